//! Start of the server: log, listener, models.

use std::io::IsTerminal;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use starling::receipt::Hex;
use tracing_subscriber::EnvFilter;

use super::auth::Keys;
use super::callback::Ready;
use super::config::{Configuration, Settings};
use super::failures::SharedFailures;
use super::machine;
use super::metrics::Metrics;
use super::models::budget::MemoryBudget;
use super::models::loading::Resources;
use super::models::pool::ModelPool;
use super::state::{Server, random_id, unix_now};
use super::trace::Exporter;
use super::value::{Bytes, LogFormat};
use crate::cli::ModelArgs;
use crate::error::Failure;
use crate::pool;

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

/// The server's state, with the models of `startup` loaded.
///
/// # Errors
/// If a key file is invalid, or a model does not load.
pub async fn open(configuration: Configuration, exporter: Exporter) -> Result<Arc<Server>, Failure> {
    let (start, settings) = (Instant::now(), configuration.settings.clone());
    let keys = Keys::new(&settings)?;
    log_threads(&configuration.model);
    let memory = machine::memory();
    let (limit, reason) = match settings.memory {
        Some(Bytes(limit)) => (limit, "--memory".to_string()),
        None => (memory.bytes, memory.reason),
    };
    tracing::info!("memory for models: {} MiB ({reason})", limit >> 20);
    let metrics = Arc::new(Metrics::new(settings.metrics_compat));
    let failures = SharedFailures::default();
    let budget = Arc::new(MemoryBudget::new(limit));
    let n_threads = configuration.model.threads;
    let resources = Resources::new(budget, Arc::clone(&metrics), Arc::clone(&failures), n_threads);
    let pool = Arc::new(ModelPool::new(configuration, Arc::new(resources))?);
    for entry in pool.entries().iter().filter(|entry| ModelPool::loads_at_start(entry)) {
        pool.load_at_start(entry).await?;
    }
    let (created, draining) = (unix_now(), AtomicBool::new(false));
    Ok(Arc::new(Server { settings, pool, metrics, exporter, keys, failures, start, created, draining }))
}

fn log_threads(args: &ModelArgs) {
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
        worker_id: server.settings.worker_id.clone().unwrap_or_else(|| random_id("worker-")),
        uri: uri.into(),
        model,
        model_sha256: instance.map(|instance| Hex(instance.model_sha256).to_string()).unwrap_or_default(),
        memory_type: "cpu",
        vram_bytes: 0,
        memory_bytes: server.pool.resources().budget.used(),
    }
}
