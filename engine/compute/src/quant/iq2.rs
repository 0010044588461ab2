//! IQ2_XXS, IQ2_XS and IQ2_S: 256 elements of 2.06, 2.31 and 2.56 bits: `x = d/8 * (2 * scale + 1) * ±{8, 25, 43}`.
//!
//! Eight consecutive elements are a point of a grid ([`super::grids`]), each with a sign. XXS and XS store 7 of the 8
//! signs of a point: the number of minus signs is even, which determines the eighth.
//!
//! | IQ2_XXS, of 66 bytes | |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..66 | per 32 elements: 4 indices of 8 bits; 4 x 7 bits of signs and, on top, a scale of 4 bits |
//!
//! | IQ2_XS, of 74 | |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..66 | per 8 elements 16 bits: index 9, signs 7 |
//! | 66..74 | scales of 4 bits, one per 16 elements, low half first |
//!
//! | IQ2_S, of 82 | |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..34 | low 8 bits of the indices |
//! | 34..66 | signs, a byte per 8 elements |
//! | 66..74 | high 2 bits of the indices, a byte per 32 elements, low bits first |
//! | 74..82 | scales of 4 bits, one per 16 elements, low half first |

use core::array;

use super::codebook::{Codes, u16_at, u32_at};
use super::fit::{TINY, error_weights, sum_of_squares};
use super::float::{scale_at, set_scale};
use super::grids::{IQ2_S, IQ2_XS, IQ2_XXS};
use super::lattice::{GridFit, GridSearch, Lattice, Refit, odd_scales};

/// All eight signs of a point, from seven.
pub(super) fn even_signs(seven: u32) -> u8 {
    let seven = seven as u8 & 127;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// Writes the codes of eight elements: a level in the low bits, the sign in bit 3.
fn put(point: u32, signs: u8, out: &mut [u8]) {
    for (j, out) in out.iter_mut().enumerate() {
        *out = (point >> (2 * j) & 3) as u8 | (signs >> j & 1) << 3;
    }
}

fn odd(scale: u8) -> i8 {
    2 * (scale & 15) as i8 + 1
}

pub(super) fn unpack_xxs(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 0) * 0.125);
    for (i, code) in out.code.chunks_exact_mut(32).enumerate() {
        let at = 2 + 8 * i;
        let signs = u32_at(block, at + 4);
        for (l, code) in code.chunks_exact_mut(8).enumerate() {
            put(IQ2_XXS[usize::from(block[at + l])], even_signs(signs >> (7 * l)), code);
        }
        out.scale[2 * i..][..2].fill(odd((signs >> 28) as u8));
    }
}

pub(super) fn unpack_xs(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 0) * 0.125);
    for (i, code) in out.code.chunks_exact_mut(8).enumerate() {
        let index = u16_at(block, 2 + 2 * i);
        put(IQ2_XS[usize::from(index & 511)], even_signs(u32::from(index >> 9)), code);
    }
    scales(&block[66..], out);
}

pub(super) fn unpack_s(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 0) * 0.125);
    for (i, code) in out.code.chunks_exact_mut(8).enumerate() {
        let high = usize::from(block[66 + i / 4] >> (i % 4 * 2) & 3);
        put(IQ2_S[usize::from(block[2 + i]) | high << 8], block[34 + i], code);
    }
    scales(&block[74..], out);
}

fn scales(nibbles: &[u8], out: &mut Codes) {
    for (s, scale) in out.scale.iter_mut().enumerate() {
        *scale = odd(nibbles[s / 2] >> (s % 2 * 4));
    }
}

/// Fits the sub-blocks of a block; sub-blocks of zeros get scale 0.
fn search<const N: usize>(search: &GridSearch, lattice: &Lattice, x: &[f32; 256], w: &[f32; 256]) -> [GridFit; N] {
    array::from_fn(|i| {
        let at = i * search.len..(i + 1) * search.len;
        search.run(lattice, &x[at.clone()], &w[at]).unwrap_or_default()
    })
}

const XS: GridSearch =
    GridSearch { len: 16, levels: 3, even: true, steps: 9, step: 0.1, tiny: TINY, refit: Refit::OffGrid };
const XXS: GridSearch = GridSearch { len: 32, steps: 6, refit: Refit::Always, ..XS };
const S: GridSearch = GridSearch { even: false, tiny: 1e-8, ..XS };

pub(super) fn quantise_xxs(lattice: &Lattice, x: &[f32; 256], importance: &[f32; 256], block: &mut [u8; 66]) {
    let w = error_weights(importance, sum_of_squares(x) / 256.0, x);
    let found: [GridFit; 8] = search(&XXS, lattice, x, &w);
    let (d, scales) = odd_scales(&found.map(|f| f.scale), 15);
    set_scale(block, 0, d);
    for (i, f) in found.iter().enumerate() {
        let signs = f.signs.iter().rev().fold(u32::from(scales[i]), |all, s| all << 7 | u32::from(s & 127));
        block[2 + 8 * i..][..4].copy_from_slice(&array::from_fn::<_, 4, _>(|l| f.index[l] as u8));
        block[6 + 8 * i..][..4].copy_from_slice(&signs.to_le_bytes());
    }
    clear_if_zero(d, &mut block[2..]);
}

pub(super) fn quantise_xs(lattice: &Lattice, x: &[f32; 256], importance: &[f32; 256], block: &mut [u8; 74]) {
    let w = error_weights(importance, sum_of_squares(x) / 256.0, x);
    let found: [GridFit; 16] = search(&XS, lattice, x, &w);
    let (d, scales) = odd_scales(&found.map(|f| f.scale), 15);
    set_scale(block, 0, d);
    for i in 0..32 {
        let f = &found[i / 2];
        let point = f.index[i % 2] | u16::from(f.signs[i % 2] & 127) << 9;
        block[2 + 2 * i..][..2].copy_from_slice(&point.to_le_bytes());
    }
    put_scales(&scales, &mut block[66..]);
    clear_if_zero(d, &mut block[2..]);
}

pub(super) fn quantise_s(lattice: &Lattice, x: &[f32; 256], importance: &[f32; 256], block: &mut [u8; 82]) {
    let w = error_weights(importance, 2.0 * sum_of_squares(x) / 256.0, x);
    let found: [GridFit; 16] = search(&S, lattice, x, &w);
    let (d, scales) = odd_scales(&found.map(|f| f.scale), 15);
    set_scale(block, 0, d * 0.9875);
    block[66..74].fill(0);
    for i in 0..32 {
        let f = &found[i / 2];
        block[2 + i] = f.index[i % 2] as u8;
        block[34 + i] = f.signs[i % 2];
        block[66 + i / 4] |= ((f.index[i % 2] >> 8) as u8) << (i % 4 * 2);
    }
    put_scales(&scales, &mut block[74..]);
}

fn put_scales(scales: &[u8; 16], out: &mut [u8]) {
    for (out, pair) in out.iter_mut().zip(scales.chunks_exact(2)) {
        *out = pair[0] | pair[1] << 4;
    }
}

/// Clears the points of a block of scale 0, as ggml does.
fn clear_if_zero(d: f32, rest: &mut [u8]) {
    if d == 0.0 {
        rest.fill(0);
    }
}
