//! `starling logits` and `starling perplexity`: the model's numbers, without sampling.

use std::io::{Write, stdout};

use base64::Engine as _;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use sha2::{Digest, Sha256};
use starling::kernels::Cpu;
use starling::kernels::attention::{KvType, PAGE};
use starling::model::{Model, Run, Stage, Trace};
use starling::pool::Pool;
use starling::tokenizer::EncodeOptions;

use crate::cli::{LogitsArgs, ModelArgs, PerplexityArgs};
use crate::error::Failure;
use crate::load;
use crate::tokens;

/// Tokens of a batch.
const BATCH: usize = 256;

/// Calls `row(position, logits)` for the tokens from `first` on.
struct Forward<'a> {
    model: &'a Model,
    cpu: Cpu,
    pool: &'a dyn Pool,
    kv_type: KvType,
}

impl Forward<'_> {
    fn rows(
        &self,
        ids: &[u32],
        first: usize,
        mut trace: Option<Trace<'_>>,
        row: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Failure> {
        let memory = |_| Failure::Memory("the context");
        let kv = self.model.kv_layout(self.kv_type);
        let pages: Vec<u32> = (0..ids.len().div_ceil(PAGE) as u32).collect();
        let mut arena = Vec::new();
        arena.try_reserve_exact(pages.len() * kv.page_bytes()).map_err(memory)?;
        arena.resize(pages.len() * kv.page_bytes(), 0);
        let batch = BATCH.min(ids.len());
        let mut scratch = self.model.scratch(self.pool, self.kv_type, batch, batch, 1, ids.len()).map_err(memory)?;
        for (i, tokens) in ids.chunks(BATCH).enumerate() {
            let pos = i * BATCH;
            let n_logits = (pos + tokens.len()).saturating_sub(first).min(tokens.len());
            let run = Run { tokens, pos, pages: &pages, n_logits };
            let trace = trace.as_mut().map(|t| &mut **t as _);
            let out = self.model.forward(self.cpu, self.pool, &[run], &kv, &mut arena, &mut scratch, trace);
            for j in 0..out.len() {
                row(pos + tokens.len() - n_logits + j, out.logits(j));
            }
        }
        Ok(())
    }
}

fn check(model: &Model, ids: &[u32]) -> Result<(), Failure> {
    let n_vocab = model.config.n_vocab;
    if !model.config.causal {
        return Err(starling::error::RequestError::Encoder.into());
    }
    if ids.is_empty() {
        return Err(starling::error::RequestError::EmptyPrompt.into());
    }
    let n_ctx = model.config.max_context();
    if ids.len() > n_ctx {
        return Err(starling::error::RequestError::ContextLength { prompt: ids.len(), max_tokens: 0, n_ctx }.into());
    }
    match ids.iter().enumerate().find(|(_, t)| **t as usize >= n_vocab) {
        Some((at, &token)) => Err(starling::error::RequestError::Token { token, at, n_vocab }.into()),
        None => Ok(()),
    }
}

/// Runs `logits`.
///
/// # Errors
/// If the model does not load or a token is not one of its.
pub fn logits(model_args: &ModelArgs, args: &LogitsArgs) -> Result<(), Failure> {
    let (cpu, pool) = (load::cpu(model_args)?, load::pool(model_args)?);
    let model = load::model(model_args, &pool)?;
    let ids = match &args.ids {
        Some(ids) => ids.clone(),
        None => {
            let text = tokens::text(args.text.as_deref(), None)?;
            model.tokenizer.encode(&text, EncodeOptions { add_special: true, parse_special: false })
        }
    };
    check(&model, &ids)?;
    let forward = Forward { model: &model, cpu, pool: &pool, kv_type: model_args.kv_type() };
    let mut out = stdout().lock();
    let mut bytes = Vec::new();
    let first = if args.all { 0 } else { ids.len() - 1 };
    let mut failed = Ok(());
    let mut trace = |stage: Stage, layer: Option<usize>, rows: &mut dyn Iterator<Item = &[f32]>| {
        let mut hash = Sha256::new();
        rows.flatten().for_each(|v| hash.update(v.to_le_bytes()));
        let layer = layer.map_or("-".into(), |l| l.to_string());
        let line = writeln!(out, "{layer:>3} {:10} {}", stage.name(), hex(&hash.finalize()));
        failed = std::mem::replace(&mut failed, Ok(())).and(line);
    };
    let trace: Option<Trace<'_>> = if args.trace { Some(&mut trace) } else { None };
    forward.rows(&ids, first, trace, &mut |_, row| bytes.extend(row.iter().flat_map(|v| v.to_le_bytes())))?;
    failed?;
    if args.trace {
        return Ok(());
    }
    let (rows, n_vocab) = (ids.len() - first, model.config.n_vocab);
    let json = json!({
        "n_tokens": ids.len(),
        "n_vocab": n_vocab,
        "isa": cpu.isa().name(),
        "threads": pool.threads(),
        "sha256": hex(&Sha256::digest(&bytes)),
        "logits": {
            "dtype": "f32le",
            "shape": [rows, n_vocab],
            "base64": base64::engine::general_purpose::STANDARD.encode(&bytes),
        },
    });
    writeln!(stdout().lock(), "{json}")?;
    Ok(())
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Runs `perplexity`: windows of the context size, the second half of each scored, as llama-perplexity does.
///
/// # Errors
/// If the model does not load or the text is shorter than a window.
pub fn perplexity(model_args: &ModelArgs, args: &PerplexityArgs) -> Result<(), Failure> {
    let (cpu, pool) = (load::cpu(model_args)?, load::pool(model_args)?);
    let model = load::model(model_args, &pool)?;
    let text = tokens::text(None, Some(&args.file))?;
    let ids = model.tokenizer.encode(&text, EncodeOptions { add_special: true, parse_special: false });
    let n_ctx = args.ctx_size;
    if ids.len() < n_ctx {
        return Err(Failure::Usage(format!("the text has {} tokens, a window needs {n_ctx}", ids.len())));
    }
    check(&model, &ids[..n_ctx])?;
    let windows = (ids.len() / n_ctx).min(args.chunks.unwrap_or(usize::MAX));
    let bar = ProgressBar::new(windows as u64);
    let style = ProgressStyle::with_template("{bar:32} {pos}/{len} windows, perplexity {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let forward = Forward { model: &model, cpu, pool: &pool, kv_type: model_args.kv_type() };
    let (mut sum, mut squares, mut n) = (0.0, 0.0, 0usize);
    for window in ids.chunks_exact(n_ctx).take(windows) {
        let mut window = window.to_vec();
        if model.tokenizer.adds_bos() {
            // each window starts like a text of its own
            window[0] = model.tokenizer.bos().unwrap_or(window[0]);
        }
        forward.rows(&window, n_ctx / 2, None, &mut |pos, row| {
            if let Some(&next) = window.get(pos + 1) {
                let loss = loss(row, next as usize);
                (sum, squares, n) = (sum + loss, squares + loss * loss, n + 1);
            }
        })?;
        bar.set_message(format!("{:.4}", (sum / n.max(1) as f64).exp()));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let mean = sum / n as f64;
    let deviation = ((squares / n as f64 - mean * mean) / n.saturating_sub(1).max(1) as f64).max(0.0).sqrt();
    let perplexity = mean.exp();
    let json = json!({ "perplexity": perplexity, "error": perplexity * deviation, "loss": mean, "tokens": n,
                       "windows": windows, "n_ctx": n_ctx });
    if args.json {
        writeln!(stdout(), "{json}")?;
    } else {
        writeln!(
            stdout(),
            "perplexity {perplexity:.4} +/- {:.4} ({n} tokens, {windows} windows of {n_ctx})",
            perplexity * deviation
        )?;
    }
    Ok(())
}

/// Negative logarithm of the probability of token `next`.
fn loss(logits: &[f32], next: usize) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|v| f64::from(v - max).exp()).sum();
    sum.ln() - f64::from(logits[next] - max)
}
