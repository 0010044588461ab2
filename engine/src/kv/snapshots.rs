//! Recurrent states of sequences, and snapshots of them in the prefix tree.
//!
//! A sequence of a model with recurrent layers has a slot for its state. A snapshot is a copy of the state after the last
//! token of a page, kept with the page's node: a prompt resumes after the longest prefix that has all pages and a
//! snapshot at its end. When no slot is free, the least recently used snapshot is evicted.

use alloc::collections::{BTreeMap, TryReserveError};
use alloc::vec::Vec;

use super::state_records::PartialState;
use super::{KvArena, NewPage, PAGE, PageKey, SeqPages};
use crate::kernels::recurrent::StateMemory;

/// A snapshot of a page.
#[derive(Clone, Copy)]
pub(super) struct Snapshot {
    slot: u32,
    /// Value of the counter at its last use.
    last_used: u64,
    /// Its key in [`StateSlots::new`], until it is taken.
    serial: Option<u64>,
}

/// Slots that are not in use, and the order of the snapshots.
#[derive(Default)]
pub(super) struct StateSlots {
    free: Vec<u32>,
    /// Page of each snapshot by its last use.
    by_use: BTreeMap<u64, u32>,
    now: u64,
    pub(super) partial: Option<PartialState>,
    /// Pages of the snapshots not yet handed to the host, in order. Empty unless they are tracked.
    new: BTreeMap<u64, u32>,
    next_serial: u64,
    is_tracking: bool,
    hits: u64,
    evictions: u64,
}

/// Memory and counters of recurrent states.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StateStats {
    /// Bytes of all slots.
    pub reserved_bytes: usize,
    /// Bytes of the slots used at least once.
    pub committed_bytes: usize,
    /// Bytes of the slots that sequences have.
    pub in_use_bytes: usize,
    /// Bytes of the slots that snapshots have.
    pub snapshot_bytes: usize,
    /// Number of snapshots.
    pub n_snapshots: usize,
    /// Prompts that began with the state of a snapshot.
    pub hits: u64,
    /// Snapshots that gave their slot to another state.
    pub evictions: u64,
}

impl StateSlots {
    /// Goes on with the counters of other slots.
    pub(super) fn keep_counters(&mut self, other: &StateSlots) {
        (self.hits, self.evictions) = (other.hits, other.evictions);
        self.is_tracking = other.is_tracking;
    }

    /// Sets whether noted snapshots are kept for [`KvArena::take_new_snapshot`].
    pub(super) fn track(&mut self, is_tracking: bool) {
        self.is_tracking = is_tracking;
        self.new.clear();
    }
}

impl KvArena {
    /// Reserves `n_slots` slots of `len` floats for sequences and snapshots.
    ///
    /// # Errors
    /// [`TryReserveError`] if the memory cannot be reserved.
    pub fn reserve_states(&mut self, len: usize, n_slots: usize) -> Result<(), TryReserveError> {
        self.memory.states = StateMemory::new(len, n_slots)?;
        self.states =
            StateSlots { free: (0..self.memory.states.n_slots() as u32).rev().collect(), ..Default::default() };
        Ok(())
    }

    /// Whether sequences have recurrent states.
    pub fn has_states(&self) -> bool {
        self.memory.states.n_slots() > 0
    }

    /// Memory and counters of the states.
    pub(super) fn state_stats(&self) -> StateStats {
        let (memory, states) = (&self.memory.states, &self.states);
        let (slot, n_snapshots) = (memory.slot_len() * size_of::<f32>(), states.by_use.len());
        StateStats {
            reserved_bytes: memory.n_slots() * slot,
            committed_bytes: memory.committed_bytes(),
            in_use_bytes: (memory.n_slots() - states.free.len() - n_snapshots) * slot,
            snapshot_bytes: n_snapshots * slot,
            n_snapshots,
            hits: states.hits,
            evictions: states.evictions,
        }
    }

    /// Counts a prompt that began with the state of a snapshot.
    pub(super) fn record_state_lookup(&mut self, is_found: bool) {
        self.states.hits += u64::from(is_found && self.has_states());
    }

    /// Gives a new sequence a state: that after the longest prefix of its pages that has a snapshot, whose further pages
    /// are dropped from `seq`. Without memory the sequence gets no state.
    pub(super) fn restore_state(&mut self, seq: &mut SeqPages) {
        if !self.has_states() {
            return;
        }
        let snapshot = |page: &u32| self.pages[*page as usize].node.as_ref().and_then(|n| n.snapshot);
        let found = seq.pages.iter().rposition(|page| snapshot(page).is_some());
        let from = found.map(|i| seq.pages[i]);
        seq.pages.truncate(found.map_or(0, |i| i + 1));
        if let Some(page) = from {
            self.touch_snapshot(page);
        }
        let Some(slot) = self.allocate_slot() else { return seq.pages.clear() };
        // `allocate_slot` may have evicted this very snapshot: then `slot` has its state
        let snapshot = from.and_then(|page| self.pages[page as usize].node.as_ref()?.snapshot);
        let filled = match (from, snapshot) {
            (Some(_), Some(snapshot)) => self.memory.states.copy(snapshot.slot, slot),
            (Some(_), None) => Ok(()),
            (None, _) => self.memory.states.reset(slot),
        };
        match filled {
            Ok(()) => seq.state = Some(slot),
            Err(_) => {
                self.states.free.push(slot);
                seq.pages.clear();
            }
        }
    }

    /// Frees the states of a sequence.
    pub(super) fn release_state(&mut self, seq: &mut SeqPages) {
        self.states.free.extend(seq.state.take().into_iter().chain(seq.saved.take()));
    }

    /// Copies the state of a sequence, so that [`KvArena::settle_state`] can return to it. Returns whether there was a
    /// slot for it.
    pub fn save_state(&mut self, seq: &mut SeqPages) -> bool {
        let Some(state) = seq.state else { return false };
        let Some(slot) = self.allocate_slot() else { return false };
        if self.memory.states.copy(state, slot).is_err() {
            self.states.free.push(slot);
            return false;
        }
        seq.saved = Some(slot);
        true
    }

    /// Keeps the state of a sequence, or returns to the saved one.
    pub fn settle_state(&mut self, seq: &mut SeqPages, keeps: bool) {
        let Some(saved) = seq.saved.take() else { return };
        let dropped = if keeps { Some(saved) } else { seq.state.replace(saved) };
        self.states.free.extend(dropped);
    }

    /// Keeps the state of a sequence after `tokens`, whole pages that are all computed, for later prompts. Publishes
    /// their pages. Does nothing if all slots are in use by sequences.
    pub fn snapshot(&mut self, seq: &SeqPages, tokens: &[u32], salt: u64) {
        debug_assert!(tokens.len().is_multiple_of(PAGE));
        let Some(state) = seq.state else { return };
        self.publish(seq, tokens, salt);
        let path: Option<u32> = self.cached_prefix(tokens, salt).nth((tokens.len() / PAGE).wrapping_sub(1));
        let Some(page) = path else { return };
        if self.pages[page as usize].node.as_ref().is_none_or(|n| n.snapshot.is_some()) {
            return self.touch_snapshot(page);
        }
        let Some(slot) = self.allocate_slot() else { return };
        match self.memory.states.copy(state, slot) {
            Ok(()) => self.attach(page, slot),
            Err(_) => self.states.free.push(slot),
        }
    }

    /// Gives a page a snapshot with these floats; `None` without memory for it.
    pub(super) fn insert_snapshot(&mut self, page: u32, floats: &[f32]) -> Option<()> {
        self.free_snapshot(page);
        let slot = self.allocate_slot()?;
        if self.memory.states.reset(slot).is_err() {
            self.states.free.push(slot);
            return None;
        }
        self.memory.states.slot_mut(slot).copy_from_slice(floats);
        self.attach(page, slot);
        Some(())
    }

    /// The state that a page has a snapshot of.
    pub(super) fn snapshot_of(&self, page: u32) -> Option<&[f32]> {
        let snapshot = self.pages[page as usize].node.as_ref()?.snapshot?;
        Some(self.memory.states.slot(snapshot.slot))
    }

    fn attach(&mut self, page: u32, slot: u32) {
        self.states.now += 1;
        let last_used = self.states.now;
        if let Some(node) = &mut self.pages[page as usize].node {
            node.snapshot = Some(Snapshot { slot, last_used, serial: None });
        }
        self.states.by_use.insert(last_used, page);
    }

    /// Drops the snapshot after the first `n_tokens` tokens of a sequence.
    pub fn drop_snapshot(&mut self, seq: &SeqPages, n_tokens: usize) {
        if let Some(&page) = seq.pages.get((n_tokens / PAGE).wrapping_sub(1)) {
            self.free_snapshot(page);
        }
    }

    /// Frees the snapshot of a page, if it has one.
    pub(super) fn free_snapshot(&mut self, page: u32) {
        let node = self.pages[page as usize].node.as_mut();
        if let Some(snapshot) = node.and_then(|n| n.snapshot.take()) {
            self.states.by_use.remove(&snapshot.last_used);
            snapshot.serial.map(|serial| self.states.new.remove(&serial));
            self.states.free.push(snapshot.slot);
        }
    }

    /// Notes the snapshot after `tokens`, if there is one, for [`KvArena::take_new_snapshot`].
    pub fn note_snapshot(&mut self, tokens: &[u32], salt: u64) {
        if !self.states.is_tracking || tokens.is_empty() {
            return;
        }
        let page = self.cached_prefix(tokens, salt).nth((tokens.len() / PAGE).wrapping_sub(1));
        let Some(page) = page else { return };
        let node = self.pages[page as usize].node.as_mut();
        if let Some(snapshot) = node.and_then(|n| n.snapshot.as_mut()).filter(|s| s.serial.is_none()) {
            self.states.next_serial += 1;
            snapshot.serial = Some(self.states.next_serial);
            self.states.new.insert(self.states.next_serial, page);
        }
    }

    /// The page of the snapshot that was noted first among those not yet taken and still there.
    pub fn take_new_snapshot(&mut self) -> Option<NewPage> {
        let (_, page) = self.states.new.pop_first()?;
        let node = self.pages[page as usize].node.as_mut()?;
        node.snapshot.as_mut()?.serial = None;
        Some(NewPage { key: node.key, n_tokens: node.position as usize + PAGE })
    }

    /// Number of leading keys after whose pages a prompt can continue: with recurrent states, up to the last snapshot.
    pub fn n_resumable(&self, keys: &[PageKey]) -> usize {
        let pages = keys.iter().map_while(|key| self.tree.get(key));
        if !self.has_states() {
            return pages.count();
        }
        let has_snapshot = |page: u32| self.pages[page as usize].node.as_ref().is_some_and(|n| n.snapshot.is_some());
        pages.zip(1..).filter(|(page, _)| has_snapshot(**page)).last().map_or(0, |(_, n)| n)
    }

    fn touch_snapshot(&mut self, page: u32) {
        self.states.now += 1;
        let now = self.states.now;
        let node = self.pages[page as usize].node.as_mut();
        if let Some(snapshot) = node.and_then(|n| n.snapshot.as_mut()) {
            self.states.by_use.remove(&snapshot.last_used);
            snapshot.last_used = now;
            self.states.by_use.insert(now, page);
        }
    }

    /// A free slot, or that of the least recently used snapshot.
    fn allocate_slot(&mut self) -> Option<u32> {
        if self.states.free.is_empty() {
            let (_, &page) = self.states.by_use.first_key_value()?;
            self.free_snapshot(page);
            self.states.evictions += 1;
        }
        self.states.free.pop()
    }
}
