//! AltUp (Baykal et al., arXiv:2301.13310), as Gemma 3n has it: several residual streams, of which a block computes one and
//! predicts and corrects the others; and the low-rank residual path Laurel (arXiv:2411.07501).
//!
//! ```text
//! m = tanh(router norm(x[0]) / n_embd)                      one value per stream
//! p[j] = x[j] + sum_a (sum_m P[j][a][m] * m) * x[a]         predictions
//! h = norm(p[0]);  y = p[0] + post_norm(attention(h))
//! y = (y + h + norm(R L h)) / sqrt(2);  y = y + post_norm(ffn(norm(y)))
//! m = tanh(router norm(y) / n_embd)
//! x[j] = p[j] + (y - p[0]) * (1 + sum_m C[j][m] * m)        corrections
//! x[j] = x[j] + layer_embedding(x[0] * scale)               for j > 0
//! ```

use alloc::vec::Vec;

use crate::error::LoadError;
use crate::model::keys::Keys;

use crate::kernels::Cpu;
use crate::kernels::act::Floats;
use crate::kernels::attention::KvMemory;
use crate::kernels::elementwise::{add_scaled, multiply, scale, soft_cap};
use crate::kernels::norm::mean_square;
use crate::math::sqrt;
use crate::model::forward::Stage;
use crate::model::residual::orders::{ForwardPass, ResidualRows, SubLayerRows};
use crate::model::rows::{as_columns, columns};
use crate::model::scratch::{Scratch, StepScratch};
use crate::model::weights::{AltUp, AltUpProjections, Laurel, padded};

/// Reads the number of residual streams. The first one must be the one that blocks compute.
pub(crate) fn read(keys: &Keys<'_, '_>) -> Result<usize, LoadError> {
    keys.in_range("altup.active_idx", keys.u32("altup.active_idx")?.or(Some(0)), 0..=0)?;
    keys.size("altup.num_inputs", 2..=16)
}

/// Buffers of the streams.
pub(crate) struct AltUpScratch {
    /// (rows, streams, n_embd)
    pub(crate) streams: Vec<f32>,
    pub(crate) predictions: Vec<f32>,
    /// (rows, padded streams)
    pub(crate) router: Vec<f32>,
    /// (rows, padded n_embd): output of Laurel; projections of a stream.
    pub(crate) laurel: Vec<f32>,
}

/// Least mean square of a projected stream.
const LEAST_SQUARE: f32 = 1e-5;

/// `y = y * (magnitude of x / magnitude of y)`.
fn match_magnitude(cpu: Cpu, x: &[f32], y: &mut [f32]) {
    let (target, own) = (mean_square(cpu, x), mean_square(cpu, y));
    let own = if own > LEAST_SQUARE { own } else { LEAST_SQUARE };
    scale(cpu, y, sqrt(target) / sqrt(own));
}

impl ForwardPass<'_, '_> {
    /// The streams before the first layer: the residual stream, and projections of it of the same magnitude.
    pub(crate) fn split_streams(&self, of: &AltUpProjections, s: &mut Scratch) {
        let (d, n, rows) = (self.model.config.n_embd, self.n, self.rows);
        let Scratch { x, step, altup, .. } = s;
        let (x, width) = (&x[..n * d], self.model.config.residual.n_altup * d);
        let (streams, projected) = (&mut altup.streams[..n * width], &mut altup.laurel[..n * padded(d)]);
        rows.each(streams, width, &|r, streams| streams[..d].copy_from_slice(&x[r * d..][..d]));
        for (j, w) in of.split.iter().enumerate() {
            rows.matrix(w, None, as_columns(x, w), projected, &mut step.words);
            rows.each(streams, width, &|r, streams| {
                let (first, others) = streams.split_at_mut(d);
                let stream = &mut others[j * d..][..d];
                stream.copy_from_slice(&projected[r * padded(d)..][..d]);
                match_magnitude(rows.cpu, first, stream);
            });
        }
    }

    /// The residual stream after the last layer: the mean of the first stream and projections of the others, of its
    /// magnitude.
    pub(crate) fn merge_streams(&self, of: &AltUpProjections, s: &mut Scratch) {
        let (d, n, rows) = (self.model.config.n_embd, self.n, self.rows);
        let Scratch { x, h, step, altup, .. } = s;
        let (x, h, count) = (&mut x[..n * d], &mut h[..n * d], self.model.config.residual.n_altup);
        let (streams, projected) = (&altup.streams[..n * count * d], &mut altup.laurel[..n * padded(d)]);
        rows.each(x, d, &|r, x| x.copy_from_slice(&streams[r * count * d..][..d]));
        for (j, w) in of.merge.iter().enumerate() {
            rows.each(h, d, &|r, h| h.copy_from_slice(&streams[(r * count + j + 1) * d..][..d]));
            rows.matrix(w, None, as_columns(h, w), projected, &mut step.words);
            rows.each(projected, padded(d), &|r, y| {
                match_magnitude(rows.cpu, &streams[r * count * d..][..d], &mut y[..d]);
            });
            rows.add(x, d, projected, padded(d), 1.0);
        }
        rows.each(x, d, &|_, x| scale(rows.cpu, x, 1.0 / count as f32));
    }

    /// A block of a model with several residual streams.
    pub(crate) fn altup_block(&mut self, i: usize, altup: &AltUp, memory: &mut KvMemory, s: &mut Scratch) {
        self.predict(altup, s);
        let Scratch { x, h, y, step, attention, experts, embeddings, altup: buffers, .. } = s;
        let (model, d, n, rows) = (self.model, self.model.config.n_embd, self.n, self.rows);
        let (layer, width) = (model.layer(i), model.config.residual.n_altup * d);
        let (x, h, y) = (&mut x[..n * d], &mut h[..n * d], &mut y[..n * padded(d)]);
        let input = rows.normed(layer.attn_norm.as_ref(), x, h);
        self.trace_stage(Stage::AttnNorm, Some(i), &mut columns(input, d, 0, d));
        let laurel = &mut buffers.laurel[..n * padded(d)];
        self.laurel(&altup.laurel, SubLayerRows { x: input, y: laurel }, step);
        self.mixer(i, SubLayerRows { x: input, y }, attention, memory, step);
        self.add(i, layer.post_attn_norm.as_ref(), Stage::PostAttnNorm, ResidualRows { x, y, h });
        rows.add(x, d, laurel, padded(d), 1.0);
        rows.each(x, d, &|_, x| scale(rows.cpu, x, core::f32::consts::FRAC_1_SQRT_2));
        let input = rows.normed(layer.ffn_norm.as_ref(), x, h);
        self.trace_stage(Stage::FfnNorm, Some(i), &mut columns(input, d, 0, d));
        self.ffn(i, SubLayerRows { x: input, y }, &mut memory.states, experts, step);
        self.add(i, layer.post_ffn_norm.as_ref(), Stage::PostFfnNorm, ResidualRows { x, y, h });

        let router = &mut buffers.router[..n * padded(model.config.residual.n_altup)];
        self.stream_weights(altup, (x, d), (h, router), step);
        let (streams, predictions) = (&mut buffers.streams[..n * width], &buffers.predictions[..n * width]);
        let (x, router) = (&*x, &*router);
        rows.each(streams, width, &|r, streams| {
            let (x, predictions) = (&x[r * d..][..d], &predictions[r * width..][..width]);
            let weights = &router[r * padded(model.config.residual.n_altup)..][..model.config.residual.n_altup];
            for ((stream, prediction), factors) in streams
                .chunks_exact_mut(d)
                .zip(predictions.chunks_exact(d))
                .zip(altup.correct.chunks_exact(model.config.residual.n_altup))
            {
                let factor = 1.0 + dot(factors, weights);
                stream.copy_from_slice(x);
                add_scaled(rows.cpu, stream, &predictions[..d], -1.0);
                scale(rows.cpu, stream, factor);
                add_scaled(rows.cpu, stream, prediction, 1.0);
            }
        });
        let Some(embedding) = &layer.embedding else { return };
        rows.each(h, d, &|r, h| {
            h.copy_from_slice(&streams[r * width..][..d]);
            multiply(rows.cpu, h, &altup.correct_scale);
        });
        self.layer_embedding(i, embedding, SubLayerRows { x: h, y }, embeddings, step);
        rows.norm(&embedding.norm, y, padded(d), h);
        self.trace_stage(Stage::LayerEmbedding, Some(i), &mut columns(h, d, 0, d));
        let h = &*h;
        rows.each(streams, width, &|r, streams| {
            for stream in streams.chunks_exact_mut(d).skip(1) {
                add_scaled(rows.cpu, stream, &h[r * d..][..d], 1.0);
            }
        });
    }

    /// Predictions of the streams; that of the first one is the residual stream of the block.
    fn predict(&self, altup: &AltUp, s: &mut Scratch) {
        let Scratch { x, h, step, altup: buffers, .. } = s;
        let (d, n, rows, count) = (self.model.config.n_embd, self.n, self.rows, self.model.config.residual.n_altup);
        let (x, h, width) = (&mut x[..n * d], &mut h[..n * d], count * d);
        let router = &mut buffers.router[..n * padded(count)];
        let streams = &buffers.streams[..n * width];
        self.stream_weights(altup, (streams, width), (h, router), step);
        let (predictions, router) = (&mut buffers.predictions[..n * width], &*router);
        rows.each(predictions, width, &|r, predictions| {
            let (streams, weights) = (&streams[r * width..][..width], &router[r * padded(count)..][..count]);
            predictions.copy_from_slice(streams);
            for (prediction, factors) in predictions.chunks_exact_mut(d).zip(altup.predict.chunks_exact(count * count))
            {
                for (stream, factors) in streams.chunks_exact(d).zip(factors.chunks_exact(count)) {
                    add_scaled(rows.cpu, prediction, stream, dot(factors, weights));
                }
            }
        });
        let predictions = &*predictions;
        rows.each(x, d, &|r, x| x.copy_from_slice(&predictions[r * width..][..d]));
    }

    /// `tanh(router norm(x) / n_embd)` of rows that are `stride` apart.
    fn stream_weights(
        &self,
        altup: &AltUp,
        (x, stride): (&[f32], usize),
        (h, router): (&mut [f32], &mut [f32]),
        step: &mut StepScratch,
    ) {
        let (d, rows) = (self.model.config.n_embd, self.rows);
        rows.norm(&altup.router_norm, x, stride, h);
        rows.each(h, d, &|_, h| scale(rows.cpu, h, 1.0 / d as f32));
        rows.linear(&altup.router, h, router, &mut step.words);
        rows.each(router, padded(self.model.config.residual.n_altup), &|_, row| soft_cap(rows.cpu, row, 1.0));
    }

    /// `y = x + norm(R L x)`.
    fn laurel(&self, laurel: &Laurel, SubLayerRows { x, y }: SubLayerRows<'_>, step: &mut StepScratch) {
        let (d, rows, stride) = (self.model.config.n_embd, self.rows, padded(laurel.left.w.rows()));
        let wide = &mut step.wide[..self.n * stride];
        rows.linear(&laurel.left, x, wide, &mut step.words);
        let right = &laurel.right;
        rows.matrix(&right.w, right.bias.as_deref(), Floats { x: wide, stride }, y, &mut step.words);
        rows.norm_beginnings(&laurel.norm, y, padded(d));
        rows.each(y, padded(d), &|r, y| add_scaled(rows.cpu, &mut y[..d], &x[r * d..][..d], 1.0));
    }
}

/// The sum of products, in order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b)
}
