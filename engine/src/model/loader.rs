//! Loading of weights: checks tensors against the configuration and packs them panel by panel, from memory or from a
//! stream.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::kernels::WeightArena;
use crate::kernels::panel::{Matrix, PANEL};
use crate::model::config::Config;
use crate::model::heads::mtp;
use crate::model::roles::{self, TensorStorage, tensor_error};
use crate::model::weights::Weights;
use crate::pool::Pool;
use crate::quant::{self, Dtype};

/// Bytes packed at a time: work for all threads, small next to the model.
const LOAD_BYTES: usize = 4 << 20;

/// A tensor to be loaded.
struct PendingTensor {
    name: String,
    /// Index of its file in a split model.
    shard: usize,
    dtype: Dtype,
    /// Offset in the file.
    offset: u64,
    len_bytes: u64,
    into: TensorStorage,
    /// Whether it belongs to the MTP head.
    of_head: bool,
}

/// Receives the bytes of the tensors, as whole files or in pieces in file order, and produces [`Weights`].
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
        for (shard, t) in shards.iter().enumerate().flat_map(|(i, g)| g.tensors().iter().map(move |t| (i, t))) {
            let name = roles::canonical(t.name, &config);
            let of_head = head.as_ref().and_then(|head| Some((mtp::name_in_head(&name, &config)?, head)));
            let (name, owner, of_head) = match of_head {
                Some((name, head)) => (name, head, true),
                None => (name, &config, false),
            };
            let Some(into) = TensorStorage::reserve(&name, t, owner, &mut arena)? else { continue };
            let (dtype, offset, len_bytes) = (t.dtype, t.offset, t.len_bytes);
            pending.push(PendingTensor { name, shard, dtype, offset, len_bytes, into, of_head });
        }
        let names = |of_head| pending.iter().filter(move |p| p.of_head == of_head).map(|p| p.name.as_str());
        if let Some(name) = first_missing(&config, names(false)) {
            return Err(LoadError::MissingTensor { name });
        }
        let missing = head.as_ref().and_then(|head| first_missing(head, names(true)));
        if let Some(name) = missing {
            return Err(LoadError::MissingTensor { name: mtp::name_in_file(&name, &config) });
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
    pub fn finish(mut self) -> Result<LoadedWeights, LoadError> {
        if let Some(p) = self.pending.get(self.at) {
            let found = format!("{} of {} bytes", self.done + self.carry.len() as u64, p.len_bytes);
            return Err(tensor_error(&p.name, &found, "the whole tensor"));
        }
        self.pending.sort_by(|a, b| a.name.cmp(&b.name));
        let (of_head, own) = self.pending.into_iter().partition(|p| p.of_head);
        let mut tensors = LoadedTensors(own);
        let weights = Weights::new(&mut tensors, &self.config)?;
        tensors.check_all_taken(&self.config)?;
        let mut mtp_head = None;
        if let Some(config) = self.head {
            let mut tensors = LoadedTensors(of_head);
            let head = Weights::mtp_head(&mut tensors, &config, &weights)?;
            tensors.check_all_taken(&config)?;
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
    let mut used = Vec::new();
    for t in shards.iter().flat_map(Gguf::tensors) {
        let name = roles::canonical(t.name, config);
        if roles::check(&name, t, config)? {
            used.push(name);
        }
    }
    match first_missing(config, used.iter().map(String::as_str)) {
        Some(name) => Err(LoadError::MissingTensor { name }),
        None => Ok(()),
    }
}

/// The first tensor that a model needs and these do not have.
fn first_missing<'p>(config: &Config, names: impl Iterator<Item = &'p str>) -> Option<String> {
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    let has = |name: &str| names.binary_search(&name).is_ok();
    roles::missing(config, has).or_else(|| roles::missing_in_layer(config, &names, has))
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

impl PendingTensor {
    /// Length of the piece that starts at byte `done`: a panel of a matrix, or the rest of a vector.
    fn piece_bytes(&self, done: u64) -> usize {
        match &self.into {
            TensorStorage::Matrices(all) => {
                let (panel, matrix) = (panel_bytes(&all[0]), matrix_bytes(&all[0]));
                (matrix - done % matrix).min(panel) as usize
            }
            TensorStorage::Vector { .. } => (self.len_bytes - done) as usize,
        }
    }

    fn not_finite(&self, done: u64, fault: quant::BlockFault) -> LoadError {
        let block = done / self.dtype.block_bytes() + fault.index as u64;
        tensor_error(&self.name, &format!("an infinity or NaN in block {block}"), "finite weights")
    }

    fn pack_piece(&mut self, done: u64, bytes: &[u8]) -> Result<(), LoadError> {
        quant::validate(self.dtype, bytes).map_err(|fault| self.not_finite(done, fault))?;
        match &mut self.into {
            TensorStorage::Matrices(all) => {
                let (panel, matrix) = (panel_bytes(&all[0]), matrix_bytes(&all[0]));
                all[(done / matrix) as usize].pack_panel((done % matrix / panel) as usize, bytes);
            }
            TensorStorage::Vector { values, .. } => {
                if self.dtype == Dtype::I32 {
                    // integers up to 2^24, which are exact; the role checks that
                    let integers = bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f32);
                    *values = integers.collect();
                    return Ok(());
                }
                *values = vec![0.0; bytes.len() / self.dtype.block_bytes() as usize];
                quant::widen(self.dtype, bytes, values)
                    .map_err(|e| tensor_error(&self.name, &format!("{e}"), "F32, F16 or BF16"))?;
            }
        }
        Ok(())
    }

    /// Packs a whole tensor, panels in parallel. `packed` is called with the byte ranges that are packed.
    fn load(&mut self, bytes: &[u8], pool: &dyn Pool, packed: &mut dyn FnMut(Range<usize>)) -> Result<(), LoadError> {
        let dtype = self.dtype;
        let TensorStorage::Matrices(all) = &mut self.into else {
            self.pack_piece(0, bytes)?;
            packed(0..bytes.len());
            return Ok(());
        };
        let (panel, matrix) = (panel_bytes(&all[0]) as usize, matrix_bytes(&all[0]) as usize);
        let panels = (LOAD_BYTES / panel).max(1);
        let mut done = 0;
        for (j, (m, bytes)) in all.iter_mut().zip(bytes.chunks_exact(matrix)).enumerate() {
            for (i, rows) in bytes.chunks(panels * panel).enumerate() {
                let fault = m.pack_panels(pool, i * panels, rows, &|rows| quant::validate(dtype, rows));
                if let Err((p, fault)) = fault {
                    return Err(self.not_finite((j * matrix + p * panel) as u64, fault));
                }
                packed(done..done + rows.len());
                done += rows.len();
            }
        }
        Ok(())
    }
}

/// Bytes of a whole panel, and of a matrix, in the file.
fn panel_bytes(m: &Matrix) -> u64 {
    (PANEL * m.row_bytes()) as u64
}

fn matrix_bytes(m: &Matrix) -> u64 {
    m.rows() as u64 * m.row_bytes() as u64
}

/// Loaded tensors, sorted by name; those taken are empty.
pub(crate) struct LoadedTensors(Vec<PendingTensor>);

impl LoadedTensors {
    fn find(&self, name: &str) -> Option<usize> {
        self.0.binary_search_by(|p| p.name.as_str().cmp(name)).ok()
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    fn take(&mut self, name: &str) -> Option<TensorStorage> {
        let i = self.find(name)?;
        Some(core::mem::replace(&mut self.0[i].into, TensorStorage::Matrices(Vec::new())))
    }

    /// Ignoring a tensor would compute another model than the file describes.
    fn check_all_taken(&self, config: &Config) -> Result<(), LoadError> {
        let is_taken = |p: &&PendingTensor| matches!(&p.into, TensorStorage::Matrices(all) if all.is_empty());
        self.0.iter().find(|p| !is_taken(p)).map_or(Ok(()), |p| Err(roles::conflict(&p.name, config)))
    }

    /// The matrices of a tensor: one, or one per expert.
    pub(crate) fn matrices(&mut self, name: &str) -> Option<Vec<Matrix>> {
        match self.take(name) {
            Some(TensorStorage::Matrices(all)) => Some(all),
            _ => None,
        }
    }

    pub(crate) fn matrix(&mut self, name: &str) -> Result<Matrix, LoadError> {
        let last = self.matrices(name).and_then(|mut all| all.pop());
        last.ok_or_else(|| LoadError::MissingTensor { name: name.into() })
    }

    /// The values of a vector, and the length of a row: heads may have rows of their own.
    pub(crate) fn vector(&mut self, name: &str) -> Option<(Vec<f32>, usize)> {
        match self.take(name) {
            Some(TensorStorage::Vector { values, width }) => Some((values, width)),
            _ => None,
        }
    }

    pub(crate) fn required(&mut self, name: &str) -> Result<Vec<f32>, LoadError> {
        self.optional(name).ok_or_else(|| LoadError::MissingTensor { name: name.into() })
    }

    pub(crate) fn optional(&mut self, name: &str) -> Option<Vec<f32>> {
        self.vector(name).map(|(values, _)| values)
    }
}
