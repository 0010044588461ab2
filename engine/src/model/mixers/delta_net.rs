//! Gated delta net (Yang et al., arXiv:2412.06464), as in Qwen3-Next and Qwen3.5:
//!
//! ```text
//! q, k, v = silu(conv(W_qkv x));  z = W_z x;  b = W_b x;  a = W_a x
//! q = l2(q) / sqrt(k_dim);  k = l2(k)
//! decay = exp(softplus(a + dt) * A);  rate = sigmoid(b)
//! y = W_out (norm(delta_rule(q, k, v, decay, rate)) * silu(z))      sigmoid(z) in Qwen4-Exp
//! ```

use alloc::format;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::elementwise::{Activation, activate, gated, sigmoid};
use crate::kernels::exp::exp;
use crate::kernels::norm::l2_norm_with_eps;
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::conv::{Conv, ConvRows, causal_conv};
use crate::kernels::recurrent::delta_rule::{DeltaHeads, DeltaRows, delta_rule};
use crate::kernels::recurrent::{StateMemory, softplus};
use crate::math::sqrt;
use crate::model::config::Config;
use crate::model::forward::Stage;
use crate::model::keys::Keys;
use crate::model::keys::MAX_WIDTH;
use crate::model::loader::LoadedTensors;
use crate::model::mixers::{MAX_CONV, RecurrentConfig};
use crate::model::residual::orders::{ForwardPass, SubLayerRows};
use crate::model::roles::{Layout, Part, Role, Scope, TensorRow, matrix, values, vector};
use crate::model::rows::columns;
use crate::model::scratch::StepScratch;
use crate::model::weights::{Linear, LinearGroup, Norm, linear, padded, required_norm, transposed};

/// Most elements of a key.
const MAX_KEY: u32 = 4096;

/// Sizes of a delta net.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaNetConfig {
    /// The heads.
    pub heads: DeltaHeads,
    /// Inputs of the convolution.
    pub conv: usize,
    /// Epsilon of unit vectors.
    pub unit_eps: f32,
    /// Activation of the gates of the output.
    pub gate: Activation,
}

impl DeltaNetConfig {
    pub(crate) fn read(keys: &Keys<'_, '_>, tiled: bool, unit_eps: f32) -> Result<DeltaNetConfig, LoadError> {
        let k_dim = keys.size("ssm.state_size", 1..=MAX_KEY)?;
        let n_key = keys.size("ssm.group_count", 1..=MAX_WIDTH / k_dim as u32)?;
        let inner = keys.size("ssm.inner_size", 1..=MAX_WIDTH)?;
        let n_value = keys.size("ssm.time_step_rank", 1..=inner as u32)?;
        if !inner.is_multiple_of(n_value) {
            return Err(keys.wrong("ssm.inner_size", inner, format!("a multiple of ssm.time_step_rank, {n_value}")));
        }
        if !n_value.is_multiple_of(n_key) {
            return Err(keys.wrong("ssm.time_step_rank", n_value, format!("a multiple of ssm.group_count, {n_key}")));
        }
        let heads = DeltaHeads { n_key, n_value, k_dim, v_dim: inner / n_value, tiled };
        let conv = keys.size("ssm.conv_kernel", 1..=MAX_CONV)?;
        Ok(DeltaNetConfig { heads, conv, unit_eps, gate: Activation::Silu })
    }

    fn key_width(&self) -> usize {
        self.heads.n_key * self.heads.k_dim
    }

    fn value_width(&self) -> usize {
        self.heads.n_value * self.heads.v_dim
    }

    /// Channels of the convolution: queries, keys and values.
    fn channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    fn conv_state_len(&self) -> usize {
        (self.conv - 1).saturating_mul(self.channels())
    }

    pub(crate) fn state_len(&self) -> usize {
        self.conv_state_len().saturating_add(self.value_width().saturating_mul(self.heads.k_dim))
    }
}

/// Weights of a delta net.
pub struct DeltaNet {
    c: DeltaNetConfig,
    /// Queries, keys and values in one; gates z; rates and decays, in one or two matrices.
    input: LinearGroup,
    /// (K, channels)
    conv: Vec<f32>,
    /// Added to the input of the decay (n_value).
    dt: Vec<f32>,
    /// Negative factor of the decay (n_value).
    a: Vec<f32>,
    /// Norm of the output of a head (v_dim).
    norm: Norm,
    /// (n_embd, n_value * v_dim)
    output: Linear,
}

fn config(c: &Config) -> Option<&DeltaNetConfig> {
    match &c.recurrent {
        Some(RecurrentConfig::DeltaNet(c)) => Some(c),
        _ => None,
    }
}

fn per_head(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    vector(config(c)?.heads.n_value)
}

fn gate_rows(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    matrix(config(c)?.heads.n_value, c.n_embd)
}

const JOINT: usize = 0;
const SEPARATE: usize = 1;

/// The tensors of a layer.
pub(crate) const TENSORS: &[TensorRow] = &[
    // rates and decays of the heads of a key head, side by side
    TensorRow::new("ssm_ba.weight", |c, _| matrix(2 * config(c)?.heads.n_value, c.n_embd))
        .of(&[(Part::Recurrent, JOINT)]),
    TensorRow::new("ssm_beta.weight", gate_rows).of(&[(Part::Recurrent, SEPARATE)]),
    TensorRow::new("ssm_alpha.weight", gate_rows).of(&[(Part::Recurrent, SEPARATE)]),
    TensorRow::new("attn_qkv.weight", |c, _| matrix(config(c)?.channels(), c.n_embd)).of(BOTH),
    TensorRow::new("attn_gate.weight", |c, _| matrix(config(c)?.value_width(), c.n_embd)).of(BOTH),
    TensorRow::new("ssm_conv1d.weight", |c, _| values(config(c)?.conv, config(c)?.channels())).of(BOTH),
    TensorRow::new("ssm_dt.bias", per_head).of(BOTH),
    TensorRow::new("ssm_a", per_head).of(BOTH),
    TensorRow::new("ssm_norm.weight", |c, _| vector(config(c)?.heads.v_dim)).of(BOTH),
    TensorRow::new("ssm_out.weight", |c, _| matrix(c.n_embd, config(c)?.value_width())).of(BOTH),
];

const BOTH: &[Layout] = &[(Part::Recurrent, JOINT), (Part::Recurrent, SEPARATE)];

impl DeltaNet {
    pub(crate) fn load(c: &DeltaNetConfig, tensors: &mut LoadedTensors, i: usize) -> Result<DeltaNet, LoadError> {
        let name = |part: &str| format!("blk.{i}.{part}");
        let gates: &[&str] = if tensors.has(&name("ssm_ba.weight")) { &["ssm_ba"] } else { &["ssm_beta", "ssm_alpha"] };
        let parts = ["attn_qkv", "attn_gate"].iter().chain(gates);
        let input = parts.map(|part| linear(tensors, &name(part))).collect::<Result<_, _>>()?;
        Ok(DeltaNet {
            c: *c,
            input: LinearGroup::separate(input),
            conv: transposed(tensors, &name("ssm_conv1d.weight"))?,
            dt: tensors.required(&name("ssm_dt.bias"))?,
            a: tensors.required(&name("ssm_a"))?,
            norm: required_norm(tensors, &name("ssm_norm"))?,
            output: linear(tensors, &name("ssm_out"))?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        self.input.matrices().chain([&self.output.w]).collect()
    }

    pub(crate) fn widths(&self) -> (Vec<&Matrix>, usize, usize) {
        let value = self.c.value_width();
        (self.input.matrices().collect(), self.input.stride + 2 * self.c.heads.n_value + value, value)
    }

    /// Offsets of rate and decay of a value head in a row of the input projections.
    fn gates_at(&self, head: usize) -> (usize, usize) {
        let DeltaHeads { n_key, n_value, .. } = self.c.heads;
        match self.input.part_starts[2..] {
            [rate, decay] => (rate + head, decay + head),
            _ => {
                let (per_key, start) = (n_value / n_key, self.input.part_starts[2]);
                let rate = start + head / per_key * 2 * per_key + head % per_key;
                (rate, rate + per_key)
            }
        }
    }
}

impl ForwardPass<'_, '_> {
    pub(crate) fn delta_net(
        &mut self,
        i: usize,
        m: &DeltaNet,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        StepScratch { wide, words, .. }: &mut StepScratch,
    ) {
        let (n, rows, heads, stride) = (self.n, self.rows, m.c.heads, m.input.stride);
        let (key, value, channels) = (m.c.key_width(), m.c.value_width(), m.c.channels());
        let (input, rest) = wide.split_at_mut(n * stride);
        let (gates, out) = rest.split_at_mut(n * 2 * heads.n_value);
        let out = &mut out[..n * value];
        rows.linear_group(&m.input, x, input, words);
        let projected = &*input;
        rows.each(gates, 2 * heads.n_value, &|r, gates| {
            let (decays, rates) = gates.split_at_mut(heads.n_value);
            for (h, (decay, rate)) in decays.iter_mut().zip(rates).enumerate() {
                let (rate_at, decay_at) = m.gates_at(h);
                *decay = exp(softplus(projected[r * stride + decay_at] + m.dt[h]) * m.a[h]);
                *rate = sigmoid(projected[r * stride + rate_at]);
            }
        });
        let state_at = self.model.config.layers[i].state_at;
        let conv = Conv { weights: &m.conv, bias: None, channels };
        let conv_rows = ConvRows { x: input, stride, at: 0 };
        causal_conv(rows.cpu, rows.pool, conv, conv_rows, self.states, (states, state_at));
        let scale = 1.0 / sqrt(heads.k_dim as f32);
        rows.each(input, stride, &|_, row| {
            activate(rows.cpu, Activation::Silu, &mut row[..channels]);
            for (i, head) in row[..2 * key].chunks_exact_mut(heads.k_dim).enumerate() {
                l2_norm_with_eps(rows.cpu, head, m.c.unit_eps, if i < heads.n_key { scale } else { 1.0 });
            }
        });
        let delta_rows = DeltaRows { x: input, stride, at: [0, key, 2 * key], gates, n_decay: heads.n_value };
        let state_at = state_at + m.c.conv_state_len();
        delta_rule((rows.cpu, rows.pool), heads, delta_rows, out, self.states, (states, state_at));
        self.trace_stage(Stage::AttnOut, Some(i), &mut columns(out, value, 0, value));
        let z = m.input.part_starts[1];
        rows.each(out, value, &|_, out| rows.norm_heads(&m.norm, out));
        let normed = &*out;
        let gate = m.c.gate;
        rows.each(input, stride, &|r, row| {
            gated(rows.cpu, gate, &mut row[z..z + value], &normed[r * value..][..value]);
        });
        let gated = &*input;
        rows.each(out, value, &|r, out| out.copy_from_slice(&gated[r * stride + z..][..value]));
        debug_assert!(y.len() == n * padded(self.model.config.n_embd));
        rows.linear(&m.output, out, y, words);
    }
}
