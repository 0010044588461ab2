//! Unpacking of panel weights to the signed bytes that AMX multiplies.
#![allow(unsafe_code)]

use core::arch::x86_64::*;
use core::ops::Range;

use super::super::avx512::Avx512;
use super::{CacheLine, UnpackedWeights};
use crate::kernels::panel::{Matrix, PANEL};
use crate::kernels::panel_layout::{Block32Layout, HEAD, PanelLayout};
use crate::kernels::simd::{Simd, each};
use crate::kernels::tiles::unpack::chunk;

/// Unpacks `blocks` of panel `p` to index `first` of `w` and the following ones.
///
/// # Safety
/// The panel must have these blocks, and `w` room for them.
#[inline(always)]
pub(super) unsafe fn unpack(
    s: Avx512,
    m: &Matrix,
    p: usize,
    blocks: Range<usize>,
    first: usize,
    w: &mut UnpackedWeights,
) {
    let (layout, panel) = (m.layout(), m.panel(p).as_ptr());
    for (i, b) in (first..).zip(blocks) {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe {
            if layout.block_len() == 32 {
                let (quants, at) = layout.block_at(m.dtype(), b);
                let groups = signed_chunk(s, layout, panel.add(quants), 0);
                store_lines(&mut w.groups[i * 8..], &groups);
                let at = panel.add(at).cast();
                store(&mut w.d[i], if layout.bf16() { s.load_bf16(at) } else { s.load_f16(at) });
                if layout.scales() == 2 {
                    store(&mut w.m[i], s.load_f16(at.add(PANEL)));
                }
                continue;
            }
            let record = panel.add(b * layout.record_bytes(m.dtype()));
            let (low, high) = w.groups[i * 128..].split_at_mut(64);
            for t in 0..8 {
                let groups = signed_chunk(s, layout, record, t);
                let scales: [__m512i; 2] = each!(2, |half| match layout {
                    PanelLayout::SuperMin { .. } => duplicate_i16(s.load_u8(record.add(t * 16))),
                    _ => duplicate_i16(s.load_i8(record.add((t * 2 + half) * 16).cast())),
                });
                let both: [[__m512i; 2]; 8] = each!(8, |g| scale_and_split(groups[g], scales[g / 4]));
                store_lines(&mut low[t * 8..], &each!(8, |g| both[g][0]));
                store_lines(&mut high[t * 8..], &each!(8, |g| both[g][1]));
            }
            let (d, dmin, mins, pairs) = match layout {
                PanelLayout::Codes(f) => (
                    s.load(record.add(256).cast()),
                    if f.has_min() { s.load(record.add(HEAD + 256).cast()) } else { s.splat(0.0) },
                    HEAD,
                    if f.has_min() { 8 } else { 0 },
                ),
                PanelLayout::SuperMin { .. } => {
                    (s.load_f16(record.add(256).cast()), s.load_f16(record.add(288).cast()), 128, 4)
                }
                _ => (s.load_f16(record.add(256).cast()), s.splat(0.0), 0, 0),
            };
            store(&mut w.d[i], d);
            store(&mut w.m[i], dmin);
            for j in 0..pairs {
                let mins = _mm512_cvtepu8_epi16(_mm256_loadu_si256(record.add(mins + j * 32).cast()));
                store_lines(&mut w.mins[i][j..], &[mins]);
            }
        }
    }
}

/// The groups of the 32 elements of chunk `t` of a block, as signed bytes; `at` points at the record of a super-block,
/// or at the quants.
#[inline(always)]
unsafe fn signed_chunk(s: Avx512, layout: &PanelLayout, at: *const u8, t: usize) -> [__m512i; 8] {
    let offset = match layout {
        PanelLayout::Blocks32(f) if f.m => 0,
        PanelLayout::Blocks32(Block32Layout { words: 8, .. }) | PanelLayout::Codes(_) => 128,
        PanelLayout::Blocks32(f) => 8 << u32::from(f.high.is_some()),
        PanelLayout::SuperSigned => 32,
        PanelLayout::SuperMin { .. } | PanelLayout::Float => 0,
    };
    // SAFETY: the caller's panel; an `Avx512` exists only where the CPU has the instructions.
    unsafe {
        let minus_offset = |group| _mm512_sub_epi8(group, _mm512_set1_epi8(offset as i8));
        let (mut groups, mut g) = ([_mm512_setzero_si512(); 8], 0);
        chunk(
            s,
            layout,
            at,
            t,
            #[inline(always)]
            |group| {
                groups[g] = minus_offset(group);
                g += 1;
            },
        );
        groups
    }
}

/// Duplicates the low i16 of each i32 lane.
#[inline(always)]
fn duplicate_i16(v: __m512i) -> __m512i {
    // SAFETY: an `Avx512` made the value.
    unsafe { _mm512_or_si512(_mm512_and_si512(v, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32::<16>(v)) }
}

/// UnpackedWeights times scales, within -4096..=4096, split into `64 * high + low`: the low bytes and the high bytes.
#[inline(always)]
fn scale_and_split(w: __m512i, scales: __m512i) -> [__m512i; 2] {
    // SAFETY: an `Avx512` made the values.
    unsafe {
        let even = _mm512_mullo_epi16(_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(w)), scales);
        let odd = _mm512_mullo_epi16(_mm512_srai_epi16::<8>(w), scales);
        let half = _mm512_set1_epi16(32);
        let (even, odd) = (_mm512_add_epi16(even, half), _mm512_add_epi16(odd, half));
        let join =
            |even, odd| _mm512_or_si512(_mm512_and_si512(even, _mm512_set1_epi16(0xff)), _mm512_slli_epi16::<8>(odd));
        let low = _mm512_and_si512(join(even, odd), _mm512_set1_epi8(63));
        [_mm512_sub_epi8(low, _mm512_set1_epi8(32)), join(_mm512_srai_epi16::<6>(even), _mm512_srai_epi16::<6>(odd))]
    }
}

#[inline(always)]
fn store_lines(lines: &mut [CacheLine], values: &[__m512i]) {
    for (line, v) in lines.iter_mut().zip(values) {
        // SAFETY: a line is 64 aligned bytes.
        unsafe { _mm512_store_si512((&raw mut line.0).cast(), *v) }
    }
}

#[inline(always)]
fn store(line: &mut CacheLine, v: __m512) {
    // SAFETY: a line is 64 aligned bytes.
    unsafe { _mm512_store_ps((&raw mut line.0).cast(), v) }
}
