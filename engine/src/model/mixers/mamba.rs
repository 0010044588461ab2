//! State-space mixers: Mamba (Gu and Dao, arXiv:2312.00752) and Mamba 2 (arXiv:2405.21060).
//!
//! ```text
//! Mamba:    x, z = W_in u;  x = silu(conv(x));  t, B, C = W_x x;  t = softplus(W_t norm(t) + b_t)
//! PLaMo 2:  as Mamba, but W_in gives z and x of each head, W_x gives B, C, t, and the channels of a head share t, A and D
//! Mamba 2:  z, x, B, C, t = W_in u;  x, B, C = silu(conv(x, B, C));  t = softplus(t + b_t)
//! y = W_out norm((scan(x, t, A, B, C) + D * x) * silu(z))
//! ```
//!
//! Norms that a model does not have are skipped. Mamba 2 normalises the channels of a group together.

use alloc::format;
use alloc::vec::Vec;

use super::kind::MAX_CONV;
use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::elementwise::{Activation, activate, gated};
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::conv::{Conv, ConvRows, causal_conv};
use crate::kernels::recurrent::scan::{Operand, ScanRows, ScanSize, selective_scan};
use crate::kernels::recurrent::{StateMemory, softplus};
use crate::model::keys::{Keys, MAX_WIDTH};
use crate::model::linear::{Linear, LinearGroup, Norm, padded};
use crate::model::memory::{Size, Stack};
use crate::model::pass::{LayerAt, Pass, Stage, SubLayerRows};
use crate::model::rows::columns;
use crate::model::tensors::{Declared, LinearName, Loaded, Name, NormName, Shape, matrix, values, vector};

/// Most values of the state of a channel.
const MAX_STATE: u32 = 4096;

/// Sizes of a Mamba or Mamba 2 mixer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MambaConfig {
    /// Channels, heads and groups. Mamba has heads of one channel and one group.
    pub size: ScanSize,
    /// Inputs of the convolution.
    pub conv: usize,
    /// Mamba: rank of the projection of the steps. `None` in Mamba 2.
    pub step_rank: Option<usize>,
    /// Whether steps, B and C are normalised without weights (Falcon Mamba).
    pub plain_norms: bool,
    /// Whether the projections are those of PLaMo 2.
    pub by_heads: bool,
}

impl MambaConfig {
    pub(crate) fn read(keys: &Keys<'_, '_>, is_mamba2: bool) -> Result<MambaConfig, LoadError> {
        let (channels, n_state, rank, conv) = MambaConfig::sizes(keys)?;
        if !is_mamba2 {
            let size = ScanSize { channels, per_head: 1, per_group: channels, n_state };
            let plain_norms = keys.bool("ssm.dt_b_c_rms")?.unwrap_or(false);
            return Ok(MambaConfig { size, conv, step_rank: Some(rank), plain_norms, by_heads: false });
        }
        let n_group = keys.u32("ssm.group_count")?;
        let n_group = keys.in_range("ssm.group_count", n_group.or(Some(1)), 1..=rank as u32)?;
        MambaConfig::of_heads(keys, n_group)
    }

    /// The layers of PLaMo 2, in a model of width `n_embd`.
    pub(crate) fn by_heads(keys: &Keys<'_, '_>, n_embd: usize) -> Result<MambaConfig, LoadError> {
        let step_rank = Some((n_embd / 16).max(64));
        Ok(MambaConfig { step_rank, by_heads: true, ..MambaConfig::of_heads(keys, 1)? })
    }

    /// Channels, values of the state of a channel, rank or heads of the steps, inputs of the convolution.
    fn sizes(keys: &Keys<'_, '_>) -> Result<(usize, usize, usize, usize), LoadError> {
        let channels = keys.size("ssm.inner_size", 1..=MAX_WIDTH)?;
        let n_state = keys.size("ssm.state_size", 1..=MAX_STATE)?;
        let rank = keys.size("ssm.time_step_rank", 1..=channels as u32)?;
        Ok((channels, n_state, rank, keys.size("ssm.conv_kernel", 1..=MAX_CONV)?))
    }

    fn of_heads(keys: &Keys<'_, '_>, n_group: usize) -> Result<MambaConfig, LoadError> {
        let (channels, n_state, n_head, conv) = MambaConfig::sizes(keys)?;
        if !channels.is_multiple_of(n_head) || channels == n_head {
            let expected = format!("a larger multiple of ssm.time_step_rank, {n_head}");
            return Err(keys.wrong("ssm.inner_size", channels, expected));
        }
        if !n_head.is_multiple_of(n_group) {
            return Err(keys.wrong("ssm.time_step_rank", n_head, format!("a multiple of ssm.group_count, {n_group}")));
        }
        if n_group * n_state > MAX_WIDTH as usize {
            return Err(keys.wrong("ssm.group_count", n_group, format!("at most {}", MAX_WIDTH as usize / n_state)));
        }
        let size = ScanSize { channels, per_head: channels / n_head, per_group: channels / n_group, n_state };
        Ok(MambaConfig { size, conv, step_rank: None, plain_norms: false, by_heads: false })
    }

    fn n_head(&self) -> usize {
        self.size.channels / self.size.per_head
    }

    /// Width of B and of C.
    fn group_width(&self) -> usize {
        self.size.channels / self.size.per_group * self.size.n_state
    }

    /// Channels of the convolution: x, and in Mamba 2 B and C.
    fn conv_channels(&self) -> usize {
        let shared = if self.step_rank.is_some() { 0 } else { 2 * self.group_width() };
        self.size.channels + shared
    }

    /// Rows of the input projection.
    fn input_width(&self) -> usize {
        let steps = if self.step_rank.is_some() { 0 } else { self.n_head() };
        self.size.channels + self.conv_channels() + steps
    }

    fn conv_state_len(&self) -> usize {
        (self.conv - 1).saturating_mul(self.conv_channels())
    }

    pub(crate) fn state_len(&self) -> usize {
        self.conv_state_len().saturating_add(self.size.state_len())
    }
}

pub(crate) const STEPS: LinearName = LinearName("ssm_x");
const STEP_HEADS: Name = Name::weight("ssm_dt");
const INPUT: LinearName = LinearName("ssm_in");
pub(crate) const CONV: LinearName = LinearName("ssm_conv1d");
const DT: Name = Name::bias("ssm_dt");
const A: Name = Name::whole("ssm_a");
const D: Name = Name::whole("ssm_d");
const NORM: NormName = NormName("ssm_norm");
/// Norms of steps, B and C.
const STEP_NORMS: [NormName; 3] = [NormName("ssm_dt_norm"), NormName("ssm_b_norm"), NormName("ssm_c_norm")];
const OUTPUT: LinearName = LinearName("ssm_out");

impl MambaConfig {
    /// Declares the tensors of a layer of a model of width `d`.
    pub(crate) fn tensors(&self, t: &mut Declared<'_>, d: usize) {
        let (channels, n_head, n_state) = (self.size.channels, self.n_head(), self.size.n_state);
        if let Some(rank) = self.step_rank {
            t.required(STEPS.weight(), matrix(rank + 2 * n_state, channels));
            t.required(STEP_HEADS, matrix(n_head, rank));
            for (norm, width) in STEP_NORMS.into_iter().zip([rank, n_state, n_state]) {
                t.optional(norm.weight(), vector(width));
                // the names in files of PLaMo 2
                t.optional(norm.bare(), vector(width));
            }
        }
        t.required(INPUT.weight(), matrix(self.input_width(), d));
        t.required(CONV.weight(), values(self.conv, self.conv_channels()));
        t.optional(CONV.bias(), vector(self.conv_channels()));
        t.required(DT, vector(n_head));
        t.required(
            A,
            match self.step_rank {
                Some(_) if self.by_heads => vector(n_head),
                Some(_) => values(n_state, channels),
                None => values(1, n_head),
            },
        );
        t.required(D, if self.step_rank.is_some() { vector(n_head) } else { values(1, n_head) });
        let per_group = self.size.per_group;
        t.optional(NORM.weight(), Shape::HeadNorm { n_head: channels / per_group, head_dim: per_group });
        t.required(OUTPUT.weight(), matrix(d, channels));
    }
}

/// Weights of a Mamba or Mamba 2 mixer.
pub(crate) struct Mamba {
    c: MambaConfig,
    input: LinearGroup,
    /// (K, channels of the convolution)
    conv: Vec<f32>,
    conv_bias: Option<Vec<f32>>,
    /// Mamba: the projections that give steps, B and C.
    steps: Option<StepWeights>,
    /// Added to the steps (heads).
    dt: Vec<f32>,
    /// (heads); Mamba: (n_state, channels).
    a: Vec<f32>,
    /// (heads)
    d: Vec<f32>,
    /// Norm of the output of each group.
    norm: Option<Norm>,
    output: Linear,
}

/// Projections of Mamba that depend on the token.
struct StepWeights {
    /// (rank + 2 n_state, channels): steps, B and C.
    x: Linear,
    /// (heads, rank)
    dt: Matrix,
    /// Norms of steps, B and C.
    norms: [Option<Norm>; 3],
}

impl StepWeights {
    fn load(c: &MambaConfig, rank: usize, t: &mut Loaded<'_>) -> Result<StepWeights, LoadError> {
        let mut norms = [None, None, None];
        let widths = [rank, c.size.n_state, c.size.n_state];
        for (to, (name, width)) in norms.iter_mut().zip(STEP_NORMS.into_iter().zip(widths)) {
            *to = t.norm(name)?.or_else(|| c.plain_norms.then(|| Norm::plain(width)));
        }
        Ok(StepWeights { x: t.linear(STEPS)?, dt: t.matrix(STEP_HEADS)?, norms })
    }
}

impl Mamba {
    pub(crate) fn load(c: &MambaConfig, t: &mut Loaded<'_>) -> Result<Mamba, LoadError> {
        let steps = match c.step_rank {
            Some(rank) => Some(StepWeights::load(c, rank, t)?),
            None => None,
        };
        Ok(Mamba {
            c: *c,
            input: LinearGroup::separate([t.linear(INPUT)?].into()),
            conv: t.transposed(CONV.weight())?,
            conv_bias: t.optional(CONV.bias()),
            steps,
            dt: t.required(DT)?,
            a: if c.size.per_head > 1 { t.required(A)? } else { t.transposed(A)? },
            d: t.required(D)?,
            norm: t.norm(NORM)?,
            output: t.linear(OUTPUT)?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        let steps = self.steps.iter().flat_map(|s| [&s.x.w, &s.dt]);
        self.input.matrices().chain(steps).chain([&self.output.w]).collect()
    }

    /// Floats of a row: inputs; steps, B and C of Mamba; steps of the heads; output.
    fn parts(&self) -> [usize; 4] {
        let [low, steps] = match &self.steps {
            Some(s) => [padded(s.x.w.rows()), padded(self.c.n_head())],
            None => [0, self.c.n_head()],
        };
        [self.input.stride, low, steps, self.c.size.channels]
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        let steps = self.steps.as_ref().map(|s| s.x.size(n).or(Size::packed(n, 1, s.dt.k())));
        let products = self.input.size(n).or(self.output.size(n)).or(steps.unwrap_or_default());
        Size::rows(n, self.parts()).and(products)
    }
}

impl Mamba {
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        at: LayerAt,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        stack: &mut Stack<'_>,
    ) {
        let (n, rows, size, stride) = (pass.n, pass.rows, self.c.size, self.input.stride);
        let (channels, conv_channels) = (size.channels, self.c.conv_channels());
        // in Mamba x comes first, then z; in Mamba 2 z comes first
        let (x_at, z_at) = if self.steps.is_some() { (0, channels) } else { (channels, 0) };
        let [input, low, dt, out] = stack.rows(n, self.parts());
        rows.linear_group(&self.input, x, input, stack);
        if self.c.by_heads {
            self.split_heads(pass, input, out);
        }
        let state_at = at.state_at;
        let conv = Conv { weights: &self.conv, bias: self.conv_bias.as_deref(), channels: conv_channels };
        let conv_rows = ConvRows { x: input, stride, at: x_at };
        causal_conv(rows.cpu, rows.pool, conv, conv_rows, pass.states, (states, state_at));
        rows.each(input, stride, &|_, row| {
            activate(rows.cpu, Activation::Silu, &mut row[x_at..x_at + conv_channels]);
        });
        let operand = |x, stride, at| Operand { x, stride, at };
        let scan_rows = match &self.steps {
            Some(s) => {
                let (low_stride, rank) = (padded(s.x.w.rows()), s.dt.k());
                let dt_stride = padded(self.c.n_head());
                rows.matrix(&s.x.w, s.x.bias.as_deref(), Floats { x: input, stride }, low, stack);
                rows.each(low, low_stride, &|_, row| {
                    if self.c.by_heads {
                        row[..rank + 2 * size.n_state].rotate_right(rank);
                    }
                    let (steps, shared) = row.split_at_mut(rank);
                    let (b, c) = shared.split_at_mut(size.n_state);
                    for (norm, part) in s.norms.iter().zip([steps, b, &mut c[..size.n_state]]) {
                        norm.iter().for_each(|norm| rows.norm_heads(norm, part));
                    }
                });
                rows.matrix(&s.dt, None, Floats { x: low, stride: low_stride }, dt, stack);
                rows.each(dt, dt_stride, &|_, row| {
                    row.iter_mut().zip(&self.dt).for_each(|(t, bias)| *t = softplus(*t + bias));
                });
                ScanRows {
                    x: operand(input, stride, x_at),
                    b: operand(low, low_stride, rank),
                    c: operand(low, low_stride, rank + size.n_state),
                    dt: operand(dt, dt_stride, 0),
                    a: &self.a,
                }
            }
            None => {
                let (n_head, b_at) = (self.c.n_head(), x_at + channels);
                let projected = &*input;
                rows.each(dt, n_head, &|r, row| {
                    let from = &projected[r * stride + x_at + conv_channels..][..n_head];
                    for ((to, t), bias) in row.iter_mut().zip(from).zip(&self.dt) {
                        *to = softplus(t + bias);
                    }
                });
                ScanRows {
                    x: operand(input, stride, x_at),
                    b: operand(input, stride, b_at),
                    c: operand(input, stride, b_at + self.c.group_width()),
                    dt: operand(dt, n_head, 0),
                    a: &self.a,
                }
            }
        };
        let scan_state = (states, state_at + self.c.conv_state_len());
        selective_scan((rows.cpu, rows.pool), size, scan_rows, out, pass.states, scan_state);
        let scanned = &*out;
        rows.each(input, stride, &|r, row| {
            let out = &scanned[r * channels..][..channels];
            let x: &mut [f32] = &mut row[x_at..x_at + channels];
            for ((x, out), d) in x.iter_mut().zip(out).zip(self.d.iter().flat_map(|d| repeat(d, size.per_head))) {
                *x = out + *x * d;
            }
            let (first, second) = row.split_at_mut(channels);
            let (x, z) = if x_at == 0 { (first, &mut second[..channels]) } else { (&mut second[..channels], first) };
            gated(rows.cpu, Activation::Silu, z, x);
            self.norm.iter().for_each(|norm| rows.norm_heads(norm, z));
        });
        let gated = &*input;
        rows.each(out, channels, &|r, out| out.copy_from_slice(&gated[r * stride + z_at..][..channels]));
        pass.trace_stage(Stage::AttnOut, Some(at.index), &mut columns(out, channels, 0, channels));
        rows.linear(&self.output, out, y, stack);
    }
}

impl Mamba {
    /// Moves z and x, which the rows have head by head, to x, then z; `z` is memory for (rows, channels).
    fn split_heads(&self, pass: &Pass<'_, '_>, input: &mut [f32], z: &mut [f32]) {
        let (channels, width, stride) = (self.c.size.channels, self.c.size.per_head, self.input.stride);
        let projected = &*input;
        pass.rows.each(z, channels, &|r, z| {
            for (z, head) in z.chunks_exact_mut(width).zip(projected[r * stride..].chunks_exact(2 * width)) {
                z.copy_from_slice(&head[..width]);
            }
        });
        let z = &*z;
        pass.rows.each(input, stride, &|r, row| {
            for head in 0..channels / width {
                row.copy_within((2 * head + 1) * width..(2 * head + 2) * width, head * width);
            }
            row[channels..2 * channels].copy_from_slice(&z[r * channels..][..channels]);
        });
    }
}

fn repeat(v: &f32, n: usize) -> impl Iterator<Item = f32> {
    core::iter::repeat_n(*v, n)
}
