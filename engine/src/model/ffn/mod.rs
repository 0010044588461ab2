//! Feed-forward networks: dense, or mixture of experts (MoE).

pub(crate) mod activation;
pub(crate) mod config;
pub(crate) mod experts;

use alloc::vec::Vec;

use crate::kernels::act::Floats;
use crate::kernels::elementwise::{Activation, activate, add_scaled, scale, sigmoid};
use crate::kernels::matmul::{MatmulJob, products};
use crate::kernels::norm::sparsify;
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::{StateMemory, softplus};
use crate::kernels::softmax::exps;
use crate::math::sqrt;
use crate::model::family::{ExpertInput, Gating, Swiglu};
use crate::model::ffn::experts::{AdjugatesConfig, ExpertsConfig};
use crate::model::forward::Stage;
use crate::model::residual::orders::{ForwardPass, SubLayerRows};
use crate::model::rows::{FfnActivation, PackedColumns, columns};
use crate::model::scratch::{ExpertsScratch, StepScratch};
use crate::model::weights::{Dense, ExpertMatrices, Experts, FeedForward, Linear, SharedExpert, padded};

/// Rows of the experts: input, of which a row has `stride` floats, input of the router, output (n, padded width).
struct ExpertRows<'x> {
    x: &'x [f32],
    stride: usize,
    router: &'x [f32],
    y: &'x mut [f32],
}

impl ForwardPass<'_, '_> {
    /// `y = ffn(x)` of layer `i`. A channel mix reads and writes the states of the sequences.
    pub(crate) fn ffn(
        &mut self,
        i: usize,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        s: &mut ExpertsScratch,
        step: &mut StepScratch,
    ) {
        let model = self.model;
        match &model.layer(i).ffn {
            FeedForward::None => return,
            FeedForward::ChannelMix(m) => self.channel_mix(i, m, SubLayerRows { x, y }, states, step),
            FeedForward::Dense(ffn) => {
                // the limit of the layer's shared experts, as in llama.cpp
                self.dense(i, ffn, model.config.layers[i].ffn.shared_limit, SubLayerRows { x, y }, step);
            }
            FeedForward::Experts(experts) => {
                let (mut normed, n) = (core::mem::take(&mut s.layer_input), self.n * model.config.n_embd);
                let mut router = core::mem::take(&mut s.router_input);
                if let Some(norm) = &experts.router_norm {
                    self.rows.norm(norm, &normed[..n], model.config.n_embd, &mut router[..n]);
                }
                let x_experts = match &experts.input_norm {
                    Some(norm) => {
                        self.rows.norm_each(norm, &mut normed[..n]);
                        &normed[..n]
                    }
                    None => x,
                };
                let x_router = match model.config.ffn.experts.map_or(ExpertInput::Same, |c| c.input) {
                    ExpertInput::LayerForRouter => &normed[..n],
                    ExpertInput::Residual => &router[..n],
                    _ => x_experts,
                };
                let d = model.config.n_embd;
                match (&experts.latent, &model.config.ffn.experts) {
                    (Some([down, up]), Some(c)) => {
                        let (mut latent, stride) = (core::mem::take(&mut s.latent), padded(c.width));
                        let (input, sum) = latent.split_at_mut(self.n * stride);
                        let sum = &mut sum[..self.n * stride];
                        self.rows.linear(down, x_experts, input, &mut step.words);
                        self.experts(i, experts, ExpertRows { x: input, stride, router: x_router, y: sum }, s, step);
                        if let Some(norm) = &experts.latent_norm {
                            self.rows.norm_beginnings(norm, sum, stride);
                        }
                        let sum = Floats { x: sum, stride };
                        self.rows.matrix(&up.w, up.bias.as_deref(), sum, y, &mut step.words);
                        s.latent = latent;
                    }
                    _ => {
                        let rows = ExpertRows { x: x_experts, stride: d, router: x_router, y };
                        self.experts(i, experts, rows, s, step);
                    }
                }
                if let Some(norm) = &experts.post_norm {
                    self.rows.norm_beginnings(norm, y, padded(model.config.n_embd));
                }
                s.router_input = router;
                s.layer_input = normed;
                if let Some(shared) = &experts.shared {
                    self.shared_expert(i, shared, SubLayerRows { x, y }, s, step);
                }
            }
        }
        let d = self.model.config.n_embd;
        self.trace_stage(Stage::FfnOut, Some(i), &mut columns(y, padded(d), 0, d));
    }

    fn dense(
        &self,
        i: usize,
        ffn: &Dense,
        limit: f32,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        step: &mut StepScratch,
    ) {
        let StepScratch { wide, words, .. } = step;
        let (stride, Linear { w, bias }) = (ffn.up.stride, &ffn.down);
        let wide = &mut wide[..self.n * stride];
        self.rows.linear_group(&ffn.up, x, wide, words);
        if self.model.config.layers[i].ffn.sparsity > 0.0 {
            let (cpu, factor) = (self.rows.cpu, self.model.config.layers[i].ffn.sparsity);
            self.rows.each(wide, stride, &|_, row| sparsify(cpu, &mut row[..w.k()], factor));
        }
        let activation = FfnActivation {
            act: match ffn.up.part_starts.len() {
                1 => self.model.config.ffn.ungated_act,
                _ => self.model.config.ffn.act,
            },
            swiglu: match self.model.config.ffn.swiglu {
                Swiglu::Limited(_) if !self.model.config.ffn.limits_dense => Swiglu::Plain,
                swiglu => swiglu,
            },
            limit,
            xielu: self.model.config.layers[i].ffn.xielu,
            situ: self.model.config.ffn.situ,
        };
        self.rows.activate(activation, wide, stride, ffn.up.part_starts.get(1).copied(), w.k());
        if let Some(norm) = &ffn.sub_norm {
            self.rows.norm_beginnings(norm, wide, stride);
        }
        self.rows.matrix(w, bias.as_deref(), Floats { x: wide, stride }, y, words);
    }

    /// Shared expert: `y += sigmoid(gate x) * ffn(x)`.
    fn shared_expert(
        &self,
        i: usize,
        e: &SharedExpert,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        s: &mut ExpertsScratch,
        step: &mut StepScratch,
    ) {
        let (n, d, rows) = (self.n, self.model.config.n_embd, self.rows);
        let mut out = core::mem::take(&mut s.outputs);
        let limit = self.model.config.layers[i].ffn.shared_limit;
        let factor = self.model.config.ffn.experts.map_or(1.0, |experts| experts.shared_factor);
        self.dense(i, &e.ffn, limit, SubLayerRows { x, y: &mut out[..n * padded(d)] }, step);
        if let Some(norm) = &e.post_norm {
            rows.norm_beginnings(norm, &mut out[..n * padded(d)], padded(d));
        }
        let gate = &mut s.router[..n * padded(1)];
        if let Some(g) = &e.gate {
            rows.linear(g, x, gate, &mut step.words);
        }
        rows.each(y, padded(d), &|r, y| {
            let weight = if e.gate.is_some() { sigmoid(gate[r * padded(1)]) } else { 1.0 };
            add_scaled(rows.cpu, &mut y[..d], &out[r * padded(d)..][..d], weight);
            if factor != 1.0 {
                scale(rows.cpu, &mut y[..d], factor);
            }
        });
        s.outputs = out;
    }

    /// `y = sum over the selected experts of weight * down(act(gate x) * up x)`, in order of selection. Adjugate experts
    /// add the same sum of theirs, whose input is y.
    fn experts(
        &mut self,
        i: usize,
        e: &Experts,
        ExpertRows { x, stride: x_stride, router: router_input, y }: ExpertRows<'_>,
        s: &mut ExpertsScratch,
        step: &mut StepScratch,
    ) {
        let Some(c) = &self.model.config.ffn.experts else { return };
        let (n, d, rows) = (self.n, c.width, self.rows);
        let router = &mut s.router[..n * padded(c.n)];
        rows.linear(&e.router, &router_input[..n * self.model.config.n_embd], router, &mut step.words);
        self.trace_stage(Stage::Router, Some(i), &mut columns(router, padded(c.n), 0, c.n));
        self.route(c, e, s);
        self.selected_experts(i, &e.matrices, (x, x_stride), s, step);
        if let Some(scales) = &e.output_scale {
            let selected = s.selected[..n * c.n_used].iter().zip(&mut s.weights);
            selected.for_each(|(expert, weight)| *weight *= scales[*expert as usize]);
        }
        rows.each(y, padded(d), &|_, y| y[..d].fill(0.0));
        self.add_selected(c, s, y);
        if let (Some(adjugates), Some(a)) = (&e.adjugates, &c.adjugates) {
            self.route_adjugates(c, a, s);
            self.selected_experts(i, adjugates, (y, padded(d)), s, step);
            self.add_selected(c, s, y);
        }
    }

    /// `y = y + sum over the selected experts of weight * output`.
    fn add_selected(&self, c: &ExpertsConfig, s: &ExpertsScratch, y: &mut [f32]) {
        let (rows, d, n_used) = (self.rows, c.width, c.n_used);
        let (expert_rows, weights, outputs) = (&s.expert_rows, &s.weights, &s.outputs);
        rows.each(y, padded(d), &|r, y| {
            for j in r * n_used..(r + 1) * n_used {
                let output = &outputs[expert_rows[j] as usize * padded(d)..][..d];
                add_scaled(rows.cpu, &mut y[..d], output, weights[j]);
            }
        });
    }

    /// The outputs of the selected experts for the rows `x`, `x_stride` floats apart. The rows of an expert are gathered,
    /// so that each expert runs one matrix product.
    fn selected_experts(
        &self,
        i: usize,
        e: &ExpertMatrices,
        (x, x_stride): (&[f32], usize),
        s: &mut ExpertsScratch,
        step: &mut StepScratch,
    ) {
        let Some(c) = &self.model.config.ffn.experts else { return };
        let (n, d, rows) = (self.n, c.width, self.rows);
        let StepScratch { wide, words, .. } = step;
        let (n_experts, n_ff) = (e.up.len(), e.down.first().map_or(0, Matrix::k));

        // a single token is the input of all its experts: no gather, unless each input has its weight, or several of the
        // experts are the same
        let total = n * c.n_used;
        let weighted = c.weighted_inputs;
        let gathered = n > 1 || weighted || n_experts < c.n || self.model.config.layers[i].ffn.routes_by_token;
        let inputs = &mut s.inputs[..total * d];
        if gathered {
            let source_rows = &s.source_rows;
            rows.each(inputs, d, &|r, input| input.copy_from_slice(&x[source_rows[r] as usize * x_stride..][..d]));
        }
        if weighted {
            for (&row, weight) in s.expert_rows.iter().zip(&mut s.weights).take(total) {
                scale(rows.cpu, &mut inputs[row as usize * d..][..d], *weight);
                *weight = 1.0;
            }
        }
        let groups = || (0..n_experts).map(|e| (e, s.starts[e]..s.starts[e + 1])).filter(|(_, rows)| !rows.is_empty());

        let is_fused = e.gate.is_empty() && e.up[0].rows() == 2 * n_ff;
        let up_at = match (is_fused, e.gate.is_empty()) {
            (true, _) => n_ff,
            (false, true) => 0,
            (false, false) => padded(n_ff),
        };
        let stride = if is_fused { padded(2 * n_ff) } else { up_at + padded(n_ff) };
        let up_row = if is_fused { 0 } else { up_at };
        let wide = &mut wide[..total * stride];
        let mut packed = PackedColumns::new(words);
        let mut jobs = Vec::new();
        for (number, (expert, group)) in groups().enumerate() {
            let (x, number) = match gathered {
                true => (Floats { x: &inputs[group.start * d..group.end * d], stride: d }, number),
                false => (Floats { x, stride: x_stride }, 0),
            };
            for (w, at) in e.gate.get(expert).map(|w| (w, 0)).into_iter().chain([(&e.up[expert], up_row)]) {
                jobs.push(MatmulJob { w, x: packed.of(&rows, w, x, number), out_column: group.start, out_row: at });
            }
        }
        products(rows.cpu, rows.pool, &jobs, wide, stride);
        // the expert of a row
        let starts = &s.starts[..=n_experts];
        let expert_of = |row: usize| starts.partition_point(|start| *start <= row) - 1;
        let add_biases = |x: &mut [f32], stride: usize, bias: &Option<Vec<f32>>, at: usize, width: usize| {
            if let Some(bias) = bias {
                let bias = |r| &bias[expert_of(r) * width..][..width];
                rows.each(x, stride, &|r, row| add_scaled(rows.cpu, &mut row[at..at + width], bias(r), 1.0));
            }
        };
        add_biases(wide, stride, &e.biases[0], 0, n_ff);
        add_biases(wide, stride, &e.biases[1], up_at, n_ff);
        let (ffn, limit) = (&self.model.config.ffn, self.model.config.layers[i].ffn.expert_limit);
        let situ = self.model.config.ffn.situ;
        let activation = FfnActivation { act: ffn.act, swiglu: ffn.swiglu, limit, xielu: None, situ };
        rows.activate(activation, wide, stride, (up_at > 0).then_some(up_at), n_ff);

        let outputs = &mut s.outputs[..total * padded(d)];
        let mut packed = PackedColumns::new(words);
        let mut jobs = Vec::new();
        for (number, (expert, group)) in groups().enumerate() {
            let (w, x) = (&e.down[expert], Floats { x: &wide[group.start * stride..group.end * stride], stride });
            jobs.push(MatmulJob { w, x: packed.of(&rows, w, x, number), out_column: group.start, out_row: 0 });
        }
        products(rows.cpu, rows.pool, &jobs, outputs, padded(d));
        add_biases(outputs, padded(d), &e.biases[2], 0, d);
    }

    /// Routes each row: selects its experts and their weights, and sorts rows by expert.
    fn route(&self, c: &ExpertsConfig, e: &Experts, s: &mut ExpertsScratch) {
        let (n, bias) = (self.n, e.selection_bias.as_deref());
        let logits = s.router.chunks_exact(padded(c.n)).map(|row| &row[..c.n]);
        let selected = s.selected.chunks_exact_mut(c.n_used).zip(s.weights.chunks_exact_mut(c.n_used));
        for (r, (logits, (selected, weights))) in logits.zip(selected).take(n).enumerate() {
            select_top(logits, selected);
            let all = match c.gating {
                Gating::Softmax => exps(self.rows.cpu, logits, logits[selected[0] as usize], 1.0, &mut s.probabilities),
                Gating::Sigmoid => {
                    s.probabilities.copy_from_slice(logits);
                    activate(self.rows.cpu, Activation::Sigmoid, &mut s.probabilities);
                    1.0
                }
                Gating::SqrtSoftplus => {
                    s.probabilities.iter_mut().zip(logits).for_each(|(p, x)| *p = sqrt(softplus(*x)));
                    1.0
                }
            };
            if let Some(by_token) = &e.by_token {
                selected.copy_from_slice(&by_token[s.tokens[r] as usize * c.n_used..][..c.n_used]);
            } else if bias.is_some() || c.groups.is_some() {
                for (e, (score, p)) in s.scores.iter_mut().zip(&s.probabilities).enumerate() {
                    *score = p / all + bias.map_or(0.0, |bias| bias[e]);
                }
                if let Some((n_groups, _)) = c.groups {
                    keep_groups(c.n / n_groups, &mut s.scores, &mut s.group_scores, &mut s.groups);
                }
                select_top(&s.scores, selected);
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
        sort_by_expert(c.n, (n, c.n_used), s);
    }

    /// Replaces the selected experts of each row by the adjugate experts of their groups, with the weights that llama.cpp
    /// gives them: the probabilities of the experts that have the numbers of the groups, normalised.
    fn route_adjugates(&self, c: &ExpertsConfig, a: &AdjugatesConfig, s: &mut ExpertsScratch) {
        let logits = s.router.chunks_exact(padded(c.n)).map(|row| &row[..c.n]);
        let selected = s.selected.chunks_exact_mut(c.n_used).zip(s.weights.chunks_exact_mut(c.n_used));
        for (logits, (selected, weights)) in logits.zip(selected).take(self.n) {
            let all = exps(self.rows.cpu, logits, logits[selected[0] as usize], 1.0, &mut s.probabilities);
            let mut sum = 0.0;
            for (expert, weight) in selected.iter_mut().zip(&mut *weights) {
                *expert /= a.per_group as u32;
                *weight = s.probabilities[*expert as usize] / all;
                sum += *weight;
            }
            let sum = sum.max(LEAST_SUM);
            weights.iter_mut().for_each(|w| *w = (*w / sum) * c.scale * a.scale);
        }
        sort_by_expert(c.n_adjugates(), (self.n, c.n_used), s);
    }
}

/// Sorts the selected experts of `n` rows, `n_used` each, by the expert, of which there are `n_experts`.
fn sort_by_expert(n_experts: usize, (n, n_used): (usize, usize), s: &mut ExpertsScratch) {
    let (starts, selected) = (&mut s.starts[..=n_experts], &s.selected[..n * n_used]);
    starts.fill(0);
    selected.iter().for_each(|&e| starts[e as usize + 1] += 1);
    for e in 0..n_experts {
        starts[e + 1] += starts[e];
    }
    for (j, &e) in selected.iter().enumerate() {
        let place = starts[e as usize];
        starts[e as usize] += 1;
        (s.expert_rows[j], s.source_rows[place]) = (place as u32, (j / n_used) as u32);
    }
    // each start has advanced to the next expert's: shift back
    starts.rotate_right(1);
    starts[0] = 0;
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
