//! Attention: the steps of a batch.

use alloc::vec::Vec;

use super::batch::AttentionBatch;
use super::config::{AttentionConfig, LayerAttention, OutputGate};
use super::heads::HeadConfig;
use super::weights::AttentionWeights;
use crate::kernels::Cpu;
use crate::kernels::act::Floats;
use crate::kernels::attention::{self, Attention, DistanceBias, KvMemory, KvRows};
use crate::kernels::elementwise::{Activation, activate, clamp, gate_by_sigmoid, multiply, scale};
use crate::kernels::recurrent::softplus;
use crate::kernels::rope::{RopeStyle, Rotation, rope};
use crate::model::memory::Stack;
use crate::model::mixers::indexer::{self, IndexInput, IndexerWeights};
use crate::model::pass::{LayerAt, Pass, Stage, SubLayerRows};
use crate::model::rows::{RowOps, columns};

impl AttentionWeights {
    /// `y = attention(x)`. Writes keys and values to `memory`. The indexer, if there is one, selects the positions that are read.
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        (at, c, l): (LayerAt, &AttentionConfig, &LayerAttention),
        indexer: Option<&IndexerWeights>,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        (s, memory): (&mut AttentionBatch, &mut KvMemory),
        stack: &mut Stack<'_>,
    ) {
        let (rows, at, n) = (pass.rows, Some(at.index), pass.n);
        let heads = l.heads;
        let (q_width, k_width, v_width, out_width) =
            (heads.q_width(), heads.k_width(), heads.v_width(), heads.out_width());
        let stride = self.qkv.stride;
        let ([k_at, v_at], owns_kv) = (self.kv_at, l.owns_kv);
        let [qkv, gates, out] = stack.rows(n, self.parts());
        rows.linear_group(&self.qkv, x, qkv, stack);
        if let Some(indexer) = indexer {
            let input = IndexInput { x, compressed: Floats { x: &[], stride: 1 } };
            indexer.run(pass, (c, l), input, (&mut *s, &mut *memory), stack);
        }
        if let Some(limit) = c.qkv_limit {
            let end = if owns_kv { v_at + v_width } else { q_width };
            rows.each(qkv, stride, &|_, row| clamp(rows.cpu, &mut row[..end], limit));
        }
        if c.gated_queries {
            split_gates(rows, &heads, qkv, stride, gates);
        }
        pass.trace_stage(Stage::Q, at, &mut columns(qkv, stride, 0, q_width));
        if owns_kv {
            if self.values_from_keys {
                rows.each(qkv, stride, &|_, row| row.copy_within(k_at..k_at + k_width, v_at));
            }
            pass.trace_stage(Stage::K, at, &mut columns(qkv, stride, k_at, k_width));
            pass.trace_stage(Stage::V, at, &mut columns(qkv, stride, v_at, v_width));
            if let Some(norm) = &self.v_norm {
                rows.each(qkv, stride, &|_, row| rows.norm_heads(norm, &mut row[v_at..v_at + v_width]));
            }
        }
        self.rotate(rows, (c, l), qkv, s);
        let k = columns(qkv, stride, k_at, if owns_kv { k_width } else { 0 });
        pass.trace_stage(Stage::Rope, at, &mut columns(qkv, stride, 0, q_width).chain(k));
        let kv = pass.kv.layers()[l.kv_layer];
        if owns_kv {
            let kv_rows = KvRows { x: qkv, stride, k_at, v_at, slots: &s.slots };
            attention::write_kv(rows.cpu, rows.pool, &kv, kv_rows, memory);
        }
        let attention = Attention {
            kv,
            memory,
            n_head: heads.n_head,
            window: l.window,
            soft_cap: c.soft_cap,
            alibi: c.alibi.as_deref(),
            bias: self.distance_bias.as_ref().zip(c.distances).map(|(table, d)| DistanceBias { table, max: d.max }),
            sinks: self.sinks.as_deref(),
            selected: indexer::selected(l.selection, &s.selection),
            q: qkv,
            q_stride: stride,
            spans: pass.spans,
        };
        if pass.traces_scores() {
            pass.trace_stage(Stage::Scores, at, &mut attention.scores(rows.cpu).iter().map(Vec::as_slice));
        }
        attention.run(rows.cpu, rows.pool, out, &mut s.threads, &mut s.parts);
        self.gate_output(rows, (c, &heads), qkv, out);
        if let Some(norm) = &self.sub_norm {
            rows.norm_each(norm, out);
        }
        if c.gated_queries {
            rows.each(out, out_width, &|r, out| gate_by_sigmoid(rows.cpu, out, &gates[r * out_width..][..out_width]));
        }
        if c.value_scale != 1.0 {
            rows.each(out, out_width, &|_, out| scale(rows.cpu, out, c.value_scale));
        }
        pass.trace_stage(Stage::AttnOut, at, &mut columns(out, out_width, 0, out_width));
        rows.linear(&self.o, out, y, stack);
    }

    /// `out = out * act(gate)`, where the layer has a gate, per head or per element.
    fn gate_output(
        &self,
        rows: RowOps<'_>,
        (c, heads): (&AttentionConfig, &HeadConfig),
        qkv: &mut [f32],
        out: &mut [f32],
    ) {
        let (Some(at), Some((gate, _))) = (self.gate_at, self.qkv.linears.last()) else { return };
        let (stride, act) = (self.qkv.stride, c.output_gate);
        let (n_gates, width) = (gate.w.rows(), heads.out_width());
        rows.each(qkv, stride, &|_, row| activate_gates(rows.cpu, act, &mut row[at..at + n_gates]));
        rows.each(out, width, &|r, out| {
            gate_heads(rows.cpu, out, &qkv[r * stride + at..][..n_gates], heads.value_dim);
        });
    }

    /// Applies the norms of query and key heads, then RoPE, in place, where the layer has them. Queries are also
    /// multiplied by the scale of the attention scores.
    fn rotate(
        &self,
        rows: RowOps<'_>,
        (c, l): (&AttentionConfig, &LayerAttention),
        qkv: &mut [f32],
        s: &AttentionBatch,
    ) {
        let sizes = l.heads;
        let (q_width, k_at) = (sizes.q_width(), self.kv_at[0]);
        let k_width = if l.owns_kv { sizes.k_width() } else { 0 };
        let style = c.style.unwrap_or(RopeStyle::NeoX);
        rows.each(qkv, self.qkv.stride, &|r, row| {
            let (cos, sin) = s.turns(l, r);
            let (q, rest) = row.split_at_mut(k_at.max(q_width));
            let q_scale = s.query_scale(c, l, r);
            let parts = [(&mut q[..q_width], &self.q_norm, q_scale), (&mut rest[..k_width], &self.k_norm, 1.0)];
            for (heads, norm, factor) in parts {
                match norm {
                    Some(norm) if c.rope_before_norm => {
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

/// Moves the gates that follow the query heads to `gates`, (rows, n_head * key_dim), and the heads together.
fn split_gates(rows: RowOps<'_>, heads: &HeadConfig, qkv: &mut [f32], stride: usize, gates: &mut [f32]) {
    let (head_dim, n_head) = (heads.key_dim, heads.n_head);
    let projected = &*qkv;
    rows.each(gates, n_head * head_dim, &|r, gates| {
        for (h, gate) in gates.chunks_exact_mut(head_dim).enumerate() {
            gate.copy_from_slice(&projected[r * stride + (2 * h + 1) * head_dim..][..head_dim]);
        }
    });
    rows.each(qkv, stride, &|_, row| {
        for h in 1..n_head {
            row.copy_within(2 * h * head_dim..(2 * h + 1) * head_dim, h * head_dim);
        }
    });
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
