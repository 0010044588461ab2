//! Biases on attention scores by the distance of a key from its query (T5, arXiv:1910.10683), the same in all layers that have none
//! of their own.

use alloc::vec::Vec;

use crate::error::LoadError;
use crate::math::ln;
use crate::model::keys::Keys;

/// Biases of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DistanceConfig {
    /// Distance from which on keys have the same bias.
    pub max: usize,
    /// Number of ranges of distances that have a bias; even.
    pub buckets: usize,
}

/// Distance from which on keys have the same bias, which files do not state.
const MAX_DISTANCE: usize = 128;

impl DistanceConfig {
    pub(crate) fn read(keys: &Keys<'_, '_>) -> Result<DistanceConfig, LoadError> {
        let buckets = keys.size("attention.relative_buckets_count", 4..=1024)? / 2 * 2;
        Ok(DistanceConfig { max: MAX_DISTANCE, buckets })
    }

    /// Biases by distance, (n_head, 2 * max + 1), from those of buckets, (buckets, n_head). Half of the buckets are for later
    /// tokens. Half of those have one distance each, the others ranges that grow with the logarithm.
    pub(crate) fn biases(&self, values: &[f32], n_head: usize) -> Vec<f32> {
        let max = self.max;
        let n = values.len() / n_head / 2;
        let exact = (n / 2).max(1);
        let bucket = |i: usize| {
            let distance = i.abs_diff(max);
            let bucket = match distance < exact {
                true => distance,
                false => {
                    // in single precision, as the model's makers
                    let log = |x: f64| ln(x) as f32;
                    let part = log((distance as f32 / exact as f32).into()) / log(max as f64 / exact as f64);
                    (exact + (part * (n - exact) as f32) as usize).min(n - 1)
                }
            };
            bucket + if i > max { n } else { 0 }
        };
        (0..n_head).flat_map(|h| (0..2 * max + 1).map(move |i| values[bucket(i) * n_head + h])).collect()
    }
}
