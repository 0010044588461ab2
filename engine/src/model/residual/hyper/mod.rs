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

pub(crate) mod gated;

use alloc::boxed::Box;
use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::attention::KvMemory;
use crate::kernels::elementwise::{add_scaled, scale};
use crate::kernels::panel::Matrix;
use crate::math::exp;
use crate::model::forward::Stage;
use crate::model::keys::Keys;
use crate::model::keys::MAX_WIDTH;
use crate::model::loader::LoadedTensors;
use crate::model::residual::hyper::gated::GatedWeights;
use crate::model::residual::orders::{ForwardPass, SubLayerRows};
use crate::model::roles::{Need, Role, Scope, TensorRow, matrix, vector};
use crate::model::rows::{as_columns, columns};
use crate::model::scratch::Scratch;
use crate::model::weights::{Linear, Norm, linear, padded};

/// Streams at most: beyond any known model.
const MAX_STREAMS: usize = 16;

/// Sizes and constants of a model's hyper-connections.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HyperConfig {
    /// Number of streams.
    pub n: usize,
    /// Added to weights.
    eps: f64,
    /// Factor of the weights of outputs, and what is added to them.
    magnitude: f64,
    write_eps: f64,
    /// Divisions of columns, if streams are mixed.
    sinkhorn: Option<usize>,
    /// Rank of the gates, if each element has one ([`gated`]).
    pub(crate) rank: Option<usize>,
}

impl HyperConfig {
    /// Reads the configuration of a model that has hyper-connections.
    pub(crate) fn read(keys: &Keys<'_, '_>) -> Result<Option<HyperConfig>, LoadError> {
        let name = "hyper_connection.count";
        let Some(n) = keys.u32(name)? else { return Ok(None) };
        let n = keys.in_range(name, Some(n), 2..=MAX_STREAMS as u32)?;
        let eps = f64::from(keys.f32("hyper_connection.epsilon")?.unwrap_or(1e-6));
        let magnitude = keys.f32("hyper_connection.magnitude")?.map(f64::from);
        let iterations = "hyper_connection.sinkhorn_iterations";
        let sinkhorn = keys.u32(iterations)?;
        let sinkhorn = sinkhorn.map(|n| keys.in_range(iterations, Some(n), 1..=1000)).transpose()?;
        let write_eps = if magnitude.is_some() { eps } else { 0.0 };
        let low_rank = "hyper_connection.low_rank";
        let rank = keys.u32(low_rank)?;
        let rank = rank.map(|rank| keys.in_range(low_rank, Some(rank), 1..=MAX_WIDTH)).transpose()?;
        Ok(Some(HyperConfig { n, eps, magnitude: magnitude.unwrap_or(2.0), write_eps, sinkhorn, rank }))
    }

    /// Weights of a sub-layer: of reads, of writes, and of the mix.
    fn n_weights(&self) -> usize {
        self.n * if self.sinkhorn.is_some() { 2 + self.n } else { 2 }
    }

    /// Scales of these.
    fn n_scales(&self) -> usize {
        if self.sinkhorn.is_some() { 3 } else { 2 }
    }
}

/// Connections that do not gate each element.
fn config(c: &Scope<'_>) -> Option<HyperConfig> {
    c.residual.hyper.filter(|hyper| hyper.rank.is_none())
}

fn weights(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    let hyper = config(c)?;
    matrix(hyper.n_weights(), hyper.n * c.n_embd)
}

fn base(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    vector(config(c)?.n_weights())
}

fn scales(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    vector(config(c)?.n_scales())
}

/// The tensors of a layer.
pub(crate) const TENSORS: &[TensorRow] = &[
    TensorRow::new("hc_attn_fn.weight", weights).need(Need::EachLayer),
    TensorRow::new("hc_attn_base.weight", base).need(Need::EachLayer),
    TensorRow::new("hc_attn_scale.weight", scales).need(Need::EachLayer),
    TensorRow::new("hc_ffn_fn.weight", weights).need(Need::EachLayer),
    TensorRow::new("hc_ffn_base.weight", base).need(Need::EachLayer),
    TensorRow::new("hc_ffn_scale.weight", scales).need(Need::EachLayer),
];

/// The tensors outside of layers.
pub(crate) const MODEL_TENSORS: &[TensorRow] = &[
    TensorRow::new("output_hc_fn.weight", |c, _| matrix(config(c)?.n, config(c)?.n * c.n_embd)),
    TensorRow::new("output_hc_base.weight", |c, _| vector(config(c)?.n)),
    TensorRow::new("output_hc_scale.weight", |c, _| {
        config(c)?;
        vector(1)
    }),
];

/// Weights of the connections of a sub-layer, or of the output.
pub enum HyperWeights {
    /// A weight per stream.
    Weighted(Box<WeightedStreams>),
    /// A gate per element.
    Gated(Box<GatedWeights>),
}

/// Weights of connections that have a weight per stream.
pub struct WeightedStreams {
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
    /// Takes the tensors `NAME_fn`, `NAME_base` and `NAME_scale`, or those of gates, if they exist; streams have `d` elements.
    pub(crate) fn load(tensors: &mut LoadedTensors, name: &str, d: usize) -> Result<Option<HyperWeights>, LoadError> {
        if tensors.has(&format!("{name}_down.weight")) {
            return Ok(Some(HyperWeights::Gated(Box::new(GatedWeights::load(tensors, name, d)?))));
        }
        if !tensors.has(&format!("{name}_fn.weight")) {
            return Ok(None);
        }
        let [base, scales] = ["base", "scale"].map(|part| tensors.required(&format!("{name}_{part}.weight")));
        let linear = linear(tensors, &format!("{name}_fn"))?;
        let norm = Norm::plain(linear.w.k());
        let streams = WeightedStreams { norm, linear, base: base?, scales: scales? };
        Ok(Some(HyperWeights::Weighted(Box::new(streams))))
    }

    /// Weights that the sub-layer's output is written with, and others of the same buffer.
    pub(crate) fn n_weights(&self) -> usize {
        match self {
            HyperWeights::Weighted(w) => w.linear.w.rows(),
            HyperWeights::Gated(w) => w.n_weights(),
        }
    }

    /// All matrices.
    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        match self {
            HyperWeights::Weighted(w) => vec![&w.linear.w],
            HyperWeights::Gated(w) => w.matrices().collect(),
        }
    }
}

impl WeightedStreams {
    /// `m[i] * scale + base[i]`.
    fn affine(&self, m: &[f32], i: usize, scale: usize) -> f64 {
        f64::from(m[i] * self.scales[scale] + self.base[i])
    }
}

/// Buffers of the streams.
pub(crate) struct HyperScratch {
    /// (rows, n, n_embd)
    pub(crate) streams: Vec<f32>,
    /// The same: their norm, and the next streams.
    pub(crate) next: Vec<f32>,
    /// (rows, padded weights)
    pub(crate) weights: Vec<f32>,
    /// (rows, padded rank), (rows, padded n * n_embd): gates of elements.
    pub(crate) low: Vec<f32>,
    pub(crate) gates: Vec<f32>,
}

fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + exp(-x))
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

impl ForwardPass<'_, '_> {
    /// The streams before the first layer: the embeddings.
    pub(crate) fn begin_streams(&self, config: &HyperConfig, s: &mut Scratch) {
        let (d, width) = (self.model.config.n_embd, config.n * self.model.config.n_embd);
        let (x, streams) = (&s.x, &mut s.hyper.streams[..self.n * width]);
        self.rows.each(streams, width, &|r, streams| {
            streams.chunks_exact_mut(d).for_each(|stream| stream.copy_from_slice(&x[r * d..][..d]));
        });
    }

    /// The residual stream after the last layer.
    pub(crate) fn end_streams(&self, config: &HyperConfig, s: &mut Scratch) {
        let (model, d, n) = (self.model, self.model.config.n_embd, self.n);
        if let Some(weights) = &model.weights.hyper_output {
            self.read_streams(config, weights, s);
            return;
        }
        let (x, streams, rows) = (&mut s.x[..n * d], &s.hyper.streams, self.rows);
        rows.each(x, d, &|r, x| {
            let streams = &streams[r * config.n * d..][..config.n * d];
            x.copy_from_slice(&streams[..d]);
            streams[d..].chunks_exact(d).for_each(|stream| add_scaled(rows.cpu, x, stream, 1.0));
            scale(rows.cpu, x, 1.0 / config.n as f32);
        });
    }

    /// A block of a model with hyper-connections.
    pub(crate) fn hyper_block(
        &mut self,
        i: usize,
        weights: &[HyperWeights; 2],
        memory: &mut KvMemory,
        s: &mut Scratch,
    ) {
        let Some(config) = self.model.config.residual.hyper else { return };
        let (layer, d, n) = (self.model.layer(i), self.model.config.n_embd, self.n);
        let [attention_weights, ffn_weights] = weights;
        if let Some(ngrams) = &layer.ngrams {
            self.add_ngrams(ngrams, memory, s);
        }
        self.read_streams(&config, attention_weights, s);
        {
            let Scratch { x, h, y, step, attention, .. } = &mut *s;
            let (x, h, y) = (&mut x[..n * d], &mut h[..n * d], &mut y[..n * padded(d)]);
            let input = self.rows.normed(layer.attn_norm.as_ref(), x, h);
            self.trace_stage(Stage::AttnNorm, Some(i), &mut columns(input, d, 0, d));
            self.mixer(i, SubLayerRows { x: input, y }, attention, memory, step);
        }
        self.write_streams(&config, attention_weights, s);
        self.read_streams(&config, ffn_weights, s);
        {
            let Scratch { x, h, y, step, experts, .. } = &mut *s;
            let (x, h, y) = (&mut x[..n * d], &mut h[..n * d], &mut y[..n * padded(d)]);
            let input = self.rows.normed(layer.ffn_norm.as_ref(), x, h);
            self.trace_stage(Stage::FfnNorm, Some(i), &mut columns(input, d, 0, d));
            self.ffn(i, SubLayerRows { x: input, y }, &mut memory.states, experts, step);
        }
        self.write_streams(&config, ffn_weights, s);
    }

    /// Computes the weights of the connections, and reads the input of a sub-layer.
    fn read_streams(&self, config: &HyperConfig, w: &HyperWeights, s: &mut Scratch) {
        let w = match w {
            HyperWeights::Weighted(w) => w,
            HyperWeights::Gated(w) => return self.read_gated(config, w, s),
        };
        let (d, n, rows) = (self.model.config.n_embd, self.n, self.rows);
        let width = config.n * d;
        let Scratch { x, step, hyper, .. } = s;
        let (streams, normed) = (&hyper.streams[..n * width], &mut hyper.next[..n * width]);
        let stride = padded(w.linear.w.rows());
        let weights = &mut hyper.weights[..n * stride];
        rows.norm(&w.norm, streams, width, normed);
        rows.matrix(&w.linear.w, w.linear.bias.as_deref(), as_columns(normed, &w.linear.w), weights, &mut step.words);
        let weights = &*weights;
        rows.each(&mut x[..n * d], d, &|r, x| {
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
    fn write_streams(&self, config: &HyperConfig, w: &HyperWeights, s: &mut Scratch) {
        let w = match w {
            HyperWeights::Weighted(w) => w,
            HyperWeights::Gated(_) => return self.write_gated(config, s),
        };
        let (d, n, rows, count) = (self.model.config.n_embd, self.n, self.rows, config.n);
        let (width, stride) = (count * d, padded(w.linear.w.rows()));
        let Scratch { y, hyper, .. } = s;
        let weights = &hyper.weights[..n * stride];
        let factor =
            |m: &[f32], j: usize| (config.magnitude * logistic(w.affine(m, count + j, 1)) + config.write_eps) as f32;
        let Some(iterations) = config.sinkhorn else {
            rows.each(&mut hyper.streams[..n * width], width, &|r, streams| {
                let m = &weights[r * stride..][..stride];
                for (j, stream) in streams.chunks_exact_mut(d).enumerate() {
                    add_scaled(rows.cpu, stream, &y[r * padded(d)..][..d], factor(m, j));
                }
            });
            return;
        };
        let streams = &hyper.streams[..n * width];
        rows.each(&mut hyper.next[..n * width], width, &|r, next| {
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
        core::mem::swap(&mut hyper.streams, &mut hyper.next);
    }
}
