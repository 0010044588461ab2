//! Buffers aligned to cache lines, and outputs that the tasks of one operation share.
#![allow(unsafe_code)]

use alloc::collections::TryReserveError;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::marker::PhantomData;
use core::ptr::NonNull;

/// One cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

/// A byte buffer aligned to 64 bytes: a range of a memory segment, which it may share with other buffers.
pub struct AlignedBuf {
    /// Owns the segment; the length of the vector stays 0.
    _segment: Arc<Vec<CacheLine>>,
    start: NonNull<u8>,
    capacity: usize,
    len: usize,
}

// SAFETY: a buffer is the only owner of its range of the segment, which is accessed through borrows of the buffer only.
unsafe impl Send for AlignedBuf {}
// SAFETY: a shared buffer gives shared borrows of its range only.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// A buffer of `len` zero bytes.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn zeroed(len: usize) -> Result<AlignedBuf, TryReserveError> {
        let mut buf = AlignedBuf::with_capacity(len)?;
        buf.grow(len);
        Ok(buf)
    }

    /// An empty buffer that can grow to `capacity` bytes. The operating system commits the memory when
    /// [`AlignedBuf::grow`] writes to it.
    ///
    /// # Errors
    /// If the memory cannot be reserved.
    pub fn with_capacity(capacity: usize) -> Result<AlignedBuf, TryReserveError> {
        let mut lines = Vec::<CacheLine>::new();
        lines.try_reserve_exact(capacity.div_ceil(64))?;
        let start = NonNull::from(lines.spare_capacity_mut()).cast();
        Ok(AlignedBuf { _segment: Arc::new(lines), start, capacity, len: 0 })
    }

    /// Splits the first `len` bytes of capacity off an empty buffer, as a buffer of their own.
    fn split(&mut self, len: usize) -> AlignedBuf {
        let taken = len.next_multiple_of(64);
        assert!(self.len == 0 && taken <= self.capacity, "split beyond the capacity, or of a buffer with contents");
        let part = AlignedBuf { _segment: Arc::clone(&self._segment), start: self.start, capacity: len, len: 0 };
        // SAFETY: inside the segment, as just checked.
        self.start = unsafe { self.start.add(taken) };
        self.capacity -= taken;
        part
    }

    /// Grows the buffer to `len` bytes; new bytes are zero. The buffer never moves.
    ///
    /// # Panics
    /// If `len` is larger than the capacity.
    pub fn grow(&mut self, len: usize) {
        assert!(len <= self.capacity, "buffer of {} bytes grown to {len}", self.capacity);
        if len > self.len {
            // SAFETY: the bytes are inside the range of this buffer.
            unsafe { self.start.add(self.len).write_bytes(0, len - self.len) };
            self.len = len;
        }
    }

    /// The contents.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the first `len` bytes are inside the segment and initialised; writing borrows the buffer exclusively.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The contents, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the first `len` bytes are inside the segment and initialised; the borrow of the buffer is exclusive.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// The contents as f32; the length is rounded down to whole values.
    pub fn f32s(&self) -> &[f32] {
        // SAFETY: aligned to 64, every bit pattern is an f32.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr().cast(), self.len / 4) }
    }

    /// The contents as f32, for writing.
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        // SAFETY: aligned to 64, every bit pattern is an f32; the borrow of the buffer is exclusive.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.len / 4) }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Allocator for buffers that live as long as each other, such as the weights of a model. It allocates large segments,
/// which the operating system may map with huge pages, so that reading all weights causes few TLB misses.
#[derive(Default)]
pub struct WeightArena {
    rest: Option<AlignedBuf>,
}

/// Bytes of a segment. 0 on WebAssembly, where reserved memory is used memory; few under Miri, which is slow.
const SEGMENT_BYTES: usize = match (cfg!(target_family = "wasm"), cfg!(miri)) {
    (true, _) => 0,
    (_, true) => 64 << 10,
    _ => 32 << 20,
};

impl WeightArena {
    /// A buffer of `len` zero bytes. The unused tail of a segment is released.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn zeroed(&mut self, len: usize) -> Result<AlignedBuf, TryReserveError> {
        let segment = |capacity| AlignedBuf::with_capacity(capacity).inspect(advise_huge_pages);
        let mut buf = if len > SEGMENT_BYTES / 8 {
            segment(len)?
        } else {
            let rest = match &mut self.rest {
                Some(rest) if rest.capacity >= len.next_multiple_of(64) => rest,
                rest => {
                    let next = segment(SEGMENT_BYTES)?;
                    rest.iter().for_each(release_tail);
                    rest.insert(next)
                }
            };
            rest.split(len)
        };
        buf.grow(len);
        Ok(buf)
    }
}

impl Drop for WeightArena {
    fn drop(&mut self) {
        self.rest.iter().for_each(release_tail);
    }
}

/// Asks for huge pages: Linux may be configured to give them only on request.
fn advise_huge_pages(buf: &AlignedBuf) {
    #[cfg(all(feature = "std", target_os = "linux"))]
    advise(buf, libc::MADV_HUGEPAGE);
    let _ = buf;
}

/// Releases the unused tail of a segment: a huge page that it shares with a buffer has committed it.
fn release_tail(rest: &AlignedBuf) {
    #[cfg(all(feature = "std", target_os = "linux"))]
    advise(rest, libc::MADV_DONTNEED);
    let _ = rest;
}

/// Calls madvise(2) on the whole pages of a buffer without contents.
#[cfg(all(feature = "std", target_os = "linux"))]
fn advise(buf: &AlignedBuf, advice: core::ffi::c_int) {
    const PAGE: usize = 4096;
    assert!(buf.len == 0, "madvise on a buffer with contents");
    let skipped = buf.start.as_ptr().align_offset(PAGE);
    let len = buf.capacity.saturating_sub(skipped) / PAGE * PAGE;
    if len > 0 {
        // SAFETY: the range is whole pages of the capacity of this buffer, which has no contents yet. The advice
        // changes how these pages are mapped, or resets them to zero; a failure changes nothing.
        unsafe { libc::madvise(buf.start.as_ptr().add(skipped).cast(), len, advice) };
    }
}

/// An output slice that the tasks of one parallel operation write in disjoint parts.
#[derive(Clone, Copy)]
pub(crate) struct SharedOut<'a, T> {
    ptr: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `slice`, whose contract forbids overlap between threads.
unsafe impl<T: Send> Send for SharedOut<'_, T> {}
// SAFETY: shared access is through `slice` too, whose contract forbids overlap between threads.
unsafe impl<T: Send> Sync for SharedOut<'_, T> {}

impl<'a, T> SharedOut<'a, T> {
    /// Shares `out` for the duration of one operation.
    pub(crate) fn new(out: &'a mut [T]) -> Self {
        SharedOut { ptr: out.as_mut_ptr(), len: out.len(), life: PhantomData }
    }

    /// Pointer to element `at`, valid for `n` elements.
    ///
    /// # Panics
    /// If the range is not inside the slice.
    pub(crate) fn ptr(&self, at: usize, n: usize) -> *mut T {
        assert!(at <= self.len && n <= self.len - at, "range outside the output");
        // SAFETY: inside the slice, as just checked.
        unsafe { self.ptr.add(at) }
    }

    /// Elements `at..at + n`, for writing.
    ///
    /// # Safety
    /// The range must not overlap another one that is in use.
    ///
    /// # Panics
    /// If the range is not inside the slice.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, at: usize, n: usize) -> &'a mut [T] {
        // SAFETY: inside the slice (`ptr` checks), and not aliased by this function's contract.
        unsafe { core::slice::from_raw_parts_mut(self.ptr(at, n), n) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    /// A 32nd of a segment.
    const UNIT: usize = if cfg!(miri) { 2 << 10 } else { 1 << 20 };

    #[test]
    fn buffers_of_an_arena_are_apart() {
        let mut arena = WeightArena::default();
        let sizes =
            [1, 64, 65, 0, SEGMENT_BYTES / 8 + 1, UNIT, 3 * UNIT, 4 * UNIT, 4 * UNIT, 4 * UNIT, 4 * UNIT, 4 * UNIT];
        let mut bufs: Vec<AlignedBuf> = sizes.iter().map(|&n| arena.zeroed(n).unwrap()).collect();
        drop(arena);
        for (i, buf) in bufs.iter_mut().enumerate() {
            assert!(buf.bytes().iter().all(|&b| b == 0) && (buf.bytes().as_ptr() as usize).is_multiple_of(64));
            buf.bytes_mut().fill(i as u8 + 1);
        }
        for (i, (buf, n)) in bufs.iter().zip(sizes).enumerate() {
            assert_eq!(buf.bytes(), vec![i as u8 + 1; n], "buffer {i}");
        }
    }

    #[test]
    fn a_buffer_grows_by_zeros() {
        let mut buf = AlignedBuf::with_capacity(1000).unwrap();
        buf.grow(100);
        buf.bytes_mut().fill(7);
        buf.grow(50);
        buf.grow(1000);
        assert!(buf.bytes()[..100].iter().all(|&b| b == 7) && buf.bytes()[100..].iter().all(|&b| b == 0));
        assert_eq!(buf.f32s().len(), 250);
    }
}
