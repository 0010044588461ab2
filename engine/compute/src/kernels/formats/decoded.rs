//! Panel blocks decoded to plain numbers, for the scalar definition of products and for rows of an embedding matrix.

use crate::kernels::bit_packing::BitPacking;
use crate::kernels::i16_fields::I16Fields;
use crate::kernels::panel::PANEL;
use crate::kernels::panel_layout::{CodebookLayout, HEAD, PanelLayout, block_at};
use crate::quant::Dtype;

/// One block of one row. In a super-block, `value = (d * scale) * q - min_scale * min`, with scale and minimum per 16 elements;
/// in a block of 32, `value = d * q + block_min`, or in NVFP4 `d * q` and `second_scale * q` for its halves. Fields that a
/// type does not have are 0, `scale` is 1.
pub(in crate::kernels) struct Decoded {
    /// Signed quants; unsigned if the type has a minimum.
    pub(in crate::kernels) q: [i16; 256],
    /// Scale of each 16 elements.
    pub(in crate::kernels) scale: [i32; 16],
    /// Minimum of each 16 elements.
    pub(in crate::kernels) min: [i32; 16],
    pub(in crate::kernels) d: f32,
    /// Scale of the minima of a super-block.
    pub(in crate::kernels) min_scale: f32,
    /// Minimum of a block of 32.
    pub(in crate::kernels) block_min: f32,
    /// Scale of the second half of a block of 32.
    pub(in crate::kernels) second_scale: f32,
}

impl Decoded {
    /// Decodes block `b` of row `r` of a panel.
    pub(in crate::kernels) fn new(layout: &PanelLayout, panel: &[u8], r: usize, b: usize) -> Decoded {
        let mut v = Decoded {
            q: [0; 256],
            scale: [1; 16],
            min: [0; 16],
            d: 0.0,
            min_scale: 0.0,
            block_min: 0.0,
            second_scale: 0.0,
        };
        let f16 = |at: usize| f16_to_f32(u16_at(panel, at));
        match layout {
            PanelLayout::Float => {}
            PanelLayout::Blocks32(f) => {
                let (quants, scales) = block_at(f.quant_bytes(), f.scales(), b);
                v.read_quants(layout, &panel[quants..], r, if f.m { 0 } else { 1 << (f.bits() - 1) });
                v.d = f16(scales + r * 2);
                v.block_min = if f.m { f16(scales + (PANEL + r) * 2) } else { 0.0 };
            }
            PanelLayout::SuperSigned => {
                let at = b * BitPacking::of(6).record_bytes();
                let o = &panel[at..];
                v.read_quants(layout, &o[HEAD..], r, 32);
                for s in 0..16 {
                    v.scale[s] = i32::from(o[s * 16 + r] as i8);
                }
                v.d = f16(at + 256 + r * 2);
            }
            PanelLayout::SuperMin { five } => {
                let at = b * BitPacking::of(4 + u32::from(*five)).record_bytes();
                let o = &panel[at..];
                v.read_quants(layout, &o[HEAD..], r, 0);
                for s in 0..16 {
                    v.scale[s] = i32::from(o[s / 2 * 16 + r]);
                    v.min[s] = i32::from(o[128 + s / 4 * 32 + r * 2 + s / 2 % 2]);
                }
                v.d = f16(at + 256 + r * 2);
                v.min_scale = f16(at + 288 + r * 2);
            }
            PanelLayout::Codes(f) if f.is_super() => v.read_codes(f, &panel[b * f.record_bytes()..], r),
            PanelLayout::Codes(f) => {
                let (quants, scales) = block_at(f.chunk_bytes(), f.parts, b);
                v.read_chunk(f, &panel[quants..], r, 0);
                let scale = |part: usize| {
                    let bits = u16_at(panel, scales + (part * PANEL + r) * 2);
                    if f.bf16() { bf16_to_f32(bits) } else { f16_to_f32(bits) }
                };
                (v.d, v.second_scale) = (scale(0), if f.parts == 2 { scale(1) } else { 0.0 });
            }
        }
        v
    }

    /// Reads the quants of the block that begins with `o` and subtracts `offset`.
    fn read_quants(&mut self, layout: &PanelLayout, o: &[u8], r: usize, offset: i16) {
        for (e, q) in self.q[..layout.block_len()].iter_mut().enumerate() {
            *q = i16::from(quant(layout, o, r, e)) - offset;
        }
    }

    /// Reads the values of chunk `t` of 32 codes.
    fn read_chunk(&mut self, f: &CodebookLayout, o: &[u8], r: usize, t: usize) {
        for e in 0..32 {
            let (byte, shift) = f.code_at(e, r);
            let code = o[byte] >> shift & ((1 << f.width) - 1);
            self.q[32 * t + e] = i16::from(f.book.table[usize::from(code)]);
        }
    }

    fn read_codes(&mut self, f: &CodebookLayout, o: &[u8], r: usize) {
        for (t, o) in o[f.codes()..].chunks_exact(f.chunk_bytes()).take(8).enumerate() {
            self.read_chunk(f, o, r, t);
        }
        for s in 0..16 {
            self.scale[s] = i32::from(o[s * 16 + r] as i8);
        }
        self.d = f32::from_bits(word(o, 256 + r * 4));
        if f.has_min() {
            for s in 0..16 {
                self.min[s] = i32::from(o[HEAD + s / 2 * 32 + r * 2 + s % 2]);
            }
            self.min_scale = f32::from_bits(word(o, HEAD + 256 + r * 4));
        }
    }

    /// The dequantised values.
    pub(in crate::kernels) fn values(&self, layout: &PanelLayout, out: &mut [f32]) {
        for (e, x) in out.iter_mut().enumerate() {
            let q = f32::from(self.q[e]);
            *x = match layout {
                PanelLayout::Blocks32(f) if f.m => q * self.d + self.block_min,
                PanelLayout::Codes(f) if f.parts == 2 => q * if e < 16 { self.d } else { self.second_scale },
                _ => (self.d * self.scale[e / 16] as f32) * q - self.min_scale * self.min[e / 16] as f32,
            };
        }
    }
}

/// Element `i` of a panel of floats.
pub(in crate::kernels) fn float_at(dtype: Dtype, panel: &[u8], i: usize) -> f32 {
    match dtype {
        Dtype::F32 => f32::from_bits(word(panel, i * 4)),
        Dtype::F16 => f16_to_f32(u16_at(panel, i * 2)),
        _ => bf16_to_f32(u16_at(panel, i * 2)),
    }
}

#[inline(always)]
pub(in crate::kernels) fn word(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

/// Four consecutive 6-bit quants of a GGUF Q6_K block, a byte each; element `e` is a multiple of 4.
pub(in crate::kernels) fn q6_word(src: &[u8], e: usize) -> u32 {
    let (n, quarter, l) = (e / 128, e % 128 / 32, e % 32);
    let low = word(src, n * 64 + quarter % 2 * 32 + l) >> (quarter / 2 * 4) & 0x0f0f_0f0f;
    let high = word(src, 128 + n * 32 + l) >> (quarter * 2) & 0x0303_0303;
    low | high << 4
}

/// Unsigned quant `e` of row `r`, of the block that begins with `o`.
#[inline(always)]
fn quant(layout: &PanelLayout, o: &[u8], r: usize, e: usize) -> u8 {
    if let PanelLayout::Blocks32(f) = layout
        && f.bits() == 8
    {
        return o[e / 4 * 64 + r * 4 + e % 4] ^ f.flip.to_le_bytes()[e % 4] ^ 0x80;
    }
    let Some(bits) = layout.packed_bits() else { return 0 };
    let packing = BitPacking::of(bits);
    let (o, e) = (&o[e / packing.len * packing.sub_block_bytes()..], e % packing.len);
    match I16Fields::of(bits) {
        Some(f) => f.element(e, |line, h| u16_at(o, line * 64 + r * 4 + h * 2)),
        None => packing.element(e, |line| u16_at(o, line * 64 + r * 4 + e % 4 / 2 * 2)),
    }
}

/// Exact conversion of finite f16 bits: a shift and a multiplication by a power of two.
#[inline(always)]
pub(in crate::kernels) fn f16_to_f32(h: u16) -> f32 {
    let x = (i32::from(h as i16) << 13) as u32 & 0x8fff_e000;
    f32::from_bits(x) * f32::from_bits(0x7780_0000)
}

/// Exact conversion of bf16 bits.
#[inline(always)]
fn bf16_to_f32(h: u16) -> f32 {
    f32::from_bits(u32::from(h) << 16)
}
