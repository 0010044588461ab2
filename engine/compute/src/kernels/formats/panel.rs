//! Packed weights: matrices as panels of 16 rows, in one layout for all targets but plain simd128.
//!
//! Packing transposes 32-bit words inside 16 consecutive rows and, for most types, regroups their bits. These rows are
//! contiguous in a GGUF file, so packing streams with the file. Rows beyond the end are zero with scale 0. All data
//! lies in the order in which a product reads it, because some hardware prefetchers only follow gapless sequential
//! reads. With `r` = row in the panel (0..16):
//!
//! - blocks of 32: types with a minimum have a record per block, `[quants][16 f16 d][16 f16 m]`; the others have one
//!   per two blocks, `[quants][16 f16 d][16 f16 d of the second][quants of the second]`, cut after the first if the
//!   number of blocks is odd. 4- and 5-bit quants are a sub-block of `bit_packing.rs` (4-bit pairs are those of GGUF).
//!   Q8_0: byte `k/4*64 + r*4 + k%4`, offset binary.
//! - Q4_K, Q5_K: a record per super-block: `[128 scales: s*16 + r][128 mins: s/2*32 + r*2 + s%2][16 f16 d][16 f16
//!   dmin]`, then the sub-blocks s.
//! - Q6_K: `[256 scales: s*16 + r][16 f16 d]`, padded to 5 lines, then 16 sub-blocks.
//! - codes of w = 1, 2 or 4 bits (see `quant::codebook`): 32 elements take w lines; group g = k/4 of the 8 is in line
//!   `g % w`, byte `r*4 + k%4`, from bit `g - g%w` on. For 4 bits these are the nibbles of Q4_0.
//! - codes in file blocks of less than 256: as blocks of 32 with one scale, d as f16 (bf16 in MXFP4); in NVFP4 `[w
//!   lines][16 bf16 d of the first 16][16 bf16 d of the others]`.
//! - codes in super-blocks: a record each, `[256 i8 scales: s*16 + r][16 f32 d]`, in Q2_K also `[256 mins: s/2*32 + r*2
//!   + s%2][16 f32 dmin]`, then `[8w lines]`.
//! - F32, F16, BF16: element (k, r) at `k*16 + r`.
//!
//! In builds for simd128 without relaxed-simd, sub-blocks are those of `i16_fields.rs`, in as many lines, and the odd
//! elements of Q8_0 are signed.

use alloc::collections::TryReserveError;
use alloc::vec::Vec;
use core::ops::Range;

use super::pack::pack_panel;
use crate::kernels::decoded::{Decoded, float_at};
use crate::kernels::panel_layout::PanelLayout;
use crate::kernels::{AlignedBuf, WeightArena, tasks};
use crate::pool::Pool;
use crate::quant::Dtype;

/// Rows of a panel.
pub const PANEL: usize = 16;

/// A matrix of `rows` x `k` weights in panels. Row r of the product is `sum_k w[r][k] * x[k]`.
pub struct Matrix {
    dtype: Dtype,
    layout: PanelLayout,
    rows: usize,
    k: usize,
    panel_bytes: usize,
    data: AlignedBuf,
}

impl Matrix {
    /// An all-zero matrix, to be filled panel by panel with [`Matrix::pack_panel`].
    ///
    /// # Errors
    /// If there is not enough memory.
    ///
    /// # Panics
    /// If the engine does not compute with the type, or `k` is not a whole number of blocks.
    pub fn zeroed(dtype: Dtype, rows: usize, k: usize) -> Result<Matrix, TryReserveError> {
        Matrix::with(dtype, rows, k, AlignedBuf::zeroed)
    }

    /// As [`Matrix::zeroed`], in memory of an arena.
    ///
    /// # Errors
    /// If there is not enough memory.
    ///
    /// # Panics
    /// As [`Matrix::zeroed`].
    pub fn zeroed_in(arena: &mut WeightArena, dtype: Dtype, rows: usize, k: usize) -> Result<Matrix, TryReserveError> {
        Matrix::with(dtype, rows, k, |len| arena.zeroed(len))
    }

    fn with(
        dtype: Dtype,
        rows: usize,
        k: usize,
        zeroed: impl FnOnce(usize) -> Result<AlignedBuf, TryReserveError>,
    ) -> Result<Matrix, TryReserveError> {
        let layout = PanelLayout::of(dtype).expect("a type that the engine supports");
        assert!(k.is_multiple_of(dtype.block_len() as usize), "row length is not a whole number of blocks");
        let panel_bytes = layout.panel_bytes(dtype, k);
        let data = zeroed(rows.div_ceil(PANEL).saturating_mul(panel_bytes))?;
        Ok(Matrix { dtype, layout, rows, k, panel_bytes, data })
    }

    /// Packs all rows of a matrix, as they lie in a GGUF file: `rows * row_bytes` bytes.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn from_rows(dtype: Dtype, rows: usize, k: usize, src: &[u8]) -> Result<Matrix, TryReserveError> {
        let mut m = Matrix::zeroed(dtype, rows, k)?;
        for (p, rows) in src.chunks(PANEL * m.row_bytes()).enumerate() {
            m.pack_panel(p, rows);
        }
        Ok(m)
    }

    /// The type of the weights; the packed values are exactly those of the file.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(in crate::kernels) fn layout(&self) -> &PanelLayout {
        &self.layout
    }

    /// Number of rows: outputs of a product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Number of panels.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    /// Bytes that the packed weights take in memory.
    pub fn len_bytes(&self) -> usize {
        self.data.len()
    }

    /// Bytes of a row in a GGUF file.
    pub fn row_bytes(&self) -> usize {
        self.k / self.dtype.block_len() as usize * self.dtype.block_bytes() as usize
    }

    pub(in crate::kernels) fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    #[inline]
    pub(in crate::kernels) fn panel(&self, p: usize) -> &[u8] {
        self.panels_of(p..p + 1)
    }

    pub(in crate::kernels) fn panels_of(&self, panels: Range<usize>) -> &[u8] {
        let n = self.panel_bytes();
        &self.data.bytes()[panels.start * n..panels.end * n]
    }

    /// Packs rows `16 * p ..` of the matrix, as they lie in the file.
    ///
    /// # Panics
    /// If `src` is not the rows of that panel.
    pub fn pack_panel(&mut self, p: usize, src: &[u8]) {
        let n = self.panel_bytes();
        assert_eq!(src.len(), PANEL.min(self.rows - p * PANEL) * self.row_bytes(), "the last panel is what is left");
        pack_panel(self.dtype, &self.layout, self.k, src, &mut self.data.bytes_mut()[p * n..(p + 1) * n]);
    }

    /// Packs the panels from `first` on, in parallel; `src` holds their rows. `check` is called with the rows of each
    /// panel before they are packed.
    ///
    /// # Errors
    /// The first panel whose check fails, and its error.
    ///
    /// # Panics
    /// If `src` is not whole panels of the rows of the matrix.
    pub fn pack_panels<E: Send>(
        &mut self,
        pool: &dyn Pool,
        first: usize,
        src: &[u8],
        check: &(dyn Fn(&[u8]) -> Result<(), E> + Sync),
    ) -> Result<(), (usize, E)> {
        let (k, dtype, layout, piece) = (self.k, self.dtype, self.layout, PANEL * self.row_bytes());
        let left = (self.rows * self.row_bytes()).saturating_sub(first * piece);
        assert!(
            src.len() == left || src.len() < left && src.len().is_multiple_of(piece),
            "rows that are not whole panels"
        );
        let mut faults: Vec<Option<E>> = (0..src.len().div_ceil(piece)).map(|_| None).collect();
        let panel_bytes = self.panel_bytes();
        let packed = &mut self.data.bytes_mut()[first * panel_bytes..][..faults.len() * panel_bytes];
        let panels = (packed, panel_bytes);
        tasks::chunks2(pool, panels, (&mut faults, 1), &|p, panel, fault| {
            let rows = &src[p * piece..src.len().min((p + 1) * piece)];
            match check(rows) {
                Ok(()) => pack_panel(dtype, &layout, k, rows, panel),
                Err(e) => fault[0] = Some(e),
            }
        });
        match faults.into_iter().enumerate().find_map(|(p, f)| f.map(|f| (first + p, f))) {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    /// Dequantises row `row` into `out`, which must be `k` long.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        let (panel, r) = (self.panel(row / PANEL), row % PANEL);
        if let PanelLayout::Float = self.layout {
            out.iter_mut().enumerate().for_each(|(k, x)| *x = float_at(self.dtype, panel, k * PANEL + r));
            return;
        }
        for (b, out) in out.chunks_exact_mut(self.layout.block_len()).enumerate() {
            Decoded::new(&self.layout, panel, r, b).values(&self.layout, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::tests::Rng;
    use crate::quant;
    use alloc::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn packed_rows_dequantise_to_the_values_of_the_file(f in 0usize..Dtype::SUPPORTED.len(), rows in 1usize..40, blocks in 1usize..4, extreme: bool, seed: u64) {
            let dtype = Dtype::SUPPORTED[f];
            let k = blocks * dtype.block_len() as usize;
            let src = Rng(seed).rows(dtype, rows, k, extreme);
            let m = Matrix::from_rows(dtype, rows, k, &src).unwrap();
            let (mut ours, mut file) = (vec![0.0; k], vec![0.0; k]);
            for (r, src) in src.chunks_exact(m.row_bytes()).enumerate() {
                m.row(r, &mut ours);
                quant::dequantise(dtype, src, &mut file).unwrap();
                for (a, b) in ours.iter().zip(&file) {
                    prop_assert_eq!(a.to_bits(), b.to_bits(), "{:?}: {} {}", dtype, a, b);
                }
            }
        }
    }
}
