//! Embeddings that each layer has of its own (Gemma 3n), from the tokens and their embeddings.

use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::elementwise::{Activation, add_scaled, gated, scale};
use crate::kernels::panel::Matrix;
use crate::math::sqrt;
use crate::model::budget::Budget;
use crate::model::linear::{Linear, Norm, padded};
use crate::model::memory::{Size, Stack};
use crate::model::pass::{Pass, SubLayerRows};
use crate::model::tensors::{Declared, LinearName, Loaded, Name, NormName, matrix, vector};

const GATE: LinearName = LinearName("inp_gate");
const PROJECTION: LinearName = LinearName("proj");
const NORM: NormName = NormName("post_norm");
const TABLE: Name = Name::weight("per_layer_token_embd");
const MODEL_PROJECTION: LinearName = LinearName("per_layer_model_proj");
const MODEL_NORM: NormName = NormName("per_layer_proj_norm");

/// Embeddings of a layer: `x = x + norm(proj(act(gate x) * embedding))`.
pub(crate) struct LayerEmbedding {
    /// (n_embd_layer, n_embd)
    gate: Linear,
    /// (n_embd, n_embd_layer)
    proj: Linear,
    /// (n_embd)
    pub(crate) norm: Norm,
}

/// Embeddings of all layers: `(norm(proj(x) / sqrt(n_embd)) + table[token] * sqrt(n_embd_layer)) / sqrt(2)`, where x is the
/// token's embedding.
pub(crate) struct LayerEmbeddings {
    /// (n_vocab, n_layer * n_embd_layer)
    table: Matrix,
    /// (n_layer * n_embd_layer, n_embd)
    proj: Linear,
    /// (n_embd_layer)
    norm: Norm,
}

/// The embeddings of a batch.
pub(crate) struct LayerEmbeddingRows {
    /// (rows, stride): those of all layers, (n_layer, width).
    all: Vec<f32>,
    width: usize,
    stride: usize,
}

/// The embeddings of one layer, in rows of `stride` floats.
#[derive(Clone, Copy)]
pub(crate) struct LayerRows<'b> {
    all: &'b [f32],
    at: usize,
    stride: usize,
}

impl LayerEmbeddingRows {
    /// For `n` rows of `n_layer` layers with embeddings of this width.
    pub(crate) fn new(n: usize, (width, n_layer): (usize, usize), budget: &mut Budget) -> LayerEmbeddingRows {
        let stride = padded(width.saturating_mul(n_layer));
        LayerEmbeddingRows { all: budget.zeros(&[n, stride]), width, stride }
    }

    /// Those of the layer with these weights.
    pub(crate) fn of(&self, block: usize) -> LayerRows<'_> {
        LayerRows { all: &self.all, at: block * self.width, stride: self.stride }
    }
}

impl LayerEmbedding {
    /// Declares the tensors of a layer of a model of width `d`.
    pub(crate) fn tensors(t: &mut Declared<'_>, width: usize, d: usize) {
        t.required(GATE.weight(), matrix(width, d));
        t.required(PROJECTION.weight(), matrix(d, width));
        t.required(NORM.weight(), vector(d));
    }

    /// Takes the tensors of a layer.
    pub(crate) fn load(t: &mut Loaded<'_>) -> Result<LayerEmbedding, LoadError> {
        Ok(LayerEmbedding { gate: t.linear(GATE)?, proj: t.linear(PROJECTION)?, norm: t.required_norm(NORM)? })
    }

    pub(crate) fn matrices(&self) -> [&Matrix; 2] {
        [&self.gate.w, &self.proj.w]
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        Size::rows(n, [padded(self.gate.w.rows())]).and(self.gate.size(n).or(self.proj.size(n)))
    }

    /// `y = proj(act(gate x) * embedding)`.
    pub(crate) fn run(
        &self,
        pass: &Pass<'_, '_>,
        act: Activation,
        of: LayerRows<'_>,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        stack: &mut Stack<'_>,
    ) {
        let (rows, width) = (pass.rows, self.gate.w.rows());
        let (stride, mut stack) = (padded(width), stack.scope());
        let [wide] = stack.rows(pass.n, [stride]);
        rows.linear(&self.gate, x, wide, &mut stack);
        rows.each(wide, stride, &|r, row| {
            gated(rows.cpu, act, &mut row[..width], &of.all[r * of.stride + of.at..][..width]);
        });
        let x = Floats { x: wide, stride };
        rows.matrix(&self.proj.w, self.proj.bias.as_deref(), x, y, &mut stack);
    }
}

impl LayerEmbeddings {
    /// Declares the tensors of a model of width `d` with `n_layer` layers and `n_vocab` tokens.
    pub(crate) fn tensors(t: &mut Declared<'_>, width: usize, (d, n_layer, n_vocab): (usize, usize, usize)) {
        t.required(TABLE, matrix(n_vocab, width * n_layer));
        t.required(MODEL_PROJECTION.weight(), matrix(width * n_layer, d));
        t.required(MODEL_NORM.weight(), vector(width));
    }

    pub(crate) fn load(t: &mut Loaded<'_>) -> Result<LayerEmbeddings, LoadError> {
        Ok(LayerEmbeddings {
            table: t.matrix(TABLE)?,
            proj: t.linear(MODEL_PROJECTION)?,
            norm: t.required_norm(MODEL_NORM)?,
        })
    }

    /// The table, and the projection.
    pub(crate) fn matrices(&self) -> [&Matrix; 2] {
        [&self.table, &self.proj.w]
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        Size::rows(1, [self.table.k()]).and(self.proj.size(n))
    }

    /// Computes the embeddings of all layers from the tokens and the residual stream.
    pub(crate) fn run(
        &self,
        pass: &Pass<'_, '_>,
        (x, tokens): (&[f32], &[u32]),
        to: &mut LayerEmbeddingRows,
        stack: &mut Stack<'_>,
    ) {
        let (on, cpu, stride) = (pass.rows, pass.rows.cpu, to.stride);
        let mut stack = stack.scope();
        let [row] = stack.rows(1, [self.table.k()]);
        let rows = &mut to.all[..pass.n * stride];
        on.linear(&self.proj, x, rows, &mut stack);
        let [by_width, by_layer] = [1.0 / sqrt(pass.d as f32), sqrt(to.width as f32)];
        for (token, out) in tokens.iter().zip(rows.chunks_exact_mut(stride)) {
            let out = &mut out[..row.len()];
            scale(cpu, out, by_width);
            on.norm_heads(&self.norm, out);
            self.table.row(*token as usize, row);
            add_scaled(cpu, out, row, by_layer);
            scale(cpu, out, core::f32::consts::FRAC_1_SQRT_2);
        }
    }
}
