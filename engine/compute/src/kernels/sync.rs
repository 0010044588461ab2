//! The primitives that `crew.rs` is built on. Its model check, `engine/compute/tests/crew_model.rs`, compiles `crew.rs`
//! with loom's in their place.

pub(super) use core::hint::spin_loop;
pub(super) use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::crew::Crew;

/// `core`'s cell with loom's interface, in which every access is a call.
pub(super) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    #[inline(always)]
    pub(super) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    #[inline(always)]
    pub(super) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}

// here, because loom's atomics have no const constructor
impl Crew {
    /// A closed gate without workers.
    pub const fn new() -> Crew {
        Crew {
            gate: AtomicU64::new(0),
            work: UnsafeCell(core::cell::UnsafeCell::new(None)),
            leading: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        }
    }
}

impl Default for Crew {
    fn default() -> Self {
        Crew::new()
    }
}
