//! Opens and loads models.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};
use starling::draft::check_draft_model;
use starling::error::LoadError;
use starling::gguf::{Gguf, GgufSet, ShardName};
use starling::kernels::Cpu;
use starling::kernels::attention::KvType;
use starling::model::{Config, Model, ModelLoader};
use starling::pool::Pool;
use starling::receipt::split_sha256;

use crate::bytes::Bytes;
use crate::error::Failure;
use crate::model_file::ModelFile;
use crate::pool::{ThreadPool, default_threads};
use crate::progress::{Of, Progress, remark};
use crate::registry::{ModelLock, Registry, Resolved};

/// The bundled model; empty without the feature `bundled-model`.
#[cfg(feature = "bundled-model")]
pub static BUNDLED: &[u8] = include_bytes!("../../../fixtures/starling-tiny/starling-tiny-q8_0.gguf");
#[cfg(not(feature = "bundled-model"))]
pub static BUNDLED: &[u8] = &[];
/// Name of the bundled model in messages.
pub const BUNDLED_NAME: &str = "starling-tiny-q8_0.gguf (bundled)";
/// Minimum size of files that are loaded with a progress bar, in bytes.
const SLOW_BYTES: usize = 1 << 28;
/// Bytes hashed before their mapped pages are released.
const HASH_BYTES: usize = 1 << 22;

/// Maximum default context; a file may name any number.
pub const DEFAULT_CTX: usize = 8192;

/// A model, and how it is computed.
#[derive(Debug, Clone, Default)]
pub struct ModelOptions {
    /// Source or file of the model; `None`: the bundled model.
    pub model: Option<PathBuf>,
    /// Keeps that file in the store.
    pub lock: Option<Arc<ModelLock>>,
    /// Number of threads; `None`: physical cores.
    pub threads: Option<u16>,
    /// Instruction set; `None`: the fastest.
    pub isa: Option<String>,
    /// Type of the KV cache; `None`: f16.
    pub kv_type: Option<KvType>,
    /// Maximum memory for intermediate results of a batch.
    pub working_memory: Option<Bytes>,
}

impl ModelOptions {
    /// Type of the KV cache.
    pub fn kv_type(&self) -> KvType {
        self.kv_type.unwrap_or(KvType::F16)
    }
}

/// The instruction set of `--isa`, or the fastest.
///
/// # Errors
/// If this CPU does not support it.
pub fn cpu(args: &ModelOptions) -> Result<Cpu, Failure> {
    Ok(match &args.isa {
        Some(name) => Cpu::named(name)?,
        None => Cpu::detect(),
    })
}

/// The pool of `--threads`, or of one thread per core.
///
/// # Errors
/// If the system cannot start the threads.
pub fn pool(args: &ModelOptions) -> Result<ThreadPool, Failure> {
    Ok(ThreadPool::new(args.threads.map_or_else(default_threads, usize::from))?)
}

/// The model's path, or its name in messages.
pub fn path(args: &ModelOptions) -> PathBuf {
    args.model.clone().unwrap_or_else(|| BUNDLED_NAME.into())
}

/// The options with the path of the model's file in place of its source.
///
/// # Errors
/// If the source leads to no file.
pub fn resolve(options: &ModelOptions) -> Result<ModelOptions, Failure> {
    options.model.as_deref().map_or_else(|| Ok(options.clone()), |source| resolve_source(options, source))
}

/// The arguments with the file of another source, such as a draft model.
///
/// # Errors
/// If the source leads to no file.
pub fn resolve_source(args: &ModelOptions, source: &Path) -> Result<ModelOptions, Failure> {
    let Resolved { path, lock } = Registry::from_env()?.resolve(source)?;
    Ok(ModelOptions { model: Some(path), lock: lock.map(Arc::new), ..args.clone() })
}

/// Loads a draft model and checks that it can draft for `target`. `args` are those of its file.
///
/// # Errors
/// As [`model`], or if the vocabularies differ.
pub fn draft_model(args: &ModelOptions, target: &Model, pool: &dyn Pool) -> Result<Arc<Model>, Failure> {
    let draft = model(args, pool)?;
    check_draft_model(&draft, target).map_err(|source| Failure::DraftModel { path: path(args), source })?;
    Ok(Arc::new(draft))
}

/// Maps the model's file, or all files of a split model in order.
///
/// # Errors
/// If a file cannot be opened.
pub fn files(args: &ModelOptions) -> Result<Vec<ModelFile>, Failure> {
    match &args.model {
        Some(path) => open_all(path),
        None if BUNDLED.is_empty() => Err(Failure::Usage("expected --model: this build has no bundled model".into())),
        None => Ok(vec![ModelFile::embedded(BUNDLED_NAME, BUNDLED)]),
    }
}

/// Maps a file, or all files of the split model that it belongs to.
///
/// # Errors
/// If a file cannot be opened.
pub fn open_all(path: &Path) -> Result<Vec<ModelFile>, Failure> {
    let open = |path: PathBuf| ModelFile::open(&path).map_err(|source| Failure::File { path, source });
    paths(path).into_iter().map(open).collect()
}

/// Paths of all files of the model that `path` belongs to.
pub fn paths(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    match ShardName::parse(name) {
        Some(shard) => (1..=shard.count).map(|i| path.with_file_name(shard.sibling(i))).collect(),
        None => vec![path.into()],
    }
}

/// Parses the header of each file.
///
/// # Errors
/// If a file is not valid GGUF; the error names the file.
pub fn headers(files: &[ModelFile]) -> Result<Vec<Gguf<'_>>, Failure> {
    files.iter().map(|file| Gguf::parse(file).map_err(|source| model_error(file, source))).collect()
}

/// Maximum size of a file that is taken for an incomplete download: a damaged header can ask for anything.
const MAX_FILE: u64 = 1 << 43;

/// The size that a file should have by its header, if it has a whole one.
fn whole_len(file: &ModelFile) -> Option<u64> {
    let gguf = Gguf::parse_header(file, MAX_FILE).ok()?;
    gguf.tensors().iter().map(|t| t.offset + t.len_bytes).max()
}

/// Parses the headers of all files and joins them.
///
/// # Errors
/// As [`headers`], or if the files do not belong to one model.
pub fn joined_headers(files: &[ModelFile]) -> Result<GgufSet<'_>, Failure> {
    GgufSet::new(headers(files)?).map_err(|e| model_error(&files[e.file], e.source))
}

/// The error of a file; a file that ends too early is an incomplete download, whatever was being read.
fn model_error(file: &ModelFile, source: LoadError) -> Failure {
    let have = file.len() as u64;
    if let Some(total) = whole_len(file).filter(|total| *total > have) {
        return Failure::Incomplete { path: file.path().into(), have, total };
    }
    Failure::Model { path: file.path().into(), source }
}

/// Loads the model of the command line.
///
/// # Errors
/// If the file cannot be read, or is not a supported model.
pub fn model(args: &ModelOptions, pool: &dyn Pool) -> Result<Model, Failure> {
    model_and_head(args, false, pool)
}

/// As [`model`]; with `mtp`, with the MTP head of the file, which drafts.
///
/// # Errors
/// Also if the file has no such head.
pub fn model_and_head(args: &ModelOptions, mtp: bool, pool: &dyn Pool) -> Result<Model, Failure> {
    let wrong = |source| Failure::Model { path: path(args), source };
    let files = files(args)?;
    let set = joined_headers(&files)?;
    warn_of_missing_pretokenizer(&path(args), &set.shards()[0]);
    let loader = if mtp { ModelLoader::with_mtp_head(set.shards()) } else { ModelLoader::new(set.shards()) };
    let mut loader = loader.map_err(wrong)?;
    if let Some(unused) = unused_layers(loader.config(), mtp, set.shards()) {
        tracing::info!("{}: {unused}", path(args).display());
    }
    let bytes: Vec<&[u8]> = files.iter().map(|f| &f[..]).collect();
    let total: usize = bytes.iter().map(|b| b.len()).sum();
    let progress = match total > SLOW_BYTES {
        true => Progress::on_terminal("loading", Of::Bytes, total as u64),
        false => Progress::hidden(),
    };
    let loaded = loader.weights().load_all(&bytes, pool, &mut |file, range| {
        progress.inc(range.len() as u64, "");
        files[file].release(range);
    });
    progress.finish();
    loaded.map_err(wrong)?;
    let mut model = loader.finish().map_err(wrong)?;
    if let Some(bytes) = args.working_memory {
        model.max_scratch_bytes = usize::try_from(bytes.0).unwrap_or(usize::MAX);
    }
    Ok(model)
}

/// Names the layers that the model has and the engine does not use, if there are any. With `mtp` it uses the first of them.
pub fn unused_layers(config: &Config, mtp: bool, shards: &[Gguf<'_>]) -> Option<String> {
    let (first, end) = (config.n_layer() + usize::from(mtp), config.n_layer() + config.n_nextn);
    let layers: Vec<String> = (first..end).map(|layer| format!("blk.{layer}.")).collect();
    let tensors = shards.iter().flat_map(|gguf| gguf.tensors());
    let tensors = tensors.filter(|tensor| layers.iter().any(|layer| tensor.name.starts_with(layer)));
    let (n, bytes) = tensors.fold((0, 0), |(n, bytes), tensor| (n + 1, bytes + tensor.len_bytes));
    let names = if end - first == 1 { format!("blk.{first}") } else { format!("blk.{first} to blk.{}", end - 1) };
    let hint = if !mtp && config.mtp_layer.is_some() { "; --draft-mtp drafts with the first" } else { "" };
    (n > 0).then(|| format!("unused: {names} (multi-token prediction, NextN), {n} tensors, {bytes} bytes{hint}"))
}

/// Warns if a byte-level BPE vocabulary names no pre-tokenizer: the default may not be the model's.
fn warn_of_missing_pretokenizer(path: &Path, gguf: &Gguf<'_>) {
    let text = |key| gguf.str(key).ok().flatten();
    if text("tokenizer.ggml.model") != Some("gpt2") || text("tokenizer.ggml.pre").is_some() {
        return;
    }
    let warning = format!(
        "{}: the key tokenizer.ggml.pre is missing; using the pre-tokenizer 'default', which may not be the model's; \
         convert the model again if its output is poor",
        path.display()
    );
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{warning}");
    } else {
        remark(format_args!("starling: {warning}"));
    }
}

/// The digest of the model that receipts contain; reads all files.
///
/// # Errors
/// If a file cannot be opened.
pub fn sha256(args: &ModelOptions) -> Result<[u8; 32], Failure> {
    let digest = |file: &ModelFile| {
        let (mut hash, mut at) = (Sha256::new(), 0);
        for piece in file.chunks(HASH_BYTES) {
            hash.update(piece);
            file.release(at..at + piece.len());
            at += piece.len();
        }
        hash.finalize().into()
    };
    Ok(split_sha256(&files(args)?.iter().map(digest).collect::<Vec<_>>()))
}
