//! Start of the server: log, listener, models.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use starling::receipt::Hex;
use starling_host::clock::{random_id, unix_now};
use starling_host::error::Failure;
use starling_host::load::ModelOptions;
use starling_host::machine;
use starling_host::pool;

use crate::config::value::Bytes;
use crate::config::{Configuration, Live, Settings};
use crate::guard::audit::{self, AuditTrail};
use crate::guard::auth::Keys;
use crate::guard::connection_memory::{ConnectionMemory, MemoryLimits};
use crate::guard::key_file;
use crate::guard::policy::TextPolicy;
use crate::guard::signature::{Policy, Verifier};
use crate::http::tls;
use crate::models::budget::MemoryBudget;
use crate::models::disk_tier::DiskTier;
use crate::models::loading::Resources;
use crate::models::pool::ModelPool;
use crate::observe::callback::Ready;
use crate::observe::failures::SharedFailures;
use crate::observe::log::LogFilter;
use crate::observe::metrics::Metrics;
use crate::observe::trace::Exporter;
use crate::routes::openai::stored::labels;
use crate::schedule::compile_slots::CompileSlots;
use crate::schedule::fair_turns::{FairTurns, TurnLimits};
use crate::server::{Configure, Server};
use crate::state::reuse::{AnswerDisk, Answers, Embeddings, KeptResponses};
use crate::state::store::{Cipher, Kind, Options, StateStore};

/// # Errors
/// If the address is in use, or if it is not a loopback address and the server has neither keys nor `allow_no_key`.
pub fn listen(settings: &Settings) -> Result<TcpListener, Failure> {
    let name = format!("{}:{}", settings.host, settings.port);
    let wrong = |e: &dyn std::fmt::Display| Failure::Io(std::io::Error::other(format!("cannot listen on {name}: {e}")));
    let addresses: Vec<SocketAddr> =
        (settings.host.as_str(), settings.port).to_socket_addrs().map_err(|e| wrong(&e))?.collect();
    let has_key = settings.api_key.as_deref().is_some_and(|k| !k.is_empty())
        || settings.api_key_file.is_some()
        || settings.tls_client_ca.is_some();
    if addresses.iter().any(|a| !a.ip().is_loopback()) && !has_key && !settings.allow_no_key {
        let expected = "expected a loopback address, or API keys (--api-key-file, STARLING_API_KEY, --tls-client-ca); --allow-no-key \
                        serves anyone who reaches the address";
        return Err(Failure::Usage(format!("host: found {}, {expected}", settings.host)));
    }
    let listener = TcpListener::bind(&addresses[..]).map_err(|e| wrong(&e))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The listener of administrators, if they have one of their own.
///
/// # Errors
/// If the address is in use, or there is no file of administrators' keys.
pub fn listen_admin(settings: &Settings) -> Result<Option<TcpListener>, Failure> {
    let Some(address) = &settings.admin_listen else { return Ok(None) };
    if settings.admin_key_file.is_none() {
        return Err(Failure::Usage("admin-listen: expected --admin-key-file with it".into()));
    }
    let wrong = |e| Failure::Io(std::io::Error::other(format!("cannot listen on {address}: {e}")));
    let listener = TcpListener::bind(address).map_err(wrong)?;
    listener.set_nonblocking(true)?;
    Ok(Some(listener))
}

/// Lists of stored answers that are read at a time.
const LISTS: TurnLimits = TurnLimits { running: 2, waiting: 8 };

/// The configuration, and how it is read again.
pub struct Source {
    pub configuration: Configuration,
    pub configure: Configure,
    /// The settings file, if there is one.
    pub config_file: Option<PathBuf>,
}

/// The server's state, with the models of `startup` loaded.
///
/// # Errors
/// If a key file is invalid, or a model does not load.
pub async fn open(source: Source, exporter: Exporter, log_filter: LogFilter) -> Result<Arc<Server>, Failure> {
    let Source { configuration, configure, config_file } = source;
    let (start, settings) = (Instant::now(), configuration.settings.clone());
    if cfg!(not(feature = "signatures")) && (settings.require_signature || settings.sign_responses) {
        let message = "require-signature, sign-responses: this build has no signatures (feature `signatures`)";
        return Err(Failure::Usage(message.into()));
    }
    let keys = Keys::new(&settings)?;
    let connection_memory = Arc::new(ConnectionMemory::new(MemoryLimits::new(&settings, &keys)));
    let keys = Live::new(keys);
    let audit = audit_log(&settings)?;
    // requests that were signed before the start may have been seen by the process before
    let policy = Policy { window: settings.signature_window, ..Policy::default() };
    let verifier = Verifier::started_at(policy, SystemTime::now());
    let tls = tls::acceptor(&settings)?.map(|acceptor| Arc::new(Live::new(acceptor)));
    let admin_keys = settings.admin_key_file.as_deref().map(|path| Keys::of_file(path, &settings));
    let admin_keys = admin_keys.transpose()?.map(Live::new);
    log_threads(&configuration.model);
    let memory = machine::memory();
    let (limit, reason) = match settings.memory {
        Some(Bytes(limit)) => (limit, "--memory".to_string()),
        None => (memory.bytes, memory.reason),
    };
    tracing::info!("memory for models: {} MiB ({reason})", limit >> 20);
    let metrics = Arc::new(Metrics::new(settings.metrics_compat));
    let metrics_of_reuse = Arc::clone(&metrics);
    let bytes = |bytes: Bytes| usize::try_from(bytes.0).unwrap_or(usize::MAX);
    let policy = TextPolicy::of(&settings, &metrics)?;
    let failures = SharedFailures::default();
    let budget = Arc::new(MemoryBudget::new(limit));
    let n_threads = configuration.model.threads;
    let disk = disk_tier(&settings)?;
    let state = state_store(&settings)?;
    let quota = settings.response_cache_disk_size.0;
    let answers_on_disk = settings.response_cache_disk.as_deref().map(|path| AnswerDisk::open(path, quota)).transpose();
    let answers_on_disk = answers_on_disk.map_err(|e| Failure::Usage(format!("response-cache-disk: {e}")))?;
    let resources = Resources::new(budget, Arc::clone(&metrics), Arc::clone(&failures), (disk, state), n_threads);
    let pool = Arc::new(ModelPool::new(configuration, Arc::new(resources))?);
    for entry in pool.entries().iter().filter(|entry| ModelPool::loads_at_start(entry)) {
        pool.load_at_start(entry).await?;
    }
    let worker_id = pool.settings().worker_id.clone().unwrap_or_else(|| random_id("worker-"));
    Ok(Arc::new(Server {
        pool,
        metrics,
        exporter,
        keys,
        tls,
        policy: Live::new(policy),
        answers: Arc::new(Answers::new(
            bytes(settings.response_cache),
            answers_on_disk,
            settings.share_identical,
            Arc::clone(&metrics_of_reuse),
        )),
        embeddings: Embeddings::new(bytes(settings.embedding_cache), metrics_of_reuse),
        kept: KeptResponses::default(),
        memory: connection_memory,
        lists: Arc::new(FairTurns::new(LISTS)),
        compile_slots: CompileSlots::new(std::thread::available_parallelism().map_or(1, usize::from)),
        verifier,
        audit,
        admin_keys,
        log_filter,
        failures,
        settings_change: Mutex::default(),
        start,
        configure,
        config_file,
        worker_id: worker_id.into(),
        created: unix_now(),
        shutting_down: AtomicBool::new(false),
        drained: AtomicBool::new(false),
    }))
}

/// Opens the directory of KV pages, if there is one.
fn disk_tier(settings: &Settings) -> Result<Option<Arc<DiskTier>>, Failure> {
    let Some(path) = &settings.kv_disk else { return Ok(None) };
    let key = settings.kv_disk_key_file.as_deref().map(key_file::read).transpose();
    let key = key.map_err(|e| Failure::Usage(format!("kv-disk-key-file: {e}")))?;
    let disk = DiskTier::open(path, settings.kv_disk_size.0, key.as_deref());
    Ok(Some(Arc::new(disk.map_err(|e| Failure::Usage(format!("kv-disk: {e}")))?)))
}

/// Opens what outlives the process, if it is kept.
fn state_store(settings: &Settings) -> Result<Option<Arc<StateStore>>, Failure> {
    let Some(path) = &settings.state_dir else { return Ok(None) };
    let cipher = settings.state_key_file.as_deref().map_or_else(|| Ok(Cipher::plain()), Cipher::read);
    let cipher = cipher.map_err(|e| Failure::Usage(format!("state-key-file: {e}")))?;
    let options = Options { answers_quota: settings.stored_answers_size.0, labels, ..Options::default() };
    let start = Instant::now();
    let store = StateStore::open(path, cipher, options).map_err(|e| Failure::Usage(format!("state-dir: {e}")))?;
    let sizes = Kind::ALL.map(|kind| format!("{} {}s", store.size(kind).0, kind.name()));
    tracing::info!("state-dir: {} in {:.3} s", sizes.join(", "), start.elapsed().as_secs_f64());
    Ok(Some(Arc::new(store)))
}

/// Opens the audit log, if there is one, and records the start.
fn audit_log(settings: &Settings) -> Result<Option<Arc<AuditTrail>>, Failure> {
    let Some(path) = &settings.audit_log else { return Ok(None) };
    let wrong = |e: &dyn std::fmt::Display| Failure::Usage(format!("audit-log: {e}"));
    let key = settings.audit_key_file.as_deref().map(audit::Key::read).transpose().map_err(|e| wrong(&e))?;
    let options = audit::Options { max_bytes: settings.audit_log_size.0, keep_files: settings.audit_log_files, key };
    let log = AuditTrail::open(path, &options).map_err(|e| wrong(&e))?;
    log.record(audit::Event::ServerStarted { version: env!("CARGO_PKG_VERSION").into() });
    Ok(Some(Arc::new(log)))
}

fn log_threads(args: &ModelOptions) {
    let (allowed, cores) = pool::cpus();
    let n = args.threads.map_or_else(pool::default_threads, usize::from);
    let why = match (args.threads, cores) {
        (Some(_), _) => "--threads".into(),
        (None, Some(cores)) => format!("{cores} physical cores, {allowed} CPUs allowed by quota, cpuset and affinity"),
        (None, None) => format!("{allowed} CPUs allowed by quota, cpuset and affinity"),
    };
    tracing::info!("{n} threads ({why})");
}

/// Body of the readiness callback: the default model.
pub fn readiness_report(server: &Server, uri: &str) -> Ready {
    let instance = server.pool.default_entry().and_then(|entry| entry.instance());
    let model = server.pool.default_entry().map(|entry| entry.name.to_string()).unwrap_or_default();
    Ready {
        worker_id: server.worker_id.to_string(),
        uri: uri.into(),
        model,
        model_sha256: instance.map(|instance| Hex(instance.model_sha256).to_string()).unwrap_or_default(),
        memory_type: "cpu",
        vram_bytes: 0,
        memory_bytes: server.pool.resources().budget.used(),
    }
}
