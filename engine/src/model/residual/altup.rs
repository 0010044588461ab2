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

use alloc::format;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::model::keys::Keys;

use super::batch::Batch;
use super::layer::{BlockRows, Layer, LayerView, add};
use crate::kernels::Cpu;
use crate::kernels::act::Floats;
use crate::kernels::attention::KvMemory;
use crate::kernels::elementwise::{add_scaled, multiply, scale, soft_cap};
use crate::kernels::norm::mean_square;
use crate::kernels::panel::Matrix;
use crate::math::sqrt;
use crate::model::linear::{Linear, Norm, padded};
use crate::model::memory::{Size, Stack};
use crate::model::pass::{Pass, Stage, SubLayerRows};
use crate::model::rows::{as_columns, columns};
use crate::model::tensors::{Declared, LinearName, Loaded, Name, NormName, Shape, any_width, matrix, values, vector};

/// Reads the number of residual streams. The first one must be the one that blocks compute.
pub(crate) fn read(keys: &Keys<'_, '_>) -> Result<usize, LoadError> {
    keys.in_range("altup.active_idx", keys.u32("altup.active_idx")?.or(Some(0)), 0..=0)?;
    keys.size("altup.num_inputs", 2..=16)
}

/// Least mean square of a projected stream.
const LEAST_SQUARE: f32 = 1e-5;

/// `y = y * (magnitude of x / magnitude of y)`.
fn match_magnitude(cpu: Cpu, x: &[f32], y: &mut [f32]) {
    let (target, own) = (mean_square(cpu, x), mean_square(cpu, y));
    let own = if own > LEAST_SQUARE { own } else { LEAST_SQUARE };
    scale(cpu, y, sqrt(target) / sqrt(own));
}

/// Weights of AltUp in a layer.
pub(crate) struct AltUp {
    /// Norm of the router's input (n_embd).
    router_norm: Norm,
    /// (n_altup, n_embd)
    router: Linear,
    /// (n_altup, n_altup, n_altup): factors of the predictions, by stream, stream that it reads, and router output.
    predict: Vec<f32>,
    /// (n_altup, n_altup): factors of the corrections, by stream and router output.
    correct: Vec<f32>,
    /// Factor on the first stream before the layer's embedding (n_embd).
    correct_scale: Vec<f32>,
    /// A low-rank path beside attention.
    laurel: Laurel,
}

/// A low-rank residual path: `x + norm(right left x)`.
pub(crate) struct Laurel {
    /// (rank, n_embd)
    left: Linear,
    /// (n_embd, rank)
    right: Linear,
    /// (n_embd)
    norm: Norm,
}

/// Projections between the residual stream outside of the layers and the streams of AltUp but the first (n_embd, n_embd).
pub(crate) struct AltUpProjections {
    /// To the streams.
    split: Vec<Matrix>,
    /// From the streams.
    merge: Vec<Matrix>,
}

const ROUTER_NORM: NormName = NormName("altup_router_norm");
const ROUTER: LinearName = LinearName("altup_router");
const PREDICT: Name = Name::weight("altup_predict_coef");
const CORRECT: Name = Name::weight("altup_correct_coef");
const CORRECT_SCALE: Name = Name::weight("altup_correct_scale");
const LAUREL_LEFT: LinearName = LinearName("laurel_l");
const LAUREL_RIGHT: LinearName = LinearName("laurel_r");
const LAUREL_NORM: NormName = NormName("laurel_post_norm");
const SPLIT: Name = Name::weight("altup_proj");
const MERGE: Name = Name::weight("altup_unembd_proj");

impl AltUp {
    /// Declares the tensors of a layer of a model of width `d` with `n` streams.
    pub(super) fn tensors(t: &mut Declared<'_>, n: usize, d: usize) {
        t.required(ROUTER.weight(), matrix(n, d));
        t.required(ROUTER_NORM.weight(), vector(d));
        t.required(PREDICT, values(n, n * n));
        t.required(CORRECT, values(n, n));
        t.required(CORRECT_SCALE, vector(d));
        // the two tell the rank
        t.required_by(LAUREL_LEFT.weight(), move |dims| matrix(any_width(dims[1]), d));
        t.required_by(LAUREL_RIGHT.weight(), move |dims| matrix(d, any_width(dims[0])));
        t.required(LAUREL_NORM.weight(), vector(d));
    }

    /// Takes the tensors of a layer.
    pub(super) fn load(t: &mut Loaded<'_>) -> Result<AltUp, LoadError> {
        let laurel = Laurel {
            left: t.linear(LAUREL_LEFT)?,
            right: t.linear(LAUREL_RIGHT)?,
            norm: t.required_norm(LAUREL_NORM)?,
        };
        if laurel.left.w.rows() != laurel.right.w.k() {
            let [found, expected] = [laurel.right.w.k(), laurel.left.w.rows()].map(|rank| format!("rank {rank}"));
            let expected = format!("{expected}, that of laurel_l.weight");
            return Err(t.error(LAUREL_RIGHT.weight(), &found, &expected));
        }
        Ok(AltUp {
            router_norm: t.required_norm(ROUTER_NORM)?,
            router: t.linear(ROUTER)?,
            predict: t.required(PREDICT)?,
            correct: t.required(CORRECT)?,
            correct_scale: t.required(CORRECT_SCALE)?,
            laurel,
        })
    }

    pub(super) fn matrices(&self) -> [&Matrix; 3] {
        [&self.router.w, &self.laurel.left.w, &self.laurel.right.w]
    }

    /// Floats of a row: predictions of the streams, weights of the streams, output of Laurel.
    fn parts(&self, c: &LayerView<'_>) -> [usize; 3] {
        let n = c.residual.n_altup;
        [n * c.d, padded(n), padded(c.d)]
    }

    /// Temporaries of `n` rows beside those of all blocks; `inner` are those of sub-layers.
    pub(super) fn size(&self, c: &LayerView<'_>, n: usize, inner: Size) -> Size {
        Size::rows(n, self.parts(c)).and(inner.or(self.router.size(n)).or(self.laurel.size(n)))
    }
}

impl AltUpProjections {
    /// Declares the tensors of a model of width `d` with `n` streams.
    pub(super) fn tensors(t: &mut Declared<'_>, n: usize, d: usize) {
        [SPLIT, MERGE].into_iter().for_each(|name| t.required(name, Shape::Matrices { n: n - 1, rows: d, k: d }));
    }

    /// Takes the tensors, if there are any.
    pub(super) fn load(t: &mut Loaded<'_>) -> Option<AltUpProjections> {
        let (split, merge) = (t.matrices(SPLIT), t.matrices(MERGE));
        Some(AltUpProjections { split: split?, merge: merge? })
    }

    pub(super) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.split.iter().chain(&self.merge)
    }

    /// Temporaries of `n` rows of a model of width `d`.
    pub(super) fn size(&self, n: usize, d: usize) -> Size {
        Size::rows(n, [padded(d), d]).and(Size::packed(n, 1, d))
    }

    /// The streams before the first layer: the residual stream, and projections of it of the same magnitude.
    pub(super) fn split(&self, pass: &Pass<'_, '_>, x: &[f32], streams: &mut [f32], stack: &mut Stack<'_>) {
        let (d, n, rows, width) = (pass.d, pass.n, pass.rows, (self.split.len() + 1) * pass.d);
        let streams = &mut streams[..n * width];
        let [projected] = stack.rows(n, [padded(d)]);
        rows.each(streams, width, &|r, streams| streams[..d].copy_from_slice(&x[r * d..][..d]));
        for (j, w) in self.split.iter().enumerate() {
            rows.matrix(w, None, as_columns(x, w), projected, stack);
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
    pub(super) fn merge(&self, pass: &Pass<'_, '_>, x: &mut [f32], streams: &[f32], stack: &mut Stack<'_>) {
        let (d, n, rows, count) = (pass.d, pass.n, pass.rows, self.merge.len() + 1);
        let streams = &streams[..n * count * d];
        let [projected, h] = stack.rows(n, [padded(d), d]);
        rows.each(x, d, &|r, x| x.copy_from_slice(&streams[r * count * d..][..d]));
        for (j, w) in self.merge.iter().enumerate() {
            rows.each(h, d, &|r, h| h.copy_from_slice(&streams[(r * count + j + 1) * d..][..d]));
            rows.matrix(w, None, as_columns(h, w), projected, stack);
            rows.each(projected, padded(d), &|r, y| {
                match_magnitude(rows.cpu, &streams[r * count * d..][..d], &mut y[..d]);
            });
            rows.add(x, d, projected, padded(d), 1.0);
        }
        rows.each(x, d, &|_, x| scale(rows.cpu, x, 1.0 / count as f32));
    }
}

/// A block of a model with several residual streams.
pub(super) fn block(
    layer: &Layer,
    altup: &AltUp,
    pass: &mut Pass<'_, '_>,
    c: LayerView<'_>,
    s: &mut Batch,
    memory: &mut KvMemory,
    stack: &mut Stack<'_>,
) {
    let Batch { x, mixers, tokens, layer_embeddings, streams, .. } = s;
    let (d, n, rows, count) = (c.d, pass.n, pass.rows, c.residual.n_altup);
    let (x, width) = (&mut x[..n * d], count * d);
    let streams = &mut streams.all[..n * width];
    let mut block = layer.take(n, &c, x, stack);
    let [predictions, router, laurel] = stack.rows(n, altup.parts(&c));
    altup.predict(pass, (streams, width), (block.h, router, predictions), stack);
    let predictions = &*predictions;
    rows.each(x, d, &|r, x| x.copy_from_slice(&predictions[r * width..][..d]));

    let input = rows.normed(layer.attn_norm.as_ref(), x, block.h);
    pass.trace_stage(Stage::AttnNorm, Some(c.at.index), &mut columns(input, d, 0, d));
    altup.laurel.run(pass, SubLayerRows { x: input, y: &mut *laurel }, stack);
    layer.run_mixer(pass, c, SubLayerRows { x: input, y: block.y }, (mixers, &mut *memory), stack);
    add(pass, c, (layer.post_attn_norm.as_ref(), Stage::PostAttnNorm), x, &mut block);
    rows.add(x, d, laurel, padded(d), 1.0);
    rows.each(x, d, &|_, x| scale(rows.cpu, x, core::f32::consts::FRAC_1_SQRT_2));
    layer.feed_forward(pass, c, (x, &mut block), (tokens, memory), stack);
    add(pass, c, (layer.post_ffn_norm.as_ref(), Stage::PostFfnNorm), x, &mut block);

    altup.stream_weights(pass, (x, d), (block.h, router), stack);
    let (x, router) = (&*x, &*router);
    rows.each(streams, width, &|r, streams| {
        let (x, predictions) = (&x[r * d..][..d], &predictions[r * width..][..width]);
        let weights = &router[r * padded(count)..][..count];
        for ((stream, prediction), factors) in
            streams.chunks_exact_mut(d).zip(predictions.chunks_exact(d)).zip(altup.correct.chunks_exact(count))
        {
            let factor = 1.0 + dot(factors, weights);
            stream.copy_from_slice(x);
            add_scaled(rows.cpu, stream, &predictions[..d], -1.0);
            scale(rows.cpu, stream, factor);
            add_scaled(rows.cpu, stream, prediction, 1.0);
        }
    });
    let Some(embedding) = &layer.embedding else { return };
    let BlockRows { h, y, .. } = &mut block;
    rows.each(h, d, &|r, h| {
        h.copy_from_slice(&streams[r * width..][..d]);
        multiply(rows.cpu, h, &altup.correct_scale);
    });
    embedding.run(pass, c.act, layer_embeddings.of(c.block), SubLayerRows { x: h, y }, stack);
    rows.norm(&embedding.norm, y, padded(d), h);
    pass.trace_stage(Stage::LayerEmbedding, Some(c.at.index), &mut columns(h, d, 0, d));
    let h = &**h;
    rows.each(streams, width, &|r, streams| {
        for stream in streams.chunks_exact_mut(d).skip(1) {
            add_scaled(rows.cpu, stream, &h[r * d..][..d], 1.0);
        }
    });
}

impl AltUp {
    /// Predictions of the streams; that of the first one is the residual stream of the block.
    fn predict(
        &self,
        pass: &Pass<'_, '_>,
        (streams, width): (&[f32], usize),
        (h, router, predictions): (&mut [f32], &mut [f32], &mut [f32]),
        stack: &mut Stack<'_>,
    ) {
        let (d, rows) = (pass.d, pass.rows);
        let count = width / d;
        self.stream_weights(pass, (streams, width), (h, &mut *router), stack);
        let router = &*router;
        rows.each(predictions, width, &|r, predictions| {
            let (streams, weights) = (&streams[r * width..][..width], &router[r * padded(count)..][..count]);
            predictions.copy_from_slice(streams);
            for (prediction, factors) in predictions.chunks_exact_mut(d).zip(self.predict.chunks_exact(count * count)) {
                for (stream, factors) in streams.chunks_exact(d).zip(factors.chunks_exact(count)) {
                    add_scaled(rows.cpu, prediction, stream, dot(factors, weights));
                }
            }
        });
    }

    /// `tanh(router norm(x) / n_embd)` of rows that are `stride` apart.
    fn stream_weights(
        &self,
        pass: &Pass<'_, '_>,
        (x, stride): (&[f32], usize),
        (h, router): (&mut [f32], &mut [f32]),
        stack: &mut Stack<'_>,
    ) {
        let (d, rows) = (pass.d, pass.rows);
        rows.norm(&self.router_norm, x, stride, h);
        rows.each(h, d, &|_, h| scale(rows.cpu, h, 1.0 / d as f32));
        rows.linear(&self.router, h, router, stack);
        rows.each(router, padded(self.router.w.rows()), &|_, row| soft_cap(rows.cpu, row, 1.0));
    }
}

impl Laurel {
    /// Floats of a row: the product of low rank.
    fn parts(&self) -> [usize; 1] {
        [padded(self.left.w.rows())]
    }

    fn size(&self, n: usize) -> Size {
        Size::rows(n, self.parts()).and(self.left.size(n).or(self.right.size(n)))
    }

    /// `y = x + norm(R L x)`.
    fn run(&self, pass: &Pass<'_, '_>, SubLayerRows { x, y }: SubLayerRows<'_>, stack: &mut Stack<'_>) {
        let (d, rows, [stride]) = (pass.d, pass.rows, self.parts());
        let mut stack = stack.scope();
        let [wide] = stack.rows(pass.n, self.parts());
        rows.linear(&self.left, x, wide, &mut stack);
        let right = &self.right;
        rows.matrix(&right.w, right.bias.as_deref(), Floats { x: wide, stride }, y, &mut stack);
        rows.norm_beginnings(&self.norm, y, padded(d));
        rows.each(y, padded(d), &|r, y| add_scaled(rows.cpu, &mut y[..d], &x[r * d..][..d], 1.0));
    }
}

/// The sum of products, in order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b)
}
