//! Online softmax: merges the results of chunks, in ascending order.

use super::lanes::blend_lanes;
use super::scalar::ScalarKernel;
use super::{KvLayer, MAX_HEAD_DIM};
use crate::kernels::Cpu;
use crate::kernels::cpu::Op;
use crate::kernels::exp::exp;
use crate::kernels::norm::max;
use crate::kernels::simd::Simd;

/// Running maximum `m` and sum `l` of an online softmax; `l` is 0 as long as no token was seen.
#[derive(Clone, Copy)]
pub(super) struct SoftmaxState {
    pub(super) m: f32,
    pub(super) l: f32,
}

impl SoftmaxState {
    /// Merges the result of the next chunk.
    #[inline(always)]
    pub(super) fn merge(
        &mut self,
        next: SoftmaxState,
        total: &mut [f32],
        part: &[f32],
        blend: impl Fn(&mut [f32], f32, &[f32], f32),
    ) {
        if next.l == 0.0 {
            return;
        }
        if self.l == 0.0 {
            *self = next;
            total.copy_from_slice(part);
            return;
        }
        let top = max(self.m, next.m);
        let (x, y) = (exp(self.m - top), exp(next.m - top));
        *self = SoftmaxState { m: top, l: self.l * x + next.l * y };
        blend(total, x, part, y);
    }
}

impl SoftmaxState {
    /// Adds a score without a value: `M' = max(M, sink); L = L*exp(M - M') + exp(sink - M'); O = O*exp(M - M')`.
    #[inline(always)]
    pub(super) fn add_sink(&mut self, sink: Option<f32>, total: &mut [f32]) {
        let Some(sink) = sink else { return };
        let top = max(self.m, sink);
        let x = exp(self.m - top);
        *self = SoftmaxState { m: top, l: self.l * x + exp(sink - top) };
        total.iter_mut().for_each(|o| *o *= x);
    }
}

#[inline(always)]
pub(super) fn scale(o: &[f32], l: f32, out: &mut [f32]) {
    let inverse = 1.0 / l;
    for (out, o) in out.iter_mut().zip(o) {
        *out = o * inverse;
    }
}

/// The partial results of one query head of one token, (n_chunks, part_len), rows `stride` floats apart.
pub(super) struct PartRows<'a> {
    pub(super) parts: &'a [f32],
    pub(super) stride: usize,
    pub(super) n_chunks: usize,
    /// The attention sink of the head.
    pub(super) sink: Option<f32>,
}

/// Merges partial results, chunks ascending, then the sink.
pub(super) fn combine(cpu: Cpu, kv: &KvLayer, rows: PartRows<'_>, out: &mut [f32]) {
    let PartRows { parts, stride, n_chunks, sink } = rows;
    assert!(n_chunks > 0 && parts.len() >= (n_chunks - 1) * stride + kv.part_len() && out.len() == kv.heads.value_dim);
    cpu.run(Combine { dims: kv.value_dims(), parts, stride, n_chunks, sink, out });
}

struct Combine<'a> {
    dims: usize,
    parts: &'a [f32],
    stride: usize,
    n_chunks: usize,
    sink: Option<f32>,
    out: &'a mut [f32],
}

impl Combine<'_> {
    #[inline(always)]
    fn combine(self, blend: impl Fn(&mut [f32], f32, &[f32], f32) + Copy) {
        let mut o = [0.0; MAX_HEAD_DIM];
        let o = &mut o[..self.dims];
        let mut running = SoftmaxState { m: f32::NEG_INFINITY, l: 0.0 };
        for part in self.parts.chunks(self.stride).take(self.n_chunks) {
            let (ml, part) = part[..2 + self.dims].split_at(2);
            running.merge(SoftmaxState { m: ml[0], l: ml[1] }, o, part, blend);
        }
        running.add_sink(self.sink, o);
        scale(&o[..self.out.len()], running.l, self.out);
    }
}

impl Op for Combine<'_> {
    type Out = ();
    fn scalar(self) {
        self.combine(ScalarKernel::blend_of);
    }
    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        self.combine(
            #[inline(always)]
            |o, x, part, y| blend_lanes(s, o, x, part, y),
        );
    }
}
