//! Transcripts of commands: help, errors and progress as a user reads them. `SNAPSHOTS=overwrite cargo test` writes the
//! files anew; their changes are reviewed as text.

use std::path::Path;

use snapbox::{Assert, Data, IntoData};

use super::starling::{fixture, starling, with_input};

/// Runs commands and compares what they print with the file of the transcript.
fn transcript(name: &str, commands: &[&[&str]]) {
    let mut text = String::new();
    for args in commands {
        text += &record(args, None);
    }
    compare(name, text);
}

fn compare(name: &str, text: String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/cli/transcripts/{name}.txt"));
    Assert::new().action_env("SNAPSHOTS").eq(text.raw(), Data::read_from(&path, None).raw());
}

fn record(args: &[&str], input: Option<&str>) -> String {
    let ran = input.map_or_else(|| starling(args), |input| with_input(args, input.as_bytes()));
    let quoted = |arg: &&str| if arg.contains(' ') { format!("\"{arg}\"") } else { arg.to_string() };
    let line: Vec<String> = args.iter().map(quoted).collect();
    let pipe = input
        .map_or_else(String::new, |input| format!("printf '{}' | ", input.replace('\\', "\\\\").replace('\n', "\\n")));
    let mut text = format!("$ {pipe}starling {}\n{}", line.join(" "), ran.text());
    if !ran.err.is_empty() {
        text += "--- standard error\n";
        text += &ran.err;
    }
    if ran.code != 0 {
        text += &format!("--- exit code {}\n", ran.code);
    }
    let text = text.replace(&fixture(""), "fixtures/").replace(env!("CARGO_TARGET_TMPDIR"), "target/tmp");
    text.lines().map(|line| redacted(line.trim_end()) + "\n").collect::<String>() + "\n"
}

/// Times and speeds as `#`.
fn redacted(line: &str) -> String {
    let is_measured = line.contains("tok/s") || line.starts_with("verified") || line.starts_with("replay");
    if !is_measured {
        return line.into();
    }
    let is_time = |word: &str| word.contains('.') && word.parse::<f64>().is_ok();
    let words = line.split(' ').map(|word| if is_time(word) { "#" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

const COMMANDS: [&str; 20] = [
    "run",
    "chat",
    "serve",
    "embed",
    "bench",
    "inspect",
    "tokenize",
    "detokenize",
    "logits",
    "perplexity",
    "quantize",
    "verify",
    "pull",
    "list",
    "show",
    "rm",
    "health",
    "admin",
    "completions",
    "man",
];

#[test]
fn help_of_every_command() {
    transcript("help", &[&["--help"]]);
    for command in COMMANDS {
        transcript(&format!("help-{command}"), &[&[command, "--help"]]);
    }
}

#[test]
fn running() {
    let q = |prompt, more: &[&'static str]| [&["run", "--isa", "scalar", "-t", "1", prompt], more].concat();
    let qwen = fixture("reference/qwen2-untied-f16.gguf");
    transcript(
        "run",
        &[
            &q("Once upon a time", &["-n", "12", "--seed", "7"]),
            &q("Once upon a time", &["-n", "12", "--temp", "0", "-q"]),
            &q("Who are you?", &["-n", "8", "--temp", "0", "--chat"]),
            &q("word", &["-n", "500", "-c", "16", "--temp", "0", "--ignore-eos"]),
            &["run", "nope.gguf", "hi"],
            &["run", "qwen2.5:0.5b"],
            &["run", "one", "two", "three"],
            &["run", "-m", &qwen, "one", "two"],
            &["run"],
            &["run", "x", "--temp", "hot"],
            &["run", "x", "-s", "any"],
            &["run", "x", "--raw", "--chat"],
        ],
    );
}

#[test]
fn options_of_other_programs() {
    transcript(
        "tips",
        &[
            &["run", "x", "-ngl", "99"],
            &["run", "x", "-fa", "on"],
            &["serve", "--mlock"],
            &["run", "x", "--ctx-sise", "5"],
            &["serve", "--top-pp", "1"],
            &["serve", "--gpu"],
            &["serve", "--listen", "127.0.0.1:80"],
            &["serve", "--tls-clients"],
            &["quantize", "-m", "a", "b", "c", "Q4_0"],
            &["inspect", "--isa", "avx2"],
            &["frobnicate"],
        ],
    );
}

#[test]
fn serving() {
    transcript(
        "serve",
        &[
            &["serve", "--host", "0.0.0.0"],
            &["serve", "--port", "99999"],
            &["serve", "--queue-high", "5", "--queue-low", "9"],
            &["serve", "--config", "nope.toml"],
            &["serve", "--tls-cert", "cert.pem"],
            &["serve", "--kv-type", "q4"],
            &["serve", "--state-key-file", "key"],
            &["serve", "--temperature", "9"],
            &["serve", "nope.gguf", "--log-level", "off"],
        ],
    );
}

#[test]
fn administering() {
    let at = ["--url", "http://127.0.0.1:9"];
    let with = |args: &[&'static str]| [&["admin"], args, &at[..]].concat();
    transcript(
        "admin",
        &[
            &with(&["models"]),
            &with(&["set", "queue-high"]),
            &with(&["set", "queue-high=many"]),
            &with(&["load"]),
            &["admin", "frobnicate"],
            &["admin"],
            &["admin", "--url", "127.0.0.1", "models"],
            &["admin", "audit", "verify", "nope.log"],
        ],
    );
}

#[test]
fn chatting() {
    let script = "Hello\n/tokens\n/stats\nTell me \\\na story\n/regen\n/edit\n";
    let args = ["chat", "-n", "6", "--temp", "0", "--isa", "scalar", "-t", "1"];
    compare("chat", record(&args, Some(script)) + &record(&["chat", "nope.gguf"], Some("")));
}

#[test]
fn files() {
    let (tiny, k256) = (fixture("starling-tiny/starling-tiny-q8_0.gguf"), fixture("reference/llama-k256-bf16.gguf"));
    let f16 = fixture("starling-tiny/starling-tiny-f16.gguf");
    let out = super::starling::temp("transcript.gguf");
    let bytes = std::fs::read(&tiny).expect("a model");
    let short = super::starling::written("short-transcript.gguf", &bytes[..bytes.len() / 2]);
    transcript(
        "files",
        &[
            &["quantize", &k256, &out, "Q4_K_M"],
            &["quantize", &f16, &out, "Q4_K_M"],
            &["quantize", &tiny, &out, "Q4_0"],
            &["quantize", &tiny, &out, "Q9"],
            &["inspect", &short],
            &["run", &short, "hi"],
            &["inspect", "nope.gguf"],
            &["tokenize", "Once upon a time"],
            &["tokenize", &tiny, "Once upon a time"],
            &["detokenize", "1", "99999999"],
            &["embed", "text"],
            &["logits", "--ids", "99999999"],
            &["perplexity", "--file", "nope.txt"],
            &["verify", "nope.json"],
            &["bench", "-p", "0", "-n", "0"],
            &["health", "--url", "http://127.0.0.1:9"],
        ],
    );
}
