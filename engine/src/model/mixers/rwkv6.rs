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

use super::low_rank::{LowRank, PlaneProduct, rank};
use super::rwkv::{HeadNorm, NORM, RwkvConfig, mix};
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
use crate::model::linear::padded;
use crate::model::memory::{Size, Stack};
use crate::model::pass::{LayerAt, Pass, Stage, SubLayerRows};
use crate::model::rows::columns;
use crate::model::tensors::{Declared, Loaded, Name, Shape, matrix, values, vector};

/// Inputs of the time mix: w, k, v, r, g.
pub(crate) const PARTS: usize = 5;

const LERPS: Name = Name::weight("time_mix_lerp_fused");
/// In older files, one tensor per input.
const SEPARATE_LERPS: [Name; PARTS] = [
    Name::weight("time_mix_lerp_w"),
    Name::weight("time_mix_lerp_k"),
    Name::weight("time_mix_lerp_v"),
    Name::weight("time_mix_lerp_r"),
    Name::weight("time_mix_lerp_g"),
];
const LERP_X: Name = Name::weight("time_mix_lerp_x");
const MIX_DOWN: Name = Name::weight("time_mix_w1");
const MIX_UP: Name = Name::weight("time_mix_w2");
/// A tensor that RWKV 7 has not.
pub(crate) const FIRST: Name = Name::weight("time_mix_first");
const DECAY: Name = Name::weight("time_mix_decay");
const DECAY_WEIGHTS: [Name; 2] = [Name::weight("time_mix_decay_w1"), Name::weight("time_mix_decay_w2")];
/// k, v, r and g.
const INPUTS: [Name; 4] = [
    Name::weight("time_mix_key"),
    Name::weight("time_mix_value"),
    Name::weight("time_mix_receptance"),
    Name::weight("time_mix_gate"),
];
const OUTPUT: Name = Name::weight("time_mix_output");

/// Declares the tensors of a layer of a model of width `d`.
pub(crate) fn tensors(c: &RwkvConfig, t: &mut Declared<'_>, d: usize) {
    if t.has(LERPS) {
        t.required(LERPS, values(d, PARTS));
    } else {
        SEPARATE_LERPS.into_iter().for_each(|lerp| t.required(lerp, vector(d)));
    }
    t.required(LERP_X, vector(d));
    t.required_by(MIX_DOWN, move |dims| matrix(PARTS * rank(dims[1] / PARTS as u64, d), d));
    t.required_by(MIX_UP, move |dims| Shape::Matrices { n: PARTS, rows: d, k: rank(dims[0], d) });
    t.required(FIRST, values(c.head_dim, c.n_head()));
    t.required(DECAY, vector(d));
    LowRank::tensors(t, DECAY_WEIGHTS, true, d);
    INPUTS.into_iter().for_each(|input| t.required(input, matrix(d, d)));
    HeadNorm::tensors(t, true, d);
    t.required(OUTPUT, matrix(d, d));
}

/// Weights of a time mix.
pub(crate) struct Rwkv6 {
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
    pub(crate) fn load(c: &RwkvConfig, t: &mut Loaded<'_>) -> Result<Rwkv6, LoadError> {
        let lerp = match t.optional(LERPS) {
            Some(all) => all,
            None => {
                let mut all = Vec::new();
                for part in SEPARATE_LERPS {
                    all.extend(t.required(part)?);
                }
                all
            }
        };
        let mix_down = t.matrix(MIX_DOWN)?;
        let mix_up = t.matrices(MIX_UP).unwrap_or_default();
        if mix_up.len() != PARTS || mix_up.iter().any(|w| w.k() * PARTS != mix_down.rows()) {
            let found = format!("{} columns", mix_up.first().map_or(0, Matrix::k));
            return Err(t.error(MIX_UP, &found, &format!("{} columns", mix_down.rows() / PARTS)));
        }
        let [key, value, receptance, gate] = INPUTS.map(|input| t.matrix(input));
        Ok(Rwkv6 {
            c: *c,
            lerp_x: t.required(LERP_X)?,
            lerp,
            mix_down,
            mix_up,
            first: t.required(FIRST)?,
            decay: t.required(DECAY)?,
            decay_weights: LowRank::load(t, DECAY_WEIGHTS)?,
            inputs: [key?, value?, receptance?, gate?],
            norm: HeadNorm::load(t)?.ok_or_else(|| t.missing(NORM.weight()))?,
            output: t.matrix(OUTPUT)?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        let first = self.mix_up.iter().chain(&self.inputs).chain(self.decay_weights.matrices());
        first.chain([&self.mix_down, &self.output]).collect()
    }

    /// Floats of a row: inputs of the tokens before, output, mixed inputs, what depends on the token, its parts, planes of the
    /// products, decays.
    fn parts(&self) -> [usize; 7] {
        let (d, low) = (self.c.width, self.mix_down.rows());
        [d, d, PARTS * d, padded(low), low, PARTS * padded(d), padded(d)]
    }

    /// Products of what depends on the token.
    fn mix_products(&self) -> Vec<PlaneProduct<'_>> {
        self.mix_up.iter().enumerate().map(|(i, w)| PlaneProduct { w, from: i, to: i }).collect()
    }

    /// Products of the mixed inputs.
    fn input_products(&self) -> Vec<PlaneProduct<'_>> {
        let inputs = [&self.decay_weights.down].into_iter().chain(&self.inputs);
        inputs.enumerate().map(|(i, w)| PlaneProduct { w, from: i, to: i }).collect()
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        let planes = [self.mix_products(), self.input_products()].map(|all| PlaneProduct::size(&all, n));
        let matrices = [&self.mix_down, &self.decay_weights.up, &self.output].map(|w| Size::packed(n, 1, w.k()));
        Size::rows(n, self.parts()).and(Size::any(planes).or(Size::any(matrices)))
    }
}

impl Rwkv6 {
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        at: LayerAt,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        stack: &mut Stack<'_>,
    ) {
        let (n, rows, d, stride, rank) = (pass.n, pass.rows, self.c.width, padded(self.c.width), self.mix_up[0].k());
        let low_stride = padded(self.mix_down.rows());
        let [before, out, mixed, low, lows, planes, decays] = stack.rows(n, self.parts());
        let state_at = at.state_at;
        token_shift(x, d, before, pass.states, (states, state_at));
        let before = &*before;
        rows.each(&mut mixed[..n * d], d, &|r, out| mix(out, &x[r * d..][..d], &before[r * d..][..d], &self.lerp_x));
        rows.matrix(&self.mix_down, None, Floats { x: &mixed[..n * d], stride: d }, low, stack);
        rows.each(lows, rank, &|r, to| {
            let from = &low[r % n * low_stride + r / n * rank..][..rank];
            to.iter_mut().zip(from).for_each(|(to, x)| *to = tanh(*x));
        });
        rows.plane_products(&self.mix_products(), n, (lows, rank), (planes, stride), stack);
        rows.each(mixed, d, &|r, out| {
            let (plane, row) = (r / n, r % n);
            let (x, before) = (&x[row * d..][..d], &before[row * d..][..d]);
            let lerp = self.lerp[plane * d..].iter().zip(&planes[r * stride..]);
            for (((out, x), before), (fixed, by_token)) in out.iter_mut().zip(x).zip(before).zip(lerp) {
                *out = (by_token + fixed) * (before - x) + x;
            }
        });
        rows.plane_products(&self.input_products(), n, (mixed, d), (planes, stride), stack);
        let low_rank = self.decay_weights.down.rows();
        rows.each(&mut planes[..n * stride], stride, &|_, row| row[..low_rank].iter_mut().for_each(|x| *x = tanh(*x)));
        rows.matrix(&self.decay_weights.up, None, Floats { x: &planes[..n * stride], stride }, decays, stack);
        rows.each(decays, stride, &|_, row| {
            row.iter_mut().zip(&self.decay).for_each(|(w, fixed)| *w = exp(-exp(*w + fixed)));
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
            bonus: Some(&self.first),
        };
        let dim = self.c.head_dim;
        let heads = LinearHeads { n: self.c.n_head(), dim, step: dim, n_decay: dim };
        let heads_at = state_at + self.c.heads_at();
        linear_attention((rows.cpu, rows.pool), heads, linear_rows, out, pass.states, (states, heads_at));
        let gates = &planes[4 * n * stride..];
        rows.each(out, d, &|r, out| {
            self.norm.run(rows.cpu, dim, out);
            multiply(rows.cpu, out, &gates[r * stride..][..d]);
        });
        pass.trace_stage(Stage::AttnOut, Some(at.index), &mut columns(out, d, 0, d));
        rows.matrix(&self.output, None, Floats { x: out, stride: d }, y, stack);
    }
}
