//! Routing: which experts a token has, and with which weights.

use super::{AdjugatesConfig, ExpertsConfig};
use crate::kernels::Cpu;
use crate::kernels::elementwise::{Activation, activate};
use crate::kernels::recurrent::softplus;
use crate::kernels::softmax::exps;
use crate::math::sqrt;
use crate::model::family::Gating;
use crate::model::linear::padded;
use crate::model::memory::{Size, Stack};

/// The experts of the rows of a batch.
pub(super) struct Routing<'m> {
    /// Rows.
    pub(super) n: usize,
    /// (rows, padded n_expert): the products of the router.
    pub(super) router: &'m mut [f32],
    /// (n_expert)
    probabilities: &'m mut [f32],
    /// (n_expert): scores by which experts are selected, if these are not the router's.
    scores: &'m mut [f32],
    /// (groups), (used groups): scores of groups, and the groups that experts are selected from.
    group_scores: &'m mut [f32],
    groups: &'m mut [u32],
    /// (rows, n_used): selected experts of each row, their weights, and the index of their rows among the expert rows.
    pub(super) selected: &'m mut [u32],
    pub(super) weights: &'m mut [f32],
    pub(super) expert_rows: &'m mut [u32],
    /// (n_expert + 1): index of the first row of each expert.
    pub(super) starts: &'m mut [u32],
    /// (expert rows): the batch row that each is a copy of.
    pub(super) source_rows: &'m mut [u32],
}

impl<'m> Routing<'m> {
    /// Floats: products of the router, probabilities, scores, scores of groups, weights.
    fn floats(c: &ExpertsConfig, n: usize) -> [usize; 5] {
        let (groups, _) = c.groups.unwrap_or_default();
        [n.saturating_mul(padded(c.n)), c.n, c.n, groups, n.saturating_mul(c.n_used)]
    }

    /// Words: used groups, selected experts, their rows, first rows of experts, source rows.
    fn words(c: &ExpertsConfig, n: usize) -> [usize; 5] {
        let ((_, used), total) = (c.groups.unwrap_or_default(), n.saturating_mul(c.n_used));
        [used, total, total, c.n + 1, total]
    }

    /// Temporaries of `n` rows.
    pub(super) fn size(c: &ExpertsConfig, n: usize) -> Size {
        let words = Routing::words(c, n).map(Size::words);
        Size::rows(1, Routing::floats(c, n)).and(words.into_iter().fold(Size::NONE, Size::and))
    }

    pub(super) fn take(stack: &mut Stack<'m>, c: &ExpertsConfig, n: usize) -> Routing<'m> {
        let [router, probabilities, scores, group_scores, weights] = stack.rows(1, Routing::floats(c, n));
        let [groups, selected, expert_rows, starts, source_rows] = Routing::words(c, n).map(|len| stack.words(len));
        Routing {
            n,
            router,
            probabilities,
            scores,
            group_scores,
            groups,
            selected,
            weights,
            expert_rows,
            starts,
            source_rows,
        }
    }

    /// Routes each row: selects its experts and their weights, and sorts rows by expert.
    pub(super) fn route(
        &mut self,
        cpu: Cpu,
        c: &ExpertsConfig,
        (bias, by_token): (Option<&[f32]>, Option<&[u32]>),
        tokens: &[u32],
    ) {
        let n = self.n;
        let s = &mut *self;
        let logits = s.router.chunks_exact(padded(c.n)).map(|row| &row[..c.n]);
        let selected = s.selected.chunks_exact_mut(c.n_used).zip(s.weights.chunks_exact_mut(c.n_used));
        for (r, (logits, (selected, weights))) in logits.zip(selected).take(n).enumerate() {
            select_top(logits, selected);
            let all = match c.gating {
                Gating::Softmax => exps(cpu, logits, logits[selected[0] as usize], 1.0, &mut *s.probabilities),
                Gating::Sigmoid => {
                    s.probabilities.copy_from_slice(logits);
                    activate(cpu, Activation::Sigmoid, &mut *s.probabilities);
                    1.0
                }
                Gating::SqrtSoftplus => {
                    s.probabilities.iter_mut().zip(logits).for_each(|(p, x)| *p = sqrt(softplus(*x)));
                    1.0
                }
            };
            if let Some(by_token) = by_token {
                selected.copy_from_slice(&by_token[tokens[r] as usize * c.n_used..][..c.n_used]);
            } else if bias.is_some() || c.groups.is_some() {
                for (e, (score, p)) in s.scores.iter_mut().zip(&*s.probabilities).enumerate() {
                    *score = p / all + bias.map_or(0.0, |bias| bias[e]);
                }
                if let Some((n_groups, _)) = c.groups {
                    keep_groups(c.n / n_groups, s.scores, s.group_scores, s.groups);
                }
                select_top(s.scores, selected);
            }
            let mut sum_selected = 0.0;
            for (weight, &expert) in weights.iter_mut().zip(&*selected) {
                *weight = s.probabilities[expert as usize];
                sum_selected += *weight;
            }
            let sum = match (c.normalised, c.gating) {
                (true, Gating::Softmax) => sum_selected,
                (true, Gating::Sigmoid | Gating::SqrtSoftplus) => sum_selected.max(LEAST_SUM),
                (false, _) => all,
            };
            weights.iter_mut().for_each(|w| *w = (*w / sum) * c.scale);
        }
        s.sort_by_expert(c.n, c.n_used);
    }

    /// Replaces the selected experts of each row by the adjugate experts of their groups, with the weights that llama.cpp
    /// gives them: the probabilities of the experts that have the numbers of the groups, normalised.
    pub(super) fn route_adjugates(&mut self, cpu: Cpu, c: &ExpertsConfig, a: &AdjugatesConfig) {
        let n = self.n;
        let s = &mut *self;
        let logits = s.router.chunks_exact(padded(c.n)).map(|row| &row[..c.n]);
        let selected = s.selected.chunks_exact_mut(c.n_used).zip(s.weights.chunks_exact_mut(c.n_used));
        for (logits, (selected, weights)) in logits.zip(selected).take(n) {
            let all = exps(cpu, logits, logits[selected[0] as usize], 1.0, &mut *s.probabilities);
            let mut sum = 0.0;
            for (expert, weight) in selected.iter_mut().zip(&mut *weights) {
                *expert /= a.per_group as u32;
                *weight = s.probabilities[*expert as usize] / all;
                sum += *weight;
            }
            let sum = sum.max(LEAST_SUM);
            weights.iter_mut().for_each(|w| *w = (*w / sum) * c.scale * a.scale);
        }
        s.sort_by_expert(c.n_adjugates(), c.n_used);
    }

    /// Sorts the selected experts of the rows, `n_used` each, by the expert, of which there are `n_experts`.
    fn sort_by_expert(&mut self, n_experts: usize, n_used: usize) {
        let starts = &mut self.starts[..=n_experts];
        starts.fill(0);
        self.selected.iter().for_each(|&e| starts[e as usize + 1] += 1);
        for e in 0..n_experts {
            starts[e + 1] += starts[e];
        }
        for (j, &e) in self.selected.iter().enumerate() {
            let place = starts[e as usize];
            starts[e as usize] += 1;
            (self.expert_rows[j], self.source_rows[place as usize]) = (place, (j / n_used) as u32);
        }
        // each start has advanced to the next expert's: shift back
        starts.rotate_right(1);
        starts[0] = 0;
    }
}

/// Least sum of the selected experts' weights (llama.cpp: the smallest normal f16).
const LEAST_SUM: f32 = 1.0 / 16384.0;

/// Keeps the groups of `size` experts whose two best scores have the largest sums; all other scores become -infinity.
fn keep_groups(size: usize, scores: &mut [f32], group_scores: &mut [f32], groups: &mut [u32]) {
    for (group, sum) in scores.chunks_exact(size).zip(&mut *group_scores) {
        let mut best = [0; 2];
        let best = &mut best[..size.min(2)];
        select_top(group, best);
        *sum = best.iter().map(|e| group[*e as usize]).sum();
    }
    select_top(group_scores, groups);
    for (_, group) in scores.chunks_exact_mut(size).enumerate().filter(|(g, _)| !groups.contains(&(*g as u32))) {
        group.fill(f32::NEG_INFINITY);
    }
}

/// The experts with the largest logits, largest first. Ties go to the lower index; NaN orders last.
fn select_top(logits: &[f32], selected: &mut [u32]) {
    for rank in 0..selected.len() {
        let (taken, rest) = selected.split_at_mut(rank);
        let mut best = None;
        for (e, &x) in logits.iter().enumerate().filter(|(e, _)| !taken.contains(&(*e as u32))) {
            match best {
                Some((_, y)) if !(x > y || (y.is_nan() && !x.is_nan())) => {}
                _ => best = Some((e as u32, x)),
            }
        }
        rest[0] = best.map_or(0, |(e, _)| e);
    }
}

#[cfg(test)]
mod tests {
    use super::select_top;

    #[test]
    fn largest_first_ties_lowest_nan_last() {
        let check = |logits: &[f32], want: &[u32]| {
            let mut got = alloc::vec![9; want.len()];
            select_top(logits, &mut got);
            assert_eq!(got, want, "{logits:?}");
        };
        check(&[1.0, 3.0, 2.0, 3.0], &[1, 3, 2]);
        check(&[0.0, -0.0, f32::NEG_INFINITY, f32::INFINITY], &[3, 0, 1, 2]);
        check(&[f32::NAN, -5.0, f32::NAN, 1.0], &[3, 1, 0]);
        check(&[f32::NAN; 3], &[0, 1, 2]);
    }
}
