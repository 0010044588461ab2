//! Drafts of an MTP head, the layer of a model's own file that predicts the token after the next
//! ([`Model::mtp_head`](crate::model::Model::mtp_head)).
//!
//! Its first guess comes from the last token of a sequence and the model's hidden state before it, each further one from
//! the guess before and the head's own hidden state. It has keys and values of its own, of all tokens whose hidden states
//! before them it was given: those that the model computed for this request. So a prompt's cached prefix is not seen, which
//! may cost accepted tokens, but no time.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::model::{DraftModel, n_ctx_of};
use super::proposal::{BatchEntry, Guess, Guesser, ProposalJob, Proposals, propose};
use crate::engine::{EngineOptions, RequestId};
use crate::error::{DraftModelError, MemoryError};
use crate::kv::{KvArena, KvStats, SeqPages};
use crate::model::{Exec, KvRef, Model, Run, Scratch, ScratchSize, logits_rows};
use crate::pool::Pool;

/// Tokens of a sequence that wait for the next proposal. If there are more, they are computed at once.
const MAX_PENDING: usize = 32;

/// An MTP head, and its state of the sequences of an engine.
pub(crate) struct MtpHead {
    model: Arc<Model>,
    arena: KvArena,
    scratch: Scratch,
    /// Maximal tokens of a sequence, and of a batch.
    n_ctx: usize,
    max_rows: usize,
    sequences: BTreeMap<RequestId, Sequence>,
}

/// The tokens of a sequence from `first` on. Positions count from there.
#[derive(Default)]
struct Sequence {
    first: usize,
    pages: SeqPages,
    /// Tokens in the pages; guesses may follow.
    n_computed: usize,
    /// Hidden states before the tokens that are not computed, (tokens, n_embd). The last token may not be known yet.
    hidden: Vec<f32>,
    /// Hidden state before the next guess (n_embd).
    before_guess: Vec<f32>,
}

/// What a batch of the model has computed of a sequence.
pub(crate) struct ComputedRows<'a> {
    pub(crate) id: RequestId,
    /// All tokens of the sequence.
    pub(crate) tokens: &'a [u32],
    /// Position of the first row.
    pub(crate) pos: usize,
    /// Hidden states of the rows, (rows, n_embd).
    pub(crate) hidden: &'a [f32],
}

impl MtpHead {
    /// Reserves KV memory and working memory.
    pub(super) fn new(
        model: Arc<Model>,
        target: &Model,
        pool: &dyn Pool,
        options: &EngineOptions,
    ) -> Result<MtpHead, DraftModelError> {
        let n_ctx = n_ctx_of(&model, options);
        let n_pages = u32::try_from(DraftModel::n_pages(target, options)).unwrap_or(u32::MAX);
        let arena = KvArena::new(model.kv_layout(options.kv_type), n_pages, [0; 32]).map_err(MemoryError::from)?;
        let (max_seqs, max_rows) = (options.max_seqs, options.batch_tokens.max(options.max_seqs));
        let size = ScratchSize { rows: max_rows, logits: max_seqs, seqs: max_seqs, n_ctx };
        let scratch = model.scratch(pool, options.kv_type, size)?;
        Ok(MtpHead { model, arena, scratch, n_ctx, max_rows, sequences: BTreeMap::new() })
    }

    pub(super) fn model(&self) -> &Arc<Model> {
        &self.model
    }

    pub(super) fn kv_stats(&self) -> KvStats {
        self.arena.stats()
    }

    pub(super) fn release(&mut self, id: RequestId) {
        if let Some(sequence) = self.sequences.remove(&id) {
            self.arena.release(sequence.pages);
        }
    }

    pub(super) fn release_memory(&mut self) {
        if self.sequences.is_empty() && self.arena.stats().committed_bytes > 0 {
            // without memory the old pages stay
            let _ = self.arena.renew();
        }
    }

    pub(super) fn propose(&mut self, exec: Exec<'_>, jobs: &[ProposalJob<'_>], budget: usize) -> Proposals {
        let budget = budget.min(self.max_rows);
        propose(self, exec, jobs, budget)
    }

    /// Takes what the model has computed of a sequence, without rejected drafts.
    pub(super) fn observe(&mut self, exec: Exec<'_>, rows: &ComputedRows<'_>) {
        let (d, arena) = (self.model.config.n_embd, &mut self.arena);
        let sequence = self.sequences.entry(rows.id).or_default();
        if sequence.next_position(d) != Some(rows.pos) {
            arena.release(core::mem::take(&mut sequence.pages));
            *sequence = Sequence { first: rows.pos + 1, pages: arena.acquire(&[], 0), ..Sequence::default() };
        }
        sequence.hidden.extend_from_slice(rows.hidden);
        while let Some(sequence) = self.sequences.get_mut(&rows.id)
            && sequence.hidden.len() > MAX_PENDING * d
        {
            sequence.drop_guesses(&mut self.arena);
            let n = sequence.n_pending(rows.tokens.len(), d).min(self.max_rows);
            let Some(entry) = self.next_entry(0, rows.id, rows.tokens, n).filter(|_| n > 0) else {
                return self.release(rows.id);
            };
            let job = ProposalJob { id: rows.id, tokens: rows.tokens, salt: 0, max: 0, next: 0.0, min_chance: 0.0 };
            self.compute(exec, &[job], &[BatchEntry { picks: false, ..entry }]);
        }
    }

    /// The next `n` tokens of a sequence; `None` if its context or the pages do not suffice.
    fn next_entry(&mut self, job: usize, id: RequestId, tokens: &[u32], n: usize) -> Option<BatchEntry> {
        let pos = self.extend(id, n)?;
        let first = self.sequences.get(&id)?.first + pos;
        Some(BatchEntry { job, tokens: tokens.get(first..first + n)?.to_vec(), pos, picks: true })
    }

    /// Reserves `n` more positions of a sequence. Returns the first, or `None` if the context or the pages do not suffice.
    fn extend(&mut self, id: RequestId, n: usize) -> Option<usize> {
        let pages = &mut self.sequences.get_mut(&id)?.pages;
        let pos = pages.n_tokens();
        (pos + n <= self.n_ctx && self.arena.extend(pages, pos + n).is_ok()).then_some(pos)
    }
}

impl Guesser for MtpHead {
    fn catch_up(&mut self, jobs: &[ProposalJob<'_>], mut budget: usize) -> Vec<BatchEntry> {
        let (d, mut batch) = (self.model.config.n_embd, Vec::with_capacity(jobs.len()));
        for (i, job) in jobs.iter().enumerate().filter(|(_, job)| job.max > 0) {
            let Some(sequence) = self.sequences.get_mut(&job.id) else { continue };
            sequence.drop_guesses(&mut self.arena);
            let n = sequence.n_pending(job.tokens.len(), d);
            // after the last token, whose hidden state before is known
            let is_ready = sequence.first + sequence.n_computed + n == job.tokens.len();
            if n == 0 || n > budget || !is_ready {
                continue;
            }
            let Some(entry) = self.next_entry(i, job.id, job.tokens, n) else { continue };
            budget -= n;
            batch.push(entry);
        }
        batch
    }

    fn compute(&mut self, exec: Exec<'_>, jobs: &[ProposalJob<'_>], batch: &[BatchEntry]) -> Vec<Guess> {
        let (layout, d) = (self.arena.layout().clone(), self.model.config.n_embd);
        let Ok(memory) = self.arena.memory_mut(&layout) else { return Vec::new() };
        let (mut runs, mut row) = (Vec::with_capacity(batch.len()), 0);
        for BatchEntry { job, tokens, .. } in batch {
            let Some(sequence) = self.sequences.get_mut(&jobs[*job].id) else { return Vec::new() };
            if sequence.hidden.is_empty() {
                self.scratch.set_hidden_before(row, &sequence.before_guess, d);
            } else {
                let n = tokens.len() * d;
                self.scratch.set_hidden_before(row, &sequence.hidden[..n], d);
                sequence.hidden.drain(..n);
                sequence.n_computed += tokens.len();
            }
            row += tokens.len();
        }
        for BatchEntry { job, tokens, pos, picks } in batch {
            let Some(sequence) = self.sequences.get(&jobs[*job].id) else { return Vec::new() };
            let pages = &sequence.pages.pages;
            runs.push(Run { tokens, pos: *pos, pages, state: 0, n_logits: usize::from(*picks) });
        }
        let picks = logits_rows(&runs);
        self.model.batch(exec, &runs, KvRef { layout: &layout, memory }, &mut self.scratch, None);
        drop(runs);
        let picking = batch.iter().zip(&picks).filter(|(entry, _)| entry.picks);
        for (entry, row) in picking {
            let hidden = self.model.hidden_states(exec, row.clone(), &self.scratch);
            if let Some(sequence) = self.sequences.get_mut(&jobs[entry.job].id) {
                sequence.before_guess = hidden;
            }
        }
        let out = self.model.logits(exec, &picks, &mut self.scratch, None);
        (0..out.len()).map(|row| Guess::of(out.logits(row))).collect()
    }

    fn append(&mut self, id: RequestId, _: u32) -> Option<usize> {
        self.extend(id, 1)
    }
}

impl Sequence {
    /// Position of the row that is expected next; `None` before the first.
    fn next_position(&self, n_embd: usize) -> Option<usize> {
        self.first.checked_sub(1).map(|before| before + self.n_computed + self.hidden.len() / n_embd)
    }

    /// Tokens that can be computed now: those known, of `n_tokens`, with hidden states before them.
    fn n_pending(&self, n_tokens: usize, n_embd: usize) -> usize {
        n_tokens.saturating_sub(self.first + self.n_computed).min(self.hidden.len() / n_embd)
    }

    fn drop_guesses(&mut self, arena: &mut KvArena) {
        arena.truncate(&mut self.pages, self.n_computed);
    }
}
