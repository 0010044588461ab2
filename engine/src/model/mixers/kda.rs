//! Kimi delta attention (Kimi Linear, arXiv:2510.26692): the gated delta rule with a decay for each element of the key.
//!
//! ```text
//! q, k, v = silu(conv(W_q h)), silu(conv(W_k h)), silu(conv(W_v h));  q = l2(q) / sqrt(head_dim);  k = l2(k)
//! f = W_f h + dt;  rate = sigmoid(W_b h);  z = W_g h
//! decay = exp(A * softplus(f)), or with a lower bound L of its logarithm exp(L * sigmoid(|A| * f))
//! y = W_o (norm(delta_rule(q, k, v, decay, rate)) * sigmoid(z))
//! ```
//!
//! W_f and W_g may be products of two matrices of low rank.

use alloc::format;
use alloc::vec::Vec;

use super::kind::MAX_CONV;
use super::low_rank::rank;
use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::elementwise::{Activation, activate, multiply, sigmoid};
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

/// A tensor that only layers of this kind have.
pub(crate) const MARKER: &str = "ssm_conv1d_q.weight";

/// Sizes of Kimi delta attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KdaConfig {
    /// Number of heads.
    pub n_head: usize,
    /// Elements of a key and of a value.
    pub head_dim: usize,
    /// Inputs of the convolution.
    pub conv: usize,
    /// Lower bound of the logarithm of decays, and the factor of A in it.
    pub lower_bound: Option<(f32, f32)>,
    /// Epsilon of unit vectors.
    pub unit_eps: f32,
}

impl KdaConfig {
    pub(crate) fn read(keys: &Keys<'_, '_>, unit_eps: f32) -> Result<KdaConfig, LoadError> {
        let head_dim = keys.size("kda.head_dim", 1..=4096)?;
        let n_head = keys.size("attention.head_count", 1..=MAX_WIDTH / head_dim as u32)?;
        let lower_bound = match keys.f32("kda.gate_lower_bound")? {
            Some(bound) if bound >= 0.0 => {
                return Err(keys.wrong("kda.gate_lower_bound", bound, "a negative number"));
            }
            bound => bound.map(|bound| (bound, -1.0)),
        };
        if lower_bound.is_some() && keys.bool("kda.safe_gate")? == Some(false) {
            return Err(keys.wrong("kda.safe_gate", false, "true, as the file has kda.gate_lower_bound"));
        }
        Ok(KdaConfig { n_head, head_dim, conv: keys.size("ssm.conv_kernel", 1..=MAX_CONV)?, lower_bound, unit_eps })
    }

    /// With a lower bound of decays, the factors A of the file are positive.
    pub(crate) fn state_positive_factors(&mut self) {
        self.lower_bound = self.lower_bound.map(|(bound, _)| (bound, 1.0));
    }

    fn width(&self) -> usize {
        self.n_head * self.head_dim
    }

    fn heads(&self) -> DeltaHeads {
        let (n, dim) = (self.n_head, self.head_dim);
        DeltaHeads { n_key: n, n_value: n, k_dim: dim, v_dim: dim, tiled: false }
    }

    /// Floats of the state of one of the three convolutions.
    fn conv_state_len(&self) -> usize {
        (self.conv - 1).saturating_mul(self.width())
    }

    pub(crate) fn state_len(&self) -> usize {
        let heads = self.width().saturating_mul(self.head_dim);
        self.conv_state_len().saturating_mul(3).saturating_add(heads)
    }

    /// The decay of an element whose input is `x`, in a head with factor `a`.
    fn decay(&self, x: f32, a: f32) -> f32 {
        match self.lower_bound {
            Some((bound, sign)) => exp(sigmoid(x * a * sign) * bound),
            None => exp(softplus(x) * a),
        }
    }
}

const QKV: LinearName = LinearName("attn_qkv");
const SEPARATE: [LinearName; 3] = [LinearName("attn_q"), LinearName("attn_k"), LinearName("attn_v")];
const CONVS: [Name; 3] = [Name::whole(MARKER), Name::weight("ssm_conv1d_k"), Name::weight("ssm_conv1d_v")];
/// The whole matrices, or the first of two of low rank, and the second ones: of decays and of gates.
const DECAYS: LinearName = LinearName("ssm_f_a");
const DECAYS_UP: Name = Name::weight("ssm_f_b");
const LOW_GATES: LinearName = LinearName("ssm_g_a");
const GATES_UP: Name = Name::weight("ssm_g_b");
const GATES: LinearName = LinearName("ssm_g");
const RATES: LinearName = LinearName("ssm_beta");
const A: Name = Name::whole("ssm_a");
const DT: Name = Name::bias("ssm_dt");
const NORM: NormName = NormName("ssm_norm");
const OUTPUT: LinearName = LinearName("attn_output");

impl KdaConfig {
    /// Declares the tensors of a layer of a model of width `d`.
    pub(crate) fn tensors(&self, t: &mut Declared<'_>, d: usize) {
        let width = self.width();
        let down_or_whole = move |dims: &[u64; 4]| match dims[1] == width as u64 {
            true => matrix(width, d),
            false => matrix(rank(dims[1], d), d),
        };
        let up = move |dims: &[u64; 4]| matrix(width, rank(dims[0], d));
        if t.has(QKV.weight()) {
            t.required(QKV.weight(), matrix(3 * width, d));
        } else {
            SEPARATE.into_iter().for_each(|part| t.required(part.weight(), matrix(width, d)));
        }
        CONVS.into_iter().for_each(|conv| t.required(conv, values(self.conv, width)));
        t.required_by(DECAYS.weight(), down_or_whole);
        t.optional_by(DECAYS_UP, up);
        t.required(RATES.weight(), matrix(self.n_head, d));
        t.required(A, values(1, self.n_head));
        t.required(DT, vector(width));
        t.optional_by(LOW_GATES.weight(), down_or_whole);
        t.optional_by(GATES_UP, up);
        t.optional(GATES.weight(), matrix(width, d));
        t.required(NORM.weight(), vector(self.head_dim));
        t.required(OUTPUT.weight(), matrix(d, width));
        t.optional(OUTPUT.bias(), vector(d));
    }
}

/// Weights of Kimi delta attention.
pub(crate) struct Kda {
    c: KdaConfig,
    /// Input of the decays, rates, gates; then queries, keys and values, in one or three matrices.
    input: LinearGroup,
    /// Offsets of queries, keys and values in a row of `input`.
    qkv_at: [usize; 3],
    /// (K, width), of queries, keys and values.
    convs: [Vec<f32>; 3],
    /// The second matrices of low rank of decays and gates.
    f_up: Option<Matrix>,
    g_up: Option<Matrix>,
    /// Added to the input of the decays (width).
    dt: Vec<f32>,
    /// Factor of the decays of a head.
    a: Vec<f32>,
    /// Norm of the output of a head (head_dim).
    norm: Norm,
    output: Linear,
}

impl Kda {
    pub(crate) fn load(c: &KdaConfig, t: &mut Loaded<'_>) -> Result<Kda, LoadError> {
        let width = c.width();
        let gate = if t.has(GATES.weight()) { GATES } else { LOW_GATES };
        let qkv = if t.has(QKV.weight()) { &[QKV][..] } else { &SEPARATE };
        let mut linears = Vec::new();
        for part in [DECAYS, RATES, gate].iter().chain(qkv) {
            linears.push(t.linear(*part)?);
        }
        // a first matrix of low rank needs its second one, a whole matrix must have none
        let second = |t: &mut Loaded<'_>, first: &Linear, name: Name| {
            let rank = first.w.rows();
            if rank == width && !t.has(name) {
                return Ok(None);
            }
            let up = t.matrix(name)?;
            match up.k() == rank {
                true => Ok(Some(up)),
                false => {
                    let [found, expected] = [up.k(), rank].map(|k| format!("shape [{k}, {width}]"));
                    Err(t.error(name, &found, &expected))
                }
            }
        };
        let f_up = second(t, &linears[0], DECAYS_UP)?;
        let g_up = second(t, &linears[2], GATES_UP)?;
        let [q, k, v] = CONVS.map(|conv| t.transposed(conv));
        let input = LinearGroup::separate(linears);
        Ok(Kda {
            c: *c,
            qkv_at: match input.part_starts[3..] {
                [q, k, v] => [q, k, v],
                _ => [0, 1, 2].map(|part| input.part_starts[3] + part * width),
            },
            input,
            convs: [q?, k?, v?],
            f_up,
            g_up,
            dt: t.required(DT)?,
            a: t.required(A)?,
            norm: t.required_norm(NORM)?,
            output: t.linear(OUTPUT)?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        self.input.matrices().chain(&self.f_up).chain(&self.g_up).chain([&self.output.w]).collect()
    }

    /// Floats of a row: inputs, inputs of decays, gates, gates of low rank, decays and rates, output.
    fn parts(&self) -> [usize; 6] {
        let (width, low) = (self.c.width(), self.g_up.as_ref().map_or(0, Matrix::k));
        [self.input.stride, padded(width), padded(width), low, width + self.c.n_head, width]
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        let ups = self.f_up.iter().chain(&self.g_up).map(|up| Size::packed(n, 1, up.k()));
        Size::rows(n, self.parts()).and(self.input.size(n).or(self.output.size(n)).or(Size::any(ups)))
    }
}

impl Kda {
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        at: LayerAt,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        stack: &mut Stack<'_>,
    ) {
        let (n, rows, stride, dim, width) = (pass.n, pass.rows, self.input.stride, self.c.head_dim, self.c.width());
        let n_head = self.c.n_head;
        let [input, decays, gates, low, rates, out] = stack.rows(n, self.parts());
        rows.linear_group(&self.input, x, input, stack);
        let [beta_at, gate_at] = [self.input.part_starts[1], self.input.part_starts[2]];
        let projected = &*input;
        match &self.f_up {
            // the first part of `input`
            Some(up) => rows.matrix(up, None, Floats { x: projected, stride }, decays, stack),
            None => rows
                .each(decays, padded(width), &|r, to| to[..width].copy_from_slice(&projected[r * stride..][..width])),
        }
        match &self.g_up {
            Some(up) => {
                let rank = up.k();
                rows.each(low, rank, &|r, to| to.copy_from_slice(&projected[r * stride + gate_at..][..rank]));
                rows.matrix(up, None, Floats { x: low, stride: rank }, gates, stack);
            }
            None => rows.each(gates, padded(width), &|r, to| {
                to[..width].copy_from_slice(&projected[r * stride + gate_at..][..width]);
            }),
        }
        let decays = &*decays;
        rows.each(rates, width + n_head, &|r, to| {
            let (to_decays, to_rates) = to.split_at_mut(width);
            let from = decays[r * padded(width)..].iter().zip(&self.dt);
            for (j, (to, (x, dt))) in to_decays.iter_mut().zip(from).enumerate() {
                *to = self.c.decay(x + dt, self.a[j / dim]);
            }
            let from = &projected[r * stride + beta_at..][..n_head];
            to_rates.iter_mut().zip(from).for_each(|(to, x)| *to = sigmoid(*x));
        });
        let mut state_at = at.state_at;
        for (weights, at) in self.convs.iter().zip(self.qkv_at) {
            let conv = Conv { weights, bias: None, channels: width };
            let conv_rows = ConvRows { x: input, stride, at };
            causal_conv(rows.cpu, rows.pool, conv, conv_rows, pass.states, (states, state_at));
            state_at += self.c.conv_state_len();
        }
        let scale = 1.0 / sqrt(dim as f32);
        rows.each(input, stride, &|_, row| {
            for (at, scale) in self.qkv_at.into_iter().zip([Some(scale), Some(1.0), None]) {
                let part = &mut row[at..at + width];
                activate(rows.cpu, Activation::Silu, part);
                if let Some(scale) = scale {
                    part.chunks_exact_mut(dim)
                        .for_each(|head| l2_norm_with_eps(rows.cpu, head, self.c.unit_eps, scale));
                }
            }
        });
        let delta_rows = DeltaRows { x: input, stride, at: self.qkv_at, gates: rates, n_decay: width };
        delta_rule((rows.cpu, rows.pool), self.c.heads(), delta_rows, out, pass.states, (states, state_at));
        rows.each(gates, padded(width), &|_, row| activate(rows.cpu, Activation::Sigmoid, &mut row[..width]));
        rows.each(out, width, &|r, out| {
            rows.norm_heads(&self.norm, out);
            multiply(rows.cpu, out, &gates[r * padded(width)..][..width]);
        });
        pass.trace_stage(Stage::AttnOut, Some(at.index), &mut columns(out, width, 0, width));
        rows.linear(&self.output, out, y, stack);
    }
}
