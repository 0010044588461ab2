//! Random weights: normal numbers of standard deviation 1/sqrt(row length), a function of seed, tensor and index.

use std::thread;

use starling::quant::{Dtype, QuantError, quantise};

/// Rows quantised at a time: bounds the memory for F32 values.
const ROWS: usize = 32;

/// The data of a tensor: biases are all zeros, norms and other vectors all ones, decay rates of recurrent layers all -1.
pub(crate) fn tensor(name: &str, dtype: Dtype, dims: &[u64], seed: u64) -> Result<Vec<u8>, QuantError> {
    let k = dims[0] as usize;
    let n_rows = dims[1..].iter().product::<u64>() as usize;
    let row_bytes = dtype.row_bytes(dims[0]).ok_or(QuantError::Length { dtype, elements: k, bytes: 0 })? as usize;
    let mut data = vec![0; row_bytes * n_rows];
    let constant = match name {
        _ if name.ends_with(".bias") => Some(0.0),
        _ if name.ends_with("ssm_a") => Some(-1.0),
        _ if dims.len() == 1 || name.ends_with("_norm.weight") => Some(1.0),
        _ => None,
    };
    if let Some(x) = constant {
        quantise(dtype, &vec![x; k * n_rows], &mut data)?;
        return Ok(data);
    }
    let key = name.bytes().fold(mix(seed), |key, b| mix(key ^ u64::from(b)));
    let half = n_rows.div_ceil(2);
    let (first, second) = data.split_at_mut(half * row_bytes);
    thread::scope(|scope| {
        let other = scope.spawn(|| rows(key, half, k, dtype, second));
        rows(key, 0, k, dtype, first)?;
        other.join().unwrap_or(Err(QuantError::Unsupported(dtype)))
    })?;
    Ok(data)
}

/// Fills `out` with rows from number `first` on.
fn rows(key: u64, first: usize, k: usize, dtype: Dtype, out: &mut [u8]) -> Result<(), QuantError> {
    let row_bytes = dtype.row_bytes(k as u64).map_or(1, |n| n as usize);
    let scale = 1.0 / (k as f32).sqrt();
    let mut values = vec![0.0; ROWS * k];
    for (i, out) in out.chunks_mut(ROWS * row_bytes).enumerate() {
        let values = &mut values[..out.len() / row_bytes * k];
        let start = ((first + i * ROWS) * k) as u64;
        for (j, value) in values.iter_mut().enumerate() {
            *value = normal(key, start + j as u64) * scale;
        }
        quantise(dtype, values, out)?;
    }
    Ok(())
}

/// Nearly normal, of mean 0 and variance 1: the sum of eight uniform numbers.
fn normal(key: u64, index: u64) -> f32 {
    /// Of a sum of eight uniform 16-bit integers: 8 * 65535 / 2 and 1 / (65536 * sqrt(8 / 12)).
    const MEAN: i64 = 262_140;
    const SCALE: f32 = 1.868_805_4e-5;
    let sixteens = |bits: u64| (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    let at = key.wrapping_add(index.wrapping_mul(2));
    let sum = sixteens(mix(at)) + sixteens(mix(at.wrapping_add(1)));
    (sum as i64 - MEAN) as f32 * SCALE
}

/// The output of the SplitMix64 generator for a state.
fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_variance() {
        let n = 100_000;
        let values: Vec<f64> = (0..n).map(|i| normal(7, i).into()).collect();
        let mean = values.iter().sum::<f64>() / n as f64;
        let variance = values.iter().map(|v| v * v).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.01, "{mean} {variance}");
    }

    #[test]
    fn threads_split_evenly_or_not() {
        for n_rows in [1, 2, 67] {
            let data = tensor("t", Dtype::F32, &[32, n_rows], 1).unwrap();
            let mut whole = vec![0; data.len()];
            rows("t".bytes().fold(mix(1), |key, b| mix(key ^ u64::from(b))), 0, 32, Dtype::F32, &mut whole).unwrap();
            assert_eq!(data, whole);
        }
    }
}
