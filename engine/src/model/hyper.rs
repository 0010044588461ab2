//! Hyper-connections (Xie et al., arXiv:2512.24880): several residual streams. A sub-layer reads a mix of them and adds its
//! output to all, which are mixed with each other:
//!
//! ```text
//! m = F plain_norm(x[0], x[1], ...)                                               of all streams together
//! a[j] = sigmoid(m[j] s[0] + b[j]) + eps;  p[j] = 2 sigmoid(m[n + j] s[1] + b[n + j])
//! C[j][k] = softmax over k of (m[2n + jn + k] s[2] + b[2n + jn + k]), + eps, by Sinkhorn's iterations
//! y = sublayer(norm(sum_j a[j] x[j]));  x[k] = p[k] y + sum_j C[j][k] x[j]          j ascending
//! ```
//!
//! An iteration divides rows j by their sums + eps, then columns k; the first one columns only. After the last layer a mix
//! like the first becomes the residual stream.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::arch::Arch;
use super::block::{ForwardPass, SubLayerRows};
use super::forward::Stage;
use super::keys::Keys;
use super::loader::LoadedTensors;
use super::rows::columns;
use super::scratch::Scratch;
use super::weights::{Linear, Norm, linear, padded};
use crate::error::LoadError;
use crate::kernels::attention::KvMemory;
use crate::kernels::elementwise::{add_scaled, sigmoid};
use crate::kernels::exp::exp;

/// Most streams: beyond any known model.
const MAX_STREAMS: usize = 16;
/// Most of Sinkhorn's iterations.
const MAX_ITERATIONS: u32 = 1024;

/// Parameters of hyper-connections.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HyperConfig {
    /// Number of residual streams.
    pub n: usize,
    /// Sinkhorn's iterations.
    pub iterations: usize,
    /// Added to factors and sums.
    pub eps: f32,
}

impl HyperConfig {
    /// Reads the parameters, if the family has hyper-connections.
    pub(super) fn read(keys: &Keys<'_, '_>, arch: &Arch) -> Result<Option<HyperConfig>, LoadError> {
        if !arch.hyper_connections {
            return Ok(None);
        }
        let name = "hyper_connection.epsilon";
        let eps = keys.f32(name)?.ok_or_else(|| keys.wrong(name, "nothing", "a number"))?;
        Ok(Some(HyperConfig {
            n: keys.size("hyper_connection.count", 1..=MAX_STREAMS as u32)?,
            iterations: keys.size("hyper_connection.sinkhorn_iterations", 0..=MAX_ITERATIONS)?,
            eps,
        }))
    }

    /// Factors of a sub-layer: on its input, on its output, and of the streams among each other.
    pub(super) fn factors(&self) -> usize {
        (2 + self.n) * self.n
    }
}

/// Weights of the factors of a sub-layer, or of the mix after the last layer.
pub struct HyperConnection {
    /// (factors, n * n_embd)
    factors: Linear,
    /// Factors on these, of each kind.
    scale: Vec<f32>,
    /// One per factor.
    base: Vec<f32>,
    /// Norm of all streams, whose weights are 1.
    norm: Norm,
}

impl HyperConnection {
    /// Takes the tensors whose names begin like this.
    pub(super) fn load(tensors: &mut LoadedTensors, name: &str) -> Result<HyperConnection, LoadError> {
        let factors = linear(tensors, &format!("{name}_fn"))?;
        let width = factors.w.k();
        Ok(HyperConnection {
            factors,
            scale: tensors.required(&format!("{name}_scale.weight"))?,
            base: tensors.required(&format!("{name}_base.weight"))?,
            norm: Norm { weight: vec![1.0; width], bias: None, eps: None, width },
        })
    }

    /// Those of mixer and feed-forward of a layer.
    pub(super) fn of_layer(
        tensors: &mut LoadedTensors,
        name: &dyn Fn(&str) -> String,
    ) -> Result<Box<[HyperConnection; 2]>, LoadError> {
        let [mixer, ffn] = ["hc_attn", "hc_ffn"].map(|part| HyperConnection::load(tensors, &name(part)));
        Ok(Box::new([mixer?, ffn?]))
    }

    pub(super) fn matrix(&self) -> &crate::kernels::panel::Matrix {
        &self.factors.w
    }
}

/// Buffers of the streams.
pub(super) struct HyperScratch {
    /// (rows, streams, n_embd), and their norm.
    pub(super) streams: Vec<f32>,
    pub(super) mixed: Vec<f32>,
    /// (rows, padded factors)
    pub(super) factors: Vec<f32>,
}

/// Divides the rows of a matrix of `n` columns by their sums.
fn divide_rows(n: usize, eps: f32, m: &mut [f32]) {
    for row in m.chunks_exact_mut(n) {
        let sum = row.iter().fold(0.0, |sum, x| sum + x) + eps;
        row.iter_mut().for_each(|x| *x /= sum);
    }
}

/// Divides the columns of a matrix of `n` columns by their sums.
fn divide_columns(n: usize, eps: f32, m: &mut [f32]) {
    for k in 0..n {
        let sum = m.iter().skip(k).step_by(n).fold(0.0, |sum, x| sum + x) + eps;
        m.iter_mut().skip(k).step_by(n).for_each(|x| *x /= sum);
    }
}

/// Factors of the streams among each other, (from, to), from logits.
fn sinkhorn(c: &HyperConfig, m: &mut [f32]) {
    for row in m.chunks_exact_mut(c.n) {
        let top = row.iter().fold(f32::NEG_INFINITY, |top, x| if *x > top { *x } else { top });
        row.iter_mut().for_each(|x| *x = exp(*x - top));
        let sum = row.iter().fold(0.0, |sum, x| sum + x);
        row.iter_mut().for_each(|x| *x = *x / sum + c.eps);
    }
    divide_columns(c.n, c.eps, m);
    for _ in 1..c.iterations {
        divide_rows(c.n, c.eps, m);
        divide_columns(c.n, c.eps, m);
    }
}

impl ForwardPass<'_, '_> {
    /// The streams before the first layer: copies of the residual stream.
    pub(super) fn begin_streams(&self, c: &HyperConfig, s: &mut Scratch) {
        let d = self.model.config.n_embd;
        let (x, streams) = (&s.x, &mut s.hyper.streams[..self.n * c.n * d]);
        self.rows.each(streams, d, &|i, stream| stream.copy_from_slice(&x[i / c.n * d..][..d]));
    }

    /// The residual stream after the last layer: a mix of the streams.
    pub(super) fn end_streams(&self, (c, of): (&HyperConfig, &HyperConnection), s: &mut Scratch) {
        self.read_streams((c, of), s);
    }

    /// A block of a model with hyper-connections.
    pub(super) fn hyper_block(
        &mut self,
        i: usize,
        [of_mixer, of_ffn]: &[HyperConnection; 2],
        memory: &mut KvMemory,
        s: &mut Scratch,
    ) {
        let (model, d, n) = (self.model, self.model.config.n_embd, self.n);
        let Some(c) = &model.config.hyper else { return };
        let layer = model.layer(i);
        self.read_streams((c, of_mixer), s);
        {
            let Scratch { x, h, y, step, attention, .. } = s;
            let (x, h, y) = (&x[..n * d], &mut h[..n * d], &mut y[..n * padded(d)]);
            let input = self.rows.normed(layer.attn_norm.as_ref(), x, h);
            self.trace_stage(Stage::AttnNorm, Some(i), &mut columns(input, d, 0, d));
            self.mixer(i, SubLayerRows { x: input, y }, attention, memory, step);
        }
        self.write_streams(c, s);
        self.read_streams((c, of_ffn), s);
        {
            let Scratch { x, h, y, step, experts, .. } = s;
            let (x, h, y) = (&x[..n * d], &mut h[..n * d], &mut y[..n * padded(d)]);
            let input = self.rows.normed(layer.ffn_norm.as_ref(), x, h);
            self.trace_stage(Stage::FfnNorm, Some(i), &mut columns(input, d, 0, d));
            self.ffn(i, SubLayerRows { x: input, y }, &mut memory.states, experts, step);
        }
        self.write_streams(c, s);
    }

    /// Computes the factors and the mix that a sub-layer reads, in `s.x`.
    fn read_streams(&self, (c, of): (&HyperConfig, &HyperConnection), s: &mut Scratch) {
        let (rows, d, n) = (self.rows, self.model.config.n_embd, self.n);
        let Scratch { x, step, hyper: HyperScratch { streams, mixed, factors }, .. } = s;
        let (width, stride) = (c.n * d, padded(of.factors.w.rows()));
        let (streams, mixed) = (&streams[..n * width], &mut mixed[..n * width]);
        let factors = &mut factors[..n * stride];
        rows.norm(&of.norm, streams, width, mixed);
        rows.linear(&of.factors, mixed, factors, &mut step.words);
        rows.each(factors, stride, &|_, row| {
            let row = &mut row[..of.base.len()];
            for (j, (x, base)) in row.iter_mut().zip(&of.base).enumerate() {
                let kind = (j / c.n).min(2);
                *x = *x * of.scale[kind] + base;
                match kind {
                    0 => *x = sigmoid(*x) + c.eps,
                    1 => *x = 2.0 * sigmoid(*x),
                    _ => {}
                }
            }
            if let Some(among) = row.get_mut(2 * c.n..) {
                sinkhorn(c, among);
            }
        });
        let factors = &*factors;
        rows.each(&mut x[..n * d], d, &|r, x| {
            x.fill(0.0);
            for (stream, factor) in streams[r * width..][..width].chunks_exact(d).zip(&factors[r * stride..][..c.n]) {
                add_scaled(rows.cpu, x, stream, *factor);
            }
        });
    }

    /// Adds the output of the sub-layer, in `s.y`, to the mixed streams.
    fn write_streams(&self, c: &HyperConfig, s: &mut Scratch) {
        let (rows, d, n) = (self.rows, self.model.config.n_embd, self.n);
        let Scratch { y, hyper: HyperScratch { streams, mixed, factors }, .. } = s;
        let (width, stride) = (c.n * d, padded(c.factors()));
        let (y, old, factors) = (&*y, &streams[..n * width], &*factors);
        rows.each(&mut mixed[..n * width], d, &|i, stream| {
            let (r, k) = (i / c.n, i % c.n);
            let factors = &factors[r * stride..][..c.factors()];
            stream.fill(0.0);
            add_scaled(rows.cpu, stream, &y[r * padded(d)..][..d], factors[c.n + k]);
            for (j, old) in old[r * width..][..width].chunks_exact(d).enumerate() {
                add_scaled(rows.cpu, stream, old, factors[(2 + j) * c.n + k]);
            }
        });
        core::mem::swap(streams, mixed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iterations_approach_a_doubly_stochastic_matrix() {
        let c = HyperConfig { n: 4, iterations: 200, eps: 1e-9 };
        let mut m: Vec<f32> = (0..16).map(|i| ((i * 7 % 16) as f32 - 8.0) / 4.0).collect();
        sinkhorn(&c, &mut m);
        for j in 0..4 {
            let row: f32 = m[4 * j..4 * j + 4].iter().sum();
            let column: f32 = m.iter().skip(j).step_by(4).sum();
            assert!((row - 1.0).abs() < 1e-4 && (column - 1.0).abs() < 1e-4, "{row} {column}");
        }
    }
}
