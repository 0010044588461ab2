//! Products on AMX: matrix registers of 16 rows of 64 bytes, and 16 x 16 dots of up to 64 signed bytes in one instruction
//! (`TDPBSSD`; Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
//!
//! A square is a panel times 16 columns. Weights are unpacked to signed bytes, a stretch of K at a time, which stays in
//! the cache while all columns pass; between stretches, sums wait in the output.
//!
//! Blocks of 32 have scales of their own, so their dots leave the matrix registers block by block. In super-blocks a
//! weight times the scale of its sub-block is an integer, which two bytes hold as `64 * high + low`: then
//! `isum = 64 * sum_j high_j q_j + sum_j low_j q_j` runs over the whole super-block.

use core::arch::asm;
use core::arch::x86_64::*;

use super::act::{Acts, SQUARE};
use super::avx512::Avx512;
use super::form::{Form, HEAD, block_at, code_line};
use super::matmul::Panels;
use super::panel::{Matrix, PANEL};
use super::simd::{Simd, each};

/// The CPU has AMX with bytes, beside all that [`Avx512`] needs, and this process may use it.
#[derive(Clone, Copy)]
pub(super) struct Amx(Avx512);

impl Amx {
    /// # Safety
    /// As the type says.
    #[inline(always)]
    pub(super) unsafe fn new(lanes: Avx512) -> Amx {
        Amx(lanes)
    }
}

/// Asks the system for the use of matrix registers, which is a process's to ask for: their state is large.
pub(super) fn is_permitted() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_PRCTL: isize = 158;
        const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
        const XFEATURE_XTILEDATA: usize = 18;
        let mut result = ARCH_PRCTL;
        // SAFETY: arch_prctl(2) with this request touches no memory of the process; the kernel keeps all registers but
        // those named.
        unsafe {
            asm!("syscall", inout("rax") result, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") XFEATURE_XTILEDATA,
                out("rcx") _, out("r11") _, options(nostack, nomem));
        }
        result == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Whether squares are there for panels of that form. Types with two float scales in 32 elements have none.
pub(super) fn has_squares(form: &Form) -> bool {
    match form {
        Form::Float => false,
        Form::Codes(f) => f.is_super() || f.parts == 1,
        _ => true,
    }
}

/// The columns of whole squares, for some panels.
pub(super) fn squares(amx: Amx, panels: Panels<'_>, a: &Acts<'_>) {
    // SAFETY: an `Amx` exists only where the CPU has the instructions.
    unsafe { run(amx.0, panels, a) }
}

/// Shapes of the matrix registers: 0 and 1 are columns and weights of 32 elements, 2 and 3 dots, from 4 on whole ones.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    bytes: [32, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 8, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Elements of a stretch in blocks of 32, or half of them in super-blocks: 16 KiB unpacked.
const STRETCH: usize = 1024;

/// 16 numbers of 4 bytes, or 64 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Unpacked weights of a panel.
struct Stretch {
    /// Groups of four elements; of a super-block the low bytes of all, then the high ones.
    groups: [Line; STRETCH / 4],
    /// f32, for each block.
    d: [Line; STRETCH / 32],
    /// Minima of blocks of 32, dmin of super-blocks.
    m: [Line; STRETCH / 32],
    /// Pairs of i16 minima of a super-block.
    mins: [[Line; 8]; STRETCH / 512],
}

/// Dots of two blocks, or of low and high bytes.
type Dots = [[Line; 16]; 2];

#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn run(s: Avx512, Panels { product, p0, p1 }: Panels<'_>, a: &Acts<'_>) {
    const ZERO: Line = Line([0; 64]);
    let mut w = Stretch {
        groups: [ZERO; STRETCH / 4],
        d: [ZERO; STRETCH / 32],
        m: [ZERO; STRETCH / 32],
        mins: [[ZERO; 8]; STRETCH / 512],
    };
    let mut dots: Dots = [[ZERO; 16]; 2];
    let form = product.w.form();
    let blocks = product.w.k() / a.kind.block;
    let per = if a.kind.block == 32 { STRETCH / 32 } else { STRETCH / 512 };
    let words = a.kind.words();
    // SAFETY: the shapes are valid; they are given back below, and nothing in between unwinds but on a broken slice.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly, preserves_flags)) }
    for p in p0..p1 {
        for b0 in (0..blocks).step_by(per) {
            let blocks_here = per.min(blocks - b0);
            // SAFETY: the panel holds these blocks.
            unsafe { unpack(s, product.w, p, b0..b0 + blocks_here, &mut w) };
            for c in (0..a.kind.in_squares(a.n)).step_by(SQUARE) {
                let records = &a.words[(c * blocks + b0 * SQUARE) * words..][..blocks_here * SQUARE * words];
                let square = Square {
                    records: records.as_ptr(),
                    head: a.kind.head(),
                    words,
                    blocks: blocks_here,
                    out: product
                        .out
                        .ptr(c * product.stride + product.at + p * PANEL, (SQUARE - 1) * product.stride + PANEL),
                    stride: product.stride,
                    continues: b0 > 0,
                };
                // SAFETY: the slice and `ptr` above checked columns and output.
                unsafe {
                    match form {
                        Form::Blocks32(f) if f.m => square.blocks::<true>(s, &w, &mut dots),
                        Form::Blocks32(_) => square.blocks::<false>(s, &w, &mut dots),
                        Form::SuperMin { .. } => square.supers::<4>(s, &w, &mut dots),
                        Form::Codes(f) if f.has_min() => square.supers::<8>(s, &w, &mut dots),
                        Form::Codes(f) if !f.is_super() => square.blocks::<false>(s, &w, &mut dots),
                        _ => square.supers::<0>(s, &w, &mut dots),
                    }
                }
            }
        }
    }
    // SAFETY: without shapes the registers have no state, which nobody uses any more.
    unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
}

/// Where a square reads and writes in one stretch.
struct Square {
    /// A record of 16 columns per block.
    records: *const u32,
    /// Words of a record before the bytes, of one column.
    head: usize,
    /// Words of a record, of one column.
    words: usize,
    blocks: usize,
    out: *mut f32,
    stride: usize,
    /// Whether sums of stretches before are in the output.
    continues: bool,
}

impl Square {
    #[inline(always)]
    unsafe fn sums(&self, s: Avx512) -> [__m512; SQUARE] {
        // SAFETY: the caller's square.
        unsafe { each!(SQUARE, |c| if self.continues { s.load(self.out.add(c * self.stride)) } else { s.splat(0.0) }) }
    }

    #[inline(always)]
    unsafe fn store(&self, s: Avx512, sums: [__m512; SQUARE]) {
        for c in 0..SQUARE {
            // SAFETY: the caller's square.
            unsafe { s.store(self.out.add(c * self.stride), sums[c]) }
        }
    }

    /// Blocks of 32, with minima or without.
    #[inline(always)]
    unsafe fn blocks<const MIN: bool>(&self, s: Avx512, w: &Stretch, dots: &mut Dots) {
        // SAFETY: the caller's square.
        unsafe {
            let mut sums = self.sums(s);
            for b in 0..self.blocks {
                let record = self.records.add(b * SQUARE * self.words);
                let dots = &mut dots[b % 2];
                dots_of_32(record.add(self.head * SQUARE), &w.groups[b * 8], dots);
                let (d, m) = (s.load(line(&w.d[b])), s.load(line(&w.m[b])));
                for c in 0..SQUARE {
                    let da = s.splat(f32::from_bits(record.add(c).read()));
                    let isum = s.to_f32(_mm512_load_si512(line(&dots[c])));
                    let mut term = s.mul(isum, s.mul(d, da));
                    if MIN {
                        let asum = s.splat(record.add(SQUARE + c).read() as i32 as f32);
                        term = s.add(term, s.mul(asum, s.mul(m, da)));
                    }
                    sums[c] = s.add(sums[c], term);
                }
            }
            self.store(s, sums);
        }
    }

    /// Super-blocks, with that many pairs of minima.
    #[inline(always)]
    unsafe fn supers<const PAIRS: usize>(&self, s: Avx512, w: &Stretch, dots: &mut Dots) {
        // SAFETY: the caller's square.
        unsafe {
            let mut sums = self.sums(s);
            for b in 0..self.blocks {
                let record = self.records.add(b * SQUARE * self.words);
                dots_of_256(record.add(self.head * SQUARE), &w.groups[b * 128], dots);
                let (d, dmin) = (s.load(line(&w.d[b])), s.load(line(&w.m[b])));
                let mins: [__m512i; PAIRS] = each!(PAIRS, |j| _mm512_load_si512(line(&w.mins[b][j])));
                let pairs = record.add((self.head - PAIRS) * SQUARE);
                for c in 0..SQUARE {
                    let da = s.splat(f32::from_bits(record.add(c).read()));
                    let (low, high) = (_mm512_load_si512(line(&dots[0][c])), _mm512_load_si512(line(&dots[1][c])));
                    let isum = s.add_i(_mm512_slli_epi32::<6>(high), low);
                    let mut term = s.mul(s.to_f32(isum), s.mul(d, da));
                    if PAIRS > 0 {
                        let mut msum = s.splat_i(0);
                        for j in 0..PAIRS {
                            let asums = _mm512_set1_epi32(pairs.add(j * SQUARE + c).read() as i32);
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
fn line<T>(line: &Line) -> *const T {
    (&raw const line.0).cast()
}

/// The dots of a block of 32: `columns` are 16 rows of 32 bytes, `groups` 8 lines of weights.
///
/// # Safety
/// They are there, and the registers have their shapes.
#[inline(always)]
unsafe fn dots_of_32(columns: *const u32, groups: *const Line, dots: &mut [Line; 16]) {
    // SAFETY: the caller's; the registers are clobbers.
    unsafe {
        asm!(
            "tileloadd tmm0, [{columns} + {half}]",
            "tileloadd tmm1, [{groups} + {line}]",
            "tilezero tmm2",
            "tdpbssd tmm2, tmm0, tmm1",
            "tilestored [{dots} + {line}], tmm2",
            columns = in(reg) columns,
            groups = in(reg) groups,
            dots = in(reg) dots,
            half = in(reg) 32usize,
            line = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _,
            options(nostack, preserves_flags),
        );
    }
}

/// The dots of a super-block: `columns` are 4 times 16 rows of 64 bytes, `groups` 64 lines of low bytes and 64 of high ones.
///
/// # Safety
/// As of [`dots_of_32`].
#[inline(always)]
unsafe fn dots_of_256(columns: *const u32, groups: *const Line, dots: &mut Dots) {
    // SAFETY: the caller's; the registers are clobbers.
    unsafe {
        asm!(
            "tilezero tmm2",
            "tilezero tmm3",
            "tileloadd tmm4, [{columns} + {line}]",
            "tileloadd tmm5, [{groups} + {line}]",
            "tileloadd tmm6, [{groups} + {line} + 4096]",
            "tdpbssd tmm2, tmm4, tmm5",
            "tdpbssd tmm3, tmm4, tmm6",
            "tileloadd tmm4, [{columns} + {line} + 1024]",
            "tileloadd tmm5, [{groups} + {line} + 1024]",
            "tileloadd tmm6, [{groups} + {line} + 5120]",
            "tdpbssd tmm2, tmm4, tmm5",
            "tdpbssd tmm3, tmm4, tmm6",
            "tileloadd tmm4, [{columns} + {line} + 2048]",
            "tileloadd tmm5, [{groups} + {line} + 2048]",
            "tileloadd tmm6, [{groups} + {line} + 6144]",
            "tdpbssd tmm2, tmm4, tmm5",
            "tdpbssd tmm3, tmm4, tmm6",
            "tileloadd tmm4, [{columns} + {line} + 3072]",
            "tileloadd tmm5, [{groups} + {line} + 3072]",
            "tileloadd tmm6, [{groups} + {line} + 7168]",
            "tdpbssd tmm2, tmm4, tmm5",
            "tdpbssd tmm3, tmm4, tmm6",
            "tilestored [{dots} + {line}], tmm2",
            "tilestored [{dots} + {line} + 1024], tmm3",
            columns = in(reg) columns,
            groups = in(reg) groups,
            dots = in(reg) dots,
            line = in(reg) 64usize,
            out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(nostack, preserves_flags),
        );
    }
}

/// Unpacks some blocks of a panel.
///
/// # Safety
/// The panel holds them, and the stretch has room for them.
#[inline(always)]
unsafe fn unpack(s: Avx512, m: &Matrix, p: usize, blocks: core::ops::Range<usize>, w: &mut Stretch) {
    let (form, panel) = (m.form(), m.panel(p).as_ptr());
    for (i, b) in blocks.enumerate() {
        // SAFETY: the caller's.
        unsafe {
            if form.block_len() == 32 {
                let (quants, scales, bf16) = match form {
                    Form::Blocks32(f) => (f.quant_bytes(), f.scales(), false),
                    Form::Codes(f) => (f.chunk_bytes(), f.parts, f.bf16()),
                    _ => unreachable!("a form in blocks of 32"),
                };
                let (quants, at) = block_at(quants, scales, b);
                let groups = chunk(s, form, panel.add(quants), 0);
                put(&mut w.groups[i * 8..], &groups);
                let at = panel.add(at).cast();
                store(&mut w.d[i], if bf16 { s.load_bf16(at) } else { s.load_f16(at) });
                if scales == 2 {
                    store(&mut w.m[i], s.load_f16(at.add(PANEL)));
                }
                continue;
            }
            let record = panel.add(b * form.record_bytes(m.dtype()));
            let (low, high) = w.groups[i * 128..].split_at_mut(64);
            for t in 0..8 {
                let groups = chunk(s, form, record, t);
                let scales: [__m512i; 2] = each!(2, |half| match form {
                    Form::SuperMin { .. } => in_pairs(s.load_u8(record.add(t * 16))),
                    _ => in_pairs(s.load_i8(record.add((t * 2 + half) * 16).cast())),
                });
                let both: [[__m512i; 2]; 8] = each!(8, |g| times(groups[g], scales[g / 4]));
                put(&mut low[t * 8..], &each!(8, |g| both[g][0]));
                put(&mut high[t * 8..], &each!(8, |g| both[g][1]));
            }
            let (d, dmin, mins, pairs) = match form {
                Form::Codes(f) => (
                    s.load(record.add(256).cast()),
                    if f.has_min() { s.load(record.add(HEAD + 256).cast()) } else { s.splat(0.0) },
                    HEAD,
                    if f.has_min() { 8 } else { 0 },
                ),
                Form::SuperMin { .. } => {
                    (s.load_f16(record.add(256).cast()), s.load_f16(record.add(288).cast()), 128, 4)
                }
                _ => (s.load_f16(record.add(256).cast()), s.splat(0.0), 0, 0),
            };
            store(&mut w.d[i], d);
            store(&mut w.m[i], dmin);
            for j in 0..pairs {
                let mins = _mm512_cvtepu8_epi16(_mm256_loadu_si256(record.add(mins + j * 32).cast()));
                put(&mut w.mins[i][j..], &[mins]);
            }
        }
    }
}

/// The groups of 32 elements, chunk `t` of a block, as signed bytes; `at` is the record of a super-block, or quants.
#[inline(always)]
unsafe fn chunk(s: Avx512, form: &Form, at: *const u8, t: usize) -> [__m512i; 8] {
    // SAFETY: the caller's panel.
    unsafe {
        let load = |line: usize| s.load_b(at.add(line * 64));
        let bits = |b, shift: usize, mask| s.and_b(s.shr16_b(b, shift as u32), mask);
        let minus = |b, offset: u8| _mm512_sub_epi8(b, _mm512_set1_epi8(offset as i8));
        match form {
            Form::Float => each!(8, |_g| _mm512_setzero_si512()),
            Form::Blocks32(f) if f.words == 8 => each!(8, |g| minus(load(g), 128)),
            Form::Blocks32(f) => {
                let five = f.high.is_some();
                let offset = if f.m { 0 } else { 8 << u32::from(five) };
                each!(8, |g| {
                    let low = bits(load(g % 4), g / 4 * 4, 15);
                    let high = if five { s.shl16_b(bits(load(4), g, 1), 4) } else { _mm512_setzero_si512() };
                    minus(s.or_b(low, high), offset)
                })
            }
            Form::SuperMin { five } => {
                let (head, nibbles) = (HEAD / 64, if *five { 8 } else { 0 });
                each!(8, |g| {
                    let low = bits(load(head + nibbles + t / 2 * 8 + g), t % 2 * 4, 15);
                    if *five { s.or_b(low, s.shl16_b(bits(load(head + g), t, 1), 4)) } else { low }
                })
            }
            Form::SuperSigned => {
                let first = HEAD / 64 + t * 6;
                each!(8, |g| {
                    let low = bits(load(first + g % 4), g / 4 * 4, 15);
                    let high = bits(load(first + 4 + g / 4), g % 4 * 2, 3);
                    minus(s.or_b(low, s.shl16_b(high, 4)), 32)
                })
            }
            Form::Codes(f) => {
                let table = minus(s.load_table(f.offset_table.as_ptr()), 128);
                let first = if f.is_super() { f.codes() / 64 + t * f.width } else { 0 };
                each!(8, |g| {
                    let (line, shift) = code_line(g, f.width);
                    s.look_up(table, bits(load(first + line), shift, (1u8 << f.width) - 1))
                })
            }
        }
    }
}

/// i32 lanes as pairs of the same i16.
#[inline(always)]
fn in_pairs(v: __m512i) -> __m512i {
    // SAFETY: an `Avx512` made the value.
    unsafe { _mm512_or_si512(_mm512_and_si512(v, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32::<16>(v)) }
}

/// Weights times scales, products within -4096..=4096, as the low and the high bytes of `64 * high + low`.
#[inline(always)]
fn times(w: __m512i, scales: __m512i) -> [__m512i; 2] {
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
fn put(lines: &mut [Line], values: &[__m512i]) {
    for (line, v) in lines.iter_mut().zip(values) {
        // SAFETY: a line is 64 aligned bytes.
        unsafe { _mm512_store_si512((&raw mut line.0).cast(), *v) }
    }
}

#[inline(always)]
fn store(line: &mut Line, v: __m512) {
    // SAFETY: a line is 64 aligned bytes.
    unsafe { _mm512_store_ps((&raw mut line.0).cast(), v) }
}
