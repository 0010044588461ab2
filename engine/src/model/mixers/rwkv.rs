//! What RWKV 6 and 7 share: their sizes, the token shift, and the channel mix, a feed-forward that also reads the token
//! before.
//!
//! ```text
//! token shift:          p = the input of the token before in the sequence
//! channel mix, RWKV 6:  y = sigmoid(W_r (h + (p - h) * l_r)) * (W_v relu(W_k (h + (p - h) * l_k))^2)
//! channel mix, RWKV 7:  y = W_v relu(W_k (h + (p - h) * l_k))^2
//! ```

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::Cpu;
use crate::kernels::act::Floats;
use crate::kernels::elementwise::{Activation, activate, multiply};
use crate::kernels::norm::{NormKind, NormWeights, norm_in_place};
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::StateMemory;
use crate::kernels::recurrent::shift::token_shift;
use crate::model::config::Config;
use crate::model::keys::Keys;
use crate::model::keys::MAX_WIDTH;
use crate::model::loader::LoadedTensors;
use crate::model::mixers::RecurrentConfig;
use crate::model::residual::orders::{ForwardPass, SubLayerRows};
use crate::model::roles::{Layout, Part, Role, Scope, matrix, vector};
use crate::model::scratch::StepScratch;
use crate::model::weights::padded;

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

/// The sizes of the time mix of either version.
pub(crate) fn config(c: &Config) -> Option<&RwkvConfig> {
    match &c.recurrent {
        Some(RecurrentConfig::Rwkv6(c) | RecurrentConfig::Rwkv7(c)) => Some(c),
        _ => None,
    }
}

/// Layout of the channel mix, after those of other feed-forwards.
pub(crate) const CHANNEL_MIX: &[Layout] = &[(Part::FeedForward, 3)];

/// The marker of layers with a channel mix.
pub(crate) const CHANNEL_MIX_KEY: &str = "channel_mix_key.weight";

pub(crate) fn channel_vector(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    if config(c)?.channel_mix { vector(c.n_embd) } else { None }
}

pub(crate) fn channel_key(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    if config(c)?.channel_mix { matrix(c.layer.ffn.width, c.n_embd) } else { None }
}

pub(crate) fn channel_value(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    if config(c)?.channel_mix { matrix(c.n_embd, c.layer.ffn.width) } else { None }
}

pub(crate) fn channel_receptance(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    if config(c)?.channel_mix { matrix(c.n_embd, c.n_embd) } else { None }
}

/// A feed-forward that also reads the token before.
pub struct ChannelMix {
    /// Share of the token before in the input of keys (n_embd).
    lerp_k: Vec<f32>,
    /// (n_ff, n_embd)
    key: Matrix,
    /// (n_embd, n_ff)
    value: Matrix,
    /// RWKV 6: share of the token before in the input of the gate, and the gate (n_embd, n_embd).
    receptance: Option<(Vec<f32>, Matrix)>,
}

impl ChannelMix {
    pub(crate) fn load(tensors: &mut LoadedTensors, name: &dyn Fn(&str) -> String) -> Result<ChannelMix, LoadError> {
        let receptance = match tensors.optional(&name("channel_mix_lerp_r.weight")) {
            Some(lerp) => Some((lerp, tensors.matrix(&name("channel_mix_receptance.weight"))?)),
            None => None,
        };
        Ok(ChannelMix {
            lerp_k: tensors.required(&name("channel_mix_lerp_k.weight"))?,
            key: tensors.matrix(&name(CHANNEL_MIX_KEY))?,
            value: tensors.matrix(&name("channel_mix_value.weight"))?,
            receptance,
        })
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        [&self.key, &self.value].into_iter().chain(self.receptance.iter().map(|(_, w)| w))
    }

    /// Width of the keys.
    pub(crate) fn n_ff(&self) -> usize {
        self.key.rows()
    }

    /// Floats of a row of [`StepScratch::wide`].
    pub(crate) fn width(&self) -> usize {
        let d = self.key.k();
        2 * d + padded(self.key.rows()) + padded(d)
    }
}

impl ForwardPass<'_, '_> {
    /// `y = channel_mix(x)` of layer `i`. Reads and writes the states of the sequences.
    pub(crate) fn channel_mix(
        &self,
        i: usize,
        m: &ChannelMix,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        StepScratch { wide, words, .. }: &mut StepScratch,
    ) {
        let (n, rows, d, stride) = (self.n, self.rows, m.key.k(), padded(m.key.rows()));
        let (before, rest) = wide.split_at_mut(n * d);
        let (mixed, rest) = rest.split_at_mut(n * d);
        let (keys, rest) = rest.split_at_mut(n * stride);
        let gates = &mut rest[..n * padded(d)];
        token_shift(x, d, before, self.states, (states, self.model.config.layers[i].state_at + d));
        rows.each(mixed, d, &|r, out| mix(out, &x[r * d..][..d], &before[r * d..][..d], &m.lerp_k));
        rows.matrix(&m.key, None, Floats { x: mixed, stride: d }, keys, words);
        rows.each(keys, stride, &|_, row| activate(rows.cpu, Activation::ReluSquared, &mut row[..m.key.rows()]));
        rows.matrix(&m.value, None, Floats { x: keys, stride }, y, words);
        if let Some((lerp, w)) = &m.receptance {
            rows.each(mixed, d, &|r, out| mix(out, &x[r * d..][..d], &before[r * d..][..d], lerp));
            rows.matrix(w, None, Floats { x: mixed, stride: d }, gates, words);
            rows.each(gates, padded(d), &|_, row| activate(rows.cpu, Activation::Sigmoid, &mut row[..d]));
            rows.each(y, padded(d), &|r, y| multiply(rows.cpu, &mut y[..d], &gates[r * padded(d)..][..d]));
        }
    }
}

/// `out = (before - x) * lerp + x`.
pub(crate) fn mix(out: &mut [f32], x: &[f32], before: &[f32], lerp: &[f32]) {
    for (((out, x), before), lerp) in out.iter_mut().zip(x).zip(before).zip(lerp) {
        *out = (before - x) * lerp + x;
    }
}

/// Norm of the heads of one token: weights and biases of all heads.
pub(crate) struct HeadNorm {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl HeadNorm {
    /// Takes the norm of layer `i`, if it has one.
    pub(crate) fn load(tensors: &mut LoadedTensors, i: usize) -> Result<Option<HeadNorm>, LoadError> {
        let name = |part: &str| format!("blk.{i}.time_mix_ln.{part}");
        Ok(match tensors.optional(&name("weight")) {
            Some(weight) => Some(HeadNorm { weight, bias: tensors.required(&name("bias"))? }),
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
