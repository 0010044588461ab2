//! A model from a file that arrives piece by piece: a download, a pipe.

use alloc::boxed::Box;
use alloc::vec::Vec;

use sha2::{Digest, Sha256};

use super::{Model, ModelLoader};
use crate::error::LoadError;
use crate::gguf::{Gguf, HeaderError};

/// Takes the bytes of one file in order, in pieces of any size; weights are checked and packed as they come, so that
/// the file never stands in memory whole.
pub struct StreamLoader {
    file_len: u64,
    fed: u64,
    /// Of the bytes so far, if asked for.
    hash: Option<Sha256>,
    state: State,
}

enum State {
    /// The beginning of the file; reading it is tried again when it is this long.
    Header {
        prefix: Vec<u8>,
        try_at: usize,
    },
    Weights(Box<ModelLoader>),
}

/// Bytes before the directory is first read.
const FIRST_TRY: usize = 64 * 1024;

impl StreamLoader {
    /// For a file of `file_len` bytes.
    pub fn new(file_len: u64) -> StreamLoader {
        let state = State::Header { prefix: Vec::new(), try_at: FIRST_TRY };
        StreamLoader { file_len, fed: 0, hash: None, state }
    }

    /// The same, with the file's SHA-256: what receipts name the model by.
    pub fn with_digest(file_len: u64) -> StreamLoader {
        StreamLoader { hash: Some(Sha256::new()), ..StreamLoader::new(file_len) }
    }

    /// SHA-256 of the bytes taken so far, if asked for.
    pub fn sha256(&self) -> Option<[u8; 32]> {
        self.hash.clone().map(|hash| hash.finalize().into())
    }

    /// Bytes taken so far.
    pub fn fed(&self) -> u64 {
        self.fed
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// What is wrong with the file, as soon as it is seen.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), LoadError> {
        self.fed += bytes.len() as u64;
        if let Some(hash) = &mut self.hash {
            hash.update(bytes);
        }
        let (prefix, try_at) = match &mut self.state {
            State::Weights(loader) => return loader.weights().feed(bytes),
            State::Header { prefix, try_at } => (prefix, try_at),
        };
        prefix.extend_from_slice(bytes);
        if prefix.len() < *try_at && (prefix.len() as u64) < self.file_len {
            return Ok(());
        }
        let gguf = match Gguf::parse_header(prefix, self.file_len) {
            Ok(gguf) => gguf,
            Err(HeaderError::Load(e)) => return Err(e),
            Err(HeaderError::NeedMore { at_least }) => {
                // at least doubled, so that trying again stays linear
                *try_at = (prefix.len() * 2).max(usize::try_from(at_least).unwrap_or(usize::MAX));
                return Ok(());
            }
        };
        let start = usize::try_from(gguf.header_len()).unwrap_or(usize::MAX);
        if prefix.len() < start {
            *try_at = start;
            return Ok(());
        }
        let mut loader = ModelLoader::new(core::slice::from_ref(&gguf))?;
        loader.weights().feed(&prefix[start..])?;
        self.state = State::Weights(Box::new(loader));
        Ok(())
    }

    /// The model, when all bytes have been fed.
    ///
    /// # Errors
    /// What is missing.
    pub fn finish(self) -> Result<Model, LoadError> {
        match self.state {
            State::Weights(loader) => loader.finish(),
            State::Header { prefix, .. } => Err(match Gguf::parse(&prefix) {
                Err(e) => e,
                // a file without tensors
                Ok(gguf) => match ModelLoader::new(core::slice::from_ref(&gguf)) {
                    Err(e) => e,
                    Ok(loader) => return loader.finish(),
                },
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Inline;
    use proptest::prelude::*;
    use std::fs;
    use std::path::PathBuf;

    fn file(name: &str) -> Vec<u8> {
        fs::read(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fixtures/reference").join(name)).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn pieces_of_any_size_make_the_same_weights(sizes in prop::collection::vec(1usize..90_000, 1..6), q in 0usize..3) {
            let bytes = file(["llama-fallback-q4_k_m.gguf", "qwen3-tied-f16.gguf", "mixtral-quant-q4_0.gguf"][q]);
            let whole = Model::load(&bytes, &Inline).unwrap();
            let mut loader = StreamLoader::new(bytes.len() as u64);
            let (mut at, mut sizes) = (0, sizes.iter().cycle());
            while at < bytes.len() {
                let n = (*sizes.next().unwrap()).min(bytes.len() - at);
                loader.feed(&bytes[at..at + n]).unwrap();
                at += n;
            }
            let streamed = loader.finish().unwrap();
            let rows = |m: &Model| {
                let mut all = Vec::new();
                for w in m.weights.layers.iter().flat_map(|l| l.matrices()) {
                    for r in 0..w.rows() {
                        let at = all.len();
                        all.resize(at + w.k(), 0.0);
                        w.row(r, &mut all[at..]);
                    }
                }
                all
            };
            prop_assert!(rows(&whole) == rows(&streamed));
        }
    }

    #[test]
    fn the_digest_is_that_of_the_file() {
        let bytes = file("llama-gqa-untied-f16.gguf");
        let mut loader = StreamLoader::with_digest(bytes.len() as u64);
        bytes.chunks(70_001).for_each(|piece| loader.feed(piece).unwrap());
        assert_eq!(loader.sha256(), Some(Sha256::digest(&bytes).into()));
        assert_eq!(StreamLoader::new(1).sha256(), None);
    }

    #[test]
    fn a_file_cut_short_is_named_by_its_tensor() {
        let bytes = file("llama-gqa-untied-f16.gguf");
        let mut loader = StreamLoader::new(bytes.len() as u64);
        loader.feed(&bytes[..bytes.len() - 10]).unwrap();
        assert!(matches!(loader.finish(), Err(LoadError::Tensor { .. })));
        let mut loader = StreamLoader::new(bytes.len() as u64);
        loader.feed(&bytes[..100]).unwrap();
        assert!(loader.finish().is_err());
    }
}
