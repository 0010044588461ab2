//! `starling pull | list | show | rm | verify`, and models by name, against a stand-in of the hub.

mod hub;
mod untrusted;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use hub::{COMMIT, Hub, Mode, digest};
use serde_json::Value;

/// Larger than two parts of a download.
const LARGE: usize = 40 << 20;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name)
}

fn model() -> Vec<u8> {
    fs::read(fixture("reference/llama-k256-q4_k_m.gguf")).expect("a model")
}

/// A model's header, then bytes that no test reads.
fn large() -> Vec<u8> {
    let mut content = model();
    content
        .extend((0u64..).flat_map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()).take(LARGE - content.len()));
    content
}

fn repository() -> Hub {
    Hub::start(vec![
        ("README.md".into(), b"text".to_vec()),
        ("tiny-Q4_K_M.gguf".into(), model()),
        ("tiny-Q8_0.gguf".into(), fs::read(fixture("reference/llama-k256-q8_0.gguf")).expect("a model")),
    ])
}

/// A home with a store of its own, removed on drop.
struct Home(PathBuf);

impl Home {
    fn new() -> Home {
        static N: AtomicUsize = AtomicUsize::new(0);
        let n = N.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("starling-registry-{}-{n}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory");
        Home(path)
    }

    fn command(&self, hub: &Hub, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_starling"));
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("STARLING_") || name.starts_with("HF_")) {
            command.env_remove(name);
        }
        for name in ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"] {
            command.env_remove(name);
        }
        command.env("STARLING_HOME", self.0.join("store")).env("HF_HUB_CACHE", self.0.join("hub"));
        command.env("HF_ENDPOINT", hub.url()).args(args);
        command
    }

    fn run(&self, hub: &Hub, args: &[&str]) -> Output {
        self.command(hub, args).output().expect("a process")
    }

    /// Standard output of a command that must succeed.
    #[track_caller]
    fn ok(&self, hub: &Hub, args: &[&str]) -> String {
        let output = self.run(hub, args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Standard error of a command that must fail.
    #[track_caller]
    fn error(&self, hub: &Hub, args: &[&str]) -> String {
        let output = self.run(hub, args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{args:?}: {error}");
        error
    }

    /// Names of all files under the store that are not locks.
    fn files(&self) -> Vec<String> {
        let mut all = Vec::new();
        for directory in ["store/blobs", "store/models"] {
            let entries = fs::read_dir(self.0.join(directory)).into_iter().flatten().flatten();
            all.extend(entries.map(|entry| entry.file_name().to_string_lossy().into_owned()));
        }
        all.retain(|name| !name.ends_with(".lock"));
        all.sort();
        all
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A server process, killed on drop.
struct Running {
    child: Child,
    /// `host:port`
    address: String,
}

impl Running {
    fn start(mut command: Command) -> Running {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("a server");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        let address = line.trim().strip_prefix("http://").expect("an address").into();
        Running { child, address }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_model_is_pulled_listed_used_verified_and_removed() {
    let (home, hub) = (Home::new(), repository());
    assert_eq!(home.ok(&hub, &["pull", "hf:o/r"]), "tiny-Q4_K_M\n");
    let bytes = hub.seen();
    assert!(bytes.iter().all(|seen| seen.path == format!("/o/r/resolve/{COMMIT}/tiny-Q4_K_M.gguf")), "{bytes:?}");
    // nothing is transferred again
    assert_eq!(home.ok(&hub, &["pull", "hf:o/r"]), "tiny-Q4_K_M\n");
    assert_eq!(hub.seen().len(), 0);
    home.ok(&hub, &["pull", "hf:o/r:q8_0", "--name", "eight"]);
    let list = home.ok(&hub, &["list"]);
    assert!(list.contains("tiny-Q4_K_M") && list.contains("eight") && list.contains("hf:o/r:q8_0"), "{list}");
    assert!(list.contains("ARCHITECTURE") && list.contains("llama"), "{list}");
    let json: Value = serde_json::from_str(&home.ok(&hub, &["list", "--json"])).expect("JSON");
    assert_eq!(json["models"][1]["files"][0]["sha256"], digest(&model()), "{json}");
    assert_eq!(json["models"][0]["revision"], COMMIT);
    assert!(home.ok(&hub, &["show", "eight"]).contains("architecture  llama"));
    let answer = |source: &str| home.ok(&hub, &["run", "-m", source, "-n", "4", "--temp", "0", "x"]);
    let path = fixture("reference/llama-k256-q4_k_m.gguf");
    assert_eq!(answer("tiny-Q4_K_M"), answer(path.to_str().expect("a path")));
    assert_eq!(answer("hf:o/r"), answer("tiny-Q4_K_M"));
    assert!(home.ok(&hub, &["verify", "--models"]).lines().all(|line| line.ends_with(": ok")));
    let stored = home.0.join("store/models/eight/tiny-Q8_0.gguf");
    let mut content = fs::read(&stored).expect("a file");
    content[5000] ^= 1;
    fs::write(&stored, content).expect("a file");
    assert!(home.error(&hub, &["verify", "eight"]).contains("1 files are damaged"));
    home.ok(&hub, &["rm", "eight", "tiny-Q4_K_M"]);
    assert_eq!(home.files(), [""; 0]);
    let error = home.error(&hub, &["run", "-m", "eigth", "x"]);
    assert!(error.contains("eigth: no such file, and no model of this name in the store"), "{error}");
}

/// Ollama's clients show the bytes of a download.
#[test]
fn a_server_pulls_and_tells_the_bytes() {
    let (home, hub) = (Home::new(), repository());
    let command = home.command(&hub, &["serve", "--port", "0", "--log-level", "off", "--manage-without-keys"]);
    let server = Running::start(command);
    let mut stream = TcpStream::connect(&server.address).expect("a connection");
    let body = r#"{"model": "hf:o/r:q8_0"}"#;
    let request = format!(
        "POST /api/pull HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).expect("a request");
    let mut response = String::new();
    stream.read_to_string(&mut response).expect("a response");
    let lines: Vec<Value> = response.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let lines: Vec<&Value> = lines.iter().filter(|line| line.is_object()).collect();
    let total = fs::read(fixture("reference/llama-k256-q8_0.gguf")).expect("a model").len();
    assert_eq!(lines[0]["status"], "pulling manifest", "{response}");
    let last = lines[lines.len() - 2];
    assert_eq!((&last["total"], &last["completed"]), (&total.into(), &total.into()), "{response}");
    assert_eq!(lines[lines.len() - 1]["status"], "success", "{response}");
}

#[test]
fn a_model_that_is_not_there_is_downloaded_unless_offline() {
    let (home, hub) = (Home::new(), repository());
    let run = |offline: bool| {
        let mut command = home.command(&hub, &["run", "-m", "hf:o/r:Q8_0", "-n", "1", "x"]);
        if offline {
            command.env("HF_HUB_OFFLINE", "1");
        }
        command.output().expect("a process")
    };
    let output = run(true);
    assert!(String::from_utf8_lossy(&output.stderr).contains("nothing is downloaded offline"));
    assert!(hub.seen().is_empty());
    assert!(run(false).status.success());
    assert!(!hub.seen().is_empty());
    assert!(run(true).status.success());
}

#[test]
fn a_cut_download_goes_on_and_parts_come_over_several_connections() {
    let content = large();
    let hub = Hub::start(vec![("large.gguf".into(), content.clone())]);
    let home = Home::new();
    // a cut is invisible
    hub.set(Mode::Cut { bytes: 3 << 20, times: 2 });
    home.ok(&hub, &["pull", "hf:o/r"]);
    let seen = hub.seen();
    let blob = home.0.join("store/blobs").join(digest(&content));
    assert!(fs::read(&blob).expect("a blob") == content);
    assert!(seen.len() >= 5 && seen.iter().all(|seen| seen.range.is_some()), "{seen:?}");
    home.ok(&hub, &["rm", "large"]);
    // more cuts than attempts: the second run asks only for what is missing
    hub.set(Mode::Cut { bytes: 1 << 20, times: 1000 });
    let error = home.error(&hub, &["pull", "hf:o/r", "--connections", "1"]);
    assert!(error.contains("received") && error.contains("run the command again"), "{error}");
    assert!(home.files().iter().any(|name| name.ends_with(".partial")));
    hub.set(Mode::Cut { bytes: 20 << 20, times: 0 });
    hub.seen();
    home.ok(&hub, &["pull", "hf:o/r"]);
    assert!(fs::read(&blob).expect("a blob") == content);
    // a server without ranges
    home.ok(&hub, &["rm", "large"]);
    hub.set(Mode::NoRanges);
    home.ok(&hub, &["pull", "hf:o/r"]);
    assert!(fs::read(&blob).expect("a blob") == content);
}

#[test]
fn an_interrupted_download_loses_no_part() {
    let content = large();
    let hub = Hub::start(vec![("large.gguf".into(), content.clone())]);
    let home = Home::new();
    // the first part arrives, then every connection is cut
    hub.set(Mode::Cut { bytes: 15 << 20, times: 100_000 });
    let mut first = home.command(&hub, &["pull", "hf:o/r", "--connections", "1"]).spawn().expect("a process");
    let index = || {
        let files = fs::read_dir(home.0.join("store/blobs")).into_iter().flatten().flatten();
        let parts = files.map(|entry| entry.path()).find(|path| path.extension().is_some_and(|e| e == "parts"));
        parts.and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default()
    };
    while !index().starts_with('1') && first.try_wait().expect("a process").is_none() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let _ = first.kill();
    let _ = first.wait();
    hub.set(Mode::Good);
    hub.seen();
    home.ok(&hub, &["pull", "hf:o/r"]);
    let ranges: Vec<String> = hub.seen().into_iter().filter_map(|seen| seen.range).collect();
    // a request for the first bytes learns the size; the complete part is not asked for again
    assert!(ranges.iter().filter(|range| range.starts_with("bytes=0-")).count() <= 1, "{ranges:?}");
    let blob = home.0.join("store/blobs").join(digest(&content));
    assert!(fs::read(&blob).expect("a blob") == content);
}

#[test]
fn bad_answers_have_clear_errors_and_leave_nothing() {
    let hub = repository();
    for (mode, parts) in [
        (Mode::Html, ["found no GGUF model but text/html", ""]),
        (Mode::Status(401), ["gated or private", "HF_TOKEN"]),
        (Mode::Status(404), ["status 404", "no such thing"]),
        (Mode::RedirectLoop, ["more than 10 redirects", ""]),
        (Mode::Damaged, ["found SHA-256", "expected"]),
    ] {
        let home = Home::new();
        hub.set(mode);
        let error = home.error(&hub, &["pull", "hf:o/r"]);
        assert!(parts.iter().all(|part| error.contains(part)), "{mode:?}: {error}");
        assert_eq!(home.files(), [""; 0], "{mode:?}");
    }
    hub.set(Mode::Good);
    let home = Home::new();
    let url = format!("{}/o/r/resolve/{COMMIT}/tiny-Q8_0.gguf", hub.url());
    let error = home.error(&hub, &["pull", &url, "--sha256", &"0".repeat(64)]);
    assert!(error.contains("the download was deleted"), "{error}");
    assert_eq!(home.files(), [""; 0]);
    let error = home.error(&hub, &["pull", "hf:o/r:Q5_0"]);
    assert!(error.contains("no model file matches \"Q5_0\"; found: tiny-Q4_K_M.gguf, tiny-Q8_0.gguf"), "{error}");
    assert!(home.error(&hub, &["pull", "http://example.org/a.gguf"]).contains("expected an https URL"));
    assert!(home.error(&hub, &["pull", "a.gguf"]).contains("expected hf:OWNER/REPO"));
}

#[test]
fn a_token_reaches_the_hub_and_no_other_host() {
    let (home, hub) = (Home::new(), repository());
    hub.set(Mode::Elsewhere);
    let output = home.command(&hub, &["pull", "hf:o/r"]).env("HF_TOKEN", "secret").output().expect("a process");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (here, elsewhere): (Vec<_>, Vec<_>) = hub.seen().into_iter().partition(|seen| seen.host.starts_with("127."));
    assert!(here.iter().all(|seen| seen.authorization.as_deref() == Some("Bearer secret")) && !here.is_empty());
    assert!(elsewhere.iter().all(|seen| seen.authorization.is_none()) && !elsewhere.is_empty());
}

#[test]
fn a_url_is_downloaded_again_only_if_it_has_changed() {
    let (home, hub) = (Home::new(), repository());
    let url = format!("{}/o/r/resolve/{COMMIT}/tiny-Q8_0.gguf", hub.url());
    assert_eq!(home.ok(&hub, &["pull", &url]), "tiny-Q8_0\n");
    hub.seen();
    home.ok(&hub, &["pull", &url]);
    let seen = hub.seen();
    assert!(seen.len() == 1 && seen[0].range.is_none(), "one request with the ETag: {seen:?}");
}

#[test]
fn split_models_are_pulled_whole() {
    let parts = [1, 2].map(|i| (format!("d/m-0000{i}-of-00002.gguf"), model()));
    let (home, hub) = (Home::new(), Hub::start(parts.to_vec()));
    assert_eq!(home.ok(&hub, &["pull", "hf:o/r"]), "m\n");
    for i in [1, 2] {
        assert!(home.0.join(format!("store/models/m/m-0000{i}-of-00002.gguf")).is_file());
    }
}

#[test]
fn two_processes_share_a_download() {
    let content = large();
    let (home, hub) = (Home::new(), Hub::start(vec![("large.gguf".into(), content)]));
    let pulls: Vec<_> = (0..2)
        .map(|_| home.command(&hub, &["pull", "hf:o/r", "--connections", "1"]).spawn().expect("a process"))
        .collect();
    for mut pull in pulls {
        assert!(pull.wait().expect("a process").success());
    }
    assert_eq!(hub.seen().len(), 3, "each part once");
}

#[test]
fn models_in_use_are_spared_by_rm_and_quota() {
    let (home, hub) = (Home::new(), repository());
    home.ok(&hub, &["pull", "hf:o/r"]);
    let mut server = home.command(&hub, &["serve", "--port", "0", "--log-level", "error", "-m", "tiny-Q4_K_M"]);
    let mut server = server.stdout(std::process::Stdio::piped()).spawn().expect("a server");
    let mut line = String::new();
    let stdout = server.stdout.take().expect("a pipe");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).expect("a line");
    assert!(home.error(&hub, &["rm", "tiny-Q4_K_M"]).contains("in use by another process"));
    let quota = |bytes: &str| {
        home.command(&hub, &["pull", "hf:o/r:Q8_0"]).env("STARLING_STORE_QUOTA", bytes).output().expect("a process")
    };
    let output = quota("800KB");
    assert!(String::from_utf8_lossy(&output.stderr).contains("exceed its quota of 800000"));
    let _ = server.kill();
    let _ = server.wait();
    // without the server, the least recently used model makes room
    assert!(quota("800KB").status.success());
    assert_eq!(home.ok(&hub, &["list"]).matches("tiny").count(), 1);
}
