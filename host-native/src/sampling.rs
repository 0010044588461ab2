//! Sampling flags of the command line.

use clap::Args;
use starling::model::Model;
use starling::sampler::{ALL_TOKENS, DRY_BREAKERS, Dry, SamplingOptions};
use starling_host::clock::random;

/// Sampling flags, in the order in which the sampler applies them.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Add B to the logit of token ID; repeatable
    #[arg(long, value_name = "ID=B", value_parser = bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Repetition penalty on tokens within --repeat-last-n, multiplicative; 1: off [default: the model file's, else 1]
    #[arg(long, alias = "repetition-penalty", value_name = "F", value_parser = number)]
    pub repeat_penalty: Option<f32>,
    /// Window of the repetition, frequency and presence penalties in tokens, prompt included; -1: all [default: the model
    /// file's, else 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(-1..))]
    pub repeat_last_n: Option<i64>,
    /// Frequency penalty: subtracted from a token's logit per occurrence; 0: off
    #[arg(long, value_name = "F", default_value_t = 0.0, allow_hyphen_values = true, value_parser = number)]
    pub frequency_penalty: f32,
    /// Presence penalty: subtracted once from the logit of a token that occurred; 0: off
    #[arg(long, value_name = "F", default_value_t = 0.0, allow_hyphen_values = true, value_parser = number)]
    pub presence_penalty: f32,
    /// DRY: penalty on tokens that continue a repetition; 0: off
    #[arg(long, value_name = "F", default_value_t = 0.0, value_parser = number)]
    pub dry_multiplier: f32,
    /// DRY: factor of the penalty per token of the repetition
    #[arg(long, value_name = "F", default_value_t = 1.75, value_parser = number)]
    pub dry_base: f32,
    /// DRY: length in tokens from which a repetition is penalised
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub dry_allowed_length: u32,
    /// DRY: window in tokens, prompt included; -1: all
    #[arg(long, value_name = "N", default_value_t = -1, value_parser = clap::value_parser!(i64).range(-1..))]
    pub dry_penalty_last_n: i64,
    /// DRY: text at which a repetition ends, repeatable; `none` for no such text [default: newline, colon, quotation mark
    /// and asterisk]
    #[arg(long, value_name = "TEXT")]
    pub dry_sequence_breaker: Vec<String>,
    /// Top-k: keep the N most probable tokens; 0: off [default: the model file's, else 40]
    #[arg(long, value_name = "N")]
    pub top_k: Option<u32>,
    /// Typical sampling: keep the most typical tokens with a total probability of P; 1: off
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = number)]
    pub typical: f32,
    /// Top-p: keep the most probable tokens with a total probability of P; 1: off [default: the model file's, else 0.95]
    #[arg(long, value_name = "P", value_parser = number)]
    pub top_p: Option<f32>,
    /// Min-p: keep tokens with at least P times the highest probability; 0: off [default: the model file's, else 0.05]
    #[arg(long, value_name = "P", value_parser = number)]
    pub min_p: Option<f32>,
    /// Temperature; 0: always the most probable token [default: the model file's, else 0.8]
    #[arg(long = "temp", alias = "temperature", value_name = "T", value_parser = number)]
    pub temperature: Option<f32>,
    /// Seed of the random draws: the same seed gives the same text; -1 or `random`: another one each time [default: random]
    #[arg(short, long, value_name = "N", value_parser = Seed::read)]
    pub seed: Option<Seed>,
}

/// A seed, or `None` for a random one each time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seed(pub Option<u64>);

impl Seed {
    /// A number, -1 or `random`.
    ///
    /// # Errors
    /// What was expected.
    pub fn read(text: &str) -> Result<Seed, String> {
        if matches!(text, "-1" | "random") {
            return Ok(Seed(None));
        }
        let expected = |_| "expected a number from 0 to 18446744073709551615, or -1 or random".into();
        text.parse().map(|seed| Seed(Some(seed))).map_err(expected)
    }
}

/// A new seed: short enough to be typed again.
pub fn random_seed() -> u64 {
    random() >> 32
}

/// # Errors
/// What was expected.
fn number(text: &str) -> Result<f32, String> {
    text.parse().map_err(|_| "expected a number".into())
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let (id, b) = text.split_once('=').ok_or("expected ID=B, e.g. 42=-1.5")?;
    Ok((id.parse().map_err(|e| format!("token id: {e}"))?, b.parse().map_err(|e| format!("bias: {e}"))?))
}

impl SamplingArgs {
    /// The options given, then those that the model file recommends, then the engine's defaults. The seed is the one
    /// given, or random.
    pub fn options(&self, model: &Model) -> SamplingOptions {
        let tokenizer = &model.tokenizer;
        let dry = || Dry {
            multiplier: self.dry_multiplier,
            base: self.dry_base,
            allowed_length: self.dry_allowed_length,
            last_n: u32::try_from(self.dry_penalty_last_n).unwrap_or(ALL_TOKENS),
            breakers: match &self.dry_sequence_breaker[..] {
                [] => tokenizer.dry_breakers(&DRY_BREAKERS),
                [none] if none == "none" => Vec::new(),
                texts => tokenizer.dry_breakers(texts),
            },
        };
        let defaults = model.recommended.apply(SamplingOptions::default());
        let last_n = self.repeat_last_n.map(|n| u32::try_from(n).unwrap_or(ALL_TOKENS));
        SamplingOptions {
            logit_bias: self.logit_bias.clone(),
            repeat_penalty: self.repeat_penalty.unwrap_or(defaults.repeat_penalty),
            repeat_last_n: last_n.unwrap_or(defaults.repeat_last_n),
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            dry: (self.dry_multiplier != 0.0).then(dry),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            typical_p: self.typical,
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            temperature: self.temperature.unwrap_or(defaults.temperature),
            seed: self.fixed_seed().unwrap_or_else(random_seed),
            ..defaults
        }
    }

    /// The seed given, unless it is to be random.
    pub fn fixed_seed(&self) -> Option<u64> {
        self.seed.and_then(|seed| seed.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_numbers_or_random() {
        let seed = |text| Seed::read(text).map(|seed| seed.0);
        assert_eq!((seed("7"), seed("18446744073709551615")), (Ok(Some(7)), Ok(Some(u64::MAX))));
        assert_eq!((seed("-1"), seed("random")), (Ok(None), Ok(None)));
        for text in ["-2", "1.5", "any", ""] {
            assert!(seed(text).is_err(), "{text}");
        }
    }
}
