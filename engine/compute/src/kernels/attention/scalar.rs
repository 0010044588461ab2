//! The scalar definition of attention over one chunk.

use core::ops::Range;

use super::super::act::quantise;
use super::super::decoded::f16_to_f32;
use super::super::elementwise::soft_cap_one;
use super::super::exp::{exp, exp_above};
use super::super::narrow::{narrow, round13};
use super::super::norm::{VIRTUAL_LANES, max, reduce};
use super::block::{AttentionBlock, ChunkKernel, ChunkTokens};
use super::int8_values::int8_value_scales;
use super::latent::{int8_at, int8_scales, int8_value};
use super::softmax_state::SoftmaxState;
use super::{CHUNK, KvLayer, KvType, MAX_LATENT_DIM, PAGE, WEIGHT_LOW};

/// [`ChunkKernel`] as plain loops: the definition.
pub(super) struct ScalarKernel<'a>(pub(super) &'a AttentionBlock<'a>);

impl ScalarKernel<'_> {
    pub(super) fn blend_of(total: &mut [f32], a: f32, part: &[f32], b: f32) {
        for (t, p) in total.iter_mut().zip(part) {
            *t = *t * a + p * b;
        }
    }
}

fn read_f32(b: &[u8], i: usize) -> f32 {
    f32::from_le_bytes([b[i * 4], b[i * 4 + 1], b[i * 4 + 2], b[i * 4 + 3]])
}

fn read_f16(b: &[u8], i: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([b[i * 2], b[i * 2 + 1]]))
}

/// Dimension `d` of the value of token `t`, from the keys of its page.
fn latent_value(kv: &KvLayer, keys: &[u8], d: usize, t: usize) -> f32 {
    match kv.kv_type {
        KvType::F32 => read_f32(keys, d * PAGE + t),
        KvType::F16 => read_f16(keys, d * PAGE + t),
        KvType::K8 | KvType::Q8 => int8_value((keys[int8_at(d, t)] ^ 0x80) as i8, read_f32(int8_scales(kv, keys), t)),
    }
}

impl ChunkKernel for ScalarKernel<'_> {
    fn scores(&self, chunk: usize, tokens: Range<usize>, q: &[f32], scores: &mut [[f32; CHUNK]], _: &mut [f32]) {
        let (a, kv, d) = (self.0, self.0.kv(), self.0.kv().heads.key_dim);
        for (q, scores) in q.chunks_exact(d).zip(scores) {
            for (t, score) in tokens.clone().zip(&mut scores[tokens.clone()]) {
                let keys = a.keys(chunk, t);
                let t = t % PAGE;
                *score = match kv.kv_type {
                    KvType::F32 => (0..d).fold(0.0, |s, i| s + read_f32(keys, i * PAGE + t) * q[i]),
                    KvType::F16 => (0..d).fold(0.0, |s, i| s + read_f16(keys, i * PAGE + t) * q[i]),
                    KvType::K8 | KvType::Q8 => {
                        let mut q8 = [0i8; MAX_LATENT_DIM];
                        let key = |i: usize| i32::from((keys[int8_at(i, t)] ^ 0x80) as i8);
                        let scales = &keys[d.next_multiple_of(4) * PAGE..];
                        let (parts, n) = kv.heads.scaled_parts();
                        let mut of_parts = parts.into_iter().take(n).enumerate().map(|(i, part)| {
                            let dq = quantise(&q[part.clone()], &mut q8[part.clone()]);
                            let dot: i32 = part.map(|i| key(i) * i32::from(q8[i])).sum();
                            dot as f32 * (read_f32(scales, i * PAGE + t) * dq)
                        });
                        let first = of_parts.next().unwrap_or(0.0);
                        of_parts.fold(first, |s, part| s + part)
                    }
                };
            }
        }
    }

    fn narrow(&self, q: &mut [f32]) {
        q.iter_mut().for_each(|q| *q = narrow(*q));
    }

    fn soft_cap(&self, s: &mut [f32], cap: f32) {
        s.iter_mut().for_each(|s| *s = soft_cap_one(*s, cap));
    }

    fn softmax(&self, s: &mut [f32]) -> SoftmaxState {
        let mut lanes = [f32::NEG_INFINITY; VIRTUAL_LANES];
        for (t, s) in s.iter().enumerate() {
            lanes[t % VIRTUAL_LANES] = max(lanes[t % VIRTUAL_LANES], *s);
        }
        let m = reduce(lanes, max);
        let mut lanes = [0.0; VIRTUAL_LANES];
        for (t, s) in s.iter_mut().enumerate() {
            *s = match self.0.kv().kv_type.has_f16_values() {
                true => round13(exp_above(WEIGHT_LOW, *s - m)),
                false => exp(*s - m),
            };
            lanes[t % VIRTUAL_LANES] += *s;
        }
        SoftmaxState { m, l: reduce(lanes, |a, b| a + b) }
    }

    fn values(&self, tokens: ChunkTokens, p: &[[f32; CHUNK]], o: &mut [f32], _: &mut [f32]) {
        let ChunkTokens { chunk, tokens, accumulate } = tokens;
        let (a, kv) = (self.0, self.0.kv());
        for (p, o) in p.iter().zip(o.chunks_exact_mut(kv.value_dims())) {
            if !accumulate {
                o.fill(0.0);
            }
            for t in tokens.clone() {
                if kv.heads.latent {
                    let keys = a.keys(chunk, t);
                    for (d, o) in o.iter_mut().enumerate() {
                        *o += p[t] * latent_value(kv, keys, d, t % PAGE);
                    }
                    continue;
                }
                let values = a.values(chunk, t);
                for (d, o) in o.iter_mut().enumerate() {
                    let i = (d / VIRTUAL_LANES * PAGE + t % PAGE) * VIRTUAL_LANES + d % VIRTUAL_LANES;
                    *o += p[t]
                        * match kv.kv_type {
                            KvType::F32 => read_f32(values, i),
                            KvType::F16 | KvType::K8 => read_f16(values, i),
                            KvType::Q8 => int8_value(values[i] as i8, read_f32(int8_value_scales(values), t % PAGE)),
                        };
                }
            }
        }
    }

    fn blend(&self, total: &mut [f32], a: f32, part: &[f32], b: f32) {
        ScalarKernel::blend_of(total, a, part, b);
    }
}
