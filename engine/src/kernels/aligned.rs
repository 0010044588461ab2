//! Memory the kernels read and write: cache-line aligned buffers, and outputs shared by the tasks of one operation.

use alloc::collections::TryReserveError;
use alloc::vec::Vec;
use core::marker::PhantomData;

/// One cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A zeroed byte buffer that starts at a 64-byte boundary.
pub struct AlignedBuf {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedBuf {
    /// `len` zero bytes; fails instead of aborting when there is no memory.
    pub fn zeroed(len: usize) -> Result<AlignedBuf, TryReserveError> {
        let n = len.div_ceil(64);
        let mut lines = Vec::new();
        lines.try_reserve_exact(n)?;
        lines.resize(n, Line([0; 64]));
        Ok(AlignedBuf { lines, len })
    }

    /// An empty buffer with room for `capacity` bytes. The system commits memory when [`AlignedBuf::grow`] first
    /// touches it.
    pub fn with_capacity(capacity: usize) -> Result<AlignedBuf, TryReserveError> {
        let mut lines = Vec::new();
        lines.try_reserve_exact(capacity.div_ceil(64))?;
        Ok(AlignedBuf { lines, len: 0 })
    }

    /// Makes the buffer `len` bytes long, new ones zero.
    ///
    /// # Panics
    /// If `len` is beyond the capacity: the buffer never moves.
    pub fn grow(&mut self, len: usize) {
        let n = len.div_ceil(64);
        assert!(n <= self.lines.capacity(), "a buffer that grows beyond its capacity");
        if n > self.lines.len() {
            self.lines.resize(n, Line([0; 64]));
        }
        self.len = self.len.max(len);
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `lines` holds at least `len` initialised bytes, `Line` has no padding.
        unsafe { core::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }

    /// The bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the borrow is exclusive.
        unsafe { core::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }

    /// The buffer as f32 values; the length is rounded down to whole values.
    pub fn f32s(&self) -> &[f32] {
        // SAFETY: aligned to 64, every bit pattern is an f32.
        unsafe { core::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len / 4) }
    }

    /// The buffer as f32 values, for writing.
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `f32s`; the borrow is exclusive.
        unsafe { core::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len / 4) }
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
