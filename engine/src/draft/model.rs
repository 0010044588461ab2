//! A draft model: a small model of the same vocabulary proposes its most probable tokens (Leviathan et al.,
//! arXiv:2211.17192).
//!
//! The model has KV pages of its own with a prefix tree, so that prompts with a known prefix are not computed again. The
//! tokens of a sequence are computed only when the model is to propose some, at most a given number per step; until it has
//! caught up, it proposes none. All sequences of a step are computed in one batch. Where no page is free, a sequence gets
//! no proposal.
//!
//! A draft model with recurrent layers saves the state of a sequence before the first guess that it computes. If the answer
//! is not as guessed, it returns to that state and computes the accepted tokens again, in the batch that gives the next
//! guess. At most [`MAX_STATES`] sequences have states; the others get no proposal.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::memory::DraftMemory;
use super::proposal::{BatchEntry, Guess, Guesser, ProposalJob, Proposals, propose};
use crate::engine::{EngineOptions, RequestId};
use crate::error::DraftModelError;
use crate::kernels::attention::PAGE;
use crate::kv::{KvArena, SeqPages};
use crate::model::{Exec, KvRef, Model, Run, logits_rows};
use crate::pool::Pool;

/// Sequences with recurrent states: each needs two, and a step rarely drafts for more.
const MAX_STATES: usize = 8;

/// A draft model, and its state of the sequences of an engine.
pub(crate) struct DraftModel {
    memory: DraftMemory,
    sequences: BTreeMap<RequestId, Sequence>,
}

/// What is computed of a sequence: its first tokens, then guesses.
#[derive(Default)]
struct Sequence {
    pages: SeqPages,
    /// Tokens of the sequence in the pages.
    n_computed: usize,
    /// Guesses in the pages after them.
    guesses: Vec<u32>,
}

impl DraftModel {
    /// Slots for recurrent states: of sequences, the saved ones, and snapshots of prompts.
    fn n_states(options: &EngineOptions) -> usize {
        3 * options.max_seqs.min(MAX_STATES) + 2
    }

    /// Bytes of the KV pages and recurrent states.
    pub(crate) fn kv_bytes(draft: &Model, target: &Model, options: &EngineOptions) -> usize {
        let pages = DraftMemory::n_pages(target, options).saturating_mul(draft.kv_layout(options.kv_type).page_bytes());
        pages.saturating_add(DraftModel::n_states(options).saturating_mul(draft.state_bytes()))
    }

    /// Reserves KV memory and working memory.
    pub(super) fn new(
        model: Arc<Model>,
        target: &Model,
        pool: &dyn Pool,
        options: &EngineOptions,
    ) -> Result<DraftModel, DraftModelError> {
        let memory = DraftMemory::new(model, target, pool, options, DraftModel::n_states(options))?;
        Ok(DraftModel { memory, sequences: BTreeMap::new() })
    }

    pub(super) fn memory(&self) -> &DraftMemory {
        &self.memory
    }

    /// Ends a sequence with these tokens.
    pub(crate) fn release(&mut self, id: RequestId, tokens: &[u32], salt: u64) {
        let Some(mut sequence) = self.sequences.remove(&id) else { return };
        sequence.drop_guesses(&mut self.memory.arena, tokens);
        let n_computed = sequence.n_computed.min(tokens.len());
        self.memory.arena.publish(&sequence.pages, &tokens[..n_computed], salt);
        self.memory.arena.release(sequence.pages);
    }

    /// Evicts the cached pages of a prefix.
    pub(crate) fn evict_prefix(&mut self, tokens: &[u32], salt: u64) {
        self.memory.arena.evict_prefix(tokens, salt);
    }

    /// Evicts up to `n` cached pages.
    pub(crate) fn evict_idle(&mut self, n: usize) {
        self.memory.arena.evict_idle(n);
    }

    /// Releases the memory of all pages, if no sequence uses one.
    pub(crate) fn release_memory(&mut self) {
        if self.sequences.is_empty() {
            self.memory.renew();
        }
    }

    /// Proposes tokens. Computes at most `budget` tokens that the sequences have got since their last proposals.
    pub(crate) fn propose(&mut self, exec: Exec<'_>, jobs: &[ProposalJob<'_>], budget: usize) -> Proposals {
        let budget = budget.min(self.memory.max_rows);
        propose(self, exec, jobs, budget)
    }

    /// Keeps snapshots of the states that are at the last page boundary of their tokens.
    fn keep_states(&mut self, jobs: &[ProposalJob<'_>], batch: &[BatchEntry]) {
        if !self.memory.arena.has_states() {
            return;
        }
        for entry in batch.iter().filter(|entry| !entry.picks) {
            let (job, end) = (&jobs[entry.job], entry.pos + entry.tokens.len());
            let is_last = end.is_multiple_of(PAGE) && end + PAGE >= job.tokens.len();
            if let Some(sequence) = self.sequences.get(&job.id).filter(|_| is_last) {
                self.memory.arena.snapshot(&sequence.pages, &job.tokens[..end], job.salt);
            }
        }
    }

    /// Saves the recurrent state of a sequence before its first guess, if it has one. Returns whether guesses may be
    /// computed.
    fn saves_state(&mut self, id: RequestId) -> bool {
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        !self.memory.arena.has_states()
            || !sequence.guesses.is_empty()
            || self.memory.arena.save_state(&mut sequence.pages)
    }

    /// Reserves `n` more positions of a sequence. Returns the first, or `None` if the context or the pages do not suffice.
    fn extend(&mut self, id: RequestId, n: usize) -> Option<usize> {
        self.memory.extend(&mut self.sequences.get_mut(&id)?.pages, n)
    }
}

impl Guesser for DraftModel {
    /// Those with the fewest first.
    fn catch_up(&mut self, jobs: &[ProposalJob<'_>], mut budget: usize) -> Vec<BatchEntry> {
        let mut pending: Vec<(usize, usize)> = Vec::with_capacity(jobs.len());
        for (i, job) in jobs.iter().enumerate().filter(|(_, job)| job.max > 0) {
            let arena = &mut self.memory.arena;
            let known = self.sequences.remove(&job.id).and_then(|mut sequence| {
                sequence.drop_guesses(arena, job.tokens);
                if sequence.n_computed < job.tokens.len() {
                    return Some(sequence);
                }
                // a recurrent state cannot go back by one token
                arena.release(sequence.pages);
                None
            });
            let sequence = known.unwrap_or_else(|| {
                let pages = arena.acquire(job.tokens, job.salt);
                Sequence { n_computed: pages.n_cached, pages, guesses: Vec::new() }
            });
            if arena.has_states() && (sequence.pages.state.is_none() || self.sequences.len() >= MAX_STATES) {
                arena.release(sequence.pages);
                continue;
            }
            pending.push((job.tokens.len() - sequence.n_computed, i));
            self.sequences.insert(job.id, sequence);
        }
        pending.sort_unstable();
        let mut batch = Vec::with_capacity(pending.len());
        for (n_pending, i) in pending {
            let (mut n, job) = (n_pending.min(budget), &jobs[i]);
            if n == 0 {
                break;
            }
            // pauses for a snapshot at the last page boundary of a prompt
            let n_computed = job.tokens.len() - n_pending;
            let boundary = ((job.tokens.len() - 1) / PAGE * PAGE).saturating_sub(n_computed);
            if self.memory.arena.has_states() && n > boundary && boundary > PAGE {
                n = boundary;
            }
            let Some(pos) = self.extend(job.id, n) else { continue };
            batch.push(BatchEntry { job: i, tokens: job.tokens[pos..pos + n].to_vec(), pos, picks: n == n_pending });
            if let Some(sequence) = self.sequences.get_mut(&job.id) {
                sequence.n_computed += n;
            }
            budget -= n;
        }
        batch
    }

    fn compute(&mut self, exec: Exec<'_>, jobs: &[ProposalJob<'_>], batch: &[BatchEntry]) -> Vec<Guess> {
        let layout = self.memory.arena.layout().clone();
        let Ok(memory) = self.memory.arena.memory_mut(&layout) else { return Vec::new() };
        let runs: Vec<Run<'_>> = batch
            .iter()
            .filter_map(|BatchEntry { job, tokens, pos, picks }| {
                let SeqPages { pages, state, .. } = &self.sequences.get(&jobs[*job].id)?.pages;
                let state = state.unwrap_or(0);
                Some(Run { tokens, pos: *pos, pages, state, n_logits: usize::from(*picks) })
            })
            .collect();
        let picks = logits_rows(&runs);
        self.memory.model.batch(exec, &runs, KvRef { layout: &layout, memory }, &mut self.memory.scratch, None);
        let out = self.memory.model.logits(exec, &picks, &mut self.memory.scratch, None);
        let guesses = (0..out.len()).map(|row| Guess::of(out.logits(row))).collect();
        self.keep_states(jobs, batch);
        guesses
    }

    fn append(&mut self, id: RequestId, token: u32) -> Option<usize> {
        if !self.saves_state(id) {
            return None;
        }
        let pos = self.extend(id, 1)?;
        self.sequences.get_mut(&id)?.guesses.push(token);
        Some(pos)
    }
}

impl Sequence {
    /// Drops the guesses that differ from the tokens of the sequence; with recurrent states all of them, unless all are right.
    /// At least the last token is left to compute: its row gives the next guess.
    fn drop_guesses(&mut self, arena: &mut KvArena, tokens: &[u32]) {
        let guessed = self.guesses.iter().zip(&tokens[self.n_computed.min(tokens.len())..]);
        let n_right = guessed.take_while(|(guess, token)| guess == token).count();
        let (n_guessed, most) = (self.guesses.len(), tokens.len().saturating_sub(1));
        self.guesses.clear();
        if arena.has_states() {
            let keeps = n_right == n_guessed && self.n_computed + n_right <= most;
            arena.settle_state(&mut self.pages, keeps);
            self.n_computed += if keeps { n_right } else { 0 };
        } else {
            self.n_computed = (self.n_computed + n_right).min(most);
        }
        arena.truncate(&mut self.pages, self.n_computed);
    }
}

/// Checks that a model can draft for another: both are decoders, of the same vocabulary.
///
/// # Errors
/// [`DraftModelError`] names the first token that differs.
pub fn check_draft_model(draft: &Model, target: &Model) -> Result<(), DraftModelError> {
    if !draft.config.causal || !target.config.causal {
        return Err(DraftModelError::Encoder);
    }
    let sizes = [draft, target].map(|model| (model.tokenizer.n_vocab(), model.config.n_vocab));
    if sizes[0] != sizes[1] {
        let [draft, target] = sizes.map(|(tokens, rows)| tokens.max(rows));
        return Err(DraftModelError::VocabularySize { draft, target });
    }
    let piece = |model: &Model, id| model.tokenizer.piece(id).unwrap_or_default().to_vec();
    for id in 0..sizes[0].0 as u32 {
        if draft.tokenizer.piece(id) != target.tokenizer.piece(id) {
            return Err(DraftModelError::Token { id, draft: piece(draft, id), target: piece(target, id) });
        }
    }
    Ok(())
}

/// Bytes that decoding one token reads of a draft model, in those of its target: the cost of a draft step before it is
/// measured.
pub(crate) fn relative_cost(draft: &Model, target: &Model) -> f32 {
    draft.decode_bytes() as f32 / (target.decode_bytes() as f32).max(1.0)
}
