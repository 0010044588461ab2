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
use crate::model::keys::{Keys, MAX_LAYERS};

use crate::kernels::attention::KvMemory;
use crate::kernels::exp::exp;
use crate::kernels::norm::{NormWeights, norm};
use crate::model::forward::Stage;
use crate::model::residual::orders::{ForwardPass, SubLayerRows};
use crate::model::rows::{RowOps, columns};
use crate::model::scratch::Scratch;
use crate::model::weights::padded;

/// Most streams that are kept.
const MAX_KEPT: usize = 63;

/// Reads the number of layers after which the residual stream is kept; 0 if it is not.
pub(crate) fn block(keys: &Keys<'_, '_>, n_layer: usize) -> Result<usize, LoadError> {
    let name = "attn_res.block_size";
    match keys.u32(name)? {
        None | Some(0) => Ok(0),
        block => keys.in_range(name, block, n_layer.div_ceil(MAX_KEPT) as u32..=MAX_LAYERS),
    }
}

impl RowOps<'_> {
    /// `h = mix(x, w)` for rows of `d` floats; `kept` is (streams, rows, d).
    pub(crate) fn mix_residuals(&self, w: &[f32], x: &[f32], kept: &[f32], h: &mut [f32]) {
        let d = w.len();
        let weights = NormWeights { kind: self.kind, eps: self.eps, w, b: None };
        self.each(h, d, &|r, out| {
            let streams = || kept.chunks_exact(x.len()).chain([x]).map(|stream| &stream[r * d..][..d]);
            let (mut scores, mut n, mut max) = ([0.0f32; MAX_KEPT + 1], 0, f32::NEG_INFINITY);
            for (score, stream) in scores.iter_mut().zip(streams()) {
                norm(self.cpu, &weights, stream, out);
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
}

impl ForwardPass<'_, '_> {
    /// The block of layer `i`; `scores` are the weights w_1 and w_2.
    pub(crate) fn attended_block(&mut self, i: usize, scores: &[Vec<f32>; 2], memory: &mut KvMemory, s: &mut Scratch) {
        let Scratch { x, h, y, step, attention, experts, residuals, .. } = s;
        let (layer, rows, d, n) = (&self.model.weights.layers[i], self.rows, self.model.config.n_embd, self.n);
        let (x, h, y) = (&mut x[..n * d], &mut h[..n * d], &mut y[..n * padded(d)]);
        let [before, after] = self.model.config.residual.kept(i);
        rows.mix_residuals(&scores[0], x, &residuals[..before * n * d], h);
        if after > before {
            residuals[before * n * d..][..n * d].copy_from_slice(x);
            x.fill(0.0);
        }
        layer.attn_norm.iter().for_each(|norm| rows.norm_each(norm, h));
        self.trace_stage(Stage::AttnNorm, Some(i), &mut columns(h, d, 0, d));
        self.mixer(i, SubLayerRows { x: h, y }, attention, memory, step);
        rows.add(x, d, y, padded(d), 1.0);
        rows.mix_residuals(&scores[1], x, &residuals[..after * n * d], h);
        layer.ffn_norm.iter().for_each(|norm| rows.norm_each(norm, h));
        self.trace_stage(Stage::FfnNorm, Some(i), &mut columns(h, d, 0, d));
        self.ffn(i, SubLayerRows { x: h, y }, &mut memory.states, experts, step);
        rows.add(x, d, y, padded(d), 1.0);
    }
}
