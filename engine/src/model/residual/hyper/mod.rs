//! Hyper-connections (Zhu et al., arXiv:2409.19606; manifold-constrained, arXiv:2512.24880): several residual streams. A
//! sub-layer reads a weighted sum of them, and its output is added to each; what is weighted how depends on the token:
//!
//! ```text
//! m = W norm(x_0, ..., x_n-1)                         one norm over all streams, without weights
//! r[j] = sigmoid(m[j] * s[0] + b[j]) + eps            read;  input = sum_j x_j * r[j]
//! w[j] = magnitude * sigmoid(m[n + j] * s[1] + b[n + j]) + eps     write; without a stated magnitude 2, and no eps
//! x_j = x_j + y * w[j]                                y: output of the sub-layer
//! x_j = y * w[j] + sum_i x_i * C[i][j]                with mixed streams
//! C[i][j] = softmax over j of m[2n + i n + j] * s[2] + b[2n + i n + j], + eps; then columns and rows are divided by their
//!           sums + eps in turn, columns first and last (Sinkhorn)
//! x = sum_j x_j * r[j]                                after the last layer, with weights of its own; or their mean
//! ```
//!
//! r, w and C are computed in f64 and rounded. Models with `hyper_connection.low_rank` have other connections: `gated.rs`.

pub(crate) mod config;
mod gated;

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

use self::config::{MAX_STREAMS, logistic};
use self::gated::{GatedNames, GatedWeights};
use super::batch::{Batch, Streams};
use super::layer::{Layer, LayerView};
use crate::error::LoadError;
use crate::kernels::attention::KvMemory;
use crate::kernels::elementwise::{add_scaled, scale};
use crate::kernels::panel::Matrix;
use crate::math::exp;
use crate::model::linear::{Linear, Norm, padded};
use crate::model::memory::{Size, Stack};
use crate::model::pass::Pass;
use crate::model::rows::as_columns;
use crate::model::tensors::{Declared, LinearName, Loaded, Name, matrix, vector};

pub use config::HyperConfig;

/// Names of the connections of attention, of the feed-forward, and of the output.
struct Names {
    weights: LinearName,
    base: Name,
    scales: Name,
    gated: GatedNames,
}

const ATTENTION: Names = Names {
    weights: LinearName("hc_attn_fn"),
    base: Name::weight("hc_attn_base"),
    scales: Name::weight("hc_attn_scale"),
    gated: gated::ATTENTION,
};
const FFN: Names = Names {
    weights: LinearName("hc_ffn_fn"),
    base: Name::weight("hc_ffn_base"),
    scales: Name::weight("hc_ffn_scale"),
    gated: gated::FFN,
};
const OUTPUT: Names = Names {
    weights: LinearName("output_hc_fn"),
    base: Name::weight("output_hc_base"),
    scales: Name::weight("output_hc_scale"),
    gated: gated::OUTPUT,
};

impl HyperConfig {
    /// Declares the tensors of a layer of a model of width `d`.
    pub(super) fn tensors(&self, t: &mut Declared<'_>, d: usize) {
        for names in [ATTENTION, FFN] {
            if let Some(rank) = self.rank {
                names.gated.tensors(t, (self.n, d), rank);
                continue;
            }
            t.required(names.weights.weight(), matrix(self.n_weights(), self.n * d));
            t.required(names.base, vector(self.n_weights()));
            t.required(names.scales, vector(self.n_scales()));
        }
    }

    /// Declares the tensors of the output.
    pub(super) fn output_tensors(&self, t: &mut Declared<'_>, d: usize) {
        if let Some(rank) = self.rank {
            return OUTPUT.gated.tensors(t, (self.n, d), rank);
        }
        t.optional(OUTPUT.weights.weight(), matrix(self.n, self.n * d));
        t.optional(OUTPUT.base, vector(self.n));
        t.optional(OUTPUT.scales, vector(1));
    }
}

/// Weights of the connections of a sub-layer, or of the output.
pub(super) enum HyperWeights {
    /// A weight per stream.
    Weighted(Box<WeightedStreams>),
    /// A gate per element.
    Gated(Box<GatedWeights>),
}

/// Weights of connections that have a weight per stream.
pub(super) struct WeightedStreams {
    /// The norm over all streams, without weights.
    norm: Norm,
    /// (weights, n * n_embd)
    linear: Linear,
    /// Added to them (weights).
    base: Vec<f32>,
    /// Their factors: of reads, writes and mix.
    scales: Vec<f32>,
}

impl HyperWeights {
    /// Takes the connections of attention and feed-forward; streams have `d` elements.
    pub(super) fn of_layer(t: &mut Loaded<'_>, d: usize) -> Result<[HyperWeights; 2], LoadError> {
        let [attention, ffn] = [ATTENTION, FFN].map(|names| HyperWeights::load(t, &names, d));
        let missing = || t.missing(ATTENTION.weights.weight());
        Ok([attention?.ok_or_else(missing)?, ffn?.ok_or_else(missing)?])
    }

    /// Takes those of the output, if they exist or are needed.
    pub(super) fn of_output(t: &mut Loaded<'_>, is_needed: bool, d: usize) -> Result<Option<HyperWeights>, LoadError> {
        match HyperWeights::load(t, &OUTPUT, d)? {
            None if is_needed => Err(t.missing(OUTPUT.weights.weight())),
            weights => Ok(weights),
        }
    }

    fn load(t: &mut Loaded<'_>, names: &Names, d: usize) -> Result<Option<HyperWeights>, LoadError> {
        if let Some(gated) = GatedWeights::load(t, &names.gated, d)? {
            return Ok(Some(HyperWeights::Gated(Box::new(gated))));
        }
        if !t.has(names.weights.weight()) {
            return Ok(None);
        }
        let (base, scales, linear) = (t.required(names.base)?, t.required(names.scales)?, t.linear(names.weights)?);
        let norm = Norm::plain(linear.w.k());
        Ok(Some(HyperWeights::Weighted(Box::new(WeightedStreams { norm, linear, base, scales }))))
    }

    /// Weights that the sub-layer's output is written with, and others of the same buffer.
    fn n_weights(&self) -> usize {
        match self {
            HyperWeights::Weighted(w) => w.linear.w.rows(),
            HyperWeights::Gated(w) => w.n_weights(),
        }
    }

    /// All matrices.
    pub(super) fn matrices(&self) -> Vec<&Matrix> {
        match self {
            HyperWeights::Weighted(w) => vec![&w.linear.w],
            HyperWeights::Gated(w) => w.matrices().collect(),
        }
    }

    /// Temporaries of reading `n` rows.
    fn size(&self, config: &HyperConfig, n: usize, d: usize) -> Size {
        match self {
            HyperWeights::Weighted(w) => w.linear.size(n),
            HyperWeights::Gated(w) => w.size(config, n, d),
        }
    }

    /// Temporaries of the output of `n` rows of a model of width `d`.
    pub(super) fn output_size(&self, config: &HyperConfig, n: usize, d: usize) -> Size {
        Size::rows(n, [padded(self.n_weights())]).and(self.size(config, n, d))
    }
}

/// Temporaries of a block beside those of all blocks; `inner` are those of sub-layers.
pub(super) fn size(weights: &[HyperWeights; 2], c: &LayerView<'_>, n: usize, inner: Size) -> Size {
    let Some(config) = &c.residual.hyper else { return inner };
    let reads = weights.iter().map(|w| w.size(config, n, c.d));
    Size::rows(n, [weights_width(weights)]).and(inner.or(Size::any(reads)))
}

/// Floats of a row of weights of both sub-layers.
fn weights_width(weights: &[HyperWeights; 2]) -> usize {
    weights.iter().map(|w| padded(w.n_weights())).max().unwrap_or(0)
}

impl WeightedStreams {
    /// `m[i] * scale + base[i]`.
    fn affine(&self, m: &[f32], i: usize, scale: usize) -> f64 {
        f64::from(m[i] * self.scales[scale] + self.base[i])
    }
}

/// Weights of the mix, `c[i * n + j]` of stream i in stream j, from their logarithms.
fn sinkhorn(config: &HyperConfig, iterations: usize, c: &mut [f64]) {
    let (n, eps) = (config.n, config.eps);
    for row in c.chunks_exact_mut(n) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.iter_mut().for_each(|x| *x = exp(*x - max));
        let sum: f64 = row.iter().sum();
        row.iter_mut().for_each(|x| *x = *x / sum + eps);
    }
    for i in 0..iterations {
        if i > 0 {
            for row in c.chunks_exact_mut(n) {
                let sum = row.iter().sum::<f64>() + eps;
                row.iter_mut().for_each(|x| *x /= sum);
            }
        }
        for j in 0..n {
            let sum = c.iter().skip(j).step_by(n).sum::<f64>() + eps;
            c.iter_mut().skip(j).step_by(n).for_each(|x| *x /= sum);
        }
    }
}

/// The streams before the first layer: the embeddings.
pub(super) fn begin(pass: &Pass<'_, '_>, config: &HyperConfig, x: &[f32], streams: &mut [f32]) {
    let (d, width) = (pass.d, config.n * pass.d);
    pass.rows.each(&mut streams[..pass.n * width], width, &|r, streams| {
        streams.chunks_exact_mut(d).for_each(|stream| stream.copy_from_slice(&x[r * d..][..d]));
    });
}

/// The residual stream after the last layer.
pub(super) fn end(
    pass: &Pass<'_, '_>,
    config: &HyperConfig,
    output: Option<&HyperWeights>,
    x: &mut [f32],
    s: &mut Streams,
    stack: &mut Stack<'_>,
) {
    let (d, rows) = (pass.d, pass.rows);
    if let Some(output) = output {
        let [weights] = stack.rows(pass.n, [padded(output.n_weights())]);
        return read_streams(pass, (config, output), x, s, weights, stack);
    }
    let streams = &s.all;
    rows.each(x, d, &|r, x| {
        let streams = &streams[r * config.n * d..][..config.n * d];
        x.copy_from_slice(&streams[..d]);
        streams[d..].chunks_exact(d).for_each(|stream| add_scaled(rows.cpu, x, stream, 1.0));
        scale(rows.cpu, x, 1.0 / config.n as f32);
    });
}

/// A block of a model with hyper-connections.
pub(super) fn block(
    layer: &Layer,
    weights: &[HyperWeights; 2],
    pass: &mut Pass<'_, '_>,
    c: LayerView<'_>,
    s: &mut Batch,
    memory: &mut KvMemory,
    stack: &mut Stack<'_>,
) {
    let Some(config) = &c.residual.hyper else { return };
    let Batch { x, mixers, tokens, streams, .. } = s;
    let x = &mut x[..pass.n * c.d];
    let mut rows = layer.take(pass.n, &c, x, stack);
    let [buffer] = stack.rows(pass.n, [weights_width(weights)]);
    let [of_attention, of_ffn] = weights;
    if let (Some(ngrams), Some(config), Some(table)) = (&layer.ngrams, &c.embedding.ngrams, c.ngram_table) {
        ngrams.run(pass, (config, table), (&mut streams.all, tokens), memory, stack);
    }
    let weights = &mut buffer[..pass.n * padded(of_attention.n_weights())];
    read_streams(pass, (config, of_attention), x, streams, weights, stack);
    layer.mix(pass, c, (x, &mut rows), (mixers, &mut *memory), stack);
    write_streams(pass, (config, of_attention), rows.y, streams, weights);
    let weights = &mut buffer[..pass.n * padded(of_ffn.n_weights())];
    read_streams(pass, (config, of_ffn), x, streams, weights, stack);
    layer.feed_forward(pass, c, (x, &mut rows), (tokens, memory), stack);
    write_streams(pass, (config, of_ffn), rows.y, streams, weights);
}

/// Computes the weights of the connections, and reads the input of a sub-layer.
fn read_streams(
    pass: &Pass<'_, '_>,
    (config, w): (&HyperConfig, &HyperWeights),
    x: &mut [f32],
    s: &mut Streams,
    weights: &mut [f32],
    stack: &mut Stack<'_>,
) {
    let (d, n, rows) = (pass.d, pass.n, pass.rows);
    let width = config.n * d;
    let (streams, normed) = (&s.all[..n * width], &mut s.next[..n * width]);
    let w = match w {
        HyperWeights::Weighted(w) => w,
        HyperWeights::Gated(w) => return w.read(pass, config, x, (streams, normed, weights), stack),
    };
    let stride = padded(w.linear.w.rows());
    rows.norm(&w.norm, streams, width, normed);
    rows.matrix(&w.linear.w, w.linear.bias.as_deref(), as_columns(normed, &w.linear.w), weights, stack);
    let weights = &*weights;
    rows.each(x, d, &|r, x| {
        let m = &weights[r * stride..][..stride];
        for (j, stream) in streams[r * width..][..width].chunks_exact(d).enumerate() {
            let factor = (logistic(w.affine(m, j, 0)) + config.eps) as f32;
            if j == 0 {
                x.copy_from_slice(stream);
                scale(rows.cpu, x, factor);
            } else {
                add_scaled(rows.cpu, x, stream, factor);
            }
        }
    });
}

/// Adds the output of a sub-layer to the streams.
fn write_streams(
    pass: &Pass<'_, '_>,
    (config, w): (&HyperConfig, &HyperWeights),
    y: &[f32],
    s: &mut Streams,
    weights: &[f32],
) {
    let w = match w {
        HyperWeights::Weighted(w) => w,
        HyperWeights::Gated(_) => return gated::write(pass, config, y, &mut s.all, weights),
    };
    let (d, n, rows, count) = (pass.d, pass.n, pass.rows, config.n);
    let (width, stride) = (count * d, padded(w.linear.w.rows()));
    let factor =
        |m: &[f32], j: usize| (config.magnitude * logistic(w.affine(m, count + j, 1)) + config.write_eps) as f32;
    let Some(iterations) = config.sinkhorn else {
        rows.each(&mut s.all[..n * width], width, &|r, streams| {
            let m = &weights[r * stride..][..stride];
            for (j, stream) in streams.chunks_exact_mut(d).enumerate() {
                add_scaled(rows.cpu, stream, &y[r * padded(d)..][..d], factor(m, j));
            }
        });
        return;
    };
    let streams = &s.all[..n * width];
    rows.each(&mut s.next[..n * width], width, &|r, next| {
        let (m, streams) = (&weights[r * stride..][..stride], &streams[r * width..][..width]);
        let mut mix = [0.0; MAX_STREAMS * MAX_STREAMS];
        let mix = &mut mix[..count * count];
        for (i, c) in mix.iter_mut().enumerate() {
            *c = w.affine(m, 2 * count + i, 2);
        }
        sinkhorn(config, iterations, mix);
        for (j, next) in next.chunks_exact_mut(d).enumerate() {
            next.copy_from_slice(&y[r * padded(d)..][..d]);
            scale(rows.cpu, next, factor(m, j));
            for (i, stream) in streams.chunks_exact(d).enumerate() {
                add_scaled(rows.cpu, next, stream, mix[i * count + j] as f32);
            }
        }
    });
    core::mem::swap(&mut s.all, &mut s.next);
}
