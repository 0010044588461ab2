//! Drafts in the engine: the draft model, what steps cost, and the draft tokens of a batch.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::plan::BatchEntry;
use super::{Engine, EngineOptions, RequestId};
use crate::draft::{
    ComputedRows, DraftCost, DraftSource, ProposalJob, Speculator, StepCosts, allot, draft_limits, relative_cost,
    worthwhile_length,
};
use crate::error::DraftModelError;
use crate::kv::KvStats;
use crate::model::{Exec, Model};
use crate::pool::Pool;

/// A batch of the draft model with at most this many rows costs as much as one of one row.
const FEW_ROWS: usize = 4;

/// Hidden states of a request's rows in a batch.
pub(super) struct HiddenRows {
    id: RequestId,
    /// Position of the first.
    pos: usize,
    /// (rows, n_embd)
    hidden: Vec<f32>,
}

impl Engine {
    /// Sets a model of the same vocabulary, or the model's own MTP head
    /// ([`Model::mtp_head`](crate::model::Model::mtp_head)), that proposes tokens where lookup is not confident
    /// ([`Request::speculation`](crate::engine::Request::speculation)), and reserves its memory. Changes no byte of an answer.
    ///
    /// # Errors
    /// [`DraftModelError`] names the first token that differs, or says what else forbids it; the engine has not changed.
    pub fn set_draft_model(&mut self, draft: Arc<Model>, pool: &dyn Pool) -> Result<(), DraftModelError> {
        let options = EngineOptions { batch_tokens: self.max_batch_tokens, ..self.options };
        let cost = DraftCost::estimated(relative_cost(&draft, &self.model));
        self.draft_model = Some(DraftSource::new(draft, &self.model, pool, &options)?);
        self.draft_cost = cost;
        Ok(())
    }

    /// The draft model.
    pub fn draft_model(&self) -> Option<&Arc<Model>> {
        self.draft_model.as_ref().map(DraftSource::model)
    }

    /// Statistics of the draft model's KV memory.
    pub fn draft_kv_stats(&self) -> Option<KvStats> {
        self.draft_model.as_ref().map(DraftSource::kv_stats)
    }

    /// Tells the engine how long the last step took, in any unit. From these times it chooses the number of draft tokens
    /// that pays ([`Request::speculation`](crate::engine::Request::speculation)). Changes no result.
    pub fn record_step_time(&mut self, time: f32) {
        match (self.decode_rows.take(), self.draft_batches) {
            (Some(rows), Some(0)) => self.costs.record(rows, time),
            (Some(rows), Some(n)) => self.draft_cost.record(&self.costs, rows, n, time),
            _ => {}
        }
    }

    /// States the costs of steps of 1, 2, ... rows, in any unit, in place of measured times; further rows cost as much as
    /// the last. Changes no result.
    pub fn set_step_costs(&mut self, costs: &[f32]) {
        self.costs = StepCosts::fixed(costs);
    }

    /// States the cost of a step of the draft model, in steps of one row of the model, in place of measured times. Changes
    /// no result.
    pub fn set_draft_cost(&mut self, cost: f32) {
        self.draft_cost = DraftCost::fixed(cost);
    }

    /// Adds draft tokens to the decode rows of a batch, within the limits of the batch and the pages that are free.
    /// Returns what the proposals cost, in the unit of the step costs.
    pub(super) fn add_drafts(&mut self, exec: Exec<'_>, plan: &mut [BatchEntry]) -> f32 {
        self.draft_batches = Some(0);
        let (n_vocab, mut drafting) = (self.model.config.n_vocab, Vec::new());
        for (i, p) in plan.iter().enumerate().filter(|(_, p)| p.n_tokens == 1) {
            let a = &mut self.active[p.request];
            let limit = a.max_draft(&self.arena);
            if let (Some(limit), Some(speculator)) = (limit, &mut a.speculator) {
                drafting.push(i);
                speculator.propose(limit, n_vocab);
            }
        }
        if drafting.is_empty() {
            return 0.0;
        }
        let n_rows: usize = plan.iter().map(|p| p.n_tokens).sum();
        let decode = plan.iter().filter(|p| p.n_tokens == 1).count();
        let free = self.options.batch_tokens.saturating_sub(n_rows).min(self.options.draft_rows);
        let requests: Vec<usize> = drafting.iter().map(|&i| plan[i].request).collect();
        let spent = self.ask_draft_model(exec, &requests, (decode, n_rows - decode), free);
        let chances = requests.iter().map(|&i| self.active[i].speculator.as_ref().map(Speculator::chances));
        let chances: Vec<Vec<f32>> = chances.map(Option::unwrap_or_default).collect();
        let drafts = allot(&chances, (decode, n_rows - decode), free, &self.costs, spent);
        for (i, n) in drafting.into_iter().zip(drafts) {
            let a = &mut self.active[plan[i].request];
            // requests before this one may have taken the free pages
            let n = n.min(a.max_draft(&self.arena).unwrap_or(0));
            let is_paged = a.ring.is_none() && n > 0;
            if is_paged && self.arena.extend(&mut a.pages, a.n_computed + 1 + n).is_err() {
                continue;
            }
            // without a copy of the recurrent state a rejected token would stay in it
            if n > 0 && self.arena.has_states() && !self.arena.save_state(&mut a.pages) {
                continue;
            }
            if let (Some(speculator), Some(last)) = (&mut a.speculator, a.tokens.last()) {
                speculator.draft(*last, n);
                plan[i].n_draft = n;
            }
        }
        spent
    }

    /// Hidden states of the last batch that the MTP head reads, by request.
    pub(super) fn hidden_of_drafts(&self, exec: Exec<'_>, plan: &[BatchEntry]) -> Vec<HiddenRows> {
        let (mut row, mut all) = (0, Vec::new());
        for p in plan.iter().filter(|_| self.draft_model.as_ref().is_some_and(DraftSource::reads_hidden)) {
            let a = &self.active[p.request];
            if a.speculator.is_some() {
                let hidden = self.model.hidden_states(exec, row..row + p.n_rows(), &self.scratch);
                all.push(HiddenRows { id: a.id, pos: a.n_computed, hidden });
            }
            row += p.n_rows();
        }
        all
    }

    /// Gives the MTP head the hidden states of rows that were not rejected.
    pub(super) fn show_hidden(&mut self, exec: Exec<'_>, all: &[HiddenRows]) {
        let Some(draft) = &mut self.draft_model else { return };
        for HiddenRows { id, pos, hidden } in all {
            let Some(a) = self.active.iter().find(|a| a.id == *id) else { continue };
            let n = a.n_computed.saturating_sub(*pos) * self.model.config.n_embd;
            if n > 0 {
                draft.observe(exec, &ComputedRows { id: *id, tokens: &a.tokens, pos: *pos, hidden: &hidden[..n] });
            }
        }
    }

    /// Lets the draft model propose tokens for those requests whose drafter is not confident, where that is expected to
    /// pay. Returns what it costs, in the unit of the step costs.
    fn ask_draft_model(
        &mut self,
        exec: Exec<'_>,
        requests: &[usize],
        (decode, prefill): (usize, usize),
        free: usize,
    ) -> f32 {
        let Some(draft) = &mut self.draft_model else { return 0.0 };
        let has_others = decode > 1 || prefill > 0;
        let rows = if has_others { self.options.prefill_chunk } else { self.options.batch_tokens };
        let limits = draft_limits((decode, has_others), (free, rows.max(requests.len())), &self.costs, self.draft_cost);
        if limits.max == 0 || limits.rows == 0 {
            return 0.0;
        }
        let mut asked = Vec::new();
        for &i in requests {
            let a = &mut self.active[i];
            let limit = a.max_draft(&self.arena).unwrap_or(0).min(limits.max);
            let length = |chances, max| worthwhile_length(chances, decode, max, &self.costs, self.draft_cost);
            if let Some(speculator) = &mut a.speculator
                && let Some((max, next, min_chance)) = speculator.ask_model(limit, length)
            {
                asked.push((i, max, next, min_chance));
            }
        }
        let job = |&(i, max, next, min_chance): &(usize, usize, f32, f32)| {
            let a = &self.active[i];
            let (id, tokens, salt) = (a.id, &a.tokens[..], a.request.cache_salt);
            ProposalJob { id, tokens, salt, max, next, min_chance }
        };
        let jobs: Vec<ProposalJob<'_>> = asked.iter().map(job).collect();
        let proposals = draft.propose(exec, &jobs, limits.rows);
        self.draft_batches = (proposals.max_rows <= FEW_ROWS).then_some(proposals.n_batches);
        for ((i, ..), guesses) in asked.into_iter().zip(proposals.guesses) {
            if let (Some(speculator), Some(guesses)) = (&mut self.active[i].speculator, guesses) {
                speculator.set_guesses(&guesses);
            }
        }
        proposals.n_batches as f32 * self.draft_cost.at(&self.costs)
    }
}
