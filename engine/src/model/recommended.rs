//! Sampling options that a model file recommends.

use crate::error::LoadError;
use crate::gguf::Gguf;

/// Sampling options that a model file recommends in llama.cpp's keys `general.sampling.*`. A host decides whether to use
/// them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RecommendedSampling {
    /// `general.sampling.temp`
    pub temperature: Option<f32>,
    /// `general.sampling.top_k`
    pub top_k: Option<u32>,
    /// `general.sampling.top_p`
    pub top_p: Option<f32>,
    /// `general.sampling.min_p`
    pub min_p: Option<f32>,
    /// `general.sampling.penalty_repeat`
    pub repeat_penalty: Option<f32>,
    /// `general.sampling.penalty_last_n`; [`ALL_TOKENS`](crate::sampler::ALL_TOKENS) for -1
    pub repeat_last_n: Option<u32>,
}

impl RecommendedSampling {
    /// The keys of a file. A value out of range is left out, as if the file had no such key.
    ///
    /// # Errors
    /// A key whose value has another type.
    pub(crate) fn from_gguf(gguf: &Gguf<'_>) -> Result<RecommendedSampling, LoadError> {
        let within = |key: &str, low: f32, high: f32| {
            Ok::<_, LoadError>(gguf.f32(key)?.filter(|value| (low..=high).contains(value)))
        };
        let integer = |key: &str| gguf.get(key).and_then(|value| value.as_integer());
        let last_n = integer("general.sampling.penalty_last_n");
        Ok(RecommendedSampling {
            temperature: within("general.sampling.temp", 0.0, 2.0)?,
            // 0 and less: all tokens
            top_k: integer("general.sampling.top_k").map(|k| u32::try_from(k.max(0)).unwrap_or(0)),
            top_p: within("general.sampling.top_p", f32::MIN_POSITIVE, 1.0)?,
            min_p: within("general.sampling.min_p", 0.0, 1.0)?,
            repeat_penalty: within("general.sampling.penalty_repeat", f32::MIN_POSITIVE, 100.0)?,
            repeat_last_n: last_n.map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::{GgufWriter, Value};
    use crate::sampler::{ALL_TOKENS, SamplingOptions};

    fn recommended(keys: &[(&str, Value<'_>)]) -> Result<RecommendedSampling, LoadError> {
        let mut writer = GgufWriter::new();
        for (key, value) in keys {
            writer.metadata(key, value).unwrap();
        }
        let file = writer.file(core::iter::empty::<alloc::vec::Vec<u8>>());
        RecommendedSampling::from_gguf(&Gguf::parse(&file).unwrap())
    }

    #[test]
    fn keys_replace_defaults_and_values_out_of_range_do_not() {
        let file = recommended(&[
            ("general.sampling.temp", Value::F32(0.7)),
            ("general.sampling.top_k", Value::I32(20)),
            ("general.sampling.top_p", Value::F32(1.5)),
            ("general.sampling.penalty_last_n", Value::I32(-1)),
        ])
        .unwrap();
        let options = file.apply(SamplingOptions::default());
        let expected =
            SamplingOptions { temperature: 0.7, top_k: 20, repeat_last_n: ALL_TOKENS, ..SamplingOptions::default() };
        assert_eq!(options, expected);
        assert_eq!(recommended(&[]).unwrap(), RecommendedSampling::default());
        assert!(recommended(&[("general.sampling.temp", Value::Str(b"hot"))]).is_err());
    }
}
