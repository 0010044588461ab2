//! Products on AMX: matrix registers of 16 rows of 64 bytes, and 16 x 16 dots of up to 64 signed bytes in one instruction
//! (`TDPBSSD`; Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
//!
//! A square is a panel times 16 columns. Weights are unpacked to signed bytes, those of a few panels and a stretch of K at
//! a time: they stay in the cache of the first level while all columns pass, and the panels share what they read of a
//! column. Between stretches, sums wait beside them: columns of the output are far apart.
//!
//! Blocks of 32 have scales of their own, so their dots leave the matrix registers block by block. In super-blocks a
//! weight times the scale of its sub-block is an integer, which two bytes hold as `64 * high + low`: then
//! `isum = 64 * sum_j high_j q_j + sum_j low_j q_j` runs over the whole super-block.

use core::arch::asm;
use core::arch::x86_64::*;
use core::mem::MaybeUninit;
use core::ops::Range;

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

/// The columns of whole squares, for some panels.
pub(super) fn squares(amx: Amx, panels: Panels<'_>, a: &Acts<'_>) {
    // SAFETY: an `Amx` exists only where the CPU has the instructions.
    unsafe { run(amx.0, panels, a) }
}

/// Shapes of the matrix registers.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    const fn new(row_bytes: [u16; 8], rows: [u8; 8]) -> Shapes {
        let mut shapes = Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut i = 0;
        while i < 8 {
            (shapes.row_bytes[i], shapes.rows[i]) = (row_bytes[i], rows[i]);
            i += 1;
        }
        shapes
    }

    /// For blocks of 32: 4 is 16 columns, 5 a block of a panel.
    const OF_32: Shapes = Shapes::new([64, 64, 64, 64, 32, 64, 64, 64], [16, 16, 16, 16, 16, 8, 16, 16]);
    /// For super-blocks, of 64 elements at a time.
    const OF_256: Shapes = Shapes::new([64; 8], [16; 8]);
}

/// 16 numbers of 4 bytes, or 64 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

const ZERO: Line = Line([0; 64]);

/// Blocks of 32 that are unpacked at once, 16 KiB; of super-blocks 4, twice as much.
const BLOCKS: usize = 64;
const SUPERS: usize = 4;

/// Unpacked weights, block by block of each panel.
struct Weights {
    /// Groups of four elements; of a super-block the low bytes of all, then the high ones.
    groups: [Line; SUPERS * 128],
    /// f32.
    d: [Line; BLOCKS],
    /// Minima of blocks of 32, dmin of super-blocks.
    m: [Line; BLOCKS],
    /// Pairs of i16 minima of a super-block.
    mins: [[Line; 8]; SUPERS],
}

/// Dots of a block, in super-blocks of the low bytes, then of the high ones.
type Dots = [Line; 32];

#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn run(s: Avx512, Panels { product, p0, p1 }: Panels<'_>, a: &Acts<'_>) {
    let mut w =
        Weights { groups: [ZERO; SUPERS * 128], d: [ZERO; BLOCKS], m: [ZERO; BLOCKS], mins: [[ZERO; 8]; SUPERS] };
    let mut sums = [const { [const { MaybeUninit::<[Line; SQUARE]>::uninit() }; PANELS] }; COLUMNS / SQUARE];
    // of even and of odd blocks
    let mut dots: [Dots; 2] = [[ZERO; 32]; 2];
    let shapes = if a.kind.block == 32 { Shapes::OF_32 } else { Shapes::OF_256 };
    let (form, words, blocks) = (product.w.form(), a.kind.words(), product.w.k() / a.kind.block);
    let (together, most) =
        if a.kind.block == 32 { (PANELS, BLOCKS / PANELS) } else { (PANELS / 2, SUPERS / (PANELS / 2)) };
    let stretch = blocks.div_ceil(blocks.div_ceil(most));
    // SAFETY: the shapes are valid; they are given back below, and nothing in between unwinds but on a broken slice.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly, preserves_flags)) }
    let end = a.kind.in_squares(a.n);
    for (c0, first) in (0..end).step_by(COLUMNS).flat_map(|c0| (p0..p1).step_by(together).map(move |p| (c0, p))) {
        let panels = first..p1.min(first + together);
        for b0 in (0..blocks).step_by(stretch) {
            let here = stretch.min(blocks - b0);
            for p in panels.clone() {
                // SAFETY: the panel holds these blocks, and there is room for them.
                unsafe { unpack(s, product.w, p, b0..b0 + here, (p - first) * here, &mut w) };
            }
            for c in (c0..end.min(c0 + COLUMNS)).step_by(SQUARE) {
                let records = &a.words[(c * blocks + b0 * SQUARE) * words..][..here * SQUARE * words];
                for p in panels.clone() {
                    let at = c * product.stride + product.at + p * PANEL;
                    let waiting: *mut f32 = sums[(c - c0) / SQUARE][p - first].as_mut_ptr().cast();
                    let (out, stride) = if b0 + here < blocks {
                        (waiting, PANEL)
                    } else {
                        (product.out.ptr(at, (SQUARE - 1) * product.stride + PANEL), product.stride)
                    };
                    let square = Square {
                        records: records.as_ptr(),
                        head: a.kind.head(),
                        words,
                        first: (p - first) * here,
                        blocks: here,
                        sums: (b0 > 0).then_some(waiting),
                        out,
                        stride,
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
    }
    // SAFETY: without shapes the registers have no state, which nobody uses any more.
    unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
}

/// Panels that share what is read of the columns; of super-blocks, half as many.
const PANELS: usize = 4;

/// Columns that share what is unpacked.
const COLUMNS: usize = 512;

/// Where a square reads and writes in one stretch.
struct Square {
    /// A record of 16 columns per block.
    records: *const u32,
    /// Words of a record before the bytes, of one column.
    head: usize,
    /// Words of a record, of one column.
    words: usize,
    /// Place of its first block in the weights.
    first: usize,
    blocks: usize,
    /// Sums of the stretches before, column by column.
    sums: Option<*mut f32>,
    out: *mut f32,
    stride: usize,
}

impl Square {
    /// The columns of a block.
    #[inline(always)]
    unsafe fn record(&self, b: usize) -> *const u32 {
        // SAFETY: the caller's square has that block.
        unsafe { self.records.add(b * SQUARE * self.words) }
    }

    /// Their bytes.
    #[inline(always)]
    unsafe fn bytes(&self, b: usize) -> *const u32 {
        // SAFETY: as above.
        unsafe { self.record(b).add(SQUARE * self.head) }
    }

    #[inline(always)]
    unsafe fn sums(&self, s: Avx512) -> [__m512; SQUARE] {
        // the lines that will be written
        (0..SQUARE).for_each(|c| s.prefetch(self.out.wrapping_add(c * self.stride).cast()));
        let Some(sums) = self.sums else { return [s.splat(0.0); SQUARE] };
        // SAFETY: the caller's square.
        unsafe { each!(SQUARE, |c| s.load(sums.add(c * PANEL))) }
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
    unsafe fn blocks<const MIN: bool>(&self, s: Avx512, w: &Weights, dots: &mut [Dots; 2]) {
        // SAFETY: the caller's square.
        unsafe {
            let mut sums = self.sums(s);
            start_32::<false>(self.bytes(0), &w.groups[self.first * 8]);
            for b in 0..self.blocks {
                let (odd, next, at) = (b % 2 == 1, b + 1, self.first + b);
                // the next block's dots while these are scaled
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
    unsafe fn supers<const PAIRS: usize>(&self, s: Avx512, w: &Weights, dots: &mut [Dots; 2]) {
        // SAFETY: the caller's square.
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
                let pairs = record.add((self.head - PAIRS) * SQUARE);
                for c in 0..SQUARE {
                    let da = s.splat(f32::from_bits(record.add(c).read()));
                    let (low, high) = (_mm512_load_si512(line(&dots[c])), _mm512_load_si512(line(&dots[SQUARE + c])));
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

/// Starts the dots of a block of 32: `columns` are 16 rows of 32 bytes, `groups` 8 lines of weights. Until they are
/// finished they stay in a matrix register of even or of odd blocks.
///
/// # Safety
/// They are there, and the registers have their shapes.
#[inline(always)]
unsafe fn start_32<const ODD: bool>(columns: *const u32, groups: *const Line) {
    macro_rules! start {
        ($dots:literal) => {
            // SAFETY: the caller's; code that is compiled without AMX leaves matrix registers alone.
            unsafe {
                asm!(
                    "tileloadd tmm4, [{columns} + {half}]",
                    "tileloadd tmm5, [{groups} + {line}]",
                    concat!("tilezero ", $dots),
                    concat!("tdpbssd ", $dots, ", tmm4, tmm5"),
                    columns = in(reg) columns,
                    groups = in(reg) groups,
                    half = in(reg) 32usize,
                    line = in(reg) 64usize,
                    options(nostack, preserves_flags, readonly),
                )
            }
        };
    }
    if ODD { start!("tmm2") } else { start!("tmm0") }
}

/// Stores the dots that [`start_32`] started.
///
/// # Safety
/// It has started some.
#[inline(always)]
unsafe fn finish_32<const ODD: bool>(dots: &mut Dots) {
    macro_rules! finish {
        ($dots:literal) => {
            // SAFETY: the caller's; 16 rows of 64 bytes.
            unsafe {
                asm!(
                    concat!("tilestored [{dots} + {line}], ", $dots),
                    dots = in(reg) dots,
                    line = in(reg) 64usize,
                    options(nostack, preserves_flags),
                )
            }
        };
    }
    if ODD { finish!("tmm2") } else { finish!("tmm0") }
}

/// Starts the dots of a super-block: `columns` are 4 times 16 rows of 64 bytes, `groups` 64 lines of low bytes and 64 of
/// high ones.
///
/// # Safety
/// As of [`start_32`].
#[inline(always)]
unsafe fn start_256<const ODD: bool>(columns: *const u32, groups: *const Line) {
    macro_rules! start {
        ($low:literal, $high:literal) => {
            // SAFETY: as in `start_32`.
            unsafe {
                asm!(
                    concat!("tilezero ", $low),
                    concat!("tilezero ", $high),
                    "tileloadd tmm4, [{columns} + {line}]",
                    "tileloadd tmm6, [{groups} + {line}]",
                    concat!("tdpbssd ", $low, ", tmm4, tmm6"),
                    "tileloadd tmm7, [{groups} + {line} + 4096]",
                    concat!("tdpbssd ", $high, ", tmm4, tmm7"),
                    "tileloadd tmm5, [{columns} + {line} + 1024]",
                    "tileloadd tmm6, [{groups} + {line} + 1024]",
                    concat!("tdpbssd ", $low, ", tmm5, tmm6"),
                    "tileloadd tmm7, [{groups} + {line} + 5120]",
                    concat!("tdpbssd ", $high, ", tmm5, tmm7"),
                    "tileloadd tmm4, [{columns} + {line} + 2048]",
                    "tileloadd tmm6, [{groups} + {line} + 2048]",
                    concat!("tdpbssd ", $low, ", tmm4, tmm6"),
                    "tileloadd tmm7, [{groups} + {line} + 6144]",
                    concat!("tdpbssd ", $high, ", tmm4, tmm7"),
                    "tileloadd tmm5, [{columns} + {line} + 3072]",
                    "tileloadd tmm6, [{groups} + {line} + 3072]",
                    concat!("tdpbssd ", $low, ", tmm5, tmm6"),
                    "tileloadd tmm7, [{groups} + {line} + 7168]",
                    concat!("tdpbssd ", $high, ", tmm5, tmm7"),
                    columns = in(reg) columns,
                    groups = in(reg) groups,
                    line = in(reg) 64usize,
                    options(nostack, preserves_flags, readonly),
                )
            }
        };
    }
    if ODD { start!("tmm2", "tmm3") } else { start!("tmm0", "tmm1") }
}

/// Stores the dots that [`start_256`] started.
///
/// # Safety
/// It has started some.
#[inline(always)]
unsafe fn finish_256<const ODD: bool>(dots: &mut Dots) {
    macro_rules! finish {
        ($low:literal, $high:literal) => {
            // SAFETY: the caller's; twice 16 rows of 64 bytes.
            unsafe {
                asm!(
                    concat!("tilestored [{dots} + {line}], ", $low),
                    concat!("tilestored [{dots} + {line} + 1024], ", $high),
                    dots = in(reg) dots,
                    line = in(reg) 64usize,
                    options(nostack, preserves_flags),
                )
            }
        };
    }
    if ODD { finish!("tmm2", "tmm3") } else { finish!("tmm0", "tmm1") }
}

/// Unpacks some blocks of a panel to the place `first` and those after it.
///
/// # Safety
/// The panel holds them, and there is room for them.
#[inline(always)]
unsafe fn unpack(s: Avx512, m: &Matrix, p: usize, blocks: Range<usize>, first: usize, w: &mut Weights) {
    let (form, panel) = (m.form(), m.panel(p).as_ptr());
    for (i, b) in (first..).zip(blocks) {
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
