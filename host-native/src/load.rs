//! From the command line to a model in memory.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use starling::error::LoadError;
use starling::gguf::{Gguf, GgufSet, ShardName};
use starling::kernels::Cpu;
use starling::model::{Model, ModelLoader};
use starling::receipt::split_sha256;

use crate::cli::ModelArgs;
use crate::error::Failure;
use crate::model_file::ModelFile;
use crate::pool::{ThreadPool, default_threads};
use crate::progress::{Of, Progress, remark};

/// The model that travels in the binary.
pub static BUNDLED: &[u8] = include_bytes!("../../fixtures/starling-tiny/starling-tiny-q8_0.gguf");
/// Its name in messages.
pub const BUNDLED_NAME: &str = "starling-tiny-q8_0.gguf (bundled)";
/// Files larger than this load with a progress bar.
const SLOW_BYTES: usize = 1 << 28;
/// Bytes hashed before their pages are let go.
const HASH_BYTES: usize = 1 << 22;

/// The instruction set that was asked for.
///
/// # Errors
/// If this machine does not have it.
pub fn cpu(args: &ModelArgs) -> Result<Cpu, Failure> {
    Ok(match &args.isa {
        Some(name) => Cpu::named(name)?,
        None => Cpu::detect(),
    })
}

/// The threads that were asked for.
///
/// # Errors
/// If the system gives no more.
pub fn pool(args: &ModelArgs) -> Result<ThreadPool, Failure> {
    Ok(ThreadPool::new(args.threads.map_or_else(default_threads, usize::from))?)
}

/// The model's name in messages.
pub fn path(args: &ModelArgs) -> PathBuf {
    args.model.clone().unwrap_or_else(|| BUNDLED_NAME.into())
}

/// The model's file, or all files of a split model in order.
///
/// # Errors
/// If one cannot be opened.
pub fn files(args: &ModelArgs) -> Result<Vec<ModelFile>, Failure> {
    args.model.as_deref().map_or_else(|| Ok(vec![ModelFile::embedded(BUNDLED_NAME, BUNDLED)]), open_all)
}

/// The file of that name, or all files of the split model that it is one of.
///
/// # Errors
/// If one cannot be opened.
pub fn open_all(path: &Path) -> Result<Vec<ModelFile>, Failure> {
    let open = |path: PathBuf| ModelFile::open(&path).map_err(|source| Failure::File { path, source });
    paths(path).into_iter().map(open).collect()
}

/// The names of those files.
pub fn paths(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    match ShardName::parse(name) {
        Some(shard) => (1..=shard.count).map(|i| path.with_file_name(shard.sibling(i))).collect(),
        None => vec![path.into()],
    }
}

/// The directory of a model, or of each file of a split model.
///
/// # Errors
/// If a file is no valid GGUF; the error names that file.
pub fn directories(files: &[ModelFile]) -> Result<Vec<Gguf<'_>>, Failure> {
    files.iter().map(|file| Gguf::parse(file).map_err(|source| fault_of(file, source))).collect()
}

/// The one directory of all files of a model.
///
/// # Errors
/// As [`directories`]; if the files are not those of one model.
pub fn directory(files: &[ModelFile]) -> Result<GgufSet<'_>, Failure> {
    GgufSet::new(directories(files)?).map_err(|e| fault_of(&files[e.file], e.source))
}

fn fault_of(file: &ModelFile, source: LoadError) -> Failure {
    Failure::Model { path: file.path().into(), source }
}

/// Loads the model that was asked for.
///
/// # Errors
/// If the file cannot be read, or is not a model this engine runs.
pub fn model(args: &ModelArgs, pool: &ThreadPool) -> Result<Model, Failure> {
    let wrong = |source| Failure::Model { path: path(args), source };
    let files = files(args)?;
    let set = directory(&files)?;
    doubt_the_tokenizer(&path(args), &set.shards()[0]);
    let mut loader = ModelLoader::new(set.shards()).map_err(wrong)?;
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

/// Says so where a file leaves open how its texts are cut, and the usual guess may not be what the model was made with.
fn doubt_the_tokenizer(path: &Path, gguf: &Gguf<'_>) {
    let text = |key| gguf.str(key).ok().flatten();
    if text("tokenizer.ggml.model") != Some("gpt2") || text("tokenizer.ggml.pre").is_some() {
        return;
    }
    let doubt = format!(
        "{}: names no pre-tokenizer (tokenizer.ggml.pre); 'default' is taken, which may not be what the model was trained \
         with: convert the model anew if its answers are poor",
        path.display()
    );
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{doubt}");
    } else {
        remark(format_args!("starling: {doubt}"));
    }
}

/// The digest that receipts name the model by: reads all of its files.
///
/// # Errors
/// If one cannot be opened.
pub fn sha256(args: &ModelArgs) -> Result<[u8; 32], Failure> {
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
