//! Verifies receipts by replay. Prefill and decode give the same bits, so prompt and output go through the model as one
//! prompt, at prefill speed; only the draws are repeated one by one.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use thiserror::Error;

use super::{Chain, FORMAT, Hex, Receipt};
use crate::error::{MemoryError, RequestError};
use crate::kernels::{Cpu, NUMERICS_VERSION};
use crate::model::Model;
use crate::model::evaluate::{EvaluatedToken, Evaluation, EvaluationError};
use crate::pool::Pool;
use crate::sampler::{LogprobKind, Sampler};

/// Tokens per batch: enough for matrix products at full speed, few enough for a logits row each.
const BATCH: usize = 64;

/// The first difference between a replay and its receipt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("step {step}: {difference}")]
pub struct Mismatch {
    /// Step of the output, from 0.
    pub step: usize,
    /// The kind of difference.
    pub difference: Difference,
}

/// A kind of difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Difference {
    /// h_0 differs: the receipt is of another request or model. No step was replayed.
    #[error("the first hash differs: the receipt is of another request or model")]
    Start,
    /// The sampler drew another token.
    #[error("found token {found}, expected {expected} (drawn in the replay)")]
    Token {
        /// The token in the receipt.
        found: u32,
        /// The token drawn in the replay.
        expected: u32,
    },
    /// The model computed an infinity or NaN, at which an engine ends the request.
    #[error("the model computed an infinity or NaN")]
    NotFinite,
    /// The token is the same, but the hidden state of this step or an earlier hash differs.
    #[error("the hash differs: the hidden state of the model is another")]
    State,
    /// The digest of the receipt differs from the hash of its last step.
    #[error("the digest differs from the hash of the last step")]
    Digest,
}

/// Why a receipt was not verified.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum VerifyError {
    /// The receipt has another format.
    #[error("receipt format: found `{0}`, expected `{FORMAT}`")]
    Format(String),
    /// An engine with another numerics version wrote the receipt.
    #[error("receipt numerics version: found {0}, expected {NUMERICS_VERSION} (this engine)")]
    Numerics(u32),
    /// The receipt is of another model.
    #[error("receipt of the model with SHA-256 {0}, not of this one")]
    Model(Hex<32>),
    /// The number of step hashes is not the number of tokens plus 1.
    #[error("found {steps} step hashes for {tokens} output tokens, expected {}", tokens + 1)]
    Steps {
        /// Tokens of the output.
        tokens: usize,
        /// Step hashes.
        steps: usize,
    },
    /// The engine would have refused the request.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// Memory for the replay could not be allocated.
    #[error("replay: {0}")]
    Memory(MemoryError),
    /// The replay differs.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
}

impl From<EvaluationError> for VerifyError {
    fn from(error: EvaluationError) -> VerifyError {
        match error {
            EvaluationError::Request(e) => VerifyError::Request(e),
            EvaluationError::Memory { source, .. } => VerifyError::Memory(source),
        }
    }
}

/// Verifies a receipt against a model whose file has the given SHA-256. `n_ctx` limits the tokens that are replayed,
/// and so the memory.
///
/// # Errors
/// [`VerifyError::Mismatch`] names the first step that differs. The other errors say why the receipt was not replayed.
pub fn verify(
    model: &Model,
    model_sha256: &[u8; 32],
    cpu: Cpu,
    pool: &dyn Pool,
    n_ctx: usize,
    receipt: &Receipt,
) -> Result<(), VerifyError> {
    let request = &receipt.request;
    let tokens = check(model, model_sha256, n_ctx, receipt)?;
    let mut sampler = Sampler::new(request.sampling.clone(), model.config.n_vocab)?;
    let mut chain = Chain::start(model_sha256, request);
    let differs = |step, difference| Err(VerifyError::Mismatch(Mismatch { step, difference }));
    let has_logprobs = request.sampling.logprobs != LogprobKind::None || request.sampling.top_logprobs != 0;
    if has_logprobs || chain.steps.first() != receipt.steps.first() {
        return differs(0, Difference::Start);
    }
    request.prompt.iter().for_each(|t| sampler.accept_prompt(*t));

    let evaluation =
        Evaluation { model, cpu, pool, kv_type: request.kv_type, batch: BATCH, n_ctx: context(model, receipt)? };
    // an output token is drawn from the logits at the token before it
    let first = request.prompt.len() - 1;
    let mut step = 0;
    let mut replay = |row: EvaluatedToken<'_>| {
        let Some(found) = receipt.output.get(step).copied() else { return Ok(()) };
        if !row.hidden.iter().chain(row.logits).all(|v| v.is_finite()) {
            return differs(step, Difference::NotFinite);
        }
        let position = (request.prompt.len() + step) as u64;
        let expected = sampler.pick(cpu, row.logits, request.sequence, position, None).token;
        if found != expected {
            return differs(step, Difference::Token { found, expected });
        }
        chain.step(row.hidden, found);
        if chain.steps.last() != receipt.steps.get(step + 1) {
            return differs(step, Difference::State);
        }
        sampler.accept(found);
        step += 1;
        Ok(())
    };
    // an empty output needs no forward pass
    if !receipt.output.is_empty() {
        evaluation.run(&tokens, first, None, &mut replay)?;
    }
    if chain.digest() == receipt.digest.0 {
        return Ok(());
    }
    differs(step.saturating_sub(1), Difference::Digest)
}

/// The shortest context in which keys have the RoPE frequencies that the receipt states.
fn context(model: &Model, receipt: &Receipt) -> Result<usize, RequestError> {
    let (n, long) = (receipt.request.prompt.len() + receipt.output.len(), receipt.request.long_context);
    // the last output token was never input
    let n = (n - 1).max(if long { model.original_context() + 1 } else { 0 });
    if model.is_long_context(n) == long {
        return Ok(n);
    }
    let expected = "the value that follows from the model and the length of the answer";
    Err(RequestError::Option { name: "long_context", found: long.to_string(), expected })
}

/// Checks everything that needs no forward pass. Returns the tokens to replay: all but the last.
fn check(model: &Model, model_sha256: &[u8; 32], n_ctx: usize, receipt: &Receipt) -> Result<Vec<u32>, VerifyError> {
    let (prompt, output) = (&receipt.request.prompt, &receipt.output);
    let n_ctx = n_ctx.min(model.config.max_context());
    if receipt.format != FORMAT {
        return Err(VerifyError::Format(receipt.format.clone()));
    }
    if receipt.numerics != NUMERICS_VERSION {
        return Err(VerifyError::Numerics(receipt.numerics));
    }
    if receipt.model.0 != *model_sha256 {
        return Err(VerifyError::Model(receipt.model));
    }
    if receipt.steps.len() != output.len() + 1 {
        return Err(VerifyError::Steps { tokens: output.len(), steps: receipt.steps.len() });
    }
    model.config.check_generates()?;
    if prompt.is_empty() {
        return Err(RequestError::EmptyPrompt.into());
    }
    // the last output token was never input
    if prompt.len() + output.len().max(1) > n_ctx.saturating_add(1) {
        let error = RequestError::ContextLength { prompt: prompt.len(), max_tokens: output.len(), n_ctx };
        return Err(error.into());
    }
    model.check_tokens(prompt.iter().chain(output))?;
    let mut tokens = [&prompt[..], output].concat();
    tokens.pop();
    Ok(tokens)
}
