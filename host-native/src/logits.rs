//! `starling logits` and `starling perplexity`.

use std::io::{BufWriter, IsTerminal, Write, stdout};
use std::num::NonZeroUsize;

use base64::engine::general_purpose::STANDARD;
use base64::write::EncoderWriter;
use serde_json::json;
use sha2::{Digest, Sha256};
use starling::math::exp;
use starling::model::Stage;
use starling::model::evaluate::Evaluation;
use starling::sampler::{Sampler, SamplingOptions};
use starling::tokenizer::EncodeOptions;
use starling_host::error::Failure;
use starling_host::load;
use starling_host::load::ModelOptions;
use starling_host::progress::{Of, Progress};

use crate::cli::{LogitsArgs, PerplexityArgs};
use crate::tokens;

/// Batch size in tokens.
const BATCH: usize = 256;

/// # Errors
/// If the model does not load, or a token id is out of range.
pub fn logits(model_args: &ModelOptions, args: &LogitsArgs) -> Result<(), Failure> {
    let (cpu, pool) = (load::cpu(model_args)?, load::pool(model_args)?);
    let model = load::model(model_args, &pool)?;
    let ids = match &args.ids {
        Some(ids) => ids.clone(),
        None => {
            let text = tokens::text(args.text.text.as_deref(), None)?;
            model.tokenizer.encode(&text, EncodeOptions { add_special: true, parse_special: false })
        }
    };
    let evaluation =
        Evaluation { model: &model, cpu, pool: &pool, kv_type: model_args.kv_type(), batch: BATCH, n_ctx: ids.len() };
    if args.trace {
        return print_trace(&evaluation, &ids);
    }
    if stdout().is_terminal() && !args.json && !args.all {
        return print_summary(&evaluation, &ids);
    }
    let first = if args.all { 0 } else { ids.len().saturating_sub(1) };
    print_logits(&evaluation, &ids, first)
}

/// Most probable tokens in the summary.
const SUMMARY: usize = 10;

/// Prints the most probable next tokens and the digest of the logits.
fn print_summary(evaluation: &Evaluation<'_>, ids: &[u32]) -> Result<(), Failure> {
    let mut last = Vec::new();
    evaluation.run::<Failure>(ids, ids.len().saturating_sub(1), None, &mut |row| {
        last = row.logits.to_vec();
        Ok(())
    })?;
    let max = last.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = last.iter().map(|logit| exp(f64::from(logit - max))).sum();
    let mut order: Vec<usize> = (0..last.len()).collect();
    order.sort_by(|a, b| last[*b].total_cmp(&last[*a]).then(a.cmp(b)));
    let bytes: Vec<u8> = last.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut out = stdout().lock();
    writeln!(out, "{} tokens, then one of {} (all of them: --json):", ids.len(), last.len())?;
    for id in order.into_iter().take(SUMMARY) {
        let share = exp(f64::from(last[id] - max)) / total * 100.0;
        let piece = evaluation.model.tokenizer.piece(id as u32).unwrap_or_default();
        writeln!(out, "{share:6.2} %  logit {:8.3}  {id:6} {:?}", last[id], String::from_utf8_lossy(piece))?;
    }
    Ok(writeln!(out, "sha256 {}", hex(&Sha256::digest(&bytes)))?)
}

/// Prints a SHA-256 of the numbers after each stage of each layer.
fn print_trace(evaluation: &Evaluation<'_>, ids: &[u32]) -> Result<(), Failure> {
    let mut out = stdout().lock();
    let mut failed = Ok(());
    let mut trace = |stage: Stage, layer: Option<usize>, rows: &mut dyn Iterator<Item = &[f32]>| {
        let mut hash = Sha256::new();
        rows.flatten().for_each(|v| hash.update(v.to_le_bytes()));
        let layer = layer.map_or("-".into(), |l| l.to_string());
        let line = writeln!(out, "{layer:>3} {:10} {}", stage.name(), hex(&hash.finalize()));
        failed = std::mem::replace(&mut failed, Ok(())).and(line);
    };
    evaluation.run::<Failure>(ids, ids.len().saturating_sub(1), Some(&mut trace), &mut |_| Ok(()))?;
    Ok(failed?)
}

/// Prints the logits after the tokens from `first` on as one JSON object, row by row: a long text has more of them than
/// fit into memory.
fn print_logits(evaluation: &Evaluation<'_>, ids: &[u32], first: usize) -> Result<(), Failure> {
    let mut out = Some(BufWriter::new(stdout().lock()));
    let (rows, n_vocab) = (ids.len() - first, evaluation.model.config.n_vocab);
    let head = json!({
        "n_tokens": ids.len(),
        "n_vocab": n_vocab,
        "isa": evaluation.cpu.isa().name(),
        "threads": evaluation.pool.threads(),
        "logits": { "dtype": "f32le", "shape": [rows, n_vocab], "base64": "" },
    })
    .to_string();
    // base64 goes into the last, empty string; the digest follows it
    let head = head.strip_suffix("\"}}").unwrap_or(&head);
    let mut hash = Sha256::new();
    let mut base64 = None;
    evaluation.run::<Failure>(ids, first, None, &mut |row| {
        // an error before the first row must not leave half an object
        if let Some(mut out) = out.take() {
            out.write_all(head.as_bytes())?;
            base64 = Some(EncoderWriter::new(out, &STANDARD));
        }
        let bytes: Vec<u8> = row.logits.iter().flat_map(|v| v.to_le_bytes()).collect();
        hash.update(&bytes);
        Ok(base64.as_mut().map_or(Ok(()), |base64| base64.write_all(&bytes))?)
    })?;
    let Some(mut base64) = base64 else { return Ok(()) };
    let mut out = base64.finish()?;
    writeln!(out, "\"}},\"sha256\":\"{}\"}}", hex(&hash.finalize()))?;
    Ok(out.flush()?)
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Scores the second half of each window of the context size, as llama-perplexity does.
///
/// # Errors
/// If the model does not load or the text is shorter than a window.
pub fn perplexity(model_args: &ModelOptions, args: &PerplexityArgs) -> Result<(), Failure> {
    let (cpu, pool) = (load::cpu(model_args)?, load::pool(model_args)?);
    let model = load::model(model_args, &pool)?;
    model.config.check_generates()?;
    let text = tokens::text(None, Some(&args.file))?;
    let ids = model.tokenizer.encode(&text, EncodeOptions { add_special: true, parse_special: false });
    let n_ctx = args.ctx_size;
    if ids.len() < n_ctx {
        return Err(Failure::Usage(format!("the text has {} tokens, one window needs {n_ctx}", ids.len())));
    }
    let windows = (ids.len() / n_ctx).min(args.chunks.map_or(usize::MAX, NonZeroUsize::get));
    let progress = Progress::new("measuring", Of::Count("windows"), windows as u64);
    let evaluation = Evaluation { model: &model, cpu, pool: &pool, kv_type: model_args.kv_type(), batch: BATCH, n_ctx };
    let mut sampler = Sampler::new(SamplingOptions::greedy(), model.config.n_vocab).map_err(Failure::Request)?;
    let (mut sum, mut squares, mut n) = (0.0, 0.0, 0usize);
    for window in ids.chunks_exact(n_ctx).take(windows) {
        let mut window = window.to_vec();
        if model.tokenizer.adds_bos() {
            // each window starts with BOS, as a separate text
            window[0] = model.tokenizer.bos().unwrap_or(window[0]);
        }
        evaluation.run::<Failure>(&window, n_ctx / 2, None, &mut |row| {
            if let Some(&next) = window.get(row.pos + 1) {
                if !row.logits.iter().all(|logit| logit.is_finite()) {
                    return Err(Failure::NotFinite);
                }
                let loss = -f64::from(sampler.score(cpu, row.logits, next).0);
                (sum, squares, n) = (sum + loss, squares + loss * loss, n + 1);
            }
            Ok(())
        })?;
        progress.inc(1, &format!("perplexity {:.4}", exp(sum / n.max(1) as f64)));
    }
    progress.finish();
    let mean = sum / n as f64;
    let deviation = ((squares / n as f64 - mean * mean) / n.saturating_sub(1).max(1) as f64).max(0.0).sqrt();
    let perplexity = exp(mean);
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
