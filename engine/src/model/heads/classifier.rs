//! The classification head of rerankers: scores of the classes of a pooled text.
//!
//! ```text
//! x = pooled state of the text: the first token's, of decoders the last token's, or the mean over all tokens
//! x = norm(act(W x + b))   if the head has a dense layer, with or without its norm
//! x = V x + c              if it has an output layer
//! x = softmax(x)           if the classes are tokens of the vocabulary (Qwen 3: yes and no)
//! ```

use alloc::vec;
use alloc::vec::Vec;

use super::projection::ProjectionScratch;
use crate::error::{LoadError, MemoryError};
use crate::kernels::elementwise::{Activation, activate, soft_cap};
use crate::math;
use crate::model::family::HeadKind;
use crate::model::linear::{Linear, Norm};
use crate::model::rows::RowOps;
use crate::model::tensors::{Declared, LinearName, Loaded, NormName, any_width, matrix, vector};

/// A classification head.
pub(crate) struct Classifier {
    /// Hidden layer.
    pub dense: Option<Linear>,
    /// Norm after it.
    pub norm: Option<Norm>,
    /// Output layer, a row per class.
    pub output: Option<Linear>,
}

const DENSE: LinearName = LinearName("cls");
const NORM: NormName = NormName("cls.norm");
const OUTPUT: LinearName = LinearName("cls.output");

impl Classifier {
    /// Declares the tensors. A layer has any shape; each must fit the one before.
    pub(crate) fn tensors(t: &mut Declared<'_>) {
        for layer in [DENSE, OUTPUT] {
            t.optional_by(layer.weight(), |dims| matrix(any_width(dims[1]), any_width(dims[0])));
            t.optional_by(layer.bias(), |dims| vector(any_width(dims[0])));
        }
        t.optional_by(NORM.weight(), |dims| vector(any_width(dims[0])));
    }

    /// The head of a file, for states of `width` elements; `None` if it has none.
    ///
    /// # Errors
    /// [`LoadError`] of a tensor whose shape does not fit the one before.
    pub(crate) fn load(t: &mut Loaded<'_>, mut width: usize) -> Result<Option<Classifier>, LoadError> {
        let mut layer = |t: &mut Loaded<'_>, name: LinearName| {
            let Some(layer) = t.optional_linear(name)? else { return Ok(None) };
            if layer.w.k() != width {
                let shape = |k| alloc::format!("shape [{k}, {}]", layer.w.rows());
                return Err(t.error(name.weight(), &shape(layer.w.k()), &shape(width)));
            }
            width = layer.w.rows();
            Ok(Some(layer))
        };
        let dense = layer(t, DENSE)?;
        let n_hidden = dense.as_ref().map(|dense| dense.w.rows());
        let norm = match n_hidden {
            Some(_) => t.norm(NORM)?,
            None => None,
        };
        if let (Some(norm), Some(n)) = (&norm, n_hidden)
            && norm.width != n
        {
            let (found, expected) = (alloc::format!("shape [{}]", norm.width), alloc::format!("shape [{n}]"));
            return Err(t.error(NORM.weight(), &found, &expected));
        }
        let output = layer(t, OUTPUT)?;
        Ok((dense.is_some() || output.is_some()).then_some(Classifier { dense, norm, output }))
    }

    /// The layers, in order.
    pub(crate) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.dense.iter().chain(&self.output)
    }

    /// Number of scores of a text: the rows of the last layer.
    pub(crate) fn n_classes(&self) -> usize {
        self.linears().last().map_or(0, |layer| layer.w.rows())
    }

    /// Memory to classify `max_texts` texts, within `limit` bytes.
    pub(crate) fn scratch(&self, max_texts: usize, limit: usize) -> Result<ProjectionScratch, MemoryError> {
        ProjectionScratch::new(&self.linears().collect::<Vec<_>>(), max_texts, limit)
    }

    /// Classifies pooled vectors of `d` elements: each then refers to its scores in `s`.
    pub(crate) fn run<'s>(
        &self,
        on: &RowOps<'_>,
        (kind, d): (HeadKind, usize),
        vectors: &mut [&mut &'s mut [f32]],
        s: &'s mut ProjectionScratch,
    ) {
        let (n, head) = (vectors.len(), self);
        s.load(vectors, d);
        if let Some(dense) = &head.dense {
            let rows = dense.w.rows();
            s.apply(on, dense, n);
            let hidden = &mut s.x[..n * rows];
            match kind {
                HeadKind::Gelu => activate(on.cpu, Activation::GeluErf, hidden),
                // with a cap of 1 it is tanh
                HeadKind::Tanh | HeadKind::Softmax => soft_cap(on.cpu, hidden, 1.0),
            }
            if let Some(norm) = &head.norm {
                on.norm_each(norm, hidden);
            }
        }
        if let Some(output) = &head.output {
            s.apply(on, output, n);
        }
        let width = self.n_classes();
        if kind == HeadKind::Softmax {
            s.x[..n * width].chunks_exact_mut(width).for_each(softmax);
        }
        for (v, x) in vectors.iter_mut().zip(s.x.chunks_exact_mut(width)) {
            **v = x;
        }
    }
}

/// Softmax in f64, summed in order: there are only a few classes.
fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut powers = vec![0.0; x.len()];
    powers.iter_mut().zip(x.iter()).for_each(|(power, x)| *power = math::exp(f64::from(*x) - f64::from(max)));
    let sum: f64 = powers.iter().sum();
    x.iter_mut().zip(&powers).for_each(|(x, power)| *x = (power / sum) as f32);
}
