//! AVX2: a register is half a panel (8 rows). With AVX-VNNI a dot is `vpdpbusd`. Without it, dots of up to 6-bit
//! weights accumulate pairs in i16 (`ActEncoding::I8PairSums`), and dots of 8-bit weights are `vpmaddubsw(|q|, w ^
//! mask)` (`ActEncoding::AbsAndMask`).
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use crate::kernels::cpu::Op;
use crate::kernels::isa::features::{enable_features, isa_features};
use crate::kernels::simd::{ActEncoding, Prefetch, Simd, TileShape, max_i16_groups};

#[derive(Clone, Copy)]
pub(in crate::kernels) struct Avx2<const VNNI: bool> {
    prefetch: Prefetch,
}

impl<const VNNI: bool> Avx2<VNNI> {
    /// # Safety
    /// The CPU has the features of `run`, and with `VNNI` those of `run_vnni`.
    #[inline(always)]
    pub(in crate::kernels) unsafe fn new(prefetch: Prefetch) -> Self {
        Avx2 { prefetch }
    }

    /// Adds the two i16 of each pair to an i32.
    #[inline(always)]
    fn widened(self, pairs: __m256i) -> __m256i {
        // SAFETY: an `Avx2` exists only where the CPU has the instructions.
        unsafe { _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)) }
    }
}

// compiled with AVX2
isa_features! { Avx2, enable_features
    pub(in crate::kernels) fn run<O: Op>(s: Avx2<false>, op: O) -> O::Out {
        op.simd(s)
    }
}

// compiled with AVX2 and AVX-VNNI
isa_features! { AvxVnni, enable_features
    pub(in crate::kernels) fn run_vnni<O: Op>(s: Avx2<true>, op: O) -> O::Out {
        op.simd(s)
    }
}

// SAFETY of every `unsafe` block below: an `Avx2` exists only where the CPU has the instructions; pointers are valid
// for LANES elements by the trait's contract.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<const VNNI: bool> Simd for Avx2<VNNI> {
    const LANES: usize = 8;
    const TILE4: TileShape = if VNNI { TileShape { rv: 2, nc: 3 } } else { TileShape { rv: 2, nc: 4 } };
    const TILE8: TileShape = Self::TILE4;
    const TILE_K: TileShape = if VNNI { TileShape { rv: 1, nc: 4 } } else { Self::TILE4 };
    const TILE_F32: TileShape = TileShape { rv: 2, nc: 4 };
    const UNPACKS: bool = !VNNI;
    const GEMV: [usize; 4] = [2, 2, 2, 2];

    type F = __m256;
    type I = __m256i;
    type B = __m256i;
    type W = __m256i;
    type A = [__m256i; 2];
    /// i32, or pairs of i16.
    type Acc = __m256i;

    #[inline(always)]
    fn prefetch_policy(self) -> Prefetch {
        self.prefetch
    }
    #[inline(always)]
    fn act_encoding(bits: u32) -> ActEncoding {
        match bits {
            _ if VNNI => ActEncoding::I8,
            8 => ActEncoding::AbsAndMask,
            _ => ActEncoding::I8PairSums,
        }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m256 {
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: __m256) {
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> __m256i {
        unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> __m256i {
        unsafe { _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, v: __m256i) {
        unsafe {
            let w = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            _mm_storel_epi64(p.cast(), _mm_packs_epi16(w, w));
        }
    }
    #[inline(always)]
    unsafe fn load_b(self, p: *const u8) -> __m256i {
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_b(self, p: *mut u8, v: __m256i) {
        unsafe { _mm256_storeu_si256(p.cast(), v) }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // prefetching any address is harmless
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    fn splat(self, v: f32) -> __m256 {
        unsafe { _mm256_set1_ps(v) }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn mac_exact(self, acc: __m256, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, acc) }
    }
    #[inline(always)]
    fn abs(self, a: __m256) -> __m256 {
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) }
    }
    #[inline(always)]
    fn select_gt(self, a: __m256, b: __m256, t: __m256, e: __m256) -> __m256 {
        unsafe { _mm256_blendv_ps(e, t, _mm256_cmp_ps::<_CMP_GT_OQ>(a, b)) }
    }

    #[inline(always)]
    fn splat_i(self, v: i32) -> __m256i {
        unsafe { _mm256_set1_epi32(v) }
    }
    #[inline(always)]
    fn add_i(self, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(a, b) }
    }
    #[inline(always)]
    fn sub_i(self, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_sub_epi32(a, b) }
    }
    #[inline(always)]
    fn max_i(self, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_max_epi32(a, b) }
    }
    #[inline(always)]
    fn min_i(self, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_min_epi32(a, b) }
    }
    #[inline(always)]
    fn sum_lanes(self, a: __m256i) -> i32 {
        unsafe {
            let a = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let a = _mm_add_epi32(a, _mm_shuffle_epi32::<0b01_00_11_10>(a));
            _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32::<0b10_11_00_01>(a)))
        }
    }
    #[inline(always)]
    fn max_lane(self, a: __m256i) -> i32 {
        unsafe {
            let a = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let a = _mm_max_epi32(a, _mm_shuffle_epi32::<0b01_00_11_10>(a));
            _mm_cvtsi128_si32(_mm_max_epi32(a, _mm_shuffle_epi32::<0b10_11_00_01>(a)))
        }
    }
    #[inline(always)]
    fn mul_i(self, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_mullo_epi32(a, b) }
    }
    #[inline(always)]
    fn shl_i<const N: i32>(self, a: __m256i) -> __m256i {
        unsafe { _mm256_slli_epi32::<N>(a) }
    }
    #[inline(always)]
    fn to_f32(self, a: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(a) }
    }
    #[inline(always)]
    fn bits(self, a: __m256) -> __m256i {
        unsafe { _mm256_castps_si256(a) }
    }
    #[inline(always)]
    fn from_bits(self, a: __m256i) -> __m256 {
        unsafe { _mm256_castsi256_ps(a) }
    }

    #[inline(always)]
    fn zeros(self) -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    fn and_b(self, a: __m256i, byte: u8) -> __m256i {
        unsafe { _mm256_and_si256(a, _mm256_set1_epi8(byte as i8)) }
    }
    #[inline(always)]
    fn xor_b(self, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_xor_si256(a, b) }
    }
    #[inline(always)]
    fn shr16_b(self, a: __m256i, n: u32) -> __m256i {
        unsafe { _mm256_srl_epi16(a, _mm_cvtsi32_si128(n as i32)) }
    }
    #[inline(always)]
    fn shl16_b(self, a: __m256i, n: u32) -> __m256i {
        unsafe { _mm256_sll_epi16(a, _mm_cvtsi32_si128(n as i32)) }
    }

    #[inline(always)]
    unsafe fn load_table(self, p: *const u8) -> __m256i {
        unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    fn look_up(self, table: __m256i, at: __m256i) -> __m256i {
        unsafe { _mm256_shuffle_epi8(table, at) }
    }

    #[inline(always)]
    fn weights<const BITS: u32>(self, b: __m256i) -> __m256i {
        b
    }
    #[inline(always)]
    unsafe fn act<const BITS: u32>(self, p: *const u32) -> [__m256i; 2] {
        unsafe {
            let a = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
            if BITS == 8 && !VNNI { [a, _mm256_set1_epi32(p.add(1).cast::<i32>().read_unaligned())] } else { [a, a] }
        }
    }
    #[inline(always)]
    fn acc<const BITS: u32>(self, init: i32) -> __m256i {
        self.splat_i(init)
    }
    #[inline(always)]
    fn dot<const BITS: u32>(self, acc: __m256i, w: __m256i, a: [__m256i; 2]) -> __m256i {
        unsafe {
            match Self::act_encoding(BITS) {
                ActEncoding::I8PairSums => _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, a[0])),
                ActEncoding::AbsAndMask => {
                    self.add_i(acc, self.widened(_mm256_maddubs_epi16(a[0], _mm256_xor_si256(w, a[1]))))
                }
                _ => _mm256_dpbusd_avx_epi32(acc, w, a[0]),
            }
        }
    }
    #[inline(always)]
    fn max_groups(bits: u32, has_zero_point: bool) -> usize {
        if VNNI { 8 } else { max_i16_groups(bits, has_zero_point) }
    }
    #[inline(always)]
    fn total<const BITS: u32>(self, acc: __m256i, _init: i32) -> __m256i {
        if Self::act_encoding(BITS) == ActEncoding::I8PairSums { self.widened(acc) } else { acc }
    }
    #[inline(always)]
    fn total_scaled<const BITS: u32>(self, acc: __m256i, _init: i32, scale: __m256i) -> __m256i {
        if Self::act_encoding(BITS) == ActEncoding::I8PairSums {
            // the multiplication by the scale also widens the pairs
            return unsafe {
                _mm256_madd_epi16(acc, _mm256_blend_epi16::<0xaa>(scale, _mm256_slli_epi32::<16>(scale)))
            };
        }
        self.mul_i(acc, scale)
    }
    #[inline(always)]
    unsafe fn pair_dot(self, acc: __m256i, m: *const u8, s: u32) -> __m256i {
        unsafe {
            let m = _mm256_cvtepu8_epi16(_mm_loadu_si128(m.cast()));
            _mm256_add_epi32(acc, _mm256_madd_epi16(m, _mm256_set1_epi32(s as i32)))
        }
    }
}
