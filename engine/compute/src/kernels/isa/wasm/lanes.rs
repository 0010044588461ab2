//! WebAssembly SIMD: a v128 is a quarter of a panel (4 rows).
//!
//! - simd128: `i32x4.dot_i16x8_s` adds i16 pairs of one row. Its operands are the weights two by two, as stored, and
//!   the odd ones alone, by a shift, so no shuffles are needed (`ActEncoding::I16`, `ActEncoding::I16OddSigned`). In
//!   builds without relaxed-simd, gemv keeps 4- to 6-bit weights packed: `i16x8.mul` multiplies several weights per
//!   lane (`i16_fields.rs`); codebook types do not.
//! - relaxed-simd: `i32x4.relaxed_dot_i8x16_i7x16_add_s`, exact when its second operand is in 0..=127: weights of up to
//!   7 bits are that operand, 8-bit ones become `(w ^ mask) . |q|` (`ActEncoding::AbsAndMask`). `f32x4.relaxed_madd`,
//!   which may or may not be fused, is used where both give the same number.
//! - relaxed-simd with `I16`: dots of up to 6-bit weights are `i16x8.relaxed_dot_i8x16_i7x16_s`, accumulated as i16
//!   pairs (`ActEncoding::I8PairSums`); 8-bit ones are those of simd128. For engines on x86 without VNNI: there the
//!   relaxed dot that adds takes five instructions, this one two, and the one of simd128 four, for as many weights.
#![allow(unsafe_code)]

#[cfg(target_arch = "wasm32")]
use core::arch::wasm32::*;
#[cfg(target_arch = "wasm64")]
use core::arch::wasm64::*;

use crate::kernels::simd::{ActEncoding, Simd, TileShape, max_i16_groups};

#[derive(Clone, Copy)]
pub(in crate::kernels) struct Wasm<const RELAXED: bool, const I16: bool = false>(&'static Constants);

impl Wasm<false> {
    #[inline(always)]
    pub(in crate::kernels) fn new() -> Self {
        Wasm(core::hint::black_box(&CONSTANTS))
    }
}

#[cfg(target_feature = "relaxed-simd")]
impl<const I16: bool> Wasm<true, I16> {
    #[inline(always)]
    pub(in crate::kernels) fn new() -> Self {
        Wasm(core::hint::black_box(&CONSTANTS))
    }
}

impl<const RELAXED: bool, const I16: bool> Wasm<RELAXED, I16> {
    /// `lane` in all 32-bit lanes.
    #[inline(always)]
    fn constant(self, lane: u32) -> v128 {
        match CONSTANTS.0.iter().position(|constant| constant[0] == lane) {
            // SAFETY: 16 aligned bytes.
            Some(i) => unsafe { v128_load(self.0.0[i].as_ptr().cast()) },
            None => u32x4_splat(lane),
        }
    }
}

/// Broadcasts 32-bit lane `i`.
#[inline(always)]
fn lane(four: v128, i: usize) -> v128 {
    match i {
        0 => i32x4_shuffle::<0, 0, 0, 0>(four, four),
        1 => i32x4_shuffle::<1, 1, 1, 1>(four, four),
        2 => i32x4_shuffle::<2, 2, 2, 2>(four, four),
        _ => i32x4_shuffle::<3, 3, 3, 3>(four, four),
    }
}

#[inline(always)]
fn relaxed_madd(a: v128, b: v128, acc: v128) -> v128 {
    #[cfg(target_feature = "relaxed-simd")]
    return f32x4_relaxed_madd(a, b, acc);
    #[cfg(not(target_feature = "relaxed-simd"))]
    unreachable!("a Wasm<true> without the feature: {:?}", (a, b, acc))
}

#[inline(always)]
fn relaxed_dot(a: v128, w: v128, acc: v128) -> v128 {
    #[cfg(target_feature = "relaxed-simd")]
    return i32x4_relaxed_dot_i8x16_i7x16_add(a, w, acc);
    #[cfg(not(target_feature = "relaxed-simd"))]
    unreachable!("a Wasm<true> without the feature: {:?}", (a, w, acc))
}

#[inline(always)]
fn relaxed_pairs(a: v128, w: v128) -> v128 {
    #[cfg(target_feature = "relaxed-simd")]
    return i16x8_relaxed_dot_i8x16_i7x16(a, w);
    #[cfg(not(target_feature = "relaxed-simd"))]
    unreachable!("a Wasm<true> without the feature: {:?}", (a, w))
}

/// Whether activations of two words are loaded four words at a time and then broadcast. Faster with Cranelift, which
/// compiles a load-and-splat to three instructions; slower with V8, which compiles it to one.
const LOADS_TOGETHER: bool = cfg!(feature = "loads-together");

/// Constants of hot loops, each broadcast to all 32-bit lanes. Loaded from memory that the compiler cannot fold, in one
/// instruction or none: engines build vector literals with three instructions in every iteration.
#[repr(C, align(16))]
struct Constants([[u32; 4]; 6]);

static CONSTANTS: Constants =
    Constants([[ODD_SIGNS; 4], [0x0f0f_0f0f; 4], [0x1f1f_1f1f; 4], [0x3f3f_3f3f; 4], [F16_FIELDS; 4], [F16_SCALE; 4]]);

/// The sign bits of the odd bytes.
const ODD_SIGNS: u32 = 0x8000_8000;
/// Sign, exponent and fraction of an f16 that was sign-extended and shifted left by 13.
const F16_FIELDS: u32 = 0x8fff_e000;
/// 2^112: the exponent biases of f16 and f32 differ by 112.
const F16_SCALE: u32 = (127 + 112) << 23;

// SAFETY of every `unsafe` block below: pointers are valid for LANES elements by the trait's contract.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<const RELAXED: bool, const I16: bool> Simd for Wasm<RELAXED, I16> {
    const LANES: usize = 4;
    const TILE4: TileShape = TileShape { rv: 2, nc: 4 };
    // loads limit columns of two words a group: 8 loads for as many dots as 10 of the other shape
    const TILE8: TileShape = if RELAXED && !I16 { TileShape { rv: 4, nc: 2 } } else { TileShape { rv: 2, nc: 4 } };
    const TILE_K: TileShape = TileShape { rv: 2, nc: 4 };
    const TILE_F32: TileShape = TileShape { rv: 2, nc: 6 };
    const UNPACKS: bool = true;
    const UNPACKS_SCALES: bool = true;
    const UNPACKS_BYTES: bool = I16 || !RELAXED;
    const PREFETCHES: bool = false;
    const GEMV: [usize; 4] = [4, 4, 4, 4];

    type F = v128;
    type I = v128;
    type B = v128;
    /// Relaxed: the bytes, twice. Otherwise i16: the even bytes (or the pairs as stored), and the odd bytes.
    type W = [v128; 2];
    type A = [v128; 2];
    /// i32, or pairs of i16.
    type Acc = v128;

    #[inline(always)]
    fn bound(self, n: usize) -> usize {
        core::hint::black_box(n)
    }

    #[inline(always)]
    fn spill<T>(self, sums: &mut T) {
        core::hint::black_box(sums);
    }

    #[inline(always)]
    fn constants<T>(self, all: &'static T) -> &'static T {
        core::hint::black_box(all)
    }

    #[inline(always)]
    fn act_encoding(bits: u32) -> ActEncoding {
        match bits {
            8 if RELAXED && !I16 => ActEncoding::AbsAndMask,
            8 => ActEncoding::I16OddSigned,
            _ if I16 => ActEncoding::I8PairSums,
            _ if RELAXED => ActEncoding::I8,
            _ => ActEncoding::I16,
        }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> v128 {
        unsafe { v128_load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: v128) {
        unsafe { v128_store(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> v128 {
        // moves sign, exponent and fraction to their places in f32; the exponent biases differ by 112
        let h = unsafe { i32x4_load_extend_i16x4(p.cast()) };
        let h = v128_and(i32x4_shl(h, 13), self.constant(F16_FIELDS));
        f32x4_mul(h, self.constant(F16_SCALE))
    }
    #[inline(always)]
    unsafe fn load_small_f16(self, p: *const u16) -> v128 {
        let h = unsafe { i32x4_load_extend_i16x4(p.cast()) };
        let a = v128_and(h, i32x4_splat(0x7fff));
        let normal = i32x4_add(i32x4_shl(a, 13), i32x4_splat(112 << 23));
        // below 2^-14: the bits count multiples of 2^-24
        let small = f32x4_mul(f32x4_convert_i32x4(a), u32x4_splat((127 - 24) << 23));
        let a = v128_bitselect(small, normal, i32x4_lt(a, i32x4_splat(1 << 10)));
        v128_or(a, v128_and(h, u32x4_splat(1 << 31)))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> v128 {
        i32x4_shl(unsafe { u32x4_load_extend_u16x4(p) }, 16)
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: v128) {
        let a = v128_and(v, i32x4_splat(0x7fff_ffff));
        // from 2^-14: adds half a unit of the 10-bit fraction less one, plus its last bit: rounds to even
        let odd = v128_and(u32x4_shr(a, 13), i32x4_splat(1));
        let bias = i32x4_splat(0xfff - (112 << 23));
        let normal = u32x4_shr(i32x4_add(i32x4_add(a, bias), odd), 13);
        // below: adding 0.5 rounds to multiples of 2^-24, the unit of subnormal f16
        let half = f32x4_splat(0.5);
        let small = i32x4_sub(f32x4_add(a, half), half);
        let h = v128_bitselect(small, normal, i32x4_lt(a, i32x4_splat((127 - 14) << 23)));
        let h = v128_or(h, v128_and(u32x4_shr(v, 16), i32x4_splat(0x8000)));
        unsafe { v128_store64_lane::<0>(u16x8_narrow_i32x4(h, h), p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> v128 {
        u32x4_extend_low_u16x8(u16x8_extend_low_u8x16(unsafe { v128_load32_zero(p.cast()) }))
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> v128 {
        i32x4_extend_low_i16x8(i16x8_extend_low_i8x16(unsafe { v128_load32_zero(p.cast()) }))
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, v: v128) {
        let pairs = i16x8_narrow_i32x4(v, v);
        unsafe { v128_store32_lane::<0>(i8x16_narrow_i16x8(pairs, pairs), p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_b(self, p: *const u8) -> v128 {
        unsafe { v128_load(p.cast()) }
    }

    #[inline(always)]
    unsafe fn store_b(self, p: *mut u8, v: v128) {
        unsafe { v128_store(p.cast(), v) }
    }
    #[inline(always)]
    fn splat(self, v: f32) -> v128 {
        f32x4_splat(v)
    }
    #[inline(always)]
    fn add(self, a: v128, b: v128) -> v128 {
        f32x4_add(a, b)
    }
    #[inline(always)]
    fn sub(self, a: v128, b: v128) -> v128 {
        f32x4_sub(a, b)
    }
    #[inline(always)]
    fn mul(self, a: v128, b: v128) -> v128 {
        f32x4_mul(a, b)
    }
    #[inline(always)]
    fn div(self, a: v128, b: v128) -> v128 {
        f32x4_div(a, b)
    }
    #[inline(always)]
    fn mac_exact(self, acc: v128, a: v128, b: v128) -> v128 {
        if RELAXED { relaxed_madd(a, b, acc) } else { f32x4_add(acc, f32x4_mul(a, b)) }
    }
    #[inline(always)]
    fn abs(self, a: v128) -> v128 {
        f32x4_abs(a)
    }
    #[inline(always)]
    fn select_gt(self, a: v128, b: v128, t: v128, e: v128) -> v128 {
        v128_bitselect(t, e, f32x4_gt(a, b))
    }
    // With relaxed-simd the compiler would emit `f32x4.relaxed_max`, whose result for zeros and NaN depends on the
    // engine.
    #[cfg(not(target_feature = "relaxed-simd"))]
    #[inline(always)]
    fn max(self, a: v128, b: v128) -> v128 {
        // `pmax(b, a)` is `b < a ? a : b`
        f32x4_pmax(b, a)
    }

    #[inline(always)]
    fn splat_i(self, v: i32) -> v128 {
        i32x4_splat(v)
    }
    #[inline(always)]
    fn add_i(self, a: v128, b: v128) -> v128 {
        i32x4_add(a, b)
    }
    #[inline(always)]
    fn sub_i(self, a: v128, b: v128) -> v128 {
        i32x4_sub(a, b)
    }
    #[inline(always)]
    fn max_i(self, a: v128, b: v128) -> v128 {
        i32x4_max(a, b)
    }
    #[inline(always)]
    fn min_i(self, a: v128, b: v128) -> v128 {
        i32x4_min(a, b)
    }
    #[inline(always)]
    fn sum_lanes(self, a: v128) -> i32 {
        let a = i32x4_add(a, i32x4_shuffle::<2, 3, 0, 1>(a, a));
        i32x4_extract_lane::<0>(i32x4_add(a, i32x4_shuffle::<1, 0, 3, 2>(a, a)))
    }
    #[inline(always)]
    fn max_lane(self, a: v128) -> i32 {
        let a = i32x4_max(a, i32x4_shuffle::<2, 3, 0, 1>(a, a));
        i32x4_extract_lane::<0>(i32x4_max(a, i32x4_shuffle::<1, 0, 3, 2>(a, a)))
    }
    #[inline(always)]
    fn mul_i(self, a: v128, b: v128) -> v128 {
        i32x4_mul(a, b)
    }
    #[inline(always)]
    fn shl_i<const N: i32>(self, a: v128) -> v128 {
        i32x4_shl(a, N as u32)
    }
    #[inline(always)]
    fn to_f32(self, a: v128) -> v128 {
        f32x4_convert_i32x4(a)
    }
    #[inline(always)]
    fn bits(self, a: v128) -> v128 {
        a
    }
    #[inline(always)]
    fn from_bits(self, a: v128) -> v128 {
        a
    }

    #[inline(always)]
    fn zeros(self) -> v128 {
        u8x16_splat(0)
    }
    #[inline(always)]
    fn and_b(self, a: v128, byte: u8) -> v128 {
        v128_and(a, self.constant(u32::from_ne_bytes([byte; 4])))
    }
    #[inline(always)]
    fn xor_b(self, a: v128, b: v128) -> v128 {
        v128_xor(a, b)
    }
    #[inline(always)]
    fn shr16_b(self, a: v128, n: u32) -> v128 {
        u16x8_shr(a, n)
    }
    #[inline(always)]
    fn shl16_b(self, a: v128, n: u32) -> v128 {
        u16x8_shl(a, n)
    }

    #[inline(always)]
    unsafe fn load_table(self, p: *const u8) -> v128 {
        unsafe { v128_load(p.cast()) }
    }
    #[inline(always)]
    fn look_up(self, table: v128, at: v128) -> v128 {
        i8x16_swizzle(table, at)
    }

    #[inline(always)]
    fn weights<const BITS: u32>(self, b: v128) -> [v128; 2] {
        self.unpacked_weights::<BITS>(self.unpacked(b, BITS))
    }
    #[inline(always)]
    fn unpacked(self, b: v128, bits: u32) -> v128 {
        if Self::act_encoding(bits) == ActEncoding::I16OddSigned { v128_xor(b, self.constant(ODD_SIGNS)) } else { b }
    }
    #[inline(always)]
    fn unpacked_weights<const BITS: u32>(self, b: v128) -> [v128; 2] {
        match Self::act_encoding(BITS) {
            ActEncoding::I16 | ActEncoding::I16OddSigned => [b, i16x8_shr(b, 8)],
            _ => [b, b],
        }
    }
    #[inline(always)]
    unsafe fn act<const BITS: u32>(self, p: *const u32) -> [v128; 2] {
        unsafe {
            if Self::act_encoding(BITS).words() == 1 {
                return [v128_load32_splat(p); 2];
            }
            if LOADS_TOGETHER {
                let both = u64x2_load_extend_u32x2(p);
                return [lane(both, 0), lane(both, 2)];
            }
            [v128_load32_splat(p), v128_load32_splat(p.add(1))]
        }
    }
    #[inline(always)]
    unsafe fn act_of<const BITS: u32, const NC: usize>(self, p: *const u32, c: usize) -> [v128; 2] {
        let words = Self::act_encoding(BITS).words();
        unsafe {
            if !(NC * words).is_multiple_of(4) || words == 2 && !LOADS_TOGETHER {
                return self.act::<BITS>(p.add(c * words));
            }
            let word = |i: usize| lane(v128_load(p.add(i / 4 * 4).cast()), i % 4);
            [word(c * words), word((c + 1) * words - 1)]
        }
    }
    #[inline(always)]
    fn acc<const BITS: u32>(self, init: i32) -> v128 {
        i32x4_splat(init)
    }
    #[inline(always)]
    fn dot<const BITS: u32>(self, acc: v128, w: [v128; 2], a: [v128; 2]) -> v128 {
        match Self::act_encoding(BITS) {
            ActEncoding::I8PairSums => i16x8_add(acc, relaxed_pairs(a[0], w[0])),
            ActEncoding::I8 => relaxed_dot(a[0], w[0], acc),
            ActEncoding::AbsAndMask => relaxed_dot(v128_xor(w[0], a[1]), a[0], acc),
            ActEncoding::I16 | ActEncoding::I16OddSigned => {
                i32x4_add(i32x4_add(acc, i32x4_dot_i16x8(w[0], a[0])), i32x4_dot_i16x8(w[1], a[1]))
            }
        }
    }
    #[inline(always)]
    unsafe fn add_field(self, acc: v128, line: v128, shift: u32, words: *const u32, i: usize) -> v128 {
        let factor = match LOADS_TOGETHER {
            true => lane(unsafe { v128_load(words.cast()) }, i),
            false => unsafe { v128_load32_splat(words.add(i)) },
        };
        i16x8_add(acc, i16x8_mul(u16x8_shr(line, shift), factor))
    }
    #[inline(always)]
    fn total_of_fields(self, acc: v128, scale: Option<v128>) -> v128 {
        match scale {
            // the multiplication by the scale also widens the pairs
            Some(scale) => i32x4_dot_i16x8(acc, i16x8_shuffle::<0, 0, 2, 2, 4, 4, 6, 6>(scale, scale)),
            None => i32x4_extadd_pairwise_i16x8(acc),
        }
    }
    #[inline(always)]
    fn max_groups(bits: u32, has_zero_point: bool) -> usize {
        if I16 { max_i16_groups(bits, has_zero_point) } else { 8 }
    }
    #[inline(always)]
    fn total<const BITS: u32>(self, acc: v128, _init: i32) -> v128 {
        if Self::act_encoding(BITS) == ActEncoding::I8PairSums { i32x4_extadd_pairwise_i16x8(acc) } else { acc }
    }
    #[inline(always)]
    fn total_scaled<const BITS: u32>(self, acc: v128, _init: i32, scale: v128) -> v128 {
        if Self::act_encoding(BITS) == ActEncoding::I8PairSums {
            return self.total_of_fields(acc, Some(scale));
        }
        i32x4_mul(acc, scale)
    }
    #[inline(always)]
    unsafe fn pair_dot(self, acc: v128, m: *const u8, s: u32) -> v128 {
        let m = unsafe { u16x8_load_extend_u8x8(m) };
        i32x4_add(acc, i32x4_dot_i16x8(m, u32x4_splat(s)))
    }
}
