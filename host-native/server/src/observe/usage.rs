//! What a request has used and how it has ended, for the access log and the audit log.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use starling_api::update::Update;

/// Tokens and outcome of one HTTP request, over all of its answers.
#[derive(Debug, Default)]
pub struct Usage {
    prompt: AtomicUsize,
    cached: AtomicUsize,
    completion: AtomicUsize,
    outcome: Mutex<Option<&'static str>>,
    first_token: OnceLock<Instant>,
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
                self.first_token.get_or_init(Instant::now);
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

    /// Time of the first token of an answer.
    pub fn first_token(&self) -> Option<Instant> {
        self.first_token.get().copied()
    }

    /// How the request has ended; `None` while it runs, or if it came to no answer.
    pub fn outcome(&self) -> Option<&'static str> {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
