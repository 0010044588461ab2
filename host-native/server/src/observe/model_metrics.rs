//! The metrics of one model, and the recent values of `/server/stats`.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use starling::engine::FinishReason;
use starling::kv::{KvStats, StateStats};
use starling_api::update::Failed;

use super::metrics::{Families, Labels, Real};
use super::stats::{Rate, Recent, Totals};
use crate::priority::Priority;

/// How a request ended: the label `outcome`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// A stop token, a stop string, or the end of a constraint.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    /// The client disconnected.
    Cancelled,
    /// `queue_timeout` or `request_timeout`.
    Timeout,
    Shutdown,
    Error,
}

impl Outcome {
    const ALL: [Outcome; 6] =
        [Outcome::Stop, Outcome::Length, Outcome::Cancelled, Outcome::Timeout, Outcome::Shutdown, Outcome::Error];

    const fn name(self) -> &'static str {
        match self {
            Outcome::Stop => "stop",
            Outcome::Length => "length",
            Outcome::Cancelled => "cancelled",
            Outcome::Timeout => "timeout",
            Outcome::Shutdown => "shutdown",
            Outcome::Error => "error",
        }
    }
}

/// Values of the gauges at the time of a scrape.
#[derive(Debug, Clone, Copy, Default)]
pub struct Snapshot {
    /// Queued requests, by [`Priority::index`].
    pub depth: [usize; 3],
    /// Queued texts to embed.
    pub texts: usize,
    /// Queued requests that had their turn and wait for KV pages or for a shared prompt.
    pub held: usize,
    /// Requests in the engine.
    pub running: usize,
    pub sessions: usize,
    pub kv: KvStats,
}

impl Snapshot {
    pub fn plus(self, other: Snapshot) -> Snapshot {
        Snapshot {
            depth: [0, 1, 2].map(|i| self.depth[i] + other.depth[i]),
            texts: self.texts + other.texts,
            held: self.held + other.held,
            running: self.running + other.running,
            sessions: self.sessions + other.sessions,
            kv: sum(self.kv, other.kv),
        }
    }

    /// Share of the KV cache held by running requests, 0 to 1.
    pub fn kv_usage(&self) -> f64 {
        self.kv.in_use_bytes as f64 / self.kv.reserved_bytes.max(1) as f64
    }
}

/// Statistics of two KV caches together.
pub fn sum(a: KvStats, b: KvStats) -> KvStats {
    KvStats {
        n_pages: a.n_pages + b.n_pages,
        page_bytes: a.page_bytes.max(b.page_bytes),
        reserved_bytes: a.reserved_bytes + b.reserved_bytes,
        committed_bytes: a.committed_bytes + b.committed_bytes,
        in_use_bytes: a.in_use_bytes + b.in_use_bytes,
        cached_bytes: a.cached_bytes + b.cached_bytes,
        free_bytes: a.free_bytes + b.free_bytes,
        fragmented_bytes: a.fragmented_bytes + b.fragmented_bytes,
        hits: a.hits + b.hits,
        misses: a.misses + b.misses,
        evictions: a.evictions + b.evictions,
        states: StateStats {
            reserved_bytes: a.states.reserved_bytes + b.states.reserved_bytes,
            committed_bytes: a.states.committed_bytes + b.states.committed_bytes,
            in_use_bytes: a.states.in_use_bytes + b.states.in_use_bytes,
            snapshot_bytes: a.states.snapshot_bytes + b.states.snapshot_bytes,
            n_snapshots: a.states.n_snapshots + b.states.n_snapshots,
            hits: a.states.hits + b.states.hits,
            evictions: a.states.evictions + b.states.evictions,
        },
    }
}

/// The series of one model.
pub struct ModelMetrics {
    model: Labels,
    requests: Family<Labels, Counter>,
    rejected: Family<Labels, Counter>,
    loads: Family<Labels, Counter>,
    unloads: Family<Labels, Counter>,
    swaps: Family<Labels, Counter>,
    worker_faults: Family<Labels, Counter>,
    depth: Family<Labels, Gauge>,
    kv_bytes: Family<Labels, Gauge>,
    recurrent_bytes: Family<Labels, Gauge>,
    snapshots: Family<Labels, Gauge>,
    snapshot_hits: Family<Labels, Counter>,
    snapshot_evictions: Family<Labels, Counter>,
    workers: Family<Labels, Gauge>,
    utilisation: Family<Labels, Real>,
    /// Workers that have a series of utilisation.
    known_workers: Mutex<BTreeSet<u32>>,
    texts_waiting: Gauge,
    waiting: Gauge,
    running: Gauge,
    sessions: Gauge,
    loaded: Gauge,
    breaker: Gauge,
    weight_bytes: Gauge,
    kv_usage: Real,
    first_token: Histogram,
    next_token: Histogram,
    whole: Histogram,
    queue_time: Histogram,
    prefill_time: Histogram,
    batch_size: Histogram,
    prefill_chunk: Histogram,
    step_time: Histogram,
    load_time: Histogram,
    prompt_tokens: Counter,
    output_tokens: Counter,
    texts: Counter,
    text_tokens: Counter,
    evictions: Counter,
    preemptions: Counter,
    draft_tokens: Counter,
    accepted_tokens: Counter,
    queries: Counter,
    hits: Counter,
    resumed: Counter,
    recent: [Recent; 3],
    rate: Rate,
}

impl ModelMetrics {
    pub fn new(f: &Families, name: &Arc<str>) -> ModelMetrics {
        let model = Labels::model(name);
        // Prometheus computes rates only of series that exist before their first increase
        for outcome in Outcome::ALL {
            drop(f.requests.get_or_create(&model.clone().and("outcome", outcome.name())));
        }
        ModelMetrics {
            requests: f.requests.clone(),
            rejected: f.rejected.clone(),
            loads: f.loads.clone(),
            unloads: f.unloads.clone(),
            swaps: f.swaps.clone(),
            worker_faults: f.worker_faults.clone(),
            depth: f.depth.clone(),
            kv_bytes: f.kv_bytes.clone(),
            recurrent_bytes: f.recurrent_bytes.clone(),
            snapshots: f.snapshots.clone(),
            snapshot_hits: f.snapshot_hits.clone(),
            snapshot_evictions: f.snapshot_evictions.clone(),
            workers: f.workers.clone(),
            utilisation: f.utilisation.clone(),
            known_workers: Mutex::default(),
            texts_waiting: f.texts_waiting.get_or_create_owned(&model),
            waiting: f.waiting.get_or_create_owned(&model),
            running: f.running.get_or_create_owned(&model),
            sessions: f.sessions.get_or_create_owned(&model),
            loaded: f.loaded.get_or_create_owned(&model),
            breaker: f.breaker.get_or_create_owned(&model),
            weight_bytes: f.weight_bytes.get_or_create_owned(&model),
            kv_usage: f.kv_usage.get_or_create_owned(&model),
            first_token: f.first_token.get_or_create_owned(&model),
            next_token: f.next_token.get_or_create_owned(&model),
            whole: f.whole.get_or_create_owned(&model),
            queue_time: f.queue_time.get_or_create_owned(&model),
            prefill_time: f.prefill_time.get_or_create_owned(&model),
            batch_size: f.batch_size.get_or_create_owned(&model),
            prefill_chunk: f.prefill_chunk.get_or_create_owned(&model),
            step_time: f.step_time.get_or_create_owned(&model),
            load_time: f.load_time.get_or_create_owned(&model),
            prompt_tokens: f.prompt_tokens.get_or_create_owned(&model),
            output_tokens: f.output_tokens.get_or_create_owned(&model),
            texts: f.texts.get_or_create_owned(&model),
            text_tokens: f.text_tokens.get_or_create_owned(&model),
            evictions: f.evictions.get_or_create_owned(&model),
            preemptions: f.preemptions.get_or_create_owned(&model),
            draft_tokens: f.draft_tokens.get_or_create_owned(&model),
            accepted_tokens: f.accepted_tokens.get_or_create_owned(&model),
            queries: f.queries.get_or_create_owned(&model),
            hits: f.hits.get_or_create_owned(&model),
            resumed: f.resumed.get_or_create_owned(&model),
            recent: Default::default(),
            rate: Rate::default(),
            model,
        }
    }

    /// Sets the gauges.
    pub fn set(&self, snapshot: &Snapshot) {
        for priority in Priority::ALL {
            let labels = self.model.clone().and("priority", priority.name());
            self.depth.get_or_create(&labels).set(snapshot.depth[priority.index()] as i64);
        }
        self.texts_waiting.set(snapshot.texts as i64);
        self.waiting.set(snapshot.depth.iter().sum::<usize>() as i64);
        self.running.set(snapshot.running as i64);
        self.sessions.set(snapshot.sessions as i64);
        let kv = &snapshot.kv;
        let states = [
            ("reserved", kv.reserved_bytes),
            ("committed", kv.committed_bytes),
            ("in_use", kv.in_use_bytes),
            ("cached", kv.cached_bytes),
            ("free", kv.free_bytes),
            ("fragmented", kv.fragmented_bytes),
        ];
        for (state, bytes) in states {
            self.kv_bytes.get_or_create(&self.model.clone().and("state", state)).set(bytes as i64);
        }
        self.kv_usage.set(snapshot.kv_usage());
        self.set_states(&kv.states);
    }

    /// Sets the gauges of recurrent states; a model without recurrent layers has none.
    fn set_states(&self, states: &StateStats) {
        if states.reserved_bytes == 0 {
            return;
        }
        let uses = [
            ("reserved", states.reserved_bytes),
            ("committed", states.committed_bytes),
            ("in_use", states.in_use_bytes),
            ("snapshots", states.snapshot_bytes),
        ];
        for (state, bytes) in uses {
            self.recurrent_bytes.get_or_create(&self.model.clone().and("state", state)).set(bytes as i64);
        }
        self.snapshots.get_or_create(&self.model).set(states.n_snapshots as i64);
    }

    /// Sets the gauge of loaded models; `weight_bytes` is 0 if the model is not loaded.
    pub fn set_loaded(&self, is_loaded: bool, weight_bytes: usize) {
        self.loaded.set(i64::from(is_loaded));
        self.weight_bytes.set(weight_bytes as i64);
    }

    /// Sets the gauge of the circuit breaker by its state.
    pub fn set_breaker(&self, state: &str) {
        self.breaker.set(match state {
            "closed" => 0,
            "half-open" => 1,
            _ => 2,
        });
    }

    /// Sets the number of workers in a state.
    pub fn set_workers(&self, state: &'static str, n: usize) {
        self.workers.get_or_create(&self.model.clone().and("state", state)).set(n as i64);
    }

    /// Sets the utilisation of the workers there are; the series of others go.
    pub fn set_utilisation(&self, workers: &[(u32, f64)]) {
        let labels = |id: u32| self.model.clone().and("worker", id.to_string());
        let mut known = self.known_workers.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|id| {
            let is_left = workers.iter().any(|(other, _)| other == id);
            if !is_left {
                self.utilisation.remove(&labels(*id));
            }
            is_left
        });
        for (id, share) in workers {
            known.insert(*id);
            self.utilisation.get_or_create(&labels(*id)).set(*share);
        }
    }

    pub fn load_finished(&self, is_ok: bool, time: Duration) {
        self.loads.get_or_create(&self.model.clone().and("result", result(is_ok))).inc();
        self.load_time.observe(time.as_secs_f64());
    }

    pub fn swap_finished(&self, is_ok: bool) {
        self.swaps.get_or_create(&self.model.clone().and("result", result(is_ok))).inc();
    }

    pub fn unloaded(&self, reason: &'static str) {
        self.unloads.get_or_create(&self.model.clone().and("reason", reason)).inc();
    }

    pub fn worker_fault(&self, kind: &'static str) {
        self.worker_faults.get_or_create(&self.model.clone().and("kind", kind)).inc();
    }

    pub fn resumed(&self, n: usize) {
        self.resumed.inc_by(n as u64);
    }

    pub fn outcomes(&self, outcome: Outcome, n: usize) {
        self.requests.get_or_create(&self.model.clone().and("outcome", outcome.name())).inc_by(n as u64);
    }

    /// Counts a request that failed, by outcome.
    pub fn failed(&self, failed: &Failed) {
        let outcome = match failed {
            Failed::QueueTimeout(_) | Failed::Timeout(_) => Outcome::Timeout,
            Failed::Shutdown => Outcome::Shutdown,
            Failed::Request(_) | Failed::Worker => Outcome::Error,
        };
        self.outcomes(outcome, 1);
    }

    pub fn rejected(&self, reason: &'static str) {
        self.rejected.get_or_create(&self.model.clone().and("reason", reason)).inc();
    }

    pub fn queue_time(&self, time: Duration) {
        self.queue_time.observe(time.as_secs_f64());
    }

    pub fn prefilled(&self, n_prompt: usize, n_cached: usize, time: Duration) {
        self.prompt_tokens.inc_by(n_prompt as u64);
        self.queries.inc_by(n_prompt as u64);
        self.hits.inc_by(n_cached as u64);
        self.prefill_time.observe(time.as_secs_f64());
    }

    /// `time` is since the arrival of the request.
    pub fn first_token(&self, time: Duration) {
        self.count_token();
        self.recent[0].add(time);
        self.first_token.observe(time.as_secs_f64());
    }

    /// `time` is since the previous token of the request.
    pub fn next_token(&self, time: Duration) {
        self.count_token();
        self.recent[1].add(time);
        self.next_token.observe(time.as_secs_f64());
    }

    fn count_token(&self) {
        self.output_tokens.inc();
        self.rate.add(1);
    }

    pub fn done(&self, reason: FinishReason, time: Duration) {
        let outcome = match reason {
            FinishReason::StopToken(_) | FinishReason::StopString(_) | FinishReason::Complete => Outcome::Stop,
            FinishReason::Length => Outcome::Length,
            FinishReason::Deadline => Outcome::Timeout,
            // an answer is filtered after the engine
            FinishReason::ContentFilter => Outcome::Stop,
            FinishReason::NotFinite | FinishReason::NoMemory | FinishReason::Constraint(_) => Outcome::Error,
        };
        self.outcomes(outcome, 1);
        self.recent[2].add(time);
        self.whole.observe(time.as_secs_f64());
    }

    /// An engine step of `n` requests that processed `prefill` prompt tokens.
    pub fn step(&self, n: usize, prefill: usize, time: Duration) {
        self.batch_size.observe(n as f64);
        if prefill > 0 {
            self.prefill_chunk.observe(prefill as f64);
        }
        self.step_time.observe(time.as_secs_f64());
    }

    pub fn drafted(&self, n_drafted: usize, n_accepted: usize) {
        self.draft_tokens.inc_by(n_drafted as u64);
        self.accepted_tokens.inc_by(n_accepted as u64);
    }

    pub fn preempted(&self) {
        self.preemptions.inc();
    }

    /// Counts what has happened in a KV cache since the statistics `before`.
    pub fn kv_counted(&self, now: &KvStats, before: &KvStats) {
        self.evictions.inc_by(now.evictions.saturating_sub(before.evictions));
        if now.states.reserved_bytes > 0 {
            let (hits, evictions) = (now.states.hits, now.states.evictions);
            self.snapshot_hits.get_or_create(&self.model).inc_by(hits.saturating_sub(before.states.hits));
            let evicted = self.snapshot_evictions.get_or_create(&self.model);
            evicted.inc_by(evictions.saturating_sub(before.states.evictions));
        }
    }

    pub fn embedded(&self, texts: usize, tokens: usize) {
        self.texts.inc_by(texts as u64);
        self.text_tokens.inc_by(tokens as u64);
    }

    /// Totals and latencies of models together.
    pub fn totals(all: &[&ModelMetrics]) -> Totals {
        let sum = |counter: fn(&ModelMetrics) -> &Counter| all.iter().map(|metrics| counter(metrics).get()).sum();
        let percentiles = |i: usize| Recent::percentiles(all.iter().map(|metrics| &metrics.recent[i]));
        Totals {
            prompt_tokens: sum(|metrics| &metrics.prompt_tokens),
            cached_tokens: sum(|metrics| &metrics.hits),
            output_tokens: sum(|metrics| &metrics.output_tokens),
            embedded_texts: sum(|metrics| &metrics.texts),
            output_tokens_per_second: all.iter().map(|metrics| metrics.rate.per_second()).sum(),
            time_to_first_token: percentiles(0),
            inter_token_latency: percentiles(1),
            request_latency: percentiles(2),
        }
    }

    /// Drops the recent latencies: another model has taken the name.
    pub fn clear_recent(&self) {
        self.recent.iter().for_each(Recent::clear);
    }
}

/// Metrics of an instance: those of its model once it serves. Before that, a self-test counts nowhere.
pub struct InstanceMetrics {
    unpublished: ModelMetrics,
    model: OnceLock<Arc<ModelMetrics>>,
}

impl InstanceMetrics {
    pub fn new(unpublished: ModelMetrics) -> InstanceMetrics {
        InstanceMetrics { unpublished, model: OnceLock::new() }
    }

    pub fn publish(&self, model: &Arc<ModelMetrics>) {
        let _ = self.model.set(Arc::clone(model));
    }
}

impl Deref for InstanceMetrics {
    type Target = ModelMetrics;

    fn deref(&self) -> &ModelMetrics {
        self.model.get().map_or(&self.unpublished, |model| model)
    }
}

const fn result(is_ok: bool) -> &'static str {
    if is_ok { "ok" } else { "failed" }
}
