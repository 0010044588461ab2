//! Loading of weights: checks tensors against the configuration and packs them panel by panel, from memory or from a
//! stream.

use alloc::format;
use alloc::vec::Vec;
use core::ops::Range;

use crate::error::LoadError;
use crate::gguf::{Gguf, TensorInfo};
use crate::kernels::WeightArena;
use crate::model::config::Config;
use crate::model::directory::{self, Directory};
use crate::model::tensors::{LoadedTensors, PendingTensor, tensor_error};
use crate::model::weights::Weights;
use crate::pool::Pool;

/// Receives the bytes of the tensors, as whole files or in pieces in file order, and produces the weights.
pub struct WeightLoader {
    config: Config,
    /// The MTP head that is loaded too.
    head: Option<Config>,
    /// Tensors in file order.
    pending: Vec<PendingTensor>,
    /// Index of the tensor that is being streamed, and the number of its bytes packed.
    at: usize,
    done: u64,
    /// Streamed bytes that do not fill a panel yet.
    carry: Vec<u8>,
    /// Offset of the tensor data in each file.
    starts: Vec<u64>,
    /// The file that `feed` reads, and the offset of its next byte.
    shard: usize,
    next: u64,
}

impl WeightLoader {
    /// Checks names, types and shapes of all tensors, and allocates the matrices. With `mtp`, those of the MTP head too.
    ///
    /// # Errors
    /// [`LoadError`] names the tensor, what was found and what was expected.
    pub fn new(shards: &[Gguf<'_>], config: Config, mtp: bool) -> Result<WeightLoader, LoadError> {
        let (mut pending, mut arena) = (Vec::<PendingTensor>::new(), WeightArena::default());
        let head = if mtp { Some(config.mtp_head().ok_or_else(|| no_head(&config))?) } else { None };
        let named = |(_, t): (usize, &TensorInfo<'_>)| {
            let name = directory::canonical(t.name, &config);
            match head.as_ref().and_then(|_| directory::name_in_head(&name, &config)) {
                Some(name) => (name, true),
                None => (name, false),
            }
        };
        let all = shards.iter().enumerate().flat_map(|(i, g)| g.tensors().iter().map(move |t| (i, t)));
        let names: Vec<_> = all.clone().map(named).collect();
        let names_of = |of_head| directory::sorted(names.iter().filter(move |n| n.1 == of_head).map(|n| n.0.as_str()));
        let own = Directory::new(&config, &names_of(false));
        let of_head = head.as_ref().map(|head| Directory::new(head, &names_of(true)));
        for ((name, is_of_head), (shard, t)) in names.iter().zip(all) {
            let directory = of_head.as_ref().filter(|_| *is_of_head).unwrap_or(&own);
            let Some((shape, declaration)) = directory.shape(name, t)? else { continue };
            let into = shape.reserve(t, &mut arena)?;
            let (dtype, offset, len_bytes) = (t.dtype, t.offset, t.len_bytes);
            let (name, excluded_by, of_head) = (name.clone(), declaration.excluded_by.clone(), *is_of_head);
            pending.push(PendingTensor { name, shard, dtype, offset, len_bytes, into, of_head, excluded_by });
        }
        let used =
            |of_head| directory::sorted(pending.iter().filter(move |p| p.of_head == of_head).map(|p| &p.name[..]));
        if let Some(name) = own.missing(&used(false)) {
            return Err(LoadError::MissingTensor { name });
        }
        if let Some(name) = of_head.as_ref().and_then(|directory| directory.missing(&used(true))) {
            return Err(LoadError::MissingTensor { name: directory::name_in_file(&name, &config) });
        }
        pending.sort_by_key(|tensor| (tensor.shard, tensor.offset));
        let starts = shards.iter().map(Gguf::header_len).collect();
        let mut loader =
            WeightLoader { config, head, pending, at: 0, done: 0, carry: Vec::new(), starts, shard: 0, next: 0 };
        loader.start_shard(0);
        Ok(loader)
    }

    /// The configuration that the tensors were checked against.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Loads all tensors from whole files in memory, in shard order. `packed` is called with a file index and a byte
    /// range that is no longer needed, every few MiB, so that a host can release mapped pages.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] if a tensor contains an infinity or NaN.
    pub fn load_all(
        &mut self,
        files: &[&[u8]],
        pool: &dyn Pool,
        packed: &mut dyn FnMut(usize, Range<usize>),
    ) -> Result<(), LoadError> {
        for p in &mut self.pending {
            let (start, shard) = (p.offset as usize, p.shard);
            let bytes = &files[shard][start..start + p.len_bytes as usize];
            p.load(bytes, pool, &mut |range| packed(shard, start + range.start..start + range.end))?;
        }
        self.at = self.pending.len();
        Ok(())
    }

    /// Starts streaming at the tensor data of file `shard`.
    pub fn start_shard(&mut self, shard: usize) {
        (self.shard, self.next) = (shard, self.starts[shard]);
    }

    /// Takes the next bytes of the file, which start at its tensor data, in pieces of any size.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] if a tensor contains an infinity or NaN.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), LoadError> {
        while !bytes.is_empty() && self.at < self.pending.len() {
            let p = &mut self.pending[self.at];
            if p.shard != self.shard {
                break;
            }
            let start = p.offset + self.done + self.carry.len() as u64;
            if self.next < start {
                // padding between tensors
                let skip = (start - self.next).min(bytes.len() as u64);
                bytes = &bytes[skip as usize..];
                self.next += skip;
                continue;
            }
            let piece = p.piece_bytes(self.done);
            let take = (piece - self.carry.len()).min(bytes.len());
            let (head, rest) = bytes.split_at(take);
            bytes = rest;
            self.next += take as u64;
            if self.carry.is_empty() && take == piece {
                p.pack_piece(self.done, head)?;
            } else {
                self.carry.extend_from_slice(head);
                if self.carry.len() < piece {
                    continue;
                }
                p.pack_piece(self.done, &self.carry)?;
                self.carry.clear();
            }
            self.done += piece as u64;
            if self.done == p.len_bytes {
                (self.at, self.done) = (self.at + 1, 0);
            }
        }
        Ok(())
    }

    /// Whether all tensors are loaded.
    pub fn is_complete(&self) -> bool {
        self.at == self.pending.len()
    }

    /// The configuration and weights, and those of the MTP head, after all tensors are loaded.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] of the first tensor that is incomplete, or that conflicts with others.
    pub fn finish(self) -> Result<LoadedWeights, LoadError> {
        if let Some(p) = self.pending.get(self.at) {
            let found = format!("{} of {} bytes", self.done + self.carry.len() as u64, p.len_bytes);
            return Err(tensor_error(&p.name, &found, "the whole tensor"));
        }
        let (of_head, own) = self.pending.into_iter().partition(|p| p.of_head);
        let mut tensors = LoadedTensors::new(own);
        let weights = Weights::new(&mut tensors, &self.config)?;
        tensors.check_all_taken()?;
        let mut mtp_head = None;
        if let Some(config) = self.head {
            let mut tensors = LoadedTensors::new(of_head);
            let head = Weights::mtp_head(&mut tensors, &config, &weights)?;
            tensors.check_all_taken()?;
            mtp_head = Some((config, head));
        }
        Ok(LoadedWeights { config: self.config, weights, mtp_head })
    }
}

/// The result of a [`WeightLoader`].
pub struct LoadedWeights {
    pub(crate) config: Config,
    pub(crate) weights: Weights,
    pub(crate) mtp_head: Option<(Config, Weights)>,
}

/// Checks names, types and shapes of all tensors of a model, as loading does, without memory for them: for headers.
///
/// # Errors
/// [`LoadError`] names the tensor, what was found and what was expected.
pub fn check_tensors(shards: &[Gguf<'_>], config: &Config) -> Result<(), LoadError> {
    let named: Vec<_> =
        shards.iter().flat_map(Gguf::tensors).map(|t| (directory::canonical(t.name, config), t)).collect();
    let directory = Directory::new(config, &directory::sorted(named.iter().map(|(name, _)| name.as_str())));
    let mut used = Vec::new();
    for (name, t) in &named {
        if let Some((shape, _)) = directory.shape(name, t)? {
            shape.check(t)?;
            used.push(name.as_str());
        }
    }
    match directory.missing(&directory::sorted(used.into_iter())) {
        Some(name) => Err(LoadError::MissingTensor { name }),
        None => Ok(()),
    }
}

/// The error for a file without an MTP head that the engine can use.
fn no_head(config: &Config) -> LoadError {
    let found = match config.n_nextn {
        0 => "no layer for multi-token prediction".into(),
        _ => format!("one of the architecture `{}`, whose layers the engine does not draft with", config.arch.name),
    };
    let key = format!("{}.nextn_predict_layers", config.arch.name);
    LoadError::Metadata { key, found, expected: "a layer for multi-token prediction (NextN)".into() }
}
