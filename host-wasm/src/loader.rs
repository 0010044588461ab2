//! A model from one file or several that arrive piece by piece.

use sha2::{Digest, Sha256};
use starling::error::LoadError;
use starling::gguf::{Gguf, GgufSet, HeaderError};
use starling::model::{Model, ModelLoader};
use starling::receipt::split_sha256;

use crate::session::Error;

/// Takes the bytes of a model's files: of each file in order, in pieces of any size. First the directories of all
/// files must be known, then weights are packed as they come, file after file, so that no file ever stands in memory
/// whole.
pub struct Loader {
    shards: Vec<Shard>,
    digest: bool,
    /// Once all directories are known, with the file that weights are taken from.
    weights: Option<(Box<ModelLoader>, usize)>,
}

/// A file on its way.
struct Shard {
    len: u64,
    fed: u64,
    hash: Sha256,
    /// Its beginning, until the weights in it are packed.
    prefix: Vec<u8>,
    /// Reading the directory is tried again when the beginning is this long.
    try_at: usize,
    /// Bytes of the directory, once known.
    header: Option<usize>,
}

/// Bytes of a file before its directory is first read.
const FIRST_TRY: usize = 64 * 1024;

impl Loader {
    /// For files of these lengths in bytes; with `digest` their SHA-256 is made, which receipts need.
    pub fn new(lens: &[u64], digest: bool) -> Loader {
        let shard =
            |&len| Shard { len, fed: 0, hash: Sha256::new(), prefix: Vec::new(), try_at: FIRST_TRY, header: None };
        Loader { shards: lens.iter().map(shard).collect(), digest, weights: None }
    }

    /// Takes the next bytes of a file; says whether its directory is known. Bytes after the directory are best held
    /// back until all directories are known: those that come before are kept as they are.
    ///
    /// # Errors
    /// What is wrong with the file; a file that is not there or not its turn.
    pub fn feed(&mut self, shard: usize, bytes: &[u8]) -> Result<bool, Error> {
        let n_shards = self.shards.len();
        let file = self.shards.get_mut(shard);
        let file = file.ok_or_else(|| Error::Option(format!("file {shard} of a model of {n_shards}")))?;
        file.fed += bytes.len() as u64;
        if file.fed > file.len {
            return Err(Error::Length { file: shard, found: file.fed, expected: file.len });
        }
        if self.digest {
            file.hash.update(bytes);
        }
        if let Some((loader, at)) = &mut self.weights {
            if *at != shard {
                return Err(Error::Option(format!("file {shard} fed while file {at} is not complete")));
            }
            loader.weights().feed(bytes)?;
            self.advance()?;
            return Ok(true);
        }
        file.prefix.extend_from_slice(bytes);
        let known = file.read_directory()?;
        if self.shards.iter().all(|s| s.header.is_some()) {
            self.start()?;
        }
        Ok(known)
    }

    /// All directories are known: from now on weights are packed.
    fn start(&mut self) -> Result<(), Error> {
        let set = self.shards.iter().map(|s| {
            Gguf::parse_header(&s.prefix, s.len).map_err(|e| match e {
                HeaderError::Load(e) => Error::Load(e),
                HeaderError::NeedMore { .. } => Error::Length { file: 0, found: s.fed, expected: s.len },
            })
        });
        let set = GgufSet::new(set.collect::<Result<Vec<_>, _>>()?)?;
        let loader = Box::new(ModelLoader::new(set.shards())?);
        self.weights = Some((loader, 0));
        self.pack_prefix(0)?;
        self.advance()
    }

    /// Packs what has been kept of a file.
    fn pack_prefix(&mut self, shard: usize) -> Result<(), LoadError> {
        let Some((loader, at)) = &mut self.weights else { return Ok(()) };
        *at = shard;
        loader.weights().start_shard(shard);
        let file = &mut self.shards[shard];
        let (prefix, start) = (core::mem::take(&mut file.prefix), file.header.unwrap_or(0));
        loader.weights().feed(&prefix[start..])
    }

    /// Goes on to the next file where one is complete.
    fn advance(&mut self) -> Result<(), Error> {
        while let Some((_, at)) = self.weights
            && self.shards[at].fed == self.shards[at].len
            && at + 1 < self.shards.len()
        {
            self.pack_prefix(at + 1)?;
        }
        Ok(())
    }

    /// Bytes of a file taken so far.
    pub fn fed(&self, shard: usize) -> u64 {
        self.shards.get(shard).map_or(0, |s| s.fed)
    }

    /// SHA-256 of the bytes of a file taken so far, if asked for.
    pub fn sha256(&self, shard: usize) -> Option<[u8; 32]> {
        self.shards.get(shard).filter(|_| self.digest).map(|s| s.hash.clone().finalize().into())
    }

    /// The model when all bytes have been fed, and the digest that names it, if asked for.
    ///
    /// # Errors
    /// What is missing.
    pub fn finish(self) -> Result<(Model, Option<[u8; 32]>), Error> {
        let digests: Option<Vec<_>> = (0..self.shards.len()).map(|i| self.sha256(i)).collect();
        let Some((loader, _)) = self.weights else {
            // the first file that is too short says what it lacks
            return Err(match self.shards.iter().enumerate().find(|(_, s)| s.header.is_none()) {
                Some((_, s)) if s.fed == s.len => Gguf::parse(&s.prefix).err().map_or(Error::NoWeights, Error::Load),
                Some((file, s)) => Error::Length { file, found: s.fed, expected: s.len },
                None => Error::NoWeights,
            });
        };
        if let Some((file, s)) = self.shards.iter().enumerate().find(|(_, s)| s.fed < s.len) {
            return Err(Error::Length { file, found: s.fed, expected: s.len });
        }
        Ok((loader.finish()?, digests.map(|d| split_sha256(&d))))
    }
}

impl Shard {
    /// Tries to read the directory where enough bytes are there; says whether it is known.
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
                // at least doubled, so that trying again stays linear
                self.try_at = (self.prefix.len() * 2).max(usize::try_from(at_least).unwrap_or(usize::MAX));
                Ok(false)
            }
        }
    }
}
