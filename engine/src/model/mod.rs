//! A model: hyper-parameters, weights, tokenizer; and the forward pass.

pub mod arch;
mod block;
pub mod config;
mod ffn;
pub mod forward;
mod heads;
mod keys;
pub mod loader;
pub mod pass;
pub(crate) mod roles;
pub mod rotary;
mod rows;
mod scratch;
pub mod stream;
pub mod weights;

use alloc::format;
use alloc::string::String;

pub use config::Config;
pub(crate) use forward::logits_rows;
pub use forward::{Run, Stage, Trace};
pub(crate) use heads::HeadScratch;
use loader::Loader;
pub use scratch::Scratch;
pub use stream::{StreamError, StreamLoader};
use weights::Weights;

use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::pool::Pool;
use crate::tokenizer::Tokenizer;

/// Bytes of working memory that any model may have unless the host says otherwise.
const LEAST_SCRATCH_LIMIT: usize = 1 << 31;

/// A model, ready to run.
pub struct Model {
    /// Shape and constants.
    pub config: Config,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// The file's chat template, in Jinja.
    pub chat_template: Option<String>,
    /// The file's name for the model.
    pub name: Option<String>,
    /// Bytes of working memory that batches may have, at most: widths and experts are the file's choice. 2 GiB, or as
    /// many as the weights take if those are more, unless the host sets another number.
    pub max_scratch_bytes: usize,
    pub(crate) weights: Weights,
}

/// A model whose directory is read and whose weights are on their way.
pub struct ModelLoader {
    loader: Loader,
    tokenizer: Tokenizer,
    chat_template: Option<String>,
    name: Option<String>,
}

/// Checks that each row of the embedding has a token. A file may have rows without one if it says how many rows there
/// are, by `ARCH.vocab_size`.
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
    /// Checks the directories of a model's files (one, or all shards in order) and reserves memory for the weights.
    ///
    /// # Errors
    /// [`LoadError`] says which key or tensor is wrong.
    pub fn new(shards: &[Gguf<'_>]) -> Result<ModelLoader, LoadError> {
        let Some(gguf) = shards.first() else {
            let (found, expected) = ("no file".into(), "at least one file".into());
            return Err(LoadError::Gguf { at: 0, what: "model", found, expected });
        };
        let config = Config::from_gguf(gguf, shards)?;
        let tokenizer = Tokenizer::from_gguf(gguf)?;
        check_vocabulary(gguf, &config, tokenizer.n_vocab())?;
        Ok(ModelLoader {
            loader: Loader::new(shards, config)?,
            tokenizer,
            chat_template: gguf.str("tokenizer.chat_template")?.map(Into::into),
            name: gguf.str("general.name")?.map(Into::into),
        })
    }

    /// The weights on their way.
    pub fn weights(&mut self) -> &mut Loader {
        &mut self.loader
    }

    /// The model, once all weights have arrived.
    ///
    /// # Errors
    /// The first tensor that is not complete.
    pub fn finish(self) -> Result<Model, LoadError> {
        let (config, weights) = self.loader.finish()?;
        let ModelLoader { tokenizer, chat_template, name, .. } = self;
        let max_scratch_bytes = weights.len_bytes().max(LEAST_SCRATCH_LIMIT);
        Ok(Model { config, tokenizer, chat_template, name, max_scratch_bytes, weights })
    }
}

impl Model {
    /// Loads a model from a whole file in memory.
    ///
    /// # Errors
    /// [`LoadError`] says what is wrong with the file, and where.
    pub fn load(file: &[u8], pool: &dyn Pool) -> Result<Model, LoadError> {
        let gguf = Gguf::parse(file)?;
        let mut loader = ModelLoader::new(core::slice::from_ref(&gguf))?;
        loader.weights().load_all(&[file], pool, &mut |_, _| {})?;
        loader.finish()
    }

    /// Bytes of the packed weights.
    pub fn weight_bytes(&self) -> usize {
        self.weights.len_bytes()
    }

    /// Bytes of weights that one decoded token reads.
    pub fn decode_bytes(&self) -> usize {
        self.weights.decode_bytes(&self.config)
    }
}
