//! Transformer blocks: attention and feed-forward, with the three orders of norms and residual sums.

use alloc::vec::Vec;

use crate::kernels::Cpu;
use crate::kernels::act::Floats;
use crate::kernels::attention::{self, Attention, DistanceBias, KvLayout, KvMemory, KvRows, Span};
use crate::kernels::elementwise::{Activation, activate, add_scaled, clamp, gate_by_sigmoid, gated, multiply, scale};
use crate::kernels::recurrent::{StateSpan, softplus};
use crate::kernels::rope::{RopeStyle, Rotation, rope};
use crate::model::Model;
use crate::model::family::ExpertInput;
use crate::model::forward::{Stage, Trace};
use crate::model::mixers::attention::HeadConfig;
use crate::model::mixers::attention::OutputGate;
use crate::model::mixers::indexer::IndexInput;
use crate::model::rows::{RowOps, columns};
use crate::model::scratch::{AttentionScratch, LayerEmbeddingScratch, Scratch, StepScratch};
use crate::model::weights::{AttentionWeights, FeedForward, LayerEmbedding, Mixer, Norm, padded};

/// Rows of a sub-layer: input (rows, n_embd), output (rows, padded n_embd).
pub(crate) struct SubLayerRows<'x> {
    pub(crate) x: &'x [f32],
    pub(crate) y: &'x mut [f32],
}

/// Rows of a residual sum: the residual stream, the output of the sub-layer, and memory for its norm.
pub(crate) struct ResidualRows<'x> {
    pub(crate) x: &'x mut [f32],
    pub(crate) y: &'x [f32],
    pub(crate) h: &'x mut [f32],
}

/// The forward pass of one batch: everything that its layers share.
pub(crate) struct ForwardPass<'a, 't> {
    pub(crate) model: &'a Model,
    pub(crate) rows: RowOps<'a>,
    pub(crate) kv: &'a KvLayout,
    pub(crate) spans: &'a [Span<'a>],
    /// The rows of each sequence and its recurrent state; empty for a model without recurrent layers.
    pub(crate) states: &'a [StateSpan],
    /// Rows of the batch.
    pub(crate) n: usize,
    pub(crate) trace: Option<Trace<'t>>,
}

impl ForwardPass<'_, '_> {
    pub(crate) fn trace_stage(&mut self, stage: Stage, layer: Option<usize>, rows: &mut dyn Iterator<Item = &[f32]>) {
        if let Some(trace) = &mut self.trace {
            trace(stage, layer, rows);
        }
    }

    /// Pre-norm block: the mixer, then the feed-forward, where the layer has them:
    ///
    /// ```text
    /// x = x + post_norm(attention(norm(x)));  x = x + post_norm(ffn(norm(x)))
    /// ```
    pub(crate) fn serial_block(&mut self, i: usize, memory: &mut KvMemory, s: &mut Scratch) {
        let Scratch { x, h, y, step, attention, experts, embeddings, skips, .. } = s;
        let (layer, d, n) = (self.model.layer(i), self.model.config.n_embd, self.n);
        let (x, h, y) = (&mut x[..n * d], &mut h[..n * d], &mut y[..n * padded(d)]);
        let experts_config = self.model.config.ffn.experts;
        let reads_residual = experts_config.is_some_and(|e| e.input == ExpertInput::Residual);
        if !experts.layer_input.is_empty() && !reads_residual {
            experts.layer_input[..n * d].copy_from_slice(x);
        }
        if !matches!(layer.mixer, Mixer::None) {
            let input = self.rows.normed(layer.attn_norm.as_ref(), x, h);
            self.trace_stage(Stage::AttnNorm, Some(i), &mut columns(input, d, 0, d));
            self.mixer(i, SubLayerRows { x: input, y }, attention, memory, step);
            self.add(i, layer.post_attn_norm.as_ref(), Stage::PostAttnNorm, ResidualRows { x, y, h });
        }
        if !experts.layer_input.is_empty() && reads_residual {
            experts.layer_input[..n * d].copy_from_slice(x);
        }
        if !matches!(layer.ffn, FeedForward::None) {
            let input = self.rows.normed(layer.ffn_norm.as_ref(), x, h);
            self.trace_stage(Stage::FfnNorm, Some(i), &mut columns(input, d, 0, d));
            self.ffn(i, SubLayerRows { x: input, y }, &mut memory.states, experts, step);
            self.add(i, layer.post_ffn_norm.as_ref(), Stage::PostFfnNorm, ResidualRows { x, y, h });
        }
        if let Some(embedding) = &layer.embedding {
            self.layer_embedding(i, embedding, SubLayerRows { x, y }, embeddings, step);
            self.add(i, Some(&embedding.norm), Stage::LayerEmbedding, ResidualRows { x, y, h });
        }
        if let Some(factor) = layer.embedding_skip {
            self.rows.add(x, d, skips, d, factor);
        }
        if let Some(factor) = layer.output_scale {
            self.rows.each(x, d, &|_, x| scale(self.rows.cpu, x, factor));
        }
    }

    /// `y = proj(act(gate x) * embedding)` of layer `i`.
    pub(crate) fn layer_embedding(
        &self,
        i: usize,
        layer: &LayerEmbedding,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        s: &LayerEmbeddingScratch,
        step: &mut StepScratch,
    ) {
        let (rows, width, act) = (self.rows, self.model.config.embedding.per_layer, self.model.config.ffn.act);
        let (stride, at) = (padded(width), self.model.config.layers[i].block * width);
        let wide = &mut step.wide[..self.n * stride];
        rows.linear(&layer.gate, x, wide, &mut step.words);
        rows.each(wide, stride, &|r, row| {
            gated(rows.cpu, act, &mut row[..width], &s.embeddings[r * s.stride + at..][..width]);
        });
        let x = Floats { x: wide, stride };
        rows.matrix(&layer.proj.w, layer.proj.bias.as_deref(), x, y, &mut step.words);
    }

    /// Parallel block: attention and feed-forward read the same residual stream. A feed-forward without a norm of its
    /// own reads the input of attention:
    ///
    /// ```text
    /// x = (x + attention(norm(x))) + ffn(ffn_norm(x) or norm(x))
    /// ```
    pub(crate) fn parallel_block(&mut self, i: usize, memory: &mut KvMemory, s: &mut Scratch) {
        let Scratch { x, h, y, step, attention, experts, .. } = s;
        let (layer, d, n) = (self.model.layer(i), self.model.config.n_embd, self.n);
        let (x, h, y) = (&mut x[..n * d], &mut h[..n * d], &mut y[..n * padded(d)]);
        let norm = layer.attn_norm.as_ref();
        let input = self.rows.normed(norm, x, h);
        self.trace_stage(Stage::AttnNorm, Some(i), &mut columns(input, d, 0, d));
        self.mixer(i, SubLayerRows { x: input, y }, attention, memory, step);
        if let Some(norm) = &layer.ffn_norm {
            self.rows.norm(norm, x, d, h);
            self.trace_stage(Stage::FfnNorm, Some(i), &mut columns(h, d, 0, d));
        }
        self.add(i, None, Stage::PostAttnNorm, ResidualRows { x, y, h: &mut [] });
        self.ffn(i, SubLayerRows { x: h, y }, &mut memory.states, experts, step);
        self.add(i, None, Stage::PostFfnNorm, ResidualRows { x, y, h: &mut [] });
    }

    /// Post-norm block: norms after the residual sums (Vaswani et al. 2017; BERT):
    ///
    /// ```text
    /// x = attn_norm(x + attention(x));  x = ffn_norm(x + ffn(x))
    /// ```
    pub(crate) fn post_norm_block(&mut self, i: usize, norms: &[Norm; 2], memory: &mut KvMemory, s: &mut Scratch) {
        let Scratch { x, y, step, attention, experts, .. } = s;
        let (d, n) = (self.model.config.n_embd, self.n);
        let (x, y) = (&mut x[..n * d], &mut y[..n * padded(d)]);
        let [attn_norm, ffn_norm] = norms;
        if !experts.layer_input.is_empty() {
            experts.layer_input[..n * d].copy_from_slice(x);
        }
        self.mixer(i, SubLayerRows { x, y }, attention, memory, step);
        self.rows.add_normed(attn_norm, x, y);
        if let Some(norm) = &self.model.layer(i).second_norm {
            self.rows.add(x, d, &experts.layer_input, d, 1.0);
            self.rows.norm_each(norm, x);
        }
        self.trace_stage(Stage::PostAttnNorm, Some(i), &mut columns(x, d, 0, d));
        self.ffn(i, SubLayerRows { x, y }, &mut memory.states, experts, step);
        self.rows.add_normed(ffn_norm, x, y);
        self.trace_stage(Stage::PostFfnNorm, Some(i), &mut columns(x, d, 0, d));
    }

    /// Block whose residual stream is the output of its norms (MiniMax-01):
    ///
    /// ```text
    /// h = norm(x);  x = h * residual_scale + attention(h);  h = norm(x);  x = h * residual_scale + ffn(h)
    /// ```
    pub(crate) fn normed_block(&mut self, i: usize, memory: &mut KvMemory, s: &mut Scratch) {
        let Scratch { x, h, y, step, attention, experts, .. } = s;
        let (layer, d, n) = (self.model.layer(i), self.model.config.n_embd, self.n);
        let (x, h, y) = (&mut x[..n * d], &mut h[..n * d], &mut y[..n * padded(d)]);
        let input = self.rows.normed(layer.attn_norm.as_ref(), x, h);
        self.trace_stage(Stage::AttnNorm, Some(i), &mut columns(input, d, 0, d));
        self.mixer(i, SubLayerRows { x: input, y }, attention, memory, step);
        self.replace(x, h, y);
        let input = self.rows.normed(layer.ffn_norm.as_ref(), x, h);
        self.trace_stage(Stage::FfnNorm, Some(i), &mut columns(input, d, 0, d));
        self.ffn(i, SubLayerRows { x: input, y }, &mut memory.states, experts, step);
        self.replace(x, h, y);
    }

    /// `x = h * residual_scale + y`.
    fn replace(&self, x: &mut [f32], h: &[f32], y: &[f32]) {
        let (rows, d, factor) = (self.rows, self.model.config.n_embd, self.model.config.residual.scale);
        rows.each(x, d, &|r, x| {
            x.copy_from_slice(&h[r * d..][..d]);
            scale(rows.cpu, x, factor);
            add_scaled(rows.cpu, x, &y[r * padded(d)..][..d], 1.0);
        });
    }

    /// `x = x + post_norm(y) * residual_scale`; `h` is overwritten if there is a norm.
    pub(crate) fn add(&mut self, i: usize, norm: Option<&Norm>, stage: Stage, rows: ResidualRows<'_>) {
        let ResidualRows { x, y, h } = rows;
        let (d, scale) = (self.model.config.n_embd, self.model.config.residual.scale);
        let Some(norm) = norm else { return self.rows.add(x, d, y, padded(d), scale) };
        self.rows.norm(norm, y, padded(d), h);
        self.trace_stage(stage, Some(i), &mut columns(h, d, 0, d));
        self.rows.add(x, d, h, d, scale);
    }

    /// `y = mixer(x)` of layer `i`. Writes keys, values and recurrent states to `memory`.
    pub(crate) fn mixer(
        &mut self,
        i: usize,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        s: &mut AttentionScratch,
        memory: &mut KvMemory,
        step: &mut StepScratch,
    ) {
        let model = self.model;
        match &model.layer(i).mixer {
            Mixer::Attention(a) => self.attention((i, a), SubLayerRows { x, y }, s, memory, step),
            Mixer::Latent(a) => self.latent_attention((i, a), SubLayerRows { x, y }, s, memory, step),
            Mixer::Compressed(a) => self.compressed_attention((i, a), SubLayerRows { x, y }, s, memory, step),
            Mixer::Recurrent(r) => self.recurrent(i, r, SubLayerRows { x, y }, &mut memory.states, step),
            Mixer::Both(both) => {
                let (attention, recurrent) = &**both;
                let mut sum = core::mem::take(&mut step.sum);
                self.attention((i, attention), SubLayerRows { x, y: &mut sum[..y.len()] }, s, memory, step);
                self.recurrent(i, recurrent, SubLayerRows { x, y }, &mut memory.states, step);
                self.rows.add(y, padded(model.config.n_embd), &sum, padded(model.config.n_embd), 1.0);
                step.sum = sum;
            }
            Mixer::Linear(linear) => self.rows.linear(linear, x, y, &mut step.words),
            Mixer::None => {}
        }
    }

    /// `y = attention(x)` of layer `i`. Writes keys and values to `memory`.
    fn attention(
        &mut self,
        (i, layer): (usize, &AttentionWeights),
        SubLayerRows { x, y }: SubLayerRows<'_>,
        s: &mut AttentionScratch,
        memory: &mut KvMemory,
        StepScratch { wide, words, .. }: &mut StepScratch,
    ) {
        let (c, rows, at) = (&self.model.config, self.rows, Some(i));
        let heads = c.layers[i].attention.heads;
        let (q_width, k_width, v_width, out_width) =
            (heads.q_width(), heads.k_width(), heads.v_width(), heads.out_width());
        let stride = layer.qkv.stride;
        let ([k_at, v_at], owns_kv) = (layer.kv_at, c.layers[i].attention.owns_kv);
        let (qkv, rest) = wide.split_at_mut(self.n * stride);
        rows.linear_group(&layer.qkv, x, qkv, words);
        self.select(i, IndexInput { x, compressed: Floats { x: &[], stride: 1 } }, s, memory, words);
        if let Some(limit) = c.attention.qkv_limit {
            let end = if owns_kv { v_at + v_width } else { q_width };
            rows.each(qkv, stride, &|_, row| clamp(rows.cpu, &mut row[..end], limit));
        }
        let (gates, rest) = rest.split_at_mut(if c.attention.gated_queries { self.n * q_width } else { 0 });
        if c.attention.gated_queries {
            self.split_gates(&heads, qkv, stride, gates);
        }
        self.trace_stage(Stage::Q, at, &mut columns(qkv, stride, 0, q_width));
        if owns_kv {
            if layer.values_from_keys {
                rows.each(qkv, stride, &|_, row| row.copy_within(k_at..k_at + k_width, v_at));
            }
            self.trace_stage(Stage::K, at, &mut columns(qkv, stride, k_at, k_width));
            self.trace_stage(Stage::V, at, &mut columns(qkv, stride, v_at, v_width));
            if let Some(norm) = &layer.v_norm {
                rows.each(qkv, stride, &|_, row| rows.norm_heads(norm, &mut row[v_at..v_at + v_width]));
            }
        }
        self.rotate(i, layer, qkv, s);
        let k = columns(qkv, stride, k_at, if owns_kv { k_width } else { 0 });
        self.trace_stage(Stage::Rope, at, &mut columns(qkv, stride, 0, q_width).chain(k));
        let kv = self.kv.layers()[c.layers[i].attention.kv_layer];
        if owns_kv {
            let kv_rows = KvRows { x: qkv, stride, k_at, v_at, slots: &s.slots };
            attention::write_kv(rows.cpu, rows.pool, &kv, kv_rows, memory);
        }
        let attention = Attention {
            kv,
            memory,
            n_head: heads.n_head,
            window: c.layers[i].attention.window,
            soft_cap: c.attention.soft_cap,
            alibi: c.attention.alibi.as_deref(),
            bias: layer
                .distance_bias
                .as_ref()
                .zip(c.attention.distances)
                .map(|(table, d)| DistanceBias { table, max: d.max }),
            sinks: layer.sinks.as_deref(),
            selected: self.selected(i, &s.selection),
            q: qkv,
            q_stride: stride,
            spans: self.spans,
        };
        if cfg!(feature = "trace") && self.trace.is_some() {
            self.trace_stage(Stage::Scores, at, &mut attention.scores(rows.cpu).iter().map(Vec::as_slice));
        }
        let out = &mut rest[..self.n * out_width];
        attention.run(rows.cpu, rows.pool, out, &mut s.threads, &mut s.parts);
        self.gate_output(&heads, layer, qkv, out);
        if let Some(norm) = &layer.attn_sub_norm {
            rows.norm_each(norm, out);
        }
        if c.attention.gated_queries {
            rows.each(out, out_width, &|r, out| gate_by_sigmoid(rows.cpu, out, &gates[r * out_width..][..out_width]));
        }
        if c.attention.value_scale != 1.0 {
            rows.each(out, out_width, &|_, out| scale(rows.cpu, out, c.attention.value_scale));
        }
        self.trace_stage(Stage::AttnOut, at, &mut columns(out, out_width, 0, out_width));
        rows.linear(&layer.o, out, y, words);
    }

    /// `out = out * act(gate)`, where the layer has a gate, per head or per element.
    fn gate_output(&self, heads: &HeadConfig, layer: &AttentionWeights, qkv: &mut [f32], out: &mut [f32]) {
        let (Some(at), Some((gate, _))) = (layer.gate_at, layer.qkv.linears.last()) else { return };
        let (rows, stride, act) = (self.rows, layer.qkv.stride, self.model.config.attention.output_gate);
        let (n_gates, width) = (gate.w.rows(), heads.out_width());
        rows.each(qkv, stride, &|_, row| activate_gates(rows.cpu, act, &mut row[at..at + n_gates]));
        rows.each(out, width, &|r, out| {
            gate_heads(rows.cpu, out, &qkv[r * stride + at..][..n_gates], heads.value_dim);
        });
    }

    /// Moves the gates that follow the query heads to `gates`, (rows, n_head * key_dim), and the heads together.
    fn split_gates(&self, heads: &HeadConfig, qkv: &mut [f32], stride: usize, gates: &mut [f32]) {
        let (head_dim, n_head) = (heads.key_dim, heads.n_head);
        let projected = &*qkv;
        self.rows.each(gates, n_head * head_dim, &|r, gates| {
            for (h, gate) in gates.chunks_exact_mut(head_dim).enumerate() {
                gate.copy_from_slice(&projected[r * stride + (2 * h + 1) * head_dim..][..head_dim]);
            }
        });
        self.rows.each(qkv, stride, &|_, row| {
            for h in 1..n_head {
                row.copy_within(2 * h * head_dim..(2 * h + 1) * head_dim, h * head_dim);
            }
        });
    }

    /// Applies the norms of query and key heads, then RoPE, in place, where the layer has them. Queries are also
    /// multiplied by the scale of the attention scores.
    fn rotate(&self, i: usize, layer: &AttentionWeights, qkv: &mut [f32], s: &AttentionScratch) {
        let (c, rows) = (&self.model.config, self.rows);
        let sizes = c.layers[i].attention.heads;
        let (q_width, k_at) = (sizes.q_width(), layer.kv_at[0]);
        let k_width = if c.layers[i].attention.owns_kv { sizes.k_width() } else { 0 };
        let style = c.attention.style.unwrap_or(RopeStyle::NeoX);
        rows.each(qkv, layer.qkv.stride, &|r, row| {
            let (cos, sin) = s.turns(c, i, r);
            let (q, rest) = row.split_at_mut(k_at.max(q_width));
            let q_scale = s.query_scale(c, i, r);
            let parts = [(&mut q[..q_width], &layer.q_norm, q_scale), (&mut rest[..k_width], &layer.k_norm, 1.0)];
            for (heads, norm, factor) in parts {
                match norm {
                    Some(norm) if c.attention.rope_before_norm => {
                        rope(rows.cpu, Rotation { style, cos, sin, scale: 1.0 }, heads, sizes.key_dim);
                        rows.norm_heads(norm, heads);
                        scale(rows.cpu, heads, factor);
                        continue;
                    }
                    Some(norm) => rows.norm_heads(norm, heads),
                    None => {}
                }
                rope(rows.cpu, Rotation { style, cos, sin, scale: factor }, heads, sizes.key_dim);
            }
        });
    }
}

/// Multiplies heads of `dim` elements by gates, one per element or one per head.
pub(crate) fn gate_heads(cpu: Cpu, heads: &mut [f32], gates: &[f32], dim: usize) {
    if gates.len() == heads.len() {
        return multiply(cpu, heads, gates);
    }
    heads.chunks_exact_mut(dim).zip(gates).for_each(|(head, gate)| scale(cpu, head, *gate));
}

/// The factors of outputs from the gates.
pub(crate) fn activate_gates(cpu: Cpu, act: OutputGate, gates: &mut [f32]) {
    match act {
        OutputGate::Sigmoid => activate(cpu, Activation::Sigmoid, gates),
        OutputGate::Softplus => gates.iter_mut().for_each(|x| *x = softplus(*x)),
    }
}
