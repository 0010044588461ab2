//! The quantisers of ggml, with and without an importance matrix. They use only f32 addition, multiplication, division
//! and correctly rounded square roots, in the order of ggml, so the bytes are the same on every target.

use super::fit::{error_weights, sum_of_squares};
use super::lattice::Lattice;
use super::{
    BlockFault, Dtype, QuantError, float, fp4, iq1, iq2, iq3, iq4, low_bits, q2_k, q3_k, q4_0, q4_1, q4_k, q5_0, q5_1,
    q5_k, q6_k,
};
use super::{check_lengths, q8_0, ternary, validate};

/// Quantises rows to one type.
#[derive(Debug)]
pub struct Quantiser {
    dtype: Dtype,
    lattice: Option<Lattice>,
}

/// Largest magnitude accepted by block types other than MXFP4: beyond it f16 scales
/// overflow, and squares come close to the limit of f32.
const LARGEST: f32 = 1e10;

impl Quantiser {
    /// Prepares the tables of a type. For IQ1, IQ2 and IQ3 types this takes a moment.
    ///
    /// # Errors
    /// [`QuantError::Unsupported`].
    pub fn new(dtype: Dtype) -> Result<Quantiser, QuantError> {
        if dtype.supported() {
            Ok(Quantiser { dtype, lattice: Lattice::of(dtype) })
        } else {
            Err(QuantError::Unsupported(dtype))
        }
    }

    /// Quantises rows of `k` elements, which must fill `out` exactly. `importance` weights the error of each element of
    /// a row; ignored by F32, F16, BF16, Q8_0, TQ1_0, TQ2_0, MXFP4, NVFP4, Q1_0 and Q2_0.
    ///
    /// # Errors
    /// Any [`QuantError`]; the contents of `out` are then unspecified.
    pub fn rows(&self, src: &[f32], k: usize, importance: Option<&[f32]>, out: &mut [u8]) -> Result<(), QuantError> {
        let dtype = self.dtype;
        check_lengths(dtype, src.len(), out.len())?;
        if let Some(index) = float::not_finite(src) {
            return Err(QuantError::NotFinite { index });
        }
        if let Some(w) = importance {
            let found = w.iter().take_while(|w| w.is_finite() && **w >= 0.0).count();
            if found != w.len() || w.len() != k {
                return Err(QuantError::Importance { found, expected: k });
            }
        }
        if src.is_empty() {
            return Ok(());
        }
        let len = dtype.block_len() as usize;
        if len > 1
            && dtype != Dtype::MXFP4
            && let Some(at) = src.iter().position(|x| x.abs() > LARGEST)
        {
            return Err(QuantError::Overflow { dtype, fault: BlockFault { index: at / len } });
        }
        let row_bytes = dtype.row_bytes(k as u64).filter(|_| src.len().is_multiple_of(k));
        let row_bytes = row_bytes.ok_or(QuantError::Length { dtype, elements: k, bytes: out.len() })? as usize;
        for (src, out) in src.chunks_exact(k).zip(out.chunks_exact_mut(row_bytes)) {
            self.row(src, importance, out)?;
        }
        validate(dtype, out).map_err(|fault| QuantError::Overflow { dtype, fault })
    }

    fn row(&self, x: &[f32], w: Option<&[f32]>, out: &mut [u8]) -> Result<(), QuantError> {
        // the legacy types weight elements relative to the mean square of their row
        let mean_square = w.map_or(0.0, |_| sum_of_squares(x) / x.len() as f32);
        match (self.dtype, w) {
            (Dtype::F32, _) => pack(x, out, float::f32_into),
            (Dtype::F16, _) => pack(x, out, float::f16_into),
            (Dtype::BF16, _) => pack(x, out, float::bf16_into),
            (Dtype::Q8_0, _) => pack(x, out, q8_0::quantise),
            (Dtype::Q4_0, None) => pack(x, out, q4_0::quantise),
            (Dtype::Q4_1, None) => pack(x, out, q4_1::quantise),
            (Dtype::Q5_0, None) => pack(x, out, q5_0::quantise),
            (Dtype::Q5_1, None) => pack(x, out, q5_1::quantise),
            (Dtype::Q4_0, Some(w)) => pack_legacy(x, w, mean_square, out, q4_0::quantise_weighted),
            (Dtype::Q4_1, Some(w)) => pack_legacy(x, w, mean_square, out, q4_1::quantise_weighted),
            (Dtype::Q5_0, Some(w)) => pack_legacy(x, w, mean_square, out, q5_0::quantise_weighted),
            (Dtype::Q5_1, Some(w)) => pack_legacy(x, w, mean_square, out, q5_1::quantise_weighted),
            (Dtype::Q2_K, w) => pack_weighted(x, w, out, q2_k::quantise),
            (Dtype::Q3_K, w) => pack_weighted(x, w, out, q3_k::quantise),
            (Dtype::Q4_K, w) => pack_weighted(x, w, out, q4_k::quantise),
            (Dtype::Q5_K, w) => pack_weighted(x, w, out, q5_k::quantise),
            (Dtype::Q6_K, w) => pack_weighted(x, w, out, q6_k::quantise),
            (Dtype::IQ4_NL, w) => pack_weighted(x, w, out, iq4::quantise_nl),
            (Dtype::IQ4_XS, w) => pack_weighted(x, w, out, iq4::quantise_xs),
            (Dtype::TQ1_0, _) => pack(x, out, ternary::quantise_1),
            (Dtype::TQ2_0, _) => pack(x, out, ternary::quantise_2),
            (Dtype::MXFP4, _) => pack(x, out, fp4::quantise_mx),
            (Dtype::NVFP4, _) => pack(x, out, fp4::quantise_nv),
            (Dtype::Q1_0, _) => pack(x, out, low_bits::quantise_1),
            (Dtype::Q2_0, _) => pack(x, out, low_bits::quantise_2),
            (dtype, w) => return self.on_grid(dtype, x, w, out),
        }
        Ok(())
    }

    fn on_grid(&self, dtype: Dtype, x: &[f32], w: Option<&[f32]>, out: &mut [u8]) -> Result<(), QuantError> {
        let Some(lattice) = &self.lattice else { return Err(QuantError::Unsupported(dtype)) };
        match (dtype, w) {
            (Dtype::IQ3_XXS, w) => pack_weighted(x, w, out, |x, w, out| iq3::quantise_xxs(lattice, x, w, out)),
            (Dtype::IQ3_S, w) => pack_weighted(x, w, out, |x, w, out| iq3::quantise_s(lattice, x, w, out)),
            (_, None) => return Err(QuantError::NeedsImportance(dtype)),
            (Dtype::IQ1_S, Some(w)) => pack_important(lattice, x, w, out, iq1::quantise_s),
            (Dtype::IQ1_M, Some(w)) => pack_important(lattice, x, w, out, iq1::quantise_m),
            (Dtype::IQ2_XXS, Some(w)) => pack_important(lattice, x, w, out, iq2::quantise_xxs),
            (Dtype::IQ2_XS, Some(w)) => pack_important(lattice, x, w, out, iq2::quantise_xs),
            (Dtype::IQ2_S, Some(w)) => pack_important(lattice, x, w, out, iq2::quantise_s),
            _ => return Err(QuantError::Unsupported(dtype)),
        }
        Ok(())
    }
}

fn pack<const LEN: usize, const BYTES: usize>(
    x: &[f32],
    out: &mut [u8],
    block: impl Fn(&[f32; LEN], &mut [u8; BYTES]),
) {
    for (x, out) in x.as_chunks::<LEN>().0.iter().zip(out.as_chunks_mut::<BYTES>().0) {
        block(x, out);
    }
}

fn pack_weighted<const LEN: usize, const BYTES: usize>(
    x: &[f32],
    w: Option<&[f32]>,
    out: &mut [u8],
    block: impl Fn(&[f32; LEN], Option<&[f32; LEN]>, &mut [u8; BYTES]),
) {
    let w = w.map(|w| w.as_chunks::<LEN>().0);
    for (i, (x, out)) in x.as_chunks::<LEN>().0.iter().zip(out.as_chunks_mut::<BYTES>().0).enumerate() {
        block(x, w.map(|w| &w[i]), out);
    }
}

fn pack_legacy<const BYTES: usize>(
    x: &[f32],
    w: &[f32],
    mean_square: f32,
    out: &mut [u8],
    block: impl Fn(&[f32; 32], &[f32; 32], &mut [u8; BYTES]),
) {
    pack_weighted(x, Some(w), out, |x, w, out| {
        if let Some(w) = w {
            block(x, &error_weights(w, mean_square, x), out);
        }
    });
}

fn pack_important<const BYTES: usize>(
    lattice: &Lattice,
    x: &[f32],
    w: &[f32],
    out: &mut [u8],
    block: impl Fn(&Lattice, &[f32; 256], &[f32; 256], &mut [u8; BYTES]),
) {
    let blocks = x.as_chunks::<256>().0.iter().zip(w.as_chunks::<256>().0);
    for ((x, w), out) in blocks.zip(out.as_chunks_mut::<BYTES>().0) {
        block(lattice, x, w, out);
    }
}
