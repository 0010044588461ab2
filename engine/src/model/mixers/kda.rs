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
use crate::model::config::Config;
use crate::model::forward::Stage;
use crate::model::keys::Keys;
use crate::model::keys::MAX_WIDTH;
use crate::model::loader::LoadedTensors;
use crate::model::mixers::low_rank::{down, rank};
use crate::model::mixers::{MAX_CONV, RecurrentConfig};
use crate::model::residual::orders::{ForwardPass, SubLayerRows};
use crate::model::roles::{Layout, Part, Role, Scope, TensorRow, matrix, tensor_error, values, vector};
use crate::model::rows::columns;
use crate::model::scratch::StepScratch;
use crate::model::weights::{Linear, LinearGroup, Norm, linear, padded, required_norm, transposed};

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

fn config(c: &Config) -> Option<&KdaConfig> {
    match &c.recurrent {
        Some(RecurrentConfig::Kda(c)) => Some(c),
        _ => None,
    }
}

fn square(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    matrix(config(c)?.width(), c.n_embd)
}

fn conv(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    values(config(c)?.conv, config(c)?.width())
}

/// The second matrix of low rank.
fn up(c: &Scope<'_>, dims: &[u64; 4]) -> Option<Role> {
    matrix(config(c)?.width(), rank(c, dims[0]))
}

/// The whole matrix, or the first of two.
fn down_or_whole(c: &Scope<'_>, dims: &[u64; 4]) -> Option<Role> {
    if dims[1] == config(c)?.width() as u64 { square(c, dims) } else { down(c, dims) }
}

const FUSED: &[Layout] = &[(Part::Recurrent, 0)];
const SEPARATE: &[Layout] = &[(Part::Recurrent, 1)];
const BOTH: &[Layout] = &[(Part::Recurrent, 0), (Part::Recurrent, 1)];

/// The tensors of a layer.
pub(crate) const TENSORS: &[TensorRow] = &[
    TensorRow::new("attn_qkv.weight", |c, _| matrix(3 * config(c)?.width(), c.n_embd)).of(FUSED),
    TensorRow::new("attn_q.weight", square).of(SEPARATE),
    TensorRow::new("attn_k.weight", square).of(SEPARATE),
    TensorRow::new("attn_v.weight", square).of(SEPARATE),
    TensorRow::new(MARKER, conv).of(BOTH),
    TensorRow::new("ssm_conv1d_k.weight", conv).of(BOTH),
    TensorRow::new("ssm_conv1d_v.weight", conv).of(BOTH),
    TensorRow::new("ssm_f_a.weight", down_or_whole).of(BOTH),
    TensorRow::new("ssm_f_b.weight", up),
    TensorRow::new("ssm_beta.weight", |c, _| matrix(config(c)?.n_head, c.n_embd)).of(BOTH),
    TensorRow::new("ssm_a", |c, _| values(1, config(c)?.n_head)).of(BOTH),
    TensorRow::new("ssm_dt.bias", |c, _| vector(config(c)?.width())).of(BOTH),
    TensorRow::new("ssm_g_a.weight", down_or_whole),
    TensorRow::new("ssm_g_b.weight", up),
    TensorRow::new("ssm_g.weight", square),
    TensorRow::new("ssm_norm.weight", |c, _| vector(config(c)?.head_dim)).of(BOTH),
    TensorRow::new("attn_output.weight", |c, _| matrix(c.n_embd, config(c)?.width())).of(BOTH),
];

/// Weights of Kimi delta attention.
pub struct Kda {
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
    pub(crate) fn load(c: &KdaConfig, tensors: &mut LoadedTensors, i: usize) -> Result<Kda, LoadError> {
        let name = |part: &str| format!("blk.{i}.{part}");
        let width = c.width();
        let gate = if tensors.has(&name("ssm_g.weight")) { "ssm_g" } else { "ssm_g_a" };
        let is_fused = tensors.has(&name("attn_qkv.weight"));
        let qkv: &[&str] = if is_fused { &["attn_qkv"] } else { &["attn_q", "attn_k", "attn_v"] };
        let mut linears = Vec::new();
        for part in ["ssm_f_a", "ssm_beta", gate].iter().chain(qkv) {
            linears.push(linear(tensors, &name(part))?);
        }
        // a first matrix of low rank needs its second one, a whole matrix must have none
        let second = |tensors: &mut LoadedTensors, first: &Linear, part: &str| {
            let (part, rank) = (name(part), first.w.rows());
            if rank == width && !tensors.has(&part) {
                return Ok(None);
            }
            let up = tensors.matrix(&part)?;
            match up.k() == rank {
                true => Ok(Some(up)),
                false => {
                    let [found, expected] = [up.k(), rank].map(|k| format!("shape [{k}, {width}]"));
                    Err(tensor_error(&part, &found, &expected))
                }
            }
        };
        let f_up = second(tensors, &linears[0], "ssm_f_b.weight")?;
        let g_up = second(tensors, &linears[2], "ssm_g_b.weight")?;
        let [q, k, v] = ["q", "k", "v"].map(|part| transposed(tensors, &name(&format!("ssm_conv1d_{part}.weight"))));
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
            dt: tensors.required(&name("ssm_dt.bias"))?,
            a: tensors.required(&name("ssm_a"))?,
            norm: required_norm(tensors, &name("ssm_norm"))?,
            output: linear(tensors, &name("attn_output"))?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        self.input.matrices().chain(&self.f_up).chain(&self.g_up).chain([&self.output.w]).collect()
    }

    pub(crate) fn widths(&self) -> (Vec<&Matrix>, usize, usize) {
        let (width, low) = (self.c.width(), self.g_up.as_ref().map_or(0, Matrix::k));
        let wide = self.input.stride + 2 * padded(width) + low + (width + self.c.n_head) + width;
        (self.input.matrices().collect(), wide, width.max(low).max(self.f_up.as_ref().map_or(0, Matrix::k)))
    }
}

impl ForwardPass<'_, '_> {
    pub(crate) fn kda(
        &mut self,
        i: usize,
        m: &Kda,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        StepScratch { wide, words, .. }: &mut StepScratch,
    ) {
        let (n, rows, stride, dim, width) = (self.n, self.rows, m.input.stride, m.c.head_dim, m.c.width());
        let n_head = m.c.n_head;
        let (input, rest) = wide.split_at_mut(n * stride);
        let (decays, rest) = rest.split_at_mut(n * padded(width));
        let (gates, rest) = rest.split_at_mut(n * padded(width));
        let (low, rest) = rest.split_at_mut(n * m.g_up.as_ref().map_or(0, Matrix::k));
        let (rates, rest) = rest.split_at_mut(n * (width + n_head));
        let out = &mut rest[..n * width];
        rows.linear_group(&m.input, x, input, words);
        let [beta_at, gate_at] = [m.input.part_starts[1], m.input.part_starts[2]];
        let projected = &*input;
        match &m.f_up {
            // the first part of `input`
            Some(up) => rows.matrix(up, None, Floats { x: projected, stride }, decays, words),
            None => rows
                .each(decays, padded(width), &|r, to| to[..width].copy_from_slice(&projected[r * stride..][..width])),
        }
        match &m.g_up {
            Some(up) => {
                let rank = up.k();
                rows.each(low, rank, &|r, to| to.copy_from_slice(&projected[r * stride + gate_at..][..rank]));
                rows.matrix(up, None, Floats { x: low, stride: rank }, gates, words);
            }
            None => rows.each(gates, padded(width), &|r, to| {
                to[..width].copy_from_slice(&projected[r * stride + gate_at..][..width]);
            }),
        }
        let decays = &*decays;
        rows.each(rates, width + n_head, &|r, to| {
            let (to_decays, to_rates) = to.split_at_mut(width);
            let from = decays[r * padded(width)..].iter().zip(&m.dt);
            for (j, (to, (x, dt))) in to_decays.iter_mut().zip(from).enumerate() {
                *to = m.c.decay(x + dt, m.a[j / dim]);
            }
            let from = &projected[r * stride + beta_at..][..n_head];
            to_rates.iter_mut().zip(from).for_each(|(to, x)| *to = sigmoid(*x));
        });
        let mut state_at = self.model.config.layers[i].state_at;
        for (weights, at) in m.convs.iter().zip(m.qkv_at) {
            let conv = Conv { weights, bias: None, channels: width };
            let conv_rows = ConvRows { x: input, stride, at };
            causal_conv(rows.cpu, rows.pool, conv, conv_rows, self.states, (states, state_at));
            state_at += m.c.conv_state_len();
        }
        let scale = 1.0 / sqrt(dim as f32);
        rows.each(input, stride, &|_, row| {
            for (at, scale) in m.qkv_at.into_iter().zip([Some(scale), Some(1.0), None]) {
                let part = &mut row[at..at + width];
                activate(rows.cpu, Activation::Silu, part);
                if let Some(scale) = scale {
                    part.chunks_exact_mut(dim).for_each(|head| l2_norm_with_eps(rows.cpu, head, m.c.unit_eps, scale));
                }
            }
        });
        let delta_rows = DeltaRows { x: input, stride, at: m.qkv_at, gates: rates, n_decay: width };
        delta_rule((rows.cpu, rows.pool), m.c.heads(), delta_rows, out, self.states, (states, state_at));
        rows.each(gates, padded(width), &|_, row| activate(rows.cpu, Activation::Sigmoid, &mut row[..width]));
        rows.each(out, width, &|r, out| {
            rows.norm_heads(&m.norm, out);
            multiply(rows.cpu, out, &gates[r * padded(width)..][..width]);
        });
        self.trace_stage(Stage::AttnOut, Some(i), &mut columns(out, width, 0, width));
        rows.linear(&m.output, out, y, words);
    }
}
