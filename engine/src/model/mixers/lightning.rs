//! Lightning attention (Qin et al., arXiv:2401.04658), linear attention with a fixed decay of each head, as in MiniMax-01:
//!
//! ```text
//! q, k, v = silu(W_qkv h), head by head;  z = W_z h
//! y = W_o (norm(linear_attention(q, k, v, decay)) * sigmoid(z))
//! ```

use alloc::format;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::elementwise::{Activation, activate, multiply};
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::StateMemory;
use crate::kernels::recurrent::linear_attention::{LinearHeads, LinearRows, linear_attention};
use crate::kernels::recurrent::scan::Operand;
use crate::math::{exp, pow};
use crate::model::config::Config;
use crate::model::forward::Stage;
use crate::model::keys::Keys;
use crate::model::keys::MAX_WIDTH;
use crate::model::loader::LoadedTensors;
use crate::model::mixers::RecurrentConfig;
use crate::model::residual::orders::{ForwardPass, SubLayerRows};
use crate::model::roles::{Layout, Part, TensorRow, matrix, vector};
use crate::model::rows::columns;
use crate::model::scratch::StepScratch;
use crate::model::weights::{Linear, LinearGroup, Norm, linear, required_norm};

/// Tensors that only layers with lightning attention have together.
pub(crate) const MARKERS: [&str; 2] = [NORM, "attn_gate.weight"];
const NORM: &str = "attn_norm_2.weight";

/// Sizes of lightning attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LightningConfig {
    /// Number of heads.
    pub n_head: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Layers of the model: decays are slower in later ones.
    pub n_layer: usize,
}

impl LightningConfig {
    pub(crate) fn read(keys: &Keys<'_, '_>, n_embd: usize, n_layer: usize) -> Result<LightningConfig, LoadError> {
        let n_head = keys.size("attention.head_count", 1..=n_embd as u32)?;
        let head_dim = keys.u32("attention.key_length")?.or(Some((n_embd / n_head) as u32));
        let head_dim = keys.in_range("attention.key_length", head_dim, 1..=MAX_WIDTH / n_head as u32)?;
        Ok(LightningConfig { n_head, head_dim, n_layer })
    }

    fn width(&self) -> usize {
        self.n_head * self.head_dim
    }

    fn heads(&self) -> LinearHeads {
        LinearHeads { n: self.n_head, dim: self.head_dim, step: 3 * self.head_dim, n_decay: 1 }
    }

    pub(crate) fn state_len(&self) -> usize {
        self.heads().state_len()
    }

    /// `exp(-slope * scale)` of each head, where slopes are those of ALiBi and later layers have a smaller scale.
    fn decays(&self, layer: usize) -> Vec<f32> {
        let scale = 1.0 - layer as f64 / (self.n_layer - 1).max(1) as f64 + 1e-5;
        let slope = |h: usize| pow(2.0, -8.0 * (h + 1) as f64 / self.n_head as f64);
        (0..self.n_head).map(|h| exp(-slope(h) * scale) as f32).collect()
    }
}

fn config(c: &Config) -> Option<&LightningConfig> {
    match &c.recurrent {
        Some(RecurrentConfig::Lightning(c)) => Some(c),
        _ => None,
    }
}

const REQUIRED: &[Layout] = &[(Part::Recurrent, 0)];

/// The tensors of a layer.
pub(crate) const TENSORS: &[TensorRow] = &[
    TensorRow::new(NORM, |c, _| vector(config(c)?.width())).of(REQUIRED),
    TensorRow::new("attn_qkv.weight", |c, _| matrix(3 * config(c)?.width(), c.n_embd)).of(REQUIRED),
    TensorRow::new("attn_gate.weight", |c, _| matrix(config(c)?.width(), c.n_embd)).of(REQUIRED),
    TensorRow::new("attn_output.weight", |c, _| matrix(c.n_embd, config(c)?.width())).of(REQUIRED),
];

/// Weights of lightning attention.
pub struct Lightning {
    c: LightningConfig,
    /// Queries, keys and values of each head in turn; gates.
    input: LinearGroup,
    /// (heads)
    decays: Vec<f32>,
    /// Norm of all heads together.
    norm: Norm,
    output: Linear,
}

impl Lightning {
    pub(crate) fn load(c: &LightningConfig, tensors: &mut LoadedTensors, i: usize) -> Result<Lightning, LoadError> {
        let name = |part: &str| format!("blk.{i}.{part}");
        let (qkv, gate) = (linear(tensors, &name("attn_qkv"))?, linear(tensors, &name("attn_gate"))?);
        Ok(Lightning {
            c: *c,
            input: LinearGroup::separate([qkv, gate].into()),
            decays: c.decays(i),
            norm: required_norm(tensors, &name("attn_norm_2"))?,
            output: linear(tensors, &name("attn_output"))?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        self.input.matrices().chain([&self.output.w]).collect()
    }

    pub(crate) fn widths(&self) -> (Vec<&Matrix>, usize, usize) {
        (self.input.matrices().collect(), self.input.stride + self.c.width(), self.c.width())
    }
}

impl ForwardPass<'_, '_> {
    pub(crate) fn lightning(
        &mut self,
        i: usize,
        m: &Lightning,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        StepScratch { wide, words, .. }: &mut StepScratch,
    ) {
        let (n, rows, stride, dim, width) = (self.n, self.rows, m.input.stride, m.c.head_dim, m.c.width());
        let (input, out) = wide.split_at_mut(n * stride);
        let out = &mut out[..n * width];
        rows.linear_group(&m.input, x, input, words);
        let gate_at = m.input.part_starts[1];
        rows.each(input, stride, &|_, row| {
            activate(rows.cpu, Activation::Silu, &mut row[..3 * width]);
            activate(rows.cpu, Activation::Sigmoid, &mut row[gate_at..gate_at + width]);
        });
        let operand = |at| Operand { x: input, stride, at };
        let linear_rows = LinearRows {
            q: operand(0),
            k: operand(dim),
            v: operand(2 * dim),
            decay: Operand { x: &m.decays, stride: 0, at: 0 },
            bonus: None,
        };
        let state_at = self.model.config.layers[i].state_at;
        linear_attention((rows.cpu, rows.pool), m.c.heads(), linear_rows, out, self.states, (states, state_at));
        rows.norm_each(&m.norm, out);
        rows.each(out, width, &|r, out| multiply(rows.cpu, out, &input[r * stride + gate_at..][..width]));
        self.trace_stage(Stage::AttnOut, Some(i), &mut columns(out, width, 0, width));
        rows.linear(&m.output, out, y, words);
    }
}
