//! Loads a model: weights, chat template, KV cache, workers.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use starling::embed::{EmbedderOptions, Pooling};
use starling::engine::EngineOptions;
use starling::model::Model;
use starling::structure;
use starling_api::openai::response::system_fingerprint;
use starling_host::clock::unix_now;
use starling_host::error::Failure;
use starling_host::load;
use starling_host::load::DEFAULT_CTX;
use starling_host::load::ModelOptions;
use starling_host::pool::{CpuSet, MAX_THREADS, ThreadPool, default_threads, numa_nodes};
use starling_host::structure::Grammars;
use starling_host::template::ServedTemplate;

use super::budget::{MemoryBudget, MemoryLease};
use super::cores::SharedThreads;
use super::disk_tier::DiskTier;
use super::dispatch::Dispatcher;
use super::engines::{BatchLimits, Shared};
use super::instance::{FileStamp, ModelInstance, ThreadPlan, Workers, limits};
use super::kv_memory::KvNeeds;
use crate::config::{Live, ModelEntry, Settings};
use crate::models::pressure::Pressure;
use crate::observe::failures::SharedFailures;
use crate::observe::metrics::Metrics;
use crate::observe::model_metrics::{InstanceMetrics, ModelMetrics};
use crate::schedule::breaker::{Breaker, BreakerLimits};
use crate::schedule::fair_turns::{FairTurns, TurnLimits};
use crate::schedule::queue::Queue;
use crate::state::kv_disk::Namespace;
use crate::state::sessions::Sessions;
use crate::state::slots::Slots;
use crate::state::store::{SessionJournal, StateStore};

/// Maximum texts of an embedding batch.
const MAX_BATCH_TEXTS: usize = 256;
/// Receipts that are replayed at a time: one, for its memory.
const REPLAYS: TurnLimits = TurnLimits { running: 1, waiting: 4 };

/// What all models share.
pub struct Resources {
    pub budget: Arc<MemoryBudget>,
    pub metrics: Arc<Metrics>,
    pub failures: SharedFailures,
    pub pressure: Arc<Pressure>,
    /// KV pages on disk (`--kv-disk`).
    pub disk: Option<Arc<DiskTier>>,
    /// Sessions and answers that outlive the process (`--state-dir`).
    pub state: Option<Arc<StateStore>>,
    /// `--threads`.
    pub n_threads: Option<u16>,
    threads: OnceLock<Arc<SharedThreads>>,
}

/// What outlives a load of a model: the name, its series and sessions.
pub struct Identity {
    pub name: Arc<str>,
    pub metrics: Arc<ModelMetrics>,
    pub sessions: Arc<Sessions>,
    /// Writes the sessions (`--state-dir`).
    pub journal: Option<Arc<SessionJournal>>,
    /// Largest `batch_tokens` and `max_seqs` that may be set while the model serves.
    pub batch_capacity: usize,
    pub seqs_capacity: usize,
}

impl Resources {
    pub fn new(
        budget: Arc<MemoryBudget>,
        metrics: Arc<Metrics>,
        failures: SharedFailures,
        (disk, state): (Option<Arc<DiskTier>>, Option<Arc<StateStore>>),
        n_threads: Option<u16>,
    ) -> Resources {
        let (pressure, threads) = (Arc::default(), OnceLock::new());
        Resources { budget, metrics, failures, pressure, disk, state, n_threads, threads }
    }

    /// The threads that models share, started at the first call.
    fn shared_threads(&self) -> Result<Arc<SharedThreads>, Failure> {
        if let Some(threads) = self.threads.get() {
            return Ok(Arc::clone(threads));
        }
        let n = self.n_threads.map_or_else(default_threads, usize::from);
        let threads = Arc::new(SharedThreads::new(ThreadPool::new(n)?));
        Ok(Arc::clone(self.threads.get_or_init(|| threads)))
    }

    /// The threads of each of a model's workers: those of all models, unless it has a number or CPUs of its own or several
    /// workers, which then divide the cores.
    fn thread_plan(&self, args: &ModelOptions, settings: &Settings, n_workers: usize) -> Result<ThreadPlan, Failure> {
        let mut cpus = settings.cpu_affinity.0.clone();
        if cpus.is_empty() && settings.workers == 0 {
            // the only node of a machine needs no pinning
            cpus = Some(numa_nodes()).filter(|nodes| nodes.len() > 1).unwrap_or_default();
        }
        let is_own = args.threads != self.n_threads;
        if !is_own && n_workers == 1 && cpus.is_empty() {
            return Ok(ThreadPlan::Shared(self.shared_threads()?, settings.share));
        }
        let n = match (args.threads, cpus.iter().map(CpuSet::n_cores).min()) {
            // each set of CPUs is divided among the workers that have it
            (None, Some(cores)) => cores / n_workers.div_ceil(cpus.len()),
            (n, _) => n.map_or_else(default_threads, usize::from) / n_workers,
        };
        Ok(ThreadPlan::Own(n.clamp(1, MAX_THREADS), cpus.into()))
    }
}

/// Name of a model in the API: its own, or after its file.
pub fn model_name(entry: &ModelEntry) -> Arc<str> {
    entry.name.clone().unwrap_or_else(|| name(&load::path(&entry.args))).into()
}

/// Size and time of change of a file, if it exists.
pub fn file_stamp(path: &Path) -> Option<FileStamp> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.len(), metadata.modified().ok()?))
}

/// The arguments of the draft model, if the settings name one, with its source resolved to a file.
///
/// # Errors
/// If the source leads to no file.
pub fn draft_args(args: &ModelOptions, settings: &Settings) -> Result<Option<ModelOptions>, Failure> {
    let source = settings.draft_model.as_deref().filter(|_| settings.draft_max > 0);
    source.map(|source| load::resolve_source(args, source)).transpose()
}

/// Bytes that a load needs: the weights, which have about the size of the files, and the KV caches; if their size follows
/// from the free memory, at least a quarter of the weights.
///
/// # Errors
/// If a file cannot be read.
pub fn estimate(args: &ModelOptions, draft: Option<&ModelOptions>, settings: &Settings) -> Result<u64, Failure> {
    let size = |path| std::fs::metadata(&path).map(|m| m.len()).map_err(|source| Failure::File { path, source });
    let size = |args: &ModelOptions| match &args.model {
        Some(path) => load::paths(path).into_iter().map(size).sum(),
        None => Ok(load::BUNDLED.len() as u64),
    };
    let files = size(args)? + draft.map(size).transpose()?.unwrap_or(0);
    let n_workers = n_workers(settings) as u64;
    let kv = settings.kv_memory.map_or(files / 4, |bytes| bytes.0.saturating_mul(n_workers));
    Ok(files.saturating_add(kv))
}

fn n_workers(settings: &Settings) -> usize {
    if settings.workers == 0 { numa_nodes().len().max(1) } else { settings.workers }
}

/// Loads a model and starts its workers. `args` are those of the entry with the source resolved to a file, `draft` those
/// of its draft model.
///
/// # Errors
/// If the model does not load, or there is not enough memory.
pub fn load(
    entry: &ModelEntry,
    (args, draft): (&ModelOptions, Option<&ModelOptions>),
    identity: Identity,
    resources: &Resources,
    mut lease: MemoryLease,
) -> Result<Arc<ModelInstance>, Failure> {
    let (start, settings) = (Instant::now(), entry.settings.clone());
    let cpu = load::cpu(args)?;
    // before the first byte is read: a later change is found
    let files = [Some(args), draft].into_iter().flatten().filter_map(|args| args.model.as_deref());
    let files = files.flat_map(load::paths).map(|path| (path.clone(), file_stamp(&path))).collect();
    let n_workers = n_workers(&settings);
    let plan = resources.thread_plan(args, &settings, n_workers)?;
    // hash and load in parallel: both read the whole file, so it is read from disk once
    let loading = plan.threads(0)?;
    let (model, sha256) = std::thread::scope(|scope| {
        let sha256 = scope.spawn(|| load::sha256(args));
        let model = load::model_and_head(args, settings.draft_mtp && settings.draft_max > 0, &loading);
        (model, sha256.join().unwrap_or(Err(Failure::Memory("the model's SHA-256".into()))))
    });
    let (model, sha256) = (Arc::new(model?), sha256?);
    let locks = [Some(args), draft].into_iter().flatten().filter_map(|args| args.lock.clone()).collect();
    let draft = draft.map(|args| load::draft_model(args, &model, &loading)).transpose()?;
    let draft = draft.or_else(|| model.mtp_head.clone());
    let threads = loading.count();
    drop(loading);
    let draft_bytes = draft.as_ref().map_or(0, |draft| draft.weight_bytes());
    lease.resize((model.weight_bytes() + draft_bytes) as u64);
    let weights = Arc::new(lease);
    let template = ServedTemplate::new(&model, settings.chat_template.as_deref())?;
    if let Some(e) = template.error() {
        tracing::warn!(model = &*identity.name, "no chats, set chat-template: the model's {e}");
    }
    let pooling = Pooling::of(&model.config).map_err(|source| Failure::Model { path: load::path(args), source })?;
    let pooling = if pooling == Pooling::None { Pooling::Mean } else { pooling };
    let n_ctx = settings.ctx_size.unwrap_or(model.config.n_ctx_train.min(DEFAULT_CTX)).max(1);
    let budget = &resources.budget;
    let models = (&model, draft.as_ref());
    // room for what may be set later
    let sizes = Settings { max_seqs: settings.max_seqs.max(identity.seqs_capacity), ..settings.clone() };
    let engine = model.config.causal.then(|| engine_options(&sizes, args, models, n_ctx, sha256, budget, n_workers));
    let engine = engine
        .transpose()?
        .map(|options| EngineOptions { batch_tokens: options.batch_tokens.max(identity.batch_capacity), ..options });
    let embedder = EmbedderOptions { max_texts: MAX_BATCH_TEXTS, batch_tokens: settings.embed_tokens, n_ctx };
    let queue = Arc::new(Queue::new(limits(&settings), settings.max_inputs));
    let breaker = Arc::new(Breaker::new(BreakerLimits::new(&settings)));
    let shared = Shared {
        name: Arc::clone(&identity.name),
        model: Arc::clone(&model),
        draft: draft.clone(),
        engine,
        embedder,
        pooling,
        cpu,
        queue: Arc::clone(&queue),
        metrics: Arc::new(InstanceMetrics::new(Metrics::unpublished(&identity.name))),
        dispatcher: Arc::new(Dispatcher::new(settings.strategy)),
        failures: Arc::clone(&resources.failures),
        breaker: Arc::clone(&breaker),
        batch: Arc::new(BatchLimits::new(&settings)),
        stall_timeout: settings.stall_timeout,
        disk: resources.disk.clone(),
    };
    let draft_kv = |options: &EngineOptions| draft.as_ref().map_or(0, |draft| options.draft_kv_bytes(draft, &model));
    let bytes = |options: &EngineOptions| [options.kv_bytes, options.state_bytes(&model), draft_kv(options)];
    let worker_bytes = engine.as_ref().map_or(0, |options| bytes(options).iter().map(|bytes| *bytes as u64).sum());
    let workers = Workers::new(shared, plan, budget, &weights, worker_bytes);
    let (mut engine, mut embedder, mut n_pages, mut kv_namespace) = (engine, embedder, 0, None);
    for _ in 0..n_workers {
        workers.add(|worker| {
            (engine, embedder) = (worker.engine().map(|engine| *engine.options()), *worker.embedder());
            n_pages = worker.engine().map_or(0, |engine| engine.kv_stats().n_pages);
            kv_namespace = worker.engine().map(|engine| Namespace(engine.page_namespace()));
        })?;
    }
    let seconds = start.elapsed().as_secs_f64();
    tracing::info!(
        model = &*identity.name,
        "model loaded in {seconds:.2} s, instruction set {}, {n_workers} workers, {threads} threads each",
        cpu.isa()
    );
    Ok(Arc::new(ModelInstance {
        name: Arc::clone(&identity.name),
        fingerprint: system_fingerprint(&sha256),
        model_sha256: sha256,
        forms: template.forms(&model.tokenizer),
        template,
        grammars: Grammars::new(structure::Limits {
            bytes: usize::try_from(settings.max_grammar.0).unwrap_or(usize::MAX),
            items: settings.grammar_items,
        }),
        engine,
        n_pages,
        kv_namespace,
        embedder,
        pooling,
        cpu,
        threads,
        queue,
        workers,
        breaker,
        metrics: Arc::clone(&identity.metrics),
        sessions: Arc::clone(&identity.sessions),
        journal: identity.journal,
        server_metrics: Arc::clone(&resources.metrics),
        slots: Arc::new(Slots::new(engine.map_or(0, |options| options.max_seqs))),
        replay: Arc::new(FairTurns::new(REPLAYS)),
        created: unix_now(),
        source: entry.args.model.as_deref().map_or(load::BUNDLED_NAME.into(), |path| path.display().to_string()),
        files,
        pressure: Arc::clone(&resources.pressure),
        _locks: locks,
        weights,
        model,
        settings: Live::new(settings),
    }))
}

/// Requests of a batch that may draft as much as they want; more share that.
const DRAFTING_SEQS: usize = 4;

/// Sizes of an engine, with KV pages and recurrent states of `kv_memory`; by default full contexts for `max_seqs` sequences,
/// at most half of the memory that is left, divided by the number of workers. A draft model's cache for the same tokens comes on top, within
/// that half.
fn engine_options(
    settings: &Settings,
    args: &ModelOptions,
    (model, draft): (&Arc<Model>, Option<&Arc<Model>>),
    n_ctx: usize,
    sha256: [u8; 32],
    budget: &MemoryBudget,
    n_workers: usize,
) -> Result<EngineOptions, Failure> {
    let kv_type = args.kv_type();
    let n_ctx = n_ctx.min(model.config.max_context());
    let needs = KvNeeds::new(settings, model, kv_type, n_ctx);
    let (page, full) = (needs.page, needs.full());
    let pages = page + draft.map_or(0, |draft| EngineOptions::kv_bytes_of(draft, kv_type, 1));
    let half = u128::from(budget.free() / 2 / n_workers as u64) * page as u128 / pages as u128;
    let half = half.min(usize::MAX as u128) as usize;
    let (total, memory, why) = match settings.kv_memory {
        Some(bytes) => {
            let total = usize::try_from(bytes.0).unwrap_or(usize::MAX);
            (total, needs.divide(total), "--kv-memory".into())
        }
        None if needs.total(full) <= half => {
            (needs.total(full), Some(full), format!("full contexts for {} sequences", settings.max_seqs))
        }
        None => (half, needs.divide(half), format!("half of the {} MiB that are free for models", budget.free() >> 20)),
    };
    let Some(memory) = memory else {
        let states = match needs.states() {
            0 => String::new(),
            bytes => format!(", recurrent states of {bytes} bytes for {} sequences (max-seqs)", settings.max_seqs),
        };
        let least = needs.least();
        return Err(Failure::Usage(format!(
            "kv-memory: found {total} bytes, expected at least {least} (one page{states})"
        )));
    };
    let kv_bytes = memory.pages;
    let tokens = kv_bytes / page * starling::kernels::attention::PAGE;
    let states = needs.describe(memory);
    tracing::info!("KV cache of a worker: {} MiB, {tokens} tokens ({why}){states}", kv_bytes >> 20);
    Ok(EngineOptions {
        kv_type,
        n_ctx,
        max_seqs: settings.max_seqs,
        batch_tokens: settings.batch_tokens.max(settings.max_seqs),
        prefill_chunk: settings.prefill_chunk,
        draft_rows: settings.draft_max * settings.max_seqs.min(DRAFTING_SEQS),
        kv_bytes,
        snapshots: needs.snapshot_options(memory),
        model_sha256: Some(sha256),
    })
}

/// The file name without `.gguf` and the number of a split file.
pub fn name(path: &Path) -> String {
    let file = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let file = file.strip_suffix(" (bundled)").unwrap_or(&file);
    file.strip_suffix(".gguf").unwrap_or(file).into()
}
