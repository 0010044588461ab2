//! Packing of the rows of a GGUF file into panels.

use crate::kernels::bit_packing::{self, BitPacking};
use crate::kernels::decoded::{q6_word, word};
use crate::kernels::i16_fields::{HAS_I16_FIELDS, I16Fields};
use crate::kernels::panel::PANEL;
use crate::kernels::panel_layout::{Block32Layout, CodebookLayout, HEAD, PanelLayout, block_at, code_line};
use crate::quant::codebook::Codes;
use crate::quant::{Dtype, q4_k};

/// Packs up to 16 rows of `k` elements.
pub(in crate::kernels) fn pack_panel(dtype: Dtype, layout: &PanelLayout, k: usize, src: &[u8], dst: &mut [u8]) {
    let block_bytes = dtype.block_bytes() as usize;
    let row_bytes = k / dtype.block_len() as usize * block_bytes;
    let record_bytes = layout.record_bytes(dtype);
    let mut codes = Codes::NONE;
    for (r, row) in src.chunks_exact(row_bytes).enumerate() {
        for (b, block) in row.chunks_exact(block_bytes).enumerate() {
            let record = b * record_bytes..(b + 1) * record_bytes;
            match layout {
                PanelLayout::Float => dst[record][r * block_bytes..][..block_bytes].copy_from_slice(block),
                PanelLayout::Blocks32(f) => pack_32(f, dst, r, b, block),
                PanelLayout::SuperMin { five } => pack_min(*five, &mut dst[record], r, block),
                PanelLayout::SuperSigned => pack_q6(&mut dst[record], r, block),
                PanelLayout::Codes(f) => {
                    f.book.unpack(block, &mut codes);
                    if f.is_super() {
                        pack_codes(f, &codes, &mut dst[record], r);
                    } else {
                        pack_codes_32(f, &codes, dst, r, b * dtype.block_len() as usize / 32);
                    }
                }
            }
        }
    }
}

fn put(b: &mut [u8], at: usize, v: u32) {
    b[at..at + 4].copy_from_slice(&v.to_le_bytes());
}

/// The low four bits of `x`, each in the lowest bit of a byte.
fn spread(x: u32) -> u32 {
    ((x & 15) * 0x0020_4081) & 0x0101_0101
}

/// Packs one or two sub-blocks of row `r` in the bit packing of this build. `group(g)` is group g as four bytes, the
/// second sub-block in the upper half of the word.
#[inline(always)]
fn pack_sub_blocks(bits: u32, group: impl Fn(usize) -> u64, sub_blocks: &mut [u8], r: usize) {
    match (I16Fields::of(bits), bits) {
        (Some(f), _) => f.pack(group, sub_blocks, r),
        (None, 4) => bit_packing::pack::<4>(group, sub_blocks, r),
        (None, 5) => bit_packing::pack::<5>(group, sub_blocks, r),
        (None, _) => bit_packing::pack::<6>(group, sub_blocks, r),
    }
}

#[inline(always)]
fn pack_32(f: &Block32Layout, dst: &mut [u8], r: usize, b: usize, src: &[u8]) {
    let (quants, scales) = block_at(f.quant_bytes(), f.scales(), b);
    let q = &mut dst[quants..][..f.quant_bytes()];
    if f.words == 8 || f.high.is_none() && !HAS_I16_FIELDS {
        // bytes, or 4-bit pairs that the file already has in this order
        for w in 0..f.words {
            put(q, w * 64 + r * 4, word(src, f.quants + w * 4) ^ f.flip);
        }
    } else {
        let high = f.high.map_or(0, |at| word(src, at));
        let low = |g: usize| word(src, f.quants + g % 4 * 4) >> (g / 4 * 4) & 0x0f0f_0f0f;
        pack_sub_blocks(f.bits(), |g| u64::from(low(g) | spread(high >> (4 * g)) << 4), q, r);
    }
    for i in 0..f.scales() {
        dst[scales + (i * PANEL + r) * 2..][..2].copy_from_slice(&src[2 * i..][..2]);
    }
}

#[inline(always)]
fn pack_q6(o: &mut [u8], r: usize, src: &[u8]) {
    for s in 0..16 {
        o[s * 16 + r] = src[192 + s];
    }
    o[256 + r * 2..][..2].copy_from_slice(&src[208..210]);
    for (i, o) in o[HEAD..].chunks_exact_mut(const { 2 * BitPacking::of(6).sub_block_bytes() }).enumerate() {
        let group = |e: usize| u64::from(q6_word(src, i * 32 + e));
        pack_sub_blocks(6, |g| group(g * 4) | group(16 + g * 4) << 32, o, r);
    }
}

#[inline(always)]
fn pack_min(five: bool, o: &mut [u8], r: usize, src: &[u8]) {
    let packed = core::array::from_fn(|i| src[4 + i]);
    for s in 0..8 {
        let (sc, m) = q4_k::scale_min(&packed, s);
        o[s * 16 + r] = sc;
        o[128 + s / 2 * 32 + r * 2 + s % 2] = m;
    }
    o[256 + r * 2..][..2].copy_from_slice(&src[..2]);
    o[288 + r * 2..][..2].copy_from_slice(&src[2..4]);
    let bits = 4 + u32::from(five);
    for (i, o) in o[HEAD..].chunks_exact_mut(2 * BitPacking::of(bits).sub_block_bytes()).enumerate() {
        let low = |g: usize| {
            let nibbles = u64::from(word(src, if five { 48 } else { 16 } + (i * 8 + g) * 4));
            (nibbles | nibbles << 28) & 0x0f0f_0f0f_0f0f_0f0f
        };
        let high = |g: usize| {
            let bits = u64::from(if five { word(src, 16 + g * 4) >> (2 * i) } else { 0 });
            ((bits | bits << 31) & 0x0101_0101_0101_0101) << 4
        };
        pack_sub_blocks(bits, |g| low(g) | high(g), o, r);
    }
}

/// Packs the codes of 32 elements.
fn pack_chunk(f: &CodebookLayout, code: &[u8], o: &mut [u8], r: usize) {
    let mut lines = [0u32; 4];
    for (g, code) in code.chunks_exact(4).enumerate() {
        let (line, shift) = code_line(g, f.width);
        lines[line] |= word(code, 0) << shift;
    }
    for (line, &v) in lines[..f.width].iter().enumerate() {
        put(o, line * 64 + r * 4, v);
    }
}

fn pack_codes(f: &CodebookLayout, codes: &Codes, o: &mut [u8], r: usize) {
    for (code, o) in codes.code.chunks_exact(32).zip(o[f.codes()..].chunks_exact_mut(f.chunk_bytes())) {
        pack_chunk(f, code, o, r);
    }
    for s in 0..16 {
        o[s * 16 + r] = codes.scale[s] as u8;
    }
    put(o, 256 + r * 4, codes.d[0].to_bits());
    if f.has_min() {
        for s in 0..16 {
            o[HEAD + s / 2 * 32 + r * 2 + s % 2] = codes.min[s];
        }
        put(o, HEAD + 256 + r * 4, codes.dmin.to_bits());
    }
}

/// Packs a file block, which is one or several panel blocks from `b` on.
fn pack_codes_32(f: &CodebookLayout, codes: &Codes, dst: &mut [u8], r: usize, b: usize) {
    let n = f.book.dtype.block_len() as usize / 32;
    for (i, code) in codes.code.chunks_exact(32).take(n).enumerate() {
        let (quants, scales) = block_at(f.chunk_bytes(), f.parts, b + i);
        pack_chunk(f, code, &mut dst[quants..], r);
        for part in 0..f.parts {
            let d = codes.d[2 * i + part];
            let bits = if f.bf16() { (d.to_bits() >> 16) as u16 } else { half::f16::from_f32(d).to_bits() };
            dst[scales + (part * PANEL + r) * 2..][..2].copy_from_slice(&bits.to_le_bytes());
        }
    }
}
