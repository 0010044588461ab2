//! Memory that is allocated once, within a limit.

use alloc::collections::TryReserveError;
use alloc::vec;
use alloc::vec::Vec;

use crate::error::MemoryError;

/// A zeroed vector; the system commits its memory on first touch, so an oversized batch limit costs little.
pub(crate) fn zeros<T: Clone + Default>(shape: &[usize]) -> Result<Vec<T>, TryReserveError> {
    let n = shape.iter().fold(1usize, |n, d| n.saturating_mul(*d));
    // `vec!` gets zeroed memory from the system but aborts if there is none, so reserve first
    Vec::<T>::new().try_reserve_exact(n)?;
    Ok(vec![T::default(); n])
}

/// Allocates buffers up to a limit in bytes. After the first failure it allocates nothing but keeps counting, so that
/// the error can state the total.
pub(crate) struct Budget {
    limit: usize,
    needed: usize,
    exhausted: Option<TryReserveError>,
}

impl Budget {
    pub(crate) fn new(limit: usize) -> Budget {
        Budget { limit, needed: 0, exhausted: None }
    }

    /// As [`zeros`]; an empty vector after a failure, which [`Budget::check`] reports.
    pub(crate) fn zeros<T: Clone + Default>(&mut self, shape: &[usize]) -> Vec<T> {
        let bytes = shape.iter().fold(size_of::<T>(), |n, d| n.saturating_mul(*d));
        self.needed = self.needed.saturating_add(bytes);
        if self.needed > self.limit || self.exhausted.is_some() {
            return Vec::new();
        }
        zeros(shape).unwrap_or_else(|e| {
            self.exhausted = Some(e);
            Vec::new()
        })
    }

    /// Returns the error if an allocation failed; `rows` is the batch size for the message.
    pub(crate) fn check(self, rows: usize) -> Result<(), MemoryError> {
        let Budget { limit, needed, exhausted } = self;
        if needed > limit {
            return Err(MemoryError::Limit { rows, needed, limit });
        }
        exhausted.map_or(Ok(()), |e| Err(e.into()))
    }
}
