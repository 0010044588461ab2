//! Sampling flags of the command line.

use clap::Args;
use starling::sampler::{ALL_TOKENS, DRY_BREAKERS, Dry, SamplingOptions};
use starling::tokenizer::Tokenizer;

/// Sampling flags, in the order in which the sampler applies them.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Add B to the logit of token ID; repeatable
    #[arg(long, value_name = "ID=B", value_parser = bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Repetition penalty on tokens within --repeat-last-n, multiplicative; 1: off
    #[arg(long, value_name = "F", default_value_t = SamplingOptions::default().repeat_penalty)]
    pub repeat_penalty: f32,
    /// Window of the repetition, frequency and presence penalties in tokens, prompt included; -1: all
    #[arg(long, value_name = "N", default_value_t = i64::from(SamplingOptions::default().repeat_last_n), value_parser = clap::value_parser!(i64).range(-1..))]
    pub repeat_last_n: i64,
    /// Frequency penalty: subtracted from a token's logit per occurrence; 0: off
    #[arg(long, value_name = "F", default_value_t = 0.0, allow_hyphen_values = true)]
    pub frequency_penalty: f32,
    /// Presence penalty: subtracted once from the logit of a token that occurred; 0: off
    #[arg(long, value_name = "F", default_value_t = 0.0, allow_hyphen_values = true)]
    pub presence_penalty: f32,
    /// DRY: penalty on tokens that continue a repetition; 0: off
    #[arg(long, value_name = "F", default_value_t = 0.0)]
    pub dry_multiplier: f32,
    /// DRY: factor of the penalty per token of the repetition
    #[arg(long, value_name = "F", default_value_t = 1.75)]
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
    /// Top-k: keep the N most probable tokens; 0: off
    #[arg(long, value_name = "N", default_value_t = SamplingOptions::default().top_k)]
    pub top_k: u32,
    /// Typical sampling: keep the most typical tokens with a total probability of P; 1: off
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub typical: f32,
    /// Top-p: keep the most probable tokens with a total probability of P; 1: off
    #[arg(long, value_name = "P", default_value_t = SamplingOptions::default().top_p)]
    pub top_p: f32,
    /// Min-p: keep tokens with at least P times the highest probability; 0: off
    #[arg(long, value_name = "P", default_value_t = SamplingOptions::default().min_p)]
    pub min_p: f32,
    /// Temperature; 0: greedy, the most probable token
    #[arg(long = "temp", alias = "temperature", value_name = "T", default_value_t = SamplingOptions::default().temperature)]
    pub temperature: f32,
    /// Sampling seed; the same seed gives the same text
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let (id, b) = text.split_once('=').ok_or("expected ID=B, e.g. 42=-1.5")?;
    Ok((id.parse().map_err(|e| format!("token id: {e}"))?, b.parse().map_err(|e| format!("bias: {e}"))?))
}

impl SamplingArgs {
    pub fn options(&self, tokenizer: &Tokenizer) -> SamplingOptions {
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
        SamplingOptions {
            logit_bias: self.logit_bias.clone(),
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: u32::try_from(self.repeat_last_n).unwrap_or(ALL_TOKENS),
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            dry: (self.dry_multiplier != 0.0).then(dry),
            top_k: self.top_k,
            typical_p: self.typical,
            top_p: self.top_p,
            min_p: self.min_p,
            temperature: self.temperature,
            seed: self.seed,
            ..SamplingOptions::default()
        }
    }
}
