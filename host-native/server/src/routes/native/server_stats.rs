//! `GET /server/stats`: load, KV caches, workers and latencies of all models. It does not wait for an engine.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use starling::kernels::Cpu;
use starling::kv::{KvStats, StateStats};
use utoipa::ToSchema;

use crate::admin::workers::{WorkerInfo, worker_info};
use crate::http::error::{ApiError, ErrorBody, HttpError, json};
use crate::http::params::QueryParams;
use crate::models::entry::Entry;
use crate::models::error::PoolError;
use crate::models::instance::ModelInstance;
use crate::observe::model_metrics::{ModelMetrics, Snapshot};
use crate::observe::stats::Totals;
use crate::schedule::scheduler::Priority;
use crate::server::Server;

/// Current load and totals since the start.
#[derive(Debug, Serialize, ToSchema)]
pub struct Stats {
    /// The model that `?model=` names, else the default one.
    pub model: String,
    /// Seconds since the server started.
    pub uptime_seconds: f64,
    /// Compute threads of all workers; those that models share count once.
    pub threads: usize,
    /// Instruction set of the kernels.
    pub isa: &'static str,
    /// Of the model that `?model=` names, else of all models together.
    #[serde(flatten)]
    pub load: Load,
    /// That model, else all models.
    pub models: BTreeMap<String, ModelStats>,
}

/// A model, and what is known of it if it is loaded.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelStats {
    /// `unloaded`, `loading`, `loaded`, `draining` or `failed`.
    pub status: &'static str,
    /// What is known of a loaded model.
    #[serde(flatten)]
    pub loaded: Option<LoadedStats>,
}

/// Load, threads and workers of a model.
#[derive(Debug, Serialize, ToSchema)]
pub struct LoadedStats {
    /// Compute threads of each worker.
    pub threads: usize,
    /// Its load.
    #[serde(flatten)]
    pub load: Load,
    /// Its workers.
    pub workers: Vec<WorkerInfo>,
}

/// Load of a model, or of several.
#[derive(Debug, Serialize, ToSchema)]
pub struct Load {
    /// Queued requests by priority.
    pub waiting: Depths,
    /// Queued requests that had their turn and wait for KV pages, or for the prefill of a prompt they share.
    pub held: usize,
    /// Requests in the engine's batch.
    pub running: usize,
    /// Queued texts to embed.
    pub texts_waiting: usize,
    /// Open sessions.
    pub sessions: usize,
    /// KV cache.
    pub kv: KvMemory,
    /// Totals and latencies.
    #[serde(flatten)]
    pub totals: Totals,
}

impl Load {
    fn new(snapshot: &Snapshot, totals: Totals) -> Load {
        let Snapshot { depth, texts, held, running, sessions, kv } = snapshot;
        let waiting = Depths {
            high: depth[Priority::High.index()],
            normal: depth[Priority::Normal.index()],
            low: depth[Priority::Low.index()],
        };
        let kv = KvMemory::new(kv);
        Load { waiting, held: *held, running: *running, texts_waiting: *texts, sessions: *sessions, kv, totals }
    }
}

/// Queued requests.
#[derive(Debug, Serialize, ToSchema)]
pub struct Depths {
    /// High priority.
    pub high: usize,
    /// Normal priority.
    pub normal: usize,
    /// Low priority.
    pub low: usize,
}

/// Memory of the KV cache, and hits of the prefix cache.
#[derive(Debug, Serialize, ToSchema)]
pub struct KvMemory {
    /// Tokens per page.
    pub page_tokens: usize,
    /// Number of pages.
    pub pages: usize,
    /// Size of the cache in bytes.
    pub reserved_bytes: usize,
    /// Bytes that the operating system has committed: pages used at least once.
    pub committed_bytes: usize,
    /// Bytes of pages held by running requests.
    pub in_use_bytes: usize,
    /// Bytes of pages held by the prefix cache only.
    pub cached_bytes: usize,
    /// Bytes of free pages.
    pub free_bytes: usize,
    /// Unused bytes in pages held by running requests.
    pub fragmented_bytes: usize,
    /// Pages evicted from the prefix cache.
    pub evictions: u64,
    /// Pages found in the prefix cache.
    pub page_hits: u64,
    /// Pages looked up in the prefix cache and not found.
    pub page_misses: u64,
    /// Recurrent states, of models with recurrent layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub states: Option<StateMemory>,
}

impl KvMemory {
    fn new(kv: &KvStats) -> KvMemory {
        KvMemory {
            page_tokens: starling::kernels::attention::PAGE,
            pages: kv.n_pages,
            reserved_bytes: kv.reserved_bytes,
            committed_bytes: kv.committed_bytes,
            in_use_bytes: kv.in_use_bytes,
            cached_bytes: kv.cached_bytes,
            free_bytes: kv.free_bytes,
            fragmented_bytes: kv.fragmented_bytes,
            evictions: kv.evictions,
            page_hits: kv.hits,
            page_misses: kv.misses,
            states: StateMemory::new(&kv.states),
        }
    }
}

/// Memory of recurrent states, and of their snapshots in the prefix cache.
#[derive(Debug, Serialize, ToSchema)]
pub struct StateMemory {
    /// Bytes for all states.
    pub reserved_bytes: usize,
    /// Bytes used at least once.
    pub committed_bytes: usize,
    /// Bytes held by running requests.
    pub in_use_bytes: usize,
    /// Bytes of snapshots.
    pub snapshot_bytes: usize,
    /// Number of snapshots.
    pub snapshots: usize,
    /// Prompts that continued from a snapshot.
    pub snapshot_hits: u64,
    /// Snapshots evicted for other states.
    pub snapshot_evictions: u64,
}

impl StateMemory {
    /// `None` for a model without recurrent layers.
    fn new(states: &StateStats) -> Option<StateMemory> {
        (states.reserved_bytes > 0).then_some(StateMemory {
            reserved_bytes: states.reserved_bytes,
            committed_bytes: states.committed_bytes,
            in_use_bytes: states.in_use_bytes,
            snapshot_bytes: states.snapshot_bytes,
            snapshots: states.n_snapshots,
            snapshot_hits: states.hits,
            snapshot_evictions: states.evictions,
        })
    }
}

/// Which model's statistics are meant.
#[derive(Debug, Deserialize)]
pub struct StatsQuery {
    model: Option<String>,
}

/// Current load, KV caches, workers and latencies as JSON: of all models, or of the one that `?model=` names
///
/// # Errors
/// If `?model=` names no model, or one that is not loaded.
#[utoipa::path(get, path = "/server/stats", tag = "Health",
    params(("model" = Option<String>, Query, description = "Model name")),
    responses(
        (status = 200, description = "Server statistics", body = Stats),
        (status = "4XX", description = "No such model, or it is not loaded", body = ErrorBody),
    ))]
pub async fn stats(
    State(server): State<Arc<Server>>,
    QueryParams(query): QueryParams<StatsQuery>,
) -> Result<Response, HttpError> {
    let entries = match &query.model {
        None => server.pool.entries(),
        Some(name) => {
            let entry = server.pool.find(Some(name)).map_err(ApiError::from)?;
            if entry.instance().is_none() {
                return Err(ApiError::from(PoolError::NotLoaded(Arc::clone(&entry.name))).into());
            }
            vec![entry]
        }
    };
    let instances: Vec<Arc<ModelInstance>> = entries.iter().filter_map(|entry| entry.instance()).collect();
    let snapshot = instances.iter().map(|instance| instance.snapshot()).fold(Snapshot::default(), Snapshot::plus);
    let metrics: Vec<&ModelMetrics> = entries.iter().map(|entry| &*entry.metrics).collect();
    let stats = Stats {
        model: entries.first().map(|entry| entry.name.to_string()).unwrap_or_default(),
        uptime_seconds: server.start.elapsed().as_secs_f64(),
        threads: n_threads(&instances),
        isa: instances.first().map_or_else(Cpu::detect, |instance| instance.cpu).isa().name(),
        load: Load::new(&snapshot, ModelMetrics::totals(&metrics)),
        models: entries.iter().map(|entry| (entry.name.to_string(), model_stats(entry))).collect(),
    };
    Ok(json(StatusCode::OK, &stats))
}

fn model_stats(entry: &Entry) -> ModelStats {
    let loaded = entry.instance().map(|instance| LoadedStats {
        threads: instance.threads,
        load: Load::new(&instance.snapshot(), ModelMetrics::totals(&[&entry.metrics])),
        workers: instance.workers.list().iter().map(worker_info).collect(),
    });
    ModelStats { status: entry.state().name(), loaded }
}

/// Compute threads of the workers of all models.
fn n_threads(instances: &[Arc<ModelInstance>]) -> usize {
    let threads = instances.iter().map(|instance| instance.workers.threads());
    let (own, shared): (Vec<_>, Vec<_>) = threads.partition(|threads| !threads.are_shared);
    own.iter().map(|threads| threads.n).sum::<usize>() + shared.iter().map(|threads| threads.n).max().unwrap_or(0)
}
