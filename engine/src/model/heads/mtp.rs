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

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::model::config::{Config, MixerKind};
use crate::model::family::Mtp;
use crate::model::loader::LoadedTensors;
use crate::model::residual::orders::ForwardPass;
use crate::model::scratch::Scratch;
use crate::model::weights::{Linear, Norm, Weights, linear, norm, padded, required_norm};
use crate::model::{Exec, Model};

/// Weights that join a token and the hidden state before it.
pub struct MtpInput {
    /// Norm of the token's embedding (n_embd).
    embed_norm: Norm,
    /// Norm of the hidden state (n_embd).
    hidden_norm: Norm,
    /// (n_embd, 2 * n_embd): of the embedding, then of the hidden state.
    pub(crate) proj: Linear,
}

/// Whether an MTP head may have such a layer.
pub(crate) fn is_supported(mixer: MixerKind, has_ffn: bool) -> bool {
    matches!(mixer, MixerKind::Attention | MixerKind::Latent) && has_ffn
}

/// The name in an MTP head of a tensor of its model's file.
pub(crate) fn name_in_head(name: &str, c: &Config) -> Option<String> {
    let part = name.strip_prefix(&format!("blk.{}.", c.n_layer())[..])?;
    // the norm before the output has several names
    let part = part.replace("layer_output_norm.", "nextn.shared_head_norm.");
    Some(format!("blk.0.{part}"))
}

/// The inverse of [`name_in_head`].
pub(crate) fn name_in_file(name: &str, c: &Config) -> String {
    name.replacen("blk.0.", &format!("blk.{}.", c.n_layer()), 1)
}

impl Weights {
    /// Takes the tensors of an MTP head of `model`.
    ///
    /// # Errors
    /// [`LoadError`] of a tensor that is missing, or whose shape does not fit another's.
    pub(crate) fn mtp_head(tensors: &mut LoadedTensors, c: &Config, model: &Weights) -> Result<Weights, LoadError> {
        let own = |tensors: &mut LoadedTensors, part: &str| {
            let matrices = tensors.matrices(&format!("blk.0.nextn.{part}.weight"));
            matrices.and_then(|mut all| all.pop()).map(Arc::new)
        };
        let (embedding, output) = (own(tensors, "embed_tokens"), own(tensors, "shared_head_head"));
        Ok(Weights {
            is_shared: [embedding.is_none(), output.is_none()],
            embedding: embedding.unwrap_or_else(|| Arc::clone(&model.embedding)),
            output: output.or_else(|| Some(Arc::clone(model.output.as_ref().unwrap_or(&model.embedding)))),
            mtp_input: Some(MtpInput {
                embed_norm: required_norm(tensors, "blk.0.nextn.enorm")?,
                hidden_norm: required_norm(tensors, "blk.0.nextn.hnorm")?,
                proj: linear(tensors, "blk.0.nextn.eh_proj")?,
            }),
            final_norm: norm(tensors, "blk.0.nextn.shared_head_norm")?.or_else(|| model.final_norm.clone()),
            output_bias: model.output_bias.clone(),
            rope_divisors: model.rope_divisors.clone(),
            layers: Weights::layers(tensors, c)?,
            token_types: None,
            positions: None,
            embedding_norm: None,
            low_state: None,
            altup: None,
            layer_embeddings: None,
            ngram_table: None,
            hyper_output: None,
            residual_score: None,
            projections: Vec::new(),
            classifier: None,
        })
    }
}

impl Model {
    /// The hidden states of `rows` of the last batch that an MTP head reads, (rows, n_embd).
    ///
    /// # Panics
    /// If a row is not in the batch.
    pub fn hidden_states(&self, exec: Exec<'_>, rows: Range<usize>, s: &Scratch) -> Vec<f32> {
        let d = self.config.n_embd;
        let x = &s.x[rows.start * d..rows.end * d];
        match &self.weights.final_norm {
            Some(norm) if self.config.output.mtp == Mtp::Normed => {
                let mut out = vec![0.0; x.len()];
                self.rows(exec).norm(norm, x, d, &mut out);
                out
            }
            _ => x.to_vec(),
        }
    }
}

impl Scratch {
    /// Sets the hidden states of the tokens before those of the next batch of an MTP head, (rows, n_embd), from row `row`
    /// on.
    ///
    /// # Panics
    /// If the working memory has fewer rows, or is not that of an MTP head.
    pub fn set_hidden_before(&mut self, row: usize, hidden: &[f32], n_embd: usize) {
        for (joined, hidden) in
            self.joined[row * 2 * n_embd..].chunks_exact_mut(2 * n_embd).zip(hidden.chunks_exact(n_embd))
        {
            joined[n_embd..].copy_from_slice(hidden);
        }
    }
}

impl ForwardPass<'_, '_> {
    /// The residual stream before the layer of an MTP head, from the embeddings and the hidden states before.
    pub(crate) fn join_hidden(&self, input: &MtpInput, s: &mut Scratch) {
        let (d, n, on) = (input.embed_norm.width, self.n, self.rows);
        let Scratch { x, y, joined, step, .. } = s;
        let (x, joined) = (&mut x[..n * d], &mut joined[..n * 2 * d]);
        for (joined, x) in joined.chunks_exact_mut(2 * d).zip(x.chunks_exact(d)) {
            joined[..d].copy_from_slice(x);
        }
        on.norm_beginnings(&input.embed_norm, joined, 2 * d);
        on.norm_ends(&input.hidden_norm, joined, 2 * d);
        let stride = padded(d);
        let y = &mut y[..n * stride];
        on.matrix(&input.proj.w, input.proj.bias.as_deref(), Floats { x: joined, stride: 2 * d }, y, &mut step.words);
        for (x, y) in x.chunks_exact_mut(d).zip(y.chunks_exact(stride)) {
            x.copy_from_slice(&y[..d]);
        }
    }
}
