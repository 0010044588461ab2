//! IQ3_XXS and IQ3_S: 256 elements of 3.06 and 3.44 bits. Four consecutive elements are a point of a grid
//! ([`super::grids`]), each with a sign.
//!
//! IQ3_XXS: `x = d/4 * (2 * scale + 1) * ±{4, 12, 20, 28, 36, 44, 52, 62}`; signs as in IQ2_XXS.
//!
//! | of 98 bytes | |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..66 | indices of 8 bits |
//! | 66..98 | per 32 elements: 4 x 7 bits of signs and, on top, a scale of 4 bits |
//!
//! IQ3_S: `x = d * (2 * scale + 1) * ±{1, 3, 5, ..., 15}`.
//!
//! | of 110 bytes | |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..66 | low 8 bits of the indices |
//! | 66..74 | their ninth bits |
//! | 74..106 | signs, a bit per element |
//! | 106..110 | scales of 4 bits, one per 32 elements, low half first |

use core::array;

use super::codebook::{Codes, u32_at};
use super::fit::{error_weights, sum_of_squares};
use super::float::{scale_at, set_scale};
use super::grids::{IQ3_S, IQ3_XXS};
use super::iq2::even_signs;
use super::lattice::{GridFit, GridSearch, Lattice, Refit, odd_scales};

/// Writes the codes of four elements: a level in the low bits, the sign in bit 3.
fn put(point: u32, signs: u8, out: &mut [u8]) {
    for (j, out) in out.iter_mut().enumerate() {
        *out = (point >> (3 * j) & 7) as u8 | (signs >> j & 1) << 3;
    }
}

pub(super) fn unpack_xxs(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 0) * 0.25);
    for (i, code) in out.code.chunks_exact_mut(32).enumerate() {
        let signs = u32_at(block, 66 + 4 * i);
        for (l, code) in code.chunks_exact_mut(4).enumerate() {
            let eight = even_signs(signs >> (l / 2 * 7));
            put(IQ3_XXS[usize::from(block[2 + 8 * i + l])], eight >> (l % 2 * 4), code);
        }
        out.scale[2 * i..][..2].fill(2 * (signs >> 28) as i8 + 1);
    }
}

pub(super) fn unpack_s(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 0));
    for (i, code) in out.code.chunks_exact_mut(4).enumerate() {
        let high = usize::from(block[66 + i / 8] >> (i % 8) & 1);
        put(IQ3_S[usize::from(block[2 + i]) | high << 8], block[74 + i / 2] >> (i % 2 * 4), code);
    }
    for (s, scale) in out.scale.iter_mut().enumerate() {
        *scale = 2 * (block[106 + s / 4] >> (s / 2 % 2 * 4) & 15) as i8 + 1;
    }
}

const XXS: GridSearch =
    GridSearch { len: 32, levels: 8, even: true, steps: 15, step: 0.2, tiny: 1e-8, refit: Refit::OffGrid };
const S: GridSearch = GridSearch { even: false, steps: 9, tiny: 0.0, refit: Refit::AllIfOffGrid, ..XXS };

/// Fits the sub-blocks of a block; without an importance matrix elements are weighted by their squares.
fn search(search: &GridSearch, lattice: &Lattice, x: &[f32; 256], importance: Option<&[f32; 256]>) -> [GridFit; 8] {
    let w = match importance {
        Some(importance) => error_weights(importance, 2.0 * sum_of_squares(x) / 256.0, x),
        None => x.map(|x| x * x),
    };
    array::from_fn(|i| search.run(lattice, &x[32 * i..][..32], &w[32 * i..][..32]).unwrap_or_default())
}

pub(super) fn quantise_xxs(lattice: &Lattice, x: &[f32; 256], w: Option<&[f32; 256]>, block: &mut [u8; 98]) {
    let found = search(&XXS, lattice, x, w);
    let (d, scales) = odd_scales(&found.map(|f| f.scale), 15);
    set_scale(block, 0, d * 1.0125);
    for (i, f) in found.iter().enumerate() {
        let signs = f.signs.iter().rev().fold(u32::from(scales[i]), |all, s| all << 7 | u32::from(s & 127));
        block[2 + 8 * i..][..8].copy_from_slice(&f.index.map(|index| index as u8));
        block[66 + 4 * i..][..4].copy_from_slice(&signs.to_le_bytes());
    }
    if d == 0.0 {
        block[2..].fill(0);
    }
}

/// The bytes are those of ggml, except for blocks in which a sub-block of zeros is followed by others: ggml writes the
/// points and signs of these one place too early. Here every sub-block has its own.
pub(super) fn quantise_s(lattice: &Lattice, x: &[f32; 256], w: Option<&[f32; 256]>, block: &mut [u8; 110]) {
    let found = search(&S, lattice, x, w);
    let (d, scales) = odd_scales(&found.map(|f| f.scale), 15);
    block.fill(0);
    set_scale(block, 0, d * 1.033);
    for (i, f) in found.iter().enumerate() {
        for (k, index) in f.index.iter().enumerate() {
            block[2 + 8 * i + k] = *index as u8;
            block[66 + i] |= ((index >> 8) as u8) << k;
        }
        block[74 + 4 * i..][..4].copy_from_slice(&f.signs);
        block[106 + i / 2] |= scales[i] << (i % 2 * 4);
    }
}
