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

use crate::error::{LoadError, MemoryError};
use crate::kernels::elementwise::{Activation, activate, soft_cap};
use crate::math;
use crate::model::config::Config;
use crate::model::family::HeadKind;
use crate::model::heads::projection::ProjectionScratch;
use crate::model::loader::LoadedTensors;
use crate::model::roles::tensor_error;
use crate::model::weights::{Linear, Norm, linear, norm};
use crate::model::{Exec, Model};

/// A classification head.
pub struct Classifier {
    /// Hidden layer.
    pub dense: Option<Linear>,
    /// Norm after it.
    pub norm: Option<Norm>,
    /// Output layer, a row per class.
    pub output: Option<Linear>,
}

impl Classifier {
    /// The head of a file; `None` if it has none.
    ///
    /// # Errors
    /// [`LoadError`] of a tensor whose shape does not fit the one before.
    pub(crate) fn load(tensors: &mut LoadedTensors, c: &Config) -> Result<Option<Classifier>, LoadError> {
        let mut width = c.n_embd;
        let mut layer = |tensors: &mut LoadedTensors, name: &str, weight: &str| {
            if !tensors.has(weight) {
                return Ok(None);
            }
            let layer = linear(tensors, name)?;
            if layer.w.k() != width {
                let shape = |k| alloc::format!("shape [{k}, {}]", layer.w.rows());
                return Err(tensor_error(weight, &shape(layer.w.k()), &shape(width)));
            }
            width = layer.w.rows();
            Ok(Some(layer))
        };
        let dense = layer(tensors, "cls", "cls.weight")?;
        let n_hidden = dense.as_ref().map(|dense| dense.w.rows());
        let norm = match n_hidden {
            Some(_) => norm(tensors, "cls.norm")?,
            None => None,
        };
        if let (Some(norm), Some(n)) = (&norm, n_hidden)
            && norm.width != n
        {
            let (found, expected) = (alloc::format!("shape [{}]", norm.width), alloc::format!("shape [{n}]"));
            return Err(tensor_error("cls.norm.weight", &found, &expected));
        }
        let output = layer(tensors, "cls.output", "cls.output.weight")?;
        Ok((dense.is_some() || output.is_some()).then_some(Classifier { dense, norm, output }))
    }

    /// The layers, in order.
    pub(crate) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.dense.iter().chain(&self.output)
    }
}

impl Model {
    /// Number of scores of a text: the rows of the last layer of the classification head; 0 without one.
    pub fn n_classes(&self) -> usize {
        self.weights.classifier.iter().flat_map(Classifier::linears).last().map_or(0, |layer| layer.w.rows())
    }

    /// Allocates memory to classify `max_texts` texts.
    ///
    /// # Errors
    /// [`MemoryError`] if the allocation fails, or would exceed [`Model::max_scratch_bytes`].
    pub(crate) fn classifier_scratch(&self, max_texts: usize) -> Result<ProjectionScratch, MemoryError> {
        let layers = self.weights.classifier.iter().flat_map(Classifier::linears).collect::<Vec<_>>();
        ProjectionScratch::new(&layers, max_texts, self.max_scratch_bytes)
    }

    /// Classifies pooled vectors (n_embd): each then refers to [`Model::n_classes`] scores in `s`. Without a head
    /// nothing is done.
    ///
    /// # Panics
    /// If there are more vectors than the scratch memory is for.
    pub(crate) fn classify<'s>(
        &self,
        exec: Exec<'_>,
        vectors: &mut [&mut &'s mut [f32]],
        s: &'s mut ProjectionScratch,
    ) {
        let (n, on, kind) = (vectors.len(), self.rows(exec), self.config.output.classifier);
        let Some(head) = self.weights.classifier.as_ref().filter(|_| n > 0) else { return };
        s.load(vectors, self.config.n_embd);
        if let Some(dense) = &head.dense {
            let rows = dense.w.rows();
            s.apply(&on, dense, n);
            let hidden = &mut s.x[..n * rows];
            match kind {
                HeadKind::Gelu => activate(exec.cpu, Activation::GeluErf, hidden),
                // with a cap of 1 it is tanh
                HeadKind::Tanh | HeadKind::Softmax => soft_cap(exec.cpu, hidden, 1.0),
            }
            if let Some(norm) = &head.norm {
                on.norm_each(norm, hidden);
            }
        }
        if let Some(output) = &head.output {
            s.apply(&on, output, n);
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
