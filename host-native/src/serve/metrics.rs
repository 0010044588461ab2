//! Counters, gauges and histograms of `/metrics` and `/server/stats`.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use starling::engine::FinishReason;
use starling::kernels::attention::PAGE;
use starling::kv::KvStats;

use super::queue::Failed;
use super::scheduler::Priority;
use super::stats::{Rate, Recent, Totals};
use super::value::Compat;

type Label = [(&'static str, &'static str); 1];
type Real = Gauge<f64, AtomicU64>;

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
#[derive(Debug, Clone, Copy)]
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

pub struct Metrics {
    registry: Registry,
    requests: Family<Label, Counter>,
    rejected: Family<Label, Counter>,
    responses: Family<Label, Counter>,
    depth: Family<Label, Gauge>,
    texts_waiting: Gauge,
    waiting: Gauge,
    running: Gauge,
    sessions: Gauge,
    first_token: Histogram,
    next_token: Histogram,
    whole: Histogram,
    queue_time: Histogram,
    prefill_time: Histogram,
    batch_size: Histogram,
    prefill_chunk: Histogram,
    step_time: Histogram,
    prompt_tokens: Counter,
    output_tokens: Counter,
    texts: Counter,
    text_tokens: Counter,
    kv_bytes: Family<Label, Gauge>,
    kv_usage: Real,
    evictions: Counter,
    preemptions: Counter,
    queries: Counter,
    hits: Counter,
    recent: [Recent; 3],
    rate: Rate,
}

impl Metrics {
    /// `model` is the label of all series; `n_pages` the size of the KV cache.
    pub fn new(model: &str, compat: Compat, n_pages: usize) -> Metrics {
        let histogram = |buckets: &[f64]| Histogram::new(buckets.iter().copied());
        let mut m = Metrics {
            registry: Registry::with_labels([("model_name".into(), model.to_string().into())].into_iter()),
            requests: Family::default(),
            rejected: Family::default(),
            responses: Family::default(),
            depth: Family::default(),
            texts_waiting: Gauge::default(),
            waiting: Gauge::default(),
            running: Gauge::default(),
            sessions: Gauge::default(),
            first_token: histogram(&FIRST_TOKEN_BUCKETS),
            next_token: histogram(&INTER_TOKEN_BUCKETS),
            whole: histogram(&REQUEST_BUCKETS),
            queue_time: histogram(&REQUEST_BUCKETS),
            prefill_time: histogram(&REQUEST_BUCKETS),
            batch_size: histogram(&SIZE_BUCKETS),
            prefill_chunk: histogram(&SIZE_BUCKETS),
            step_time: histogram(&FIRST_TOKEN_BUCKETS),
            prompt_tokens: Counter::default(),
            output_tokens: Counter::default(),
            texts: Counter::default(),
            text_tokens: Counter::default(),
            kv_bytes: Family::default(),
            kv_usage: Real::default(),
            evictions: Counter::default(),
            preemptions: Counter::default(),
            queries: Counter::default(),
            hits: Counter::default(),
            recent: Default::default(),
            rate: Rate::default(),
        };
        m.register();
        if compat == Compat::Vllm {
            m.register_vllm(n_pages);
        }
        // Prometheus computes rates only of series that exist before their first increase
        use Outcome::{Cancelled, Error, Length, Shutdown, Stop, Timeout};
        for outcome in [Stop, Length, Cancelled, Timeout, Shutdown, Error] {
            drop(m.requests.get_or_create(&[("outcome", outcome.name())]));
        }
        m
    }

    fn register(&mut self) {
        let r = self.registry.sub_registry_with_prefix("starling");
        r.register("requests", "Finished requests by outcome", self.requests.clone());
        r.register("rejected", "Requests refused before the queue, by reason", self.rejected.clone());
        r.register("http_responses", "HTTP responses by status class", self.responses.clone());
        r.register("queue_depth", "Queued requests by priority", self.depth.clone());
        r.register("queue_texts", "Queued texts to embed", self.texts_waiting.clone());
        r.register(
            "requests_waiting",
            "Queued requests, including those admitted but waiting for KV pages",
            self.waiting.clone(),
        );
        r.register("requests_running", "Requests in the engine's batch", self.running.clone());
        r.register("sessions", "Open sessions", self.sessions.clone());
        r.register(
            "time_to_first_token_seconds",
            "Time from request arrival to its first token",
            self.first_token.clone(),
        );
        r.register(
            "inter_token_latency_seconds",
            "Time between consecutive tokens of a request",
            self.next_token.clone(),
        );
        r.register("e2e_request_latency_seconds", "Time from request arrival to its last token", self.whole.clone());
        r.register(
            "request_queue_time_seconds",
            "Time from request arrival to its admission to the engine",
            self.queue_time.clone(),
        );
        r.register(
            "request_prefill_time_seconds",
            "Time from admission to the end of prefill",
            self.prefill_time.clone(),
        );
        r.register("step_batch_size", "Requests in an engine step", self.batch_size.clone());
        r.register(
            "step_prefill_tokens",
            "Prompt tokens in an engine step, where there are any",
            self.prefill_chunk.clone(),
        );
        r.register("step_seconds", "Duration of an engine step", self.step_time.clone());
        r.register(
            "prompt_tokens",
            "Prompt tokens, including those found in the prefix cache",
            self.prompt_tokens.clone(),
        );
        r.register("output_tokens", "Generated tokens", self.output_tokens.clone());
        r.register("embedded_texts", "Embedded texts", self.texts.clone());
        r.register("embedded_tokens", "Tokens of embedded texts", self.text_tokens.clone());
        r.register("kv_bytes", "KV cache memory by state, in bytes", self.kv_bytes.clone());
        r.register("kv_usage_ratio", "Share of the KV cache held by running requests, 0 to 1", self.kv_usage.clone());
        r.register("kv_evictions", "KV pages evicted from the prefix cache", self.evictions.clone());
        r.register("preemptions", "Requests preempted for lack of KV pages", self.preemptions.clone());
        r.register("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", self.queries.clone());
        r.register("prefix_cache_hits", "Prompt tokens found in the prefix cache", self.hits.clone());
    }

    fn register_vllm(&mut self, n_pages: usize) {
        let info = Family::<[(&'static str, String); 2], Gauge>::default();
        info.get_or_create(&[("block_size", PAGE.to_string()), ("num_gpu_blocks", n_pages.to_string())]).set(1);
        let r = &mut self.registry;
        r.register("vllm:num_requests_running", "Requests in the engine's batch", self.running.clone());
        r.register(
            "vllm:num_requests_waiting",
            "Queued requests, including those admitted but waiting for KV pages",
            self.waiting.clone(),
        );
        r.register(
            "vllm:kv_cache_usage_perc",
            "Share of the KV cache held by running requests, 0 to 1",
            self.kv_usage.clone(),
        );
        r.register("vllm:num_preemptions", "Requests preempted for lack of KV pages", self.preemptions.clone());
        r.register("vllm:cache_config_info", "KV cache configuration: page size in tokens, number of pages", info);
        r.register("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", self.queries.clone());
        r.register("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", self.hits.clone());
        r.register(
            "vllm:prompt_tokens",
            "Prompt tokens, including those found in the prefix cache",
            self.prompt_tokens.clone(),
        );
        r.register("vllm:generation_tokens", "Generated tokens", self.output_tokens.clone());
        r.register(
            "vllm:time_to_first_token_seconds",
            "Time from request arrival to its first token",
            self.first_token.clone(),
        );
        r.register(
            "vllm:inter_token_latency_seconds",
            "Time between consecutive tokens of a request",
            self.next_token.clone(),
        );
        r.register(
            "vllm:e2e_request_latency_seconds",
            "Time from request arrival to its last token",
            self.whole.clone(),
        );
        r.register(
            "vllm:request_queue_time_seconds",
            "Time from request arrival to its admission to the engine",
            self.queue_time.clone(),
        );
    }

    /// All metrics in OpenMetrics text format.
    pub fn openmetrics(&self, snapshot: &Snapshot) -> String {
        for priority in Priority::ALL {
            self.depth.get_or_create(&[("priority", priority.name())]).set(snapshot.depth[priority.index()] as i64);
        }
        let waiting = snapshot.depth.iter().sum::<usize>();
        self.texts_waiting.set(snapshot.texts as i64);
        self.waiting.set(waiting as i64);
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
            self.kv_bytes.get_or_create(&[("state", state)]).set(bytes as i64);
        }
        self.kv_usage.set(kv.in_use_bytes as f64 / kv.reserved_bytes.max(1) as f64);
        // the KV arena has its own counter; this adds what is new
        self.evictions.inc_by(kv.evictions.saturating_sub(self.evictions.get()));
        let mut text = String::new();
        // writing to a string does not fail
        let _ = encode(&mut text, &self.registry);
        text
    }

    /// All metrics in Prometheus text format 0.0.4.
    pub fn prometheus(&self, snapshot: &Snapshot) -> String {
        to_prometheus(&self.openmetrics(snapshot))
    }

    pub fn outcomes(&self, outcome: Outcome, n: usize) {
        self.requests.get_or_create(&[("outcome", outcome.name())]).inc_by(n as u64);
    }

    /// Counts a request that failed, by outcome.
    pub fn failed(&self, failed: &Failed) {
        let outcome = match failed {
            Failed::QueueTimeout(_) | Failed::Timeout(_) => Outcome::Timeout,
            Failed::Shutdown => Outcome::Shutdown,
            Failed::Request(_) => Outcome::Error,
        };
        self.outcomes(outcome, 1);
    }

    pub fn rejected(&self, reason: &'static str) {
        self.rejected.get_or_create(&[("reason", reason)]).inc();
    }

    pub fn response(&self, status: u16) {
        let class = ["other", "1xx", "2xx", "3xx", "4xx", "5xx"][usize::from(status / 100).min(5)];
        self.responses.get_or_create(&[("class", class)]).inc();
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

    pub fn preempted(&self) {
        self.preemptions.inc();
    }

    pub fn embedded(&self, texts: usize, tokens: usize) {
        self.texts.inc_by(texts as u64);
        self.text_tokens.inc_by(tokens as u64);
    }

    pub fn totals(&self) -> Totals {
        let [first, next, whole] = &self.recent;
        Totals {
            prompt_tokens: self.prompt_tokens.get(),
            cached_tokens: self.hits.get(),
            output_tokens: self.output_tokens.get(),
            embedded_texts: self.texts.get(),
            output_tokens_per_second: self.rate.per_second(),
            time_to_first_token: first.percentiles(),
            inter_token_latency: next.percentiles(),
            request_latency: whole.percentiles(),
        }
    }
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
    use super::*;

    fn snapshot() -> Snapshot {
        let kv = KvStats { reserved_bytes: 8, in_use_bytes: 2, evictions: 3, ..KvStats::default() };
        Snapshot { depth: [1, 2, 3], texts: 4, held: 1, running: 5, sessions: 6, kv }
    }

    #[test]
    fn both_formats_have_the_same_samples() {
        let m = Metrics::new("m", Compat::Vllm, 12);
        m.first_token(Duration::from_millis(3));
        let open = m.openmetrics(&snapshot());
        assert!(open.ends_with("# EOF\n"));
        assert!(
            open.contains("# TYPE starling_output_tokens counter\nstarling_output_tokens_total{model_name=\"m\"} 1")
        );
        assert!(open.contains("vllm:num_requests_waiting{model_name=\"m\"} 6\n"));
        assert!(open.contains("block_size=\"16\",num_gpu_blocks=\"12\"} 1\n"), "{open}");
        assert!(open.contains("vllm:kv_cache_usage_perc{model_name=\"m\"} 0.25\n"));
        let old = m.prometheus(&snapshot());
        assert!(!old.contains("# EOF") && old.contains("# TYPE starling_output_tokens_total counter\n"));
        assert!(old.contains("starling_kv_evictions_total{model_name=\"m\"} 3\n"));
        let samples = |text: &str| text.lines().filter(|l| !l.starts_with('#')).map(String::from).collect::<Vec<_>>();
        assert_eq!(samples(&open), samples(&old));
    }
}
