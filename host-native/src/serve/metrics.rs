//! What is counted, for Prometheus and for `/server/stats`.

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

use super::past::{Past, Rate, Recent};
use super::queue::Failed;
use super::scheduler::Priority;
use super::value::Compat;

/// A label and its value.
type Label = [(&'static str, &'static str); 1];
type Real = Gauge<f64, AtomicU64>;

/// Buckets of vLLM, so that its dashboards fit.
#[rustfmt::skip]
const FIRST: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
];
#[rustfmt::skip]
const NEXT: [f64; 19] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
#[rustfmt::skip]
const WHOLE: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
const SIZES: [f64; 14] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 16384.0];

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The answer ended by itself or at a stop string.
    Stop,
    /// It was as long as it might be.
    Length,
    /// The client went away.
    Cancelled,
    /// It waited or took too long.
    Timeout,
    /// The server ended before it.
    Shutdown,
    /// A fault.
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

/// How things stand when someone asks.
#[derive(Debug, Clone, Copy)]
pub struct Standing {
    /// Requests that wait, by priority.
    pub depth: [usize; 3],
    /// Texts that wait.
    pub texts: usize,
    /// Requests at the engine's door.
    pub held: usize,
    /// Answers being made.
    pub running: usize,
    /// Sessions.
    pub sessions: usize,
    /// Memory of keys and values.
    pub kv: KvStats,
}

/// All counters.
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
    /// Counters at zero, of a model of that name with so many pages of keys and values.
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
            first_token: histogram(&FIRST),
            next_token: histogram(&NEXT),
            whole: histogram(&WHOLE),
            queue_time: histogram(&WHOLE),
            prefill_time: histogram(&WHOLE),
            batch_size: histogram(&SIZES),
            prefill_chunk: histogram(&SIZES),
            step_time: histogram(&FIRST),
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
        // series that are there from the start, so that their growth can be seen
        use Outcome::{Cancelled, Error, Length, Shutdown, Stop, Timeout};
        for outcome in [Stop, Length, Cancelled, Timeout, Shutdown, Error] {
            drop(m.requests.get_or_create(&[("outcome", outcome.name())]));
        }
        m
    }

    fn register(&mut self) {
        let r = self.registry.sub_registry_with_prefix("starling");
        r.register("requests", "Requests by how they ended", self.requests.clone());
        r.register("rejected", "Requests that were not let in, by reason", self.rejected.clone());
        r.register("http_responses", "Responses by class of status", self.responses.clone());
        r.register("queue_depth", "Requests that wait, by priority", self.depth.clone());
        r.register("queue_texts", "Texts that wait to be embedded", self.texts_waiting.clone());
        r.register("requests_waiting", "Requests that wait, at the engine's door too", self.waiting.clone());
        r.register("requests_running", "Answers being made", self.running.clone());
        r.register("sessions", "Open sessions", self.sessions.clone());
        r.register("time_to_first_token_seconds", "From the request to its first token", self.first_token.clone());
        r.register("inter_token_latency_seconds", "From a token to the next", self.next_token.clone());
        r.register("e2e_request_latency_seconds", "From the request to the end of its answer", self.whole.clone());
        r.register("request_queue_time_seconds", "From the request to its start", self.queue_time.clone());
        r.register(
            "request_prefill_time_seconds",
            "From the start to the end of the prompt",
            self.prefill_time.clone(),
        );
        r.register("step_batch_size", "Answers in a step", self.batch_size.clone());
        r.register("step_prefill_tokens", "Tokens of prompts in a step that has some", self.prefill_chunk.clone());
        r.register("step_seconds", "Time of a step", self.step_time.clone());
        r.register("prompt_tokens", "Tokens of prompts, cached ones included", self.prompt_tokens.clone());
        r.register("output_tokens", "Tokens of answers", self.output_tokens.clone());
        r.register("embedded_texts", "Texts embedded", self.texts.clone());
        r.register("embedded_tokens", "Tokens of texts embedded", self.text_tokens.clone());
        r.register("kv_bytes", "Memory of keys and values, by state", self.kv_bytes.clone());
        r.register("kv_usage_ratio", "Share of that memory that answers hold", self.kv_usage.clone());
        r.register("kv_evictions", "Cached pages given away", self.evictions.clone());
        r.register("preemptions", "Times an answer gave its memory to older ones", self.preemptions.clone());
        r.register("prefix_cache_queries", "Tokens of prompts looked for in the cache", self.queries.clone());
        r.register("prefix_cache_hits", "Tokens of prompts found there", self.hits.clone());
    }

    fn register_vllm(&mut self, n_pages: usize) {
        let info = Family::<[(&'static str, String); 2], Gauge>::default();
        info.get_or_create(&[("block_size", PAGE.to_string()), ("num_gpu_blocks", n_pages.to_string())]).set(1);
        let r = &mut self.registry;
        r.register("vllm:num_requests_running", "Answers being made", self.running.clone());
        r.register("vllm:num_requests_waiting", "Requests that wait", self.waiting.clone());
        r.register("vllm:kv_cache_usage_perc", "Share of pages that answers hold, from 0 to 1", self.kv_usage.clone());
        r.register("vllm:num_preemptions", "Times an answer gave its memory to older ones", self.preemptions.clone());
        r.register("vllm:cache_config_info", "Pages of keys and values", info);
        r.register("vllm:prefix_cache_queries", "Tokens looked for in the cache", self.queries.clone());
        r.register("vllm:prefix_cache_hits", "Tokens found there", self.hits.clone());
        r.register("vllm:prompt_tokens", "Tokens of prompts", self.prompt_tokens.clone());
        r.register("vllm:generation_tokens", "Tokens of answers", self.output_tokens.clone());
        r.register("vllm:time_to_first_token_seconds", "To the first token", self.first_token.clone());
        r.register("vllm:inter_token_latency_seconds", "From a token to the next", self.next_token.clone());
        r.register("vllm:e2e_request_latency_seconds", "From request to end", self.whole.clone());
        r.register("vllm:request_queue_time_seconds", "From request to start", self.queue_time.clone());
    }

    /// All of it, in OpenMetrics.
    pub fn openmetrics(&self, now: &Standing) -> String {
        for priority in Priority::ALL {
            self.depth.get_or_create(&[("priority", priority.name())]).set(now.depth[priority.index()] as i64);
        }
        let waiting = now.depth.iter().sum::<usize>() + now.held;
        self.texts_waiting.set(now.texts as i64);
        self.waiting.set(waiting as i64);
        self.running.set(now.running as i64);
        self.sessions.set(now.sessions as i64);
        let kv = &now.kv;
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
        // the arena counts for itself; counters only go up
        self.evictions.inc_by(kv.evictions.saturating_sub(self.evictions.get()));
        let mut text = String::new();
        // writing to a string does not fail
        let _ = encode(&mut text, &self.registry);
        text
    }

    /// All of it, in the text format that Prometheus had before.
    pub fn prometheus(&self, now: &Standing) -> String {
        to_prometheus(&self.openmetrics(now))
    }

    /// Requests that ended so.
    pub fn outcomes(&self, outcome: Outcome, n: usize) {
        self.requests.get_or_create(&[("outcome", outcome.name())]).inc_by(n as u64);
    }

    /// A request that ended without an answer.
    pub fn failed(&self, why: &Failed) {
        let outcome = match why {
            Failed::QueueTimeout(_) | Failed::Timeout(_) => Outcome::Timeout,
            Failed::Shutdown => Outcome::Shutdown,
            Failed::Request(_) => Outcome::Error,
        };
        self.outcomes(outcome, 1);
    }

    /// A request that was not let in.
    pub fn rejected(&self, reason: &'static str) {
        self.rejected.get_or_create(&[("reason", reason)]).inc();
    }

    /// A response.
    pub fn response(&self, status: u16) {
        let class = ["other", "1xx", "2xx", "3xx", "4xx", "5xx"][usize::from(status / 100).min(5)];
        self.responses.get_or_create(&[("class", class)]).inc();
    }

    /// A request left the queue.
    pub fn queue_time(&self, time: Duration) {
        self.queue_time.observe(time.as_secs_f64());
    }

    /// A prompt was processed.
    pub fn prefilled(&self, n_prompt: usize, n_cached: usize, time: Duration) {
        self.prompt_tokens.inc_by(n_prompt as u64);
        self.queries.inc_by(n_prompt as u64);
        self.hits.inc_by(n_cached as u64);
        self.prefill_time.observe(time.as_secs_f64());
    }

    /// The first token of an answer.
    pub fn first_token(&self, time: Duration) {
        self.count_token();
        self.recent[0].add(time);
        self.first_token.observe(time.as_secs_f64());
    }

    /// Another token.
    pub fn next_token(&self, time: Duration) {
        self.count_token();
        self.recent[1].add(time);
        self.next_token.observe(time.as_secs_f64());
    }

    fn count_token(&self) {
        self.output_tokens.inc();
        self.rate.add(1);
    }

    /// The end of an answer.
    pub fn done(&self, reason: FinishReason, _n_tokens: usize, time: Duration) {
        let outcome = match reason {
            FinishReason::StopToken(_) | FinishReason::StopString(_) | FinishReason::Complete => Outcome::Stop,
            FinishReason::Length => Outcome::Length,
            FinishReason::NotFinite | FinishReason::NoMemory | FinishReason::Constraint(_) => Outcome::Error,
        };
        self.outcomes(outcome, 1);
        self.recent[2].add(time);
        self.whole.observe(time.as_secs_f64());
    }

    /// A step of `n` answers, with `prefill` tokens of prompts.
    pub fn step(&self, n: usize, prefill: usize, time: Duration) {
        self.batch_size.observe(n as f64);
        if prefill > 0 {
            self.prefill_chunk.observe(prefill as f64);
        }
        self.step_time.observe(time.as_secs_f64());
    }

    /// An answer gave up its memory.
    pub fn preempted(&self) {
        self.preemptions.inc();
    }

    /// A batch of texts.
    pub fn embedded(&self, texts: usize, tokens: usize) {
        self.texts.inc_by(texts as u64);
        self.text_tokens.inc_by(tokens as u64);
    }

    /// What `/server/stats` says of the past.
    pub fn past(&self) -> Past {
        let [first, next, whole] = &self.recent;
        Past {
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

/// OpenMetrics in the older format: a counter's family has the name of its samples, and there is no end mark.
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
        let (mark, kind, name, rest) = (words.next(), words.next(), words.next(), words.next());
        match (mark, kind, name, rest) {
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

    fn standing() -> Standing {
        let kv = KvStats { reserved_bytes: 8, in_use_bytes: 2, evictions: 3, ..KvStats::default() };
        Standing { depth: [1, 2, 3], texts: 4, held: 1, running: 5, sessions: 6, kv }
    }

    #[test]
    fn both_formats_say_the_same() {
        let m = Metrics::new("m", Compat::Vllm, 12);
        m.first_token(Duration::from_millis(3));
        let open = m.openmetrics(&standing());
        assert!(open.ends_with("# EOF\n"));
        assert!(
            open.contains("# TYPE starling_output_tokens counter\nstarling_output_tokens_total{model_name=\"m\"} 1")
        );
        assert!(open.contains("vllm:num_requests_waiting{model_name=\"m\"} 7\n"));
        assert!(open.contains("block_size=\"16\",num_gpu_blocks=\"12\"} 1\n"), "{open}");
        assert!(open.contains("vllm:kv_cache_usage_perc{model_name=\"m\"} 0.25\n"));
        let old = m.prometheus(&standing());
        assert!(!old.contains("# EOF") && old.contains("# TYPE starling_output_tokens_total counter\n"));
        assert!(old.contains("starling_kv_evictions_total{model_name=\"m\"} 3\n"));
        let samples = |text: &str| text.lines().filter(|l| !l.starts_with('#')).map(String::from).collect::<Vec<_>>();
        assert_eq!(samples(&open), samples(&old));
    }
}
