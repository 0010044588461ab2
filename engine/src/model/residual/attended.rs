//! Blocks whose sub-layers read a mix of the residual streams of earlier layers (Kimi K3). The stream is kept before every
//! `residual_block`-th layer, and then starts anew from the output of attention:
//!
//! ```text
//! mix(x, w): s_j = sum(norm(r_j) * w) of the kept streams r_j and of x;  p = softmax(s);  sum_j r_j * p_j
//! a = mix(x, w_1);  keep x;  x = x + attention(norm(a)), or attention(norm(a)) where x was kept
//! x = x + ffn(norm(mix(x, w_2)))
//! ```

use alloc::vec::Vec;

use crate::error::LoadError;

use super::batch::Batch;
use super::config::MAX_KEPT;
use super::layer::{BlockRows, Layer, LayerView};
use crate::kernels::attention::KvMemory;
use crate::kernels::exp::exp;
use crate::kernels::norm::{NormWeights, norm};
use crate::model::ffn::FfnInput;
use crate::model::linear::padded;
use crate::model::memory::Stack;
use crate::model::pass::{Pass, Stage, SubLayerRows};
use crate::model::rows::{RowOps, columns};
use crate::model::tensors::{Declared, Loaded, Name, vector};

/// Weights of the scores of attention and feed-forward, and of the output.
const SCORES: [Name; 2] = [Name::weight("attn_res_score"), Name::weight("ffn_res_score")];
pub(super) const OUTPUT_SCORE: Name = Name::weight("output_res_score");

/// Declares the tensors of a layer of a model of width `d`.
pub(super) fn tensors(t: &mut Declared<'_>, d: usize) {
    SCORES.into_iter().for_each(|score| t.required(score, vector(d)));
}

/// Takes the tensors of a layer.
pub(super) fn load(t: &mut Loaded<'_>) -> Result<[Vec<f32>; 2], LoadError> {
    let [attention, ffn] = SCORES.map(|score| t.required(score));
    Ok([attention?, ffn?])
}

/// `h = mix(x, w)` for rows of `d` floats; `kept` is (streams, rows, d).
pub(super) fn mix(rows: &RowOps<'_>, w: &[f32], x: &[f32], kept: &[f32], h: &mut [f32]) {
    let d = w.len();
    let weights = NormWeights { kind: rows.kind, eps: rows.eps, w, b: None };
    rows.each(h, d, &|r, out| {
        let streams = || kept.chunks_exact(x.len()).chain([x]).map(|stream| &stream[r * d..][..d]);
        let (mut scores, mut n, mut max) = ([0.0f32; MAX_KEPT + 1], 0, f32::NEG_INFINITY);
        for (score, stream) in scores.iter_mut().zip(streams()) {
            norm(rows.cpu, &weights, stream, out);
            *score = out.iter().fold(0.0, |sum, x| sum + x);
            max = if *score > max { *score } else { max };
            n += 1;
        }
        let mut sum = 0.0;
        for score in &mut scores[..n] {
            *score = exp(*score - max);
            sum += *score;
        }
        out.fill(0.0);
        for (score, stream) in scores[..n].iter().zip(streams()) {
            let p = score / sum;
            out.iter_mut().zip(stream).for_each(|(out, x)| *out += x * p);
        }
    });
}

/// The block of a layer; `scores` are the weights w_1 and w_2.
pub(super) fn block(
    layer: &Layer,
    scores: &[Vec<f32>; 2],
    pass: &mut Pass<'_, '_>,
    c: LayerView<'_>,
    s: &mut Batch,
    memory: &mut KvMemory,
    stack: &mut Stack<'_>,
) {
    let Batch { x, mixers, tokens, streams, .. } = s;
    let (rows, d, n, at) = (pass.rows, c.d, pass.n, Some(c.at.index));
    let (x, kept) = (&mut x[..n * d], &mut streams.kept);
    let BlockRows { h, y, input } = layer.take(n, &c, x, stack);
    let [before, after] = c.residual.kept(c.at.index);
    mix(&rows, &scores[0], x, &kept[..before * n * d], h);
    if after > before {
        kept[before * n * d..][..n * d].copy_from_slice(x);
        x.fill(0.0);
    }
    layer.attn_norm.iter().for_each(|norm| rows.norm_each(norm, h));
    pass.trace_stage(Stage::AttnNorm, at, &mut columns(h, d, 0, d));
    layer.run_mixer(pass, c, SubLayerRows { x: h, y: &mut *y }, (mixers, &mut *memory), stack);
    rows.add(x, d, y, padded(d), 1.0);
    mix(&rows, &scores[1], x, &kept[..after * n * d], h);
    layer.ffn_norm.iter().for_each(|norm| rows.norm_each(norm, h));
    pass.trace_stage(Stage::FfnNorm, at, &mut columns(h, d, 0, d));
    let input = FfnInput { layer: input, tokens };
    layer.run_ffn(pass, c, SubLayerRows { x: h, y: &mut *y }, input, memory, stack);
    rows.add(x, d, y, padded(d), 1.0);
}
