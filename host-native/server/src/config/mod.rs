//! Server settings: one table, read from flags, environment variables and a file, in this order of precedence.

mod file;
mod layers;
mod live;
pub mod value;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use starling::structure::Limits;
use starling_api::output::SyntaxNames;

pub use file::{SettingsFile, plain};
pub use layers::{Configuration, ModelEntry, ServeOptions};
pub use live::Live;
use value::{Affinity, Bytes, Compat, LoadPolicy, LogFormat, Strategy, Value};

/// Tenant of requests to a server without API keys.
pub const ANYONE: &str = "default";
/// Default of `draft-max`.
pub const DRAFT_MAX: u16 = 8;
/// Default of `draft-min-acceptance`.
pub const DRAFT_MIN_ACCEPTANCE: f32 = 0.3;

pub struct Setting {
    /// Name in the file; the flag is `--queue-high`, the environment variable `STARLING_QUEUE_HIGH`.
    pub key: &'static str,
    /// Placeholder of the value in `--help`.
    pub value_name: &'static str,
    pub help: &'static str,
    /// Whether models may differ in it: a key of `[models.NAME]` too.
    pub is_per_model: bool,
    pub set: fn(&mut Settings, &str) -> Result<(), String>,
    pub get: fn(&Settings) -> Option<String>,
    /// Copies the value.
    pub copy: fn(&Settings, &mut Settings),
}

macro_rules! settings {
    ($($field:ident $key:literal $kind:ty = $default:expr, $value_name:literal $(in $range:expr)?,
        $help:literal $(per $scope:ident)?;)*) => {
        #[derive(Debug, Clone)]
        pub struct Settings {
            $(#[doc = $help] pub $field: $kind,)*
        }

        impl Default for Settings {
            fn default() -> Self {
                Settings { $($field: $default,)* }
            }
        }

        /// All settings, in the order of `--help`.
        pub static TABLE: &[Setting] = &[$(Setting {
            key: $key,
            value_name: $value_name,
            help: $help,
            is_per_model: [$(stringify!($scope),)? ""].len() > 1,
            set: |settings, text| {
                let value = <$kind as Value>::read(text)?;
                $(value.within($range)?;)?
                settings.$field = value;
                Ok(())
            },
            get: |settings| settings.$field.show(),
            copy: |from, to| to.$field.clone_from(&from.$field),
        },)*];
    };
}

settings! {
    host "host" String = "127.0.0.1".into(), "ADDRESS", "Address to listen on; other than a loopback address, it needs API keys or --allow-no-key";
    port "port" u16 = 8080, "N", "TCP port to listen on; 0: any free port, printed to standard output";
    model_name "model-name" Option<String> = None, "NAME", "Model name in the API [default: the file name without .gguf]";
    models_dir "models-dir" Option<PathBuf> = None, "DIR", "Serve every GGUF file of this directory under its file name, loaded on demand; new files are found while the server runs";
    memory "memory" Option<Bytes> = None, "BYTES", "Memory for weights and KV caches of all models; an idle model is unloaded if a requested one needs its memory [default: the memory available at the start]";
    autoload "autoload" bool = true, "BOOL", "Load a model when a request names it; otherwise only /admin/models and /models/load do";
    load_wait "load-wait" Duration = Duration::from_secs(60), "SECONDS" in 0.0..=86_400.0, "Maximum time that a request waits for its model to load, in seconds; then it fails with status 503 and Retry-After; 0: at once";
    load_queue "load-queue" usize = 64, "N" in 0.0..=65_536.0, "Maximum requests that wait for one model to load; further ones fail with status 503";
    load "load" Option<LoadPolicy> = None, "WHEN", "When to load a model: startup or on-demand [default: startup, on-demand in models-dir]" per model;
    pin "pin" bool = false, "BOOL", "Never unload the model to make room for another, nor when it is idle" per model;
    idle_timeout "idle-timeout" Option<Duration> = None, "SECONDS" in 0.0..=604_800.0, "Time without requests after which a model is unloaded, in seconds; its name stays [default: never]" per model;
    weight "weight" u32 = 1, "N" in 0.0..=1_000_000.0, "Share of requests for NAME that this version NAME@VERSION gets, relative to the other versions; 0: none" per model;
    share "share" u32 = 1, "N" in 1.0..=1000.0, "Share of compute time of this model, relative to the other models" per model;
    workers "workers" usize = 0, "N" in 0.0..=64.0, "Workers of the model, each an engine with a KV cache of its own over the same weights; 0: one per NUMA node, on its CPUs" per model;
    cpu_affinity "cpu-affinity" Affinity = Affinity::default(), "CPUS", "CPUs of the model's threads, such as 0-7; lists for several workers are separated by `/`, as in 0-7/8-15 [default: any]" per model;
    strategy "strategy" Strategy = Strategy::PrefixAware, "NAME", "How a worker is chosen for a request: round-robin, least-loaded, memory-aware (most free KV pages), or prefix-aware (longest cached prefix, then load)" per model;
    aliases "aliases" Vec<String> = Vec::new(), "NAMES", "Further names of the model in the API, comma-separated" per model;
    breaker_faults "breaker-faults" usize = 5, "N" in 0.0..=1000.0, "Number of worker failures and missed deadlines within breaker-window after which requests to the model are refused with status 503: of the tenant whose requests caused them, or of all if no one tenant did; 0: never" per model;
    breaker_window "breaker-window" Duration = Duration::from_secs(60), "SECONDS" in 0.1..=86_400.0, "Period over which breaker-faults are counted, in seconds" per model;
    breaker_open "breaker-open" Duration = Duration::from_secs(30), "SECONDS" in 0.1..=86_400.0, "Time after which a request may try a model again that breaker-faults has stopped, in seconds" per model;
    memory_pressure "memory-pressure" bool = true, "BOOL", "React to memory pressure of the control group or the machine: smaller batches, eviction, unloading of idle models, then refusal of requests below high priority";
    admin_key_file "admin-key-file" Option<PathBuf> = None, "FILE", "File of administrators' keys, one per line, in the form of api-key-file: the key, then optionally a name; without it there is no /admin interface";
    admin_listen "admin-listen" Option<String> = None, "ADDRESS", "Address and port of a separate listener for /admin, such as 127.0.0.1:9090 [default: the public listener]";
    manage_without_keys "manage-without-keys" bool = false, "BOOL", "Let clients on this machine add, remove and unload models by the paths of Ollama and llama-server if the server has no keys; requests that a proxy has forwarded, and those of pages of other origins, may not";
    watch_config "watch-config" bool = false, "BOOL", "Reload the settings file when it changes, as on SIGHUP";
    fault_injection "fault-injection" bool = false, "BOOL", "Let administrators make workers fail, to test failover";
    chat_template "chat-template" Option<String> = None, "NAME|FILE", "Chat template: the name of a built-in one, or a file [default: the model's own, else chatml]" per model;
    tool_call_format "tool-call-format" String = "auto".into(), "NAME", "Syntax of tool calls in answers: auto (by the chat template), none (they are content), or a name such as hermes, mistral or llama3" per model;
    reasoning_format "reasoning-format" String = "auto".into(), "NAME", "Syntax of reasoning in answers: auto (by the chat template), none (it is content), or a name such as think or mistral" per model;
    ctx_size "ctx-size" Option<usize> = None, "N" in 1.0..=16_777_216.0, "Context size in tokens, prompt and output together [default: the model's training context, at most 8192]" per model;
    max_seqs "max-seqs" usize = 32, "N" in 1.0..=1024.0, "Sequences that run in one batch; further requests wait in the queue" per model;
    batch_tokens "batch-tokens" usize = 128, "N" in 1.0..=65_536.0, "Maximum tokens of an engine step, at least max-seqs; longer prompts are processed in several steps" per model;
    prefill_chunk "prefill-chunk" usize = 24, "N" in 1.0..=65_536.0, "Maximum prompt tokens of a step that also decodes; a larger chunk shortens the time to first token and lengthens the time between tokens of other requests" per model;
    draft_max "draft-max" usize = DRAFT_MAX.into(), "N" in 0.0..=64.0, "Maximum draft tokens of a request per step, taken from its prediction, prompt and answer, or from the draft model; changes the speed, not the output; 0: off" per model;
    draft_min_acceptance "draft-min-acceptance" f32 = DRAFT_MIN_ACCEPTANCE, "X" in 0.0..=1.0, "Minimum share of draft tokens expected to be accepted; fewer tokens are drafted if it would be lower" per model;
    draft_model "draft-model" Option<PathBuf> = None, "MODEL", "Smaller model with the same vocabulary, as --model takes it, which drafts tokens that prompt and answer do not predict" per model;
    draft_mtp "draft-mtp" bool = false, "BOOL", "Draft with the layer of the model file for multi-token prediction (MTP, NextN) where prompt and answer do not suffice; a file without one is an error" per model;
    embed_tokens "embed-tokens" usize = 2048, "N" in 1.0..=1_048_576.0, "Maximum tokens of a batch of texts to embed, and of one such text" per model;
    kv_memory "kv-memory" Option<Bytes> = None, "BYTES", "KV cache size, recurrent states included, e.g. 512MiB or 4GiB [default: full contexts for max-seqs sequences, at most half of the memory left beside the weights]" per model;
    snapshot_memory "snapshot-memory" Option<Bytes> = None, "BYTES", "Part of kv-memory for snapshots of recurrent states, from which prompts with a known prefix continue; 0: none. Only for models with recurrent layers [default: room for one per snapshot-interval]" per model;
    snapshot_interval "snapshot-interval" Option<usize> = None, "N" in 16.0..=16_777_216.0, "Tokens of a long prompt from one snapshot of recurrent states to the next, rounded up to a multiple of 16 [default: as many as take the memory of a snapshot, from 128 to 2048]" per model;
    temperature "temperature" Option<f32> = None, "T" in 0.0..=2.0, "Sampling temperature of requests that give none [default: the model file's, else 1]" per model;
    top_k "top-k" Option<u32> = None, "N", "top_k of requests that give none; 0: all tokens [default: the model file's, else 0]" per model;
    top_p "top-p" Option<f32> = None, "P" in 0.0..=1.0, "top_p of requests that give none [default: the model file's, else 1]" per model;
    min_p "min-p" Option<f32> = None, "P" in 0.0..=1.0, "min_p of requests that give none [default: the model file's, else 0]" per model;
    repetition_penalty "repetition-penalty" Option<f32> = None, "X" in 0.01..=100.0, "repetition_penalty of requests that give none [default: the model file's, else 1]" per model;
    seed "seed" Option<u64> = None, "N", "Sampling seed of requests that give none [default: random for each request]" per model;
    queue_high "queue-high" usize = 256, "N" in 1.0..=1_000_000.0, "High watermark: queued requests at which new ones are refused with status 429" per model;
    queue_low "queue-low" Option<usize> = None, "N" in 0.0..=1_000_000.0, "Low watermark: queued requests at which new ones are accepted again; at most queue-high [default: three quarters of queue-high]" per model;
    queue_timeout "queue-timeout" Duration = Duration::from_secs(120), "SECONDS" in 0.001..=86_400.0, "Maximum time of a request in the queue, in seconds; then it fails with status 503" per model;
    request_timeout "request-timeout" Duration = Duration::from_secs(900), "SECONDS" in 0.001..=604_800.0, "Maximum time of a request, queue included, in seconds; then it fails with status 504" per model;
    drain_timeout "drain-timeout" Duration = Duration::from_secs(30), "SECONDS" in 0.0..=86_400.0, "Time for running requests to finish after SIGTERM, in seconds; 0 ends them at once";
    tenant_requests "tenant-requests" usize = 0, "N" in 0.0..=1_000_000.0, "Maximum requests of a tenant, queued and running; 0: no limit" per model;
    tenant_tokens "tenant-tokens" usize = 0, "N" in 0.0..=1e12, "Maximum tokens of a tenant's queued requests, prompt and max_tokens together; 0: no limit" per model;
    max_prompt "max-prompt" usize = 0, "N" in 0.0..=16_777_216.0, "Maximum tokens of a prompt; 0: what fits the context" per model;
    max_tokens "max-tokens" usize = 0, "N" in 0.0..=16_777_216.0, "Maximum tokens of an answer: larger values of max_tokens are cut to it; 0: what fits the context" per model;
    max_n "max-n" usize = 16, "N" in 1.0..=128.0, "Maximum of n in a request, the answers to one prompt" per model;
    max_grammar "max-grammar" Bytes = Bytes(Limits::DEFAULT.bytes as u64), "BYTES" in 1.0..=1_048_576.0, "Maximum size of a JSON schema, regular expression or grammar in a request, in bytes" per model;
    grammar_items "grammar-items" usize = Limits::DEFAULT.items, "N" in 1000.0..=1e8, "Maximum grammar parser items per output token; the request fails beyond it. All requests wait for the parser, so this bounds how long one can delay the others" per model;
    max_inputs "max-inputs" usize = 2048, "N" in 1.0..=65_536.0, "Maximum texts of an embedding request, or prompts of a completion request" per model;
    session_ttl "session-ttl" Duration = Duration::from_secs(1800), "SECONDS" in 0.1..=604_800.0, "Time without use after which a session is closed, in seconds" per model;
    max_sessions "max-sessions" usize = 1024, "N" in 1.0..=1_000_000.0, "Maximum open sessions; a new one closes the least recently used idle one" per model;
    session_memory "session-memory" Bytes = Bytes(4 << 20), "BYTES" in 1024.0..=1.1e12, "Maximum memory of one session for messages and tokens, in bytes; a turn that needs more is refused" per model;
    sessions_memory "sessions-memory" Bytes = Bytes(256 << 20), "BYTES" in 1024.0..=1.1e12, "Maximum memory of all sessions for messages and tokens, in bytes; the least recently used idle ones are closed" per model;
    state_dir "state-dir" Option<PathBuf> = None, "DIR", "Keep sessions, and answers of requests with store: true, in this directory, so that they outlive the process [default: none]";
    state_key_file "state-key-file" Option<PathBuf> = None, "FILE", "Key that encrypts state-dir, 64 hexadecimal digits [default: it is not encrypted]";
    stored_answers_ttl "stored-answers-ttl" Duration = Duration::from_secs(30 * 86_400), "SECONDS" in 0.1..=3.2e9, "Time after which an answer in state-dir is removed, in seconds";
    stored_answers_size "stored-answers-size" Bytes = Bytes(64 << 20), "BYTES" in 0.0..=1.1e12, "Maximum size of a tenant's answers in state-dir, in bytes; the oldest are removed";
    response_cache "response-cache" Bytes = Bytes(0), "BYTES" in 0.0..=1.1e12, "Memory for a cache of answers: repeated requests with a seed or temperature 0 get the cached answer; 0: off";
    response_cache_disk "response-cache-disk" Option<PathBuf> = None, "DIR", "Keep such answers in this directory too, so that they are used again after a restart or when memory is short [default: none]";
    response_cache_disk_size "response-cache-disk-size" Bytes = Bytes(1 << 30), "BYTES" in 0.0..=1.1e15, "Maximum size of the files in response-cache-disk, in bytes; the least recently used answers are removed";
    share_identical "share-identical" bool = false, "BOOL", "Compute simultaneous identical requests of a tenant once, if they have a seed or temperature 0";
    embedding_cache "embedding-cache" Bytes = Bytes(0), "BYTES" in 0.0..=1.1e12, "Memory for a cache of embeddings; 0: off";
    resume_window "resume-window" Duration = Duration::ZERO, "SECONDS" in 0.0..=86_400.0, "Time in which a client may resume an interrupted stream with the header Last-Event-ID, in seconds; the answer is generated meanwhile; 0: off, the answer ends when the client disconnects";
    idempotency_window "idempotency-window" Duration = Duration::from_secs(600), "SECONDS" in 0.0..=86_400.0, "Time in which a request with the same Idempotency-Key gets the response of the first, in seconds; 0: the header is ignored";
    refuse_unknown_fields "refuse-unknown-fields" bool = false, "BOOL", "Refuse a request with a field that no endpoint knows with status 400; otherwise the response header x-starling-ignored-fields names it";
    max_body "max-body" Bytes = Bytes(8 << 20), "BYTES" in 1.0..=1.1e9, "Maximum size of a request body, in bytes; a larger one gets status 413";
    max_header "max-header" Bytes = Bytes(32 << 10), "BYTES" in 8192.0..=1_048_576.0, "Maximum size of a request's headers, in bytes";
    header_timeout "header-timeout" Duration = Duration::from_secs(15), "SECONDS" in 0.001..=3600.0, "Time for a request's headers, for a TLS handshake, and for a connection without a request in progress, in seconds; then the connection is closed";
    body_timeout "body-timeout" Duration = Duration::from_secs(30), "SECONDS" in 0.001..=3600.0, "Time for a request body, in seconds; then the request fails with status 408";
    body_rate "body-rate" Bytes = Bytes(1 << 10), "BYTES" in 0.0..=1.1e9, "Minimum rate of a request body after its first 5 seconds, in bytes per second; a slower request fails with status 408; 0: none";
    write_timeout "write-timeout" Duration = Duration::from_secs(60), "SECONDS" in 0.001..=3600.0, "Maximum time without a byte of a response being received by the client, in seconds; then its connection or HTTP/2 stream is closed";
    sse_keep_alive "sse-keep-alive" Duration = Duration::from_secs(15), "SECONDS" in 0.0..=3600.0, "Time without events after which an event stream sends a comment line, in seconds, so that proxies keep the connection; 0: never";
    max_connections "max-connections" usize = 1024, "N" in 1.0..=65_536.0, "Maximum open connections; further ones get status 503, but probes and administrators are served";
    max_connections_per_address "max-connections-per-address" Option<usize> = None, "N" in 0.0..=65_536.0, "Maximum open connections of one client address (IPv6: of one /64 network); further ones get status 503, but probes and administrators are served; 0: no limit [default: half of max-connections]";
    connection_memory "connection-memory" Bytes = Bytes(512 << 20), "BYTES" in 1_048_576.0..=1.1e12, "Memory for requests and responses of all connections, in bytes: bodies, what is parsed from them, and responses that clients have not read; requests beyond it get status 503";
    connection_memory_share "connection-memory-share" f32 = 0.5, "X" in 0.01..=1.0, "Share of connection-memory that one tenant, and one client address (IPv6: one /64 network), may have; requests beyond it get status 429. Without tenants only the address counts";
    api_key "api-key" Option<String> = None, "KEY", "API key that clients must send; prefer STARLING_API_KEY, as other users of the machine can read command lines";
    api_key_file "api-key-file" Option<PathBuf> = None, "FILE", "File of clients, one per line: an API key, cert:NAME or hmac:ID:SECRET, then optionally the tenant's name, its share of turns (1 to 1000), and max-priority=high, which lets its requests have a higher priority than those of other tenants";
    key_requests "key-requests" u32 = 0, "N", "Maximum requests per minute and API key; 0: no limit";
    key_tokens "key-tokens" u32 = 0, "N", "Maximum tokens per minute and API key, prompt and max_tokens together; 0: no limit";
    allow_no_key "allow-no-key" bool = false, "BOOL", "Allow listening on other than loopback addresses without API keys: anyone who reaches the address can use the server";
    allowed_hosts "allowed-hosts" Vec<String> = Vec::new(), "NAMES", "Further values of the Host header to accept, comma-separated; *: any; empty: none on loopback addresses, any elsewhere";
    tls_cert "tls-cert" Option<PathBuf> = None, "FILE", "TLS certificate chain, PEM file, server certificate first; with tls-key it enables HTTPS";
    tls_key "tls-key" Option<PathBuf> = None, "FILE", "Private key of the TLS certificate, PEM file";
    tls_client_ca "tls-client-ca" Option<PathBuf> = None, "FILE", "Certificate authorities of clients, PEM file: clients may authenticate by a certificate of one of them instead of a key, if api-key-file has a line cert:NAME for it";
    tls_client_required "tls-client-required" bool = false, "BOOL", "Refuse TLS connections without a client certificate";
    require_signature "require-signature" bool = false, "BOOL", "Refuse requests that are not signed by a key hmac:ID:SECRET of api-key-file or admin-key-file (HTTP Message Signatures, RFC 9421)";
    signature_window "signature-window" Duration = Duration::from_secs(300), "SECONDS" in 1.0..=86_400.0, "Maximum difference between the time of a signature and the server's clock, in seconds; within it, no nonce is accepted twice";
    sign_responses "sign-responses" bool = false, "BOOL", "Sign the responses to signed requests with the same key";
    policy_file "policy-file" Option<PathBuf> = None, "FILE", "Policy on texts of prompts and answers: patterns to refuse or replace, personal data, and a service to ask; TOML, YAML or JSON, read again on reload";
    kv_disk "kv-disk" Option<PathBuf> = None, "DIR", "Keep KV cache pages of all models in this directory, so that prompts are not computed again after a restart or an eviction [default: none]";
    kv_disk_key_file "kv-disk-key-file" Option<PathBuf> = None, "FILE", "Key of the checksums in kv-disk, at least 64 hexadecimal digits: for a directory that others can write; files without it are refused";
    kv_disk_size "kv-disk-size" Bytes = Bytes(16 << 30), "BYTES" in 0.0..=1.1e15, "Maximum size of the files in kv-disk, in bytes; the least recently used pages are removed";
    slot_save_path "slot-save-path" Option<PathBuf> = None, "DIR", "Directory for the files of POST /slots/{id}?action=save and restore [default: none]";
    slot_save_size "slot-save-size" Bytes = Bytes(16 << 30), "BYTES" in 0.0..=1.1e15, "Maximum size of a tenant's files in slot-save-path, in bytes; a file beyond it is refused";
    audit_log "audit-log" Option<PathBuf> = None, "FILE", "File of the audit log, which records who did what but no texts, as JSON lines chained by hashes; `starling admin audit verify` checks it [default: none]";
    audit_log_size "audit-log-size" Bytes = Bytes(64 << 20), "BYTES" in 0.0..=1.1e12, "Size at which the audit log is rotated, in bytes; 0: never";
    audit_log_files "audit-log-files" usize = 0, "N", "Rotated files of the audit log to keep; 0: all";
    audit_key_file "audit-key-file" Option<PathBuf> = None, "FILE", "Key of the audit log's hashes, at least 64 hexadecimal digits: without it, whoever can write the log can forge it";
    cors_origins "cors-origins" Vec<String> = Vec::new(), "ORIGINS", "Web origins whose pages may call the server (CORS), comma-separated; *: any; empty: none";
    worker_id "worker-id" Option<String> = None, "ID", "Worker name in the readiness callback and in traces [default: random]";
    callback_url "callback-url" Option<String> = None, "URL", "URL that receives a readiness report (POST, http only) once the model is loaded";
    metrics_without_key "metrics-without-key" bool = false, "BOOL", "Serve /metrics to clients without a key, for scrapers that have none";
    metrics_compat "metrics-compat" Compat = Compat::None, "NAME", "Add the metrics under the names of another server: none or vllm";
    stall_timeout "stall-timeout" Duration = Duration::from_secs(120), "SECONDS" in 0.1..=86_400.0, "Duration of an engine step after which /livez and /readyz fail, in seconds" per model;
    otlp_endpoint "otlp-endpoint" Option<String> = None, "URL", "OpenTelemetry collector for traces (OTLP over HTTP), e.g. http://localhost:4318; OpenTelemetry's environment variables set sampling and batching [default: no traces]";
    log_level "log-level" String = "info".into(), "LEVEL", "Log level: error, warn, info, debug or trace; by module as in tower_http=debug,info";
    log_format "log-format" LogFormat = LogFormat::Pretty, "FORMAT", "Log format: pretty, or json (one object per line)";
}

impl Settings {
    /// Checks settings that depend on one another.
    ///
    /// # Errors
    /// The setting that is wrong, and what was expected.
    pub fn check(&self) -> Result<(), String> {
        let (low, high) = (self.queue_low(), self.queue_high);
        if low > high {
            return Err(format!(
                "queue-low is {low} and queue-high is {high}, expected queue-low to be at most queue-high: lower queue-low, \
                 raise queue-high, or leave out queue-low"
            ));
        }
        if self.response_cache_disk.is_some() && self.response_cache_disk == self.kv_disk {
            return Err("response-cache-disk: found the directory of kv-disk, expected another".into());
        }
        if self.draft_mtp && self.draft_model.is_some() {
            return Err("draft-mtp and draft-model: expected one of them".into());
        }
        if self.state_key_file.is_some() && self.state_dir.is_none() {
            return Err("state-key-file: expected --state-dir with it".into());
        }
        let names = SyntaxNames { calls: Some(&self.tool_call_format), reasoning: Some(&self.reasoning_format) };
        names.check().map_err(|e| e.message)?;
        Ok(())
    }

    /// `queue_low` with its default applied.
    pub fn queue_low(&self) -> usize {
        self.queue_low.unwrap_or(self.queue_high / 4 * 3)
    }

    /// `max_connections_per_address` with its default applied.
    pub fn connections_per_address(&self) -> usize {
        match self.max_connections_per_address {
            Some(0) => usize::MAX,
            Some(n) => n,
            None => (self.max_connections / 2).max(1),
        }
    }

    /// The TOML file of `--print-config`: help, value and origin of each setting. API keys are counted.
    pub fn to_toml(&self, origins: &BTreeMap<&'static str, String>) -> String {
        let lines = TABLE.iter().map(|s| {
            let origin = origins.get(s.key).map_or_else(String::new, |origin| format!("  # {origin}"));
            match (s.get)(self) {
                _ if s.key == "api-key" => format!("# {}\n# api-key ={}{origin}\n", s.help, self.keys_set()),
                Some(value) => format!("# {}\n{} = {value}{origin}\n", s.help, s.key),
                None => format!("# {}\n# {} =\n", s.help, s.key),
            }
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    /// The number of API keys, in the place of their values.
    fn keys_set(&self) -> String {
        let lines = |path: &PathBuf| fs::read_to_string(path).ok();
        let is_key = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with('#');
        let in_file = self.api_key_file.as_ref().and_then(lines).map_or(0, |text| text.lines().filter(is_key).count());
        match usize::from(self.api_key.as_deref().is_some_and(|key| !key.is_empty())) + in_file {
            0 => String::new(),
            1 => " (1 key set)".into(),
            n => format!(" ({n} keys set)"),
        }
    }
}

/// Settings that may change while the server runs.
pub const LIVE: [&str; 31] = [
    "weight",
    "autoload",
    "load-wait",
    "load-queue",
    "pin",
    "idle-timeout",
    "strategy",
    "max-seqs",
    "batch-tokens",
    "prefill-chunk",
    "draft-max",
    "draft-min-acceptance",
    "temperature",
    "top-k",
    "top-p",
    "min-p",
    "repetition-penalty",
    "seed",
    "queue-high",
    "queue-low",
    "queue-timeout",
    "request-timeout",
    "tenant-requests",
    "tenant-tokens",
    "max-prompt",
    "max-tokens",
    "max-n",
    "max-inputs",
    "key-requests",
    "key-tokens",
    "log-level",
];

/// The setting of a key.
pub fn setting(key: &str) -> Option<&'static Setting> {
    TABLE.iter().find(|setting| setting.key == key)
}
