//! Penalties on tokens that occurred: counts over a window, as llama.cpp has them.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::dry::{self, DryScratch};
use super::options::{ALL_TOKENS, PenaltyScope, SamplingOptions};

/// The accepted tokens, as far as an option needs them.
pub(super) struct History {
    /// All accepted tokens; empty if no option looks back.
    tokens: Vec<u32>,
    /// Token -> occurrences in the window, 0 for those that left it; a tree, so that its order is the ids'.
    counts: BTreeMap<u32, u32>,
    /// How many of `tokens` are the prompt's.
    n_prompt: usize,
    /// As `counts`, of the prompt's tokens alone: those that a narrower scope leaves out.
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

    /// Whether an option looks back.
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
        let leaves_prompt_out = options.penalty_scope == PenaltyScope::Answer;
        *self.counts.entry(token).or_default() += 1;
        if leaves_prompt_out && is_prompt {
            *self.prompt_counts.entry(token).or_default() += 1;
        }
        let n = options.repeat_last_n;
        if n != ALL_TOKENS && self.tokens.len() > n as usize {
            let at = self.tokens.len() - 1 - n as usize;
            let gone = self.tokens[at];
            if let Some(count) = self.counts.get_mut(&gone) {
                *count -= 1;
            }
            if at < self.n_prompt
                && let Some(count) = self.prompt_counts.get_mut(&gone)
            {
                *count -= 1;
            }
        }
    }

    /// Applies repeat, frequency and presence penalty, then DRY.
    pub(super) fn apply(&mut self, options: &SamplingOptions, x: &mut [f32]) {
        for (token, count) in self.counts.iter().filter(|(_, count)| **count > 0) {
            let Some(x) = x.get_mut(*token as usize) else { continue };
            // a token that the grammar forbids stays forbidden
            if *x == f32::NEG_INFINITY {
                continue;
            }
            let scaled = if *x > 0.0 { *x / options.repeat_penalty } else { *x * options.repeat_penalty };
            let counted = count - self.prompt_counts.get(token).copied().unwrap_or(0);
            let presence = if counted > 0 { options.presence_penalty } else { 0.0 };
            let taken = counted as f32 * options.frequency_penalty + presence;
            *x = finite(finite(scaled) - finite(taken));
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

/// `x` within the finite numbers.
pub(super) fn finite(x: f32) -> f32 {
    x.clamp(f32::MIN, f32::MAX)
}
