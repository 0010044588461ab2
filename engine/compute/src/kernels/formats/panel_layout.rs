//! The geometry of panels, shared by packing, the scalar definition and the kernels. The head of `panel.rs` describes
//! the layouts.

use crate::kernels::bit_packing::BitPacking;
use crate::kernels::i16_fields::HAS_I16_FIELDS;
use crate::kernels::panel::PANEL;
use crate::quant::Dtype;
use crate::quant::codebook::{Codebook, Scale};

/// Bytes of scales and padding before the quants in the record of a super-block. Q2_K has as many again for its minima.
pub(in crate::kernels) const HEAD: usize = 320;

/// The panel layout of a type.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernels) enum PanelLayout {
    /// F32, F16, BF16.
    Float,
    /// The legacy types: blocks of 32.
    Blocks32(Block32Layout),
    /// Q4_K, Q5_K.
    SuperMin { five: bool },
    /// Q6_K.
    SuperSigned,
    /// Codebook types: codes of 1, 2 or 4 bits.
    Codes(CodebookLayout),
}

/// Fields of a GGUF block of 32; `d` always comes first.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernels) struct Block32Layout {
    /// Whether the block has a minimum, an f16 after `d`.
    pub(in crate::kernels) m: bool,
    /// Offset of the 32 fifth bits, if any.
    pub(in crate::kernels) high: Option<usize>,
    /// Offset of the quants.
    pub(in crate::kernels) quants: usize,
    /// Number of 32-bit words of quants.
    pub(in crate::kernels) words: usize,
    /// Mask that is xored into words of byte quants: 0x80 makes a signed byte offset binary.
    pub(in crate::kernels) flip: u32,
}

impl Block32Layout {
    /// Bytes of the quants of 16 rows.
    pub(in crate::kernels) const fn quant_bytes(&self) -> usize {
        if self.words == 8 { 512 } else { BitPacking::of(self.bits()).sub_block_bytes() }
    }

    /// Number of scales and minima of a block.
    pub(in crate::kernels) const fn scales(&self) -> usize {
        1 + self.m as usize
    }

    /// Bits of a quant.
    pub(in crate::kernels) const fn bits(&self) -> u32 {
        match (self.words, self.high) {
            (8, _) => 8,
            (_, Some(_)) => 5,
            _ => 4,
        }
    }
}

/// Layout of codebook types. A panel block is one of 32 elements, or a super-block of 8 chunks of 32.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernels) struct CodebookLayout {
    pub(in crate::kernels) book: &'static Codebook,
    /// The codebook in offset binary, repeated to 16 entries, so that a code may have bits of other codes above it.
    pub(in crate::kernels) offset_table: [u8; 16],
    /// Bits of a code, and number of lines that 32 elements take.
    pub(in crate::kernels) width: usize,
    /// Scales per block of 32: 1, or 2 for its halves.
    pub(in crate::kernels) parts: usize,
}

impl CodebookLayout {
    fn new(book: &'static Codebook) -> CodebookLayout {
        CodebookLayout {
            book,
            offset_table: core::array::from_fn(|i| book.table[i % (1 << book.width)] as u8 ^ 0x80),
            width: book.width,
            parts: if book.scale == Scale::Each { 2 } else { 1 },
        }
    }

    /// Whether a panel block is a super-block of 256.
    pub(in crate::kernels) fn is_super(&self) -> bool {
        self.book.dtype.block_len() == 256
    }

    /// Whether every 16 elements have a minimum.
    pub(in crate::kernels) fn has_min(&self) -> bool {
        self.book.scale == Scale::F16AndMin
    }

    /// Whether the scales of blocks of 32 are bf16 rather than f16.
    pub(in crate::kernels) fn bf16(&self) -> bool {
        matches!(self.book.scale, Scale::Power | Scale::Each)
    }

    /// Bytes of the codes of 32 elements of 16 rows.
    pub(in crate::kernels) fn chunk_bytes(&self) -> usize {
        64 * self.width
    }

    /// Offset in a chunk, and right shift, of element `e` of 32 in row `r`.
    pub(in crate::kernels) fn code_at(&self, e: usize, r: usize) -> (usize, usize) {
        let (line, shift) = code_line(e / 4, self.width);
        (line * 64 + r * 4 + e % 4, shift)
    }

    /// Offset of the codes in the record of a super-block: after scales, `d`, minima and `dmin`.
    pub(in crate::kernels) fn codes(&self) -> usize {
        if self.has_min() { 2 * HEAD } else { HEAD }
    }

    /// Bytes of the record of a super-block.
    pub(in crate::kernels) fn record_bytes(&self) -> usize {
        self.codes() + 8 * self.chunk_bytes()
    }
}

/// Offsets in a panel of the quants and of the scales of block `b` of 32, with `quants` bytes of quants and `scales` (1
/// or 2) times 32 bytes of scales. In reading order, quants aligned to cache lines: with one scale a record is two
/// blocks, as quants, both scales, quants; with two, one block, as quants and scales.
#[inline(always)]
pub(in crate::kernels) const fn block_at(quants: usize, scales: usize, b: usize) -> (usize, usize) {
    if scales == 2 {
        let at = b * (quants + 64);
        return (at, at + quants);
    }
    let at = b / 2 * (2 * quants + 64);
    if b.is_multiple_of(2) { (at, at + quants) } else { (at + quants + 64, at + quants + 32) }
}

/// Line in a chunk, and right shift, of group `g` of 8.
#[inline(always)]
pub(in crate::kernels) fn code_line(g: usize, width: usize) -> (usize, usize) {
    let line = g & (width - 1);
    (line, g - line)
}

impl PanelLayout {
    /// The layout of a type; `None` if the engine does not compute with it.
    pub(in crate::kernels) fn of(dtype: Dtype) -> Option<PanelLayout> {
        let f = Block32Layout { m: false, high: None, quants: 2, words: 4, flip: 0 };
        Some(match dtype {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 => PanelLayout::Float,
            Dtype::Q4_0 => PanelLayout::Blocks32(f),
            Dtype::Q4_1 => PanelLayout::Blocks32(Block32Layout { m: true, quants: 4, ..f }),
            Dtype::Q5_0 => PanelLayout::Blocks32(Block32Layout { high: Some(2), quants: 6, ..f }),
            Dtype::Q5_1 => PanelLayout::Blocks32(Block32Layout { m: true, high: Some(4), quants: 8, ..f }),
            // with i16 fields odd elements stay signed, for `ActEncoding::I16OddSigned`
            Dtype::Q8_0 => PanelLayout::Blocks32(Block32Layout {
                words: 8,
                flip: if HAS_I16_FIELDS { 0x0080_0080 } else { 0x8080_8080 },
                ..f
            }),
            Dtype::Q4_K => PanelLayout::SuperMin { five: false },
            Dtype::Q5_K => PanelLayout::SuperMin { five: true },
            Dtype::Q6_K => PanelLayout::SuperSigned,
            other => PanelLayout::Codes(CodebookLayout::new(Codebook::of(other)?)),
        })
    }

    /// Bits of bit-packed quants; `None` for bytes, codes and floats.
    pub(in crate::kernels) fn packed_bits(&self) -> Option<u32> {
        match self {
            PanelLayout::Blocks32(f) => Some(f.bits()).filter(|&bits| bits < 8),
            PanelLayout::SuperMin { five } => Some(4 + u32::from(*five)),
            PanelLayout::SuperSigned => Some(6),
            PanelLayout::Float | PanelLayout::Codes(_) => None,
        }
    }

    /// Elements of a panel block.
    pub(in crate::kernels) fn block_len(&self) -> usize {
        match self {
            PanelLayout::Float => 1,
            PanelLayout::Blocks32(_) => 32,
            PanelLayout::Codes(f) if !f.is_super() => 32,
            _ => 256,
        }
    }

    /// Whether the AMX kernel supports it: not types with two float scales per 32 elements.
    pub(in crate::kernels) fn fits_amx(&self) -> bool {
        match self {
            PanelLayout::Float => false,
            PanelLayout::Codes(f) => f.is_super() || f.parts == 1,
            _ => true,
        }
    }

    /// Bytes of the quants of a block of 32, or of the whole record of a super-block.
    pub(in crate::kernels) fn quants_or_record_bytes(&self, dtype: Dtype) -> usize {
        match self {
            PanelLayout::Blocks32(f) => f.quant_bytes(),
            PanelLayout::Codes(f) if !f.is_super() => f.chunk_bytes(),
            _ => self.record_bytes(dtype),
        }
    }

    /// Scales and minima of a block of 32; 0 for super-blocks, whose records contain them.
    pub(in crate::kernels) fn scales(&self) -> usize {
        match self {
            PanelLayout::Blocks32(f) => f.scales(),
            PanelLayout::Codes(f) if !f.is_super() => f.parts,
            _ => 0,
        }
    }

    /// Whether the scales of blocks of 32 are bf16 rather than f16.
    pub(in crate::kernels) fn bf16(&self) -> bool {
        matches!(self, PanelLayout::Codes(f) if f.bf16())
    }

    /// Offsets in a panel of the quants and scales of block `b` of 32; of a super-block, twice the offset of its
    /// record.
    pub(in crate::kernels) fn block_at(&self, dtype: Dtype, b: usize) -> (usize, usize) {
        let bytes = self.quants_or_record_bytes(dtype);
        match self.scales() {
            0 => (b * bytes, b * bytes),
            scales => block_at(bytes, scales, b),
        }
    }

    /// Bytes of a panel block, scales included.
    fn block_bytes(&self, dtype: Dtype) -> usize {
        self.quants_or_record_bytes(dtype) + 32 * self.scales()
    }

    /// Bytes of the record of a panel block; 0 for blocks of 32, which share records.
    pub(in crate::kernels) fn record_bytes(&self, dtype: Dtype) -> usize {
        match self {
            PanelLayout::Float => PANEL * dtype.block_bytes() as usize,
            PanelLayout::SuperMin { five } => BitPacking::of(4 + u32::from(*five)).record_bytes(),
            PanelLayout::SuperSigned => BitPacking::of(6).record_bytes(),
            PanelLayout::Codes(f) => f.record_bytes(),
            PanelLayout::Blocks32(_) => 0,
        }
    }

    /// Bytes of a panel of rows of `k` elements.
    pub(in crate::kernels) fn panel_bytes(&self, dtype: Dtype, k: usize) -> usize {
        (k / self.block_len() * self.block_bytes(dtype)).next_multiple_of(64)
    }
}
