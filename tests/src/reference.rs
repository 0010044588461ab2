//! Reference cases, computed by other implementations; schema and tolerances in `fixtures/reference/README.md`.

use std::fs;
use std::ops::Range;
use std::path::PathBuf;

use base64::Engine as _;
use serde::Deserialize;
use starling::error::LoadError;
use starling::gguf::{Gguf, GgufWriter, TensorInfo, Value};
use starling::kernels::Cpu;
use starling::kernels::attention::KvType;
use starling::model::Model;
use starling::model::evaluate::{Evaluation, EvaluationError};
use starling::pool::{Inline, Pool};

/// A case: `NAME.json`.
#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct Case {
    pub name: String,
    pub kind: String,
    pub files: Vec<File>,
    pub prompts: Vec<Prompt>,
    /// Embedding cases: `mean`, `cls` or `last`.
    pub pooling: Option<String>,
    pub llama_cpp_vs_reference: serde_json::Map<String, serde_json::Value>,
}

/// A model file of a case.
#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct File {
    pub file: String,
    #[serde(rename = "type")]
    pub dtype: String,
}

/// A prompt and its reference results.
#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct Prompt {
    pub text: String,
    pub ids: Vec<u32>,
    pub logits_last: Option<Vec<f32>>,
    pub logits_all: Option<Block>,
    pub greedy: Option<Greedy>,
    pub router_margins: Option<Vec<f32>>,
    /// Embedding cases: the normalised pooled vector, and the states of all tokens.
    pub embedding: Option<Vec<f32>>,
    pub hidden_all: Option<Block>,
}

/// Row-major little-endian f32.
#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct Block {
    pub shape: Vec<usize>,
    pub base64: String,
}

/// Greedy continuation.
#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct Greedy {
    pub ids: Vec<u32>,
    pub margins: Vec<f32>,
}

/// Path of the folder `fixtures`.
pub fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fixtures")
}

impl Block {
    /// The numbers.
    ///
    /// # Panics
    /// If the block is not valid base64.
    pub fn values(&self) -> Vec<f32> {
        let bytes = base64::engine::general_purpose::STANDARD.decode(&self.base64).expect("base64");
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }
}

/// All cases of a kind, `causal` or `embedding`, sorted by name.
///
/// # Panics
/// If a file cannot be read.
pub fn cases(kind: &str) -> Vec<Case> {
    let mut cases: Vec<Case> = fs::read_dir(fixtures().join("reference"))
        .expect("fixtures/reference")
        .map(|e| e.expect("a file").path())
        .filter(|p| p.extension().is_some_and(|e| e == "json"))
        .map(|p| serde_json::from_slice(&fs::read(&p).expect("a file")).unwrap_or_else(|e| panic!("{p:?}: {e}")))
        .filter(|c: &Case| c.kind == kind)
        .collect();
    cases.sort_by(|a, b| a.name.cmp(&b.name));
    cases
}

/// Loads a reference model.
///
/// # Panics
/// If it does not load.
pub fn load(file: &str) -> Model {
    Model::load(&read(file), &Inline).unwrap_or_else(|e| panic!("{file}: {e}"))
}

/// The bytes of a file in `fixtures/reference`.
///
/// # Panics
/// If the file cannot be read.
pub fn read(file: &str) -> Vec<u8> {
    fs::read(fixtures().join("reference").join(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
}

/// A part of a tensor: name, dimensions, and byte range in the tensor's data.
pub type Piece = (String, Vec<u64>, Range<usize>);

/// Loads a reference model with changed metadata, its tensors cut by `pieces`.
///
/// # Errors
/// The loader's error.
///
/// # Panics
/// If the file cannot be read.
pub fn changed(
    file: &str,
    metadata: &[(&str, Value<'_>)],
    pieces: &dyn Fn(&TensorInfo<'_>) -> Vec<Piece>,
) -> Result<Model, LoadError> {
    Model::load(&rewritten(&read(file), metadata, pieces), &Inline)
}

/// A file with changed metadata, its tensors cut by `pieces`.
fn rewritten(file: &[u8], metadata: &[(&str, Value<'_>)], pieces: &dyn Fn(&TensorInfo<'_>) -> Vec<Piece>) -> Vec<u8> {
    let gguf = Gguf::parse(file).expect("a model");
    let kept = gguf.metadata().iter().filter(|(key, _)| metadata.iter().all(|(k, _)| k != key));
    written(&gguf, kept.chain(metadata), pieces)
}

/// A file with this metadata, except for the alignment, and the tensors cut by `pieces`.
///
/// # Panics
/// If `gguf` has no tensor data, or the changed file is invalid.
pub fn written<'a>(
    gguf: &Gguf<'_>,
    metadata: impl IntoIterator<Item = &'a (&'a str, Value<'a>)>,
    pieces: &dyn Fn(&TensorInfo<'_>) -> Vec<Piece>,
) -> Vec<u8> {
    let mut writer = GgufWriter::new();
    for (key, value) in metadata.into_iter().filter(|(key, _)| *key != "general.alignment") {
        writer.metadata(key, value).expect("a value");
    }
    let mut contents = Vec::new();
    for t in gguf.tensors() {
        for (name, dims, range) in pieces(t) {
            writer.tensor(&name, t.dtype, &dims).expect("a tensor");
            contents.push(&gguf.data(t).expect("data")[range]);
        }
    }
    writer.file(contents)
}

/// Splits a model into `n_files` files with equal numbers of tensors, in order.
///
/// # Panics
/// If the file is no model.
pub fn split(file: &[u8], n_files: usize) -> Vec<Vec<u8>> {
    let n_tensors = Gguf::parse(file).expect("a model").tensors().len();
    let each = n_tensors.div_ceil(n_files);
    split_at(file, &(0..=n_files).map(|i| n_tensors.min(i * each)).collect::<Vec<_>>())
}

/// Splits a model into files: each has the tensors from one index of `cuts` to the next.
///
/// # Panics
/// If the file is no model.
pub fn split_at(file: &[u8], cuts: &[usize]) -> Vec<Vec<u8>> {
    let gguf = Gguf::parse(file).expect("a model");
    let part = |i: usize| {
        let places = [("split.no", i), ("split.count", cuts.len() - 1), ("split.tensors.count", gguf.tensors().len())];
        let places = places.map(|(key, n)| (key, Value::U32(n as u32)));
        let metadata = if i == 0 { gguf.metadata() } else { &[] };
        let here: Vec<&str> = gguf.tensors()[cuts[i]..cuts[i + 1]].iter().map(|t| t.name).collect();
        let pieces = |t: &TensorInfo<'_>| if here.contains(&t.name) { whole(t) } else { Vec::new() };
        written(&gguf, metadata.iter().chain(&places), &pieces)
    };
    (0..cuts.len() - 1).map(part).collect()
}

/// The whole tensor as one piece.
pub fn whole(t: &TensorInfo<'_>) -> Vec<Piece> {
    vec![(t.name.into(), t.dims[..t.n_dims as usize].to_vec(), 0..t.len_bytes as usize)]
}

/// Logits after each token of `ids`, computed in one batch with an f32 KV cache: (n_tokens, n_vocab).
///
/// # Panics
/// If there is no memory.
pub fn logits(model: &Model, cpu: Cpu, ids: &[u32]) -> Vec<f32> {
    logits_in_batches(model, (cpu, &Inline), KvType::F32, ids.len(), ids)
}

/// Logits after each token of `ids`, computed in batches of `batch` tokens: (n_tokens, n_vocab).
///
/// # Panics
/// If there is no memory.
pub fn logits_in_batches(
    model: &Model,
    (cpu, pool): (Cpu, &dyn Pool),
    kv_type: KvType,
    batch: usize,
    ids: &[u32],
) -> Vec<f32> {
    let evaluation = Evaluation { model, cpu, pool, kv_type, batch, n_ctx: ids.len() };
    let mut logits = Vec::new();
    let done = evaluation.run::<EvaluationError>(ids, 0, None, &mut |row| {
        logits.extend_from_slice(row.logits);
        Ok(())
    });
    done.expect("a text that fits");
    logits
}
