//! `starling bench`: tokens per second of prefill and decode, measured as llama-bench does: `pp` tests process a prompt
//! in one go, `tg` tests generate token by token, each after `d` tokens of context; `tgAxN` tests decode `A` answers in one
//! batch; `emb` tests embed texts.

use std::io::{Write, stderr, stdout};
use std::sync::Arc;
use std::time::Instant;

use indicatif::HumanBytes;
use serde::Serialize;
use starling::embed::{Embedder, EmbedderOptions, Pooling, Text};
use starling::engine::{Engine, EngineOptions, Event, Request};
use starling::kernels::Cpu;
use starling::kernels::attention::{KvMemory, KvType, PAGE};
use starling::kernels::recurrent::StateMemory;
use starling::model::{Exec, KvRef, Model, Run, Scratch, ScratchSize};
use starling::pool::Pool;
use starling_host::error::Failure;
use starling_host::load;
use starling_host::load::ModelOptions;
use starling_host::machine;
use starling_host::pool::ThreadPool;

use crate::bandwidth;
use crate::cli::{BenchArgs, BenchOutput};
use crate::run::BATCH;

/// Tokens of a batch of texts.
const EMBED_BATCH: usize = 2048;

#[derive(Debug, Serialize)]
struct Row {
    model: String,
    isa: &'static str,
    threads: usize,
    kv_type: &'static str,
    test: String,
    tokens: usize,
    depth: usize,
    /// Seconds of each repetition.
    seconds: Vec<f64>,
    /// Tokens per second of the median repetition.
    tokens_per_second: f64,
    /// Decode tests: bytes of weights read per second, as a share of the read bandwidth.
    #[serde(skip_serializing_if = "Option::is_none")]
    bandwidth_share: Option<f64>,
}

pub fn run(model_args: &ModelOptions, args: &BenchArgs) -> Result<(), Failure> {
    let cpu = load::cpu(model_args)?;
    let pool = load::pool(model_args)?;
    let default = [pool.threads() as u16];
    let threads = if args.threads.is_empty() { &default } else { &args.threads[..] };
    let kv_type = model_args.kv_type();
    let model = Arc::new(load::model(model_args, &pool)?);
    drop(pool);
    let files = args.memory.then(machine::mapped_files).flatten();
    let (mut rows, mut most_kv) = (Vec::new(), 0);
    let kv_bytes = |n_seqs: usize, n_ctx| EngineOptions::kv_bytes_of(&model, kv_type, n_ctx).saturating_mul(n_seqs);
    for &threads in threads {
        let pool = ThreadPool::new(usize::from(threads))?;
        let bandwidth = args.bandwidth.then(|| bandwidth::read(&pool));
        let row = |test, kv_type: KvType, tokens, depth, seconds: Vec<f64>| {
            let mut sorted = seconds.clone();
            sorted.sort_by(f64::total_cmp);
            Row {
                model: load::path(model_args).display().to_string(),
                isa: cpu.isa().name(),
                threads: pool.threads(),
                kv_type: kv_type.name(),
                test,
                tokens,
                depth,
                tokens_per_second: tokens as f64 / sorted[sorted.len() / 2],
                bandwidth_share: None,
                seconds,
            }
        };
        for &(texts, n) in &args.embed {
            let seconds = embed(&model, cpu, &pool, texts, n, args.repetitions)?;
            rows.push(row(format!("emb{texts}x{n}"), KvType::F32, texts * n, 0, seconds));
        }
        // encoders generate nothing
        let depths = if model.config.causal { &args.depth[..] } else { &[] };
        for &depth in depths {
            let tests = args.prompt.iter().map(|&n| (n, true)).chain(args.generate.iter().map(|&n| (n, false)));
            for (n, prefill) in tests.filter(|&(n, _)| n > 0) {
                most_kv = most_kv.max(kv_bytes(1, depth + n));
                let mut bench = Bench::new(&model, cpu, &pool, kv_type, depth + n)?;
                let seconds = (0..=args.repetitions).map(|_| bench.test(depth, n, prefill)).skip(1).collect();
                let mut row = row(format!("{}{n}", if prefill { "pp" } else { "tg" }), kv_type, n, depth, seconds);
                let weights_per_second = model.decode_bytes() as f64 * row.tokens_per_second;
                row.bandwidth_share = bandwidth.filter(|_| !prefill).map(|most| weights_per_second / most);
                rows.push(row);
            }
            for &(n_seqs, n) in &args.answers {
                most_kv = most_kv.max(kv_bytes(n_seqs, depth.max(1) + n));
                let seconds = answers(&model, cpu, &pool, kv_type, depth, (n_seqs, n), args.repetitions)?;
                rows.push(row(format!("tg{n_seqs}x{n}"), kv_type, n_seqs * n, depth, seconds));
            }
        }
    }
    if rows.is_empty() {
        let encodes = if model.config.causal { "" } else { "; the model is an encoder: try -e 8x128" };
        return Err(Failure::Usage(format!("nothing to measure{encodes}")));
    }
    print(&rows, args.output)?;
    if args.memory {
        print_memory(model.weight_bytes(), most_kv, files)?;
    }
    Ok(())
}

/// Prints the memory that the largest test needs next to the peak of the process. `files` are the resident bytes of the
/// program and its libraries after the model was loaded.
fn print_memory(weights: usize, kv: usize, files: Option<u64>) -> Result<(), Failure> {
    let needed = weights + kv;
    let had = |bytes: u64| format!("{}, {:+.1} %", HumanBytes(bytes), (bytes as f64 / needed as f64 - 1.0) * 100.0);
    let (weights, kv) = (HumanBytes(weights as u64), HumanBytes(kv as u64));
    let mut out = stderr().lock();
    write!(out, "memory: {weights} of weights, {kv} of KV cache at most")?;
    if let Some(peak) = machine::peak() {
        write!(out, "; peak of the process: {}", had(peak))?;
        if let Some(files) = files {
            write!(out, "; without program and libraries: {}", had(peak.saturating_sub(files)))?;
        }
    }
    writeln!(out)?;
    Ok(())
}

/// Seconds per repetition to decode `n` tokens of `n_seqs` answers in one batch, after `depth` tokens of prompt.
fn answers(
    model: &Arc<Model>,
    cpu: Cpu,
    pool: &ThreadPool,
    kv_type: KvType,
    depth: usize,
    (n_seqs, n): (usize, usize),
    repetitions: u32,
) -> Result<Vec<f64>, Failure> {
    let (n_prompt, vocab) = (depth.max(1), model.config.n_vocab);
    let n_ctx = n_prompt + n;
    let options = EngineOptions {
        kv_type,
        n_ctx,
        max_seqs: n_seqs,
        batch_tokens: BATCH.max(n_seqs),
        prefill_chunk: BATCH,
        draft_rows: 0,
        kv_bytes: EngineOptions::kv_bytes_of(model, kv_type, n_ctx).saturating_mul(n_seqs),
        snapshots: Default::default(),
        model_sha256: None,
    };
    let mut engine = Engine::new(Arc::clone(model), pool, options).map_err(Failure::memory("the answers"))?;
    let mut seconds = Vec::new();
    for _ in 0..=repetitions {
        for seq in 0..n_seqs {
            let tokens = (0..n_prompt).map(|i| (((seq * n_prompt + i) * 7919 + 13) % vocab) as u32).collect();
            // the first token is sampled during prefill, before the timed part
            engine.submit(Request { max_tokens: Some(n + 1), ignore_eos: true, ..Request::new(tokens) })?;
        }
        let mut left = n_seqs;
        while left > 0 {
            engine.step(cpu, pool, &mut |event| left -= usize::from(matches!(event, Event::Prefilled { .. })));
        }
        let start = Instant::now();
        while !engine.is_idle() {
            engine.step(cpu, pool, &mut |_| {});
        }
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.remove(0);
    Ok(seconds)
}

/// Seconds per repetition to embed `texts` texts of `n` tokens, in batches.
fn embed(
    model: &Arc<Model>,
    cpu: Cpu,
    pool: &ThreadPool,
    texts: usize,
    n: usize,
    repetitions: u32,
) -> Result<Vec<f64>, Failure> {
    let sizes = EmbedderOptions { max_texts: texts, batch_tokens: EMBED_BATCH.max(n), n_ctx: n };
    let mut embedder = Embedder::new(Arc::clone(model), pool, sizes).map_err(Failure::memory("the texts"))?;
    let token = |i: usize| ((i * 7919 + 13) % model.config.n_vocab) as u32;
    let ids: Vec<Vec<u32>> = (0..texts).map(|t| (0..n).map(|i| token(t * n + i)).collect()).collect();
    let text = |tokens| Text { tokens, pooling: Pooling::Mean, dimensions: None, normalise: true };
    let all: Vec<Text<'_>> = ids.iter().map(|ids| text(ids.as_slice())).collect();
    let mut seconds = Vec::new();
    for _ in 0..=repetitions {
        let (start, mut left) = (Instant::now(), &all[..]);
        while !left.is_empty() {
            let (batch, rest) = left.split_at(embedder.fit(left.iter().map(|t| t.tokens.len())).max(1));
            embedder.embed(cpu, pool, batch, &mut |_, _| {})?;
            left = rest;
        }
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.remove(0);
    Ok(seconds)
}

fn print(rows: &[Row], output: BenchOutput) -> Result<(), Failure> {
    let mut out = stdout().lock();
    if output == BenchOutput::Json {
        let json = serde_json::to_string_pretty(rows).map_err(std::io::Error::other)?;
        writeln!(out, "{json}")?;
        return Ok(());
    }
    let share = rows.iter().any(|r| r.bandwidth_share.is_some());
    let (head, line) = if share { (" of read bandwidth |", "---|") } else { ("", "") };
    writeln!(out, "| model | isa | threads | kv | test | depth | tok/s |{head}")?;
    writeln!(out, "|---|---|---|---|---|---|---|{line}")?;
    for r in rows {
        let cells = format!("| {} | {} | {} | {} | {}", r.model, r.isa, r.threads, r.kv_type, r.test);
        write!(out, "{cells} | {} | {:.1} |", r.depth, r.tokens_per_second)?;
        match r.bandwidth_share {
            Some(share) => writeln!(out, " {:.0} % |", share * 100.0)?,
            None => writeln!(out, "{}", if share { " |" } else { "" })?,
        }
    }
    Ok(())
}

/// KV memory and scratch of one test.
struct Bench<'a> {
    model: &'a Model,
    cpu: Cpu,
    pool: &'a ThreadPool,
    kv_type: KvType,
    memory: KvMemory,
    pages: Vec<u32>,
    scratch: Scratch,
}

impl<'a> Bench<'a> {
    fn new(model: &'a Model, cpu: Cpu, pool: &'a ThreadPool, kv_type: KvType, n_ctx: usize) -> Result<Self, Failure> {
        let most = model.config.max_context();
        if n_ctx > most {
            return Err(Failure::Usage(format!("the test needs {n_ctx} positions, the model has {most}")));
        }
        let needed = EngineOptions::kv_bytes_of(model, kv_type, n_ctx) as u64;
        let free = machine::left(0);
        if needed > free {
            let (needed, free) = (HumanBytes(needed), HumanBytes(free));
            return Err(Failure::Memory(format!("a context of {n_ctx} tokens: it takes {needed}, {free} are free")));
        }
        let pages: Vec<u32> = (0..n_ctx.div_ceil(PAGE) as u32).collect();
        let memory = KvMemory::zeroed(&model.kv_layout(kv_type), pages.len());
        let mut memory = memory.map_err(|_| Failure::Memory("the context".into()))?;
        memory.states =
            StateMemory::zeroed(model.config.state_len(), 1).map_err(|_| Failure::Memory("the state".into()))?;
        let size = ScratchSize { rows: BATCH.min(n_ctx), logits: 1, seqs: 1, n_ctx };
        let scratch = model.scratch(pool, kv_type, size);
        let scratch = scratch.map_err(Failure::memory("the context"))?;
        Ok(Bench { model, cpu, pool, kv_type, memory, pages, scratch })
    }

    fn batch(&mut self, tokens: &[u32], pos: usize) {
        let layout = self.model.kv_layout(self.kv_type);
        let run = Run { tokens, pos, pages: &self.pages, state: 0, n_logits: 1 };
        let exec = Exec { cpu: self.cpu, pool: self.pool };
        let kv = KvRef { layout: &layout, memory: &mut self.memory };
        self.model.forward(exec, &[run], kv, &mut self.scratch, None);
    }

    /// Seconds for `n` tokens after `depth` tokens of context.
    fn test(&mut self, depth: usize, n: usize, prefill: bool) -> f64 {
        let vocab = self.model.config.n_vocab;
        let tokens: Vec<u32> = (0..depth + n).map(|i| ((i * 7919 + 13) % vocab) as u32).collect();
        for (i, piece) in tokens[..depth].chunks(BATCH).enumerate() {
            self.batch(piece, i * BATCH);
        }
        let start = Instant::now();
        let size = if prefill { BATCH } else { 1 };
        for (i, piece) in tokens[depth..].chunks(size).enumerate() {
            self.batch(piece, depth + i * size);
        }
        start.elapsed().as_secs_f64()
    }
}
