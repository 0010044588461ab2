//! The output: `logits = soft_cap((W_out norm(x) + b) * scale)`.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::OutputConfig;
use crate::error::LoadError;
use crate::kernels::elementwise::{scale, soft_cap};
use crate::kernels::panel::Matrix;
use crate::model::linear::{Norm, padded};
use crate::model::memory::{Size, Stack};
use crate::model::rows::{RowOps, as_columns};
use crate::model::tensors::{Declared, LinearName, Loaded, NormName, matrix, vector};

const OUTPUT: LinearName = LinearName("output");
const NORM: NormName = NormName("output_norm");

/// Weights of the output.
pub(crate) struct Output {
    /// Norm after the layers (n_embd).
    pub(crate) norm: Option<Norm>,
    /// (n_vocab, n_embd); `None` if tied to the embedding.
    pub(crate) matrix: Option<Arc<Matrix>>,
    /// Whether the matrix is that of another model.
    pub(crate) is_shared: bool,
    /// One value per logit.
    pub(crate) bias: Option<Vec<f32>>,
}

/// What the norm after the layers is.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum FinalNorm {
    /// That of the file.
    Own,
    /// One without weights.
    Plain,
    /// None.
    None,
}

impl Output {
    /// Declares the tensors of a model of width `d` with `n_vocab` tokens.
    pub(crate) fn tensors(t: &mut Declared<'_>, norm: FinalNorm, (d, n_vocab): (usize, usize)) {
        if norm == FinalNorm::Own {
            t.required(NORM.weight(), vector(d));
            t.optional(NORM.bias(), vector(d));
        }
        // tied to the embedding if it is missing
        t.optional(OUTPUT.weight(), matrix(n_vocab, d));
        t.optional(OUTPUT.bias(), vector(n_vocab));
    }

    pub(crate) fn load(t: &mut Loaded<'_>, norm: FinalNorm, d: usize) -> Result<Output, LoadError> {
        Ok(Output {
            norm: t.norm(NORM)?.or_else(|| (norm == FinalNorm::Plain).then(|| Norm::plain(d))),
            matrix: t.optional_matrix(OUTPUT.weight()).map(Arc::new),
            is_shared: false,
            bias: t.optional(OUTPUT.bias()),
        })
    }

    /// Temporaries of `n` rows of a model of width `d`.
    pub(crate) fn size(n: usize, d: usize) -> Size {
        Size::packed(n, 1, d)
    }

    /// The logits of hidden states after the norm; `matrix` is that of the output.
    pub(crate) fn run(
        &self,
        on: &RowOps<'_>,
        (c, matrix): (&OutputConfig, &Matrix),
        hidden: &[f32],
        logits: &mut [f32],
        stack: &mut Stack<'_>,
    ) {
        on.matrix(matrix, self.bias.as_deref(), as_columns(hidden, matrix), logits, stack);
        if c.scale == 1.0 && c.soft_cap.is_none() {
            return;
        }
        on.each(logits, padded(matrix.rows()), &|_, row| {
            if c.scale != 1.0 {
                scale(on.cpu, row, c.scale);
            }
            if let Some(cap) = c.soft_cap {
                soft_cap(on.cpu, row, cap);
            }
        });
    }
}
