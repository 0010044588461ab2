//! What RWKV 6 and 7 share: their sizes, the token shift, and the norm of heads.

use alloc::format;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::Cpu;
use crate::kernels::norm::{NormKind, NormWeights, norm_in_place};
use crate::model::keys::{Keys, MAX_WIDTH};
use crate::model::tensors::{Declared, Loaded, NormName, vector};

/// Epsilon of the norm of heads.
const HEAD_EPS: f32 = 64e-5;

/// Sizes of a time mix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RwkvConfig {
    /// Width of all heads together (n_embd).
    pub width: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether the feed-forwards are channel mixes, which have a state too.
    pub channel_mix: bool,
}

impl RwkvConfig {
    pub(crate) fn read(keys: &Keys<'_, '_>, n_embd: usize, channel_mix: bool) -> Result<RwkvConfig, LoadError> {
        let head_dim = keys.size("wkv.head_size", 1..=MAX_WIDTH)?;
        if !n_embd.is_multiple_of(head_dim) {
            return Err(keys.wrong("wkv.head_size", head_dim, format!("a divisor of embedding_length, {n_embd}")));
        }
        Ok(RwkvConfig { width: n_embd, head_dim, channel_mix })
    }

    pub(crate) fn n_head(&self) -> usize {
        self.width / self.head_dim
    }

    /// Offset of the heads in the state: after the last inputs of the time mix and of the channel mix.
    pub(crate) fn heads_at(&self) -> usize {
        self.width * if self.channel_mix { 2 } else { 1 }
    }

    pub(crate) fn state_len(&self) -> usize {
        self.heads_at().saturating_add(self.width.saturating_mul(self.head_dim))
    }
}

/// `out = (before - x) * lerp + x`.
pub(crate) fn mix(out: &mut [f32], x: &[f32], before: &[f32], lerp: &[f32]) {
    for (((out, x), before), lerp) in out.iter_mut().zip(x).zip(before).zip(lerp) {
        *out = (before - x) * lerp + x;
    }
}

pub(crate) const NORM: NormName = NormName("time_mix_ln");

/// Norm of the heads of one token: weights and biases of all heads.
pub(crate) struct HeadNorm {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl HeadNorm {
    /// Declares the tensors of a layer of a model of width `d`.
    pub(crate) fn tensors(t: &mut Declared<'_>, is_required: bool, d: usize) {
        for name in [NORM.weight(), NORM.bias()] {
            if is_required { t.required(name, vector(d)) } else { t.optional(name, vector(d)) }
        }
    }

    /// Takes the norm of a layer, if it has one.
    pub(crate) fn load(t: &mut Loaded<'_>) -> Result<Option<HeadNorm>, LoadError> {
        Ok(match t.optional(NORM.weight()) {
            Some(weight) => Some(HeadNorm { weight, bias: t.required(NORM.bias())? }),
            None => None,
        })
    }

    pub(crate) fn run(&self, cpu: Cpu, head_dim: usize, heads: &mut [f32]) {
        let weights = self.weight.chunks_exact(head_dim).zip(self.bias.chunks_exact(head_dim));
        for (head, (w, b)) in heads.chunks_exact_mut(head_dim).zip(weights) {
            norm_in_place(cpu, &NormWeights { kind: NormKind::Layer, eps: HEAD_EPS, w, b: Some(b) }, head);
        }
    }
}
