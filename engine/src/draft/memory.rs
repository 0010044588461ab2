//! A model that drafts, with its KV pages and working memory.

use alloc::sync::Arc;

use crate::engine::EngineOptions;
use crate::error::{DraftModelError, MemoryError};
use crate::kernels::attention::PAGE;
use crate::kv::{KvArena, SeqPages};
use crate::model::{Model, Scratch, ScratchSize};
use crate::pool::Pool;

/// A model that drafts, and the memory that it computes in.
pub(super) struct DraftMemory {
    pub(super) model: Arc<Model>,
    pub(super) arena: KvArena,
    pub(super) scratch: Scratch,
    /// Maximal tokens of a sequence.
    n_ctx: usize,
    /// Maximal tokens of a batch.
    pub(super) max_rows: usize,
}

impl DraftMemory {
    /// Number of KV pages: as many as the engine has, at most those of its sequences' contexts.
    pub(super) fn n_pages(target: &Model, options: &EngineOptions) -> usize {
        let pages = options.kv_bytes / target.kv_layout(options.kv_type).page_bytes();
        pages.min(options.max_seqs.saturating_mul(options.n_ctx.div_ceil(PAGE)))
    }

    /// Reserves KV memory with `n_states` slots for recurrent states, and working memory.
    pub(super) fn new(
        model: Arc<Model>,
        target: &Model,
        pool: &dyn Pool,
        options: &EngineOptions,
        n_states: usize,
    ) -> Result<DraftMemory, DraftModelError> {
        let n_ctx = options.n_ctx.min(model.config.max_context());
        let n_pages = u32::try_from(DraftMemory::n_pages(target, options)).unwrap_or(u32::MAX);
        let mut arena = KvArena::new(model.kv_layout(options.kv_type), n_pages, [0; 32]).map_err(MemoryError::from)?;
        arena.reserve_states(model.config.state_len(), n_states).map_err(MemoryError::from)?;
        let (max_seqs, max_rows) = (options.max_seqs, options.batch_tokens.max(options.max_seqs));
        let size = ScratchSize { rows: max_rows, logits: max_seqs, seqs: max_seqs, n_ctx };
        let scratch = model.scratch(pool, options.kv_type, size)?;
        Ok(DraftMemory { model, arena, scratch, n_ctx, max_rows })
    }

    /// Reserves `n` more positions of a sequence. Returns the first, or `None` if the context or the pages do not suffice.
    pub(super) fn extend(&mut self, pages: &mut SeqPages, n: usize) -> Option<usize> {
        let pos = pages.n_tokens();
        (pos + n <= self.n_ctx && self.arena.extend(pages, pos + n).is_ok()).then_some(pos)
    }

    /// Releases the memory of all pages, none of which a sequence uses.
    pub(super) fn renew(&mut self) {
        if self.arena.stats().committed_bytes > 0 {
            // without memory the old pages stay
            let _ = self.arena.renew();
        }
    }
}
