//! Matrix products on AMX: tile registers of 16 rows of 64 bytes, and 16 x 16 dots of up to 64 signed bytes in one
//! instruction (`TDPBSSD`; Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
//!
//! An AMX tile is a panel times 16 columns. The weights of a few panels are unpacked to signed bytes, a stretch of K at
//! a time: they stay in the L1 cache while all columns pass, and the panels share the loads of a column. Between
//! stretches the sums are kept in a buffer beside them, as the columns of the output are far apart.
//!
//! Blocks of 32 have scales of their own, so their dots leave the tile registers after each block. In a super-block,
//! weight times scale is an integer that fits two bytes as `64 * high + low`, so `isum = 64 * sum_j high_j q_j + sum_j
//! low_j q_j` is accumulated over the whole super-block.
#![allow(unsafe_code)]

mod registers;
mod unpack;

pub(in crate::kernels) use registers::is_permitted;

use core::arch::x86_64::*;
use core::mem::MaybeUninit;

use super::avx512::Avx512;
use crate::kernels::act::{AMX_COLUMNS, PackedActs};
use crate::kernels::isa::features::{enable_features, isa_features};
use crate::kernels::matmul::Panels;
use crate::kernels::matmul::partition::AMX_PANELS as PANELS;
use crate::kernels::panel::PANEL;
use crate::kernels::panel_layout::PanelLayout;
use crate::kernels::simd::{Simd, each};
use registers::{TileConfig, finish_32, finish_256, start_32, start_256};
use unpack::unpack;

/// Proof that the CPU has AMX with int8, and all that [`Avx512`] needs, and that this process may use it.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Amx(Avx512);

impl Amx {
    /// # Safety
    /// The CPU has these instructions, and the process has the permission to use AMX.
    #[inline(always)]
    pub(in crate::kernels) unsafe fn new(lanes: Avx512) -> Amx {
        Amx(lanes)
    }
}

/// Computes the columns of whole AMX tiles, for some panels.
pub(in crate::kernels) fn gemm(amx: Amx, panels: Panels<'_>, a: &PackedActs<'_>) {
    // SAFETY: an `Amx` exists only where the CPU has the instructions.
    unsafe { run(amx.0, panels, a) }
}

/// A cache line: 16 values of 4 bytes, or 64 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

const ZERO: CacheLine = CacheLine([0; 64]);

/// Number of blocks of 32 that are unpacked at once (16 KiB), and of super-blocks (32 KiB).
const BLOCKS: usize = 64;
const SUPERS: usize = 4;

/// Unpacked weights, block by block of each panel.
struct UnpackedWeights {
    /// Groups of four elements; of a super-block the low bytes of all groups, then the high bytes.
    groups: [CacheLine; SUPERS * 128],
    /// Scales, f32.
    d: [CacheLine; BLOCKS],
    /// Minima of blocks of 32, `dmin` of super-blocks; f32.
    m: [CacheLine; BLOCKS],
    /// Minima of a super-block, as i16 pairs.
    mins: [[CacheLine; 8]; SUPERS],
}

/// Dots of a block; of a super-block those of the low bytes, then of the high bytes.
type Dots = [CacheLine; 32];

// compiled with AVX-512; the AMX instructions are inline assembly
isa_features! { Avx512Vnni, enable_features
    unsafe fn run(s: Avx512, panels: Panels<'_>, a: &PackedActs<'_>) {
        // SAFETY: the caller gives panels of the product, packed activations of its layout, and an `Avx512` that came from an `Amx`.
        unsafe { run_panels(s, panels, a) }
    }
}

#[inline(always)]
unsafe fn run_panels(s: Avx512, Panels { product, p0, p1, .. }: Panels<'_>, a: &PackedActs<'_>) {
    let mut w = UnpackedWeights {
        groups: [ZERO; SUPERS * 128],
        d: [ZERO; BLOCKS],
        m: [ZERO; BLOCKS],
        mins: [[ZERO; 8]; SUPERS],
    };
    let mut sums =
        [const { [const { MaybeUninit::<[CacheLine; AMX_COLUMNS]>::uninit() }; PANELS] }; COLUMNS / AMX_COLUMNS];
    // of even and of odd blocks
    let mut dots: [Dots; 2] = [[ZERO; 32]; 2];
    let config = if a.layout.block == 32 { TileConfig::BLOCK32 } else { TileConfig::SUPER_BLOCK };
    let (layout, words, blocks) = (product.w.layout(), a.layout.words, product.w.k() / a.layout.block);
    let (together, most) =
        if a.layout.block == 32 { (PANELS, BLOCKS / PANELS) } else { (PANELS / 2, SUPERS / (PANELS / 2)) };
    let stretch = blocks.div_ceil(blocks.div_ceil(most));
    // SAFETY: an `Avx512` that came from an `Amx`.
    unsafe { config.load() }
    let end = a.layout.amx_columns(a.n);
    for (c0, first) in (0..end).step_by(COLUMNS).flat_map(|c0| (p0..p1).step_by(together).map(move |p| (c0, p))) {
        let panels = first..p1.min(first + together);
        for b0 in (0..blocks).step_by(stretch) {
            let here = stretch.min(blocks - b0);
            for p in panels.clone() {
                // SAFETY: the panel holds these blocks, and there is room for them.
                unsafe { unpack(s, product.w, p, b0..b0 + here, (p - first) * here, &mut w) };
            }
            for c in (c0..end.min(c0 + COLUMNS)).step_by(AMX_COLUMNS) {
                let records = &a.words[(c * blocks + b0 * AMX_COLUMNS) * words..][..here * AMX_COLUMNS * words];
                for p in panels.clone() {
                    let at = c * product.stride + product.at + p * PANEL;
                    let waiting: *mut f32 = sums[(c - c0) / AMX_COLUMNS][p - first].as_mut_ptr().cast();
                    let (out, stride) = if b0 + here < blocks {
                        (waiting, PANEL)
                    } else {
                        (product.out.ptr(at, (AMX_COLUMNS - 1) * product.stride + PANEL), product.stride)
                    };
                    let tile = AmxTile {
                        records: records.as_ptr(),
                        head: a.layout.head(),
                        words,
                        first: (p - first) * here,
                        blocks: here,
                        sums: (b0 > 0).then_some(waiting),
                        out,
                        stride,
                    };
                    // SAFETY: the slice and `ptr` above checked columns and output.
                    unsafe {
                        match layout {
                            PanelLayout::Blocks32(f) if f.m => tile.blocks::<true>(s, &w, &mut dots),
                            PanelLayout::Blocks32(_) => tile.blocks::<false>(s, &w, &mut dots),
                            PanelLayout::SuperMin { .. } => tile.supers::<4>(s, &w, &mut dots),
                            PanelLayout::Codes(f) if f.has_min() => tile.supers::<8>(s, &w, &mut dots),
                            PanelLayout::Codes(f) if !f.is_super() => tile.blocks::<false>(s, &w, &mut dots),
                            _ => tile.supers::<0>(s, &w, &mut dots),
                        }
                    }
                }
            }
        }
    }
    // SAFETY: the `Avx512` came from an `Amx`, which exists only where CPU and system provide the registers.
    unsafe { registers::release() }
}

/// Columns that are computed with the same unpacked weights.
const COLUMNS: usize = 512;

/// Inputs and output of an AMX tile, for one stretch of K.
struct AmxTile {
    /// Packed activations: a record of 16 columns per block.
    records: *const u32,
    /// Words of one column in a record, before the bytes.
    head: usize,
    /// Words of one column in a record.
    words: usize,
    /// Index of its first block in `UnpackedWeights`.
    first: usize,
    blocks: usize,
    /// Sums of the stretches before, column by column, if any.
    sums: Option<*mut f32>,
    out: *mut f32,
    stride: usize,
}

impl AmxTile {
    /// The record of block `b`.
    #[inline(always)]
    unsafe fn record(&self, b: usize) -> *const u32 {
        // SAFETY: the caller's tile has that block.
        unsafe { self.records.add(b * AMX_COLUMNS * self.words) }
    }

    /// The bytes in the record of block `b`.
    #[inline(always)]
    unsafe fn bytes(&self, b: usize) -> *const u32 {
        // SAFETY: the caller's tile has that block, whose bytes follow its words.
        unsafe { self.record(b).add(AMX_COLUMNS * self.head) }
    }

    #[inline(always)]
    unsafe fn sums(&self, s: Avx512) -> [__m512; AMX_COLUMNS] {
        // prefetches the lines to be written
        (0..AMX_COLUMNS).for_each(|c| s.prefetch(self.out.wrapping_add(c * self.stride).cast()));
        let Some(sums) = self.sums else { return [s.splat(0.0); AMX_COLUMNS] };
        // SAFETY: the caller's tile.
        unsafe { each!(AMX_COLUMNS, |c| s.load(sums.add(c * PANEL))) }
    }

    #[inline(always)]
    unsafe fn store(&self, s: Avx512, sums: [__m512; AMX_COLUMNS]) {
        for c in 0..AMX_COLUMNS {
            // SAFETY: the caller's tile.
            unsafe { s.store(self.out.add(c * self.stride), sums[c]) }
        }
    }

    /// Blocks of 32, with minima if `MIN`.
    #[inline(always)]
    unsafe fn blocks<const MIN: bool>(&self, s: Avx512, w: &UnpackedWeights, dots: &mut [Dots; 2]) {
        // SAFETY: the caller's tile.
        unsafe {
            let mut sums = self.sums(s);
            start_32::<false>(self.bytes(0), &w.groups[self.first * 8]);
            for b in 0..self.blocks {
                let (odd, next, at) = (b % 2 == 1, b + 1, self.first + b);
                // computes the dots of the next block while these are scaled
                if next < self.blocks {
                    let (bytes, groups) = (self.bytes(next), &w.groups[(self.first + next) * 8]);
                    if odd { start_32::<false>(bytes, groups) } else { start_32::<true>(bytes, groups) }
                }
                let (record, dots) = (self.record(b), &mut dots[usize::from(odd)]);
                if odd {
                    finish_32::<true>(dots)
                } else {
                    finish_32::<false>(dots)
                }
                let (d, m) = (s.load(line(&w.d[at])), s.load(line(&w.m[at])));
                for c in 0..AMX_COLUMNS {
                    let da = s.splat(f32::from_bits(record.add(c).read()));
                    let isum = s.to_f32(_mm512_load_si512(line(&dots[c])));
                    let mut term = s.mul(isum, s.mul(d, da));
                    if MIN {
                        let asum = s.splat(record.add(AMX_COLUMNS + c).read() as i32 as f32);
                        term = s.add(term, s.mul(asum, s.mul(m, da)));
                    }
                    sums[c] = s.add(sums[c], term);
                }
            }
            self.store(s, sums);
        }
    }

    /// Super-blocks, with `PAIRS` i16 pairs of minima.
    #[inline(always)]
    unsafe fn supers<const PAIRS: usize>(&self, s: Avx512, w: &UnpackedWeights, dots: &mut [Dots; 2]) {
        // SAFETY: the caller's tile.
        unsafe {
            let mut sums = self.sums(s);
            start_256::<false>(self.bytes(0), &w.groups[self.first * 128]);
            for b in 0..self.blocks {
                let (odd, next, at) = (b % 2 == 1, b + 1, self.first + b);
                if next < self.blocks {
                    let (bytes, groups) = (self.bytes(next), &w.groups[(self.first + next) * 128]);
                    if odd { start_256::<false>(bytes, groups) } else { start_256::<true>(bytes, groups) }
                }
                let (record, dots) = (self.record(b), &mut dots[usize::from(odd)]);
                if odd {
                    finish_256::<true>(dots)
                } else {
                    finish_256::<false>(dots)
                }
                let (d, dmin) = (s.load(line(&w.d[at])), s.load(line(&w.m[at])));
                let mins: [__m512i; PAIRS] = each!(PAIRS, |j| _mm512_load_si512(line(&w.mins[at][j])));
                let pairs = record.add((self.head - PAIRS) * AMX_COLUMNS);
                for c in 0..AMX_COLUMNS {
                    let da = s.splat(f32::from_bits(record.add(c).read()));
                    let (low, high) =
                        (_mm512_load_si512(line(&dots[c])), _mm512_load_si512(line(&dots[AMX_COLUMNS + c])));
                    let isum = s.add_i(_mm512_slli_epi32::<6>(high), low);
                    let mut term = s.mul(s.to_f32(isum), s.mul(d, da));
                    if PAIRS > 0 {
                        let mut msum = s.splat_i(0);
                        for j in 0..PAIRS {
                            let asums = _mm512_set1_epi32(pairs.add(j * AMX_COLUMNS + c).read() as i32);
                            msum = _mm512_dpwssd_epi32(msum, mins[j], asums);
                        }
                        term = s.sub(term, s.mul(s.to_f32(msum), s.mul(dmin, da)));
                    }
                    sums[c] = s.add(sums[c], term);
                }
            }
            self.store(s, sums);
        }
    }
}

#[inline(always)]
fn line<T>(line: &CacheLine) -> *const T {
    (&raw const line.0).cast()
}
