//! Time mix of RWKV 6 (Peng et al., arXiv:2404.05892), where p is the input of the token before:
//!
//! ```text
//! t = tanh(W_1 (h + (p - h) * l_x))
//! x_i = h + (p - h) * (l_i + W_2i t_i)                       i of w, k, v, r, g
//! r, k, v = W_r x_r, W_k x_k, W_v x_v;  g = silu(W_g x_g)
//! w = exp(-exp(W_b tanh(W_a x_w) + w_0))
//! y = W_o (norm(linear_attention(r, k, v, w, u)) * g)
//! ```

use alloc::format;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::elementwise::{Activation, activate, multiply};
use crate::kernels::exp::exp;
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::StateMemory;
use crate::kernels::recurrent::linear_attention::{LinearHeads, LinearRows, linear_attention};
use crate::kernels::recurrent::scan::Operand;
use crate::kernels::recurrent::shift::token_shift;
use crate::kernels::special::tanh;
use crate::model::forward::Stage;
use crate::model::loader::LoadedTensors;
use crate::model::mixers::low_rank::{LowRank, PlaneProduct, down, rank, up};
use crate::model::mixers::rwkv::{
    CHANNEL_MIX, CHANNEL_MIX_KEY, HeadNorm, RwkvConfig, channel_key, channel_receptance, channel_value, channel_vector,
    config, mix,
};
use crate::model::residual::orders::{ForwardPass, SubLayerRows};
use crate::model::roles::{Layout, Part, Role, Scope, TensorRow, matrix, tensor_error, values, vector};
use crate::model::rows::columns;
use crate::model::scratch::StepScratch;
use crate::model::weights::{missing, padded};

/// Inputs of the time mix: w, k, v, r, g.
pub(crate) const PARTS: usize = 5;

const FUSED: &[Layout] = &[(Part::Recurrent, 0)];
const SEPARATE: &[Layout] = &[(Part::Recurrent, 1)];
const BOTH: &[Layout] = &[(Part::Recurrent, 0), (Part::Recurrent, 1)];

fn wide(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    vector(c.n_embd)
}

fn square(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    matrix(c.n_embd, c.n_embd)
}

/// The tensors of a layer.
pub(crate) const TENSORS: &[TensorRow] = &[
    TensorRow::new("time_mix_lerp_fused.weight", |c, _| values(c.n_embd, PARTS)).of(FUSED),
    // in older files, one tensor per input
    TensorRow::new("time_mix_lerp_w.weight", wide).of(SEPARATE),
    TensorRow::new("time_mix_lerp_k.weight", wide).of(SEPARATE),
    TensorRow::new("time_mix_lerp_v.weight", wide).of(SEPARATE),
    TensorRow::new("time_mix_lerp_r.weight", wide).of(SEPARATE),
    TensorRow::new("time_mix_lerp_g.weight", wide).of(SEPARATE),
    TensorRow::new("time_mix_lerp_x.weight", wide).of(BOTH),
    TensorRow::new("time_mix_w1.weight", |c, dims| matrix(PARTS * rank(c, dims[1] / PARTS as u64), c.n_embd)).of(BOTH),
    TensorRow::new("time_mix_w2.weight", |c, dims| {
        Some(Role::Matrices { n: PARTS, rows: c.n_embd, k: rank(c, dims[0]) })
    })
    .of(BOTH),
    TensorRow::new("time_mix_first.weight", |c, _| values(config(c)?.head_dim, config(c)?.n_head())).of(BOTH),
    TensorRow::new("time_mix_decay.weight", wide).of(BOTH),
    TensorRow::new("time_mix_decay_w1.weight", down).of(BOTH),
    TensorRow::new("time_mix_decay_w2.weight", up).of(BOTH),
    TensorRow::new("time_mix_key.weight", square).of(BOTH),
    TensorRow::new("time_mix_value.weight", square).of(BOTH),
    TensorRow::new("time_mix_receptance.weight", square).of(BOTH),
    TensorRow::new("time_mix_gate.weight", square).of(BOTH),
    TensorRow::new("time_mix_ln.weight", wide).of(BOTH),
    TensorRow::new("time_mix_ln.bias", wide).of(BOTH),
    TensorRow::new("time_mix_output.weight", square).of(BOTH),
    TensorRow::new("channel_mix_lerp_k.weight", channel_vector).of(CHANNEL_MIX),
    TensorRow::new("channel_mix_lerp_r.weight", channel_vector).of(CHANNEL_MIX),
    TensorRow::new(CHANNEL_MIX_KEY, channel_key).of(CHANNEL_MIX),
    TensorRow::new("channel_mix_value.weight", channel_value).of(CHANNEL_MIX),
    TensorRow::new("channel_mix_receptance.weight", channel_receptance).of(CHANNEL_MIX),
];

/// Weights of a time mix.
pub struct Rwkv6 {
    c: RwkvConfig,
    /// Share of the token before in the input of `mix_down` (n_embd).
    lerp_x: Vec<f32>,
    /// The same in the five inputs, (5, n_embd), before what depends on the token is added.
    lerp: Vec<f32>,
    /// (5 * rank, n_embd)
    mix_down: Matrix,
    /// Five of (n_embd, rank).
    mix_up: Vec<Matrix>,
    /// The bonus u (heads, head_dim).
    first: Vec<f32>,
    /// Added to the input of the decay (n_embd).
    decay: Vec<f32>,
    decay_weights: LowRank,
    /// k, v, r and g.
    inputs: [Matrix; 4],
    norm: HeadNorm,
    output: Matrix,
}

impl Rwkv6 {
    pub(crate) fn load(c: &RwkvConfig, tensors: &mut LoadedTensors, i: usize) -> Result<Rwkv6, LoadError> {
        let name = |part: &str| format!("blk.{i}.time_mix_{part}.weight");
        let lerp = match tensors.optional(&name("lerp_fused")) {
            Some(all) => all,
            None => {
                let mut all = Vec::new();
                for part in ["lerp_w", "lerp_k", "lerp_v", "lerp_r", "lerp_g"] {
                    all.extend(tensors.required(&name(part))?);
                }
                all
            }
        };
        let mix_down = tensors.matrix(&name("w1"))?;
        let mix_up = tensors.matrices(&name("w2")).unwrap_or_default();
        if mix_up.len() != PARTS || mix_up.iter().any(|w| w.k() * PARTS != mix_down.rows()) {
            let found = format!("{} columns", mix_up.first().map_or(0, Matrix::k));
            return Err(tensor_error(&name("w2"), &found, &format!("{} columns", mix_down.rows() / PARTS)));
        }
        let [key, value, receptance, gate] = ["key", "value", "receptance", "gate"].map(|p| tensors.matrix(&name(p)));
        Ok(Rwkv6 {
            c: *c,
            lerp_x: tensors.required(&name("lerp_x"))?,
            lerp,
            mix_down,
            mix_up,
            first: tensors.required(&name("first"))?,
            decay: tensors.required(&name("decay"))?,
            decay_weights: LowRank::load(tensors, &name("decay_w1"), &name("decay_w2"))?,
            inputs: [key?, value?, receptance?, gate?],
            norm: HeadNorm::load(tensors, i)?.ok_or_else(|| missing(&name("ln")))?,
            output: tensors.matrix(&name("output"))?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        let first = self.mix_up.iter().chain(&self.inputs).chain(self.decay_weights.matrices());
        first.chain([&self.mix_down, &self.output]).collect()
    }

    pub(crate) fn widths(&self) -> (Vec<&Matrix>, usize, usize) {
        let (d, low) = (self.c.width, self.mix_down.rows());
        let wide = (PARTS + 2) * d + padded(low) + low + (PARTS + 1) * padded(d);
        (self.matrices(), wide, d)
    }
}

impl ForwardPass<'_, '_> {
    pub(crate) fn rwkv6(
        &mut self,
        i: usize,
        m: &Rwkv6,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        StepScratch { wide, words, .. }: &mut StepScratch,
    ) {
        let (n, rows, d, stride, rank) = (self.n, self.rows, m.c.width, padded(m.c.width), m.mix_up[0].k());
        let low_stride = padded(m.mix_down.rows());
        let (before, rest) = wide.split_at_mut(n * d);
        let (out, rest) = rest.split_at_mut(n * d);
        let (mixed, rest) = rest.split_at_mut(PARTS * n * d);
        let (low, rest) = rest.split_at_mut(n * low_stride);
        let (lows, rest) = rest.split_at_mut(PARTS * n * rank);
        let (planes, rest) = rest.split_at_mut(PARTS * n * stride);
        let decays = &mut rest[..n * stride];
        let state_at = self.model.config.layers[i].state_at;
        token_shift(x, d, before, self.states, (states, state_at));
        let before = &*before;
        rows.each(&mut mixed[..n * d], d, &|r, out| mix(out, &x[r * d..][..d], &before[r * d..][..d], &m.lerp_x));
        rows.matrix(&m.mix_down, None, Floats { x: &mixed[..n * d], stride: d }, low, words);
        rows.each(lows, rank, &|r, to| {
            let from = &low[r % n * low_stride + r / n * rank..][..rank];
            to.iter_mut().zip(from).for_each(|(to, x)| *to = tanh(*x));
        });
        let products: Vec<_> = m.mix_up.iter().enumerate().map(|(i, w)| PlaneProduct { w, from: i, to: i }).collect();
        rows.plane_products(&products, n, (lows, rank), (planes, stride), words);
        rows.each(mixed, d, &|r, out| {
            let (plane, row) = (r / n, r % n);
            let (x, before) = (&x[row * d..][..d], &before[row * d..][..d]);
            let lerp = m.lerp[plane * d..].iter().zip(&planes[r * stride..]);
            for (((out, x), before), (fixed, by_token)) in out.iter_mut().zip(x).zip(before).zip(lerp) {
                *out = (by_token + fixed) * (before - x) + x;
            }
        });
        let inputs = [&m.decay_weights.down].into_iter().chain(&m.inputs);
        let products: Vec<_> = inputs.enumerate().map(|(i, w)| PlaneProduct { w, from: i, to: i }).collect();
        rows.plane_products(&products, n, (mixed, d), (planes, stride), words);
        let low_rank = m.decay_weights.down.rows();
        rows.each(&mut planes[..n * stride], stride, &|_, row| row[..low_rank].iter_mut().for_each(|x| *x = tanh(*x)));
        rows.matrix(&m.decay_weights.up, None, Floats { x: &planes[..n * stride], stride }, decays, words);
        rows.each(decays, stride, &|_, row| {
            row.iter_mut().zip(&m.decay).for_each(|(w, fixed)| *w = exp(-exp(*w + fixed)));
        });
        rows.each(&mut planes[4 * n * stride..], stride, &|_, row| {
            activate(rows.cpu, Activation::Silu, &mut row[..d]);
        });
        let plane = |i: usize| Operand { x: &planes[i * n * stride..][..n * stride], stride, at: 0 };
        let linear_rows = LinearRows {
            q: plane(3),
            k: plane(1),
            v: plane(2),
            decay: Operand { x: decays, stride, at: 0 },
            bonus: Some(&m.first),
        };
        let dim = m.c.head_dim;
        let heads = LinearHeads { n: m.c.n_head(), dim, step: dim, n_decay: dim };
        let heads_at = state_at + m.c.heads_at();
        linear_attention((rows.cpu, rows.pool), heads, linear_rows, out, self.states, (states, heads_at));
        let gates = &planes[4 * n * stride..];
        rows.each(out, d, &|r, out| {
            m.norm.run(rows.cpu, dim, out);
            multiply(rows.cpu, out, &gates[r * stride..][..d]);
        });
        self.trace_stage(Stage::AttnOut, Some(i), &mut columns(out, d, 0, d));
        rows.matrix(&m.output, None, Floats { x: out, stride: d }, y, words);
    }
}
