//! Server settings: one table, read from flags, environment variables and a TOML file, in this order of precedence.

use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Args, FromArgMatches};
use starling::structure::Limits;

use super::value::{Bytes, Compat, LogFormat, Value};
use crate::cli::{KvChoice, ModelArgs};
use crate::error::Failure;
use crate::pool::MAX_THREADS;
use crate::tokens::text_file;

pub struct Setting {
    /// Name in the file; the flag is `--queue-high`, the environment variable `STARLING_QUEUE_HIGH`.
    pub key: &'static str,
    /// Placeholder of the value in `--help`.
    value_name: &'static str,
    help: &'static str,
    set: fn(&mut Settings, &str) -> Result<(), String>,
    get: fn(&Settings) -> Option<String>,
}

macro_rules! settings {
    ($($field:ident $key:literal $kind:ty = $default:expr, $value_name:literal $(in $range:expr)?, $help:literal;)*) => {
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
            set: |settings, text| {
                let value = <$kind as Value>::read(text)?;
                $(value.within($range)?;)?
                settings.$field = value;
                Ok(())
            },
            get: |settings| settings.$field.show(),
        },)*];
    };
}

settings! {
    host "host" String = "127.0.0.1".into(), "ADDRESS", "Address to listen on; other than a loopback address, it needs API keys or --allow-no-key";
    port "port" u16 = 8080, "N", "TCP port to listen on; 0: any free port, printed to standard output";
    model_name "model-name" Option<String> = None, "NAME", "Model name in the API [default: the file name without .gguf]";
    chat_template "chat-template" Option<String> = None, "NAME|FILE", "Chat template: the name of a built-in one, or a file [default: the model's own, else chatml]";
    ctx_size "ctx-size" Option<usize> = None, "N" in 1.0..=16_777_216.0, "Context size in tokens, prompt and output together [default: the model's training context, at most 8192]";
    max_seqs "max-seqs" usize = 32, "N" in 1.0..=1024.0, "Sequences that run in one batch; further requests wait in the queue";
    batch_tokens "batch-tokens" usize = 128, "N" in 1.0..=65_536.0, "Maximum tokens of an engine step, at least max-seqs; longer prompts are processed in several steps";
    prefill_chunk "prefill-chunk" usize = 24, "N" in 1.0..=65_536.0, "Maximum prompt tokens of a step that also decodes; a larger chunk shortens the time to first token and lengthens the time between tokens of other requests";
    embed_tokens "embed-tokens" usize = 2048, "N" in 1.0..=1_048_576.0, "Maximum tokens of a batch of texts to embed, and of one such text";
    kv_memory "kv-memory" Option<Bytes> = None, "BYTES", "KV cache size, e.g. 512MiB or 4GiB [default: full contexts for max-seqs sequences, at most half of the memory that the weights leave]";
    seed "seed" Option<u64> = None, "N", "Sampling seed of requests that give none [default: random for each request]";
    queue_high "queue-high" usize = 256, "N" in 1.0..=1_000_000.0, "High watermark: queued requests at which new ones are refused with status 429";
    queue_low "queue-low" usize = 192, "N" in 0.0..=1_000_000.0, "Low watermark: queued requests at which new ones are accepted again; at most queue-high";
    queue_timeout "queue-timeout" Duration = Duration::from_secs(120), "SECONDS" in 0.001..=86_400.0, "Maximum time of a request in the queue, in seconds; then it fails with status 503";
    request_timeout "request-timeout" Duration = Duration::from_secs(900), "SECONDS" in 0.001..=604_800.0, "Maximum time of a request, queue included, in seconds; then it fails with status 504";
    drain_timeout "drain-timeout" Duration = Duration::from_secs(30), "SECONDS" in 0.0..=86_400.0, "Time for running requests to finish after SIGTERM, in seconds; 0 ends them at once";
    tenant_requests "tenant-requests" usize = 0, "N" in 0.0..=1_000_000.0, "Maximum requests of a tenant, queued and running; 0: no limit";
    tenant_tokens "tenant-tokens" usize = 0, "N" in 0.0..=1e12, "Maximum tokens of a tenant's queued requests, prompt and max_tokens together; 0: no limit";
    max_prompt "max-prompt" usize = 0, "N" in 0.0..=16_777_216.0, "Maximum tokens of a prompt; 0: what the context holds";
    max_tokens "max-tokens" usize = 0, "N" in 0.0..=16_777_216.0, "Maximum of max_tokens in a request, and its default where the endpoint has none; 0: what the context holds";
    max_n "max-n" usize = 16, "N" in 1.0..=128.0, "Maximum of n in a request, the answers to one prompt";
    max_grammar "max-grammar" Bytes = Bytes(Limits::DEFAULT.bytes as u64), "BYTES" in 1.0..=1_048_576.0, "Maximum size of a JSON schema, regular expression or grammar in a request, in bytes";
    grammar_items "grammar-items" usize = Limits::DEFAULT.items, "N" in 1000.0..=1e8, "Maximum grammar parser items per output token; the request fails beyond it. All requests wait for the parser, so this bounds how long one can delay the others";
    max_inputs "max-inputs" usize = 2048, "N" in 1.0..=65_536.0, "Maximum texts of an embedding request, or prompts of a completion request";
    session_ttl "session-ttl" Duration = Duration::from_secs(1800), "SECONDS" in 0.1..=604_800.0, "Time without use after which a session is closed, in seconds";
    max_sessions "max-sessions" usize = 1024, "N" in 1.0..=1_000_000.0, "Maximum open sessions; a new one closes the least recently used idle one";
    session_memory "session-memory" Bytes = Bytes(4 << 20), "BYTES" in 1024.0..=1.1e12, "Maximum memory of one session for messages and tokens, in bytes; a turn that needs more is refused";
    sessions_memory "sessions-memory" Bytes = Bytes(256 << 20), "BYTES" in 1024.0..=1.1e12, "Maximum memory of all sessions for messages and tokens, in bytes; the least recently used idle ones are closed";
    max_body "max-body" Bytes = Bytes(8 << 20), "BYTES" in 1.0..=1.1e9, "Maximum size of a request body, in bytes; a larger one gets status 413";
    max_header "max-header" Bytes = Bytes(32 << 10), "BYTES" in 8192.0..=1_048_576.0, "Maximum size of a request's headers, in bytes";
    header_timeout "header-timeout" Duration = Duration::from_secs(15), "SECONDS" in 0.001..=3600.0, "Time for a request's headers, for a TLS handshake, and for a connection without a request in progress, in seconds; then the connection is closed";
    body_timeout "body-timeout" Duration = Duration::from_secs(30), "SECONDS" in 0.001..=3600.0, "Time for a request body, in seconds; then the request fails with status 408";
    write_timeout "write-timeout" Duration = Duration::from_secs(60), "SECONDS" in 0.001..=3600.0, "Time that a client may take no byte of a response, in seconds; then its connection or HTTP/2 stream is closed";
    sse_keep_alive "sse-keep-alive" Duration = Duration::from_secs(15), "SECONDS" in 0.0..=3600.0, "Time without events after which an event stream sends a comment line, in seconds, so that proxies keep the connection; 0: never";
    max_connections "max-connections" usize = 1024, "N" in 1.0..=65_536.0, "Maximum open connections; further ones wait to be accepted";
    max_connections_per_address "max-connections-per-address" Option<usize> = None, "N" in 0.0..=65_536.0, "Maximum open connections of one client address (IPv6: of one /64 network); further ones are closed; 0: no limit [default: half of max-connections]";
    api_key "api-key" Option<String> = None, "KEY", "API key that clients must send; prefer STARLING_API_KEY, as other users of the machine can read command lines";
    api_key_file "api-key-file" Option<PathBuf> = None, "FILE", "File of API keys, one per line: the key, then optionally the tenant's name and its share of turns (1 to 1000)";
    key_requests "key-requests" u32 = 0, "N", "Maximum requests per minute and API key; 0: no limit";
    key_tokens "key-tokens" u32 = 0, "N", "Maximum tokens per minute and API key, prompt and max_tokens together; 0: no limit";
    allow_no_key "allow-no-key" bool = false, "BOOL", "Listen on other than loopback addresses without API keys";
    allowed_hosts "allowed-hosts" Vec<String> = Vec::new(), "NAMES", "Names in the Host header to accept besides the server's own, comma-separated; *: any; empty: none on loopback addresses, elsewhere any";
    tls_cert "tls-cert" Option<PathBuf> = None, "FILE", "TLS certificate chain, PEM file, server certificate first; with tls-key it enables HTTPS";
    tls_key "tls-key" Option<PathBuf> = None, "FILE", "Private key of the TLS certificate, PEM file";
    cors_origins "cors-origins" Vec<String> = Vec::new(), "ORIGINS", "Web origins whose pages may call the server (CORS), comma-separated; *: any; empty: none";
    worker_id "worker-id" Option<String> = None, "ID", "Worker name in the readiness callback and in traces [default: random]";
    callback_url "callback-url" Option<String> = None, "URL", "URL that receives a readiness report (POST, http only) once the model is loaded";
    metrics_compat "metrics-compat" Compat = Compat::None, "NAME", "Metrics under another server's names too: none or vllm";
    stall_timeout "stall-timeout" Duration = Duration::from_secs(120), "SECONDS" in 0.1..=86_400.0, "Duration of an engine step after which /livez and /readyz fail, in seconds";
    otlp_endpoint "otlp-endpoint" Option<String> = None, "URL", "OpenTelemetry collector for traces (OTLP over HTTP), e.g. http://localhost:4318; OpenTelemetry's environment variables set sampling and batching [default: no traces]";
    log_level "log-level" String = "info".into(), "LEVEL", "Log level: error, warn, info, debug or trace; by module as in tower_http=debug,info";
    log_format "log-format" LogFormat = LogFormat::Pretty, "FORMAT", "Log format: pretty, or json (one object per line)";
}

/// Keys of the file that set [`ModelArgs`], which other commands have too.
const MODEL_KEYS: [&str; 5] = ["model", "threads", "isa", "kv-type", "working-memory"];

#[derive(Debug, Clone, Default)]
pub struct ServeArgs {
    /// Settings given as flags.
    flags: Vec<(&'static str, String)>,
    config: Option<PathBuf>,
    print_config: bool,
}

impl FromArgMatches for ServeArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut args = ServeArgs::default();
        args.update_from_arg_matches(matches)?;
        Ok(args)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        let text = |setting: &'static Setting| Some((setting.key, matches.get_one::<String>(setting.key)?.clone()));
        self.flags = TABLE.iter().filter_map(text).collect();
        self.config = matches.get_one::<PathBuf>("config").cloned();
        self.print_config = matches.get_flag("print-config");
        Ok(())
    }
}

impl Args for ServeArgs {
    fn augment_args(mut command: clap::Command) -> clap::Command {
        let file = Arg::new("config").long("config").value_name("FILE").env("STARLING_CONFIG");
        let file = file.value_parser(clap::value_parser!(PathBuf)).help("TOML file of settings");
        let print = Arg::new("print-config").long("print-config").action(ArgAction::SetTrue);
        command = command.arg(file).arg(print.help("Print the settings in effect as a TOML file and exit"));
        let defaults = Settings::default();
        for setting in TABLE {
            let default = (setting.get)(&defaults).map_or_else(String::new, |value| format!(" [default: {value}]"));
            let help = format!("{}{default}", setting.help);
            let mut arg = Arg::new(setting.key).long(setting.key).value_name(setting.value_name).help(help);
            if setting.value_name == "BOOL" {
                arg = arg.num_args(0..=1).default_missing_value("true").require_equals(true);
            }
            command = command.arg(arg);
        }
        let precedence = "Each setting is also a key of the file of --config (queue-high) and an environment variable \
                          (STARLING_QUEUE_HIGH). A flag overrides the environment, and both override the file.";
        command.after_help(precedence)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl ServeArgs {
    /// The settings in effect, and the model arguments completed from the file.
    ///
    /// # Errors
    /// The first invalid value, with its flag, environment variable, or file and key.
    pub fn settings(&self, model: &ModelArgs) -> Result<(Settings, ModelArgs), Failure> {
        let variable = |key: &str| {
            let name = variable(key);
            env::var_os(&name).map(|value| (name, value.to_string_lossy().into_owned()))
        };
        self.layered(model, variable)
    }

    fn layered(
        &self,
        model: &ModelArgs,
        variable: impl Fn(&str) -> Option<(String, String)>,
    ) -> Result<(Settings, ModelArgs), Failure> {
        let (mut settings, mut model) = (Settings::default(), model.clone());
        if let Some(path) = &self.config {
            read_file(path, &mut settings, &mut model)?;
        }
        for setting in TABLE {
            if let Some((name, text)) = variable(setting.key) {
                (setting.set)(&mut settings, &text).map_err(|e| Failure::Usage(format!("{name}: {e}")))?;
            }
        }
        for (key, text) in &self.flags {
            let setting = TABLE.iter().find(|s| s.key == *key);
            let set = setting.map_or(Ok(()), |s| (s.set)(&mut settings, text));
            set.map_err(|e| Failure::Usage(format!("--{key}: {e}")))?;
        }
        if settings.queue_low > settings.queue_high {
            let (low, high) = (settings.queue_low, settings.queue_high);
            return Err(Failure::Usage(format!("queue-low: found {low}, expected at most {high} (queue-high)")));
        }
        Ok((settings, model))
    }

    /// Whether `--print-config` was given.
    pub fn prints(&self) -> bool {
        self.print_config
    }
}

fn variable(key: &str) -> String {
    format!("STARLING_{}", key.replace('-', "_").to_uppercase())
}

fn read_file(path: &Path, settings: &mut Settings, model: &mut ModelArgs) -> Result<(), Failure> {
    let text = text_file(path)?;
    let wrong = |what: String| Failure::Usage(format!("{}: {what}", path.display()));
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
        let line = e.span().map_or(0, |span| text[..span.start.min(text.len())].lines().count().max(1));
        wrong(format!("line {line}: {}", e.message()))
    })?;
    for (name, value) in &table {
        let key = name.replace('_', "-");
        let text = plain(value).ok_or_else(|| {
            wrong(format!("{name}: found a {}, expected a string, number, boolean or array of them", value.type_str()))
        })?;
        let at = |e| wrong(format!("{name}: {e}"));
        match TABLE.iter().find(|s| s.key == key) {
            Some(setting) => (setting.set)(settings, &text).map_err(at)?,
            None if MODEL_KEYS.contains(&key.as_str()) => model_key(model, &key, &text).map_err(at)?,
            None => {
                let near = TABLE.iter().map(|s| s.key).chain(MODEL_KEYS).min_by_key(|k| strsim::levenshtein(k, &key));
                return Err(wrong(format!("{name}: unknown setting; did you mean {}?", near.unwrap_or_default())));
            }
        }
    }
    Ok(())
}

/// A TOML value as text, as a flag would have it; `None` for tables and dates.
fn plain(value: &toml::Value) -> Option<String> {
    Some(match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Integer(n) => n.to_string(),
        toml::Value::Float(x) => x.to_string(),
        toml::Value::Boolean(b) => b.to_string(),
        toml::Value::Array(items) => items.iter().map(plain).collect::<Option<Vec<_>>>()?.join(","),
        _ => return None,
    })
}

/// Sets a model argument from the file unless a flag or environment variable has set it.
fn model_key(model: &mut ModelArgs, key: &str, text: &str) -> Result<(), String> {
    match key {
        "model" => model.model = model.model.take().or(Some(text.into())),
        "isa" => model.isa = model.isa.take().or(Some(text.into())),
        "threads" => {
            let n = u16::read(text)?;
            n.within(1.0..=MAX_THREADS as f64)?;
            model.threads = model.threads.or(Some(n));
        }
        "working-memory" => model.working_memory = model.working_memory.or(Some(Bytes::read(text)?)),
        _ => {
            let kind: KvChoice = clap::ValueEnum::from_str(text, true)
                .map_err(|_| format!("found {text:?}, expected f32, f16 or k8"))?;
            model.kv_type = model.kv_type.or(Some(kind));
        }
    }
    Ok(())
}

impl Settings {
    /// `max_connections_per_address` with its default applied.
    pub fn connections_per_address(&self) -> usize {
        match self.max_connections_per_address {
            Some(0) => usize::MAX,
            Some(n) => n,
            None => (self.max_connections / 2).max(1),
        }
    }

    /// The TOML file of `--print-config`: help and value of each setting, without the API key.
    pub fn to_toml(&self) -> String {
        let lines = TABLE.iter().map(|s| match (s.get)(self) {
            _ if s.key == "api-key" => format!("# {}\n# api-key =\n", s.help),
            Some(value) => format!("# {}\n{} = {value}\n", s.help, s.key),
            None => format!("# {}\n# {} =\n", s.help, s.key),
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn none(_: &str) -> Option<(String, String)> {
        None
    }

    fn model() -> ModelArgs {
        ModelArgs { model: None, threads: None, isa: None, kv_type: None, working_memory: None }
    }

    fn file(name: &str, text: &str) -> PathBuf {
        let path = env::temp_dir().join(format!("starling-{}-{name}.toml", std::process::id()));
        fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn flags_override_the_environment_and_both_override_the_file() {
        let path = file("layers", "port = 1\nqueue-high = 300\nmax_seqs = 3\nkv-memory = \"2GiB\"\nthreads = 3\n");
        let args = ServeArgs { flags: vec![("port", "3".into())], config: Some(path.clone()), print_config: false };
        let environment = |key: &str| match key {
            "port" | "queue-high" => Some((variable(key), "400".to_string())),
            _ => None,
        };
        let (s, m) = args.layered(&model(), environment).unwrap();
        assert_eq!((s.port, s.queue_high, s.max_seqs, s.kv_memory), (3, 400, 3, Some(Bytes(2 << 30))));
        assert_eq!(m.threads, Some(3));
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn printed_settings_read_back_equal() {
        let path =
            file("shown", &Settings { cors_origins: vec!["a".into(), "b".into()], ..Settings::default() }.to_toml());
        let args = ServeArgs { config: Some(path.clone()), ..ServeArgs::default() };
        let (s, _) = args.layered(&model(), none).unwrap();
        assert_eq!(s.to_toml(), fs::read_to_string(&path).unwrap());
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn an_invalid_value_is_reported_with_file_and_key() {
        for (name, text, parts) in [
            ("kind", "port = \"x\"", ["port", "expected an integer from 0 to 65535"]),
            ("range", "max-seqs = 0", ["max-seqs", "from 1 to 1024"]),
            ("unknown", "queue-hihg = 1", ["queue-hihg", "queue-high"]),
            ("syntax", "port = 1\nhost = ", ["line 2", ""]),
            ("order", "queue-low = 300", ["queue-low", "256"]),
        ] {
            let path = file(name, text);
            let args = ServeArgs { config: Some(path.clone()), ..ServeArgs::default() };
            let error = args.layered(&model(), none).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
            fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn keys_are_distinct_and_differ_from_model_keys() {
        let mut keys: Vec<&str> = TABLE.iter().map(|s| s.key).chain(MODEL_KEYS).collect();
        keys.sort_unstable();
        assert!(keys.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
