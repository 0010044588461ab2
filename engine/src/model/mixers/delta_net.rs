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

use super::kind::MAX_CONV;
use crate::error::LoadError;
use crate::kernels::elementwise::{Activation, activate, gated, sigmoid};
use crate::kernels::exp::exp;
use crate::kernels::norm::l2_norm_with_eps;
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::conv::{Conv, ConvRows, causal_conv};
use crate::kernels::recurrent::delta_rule::{DeltaHeads, DeltaRows, delta_rule};
use crate::kernels::recurrent::{StateMemory, softplus};
use crate::math::sqrt;
use crate::model::keys::{Keys, MAX_WIDTH};
use crate::model::linear::{Linear, LinearGroup, Norm, padded};
use crate::model::memory::{Size, Stack};
use crate::model::pass::{LayerAt, Pass, Stage, SubLayerRows};
use crate::model::rows::columns;
use crate::model::tensors::{Declared, LinearName, Loaded, Name, NormName, matrix, values, vector};

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
pub(crate) struct DeltaNet {
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

const JOINT_GATES: LinearName = LinearName("ssm_ba");
const RATES: LinearName = LinearName("ssm_beta");
const DECAYS: LinearName = LinearName("ssm_alpha");
/// Tensors of which no other recurrent layer has one.
pub(crate) const MARKERS: [Name; 2] = [RATES.weight(), JOINT_GATES.weight()];
const QKV: LinearName = LinearName("attn_qkv");
const GATE: LinearName = LinearName("attn_gate");
const CONV: Name = Name::weight("ssm_conv1d");
const DT: Name = Name::bias("ssm_dt");
const A: Name = Name::whole("ssm_a");
const NORM: NormName = NormName("ssm_norm");
const OUTPUT: LinearName = LinearName("ssm_out");

impl DeltaNetConfig {
    /// Declares the tensors of a layer of a model of width `d`.
    pub(crate) fn tensors(&self, t: &mut Declared<'_>, d: usize) {
        let n = self.heads.n_value;
        if t.has(JOINT_GATES.weight()) {
            // rates and decays of the heads of a key head, side by side
            t.required(JOINT_GATES.weight(), matrix(2 * n, d));
        } else {
            t.required(RATES.weight(), matrix(n, d));
            t.required(DECAYS.weight(), matrix(n, d));
        }
        t.required(QKV.weight(), matrix(self.channels(), d));
        t.required(GATE.weight(), matrix(self.value_width(), d));
        t.required(CONV, values(self.conv, self.channels()));
        t.required(DT, vector(n));
        t.required(A, vector(n));
        t.required(NORM.weight(), vector(self.heads.v_dim));
        t.required(OUTPUT.weight(), matrix(d, self.value_width()));
    }
}

impl DeltaNet {
    pub(crate) fn load(c: &DeltaNetConfig, t: &mut Loaded<'_>) -> Result<DeltaNet, LoadError> {
        let gates = if t.has(JOINT_GATES.weight()) { &[JOINT_GATES][..] } else { &[RATES, DECAYS] };
        let input = [QKV, GATE].iter().chain(gates).map(|part| t.linear(*part)).collect::<Result<_, _>>()?;
        Ok(DeltaNet {
            c: *c,
            input: LinearGroup::separate(input),
            conv: t.transposed(CONV)?,
            dt: t.required(DT)?,
            a: t.required(A)?,
            norm: t.required_norm(NORM)?,
            output: t.linear(OUTPUT)?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        self.input.matrices().chain([&self.output.w]).collect()
    }

    /// Floats of a row: inputs, gates, output.
    fn parts(&self) -> [usize; 3] {
        [self.input.stride, 2 * self.c.heads.n_value, self.c.value_width()]
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        Size::rows(n, self.parts()).and(self.input.size(n).or(self.output.size(n)))
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

impl DeltaNet {
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        at: LayerAt,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        stack: &mut Stack<'_>,
    ) {
        let (n, rows, heads, stride) = (pass.n, pass.rows, self.c.heads, self.input.stride);
        let (key, value, channels) = (self.c.key_width(), self.c.value_width(), self.c.channels());
        let [input, gates, out] = stack.rows(n, self.parts());
        rows.linear_group(&self.input, x, input, stack);
        let projected = &*input;
        rows.each(gates, 2 * heads.n_value, &|r, gates| {
            let (decays, rates) = gates.split_at_mut(heads.n_value);
            for (h, (decay, rate)) in decays.iter_mut().zip(rates).enumerate() {
                let (rate_at, decay_at) = self.gates_at(h);
                *decay = exp(softplus(projected[r * stride + decay_at] + self.dt[h]) * self.a[h]);
                *rate = sigmoid(projected[r * stride + rate_at]);
            }
        });
        let state_at = at.state_at;
        let conv = Conv { weights: &self.conv, bias: None, channels };
        let conv_rows = ConvRows { x: input, stride, at: 0 };
        causal_conv(rows.cpu, rows.pool, conv, conv_rows, pass.states, (states, state_at));
        let scale = 1.0 / sqrt(heads.k_dim as f32);
        rows.each(input, stride, &|_, row| {
            activate(rows.cpu, Activation::Silu, &mut row[..channels]);
            for (i, head) in row[..2 * key].chunks_exact_mut(heads.k_dim).enumerate() {
                l2_norm_with_eps(rows.cpu, head, self.c.unit_eps, if i < heads.n_key { scale } else { 1.0 });
            }
        });
        let delta_rows = DeltaRows { x: input, stride, at: [0, key, 2 * key], gates, n_decay: heads.n_value };
        let state_at = state_at + self.c.conv_state_len();
        delta_rule((rows.cpu, rows.pool), heads, delta_rows, out, pass.states, (states, state_at));
        pass.trace_stage(Stage::AttnOut, Some(at.index), &mut columns(out, value, 0, value));
        let z = self.input.part_starts[1];
        rows.each(out, value, &|_, out| rows.norm_heads(&self.norm, out));
        let normed = &*out;
        let gate = self.c.gate;
        rows.each(input, stride, &|r, row| {
            gated(rows.cpu, gate, &mut row[z..z + value], &normed[r * value..][..value]);
        });
        let gated = &*input;
        rows.each(out, value, &|r, out| out.copy_from_slice(&gated[r * stride + z..][..value]));
        debug_assert!(y.len() == n * padded(pass.d));
        rows.linear(&self.output, out, y, stack);
    }
}
