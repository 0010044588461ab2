//! `starling embed`: texts in, vectors out.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write, stdout};
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use serde::Serialize;
use serde_json::Value;
use starling::embed::{Embedder, EmbedderOptions, Pooling, Text};
use starling::model::Model;
use starling::tokenizer::EncodeOptions;
use starling_host::error::Failure;
use starling_host::load;
use starling_host::load::DEFAULT_CTX;
use starling_host::load::ModelOptions;
use starling_host::progress::{Of, Progress};

use crate::cli::{EmbedArgs, EmbedOutput};
use crate::tokens;

/// Default size of a batch in tokens: keeps all threads busy with little memory.
const BATCH: usize = 2048;
/// Minimum number of texts for a progress bar.
const MANY: usize = 64;

/// # Errors
/// If the model does not load, a text is wrong, or output fails.
pub fn run(model_args: &ModelOptions, args: &EmbedArgs) -> Result<(), Failure> {
    if model_args.model.is_none() {
        return Err(Failure::Usage("no model: the bundled model cannot embed; give an embedding model with -m".into()));
    }
    if args.output == EmbedOutput::Npy && args.to.is_none() && stdout().is_terminal() {
        return Err(Failure::Usage("npy is binary: give an output file with --to".into()));
    }
    let (cpu, pool) = (load::cpu(model_args)?, load::pool(model_args)?);
    let model = Arc::new(load::model(model_args, &pool)?);
    let pooling = match args.pooling {
        Some(choice) => choice.into(),
        None => Pooling::of(&model.config).map_err(|source| Failure::Model { path: load::path(model_args), source })?,
    };
    let n_ctx = args.ctx_size.unwrap_or(model.config.n_ctx_train.min(DEFAULT_CTX)).max(1);
    let batch_tokens = args.batch_tokens.unwrap_or(BATCH.max(n_ctx.min(model.config.max_context()))).max(1);
    let sizes = EmbedderOptions { max_texts: args.batch_texts.max(1), batch_tokens, n_ctx };
    let mut embedder = Embedder::new(Arc::clone(&model), &pool, sizes).map_err(Failure::memory("batches of texts"))?;

    let mut ids = ids(&model, args)?;
    if ids.is_empty() {
        return Err(Failure::Usage("no texts: give arguments, --file, or lines on standard input".into()));
    }
    if args.truncate {
        ids.iter_mut().for_each(|ids| embedder.truncate(ids));
    }
    let text = |tokens| Text { tokens, pooling, dimensions: args.dimensions, normalise: !args.no_normalize };
    let texts: Vec<Text<'_>> = ids.iter().map(|ids| text(ids.as_slice())).collect();
    for (i, text) in texts.iter().enumerate() {
        embedder.check(text).map_err(|e| if texts.len() > 1 { numbered(i, &e) } else { e.into() })?;
    }

    let width = args.dimensions.unwrap_or(pooling.width(&model));
    let rows = texts.iter().map(|t| if pooling == Pooling::None { t.tokens.len() } else { 1 }).sum();
    let mut out = Output::new(args, rows, width)?;
    let progress = match texts.len() >= MANY {
        true => Progress::new("embedding", Of::Count("texts"), texts.len() as u64),
        false => Progress::hidden(),
    };
    let mut left = &texts[..];
    while !left.is_empty() {
        let first = texts.len() - left.len();
        let (batch, rest) = left.split_at(embedder.fit(left.iter().map(|t| t.tokens.len())));
        let mut failed = Ok(());
        embedder.embed(cpu, &pool, batch, &mut |i, vectors| {
            if failed.is_ok() {
                failed = match vectors {
                    Some(vectors) => out.write(first + i, &batch[i], width, vectors).map_err(Failure::from),
                    None => Err(Failure::Weights(format!(
                        "text {}: the model produced infinite or NaN values; its weights are damaged",
                        first + i
                    ))),
                };
            }
        })?;
        failed?;
        progress.inc(batch.len() as u64, "");
        left = rest;
    }
    progress.finish();
    Ok(out.finish()?)
}

fn numbered(i: usize, e: &starling::error::RequestError) -> Failure {
    Failure::Usage(format!("text {i}: {e}"))
}

/// Token ids of all texts.
fn ids(model: &Model, args: &EmbedArgs) -> Result<Vec<Vec<u32>>, Failure> {
    if !args.ids.is_empty() {
        let id = |word: &str| tokens::token_id(word).map_err(|e| Failure::Usage(format!("--ids: {e}")));
        return args.ids.iter().map(|list| list.split(',').map(id).collect()).collect();
    }
    let options = EncodeOptions { add_special: true, parse_special: args.special };
    let encode = |text: &str| model.tokenizer.encode(text, options);
    if !args.texts.is_empty() {
        return Ok(args.texts.iter().map(|text| encode(text)).collect());
    }
    let file = args.file.as_deref().filter(|file| *file != Path::new("-"));
    let lines = tokens::text(None, file)?;
    if !args.jsonl {
        return Ok(lines.lines().map(encode).collect());
    }
    let texts = lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    texts
        .map(|(i, line)| Ok(encode(&json_text(line).map_err(|e| Failure::Usage(format!("line {}: {e}", i + 1)))?)))
        .collect()
}

/// The text of a line of JSON: a string, or an object with `text` or `input`.
fn json_text(line: &str) -> Result<String, String> {
    let value: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
    let text = match &value {
        Value::Object(fields) => fields.get("text").or_else(|| fields.get("input")),
        other => Some(other),
    };
    match text {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(format!("found {other}, expected a string")),
        None => Err("found neither `text` nor `input`".into()),
    }
}

#[derive(Serialize)]
struct Row<'a> {
    index: usize,
    embedding: Numbers<'a>,
    n_tokens: usize,
}

/// One vector, one per token, or either as base64.
#[derive(Serialize)]
#[serde(untagged)]
enum Numbers<'a> {
    One(&'a [f32]),
    Rows(Vec<&'a [f32]>),
    Base64(String),
}

/// Output formats: a JSON array, JSON lines, or a NumPy array.
struct Output {
    to: BufWriter<Box<dyn Write>>,
    format: EmbedOutput,
    first: bool,
}

impl Output {
    fn new(args: &EmbedArgs, rows: usize, width: usize) -> Result<Output, Failure> {
        let to: Box<dyn Write> = match &args.to {
            Some(path) => Box::new(File::create(path).map_err(|source| Failure::File { path: path.clone(), source })?),
            None => Box::new(stdout()),
        };
        let mut to = BufWriter::new(to);
        match args.output {
            EmbedOutput::Npy => to.write_all(&npy_header(rows, width))?,
            _ => to.write_all(b"[")?,
        }
        Ok(Output { to, format: args.output, first: true })
    }

    /// Writes the vectors of a text: rows of `width` numbers.
    fn write(&mut self, index: usize, text: &Text<'_>, width: usize, vectors: &[f32]) -> std::io::Result<()> {
        let bytes = || vectors.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let embedding = match self.format {
            EmbedOutput::Npy => return self.to.write_all(&bytes()),
            EmbedOutput::Base64 => Numbers::Base64(base64::engine::general_purpose::STANDARD.encode(bytes())),
            EmbedOutput::Json if text.pooling == Pooling::None => Numbers::Rows(vectors.chunks(width).collect()),
            EmbedOutput::Json => Numbers::One(vectors),
        };
        let json = serde_json::to_string(&Row { index, embedding, n_tokens: text.tokens.len() })?;
        let before = if std::mem::take(&mut self.first) { "\n" } else { ",\n" };
        write!(self.to, "{before}{json}")
    }

    fn finish(mut self) -> std::io::Result<()> {
        if self.format != EmbedOutput::Npy {
            self.to.write_all(b"\n]\n")?;
        }
        self.to.flush()
    }
}

/// The header of a NumPy file of f32, format 1.0: its length with magic and version is a multiple of 64.
fn npy_header(rows: usize, width: usize) -> Vec<u8> {
    let dict = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}");
    let len = (10 + dict.len() + 1).next_multiple_of(64) - 10;
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend((len as u16).to_le_bytes());
    header.extend(dict.as_bytes());
    header.resize(10 + len - 1, b' ');
    header.push(b'\n');
    header
}
