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

use alloc::format;

use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::elementwise::{Activation, activate, add_scaled, multiply, scale};
use crate::kernels::panel::Matrix;
use crate::model::loader::LoadedTensors;
use crate::model::residual::hyper::{HyperConfig, HyperScratch, logistic};
use crate::model::residual::orders::ForwardPass;
use crate::model::roles::{Need, Role, Scope, TensorRow, matrix, values, vector};
use crate::model::scratch::Scratch;
use crate::model::weights::{Linear, Norm, linear, missing, padded};

/// Weights of the connections of a sub-layer, or of the output.
pub struct GatedWeights {
    /// Norm of each stream, (n, n_embd).
    norm: Norm,
    /// (rank, n * n_embd)
    down: Linear,
    /// (n * n_embd, rank)
    up: Linear,
    /// (n, n * n_embd); the output has none.
    inject: Option<Linear>,
}

/// The number of streams, the width of all, and the rank of the gates.
fn sizes(c: &Scope<'_>) -> Option<(usize, usize, usize)> {
    let hyper = c.residual.hyper?;
    Some((hyper.n, hyper.n * c.n_embd, hyper.rank?))
}

/// Norms of all streams, in one dimension or two.
pub(crate) fn norms(c: &Scope<'_>, dims: &[u64; 4]) -> Option<Role> {
    let (n, width, _) = sizes(c)?;
    if dims[0] == width as u64 { vector(width) } else { values(c.n_embd, n) }
}

fn down(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    let (_, width, rank) = sizes(c)?;
    matrix(rank, width)
}

fn up(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    let (_, width, rank) = sizes(c)?;
    matrix(width, rank)
}

fn inject(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    let (n, width, _) = sizes(c)?;
    matrix(n, width)
}

/// The tensors of a layer.
pub(crate) const TENSORS: &[TensorRow] = &[
    TensorRow::new("hc_attn_norm.weight", norms).need(Need::EachLayer),
    TensorRow::new("hc_attn_down.weight", down).need(Need::EachLayer),
    TensorRow::new("hc_attn_up.weight", up).need(Need::EachLayer),
    TensorRow::new("hc_attn_inject.weight", inject).need(Need::EachLayer),
    TensorRow::new("hc_ffn_norm.weight", norms).need(Need::EachLayer),
    TensorRow::new("hc_ffn_down.weight", down).need(Need::EachLayer),
    TensorRow::new("hc_ffn_up.weight", up).need(Need::EachLayer),
    TensorRow::new("hc_ffn_inject.weight", inject).need(Need::EachLayer),
];

/// The tensors outside of layers.
pub(crate) const MODEL_TENSORS: &[TensorRow] = &[
    TensorRow::new("output_hc_norm.weight", norms).need(Need::Always),
    TensorRow::new("output_hc_down.weight", down).need(Need::Always),
    TensorRow::new("output_hc_up.weight", up).need(Need::Always),
];

/// Takes a norm of all streams, each of `d` elements.
pub(crate) fn stream_norm(tensors: &mut LoadedTensors, name: &str, d: usize) -> Result<Norm, LoadError> {
    let name = format!("{name}.weight");
    let (weight, _) = tensors.vector(&name).ok_or_else(|| missing(&name))?;
    Ok(Norm { weight, bias: None, eps: None, width: d })
}

impl GatedWeights {
    /// Takes the tensors `NAME_norm`, `NAME_down`, `NAME_up` and `NAME_inject`, if there is the last.
    pub(crate) fn load(tensors: &mut LoadedTensors, name: &str, d: usize) -> Result<GatedWeights, LoadError> {
        let has_inject = tensors.has(&format!("{name}_inject.weight"));
        Ok(GatedWeights {
            norm: stream_norm(tensors, &format!("{name}_norm"), d)?,
            down: linear(tensors, &format!("{name}_down"))?,
            up: linear(tensors, &format!("{name}_up"))?,
            inject: if has_inject { Some(linear(tensors, &format!("{name}_inject"))?) } else { None },
        })
    }

    pub(crate) fn n_weights(&self) -> usize {
        self.inject.as_ref().map_or(0, |inject| inject.w.rows())
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        [&self.down, &self.up].into_iter().chain(&self.inject).map(|linear| &linear.w)
    }
}

impl ForwardPass<'_, '_> {
    /// Computes the gates of a sub-layer and reads its input.
    pub(crate) fn read_gated(&self, config: &HyperConfig, w: &GatedWeights, s: &mut Scratch) {
        let (d, n, rows, count) = (self.model.config.n_embd, self.n, self.rows, config.n);
        let (width, rank, part) = (count * d, w.up.w.k(), 1.0 / count as f32);
        let Scratch { x, step, hyper, .. } = s;
        let HyperScratch { streams, next, weights, low, gates } = hyper;
        let (streams, normed) = (&streams[..n * width], &mut next[..n * width]);
        rows.each(normed, width, &|r, normed| {
            normed.copy_from_slice(&streams[r * width..][..width]);
            rows.norm_heads(&w.norm, normed);
        });
        let normed = &*normed;
        if let Some(inject) = &w.inject {
            rows.linear(inject, normed, &mut weights[..n * padded(count)], &mut step.words);
        }
        let (low, gates) = (&mut low[..n * padded(rank)], &mut gates[..n * padded(width)]);
        rows.linear(&w.down, normed, low, &mut step.words);
        rows.each(low, padded(rank), &|_, low| {
            scale(rows.cpu, &mut low[..rank], part);
            activate(rows.cpu, Activation::Silu, &mut low[..rank]);
        });
        let low = Floats { x: low, stride: padded(rank) };
        rows.matrix(&w.up.w, w.up.bias.as_deref(), low, gates, &mut step.words);
        rows.each(gates, padded(width), &|r, gates| {
            let gates = &mut gates[..width];
            activate(rows.cpu, Activation::Sigmoid, gates);
            multiply(rows.cpu, gates, &normed[r * width..][..width]);
        });
        let gated = &*gates;
        rows.each(&mut x[..n * d], d, &|r, x| {
            let gated = &gated[r * padded(width)..][..width];
            x.copy_from_slice(&gated[..d]);
            gated[d..].chunks_exact(d).for_each(|stream| add_scaled(rows.cpu, x, stream, 1.0));
            scale(rows.cpu, x, part);
        });
    }

    /// Adds the output of a sub-layer to the streams.
    pub(crate) fn write_gated(&self, config: &HyperConfig, s: &mut Scratch) {
        let (d, n, rows, count) = (self.model.config.n_embd, self.n, self.rows, config.n);
        let (width, part) = (count * d, 1.0 / count as f32);
        let Scratch { y, hyper, .. } = s;
        let weights = &hyper.weights;
        rows.each(&mut hyper.streams[..n * width], width, &|r, streams| {
            let inject = &weights[r * padded(count)..][..count];
            for (stream, x) in streams.chunks_exact_mut(d).zip(inject) {
                let factor = (2.0 * logistic(f64::from(x * part))) as f32;
                add_scaled(rows.cpu, stream, &y[r * padded(d)..][..d], factor);
            }
        });
    }
}
