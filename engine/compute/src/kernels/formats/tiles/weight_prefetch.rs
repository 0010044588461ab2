//! Software prefetch of the weights that a product of several columns reads next. The hardware prefetcher sees a stream
//! only once it is read, so without this every group of rows would start with cache misses.

use core::ops::Range;

use crate::kernels::panel::{Matrix, PANEL};
use crate::kernels::simd::Simd;

/// A range of weights, prefetched line by line.
#[derive(Clone)]
pub(in crate::kernels) struct WeightPrefetch {
    lines: Range<*const u8>,
    /// Bytes to prefetch per 32 elements that the tile computes.
    step: usize,
}

impl WeightPrefetch {
    const LINE: usize = 64;

    pub(in crate::kernels) const NONE: WeightPrefetch =
        WeightPrefetch { lines: core::ptr::null()..core::ptr::null(), step: 0 };

    /// Up to `rows` rows from `row` on, of a task that ends with panel `end`; at its end, `prefetch_next`.
    pub(in crate::kernels) fn rows(
        w: &Matrix,
        row: usize,
        rows: usize,
        end: usize,
        prefetch_next: &[u8],
    ) -> WeightPrefetch {
        let (first, last) = (row / PANEL, (row + rows).div_ceil(PANEL));
        let bytes = if first < end { w.panels_of(first..last.min(end)) } else { prefetch_next };
        let most = (last - first) * w.panel_bytes();
        WeightPrefetch { lines: bytes[..bytes.len().min(most)].as_ptr_range(), step: 0 }
    }

    /// The part for a tile that does `work` of `all` the work on these rows, in `chunks` chunks of 32 elements.
    #[inline(always)]
    pub(in crate::kernels) fn share<S: Simd>(
        &self,
        _: S,
        work: Range<usize>,
        all: usize,
        chunks: usize,
    ) -> WeightPrefetch {
        if S::PREFETCHES { self.part(work, all, chunks) } else { WeightPrefetch::NONE }
    }

    fn part(&self, work: Range<usize>, all: usize, chunks: usize) -> WeightPrefetch {
        let total = (self.lines.end as usize - self.lines.start as usize) / Self::LINE;
        let [start, end] = [work.start, work.end].map(|work| total * work / all);
        let at = |line: usize| self.lines.start.wrapping_add(line * Self::LINE);
        WeightPrefetch { lines: at(start)..at(end), step: (end - start).div_ceil(chunks) * Self::LINE }
    }

    /// Prefetches the lines of one chunk.
    #[inline(always)]
    pub(super) fn prefetch_chunk<S: Simd>(&mut self, s: S) {
        if !S::PREFETCHES {
            return;
        }
        let stop = self.lines.end.min(self.lines.start.wrapping_add(self.step));
        while self.lines.start < stop {
            s.prefetch(self.lines.start);
            self.lines.start = self.lines.start.wrapping_add(Self::LINE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn tiles_prefetch_each_line_once(lines in 0usize..3000, columns in prop::collection::vec(1usize..7, 1..50), chunks in 1usize..60) {
            let memory = vec![0u8; lines * WeightPrefetch::LINE];
            let next = WeightPrefetch { lines: memory.as_ptr_range(), step: 0 };
            let (all, mut done, mut at) = (columns.iter().sum::<usize>(), 0, next.lines.start);
            for nc in columns {
                let part = next.part(done..done + nc, all, chunks);
                prop_assert_eq!(part.lines.start, at);
                let bytes = part.lines.end as usize - part.lines.start as usize;
                prop_assert!(part.step * chunks >= bytes && part.step * chunks < bytes + chunks * WeightPrefetch::LINE);
                (done, at) = (done + nc, part.lines.end);
            }
            prop_assert_eq!(at, next.lines.end);
        }
    }
}
