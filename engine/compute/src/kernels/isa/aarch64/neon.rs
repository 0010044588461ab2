//! NEON: a register is a quarter of a panel (4 rows). With the dot-product extension a dot is `sdot` on signed weights
//! (unsigned weights of up to 7 bits are valid signed ones). Without it, products of up to 6-bit weights accumulate in
//! i16 for a whole block (8 x 31 x 127 = 31,496, and 4 x 63 x 127 = 32,004 for the 4 groups of Q6_K) and 8-bit ones are
//! widened at once.
//!
//! 8-bit weights are stored with 128 added; `dot` converts them back, once per register for all columns, so their
//! zero-point term `-128 * sum(q)` is ignored.
#![allow(unsafe_code)]

use core::arch::aarch64::*;
use core::arch::asm;

use crate::kernels::cpu::Op;
use crate::kernels::isa::features::{enable_features, isa_features};
use crate::kernels::simd::{ActEncoding, Simd, TileShape};

#[derive(Clone, Copy)]
pub(in crate::kernels) struct Neon<const DOTPROD: bool>(());

impl Neon<false> {
    /// Every AArch64 CPU has NEON.
    #[inline(always)]
    pub(in crate::kernels) fn new() -> Self {
        Neon(())
    }
}

impl Neon<true> {
    /// # Safety
    /// The CPU has the features of `run_dotprod`.
    #[inline(always)]
    pub(in crate::kernels) unsafe fn new() -> Self {
        Neon(())
    }
}

// compiled with the dot-product extension
isa_features! { NeonDotprod, enable_features
    pub(in crate::kernels) fn run_dotprod<O: Op>(s: Neon<true>, op: O) -> O::Out {
        op.simd(s)
    }
}

/// `acc + w . a` of four i8 per lane.
///
/// # Safety
/// The CPU has the dot products.
#[inline(always)]
unsafe fn sdot(mut acc: int32x4_t, w: int8x16_t, a: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction reads and writes these registers only.
    unsafe {
        asm!(".arch_extension dotprod", "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) acc, in(vreg) w, in(vreg) a, options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

// SAFETY of every `unsafe` block below: AArch64 has NEON, and a `Neon<true>` exists only where the CPU has the dot
// products; pointers are valid for LANES elements by the trait's contract.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<const DOTPROD: bool> Simd for Neon<DOTPROD> {
    const LANES: usize = 4;
    // accumulators, float sums, weights and the activations of one column take 29 of the 32 registers in both
    const TILE4: TileShape = if DOTPROD { TileShape { rv: 4, nc: 3 } } else { TileShape { rv: 2, nc: 4 } };
    const TILE8: TileShape = Self::TILE4;
    const TILE_K: TileShape = Self::TILE4;
    const TILE_F32: TileShape = TileShape { rv: 4, nc: 4 };
    const UNPACKS: bool = false;
    const GEMV: [usize; 4] = [4, 4, 4, 4];

    type F = float32x4_t;
    type I = int32x4_t;
    type B = uint8x16_t;
    type W = int8x16_t;
    type A = int8x16_t;
    /// With the dot-product extension only the first is used; without it they hold i32 pair sums (8 bits) or i16 quad
    /// sums of the rows.
    type Acc = [int32x4_t; 2];

    #[inline(always)]
    fn act_encoding(_bits: u32) -> ActEncoding {
        ActEncoding::I8
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> float32x4_t {
        unsafe { vld1q_f32(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: float32x4_t) {
        unsafe { vst1q_f32(p, v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> float32x4_t {
        unsafe {
            let h = vld1_u16(p);
            let v: float32x4_t;
            asm!("fcvtl {0:v}.4s, {1:v}.4h", lateout(vreg) v, in(vreg) h, options(pure, nomem, nostack, preserves_flags));
            v
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> float32x4_t {
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: float32x4_t) {
        unsafe {
            let h: uint16x4_t;
            asm!("fcvtn {0:v}.4h, {1:v}.4s", lateout(vreg) h, in(vreg) v, options(pure, nomem, nostack, preserves_flags));
            vst1_u16(p, h);
        }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> int32x4_t {
        unsafe {
            let b = vcreate_u8(u64::from(p.cast::<u32>().read_unaligned()));
            vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(b))))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> int32x4_t {
        unsafe {
            let b = vcreate_s8(u64::from(p.cast::<u32>().read_unaligned()));
            vmovl_s16(vget_low_s16(vmovl_s8(b)))
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, v: int32x4_t) {
        unsafe {
            let h = vmovn_s32(v);
            let b = vreinterpret_u32_s8(vmovn_s16(vcombine_s16(h, h)));
            p.cast::<u32>().write_unaligned(vget_lane_u32::<0>(b));
        }
    }
    #[inline(always)]
    unsafe fn load_b(self, p: *const u8) -> uint8x16_t {
        unsafe { vld1q_u8(p) }
    }
    #[inline(always)]
    unsafe fn store_b(self, p: *mut u8, v: uint8x16_t) {
        unsafe { vst1q_u8(p, v) }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // prefetching any address is harmless
        unsafe { asm!("prfm pldl1keep, [{0}]", in(reg) p, options(readonly, nostack, preserves_flags)) }
    }

    #[inline(always)]
    fn splat(self, v: f32) -> float32x4_t {
        unsafe { vdupq_n_f32(v) }
    }
    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    fn mac_exact(self, acc: float32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vfmaq_f32(acc, a, b) }
    }
    #[inline(always)]
    fn abs(self, a: float32x4_t) -> float32x4_t {
        unsafe { vabsq_f32(a) }
    }
    #[inline(always)]
    fn select_gt(self, a: float32x4_t, b: float32x4_t, t: float32x4_t, e: float32x4_t) -> float32x4_t {
        unsafe { vbslq_f32(vcgtq_f32(a, b), t, e) }
    }

    #[inline(always)]
    fn splat_i(self, v: i32) -> int32x4_t {
        unsafe { vdupq_n_s32(v) }
    }
    #[inline(always)]
    fn add_i(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        unsafe { vaddq_s32(a, b) }
    }
    #[inline(always)]
    fn sub_i(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        unsafe { vsubq_s32(a, b) }
    }
    #[inline(always)]
    fn max_i(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        unsafe { vmaxq_s32(a, b) }
    }
    #[inline(always)]
    fn min_i(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        unsafe { vminq_s32(a, b) }
    }
    #[inline(always)]
    fn sum_lanes(self, a: int32x4_t) -> i32 {
        unsafe { vaddvq_s32(a) }
    }
    #[inline(always)]
    fn max_lane(self, a: int32x4_t) -> i32 {
        unsafe { vmaxvq_s32(a) }
    }
    #[inline(always)]
    fn mul_i(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        unsafe { vmulq_s32(a, b) }
    }
    #[inline(always)]
    fn shl_i<const N: i32>(self, a: int32x4_t) -> int32x4_t {
        unsafe { vshlq_n_s32::<N>(a) }
    }
    #[inline(always)]
    fn to_f32(self, a: int32x4_t) -> float32x4_t {
        unsafe { vcvtq_f32_s32(a) }
    }
    #[inline(always)]
    fn bits(self, a: float32x4_t) -> int32x4_t {
        unsafe { vreinterpretq_s32_f32(a) }
    }
    #[inline(always)]
    fn from_bits(self, a: int32x4_t) -> float32x4_t {
        unsafe { vreinterpretq_f32_s32(a) }
    }

    #[inline(always)]
    fn zeros(self) -> uint8x16_t {
        unsafe { vdupq_n_u8(0) }
    }
    #[inline(always)]
    fn and_b(self, a: uint8x16_t, byte: u8) -> uint8x16_t {
        unsafe { vandq_u8(a, vdupq_n_u8(byte)) }
    }
    #[inline(always)]
    fn xor_b(self, a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        unsafe { veorq_u8(a, b) }
    }
    #[inline(always)]
    fn shr16_b(self, a: uint8x16_t, n: u32) -> uint8x16_t {
        unsafe { vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(a), vdupq_n_s16(-(n as i16)))) }
    }
    #[inline(always)]
    fn shl16_b(self, a: uint8x16_t, n: u32) -> uint8x16_t {
        unsafe { vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(a), vdupq_n_s16(n as i16))) }
    }

    #[inline(always)]
    unsafe fn load_table(self, p: *const u8) -> uint8x16_t {
        unsafe { vld1q_u8(p) }
    }
    #[inline(always)]
    fn look_up(self, table: uint8x16_t, at: uint8x16_t) -> uint8x16_t {
        unsafe { vqtbl1q_u8(table, at) }
    }

    #[inline(always)]
    fn weights<const BITS: u32>(self, b: uint8x16_t) -> int8x16_t {
        unsafe { vreinterpretq_s8_u8(b) }
    }
    #[inline(always)]
    fn weights_hi4(self, b: uint8x16_t) -> int8x16_t {
        unsafe { vreinterpretq_s8_u8(vshrq_n_u8::<4>(b)) }
    }
    #[inline(always)]
    unsafe fn act<const BITS: u32>(self, p: *const u32) -> int8x16_t {
        unsafe { vreinterpretq_s8_u32(vld1q_dup_u32(p)) }
    }
    #[inline(always)]
    fn acc<const BITS: u32>(self, init: i32) -> [int32x4_t; 2] {
        [self.splat_i(if DOTPROD && BITS < 8 { init } else { 0 }), self.splat_i(0)]
    }
    #[inline(always)]
    fn dot<const BITS: u32>(self, [x, y]: [int32x4_t; 2], w: int8x16_t, a: int8x16_t) -> [int32x4_t; 2] {
        unsafe {
            let w = if BITS == 8 { veorq_s8(w, vdupq_n_s8(-128)) } else { w };
            if DOTPROD {
                return [sdot(x, w, a), y];
            }
            if BITS == 8 {
                let low = vmull_s8(vget_low_s8(w), vget_low_s8(a));
                return [vpadalq_s16(x, low), vpadalq_s16(y, vmull_high_s8(w, a))];
            }
            let low = vmlal_s8(vreinterpretq_s16_s32(x), vget_low_s8(w), vget_low_s8(a));
            let high = vmlal_high_s8(vreinterpretq_s16_s32(y), w, a);
            [vreinterpretq_s32_s16(low), vreinterpretq_s32_s16(high)]
        }
    }
    #[inline(always)]
    fn total<const BITS: u32>(self, [x, y]: [int32x4_t; 2], init: i32) -> int32x4_t {
        unsafe {
            if DOTPROD {
                return x;
            }
            if BITS == 8 {
                return vpaddq_s32(x, y);
            }
            let (low, high) = (vpaddlq_s16(vreinterpretq_s16_s32(x)), vpaddlq_s16(vreinterpretq_s16_s32(y)));
            vaddq_s32(vpaddq_s32(low, high), self.splat_i(init))
        }
    }
    #[inline(always)]
    unsafe fn pair_dot(self, acc: int32x4_t, m: *const u8, s: u32) -> int32x4_t {
        unsafe {
            let m = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(m)));
            let s = vreinterpretq_s16_u32(vdupq_n_u32(s));
            let low = vmull_s16(vget_low_s16(m), vget_low_s16(s));
            vaddq_s32(acc, vpaddq_s32(low, vmull_high_s16(m, s)))
        }
    }
}
