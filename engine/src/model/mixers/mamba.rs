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

use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::elementwise::{Activation, activate, gated};
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::conv::{Conv, ConvRows, causal_conv};
use crate::kernels::recurrent::scan::{Operand, ScanRows, ScanSize, selective_scan};
use crate::kernels::recurrent::{StateMemory, softplus};
use crate::model::config::Config;
use crate::model::forward::Stage;
use crate::model::keys::Keys;
use crate::model::keys::MAX_WIDTH;
use crate::model::loader::LoadedTensors;
use crate::model::mixers::{MAX_CONV, RecurrentConfig};
use crate::model::residual::orders::{ForwardPass, SubLayerRows};
use crate::model::roles::{Layout, Part, Role, TensorRow, matrix, values, vector};
use crate::model::rows::columns;
use crate::model::scratch::StepScratch;
use crate::model::weights::{Linear, LinearGroup, Norm, linear, norm, padded, transposed};

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

fn config(c: &Config) -> Option<&MambaConfig> {
    match &c.recurrent {
        Some(RecurrentConfig::Mamba(c)) => Some(c),
        _ => None,
    }
}

/// A tensor of Mamba only, whose shape follows from the rank of the steps.
fn of_rank(c: &Config, role: impl Fn(&MambaConfig, usize) -> Option<Role>) -> Option<Role> {
    let m = config(c)?;
    role(m, m.step_rank?)
}

const MAMBA: usize = 0;
const MAMBA2: usize = 1;
const OF_MAMBA: &[Layout] = &[(Part::Recurrent, MAMBA)];
const OF_BOTH: &[Layout] = &[(Part::Recurrent, MAMBA), (Part::Recurrent, MAMBA2)];

/// The tensors of a layer.
pub(crate) const TENSORS: &[TensorRow] = &[
    TensorRow::new("ssm_x.weight", |c, _| of_rank(c, |m, rank| matrix(rank + 2 * m.size.n_state, m.size.channels)))
        .of(OF_MAMBA),
    TensorRow::new("ssm_dt.weight", |c, _| of_rank(c, |m, rank| matrix(m.n_head(), rank))).of(OF_MAMBA),
    TensorRow::new("ssm_in.weight", |c, _| matrix(config(c)?.input_width(), c.n_embd)).of(OF_BOTH),
    TensorRow::new("ssm_conv1d.weight", |c, _| values(config(c)?.conv, config(c)?.conv_channels())).of(OF_BOTH),
    TensorRow::new("ssm_conv1d.bias", |c, _| vector(config(c)?.conv_channels())),
    TensorRow::new("ssm_dt.bias", |c, _| vector(config(c)?.n_head())).of(OF_BOTH),
    TensorRow::new("ssm_a", |c, _| {
        let m = config(c)?;
        match m.step_rank {
            Some(_) if m.by_heads => vector(m.n_head()),
            Some(_) => values(m.size.n_state, m.size.channels),
            None => values(1, m.n_head()),
        }
    })
    .of(OF_BOTH),
    TensorRow::new("ssm_d", |c, _| {
        let m = config(c)?;
        if m.step_rank.is_some() { vector(m.n_head()) } else { values(1, m.n_head()) }
    })
    .of(OF_BOTH),
    TensorRow::new("ssm_norm.weight", |c, _| {
        let size = config(c)?.size;
        Some(Role::HeadNorm { n_head: size.channels / size.per_group, head_dim: size.per_group })
    }),
    TensorRow::new("ssm_dt_norm.weight", |c, _| of_rank(c, |_, rank| vector(rank))),
    TensorRow::new("ssm_b_norm.weight", |c, _| of_rank(c, |m, _| vector(m.size.n_state))),
    TensorRow::new("ssm_c_norm.weight", |c, _| of_rank(c, |m, _| vector(m.size.n_state))),
    // the names in files of PLaMo 2
    TensorRow::new("ssm_dt_norm", |c, _| of_rank(c, |_, rank| vector(rank))),
    TensorRow::new("ssm_b_norm", |c, _| of_rank(c, |m, _| vector(m.size.n_state))),
    TensorRow::new("ssm_c_norm", |c, _| of_rank(c, |m, _| vector(m.size.n_state))),
    TensorRow::new("ssm_out.weight", |c, _| matrix(c.n_embd, config(c)?.size.channels)).of(OF_BOTH),
];

/// Weights of a Mamba or Mamba 2 mixer.
pub struct Mamba {
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
    fn load(c: &MambaConfig, rank: usize, tensors: &mut LoadedTensors, i: usize) -> Result<StepWeights, LoadError> {
        let name = |part: &str| format!("blk.{i}.{part}");
        let mut norms = [None, None, None];
        let parts = [("ssm_dt_norm", rank), ("ssm_b_norm", c.size.n_state), ("ssm_c_norm", c.size.n_state)];
        for (to, (part, width)) in norms.iter_mut().zip(parts) {
            *to = norm(tensors, &name(part))?.or_else(|| c.plain_norms.then(|| Norm::plain(width)));
        }
        Ok(StepWeights { x: linear(tensors, &name("ssm_x"))?, dt: tensors.matrix(&name("ssm_dt.weight"))?, norms })
    }
}

impl Mamba {
    pub(crate) fn load(c: &MambaConfig, tensors: &mut LoadedTensors, i: usize) -> Result<Mamba, LoadError> {
        let name = |part: &str| format!("blk.{i}.{part}");
        let steps = match c.step_rank {
            Some(rank) => Some(StepWeights::load(c, rank, tensors, i)?),
            None => None,
        };
        Ok(Mamba {
            c: *c,
            input: LinearGroup::separate([linear(tensors, &name("ssm_in"))?].into()),
            conv: transposed(tensors, &name("ssm_conv1d.weight"))?,
            conv_bias: tensors.optional(&name("ssm_conv1d.bias")),
            steps,
            dt: tensors.required(&name("ssm_dt.bias"))?,
            a: if c.size.per_head > 1 {
                tensors.required(&name("ssm_a"))?
            } else {
                transposed(tensors, &name("ssm_a"))?
            },
            d: tensors.required(&name("ssm_d"))?,
            norm: norm(tensors, &name("ssm_norm"))?,
            output: linear(tensors, &name("ssm_out"))?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        let steps = self.steps.iter().flat_map(|s| [&s.x.w, &s.dt]);
        self.input.matrices().chain(steps).chain([&self.output.w]).collect()
    }

    pub(crate) fn widths(&self) -> (Vec<&Matrix>, usize, usize) {
        let channels = self.c.size.channels;
        let steps = match &self.steps {
            Some(s) => padded(s.x.w.rows()) + padded(self.c.n_head()),
            None => self.c.n_head(),
        };
        (self.input.matrices().collect(), self.input.stride + steps + channels, channels)
    }
}

impl ForwardPass<'_, '_> {
    pub(crate) fn mamba(
        &mut self,
        i: usize,
        m: &Mamba,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        StepScratch { wide, words, .. }: &mut StepScratch,
    ) {
        let (n, rows, size, stride) = (self.n, self.rows, m.c.size, m.input.stride);
        let (channels, conv_channels) = (size.channels, m.c.conv_channels());
        // in Mamba x comes first, then z; in Mamba 2 z comes first
        let (x_at, z_at) = if m.steps.is_some() { (0, channels) } else { (channels, 0) };
        let (input, rest) = wide.split_at_mut(n * stride);
        rows.linear_group(&m.input, x, input, words);
        if m.c.by_heads {
            self.split_heads(m, input, &mut rest[..n * channels]);
        }
        let state_at = self.model.config.layers[i].state_at;
        let conv = Conv { weights: &m.conv, bias: m.conv_bias.as_deref(), channels: conv_channels };
        let conv_rows = ConvRows { x: input, stride, at: x_at };
        causal_conv(rows.cpu, rows.pool, conv, conv_rows, self.states, (states, state_at));
        rows.each(input, stride, &|_, row| {
            activate(rows.cpu, Activation::Silu, &mut row[x_at..x_at + conv_channels]);
        });
        let operand = |x, stride, at| Operand { x, stride, at };
        let (scan_rows, out) = match &m.steps {
            Some(s) => {
                let (low_stride, rank) = (padded(s.x.w.rows()), s.dt.k());
                let (low, rest) = rest.split_at_mut(n * low_stride);
                let dt_stride = padded(m.c.n_head());
                let (dt, out) = rest.split_at_mut(n * dt_stride);
                rows.matrix(&s.x.w, s.x.bias.as_deref(), Floats { x: input, stride }, low, words);
                rows.each(low, low_stride, &|_, row| {
                    if m.c.by_heads {
                        row[..rank + 2 * size.n_state].rotate_right(rank);
                    }
                    let (steps, shared) = row.split_at_mut(rank);
                    let (b, c) = shared.split_at_mut(size.n_state);
                    for (norm, part) in s.norms.iter().zip([steps, b, &mut c[..size.n_state]]) {
                        norm.iter().for_each(|norm| rows.norm_heads(norm, part));
                    }
                });
                rows.matrix(&s.dt, None, Floats { x: low, stride: low_stride }, dt, words);
                rows.each(dt, dt_stride, &|_, row| {
                    row.iter_mut().zip(&m.dt).for_each(|(t, bias)| *t = softplus(*t + bias));
                });
                let scan_rows = ScanRows {
                    x: operand(input, stride, x_at),
                    b: operand(low, low_stride, rank),
                    c: operand(low, low_stride, rank + size.n_state),
                    dt: operand(dt, dt_stride, 0),
                    a: &m.a,
                };
                (scan_rows, out)
            }
            None => {
                let (n_head, b_at) = (m.c.n_head(), x_at + channels);
                let (dt, out) = rest.split_at_mut(n * n_head);
                let projected = &*input;
                rows.each(dt, n_head, &|r, row| {
                    let from = &projected[r * stride + x_at + conv_channels..][..n_head];
                    for ((to, t), bias) in row.iter_mut().zip(from).zip(&m.dt) {
                        *to = softplus(t + bias);
                    }
                });
                let scan_rows = ScanRows {
                    x: operand(input, stride, x_at),
                    b: operand(input, stride, b_at),
                    c: operand(input, stride, b_at + m.c.group_width()),
                    dt: operand(dt, n_head, 0),
                    a: &m.a,
                };
                (scan_rows, out)
            }
        };
        let out = &mut out[..n * channels];
        let scan_state = (states, state_at + m.c.conv_state_len());
        selective_scan((rows.cpu, rows.pool), size, scan_rows, out, self.states, scan_state);
        let scanned = &*out;
        rows.each(input, stride, &|r, row| {
            let out = &scanned[r * channels..][..channels];
            let x: &mut [f32] = &mut row[x_at..x_at + channels];
            for ((x, out), d) in x.iter_mut().zip(out).zip(m.d.iter().flat_map(|d| repeat(d, size.per_head))) {
                *x = out + *x * d;
            }
            let (first, second) = row.split_at_mut(channels);
            let (x, z) = if x_at == 0 { (first, &mut second[..channels]) } else { (&mut second[..channels], first) };
            gated(rows.cpu, Activation::Silu, z, x);
            m.norm.iter().for_each(|norm| rows.norm_heads(norm, z));
        });
        let gated = &*input;
        rows.each(out, channels, &|r, out| out.copy_from_slice(&gated[r * stride + z_at..][..channels]));
        self.trace_stage(Stage::AttnOut, Some(i), &mut columns(out, channels, 0, channels));
        rows.linear(&m.output, out, y, words);
    }
}

impl ForwardPass<'_, '_> {
    /// Moves z and x, which the rows have head by head, to x, then z; `z` is memory for (rows, channels).
    fn split_heads(&self, m: &Mamba, input: &mut [f32], z: &mut [f32]) {
        let (channels, width, stride) = (m.c.size.channels, m.c.size.per_head, m.input.stride);
        let projected = &*input;
        self.rows.each(z, channels, &|r, z| {
            for (z, head) in z.chunks_exact_mut(width).zip(projected[r * stride..].chunks_exact(2 * width)) {
                z.copy_from_slice(&head[..width]);
            }
        });
        let z = &*z;
        self.rows.each(input, stride, &|r, row| {
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
