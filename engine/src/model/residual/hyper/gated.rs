//! Hyper-connections that gate each element of the streams (Qwen4-Exp); a sub-layer has no other norm of its input:
//!
//! ```text
//! u_j = norm(x_j) * v_j                               weights of its own for each stream
//! a = W_down (u_0, ..., u_n-1);  g = W_up silu(a * (1 / n))
//! input = (sum_j u_j * sigmoid(g_j)) * (1 / n)
//! x_j = x_j + y * w[j],  w = 2 * sigmoid((W_inject (u_0, ..., u_n-1)) * (1 / n))      y: output of the sub-layer
//! ```
//!
//! w is computed in f64 and rounded.

use super::config::{HyperConfig, logistic};
use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::elementwise::{Activation, activate, add_scaled, multiply, scale};
use crate::kernels::panel::Matrix;
use crate::model::embeddings::ngrams::{stream_norm, take_stream_norm};
use crate::model::linear::{Linear, Norm, padded};
use crate::model::memory::{Size, Stack};
use crate::model::pass::Pass;
use crate::model::tensors::{Declared, LinearName, Loaded, Name, matrix};

/// Weights of the connections of a sub-layer, or of the output.
pub(crate) struct GatedWeights {
    /// Norm of each stream, (n, n_embd).
    norm: Norm,
    /// (rank, n * n_embd)
    down: Linear,
    /// (n * n_embd, rank)
    up: Linear,
    /// (n, n * n_embd); the output has none.
    inject: Option<Linear>,
}

/// Names of the connections of a sub-layer.
pub(super) struct GatedNames {
    norm: Name,
    down: LinearName,
    up: LinearName,
    inject: Option<LinearName>,
}

pub(super) const ATTENTION: GatedNames = GatedNames {
    norm: Name::weight("hc_attn_norm"),
    down: LinearName("hc_attn_down"),
    up: LinearName("hc_attn_up"),
    inject: Some(LinearName("hc_attn_inject")),
};
pub(super) const FFN: GatedNames = GatedNames {
    norm: Name::weight("hc_ffn_norm"),
    down: LinearName("hc_ffn_down"),
    up: LinearName("hc_ffn_up"),
    inject: Some(LinearName("hc_ffn_inject")),
};
/// The output injects nothing.
pub(super) const OUTPUT: GatedNames = GatedNames {
    norm: Name::weight("output_hc_norm"),
    down: LinearName("output_hc_down"),
    up: LinearName("output_hc_up"),
    inject: None,
};

impl GatedNames {
    /// Declares the tensors of connections of `n` streams of `d` elements.
    pub(super) fn tensors(&self, t: &mut Declared<'_>, (n, d): (usize, usize), rank: usize) {
        stream_norm(t, self.norm, n, d);
        t.required(self.down.weight(), matrix(rank, n * d));
        t.required(self.up.weight(), matrix(n * d, rank));
        if let Some(inject) = self.inject {
            t.required(inject.weight(), matrix(n, n * d));
        }
    }
}

impl GatedWeights {
    /// Takes the tensors, if there are such.
    pub(super) fn load(t: &mut Loaded<'_>, names: &GatedNames, d: usize) -> Result<Option<GatedWeights>, LoadError> {
        if !t.has(names.down.weight()) {
            return Ok(None);
        }
        let inject = match names.inject {
            Some(inject) => t.optional_linear(inject)?,
            None => None,
        };
        let norm = take_stream_norm(t, names.norm, d)?;
        Ok(Some(GatedWeights { norm, down: t.linear(names.down)?, up: t.linear(names.up)?, inject }))
    }

    /// Floats of a row: the product of low rank, gates.
    fn parts(&self, config: &HyperConfig, d: usize) -> [usize; 2] {
        [padded(self.up.w.k()), padded(config.n * d)]
    }

    /// Temporaries of `n` rows.
    pub(super) fn size(&self, config: &HyperConfig, n: usize, d: usize) -> Size {
        let inject = self.inject.as_ref().map_or(Size::NONE, |inject| inject.size(n));
        Size::rows(n, self.parts(config, d)).and(self.down.size(n).or(self.up.size(n)).or(inject))
    }

    pub(crate) fn n_weights(&self) -> usize {
        self.inject.as_ref().map_or(0, |inject| inject.w.rows())
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        [&self.down, &self.up].into_iter().chain(&self.inject).map(|linear| &linear.w)
    }
}

impl GatedWeights {
    /// Computes the gates of a sub-layer and reads its input.
    pub(super) fn read(
        &self,
        pass: &Pass<'_, '_>,
        config: &HyperConfig,
        x: &mut [f32],
        (streams, normed, weights): (&[f32], &mut [f32], &mut [f32]),
        stack: &mut Stack<'_>,
    ) {
        let (w, d, n, rows, count) = (self, pass.d, pass.n, pass.rows, config.n);
        let (width, rank, part) = (count * d, w.up.w.k(), 1.0 / count as f32);
        let mut stack = stack.scope();
        let [low, gates] = stack.rows(n, w.parts(config, d));
        rows.each(normed, width, &|r, normed| {
            normed.copy_from_slice(&streams[r * width..][..width]);
            rows.norm_heads(&w.norm, normed);
        });
        let normed = &*normed;
        if let Some(inject) = &w.inject {
            rows.linear(inject, normed, weights, &mut stack);
        }
        rows.linear(&w.down, normed, low, &mut stack);
        rows.each(low, padded(rank), &|_, low| {
            scale(rows.cpu, &mut low[..rank], part);
            activate(rows.cpu, Activation::Silu, &mut low[..rank]);
        });
        let low = Floats { x: low, stride: padded(rank) };
        rows.matrix(&w.up.w, w.up.bias.as_deref(), low, gates, &mut stack);
        rows.each(gates, padded(width), &|r, gates| {
            let gates = &mut gates[..width];
            activate(rows.cpu, Activation::Sigmoid, gates);
            multiply(rows.cpu, gates, &normed[r * width..][..width]);
        });
        let gated = &*gates;
        rows.each(x, d, &|r, x| {
            let gated = &gated[r * padded(width)..][..width];
            x.copy_from_slice(&gated[..d]);
            gated[d..].chunks_exact(d).for_each(|stream| add_scaled(rows.cpu, x, stream, 1.0));
            scale(rows.cpu, x, part);
        });
    }
}

/// Adds the output of a sub-layer to the streams.
pub(super) fn write(pass: &Pass<'_, '_>, config: &HyperConfig, y: &[f32], streams: &mut [f32], weights: &[f32]) {
    let (d, rows, count) = (pass.d, pass.rows, config.n);
    let (width, part) = (count * d, 1.0 / count as f32);
    rows.each(&mut streams[..pass.n * width], width, &|r, streams| {
        let inject = &weights[r * padded(count)..][..count];
        for (stream, x) in streams.chunks_exact_mut(d).zip(inject) {
            let factor = (2.0 * logistic(f64::from(x * part))) as f32;
            add_scaled(rows.cpu, stream, &y[r * padded(d)..][..d], factor);
        }
    });
}
