//! The model that drafts where the [`Drafter`](super::Drafter) is not confident: one of its own file, or an MTP head.

use alloc::sync::Arc;

use super::head::{ComputedRows, MtpHead};
use super::memory::DraftMemory;
use super::model::{DraftModel, check_draft_model};
use super::proposal::{ProposalJob, Proposals};
use crate::engine::{EngineOptions, RequestId};
use crate::error::DraftModelError;
use crate::kv::KvStats;
use crate::model::{Exec, Model};
use crate::pool::Pool;

/// A model that drafts.
pub(crate) enum DraftSource {
    /// A small model of the same vocabulary.
    Model(DraftModel),
    /// The layer of the model's own file for multi-token prediction.
    Head(MtpHead),
}

impl DraftSource {
    /// Checks the vocabulary and reserves KV memory and working memory.
    pub(crate) fn new(
        draft: Arc<Model>,
        target: &Model,
        pool: &dyn Pool,
        options: &EngineOptions,
    ) -> Result<DraftSource, DraftModelError> {
        check_draft_model(&draft, target)?;
        Ok(match draft.config.is_mtp_head {
            true => DraftSource::Head(MtpHead::new(draft, target, pool, options)?),
            false => DraftSource::Model(DraftModel::new(draft, target, pool, options)?),
        })
    }

    fn memory(&self) -> &DraftMemory {
        match self {
            DraftSource::Model(draft) => draft.memory(),
            DraftSource::Head(head) => head.memory(),
        }
    }

    /// The model.
    pub(crate) fn model(&self) -> &Arc<Model> {
        &self.memory().model
    }

    /// Statistics of KV memory.
    pub(crate) fn kv_stats(&self) -> KvStats {
        self.memory().arena.stats()
    }

    /// Ends a sequence with these tokens.
    pub(crate) fn release(&mut self, id: RequestId, tokens: &[u32], salt: u64) {
        match self {
            DraftSource::Model(draft) => draft.release(id, tokens, salt),
            DraftSource::Head(head) => head.release(id),
        }
    }

    /// Evicts the cached pages of a prefix. An MTP head caches none.
    pub(crate) fn evict_prefix(&mut self, tokens: &[u32], salt: u64) {
        if let DraftSource::Model(draft) = self {
            draft.evict_prefix(tokens, salt);
        }
    }

    /// Evicts up to `n` cached pages.
    pub(crate) fn evict_idle(&mut self, n: usize) {
        if let DraftSource::Model(draft) = self {
            draft.evict_idle(n);
        }
    }

    /// Releases the memory of all pages, if no sequence uses one.
    pub(crate) fn release_memory(&mut self) {
        match self {
            DraftSource::Model(draft) => draft.release_memory(),
            DraftSource::Head(head) => head.release_memory(),
        }
    }

    /// Whether it reads hidden states of the model.
    pub(crate) fn reads_hidden(&self) -> bool {
        matches!(self, DraftSource::Head(_))
    }

    /// Takes what the model has computed of a sequence, without rejected drafts.
    pub(crate) fn observe(&mut self, exec: Exec<'_>, rows: &ComputedRows<'_>) {
        if let DraftSource::Head(head) = self {
            head.observe(exec, rows);
        }
    }

    /// Proposes tokens. Computes at most `budget` tokens that the sequences have got since their last proposals.
    pub(crate) fn propose(&mut self, exec: Exec<'_>, jobs: &[ProposalJob<'_>], budget: usize) -> Proposals {
        match self {
            DraftSource::Model(draft) => draft.propose(exec, jobs, budget),
            DraftSource::Head(head) => head.propose(exec, jobs, budget),
        }
    }
}
