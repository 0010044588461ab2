//! A server with an administrator, and files for tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::server::{LIMIT, Response, Server, fixture};

/// A directory that is removed on drop.
pub(crate) struct Directory(pub(crate) PathBuf);

impl Directory {
    pub(crate) fn new() -> Directory {
        static N: AtomicUsize = AtomicUsize::new(0);
        let n = N.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("starling-serve-{}-{n}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory");
        Directory(path)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).expect("a file");
        path.to_str().expect("a path").into()
    }

    /// Copies a reference model under a name.
    pub(crate) fn model(&self, of: &str, name: &str) -> String {
        let path = self.0.join(name);
        // a new file, as a download makes it: the old one may be mapped
        let new = self.0.join(format!(".{name}"));
        fs::copy(reference(of), &new).expect("a copy");
        fs::rename(&new, &path).expect("a file");
        path.to_str().expect("a path").into()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The path of a reference model.
pub(crate) fn reference(name: &str) -> String {
    fixture(&format!("reference/{name}.gguf"))
}

pub(crate) const KEY: &str = "administrator-key";

/// A server with an administrator.
pub(crate) struct Managed {
    pub(crate) server: Server,
    _directory: Directory,
}

impl Managed {
    pub(crate) fn start(args: &[&str]) -> Managed {
        let directory = Directory::new();
        let keys = directory.write("keys", format!("# administrators\n{KEY} anna\n"));
        let args: Vec<&str> = ["--admin-key-file", &keys, "--fault-injection"].iter().chain(args).copied().collect();
        Managed { server: Server::start(&args), _directory: directory }
    }

    pub(crate) fn send(&self, method: &str, path: &str, body: &Value) -> Response {
        self.send_to(method, &format!("/admin/{path}"), body)
    }

    /// The response of any endpoint.
    pub(crate) fn send_to(&self, method: &str, path: &str, body: &Value) -> Response {
        let key = format!("Bearer {KEY}");
        let headers = [("authorization", key.as_str()), ("content-type", "application/json")];
        self.server.send(method, path, &headers, body.to_string().as_bytes())
    }

    /// The JSON of a response that must have status 200.
    #[track_caller]
    pub(crate) fn ok(&self, method: &str, path: &str, body: &Value) -> Value {
        let response = self.send(method, path, body);
        assert_eq!(response.status, 200, "{method} {path} {body}: {}", response.text());
        response.json()
    }

    /// Waits until `is_so` holds for `GET /admin/PATH`.
    #[track_caller]
    pub(crate) fn wait(&self, path: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let value = self.ok("GET", path, &json!({}));
            if is_so(&value) {
                return value;
            }
            assert!(start.elapsed() < LIMIT, "{path}: {value}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A request for a greedy completion without end tokens.
pub(crate) fn completion(model: &str, prompt: &str, max_tokens: usize) -> Value {
    json!({ "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true })
}

/// Tokens of a greedy completion of `n` tokens after a prompt in tokens, and the number of prompt tokens from the cache.
pub(crate) fn continued(server: &Server, model: &str, prompt: &[u64], n: usize) -> (Vec<u64>, u64) {
    let request = json!({ "model": model, "prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": true,
                          "return_tokens": true });
    let answer = server.ok("/completion", &request);
    let tokens = answer["tokens"].as_array().expect("tokens").iter().map(|token| token.as_u64().expect("a token"));
    (tokens.collect(), answer["tokens_cached"].as_u64().expect("a number"))
}

/// The text of a completion.
#[track_caller]
pub(crate) fn text(response: &Value) -> String {
    response["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{response}")).into()
}
