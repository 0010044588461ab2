//! Sampling filters. Each takes candidates sorted by [`Candidate::order`] and keeps that order.

use alloc::vec::Vec;
use core::cmp::Ordering;

use crate::kernels::Cpu;
use crate::kernels::exp::exp;
use crate::kernels::softmax::{group, group_maxima, groups};
use crate::math;

/// A token that may still be sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) logit: f32,
    pub(super) token: u32,
}

impl Candidate {
    /// Larger logits first, then lower ids.
    fn order(a: &Candidate, b: &Candidate) -> Ordering {
        b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
    }

    /// Lower ids first.
    pub(super) fn by_token(a: &Candidate, b: &Candidate) -> Ordering {
        a.token.cmp(&b.token)
    }

    fn of(x: &[f32], i: usize) -> Candidate {
        // + 0.0 turns -0.0 into 0.0
        Candidate { logit: x[i] + 0.0, token: i as u32 }
    }
}

/// Moves the first `k` (at least 1) candidates by [`Candidate::order`] to the front, unsorted, and returns the last of
/// them.
#[inline(never)]
fn first(candidates: &mut [Candidate], k: usize) -> Candidate {
    *candidates.select_nth_unstable_by(k - 1, Candidate::order).1
}

/// Maxima of groups of logits, which make top-k and min-p fast.
pub(super) struct LogitGroups {
    maxima: Vec<f32>,
    /// The maxima as candidates, for partial sorting.
    order: Vec<Candidate>,
}

impl LogitGroups {
    pub(super) fn new(n_vocab: usize) -> Self {
        let n = groups(n_vocab);
        LogitGroups { maxima: alloc::vec![f32::NEG_INFINITY; n], order: Vec::with_capacity(n) }
    }

    /// Computes the maxima of the logits that the other methods are called with.
    pub(super) fn scan(&mut self, cpu: Cpu, x: &[f32]) {
        group_maxima(cpu, x, &mut self.maxima);
    }

    /// The largest logit.
    pub(super) fn max(&self) -> f32 {
        self.maxima.iter().copied().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
    }

    /// The token of the largest logit; of several the lowest id.
    pub(super) fn arg_max(&self, x: &[f32]) -> u32 {
        let max = self.max();
        let tied = self.maxima.iter().enumerate().filter(|(_, m)| **m == max);
        tied.filter_map(|(g, _)| group(g, x.len()).find(|i| x[*i] == max)).min().unwrap_or(0) as u32
    }

    /// The tokens with a logit of at least `floor`, unsorted.
    fn at_least(&self, x: &[f32], floor: f32, out: &mut Vec<Candidate>) {
        out.clear();
        for (g, _) in self.maxima.iter().enumerate().filter(|(_, m)| **m >= floor) {
            out.extend(group(g, x.len()).filter(|i| x[*i] >= floor).map(|i| Candidate::of(x, i)));
        }
    }

    /// The first `k` tokens by [`Candidate::order`], sorted.
    ///
    /// The k-th largest group maximum is a lower bound of the k-th largest logit, so only groups that reach it are
    /// scanned.
    pub(super) fn top(&mut self, x: &[f32], k: usize, out: &mut Vec<Candidate>) {
        let k = k.min(x.len());
        if k == 0 {
            return out.clear();
        }
        let mut floor = f32::NEG_INFINITY;
        if k < self.maxima.len() / 2 {
            all(&self.maxima, &mut self.order);
            floor = first(&mut self.order, k).logit;
        }
        self.at_least(x, floor, out);
        if k < out.len() {
            first(out, k);
            out.truncate(k);
        }
        out.sort_unstable_by(Candidate::order);
    }

    /// The tokens at least `min_p` times as probable as the first, sorted.
    pub(super) fn min_p(&self, x: &[f32], min_p: f32, out: &mut Vec<Candidate>) {
        // a floor slightly below the exact bound, then the exact definition
        let max = self.max();
        let floor = (f64::from(max) + math::ln(f64::from(min_p).max(1e-300)) - 1e-3) as f32;
        self.at_least(x, floor.next_down(), out);
        out.retain(|c| exp(c.logit - max) >= min_p);
        out.sort_unstable_by(Candidate::order);
    }
}

/// Drops tokens that a mask forbids.
pub(super) fn drop_forbidden(kept: &mut Vec<Candidate>) {
    kept.retain(|c| c.logit > f32::NEG_INFINITY);
}

/// Top-p: keeps the shortest prefix whose weights `exp(logit - first)`, summed in f64, reach `top_p * total`; at least
/// one candidate. Returns whether the candidates reach it.
pub(super) fn top_p(kept: &mut Vec<Candidate>, top_p: f32, total: f64) -> bool {
    let Some(first) = kept.first().map(|c| c.logit) else { return false };
    let goal = f64::from(top_p) * total;
    let mut sum = 0.0;
    let reaches = |c: &Candidate| {
        sum += f64::from(exp(c.logit - first));
        sum >= goal
    };
    match kept.iter().position(reaches) {
        Some(last) => {
            kept.truncate(last + 1);
            true
        }
        None => false,
    }
}

/// `sum exp(logit - first)` over the candidates, in order, in f64.
pub(super) fn total(kept: &[Candidate]) -> f64 {
    let Some(first) = kept.first().map(|c| c.logit) else { return 0.0 };
    kept.iter().fold(0.0, |sum, c| sum + f64::from(exp(c.logit - first)))
}

/// Min-p: keeps candidates at least `min_p` times as probable as the first.
pub(super) fn min_p(kept: &mut Vec<Candidate>, min_p: f32) {
    let Some(first) = kept.first().map(|c| c.logit) else { return };
    // the candidates are sorted, so those kept are a prefix
    let n = kept.partition_point(|c| exp(c.logit - first) >= min_p);
    kept.truncate(n.max(1));
}

/// All tokens as candidates, unsorted.
pub(super) fn all(x: &[f32], out: &mut Vec<Candidate>) {
    out.clear();
    out.extend((0..x.len()).map(|i| Candidate::of(x, i)));
}

/// A candidate of typical sampling: `shift` is the distance of its information from the entropy.
#[derive(Clone, Copy)]
pub(super) struct TypicalCandidate {
    shift: f64,
    weight: f32,
    candidate: Candidate,
}

/// Sizes of the prefixes that [`typical`] sorts one after the other until they reach the goal.
const FRONTS: [usize; 2] = [64, 1024];

/// Typical sampling: keeps the candidates whose information is nearest to the entropy, until they reach `typical_p` of
/// the total weight:
///
/// ```text
/// w = exp(logit - max), W = sum w, V = sum w (logit - max)    f64, ascending ids;  H = ln W - V / W
/// shift = | ln W - (logit - max) - H |;  ascending by (shift, id), until the sum of w reaches typical_p * W
/// ```
/// Candidates of weight 0 are dropped. The input is in any order, the output sorted.
pub(super) fn typical(kept: &mut Vec<Candidate>, typical_p: f32, shifts: &mut Vec<TypicalCandidate>) {
    let max = kept.iter().fold(f32::NEG_INFINITY, |m, c| if c.logit > m { c.logit } else { m });
    if !kept.is_sorted_by_key(|c| c.token) {
        kept.sort_unstable_by(Candidate::by_token);
    }
    shifts.clear();
    let weighed = kept.iter().map(|c| TypicalCandidate { shift: 0.0, weight: exp(c.logit - max), candidate: *c });
    shifts.extend(weighed.filter(|s| s.weight > 0.0));
    let (mut sum, mut information) = (0.0, 0.0);
    for s in shifts.iter() {
        sum += f64::from(s.weight);
        information += f64::from(s.weight) * f64::from(s.candidate.logit - max);
    }
    let ln_sum = math::ln(sum);
    let entropy = ln_sum - information / sum;
    for s in shifts.iter_mut() {
        s.shift = (ln_sum - f64::from(s.candidate.logit - max) - entropy).abs();
    }
    let order = |a: &TypicalCandidate, b: &TypicalCandidate| {
        a.shift.total_cmp(&b.shift).then(a.candidate.token.cmp(&b.candidate.token))
    };
    let goal = f64::from(typical_p) * sum;
    let mut got = 0.0;
    kept.clear();
    let mut rest = &mut shifts[..];
    for n in FRONTS.into_iter().chain([usize::MAX]) {
        if got >= goal {
            break;
        }
        if n < rest.len() {
            rest.select_nth_unstable_by(n, order);
        }
        let (front, others) = rest.split_at_mut(n.min(rest.len()));
        front.sort_by(order);
        rest = others;
        for s in front.iter() {
            if got >= goal {
                break;
            }
            kept.push(s.candidate);
            got += f64::from(s.weight);
        }
    }
    kept.sort_unstable_by(Candidate::order);
}
