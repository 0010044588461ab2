//! AVX-512 with VNNI: a register is the 16 rows of a panel; a dot is `vpdpbusd` on unsigned weights.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use crate::kernels::cpu::Op;
use crate::kernels::isa::features::{enable_features, isa_features};
use crate::kernels::simd::{ActEncoding, Prefetch, Simd, TileShape};

#[derive(Clone, Copy)]
pub(in crate::kernels) struct Avx512 {
    prefetch: Prefetch,
}

impl Avx512 {
    /// # Safety
    /// The CPU has the features of `run`.
    #[inline(always)]
    pub(in crate::kernels) unsafe fn new(prefetch: Prefetch) -> Self {
        Avx512 { prefetch }
    }
}

// compiled with AVX-512
isa_features! { Avx512Vnni, enable_features
    pub(in crate::kernels) fn run<O: Op>(s: Avx512, op: O) -> O::Out {
        op.simd(s)
    }
}

// SAFETY of every `unsafe` block below: an `Avx512` exists only where the CPU has the instructions; pointers are
// valid for LANES elements by the trait's contract.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx512 {
    const LANES: usize = 16;
    const TILE4: TileShape = TileShape { rv: 2, nc: 6 };
    const TILE8: TileShape = TileShape { rv: 3, nc: 4 };
    const TILE_K: TileShape = TileShape { rv: 2, nc: 4 };
    const TILE_F32: TileShape = TileShape { rv: 4, nc: 6 };
    const UNPACKS: bool = false;
    const GEMV: [usize; 4] = [4, 1, 1, 4];

    type F = __m512;
    type I = __m512i;
    type B = __m512i;
    type W = __m512i;
    type A = __m512i;
    type Acc = __m512i;

    #[inline(always)]
    fn prefetch_policy(self) -> Prefetch {
        self.prefetch
    }
    #[inline(always)]
    fn act_encoding(_bits: u32) -> ActEncoding {
        ActEncoding::I8
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: __m512) {
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> __m512i {
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> __m512i {
        unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, v: __m512i) {
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(v)) }
    }
    #[inline(always)]
    unsafe fn load_b(self, p: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_b(self, p: *mut u8, v: __m512i) {
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // prefetching any address is harmless
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    fn splat(self, v: f32) -> __m512 {
        unsafe { _mm512_set1_ps(v) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn mac_exact(self, acc: __m512, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, acc) }
    }
    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        unsafe { _mm512_abs_ps(a) }
    }
    #[inline(always)]
    fn select_gt(self, a: __m512, b: __m512, t: __m512, e: __m512) -> __m512 {
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), e, t) }
    }

    #[inline(always)]
    fn splat_i(self, v: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(v) }
    }
    #[inline(always)]
    fn add_i(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    fn sub_i(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_sub_epi32(a, b) }
    }
    #[inline(always)]
    fn max_i(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_max_epi32(a, b) }
    }
    #[inline(always)]
    fn min_i(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_min_epi32(a, b) }
    }
    #[inline(always)]
    fn sum_lanes(self, a: __m512i) -> i32 {
        unsafe { _mm512_reduce_add_epi32(a) }
    }
    #[inline(always)]
    fn max_lane(self, a: __m512i) -> i32 {
        unsafe { _mm512_reduce_max_epi32(a) }
    }
    #[inline(always)]
    fn mul_i(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_mullo_epi32(a, b) }
    }
    #[inline(always)]
    fn shl_i<const N: i32>(self, a: __m512i) -> __m512i {
        unsafe { _mm512_sll_epi32(a, _mm_cvtsi32_si128(N)) }
    }
    #[inline(always)]
    fn to_f32(self, a: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(a) }
    }
    #[inline(always)]
    fn bits(self, a: __m512) -> __m512i {
        unsafe { _mm512_castps_si512(a) }
    }
    #[inline(always)]
    fn from_bits(self, a: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(a) }
    }

    #[inline(always)]
    fn zeros(self) -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    fn and_b(self, a: __m512i, byte: u8) -> __m512i {
        unsafe { _mm512_and_si512(a, _mm512_set1_epi8(byte as i8)) }
    }
    #[inline(always)]
    fn xor_b(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_xor_si512(a, b) }
    }
    #[inline(always)]
    fn shr16_b(self, a: __m512i, n: u32) -> __m512i {
        unsafe { _mm512_srl_epi16(a, _mm_cvtsi32_si128(n as i32)) }
    }
    #[inline(always)]
    fn shl16_b(self, a: __m512i, n: u32) -> __m512i {
        unsafe { _mm512_sll_epi16(a, _mm_cvtsi32_si128(n as i32)) }
    }

    #[inline(always)]
    unsafe fn load_table(self, p: *const u8) -> __m512i {
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    fn look_up(self, table: __m512i, at: __m512i) -> __m512i {
        unsafe { _mm512_shuffle_epi8(table, at) }
    }

    #[inline(always)]
    fn weights<const BITS: u32>(self, b: __m512i) -> __m512i {
        b
    }
    #[inline(always)]
    unsafe fn act<const BITS: u32>(self, p: *const u32) -> __m512i {
        unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    fn acc<const BITS: u32>(self, init: i32) -> __m512i {
        self.splat_i(init)
    }
    #[inline(always)]
    fn dot<const BITS: u32>(self, acc: __m512i, w: __m512i, a: __m512i) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(acc, w, a) }
    }
    #[inline(always)]
    fn total<const BITS: u32>(self, acc: __m512i, _init: i32) -> __m512i {
        acc
    }
    #[inline(always)]
    unsafe fn pair_dot(self, acc: __m512i, m: *const u8, s: u32) -> __m512i {
        unsafe {
            let m = _mm512_cvtepu8_epi16(_mm256_loadu_si256(m.cast()));
            _mm512_dpwssd_epi32(acc, m, _mm512_set1_epi32(s as i32))
        }
    }
}
