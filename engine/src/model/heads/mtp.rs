//! Multi-token prediction (NextN): a layer after those of the model that predicts the token after the next, from the
//! next token and the hidden state before it (DeepSeek-V3, arXiv:2412.19437, section 2.2):
//!
//! ```text
//! x = proj [norm(embedding[token]); norm(hidden state of the token before)]
//! logits = W_out norm(block(x))
//! ```
//!
//! It is loaded as a model of one layer, an *MTP head*, which shares embedding and output with its model unless the file has
//! others for it. The engine drafts with it: [`Engine::set_draft_model`](crate::engine::Engine::set_draft_model). Of several such
//! layers the first one is used, again and again.

use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::panel::Matrix;
use crate::model::linear::{Linear, Norm, padded};
use crate::model::memory::{Size, Stack};
use crate::model::mixers::MixerKind;
use crate::model::pass::Pass;
use crate::model::tensors::{Declared, LinearName, Loaded, Name, NormName, matrix, vector};

pub(crate) const JOIN: LinearName = LinearName("nextn.eh_proj");
const EMBEDDING_NORM: NormName = NormName("nextn.enorm");
const HIDDEN_NORM: NormName = NormName("nextn.hnorm");
/// The norm before the output, and its other name in files.
const OUTPUT_NORM: NormName = NormName("nextn.shared_head_norm");
pub(crate) const OUTPUT_NORM_STEMS: [&str; 2] = ["layer_output_norm.", "nextn.shared_head_norm."];
/// Embedding and output of the head alone.
const EMBEDDING: Name = Name::weight("nextn.embed_tokens");
const OUTPUT: Name = Name::weight("nextn.shared_head_head");

/// Weights that join a token and the hidden state before it.
pub(crate) struct MtpInput {
    /// Norm of the token's embedding (n_embd).
    embed_norm: Norm,
    /// Norm of the hidden state (n_embd).
    hidden_norm: Norm,
    /// (n_embd, 2 * n_embd): of the embedding, then of the hidden state.
    proj: Linear,
}

/// What a head has in place of its model's.
pub(crate) struct MtpWeights {
    pub(crate) input: MtpInput,
    pub(crate) output_norm: Option<Norm>,
    pub(crate) embedding: Option<Matrix>,
    pub(crate) output: Option<Matrix>,
}

/// Whether an MTP head may have such a layer.
pub(crate) fn is_supported(mixer: MixerKind, has_ffn: bool) -> bool {
    matches!(mixer, MixerKind::Attention | MixerKind::Latent) && has_ffn
}

impl MtpWeights {
    /// Declares the tensors of a head of width `d` with `n_vocab` tokens.
    pub(crate) fn tensors(t: &mut Declared<'_>, d: usize, n_vocab: usize) {
        t.required(JOIN.weight(), matrix(d, 2 * d));
        t.required(EMBEDDING_NORM.weight(), vector(d));
        t.required(HIDDEN_NORM.weight(), vector(d));
        t.optional(OUTPUT_NORM.weight(), vector(d));
        t.optional(EMBEDDING, matrix(n_vocab, d));
        t.optional(OUTPUT, matrix(n_vocab, d));
    }

    /// Takes the tensors of a head.
    pub(crate) fn load(t: &mut Loaded<'_>) -> Result<MtpWeights, LoadError> {
        Ok(MtpWeights {
            embedding: t.optional_matrix(EMBEDDING),
            output: t.optional_matrix(OUTPUT),
            input: MtpInput {
                embed_norm: t.required_norm(EMBEDDING_NORM)?,
                hidden_norm: t.required_norm(HIDDEN_NORM)?,
                proj: t.linear(JOIN)?,
            },
            output_norm: t.norm(OUTPUT_NORM)?,
        })
    }
}

/// What a head reads, (rows, 2 * n_embd): the token's embedding and the hidden state before it.
pub(crate) struct JoinedRows(pub(crate) Vec<f32>);

impl JoinedRows {
    /// Sets hidden states of `d` elements from row `row` on.
    pub(crate) fn set_hidden(&mut self, row: usize, hidden: &[f32], d: usize) {
        for (joined, hidden) in self.0[row * 2 * d..].chunks_exact_mut(2 * d).zip(hidden.chunks_exact(d)) {
            joined[d..].copy_from_slice(hidden);
        }
    }
}

impl MtpInput {
    pub(crate) fn matrix(&self) -> &Matrix {
        &self.proj.w
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        Size::rows(n, [padded(self.proj.w.rows())]).and(self.proj.size(n))
    }

    /// The residual stream before the layer, from the embeddings and the hidden states before.
    pub(crate) fn run(&self, pass: &Pass<'_, '_>, x: &mut [f32], joined: &mut JoinedRows, stack: &mut Stack<'_>) {
        let (d, n, on) = (pass.d, pass.n, pass.rows);
        let (mut stack, stride) = (stack.scope(), padded(d));
        let joined = &mut joined.0[..n * 2 * d];
        for (joined, x) in joined.chunks_exact_mut(2 * d).zip(x.chunks_exact(d)) {
            joined[..d].copy_from_slice(x);
        }
        on.norm_beginnings(&self.embed_norm, joined, 2 * d);
        on.norm_ends(&self.hidden_norm, joined, 2 * d);
        let [y] = stack.rows(n, [stride]);
        on.matrix(&self.proj.w, self.proj.bias.as_deref(), Floats { x: joined, stride: 2 * d }, y, &mut stack);
        for (x, y) in x.chunks_exact_mut(d).zip(y.chunks_exact(stride)) {
            x.copy_from_slice(&y[..d]);
        }
    }
}
