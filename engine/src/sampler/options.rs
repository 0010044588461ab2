//! Sampling options of a request and their ranges.

use alloc::string::ToString;
use alloc::vec::Vec;

use crate::error::RequestError;

/// `repeat_last_n` and [`Dry::last_n`]: all tokens of the sequence.
pub const ALL_TOKENS: u32 = u32::MAX;
/// Maximum of [`SamplingOptions::top_logprobs`]: ten times the limit of OpenAI's API.
pub const MAX_TOP_LOGPROBS: u32 = 200;

/// Default DRY sequence breakers, those of llama.cpp
/// ([`Tokenizer::dry_breakers`](crate::tokenizer::Tokenizer::dry_breakers) gives their tokens).
pub const DRY_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];
/// Tokens of all DRY sequence breakers together.
const MAX_BREAKER_TOKENS: usize = 65_536;

/// Sampling options, in the order in which the sampler applies them.
///
/// A stage is off at its neutral value, and then costs nothing.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
pub struct SamplingOptions {
    /// Logit bias: token ids and the finite numbers added to their logits, one entry per token.
    pub logit_bias: Vec<(u32, f32)>,
    /// Repetition penalty: positive logits of recent tokens are divided by this, others multiplied (Keskar et al. 2019,
    /// CTRL); 1 is off.
    pub repeat_penalty: f32,
    /// Window of the repetition, frequency and presence penalties in tokens, prompt included; 0 is off, [`ALL_TOKENS`]
    /// all.
    pub repeat_last_n: u32,
    /// Subtracted from the logit of a token for each occurrence in the window; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted once from the logit of a token that occurs in the window; 0 is off.
    pub presence_penalty: f32,
    /// Which tokens of the window the frequency and presence penalties count.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "PenaltyScope::is_all"))]
    pub penalty_scope: PenaltyScope,
    /// DRY penalty; `None` is off.
    pub dry: Option<Dry>,
    /// Top-k: keep this many of the most probable tokens (Fan et al. 2018); 0 is off.
    pub top_k: u32,
    /// Locally typical sampling: keep the most typical tokens with this total probability (Meister et al. 2022); in
    /// (0, 1], 1 is off.
    pub typical_p: f32,
    /// Top-p, nucleus sampling: keep the most probable tokens with this total probability (Holtzman et al. 2020); in
    /// (0, 1], 1 is off.
    pub top_p: f32,
    /// Min-p: keep tokens with at least this fraction of the highest probability (Nguyen et al. 2024); in [0, 1], 0 is
    /// off.
    pub min_p: f32,
    /// Logits are divided by this; 0 is greedy: the most probable token, without filters.
    pub temperature: f32,
    /// Seed of the random draws.
    pub seed: u64,
    /// Which log-probabilities to report.
    pub logprobs: LogprobKind,
    /// Number of alternatives to report with their log-probabilities, at most [`MAX_TOP_LOGPROBS`].
    pub top_logprobs: u32,
}

/// DRY: a penalty of `multiplier * base^(length - allowed_length)` on a token that would continue a repetition of `length`
/// tokens (p-e-w, text-generation-webui pull request 5677).
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Dry {
    /// Penalty at the allowed length; at least 0, 0 is off.
    pub multiplier: f32,
    /// Growth per token of the repetition; at least 1.
    pub base: f32,
    /// Shorter repetitions have no penalty; at least 1.
    pub allowed_length: u32,
    /// Window in tokens, prompt included; 0 is off, [`ALL_TOKENS`] all.
    pub last_n: u32,
    /// Sequence breakers: token sequences that end a repetition; none is empty.
    #[cfg_attr(feature = "serde", serde(default))]
    pub breakers: Vec<Vec<u32>>,
}

/// Which tokens the frequency and presence penalties count. The repetition penalty always counts all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum PenaltyScope {
    /// Prompt and answer, as in llama.cpp.
    #[default]
    All,
    /// The answer only, as in OpenAI's API and vLLM.
    Answer,
}

#[cfg(feature = "serde")]
impl PenaltyScope {
    /// Whether it is the default, which serialised options omit.
    pub(crate) fn is_all(&self) -> bool {
        *self == PenaltyScope::All
    }
}

/// The distribution of reported log-probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum LogprobKind {
    /// No log-probabilities.
    #[default]
    None,
    /// The model's: softmax of its logits.
    Raw,
    /// The distribution that the token was drawn from, after all stages.
    Final,
}

impl Default for SamplingOptions {
    /// The defaults of llama.cpp's server: temperature 0.8, top-k 40, top-p 0.95, min-p 0.05.
    fn default() -> Self {
        SamplingOptions { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..SamplingOptions::neutral() }
    }
}

impl SamplingOptions {
    /// All stages off: draws from the model's distribution.
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

    /// Greedy: the most probable token; of equals, the lowest id.
    pub fn greedy() -> Self {
        SamplingOptions { temperature: 0.0, ..SamplingOptions::neutral() }
    }

    /// Whether a penalty that counts tokens has an effect.
    pub(super) fn counts_tokens(&self) -> bool {
        self.repeat_last_n > 0
            && (self.repeat_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0)
    }

    /// DRY's options, if it has an effect.
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
            check_id("logit_bias", *token, n_vocab)?;
            range("logit_bias", *bias, true, "finite numbers")?;
        }
        let mut biased: Vec<u32> = self.logit_bias.iter().map(|(token, _)| *token).collect();
        biased.sort_unstable();
        if let Some(pair) = biased.windows(2).find(|pair| pair[0] == pair[1]) {
            let found = pair[0].to_string();
            return Err(RequestError::Option { name: "logit_bias", found, expected: "one entry per token" });
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
                range("dry.breakers", breaker.len() as f32, !breaker.is_empty(), "sequences of one token or more")?;
                breaker.iter().try_for_each(|t| check_id("dry.breakers", *t, n_vocab))?;
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

fn check_id(name: &'static str, token: u32, n_vocab: usize) -> Result<(), RequestError> {
    if (token as usize) < n_vocab {
        return Ok(());
    }
    Err(RequestError::Option { name, found: token.to_string(), expected: "ids of the vocabulary" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    /// Size of the vocabulary.
    const N: usize = 10;

    fn dry() -> Dry {
        Dry { multiplier: 0.8, base: 1.75, allowed_length: 2, last_n: ALL_TOKENS, breakers: vec![vec![1], vec![2, 3]] }
    }

    /// Greedy options with one change.
    fn options(change: impl FnOnce(&mut SamplingOptions)) -> SamplingOptions {
        let mut options = SamplingOptions::greedy();
        change(&mut options);
        options
    }

    #[test]
    fn ranges_have_these_ends() {
        let valid = [
            SamplingOptions::default(),
            SamplingOptions::neutral(),
            options(|o| o.logit_bias = vec![(9, f32::MIN), (0, f32::MAX)]),
            options(|o| o.repeat_penalty = f32::MIN_POSITIVE),
            options(|o| (o.typical_p, o.top_p) = (f32::MIN_POSITIVE, f32::MIN_POSITIVE)),
            options(|o| (o.frequency_penalty, o.presence_penalty) = (-1e30, 1e30)),
            options(|o| (o.min_p, o.temperature) = (1.0, f32::MAX)),
            options(|o| (o.top_k, o.repeat_last_n, o.top_logprobs) = (u32::MAX, ALL_TOKENS, MAX_TOP_LOGPROBS)),
            options(|o| o.dry = Some(dry())),
            options(|o| o.dry = Some(Dry { multiplier: 0.0, base: 1.0, allowed_length: 1, ..dry() })),
            options(|o| o.dry = Some(Dry { breakers: vec![vec![0; MAX_BREAKER_TOKENS]], ..dry() })),
        ];
        for options in valid {
            assert_eq!(options.check(N), Ok(()), "{options:?}");
        }
    }

    #[test]
    fn what_is_beyond_them_is_named() {
        let with_dry = |dry: Dry| options(|o| o.dry = Some(dry));
        let invalid = [
            ("logit_bias", "10", options(|o| o.logit_bias = vec![(10, 0.0)])),
            ("logit_bias", "NaN", options(|o| o.logit_bias = vec![(1, f32::NAN)])),
            ("logit_bias", "3", options(|o| o.logit_bias = vec![(3, 1.0), (5, 1.0), (3, 2.0)])),
            ("repeat_penalty", "0", options(|o| o.repeat_penalty = 0.0)),
            ("repeat_penalty", "inf", options(|o| o.repeat_penalty = f32::INFINITY)),
            ("frequency_penalty", "NaN", options(|o| o.frequency_penalty = f32::NAN)),
            ("presence_penalty", "-inf", options(|o| o.presence_penalty = f32::NEG_INFINITY)),
            ("dry.multiplier", "-1", with_dry(Dry { multiplier: -1.0, ..dry() })),
            ("dry.base", "0.5", with_dry(Dry { base: 0.5, ..dry() })),
            ("dry.base", "NaN", with_dry(Dry { base: f32::NAN, ..dry() })),
            ("dry.allowed_length", "0", with_dry(Dry { allowed_length: 0, ..dry() })),
            ("dry.breakers", "0", with_dry(Dry { breakers: vec![vec![]], ..dry() })),
            ("dry.breakers", "10", with_dry(Dry { breakers: vec![vec![1, 10]], ..dry() })),
            ("dry.breakers", "65537", with_dry(Dry { breakers: vec![vec![0; 65_536], vec![0]], ..dry() })),
            ("typical_p", "0", options(|o| o.typical_p = 0.0)),
            ("top_p", "1.5", options(|o| o.top_p = 1.5)),
            ("top_p", "NaN", options(|o| o.top_p = f32::NAN)),
            ("min_p", "-0.1", options(|o| o.min_p = -0.1)),
            ("temperature", "-1", options(|o| o.temperature = -1.0)),
            ("temperature", "inf", options(|o| o.temperature = f32::INFINITY)),
            ("top_logprobs", "201", options(|o| o.top_logprobs = 201)),
        ];
        for (expected, value, options) in invalid {
            match options.check(N) {
                Err(RequestError::Option { name, found, .. }) => assert_eq!((name, found.as_str()), (expected, value)),
                other => panic!("{expected} = {value}: found {other:?}"),
            }
        }
    }

    #[test]
    fn penalties_without_effect_cost_nothing() {
        assert!(!options(|o| o.repeat_last_n = 64).counts_tokens());
        assert!(options(|o| o.presence_penalty = 0.5).counts_tokens());
        assert!(!options(|o| (o.presence_penalty, o.repeat_last_n) = (0.5, 0)).counts_tokens());
        assert!(options(|o| o.dry = Some(dry())).active_dry().is_some());
        assert_eq!(options(|o| o.dry = Some(Dry { multiplier: 0.0, ..dry() })).active_dry(), None);
        assert_eq!(options(|o| o.dry = Some(Dry { last_n: 0, ..dry() })).active_dry(), None);
    }
}
