//! Naive implementation of the sampling stages: full sorts, f64, quadratic searches.

use alloc::vec::Vec;

use crate::sampler::{ALL_TOKENS, Dry, SamplingOptions};

/// Logits after bias, mask and penalties.
pub(super) fn adjusted(
    o: &SamplingOptions,
    history: &[u32],
    logits: &[f32],
    is_allowed: impl Fn(usize) -> bool,
) -> Vec<f32> {
    let mut x = logits.to_vec();
    for (token, bias) in &o.logit_bias {
        x[*token as usize] += bias;
    }
    for (t, x) in x.iter_mut().enumerate() {
        if !is_allowed(t) {
            *x = f32::NEG_INFINITY;
        }
    }
    let window = last(history, o.repeat_last_n);
    for (t, x) in x.iter_mut().enumerate() {
        let count = window.iter().filter(|h| **h as usize == t).count() as f32;
        if count > 0.0 && *x > f32::NEG_INFINITY {
            *x = if *x > 0.0 { *x / o.repeat_penalty } else { *x * o.repeat_penalty };
            *x -= count * o.frequency_penalty + o.presence_penalty;
        }
    }
    if let Some(dry) = &o.dry {
        for (t, length) in dry_lengths(dry, history, x.len()).into_iter().enumerate() {
            if length >= dry.allowed_length && x[t] > f32::NEG_INFINITY && dry.last_n > 0 {
                let power = f64::from(dry.base).powi((length - dry.allowed_length) as i32).min(3.4e38);
                x[t] -= (f64::from(dry.multiplier) * power).min(f64::from(f32::MAX)) as f32;
            }
        }
    }
    x
}

fn last(tokens: &[u32], n: u32) -> &[u32] {
    if n == ALL_TOKENS { tokens } else { &tokens[tokens.len().saturating_sub(n as usize)..] }
}

/// For each token the longest repetition it would continue.
fn dry_lengths(dry: &Dry, history: &[u32], n_vocab: usize) -> Vec<u32> {
    let mut out = alloc::vec![0; n_vocab];
    let h = last(history, dry.last_n);
    for end in 0..h.len() {
        // the longest suffix of h[..end] that is a suffix of h and has no breaker in it
        let is_repeated = |n: usize| {
            let suffix = &h[h.len() - n..];
            h[..end].ends_with(suffix) && !has_breaker(dry, h, h.len() - n)
        };
        let length = (1..=end).take_while(|n| is_repeated(*n)).count() as u32;
        let token = h[end];
        if !dry.breakers.iter().any(|b| b[..] == [token]) {
            out[token as usize] = length.max(out[token as usize]);
        }
    }
    out
}

/// Whether a breaker ends in `h[from..]`.
fn has_breaker(dry: &Dry, h: &[u32], from: usize) -> bool {
    (from + 1..=h.len()).any(|end| dry.breakers.iter().any(|b| h[..end].ends_with(b)))
}

/// Tokens that the filters keep, with their final probabilities, by id.
pub(super) fn distribution(o: &SamplingOptions, x: &[f32]) -> Vec<(u32, f64)> {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut kept: Vec<(u32, f32)> = x.iter().enumerate().map(|(t, x)| (t as u32, *x)).collect();
    kept.retain(|(_, x)| f64::from(x - max).exp() > 0.0);
    if o.temperature == 0.0 {
        return kept.iter().find(|(_, x)| *x == max).map(|(t, _)| (*t, 1.0)).into_iter().collect();
    }
    kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if o.top_k > 0 {
        kept.truncate(o.top_k as usize);
    }
    if o.typical_p < 1.0 {
        let p = softmax(&kept, 1.0);
        let entropy: f64 = p.iter().filter(|p| **p > 0.0).map(|p| -p * p.ln()).sum();
        let mut by_shift: Vec<(f64, f64, (u32, f32))> =
            kept.iter().zip(p).map(|(c, p)| ((-p.ln() - entropy).abs(), p, *c)).collect();
        by_shift.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.2.0.cmp(&b.2.0)));
        let p: Vec<f64> = by_shift.iter().map(|s| s.1).collect();
        by_shift.truncate(front(&p, o.typical_p));
        kept = by_shift.into_iter().map(|s| s.2).collect();
        kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    }
    if o.top_p < 1.0 {
        kept.truncate(front(&softmax(&kept, 1.0), o.top_p));
    }
    if o.min_p > 0.0 {
        let best = kept[0].1;
        kept.retain(|c| f64::from(c.1 - best).exp() >= f64::from(o.min_p));
    }
    kept.sort_by_key(|c| c.0);
    let p = softmax(&kept, f64::from(o.temperature));
    kept.iter().zip(p).map(|(c, p)| (c.0, p)).collect()
}

/// Number of tokens needed to reach the mass.
fn front(p: &[f64], mass: f32) -> usize {
    let mut sum = 0.0;
    let reached = p.iter().position(|p| {
        sum += p;
        sum >= f64::from(mass)
    });
    reached.map_or(p.len(), |i| i + 1)
}

pub(super) fn softmax(x: &[(u32, f32)], t: f64) -> Vec<f64> {
    let max = x.iter().map(|c| c.1).fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f64> = x.iter().map(|c| (f64::from(c.1 - max) / t).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.into_iter().map(|e| e / sum).collect()
}
