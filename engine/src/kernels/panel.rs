//! Weight matrices as panels of 16 rows: one layout for every target.
//!
//! Repacking is a transposition of 32-bit words inside 16 consecutive rows, which are contiguous in a GGUF file, so it
//! streams with the file. Rows beyond the end are zero with scale 0. With `r` = row in the panel (0..16), `b` = block,
//! `nb` = blocks of a row:
//!
//! - blocks of 32: `[nb x quants][nb x 16 f16 d]` and for types with a minimum `[nb x 16 f16 m]`. Quants of 4 and 5
//!   bits: byte `(k%16)/4*64 + r*4 + k%4`, low nibble k < 16, high nibble k >= 16 (GGUF's own pairing); fifth bits in
//!   one more line: byte `r*4 + k%4`, bit `k/4`. Q8_0: byte `k/4*64 + r*4 + k%4`, offset binary.
//! - Q4_K, Q5_K: a record per super-block: `[32 lines of nibbles][Q5_K: 8 lines of fifth bits][128 scales: s*16 + r]
//!   [128 mins: s/2*32 + r*2 + s%2][16 f16 d][16 f16 dmin]`; line `c*8 + g` holds group g of sub-blocks 2c (low) and
//!   2c+1 (high); fifth-bit line g holds group g, bit s for sub-block s.
//! - Q6_K: `[32 lines of low nibbles][16 lines of two high bits][256 scales: s*16 + r][16 f16 d]`, padded to 53 lines.
//!   With k = 32t + 16h + 4i + j: nibble h of line `4t + i`, and bits 2i, 2i+1 of line `32 + 2t + h`, byte `r*4 + j`.
//! - F32, F16, BF16: element (k, r) at `k*16 + r`.

use alloc::collections::TryReserveError;
use alloc::vec::Vec;

use super::{AlignedBuf, tasks};
use crate::pool::Pool;

/// Rows of a panel.
pub const PANEL: usize = 16;

/// How a matrix lies in memory. Named after the GGUF types whose values they hold exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, non_camel_case_types)]
pub enum Format {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl Format {
    /// All formats.
    pub const ALL: [Format; 11] = [
        Format::F32,
        Format::F16,
        Format::BF16,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q8_0,
        Format::Q4_K,
        Format::Q5_K,
        Format::Q6_K,
    ];

    /// Elements of a block.
    pub const fn block_len(self) -> usize {
        match self {
            Format::F32 | Format::F16 | Format::BF16 => 1,
            Format::Q4_K | Format::Q5_K | Format::Q6_K => 256,
            _ => 32,
        }
    }

    /// Bytes of a block of one row in a GGUF file.
    pub const fn file_bytes(self) -> usize {
        match self {
            Format::F32 => 4,
            Format::F16 | Format::BF16 => 2,
            Format::Q4_0 => 18,
            Format::Q4_1 => 20,
            Format::Q5_0 => 22,
            Format::Q5_1 => 24,
            Format::Q8_0 => 34,
            Format::Q4_K => 144,
            Format::Q5_K => 176,
            Format::Q6_K => 210,
        }
    }

    /// Bytes of a panel of rows of `k` elements.
    pub const fn panel_bytes(self, k: usize) -> usize {
        let nb = k / self.block_len();
        let bytes = match self.blocks32() {
            Some(f) => nb * (f.quant_bytes() + 32 + if f.m { 32 } else { 0 }),
            None => nb * self.record_bytes(),
        };
        bytes.next_multiple_of(64)
    }

    /// Bytes of one block of a panel, for formats that keep a block in one piece.
    pub(super) const fn record_bytes(self) -> usize {
        match self {
            Format::F32 => 64,
            Format::F16 | Format::BF16 => 32,
            Format::Q4_K => 2368,
            Format::Q5_K => 2880,
            Format::Q6_K => 3392,
            _ => 0,
        }
    }

    pub(super) const fn blocks32(self) -> Option<Blocks32> {
        let f = Blocks32 { m: false, high: None, quants: 2, words: 4, flip: 0 };
        Some(match self {
            Format::Q4_0 => f,
            Format::Q4_1 => Blocks32 { m: true, quants: 4, ..f },
            Format::Q5_0 => Blocks32 { high: Some(2), quants: 6, ..f },
            Format::Q5_1 => Blocks32 { m: true, high: Some(4), quants: 8, ..f },
            Format::Q8_0 => Blocks32 { words: 8, flip: 0x8080_8080, ..f },
            _ => return None,
        })
    }
}

/// Where the fields of a GGUF block of 32 lie; `d` is always first.
#[derive(Clone, Copy)]
pub(super) struct Blocks32 {
    /// Has a minimum, an f16 after `d`.
    pub(super) m: bool,
    /// Offset of the 32 fifth bits.
    pub(super) high: Option<usize>,
    /// Offset of the quants.
    quants: usize,
    /// 32-bit words of quants.
    words: usize,
    /// What makes the quants unsigned.
    flip: u32,
}

impl Blocks32 {
    pub(super) const fn quant_bytes(&self) -> usize {
        self.words * 64 + if self.high.is_some() { 64 } else { 0 }
    }
}

/// A matrix of `rows` x `k` weights in panels. Row r of the product is `sum_k w[r][k] * x[k]`.
pub struct Matrix {
    format: Format,
    rows: usize,
    k: usize,
    data: AlignedBuf,
}

impl Matrix {
    /// An all-zero matrix, to be filled panel by panel with [`Matrix::pack_panel`].
    ///
    /// # Panics
    /// If `k` is not a whole number of blocks.
    pub fn zeroed(format: Format, rows: usize, k: usize) -> Result<Matrix, TryReserveError> {
        assert!(k.is_multiple_of(format.block_len()), "row length is not a whole number of blocks");
        let data = AlignedBuf::zeroed(rows.div_ceil(PANEL) * format.panel_bytes(k))?;
        Ok(Matrix { format, rows, k, data })
    }

    /// Packs GGUF rows, `rows * k / block_len * file_bytes` bytes of them.
    pub fn from_rows(format: Format, rows: usize, k: usize, src: &[u8]) -> Result<Matrix, TryReserveError> {
        let mut m = Matrix::zeroed(format, rows, k)?;
        for (p, rows) in src.chunks(PANEL * m.row_bytes()).enumerate() {
            m.pack_panel(p, rows);
        }
        Ok(m)
    }

    /// The layout.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Outputs of a product.
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

    /// Bytes of memory the weights take.
    pub fn len_bytes(&self) -> usize {
        self.data.len()
    }

    /// Bytes of a row in a GGUF file.
    pub fn row_bytes(&self) -> usize {
        self.k / self.format.block_len() * self.format.file_bytes()
    }

    pub(super) fn panel(&self, p: usize) -> &[u8] {
        let n = self.format.panel_bytes(self.k);
        &self.data.bytes()[p * n..(p + 1) * n]
    }

    /// Packs rows `16 * p ..` of the matrix, given as they lie in the file.
    ///
    /// # Panics
    /// If `src` is not the rows of that panel.
    pub fn pack_panel(&mut self, p: usize, src: &[u8]) {
        let n = self.format.panel_bytes(self.k);
        assert_eq!(src.len(), PANEL.min(self.rows - p * PANEL) * self.row_bytes(), "the last panel is what is left");
        pack_panel(self.format, self.k, src, &mut self.data.bytes_mut()[p * n..(p + 1) * n]);
    }

    /// Packs the panels from `first` on, in parallel: `src` is their rows. `check` sees the rows of a panel before they
    /// are packed; the first panel that fails is returned.
    ///
    /// # Panics
    /// If `src` is not whole panels of the matrix's rows.
    pub fn pack_panels<E: Send>(
        &mut self,
        pool: &dyn Pool,
        first: usize,
        src: &[u8],
        check: &(dyn Fn(&[u8]) -> Result<(), E> + Sync),
    ) -> Result<(), (usize, E)> {
        let (k, format, piece) = (self.k, self.format, PANEL * self.row_bytes());
        let left = (self.rows * self.row_bytes()).saturating_sub(first * piece);
        assert!(src.len() == left || src.len() < left && src.len().is_multiple_of(piece), "whole panels");
        let mut faults: Vec<Option<E>> = (0..src.len().div_ceil(piece)).map(|_| None).collect();
        let panel_bytes = format.panel_bytes(k);
        let packed = &mut self.data.bytes_mut()[first * panel_bytes..][..faults.len() * panel_bytes];
        let panels = (packed, panel_bytes);
        tasks::chunks2(pool, panels, (&mut faults, 1), &|p, panel, fault| {
            let rows = &src[p * piece..src.len().min((p + 1) * piece)];
            match check(rows) {
                Ok(()) => pack_panel(format, k, rows, panel),
                Err(e) => fault[0] = Some(e),
            }
        });
        match faults.into_iter().enumerate().find_map(|(p, f)| f.map(|f| (first + p, f))) {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    /// Row `row` as it lies in a GGUF file: the inverse of packing. `out` is `row_bytes` long.
    pub fn unpack_row(&self, row: usize, out: &mut [u8]) {
        let panel = self.panel(row / PANEL);
        for (b, block) in out.chunks_exact_mut(self.format.file_bytes()).enumerate() {
            unpack_block(self.format, self.k, panel, row % PANEL, b, block);
        }
    }
}

fn pack_panel(format: Format, k: usize, src: &[u8], dst: &mut [u8]) {
    let row_bytes = k / format.block_len() * format.file_bytes();
    for (r, row) in src.chunks_exact(row_bytes).enumerate() {
        for (b, block) in row.chunks_exact(format.file_bytes()).enumerate() {
            pack_block(format, k, dst, r, b, block);
        }
    }
}

fn word(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn put(b: &mut [u8], at: usize, v: u32) {
    b[at..at + 4].copy_from_slice(&v.to_le_bytes());
}

/// Byte i of the result holds bits i, i+4, i+8, ... of `x`, and the reverse.
fn planes_of_bits(x: u32) -> u32 {
    (0..32).fold(0, |y, k| y | (x >> k & 1) << (k % 4 * 8 + k / 4))
}

fn bits_of_planes(y: u32) -> u32 {
    (0..32).fold(0, |x, k| x | (y >> (k % 4 * 8 + k / 4) & 1) << k)
}

#[inline(always)]
fn pack_block(format: Format, k: usize, dst: &mut [u8], r: usize, b: usize, src: &[u8]) {
    let nb = k / format.block_len();
    if let Some(f) = format.blocks32() {
        let qb = f.quant_bytes();
        let (quants, scales) = dst.split_at_mut(nb * qb);
        let q = &mut quants[b * qb..(b + 1) * qb];
        for w in 0..f.words {
            put(q, w * 64 + r * 4, word(src, f.quants + w * 4) ^ f.flip);
        }
        if let Some(at) = f.high {
            put(q, f.words * 64 + r * 4, planes_of_bits(word(src, at)));
        }
        scales[(b * PANEL + r) * 2..][..2].copy_from_slice(&src[..2]);
        if f.m {
            scales[((nb + b) * PANEL + r) * 2..][..2].copy_from_slice(&src[2..4]);
        }
        return;
    }
    let rec = format.record_bytes();
    let o = &mut dst[b * rec..(b + 1) * rec];
    match format {
        Format::F32 => o[r * 4..][..4].copy_from_slice(src),
        Format::F16 | Format::BF16 => o[r * 2..][..2].copy_from_slice(src),
        Format::Q6_K => {
            for t in 0..8 {
                for i in 0..4 {
                    let (lo, hi) = (q6_word(src, t * 32 + i * 4), q6_word(src, t * 32 + 16 + i * 4));
                    put(o, (t * 4 + i) * 64 + r * 4, lo & 0x0f0f_0f0f | (hi & 0x0f0f_0f0f) << 4);
                }
                for h in 0..2 {
                    let two = |i: usize| (q6_word(src, t * 32 + h * 16 + i * 4) >> 4 & 0x0303_0303) << (2 * i);
                    put(o, (32 + t * 2 + h) * 64 + r * 4, two(0) | two(1) | two(2) | two(3));
                }
            }
            for s in 0..16 {
                o[3072 + s * 16 + r] = src[192 + s];
            }
            o[3328 + r * 2..][..2].copy_from_slice(&src[208..210]);
        }
        _ => {
            let five = format == Format::Q5_K;
            let (qs, meta) = if five { (48, 2560) } else { (16, 2048) };
            for w in 0..32 {
                put(o, w * 64 + r * 4, word(src, qs + w * 4));
            }
            if five {
                for g in 0..8 {
                    put(o, 2048 + g * 64 + r * 4, word(src, 16 + g * 4));
                }
            }
            for s in 0..8 {
                let (sc, m) = scale_min(&src[4..16], s);
                o[meta + s * 16 + r] = sc;
                o[meta + 128 + s / 2 * 32 + r * 2 + s % 2] = m;
            }
            o[meta + 256 + r * 2..][..2].copy_from_slice(&src[..2]);
            o[meta + 288 + r * 2..][..2].copy_from_slice(&src[2..4]);
        }
    }
}

fn unpack_block(format: Format, k: usize, panel: &[u8], r: usize, b: usize, dst: &mut [u8]) {
    let nb = k / format.block_len();
    if let Some(f) = format.blocks32() {
        let qb = f.quant_bytes();
        let (quants, scales) = panel.split_at(nb * qb);
        let q = &quants[b * qb..(b + 1) * qb];
        for w in 0..f.words {
            put(dst, f.quants + w * 4, word(q, w * 64 + r * 4) ^ f.flip);
        }
        if let Some(at) = f.high {
            put(dst, at, bits_of_planes(word(q, f.words * 64 + r * 4)));
        }
        dst[..2].copy_from_slice(&scales[(b * PANEL + r) * 2..][..2]);
        if f.m {
            dst[2..4].copy_from_slice(&scales[((nb + b) * PANEL + r) * 2..][..2]);
        }
        return;
    }
    let rec = format.record_bytes();
    let o = &panel[b * rec..(b + 1) * rec];
    match format {
        Format::F32 => dst.copy_from_slice(&o[r * 4..][..4]),
        Format::F16 | Format::BF16 => dst.copy_from_slice(&o[r * 2..][..2]),
        Format::Q6_K => {
            dst.fill(0);
            for e in 0..256 {
                q6_set(dst, e, q6_value(o, r, e));
            }
            for s in 0..16 {
                dst[192 + s] = o[3072 + s * 16 + r];
            }
            dst[208..210].copy_from_slice(&o[3328 + r * 2..][..2]);
        }
        _ => {
            let five = format == Format::Q5_K;
            let (qs, meta) = if five { (48, 2560) } else { (16, 2048) };
            for w in 0..32 {
                put(dst, qs + w * 4, word(o, w * 64 + r * 4));
            }
            if five {
                for g in 0..8 {
                    put(dst, 16 + g * 4, word(o, 2048 + g * 64 + r * 4));
                }
            }
            dst[4..16].fill(0);
            for s in 0..8 {
                set_scale_min(&mut dst[4..16], s, o[meta + s * 16 + r], o[meta + 128 + s / 2 * 32 + r * 2 + s % 2]);
            }
            dst[..2].copy_from_slice(&o[meta + 256 + r * 2..][..2]);
            dst[2..4].copy_from_slice(&o[meta + 288 + r * 2..][..2]);
        }
    }
}

/// 6-bit scale and minimum of sub-block `s` of a Q4_K or Q5_K block (ggml's packing in 12 bytes).
fn scale_min(p: &[u8], s: usize) -> (u8, u8) {
    if s < 4 {
        (p[s] & 63, p[s + 4] & 63)
    } else {
        (p[s + 4] & 15 | p[s - 4] >> 6 << 4, p[s + 4] >> 4 | p[s] >> 6 << 4)
    }
}

fn set_scale_min(p: &mut [u8], s: usize, sc: u8, m: u8) {
    if s < 4 {
        p[s] |= sc;
        p[s + 4] |= m;
    } else {
        p[s + 4] |= sc & 15 | m << 4;
        p[s - 4] |= sc >> 4 << 6;
        p[s] |= m >> 4 << 6;
    }
}

/// Four consecutive 6-bit values (element `e` is a multiple of 4) of a GGUF Q6_K block, a byte each.
fn q6_word(src: &[u8], e: usize) -> u32 {
    let (n, quarter, l) = (e / 128, e % 128 / 32, e % 32);
    let low = word(src, n * 64 + quarter % 2 * 32 + l) >> (quarter / 2 * 4) & 0x0f0f_0f0f;
    let high = word(src, 128 + n * 32 + l) >> (quarter * 2) & 0x0303_0303;
    low | high << 4
}

fn q6_set(dst: &mut [u8], e: usize, v: u8) {
    let (n, quarter, l) = (e / 128, e % 128 / 32, e % 32);
    dst[n * 64 + quarter % 2 * 32 + l] |= (v & 15) << (quarter / 2 * 4);
    dst[128 + n * 32 + l] |= v >> 4 << (quarter * 2);
}

/// The unsigned 6-bit value of element `e`, row `r` in a panel record.
fn q6_value(o: &[u8], r: usize, e: usize) -> u8 {
    let (t, h, i, j) = (e / 32, e % 32 / 16, e % 16 / 4, e % 4);
    let low = o[(t * 4 + i) * 64 + r * 4 + j] >> (4 * h) & 15;
    let high = o[(32 + t * 2 + h) * 64 + r * 4 + j] >> (2 * i) & 3;
    low | high << 4
}

/// One block of one row, decoded for the scalar definition: `value = d * scale[s] * q - dmin * min[s]` for super-blocks,
/// `d * q + dmin` for blocks of 32 with a minimum, `d * q` for the others.
pub(super) struct Decoded {
    /// Signed quants (unsigned where the type has a minimum).
    pub(super) q: [i16; 256],
    /// Scales of 16-element sub-blocks.
    pub(super) scale: [i32; 16],
    /// Minima of 16-element sub-blocks.
    pub(super) min: [i32; 16],
    pub(super) d: f32,
    pub(super) dmin: f32,
}

impl Decoded {
    pub(super) fn new(format: Format, k: usize, panel: &[u8], r: usize, b: usize) -> Decoded {
        let mut v = Decoded { q: [0; 256], scale: [0; 16], min: [0; 16], d: 0.0, dmin: 0.0 };
        let f16 = |at: usize| f16_to_f32(u16::from_le_bytes([panel[at], panel[at + 1]]));
        let nb = k / format.block_len();
        if let Some(f) = format.blocks32() {
            let qb = f.quant_bytes();
            let o = &panel[b * qb..];
            let offset = if f.words == 8 { 128 } else { [8, 16, 0][if f.m { 2 } else { f.high.is_some() as usize }] };
            for e in 0..32 {
                let (g, i) = (e / 4, r * 4 + e % 4);
                let x = if f.words == 8 { o[g * 64 + i] } else { o[g % 4 * 64 + i] >> (g / 4 * 4) & 15 };
                let high = if f.high.is_some() { (o[256 + i] >> g & 1) << 4 } else { 0 };
                v.q[e] = i16::from(x | high) - offset;
            }
            v.d = f16(nb * qb + (b * PANEL + r) * 2);
            v.dmin = if f.m { f16(nb * qb + ((nb + b) * PANEL + r) * 2) } else { 0.0 };
            return v;
        }
        let at = b * format.record_bytes();
        let o = &panel[at..];
        if format == Format::Q6_K {
            for e in 0..256 {
                v.q[e] = i16::from(q6_value(o, r, e)) - 32;
            }
            for s in 0..16 {
                v.scale[s] = i32::from(o[3072 + s * 16 + r] as i8);
            }
            v.d = f16(at + 3328 + r * 2);
            return v;
        }
        let five = format == Format::Q5_K;
        let meta = if five { 2560 } else { 2048 };
        for e in 0..256 {
            let (s, g, i) = (e / 32, e % 32 / 4, r * 4 + e % 4);
            let x = o[(s / 2 * 8 + g) * 64 + i] >> (s % 2 * 4) & 15;
            let high = if five { (o[2048 + g * 64 + i] >> s & 1) << 4 } else { 0 };
            v.q[e] = i16::from(x | high);
        }
        for s in 0..16 {
            v.scale[s] = i32::from(o[meta + s / 2 * 16 + r]);
            v.min[s] = i32::from(o[meta + 128 + s / 4 * 32 + r * 2 + s / 2 % 2]);
        }
        v.d = f16(at + meta + 256 + r * 2);
        v.dmin = f16(at + meta + 288 + r * 2);
        v
    }
}

/// f16 bits to f32, exact for finite values: a shift and a multiplication by a power of two.
#[inline(always)]
pub(super) fn f16_to_f32(h: u16) -> f32 {
    let x = (i32::from(h as i16) << 13) as u32 & 0x8fff_e000;
    f32::from_bits(x) * f32::from_bits(0x7780_0000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn unpacking_undoes_packing(f in 0usize..Format::ALL.len(), rows in 1usize..40, blocks in 1usize..4, seed: u64) {
            let format = Format::ALL[f];
            let k = blocks * format.block_len();
            let mut x = seed;
            let src: Vec<u8> = (0..rows * blocks * format.file_bytes())
                .map(|_| { x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407); (x >> 56) as u8 })
                .collect();
            let m = Matrix::from_rows(format, rows, k, &src).unwrap();
            let mut row = vec![0; m.row_bytes()];
            for r in 0..rows {
                m.unpack_row(r, &mut row);
                prop_assert_eq!(&row[..], &src[r * row.len()..(r + 1) * row.len()]);
            }
        }
    }
}
