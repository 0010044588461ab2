//! Attention over the keys of two layers of the KV pages with one softmax: each gives a partial result, and these are merged
//! in order, as those of chunks are, then the sink.
#![allow(unsafe_code)]

use alloc::vec::Vec;

use super::block::{AttentionBlock, BlockOutput};
use super::softmax_state::{PartRows, combine};
use super::{AttendScratch, Attention, FEW_ROWS, MAX_COLUMNS};
use crate::kernels::{Cpu, SharedOut, tasks};
use crate::pool::Pool;

/// Number of layers that share a softmax.
pub(super) const JOINT_PARTS: usize = 2;

/// Computes `out`, (rows, n_head * value_dim), from the keys and values that one of the two parts attends to. They have the
/// same heads, queries and spans; the sinks are those of the first. A row of the second part may attend to nothing.
///
/// # Panics
/// If the parts differ, spans overlap or are outside a buffer, or the scratch memory is for layers without compressed keys.
pub fn attend_jointly(
    parts: &[Attention<'_>; JOINT_PARTS],
    cpu: Cpu,
    pool: &dyn Pool,
    out: &mut [f32],
    scratch: &mut [AttendScratch],
) {
    let [of, other] = parts;
    assert!(of.kv.heads == other.kv.heads && of.n_head == other.n_head && of.kv.kv_type == other.kv.kv_type);
    assert!(of.spans.len() == other.spans.len());
    let (kv, d, len) = (&of.kv, of.kv.heads.value_dim, of.kv.part_len());
    let (width, group) = (of.n_head * d, of.n_head / kv.heads.n);
    let block = (MAX_COLUMNS / group).max(1);
    // a few rows keep all threads busy with some heads each
    let is_few = of.spans.iter().map(|span| span.n).sum::<usize>() <= FEW_ROWS;
    let columns = if is_few { group.div_ceil(pool.threads()).clamp(1, MAX_COLUMNS) } else { MAX_COLUMNS };
    let (mut all_tasks, mut end) = (Vec::new(), 0);
    for (i, span) in of.spans.iter().enumerate() {
        assert!(span.row >= end && (span.row + span.n) * width <= out.len());
        end = span.row + span.n;
        for head in 0..kv.heads.n {
            let last = (head + 1) * group;
            for first in (head * group..last).step_by(columns) {
                let heads = first..last.min(first + columns);
                let tokens = (0..span.n).step_by(block);
                all_tasks.extend(tokens.map(|token| (i, head, heads.clone(), token..span.n.min(token + block))));
            }
        }
    }
    all_tasks.reverse();
    let rows = SharedOut::new(out);
    tasks::with_state(pool, all_tasks.len(), scratch, &|i, scratch| {
        let (span, head, heads, tokens) = &all_tasks[i];
        let span = &of.spans[*span];
        let columns = heads.len() * tokens.len();
        let mut results = core::mem::take(&mut scratch.joint);
        assert!(results.len() >= JOINT_PARTS * columns * len, "scratch made for layers without compressed keys");
        let shared = SharedOut::new(&mut results);
        for (part, of) in parts.iter().enumerate() {
            let block = AttentionBlock {
                of,
                head: *head,
                query_heads: heads.clone(),
                span,
                row: span.row + tokens.start,
                tokens: tokens.len(),
                pos: span.pos + tokens.start,
                chunks: of.chunks(span, tokens.start, tokens.len()),
            };
            block.run(cpu, BlockOutput::Part { out: shared, at: part * columns * len }, scratch);
        }
        for column in 0..columns {
            let (token, head) = (tokens.start + column / heads.len(), heads.start + column % heads.len());
            let sink = of.sinks.map(|sinks| sinks[head]);
            // SAFETY: a task owns the elements of its tokens and query heads.
            let out = unsafe { rows.slice((span.row + token) * width + head * d, d) };
            let part = PartRows { parts: &results[column * len..], stride: columns * len, n_chunks: parts.len(), sink };
            combine(cpu, kv, part, out);
        }
        scratch.joint = results;
    });
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::super::{
        AttentionWindow, KvHeads, KvLayout, KvMemory, KvRows, KvType, PAGE, SelectionScratch, Slot, Span, write_kv,
    };
    use super::*;
    use crate::kernels::tests::{Rng, Scoped};
    use crate::pool::Inline;

    const DIM: usize = 32;
    const WINDOW: usize = 21;
    /// Positions whose keys of the second layer are attended to.
    const EVERY: usize = 20;

    struct Case {
        kv_type: KvType,
        n_head: usize,
        all: usize,
        /// (all, 2, DIM): keys of both layers.
        keys: Vec<f32>,
        /// (all, n_head, DIM)
        queries: Vec<f32>,
        sinks: Vec<f32>,
    }

    impl Case {
        /// Outputs of all rows, computed in batches of `batch`.
        fn run(&self, cpu: Cpu, pool: &dyn Pool, batch: usize) -> Vec<f32> {
            let heads = KvHeads::latent(DIM, DIM);
            let layout = KvLayout::new(self.kv_type, [heads, heads, KvHeads::exact(2, DIM)]);
            let pages: Vec<u32> = (0..self.all.div_ceil(PAGE) as u32).rev().collect();
            let mut memory = KvMemory::zeroed(&layout, pages.len()).expect("memory");
            let mut scratch: Vec<_> = (0..pool.threads()).map(|_| AttendScratch::new(layout.layers())).collect();
            let mut all = Vec::new();
            for pos in (0..self.all).step_by(batch) {
                let n = batch.min(self.all - pos);
                let place = |pos: usize| Slot { page: pages[pos / PAGE], token: (pos % PAGE) as u32 };
                let slots: Vec<Slot> = (pos..pos + n).map(place).collect();
                for (i, kv) in layout.layers()[..2].iter().enumerate() {
                    let x = &self.keys[pos * 2 * DIM..(pos + n) * 2 * DIM];
                    let rows = KvRows { x, stride: 2 * DIM, k_at: i * DIM, v_at: 0, slots: &slots };
                    write_kv(cpu, pool, kv, rows, &mut memory);
                }
                let n_pages = self.all.div_ceil(PAGE);
                let mut words = vec![0u16; n * n_pages];
                for (row, words) in words.chunks_exact_mut(n_pages).enumerate() {
                    for t in (0..=pos + row).filter(|t| (t + 1).is_multiple_of(EVERY)) {
                        words[t / PAGE] |= 1 << (t % PAGE);
                    }
                }
                let selection = SelectionScratch { lists: 1, n_ctx: self.all, scores: vec![], blocks: vec![], words };
                let span = Span { row: 0, n, pos, pages: &pages };
                let of_window = Attention {
                    kv: layout.layers()[0],
                    memory: &memory,
                    n_head: self.n_head,
                    window: AttentionWindow { left: WINDOW - 1, right: 0, chunk: usize::MAX },
                    soft_cap: None,
                    alibi: None,
                    bias: None,
                    sinks: Some(&self.sinks),
                    selected: None,
                    q: &self.queries[pos * self.n_head * DIM..],
                    q_stride: self.n_head * DIM,
                    spans: &[span],
                };
                let window = AttentionWindow::CAUSAL;
                let selected = Some(selection.selected());
                let parts = [of_window, Attention { kv: layout.layers()[1], window, selected, ..of_window }];
                let mut out = vec![f32::NAN; n * self.n_head * DIM];
                attend_jointly(&parts, cpu, pool, &mut out, &mut scratch);
                all.extend(out);
            }
            all
        }

        /// The output of a head in f64.
        fn head(&self, pos: usize, head: usize) -> Vec<f64> {
            let key = |t: usize, layer: usize| &self.keys[(t * 2 + layer) * DIM..][..DIM];
            let near = (pos.saturating_sub(WINDOW - 1)..=pos).map(|t| key(t, 0));
            let blocks = (0..=pos).filter(|t| (t + 1).is_multiple_of(EVERY)).map(|t| key(t, 1));
            let keys: Vec<&[f32]> = near.chain(blocks).collect();
            let q = &self.queries[(pos * self.n_head + head) * DIM..][..DIM];
            let dot = |k: &&[f32]| k.iter().zip(q).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum::<f64>().exp();
            let weights: Vec<f64> = keys.iter().map(dot).collect();
            let sum = weights.iter().sum::<f64>() + f64::from(self.sinks[head]).exp();
            let output = |d: usize| keys.iter().zip(&weights).map(|(k, w)| w * f64::from(k[d])).sum::<f64>() / sum;
            (0..DIM).map(output).collect()
        }
    }

    /// One softmax over both layers and the sink, with the same bits however rows are batched.
    #[test]
    fn both_layers_share_a_softmax() {
        for (kv_type, n_head) in KvType::ALL.into_iter().zip([3, 8, 40, 33]) {
            let (all, mut rng) = (300, Rng(n_head as u64));
            // multiples of 1/16 below 1: exact in f16
            let mut numbers =
                |n: usize| -> Vec<f32> { (0..n).map(|_| (rng.next() % 31) as f32 / 16.0 - 15.0 / 16.0).collect() };
            let (keys, queries, sinks) = (numbers(all * 2 * DIM), numbers(all * n_head * DIM), numbers(n_head));
            let case = Case { kv_type, n_head, all, keys, queries, sinks };
            let out = case.run(Cpu::SCALAR, &Inline, all);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            for cpu in Cpu::available() {
                for batch in [all, 1, 37] {
                    assert_eq!(bits(&out), bits(&case.run(cpu, &Scoped(2), batch)), "{kv_type:?}, batches of {batch}");
                }
            }
            let tolerance = if kv_type == KvType::K8 || kv_type == KvType::Q8 { 0.1 } else { 2e-3 };
            for (pos, out) in out.chunks_exact(n_head * DIM).enumerate().step_by(7) {
                for (head, out) in out.chunks_exact(DIM).enumerate() {
                    for (got, want) in out.iter().zip(case.head(pos, head)) {
                        assert!((f64::from(*got) - want).abs() < tolerance, "{got} instead of {want} at {pos}");
                    }
                }
            }
        }
    }
}
