//! IQ1_S and IQ1_M: 256 elements of 1.56 and 1.75 bits: `x = d/8 * (2 * scale + 1) * (8 * {-1, 0, 1} ± 1)`.
//!
//! Eight consecutive elements are a point of a grid of 2048 ([`super::grids`]).
//!
//! | IQ1_S, of 50 bytes | |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..34 | low 8 bits of the indices |
//! | 34..50 | per 32 elements 16 bits: 4 x 3 high bits of the indices, scale 3, and 1 for `- 1` |
//!
//! | IQ1_M, of 56 | |
//! |---|---|
//! | 0..32 | low 8 bits of the indices |
//! | 32..48 | per 8 elements 4 bits: 3 high bits of the index, and 1 for `- 1` |
//! | 48..56 | per 64 elements 16 bits: 4 scales of 3 bits, one per 16 elements, and, on top, 4 bits of `d`, f16 |

use core::array;

use super::codebook::{Codes, u16_at};
use super::fit::{error_weights, sum_of_squares};
use super::float::{scale_at, set_scale};
use super::grids::IQ1;
use super::lattice::{Lattice, odd_scales};

/// Writes the codes of eight elements: a level in the low bits; bit 2 is set for minus an eighth.
fn put(point: u32, minus: bool, out: &mut [u8]) {
    for (j, out) in out.iter_mut().enumerate() {
        *out = (point >> (2 * j) & 3) as u8 | u8::from(minus) << 2;
    }
}

pub(super) fn unpack_s(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 0) * 0.125);
    for (i, code) in out.code.chunks_exact_mut(8).enumerate() {
        let high = u16_at(block, 34 + i / 4 * 2);
        let index = usize::from(block[2 + i]) | usize::from(high >> (i % 4 * 3) & 7) << 8;
        put(IQ1[index], high & 0x8000 != 0, code);
    }
    for (s, scale) in out.scale.iter_mut().enumerate() {
        *scale = 2 * (u16_at(block, 34 + s / 2 * 2) >> 12 & 7) as i8 + 1;
    }
}

pub(super) fn unpack_m(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(&scale_of_m(block), 0) * 0.125);
    for (i, code) in out.code.chunks_exact_mut(8).enumerate() {
        let high = block[32 + i / 2] >> (i % 2 * 4);
        put(IQ1[usize::from(block[i]) | usize::from(high & 7) << 8], high & 8 != 0, code);
    }
    for (s, scale) in out.scale.iter_mut().enumerate() {
        *scale = 2 * (u16_at(block, 48 + s / 4 * 2) >> (s % 4 * 3) & 7) as i8 + 1;
    }
}

/// The f16 scale of an IQ1_M block, whose four parts are in the top bits of the scales.
pub(super) fn scale_of_m(block: &[u8]) -> [u8; 2] {
    (0..4).fold(0, |d, i| d | (u16_at(block, 48 + 2 * i) >> 12) << (4 * i)).to_le_bytes()
}

/// Values of the levels, plus an eighth and minus an eighth.
const VALUES: [[f32; 3]; 2] = [[-0.875, 0.125, 1.125], [-1.125, -0.125, 0.875]];

/// A fitted sub-block: `x` is about `scale * VALUES[minus[k]][level]`, k = 0 in the first half.
struct SubBlockFit<const POINTS: usize> {
    scale: f32,
    index: [u16; POINTS],
    minus: [bool; 2],
}

impl<const POINTS: usize> SubBlockFit<POINTS> {
    /// The level values of point `k`.
    fn values(&self, k: usize) -> &'static [f32; 3] {
        &VALUES[usize::from(self.minus[2 * k / POINTS])]
    }
}

/// The best scale and points of a sub-block. With three levels, all splits of the sorted elements can be tried:
/// `splits` does so and returns the best boundaries, scale and eighths.
fn search<const N: usize, const POINTS: usize>(
    lattice: &Lattice,
    x: &[f32],
    w: &[f32],
    tiny: f32,
    splits: impl Fn(&[usize; N], &[f32], &[f32]) -> Option<Split>,
) -> Option<SubBlockFit<POINTS>> {
    if !x.iter().any(|x| x.abs() >= tiny) {
        return None;
    }
    let mut order: [usize; N] = array::from_fn(|i| i);
    order.sort_by(|&a, &b| x[a].partial_cmp(&x[b]).unwrap_or(core::cmp::Ordering::Equal));
    let mut split = splits(&order, x, w)?;
    let mut levels = [0; N];
    for (j, &i) in order.iter().enumerate() {
        levels[i] = u8::from(j >= split.first) + u8::from(j >= split.second);
    }
    if split.scale < 0.0 {
        split.scale = -split.scale;
        levels = levels.map(|l| 2 - l);
        split.minus = split.minus.map(|m| !m);
    }
    let mut found = SubBlockFit { scale: split.scale, index: [0; POINTS], minus: split.minus };
    let mut off_grid = false;
    for k in 0..POINTS {
        let (at, values) = (8 * k..8 * k + 8, found.values(k));
        let (index, exact) =
            lattice.nearest(&levels[at.clone()], &x[at.clone()], &w[at], found.scale, |l| values[usize::from(l)]);
        found.index[k] = index;
        off_grid |= !exact;
    }
    if off_grid {
        let (mut qx, mut q2) = (0.0, 0.0);
        for (i, (x, w)) in x.iter().zip(w).enumerate() {
            let q = found.values(i / 8)[usize::from(lattice.level(found.index[i / 8], i % 8))];
            qx += w * q * x;
            q2 += w * q * q;
        }
        if qx > 0.0 && q2 > 0.0 {
            found.scale = qx / q2;
        }
    }
    Some(found)
}

/// A split of the sorted elements: those before `first` get level 0, those before `second` level 1, the rest level 2.
struct Split {
    first: usize,
    second: usize,
    scale: f32,
    minus: [bool; 2],
}

/// The best split so far, by the decrease of the error.
struct Best {
    score: f32,
    split: Option<Split>,
}

impl Best {
    fn offer(&mut self, first: usize, second: usize, minus: [bool; 2], qx: f32, q2: f32) {
        if q2 > 0.0 && qx * qx > self.score * q2 {
            let scale = qx / q2;
            *self = Best { score: scale * qx, split: Some(Split { first, second, scale, minus }) };
        }
    }
}

/// Tries all splits of 32 elements, with one eighth for all of them.
fn splits_32(order: &[usize; 32], x: &[f32], w: &[f32]) -> Option<Split> {
    let (mut sum_x, mut sum_w) = ([0.0; 33], [0.0; 33]);
    for (j, &i) in order.iter().enumerate() {
        sum_x[j + 1] = sum_x[j] + w[i] * x[i];
        sum_w[j + 1] = sum_w[j] + w[i];
    }
    let mut best = Best { score: f32::MIN, split: None };
    for first in 0..=32 {
        for second in first..=32 {
            let parts = |s: &[f32; 33]| [s[first] - s[0], s[second] - s[first], s[32] - s[second]];
            let (px, pw) = (parts(&sum_x), parts(&sum_w));
            for (minus, v) in [(false, &VALUES[0]), (true, &VALUES[1])] {
                let qx = px[0] * v[0] + px[1] * v[1] + px[2] * v[2];
                let q2 = pw[0] * v[0] * v[0] + pw[1] * v[1] * v[1] + pw[2] * v[2] * v[2];
                best.offer(first, second, [minus; 2], qx, q2);
            }
        }
    }
    best.split
}

/// Tries all splits of 16 elements, with an eighth per half. Neighbouring level values differ by 1, which shortens the
/// sums.
fn splits_16(order: &[usize; 16], x: &[f32], w: &[f32]) -> Option<Split> {
    let (mut sum_x, mut sum_w) = ([[0.0; 17]; 2], [[0.0; 17]; 2]);
    for (j, &i) in order.iter().enumerate() {
        for half in 0..2 {
            let (dx, dw) = if i / 8 == half { (w[i] * x[i], w[i]) } else { (0.0, 0.0) };
            sum_x[half][j + 1] = sum_x[half][j] + dx;
            sum_w[half][j + 1] = sum_w[half][j] + dw;
        }
    }
    let mut best = Best { score: f32::MIN, split: None };
    for first in 0..=16 {
        for second in first..=16 {
            // per half, with plus an eighth and with minus an eighth
            let sums = [0, 1].map(|half| {
                let (x, w) = (&sum_x[half], &sum_w[half]);
                let below = x[first] + x[second];
                VALUES.map(|v| {
                    let (step1, step2) = (v[0] * v[0] - v[1] * v[1], v[1] * v[1] - v[2] * v[2]);
                    (x[16] * v[2] - below, w[16] * v[2] * v[2] + w[first] * step1 + w[second] * step2)
                })
            });
            for (a, b) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let (qx, q2) = (sums[0][a].0 + sums[1][b].0, sums[0][a].1 + sums[1][b].1);
                best.offer(first, second, [a == 1, b == 1], qx, q2);
            }
        }
    }
    best.split
}

pub(super) fn quantise_s(lattice: &Lattice, x: &[f32; 256], importance: &[f32; 256], block: &mut [u8; 50]) {
    let w: [f32; 256] = error_weights(importance, 2.0 * sum_of_squares(x) / 256.0, x);
    let found: [Option<SubBlockFit<4>>; 8] =
        array::from_fn(|i| search(lattice, &x[32 * i..][..32], &w[32 * i..][..32], 1e-12, splits_32));
    let (d, scales) = odd_scales(&array::from_fn::<_, 8, _>(|i| found[i].as_ref().map_or(0.0, |f| f.scale)), 7);
    block.fill(0);
    set_scale(block, 0, d * 1.125);
    for (i, f) in found.iter().enumerate() {
        let mut high = u16::from(scales[i]) << 12;
        if let Some(f) = f {
            for (k, index) in f.index.iter().enumerate() {
                block[2 + 4 * i + k] = *index as u8;
                high |= (index >> 8) << (3 * k);
            }
            high |= u16::from(f.minus[0] && d != 0.0) << 15;
        }
        block[34 + 2 * i..][..2].copy_from_slice(&high.to_le_bytes());
    }
}

pub(super) fn quantise_m(lattice: &Lattice, x: &[f32; 256], importance: &[f32; 256], block: &mut [u8; 56]) {
    let w: [f32; 256] = error_weights(importance, 2.0 * sum_of_squares(x) / 256.0, x);
    let found: [Option<SubBlockFit<2>>; 16] =
        array::from_fn(|i| search(lattice, &x[16 * i..][..16], &w[16 * i..][..16], 1e-7, splits_16));
    let (mut d, scales) = odd_scales(&array::from_fn::<_, 16, _>(|i| found[i].as_ref().map_or(0.0, |f| f.scale)), 7);
    block.fill(0);
    // the scales of the sub-blocks are rounded now: finds the best `d` for them
    let (mut qx, mut q2) = (0.0, 0.0);
    for (s, f) in found.iter().enumerate() {
        let (index, minus) = f.as_ref().map_or(([0; 2], [false; 2]), |f| (f.index, f.minus));
        for (k, (index, minus)) in index.into_iter().zip(minus).enumerate() {
            block[2 * s + k] = index as u8;
            block[32 + s] |= ((index >> 8) as u8 | u8::from(minus && d != 0.0) << 3) << (4 * k);
            for j in 0..8 {
                let level = usize::from(lattice.level(index, j));
                let q = VALUES[usize::from(minus)][level] * f32::from(2 * scales[s] + 1);
                let e = 16 * s + 8 * k + j;
                qx += w[e] * q * x[e];
                q2 += w[e] * q * q;
            }
        }
    }
    if d != 0.0 && q2 > 0.0 {
        d = qx / q2;
    }
    let d = half::f16::from_f32(d * 1.1125).to_bits();
    for i in 0..4 {
        let four = (0..4).fold(d >> (4 * i) << 12, |four, s| four | u16::from(scales[4 * i + s]) << (3 * s));
        block[48 + 2 * i..][..2].copy_from_slice(&four.to_le_bytes());
    }
}
