//! The vocabulary of an instruction set: lanes of f32 and i32, and exact dots of 4 weights with 4 activations per lane.
//!
//! A value of a type that implements [`Simd`] exists only where the CPU has the instructions (see `Cpu`), so every
//! method without pointers is safe to call. Lane `i` of an operation depends on lane `i` of its inputs alone.
//!
//! Dots are exact integers, so their order is free and each instruction set has its own recipe (`ActEncoding`): what an
//! activation word looks like in a tile, and what a prepared weight is.

/// `each!(N, |i| e)` is `[e for i = 0, e for i = 1, ...]`, N of them. A loop, as `core::array::from_fn` is not always
/// inlined: then its closure would be compiled without the instruction set, each instruction a call.
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

/// How a tile stores the activations of one 4-element group of a column. All hold the same integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code)] // each target makes its own
pub(crate) enum ActEncoding {
    /// One word of four i8: for unsigned x signed dots. The block's initial value is `-offset * sum(q)`.
    I8,
    /// The same word, for dots that stay pairs of i16 to their end. The initial value is such a pair, `-offset` times the
    /// sums of all q0 + q1 and of all q2 + q3: what has to fit i16 are then sums of signed weights times q, and on the way
    /// there they may wrap.
    I8PairSums,
    /// Two words, `|q|` and a mask (0x80 where q >= 0, 0x7f where q < 0), for `(w ^ mask) . |q|` on offset-binary
    /// weights: `w*q = (~w)*|q| + |q|` for negative q. The initial value is the sum of `|q|` over q < 0.
    AbsAndMask,
    /// Two words, the i16 pairs (q0, q2) and (q1 - 256 q0, q3 - 256 q2): for i16 pair dots with a weight word as it is and
    /// with its odd bytes, as `w0 q0 + w1 q1 = (w0 + 256 w1) q0 + w1 (q1 - 256 q0)`. For weights of up to 7 bits.
    I16,
    /// The same words, for weights of 8 bits whose odd bytes are signed. Only even ones have an offset: the initial value
    /// is `-offset` times the sum of all q0 and q2.
    I16OddSigned,
}

impl ActEncoding {
    /// 32-bit words of one group of four activations.
    pub(crate) const fn words(self) -> usize {
        match self {
            ActEncoding::I8 | ActEncoding::I8PairSums => 1,
            ActEncoding::AbsAndMask | ActEncoding::I16 | ActEncoding::I16OddSigned => 2,
        }
    }
}

/// Rows (in vectors) and columns of a register tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TileShape {
    /// Vectors of `LANES` rows.
    pub rv: usize,
    /// Columns.
    pub nc: usize,
}

/// How weights are read: ahead of the reader where each is used once, for one column; otherwise see `tiles/weight_prefetch.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prefetch {
    /// How far ahead of the reader memory is asked for.
    pub distance: PrefetchDistance,
    /// Whether several panels are read at once. Some processors fetch ahead well only for a reader who goes through
    /// memory in its order.
    pub interleaves_panels: bool,
    /// Columns from which on the weights of the next rows are asked for.
    pub min_columns: usize,
}

/// Bytes between the reader and what is asked for; 0: nothing is, the processor sees what comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PrefetchDistance {
    /// Where weights are unpacked.
    pub packed: usize,
    /// Where they are bytes, which are read faster.
    pub bytes: usize,
    /// Where they are floats.
    pub floats: usize,
}

impl Prefetch {
    /// Intel's processors, and where nothing was measured.
    pub(crate) const DEFAULT: Prefetch = Prefetch {
        distance: PrefetchDistance { packed: 2048, bytes: 2048, floats: 2048 },
        interleaves_panels: true,
        min_columns: 2,
    };
    /// Zen 4: 60-90 % of its bandwidth when it is left alone, half of that otherwise; so few columns, which wait for memory
    /// more than they compute, ask for nothing either.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const OFF: Prefetch = Prefetch {
        distance: PrefetchDistance { packed: 0, bytes: 0, floats: 0 },
        interleaves_panels: false,
        min_columns: 16,
    };
    /// Zen 5: a fifth to a whole more where it is asked, a tenth less for bytes of one column.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const AHEAD_8_KIB: Prefetch = Prefetch {
        distance: PrefetchDistance { packed: 8192, bytes: 0, floats: 8192 },
        interleaves_panels: false,
        min_columns: 2,
    };
}

/// Modules for browsers have fewer kinds of tiles: full ones, and those of products of one column, which take the columns
/// that are left one by one. Super-blocks, which are dear to unpack, also have tiles of two.
pub(crate) const FEW_TILES: bool = cfg!(target_family = "wasm");

/// Groups whose dots, as pairs of products in i16, fit together: 8 of 4 bits, 8 * 2 * 15 * 127 = 30,480; 4 of 5 bits,
/// 4 * 2 * 31 * 127 = 31,496. Where the `first` value takes the offset off, 8 of 5 bits, 8 * 2 * 16 * 127 = 32,512; and 4
/// of 6 bits, 4 * 2 * 32 * 127, which have their scale then.
#[cfg(any(target_arch = "x86_64", target_feature = "simd128"))]
pub(crate) const fn max_i16_groups(bits: u32, has_zero_point: bool) -> usize {
    if bits == 5 && !has_zero_point { 4 } else { 8 }
}

/// One instruction set. `BITS` in the dots is the width of the unsigned weights: 4, 5, 6 or 8; at 8 they are signed
/// numbers with 128 added, as are those of codes.
///
/// # Safety
/// The methods that take pointers read or write `LANES` elements there; `load_table` reads 16.
#[allow(clippy::missing_safety_doc)] // one contract for all, above
pub(crate) trait Simd: Copy {
    /// f32 lanes; divides 16.
    const LANES: usize;
    /// Register tile for 4- and 5-bit blocks of 32.
    const TILE4: TileShape;
    /// Register tile for 8-bit blocks of 32.
    const TILE8: TileShape;
    /// Register tile for super-blocks of 256.
    const TILE_K: TileShape;
    /// Register tile for f32 products.
    const TILE_F32: TileShape;
    /// Whether weights are unpacked to bytes once for all tiles of several columns, rather than in each.
    const UNPACKS: bool;
    /// Whether scales are widened once for all those tiles, also of weights that stay: not where that is one instruction.
    const UNPACKS_SCALES: bool = false;
    /// Whether bytes are unpacked too, as [`Simd::unpacked`] has something to do, or to be like other weights.
    const UNPACKS_BYTES: bool = false;
    /// Whether [`Simd::prefetch`] does something.
    const PREFETCHES: bool = true;
    /// Row vectors at a time for one column: 4- and 5-bit, 8-bit, super-blocks, f32. A panel at least.
    const GEMV: [usize; 4];

    /// `LANES` f32.
    type F: Copy;
    /// `LANES` i32.
    type I: Copy;
    /// `4 * LANES` bytes.
    type B: Copy;
    /// Weights of four k for `LANES` rows, ready for `dot`.
    type W: Copy;
    /// Activations of four k of one column, ready for `dot`.
    type A: Copy;
    /// A running dot per lane.
    type Acc: Copy;

    /// How the processor likes weights to be read for one column.
    #[inline(always)]
    fn prefetch_policy(self) -> Prefetch {
        Prefetch::DEFAULT
    }
    /// The recipe for weights of that width.
    fn act_encoding(bits: u32) -> ActEncoding;

    unsafe fn load(self, p: *const f32) -> Self::F;
    unsafe fn store(self, p: *mut f32, v: Self::F);
    /// Exact widening of finite f16.
    unsafe fn load_f16(self, p: *const u16) -> Self::F;
    /// The same for numbers that are often below 2^-14, as the scales of super-blocks are: not by products with subnormal
    /// f32, which take processors up to a hundred times as long as others.
    #[inline(always)]
    unsafe fn load_small_f16(self, p: *const u16) -> Self::F {
        // SAFETY: the caller's.
        unsafe { self.load_f16(p) }
    }
    /// Exact widening of bf16.
    unsafe fn load_bf16(self, p: *const u16) -> Self::F;
    /// Rounds to nearest even; the values are within f16's finite range.
    unsafe fn store_f16(self, p: *mut u16, v: Self::F);
    /// Bytes as unsigned i32 lanes.
    unsafe fn load_u8(self, p: *const u8) -> Self::I;
    /// Bytes as signed i32 lanes.
    unsafe fn load_i8(self, p: *const i8) -> Self::I;
    /// Lanes as bytes; they are within -128..=127.
    unsafe fn store_i8(self, p: *mut i8, v: Self::I);
    unsafe fn load_b(self, p: *const u8) -> Self::B;
    unsafe fn store_b(self, p: *mut u8, v: Self::B);
    /// The bound of a hot loop. Opaque where full unrolling costs speed: the compiler then moves the dots column by
    /// column and spills, and a WebAssembly engine does not reschedule.
    #[inline(always)]
    fn bound(self, n: usize) -> usize {
        n
    }
    /// Keeps sums in memory while a loop runs that does not use them: engines of WebAssembly give the few registers to
    /// what lives long rather than to what the loop at hand needs.
    #[inline(always)]
    fn spill<T>(self, _sums: &mut T) {}
    /// Constants of hot loops. From memory that the compiler does not see through where engines make vectors that stand in
    /// the code anew in three instructions, each time around.
    #[inline(always)]
    fn constants<T>(self, all: &'static T) -> &'static T {
        all
    }
    /// A hint that this line is wanted soon.
    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
    /// The same for the line that begins `at` bytes from `stream`, if one does and `stream` is not null.
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
    /// `acc + a * b` where every product is exact in f32 (see `narrow.rs`): fused or not, the same number.
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

    /// Bytes that are 0.
    fn zeros(self) -> Self::B;
    fn and_b(self, a: Self::B, byte: u8) -> Self::B;
    fn xor_b(self, a: Self::B, b: Self::B) -> Self::B;
    /// Shifts 16-bit lanes; bits cross bytes, so mask afterwards.
    fn shr16_b(self, a: Self::B, n: u32) -> Self::B;
    fn shl16_b(self, a: Self::B, n: u32) -> Self::B;
    /// A table of 16 bytes, for [`Simd::look_up`].
    unsafe fn load_table(self, p: *const u8) -> Self::B;
    /// The table's bytes at the indices in `at`, which are below 16.
    fn look_up(self, table: Self::B, at: Self::B) -> Self::B;

    /// Bytes as weights.
    fn weights<const BITS: u32>(self, b: Self::B) -> Self::W;
    /// Bytes of weights as unpacking leaves them: what is left to do for `weights` is not done again for each tile.
    #[inline(always)]
    fn unpacked(self, b: Self::B, _bits: u32) -> Self::B {
        b
    }
    /// Such bytes as weights.
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
    /// The activation words of one group and column.
    unsafe fn act<const BITS: u32>(self, p: *const u32) -> Self::A;
    /// Those of column `c`, where `p` has the words of `NC` columns.
    #[inline(always)]
    unsafe fn act_of<const BITS: u32, const NC: usize>(self, p: *const u32, c: usize) -> Self::A {
        // SAFETY: the caller's.
        unsafe { self.act::<BITS>(p.add(c * Self::act_encoding(BITS).words())) }
    }
    /// A dot that will end as `init + sum`; with `ActEncoding::I8PairSums`, `init` is two i16.
    fn acc<const BITS: u32>(self, init: i32) -> Self::Acc;
    /// Adds the dots of one group.
    fn dot<const BITS: u32>(self, acc: Self::Acc, w: Self::W, a: Self::A) -> Self::Acc;
    /// Adds, modulo 2^16, what lanes of 16 bits of a line have from the bit `shift` on, times the pair of word `i` of the
    /// line's four. For weights in fields; so is the next.
    #[inline(always)]
    unsafe fn add_field(
        self,
        _acc: Self::Acc,
        _line: Self::B,
        _shift: u32,
        _words: *const u32,
        _i: usize,
    ) -> Self::Acc {
        unreachable!("an instruction set whose panels have no fields")
    }
    /// The sum of such a dot's pairs, times a scale in -128..=127, if there is one.
    #[inline(always)]
    fn total_of_fields(self, _acc: Self::Acc, _scale: Option<Self::I>) -> Self::I {
        unreachable!("an instruction set whose panels have no fields")
    }
    /// Most groups that a dot may take. `first`: whether it starts from a value that takes the weights' offset off.
    #[inline(always)]
    fn max_groups(_bits: u32, _has_zero_point: bool) -> usize {
        8
    }
    /// The value of a dot of at most a run.
    fn total<const BITS: u32>(self, acc: Self::Acc, init: i32) -> Self::I;
    /// `total * scale`, the scale in -128..=127.
    #[inline(always)]
    fn total_scaled<const BITS: u32>(self, acc: Self::Acc, init: i32, scale: Self::I) -> Self::I {
        self.mul_i(self.total::<BITS>(acc, init), scale)
    }
    /// `acc + m[0]*s[0] + m[1]*s[1]` per lane: `m` holds a pair of bytes (0..=63) per lane, `s` a pair of i16 in a word.
    unsafe fn pair_dot(self, acc: Self::I, m: *const u8, s: u32) -> Self::I;
}
