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

use alloc::format;
use alloc::vec::Vec;

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
use crate::model::forward::Stage;
use crate::model::loader::LoadedTensors;
use crate::model::mixers::low_rank::{LowRank, PlaneProduct, down, up};
use crate::model::mixers::rwkv::{
    CHANNEL_MIX, CHANNEL_MIX_KEY, HeadNorm, RwkvConfig, channel_key, channel_value, channel_vector, mix,
};
use crate::model::residual::orders::{ForwardPass, SubLayerRows};
use crate::model::roles::{Layout, Part, Role, Scope, TensorRow, matrix, values, vector};
use crate::model::rows::columns;
use crate::model::scratch::StepScratch;
use crate::model::weights::padded;

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

const REQUIRED: &[Layout] = &[(Part::Recurrent, 0)];

fn wide(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    vector(c.n_embd)
}

fn square(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    matrix(c.n_embd, c.n_embd)
}

/// The tensors of a layer.
pub(crate) const TENSORS: &[TensorRow] = &[
    TensorRow::new("time_mix_w0.weight", wide).of(REQUIRED),
    TensorRow::new("time_mix_w1.weight", down).of(REQUIRED),
    TensorRow::new("time_mix_w2.weight", up).of(REQUIRED),
    TensorRow::new("time_mix_a0.weight", wide).of(REQUIRED),
    TensorRow::new("time_mix_a1.weight", down).of(REQUIRED),
    TensorRow::new("time_mix_a2.weight", up).of(REQUIRED),
    TensorRow::new("time_mix_v0.weight", wide),
    TensorRow::new("time_mix_v1.weight", down),
    TensorRow::new("time_mix_v2.weight", up),
    TensorRow::new("time_mix_g1.weight", down),
    TensorRow::new("time_mix_g2.weight", up),
    // without g, one part less
    TensorRow::new("time_mix_lerp_fused.weight", |c, dims| {
        values(c.n_embd, if dims.contains(&(PARTS as u64 - 1)) { PARTS - 1 } else { PARTS })
    })
    .of(REQUIRED),
    TensorRow::new("time_mix_k_k.weight", wide).of(REQUIRED),
    TensorRow::new("time_mix_k_a.weight", wide).of(REQUIRED),
    TensorRow::new("time_mix_r_k.weight", wide).of(REQUIRED),
    TensorRow::new("time_mix_key.weight", square).of(REQUIRED),
    TensorRow::new("time_mix_value.weight", square).of(REQUIRED),
    TensorRow::new("time_mix_receptance.weight", square).of(REQUIRED),
    TensorRow::new("time_mix_ln.weight", wide),
    TensorRow::new("time_mix_ln.bias", wide),
    TensorRow::new("time_mix_output.weight", square).of(REQUIRED),
    TensorRow::new("channel_mix_lerp_k.weight", channel_vector).of(CHANNEL_MIX),
    TensorRow::new(CHANNEL_MIX_KEY, channel_key).of(CHANNEL_MIX),
    TensorRow::new("channel_mix_value.weight", channel_value).of(CHANNEL_MIX),
];

/// Weights of a time mix.
pub struct Rwkv7 {
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
    pub(crate) fn load(c: &RwkvConfig, tensors: &mut LoadedTensors, i: usize) -> Result<Rwkv7, LoadError> {
        let name = |part: &str| format!("blk.{i}.time_mix_{part}.weight");
        let low_rank = |tensors: &mut LoadedTensors, part: &str| {
            LowRank::load(tensors, &name(&format!("{part}1")), &name(&format!("{part}2")))
        };
        let biased = |tensors: &mut LoadedTensors, part: &str| {
            Ok::<_, LoadError>((low_rank(tensors, part)?, tensors.required(&name(&format!("{part}0")))?))
        };
        let lerp = tensors.required(&name("lerp_fused"))?;
        let has_gate = tensors.has(&name("g1")) || lerp.len() == PARTS * c.width;
        // files have these tensors in the first layer too, where they are not used
        let v = if i > 0 || tensors.has(&name("v1")) { Some(biased(tensors, "v")?) } else { None };
        Ok(Rwkv7 {
            c: *c,
            lerp,
            receptance: tensors.matrix(&name("receptance"))?,
            key: tensors.matrix(&name("key"))?,
            value: tensors.matrix(&name("value"))?,
            w: biased(tensors, "w")?,
            a: biased(tensors, "a")?,
            v: v.filter(|_| i > 0),
            g: if has_gate { Some(low_rank(tensors, "g")?) } else { None },
            k_k: tensors.required(&name("k_k"))?,
            k_a: tensors.required(&name("k_a"))?,
            r_k: tensors.required(&name("r_k"))?,
            norm: HeadNorm::load(tensors, i)?,
            output: tensors.matrix(&name("output"))?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        let low_ranks = [&self.w.0, &self.a.0].into_iter().chain(self.v.as_ref().map(|(v, _)| v)).chain(&self.g);
        let all = low_ranks.flat_map(LowRank::matrices);
        all.chain([&self.receptance, &self.key, &self.value, &self.output]).collect()
    }

    pub(crate) fn widths(&self) -> (Vec<&Matrix>, usize, usize) {
        let d = self.c.width;
        (self.matrices(), (PARTS + 2) * d + (FIRST_PLANES + SECOND_PLANES) * padded(d), d)
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

impl ForwardPass<'_, '_> {
    pub(crate) fn rwkv7(
        &mut self,
        i: usize,
        m: &Rwkv7,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        StepScratch { wide, words, first_values, .. }: &mut StepScratch,
    ) {
        let (n, rows, d, stride, dim) = (self.n, self.rows, m.c.width, padded(m.c.width), m.c.head_dim);
        let plane_len = n * stride;
        // the inputs of the tokens before, later the removal keys
        let (removal, rest) = wide.split_at_mut(n * d);
        let (out, rest) = rest.split_at_mut(n * d);
        let (mixed, rest) = rest.split_at_mut(n * m.lerp.len());
        let (first, rest) = rest.split_at_mut(FIRST_PLANES * plane_len);
        let second = &mut rest[..SECOND_PLANES * plane_len];
        let state_at = self.model.config.layers[i].state_at;
        token_shift(x, d, removal, self.states, (states, state_at));
        let before = &*removal;
        rows.each(mixed, d, &|r, out| {
            mix(out, &x[r % n * d..][..d], &before[r % n * d..][..d], &m.lerp[r / n * d..][..d]);
        });
        rows.plane_products(&m.first(), n, (mixed, d), (first, stride), words);
        let low_rank = m.w.0.down.rows();
        rows.each(&mut first[W * plane_len..][..plane_len], stride, &|_, row| {
            row[..low_rank].iter_mut().for_each(|x| *x = tanh(*x));
        });
        if let Some(g) = &m.g {
            let rank = g.down.rows();
            rows.each(&mut first[G * plane_len..][..plane_len], stride, &|_, row| {
                activate(rows.cpu, Activation::Sigmoid, &mut row[..rank]);
            });
        }
        rows.plane_products(&m.second(), n, (first, stride), (second, stride), words);
        let (w, rest) = second.split_at_mut(plane_len);
        let (shares, rest) = rest.split_at_mut(plane_len);
        let (rates, gates) = rest.split_at_mut(plane_len);
        rows.each(w, stride, &|_, row| {
            row.iter_mut().zip(&m.w.1).for_each(|(w, fixed)| *w = exp(sigmoid(*w + fixed) * DECAY));
        });
        rows.each(rates, stride, &|_, row| biased_sigmoid(row, &m.a.1));
        let (r_to_w, rest) = first.split_at_mut(K * plane_len);
        let (keys, rest) = rest.split_at_mut(plane_len);
        let values = &mut rest[..plane_len];
        match &m.v {
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
            for ((to, k), factor) in to.iter_mut().zip(&keys[r * stride..][..d]).zip(&m.k_k) {
                *to = k * factor;
            }
            to.chunks_exact_mut(dim).for_each(|head| l2_norm(rows.cpu, head, LEAST_LENGTH, 1.0));
        });
        rows.each(keys, stride, &|r, row| {
            for ((k, rate), factor) in row.iter_mut().zip(&rates[r * stride..][..d]).zip(&m.k_a) {
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
        let (size, heads_at) = ((m.c.n_head(), dim), state_at + m.c.heads_at());
        wkv7((rows.cpu, rows.pool), size, wkv_rows, out, self.states, (states, heads_at));
        rows.each(out, d, &|row, out| {
            if let Some(norm) = &m.norm {
                norm.run(rows.cpu, dim, out);
            }
            let at = row * stride;
            for (h, head) in out.chunks_exact_mut(dim).enumerate() {
                let at = at + h * dim;
                let products = receptance[at..].iter().zip(&keys[at..]).zip(&m.r_k[h * dim..][..dim]);
                let own = products.fold(0.0, |sum, ((r, k), factor)| sum + (k * r) * factor);
                head.iter_mut().zip(&values[at..]).for_each(|(out, v)| *out += v * own);
            }
            if m.g.is_some() {
                multiply(rows.cpu, out, &gates[at..][..d]);
            }
        });
        self.trace_stage(Stage::AttnOut, Some(i), &mut columns(out, d, 0, d));
        rows.matrix(&m.output, None, Floats { x: out, stride: d }, y, words);
    }
}
