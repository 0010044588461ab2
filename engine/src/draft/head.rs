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

use super::memory::DraftMemory;
use super::proposal::{BatchEntry, Guess, Guesser, ProposalJob, Proposals, propose};
use crate::engine::{EngineOptions, RequestId};
use crate::error::DraftModelError;
use crate::kv::{KvArena, SeqPages};
use crate::model::{Exec, KvRef, Model, Run, logits_rows};
use crate::pool::Pool;

/// Tokens of a sequence that wait for the next proposal. If there are more, they are computed at once.
const MAX_PENDING: usize = 32;

/// An MTP head, and its state of the sequences of an engine.
pub(crate) struct MtpHead {
    memory: DraftMemory,
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
        Ok(MtpHead { memory: DraftMemory::new(model, target, pool, options, 0)?, sequences: BTreeMap::new() })
    }

    pub(super) fn memory(&self) -> &DraftMemory {
        &self.memory
    }

    pub(super) fn release(&mut self, id: RequestId) {
        if let Some(sequence) = self.sequences.remove(&id) {
            self.memory.arena.release(sequence.pages);
        }
    }

    pub(super) fn release_memory(&mut self) {
        if self.sequences.is_empty() {
            self.memory.renew();
        }
    }

    pub(super) fn propose(&mut self, exec: Exec<'_>, jobs: &[ProposalJob<'_>], budget: usize) -> Proposals {
        let budget = budget.min(self.memory.max_rows);
        propose(self, exec, jobs, budget)
    }

    /// Takes what the model has computed of a sequence, without rejected drafts.
    pub(super) fn observe(&mut self, exec: Exec<'_>, rows: &ComputedRows<'_>) {
        let (d, arena) = (self.memory.model.config.n_embd, &mut self.memory.arena);
        let sequence = self.sequences.entry(rows.id).or_default();
        if sequence.next_position(d) != Some(rows.pos) {
            arena.release(core::mem::take(&mut sequence.pages));
            *sequence = Sequence { first: rows.pos + 1, pages: arena.acquire(&[], 0), ..Sequence::default() };
        }
        sequence.hidden.extend_from_slice(rows.hidden);
        while let Some(sequence) = self.sequences.get_mut(&rows.id)
            && sequence.hidden.len() > MAX_PENDING * d
        {
            sequence.drop_guesses(&mut self.memory.arena);
            let n = sequence.n_pending(rows.tokens.len(), d).min(self.memory.max_rows);
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
        self.memory.extend(&mut self.sequences.get_mut(&id)?.pages, n)
    }
}

impl Guesser for MtpHead {
    fn catch_up(&mut self, jobs: &[ProposalJob<'_>], mut budget: usize) -> Vec<BatchEntry> {
        let (d, mut batch) = (self.memory.model.config.n_embd, Vec::with_capacity(jobs.len()));
        for (i, job) in jobs.iter().enumerate().filter(|(_, job)| job.max > 0) {
            let Some(sequence) = self.sequences.get_mut(&job.id) else { continue };
            sequence.drop_guesses(&mut self.memory.arena);
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
        let (layout, d) = (self.memory.arena.layout().clone(), self.memory.model.config.n_embd);
        let Ok(memory) = self.memory.arena.memory_mut(&layout) else { return Vec::new() };
        let (mut runs, mut row) = (Vec::with_capacity(batch.len()), 0);
        for BatchEntry { job, tokens, .. } in batch {
            let Some(sequence) = self.sequences.get_mut(&jobs[*job].id) else { return Vec::new() };
            if sequence.hidden.is_empty() {
                self.memory.scratch.set_hidden_before(row, &sequence.before_guess, d);
            } else {
                let n = tokens.len() * d;
                self.memory.scratch.set_hidden_before(row, &sequence.hidden[..n], d);
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
        self.memory.model.batch(exec, &runs, KvRef { layout: &layout, memory }, &mut self.memory.scratch, None);
        drop(runs);
        let picking = batch.iter().zip(&picks).filter(|(entry, _)| entry.picks);
        for (entry, row) in picking {
            let hidden = self.memory.model.hidden_states(exec, row.clone(), &self.memory.scratch);
            if let Some(sequence) = self.sequences.get_mut(&jobs[entry.job].id) {
                sequence.before_guess = hidden;
            }
        }
        let out = self.memory.model.logits(exec, &picks, &mut self.memory.scratch, None);
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
