//! The filters. Each works on candidates sorted by [`Candidate::order`] and keeps that order.

use alloc::vec::Vec;
use core::cmp::Ordering;

use crate::kernels::Cpu;
use crate::kernels::exp::exp;
use crate::kernels::softmax::{group, group_maxima, groups};
use crate::math;

/// A token that may still be drawn.
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
        // + 0: the two zeros are one value
        Candidate { logit: x[i] + 0.0, token: i as u32 }
    }
}

/// Puts the first `k` candidates by [`Candidate::order`], at least one, to the front, unsorted; the last of them.
#[inline(never)]
fn first(candidates: &mut [Candidate], k: usize) -> Candidate {
    *candidates.select_nth_unstable_by(k - 1, Candidate::order).1
}

/// A vocabulary of logits, with the maxima of its groups.
pub(super) struct Groups {
    maxima: Vec<f32>,
    /// The groups as candidates: what sorts those sorts these.
    order: Vec<Candidate>,
}

impl Groups {
    pub(super) fn new(n_vocab: usize) -> Self {
        let n = groups(n_vocab);
        Groups { maxima: alloc::vec![f32::NEG_INFINITY; n], order: Vec::with_capacity(n) }
    }

    /// Looks at the logits that the other methods will be asked about.
    pub(super) fn look(&mut self, cpu: Cpu, x: &[f32]) {
        group_maxima(cpu, x, &mut self.maxima);
    }

    /// The largest logit.
    pub(super) fn max(&self) -> f32 {
        self.maxima.iter().copied().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
    }

    /// The lowest id of the largest logit.
    pub(super) fn arg_max(&self, x: &[f32]) -> u32 {
        let max = self.max();
        let tied = self.maxima.iter().enumerate().filter(|(_, m)| **m == max);
        tied.filter_map(|(g, _)| group(g, x.len()).find(|i| x[*i] == max)).min().unwrap_or(0) as u32
    }

    /// All candidates of at least that logit, unsorted.
    fn at_least(&self, x: &[f32], floor: f32, out: &mut Vec<Candidate>) {
        out.clear();
        for (g, _) in self.maxima.iter().enumerate().filter(|(_, m)| **m >= floor) {
            out.extend(group(g, x.len()).filter(|i| x[*i] >= floor).map(|i| Candidate::of(x, i)));
        }
    }

    /// The `k` first candidates, sorted.
    ///
    /// The k-th largest of the groups' maxima bounds the k-th largest logit from below, so only groups that reach it
    /// are looked at.
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

    /// Candidates at least `min_p` times as probable as the first, sorted.
    pub(super) fn min_p(&self, x: &[f32], min_p: f32, out: &mut Vec<Candidate>) {
        // a little below the exact bound, then the definition
        let max = self.max();
        let floor = (f64::from(max) + math::ln(f64::from(min_p).max(1e-300)) - 1e-3) as f32;
        self.at_least(x, floor.next_down(), out);
        out.retain(|c| exp(c.logit - max) >= min_p);
        out.sort_unstable_by(Candidate::order);
    }
}

/// Leaves out what a mask forbids.
pub(super) fn drop_forbidden(kept: &mut Vec<Candidate>) {
    kept.retain(|c| c.logit > f32::NEG_INFINITY);
}

/// Keeps the shortest front whose weights `exp(logit - first)`, added in f64, reach `top_p * total`; at least one.
/// Returns whether the candidates reached it.
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

/// Keeps candidates at least `min_p` times as probable as the first.
pub(super) fn min_p(kept: &mut Vec<Candidate>, min_p: f32) {
    let Some(first) = kept.first().map(|c| c.logit) else { return };
    // sorted, so a front
    let n = kept.partition_point(|c| exp(c.logit - first) >= min_p);
    kept.truncate(n.max(1));
}

/// All tokens, unsorted.
pub(super) fn all(x: &[f32], out: &mut Vec<Candidate>) {
    out.clear();
    out.extend((0..x.len()).map(|i| Candidate::of(x, i)));
}

/// A candidate, how far its information is from the entropy, and its weight.
#[derive(Clone, Copy)]
pub(super) struct Shift {
    shift: f64,
    weight: f32,
    candidate: Candidate,
}

/// Sizes of the front that [`typical`] sorts, until it has the mass.
const FRONTS: [usize; 2] = [64, 1024];

/// Keeps the candidates whose information is nearest the entropy, until they have `typical_p` of the mass:
///
/// ```text
/// w = exp(logit - max), W = sum w, V = sum w (logit - max)    f64, ascending ids;  H = ln W - V / W
/// shift = | ln W - (logit - max) - H |;  ascending by (shift, id), until the sum of w reaches typical_p * W
/// ```
/// Candidates of weight 0 are dropped. The input is in any order, the output sorted.
pub(super) fn typical(kept: &mut Vec<Candidate>, typical_p: f32, shifts: &mut Vec<Shift>) {
    let max = kept.iter().fold(f32::NEG_INFINITY, |m, c| if c.logit > m { c.logit } else { m });
    if !kept.is_sorted_by_key(|c| c.token) {
        kept.sort_unstable_by(Candidate::by_token);
    }
    shifts.clear();
    let weighed = kept.iter().map(|c| Shift { shift: 0.0, weight: exp(c.logit - max), candidate: *c });
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
    let order = |a: &Shift, b: &Shift| a.shift.total_cmp(&b.shift).then(a.candidate.token.cmp(&b.candidate.token));
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
