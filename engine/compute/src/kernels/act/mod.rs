//! Activations for quantised products: rounded to 8 bits in blocks, packed in tiles of columns.
//!
//! ```text
//! amax = max |x_i| of the block
//! q = 0, d = 0                                   if amax < 1e-30 or amax is not finite
//! q_i = rne(x_i * (127 / amax)), d = amax * (1/127)   otherwise
//! ```
//!
//! A tile holds `nc` columns; per block one record of 32-bit words, column fastest: `[d x nc][zero_point_terms x nc][sums x nc]
//! [groups of four x nc x words]`. Firsts are the initial values of the dots that the block's scales want, for weights
//! that are stored with an offset; sums are what minima want, of the whole block or in pairs of i16. Where weights are
//! in fields, the record of a column alone has their factors in place of the groups, and zero_point_terms that are pairs of i16.
//!
//! A square, for CPUs with matrix registers, holds 16 columns. The groups of 32 or 64 elements of a column follow each
//! other there: `[32 or 64 bytes x 16]`, of the first elements, then of the next.

mod quantise;
mod record;

use self::quantise::{PartSums, quantise_and_sum};
pub(super) use self::quantise::{quantise, quantise_lanes};
use self::record::write_record;
pub(super) use self::record::{read_block, write_groups, zero_point_term_of_bytes};
use super::cpu::{Isa, Op};
use super::i16_fields::{HAS_I16_FIELDS, I16Fields};
use super::panel_layout::PanelLayout;
use super::simd::{ActEncoding, FEW_TILES, Simd};
use super::{Cpu, tasks};
use crate::pool::{Inline, Pool};
use crate::quant::Dtype;

/// What a quantised product wants its activations to look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActLayout {
    /// Block length.
    pub(super) block: usize,
    /// Words of a group.
    pub(super) encoding: ActEncoding,
    /// Initial values of dots: of 1, 2 or 16 equal parts of the block, or none.
    zero_point_terms: usize,
    /// What is added to the weights in memory.
    offset: i32,
    sums: Sums,
    /// Columns of a full tile.
    pub(super) nc: usize,
    /// Whether 16 columns, where there are enough of them, are a square.
    amx: bool,
    /// Words of the record of one block and column.
    pub(super) words: usize,
    /// Bits of the weights, where those are in fields and a column alone in its tile has a record for them; otherwise 0.
    fields: u32,
}

/// Columns of a square.
pub(super) const AMX_COLUMNS: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sums {
    No,
    /// The sum of q.
    Whole,
    /// i16 pairs of the sums of that many elements.
    Pairs(usize),
}

impl ActLayout {
    /// The form that `cpu` wants for a matrix of that type; `None` for types that take f32.
    pub fn of(cpu: Cpu, dtype: Dtype) -> Option<ActLayout> {
        struct Of(Dtype);
        impl Op for Of {
            type Out = Option<ActLayout>;
            const DOTS: bool = true;
            fn scalar(self) -> Self::Out {
                kind(self.0, |_| ActEncoding::I8, [1, 1, 1])
            }
            #[inline(always)]
            fn simd<S: Simd>(self, _: S) -> Self::Out {
                kind(self.0, S::act_encoding, [S::TILE4.nc, S::TILE8.nc, S::TILE_K.nc])
            }
        }
        let kind = cpu.run(Of(dtype))?;
        Some(ActLayout { amx: cpu.isa() == Isa::Amx && PanelLayout::of(dtype)?.fits_amx(), ..kind })
    }

    /// Known to be false where no CPU has matrix registers, so that what follows from it is not compiled.
    fn uses_amx(&self) -> bool {
        cfg!(target_arch = "x86_64") && self.amx
    }

    /// Of `n` columns, the first ones that are in squares: all whole ones, where there are enough for weights to be worth
    /// their unpacking.
    pub(super) fn amx_columns(&self, n: usize) -> usize {
        if self.uses_amx() && n >= 2 * AMX_COLUMNS { n / AMX_COLUMNS * AMX_COLUMNS } else { 0 }
    }

    /// The columns of the tile that starts at column `c` of `n`: squares, full tiles, then what is left.
    pub(super) fn columns(&self, n: usize, c: usize) -> usize {
        if c < self.amx_columns(n) { AMX_COLUMNS } else { tile_columns(self.nc, self.block, n - c) }
    }

    /// Columns of a task of packing, for `n` of them: whole tiles.
    fn task_columns(&self, n: usize) -> usize {
        if self.amx_columns(n) > 0 { AMX_COLUMNS } else { TASK_COLUMNS }
    }

    /// Parts of a block whose integers are summed.
    fn parts(&self) -> usize {
        match self.sums {
            Sums::Pairs(of) => self.block / of,
            Sums::No | Sums::Whole => self.zero_point_terms.max(1),
        }
    }

    /// Words before the groups, of one column.
    pub(super) fn head(&self) -> usize {
        1 + self.zero_point_terms
            + match self.sums {
                Sums::No => 0,
                Sums::Whole => 1,
                Sums::Pairs(of) => self.block / of / 2,
            }
    }

    /// The fields for which a tile of `nc` columns is, if it is for such.
    fn fields(&self, nc: usize) -> Option<&'static I16Fields> {
        if nc == 1 { I16Fields::of(self.fields) } else { None }
    }

    /// Words of the record of one block and column in a tile of `nc` columns.
    pub(super) fn record(&self, nc: usize) -> usize {
        match self.fields(nc) {
            Some(f) => self.head() + self.block / f.len * f.words(),
            None => self.words,
        }
    }

    /// Where column `c` of `n` packed columns of `k` elements begins, or the tile that it is the first of. Those alone
    /// come last.
    pub(super) fn start(&self, n: usize, k: usize, c: usize) -> usize {
        let several = c.min(n - self.alone_of(n));
        k / self.block * (several * self.words + (c - several) * self.record(1))
    }

    /// Words of `n` packed columns of `k` elements.
    pub fn len_words(&self, n: usize, k: usize) -> usize {
        self.start(n, k, n)
    }

    /// Of `n` columns, those that are alone in their tiles and have records of their own kind.
    fn alone_of(&self, n: usize) -> usize {
        match self.block {
            _ if self.fields == 0 => 0,
            256 => n % self.nc % 2,
            _ => n % self.nc,
        }
    }
}

fn kind(dtype: Dtype, encoding: fn(u32) -> ActEncoding, nc: [usize; 3]) -> Option<ActLayout> {
    assert!(nc.iter().all(|&nc| TASK_COLUMNS.is_multiple_of(nc)), "tiles never cross the tasks that pack them");
    let of = |bits, offset, zero_point_terms, sums, nc| ActLayout {
        block: 32,
        encoding: encoding(bits),
        zero_point_terms,
        offset,
        sums,
        nc,
        amx: false,
        words: 0,
        fields: if HAS_I16_FIELDS && encoding(bits) == ActEncoding::I16 { bits } else { 0 },
    };
    let block = PanelLayout::of(dtype)?.block_len();
    let kind = match PanelLayout::of(dtype)? {
        PanelLayout::Float => return None,
        PanelLayout::Blocks32(f) if f.words == 8 => of(8, 128, 1, Sums::No, nc[1]),
        PanelLayout::Blocks32(f) => {
            let (bits, offset) = if f.high.is_some() { (5, 16) } else { (4, 8) };
            if f.m { of(bits, 0, 0, Sums::Whole, nc[0]) } else { of(bits, offset, 1, Sums::No, nc[0]) }
        }
        PanelLayout::SuperMin { five } => of(4 + u32::from(five), 0, 0, Sums::Pairs(32), nc[2]),
        PanelLayout::SuperSigned => of(6, 32, 16, Sums::No, nc[2]),
        PanelLayout::Codes(f) if f.is_super() => {
            of(8, 128, 16, if f.has_min() { Sums::Pairs(16) } else { Sums::No }, nc[2])
        }
        PanelLayout::Codes(f) => of(8, 128, f.parts, Sums::No, nc[1]),
    };
    let kind = ActLayout { block, ..kind };
    Some(ActLayout { words: kind.head() + block / 4 * kind.encoding.words(), ..kind })
}

/// The columns of the tile that starts with `left` columns to go, where there are no squares; for blocks of that length.
pub(super) const fn tile_columns(nc: usize, block: usize, left: usize) -> usize {
    match left {
        _ if left >= nc => nc,
        2.. if FEW_TILES && block == 256 => 2,
        _ if FEW_TILES => 1,
        _ => left,
    }
}

/// Words that `n` columns of `k` elements take, at most: two and a half of group and head per four elements, and one more
/// of a column alone, as all may be where experts have one each.
pub fn most_words(n: usize, k: usize) -> usize {
    n.saturating_mul(k * if HAS_I16_FIELDS { 7 } else { 5 } / 8 + 32)
}

/// Columns packed for one kind of matrix.
#[derive(Clone, Copy)]
pub struct PackedActs<'a> {
    /// The form of the records.
    pub kind: ActLayout,
    /// Number of columns (tokens).
    pub n: usize,
    /// Elements of a column.
    pub k: usize,
    /// The records, `kind.len_words(n, k)` words.
    pub words: &'a [u32],
}

/// Rows of floats, `stride` apart, of which the first elements are columns of a product.
#[derive(Clone, Copy)]
pub struct Floats<'a> {
    /// (n, stride)
    pub x: &'a [f32],
    /// Floats from one row to the next, the columns' elements at least.
    pub stride: usize,
}

impl<'a> Floats<'a> {
    /// Number of rows.
    pub fn n(&self) -> usize {
        self.x.len() / self.stride
    }

    /// Rows from `first` to `end`.
    pub(super) fn rows(&self, first: usize, end: usize) -> Floats<'a> {
        Floats { x: &self.x[first * self.stride..end * self.stride], ..*self }
    }
}

/// Columns of a task: whole tiles of every kind.
pub const TASK_COLUMNS: usize = 12;

/// Quantises and packs columns of `k` elements, in parallel. `words` is at least `kind.len_words(n, k)` long.
pub fn pack<'w>(
    cpu: Cpu,
    pool: &dyn Pool,
    kind: ActLayout,
    x: Floats<'_>,
    k: usize,
    words: &'w mut [u32],
) -> PackedActs<'w> {
    let n = x.n();
    let words = &mut words[..kind.len_words(n, k)];
    let tiles = |mut c: usize, mut left: &mut [u32]| {
        while !left.is_empty() {
            let nc = kind.columns(n, c);
            let (out, rest) = left.split_at_mut(nc * kind.record(nc) * (k / kind.block));
            cpu.run(PackTile { kind, x: x.rows(c, c + nc), k, nc, out });
            (c, left) = (c + nc, rest);
        }
    };
    let several = n - kind.alone_of(n);
    let (of_several, alone) = words.split_at_mut(kind.start(n, k, several));
    let columns = kind.task_columns(n);
    let chunk = columns * kind.words * (k / kind.block);
    tasks::chunks(few(pool, n), of_several, chunk, &|i, words, _| tiles(i * columns, words));
    tiles(several, alone);
    PackedActs { kind, n, k, words }
}

/// A few rows are not worth waking the other threads for.
pub fn few(pool: &dyn Pool, n: usize) -> &dyn Pool {
    if n <= TASK_COLUMNS { &Inline } else { pool }
}

struct PackTile<'a> {
    kind: ActLayout,
    x: Floats<'a>,
    k: usize,
    nc: usize,
    out: &'a mut [u32],
}

impl Op for PackTile<'_> {
    type Out = ();
    const DOTS: bool = true;

    fn scalar(self) {
        self.pack(|x, q, sums| {
            let d = quantise(x, q);
            for (q, sum) in q.chunks(q.len() / sums.all.len()).zip(sums.all) {
                *sum = q.iter().map(|&q| i32::from(q)).sum();
            }
            d
        });
    }

    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        // widths below 8 share a recipe; each is compiled alone
        let encoding = if self.kind.encoding == S::act_encoding(8) { S::act_encoding(8) } else { S::act_encoding(4) };
        PackTile { kind: ActLayout { encoding, ..self.kind }, ..self }.pack(
            #[inline(always)]
            |x, q, sums| quantise_and_sum(s, encoding, x, q, sums),
        );
    }
}

impl PackTile<'_> {
    #[inline(always)]
    fn pack(self, quantise: impl Fn(&[f32], &mut [i8], PartSums<'_>) -> f32) {
        match (self.kind.block, self.kind.parts()) {
            (32, 1) => self.pack_blocks::<32, 1>(32, 1, quantise),
            (block, parts) if FEW_TILES => self.pack_blocks::<256, 16>(block, parts, quantise),
            (32, _) => self.pack_blocks::<32, 2>(32, 2, quantise),
            (_, 8) => self.pack_blocks::<256, 8>(256, 8, quantise),
            _ => self.pack_blocks::<256, 16>(256, 16, quantise),
        }
    }

    #[inline(always)]
    fn pack_blocks<const BLOCK: usize, const MOST: usize>(
        self,
        block: usize,
        parts: usize,
        quantise: impl Fn(&[f32], &mut [i8], PartSums<'_>) -> f32,
    ) {
        let (mut q, mut all, mut some) = ([0i8; BLOCK], [0i32; MOST], [0i32; MOST]);
        let (q, all) = (&mut q[..block], &mut all[..parts]);
        let some = match self.kind.encoding {
            ActEncoding::I8 => &mut [],
            ActEncoding::I16 if self.kind.fields(self.nc).is_none() => &mut [],
            _ => &mut some[..parts],
        };
        let words = self.kind.record(self.nc) * self.nc;
        for (c, row) in self.x.x.chunks_exact(self.x.stride).enumerate() {
            for (x, out) in row[..self.k].chunks_exact(block).zip(self.out.chunks_exact_mut(words)) {
                let d = quantise(x, q, PartSums { all, some });
                // through memory: in registers, the compiler would take vectors apart byte by byte
                core::hint::black_box(&mut *q);
                write_record(self.kind, q, PartSums { all, some }, d, self.nc, c, out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Together, and one by one, as where each has an expert of its own.
    #[test]
    fn columns_fit_in_most_words() {
        for (cpu, dtype) in Cpu::available().into_iter().flat_map(|cpu| Dtype::SUPPORTED.map(|dtype| (cpu, dtype))) {
            let Some(kind) = ActLayout::of(cpu, dtype) else { continue };
            for (n, blocks) in (1..60).flat_map(|n| [1, 2, 3, 40].map(|blocks| (n, blocks))) {
                let k = blocks * kind.block;
                let most = most_words(n, k);
                assert!(kind.len_words(n, k) <= most, "{dtype:?}, {n} columns of {k} together");
                assert!(n * kind.len_words(1, k) <= most, "{dtype:?}, {n} columns of {k} one by one");
            }
        }
    }
}
