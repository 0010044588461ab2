//! Repetition, frequency and presence penalties, which count tokens in a window as llama.cpp does, and DRY.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::dry::{self, DryScratch};
use super::options::{ALL_TOKENS, PenaltyScope, SamplingOptions};

/// The accepted tokens that penalties need.
pub(super) struct History {
    /// All accepted tokens; empty if no penalty is on.
    tokens: Vec<u32>,
    /// Token -> occurrences in the window, 0 for tokens that left it; ordered, so that the order of operations is fixed.
    counts: BTreeMap<u32, u32>,
    /// Number of prompt tokens in `tokens`.
    n_prompt: usize,
    /// As `counts`, for prompt tokens only; [`PenaltyScope::Answer`] subtracts them.
    prompt_counts: BTreeMap<u32, u32>,
    is_counted: bool,
    dry: Option<DryScratch>,
}

impl History {
    pub(super) fn new(options: &SamplingOptions) -> Self {
        History {
            tokens: Vec::new(),
            counts: BTreeMap::new(),
            n_prompt: 0,
            prompt_counts: BTreeMap::new(),
            is_counted: options.counts_tokens(),
            dry: options.active_dry().map(DryScratch::new),
        }
    }

    /// Whether a penalty is on.
    pub(super) fn is_used(&self) -> bool {
        self.is_counted || self.dry.is_some()
    }

    pub(super) fn accept(&mut self, options: &SamplingOptions, token: u32, is_prompt: bool) {
        if !self.is_used() {
            return;
        }
        self.tokens.push(token);
        self.n_prompt += usize::from(is_prompt);
        if !self.is_counted {
            return;
        }
        let excludes_prompt = options.penalty_scope == PenaltyScope::Answer;
        *self.counts.entry(token).or_default() += 1;
        if excludes_prompt && is_prompt {
            *self.prompt_counts.entry(token).or_default() += 1;
        }
        let n = options.repeat_last_n;
        if n != ALL_TOKENS && self.tokens.len() > n as usize {
            let at = self.tokens.len() - 1 - n as usize;
            let left = self.tokens[at];
            if let Some(count) = self.counts.get_mut(&left) {
                *count -= 1;
            }
            if at < self.n_prompt
                && let Some(count) = self.prompt_counts.get_mut(&left)
            {
                *count -= 1;
            }
        }
    }

    /// Applies repeat, frequency and presence penalty, then DRY.
    pub(super) fn apply(&mut self, options: &SamplingOptions, x: &mut [f32]) {
        for (token, count) in self.counts.iter().filter(|(_, count)| **count > 0) {
            let Some(x) = x.get_mut(*token as usize) else { continue };
            // the constraint forbids this token
            if *x == f32::NEG_INFINITY {
                continue;
            }
            let scaled = if *x > 0.0 { *x / options.repeat_penalty } else { *x * options.repeat_penalty };
            let counted = count - self.prompt_counts.get(token).copied().unwrap_or(0);
            let presence = if counted > 0 { options.presence_penalty } else { 0.0 };
            let penalty = counted as f32 * options.frequency_penalty + presence;
            *x = finite(finite(scaled) - finite(penalty));
        }
        if let (Some(scratch), Some(dry)) = (&mut self.dry, options.active_dry()) {
            for (token, length) in scratch.repetitions(dry, last(&self.tokens, dry.last_n)) {
                let Some(x) = x.get_mut(*token as usize) else { continue };
                if *x != f32::NEG_INFINITY {
                    *x = finite(*x - dry::penalty(dry, *length));
                }
            }
        }
    }
}

/// The last `n` tokens.
fn last(tokens: &[u32], n: u32) -> &[u32] {
    if n == ALL_TOKENS { tokens } else { &tokens[tokens.len().saturating_sub(n as usize)..] }
}

/// Clamps `x` to the finite numbers.
pub(super) fn finite(x: f32) -> f32 {
    x.clamp(f32::MIN, f32::MAX)
}
