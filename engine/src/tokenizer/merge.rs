//! The merge loop of one word, shared by byte-level BPE and SentencePiece.
//!
//! ```text
//! while two neighbours can merge:
//!     merge the pair of the lowest rank; of equal ranks, the leftmost
//! ```
//!
//! Short words scan all pairs; long words keep them in a heap, which takes O(n log n).

use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use core::cmp::Reverse;

/// Id of a symbol that is not a token and merges with nothing by id.
pub(super) const NO_TOKEN: u32 = u32::MAX;

/// A symbol of a word: its start offset and token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Symbol {
    pub(super) start: u32,
    pub(super) id: u32,
}

/// The merges of a vocabulary.
pub(super) trait Merges {
    /// Rank and token of the merge of `left` and `right`; `right` ends at byte `end`.
    fn merge(&self, word: &[u8], left: Symbol, right: Symbol, end: u32) -> Option<(u32, u32)>;
}

/// Buffers for [`merge_all`].
#[derive(Debug, Default)]
pub(super) struct MergeScratch {
    /// The symbols of the word; input and output.
    pub(super) symbols: Vec<Symbol>,
    /// Rank and merged token of symbol i and its right neighbour.
    pairs: Vec<(u32, u32)>,
    links: Vec<Link>,
    heap: BinaryHeap<Reverse<Candidate>>,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    before: u32,
    after: u32,
    /// End offset of the symbol; 0 after it was merged into its left neighbour.
    end: u32,
}

/// A possible merge; ordered by rank, then position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: u32,
    end: u32,
    right: u32,
    id: u32,
}

/// Maximal number of symbols of a word merged by scanning; beyond it the heap is faster.
const SHORT: usize = 48;
const NONE: u32 = u32::MAX;
const NO_MERGE: (u32, u32) = (u32::MAX, NO_TOKEN);

/// Merges `scratch.symbols`, which cover `word`.
#[inline]
pub(super) fn merge_all<M: Merges>(merges: &M, word: &[u8], scratch: &mut MergeScratch) {
    if scratch.symbols.len() <= SHORT { merge_short(merges, word, scratch) } else { merge_long(merges, word, scratch) }
}

fn merge_short<M: Merges>(merges: &M, word: &[u8], scratch: &mut MergeScratch) {
    let MergeScratch { symbols, pairs, .. } = scratch;
    let end_of = |symbols: &[Symbol], i: usize| symbols.get(i + 1).map_or(word.len() as u32, |next| next.start);
    let pair = |symbols: &[Symbol], i: usize| match symbols.get(i + 1) {
        Some(&right) => merges.merge(word, symbols[i], right, end_of(symbols, i + 1)).unwrap_or(NO_MERGE),
        None => NO_MERGE,
    };
    pairs.clear();
    pairs.extend((0..symbols.len()).map(|i| pair(symbols, i)));
    loop {
        let mut best = (u32::MAX, 0);
        for (i, &(rank, _)) in pairs.iter().enumerate() {
            if rank < best.0 {
                best = (rank, i);
            }
        }
        let (rank, i) = best;
        if rank == u32::MAX {
            return;
        }
        symbols[i].id = pairs[i].1;
        symbols.remove(i + 1);
        pairs.remove(i + 1);
        pairs[i] = pair(symbols, i);
        if i > 0 {
            pairs[i - 1] = pair(symbols, i - 1);
        }
    }
}

fn merge_long<M: Merges>(merges: &M, word: &[u8], scratch: &mut MergeScratch) {
    let MergeScratch { symbols, links, heap, .. } = scratch;
    let n = symbols.len();
    links.clear();
    links.extend((0..n).map(|i| Link {
        before: if i == 0 { NONE } else { i as u32 - 1 },
        after: if i + 1 == n { NONE } else { i as u32 + 1 },
        end: symbols.get(i + 1).map_or(word.len() as u32, |next| next.start),
    }));
    let candidate = |symbols: &[Symbol], links: &[Link], left: u32, right: u32| {
        let end = links[right as usize].end;
        let (rank, id) = merges.merge(word, symbols[left as usize], symbols[right as usize], end)?;
        Some(Reverse(Candidate { rank, left, end, right, id }))
    };
    let mut first: Vec<_> = core::mem::take(heap).into_vec();
    first.clear();
    first.extend((1..n as u32).filter_map(|right| candidate(symbols, links, right - 1, right)));
    *heap = BinaryHeap::from(first);
    while let Some(Reverse(top)) = heap.pop() {
        let (left, right) = (top.left as usize, top.right as usize);
        // skip candidates that are stale: no longer neighbours, or the right one has grown
        if links[left].end == 0 || links[left].after != top.right || links[right].end != top.end {
            continue;
        }
        symbols[left].id = top.id;
        let after = links[right].after;
        links[left].end = top.end;
        links[left].after = after;
        links[right].end = 0;
        if after != NONE {
            links[after as usize].before = top.left;
            heap.extend(candidate(symbols, links, top.left, after));
        }
        let before = links[left].before;
        if before != NONE {
            heap.extend(candidate(symbols, links, before, top.left));
        }
    }
    let mut i = 0;
    symbols.retain(|_| {
        i += 1;
        links[i - 1].end != 0
    });
}
