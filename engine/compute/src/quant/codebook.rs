//! Codebook types: an element is a code of 1, 2 or 4 bits, an index into a table of at most 16 integers.
//!
//! ```text
//! x = (d * scale) * table[code] - dmin * min
//! ```
//!
//! `d` is a float; `scale` and `min` are small integers for 16 elements each; only Q2_K has minima. A type is defined
//! by its table and a function that reads a block, so all of them share one dequantiser and one panel layout. Products
//! with `d` are exact: it has at most 11 significant bits, the integers together at most 12.

use super::{Dtype, fp4, iq1, iq2, iq3, iq4, low_bits, q2_k, q3_k, ternary};

/// Largest number of elements of a block.
pub const MAX_LEN: usize = 256;
/// Number of elements that share a scale.
pub const SUB: usize = 16;

/// A codebook type.
#[derive(Debug)]
pub struct Codebook {
    /// The type.
    pub dtype: Dtype,
    /// Bits of a code: 1, 2 or 4.
    pub width: usize,
    /// The integer that each code stands for; entries of unused codes are arbitrary.
    pub table: [i8; 16],
    /// Encoding of `d`.
    pub scale: Scale,
    unpack: fn(&[u8], &mut Codes),
}

/// Encoding of `d` in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// One f16 per block, in some types times a constant power of two.
    F16,
    /// One f16 per block, and a minimum for every 16 elements.
    F16AndMin,
    /// One power of two per block, 2^-128 or more; representable as bf16.
    Power,
    /// An 8-bit float for every 16 elements.
    Each,
}

/// The codes, scales and minima of a block. Entries beyond the length of the block are arbitrary.
#[derive(Debug, Clone, PartialEq)]
pub struct Codes {
    /// The code of each element.
    pub code: [u8; MAX_LEN],
    /// `d` of each 16 elements: equal in the whole block, except in NVFP4.
    pub d: [f32; MAX_LEN / SUB],
    /// Scale of each 16 elements.
    pub scale: [i8; MAX_LEN / SUB],
    /// Unit of the minima.
    pub dmin: f32,
    /// Minimum of each 16 elements.
    pub min: [u8; MAX_LEN / SUB],
}

impl Codes {
    /// Scales of 1, everything else 0.
    pub const NONE: Codes = Codes { code: [0; 256], d: [0.0; 16], scale: [1; 16], dmin: 0.0, min: [0; 16] };
}

/// A table of up to 8 magnitudes: bit 3 of a code is the sign.
const fn signed(magnitudes: &[i8]) -> [i8; 16] {
    let (mut table, mut i) = ([0; 16], 0);
    while i < magnitudes.len() {
        (table[i], table[i + 8]) = (magnitudes[i], -magnitudes[i]);
        i += 1;
    }
    table
}

/// A table with fewer than 16 entries.
const fn short(values: &[i8]) -> [i8; 16] {
    let (mut table, mut i) = ([0; 16], 0);
    while i < values.len() {
        table[i] = values[i];
        i += 1;
    }
    table
}

const fn row(dtype: Dtype, width: usize, table: [i8; 16], unpack: fn(&[u8], &mut Codes)) -> Codebook {
    Codebook { dtype, width, table, scale: Scale::F16, unpack }
}

/// FP4 (E2M1) values, doubled: a sign, two bits of exponent and one of fraction.
pub(super) const FP4: [i8; 16] = signed(&[0, 1, 2, 3, 4, 6, 8, 12]);
/// The 16 levels of IQ4_NL and IQ4_XS, close to quantiles of a normal distribution.
pub(super) const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
const IQ2: [i8; 16] = signed(&[8, 25, 43]);
/// In eighths: -1, 0 or 1, plus an eighth, or minus an eighth if bit 2 of the code is set.
const IQ1: [i8; 16] = short(&[-7, 1, 9, 0, -9, -1, 7]);
const TERNARY: [i8; 16] = short(&[-1, 0, 1, 2]);

static TABLE: [Codebook; 17] = [
    Codebook { scale: Scale::F16AndMin, ..row(Dtype::Q2_K, 2, short(&[0, 1, 2, 3]), q2_k::unpack) },
    row(Dtype::Q3_K, 4, short(&[-4, -3, -2, -1, 0, 1, 2, 3]), q3_k::unpack),
    row(Dtype::IQ2_XXS, 4, IQ2, iq2::unpack_xxs),
    row(Dtype::IQ2_XS, 4, IQ2, iq2::unpack_xs),
    row(Dtype::IQ2_S, 4, IQ2, iq2::unpack_s),
    row(Dtype::IQ3_XXS, 4, signed(&[4, 12, 20, 28, 36, 44, 52, 62]), iq3::unpack_xxs),
    row(Dtype::IQ3_S, 4, signed(&[1, 3, 5, 7, 9, 11, 13, 15]), iq3::unpack_s),
    row(Dtype::IQ1_S, 4, IQ1, iq1::unpack_s),
    row(Dtype::IQ1_M, 4, IQ1, iq1::unpack_m),
    row(Dtype::IQ4_NL, 4, IQ4, iq4::unpack_nl),
    row(Dtype::IQ4_XS, 4, IQ4, iq4::unpack_xs),
    row(Dtype::TQ1_0, 2, TERNARY, ternary::unpack_1),
    row(Dtype::TQ2_0, 2, TERNARY, ternary::unpack_2),
    Codebook { scale: Scale::Power, ..row(Dtype::MXFP4, 4, FP4, fp4::unpack_mx) },
    Codebook { scale: Scale::Each, ..row(Dtype::NVFP4, 4, FP4, fp4::unpack_nv) },
    row(Dtype::Q1_0, 1, short(&[-1, 1]), low_bits::unpack_1),
    row(Dtype::Q2_0, 2, TERNARY, low_bits::unpack_2),
];

impl Codebook {
    /// The codebook of a type; `None` if it is not a codebook type.
    pub fn of(dtype: Dtype) -> Option<&'static Codebook> {
        TABLE.iter().find(|row| row.dtype == dtype)
    }

    /// Reads a block.
    ///
    /// # Panics
    /// If `block` is not as long as the blocks of the type.
    pub fn unpack(&self, block: &[u8], out: &mut Codes) {
        assert_eq!(block.len() as u64, self.dtype.block_bytes(), "a whole block");
        (self.unpack)(block, out);
    }
}

/// Dequantises whole blocks.
pub(super) fn dequantise(book: &Codebook, src: &[u8], out: &mut [f32]) {
    let mut codes = Codes::NONE;
    let (bytes, len) = (book.dtype.block_bytes() as usize, book.dtype.block_len() as usize);
    for (src, out) in src.chunks_exact(bytes).zip(out.chunks_exact_mut(len)) {
        book.unpack(src, &mut codes);
        for (s, out) in out.chunks_exact_mut(SUB).enumerate() {
            let d = codes.d[s] * f32::from(codes.scale[s]);
            let min = codes.dmin * f32::from(codes.min[s]);
            for (x, &code) in out.iter_mut().zip(&codes.code[s * SUB..]) {
                *x = d * f32::from(book.table[usize::from(code)]) - min;
            }
        }
    }
}

/// Little-endian integers in a block.
pub(super) fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

pub(super) fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from(u16_at(block, at)) | u32::from(u16_at(block, at + 2)) << 16
}
