//! Attention over the keys of two layers of the KV pages with one softmax: each gives a partial result, and these are merged
//! in order, as those of chunks are, then the sink.

use alloc::vec::Vec;

use super::block::{AttentionBlock, BlockOutput};
use super::softmax_state::{PartRows, combine};
use super::{AttendScratch, Attention, MAX_COLUMNS};
use crate::kernels::{Cpu, SharedOut, tasks};
use crate::pool::Pool;

/// Computes `out`, (rows, n_head * value_dim), from the keys and values that one of the two parts attends to. They have the
/// same heads, queries and spans; the sinks are those of the first. A row of the second part may attend to nothing.
///
/// # Panics
/// If the parts differ, or spans are outside a buffer.
pub fn attend_jointly(
    parts: &[Attention<'_>; 2],
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
    let mut all_tasks = Vec::new();
    for (i, span) in of.spans.iter().enumerate() {
        assert!((span.row + span.n) * width <= out.len());
        for head in 0..kv.heads.n {
            for heads in of.query_heads(head) {
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
        results.resize((parts.len() * MAX_COLUMNS * len).max(results.len()), 0.0);
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
