//! DRY ("don't repeat yourself") penalty: finds the tokens that would continue a repetition, and the repetition's
//! length.
//!
//! ```text
//! z[i]   = length of the longest common suffix of t[..i] and t[..n],   i < n
//! limit  = tokens after the last complete sequence breaker (all, if there is none)
//! length(token) = max over i with t[i] = token of min(z[i], limit)
//! ```
//!
//! Suffix lengths are computed by the Z-algorithm (Gusfield 1997) on the reversed tokens, in linear time. Breakers are
//! searched by binary search, token by token from the end, so that many breakers cost little more than a few.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::options::Dry;
use crate::math;

/// Natural logarithm of the largest f32.
const MAX_LN: f64 = 88.722_839_1;

/// Buffers of [`DryScratch::repetitions`].
pub(super) struct DryScratch {
    /// Common suffix lengths `z[i]`, counted from the end of the tokens.
    z: Vec<u32>,
    /// Length of the longest repetition that each token would continue.
    longest: BTreeMap<u32, u32>,
    /// Sequence breakers, each reversed, sorted. A token that is a breaker by itself is never penalised.
    breakers: Vec<Vec<u32>>,
}

impl DryScratch {
    pub(super) fn new(dry: &Dry) -> Self {
        let mut breakers = dry.breakers.clone();
        breakers.iter_mut().for_each(|b| b.reverse());
        breakers.sort_unstable();
        DryScratch { z: Vec::new(), longest: BTreeMap::new(), breakers }
    }

    /// Whether the tokens end with a sequence breaker.
    fn is_broken(&self, tokens: &[u32]) -> bool {
        // breakers that agree with the last `len` tokens
        let mut these = &self.breakers[..];
        for (len, token) in tokens.iter().rev().enumerate() {
            let from = these.partition_point(|b| b[len] < *token);
            let to = these.partition_point(|b| b[len] <= *token);
            these = &these[from..to];
            match these.first() {
                None => return false,
                Some(shortest) if shortest.len() == len + 1 => return true,
                Some(_) => {}
            }
        }
        false
    }

    /// Number of tokens after the last complete sequence breaker.
    fn since_breaker(&self, tokens: &[u32]) -> usize {
        let last = (1..=tokens.len()).rev().find(|end| self.is_broken(&tokens[..*end])).unwrap_or(0);
        tokens.len() - last
    }

    /// The tokens that would continue a repetition of at least `allowed_length` tokens, with its length.
    pub(super) fn repetitions(&mut self, dry: &Dry, tokens: &[u32]) -> &BTreeMap<u32, u32> {
        self.longest.clear();
        let n = tokens.len();
        let limit = self.since_breaker(tokens);
        if limit < dry.allowed_length as usize {
            return &self.longest;
        }
        suffix_lengths(tokens, &mut self.z);
        for (i, z) in self.z.iter().enumerate().skip(1) {
            let length = (*z as usize).min(limit) as u32;
            if length >= dry.allowed_length {
                // the suffix of tokens[..n - i] is repeated at the end, and tokens[n - i] followed it
                let token = tokens[n - i];
                if !self.is_broken(&[token]) {
                    let longest = self.longest.entry(token).or_default();
                    *longest = length.max(*longest);
                }
            }
        }
        &self.longest
    }
}

/// `multiplier * base^(length - allowed_length)`, bounded by the largest f32.
pub(super) fn penalty(dry: &Dry, length: u32) -> f32 {
    let ln = f64::from(length - dry.allowed_length) * math::ln(f64::from(dry.base));
    let power = math::exp(if ln > MAX_LN { MAX_LN } else { ln });
    super::penalties::finite((f64::from(dry.multiplier) * power) as f32)
}

/// `z[i]` for i in 1..n: the longest common suffix of `tokens[..n - i]` and `tokens`.
fn suffix_lengths(tokens: &[u32], z: &mut Vec<u32>) {
    let n = tokens.len();
    let at = |i: usize| tokens[n - 1 - i];
    z.clear();
    z.resize(n, 0);
    let (mut left, mut right) = (0, 0);
    for i in 1..n {
        let mut len = if i < right { (z[i - left] as usize).min(right - i) } else { 0 };
        while i + len < n && at(len) == at(i + len) {
            len += 1;
        }
        if i + len > right {
            (left, right) = (i, i + len);
        }
        z[i] = len as u32;
    }
}
