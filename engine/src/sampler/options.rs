//! What a request may ask of the sampler, and which values are in range.

use alloc::string::ToString;
use alloc::vec::Vec;

use crate::error::RequestError;

/// `repeat_last_n` and [`Dry::last_n`]: all tokens of the sequence.
pub const ALL_TOKENS: u32 = u32::MAX;
/// Most log-probabilities of a token's alternatives: ten times what the OpenAI interface allows.
pub const MAX_TOP_LOGPROBS: u32 = 200;

/// Texts that DRY's repetitions do not reach over by default; as llama.cpp has them
/// ([`Tokenizer::dry_breakers`](crate::tokenizer::Tokenizer::dry_breakers) gives their tokens).
pub const DRY_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];
/// Tokens of all DRY breakers together.
const MAX_BREAKER_TOKENS: usize = 65_536;

/// Sampling options, in the order in which the sampler applies them (but for the seed).
///
/// Each stage is off at its neutral value; a stage that is off costs nothing.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
pub struct SamplingOptions {
    /// Added to the logits of these tokens, one entry a token; finite.
    pub logit_bias: Vec<(u32, f32)>,
    /// Positive logits of recent tokens are divided by this, others multiplied (Keskar et al. 2019, CTRL); 1 is off.
    pub repeat_penalty: f32,
    /// How many of the last tokens, the prompt's included, the three penalties look at; 0 is off, [`ALL_TOKENS`] all.
    pub repeat_last_n: u32,
    /// Taken from the logit of a recent token once for each time it occurs; 0 is off.
    pub frequency_penalty: f32,
    /// Taken from the logit of a recent token once; 0 is off.
    pub presence_penalty: f32,
    /// Which of these tokens the frequency and the presence penalty count.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "PenaltyScope::is_all"))]
    pub penalty_scope: PenaltyScope,
    /// Penalty on tokens that would continue a repetition.
    pub dry: Option<Dry>,
    /// Keep this many of the most probable tokens (Fan et al. 2018); 0 is off.
    pub top_k: u32,
    /// Keep the most typical tokens with this mass (Meister et al. 2022, locally typical sampling); in (0, 1], 1 is off.
    pub typical_p: f32,
    /// Keep the most probable tokens with this mass (Holtzman et al. 2020, nucleus sampling); in (0, 1], 1 is off.
    pub top_p: f32,
    /// Keep tokens at least this fraction as probable as the most probable (Nguyen et al. 2024); in [0, 1], 0 is off.
    pub min_p: f32,
    /// Logits are divided by this; 0 takes the most probable token and leaves the filters out.
    pub temperature: f32,
    /// Key of the draws.
    pub seed: u64,
    /// Which log-probabilities to report.
    pub logprobs: LogprobKind,
    /// How many alternatives to report with their log-probabilities, at most [`MAX_TOP_LOGPROBS`].
    pub top_logprobs: u32,
}

/// A penalty that grows exponentially with the length of the repetition a token would continue ("DRY", by
/// p-e-w, text-generation-webui pull request 5677): `multiplier * base^(length - allowed_length)`.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Dry {
    /// Penalty of the shortest repetition that has one; at least 0, and 0 is off.
    pub multiplier: f32,
    /// Growth with each token more; at least 1.
    pub base: f32,
    /// Repetitions shorter than this are free; at least 1.
    pub allowed_length: u32,
    /// How many of the last tokens to look at; 0 is off, [`ALL_TOKENS`] all.
    pub last_n: u32,
    /// No repetition reaches back over one of these token sequences; none is empty.
    #[cfg_attr(feature = "serde", serde(default))]
    pub breakers: Vec<Vec<u32>>,
}

/// Which tokens the frequency and the presence penalty count. The repeat penalty counts all in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum PenaltyScope {
    /// Those of the prompt and of the answer, as llama.cpp has it.
    #[default]
    All,
    /// Those of the answer, as OpenAI and vLLM have it.
    Answer,
}

#[cfg(feature = "serde")]
impl PenaltyScope {
    /// Whether it is the default, which receipts leave out.
    pub(crate) fn is_all(&self) -> bool {
        *self == PenaltyScope::All
    }
}

/// Which distribution log-probabilities are of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum LogprobKind {
    /// None is computed.
    #[default]
    None,
    /// The model's own: softmax of the logits as they come.
    Raw,
    /// The one the token was drawn from, after all stages.
    Final,
}

impl Default for SamplingOptions {
    /// The defaults that users of llama.cpp's server know: temperature 0.8, top-k 40, top-p 0.95, min-p 0.05.
    fn default() -> Self {
        SamplingOptions { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..SamplingOptions::neutral() }
    }
}

impl SamplingOptions {
    /// Draws from the model's own distribution: every stage off.
    pub fn neutral() -> Self {
        SamplingOptions {
            logit_bias: Vec::new(),
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_scope: PenaltyScope::All,
            dry: None,
            top_k: 0,
            typical_p: 1.0,
            top_p: 1.0,
            min_p: 0.0,
            temperature: 1.0,
            seed: 0,
            logprobs: LogprobKind::None,
            top_logprobs: 0,
        }
    }

    /// Always the most probable token; of equal ones the lowest id.
    pub fn greedy() -> Self {
        SamplingOptions { temperature: 0.0, ..SamplingOptions::neutral() }
    }

    /// Whether the three counted penalties do anything.
    pub(super) fn counts_tokens(&self) -> bool {
        self.repeat_last_n > 0
            && (self.repeat_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0)
    }

    /// Whether DRY does anything.
    pub(super) fn active_dry(&self) -> Option<&Dry> {
        self.dry.as_ref().filter(|d| d.multiplier > 0.0 && d.last_n > 0)
    }

    /// Checks every option against its range and every id against the vocabulary.
    ///
    /// # Errors
    /// The first option out of range.
    pub fn check(&self, n_vocab: usize) -> Result<(), RequestError> {
        let range = |name, v: f32, ok: bool, expected| {
            if v.is_finite() && ok {
                Ok(())
            } else {
                Err(RequestError::Option { name, found: v.to_string(), expected })
            }
        };
        let fraction = |v: f32| v > 0.0 && v <= 1.0;
        for (token, bias) in &self.logit_bias {
            id("logit_bias", *token, n_vocab)?;
            range("logit_bias", *bias, true, "finite numbers")?;
        }
        let mut biased: Vec<u32> = self.logit_bias.iter().map(|(token, _)| *token).collect();
        biased.sort_unstable();
        if let Some(pair) = biased.windows(2).find(|pair| pair[0] == pair[1]) {
            let found = pair[0].to_string();
            return Err(RequestError::Option { name: "logit_bias", found, expected: "one entry a token" });
        }
        range("repeat_penalty", self.repeat_penalty, self.repeat_penalty > 0.0, "a number above 0")?;
        range("frequency_penalty", self.frequency_penalty, true, "a finite number")?;
        range("presence_penalty", self.presence_penalty, true, "a finite number")?;
        if let Some(dry) = &self.dry {
            range("dry.multiplier", dry.multiplier, dry.multiplier >= 0.0, "a number of 0 or more")?;
            range("dry.base", dry.base, dry.base >= 1.0, "a number of 1 or more")?;
            range("dry.allowed_length", dry.allowed_length as f32, dry.allowed_length > 0, "1 or more")?;
            let tokens: usize = dry.breakers.iter().map(Vec::len).sum();
            range("dry.breakers", tokens as f32, tokens <= MAX_BREAKER_TOKENS, "at most 65536 tokens in all")?;
            for breaker in &dry.breakers {
                range("dry.breakers", breaker.len() as f32, !breaker.is_empty(), "sequences of a token or more")?;
                breaker.iter().try_for_each(|t| id("dry.breakers", *t, n_vocab))?;
            }
        }
        range("typical_p", self.typical_p, fraction(self.typical_p), "a number above 0, at most 1")?;
        range("top_p", self.top_p, fraction(self.top_p), "a number above 0, at most 1")?;
        range("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "a number from 0 to 1")?;
        range("temperature", self.temperature, self.temperature >= 0.0, "a number of 0 or more")?;
        let n = self.top_logprobs;
        range("top_logprobs", n as f32, n <= MAX_TOP_LOGPROBS, "a number from 0 to 200")
    }
}

fn id(name: &'static str, token: u32, n_vocab: usize) -> Result<(), RequestError> {
    if (token as usize) < n_vocab {
        return Ok(());
    }
    Err(RequestError::Option { name, found: token.to_string(), expected: "ids of the vocabulary" })
}
