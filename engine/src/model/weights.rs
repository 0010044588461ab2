//! Weights of a model, assembled from its tensors.

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::panel::Matrix;
use crate::model::config::Config;
use crate::model::embeddings::ngrams;
use crate::model::embeddings::per_layer::LayerEmbeddings;
use crate::model::embeddings::tokens::TokenEmbeddings;
use crate::model::heads::classifier::Classifier;
use crate::model::heads::mtp::{MtpInput, MtpWeights};
use crate::model::heads::output::{FinalNorm, Output};
use crate::model::heads::projection;
use crate::model::linear::Linear;
use crate::model::mixers::attention::rotary::RopeDivisors;
use crate::model::residual::PassEnd;
use crate::model::residual::block::{self, Block};
use crate::model::residual::streams::StreamWeights;
use crate::model::tensors::{Declared, LoadedTensors, Name, missing};

/// All weights of a model.
pub(crate) struct Weights {
    pub(crate) embedding: TokenEmbeddings,
    /// What an MTP head reads in place of embeddings.
    pub(crate) mtp_input: Option<MtpInput>,
    /// Embeddings of the layers.
    pub(crate) layer_embeddings: Option<LayerEmbeddings>,
    /// Embeddings of n-grams, (rows, width of a head).
    pub(crate) ngram_table: Option<Matrix>,
    /// Weights of several residual streams.
    pub(crate) streams: StreamWeights,
    /// The layers, in order.
    pub(crate) layers: Vec<Block>,
    pub(crate) output: Output,
    /// Divisors of the RoPE frequencies.
    pub(crate) rope_divisors: RopeDivisors,
    /// Projections of a pooled embedding (n_embd), applied in order.
    pub(crate) projections: Vec<Linear>,
    /// Classification head of rerankers.
    pub(crate) classifier: Option<Classifier>,
}

/// Beginning of the names of tensors of a layer.
pub(crate) fn prefix(layer: usize) -> String {
    format!("blk.{layer}.")
}

/// What follows the layers.
fn final_norm(c: &Config) -> FinalNorm {
    if c.norm.plain {
        FinalNorm::Plain
    } else if c.residual.post_norm || c.residual.has_gated_streams() {
        FinalNorm::None
    } else {
        FinalNorm::Own
    }
}

/// Whether passes are nested.
fn has_cycles(c: &Config) -> bool {
    c.layers.iter().any(|l| l.after == Some(PassEnd::Low))
}

/// Declares the tensors outside of layers.
pub(crate) fn tensors(c: &Config, t: &mut Declared<'_>) {
    let (d, n_vocab) = (c.n_embd, c.n_vocab);
    TokenEmbeddings::tensors(t, &c.embedding, (d, n_vocab, c.n_ctx_train));
    Output::tensors(t, final_norm(c), (d, n_vocab));
    StreamWeights::tensors(t, &c.residual, has_cycles(c), d);
    match &c.embedding.ngrams {
        Some(ngrams) => ngrams.table(t),
        None if c.embedding.per_layer > 0 => {
            LayerEmbeddings::tensors(t, c.embedding.per_layer, (d, c.n_blocks(), n_vocab));
        }
        None => {}
    }
    RopeDivisors::tensors(t, c.attention.rope_pairs(), c.attention.is_longrope());
    projection::tensors(t);
    Classifier::tensors(t);
}

/// Declares the tensors of the layer with the weights of this index.
pub(crate) fn layer_tensors(c: &Config, index: usize, t: &mut Declared<'_>) {
    block::tensors(&c.view(c.block_index(index)), t);
    if c.is_mtp_head {
        MtpWeights::tensors(t, c.n_embd, c.n_vocab);
    }
}

impl Weights {
    /// Takes the tensors of a file and assembles the weights.
    ///
    /// # Errors
    /// [`LoadError`] of a tensor that is missing, or whose shape does not fit another's.
    pub(crate) fn new(tensors: &mut LoadedTensors, c: &Config) -> Result<Weights, LoadError> {
        let layers = Weights::layers(tensors, c)?;
        let (t, d) = (&mut tensors.of(""), c.n_embd);
        Ok(Weights {
            embedding: TokenEmbeddings::load(t, &c.embedding, d)?,
            mtp_input: None,
            layer_embeddings: if c.embedding.per_layer > 0 { Some(LayerEmbeddings::load(t)?) } else { None },
            ngram_table: match c.embedding.ngrams {
                Some(_) => Some(t.matrix(ngrams::TABLE)?),
                None => None,
            },
            streams: StreamWeights::load(t, c.attention.compressed.is_some(), d)?,
            layers,
            output: Output::load(t, final_norm(c), d)?,
            rope_divisors: RopeDivisors::load(t),
            projections: projection::load(t, d)?,
            classifier: Classifier::load(t, d)?,
        })
    }

    /// Takes the tensors of an MTP head of `model`.
    ///
    /// # Errors
    /// [`LoadError`] of a tensor that is missing, or whose shape does not fit another's.
    pub(crate) fn mtp_head(tensors: &mut LoadedTensors, c: &Config, model: &Weights) -> Result<Weights, LoadError> {
        let MtpWeights { input, output_norm, embedding, output } = MtpWeights::load(&mut tensors.of(&prefix(0)))?;
        let (owns_embedding, owns_output) = (embedding.is_some(), output.is_some());
        let of_model = || Arc::clone(model.output.matrix.as_ref().unwrap_or(&model.embedding.table));
        let table = embedding.map_or_else(|| Arc::clone(&model.embedding.table), Arc::new);
        Ok(Weights {
            embedding: TokenEmbeddings::of_table(table, !owns_embedding),
            mtp_input: Some(input),
            layer_embeddings: None,
            ngram_table: None,
            streams: StreamWeights::default(),
            layers: Weights::layers(tensors, c)?,
            output: Output {
                norm: output_norm.or_else(|| model.output.norm.clone()),
                matrix: Some(output.map_or_else(of_model, Arc::new)),
                is_shared: !owns_output,
                bias: model.output.bias.clone(),
            },
            rope_divisors: model.rope_divisors.clone(),
            projections: Vec::new(),
            classifier: None,
        })
    }

    fn layers(tensors: &mut LoadedTensors, c: &Config) -> Result<Vec<Block>, LoadError> {
        let load = |i: usize| Block::load(&c.view(c.block_index(i)), &mut tensors.of(&prefix(i)));
        let mut layers = (0..c.n_blocks()).map(load).collect::<Result<Vec<_>, _>>()?;
        let missing = |i: usize, name: Name| missing(format!("{}{}", prefix(i), name.text()));
        let mut first = None;
        for (i, block) in layers.iter_mut().enumerate() {
            let n_head = c.block(i).attention.heads.n_head;
            if let Some(attention) = block.layer.mixer.attention_mut() {
                attention.share_biases(&c.attention, n_head, &mut first).map_err(|name| missing(i, name))?;
            }
        }
        block::check(&layers).map_err(|(i, name)| missing(i, name))?;
        Ok(layers)
    }

    /// The matrix of the output.
    pub(crate) fn output_matrix(&self) -> &Matrix {
        self.output.matrix.as_ref().unwrap_or(&self.embedding.table)
    }

    /// Bytes of the packed matrices.
    pub(crate) fn len_bytes(&self) -> usize {
        let output = self.output.matrix.as_deref().filter(|_| !self.output.is_shared);
        let layers = self.layers.iter().flat_map(Block::matrices);
        let heads = self.classifier.iter().flat_map(Classifier::linears);
        let outside = self.embedding.matrices().chain(output).chain(self.mtp_input.iter().map(MtpInput::matrix));
        let outside = outside.chain(self.projections.iter().chain(heads).map(|projection| &projection.w));
        let outside = outside.chain(self.layer_embeddings.iter().flat_map(LayerEmbeddings::matrices));
        let outside = outside.chain(self.streams.matrices()).chain(&self.ngram_table);
        outside.chain(layers).map(Matrix::len_bytes).sum()
    }

    /// Bytes of the matrices that one decoded token reads: all but embedding tables and experts that are not selected.
    pub(crate) fn decode_bytes(&self, c: &Config) -> usize {
        let layer = |block: &Block| -> usize {
            let all: usize = block.matrices().into_iter().map(Matrix::len_bytes).sum();
            all - block.layer.ffn.unused_bytes(&c.ffn)
        };
        let [_, projection] = self.layer_embeddings.as_ref().map_or([None; 2], |e| e.matrices().map(Some));
        let input = self.mtp_input.as_ref().map(MtpInput::matrix);
        let outside = projection.into_iter().chain(input).chain(self.streams.matrices());
        let outside = outside.chain([self.output_matrix()]).map(Matrix::len_bytes).sum::<usize>();
        outside + c.layers.iter().map(|config| layer(&self.layers[config.block])).sum::<usize>()
    }
}
