//! What a model file says of its model before it is loaded.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use starling::embed::Pooling;
use starling::model::Config;
use starling_api::infill::Infill;
use starling_host::error::Failure;
use starling_host::load;

use super::instance::FileStamp;
use super::loading::file_stamp;

/// What is known of a model by the headers of its files.
#[derive(Debug, Clone)]
pub struct ModelHeader {
    /// Architecture.
    pub family: &'static str,
    /// Number of parameters.
    pub n_parameters: u64,
    /// Mixture of types, as llama.cpp numbers it.
    pub file_type: Option<u32>,
    /// Size of all files.
    pub bytes: u64,
    pub kind: ModelKind,
    /// Chat template of the file.
    pub template: Option<String>,
    /// Whether the vocabulary has tokens for infill.
    pub has_infill: bool,
}

/// What a model is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelKind {
    Generates,
    Embeds,
    Ranks,
}

impl ModelHeader {
    /// Reads the headers of the files of the model that `path` belongs to. The weights are not read.
    ///
    /// # Errors
    /// If a file cannot be read, or its model is not supported.
    pub fn read(path: &Path) -> Result<ModelHeader, Failure> {
        let files = load::open_all(path)?;
        let set = load::joined_headers(&files)?;
        let shards = set.shards();
        let wrong = |source| Failure::Model { path: path.into(), source };
        let first = &shards[0];
        let config = Config::from_gguf(first, shards).map_err(wrong)?;
        let tensors = || shards.iter().flat_map(|gguf| gguf.tensors());
        let has_head = tensors().any(|tensor| tensor.name.starts_with("cls."));
        let kind = match Pooling::of(&config) {
            Ok(Pooling::Rank) => ModelKind::Ranks,
            _ if has_head => ModelKind::Ranks,
            _ if config.causal => ModelKind::Generates,
            _ => ModelKind::Embeds,
        };
        let tokens = first.str_array("tokenizer.ggml.tokens").map_err(wrong)?;
        // texts of control tokens begin so
        let tokens: HashSet<&[u8]> = tokens
            .into_iter()
            .flatten()
            .filter(|token| token.starts_with(b"<") || token.starts_with("▁<".as_bytes()))
            .collect();
        Ok(ModelHeader {
            family: config.arch.name,
            n_parameters: tensors().map(|tensor| tensor.n_elements()).sum(),
            file_type: first.u32("general.file_type").unwrap_or(None),
            bytes: files.iter().map(|file| file.len() as u64).sum(),
            kind,
            template: first.str("tokenizer.chat_template").unwrap_or(None).map(str::to_string),
            has_infill: Infill::has_tokens(|text| tokens.contains(text.as_bytes())),
        })
    }
}

/// The header of a model file, read again when the file has changed.
#[derive(Debug, Default)]
pub struct HeaderCache(Mutex<Option<Known>>);

type Known = (PathBuf, FileStamp, Option<Arc<ModelHeader>>);

impl HeaderCache {
    /// The header of a file; `None` if there is no file, or it cannot be read.
    pub fn get(&self, path: &Path) -> Option<Arc<ModelHeader>> {
        let stamp = file_stamp(path)?;
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, at, header)) = &*known
            && of == path
            && *at == stamp
        {
            return header.clone();
        }
        let header = ModelHeader::read(path).ok().map(Arc::new);
        *known = Some((path.into(), stamp, header.clone()));
        header
    }
}
