//! The SIMD vocabulary: operations on lanes of f32 and i32, and exact integer dots of 4 weights with 4 activations per
//! lane.
//!
//! A value of a type that implements [`Simd`] exists only where the CPU has the instructions (see `Cpu`), so every
//! method without pointers is safe to call. Lane `i` of a result depends only on lane `i` of the inputs, except in the
//! named reductions.
//!
//! Dots are exact integers, so the order of their additions is free: each instruction set has its own encoding of
//! activations (`ActEncoding`) and its own form of weight vectors.
#![allow(unsafe_code)]

/// `each!(N, |i| e)` is `[e for i = 0, e for i = 1, ...]`, N elements. A loop, because closures given to
/// `core::array::from_fn` are not always inlined and would then be compiled without the CPU features, one call per
/// instruction.
macro_rules! each {
    ($n:expr, |$i:ident| $e:expr) => {{
        let mut all = [
            {
                let $i = 0usize;
                $e
            };
            $n
        ];
        for $i in 1..$n {
            all[$i] = $e;
        }
        all
    }};
}
pub(crate) use each;

/// Encoding of the activations of one 4-element group of a column in a tile. All encodings hold the same integers
/// q0..q3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code)] // each target constructs its own
pub(crate) enum ActEncoding {
    /// One word of four i8, for unsigned x signed dots. Zero-point term: `-offset * sum(q)`.
    I8,
    /// The same word, for dots whose pairs of products stay in i16. The zero-point term is a pair of i16, `-offset`
    /// times the sums of q0 + q1 and of q2 + q3. Only the final sums, of signed weights times q, must fit i16;
    /// intermediate sums may wrap.
    I8PairSums,
    /// Two words, `|q|` and a mask (0x80 where q >= 0, 0x7f where q < 0), for `(w ^ mask) . |q|` on offset-binary
    /// weights, since `w*q = (~w)*|q| + |q|` for negative q. Zero-point term: the sum of `|q|` over q < 0.
    AbsAndMask,
    /// Two words, the i16 pairs (q0, q2) and (q1 - 256 q0, q3 - 256 q2), for i16 pair dots with the weight word itself
    /// and with its odd bytes: `w0 q0 + w1 q1 = (w0 + 256 w1) q0 + w1 (q1 - 256 q0)`. For weights of up to 7 bits.
    I16,
    /// The same words, for 8-bit weights whose odd bytes are signed. Only even bytes have an offset, so the zero-point
    /// term is `-offset` times the sum of all q0 and q2.
    I16OddSigned,
}

impl ActEncoding {
    /// Number of 32-bit words of one group of four activations.
    pub(crate) const fn words(self) -> usize {
        match self {
            ActEncoding::I8 | ActEncoding::I8PairSums => 1,
            ActEncoding::AbsAndMask | ActEncoding::I16 | ActEncoding::I16OddSigned => 2,
        }
    }
}

/// Size of a register tile: rows, in vectors, and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TileShape {
    /// Vectors of `LANES` rows.
    pub rv: usize,
    /// Columns (tokens).
    pub nc: usize,
}

/// Software prefetch policy, by CPU. `distance` and `interleaves_panels` are for products of one column (gemv), which
/// read each weight once; products of several columns prefetch with `tiles/weight_prefetch.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prefetch {
    /// How far ahead of the reader a gemv prefetches.
    pub distance: PrefetchDistance,
    /// Whether a gemv reads several panels at once. False where the hardware prefetcher follows one sequential stream
    /// only.
    pub interleaves_panels: bool,
    /// Smallest number of columns at which a product prefetches the weights of its next rows.
    pub min_columns: usize,
}

/// Prefetch distances in bytes; 0 disables software prefetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PrefetchDistance {
    /// For weights that are unpacked from less than a byte.
    pub packed: usize,
    /// For weights of whole bytes, which are consumed faster.
    pub bytes: usize,
    /// For float weights.
    pub floats: usize,
}

impl Prefetch {
    /// Intel processors, and all that were not measured.
    pub(crate) const DEFAULT: Prefetch = Prefetch {
        distance: PrefetchDistance { packed: 2048, bytes: 2048, floats: 2048 },
        interleaves_panels: true,
        min_columns: 2,
    };
    /// Zen 4: software prefetch halves its read bandwidth, so it is disabled in gemv and below 16 columns.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const OFF: Prefetch = Prefetch {
        distance: PrefetchDistance { packed: 0, bytes: 0, floats: 0 },
        interleaves_panels: false,
        min_columns: 16,
    };
    /// Zen 5: prefetching 8 KiB ahead makes gemv 20 to 100 % faster, but 10 % slower with byte weights.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const AHEAD_8_KIB: Prefetch = Prefetch {
        distance: PrefetchDistance { packed: 8192, bytes: 0, floats: 8192 },
        interleaves_panels: false,
        min_columns: 2,
    };
}

/// Whether this build has only the tile shapes that matter most, as WebAssembly builds do: full tiles, and tiles of one
/// column for the columns left over. Super-blocks, which are expensive to unpack, also have tiles of two columns.
pub(crate) const FEW_TILES: bool = cfg!(target_family = "wasm");

/// Number of groups whose dots, as pairs of products in i16, cannot overflow: 8 groups of 4-bit weights, 8 * 2 * 15 *
/// 127 = 30,480; 4 of 5-bit weights, 4 * 2 * 31 * 127 = 31,496. With a zero-point term, 8 of 5-bit weights, 8 * 2 * 16
/// * 127 = 32,512, and 4 of 6-bit weights, 4 * 2 * 32 * 127 = 32,512, which then get their scale.
#[cfg(any(target_arch = "x86_64", target_feature = "simd128"))]
pub(crate) const fn max_i16_groups(bits: u32, has_zero_point: bool) -> usize {
    if bits == 5 && !has_zero_point { 4 } else { 8 }
}

/// One instruction set. `BITS` in the dots is the width of the unsigned weights: 4, 5, 6 or 8. 8-bit weights, and the
/// values of codebook types, are signed numbers stored with 128 added.
///
/// # Safety
/// The methods that take pointers read or write `LANES` elements there; `load_table` reads 16.
#[allow(clippy::missing_safety_doc)] // one contract for all, above
pub(crate) trait Simd: Copy {
    /// Number of f32 lanes; divides 16.
    const LANES: usize;
    /// Register tile for 4- and 5-bit blocks of 32.
    const TILE4: TileShape;
    /// Register tile for 8-bit blocks of 32.
    const TILE8: TileShape;
    /// Register tile for super-blocks of 256.
    const TILE_K: TileShape;
    /// Register tile for f32 products.
    const TILE_F32: TileShape;
    /// Whether products of several columns unpack weights to bytes once, rather than in each tile.
    const UNPACKS: bool;
    /// Whether those products also convert scales to f32 once, even for weights that stay packed. Not where the
    /// conversion is one instruction.
    const UNPACKS_SCALES: bool = false;
    /// Whether byte weights are copied to the unpack buffer too: where [`Simd::unpacked`] changes them, or where one
    /// tile serves packed and byte weights.
    const UNPACKS_BYTES: bool = false;
    /// Whether [`Simd::prefetch`] emits an instruction.
    const PREFETCHES: bool = true;
    /// Vectors of rows at a time for one column (gemv), for 4- and 5-bit blocks, 8-bit blocks, super-blocks and f32; at
    /// least a panel is read.
    const GEMV: [usize; 4];

    /// `LANES` f32.
    type F: Copy;
    /// `LANES` i32.
    type I: Copy;
    /// `4 * LANES` bytes.
    type B: Copy;
    /// Weights of four consecutive k of `LANES` rows, ready for `dot`.
    type W: Copy;
    /// Activations of four consecutive k of one column, ready for `dot`.
    type A: Copy;
    /// A dot accumulator per lane.
    type Acc: Copy;

    /// Prefetch policy of this processor.
    #[inline(always)]
    fn prefetch_policy(self) -> Prefetch {
        Prefetch::DEFAULT
    }
    /// Encoding of activations for weights of that width.
    fn act_encoding(bits: u32) -> ActEncoding;

    unsafe fn load(self, p: *const f32) -> Self::F;
    unsafe fn store(self, p: *mut f32, v: Self::F);
    /// Exact conversion of finite f16.
    unsafe fn load_f16(self, p: *const u16) -> Self::F;
    /// The same for numbers that are often below 2^-14, as the scales of super-blocks are. Must not multiply subnormal
    /// f32, which is up to a hundred times slower.
    #[inline(always)]
    unsafe fn load_small_f16(self, p: *const u16) -> Self::F {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe { self.load_f16(p) }
    }
    /// Exact conversion of bf16.
    unsafe fn load_bf16(self, p: *const u16) -> Self::F;
    /// Rounds to nearest even. The values must be within the finite range of f16.
    unsafe fn store_f16(self, p: *mut u16, v: Self::F);
    /// Zero-extends bytes to i32 lanes.
    unsafe fn load_u8(self, p: *const u8) -> Self::I;
    /// Sign-extends bytes to i32 lanes.
    unsafe fn load_i8(self, p: *const i8) -> Self::I;
    /// Narrows lanes to bytes. They must be within -128..=127.
    unsafe fn store_i8(self, p: *mut i8, v: Self::I);
    unsafe fn load_b(self, p: *const u8) -> Self::B;
    unsafe fn store_b(self, p: *mut u8, v: Self::B);
    /// The bound of a hot loop, opaque to the compiler where full unrolling costs speed: it would then reorder the dots
    /// column by column and spill, and WebAssembly engines do not reschedule.
    #[inline(always)]
    fn bound(self, n: usize) -> usize {
        n
    }
    /// Spills accumulators to memory across a loop that does not use them: WebAssembly engines would keep these in
    /// registers rather than what the loop needs.
    #[inline(always)]
    fn spill<T>(self, _sums: &mut T) {}
    /// Constants of hot loops, loaded from memory that the compiler cannot fold where engines would rebuild vector
    /// literals with three instructions in every iteration.
    #[inline(always)]
    fn constants<T>(self, all: &'static T) -> &'static T {
        all
    }
    /// Prefetches the cache line at `p`.
    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
    /// Prefetches the cache line that begins `at` bytes from `stream`, if one begins there and `stream` is not null.
    #[inline(always)]
    fn prefetch_line(self, stream: *const u8, at: usize) {
        if Self::PREFETCHES && !stream.is_null() && at.is_multiple_of(64) {
            self.prefetch(stream.wrapping_add(at));
        }
    }

    fn splat(self, v: f32) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `acc + a * b` where every product is exact in f32 (see `narrow.rs`), so that fused and separate rounding agree.
    #[inline(always)]
    fn mac_exact(self, acc: Self::F, a: Self::F, b: Self::F) -> Self::F {
        self.add(acc, self.mul(a, b))
    }
    fn abs(self, a: Self::F) -> Self::F;
    /// `a > b ? t : e`, per lane.
    fn select_gt(self, a: Self::F, b: Self::F, t: Self::F, e: Self::F) -> Self::F;
    /// `a > b ? a : b`, per lane.
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        self.select_gt(a, b, a, b)
    }

    fn splat_i(self, v: i32) -> Self::I;
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn max_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn min_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// The sum of all lanes.
    fn sum_lanes(self, a: Self::I) -> i32;
    /// The largest of all lanes.
    fn max_lane(self, a: Self::I) -> i32;
    fn mul_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn shl_i<const N: i32>(self, a: Self::I) -> Self::I;
    /// Correctly rounded conversion.
    fn to_f32(self, a: Self::I) -> Self::F;
    fn bits(self, a: Self::F) -> Self::I;
    fn from_bits(self, a: Self::I) -> Self::F;

    /// All bytes zero.
    fn zeros(self) -> Self::B;
    fn and_b(self, a: Self::B, byte: u8) -> Self::B;
    fn xor_b(self, a: Self::B, b: Self::B) -> Self::B;
    /// Shifts 16-bit lanes. Bits cross from byte to byte, so the result must be masked.
    fn shr16_b(self, a: Self::B, n: u32) -> Self::B;
    fn shl16_b(self, a: Self::B, n: u32) -> Self::B;
    /// Loads a table of 16 bytes for [`Simd::look_up`].
    unsafe fn load_table(self, p: *const u8) -> Self::B;
    /// The bytes of the table at the indices in `at`, which must be below 16.
    fn look_up(self, table: Self::B, at: Self::B) -> Self::B;

    /// Bytes as weights ready for `dot`.
    fn weights<const BITS: u32>(self, b: Self::B) -> Self::W;
    /// Bytes in the form that the unpack buffer holds: conversions needed by `weights` that can be done once for all
    /// tiles.
    #[inline(always)]
    fn unpacked(self, b: Self::B, _bits: u32) -> Self::B {
        b
    }
    /// Bytes of the unpack buffer as weights.
    #[inline(always)]
    fn unpacked_weights<const BITS: u32>(self, b: Self::B) -> Self::W {
        self.weights::<BITS>(b)
    }
    /// Low nibbles as weights.
    #[inline(always)]
    fn weights_lo4(self, b: Self::B) -> Self::W {
        self.weights::<4>(self.and_b(b, 15))
    }
    /// High nibbles as weights.
    #[inline(always)]
    fn weights_hi4(self, b: Self::B) -> Self::W {
        self.weights::<4>(self.and_b(self.shr16_b(b, 4), 15))
    }
    /// The activation words of one group of one column.
    unsafe fn act<const BITS: u32>(self, p: *const u32) -> Self::A;
    /// The activation words of column `c`; `p` points at the words of `NC` columns.
    #[inline(always)]
    unsafe fn act_of<const BITS: u32, const NC: usize>(self, p: *const u32, c: usize) -> Self::A {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe { self.act::<BITS>(p.add(c * Self::act_encoding(BITS).words())) }
    }
    /// An accumulator whose total will be `init + sum`; with `ActEncoding::I8PairSums`, `init` is two i16.
    fn acc<const BITS: u32>(self, init: i32) -> Self::Acc;
    /// Adds the dot of one group.
    fn dot<const BITS: u32>(self, acc: Self::Acc, w: Self::W, a: Self::A) -> Self::Acc;
    /// Adds `(line >> shift) * factor` on 16-bit lanes, modulo 2^16; the factor is the i16 pair in word `i` of the four
    /// words of the line. Only for panels with i16 fields (`i16_fields.rs`), like [`Simd::total_of_fields`].
    #[inline(always)]
    unsafe fn add_field(
        self,
        _acc: Self::Acc,
        _line: Self::B,
        _shift: u32,
        _words: *const u32,
        _i: usize,
    ) -> Self::Acc {
        unreachable!("only simd128 panels have i16 fields")
    }
    /// The sum of the i16 pairs of such an accumulator, times a scale in -128..=127 if there is one.
    #[inline(always)]
    fn total_of_fields(self, _acc: Self::Acc, _scale: Option<Self::I>) -> Self::I {
        unreachable!("only simd128 panels have i16 fields")
    }
    /// Largest number of groups that one accumulator can add without overflow. `has_zero_point`: whether it starts from
    /// a zero-point term.
    #[inline(always)]
    fn max_groups(_bits: u32, _has_zero_point: bool) -> usize {
        8
    }
    /// The value of an accumulator of at most `max_groups` groups.
    fn total<const BITS: u32>(self, acc: Self::Acc, init: i32) -> Self::I;
    /// `total * scale`; the scale must be in -128..=127.
    #[inline(always)]
    fn total_scaled<const BITS: u32>(self, acc: Self::Acc, init: i32, scale: Self::I) -> Self::I {
        self.mul_i(self.total::<BITS>(acc, init), scale)
    }
    /// `acc + m[0]*s[0] + m[1]*s[1]` per lane: `m` holds a pair of bytes (0..=63) per lane, `s` a pair of i16 in a word.
    unsafe fn pair_dot(self, acc: Self::I, m: *const u8, s: u32) -> Self::I;
}
