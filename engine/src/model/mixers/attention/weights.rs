//! Weights of attention.

use alloc::vec;
use alloc::vec::Vec;

use super::config::{AttentionConfig, LayerAttention};
use crate::error::LoadError;
use crate::kernels::panel::Matrix;
use crate::model::linear::{Linear, LinearGroup, Norm, per_element};
use crate::model::memory::Size;
use crate::model::mixers::indexer::IndexerWeights;
use crate::model::tensors::{Declared, LinearName, Loaded, Name, NormName, Shape, matrix, values, vector};

const QKV: LinearName = LinearName("attn_qkv");
const Q: LinearName = LinearName("attn_q");
const K: LinearName = LinearName("attn_k");
const V: LinearName = LinearName("attn_v");
const GATE: LinearName = LinearName("attn_gate");
pub(crate) const OUTPUT: LinearName = LinearName("attn_output");
const Q_NORM: NormName = NormName("attn_q_norm");
const K_NORM: NormName = NormName("attn_k_norm");
const SUB_NORM: NormName = NormName("attn_sub_norm");
const DISTANCES: Name = Name::weight("attn_rel_b");
const SINKS: Name = Name::weight("attn_sinks");
const SEPARATE: (Name, &str) = (QKV.weight(), "either the fused or the separate tensors");

/// Beginnings of the names of tensors that layers which read the keys and values of others do not use.
pub(crate) const OF_KEYS: [&str; 3] = ["attn_k.", "attn_v.", "attn_k_norm."];

/// Weights of attention.
pub(crate) struct AttentionWeights {
    /// Queries (n_head * key_dim, n_embd), keys (n_head_kv * key_dim, n_embd) and values (n_head_kv * value_dim, n_embd);
    /// then the gate of the output, if there is one (n_head or n_head * value_dim, n_embd). With
    /// [`AttentionConfig::gated_queries`] each query head is followed by its gate.
    pub(super) qkv: LinearGroup,
    /// Offsets of keys and values in a row of `qkv`, where the layer has its own.
    pub(super) kv_at: [usize; 2],
    /// Offset of the gate in a row of `qkv`.
    pub(super) gate_at: Option<usize>,
    /// Whether values are copies of the keys before these are normalised and rotated.
    pub(super) values_from_keys: bool,
    /// Floats of a row of gates that follow the query heads; 0 without.
    pub(super) gates: usize,
    /// Norm of the heads of values.
    pub(super) v_norm: Option<Norm>,
    /// Norm before the output projection (n_head * value_dim).
    pub(super) sub_norm: Option<Norm>,
    /// Biases on scores (n_head, 2 * max + 1), by distance of the key from `-max` on.
    pub(super) distance_bias: Option<Vec<f32>>,
    /// Attention sinks (n_head).
    pub(super) sinks: Option<Vec<f32>>,
    /// Norm of query heads.
    pub(super) q_norm: Option<Norm>,
    /// Norm of key heads.
    pub(super) k_norm: Option<Norm>,
    /// Output projection (n_embd, n_head * value_dim).
    pub(super) o: Linear,
}

impl AttentionWeights {
    /// Declares the tensors of a layer of a model of width `d`.
    pub(crate) fn tensors(t: &mut Declared<'_>, c: &AttentionConfig, layer: &LayerAttention, d: usize) {
        let heads = layer.heads;
        let (q, k, v) = (c.q_rows(&heads), heads.k_width(), heads.v_width());
        let (fused, owns_kv) = (q + k + v, layer.owns_kv);
        t.optional(QKV.bias(), vector(fused));
        let parts = [(Q, q), (K, k), (V, v)];
        let parts = parts.into_iter().take(if owns_kv { 3 } else { 1 });
        if t.has(QKV.weight()) {
            t.required(QKV.weight(), matrix(fused, d));
            for (part, rows) in parts {
                t.excluded(part.weight(), matrix(rows, d), SEPARATE);
                t.excluded(part.bias(), vector(rows), SEPARATE);
            }
        } else {
            for (part, rows) in parts {
                match part.0 == V.0 && c.values_from_keys {
                    true => t.free(part.weight(), matrix(rows, d)),
                    false => t.required(part.weight(), matrix(rows, d)),
                }
                t.optional(part.bias(), vector(rows));
            }
            t.optional(QKV.weight(), matrix(fused, d));
        }
        t.required(OUTPUT.weight(), matrix(d, heads.out_width()));
        t.optional(OUTPUT.bias(), vector(d));
        t.optional(Q_NORM.weight(), Shape::HeadNorm { n_head: heads.n_head, head_dim: heads.key_dim });
        t.optional(Q_NORM.bias(), vector(heads.q_width()));
        if owns_kv {
            t.optional(K_NORM.weight(), Shape::HeadNorm { n_head: heads.n_head_kv, head_dim: heads.key_dim });
            t.optional(K_NORM.bias(), vector(k));
        }
        t.optional(SUB_NORM.weight(), vector(heads.out_width()));
        if let Some(distances) = c.distances {
            // layers without have those of the first
            t.free(DISTANCES, values(heads.n_head, distances.buckets));
        }
        t.optional(SINKS, vector(heads.n_head));
        // a gate per head or per element
        t.optional_by(GATE.weight(), move |dims| {
            matrix(if dims[1] == heads.n_head as u64 { heads.n_head } else { heads.out_width() }, d)
        });
    }

    /// Takes the tensors of a layer.
    pub(crate) fn load(
        t: &mut Loaded<'_>,
        c: &AttentionConfig,
        layer: &LayerAttention,
    ) -> Result<AttentionWeights, LoadError> {
        let (heads, owns_kv) = (&layer.heads, layer.owns_kv);
        let is_fused = t.has(QKV.weight());
        let values_from_keys = owns_kv && c.values_from_keys && !is_fused && !t.has(V.weight());
        if values_from_keys && heads.key_dim != heads.value_dim {
            return Err(t.missing(V.weight()));
        }
        let mut qkv = if is_fused {
            LinearGroup::fused(t.linear(QKV)?, &[c.q_rows(heads), heads.k_width(), heads.v_width()])
        } else {
            let mut group = LinearGroup::separate(vec![t.linear(Q)?]);
            if owns_kv {
                group.push(t.linear(K)?);
            }
            if owns_kv && !values_from_keys {
                group.push(t.linear(V)?);
            } else if owns_kv {
                group.reserve(heads.v_width());
            }
            group
        };
        let kv_at = match qkv.part_starts[..] {
            [_, k_at, v_at, ..] => [k_at, v_at],
            _ => [0; 2],
        };
        let gate = t.optional_linear(GATE)?;
        let gate_at = gate.is_some().then_some(qkv.stride);
        if let Some(gate) = gate {
            qkv.push(gate);
        }
        let head_norm = || (c.plain_head_norms && layer.rope.is_some()).then(|| Norm::plain(heads.key_dim));
        let distance_bias = t.vector(DISTANCES);
        Ok(AttentionWeights {
            qkv,
            kv_at,
            gate_at,
            values_from_keys,
            gates: if c.gated_queries { heads.q_width() } else { 0 },
            v_norm: c.plain_value_norm.then(|| Norm::plain(heads.value_dim)),
            sub_norm: t.norm(SUB_NORM)?,
            distance_bias: distance_bias.and_then(|(values, n_head)| Some(c.distances?.biases(&values, n_head))),
            sinks: t.optional(SINKS),
            q_norm: t.norm(Q_NORM)?.map(|n| per_element(n, heads.key_dim)).or_else(head_norm),
            k_norm: t.norm(K_NORM)?.map(|n| per_element(n, heads.key_dim)).or_else(head_norm),
            o: t.linear(OUTPUT)?,
        })
    }

    /// Takes the biases by distance of the first layer, where the layer has none.
    ///
    /// # Errors
    /// The name of the missing tensor, without that of the layer.
    pub(crate) fn share_biases(
        &mut self,
        c: &AttentionConfig,
        n_head: usize,
        first: &mut Option<Vec<f32>>,
    ) -> Result<(), Name> {
        let Some(distances) = c.distances else { return Ok(()) };
        let len = n_head * (2 * distances.max + 1);
        if self.distance_bias.is_none() {
            self.distance_bias = first.clone().filter(|biases| biases.len() == len);
        }
        let Some(biases) = &self.distance_bias else { return Err(DISTANCES) };
        if first.is_none() {
            *first = Some(biases.clone());
        }
        Ok(())
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        self.qkv.matrices().chain([&self.o.w]).collect()
    }

    /// Floats of a row: queries, keys, values and gates; gates that followed the queries; output of the heads.
    pub(super) fn parts(&self) -> [usize; 3] {
        [self.qkv.stride, self.gates, self.o.w.k()]
    }

    /// Temporaries of `n` rows, and of the indexer, if there is one.
    pub(crate) fn size(&self, n: usize, indexer: Option<&IndexerWeights>) -> Size {
        let indexer = indexer.map_or(Size::NONE, |indexer| indexer.size(n));
        Size::rows(n, self.parts()).and(self.qkv.size(n).or(self.o.size(n)).or(indexer))
    }
}
