//! Feed-forward networks: dense, or mixture of experts (MoE).

use alloc::vec::Vec;

use super::block::{ForwardPass, SubLayerRows};
use super::config::ExpertsConfig;
use super::forward::Stage;
use super::rows::{PackedColumns, as_columns, columns};
use super::scratch::{ExpertsScratch, StepScratch};
use super::weights::{Dense, Experts, FeedForward, Linear, SharedExpert, padded};
use crate::kernels::act::Floats;
use crate::kernels::elementwise::add_scaled;
use crate::kernels::exp::exp;
use crate::kernels::matmul::{MatmulJob, products};
use crate::kernels::softmax::exps;

impl ForwardPass<'_, '_> {
    /// `y = ffn(x)` of layer `i`.
    pub(super) fn ffn(
        &mut self,
        i: usize,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        s: &mut ExpertsScratch,
        step: &mut StepScratch,
    ) {
        match &self.model.weights.layers[i].ffn {
            FeedForward::None => return,
            FeedForward::Dense(ffn) => self.dense(ffn, x, y, step),
            FeedForward::Experts(experts) => {
                self.experts(i, experts, SubLayerRows { x, y }, s, step);
                if let Some(shared) = &experts.shared {
                    self.shared_expert(shared, x, y, s, step);
                }
            }
        }
        let d = self.model.config.n_embd;
        self.trace_stage(Stage::FfnOut, Some(i), &mut columns(y, padded(d), 0, d));
    }

    fn dense(&self, ffn: &Dense, x: &[f32], y: &mut [f32], StepScratch { wide, words, .. }: &mut StepScratch) {
        let (stride, Linear { w, bias }) = (ffn.up.stride, &ffn.down);
        let wide = &mut wide[..self.n * stride];
        self.rows.linear_group(&ffn.up, x, wide, words);
        self.rows.activate(self.model.config.arch.act, wide, stride, ffn.up.part_starts.get(1).copied(), w.k());
        self.rows.matrix(w, bias.as_deref(), Floats { x: wide, stride }, y, words);
    }

    /// Shared expert: `y += sigmoid(gate x) * ffn(x)`.
    fn shared_expert(
        &self,
        e: &SharedExpert,
        x: &[f32],
        y: &mut [f32],
        s: &mut ExpertsScratch,
        step: &mut StepScratch,
    ) {
        let (n, d, rows) = (self.n, self.model.config.n_embd, self.rows);
        let mut out = core::mem::take(&mut s.outputs);
        self.dense(&e.ffn, x, &mut out[..n * padded(d)], step);
        let gate = &mut s.router[..n * padded(1)];
        if let Some(g) = &e.gate {
            rows.linear(g, x, gate, &mut step.words);
        }
        rows.each(y, padded(d), &|r, y| {
            let weight = if e.gate.is_some() { 1.0 / (1.0 + exp(-gate[r * padded(1)])) } else { 1.0 };
            add_scaled(rows.cpu, &mut y[..d], &out[r * padded(d)..][..d], weight);
        });
        s.outputs = out;
    }

    /// `y = sum over the selected experts of weight * down(act(gate x) * up x)`, in order of selection. The rows of an
    /// expert are gathered, so that each expert runs one matrix product.
    fn experts(
        &mut self,
        i: usize,
        e: &Experts,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        s: &mut ExpertsScratch,
        step: &mut StepScratch,
    ) {
        let Some(c) = &self.model.config.experts else { return };
        let (n, d, rows) = (self.n, self.model.config.n_embd, self.rows);
        let StepScratch { wide, words, .. } = step;
        let router = &mut s.router[..n * padded(c.n)];
        rows.linear(&e.router, x, router, words);
        self.trace_stage(Stage::Router, Some(i), &mut columns(router, padded(c.n), 0, c.n));
        self.route(c, s);

        // a single token is the input of all its experts: no gather
        let total = n * c.n_used;
        let inputs = &mut s.inputs[..total * d];
        if n > 1 {
            let source_rows = &s.source_rows;
            rows.each(inputs, d, &|r, input| input.copy_from_slice(&x[source_rows[r] as usize * d..][..d]));
        }
        let groups = || (0..c.n).map(|e| (e, s.starts[e]..s.starts[e + 1])).filter(|(_, rows)| !rows.is_empty());

        let stride = 2 * padded(c.n_ff);
        let wide = &mut wide[..total * stride];
        let mut packed = PackedColumns::new(words);
        let mut jobs = Vec::new();
        for (number, (expert, group)) in groups().enumerate() {
            let (x, number) = if n > 1 { (&inputs[group.start * d..group.end * d], number) } else { (x, 0) };
            for (w, at) in [(&e.gate[expert], 0), (&e.up[expert], padded(c.n_ff))] {
                jobs.push(MatmulJob {
                    w,
                    x: packed.of(&rows, w, as_columns(x, w), number),
                    out_column: group.start,
                    out_row: at,
                });
            }
        }
        products(rows.cpu, rows.pool, &jobs, wide, stride);
        rows.activate(self.model.config.arch.act, wide, stride, Some(padded(c.n_ff)), c.n_ff);

        let outputs = &mut s.outputs[..total * padded(d)];
        let mut packed = PackedColumns::new(words);
        let mut jobs = Vec::new();
        for (number, (expert, group)) in groups().enumerate() {
            let (w, x) = (&e.down[expert], Floats { x: &wide[group.start * stride..group.end * stride], stride });
            jobs.push(MatmulJob { w, x: packed.of(&rows, w, x, number), out_column: group.start, out_row: 0 });
        }
        products(rows.cpu, rows.pool, &jobs, outputs, padded(d));

        let (expert_rows, weights) = (&s.expert_rows, &s.weights);
        rows.each(y, padded(d), &|r, y| {
            let y = &mut y[..d];
            y.fill(0.0);
            for j in r * c.n_used..(r + 1) * c.n_used {
                add_scaled(rows.cpu, y, &outputs[expert_rows[j] as usize * padded(d)..][..d], weights[j]);
            }
        });
    }

    /// Routes each row: selects its experts and their weights, and sorts rows by expert.
    fn route(&self, c: &ExpertsConfig, s: &mut ExpertsScratch) {
        let n = self.n;
        let logits = s.router.chunks_exact(padded(c.n)).map(|row| &row[..c.n]);
        let selected = s.selected.chunks_exact_mut(c.n_used).zip(s.weights.chunks_exact_mut(c.n_used));
        for (logits, (selected, weights)) in logits.zip(selected).take(n) {
            select_top(logits, selected);
            let max = logits[selected[0] as usize];
            let all = exps(self.rows.cpu, logits, max, 1.0, &mut s.probabilities);
            let mut sum_selected = 0.0;
            for (weight, &expert) in weights.iter_mut().zip(&*selected) {
                *weight = s.probabilities[expert as usize];
                sum_selected += *weight;
            }
            let sum = if c.normalised { sum_selected } else { all };
            weights.iter_mut().for_each(|w| *w = (*w / sum) * c.scale);
        }
        s.starts.fill(0);
        let selected = &s.selected[..n * c.n_used];
        selected.iter().for_each(|&e| s.starts[e as usize + 1] += 1);
        for e in 0..c.n {
            s.starts[e + 1] += s.starts[e];
        }
        for (j, &e) in selected.iter().enumerate() {
            let place = s.starts[e as usize];
            s.starts[e as usize] += 1;
            (s.expert_rows[j], s.source_rows[place]) = (place as u32, (j / c.n_used) as u32);
        }
        // each start has advanced to the next expert's: shift back
        s.starts.rotate_right(1);
        s.starts[0] = 0;
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
