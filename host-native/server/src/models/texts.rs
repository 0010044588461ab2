//! Texts that a worker embeds: how many are computed at once, how much of them between two engine steps, and which is refused
//! for the faults that it causes.

use std::mem;
use std::sync::Arc;

use starling::embed::{Pooling, Text};
use starling_host::clock::unix_now;

use super::worker::{Worker, raise_injected};
use crate::observe::failures::Failure;
use crate::schedule::queue::{Failed, TextJob, Update};

/// Lost workers after which a text is refused.
const MAX_FAULTS: u32 = 2;

/// Number of leading texts to compute in one batch, of the `fit` that fit: one that a worker was lost with is computed alone,
/// so that another fault is its own.
fn batch_len(n_faults: impl IntoIterator<Item = u32>, fit: usize) -> usize {
    let mut n_faults = n_faults.into_iter().take(fit.max(1)).peekable();
    match n_faults.peek() {
        Some(0) => n_faults.take_while(|n| *n == 0).count(),
        Some(_) => 1,
        None => 0,
    }
}

/// Layers of a batch of `n_tokens` tokens to compute before the next engine step: about as much work as `step_tokens` tokens
/// through all of `n_layers`, and at least one layer.
fn layers_per_turn(n_tokens: usize, n_layers: usize, step_tokens: usize) -> usize {
    (step_tokens.saturating_mul(n_layers) / n_tokens.max(1)).clamp(1, n_layers.max(1))
}

/// A text for the embedder; `pooling` is that of the model.
fn form(job: &TextJob, pooling: Pooling) -> Text<'_> {
    let TextJob { tokens, dimensions, .. } = job;
    Text { tokens, pooling: job.pooling.unwrap_or(pooling), dimensions: *dimensions, normalise: true }
}

impl Worker {
    /// Takes texts from the queue, about a batch of them.
    pub fn take_texts(&mut self) {
        if !self.texts.is_empty() {
            return;
        }
        let options = self.engines.embedder.options();
        let (mut left, max_texts) = (options.batch_tokens, options.max_texts);
        let mut waiting = self.shared.queue.lock();
        // the last text may exceed the batch; it is in the next one
        while self.texts.len() < max_texts && left > 0 {
            let Some(queued) = waiting.texts.take(|_| true) else { break };
            left = left.saturating_sub(queued.job.tokens.len());
            self.texts.push(queued);
        }
    }

    /// Computes some layers of a batch of texts, so that running answers go on between them.
    pub fn embed(&mut self) {
        self.is_embedding = true;
        if self.n_batch == 0 && !self.begin_batch() {
            self.is_embedding = false;
            return;
        }
        raise_injected(&self.status, self.shared.stall_timeout);
        let batch = &self.texts[..self.n_batch];
        let n_tokens = batch.iter().map(|queued| queued.job.tokens.len()).sum();
        let [batch_tokens, prefill_chunk] = self.shared.batch.current();
        let step_tokens = if self.engines.active() > 0 { prefill_chunk } else { batch_tokens };
        let (shared, embedder) = (&self.shared, &mut self.engines.embedder);
        let n_layers = layers_per_turn(n_tokens, embedder.n_layers(), step_tokens);
        let forms: Vec<Text<'_>> = batch.iter().map(|queued| form(&queued.job, shared.pooling)).collect();
        let is_done = self.threads.run(|pool| {
            embedder.advance(shared.cpu, pool, &forms, n_layers, &mut |i, vector| {
                batch[i].job.send(Update::Vector { vector: vector.map(<[f32]>::to_vec) });
            })
        });
        self.is_embedding = false;
        if is_done {
            shared.metrics.embedded(batch.len(), n_tokens);
            batch.iter().for_each(|queued| shared.breaker.success(&queued.tenant));
            self.end_batch();
        }
    }

    /// Begins a batch of the texts that were taken. Returns whether there is one.
    fn begin_batch(&mut self) -> bool {
        let queue = &self.shared.queue;
        self.texts.retain(|queued| {
            let is_wanted = !queued.job.to.is_closed();
            if !is_wanted {
                queue.lock().texts.release(&queued.tenant);
            }
            is_wanted
        });
        let embedder = &mut self.engines.embedder;
        let fit = embedder.fit(self.texts.iter().map(|queued| queued.job.tokens.len()));
        self.n_batch = batch_len(self.texts.iter().map(|queued| queued.job.n_faults), fit);
        let batch = &self.texts[..self.n_batch];
        let forms: Vec<Text<'_>> = batch.iter().map(|queued| form(&queued.job, self.shared.pooling)).collect();
        if forms.is_empty() {
            return false;
        }
        let Err(e) = embedder.begin(&forms) else { return true };
        batch.iter().for_each(|queued| queued.job.send(Update::Failed(e.clone().into())));
        self.end_batch();
        false
    }

    /// Releases the texts of the batch, which have their vectors or an error.
    fn end_batch(&mut self) {
        let mut waiting = self.shared.queue.lock();
        self.texts.drain(..mem::take(&mut self.n_batch)).for_each(|queued| waiting.texts.release(&queued.tenant));
    }

    /// Returns the texts to the queue. The first `n_suspects` were computed at the time of a fault; those that were so too
    /// often are refused.
    pub fn put_back_texts(&mut self, n_suspects: usize, fault: &Arc<str>) {
        self.n_batch = 0;
        let mut waiting = self.shared.queue.lock();
        for (i, mut text) in self.texts.drain(..).enumerate() {
            text.job.n_faults += u32::from(i < n_suspects);
            if text.job.n_faults < MAX_FAULTS {
                waiting.texts.put_back(text);
                continue;
            }
            self.shared.failures.add(Failure {
                time: unix_now(),
                request_id: text.job.request_id.to_string(),
                model: self.shared.name.to_string(),
                worker: self.id,
                fault: fault.to_string(),
                tokens: text.job.tokens.len(),
            });
            self.shared.metrics.failed(&Failed::Worker);
            waiting.texts.release(&text.tenant);
            text.job.send(Update::Failed(Failed::Worker));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    #[test]
    fn a_poison_text_is_refused_and_its_neighbours_are_computed() {
        for (n, poison) in [(1, vec![0]), (8, vec![3]), (20, vec![0, 7, 19]), (5, vec![])] {
            let mut texts: VecDeque<(usize, u32)> = (0..n).map(|i| (i, 0)).collect();
            let (mut computed, mut refused, mut n_faults) = (Vec::new(), Vec::new(), 0);
            while !texts.is_empty() {
                let len = batch_len(texts.iter().map(|(_, faults)| *faults), 4);
                let mut batch: Vec<_> = texts.drain(..len).collect();
                if !batch.iter().any(|(i, _)| poison.contains(i)) {
                    computed.extend(batch.into_iter().map(|(i, _)| i));
                    continue;
                }
                n_faults += 1;
                batch.iter_mut().for_each(|(_, faults)| *faults += 1);
                refused.extend(batch.iter().filter(|(_, faults)| *faults >= MAX_FAULTS).map(|(i, _)| *i));
                batch
                    .into_iter()
                    .rev()
                    .filter(|(_, faults)| *faults < MAX_FAULTS)
                    .for_each(|text| texts.push_front(text));
            }
            computed.sort_unstable();
            let healthy: Vec<usize> = (0..n).filter(|i| !poison.contains(i)).collect();
            assert_eq!((computed, refused), (healthy, poison.clone()));
            assert!(n_faults <= 2 * poison.len(), "{n_faults}");
        }
    }

    #[test]
    fn a_turn_is_bounded_by_tokens() {
        // (tokens, layers, budget) and the layers of a turn
        let cases = [((2048, 28, 24), 1), ((100, 28, 24), 6), ((10, 28, 24), 28), ((1, 1, 1), 1), ((500, 12, 128), 3)];
        for ((n_tokens, n_layers, step), expected) in cases {
            let found = layers_per_turn(n_tokens, n_layers, step);
            assert_eq!(found, expected, "{n_tokens} {n_layers} {step}");
            assert!(found == 1 || found * n_tokens <= step * n_layers || found == n_layers);
        }
    }
}
