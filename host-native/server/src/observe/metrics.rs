//! Counters, gauges and histograms of `/metrics`: families whose series are labelled by model.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, LabelSetEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use starling::kernels::attention::PAGE;

use super::model_metrics::ModelMetrics;
use crate::config::value::Compat;

/// Values of the KV pages on disk.
#[derive(Debug, Clone, Copy)]
pub struct KvDiskValues {
    pub pages: u64,
    pub bytes: u64,
    pub queued_bytes: u64,
    pub hits: u64,
    pub misses: u64,
    pub written: u64,
    pub dropped: u64,
    pub evicted: u64,
    pub io_errors: u64,
}

/// A gauge of a real number.
pub type Real = Gauge<f64, AtomicU64>;
type Histograms = Family<Labels, Histogram, fn() -> Histogram>;

/// Labels of a series: the model, unless it is the server's, and one more of some families.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Labels {
    model: Option<Arc<str>>,
    other: Option<(&'static str, Cow<'static, str>)>,
}

impl Labels {
    pub fn model(name: &Arc<str>) -> Labels {
        Labels { model: Some(Arc::clone(name)), other: None }
    }

    pub fn and(self, key: &'static str, value: impl Into<Cow<'static, str>>) -> Labels {
        Labels { other: Some((key, value.into())), ..self }
    }

    /// Labels of a series of the server.
    fn one(key: &'static str, value: impl Into<Cow<'static, str>>) -> Labels {
        Labels { model: None, other: Some((key, value.into())) }
    }
}

impl EncodeLabelSet for Labels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        let model = self.model.as_deref().map(|name| ("model_name", name));
        let other = self.other.as_ref().map(|(key, value)| (*key, &**value));
        for pair in model.into_iter().chain(other) {
            prometheus_client::encoding::EncodeLabel::encode(&pair, encoder.encode_label())?;
        }
        Ok(())
    }
}

/// Time to first token, in seconds. The buckets are vLLM's, so that its dashboards work.
#[rustfmt::skip]
const FIRST_TOKEN_BUCKETS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
];
/// Time between tokens, in seconds.
#[rustfmt::skip]
const INTER_TOKEN_BUCKETS: [f64; 19] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// Time of a request, in seconds.
#[rustfmt::skip]
const REQUEST_BUCKETS: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
const SIZE_BUCKETS: [f64; 14] =
    [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 16384.0];

/// One row for each family: field, type, Starling's name, vLLM's name if it has the metric too, help.
macro_rules! families {
    ($($field:ident: $kind:ty $(= $new:expr)?, $name:literal $(or $vllm:literal)?, $help:literal;)*) => {
        /// All metric families.
        pub struct Families {
            $(pub $field: $kind,)*
        }

        impl Families {
            fn new() -> Families {
                Families { $($field: families!(@new $kind $(= $new)?),)* }
            }

            fn register(&self, registry: &mut Registry, compat: Compat) {
                let own = registry.sub_registry_with_prefix("starling");
                $(own.register($name, $help, self.$field.clone());)*
                if compat == Compat::Vllm {
                    $($(registry.register($vllm, $help, self.$field.clone());)?)*
                }
            }
        }
    };
    (@new $kind:ty = $new:expr) => { Histograms::new_with_constructor(|| Histogram::new($new)) };
    (@new $kind:ty) => { <$kind>::default() };
}

families! {
    requests: Family<Labels, Counter>, "requests", "Finished requests by outcome";
    rejected: Family<Labels, Counter>, "rejected", "Requests refused before the queue, by reason";
    responses: Family<Labels, Counter>, "http_responses", "HTTP responses by status class";
    depth: Family<Labels, Gauge>, "queue_depth", "Queued requests by priority";
    texts_waiting: Family<Labels, Gauge>, "queue_texts", "Queued texts to embed";
    waiting: Family<Labels, Gauge>, "requests_waiting" or "vllm:num_requests_waiting",
        "Queued requests, including those admitted but waiting for KV pages";
    running: Family<Labels, Gauge>, "requests_running" or "vllm:num_requests_running",
        "Requests in the engine's batch";
    sessions: Family<Labels, Gauge>, "sessions", "Open sessions";
    first_token: Histograms = FIRST_TOKEN_BUCKETS,
        "time_to_first_token_seconds" or "vllm:time_to_first_token_seconds",
        "Time from request arrival to its first token";
    next_token: Histograms = INTER_TOKEN_BUCKETS,
        "inter_token_latency_seconds" or "vllm:inter_token_latency_seconds",
        "Time between consecutive tokens of a request";
    whole: Histograms = REQUEST_BUCKETS,
        "e2e_request_latency_seconds" or "vllm:e2e_request_latency_seconds",
        "Time from request arrival to its last token";
    queue_time: Histograms = REQUEST_BUCKETS,
        "request_queue_time_seconds" or "vllm:request_queue_time_seconds",
        "Time from request arrival to its admission to the engine";
    prefill_time: Histograms = REQUEST_BUCKETS, "request_prefill_time_seconds",
        "Time from admission to the end of prefill";
    batch_size: Histograms = SIZE_BUCKETS, "step_batch_size", "Requests in an engine step";
    prefill_chunk: Histograms = SIZE_BUCKETS, "step_prefill_tokens",
        "Prompt tokens in an engine step, where there are any";
    step_time: Histograms = FIRST_TOKEN_BUCKETS, "step_seconds", "Duration of an engine step";
    prompt_tokens: Family<Labels, Counter>, "prompt_tokens" or "vllm:prompt_tokens",
        "Prompt tokens, including those found in the prefix cache";
    output_tokens: Family<Labels, Counter>, "output_tokens" or "vllm:generation_tokens", "Generated tokens";
    texts: Family<Labels, Counter>, "embedded_texts", "Embedded texts";
    text_tokens: Family<Labels, Counter>, "embedded_tokens", "Tokens of embedded texts";
    kv_bytes: Family<Labels, Gauge>, "kv_bytes", "KV cache memory by state, in bytes";
    kv_usage: Family<Labels, Real>, "kv_usage_ratio" or "vllm:kv_cache_usage_perc",
        "Share of the KV cache held by running requests, 0 to 1";
    evictions: Family<Labels, Counter>, "kv_evictions", "KV pages evicted from the prefix cache";
    recurrent_bytes: Family<Labels, Gauge>, "recurrent_state_bytes",
        "Memory of recurrent states by state: reserved, committed, in use by requests, snapshots; in bytes";
    snapshots: Family<Labels, Gauge>, "state_snapshots", "Snapshots of recurrent states in the prefix cache";
    snapshot_hits: Family<Labels, Counter>, "state_snapshot_hits", "Prompts that continued from a snapshot";
    snapshot_evictions: Family<Labels, Counter>, "state_snapshot_evictions", "Snapshots evicted for other recurrent states";
    preemptions: Family<Labels, Counter>, "preemptions" or "vllm:num_preemptions",
        "Requests preempted for lack of KV pages";
    draft_tokens: Family<Labels, Counter>, "draft_tokens" or "vllm:spec_decode_num_draft_tokens",
        "Draft tokens of speculative decoding";
    accepted_tokens: Family<Labels, Counter>, "accepted_draft_tokens" or "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens that became output tokens";
    queries: Family<Labels, Counter>, "prefix_cache_queries" or "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache";
    hits: Family<Labels, Counter>, "prefix_cache_hits" or "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache";
    loaded: Family<Labels, Gauge>, "model_loaded", "Whether the model is loaded, 0 or 1";
    weight_bytes: Family<Labels, Gauge>, "model_weight_bytes", "Memory of the model's weights, in bytes";
    loads: Family<Labels, Counter>, "model_loads", "Loads of the model by result";
    unloads: Family<Labels, Counter>, "model_unloads", "Unloads of the model by reason";
    swaps: Family<Labels, Counter>, "model_swaps", "Replacements of the running model by result";
    load_time: Histograms = REQUEST_BUCKETS, "model_load_seconds", "Time to load the model";
    breaker: Family<Labels, Gauge>, "breaker_state", "Circuit breaker: 0 closed, 1 half-open, 2 open";
    pressure: Gauge, "memory_pressure_level", "Memory pressure, 0 to 3";
    memory_used: Gauge, "model_memory_used_bytes", "Memory of all weights and KV caches, in bytes";
    workers: Family<Labels, Gauge>, "workers", "Workers by state";
    utilisation: Family<Labels, Real>, "worker_utilisation_ratio",
        "Share of the last 10 s in which the worker had work, 0 to 1";
    tenant_requests: Family<Labels, Counter>, "tenant_requests", "Finished POST requests of a tenant; those of tenants beyond the first 64 have the label (other)";
    tenant_prompt_tokens: Family<Labels, Counter>, "tenant_prompt_tokens", "Prompt tokens of a tenant";
    tenant_output_tokens: Family<Labels, Counter>, "tenant_output_tokens", "Generated tokens of a tenant";
    worker_faults: Family<Labels, Counter>, "worker_faults", "Faults that ended a worker, by kind";
    policy: Family<Labels, Counter>, "policy_actions", "Prompts and answers that the policy refused or changed, and failures of its service, by action";
    reused: Family<Labels, Counter>, "reuse", "Determined requests by what was used again: an answer (hit), one in flight (shared), none (miss); the same of texts to embed";
    kept_bytes: Family<Labels, Gauge>, "reuse_cache_bytes", "Memory of answers and embeddings that are kept, by cache";
    state_rows: Family<Labels, Gauge>, "state_rows", "Rows in state-dir by kind";
    state_bytes: Family<Labels, Gauge>, "state_bytes", "Bytes of the rows in state-dir by kind";
    state_writes: Family<Labels, Gauge>, "state_writes", "Rows written into state-dir or deleted since the start, and those that failed, by result";
    kept_evicted: Family<Labels, Gauge>, "reuse_cache_evictions", "Answers and embeddings evicted since the start, by cache";
    audit_lost: Gauge, "audit_lost_events", "Events that the audit log has lost since the start";
    audit_failures: Gauge, "audit_failures", "Failures to write the audit log since the start";
    answers_disk_bytes: Gauge, "reuse_disk_bytes", "Size of the answers in response-cache-disk, in bytes";
    answers_disk_refused: Gauge, "reuse_disk_refused", "Damaged or foreign files in response-cache-disk since the start";
    answers_disk_errors: Gauge, "reuse_disk_io_errors", "Failed file system calls for response-cache-disk since the start";
    disk_pages: Gauge, "kv_disk_pages", "KV pages on disk";
    disk_bytes: Gauge, "kv_disk_bytes", "Size of the KV pages on disk, in bytes";
    disk_queued: Gauge, "kv_disk_queued_bytes", "Bytes of the KV pages that wait to be written to disk";
    disk_hits: Counter, "kv_disk_hits", "KV pages read from disk";
    disk_misses: Counter, "kv_disk_misses", "KV pages expected on disk and not read: missing, refused or failed";
    disk_written: Counter, "kv_disk_written", "KV pages written to disk";
    disk_dropped: Counter, "kv_disk_dropped", "KV pages not written to disk: too large, queue full or failed";
    disk_evicted: Counter, "kv_disk_evicted", "KV pages removed from disk for its size limit or for lack of space";
    disk_errors: Counter, "kv_disk_io_errors", "Failed file system calls for KV pages on disk";
    disk_refused: Family<Labels, Counter>, "kv_disk_refused", "Damaged or foreign KV pages on disk, by reason";
    resumed: Family<Labels, Counter>, "requests_resumed", "Running requests moved to another worker";
}

/// vLLM's description of the KV cache: page size in tokens, number of pages.
type CacheInfo = Family<[(&'static str, String); 3], Gauge>;

/// The registry of all metrics.
pub struct Metrics {
    registry: Registry,
    families: Families,
    cache_info: Option<CacheInfo>,
    /// Tenants that have series of their own.
    tenants: Mutex<BTreeSet<Arc<str>>>,
}

/// Tenants with series of their own, at most: each is kept until the process ends.
const MAX_TENANTS: usize = 64;
/// The label of all other tenants.
const OTHER_TENANTS: &str = "(other)";

impl Metrics {
    pub fn new(compat: Compat) -> Metrics {
        let (mut registry, families) = (Registry::default(), Families::new());
        families.register(&mut registry, compat);
        let cache_info = (compat == Compat::Vllm).then(|| {
            let info = CacheInfo::default();
            let help = "KV cache configuration: page size in tokens, number of pages";
            registry.register("vllm:cache_config_info", help, info.clone());
            info
        });
        Metrics { registry, families, cache_info, tenants: Mutex::default() }
    }

    /// The metrics of a model by its name in the API.
    pub fn model(&self, name: &Arc<str>) -> ModelMetrics {
        ModelMetrics::new(&self.families, name)
    }

    /// Metrics of a model that are not published: of one that does not serve yet.
    pub fn unpublished(name: &Arc<str>) -> ModelMetrics {
        ModelMetrics::new(&Families::new(), name)
    }

    /// Counts a finished request of a tenant, with its tokens.
    pub fn tenant(&self, name: &Arc<str>, prompt_tokens: usize, output_tokens: usize) {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = tenants.contains(name) || tenants.len() < MAX_TENANTS && tenants.insert(Arc::clone(name));
        drop(tenants);
        let labels = Labels::one("tenant", if is_known { name.to_string() } else { OTHER_TENANTS.into() });
        let f = &self.families;
        f.tenant_requests.get_or_create(&labels).inc();
        f.tenant_prompt_tokens.get_or_create(&labels).inc_by(prompt_tokens as u64);
        f.tenant_output_tokens.get_or_create(&labels).inc_by(output_tokens as u64);
    }

    /// Notes the number of KV pages of a model that has been loaded.
    pub fn describe_cache(&self, name: &str, n_pages: usize) {
        let Some(info) = &self.cache_info else { return };
        let labels = [
            ("model_name", name.to_string()),
            ("block_size", PAGE.to_string()),
            ("num_gpu_blocks", n_pages.to_string()),
        ];
        info.clear();
        info.get_or_create(&labels).set(1);
    }

    /// Counts a request that was refused before its model was known.
    pub fn rejected(&self, reason: &'static str) {
        self.families.rejected.get_or_create(&Labels::one("reason", reason)).inc();
    }

    /// Sets the gauges of the server.
    pub fn set_memory(&self, pressure: u8, used_bytes: u64) {
        self.families.pressure.set(i64::from(pressure));
        self.families.memory_used.set(used_bytes as i64);
    }

    /// Counts a request or text whose answer is determined.
    pub fn reused(&self, result: &'static str) {
        self.families.reused.get_or_create(&Labels::one("result", result)).inc();
    }

    /// Sets the gauges of a kind of rows in the state store: their number and bytes.
    pub fn set_state_rows(&self, kind: &'static str, (rows, bytes): (usize, u64)) {
        let labels = Labels::one("kind", kind);
        self.families.state_rows.get_or_create(&labels).set(rows as i64);
        self.families.state_bytes.get_or_create(&labels).set(bytes.cast_signed());
    }

    /// Sets the gauges of writes to the state store.
    pub fn set_state_writes(&self, written: u64, failed: u64) {
        for (result, n) in [("ok", written), ("failed", failed)] {
            self.families.state_writes.get_or_create(&Labels::one("result", result)).set(n.cast_signed());
        }
    }

    /// Sets the gauges of a cache of results.
    pub fn set_kept(&self, cache: &'static str, n_bytes: usize, n_evicted: u64) {
        let labels = Labels::one("cache", cache);
        self.families.kept_bytes.get_or_create(&labels).set(n_bytes as i64);
        self.families.kept_evicted.get_or_create(&labels).set(n_evicted.cast_signed());
    }

    /// Counts what the policy on texts has done.
    pub fn policy(&self, action: &'static str) {
        self.families.policy.get_or_create(&Labels::one("action", action)).inc();
    }

    /// Sets the values of the answers on disk.
    pub fn set_answers_disk(&self, bytes: u64, refused: u64, io_errors: u64) {
        let f = &self.families;
        f.answers_disk_bytes.set(bytes.cast_signed());
        f.answers_disk_refused.set(refused.cast_signed());
        f.answers_disk_errors.set(io_errors.cast_signed());
    }

    /// Sets the values of the KV pages on disk, and of those that were refused by reason.
    pub fn set_kv_disk(&self, values: &KvDiskValues, refused: impl IntoIterator<Item = (&'static str, u64)>) {
        let f = &self.families;
        f.disk_pages.set(values.pages.cast_signed());
        f.disk_bytes.set(values.bytes.cast_signed());
        f.disk_queued.set(values.queued_bytes.cast_signed());
        let counters = [
            (&f.disk_hits, values.hits),
            (&f.disk_misses, values.misses),
            (&f.disk_written, values.written),
            (&f.disk_dropped, values.dropped),
            (&f.disk_evicted, values.evicted),
            (&f.disk_errors, values.io_errors),
        ];
        for (counter, value) in counters {
            counter.inner().store(value, Ordering::Relaxed);
        }
        for (reason, value) in refused {
            let labels = Labels::one("reason", reason);
            f.disk_refused.get_or_create(&labels).inner().store(value, Ordering::Relaxed);
        }
    }

    /// Sets the gauges of the audit log.
    pub fn set_audit(&self, lost: u64, failures: u64) {
        self.families.audit_lost.set(lost.cast_signed());
        self.families.audit_failures.set(failures.cast_signed());
    }

    pub fn response(&self, status: u16) {
        let class = ["other", "1xx", "2xx", "3xx", "4xx", "5xx"][usize::from(status / 100).min(5)];
        self.families.responses.get_or_create(&Labels::one("class", class)).inc();
    }

    /// All metrics in OpenMetrics text format; the gauges are as last set.
    pub fn openmetrics(&self) -> String {
        let mut text = String::new();
        // writing to a string does not fail
        let _ = encode(&mut text, &self.registry);
        text
    }

    /// All metrics in Prometheus text format 0.0.4.
    pub fn prometheus(&self) -> String {
        to_prometheus(&self.openmetrics())
    }
}

/// The metrics without the series of tenants other than `tenant`.
pub fn of_tenant(text: &str, tenant: &str) -> String {
    let own = format!("{{tenant=\"{}\"}}", tenant.replace('\\', "\\\\").replace('"', "\\\""));
    let is_seen = |line: &&str| !line.starts_with("starling_tenant_") || line.contains(&own);
    text.split_inclusive('\n').filter(is_seen).collect()
}

/// OpenMetrics text to Prometheus text: a counter's `# TYPE` and `# HELP` carry the suffix `_total`, and `# EOF` goes.
fn to_prometheus(text: &str) -> String {
    let mut counters = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("# TYPE ").and_then(|rest| rest.strip_suffix(" counter")) {
            counters.push(name);
        }
    }
    let mut out = String::with_capacity(text.len() + 1024);
    for line in text.lines().filter(|line| *line != "# EOF") {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some(kind), Some(name), Some(rest)) if counters.contains(&name) => {
                out.extend(["# ", kind, " ", name, "_total ", rest]);
            }
            _ => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use starling::kv::KvStats;

    use super::super::model_metrics::Snapshot;
    use super::*;

    fn snapshot() -> Snapshot {
        let kv = KvStats { reserved_bytes: 8, in_use_bytes: 2, ..KvStats::default() };
        Snapshot { depth: [1, 2, 3], texts: 4, held: 1, running: 5, sessions: 6, kv }
    }

    #[test]
    fn both_formats_have_the_same_samples() {
        let m = Metrics::new(Compat::Vllm);
        let model = m.model(&"m".into());
        m.describe_cache("m", 12);
        model.first_token(Duration::from_millis(3));
        model.kv_counted(&KvStats { evictions: 3, ..KvStats::default() }, &KvStats::default());
        model.set(&snapshot());
        let open = m.openmetrics();
        assert!(open.ends_with("# EOF\n"));
        assert!(
            open.contains("# TYPE starling_output_tokens counter\nstarling_output_tokens_total{model_name=\"m\"} 1")
        );
        assert!(open.contains("vllm:num_requests_waiting{model_name=\"m\"} 6\n"));
        assert!(open.contains("block_size=\"16\",num_gpu_blocks=\"12\"} 1\n"), "{open}");
        assert!(open.contains("vllm:kv_cache_usage_perc{model_name=\"m\"} 0.25\n"));
        let old = m.prometheus();
        assert!(!old.contains("# EOF") && old.contains("# TYPE starling_output_tokens_total counter\n"));
        assert!(old.contains("starling_kv_evictions_total{model_name=\"m\"} 3\n"));
        let samples = |text: &str| text.lines().filter(|l| !l.starts_with('#')).map(String::from).collect::<Vec<_>>();
        assert_eq!(samples(&open), samples(&old));
    }

    /// Clients with names of their own cannot fill the memory of whoever scrapes.
    #[test]
    fn the_number_of_tenants_is_bounded() {
        let m = Metrics::new(Compat::None);
        for i in 0..200 {
            m.tenant(&format!("t{i}").into(), 3, 2);
            m.tenant(&"t0".into(), 1, 0);
        }
        let text = m.prometheus();
        assert_eq!(
            text.lines().filter(|line| line.starts_with("starling_tenant_requests_total{")).count(),
            MAX_TENANTS + 1
        );
        assert!(text.contains("starling_tenant_requests_total{tenant=\"(other)\"} 136\n"), "{text}");
        assert!(text.contains("starling_tenant_prompt_tokens_total{tenant=\"t0\"} 203\n"), "{text}");
        assert!(text.contains("starling_tenant_output_tokens_total{tenant=\"t63\"} 2\n"), "{text}");
        let own = of_tenant(&text, "t63");
        let series = own.lines().filter(|line| line.starts_with("starling_tenant_")).count();
        assert_eq!((series, own.matches("tenant=\"t63\"").count()), (3, 3), "{own}");
    }

    /// A worker that is gone leaves no series.
    #[test]
    fn utilisation_is_of_the_workers_there_are() {
        let m = Metrics::new(Compat::None);
        let model = m.model(&"m".into());
        model.set_utilisation(&[(0, 0.5), (1, 1.0)]);
        model.set_utilisation(&[(1, 0.25)]);
        let text = m.prometheus();
        assert!(text.contains("starling_worker_utilisation_ratio{model_name=\"m\",worker=\"1\"} 0.25\n"), "{text}");
        assert!(!text.contains("worker=\"0\""), "{text}");
    }

    #[test]
    fn a_family_is_described_once_for_all_models() {
        let m = Metrics::new(Compat::None);
        let (a, b) = (m.model(&"a".into()), m.model(&"b".into()));
        a.preempted();
        b.preempted();
        let text = m.openmetrics();
        assert_eq!(text.matches("# TYPE starling_preemptions counter").count(), 1);
        assert!(
            ["a", "b"].iter().all(|name| text.contains(&format!("preemptions_total{{model_name=\"{name}\"}} 1\n")))
        );
    }
}
