//! Options that a model file recommends.

use super::SamplingOptions;
use crate::model::RecommendedSampling;

impl RecommendedSampling {
    /// `options` with what the file recommends.
    pub fn apply(&self, options: SamplingOptions) -> SamplingOptions {
        SamplingOptions {
            temperature: self.temperature.unwrap_or(options.temperature),
            top_k: self.top_k.unwrap_or(options.top_k),
            top_p: self.top_p.unwrap_or(options.top_p),
            min_p: self.min_p.unwrap_or(options.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(options.repeat_penalty),
            repeat_last_n: self.repeat_last_n.unwrap_or(options.repeat_last_n),
            ..options
        }
    }
}
