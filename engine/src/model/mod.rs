//! Models: hyper-parameters, weights, tokenizer and the forward pass.

mod budget;
pub mod config;
mod directory;
pub(crate) mod embeddings;
pub mod evaluate;
pub mod families;
pub mod family;
pub(crate) mod ffn;
pub mod forward;
pub(crate) mod heads;
mod keys;
mod linear;
pub mod loader;
mod memory;
pub(crate) mod mixers;
mod pass;
mod recommended;
pub(crate) mod residual;
mod rows;
mod scratch;
pub mod stream;
mod tensors;
mod weights;

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;

pub use config::Config;
pub use families as arch;
pub(crate) use forward::logits_rows;
pub(crate) use heads::projection::ProjectionScratch;
use loader::{LoadedWeights, WeightLoader};
pub use pass::{Exec, KvRef, Run, Stage, Trace};
pub use recommended::RecommendedSampling;
use residual::block::Block;
pub use scratch::{Scratch, ScratchSize};
pub use stream::{StreamError, StreamLoader};
use weights::Weights;

use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::pool::Pool;
use crate::tokenizer::Tokenizer;

/// Default limit of working memory, unless the weights are larger.
const LEAST_SCRATCH_LIMIT: usize = 1 << 31;

/// A loaded model.
pub struct Model {
    /// Hyper-parameters.
    pub config: Config,
    /// Tokenizer of the model file.
    pub tokenizer: Arc<Tokenizer>,
    /// Chat template of the model file, in Jinja.
    pub chat_template: Option<String>,
    /// Prompt of a reranker, with `{query}` and `{document}` (`tokenizer.chat_template.rerank`).
    pub rerank_template: Option<String>,
    /// Name of the model (`general.name`).
    pub name: Option<String>,
    /// Number of elements of all tensors.
    pub n_parameters: u64,
    /// Mixture of types of the file, as llama.cpp numbers it (`general.file_type`).
    pub file_type: Option<u32>,
    /// Sampling options that the file recommends.
    pub recommended: RecommendedSampling,
    /// Maximal bytes of working memory. An untrusted file controls widths and numbers of experts, and so the memory
    /// that a batch needs. The default is 2 GiB or the size of the weights, whichever is larger; hosts may set another
    /// value.
    pub max_scratch_bytes: usize,
    pub(crate) weights: Weights,
    /// The layer of the file that predicts a further token, if it was loaded ([`ModelLoader::with_mtp_head`]).
    pub mtp_head: Option<Arc<Model>>,
}

/// A model whose metadata and tensor directory are parsed and whose weights are being loaded.
pub struct ModelLoader {
    loader: WeightLoader,
    tokenizer: Arc<Tokenizer>,
    chat_template: Option<String>,
    rerank_template: Option<String>,
    name: Option<String>,
    n_parameters: u64,
    file_type: Option<u32>,
    recommended: RecommendedSampling,
}

/// Checks that each row of the embedding has a token. A file may have padding rows if `ARCH.vocab_size` is the number
/// of rows.
fn check_vocabulary(gguf: &Gguf<'_>, config: &Config, n_tokens: usize) -> Result<(), LoadError> {
    let (rows, key) = (config.n_vocab, format!("{}.vocab_size", config.arch.name));
    let is_padded = n_tokens < rows && gguf.u32(&key)?.is_some_and(|size| size as usize == rows);
    if n_tokens == rows || is_padded {
        return Ok(());
    }
    Err(LoadError::Metadata {
        key: "tokenizer.ggml.tokens".into(),
        found: format!("{n_tokens} tokens"),
        expected: match n_tokens < rows {
            true => format!("{rows} (the rows of token_embd.weight), or `{key}` = {rows}"),
            false => format!("{rows} (the rows of token_embd.weight)"),
        },
    })
}

impl ModelLoader {
    /// Checks metadata and tensor directories of a model's files (one, or all shards in order) and allocates the
    /// weights.
    ///
    /// # Errors
    /// [`LoadError`] names the key or tensor that is invalid.
    pub fn new(shards: &[Gguf<'_>]) -> Result<ModelLoader, LoadError> {
        ModelLoader::with(shards, false)
    }

    /// As [`ModelLoader::new`], for a model with its MTP head ([`Model::mtp_head`]).
    ///
    /// # Errors
    /// Also if the file has none that the engine can use.
    pub fn with_mtp_head(shards: &[Gguf<'_>]) -> Result<ModelLoader, LoadError> {
        ModelLoader::with(shards, true)
    }

    fn with(shards: &[Gguf<'_>], mtp: bool) -> Result<ModelLoader, LoadError> {
        let Some(gguf) = shards.first() else {
            let (found, expected) = ("no file".into(), "at least one file".into());
            return Err(LoadError::Gguf { at: 0, what: "model", found, expected });
        };
        let config = Config::from_gguf(gguf, shards)?;
        let tokenizer = Tokenizer::from_gguf(gguf)?;
        check_vocabulary(gguf, &config, tokenizer.n_vocab())?;
        Ok(ModelLoader {
            loader: WeightLoader::new(shards, config, mtp)?,
            tokenizer: Arc::new(tokenizer),
            chat_template: gguf.str("tokenizer.chat_template")?.map(Into::into),
            rerank_template: gguf.str("tokenizer.chat_template.rerank")?.map(Into::into),
            name: gguf.str("general.name")?.map(Into::into),
            n_parameters: shards.iter().flat_map(|shard| shard.tensors()).map(|tensor| tensor.n_elements()).sum(),
            // a mixture of another program is no reason to refuse the file
            file_type: gguf.u32("general.file_type").unwrap_or(None),
            recommended: RecommendedSampling::from_gguf(gguf)?,
        })
    }

    /// Hyper-parameters.
    pub fn config(&self) -> &Config {
        self.loader.config()
    }

    /// The loader of the weights, to which the bytes of the files are passed.
    pub fn weights(&mut self) -> &mut WeightLoader {
        &mut self.loader
    }

    /// The model, after all weights are loaded.
    ///
    /// # Errors
    /// [`LoadError`] of the first tensor that is incomplete or that conflicts with others.
    pub fn finish(self) -> Result<Model, LoadError> {
        let LoadedWeights { config, weights, mtp_head } = self.loader.finish()?;
        let max_scratch_bytes = weights.len_bytes().max(LEAST_SCRATCH_LIMIT);
        let mtp_head = mtp_head.map(|(config, weights)| Model {
            config,
            tokenizer: Arc::clone(&self.tokenizer),
            chat_template: None,
            rerank_template: None,
            name: None,
            n_parameters: 0,
            file_type: self.file_type,
            recommended: RecommendedSampling::default(),
            max_scratch_bytes,
            weights,
            mtp_head: None,
        });
        Ok(Model {
            mtp_head: mtp_head.map(Arc::new),
            config,
            tokenizer: self.tokenizer,
            chat_template: self.chat_template,
            rerank_template: self.rerank_template,
            name: self.name,
            n_parameters: self.n_parameters,
            file_type: self.file_type,
            recommended: self.recommended,
            max_scratch_bytes,
            weights,
        })
    }
}

impl Model {
    /// Loads a model from the bytes of a GGUF file.
    ///
    /// # Errors
    /// [`LoadError`] names the offset, key or tensor that is invalid.
    pub fn load(file: &[u8], pool: &dyn Pool) -> Result<Model, LoadError> {
        let gguf = Gguf::parse(file)?;
        let mut loader = ModelLoader::new(core::slice::from_ref(&gguf))?;
        loader.weights().load_all(&[file], pool, &mut |_, _| {})?;
        loader.finish()
    }

    /// The weights of layer `i`: several layers may have the same.
    pub(crate) fn layer(&self, i: usize) -> &Block {
        &self.weights.layers[self.config.layers[i].block]
    }

    /// Bytes of the packed weights.
    pub fn weight_bytes(&self) -> usize {
        self.weights.len_bytes()
    }

    /// Bytes of weights that the forward pass of one decoded token reads.
    pub fn decode_bytes(&self) -> usize {
        self.weights.decode_bytes(&self.config)
    }
}
