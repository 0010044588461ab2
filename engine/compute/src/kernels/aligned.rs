//! Memory the kernels read and write: cache-line aligned buffers, and outputs shared by the tasks of one operation.

use alloc::collections::TryReserveError;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::marker::PhantomData;
use core::ptr::NonNull;

/// One cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A byte buffer that starts at a 64-byte boundary: a part of a piece of memory, alone in it or beside others.
pub struct AlignedBuf {
    /// Keeps the memory; its own length stays 0.
    _piece: Arc<Vec<Line>>,
    start: NonNull<u8>,
    capacity: usize,
    len: usize,
}

// SAFETY: a buffer's part of the piece belongs to it alone, and is read and written through borrows of the buffer only.
unsafe impl Send for AlignedBuf {}
// SAFETY: as above.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` zero bytes; fails instead of aborting when there is no memory.
    pub fn zeroed(len: usize) -> Result<AlignedBuf, TryReserveError> {
        let mut buf = AlignedBuf::with_capacity(len)?;
        buf.grow(len);
        Ok(buf)
    }

    /// An empty buffer with room for `capacity` bytes. The system commits memory when [`AlignedBuf::grow`] first
    /// touches it.
    pub fn with_capacity(capacity: usize) -> Result<AlignedBuf, TryReserveError> {
        let mut lines = Vec::<Line>::new();
        lines.try_reserve_exact(capacity.div_ceil(64))?;
        let start = NonNull::from(lines.spare_capacity_mut()).cast();
        Ok(AlignedBuf { _piece: Arc::new(lines), start, capacity, len: 0 })
    }

    /// Cuts off the first `len` bytes of the room of an empty buffer, as a buffer of their own.
    fn split(&mut self, len: usize) -> AlignedBuf {
        let taken = len.next_multiple_of(64);
        assert!(self.len == 0 && taken <= self.capacity, "a part of what is there");
        let part = AlignedBuf { _piece: Arc::clone(&self._piece), start: self.start, capacity: len, len: 0 };
        // SAFETY: inside the piece, as just checked.
        self.start = unsafe { self.start.add(taken) };
        self.capacity -= taken;
        part
    }

    /// Makes the buffer `len` bytes long, new ones zero.
    ///
    /// # Panics
    /// If `len` is beyond the capacity: the buffer never moves.
    pub fn grow(&mut self, len: usize) {
        assert!(len <= self.capacity, "a buffer that grows beyond its capacity");
        if len > self.len {
            // SAFETY: the bytes are inside this buffer's part of the piece.
            unsafe { self.start.add(self.len).write_bytes(0, len - self.len) };
            self.len = len;
        }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the first `len` bytes are inside the piece and initialised; writing borrows the buffer exclusively.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the borrow is exclusive.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// The buffer as f32 values; the length is rounded down to whole values.
    pub fn f32s(&self) -> &[f32] {
        // SAFETY: aligned to 64, every bit pattern is an f32.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr().cast(), self.len / 4) }
    }

    /// The buffer as f32 values, for writing.
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `f32s`; the borrow is exclusive.
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

/// Memory for buffers that live and end together, as the weights of a model: taken in pieces that the system may back
/// with large pages, so that a reader of all of them seldom waits for a translation of addresses.
#[derive(Default)]
pub struct WeightArena {
    rest: Option<AlignedBuf>,
}

/// Bytes of a piece. WebAssembly has no pages, and uses what is reserved.
const SEGMENT_BYTES: usize = if cfg!(target_family = "wasm") { 0 } else { 32 << 20 };

impl WeightArena {
    /// `len` zero bytes. What is left of a piece is given back.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn zeroed(&mut self, len: usize) -> Result<AlignedBuf, TryReserveError> {
        let piece = |capacity| AlignedBuf::with_capacity(capacity).inspect(advise_huge_pages);
        let mut buf = if len > SEGMENT_BYTES / 8 {
            piece(len)?
        } else {
            let rest = match &mut self.rest {
                Some(rest) if rest.capacity >= len.next_multiple_of(64) => rest,
                rest => {
                    let next = piece(SEGMENT_BYTES)?;
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

/// Linux gives large pages unasked only where it is configured to.
fn advise_huge_pages(room: &AlignedBuf) {
    #[cfg(all(feature = "std", target_os = "linux"))]
    advise(room, libc::MADV_HUGEPAGE);
    let _ = room;
}

/// What is left of a piece is in the large page of the buffer before it, and so has memory.
fn release_tail(rest: &AlignedBuf) {
    #[cfg(all(feature = "std", target_os = "linux"))]
    advise(rest, libc::MADV_DONTNEED);
    let _ = rest;
}

/// Tells the system of the whole pages of a room that no buffer has taken yet.
#[cfg(all(feature = "std", target_os = "linux"))]
fn advise(room: &AlignedBuf, advice: core::ffi::c_int) {
    const PAGE: usize = 4096;
    assert!(room.len == 0, "a room without bytes");
    let skipped = room.start.as_ptr().align_offset(PAGE);
    let len = room.capacity.saturating_sub(skipped) / PAGE * PAGE;
    if len > 0 {
        // SAFETY: whole pages inside the room, in which there is nothing yet: the advice changes how they are mapped, or
        // that they are zero until they are written. It may be refused, which changes nothing.
        unsafe { libc::madvise(room.start.as_ptr().add(skipped).cast(), len, advice) };
    }
}

/// A slice that the tasks of one parallel operation write in disjoint parts.
#[derive(Clone, Copy)]
pub(crate) struct SharedOut<'a, T> {
    ptr: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `slice`, whose contract forbids overlap between threads.
unsafe impl<T: Send> Send for SharedOut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedOut<'_, T> {}

impl<'a, T> SharedOut<'a, T> {
    /// Shares `out` for the life of one operation.
    pub(crate) fn new(out: &'a mut [T]) -> Self {
        SharedOut { ptr: out.as_mut_ptr(), len: out.len(), life: PhantomData }
    }

    /// The pointer to element `at`, valid for `n` elements.
    ///
    /// # Panics
    /// If the part is not inside the slice.
    pub(crate) fn ptr(&self, at: usize, n: usize) -> *mut T {
        assert!(at <= self.len && n <= self.len - at, "part outside the output");
        // SAFETY: inside the slice, as just checked.
        unsafe { self.ptr.add(at) }
    }

    /// The part `at..at + n`, for writing.
    ///
    /// # Safety
    /// No other part that is alive may overlap it.
    ///
    /// # Panics
    /// If the part is not inside the slice.
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

    #[test]
    fn buffers_of_an_arena_are_apart() {
        let mut arena = WeightArena::default();
        let sizes = [
            1,
            64,
            65,
            0,
            SEGMENT_BYTES / 8 + 1,
            1 << 20,
            3 << 20,
            4 << 20,
            4 << 20,
            4 << 20,
            4 << 20,
            4 << 20,
            4 << 20,
        ];
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
