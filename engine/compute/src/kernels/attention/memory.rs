//! Memory of KV pages: segments of equally many pages, which never move.
#![allow(unsafe_code)]

use alloc::collections::TryReserveError;
use alloc::vec;
use alloc::vec::Vec;

use super::super::recurrent::StateMemory;
use super::super::{AlignedBuf, SharedOut};
use super::KvLayout;

/// Approximate bytes of a segment on WebAssembly, where reserved memory is used memory. Elsewhere all pages are in one
/// segment, which the operating system commits as it is touched.
const SEGMENT_BYTES: Option<usize> = if cfg!(target_family = "wasm") { Some(4 << 20) } else { None };

/// Mapping from pages to segments.
#[derive(Clone, Copy)]
struct PageMap {
    page_bytes: usize,
    /// A segment has `1 << shift` pages; the last one may have fewer.
    shift: u32,
}

impl PageMap {
    /// Index of the segment of a page, and offset of the page in it.
    fn locate(self, page: u32) -> (usize, usize) {
        let page = page as usize;
        (page >> self.shift, (page & ((1 << self.shift) - 1)) * self.page_bytes)
    }
}

/// Memory of the sequences: KV pages, and recurrent states.
pub struct KvMemory {
    segments: Vec<Option<AlignedBuf>>,
    map: PageMap,
    n_pages: usize,
    /// Recurrent states; no slots for a model without recurrent layers.
    pub states: StateMemory,
}

impl KvMemory {
    /// Reserves memory for `n_pages` pages of a layout. [`KvMemory::commit`] must be called before a page is used.
    ///
    /// # Errors
    /// If the memory cannot be reserved. On WebAssembly only `commit` reserves memory, and may fail.
    pub fn new(layout: &KvLayout, n_pages: usize) -> Result<KvMemory, TryReserveError> {
        let all = n_pages.checked_next_power_of_two().map_or(usize::BITS - 1, usize::trailing_zeros);
        let shift = SEGMENT_BYTES.map_or(all, |bytes| all.min((bytes / layout.page_bytes()).max(1).ilog2()));
        let mut memory = KvMemory::with_segments(layout, n_pages, shift)?;
        if SEGMENT_BYTES.is_none() {
            memory.segments = vec![Some(AlignedBuf::with_capacity(n_pages.saturating_mul(layout.page_bytes()))?)];
        }
        Ok(memory)
    }

    /// As [`KvMemory::new`], with segments of `1 << shift` pages, none of them allocated.
    pub(crate) fn with_segments(layout: &KvLayout, n_pages: usize, shift: u32) -> Result<KvMemory, TryReserveError> {
        let n = n_pages.div_ceil(1 << shift);
        let mut segments = Vec::new();
        segments.try_reserve_exact(n)?;
        segments.resize_with(n, || None);
        let map = PageMap { page_bytes: layout.page_bytes(), shift };
        Ok(KvMemory { segments, map, n_pages, states: StateMemory::default() })
    }

    /// Memory of `n_pages` pages, all committed and zero.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn zeroed(layout: &KvLayout, n_pages: usize) -> Result<KvMemory, TryReserveError> {
        let mut memory = KvMemory::new(layout, n_pages)?;
        (0..n_pages as u32).try_for_each(|page| memory.commit(page))?;
        Ok(memory)
    }

    /// Commits a page; a new one is zero.
    ///
    /// # Errors
    /// If there is not enough memory.
    ///
    /// # Panics
    /// If the memory was made for fewer pages.
    pub fn commit(&mut self, page: u32) -> Result<(), TryReserveError> {
        let PageMap { page_bytes, shift } = self.map;
        let (i, at) = self.map.locate(page);
        let segment = match &mut self.segments[i] {
            Some(segment) => segment,
            none => {
                let n_pages = (self.n_pages - (i << shift)).min(1 << shift);
                none.insert(AlignedBuf::with_capacity(n_pages.saturating_mul(page_bytes))?)
            }
        };
        segment.grow(at + page_bytes);
        Ok(())
    }

    /// Bytes of committed pages.
    pub fn committed_bytes(&self) -> usize {
        self.segments.iter().flatten().map(AlignedBuf::len).sum()
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.map.page_bytes
    }

    /// The contents of a page.
    ///
    /// # Panics
    /// If the page is not committed.
    pub fn page(&self, page: u32) -> &[u8] {
        let (segment, at) = self.map.locate(page);
        let segment = self.segments[segment].as_ref().map_or(Default::default(), AlignedBuf::bytes);
        &segment[at..at + self.page_bytes()]
    }

    /// The contents of a page, for writing.
    ///
    /// # Panics
    /// If the page is not committed.
    pub fn page_mut(&mut self, page: u32) -> &mut [u8] {
        let ((segment, at), n) = (self.map.locate(page), self.page_bytes());
        let segment = self.segments[segment].as_mut().map_or(Default::default(), AlignedBuf::bytes_mut);
        &mut segment[at..at + n]
    }

    /// Copies one page to another.
    ///
    /// # Panics
    /// If one of them is not committed.
    pub fn copy(&mut self, from: u32, to: u32) {
        let page = self.page(from).to_vec();
        self.page_mut(to).copy_from_slice(&page);
    }

    /// All pages, for the tasks of one operation to write.
    pub(super) fn shared(&mut self) -> SharedPages<'_> {
        let segments = self.segments.iter_mut();
        let segments = segments.map(|p| SharedOut::new(p.as_mut().map_or(Default::default(), AlignedBuf::bytes_mut)));
        SharedPages { segments: segments.collect(), map: self.map }
    }
}

/// Pages that tasks write in disjoint parts.
pub(super) struct SharedPages<'a> {
    segments: Vec<SharedOut<'a, u8>>,
    map: PageMap,
}

impl<'a> SharedPages<'a> {
    /// Bytes `at..at + n` of a page, for writing.
    ///
    /// # Safety
    /// The range must not overlap another one that is in use.
    ///
    /// # Panics
    /// If the range is not inside the page.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn slice(&self, page: u32, at: usize, n: usize) -> &'a mut [u8] {
        assert!(at + n <= self.map.page_bytes, "range outside its page");
        let (segment, start) = self.map.locate(page);
        // SAFETY: by this function's contract.
        unsafe { self.segments[segment].slice(start + at, n) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{KvHeads, KvType};
    use super::*;

    #[test]
    fn pages_keep_their_contents_in_any_commit_order() {
        let layout = KvLayout::new(KvType::F32, [KvHeads::separate(1, 8, 8)]);
        for (n_pages, shift) in [(1, 0), (5, 0), (5, 1), (8, 2), (9, 2), (9, 3), (9, 4)] {
            let mut memory = KvMemory::with_segments(&layout, n_pages, shift).expect("memory");
            assert_eq!(memory.committed_bytes(), 0);
            let order: Vec<u32> = (0..n_pages).map(|i| (i * 7 % n_pages) as u32).collect();
            for (n, &new) in order.iter().enumerate() {
                memory.commit(new).expect("memory");
                assert!(memory.page(new).iter().all(|&b| b == 0));
                memory.page_mut(new).fill(new as u8);
                // SAFETY: the only range in use.
                unsafe { memory.shared().slice(new, 1, 2) }.fill(100 + new as u8);
                for &old in &order[..=n] {
                    memory.commit(old).expect("memory");
                    let (a, b) = (old as u8, 100 + old as u8);
                    assert_eq!(memory.page(old)[..4], [a, b, b, a]);
                }
            }
            assert_eq!(memory.committed_bytes(), n_pages * layout.page_bytes());
            for to in 1..n_pages as u32 {
                memory.copy(0, to);
                assert_eq!(memory.page(0), memory.page(to));
            }
        }
    }
}
