//! One text through the model in batches, without an engine: for its logits, its perplexity, or the replay of an answer.

use alloc::vec::Vec;

use thiserror::Error;

use super::{Model, Run, Trace};
use crate::error::{MemoryError, RequestError};
use crate::kernels::Cpu;
use crate::kernels::attention::{KvMemory, KvType, PAGE};
use crate::pool::Pool;

/// How a text is run.
pub struct Pass<'a> {
    /// The model; not an encoder.
    pub model: &'a Model,
    /// Instruction set.
    pub cpu: Cpu,
    /// Threads.
    pub pool: &'a dyn Pool,
    /// How keys and values are kept. Changes numbers.
    pub kv_type: KvType,
    /// Tokens of a batch.
    pub batch: usize,
    /// Tokens of the context, at least those of the text. Changes numbers of models that rotate by other frequencies in
    /// long contexts ([`Model::is_long_context`]).
    pub n_ctx: usize,
}

/// What the model gives after one token.
pub struct Row<'a> {
    /// Position of the token.
    pub pos: usize,
    /// The state after the final norm (n_embd).
    pub hidden: &'a [f32],
    /// (n_vocab).
    pub logits: &'a [f32],
}

/// A text that was not run.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum PassError {
    /// The model cannot run it.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// Memory for its KV cache or batches could not be allocated.
    #[error("context of {n_ctx} tokens: {source}")]
    Memory {
        /// Tokens of the text.
        n_ctx: usize,
        /// The allocation that failed.
        source: MemoryError,
    },
}

impl Pass<'_> {
    /// Runs `tokens`; calls `row` for those from `first` on, in order, until it fails. `trace` sees every stage of each
    /// batch.
    ///
    /// # Errors
    /// [`PassError`] if the text cannot be run, and what `row` returns.
    pub fn run<E: From<PassError>>(
        &self,
        tokens: &[u32],
        first: usize,
        mut trace: Option<Trace<'_>>,
        row: &mut dyn FnMut(Row<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.check(tokens).map_err(PassError::from)?;
        let memory = |source: MemoryError| PassError::Memory { n_ctx: tokens.len(), source };
        let kv = self.model.kv_layout(self.kv_type);
        let pages: Vec<u32> = (0..tokens.len().div_ceil(PAGE) as u32).collect();
        let mut kv_memory = KvMemory::zeroed(&kv, pages.len()).map_err(|e| memory(e.into()))?;
        let batch = self.batch.clamp(1, tokens.len());
        let mut scratch = self.model.scratch(self.pool, self.kv_type, batch, batch, 1, self.n_ctx).map_err(memory)?;
        for (i, tokens) in tokens.chunks(batch).enumerate() {
            let (pos, end) = (i * batch, i * batch + tokens.len());
            let n_logits = end.saturating_sub(first.max(pos));
            let run = Run { tokens, pos, pages: &pages, n_logits };
            let trace = trace.as_mut().map(|t| &mut **t as _);
            let out = self.model.forward(self.cpu, self.pool, &[run], &kv, &mut kv_memory, &mut scratch, trace);
            for j in 0..out.len() {
                row(Row { pos: end - n_logits + j, hidden: out.hidden(j), logits: out.logits(j) })?;
            }
        }
        Ok(())
    }

    fn check(&self, tokens: &[u32]) -> Result<(), RequestError> {
        if !self.model.config.causal {
            return Err(RequestError::Encoder);
        }
        if tokens.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        let n_ctx = self.n_ctx.min(self.model.config.max_context());
        if tokens.len() > n_ctx {
            return Err(RequestError::ContextLength { prompt: tokens.len(), max_tokens: 0, n_ctx });
        }
        self.model.check_tokens(tokens)
    }
}

impl Model {
    /// Whether all of them are the model's.
    ///
    /// # Errors
    /// The first that is not.
    pub fn check_tokens<'t>(&self, tokens: impl IntoIterator<Item = &'t u32>) -> Result<(), RequestError> {
        let n_vocab = self.config.n_vocab;
        match tokens.into_iter().enumerate().find(|(_, token)| **token as usize >= n_vocab) {
            Some((at, &token)) => Err(RequestError::Token { token, at, n_vocab }),
            None => Ok(()),
        }
    }
}
