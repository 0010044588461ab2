//! Working memory of the forward pass, allocated once.

use alloc::vec::Vec;

use super::Model;
use super::budget::Budget;
use super::memory::{Memory, Size};
use crate::error::MemoryError;
use crate::kernels::attention::{KvLayout, KvType};
use crate::model::embeddings::per_layer::{LayerEmbeddingRows, LayerEmbeddings};
use crate::model::heads::mtp::{JoinedRows, MtpInput};
use crate::model::heads::output::Output;
use crate::model::linear::padded;
use crate::model::mixers::MixerBatch;
use crate::model::mixers::attention::batch::{AttentionBatch, BatchSize};
use crate::model::residual::batch::Batch;
use crate::pool::Pool;

/// The largest batch that working memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScratchSize {
    /// Tokens.
    pub rows: usize,
    /// Rows with logits.
    pub logits: usize,
    /// Sequences.
    pub seqs: usize,
    /// Tokens of a sequence. With LongRoPE, selects the frequencies ([`Model::is_long_context`]).
    pub n_ctx: usize,
}

/// Working memory for batches up to a [`ScratchSize`].
pub struct Scratch {
    /// Maximal rows and logits rows of a batch.
    pub(super) max_rows: usize,
    pub(super) max_logits: usize,
    pub(super) batch: Batch,
    /// What an MTP head reads.
    pub(super) joined: JoinedRows,
    /// (logits rows, n_embd) after the final norm, and (logits rows, padded n_vocab).
    pub(super) hidden: Vec<f32>,
    pub(super) logits: Vec<f32>,
    /// Temporaries.
    pub(super) memory: Memory,
}

impl Scratch {
    /// Sets the hidden states of the tokens before those of the next batch of an MTP head, (rows, n_embd), from row `row`
    /// on.
    ///
    /// # Panics
    /// If the working memory has fewer rows, or is not that of an MTP head.
    pub fn set_hidden_before(&mut self, row: usize, hidden: &[f32], n_embd: usize) {
        self.joined.set_hidden(row, hidden, n_embd);
    }

    /// Bytes of temporaries: those that there are, and the most that a batch has used so far. A batch of the largest size uses
    /// all.
    pub fn temporary_bytes(&self) -> [usize; 2] {
        self.memory.usage().map(Size::bytes)
    }
}

impl Model {
    /// The layout of this model's KV pages.
    pub fn kv_layout(&self, kv_type: KvType) -> KvLayout {
        self.config.kv_layout(kv_type)
    }

    /// Whether contexts of `n_ctx` tokens use the LongRoPE frequencies for long contexts. Keys of long and short
    /// contexts are not interchangeable.
    pub fn is_long_context(&self, n_ctx: usize) -> bool {
        self.weights.rope_divisors.depend_on_context() && n_ctx > self.original_context()
    }

    /// The training context before RoPE scaling, in tokens.
    pub(crate) fn original_context(&self) -> usize {
        let stretched = self.config.attention.ropes.iter().find_map(|r| r.scaling);
        stretched.map_or(self.config.n_ctx_train, |s| s.original_context)
    }

    /// Bytes of the recurrent state of a sequence; 0 for a model without recurrent layers.
    pub fn state_bytes(&self) -> usize {
        self.config.state_bytes()
    }

    /// Allocates working memory for batches of up to `size`.
    ///
    /// # Errors
    /// [`MemoryError`] if the allocation fails, or would exceed [`Model::max_scratch_bytes`].
    pub fn scratch(&self, pool: &dyn Pool, kv_type: KvType, size: ScratchSize) -> Result<Scratch, MemoryError> {
        let ScratchSize { rows: n, logits: max_logits, seqs, n_ctx } = size;
        let mut budget = Budget::new(self.max_scratch_bytes);
        let (c, d) = (&self.config, self.config.n_embd);
        let batch_size = BatchSize { rows: n, seqs, n_ctx, threads: pool.threads(), n_head: c.n_head() };
        let rotary = self.weights.rope_divisors.rotary(&c.attention.ropes, self.is_long_context(n_ctx));
        let first_values = c.recurrent.as_ref().map_or(0, |recurrent| recurrent.first_values(d));
        let mixers = MixerBatch {
            attention: AttentionBatch::new(&c.attention, rotary, &self.kv_layout(kv_type), batch_size, &mut budget),
            first_values: budget.zeros(&[n, first_values]),
        };
        let layer_embeddings = LayerEmbeddingRows::new(n, (c.embedding.per_layer, c.n_blocks()), &mut budget);
        let rows = (mixers, layer_embeddings, c.embedding.skips);
        let has_cycles = self.weights.streams.has_cycles();
        let scratch = Scratch {
            max_rows: n,
            max_logits,
            batch: Batch::new(&c.residual, (n, d, c.n_layer()), has_cycles, rows, &mut budget),
            joined: JoinedRows(budget.zeros(&[if c.is_mtp_head { n } else { 0 }, 2 * d])),
            hidden: budget.zeros(&[max_logits, d]),
            logits: budget.zeros(&[max_logits, padded(c.n_vocab)]),
            memory: Memory::new(self.temporaries(n, max_logits), &mut budget),
        };
        budget.check(n)?;
        Ok(scratch)
    }

    /// Temporaries of a batch of `n` rows and `logits` of them with logits.
    fn temporaries(&self, n: usize, logits: usize) -> Size {
        let (c, w, d) = (&self.config, &self.weights, self.config.n_embd);
        let layers = c.layers.iter().enumerate().map(|(i, layer)| w.layers[layer.block].size(&c.view(i), n));
        let input = w.mtp_input.as_ref().map(|input: &MtpInput| input.size(n));
        let embeddings = w.layer_embeddings.as_ref().map(|embeddings: &LayerEmbeddings| embeddings.size(n));
        let begin = w.embedding.size(d).or(input.unwrap_or_default()).or(embeddings.unwrap_or_default());
        let end = w.streams.size(&c.residual, n, d).or(Size::rows(n, [d])).or(Output::size(logits, d));
        Size::any(layers).or(begin).or(end)
    }
}
