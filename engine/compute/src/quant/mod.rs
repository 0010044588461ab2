//! Element types of tensors, and their quantisation. [`Dtype`] has the name and size of every type of ggml.
//!
//! Legacy types and most K-quants have a file each, with layout, `dequantise` (exact values, in the rounding order of
//! ggml) and `quantise`; codebook types are rows of [`codebook`]. [`Quantiser`] gives the bytes of ggml.
//! Source: <https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-quants.c>.

pub mod codebook;
mod dtype;
mod fit;
mod float;
mod fp4;
mod grids;
mod iq1;
mod iq2;
mod iq3;
mod iq4;
mod kquant;
mod lattice;
mod low_bits;
pub mod mix;
mod q2_k;
mod q3_k;
pub mod q4_0;
pub mod q4_1;
pub mod q4_k;
pub mod q5_0;
pub mod q5_1;
pub mod q5_k;
pub mod q6_k;
pub mod q8_0;
mod quantiser;
mod ternary;

use thiserror::Error;

use self::codebook::Codebook;
pub use self::dtype::Dtype;
pub use self::quantiser::Quantiser;

/// A block with an infinite or NaN scale; in F32, F16 and BF16 tensors, such an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("block {index}: infinite or NaN, or cut short; expected whole blocks of finite numbers")]
pub struct BlockFault {
    /// Index of the first such block. A truncated block counts.
    pub index: usize,
}

/// Why a conversion failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum QuantError {
    /// The engine does not support this type.
    #[error("type {}: not supported, no conversion from or to it", .0.name())]
    Unsupported(Dtype),
    /// The elements and bytes are not the same number of blocks.
    #[error(
        "type {}: {elements} elements and {bytes} bytes, expected as many blocks of {} elements as of {} bytes",
        dtype.name(), dtype.block_len(), dtype.block_bytes()
    )]
    Length {
        /// The type of the bytes.
        dtype: Dtype,
        /// Number of elements given.
        elements: usize,
        /// Number of bytes given.
        bytes: usize,
    },
    /// The type has too few bits to be quantised without an importance matrix.
    #[error("type {}: needs an importance matrix", .0.name())]
    NeedsImportance(Dtype),
    /// The importance matrix must have one finite number of at least 0 per element of a row.
    #[error("importance matrix: {found} finite numbers of at least 0, expected {expected}, one per element of a row")]
    Importance {
        /// Number of valid entries before the first invalid one.
        found: usize,
        /// Elements of a row.
        expected: usize,
    },
    /// An element to be quantised is infinite or NaN.
    #[error("element {index}: infinite or NaN, expected a finite number")]
    NotFinite {
        /// Index of the first such element.
        index: usize,
    },
    /// An element is outside the range of the type.
    #[error("block {}: numbers beyond the range of type {}", fault.index, dtype.name())]
    Overflow {
        /// The type.
        dtype: Dtype,
        /// The first block with such an element.
        fault: BlockFault,
    },
}

/// Dequantises whole blocks: writes the exact values of `src` to `out`.
///
/// # Errors
/// [`QuantError::Unsupported`], or [`QuantError::Length`] if `src` is not exactly the blocks of `out.len()` elements.
pub fn dequantise(dtype: Dtype, src: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    check_lengths(dtype, out.len(), src.len())?;
    match dtype {
        Dtype::F32 | Dtype::F16 | Dtype::BF16 => widen(dtype, src, out)?,
        Dtype::Q4_0 => unpack(src, out, q4_0::dequantise),
        Dtype::Q4_1 => unpack(src, out, q4_1::dequantise),
        Dtype::Q5_0 => unpack(src, out, q5_0::dequantise),
        Dtype::Q5_1 => unpack(src, out, q5_1::dequantise),
        Dtype::Q8_0 => unpack(src, out, q8_0::dequantise),
        Dtype::Q4_K => unpack(src, out, q4_k::dequantise),
        Dtype::Q5_K => unpack(src, out, q5_k::dequantise),
        Dtype::Q6_K => unpack(src, out, q6_k::dequantise),
        other => codebook::dequantise(Codebook::of(other).ok_or(QuantError::Unsupported(other))?, src, out),
    }
    Ok(())
}

/// [`dequantise`] for F32, F16 and BF16 alone.
///
/// # Errors
/// [`QuantError::Unsupported`] or [`QuantError::Length`].
pub fn widen(dtype: Dtype, src: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    check_lengths(dtype, out.len(), src.len())?;
    match dtype {
        Dtype::F32 => unpack(src, out, float::f32_from),
        Dtype::F16 => unpack(src, out, float::f16_from),
        Dtype::BF16 => unpack(src, out, float::bf16_from),
        other => return Err(QuantError::Unsupported(other)),
    }
    Ok(())
}

/// Quantises `src` to `dtype`: whole blocks, which must fill `out` exactly. For repeated calls use a [`Quantiser`].
///
/// # Errors
/// Any [`QuantError`]; the contents of `out` are then unspecified.
pub fn quantise(dtype: Dtype, src: &[f32], out: &mut [u8]) -> Result<(), QuantError> {
    Quantiser::new(dtype)?.rows(src, src.len(), None, out)
}

/// Checks that every scale of `bytes` is finite (in F32, F16 and BF16 every element; in MXFP4 that all values are).
/// Blocks of other types are always valid. Runs at memory bandwidth.
///
/// # Errors
/// The first block that fails.
pub fn validate(dtype: Dtype, bytes: &[u8]) -> Result<(), BlockFault> {
    let len = dtype.block_bytes() as usize;
    let f16_is_bad = |b: &[u8], at: usize| u16::from_le_bytes([b[at], b[at + 1]]) & 0x7c00 == 0x7c00;
    let fault = match (dtype, dtype.f16_scales()) {
        (Dtype::F32, _) => first_bad(bytes, len, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) << 1 >= 0xff00_0000),
        (Dtype::BF16, _) => first_bad(bytes, len, |b| b[1] & 0x7f == 0x7f && b[0] & 0x80 != 0),
        (Dtype::MXFP4, _) => first_bad(bytes, len, |b| b[0] > fp4::MAX_EXPONENT),
        (Dtype::IQ1_M, _) => first_bad(bytes, len, |b| f16_is_bad(&iq1::scale_of_m(b), 0)),
        (_, &[at]) => first_bad(bytes, len, |b| f16_is_bad(b, at)),
        (_, &[d, m]) => first_bad(bytes, len, |b| f16_is_bad(b, d) | f16_is_bad(b, m)),
        _ => first_bad(bytes, len, |_| false),
    };
    fault.map_or(Ok(()), |index| Err(BlockFault { index }))
}

/// Index of the first block of `len` bytes that is `bad` or truncated.
#[inline(always)]
fn first_bad(bytes: &[u8], len: usize, bad: impl Fn(&[u8]) -> bool) -> Option<usize> {
    let blocks = bytes.chunks_exact(len);
    let cut = (!blocks.remainder().is_empty()).then_some(bytes.len() / len);
    blocks.into_iter().position(bad).or(cut)
}

fn check_lengths(dtype: Dtype, elements: usize, bytes: usize) -> Result<(), QuantError> {
    match dtype.row_bytes(elements as u64) {
        Some(n) if n == bytes as u64 => Ok(()),
        _ => Err(QuantError::Length { dtype, elements, bytes }),
    }
}

fn unpack<const LEN: usize, const BYTES: usize>(
    src: &[u8],
    out: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    for (src, out) in src.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<LEN>().0) {
        block(src, out);
    }
}

#[cfg(test)]
mod tests;
