//! Activations for quantised products: quantised to 8 bits in blocks and packed in tiles of columns.
//!
//! ```text
//! amax = max |x_i| of the block
//! q = 0, d = 0                                   if amax < 1e-30 or amax is not finite
//! q_i = rne(x_i * (127 / amax)), d = amax * (1/127)   otherwise
//! ```
//!
//! A tile holds `nc` columns, as a record of 32-bit words per block, column fastest: `[d x nc][zero-point terms x
//! nc][sums x nc][groups of four x nc x words]`. A zero-point term is the start of a dot accumulator, minus the zero
//! point times the sum of the activations, for weights that are stored with an offset; a record has one per scale of
//! the weights. Sums of the activations are for weights with minima, one per block or in i16 pairs. In builds with i16
//! fields, the record of a tile of one column has factors in place of the groups, and zero-point terms that are i16
//! pairs.
//!
//! An AMX tile holds 16 columns. Each column contributes 32 or 64 consecutive bytes: `[32 or 64 bytes x 16]` of the
//! first elements, then of the next.

mod quantise;
mod record;

use self::quantise::{PartSums, quantise_and_sum};
pub(in crate::kernels) use self::quantise::{quantise, quantise_lanes};
use self::record::write_record;
pub(in crate::kernels) use self::record::{read_block, write_groups, zero_point_term_of_bytes};
use crate::kernels::cpu::{Isa, Op};
use crate::kernels::i16_fields::{HAS_I16_FIELDS, I16Fields};
use crate::kernels::panel_layout::PanelLayout;
use crate::kernels::simd::{ActEncoding, FEW_TILES, Simd};
use crate::kernels::{Cpu, tasks};
use crate::pool::{Inline, Pool};
use crate::quant::Dtype;

/// The packed layout of activations that a quantised product needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActLayout {
    /// Elements of a block.
    pub(in crate::kernels) block: usize,
    /// Encoding of a group.
    pub(in crate::kernels) encoding: ActEncoding,
    /// Number of zero-point terms of a block: 0, 1, 2 or 16, each for an equal part of it.
    zero_point_terms: usize,
    /// Offset (zero point) of the stored weights.
    offset: i32,
    sums: Sums,
    /// Columns of a full tile.
    pub(in crate::kernels) nc: usize,
    /// Whether 16 columns are packed as an AMX tile, if there are enough of them.
    amx: bool,
    /// Words of the record of one block and column.
    pub(in crate::kernels) words: usize,
    /// Bits of the weights if they are in i16 fields and a tile of one column has factors for them; otherwise 0.
    fields: u32,
}

/// Columns of an AMX tile.
pub(in crate::kernels) const AMX_COLUMNS: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sums {
    None,
    /// The sum of all q of a block.
    Block,
    /// Sums of that many consecutive q each, in i16 pairs.
    Pairs(usize),
}

impl ActLayout {
    /// The layout that `cpu` needs for weights of that type; `None` for float weights, whose activations stay f32.
    pub fn of(cpu: Cpu, dtype: Dtype) -> Option<ActLayout> {
        struct Of(Dtype);
        impl Op for Of {
            type Out = Option<ActLayout>;
            const DOTS: bool = true;
            fn scalar(self) -> Self::Out {
                act_layout(self.0, |_| ActEncoding::I8, [1, 1, 1])
            }
            #[inline(always)]
            fn simd<S: Simd>(self, _: S) -> Self::Out {
                act_layout(self.0, S::act_encoding, [S::TILE4.nc, S::TILE8.nc, S::TILE_K.nc])
            }
        }
        let layout = cpu.run(Of(dtype))?;
        Some(ActLayout { amx: cpu.isa() == Isa::Amx && PanelLayout::of(dtype)?.fits_amx(), ..layout })
    }

    /// False at compile time on targets without AMX, which removes the code that depends on it.
    fn uses_amx(&self) -> bool {
        cfg!(target_arch = "x86_64") && self.amx
    }

    /// How many of `n` columns are in AMX tiles: the largest multiple of 16, if there are enough columns to pay for
    /// unpacking the weights.
    pub(in crate::kernels) fn amx_columns(&self, n: usize) -> usize {
        if self.uses_amx() && n >= 2 * AMX_COLUMNS { n / AMX_COLUMNS * AMX_COLUMNS } else { 0 }
    }

    /// Columns of the tile that starts at column `c` of `n`: AMX tiles first, then full tiles, then the rest.
    pub(in crate::kernels) fn columns(&self, n: usize, c: usize) -> usize {
        if c < self.amx_columns(n) { AMX_COLUMNS } else { tile_columns(self.nc, self.block, n - c) }
    }

    /// Columns that one packing task takes, of `n`: whole tiles.
    fn task_columns(&self, n: usize) -> usize {
        if self.amx_columns(n) > 0 { AMX_COLUMNS } else { TASK_COLUMNS }
    }

    /// Number of equal parts of a block whose q are summed.
    fn parts(&self) -> usize {
        match self.sums {
            Sums::Pairs(of) => self.block / of,
            Sums::None | Sums::Block => self.zero_point_terms.max(1),
        }
    }

    /// Words of one column before the groups.
    pub(in crate::kernels) fn head(&self) -> usize {
        1 + self.zero_point_terms
            + match self.sums {
                Sums::None => 0,
                Sums::Block => 1,
                Sums::Pairs(of) => self.block / of / 2,
            }
    }

    /// The i16 fields whose factors a tile of `nc` columns has, if any.
    fn fields(&self, nc: usize) -> Option<&'static I16Fields> {
        if nc == 1 { I16Fields::of(self.fields) } else { None }
    }

    /// Words of the record of one block and column, in a tile of `nc` columns.
    pub(in crate::kernels) fn record(&self, nc: usize) -> usize {
        match self.fields(nc) {
            Some(f) => self.head() + self.block / f.len * f.words(),
            None => self.words,
        }
    }

    /// Index of the first word of column `c` of `n`, which is the first one of a tile. Tiles of one column with records
    /// of their own layout come last.
    pub(in crate::kernels) fn start(&self, n: usize, k: usize, c: usize) -> usize {
        let several = c.min(n - self.single_columns(n));
        k / self.block * (several * self.words + (c - several) * self.record(1))
    }

    /// Number of words of `n` packed columns of `k` elements.
    pub fn len_words(&self, n: usize, k: usize) -> usize {
        self.start(n, k, n)
    }

    /// How many of `n` columns are in tiles of one column that have factors of i16 fields.
    fn single_columns(&self, n: usize) -> usize {
        match self.block {
            _ if self.fields == 0 => 0,
            256 => n % self.nc % 2,
            _ => n % self.nc,
        }
    }
}

fn act_layout(dtype: Dtype, encoding: fn(u32) -> ActEncoding, nc: [usize; 3]) -> Option<ActLayout> {
    assert!(nc.iter().all(|&nc| TASK_COLUMNS.is_multiple_of(nc)), "tiles must not cross packing tasks");
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
    let layout = match PanelLayout::of(dtype)? {
        PanelLayout::Float => return None,
        PanelLayout::Blocks32(f) if f.words == 8 => of(8, 128, 1, Sums::None, nc[1]),
        PanelLayout::Blocks32(f) => {
            let (bits, offset) = if f.high.is_some() { (5, 16) } else { (4, 8) };
            if f.m { of(bits, 0, 0, Sums::Block, nc[0]) } else { of(bits, offset, 1, Sums::None, nc[0]) }
        }
        PanelLayout::SuperMin { five } => of(4 + u32::from(five), 0, 0, Sums::Pairs(32), nc[2]),
        PanelLayout::SuperSigned => of(6, 32, 16, Sums::None, nc[2]),
        PanelLayout::Codes(f) if f.is_super() => {
            of(8, 128, 16, if f.has_min() { Sums::Pairs(16) } else { Sums::None }, nc[2])
        }
        PanelLayout::Codes(f) => of(8, 128, f.parts, Sums::None, nc[1]),
    };
    let layout = ActLayout { block, ..layout };
    Some(ActLayout { words: layout.head() + block / 4 * layout.encoding.words(), ..layout })
}

/// Columns of the tile that starts with `left` columns to go, outside of AMX tiles, for blocks of length `block`.
pub(in crate::kernels) const fn tile_columns(nc: usize, block: usize, left: usize) -> usize {
    match left {
        _ if left >= nc => nc,
        2.. if FEW_TILES && block == 256 => 2,
        _ if FEW_TILES => 1,
        _ => left,
    }
}

/// Upper bound of the words of `n` columns of `k` elements for any type: two and a half per four elements, for groups
/// and head, and one more with i16 fields, where all columns may be in tiles of one (a column per expert).
pub fn max_words(n: usize, k: usize) -> usize {
    n.saturating_mul(k * if HAS_I16_FIELDS { 7 } else { 5 } / 8 + 32)
}

/// Columns packed for a type of weights.
#[derive(Clone, Copy)]
pub struct PackedActs<'a> {
    /// The layout of the records.
    pub layout: ActLayout,
    /// Number of columns (tokens).
    pub n: usize,
    /// Elements of a column.
    pub k: usize,
    /// The records: `layout.len_words(n, k)` words.
    pub words: &'a [u32],
}

/// Rows of f32, `stride` apart; the first elements of each row are a column of a product.
#[derive(Clone, Copy)]
pub struct Floats<'a> {
    /// (n, stride); the last row may end after its column.
    pub x: &'a [f32],
    /// Floats from one row to the next, at least the elements of a column.
    pub stride: usize,
}

impl<'a> Floats<'a> {
    /// Number of rows.
    pub fn n(&self) -> usize {
        self.x.len().div_ceil(self.stride)
    }

    pub(in crate::kernels) fn rows(&self, first: usize, end: usize) -> Floats<'a> {
        Floats { x: &self.x[first * self.stride..self.x.len().min(end * self.stride)], ..*self }
    }
}

/// Columns that one packing task takes: a multiple of the tile widths of all instruction sets.
pub const TASK_COLUMNS: usize = 12;

/// Quantises and packs columns of `k` elements, in parallel. `words` must have at least `layout.len_words(n, k)` words.
pub fn pack<'w>(
    cpu: Cpu,
    pool: &dyn Pool,
    layout: ActLayout,
    x: Floats<'_>,
    k: usize,
    words: &'w mut [u32],
) -> PackedActs<'w> {
    let n = x.n();
    let words = &mut words[..layout.len_words(n, k)];
    let tiles = |mut c: usize, mut left: &mut [u32]| {
        while !left.is_empty() {
            let nc = layout.columns(n, c);
            let (out, rest) = left.split_at_mut(nc * layout.record(nc) * (k / layout.block));
            cpu.run(PackTile { layout, x: x.rows(c, c + nc), k, nc, out });
            (c, left) = (c + nc, rest);
        }
    };
    let several = n - layout.single_columns(n);
    let (of_several, alone) = words.split_at_mut(layout.start(n, k, several));
    let columns = layout.task_columns(n);
    let chunk = columns * layout.words * (k / layout.block);
    tasks::chunks(pool_for_rows(pool, n), of_several, chunk, &|i, words, _| tiles(i * columns, words));
    tiles(several, alone);
    PackedActs { layout, n, k, words }
}

/// The pool for `n` rows: waking other threads costs more than packing a few rows.
pub fn pool_for_rows(pool: &dyn Pool, n: usize) -> &dyn Pool {
    if n <= TASK_COLUMNS { &Inline } else { pool }
}

struct PackTile<'a> {
    layout: ActLayout,
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
        // widths below 8 share an encoding; each encoding is compiled separately
        let encoding = if self.layout.encoding == S::act_encoding(8) { S::act_encoding(8) } else { S::act_encoding(4) };
        PackTile { layout: ActLayout { encoding, ..self.layout }, ..self }.pack(
            #[inline(always)]
            |x, q, sums| quantise_and_sum(s, encoding, x, q, sums),
        );
    }
}

impl PackTile<'_> {
    #[inline(always)]
    fn pack(self, quantise: impl Fn(&[f32], &mut [i8], PartSums<'_>) -> f32) {
        match (self.layout.block, self.layout.parts()) {
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
        let (mut q, mut all, mut subset) = ([0i8; BLOCK], [0i32; MOST], [0i32; MOST]);
        let (q, all) = (&mut q[..block], &mut all[..parts]);
        let subset = match self.layout.encoding {
            ActEncoding::I8 => &mut [],
            ActEncoding::I16 if self.layout.fields(self.nc).is_none() => &mut [],
            _ => &mut subset[..parts],
        };
        let words = self.layout.record(self.nc) * self.nc;
        for (c, row) in self.x.x.chunks(self.x.stride).enumerate() {
            for (x, out) in row[..self.k].chunks_exact(block).zip(self.out.chunks_exact_mut(words)) {
                let d = quantise(x, q, PartSums { all, subset });
                // through memory: in registers the compiler would take vectors apart byte by byte
                core::hint::black_box(&mut *q);
                write_record(self.layout, q, PartSums { all, subset }, d, self.nc, c, out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Columns packed together, and each alone, as with one expert per token.
    #[test]
    fn columns_fit_in_max_words() {
        for (cpu, dtype) in Cpu::available().into_iter().flat_map(|cpu| Dtype::SUPPORTED.map(|dtype| (cpu, dtype))) {
            let Some(layout) = ActLayout::of(cpu, dtype) else { continue };
            for (n, blocks) in (1..60).flat_map(|n| [1, 2, 3, 40].map(|blocks| (n, blocks))) {
                let k = blocks * layout.block;
                let most = max_words(n, k);
                assert!(layout.len_words(n, k) <= most, "{dtype:?}, {n} columns of {k} together");
                assert!(n * layout.len_words(1, k) <= most, "{dtype:?}, {n} columns of {k} one by one");
            }
        }
    }
}
