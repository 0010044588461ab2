//! Loading of a model whose files arrive in pieces.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::mem;

use sha2::{Digest, Sha256};

use crate::error::LoadError;
use crate::gguf::{Gguf, GgufSet, HeaderError, split_sha256};
use crate::model::{Model, ModelLoader};

/// Why streamed bytes did not make a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The only file, or the model as a whole, is malformed or unsupported.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// One of several files is malformed or unsupported.
    #[error("file {file}: {source}")]
    File {
        /// Index of the file, from 0.
        file: usize,
        /// The error.
        source: LoadError,
    },
    /// A file is shorter or longer than the length given to [`StreamLoader::new`].
    #[error("file {file}: received {found} bytes, expected {expected}")]
    Length {
        /// Index of the file, from 0.
        file: usize,
        /// Bytes received.
        found: u64,
        /// Length given to [`StreamLoader::new`].
        expected: u64,
    },
    /// Bytes of a file that does not exist, or before its turn.
    #[error("received bytes of file {file}, expected bytes of file {expected}")]
    Order {
        /// Index of the file, from 0.
        file: usize,
        /// The file that the loader reads now, or the last one.
        expected: usize,
    },
    /// The files contain no tensors.
    #[error("the model has no weights: its files contain no tensors")]
    NoWeights,
}

/// Receives the bytes of a model's files, each file in order, in pieces of any size. First the headers of all files
/// must be complete; then weights are packed as they arrive, file after file. No file is in memory as a whole.
pub struct StreamLoader {
    shards: Vec<Shard>,
    digest: bool,
    /// Whether the MTP head is loaded too.
    mtp: bool,
    /// The weight loader, once all headers are parsed, and the index of the file it reads.
    weights: Option<(Box<ModelLoader>, usize)>,
}

/// State of a file.
struct Shard {
    len: u64,
    fed: u64,
    hash: Sha256,
    /// Its first bytes, until the weights in them are packed.
    prefix: Vec<u8>,
    /// Length of `prefix` at which parsing the header is tried next.
    try_at: usize,
    /// Bytes of the header, once parsed.
    header: Option<usize>,
}

/// Bytes of a file before its header is first parsed.
const FIRST_TRY: usize = 64 * 1024;

impl StreamLoader {
    /// A loader for files of these lengths in bytes. With `digest` it computes their SHA-256, which receipts need.
    pub fn new(lens: &[u64], digest: bool) -> StreamLoader {
        let shard =
            |&len| Shard { len, fed: 0, hash: Sha256::new(), prefix: Vec::new(), try_at: FIRST_TRY, header: None };
        StreamLoader { shards: lens.iter().map(shard).collect(), digest, mtp: false, weights: None }
    }

    /// Loads the model with its MTP head ([`Model::mtp_head`]). To be called before the first [`StreamLoader::feed`].
    pub fn load_mtp_head(&mut self) {
        self.mtp = true;
    }

    /// Takes the next bytes of a file. Returns whether its header is complete. Send the bytes after a header only when
    /// all headers are complete: earlier ones are buffered.
    ///
    /// # Errors
    /// [`StreamError`] if the file is malformed, does not exist, or is not the one to be read now.
    pub fn feed(&mut self, shard: usize, bytes: &[u8]) -> Result<bool, StreamError> {
        let n_shards = self.shards.len();
        let file = self.shards.get_mut(shard);
        let file = file.ok_or(StreamError::Order { file: shard, expected: n_shards.saturating_sub(1) })?;
        file.fed += bytes.len() as u64;
        if file.fed > file.len {
            return Err(StreamError::Length { file: shard, found: file.fed, expected: file.len });
        }
        if self.digest {
            file.hash.update(bytes);
        }
        if let Some((loader, at)) = &mut self.weights {
            if *at != shard {
                return Err(StreamError::Order { file: shard, expected: *at });
            }
            loader.weights().feed(bytes).map_err(|source| self.in_file(shard, source))?;
            self.advance()?;
            return Ok(true);
        }
        let needed = (file.prefix.len() + bytes.len()) as u64;
        if file.prefix.try_reserve(bytes.len()).is_err() {
            let source = LoadError::OutOfMemory { what: "metadata and tensor directory", needed };
            return Err(self.in_file(shard, source));
        }
        file.prefix.extend_from_slice(bytes);
        let known = file.read_directory();
        let known = known.map_err(|source| self.in_file(shard, source))?;
        if self.shards.iter().all(|s| s.header.is_some()) {
            self.start()?;
        }
        Ok(known)
    }

    /// All headers are parsed: packs weights from now on.
    fn start(&mut self) -> Result<(), StreamError> {
        let directories = self.shards.iter().enumerate().map(|(file, s)| {
            Gguf::parse_header(&s.prefix, s.len).map_err(|e| match e {
                HeaderError::Load(source) => self.in_file(file, source),
                HeaderError::NeedMore { .. } => StreamError::Length { file, found: s.fed, expected: s.len },
            })
        });
        let directories = directories.collect::<Result<Vec<_>, _>>()?;
        let set = GgufSet::new(directories).map_err(|e| self.in_file(e.file, e.source))?;
        let loader = if self.mtp { ModelLoader::with_mtp_head(set.shards()) } else { ModelLoader::new(set.shards()) };
        let loader = Box::new(loader?);
        self.weights = Some((loader, 0));
        self.pack_prefix(0)?;
        self.advance()
    }

    /// Packs the buffered bytes of a file.
    fn pack_prefix(&mut self, shard: usize) -> Result<(), StreamError> {
        let Some((loader, at)) = &mut self.weights else { return Ok(()) };
        *at = shard;
        loader.weights().start_shard(shard);
        let file = &mut self.shards[shard];
        let (prefix, start) = (mem::take(&mut file.prefix), file.header.unwrap_or(0));
        loader.weights().feed(&prefix[start..]).map_err(|source| self.in_file(shard, source))
    }

    /// The error of a file, which is named where there are several.
    fn in_file(&self, file: usize, source: LoadError) -> StreamError {
        if self.shards.len() > 1 { StreamError::File { file, source } } else { StreamError::Load(source) }
    }

    /// Moves on to the next file when one is complete.
    fn advance(&mut self) -> Result<(), StreamError> {
        while let Some((_, at)) = self.weights
            && self.shards[at].fed == self.shards[at].len
            && at + 1 < self.shards.len()
        {
            self.pack_prefix(at + 1)?;
        }
        Ok(())
    }

    /// Bytes of a file received so far.
    pub fn fed(&self, shard: usize) -> u64 {
        self.shards.get(shard).map_or(0, |s| s.fed)
    }

    /// SHA-256 of the bytes of a file received so far, if requested.
    pub fn sha256(&self, shard: usize) -> Option<[u8; 32]> {
        self.shards.get(shard).filter(|_| self.digest).map(|s| s.hash.clone().finalize().into())
    }

    /// The model, after all bytes are received, and the digest that identifies it, if requested.
    ///
    /// # Errors
    /// [`StreamError`] names what is missing.
    pub fn finish(self) -> Result<(Model, Option<[u8; 32]>), StreamError> {
        let digests: Option<Vec<_>> = (0..self.shards.len()).map(|i| self.sha256(i)).collect();
        let Some((loader, _)) = self.weights else {
            // report the first file that is too short
            return Err(match self.shards.iter().enumerate().find(|(_, s)| s.header.is_none()) {
                Some((file, s)) if s.fed == s.len => {
                    Gguf::parse(&s.prefix).err().map_or(StreamError::NoWeights, |e| self.in_file(file, e))
                }
                Some((file, s)) => StreamError::Length { file, found: s.fed, expected: s.len },
                None => StreamError::NoWeights,
            });
        };
        if let Some((file, s)) = self.shards.iter().enumerate().find(|(_, s)| s.fed < s.len) {
            return Err(StreamError::Length { file, found: s.fed, expected: s.len });
        }
        Ok((loader.finish()?, digests.map(|d| split_sha256(&d))))
    }
}

impl Shard {
    /// Tries to parse the header if enough bytes arrived. Returns whether it is parsed.
    fn read_directory(&mut self) -> Result<bool, LoadError> {
        if self.header.is_some() {
            return Ok(true);
        }
        if self.prefix.len() < self.try_at && self.fed < self.len {
            return Ok(false);
        }
        match Gguf::parse_header(&self.prefix, self.len) {
            Ok(gguf) => {
                let start = usize::try_from(gguf.header_len()).unwrap_or(usize::MAX);
                if self.prefix.len() < start {
                    self.try_at = start;
                } else {
                    self.header = Some(start);
                }
                Ok(self.header.is_some())
            }
            Err(HeaderError::Load(e)) => Err(e),
            Err(HeaderError::NeedMore { at_least }) => {
                // at least doubled, so that repeated parsing stays linear in total
                self.try_at = (self.prefix.len() * 2).max(usize::try_from(at_least).unwrap_or(usize::MAX));
                Ok(false)
            }
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
            let mut loader = StreamLoader::new(&[bytes.len() as u64], false);
            let (mut at, mut sizes) = (0, sizes.iter().cycle());
            while at < bytes.len() {
                let n = (*sizes.next().unwrap()).min(bytes.len() - at);
                loader.feed(0, &bytes[at..at + n]).unwrap();
                at += n;
            }
            let streamed = loader.finish().unwrap().0;
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
        let mut loader = StreamLoader::new(&[bytes.len() as u64], true);
        for piece in bytes.chunks(70_001) {
            loader.feed(0, piece).unwrap();
        }
        assert_eq!(loader.sha256(0), Some(Sha256::digest(&bytes).into()));
        assert_eq!(StreamLoader::new(&[1], false).sha256(0), None);
    }

    #[test]
    fn bytes_that_do_not_belong_are_refused() {
        let mut loader = StreamLoader::new(&[10, 20], false);
        assert_eq!(loader.feed(2, b"x"), Err(StreamError::Order { file: 2, expected: 1 }));
        assert_eq!(loader.feed(0, &[0; 11]), Err(StreamError::Length { file: 0, found: 11, expected: 10 }));
        let mut loader = StreamLoader::new(&[], false);
        assert_eq!(loader.feed(0, b"x"), Err(StreamError::Order { file: 0, expected: 0 }));
        assert_eq!(loader.finish().err(), Some(StreamError::NoWeights));
    }

    #[test]
    fn an_error_names_the_file_that_it_happened_in() {
        let bytes = file("llama-gqa-untied-f16.gguf");
        let (len, wrong) = (bytes.len() as u64, b"not a model");
        let file_of = |error: Result<bool, StreamError>| match error {
            Err(StreamError::File { file, .. }) => Some(file),
            _ => None,
        };
        let mut loader = StreamLoader::new(&[len, wrong.len() as u64], false);
        loader.feed(0, &bytes[..bytes.len() / 2]).unwrap();
        assert_eq!(file_of(loader.feed(1, wrong)), Some(1));
        // `split.no` is missing in both, the first is named
        let mut loader = StreamLoader::new(&[len, len], false);
        loader.feed(0, &bytes).unwrap();
        assert_eq!(file_of(loader.feed(1, &bytes)), Some(0));
        // a single file needs no name
        let mut loader = StreamLoader::new(&[wrong.len() as u64], false);
        assert!(matches!(loader.feed(0, wrong), Err(StreamError::Load(_))));
    }

    #[test]
    fn a_file_cut_short_is_named_with_its_length() {
        let bytes = file("llama-gqa-untied-f16.gguf");
        let mut loader = StreamLoader::new(&[bytes.len() as u64], false);
        loader.feed(0, &bytes[..bytes.len() - 10]).unwrap();
        let length = StreamError::Length { file: 0, found: bytes.len() as u64 - 10, expected: bytes.len() as u64 };
        assert_eq!(loader.finish().err(), Some(length));
        let mut loader = StreamLoader::new(&[bytes.len() as u64], false);
        loader.feed(0, &bytes[..100]).unwrap();
        assert!(loader.finish().is_err());
    }
}
