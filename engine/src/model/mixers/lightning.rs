//! Lightning attention (Qin et al., arXiv:2401.04658), linear attention with a fixed decay of each head, as in MiniMax-01:
//!
//! ```text
//! q, k, v = silu(W_qkv h), head by head;  z = W_z h
//! y = W_o (norm(linear_attention(q, k, v, decay)) * sigmoid(z))
//! ```

use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::elementwise::{Activation, activate, multiply};
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::StateMemory;
use crate::kernels::recurrent::linear_attention::{LinearHeads, LinearRows, linear_attention};
use crate::kernels::recurrent::scan::Operand;
use crate::math::{exp, pow};
use crate::model::keys::{Keys, MAX_WIDTH};
use crate::model::linear::{Linear, LinearGroup, Norm};
use crate::model::memory::{Size, Stack};
use crate::model::pass::{LayerAt, Pass, Stage, SubLayerRows};
use crate::model::rows::columns;
use crate::model::tensors::{Declared, LinearName, Loaded, Name, NormName, matrix, vector};

const NORM: NormName = NormName("attn_norm_2");
const QKV: LinearName = LinearName("attn_qkv");
const GATE: LinearName = LinearName("attn_gate");
const OUTPUT: LinearName = LinearName("attn_output");
/// Tensors that only layers with lightning attention have together.
pub(crate) const MARKERS: [Name; 2] = [NORM.weight(), GATE.weight()];

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

impl LightningConfig {
    /// Declares the tensors of a layer of a model of width `d`.
    pub(crate) fn tensors(&self, t: &mut Declared<'_>, d: usize) {
        let width = self.width();
        t.required(NORM.weight(), vector(width));
        t.required(QKV.weight(), matrix(3 * width, d));
        t.required(GATE.weight(), matrix(width, d));
        t.required(OUTPUT.weight(), matrix(d, width));
        t.optional(OUTPUT.bias(), vector(d));
    }
}

/// Weights of lightning attention.
pub(crate) struct Lightning {
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
    pub(crate) fn load(c: &LightningConfig, layer: usize, t: &mut Loaded<'_>) -> Result<Lightning, LoadError> {
        let (qkv, gate) = (t.linear(QKV)?, t.linear(GATE)?);
        Ok(Lightning {
            c: *c,
            input: LinearGroup::separate([qkv, gate].into()),
            decays: c.decays(layer),
            norm: t.required_norm(NORM)?,
            output: t.linear(OUTPUT)?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        self.input.matrices().chain([&self.output.w]).collect()
    }

    /// Floats of a row: inputs, output.
    fn parts(&self) -> [usize; 2] {
        [self.input.stride, self.c.width()]
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        Size::rows(n, self.parts()).and(self.input.size(n).or(self.output.size(n)))
    }
}

impl Lightning {
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        at: LayerAt,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        stack: &mut Stack<'_>,
    ) {
        let (n, rows, stride, dim, width) = (pass.n, pass.rows, self.input.stride, self.c.head_dim, self.c.width());
        let [input, out] = stack.rows(n, self.parts());
        rows.linear_group(&self.input, x, input, stack);
        let gate_at = self.input.part_starts[1];
        rows.each(input, stride, &|_, row| {
            activate(rows.cpu, Activation::Silu, &mut row[..3 * width]);
            activate(rows.cpu, Activation::Sigmoid, &mut row[gate_at..gate_at + width]);
        });
        let operand = |at| Operand { x: input, stride, at };
        let linear_rows = LinearRows {
            q: operand(0),
            k: operand(dim),
            v: operand(2 * dim),
            decay: Operand { x: &self.decays, stride: 0, at: 0 },
            bonus: None,
        };
        let state_at = at.state_at;
        linear_attention((rows.cpu, rows.pool), self.c.heads(), linear_rows, out, pass.states, (states, state_at));
        rows.norm_each(&self.norm, out);
        rows.each(out, width, &|r, out| multiply(rows.cpu, out, &input[r * stride + gate_at..][..width]));
        pass.trace_stage(Stage::AttnOut, Some(at.index), &mut columns(out, width, 0, width));
        rows.linear(&self.output, out, y, stack);
    }
}
