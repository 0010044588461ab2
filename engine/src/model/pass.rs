//! The forward pass of one batch: what all mechanisms share.

use crate::kernels::Cpu;
use crate::kernels::attention::{KvLayout, KvMemory, Span};
use crate::kernels::recurrent::StateSpan;
use crate::model::rows::RowOps;
use crate::pool::Pool;

/// Where a forward pass runs: instruction set and threads. Neither changes a result.
#[derive(Clone, Copy)]
pub struct Exec<'a> {
    /// Instruction set.
    pub cpu: Cpu,
    /// Threads.
    pub pool: &'a dyn Pool,
}

/// The KV pages that a forward pass reads and writes.
pub struct KvRef<'a> {
    /// Layout of a page.
    pub layout: &'a KvLayout,
    /// The pages.
    pub memory: &'a mut KvMemory,
}

/// Consecutive tokens of one sequence in a batch.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// Token ids, each below `n_vocab`.
    pub tokens: &'a [u32],
    /// Position of the first token in its sequence.
    pub pos: usize,
    /// KV pages of the sequence, one per [`PAGE`](crate::kernels::attention::PAGE) positions, up to the last token of the run.
    pub pages: &'a [u32],
    /// Slot of the sequence's recurrent state; not used by models without recurrent layers.
    pub state: u32,
    /// Number of tokens, counted from the last, to compute logits for.
    pub n_logits: usize,
}

/// A point of the forward pass that a trace reports. [`Stage::Rope`] has the rotated queries, then the rotated keys;
/// [`Stage::Scores`] the scaled attention scores before the softmax, a row for each head of each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Stage {
    Embedding,
    AttnNorm,
    Q,
    K,
    V,
    Rope,
    Scores,
    AttnOut,
    PostAttnNorm,
    FfnNorm,
    Router,
    FfnOut,
    PostFfnNorm,
    LayerEmbedding,
    FinalNorm,
    Logits,
}

impl Stage {
    /// The stage's name in the output of a trace.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Embedding => "embedding",
            Stage::AttnNorm => "attn_norm",
            Stage::Q => "q",
            Stage::K => "k",
            Stage::V => "v",
            Stage::Rope => "rope",
            Stage::Scores => "scores",
            Stage::AttnOut => "attn_out",
            Stage::PostAttnNorm => "post_attn_norm",
            Stage::FfnNorm => "ffn_norm",
            Stage::Router => "router",
            Stage::FfnOut => "ffn_out",
            Stage::PostFfnNorm => "post_ffn_norm",
            Stage::LayerEmbedding => "layer_embedding",
            Stage::FinalNorm => "final_norm",
            Stage::Logits => "logits",
        }
    }
}

/// A callback of the forward pass: stage, layer index (`None` outside the layers), and the rows of values, one per
/// token.
pub type Trace<'a> = &'a mut dyn FnMut(Stage, Option<usize>, &mut dyn Iterator<Item = &[f32]>);

/// Rows of a sub-layer: input (rows, n_embd), output (rows, padded n_embd).
pub(crate) struct SubLayerRows<'x> {
    pub(crate) x: &'x [f32],
    pub(crate) y: &'x mut [f32],
}

/// The place of a layer.
#[derive(Clone, Copy)]
pub(crate) struct LayerAt {
    /// Index of the layer.
    pub(crate) index: usize,
    /// Offset of its state in the recurrent state of a sequence.
    pub(crate) state_at: usize,
}

/// A batch.
pub(crate) struct Pass<'a, 't> {
    pub(crate) rows: RowOps<'a>,
    /// Width of the residual stream (n_embd).
    pub(crate) d: usize,
    pub(crate) kv: &'a KvLayout,
    pub(crate) spans: &'a [Span<'a>],
    /// The rows of each sequence and its recurrent state; empty for a model without recurrent layers.
    pub(crate) states: &'a [StateSpan],
    /// Rows of the batch.
    pub(crate) n: usize,
    pub(crate) trace: Option<Trace<'t>>,
}

impl Pass<'_, '_> {
    pub(crate) fn trace_stage(&mut self, stage: Stage, layer: Option<usize>, rows: &mut dyn Iterator<Item = &[f32]>) {
        if let Some(trace) = &mut self.trace {
            trace(stage, layer, rows);
        }
    }

    /// Whether attention scores are reported.
    pub(crate) fn traces_scores(&self) -> bool {
        cfg!(feature = "trace") && self.trace.is_some()
    }
}
