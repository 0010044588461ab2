//! Keeps steps short on a thread that has other work: chooses the tokens of a batch by the duration of the last.

use crate::session::Session;

/// Tokens of the first batch of a model whose speed is not known.
const FIRST_BATCH_TOKENS: usize = 4;

/// The tokens of the next batch.
#[derive(Debug)]
pub(crate) struct Pacer {
    max_step_ms: f64,
    max_tokens: usize,
    batch_tokens: usize,
}

impl Pacer {
    /// Batches of at most `max_tokens` tokens, and steps of about `max_step_ms` at most.
    pub(crate) fn new(max_step_ms: f64, max_tokens: usize) -> Pacer {
        let max_tokens = max_tokens.max(1);
        Pacer { max_step_ms, max_tokens, batch_tokens: FIRST_BATCH_TOKENS.min(max_tokens) }
    }

    pub(crate) fn batch_tokens(&self) -> usize {
        self.batch_tokens
    }

    /// Chooses the next batch after a step of `tokens` tokens. A duration that is not known, NaN, changes nothing.
    pub(crate) fn record(&mut self, tokens: usize, step_ms: f64) {
        let before = self.batch_tokens;
        if step_ms > self.max_step_ms && tokens > 1 {
            self.batch_tokens = (before.min(tokens) / 2).max(1);
        } else if step_ms < self.max_step_ms / 3.0 && tokens >= before {
            self.batch_tokens = (before * 2).min(self.max_tokens);
        }
    }
}

impl Session {
    /// Takes the duration of a step of `tokens` tokens, NaN if it is not known. Changes no result.
    pub(crate) fn record_step(&mut self, tokens: usize, step_ms: f64) {
        self.engine.record_step_time(step_ms as f32);
        self.pages.step_ms = step_ms;
        if let Some(pacer) = &mut self.pacer {
            pacer.record(tokens, step_ms);
            self.limit_batch();
        }
    }

    /// Limits the next batch to the pacer's choice.
    pub(crate) fn limit_batch(&mut self) {
        if let Some(pacer) = &self.pacer {
            let tokens = pacer.batch_tokens();
            self.engine.set_batch_limits(tokens, (tokens / 2).max(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_follow_the_durations() {
        let steps = [
            // fast: doubled up to the limit
            (4, 1.0, 8),
            (8, 1.0, 16),
            (16, 1.0, 20),
            (20, 1.0, 20),
            // in between, unknown, or not full: as it was
            (20, 10.0, 20),
            (20, f64::NAN, 20),
            // slow: half of what the step had
            (20, 40.0, 10),
            (6, 40.0, 3),
            (2, 1.0, 3),
            (3, 40.0, 1),
            // a decode step of one token cannot be shortened
            (1, 40.0, 1),
            (1, 1.0, 2),
        ];
        let mut pacer = Pacer::new(16.0, 20);
        assert_eq!(pacer.batch_tokens(), FIRST_BATCH_TOKENS);
        for (i, (tokens, ms, want)) in steps.into_iter().enumerate() {
            pacer.record(tokens, ms);
            assert_eq!(pacer.batch_tokens(), want, "after step {i}");
        }
        assert_eq!(Pacer::new(16.0, 2).batch_tokens(), 2);
    }
}
