//! What a request has used and how it has ended, for the audit log.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::queue::Update;

/// Tokens and outcome of one HTTP request, over all of its answers.
#[derive(Debug, Default)]
pub struct Usage {
    prompt: AtomicUsize,
    cached: AtomicUsize,
    completion: AtomicUsize,
    outcome: Mutex<Option<&'static str>>,
}

impl Usage {
    /// Counts tokens of prompts or of texts to embed.
    pub fn add_prompt(&self, tokens: usize) {
        self.prompt.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Notes an update that the request has received.
    pub fn note(&self, update: &Update) {
        match update {
            Update::Started | Update::Drafted { .. } => {}
            Update::Prefilled { n_cached, .. } => {
                self.cached.fetch_add(*n_cached, Ordering::Relaxed);
            }
            Update::Token { .. } => {
                self.completion.fetch_add(1, Ordering::Relaxed);
            }
            Update::Done { reason, .. } => self.end(reason.name()),
            Update::Vector { .. } => self.end("complete"),
            Update::Failed(failed) => self.end(failed.name()),
        }
    }

    /// The last outcome counts: an error ends the other answers of a request.
    fn end(&self, outcome: &'static str) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }

    /// Tokens of prompts, tokens of them found in the prefix cache, and tokens of answers.
    pub fn tokens(&self) -> [usize; 3] {
        [&self.prompt, &self.cached, &self.completion].map(|n| n.load(Ordering::Relaxed))
    }

    /// How the request has ended; `None` while it runs, or if it came to no answer.
    pub fn outcome(&self) -> Option<&'static str> {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
