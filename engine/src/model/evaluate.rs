//! Runs one text through the model without an engine: for logits, perplexity, or the replay of a receipt.

use alloc::vec::Vec;

use thiserror::Error;

use crate::error::{MemoryError, RequestError};
use crate::kernels::Cpu;
use crate::kernels::attention::{KvMemory, KvType, PAGE};
use crate::kernels::recurrent::StateMemory;
use crate::model::{Exec, KvRef, Model, Run, ScratchSize, Trace};
use crate::pool::Pool;

/// Parameters of the evaluation of a text.
pub struct Evaluation<'a> {
    /// The model: a decoder, or one that generates by diffusion.
    pub model: &'a Model,
    /// Instruction set to use.
    pub cpu: Cpu,
    /// Threads to use.
    pub pool: &'a dyn Pool,
    /// Element type of the KV cache. Changes results.
    pub kv_type: KvType,
    /// Maximal tokens of a batch; a text is one batch with a model that generates by diffusion.
    pub batch: usize,
    /// Context in tokens, at least the length of the text. With LongRoPE it selects the frequencies
    /// ([`Model::is_long_context`]).
    pub n_ctx: usize,
}

/// The output of the model at one token.
pub struct EvaluatedToken<'a> {
    /// Position of the token.
    pub pos: usize,
    /// Hidden state after the final norm (n_embd).
    pub hidden: &'a [f32],
    /// Logits (n_vocab): of the next token; with diffusion of this token, or of the next if they are shifted.
    pub logits: &'a [f32],
}

/// Why a text was not evaluated.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum EvaluationError {
    /// The text is empty, too long, contains invalid tokens, or the model is an encoder.
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

impl Evaluation<'_> {
    /// Runs the forward pass of `tokens` and calls `row` for those from index `first` on, in order, until `row` fails.
    /// `trace` is called for every stage of each batch.
    ///
    /// # Errors
    /// [`EvaluationError`] if the text cannot be evaluated; the error of `row`.
    pub fn run<E: From<EvaluationError>>(
        &self,
        tokens: &[u32],
        first: usize,
        mut trace: Option<Trace<'_>>,
        row: &mut dyn FnMut(EvaluatedToken<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.check(tokens).map_err(EvaluationError::from)?;
        let no_memory = |source: MemoryError| EvaluationError::Memory { n_ctx: tokens.len(), source };
        let layout = self.model.kv_layout(self.kv_type);
        let pages: Vec<u32> = (0..tokens.len().div_ceil(PAGE) as u32).collect();
        let mut memory = KvMemory::zeroed(&layout, pages.len()).map_err(|e| no_memory(e.into()))?;
        memory.states = StateMemory::zeroed(self.model.config.state_len(), 1).map_err(|e| no_memory(e.into()))?;
        let config = &self.model.config;
        // where tokens see later ones, a text is one batch
        let batch = if config.causal { self.batch.clamp(1, tokens.len()) } else { tokens.len() };
        let size = ScratchSize { rows: batch, logits: batch, seqs: 1, n_ctx: self.n_ctx };
        let mut scratch = self.model.scratch(self.pool, self.kv_type, size).map_err(no_memory)?;
        for (i, tokens) in tokens.chunks(batch).enumerate() {
            let (pos, end) = (i * batch, i * batch + tokens.len());
            let n_logits = end.saturating_sub(first.max(pos));
            let run = Run { tokens, pos, pages: &pages, state: 0, n_logits };
            let trace = trace.as_mut().map(|t| &mut **t as _);
            let exec = Exec { cpu: self.cpu, pool: self.pool };
            let kv = KvRef { layout: &layout, memory: &mut memory };
            let out = self.model.forward(exec, &[run], kv, &mut scratch, trace);
            for j in 0..out.len() {
                row(EvaluatedToken { pos: end - n_logits + j, hidden: out.hidden(j), logits: out.logits(j) })?;
            }
        }
        Ok(())
    }

    fn check(&self, tokens: &[u32]) -> Result<(), RequestError> {
        if self.model.config.diffusion.is_none() {
            self.model.config.check_generates()?;
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
    /// Checks that all token ids are in the vocabulary.
    ///
    /// # Errors
    /// [`RequestError::Token`] of the first that is not.
    pub fn check_tokens<'t>(&self, tokens: impl IntoIterator<Item = &'t u32>) -> Result<(), RequestError> {
        let n_vocab = self.config.n_vocab;
        match tokens.into_iter().enumerate().find(|(_, token)| **token as usize >= n_vocab) {
            Some((at, &token)) => Err(RequestError::Token { token, at, n_vocab }),
            None => Ok(()),
        }
    }
}
