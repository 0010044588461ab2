//! Start of the server: log, listener, model, KV cache.

use std::io::IsTerminal;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use starling::embed::{Embedder, EmbedderOptions, Pooling};
use starling::engine::{Engine, EngineOptions};
use starling::model::Model;
use starling::pool::Pool;
use starling::receipt::Hex;
use starling::structure;
use starling_api::openai::response::system_fingerprint;
use tracing_subscriber::EnvFilter;

use super::auth::Keys;
use super::callback::Ready;
use super::config::Settings;
use super::machine;
use super::metrics::Metrics;
use super::queue::Queue;
use super::scheduler::Limits;
use super::sessions::{SessionLimits, Sessions};
use super::state::{App, fresh_name, unix_now};
use super::trace::Exporter;
use super::value::{Bytes, LogFormat};
use super::worker::{Worker, WorkerStatus};
use crate::cli::ModelArgs;
use crate::error::Failure;
use crate::run::DEFAULT_CTX;
use crate::structure::Grammars;
use crate::{chat, load, pool};

/// Maximum texts of an embedding batch.
const MAX_BATCH_TEXTS: usize = 256;

/// Logs to standard error from now on.
///
/// # Errors
/// If `log_level` is invalid.
pub fn init_log(settings: &Settings) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(&settings.log_level).map_err(|e| Failure::Usage(format!("log-level: {e}")))?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match settings.log_format {
        LogFormat::Json => log.json().flatten_event(true).with_current_span(true).with_span_list(false).try_init(),
        LogFormat::Pretty => log.with_ansi(std::io::stderr().is_terminal()).with_target(false).try_init(),
    };
    started.map_err(|e| Failure::Io(std::io::Error::other(e)))
}

/// # Errors
/// If the address is in use, or if it is not a loopback address and the server has neither keys nor `allow_no_key`.
pub fn listen(settings: &Settings) -> Result<TcpListener, Failure> {
    let name = format!("{}:{}", settings.host, settings.port);
    let wrong = |e: &dyn std::fmt::Display| Failure::Io(std::io::Error::other(format!("cannot listen on {name}: {e}")));
    let addresses: Vec<SocketAddr> =
        (settings.host.as_str(), settings.port).to_socket_addrs().map_err(|e| wrong(&e))?.collect();
    let has_key = settings.api_key.as_deref().is_some_and(|k| !k.is_empty()) || settings.api_key_file.is_some();
    if addresses.iter().any(|a| !a.ip().is_loopback()) && !has_key && !settings.allow_no_key {
        let expected = "expected a loopback address, or API keys (--api-key-file, STARLING_API_KEY); --allow-no-key \
                        serves anyone who reaches the address";
        return Err(Failure::Usage(format!("host: found {}, {expected}", settings.host)));
    }
    let listener = TcpListener::bind(&addresses[..]).map_err(|e| wrong(&e))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Loads the model and reserves the KV cache.
///
/// # Errors
/// If a key file is invalid, the model does not load, or there is not enough memory.
pub fn load(settings: Settings, args: &ModelArgs, exporter: Exporter) -> Result<(Arc<App>, Worker), Failure> {
    let (start, keys) = (Instant::now(), Keys::new(&settings)?);
    let cpu = load::cpu(args)?;
    let threads = load::pool(args)?;
    log_threads(args, threads.threads());
    let memory = machine::memory();
    // hash and load in parallel: both read the whole file, so it is read from disk once
    let (model, sha256) = std::thread::scope(|scope| {
        let sha256 = scope.spawn(|| load::sha256(args));
        let model = load::model(args, &threads);
        (model, sha256.join().unwrap_or(Err(Failure::Memory("the model's SHA-256".into()))))
    });
    let (model, sha256) = (Arc::new(model?), sha256?);
    let template = chat::template(&model, settings.chat_template.as_deref())?;
    let pooling = Pooling::of(&model.config).map_err(|source| Failure::Model { path: load::path(args), source })?;
    let n_ctx = settings.ctx_size.unwrap_or(model.config.n_ctx_train.min(DEFAULT_CTX)).max(1);
    let engine = match model.config.causal {
        true => Some(engine(&settings, args, &model, &threads, n_ctx, sha256, &memory)?),
        false => None,
    };
    let sizes = EmbedderOptions { max_texts: MAX_BATCH_TEXTS, batch_tokens: settings.embed_tokens, n_ctx };
    let embedder = Embedder::new(Arc::clone(&model), &threads, sizes).map_err(Failure::memory("batches of texts"))?;
    let model_name = settings.model_name.clone().unwrap_or_else(|| name(&load::path(args)));
    let n_pages = engine.as_ref().map_or(0, |e| e.kv_stats().n_pages);
    let limits = Limits {
        high: settings.queue_high,
        low: settings.queue_low,
        tenant_requests: settings.tenant_requests,
        tenant_tokens: settings.tenant_tokens,
    };
    let queue = Arc::new(Queue::new(limits, settings.max_inputs));
    let status = Arc::new(WorkerStatus::new());
    let metrics = Arc::new(Metrics::new(&model_name, settings.metrics_compat, n_pages));
    let grammars = Grammars::new(structure::Limits {
        bytes: usize::try_from(settings.max_grammar.0).unwrap_or(usize::MAX),
        items: settings.grammar_items,
    });
    let app = App {
        fingerprint: system_fingerprint(&sha256),
        model_sha256: sha256,
        template,
        grammars,
        engine: engine.as_ref().map(|e| *e.options()),
        n_pages,
        embedder: *embedder.options(),
        cpu,
        threads: threads.threads(),
        queue: Arc::clone(&queue),
        worker: Arc::clone(&status),
        metrics: Arc::clone(&metrics),
        exporter,
        sessions: Arc::new(Sessions::new(session_limits(&settings))),
        keys,
        replay: Arc::new(tokio::sync::Semaphore::new(1)),
        start,
        created: unix_now(),
        draining: AtomicBool::new(false),
        model: Arc::clone(&model),
        model_name,
        settings,
    };
    tracing::info!("model loaded in {:.2} s, instruction set {}", start.elapsed().as_secs_f64(), cpu.isa());
    let pooling = if pooling == Pooling::None { Pooling::Mean } else { pooling };
    let worker = Worker::new((engine, embedder, pooling), (cpu, threads), (queue, status, metrics));
    Ok((Arc::new(app), worker))
}

fn session_limits(settings: &Settings) -> SessionLimits {
    let bytes = |bytes: Bytes| usize::try_from(bytes.0).unwrap_or(usize::MAX);
    SessionLimits {
        ttl: settings.session_ttl,
        count: settings.max_sessions,
        bytes: bytes(settings.session_memory),
        total_bytes: bytes(settings.sessions_memory),
    }
}

fn log_threads(args: &ModelArgs, n: usize) {
    let (allowed, cores) = pool::cpus();
    let why = match (args.threads, cores) {
        (Some(_), _) => "--threads".into(),
        (None, Some(cores)) => format!("{cores} physical cores, {allowed} CPUs allowed by quota, cpuset and affinity"),
        (None, None) => format!("{allowed} CPUs allowed by quota, cpuset and affinity"),
    };
    tracing::info!("{n} threads ({why})");
}

/// The engine, with a KV cache of `kv_memory`; by default full contexts for `max_seqs` sequences, at most half of the
/// memory that the weights leave.
fn engine(
    settings: &Settings,
    args: &ModelArgs,
    model: &Arc<Model>,
    threads: &dyn Pool,
    n_ctx: usize,
    sha256: [u8; 32],
    memory: &machine::Memory,
) -> Result<Engine, Failure> {
    let kv_type = args.kv_type();
    let n_ctx = n_ctx.min(model.config.max_context());
    let per_sequence = EngineOptions::kv_bytes_of(model, kv_type, n_ctx);
    let full = per_sequence.saturating_mul(settings.max_seqs);
    let half = (memory.bytes.saturating_sub(model.weight_bytes() as u64) / 2).min(usize::MAX as u64) as usize;
    let (kv_bytes, why) = match settings.kv_memory {
        Some(bytes) => (usize::try_from(bytes.0).unwrap_or(usize::MAX), "--kv-memory".into()),
        None if full <= half => (full, format!("full contexts for {} sequences", settings.max_seqs)),
        None => (half, format!("half of what the weights leave of {} MiB, {}", memory.bytes >> 20, memory.reason)),
    };
    let max_seqs = settings.max_seqs;
    let batch_tokens = settings.batch_tokens.max(max_seqs);
    let options = EngineOptions {
        kv_type,
        n_ctx,
        max_seqs,
        batch_tokens,
        prefill_chunk: settings.prefill_chunk,
        kv_bytes,
        model_sha256: Some(sha256),
    };
    let engine = Engine::new(Arc::clone(model), threads, options).map_err(Failure::memory("KV cache"))?;
    let stats = engine.kv_stats();
    if stats.n_pages == 0 {
        let need = stats.page_bytes;
        return Err(Failure::Usage(format!("kv-memory: found {kv_bytes} bytes, expected at least {need} (one page)")));
    }
    let tokens = stats.n_pages * starling::kernels::attention::PAGE;
    tracing::info!("KV cache: {} MiB, {tokens} tokens ({why})", stats.reserved_bytes >> 20);
    Ok(engine)
}

/// The file name without `.gguf`.
fn name(path: &Path) -> String {
    let file = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let file = file.strip_suffix(" (bundled)").unwrap_or(&file);
    file.strip_suffix(".gguf").unwrap_or(file).into()
}

/// Body of the readiness callback.
pub fn readiness_report(app: &App, uri: &str) -> Ready {
    Ready {
        worker_id: app.settings.worker_id.clone().unwrap_or_else(|| fresh_name("worker-")),
        uri: uri.into(),
        model: app.model_name.clone(),
        model_sha256: Hex(app.model_sha256).to_string(),
        memory_type: "cpu",
        vram_bytes: 0,
        memory_bytes: (app.model.weight_bytes() + app.worker.kv().reserved_bytes) as u64,
    }
}
