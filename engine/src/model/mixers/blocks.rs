//! Keys of blocks of positions. A block's key is made of what each of its positions has in KV pages, and stands at the last one,
//! so that it depends on the tokens up to its own place only.

use super::attention::batch::AttentionBatch;
use crate::kernels::attention::{self, KvLayer, KvMemory, KvRows, Span};
use crate::kernels::elementwise::add_scaled;
use crate::model::pass::Pass;

/// Where the keys of blocks of `ratio` positions are.
#[derive(Clone, Copy)]
pub(crate) struct BlockKeys {
    /// Layer of the keys in KV pages.
    pub(crate) keys: KvLayer,
    /// Layer of what they are made of.
    pub(crate) made_of: KvLayer,
    /// Positions of a block.
    pub(crate) ratio: usize,
}

/// Computes the key of the block that ends at a position, from memory and the pages of the sequence.
pub(crate) type MakeKey<'m> = &'m (dyn Fn(&KvMemory, &[u32], usize, &mut [f32]) + Sync);

/// The span and position of a row.
fn place<'s, 'r>(spans: &'s [Span<'r>], row: usize) -> (&'s Span<'r>, usize) {
    let span = &spans[spans.partition_point(|span| span.row + span.n <= row)];
    (span, span.pos + row - span.row)
}

impl Pass<'_, '_> {
    /// Puts the gates of each row, at `gate_at`, beside its values, and adds the bias of the position in its block. `bias` is
    /// (ratio, width): values and gates have `width` elements.
    pub(crate) fn bias_gates(&self, (input, stride): (&mut [f32], usize), gate_at: usize, bias: &[f32], ratio: usize) {
        let (rows, spans, width) = (self.rows, self.spans, bias.len() / ratio);
        rows.each(input, stride, &|r, row| {
            row.copy_within(gate_at..gate_at + width, width);
            let at = place(spans, r).1 % ratio * width;
            add_scaled(rows.cpu, &mut row[width..2 * width], &bias[at..at + width], 1.0);
        });
    }

    /// Writes what keys are made of, the first elements of the rows of `input`, and then the keys of the blocks that end with
    /// these rows. `keys`, (rows, elements of a key), is zero at other positions.
    pub(crate) fn write_block_keys(
        &self,
        of: BlockKeys,
        (input, stride): (&[f32], usize),
        (keys, dim): (&mut [f32], usize),
        s: &AttentionBatch,
        memory: &mut KvMemory,
        make: MakeKey<'_>,
    ) {
        let (rows, spans) = (self.rows, self.spans);
        let kv_rows = KvRows { x: input, stride, k_at: 0, v_at: 0, slots: &s.slots };
        attention::write_kv(rows.cpu, rows.pool, &of.made_of, kv_rows, memory);
        let written = &*memory;
        rows.each(keys, dim, &|r, key| {
            let (span, pos) = place(spans, r);
            match (pos + 1).is_multiple_of(of.ratio) {
                true => make(written, span.pages, pos, key),
                false => key.fill(0.0),
            }
        });
        let kv_rows = KvRows { x: keys, stride: dim, k_at: 0, v_at: 0, slots: &s.slots };
        attention::write_kv(rows.cpu, rows.pool, &of.keys, kv_rows, memory);
    }
}
