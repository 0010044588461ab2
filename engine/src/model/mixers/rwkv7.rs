//! Time mix of RWKV 7 (Peng et al., arXiv:2503.14456), where p is the input of the token before:
//!
//! ```text
//! x_i = h + (p - h) * l_i                                    i of r, w, k, v, a, g
//! r, k, v = W_r x_r, W_k x_k, W_v x_v
//! w = exp(-e^-0.5 * sigmoid(w_0 + W_w2 tanh(W_w1 x_w)))
//! a = sigmoid(a_0 + W_a2 (W_a1 x_a));  g = W_g2 sigmoid(W_g1 x_g)
//! v = v + (v of the first layer - v) * sigmoid(v_0 + W_v2 (W_v1 x_v))
//! z = l2(k * k_k);  k = k + (a * (k * k_a) - k * k_a)
//! y = W_o ((norm(wkv7(r, w, k, v, z, a)) + v * sum(r * k * r_k)) * g)
//! ```
//!
//! ARWKV may lack the norm and g.

use alloc::vec::Vec;

use super::low_rank::{LowRank, PlaneProduct};
use super::rwkv::{HeadNorm, RwkvConfig, mix};
use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::elementwise::{Activation, activate, multiply, sigmoid};
use crate::kernels::exp::exp;
use crate::kernels::norm::l2_norm;
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::StateMemory;
use crate::kernels::recurrent::scan::Operand;
use crate::kernels::recurrent::shift::token_shift;
use crate::kernels::recurrent::wkv7::{Wkv7Rows, wkv7};
use crate::kernels::special::tanh;
use crate::model::linear::padded;
use crate::model::memory::{Size, Stack};
use crate::model::pass::{LayerAt, Pass, Stage, SubLayerRows};
use crate::model::rows::columns;
use crate::model::tensors::{Declared, Loaded, Name, matrix, values, vector};

/// Inputs of the time mix: r, w, k, v, a, g; the last one may be missing.
pub(crate) const PARTS: usize = 6;
/// Factor of the logarithm of decays: -exp(-0.5), as RWKV's code has it.
const DECAY: f32 = -0.606531;
/// Least length of a removal key.
const LEAST_LENGTH: f32 = 1e-12;

/// Planes of the first products, and of the second ones, which follow from those of low rank.
const R: usize = 0;
const W: usize = 1;
const K: usize = 2;
const V: usize = 3;
const V_LOW: usize = 4;
const A: usize = 5;
const G: usize = 6;
const FIRST_PLANES: usize = 7;
/// w, v, a, g
const SECOND_PLANES: usize = 4;

/// What is added to decays, and their matrices of low rank; the same of rates and of shares of the first layer's values.
const DECAYS: (Name, [Name; 2]) =
    (Name::weight("time_mix_w0"), [Name::weight("time_mix_w1"), Name::weight("time_mix_w2")]);
const RATES: (Name, [Name; 2]) =
    (Name::weight("time_mix_a0"), [Name::weight("time_mix_a1"), Name::weight("time_mix_a2")]);
const SHARES: (Name, [Name; 2]) =
    (Name::weight("time_mix_v0"), [Name::weight("time_mix_v1"), Name::weight("time_mix_v2")]);
const GATES: [Name; 2] = [Name::weight("time_mix_g1"), Name::weight("time_mix_g2")];
const LERPS: Name = Name::weight("time_mix_lerp_fused");
/// Factors of the removal key, of the key, and of the current token's own value.
const K_K: Name = Name::weight("time_mix_k_k");
const K_A: Name = Name::weight("time_mix_k_a");
const R_K: Name = Name::weight("time_mix_r_k");
/// A tensor that all layers with a time mix have.
pub(crate) const KEY: Name = Name::weight("time_mix_key");
const VALUE: Name = Name::weight("time_mix_value");
const RECEPTANCE: Name = Name::weight("time_mix_receptance");
const OUTPUT: Name = Name::weight("time_mix_output");

/// Declares the tensors of a layer of a model of width `d`.
pub(crate) fn tensors(t: &mut Declared<'_>, d: usize) {
    for (bias, weights) in [DECAYS, RATES] {
        t.required(bias, vector(d));
        LowRank::tensors(t, weights, true, d);
    }
    t.optional(SHARES.0, vector(d));
    LowRank::tensors(t, SHARES.1, false, d);
    LowRank::tensors(t, GATES, false, d);
    // without g, one part less
    t.required_by(LERPS, move |dims| values(d, if dims.contains(&(PARTS as u64 - 1)) { PARTS - 1 } else { PARTS }));
    [K_K, K_A, R_K].into_iter().for_each(|factor| t.required(factor, vector(d)));
    [KEY, VALUE, RECEPTANCE].into_iter().for_each(|input| t.required(input, matrix(d, d)));
    HeadNorm::tensors(t, false, d);
    t.required(OUTPUT, matrix(d, d));
}

/// Weights of a time mix.
pub(crate) struct Rwkv7 {
    c: RwkvConfig,
    /// Share of the token before in the inputs (5 or 6, n_embd).
    lerp: Vec<f32>,
    receptance: Matrix,
    key: Matrix,
    value: Matrix,
    /// Decays, and what is added to them (n_embd).
    w: (LowRank, Vec<f32>),
    /// Rates.
    a: (LowRank, Vec<f32>),
    /// Share of the first layer's value; `None` in the first layer.
    v: Option<(LowRank, Vec<f32>)>,
    /// Gate of the output.
    g: Option<LowRank>,
    /// Factors (n_embd): of the removal key, of the key, and of the current token's own value.
    k_k: Vec<f32>,
    k_a: Vec<f32>,
    r_k: Vec<f32>,
    norm: Option<HeadNorm>,
    output: Matrix,
}

impl Rwkv7 {
    /// Takes the tensors of a layer; `is_first` if no layer is before it.
    pub(crate) fn load(c: &RwkvConfig, is_first: bool, t: &mut Loaded<'_>) -> Result<Rwkv7, LoadError> {
        let biased = |t: &mut Loaded<'_>, (bias, weights): (Name, [Name; 2])| {
            Ok::<_, LoadError>((LowRank::load(t, weights)?, t.required(bias)?))
        };
        let lerp = t.required(LERPS)?;
        let has_gate = t.has(GATES[0]) || lerp.len() == PARTS * c.width;
        // files have these tensors in the first layer too, where they are not used
        let v = if !is_first || t.has(SHARES.1[0]) { Some(biased(t, SHARES)?) } else { None };
        Ok(Rwkv7 {
            c: *c,
            lerp,
            receptance: t.matrix(RECEPTANCE)?,
            key: t.matrix(KEY)?,
            value: t.matrix(VALUE)?,
            w: biased(t, DECAYS)?,
            a: biased(t, RATES)?,
            v: v.filter(|_| !is_first),
            g: if has_gate { Some(LowRank::load(t, GATES)?) } else { None },
            k_k: t.required(K_K)?,
            k_a: t.required(K_A)?,
            r_k: t.required(R_K)?,
            norm: HeadNorm::load(t)?,
            output: t.matrix(OUTPUT)?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        let low_ranks = [&self.w.0, &self.a.0].into_iter().chain(self.v.as_ref().map(|(v, _)| v)).chain(&self.g);
        let all = low_ranks.flat_map(LowRank::matrices);
        all.chain([&self.receptance, &self.key, &self.value, &self.output]).collect()
    }

    /// Floats of a row: removal keys, output, mixed inputs, planes of the first products and of the second ones.
    fn parts(&self) -> [usize; 5] {
        let d = self.c.width;
        [d, d, self.lerp.len(), FIRST_PLANES * padded(d), SECOND_PLANES * padded(d)]
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        let planes = [self.first(), self.second()].map(|all| PlaneProduct::size(&all, n));
        Size::rows(n, self.parts()).and(Size::any(planes).or(Size::packed(n, 1, self.output.k())))
    }

    /// The first products, of the mixed inputs.
    fn first(&self) -> Vec<PlaneProduct<'_>> {
        let product = |w, from, to| Some(PlaneProduct { w, from, to });
        let all = [
            product(&self.receptance, 0, R),
            product(&self.w.0.down, 1, W),
            product(&self.key, 2, K),
            product(&self.value, 3, V),
            self.v.as_ref().and_then(|(v, _)| product(&v.down, 3, V_LOW)),
            product(&self.a.0.down, 4, A),
            self.g.as_ref().and_then(|g| product(&g.down, 5, G)),
        ];
        all.into_iter().flatten().collect()
    }

    /// The second products, of the planes of low rank.
    fn second(&self) -> Vec<PlaneProduct<'_>> {
        let product = |w, from, to| Some(PlaneProduct { w, from, to });
        let all = [
            product(&self.w.0.up, W, 0),
            self.v.as_ref().and_then(|(v, _)| product(&v.up, V_LOW, 1)),
            product(&self.a.0.up, A, 2),
            self.g.as_ref().and_then(|g| product(&g.up, G, 3)),
        ];
        all.into_iter().flatten().collect()
    }
}

/// `x = sigmoid(x + fixed)`.
fn biased_sigmoid(x: &mut [f32], fixed: &[f32]) {
    x.iter_mut().zip(fixed).for_each(|(x, fixed)| *x = sigmoid(*x + fixed));
}

impl Rwkv7 {
    /// `y = time_mix(x)`. The first layer writes its values to `first_values`, (rows, n_embd), which later layers read.
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        at: LayerAt,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        (states, first_values): (&mut StateMemory, &mut [f32]),
        stack: &mut Stack<'_>,
    ) {
        let (n, rows, d, stride, dim) = (pass.n, pass.rows, self.c.width, padded(self.c.width), self.c.head_dim);
        let plane_len = n * stride;
        // the inputs of the tokens before, later the removal keys
        let [removal, out, mixed, first, second] = stack.rows(n, self.parts());
        let state_at = at.state_at;
        token_shift(x, d, removal, pass.states, (states, state_at));
        let before = &*removal;
        rows.each(mixed, d, &|r, out| {
            mix(out, &x[r % n * d..][..d], &before[r % n * d..][..d], &self.lerp[r / n * d..][..d]);
        });
        rows.plane_products(&self.first(), n, (mixed, d), (first, stride), stack);
        let low_rank = self.w.0.down.rows();
        rows.each(&mut first[W * plane_len..][..plane_len], stride, &|_, row| {
            row[..low_rank].iter_mut().for_each(|x| *x = tanh(*x));
        });
        if let Some(g) = &self.g {
            let rank = g.down.rows();
            rows.each(&mut first[G * plane_len..][..plane_len], stride, &|_, row| {
                activate(rows.cpu, Activation::Sigmoid, &mut row[..rank]);
            });
        }
        rows.plane_products(&self.second(), n, (first, stride), (second, stride), stack);
        let (w, rest) = second.split_at_mut(plane_len);
        let (shares, rest) = rest.split_at_mut(plane_len);
        let (rates, gates) = rest.split_at_mut(plane_len);
        rows.each(w, stride, &|_, row| {
            row.iter_mut().zip(&self.w.1).for_each(|(w, fixed)| *w = exp(sigmoid(*w + fixed) * DECAY));
        });
        rows.each(rates, stride, &|_, row| biased_sigmoid(row, &self.a.1));
        let (r_to_w, rest) = first.split_at_mut(K * plane_len);
        let (keys, rest) = rest.split_at_mut(plane_len);
        let values = &mut rest[..plane_len];
        match &self.v {
            Some((_, fixed)) => {
                rows.each(shares, stride, &|_, row| biased_sigmoid(row, fixed));
                rows.each(values, stride, &|r, row| {
                    let shares = &shares[r * stride..][..d];
                    for ((v, first), share) in row.iter_mut().zip(&first_values[r * d..][..d]).zip(shares) {
                        *v += (first - *v) * share;
                    }
                });
            }
            None => {
                let values = &*values;
                rows.each(&mut first_values[..n * d], d, &|r, to| to.copy_from_slice(&values[r * stride..][..d]));
            }
        }
        rows.each(removal, d, &|r, to| {
            for ((to, k), factor) in to.iter_mut().zip(&keys[r * stride..][..d]).zip(&self.k_k) {
                *to = k * factor;
            }
            to.chunks_exact_mut(dim).for_each(|head| l2_norm(rows.cpu, head, LEAST_LENGTH, 1.0));
        });
        rows.each(keys, stride, &|r, row| {
            for ((k, rate), factor) in row.iter_mut().zip(&rates[r * stride..][..d]).zip(&self.k_a) {
                let part = *k * factor;
                *k += rate * part - part;
            }
        });
        let operand = |x| Operand { x, stride, at: 0 };
        let (receptance, keys, values) = (&r_to_w[..plane_len], &*keys, &*values);
        let wkv_rows = Wkv7Rows {
            r: operand(receptance),
            w: operand(w),
            k: operand(keys),
            v: operand(values),
            z: Operand { x: removal, stride: d, at: 0 },
            a: operand(rates),
        };
        let (size, heads_at) = ((self.c.n_head(), dim), state_at + self.c.heads_at());
        wkv7((rows.cpu, rows.pool), size, wkv_rows, out, pass.states, (states, heads_at));
        rows.each(out, d, &|row, out| {
            if let Some(norm) = &self.norm {
                norm.run(rows.cpu, dim, out);
            }
            let at = row * stride;
            for (h, head) in out.chunks_exact_mut(dim).enumerate() {
                let at = at + h * dim;
                let products = receptance[at..].iter().zip(&keys[at..]).zip(&self.r_k[h * dim..][..dim]);
                let own = products.fold(0.0, |sum, ((r, k), factor)| sum + (k * r) * factor);
                head.iter_mut().zip(&values[at..]).for_each(|(out, v)| *out += v * own);
            }
            if self.g.is_some() {
                multiply(rows.cpu, out, &gates[at..][..d]);
            }
        });
        pass.trace_stage(Stage::AttnOut, Some(at.index), &mut columns(out, d, 0, d));
        rows.matrix(&self.output, None, Floats { x: out, stride: d }, y, stack);
    }
}
