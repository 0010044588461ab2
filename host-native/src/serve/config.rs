//! The server's settings: one table, and where values come from: file < environment < flags.

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

/// One setting: its name in files (and, with `--`, on the command line), its form, and how to read and show it.
pub struct Setting {
    /// Words joined by hyphens. The environment has them as `STARLING_` and capitals joined by underscores.
    pub key: &'static str,
    /// What stands for the value in the manual.
    form: &'static str,
    help: &'static str,
    set: fn(&mut Settings, &str) -> Result<(), String>,
    get: fn(&Settings) -> Option<String>,
}

macro_rules! settings {
    ($($field:ident $key:literal $kind:ty = $default:expr, $form:literal $(in $range:expr)?, $help:literal;)*) => {
        /// What the server does, and how much of it.
        #[derive(Debug, Clone)]
        pub struct Settings {
            $(#[doc = $help] pub $field: $kind,)*
        }

        impl Default for Settings {
            fn default() -> Self {
                Settings { $($field: $default,)* }
            }
        }

        /// All settings, in the order of the manual.
        pub static TABLE: &[Setting] = &[$(Setting {
            key: $key,
            form: $form,
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
    host "host" String = "127.0.0.1".into(), "ADDRESS", "Address to listen on";
    port "port" u16 = 8080, "N", "Port to listen on; 0 takes any that is free";
    model_name "model-name" Option<String> = None, "NAME", "The model's name for clients [default: that of its file]";
    chat_template "chat-template" Option<String> = None, "NAME|FILE", "Chat template: a built-in one by name, or a file [default: the model's, or chatml]";
    ctx_size "ctx-size" Option<usize> = None, "N" in 1.0..=16_777_216.0, "Tokens of a context, prompt and answer [default: what the model was made for, at most 8192]";
    max_seqs "max-seqs" usize = 32, "N" in 1.0..=1024.0, "Answers at once; others wait";
    batch_tokens "batch-tokens" usize = 128, "N" in 1.0..=65_536.0, "Tokens of a step: prompts are cut into pieces of this size, so that a short one does not wait for a long one";
    prefill_chunk "prefill-chunk" usize = 24, "N" in 1.0..=65_536.0, "Tokens of prompts in a step in which answers advance too: more are done sooner, and let answers wait longer";
    embed_tokens "embed-tokens" usize = 2048, "N" in 1.0..=1_048_576.0, "Tokens of a batch of texts to embed, and of one such text, at most";
    kv_memory "kv-memory" Option<Bytes> = None, "BYTES", "Memory for keys and values, as 512MiB or 4GiB [default: full contexts for all answers, at most half of what this process may have]";
    seed "seed" Option<u64> = None, "N", "Seed of requests that name none [default: another for each]";
    queue_high "queue-high" usize = 256, "N" in 1.0..=1_000_000.0, "Waiting requests at which new ones are refused";
    queue_low "queue-low" usize = 192, "N" in 0.0..=1_000_000.0, "Waiting requests at which they are taken again";
    queue_timeout "queue-timeout" Duration = Duration::from_secs(120), "SECONDS" in 0.001..=86_400.0, "Time that a request may wait";
    request_timeout "request-timeout" Duration = Duration::from_secs(900), "SECONDS" in 0.001..=604_800.0, "Time that a request may take in all";
    drain_timeout "drain-timeout" Duration = Duration::from_secs(30), "SECONDS" in 0.0..=86_400.0, "Time that running answers have to end after SIGTERM";
    tenant_requests "tenant-requests" usize = 0, "N" in 0.0..=1_000_000.0, "Requests of a tenant at once, waiting ones included; 0 for no limit";
    tenant_tokens "tenant-tokens" usize = 0, "N" in 0.0..=1e12, "Tokens, of prompts and answers, that a tenant may have waiting; 0 for no limit";
    max_prompt "max-prompt" usize = 0, "N" in 0.0..=16_777_216.0, "Tokens of a prompt; 0 for as many as the context holds";
    max_tokens "max-tokens" usize = 0, "N" in 0.0..=16_777_216.0, "Tokens of an answer, and how many one has that asks for none; 0 for as many as the context holds";
    max_n "max-n" usize = 16, "N" in 1.0..=128.0, "Answers to one request";
    max_grammar "max-grammar" Bytes = Bytes(Limits::DEFAULT.bytes as u64), "BYTES" in 1.0..=1_048_576.0, "Bytes of a schema, an expression or a grammar that an answer has to follow";
    grammar_items "grammar-items" usize = Limits::DEFAULT.items, "N" in 1000.0..=1e8, "Items of a grammar's parser for one token, at most; while it works no other answer goes on";
    max_inputs "max-inputs" usize = 2048, "N" in 1.0..=65_536.0, "Texts of a request to embed, or prompts of a completion";
    session_ttl "session-ttl" Duration = Duration::from_secs(1800), "SECONDS" in 0.1..=604_800.0, "Time after which an unused session is closed";
    max_sessions "max-sessions" usize = 1024, "N" in 1.0..=1_000_000.0, "Sessions; the longest unused makes room for a new one";
    session_memory "session-memory" Bytes = Bytes(4 << 20), "BYTES" in 1024.0..=1.1e12, "Memory for messages and tokens of one session; a turn that needs more is refused";
    sessions_memory "sessions-memory" Bytes = Bytes(256 << 20), "BYTES" in 1024.0..=1.1e12, "Memory for messages and tokens of all sessions; the longest unused make room";
    max_body "max-body" Bytes = Bytes(8 << 20), "BYTES" in 1.0..=1.1e9, "Bytes of a request's body";
    max_header "max-header" Bytes = Bytes(32 << 10), "BYTES" in 8192.0..=1_048_576.0, "Bytes of a request's head";
    header_timeout "header-timeout" Duration = Duration::from_secs(15), "SECONDS" in 0.001..=3600.0, "Time for the head of a request and for a TLS handshake, and that a connection may be open without a request in progress";
    body_timeout "body-timeout" Duration = Duration::from_secs(30), "SECONDS" in 0.001..=3600.0, "Time for the body of a request";
    write_timeout "write-timeout" Duration = Duration::from_secs(60), "SECONDS" in 0.001..=3600.0, "Time that a client may leave an answer unread";
    sse_keep_alive "sse-keep-alive" Duration = Duration::from_secs(15), "SECONDS" in 0.0..=3600.0, "Time without events after which a stream gets a comment line, so that proxies keep it; 0 for none";
    max_connections "max-connections" usize = 1024, "N" in 1.0..=65_536.0, "Connections at once; others wait";
    max_connections_per_address "max-connections-per-address" Option<usize> = None, "N" in 0.0..=65_536.0, "Connections of one address (IPv6: of one /64 network) at once; further ones are closed; 0 for no limit [default: half of max-connections]";
    api_key "api-key" Option<String> = None, "KEY", "A key that clients must have; better given as STARLING_API_KEY than on the command line";
    api_key_file "api-key-file" Option<PathBuf> = None, "FILE", "Keys that clients must have, one a line: a key, and if wanted the name of its tenant and its share of turns";
    key_requests "key-requests" u32 = 0, "N", "Requests a minute with one key; 0 for no limit";
    key_tokens "key-tokens" u32 = 0, "N", "Tokens a minute, of prompts and answers, with one key; 0 for no limit";
    allow_no_key "allow-no-key" bool = false, "BOOL", "Listen on an address that others reach although there is no key";
    allowed_hosts "allowed-hosts" Vec<String> = Vec::new(), "NAMES", "Names that requests may call this server by, with commas; * for any; if there are none, on loopback addresses its own, elsewhere any";
    tls_cert "tls-cert" Option<PathBuf> = None, "FILE", "Certificates in PEM, the server's own first: with them connections are encrypted";
    tls_key "tls-key" Option<PathBuf> = None, "FILE", "The key of the certificate, in PEM";
    cors_origins "cors-origins" Vec<String> = Vec::new(), "ORIGINS", "Origins whose pages may call this server, with commas; * for any";
    worker_id "worker-id" Option<String> = None, "ID", "This worker's name, for the orchestrator";
    callback_url "callback-url" Option<String> = None, "URL", "Where to report once the model is loaded (http)";
    metrics_compat "metrics-compat" Compat = Compat::None, "NAME", "Metrics by the names of another server too: none or vllm";
    stall_timeout "stall-timeout" Duration = Duration::from_secs(120), "SECONDS" in 0.1..=86_400.0, "Time of one step after which the server no longer counts as alive";
    otlp_endpoint "otlp-endpoint" Option<String> = None, "URL", "Where to send traces: a collector of OTLP over http, as http://localhost:4318; sampling and batches by OpenTelemetry's own variables";
    log_level "log-level" String = "info".into(), "LEVEL", "error, warn, info, debug or trace, or by module as in tower_http=debug,info";
    log_format "log-format" LogFormat = LogFormat::Pretty, "FORMAT", "pretty or json";
}

/// Keys that belong to the model's arguments, which all commands have.
const MODEL_KEYS: [&str; 5] = ["model", "threads", "isa", "kv-type", "working-memory"];

/// Options of `serve`.
#[derive(Debug, Clone, Default)]
pub struct ServeArgs {
    /// Settings on the command line.
    given: Vec<(&'static str, String)>,
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
        self.given = TABLE.iter().filter_map(text).collect();
        self.config = matches.get_one::<PathBuf>("config").cloned();
        self.print_config = matches.get_flag("print-config");
        Ok(())
    }
}

impl Args for ServeArgs {
    fn augment_args(mut command: clap::Command) -> clap::Command {
        let file = Arg::new("config").long("config").value_name("FILE").env("STARLING_CONFIG");
        let file = file.value_parser(clap::value_parser!(PathBuf)).help("Read settings from a TOML file");
        let print = Arg::new("print-config").long("print-config").action(ArgAction::SetTrue);
        command = command.arg(file).arg(print.help("Print the settings in effect, as a file, and exit"));
        let defaults = Settings::default();
        for setting in TABLE {
            let default = (setting.get)(&defaults).map_or_else(String::new, |value| format!(" [default: {value}]"));
            let help = format!("{}{default}", setting.help);
            let mut arg = Arg::new(setting.key).long(setting.key).value_name(setting.form).help(help);
            if setting.form == "BOOL" {
                arg = arg.num_args(0..=1).default_missing_value("true").require_equals(true);
            }
            command = command.arg(arg);
        }
        let manual = "Every setting can also stand in the file of --config, under the same name without the hyphens \
                      before it, and in the environment, as STARLING_QUEUE_HIGH for --queue-high. A flag counts more \
                      than the environment, and that more than the file. --print-config shows the defaults.";
        command.after_help(manual)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl ServeArgs {
    /// The settings in effect, and the model's arguments with those of the file.
    ///
    /// # Errors
    /// The first value that is wrong, with file and key, variable, or flag.
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
        for (key, text) in &self.given {
            let setting = TABLE.iter().find(|s| s.key == *key);
            let set = setting.map_or(Ok(()), |s| (s.set)(&mut settings, text));
            set.map_err(|e| Failure::Usage(format!("--{key}: {e}")))?;
        }
        if settings.queue_low > settings.queue_high {
            let (low, high) = (settings.queue_low, settings.queue_high);
            return Err(Failure::Usage(format!("queue-low: found {low}, expected at most queue-high, {high}")));
        }
        Ok((settings, model))
    }

    /// Whether the settings are only to be shown.
    pub fn prints(&self) -> bool {
        self.print_config
    }
}

/// The variable of a setting.
fn variable(key: &str) -> String {
    format!("STARLING_{}", key.replace('-', "_").to_uppercase())
}

/// Takes the settings of a TOML file.
fn read_file(path: &Path, settings: &mut Settings, model: &mut ModelArgs) -> Result<(), Failure> {
    let text = text_file(path)?;
    let wrong = |what: String| Failure::Usage(format!("{}: {what}", path.display()));
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
        let line = e.span().map_or(0, |span| text[..span.start.min(text.len())].lines().count().max(1));
        wrong(format!("line {line}: {}", e.message()))
    })?;
    for (name, value) in &table {
        let key = name.replace('_', "-");
        let text =
            plain(value).ok_or_else(|| wrong(format!("{name}: found a {}, expected a value", value.type_str())))?;
        let at = |e| wrong(format!("{name}: {e}"));
        match TABLE.iter().find(|s| s.key == key) {
            Some(setting) => (setting.set)(settings, &text).map_err(at)?,
            None if MODEL_KEYS.contains(&key.as_str()) => model_key(model, &key, &text).map_err(at)?,
            None => {
                let near = TABLE.iter().map(|s| s.key).chain(MODEL_KEYS).min_by_key(|k| distance(k, &key));
                return Err(wrong(format!("{name}: no such setting; is it {}?", near.unwrap_or_default())));
            }
        }
    }
    Ok(())
}

/// A value of TOML as it would stand on the command line.
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

/// Flags and environment come before the file.
fn model_key(model: &mut ModelArgs, key: &str, text: &str) -> Result<(), String> {
    match key {
        "model" => model.model = model.model.take().or(Some(text.into())),
        "isa" => model.isa = model.isa.take().or(Some(text.into())),
        "threads" => {
            let n = u16::read(text)?;
            f64::from(n).within(1.0..=MAX_THREADS as f64)?;
            model.threads = model.threads.or(Some(n));
        }
        "working-memory" => model.working_memory = model.working_memory.or(Some(Bytes::read(text)?)),
        _ => {
            let kind: KvChoice =
                clap::ValueEnum::from_str(text, true).map_err(|_| format!("found {text}, expected f32, f16 or k8"))?;
            model.kv_type = model.kv_type.or(Some(kind));
        }
    }
    Ok(())
}

/// Letters to change, add or take away (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let best = (corner + usize::from(x != y)).min(row[j] + 1).min(row[j + 1] + 1);
            corner = std::mem::replace(&mut row[j + 1], best);
        }
    }
    row[b.len()]
}

impl Settings {
    /// Connections of one address at once.
    pub fn connections_per_address(&self) -> usize {
        match self.max_connections_per_address {
            Some(0) => usize::MAX,
            Some(n) => n,
            None => (self.max_connections / 2).max(1),
        }
    }

    /// As a file: what is in effect, with what each setting means.
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
    fn flags_count_more_than_the_environment_and_that_more_than_the_file() {
        let path = file("layers", "port = 1\nqueue-high = 300\nmax_seqs = 3\nkv-memory = \"2GiB\"\nthreads = 3\n");
        let args = ServeArgs { given: vec![("port", "3".into())], config: Some(path.clone()), print_config: false };
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
    fn what_is_shown_reads_back_as_the_same() {
        let path =
            file("shown", &Settings { cors_origins: vec!["a".into(), "b".into()], ..Settings::default() }.to_toml());
        let args = ServeArgs { config: Some(path.clone()), ..ServeArgs::default() };
        let (s, _) = args.layered(&model(), none).unwrap();
        assert_eq!(s.to_toml(), fs::read_to_string(&path).unwrap());
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_wrong_value_is_named_by_file_and_key() {
        for (name, text, parts) in [
            ("kind", "port = \"x\"", ["port", "expected a number"]),
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
    fn keys_are_distinct_and_are_no_other_argument() {
        let mut keys: Vec<&str> = TABLE.iter().map(|s| s.key).chain(MODEL_KEYS).collect();
        keys.sort_unstable();
        assert!(keys.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
