//! How the memory of a worker is divided among KV pages, recurrent states of sequences, and snapshots of such states.

use std::sync::Arc;

use starling::engine::{EngineOptions, SnapshotOptions};
use starling::kernels::attention::{KvType, PAGE};
use starling::model::Model;

use crate::config::Settings;

/// What the sequences of a model need, in bytes unless noted.
#[derive(Debug, Clone, Copy)]
pub struct KvNeeds {
    /// A page.
    pub page: usize,
    /// Pages of full contexts for all sequences.
    full: usize,
    /// The recurrent state of a sequence; 0 for a model without recurrent layers.
    state: usize,
    n_seqs: usize,
    /// Pages from one snapshot to the next.
    every: usize,
    /// Snapshots, if the settings say.
    snapshots: Option<usize>,
}

/// Memory of a worker, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvDivision {
    /// KV pages.
    pub pages: usize,
    /// Snapshots of recurrent states.
    snapshots: usize,
}

impl KvNeeds {
    pub fn new(settings: &Settings, model: &Arc<Model>, kv_type: KvType, n_ctx: usize) -> KvNeeds {
        let every = settings.snapshot_interval.map(|tokens| tokens.div_ceil(PAGE));
        KvNeeds {
            page: EngineOptions::kv_bytes_of(model, kv_type, 1),
            full: EngineOptions::kv_bytes_of(model, kv_type, n_ctx).saturating_mul(settings.max_seqs),
            state: model.state_bytes(),
            n_seqs: settings.max_seqs,
            every: SnapshotOptions { max: None, every }.pages(model, kv_type),
            snapshots: settings.snapshot_memory.map(|bytes| usize::try_from(bytes.0).unwrap_or(usize::MAX)),
        }
    }

    /// Full contexts, and a snapshot for each interval of them.
    pub fn full(&self) -> KvDivision {
        let n = (self.full / self.page / self.every).max(self.n_seqs.saturating_add(2));
        KvDivision { pages: self.full, snapshots: self.snapshots.unwrap_or_else(|| n.saturating_mul(self.state)) }
    }

    /// The recurrent states of all sequences.
    pub fn states(&self) -> usize {
        self.n_seqs.saturating_mul(self.state)
    }

    /// All bytes of a worker.
    pub fn total(&self, memory: KvDivision) -> usize {
        let states = if self.state == 0 { 0 } else { self.states().saturating_add(memory.snapshots) };
        memory.pages.saturating_add(states)
    }

    /// The least memory of a worker.
    pub fn least(&self) -> usize {
        self.total(KvDivision { pages: self.page, snapshots: self.snapshots.unwrap_or(0) })
    }

    /// Divides `total` bytes: a state for each sequence, then pages with a snapshot for each interval, but pages for full
    /// contexts first, from at most half of the rest. `None` if there is no room for a page.
    pub fn divide(&self, total: usize) -> Option<KvDivision> {
        if self.state == 0 {
            return (total >= self.page).then_some(KvDivision { pages: total, snapshots: 0 });
        }
        let rest = total.checked_sub(self.states())?;
        let pages = match self.snapshots {
            Some(snapshots) => rest.checked_sub(snapshots)?,
            None => {
                let interval = (self.page as u128).saturating_mul(self.every as u128);
                let share = (rest as u128).saturating_mul(interval) / interval.saturating_add(self.state as u128);
                // at most `rest`
                (share as usize).max(self.full.min(rest / 2)).max(self.page)
            }
        };
        (pages >= self.page && pages <= rest).then(|| KvDivision { pages, snapshots: rest - pages })
    }

    /// The engine's options for the snapshots.
    pub fn snapshot_options(&self, memory: KvDivision) -> SnapshotOptions {
        SnapshotOptions { max: memory.snapshots.checked_div(self.state), every: Some(self.every) }
    }

    /// The states in words, for the log; empty for a model without recurrent layers.
    pub fn describe(&self, memory: KvDivision) -> String {
        match memory.snapshots.checked_div(self.state) {
            None => String::new(),
            Some(n) => format!(
                "; recurrent states: {} MiB for {} sequences, {} MiB for {n} snapshots, one per {} tokens of a long prompt",
                self.states() >> 20,
                self.n_seqs,
                memory.snapshots >> 20,
                self.every.saturating_mul(PAGE)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// What is divided is never more than the total, and the least memory suffices.
        #[test]
        fn parts_fit_the_total(
            page in 1usize..5000,
            state in 0usize..100_000,
            n_seqs in 1usize..40,
            every in 1usize..200,
            contexts in 1usize..10_000,
            more in 0usize..1 << 30,
            snapshots in prop::option::of(0usize..1 << 20),
        ) {
            let needs = KvNeeds { page, full: page * contexts, state, n_seqs, every, snapshots };
            prop_assert_eq!(needs.divide(needs.least() - 1), None);
            let total = needs.least() + more;
            let memory = needs.divide(total).unwrap();
            prop_assert!(needs.total(memory) <= total && memory.pages >= page);
            let n = needs.snapshot_options(memory).max;
            prop_assert_eq!(n, (state > 0).then(|| memory.snapshots / state.max(1)));
            if let Some(snapshots) = snapshots.filter(|_| state > 0) {
                prop_assert_eq!(memory.snapshots, snapshots);
            }
        }
    }
}
