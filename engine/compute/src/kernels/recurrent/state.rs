//! Memory of the recurrent states of sequences: one slot per sequence, which has the states of all recurrent layers.
#![allow(unsafe_code)]

use alloc::collections::TryReserveError;
use alloc::vec::Vec;

use super::super::SharedOut;

/// Slots of equally many floats. A slot takes memory once it is used.
#[derive(Default)]
pub struct StateMemory {
    /// Empty until used.
    slots: Vec<Vec<f32>>,
    len: usize,
}

impl StateMemory {
    /// `n_slots` slots of `len` floats; none if `len` is 0.
    ///
    /// # Errors
    /// If the list of slots cannot be allocated.
    pub fn new(len: usize, n_slots: usize) -> Result<StateMemory, TryReserveError> {
        let mut slots = Vec::new();
        if len > 0 {
            slots.try_reserve_exact(n_slots)?;
            slots.resize_with(n_slots, Vec::new);
        }
        Ok(StateMemory { slots, len })
    }

    /// [`StateMemory::new`] with all slots in use and zero.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    pub fn zeroed(len: usize, n_slots: usize) -> Result<StateMemory, TryReserveError> {
        let mut memory = StateMemory::new(len, n_slots)?;
        (0..memory.n_slots() as u32).try_for_each(|slot| memory.reset(slot))?;
        Ok(memory)
    }

    /// Number of slots.
    pub fn n_slots(&self) -> usize {
        self.slots.len()
    }

    /// Floats of a slot.
    pub fn slot_len(&self) -> usize {
        self.len
    }

    /// Bytes of the slots used so far.
    pub fn committed_bytes(&self) -> usize {
        self.slots.iter().filter(|slot| !slot.is_empty()).count() * self.len * size_of::<f32>()
    }

    /// Sets a slot to zero, the state before the first token.
    ///
    /// # Errors
    /// If its memory cannot be allocated.
    pub fn reset(&mut self, slot: u32) -> Result<(), TryReserveError> {
        let slot = &mut self.slots[slot as usize];
        slot.clear();
        slot.try_reserve_exact(self.len)?;
        slot.resize(self.len, 0.0);
        Ok(())
    }

    /// Copies the state of one slot to another.
    ///
    /// # Errors
    /// If the memory of the other cannot be allocated.
    pub fn copy(&mut self, from: u32, to: u32) -> Result<(), TryReserveError> {
        if from == to {
            return Ok(());
        }
        let mut copy = core::mem::take(&mut self.slots[to as usize]);
        copy.clear();
        let reserved = copy.try_reserve_exact(self.len);
        if reserved.is_ok() {
            copy.extend_from_slice(&self.slots[from as usize]);
        }
        self.slots[to as usize] = copy;
        reserved
    }

    /// The state in a slot; empty if the slot was never used.
    pub fn slot(&self, slot: u32) -> &[f32] {
        &self.slots[slot as usize]
    }

    /// The state in a slot, for writing.
    pub fn slot_mut(&mut self, slot: u32) -> &mut [f32] {
        &mut self.slots[slot as usize]
    }

    /// All slots, for the tasks of one operation to write.
    pub fn shared(&mut self) -> SharedStates<'_> {
        SharedStates(self.slots.iter_mut().map(|slot| SharedOut::new(&mut slot[..])).collect())
    }
}

/// Slots that tasks write in disjoint parts.
pub struct SharedStates<'a>(Vec<SharedOut<'a, f32>>);

impl<'a> SharedStates<'a> {
    /// Pointer to float `at` of a slot, valid for `n` floats.
    ///
    /// # Panics
    /// If the range is not inside the slot.
    pub(super) fn ptr(&self, slot: u32, at: usize, n: usize) -> *mut f32 {
        self.0[slot as usize].ptr(at, n)
    }

    /// Floats `at..at + n` of a slot, for writing.
    ///
    /// # Safety
    /// The range must not overlap another one that is in use.
    ///
    /// # Panics
    /// If the range is not inside the slot.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn slice(&self, slot: u32, at: usize, n: usize) -> &'a mut [f32] {
        // SAFETY: by this function's contract.
        unsafe { self.0[slot as usize].slice(at, n) }
    }
}
