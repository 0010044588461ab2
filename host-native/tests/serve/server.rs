//! A server process, and a minimal HTTP client that shows the raw response.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Time limit of each wait and read.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A server process, killed on drop.
pub(crate) struct Server {
    child: Child,
    /// `host:port`
    pub(crate) address: String,
}

/// A response with the chunks of its body joined.
#[derive(Debug, Clone)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// Server-sent events: name and data of each.
    pub(crate) fn events(&self) -> Vec<(String, String)> {
        let text = String::from_utf8(self.body.clone()).expect("UTF-8");
        assert!(text.ends_with("\n\n"), "a stream ends with an event: {text:?}");
        let field = |event: &str, name: &str| {
            event.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().to_string()
        };
        text.trim_end().split("\n\n").map(|e| (field(e, "event: "), field(e, "data: "))).collect()
    }

    /// The chunks of an OpenAI stream, without the final `[DONE]`.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().expect("events").1, "[DONE]");
        events.iter().map(|(_, data)| serde_json::from_str(data).expect("JSON")).collect()
    }
}

pub(crate) fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name).to_str().expect("a path").into()
}

/// The `starling` command without `STARLING_*` environment variables.
pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_starling"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("STARLING_")) {
        command.env_remove(name);
    }
    command.args(args);
    command
}

impl Server {
    /// Starts a server on a free port and waits until it listens.
    pub(crate) fn start(args: &[&str]) -> Server {
        Server::start_with(args, &[])
    }

    pub(crate) fn start_with(args: &[&str], environment: &[(&str, &str)]) -> Server {
        let mut command = command(&["serve", "--port", "0", "--log-level", "error"]);
        let command = command.args(args).envs(environment.iter().copied()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the server");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        Server::of(child, &line)
    }

    /// `line` is the URL that the process printed.
    pub(crate) fn of(child: Child, line: &str) -> Server {
        let address = line.trim().split_once("://").unwrap_or_else(|| panic!("an address, not {line:?}")).1.into();
        Server { child, address }
    }

    pub(crate) fn get(&self, path: &str) -> Response {
        self.send("GET", path, &[], b"")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Response {
        self.post_with(path, &[], body)
    }

    pub(crate) fn post_with(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Response {
        let headers: Vec<_> = [("content-type", "application/json")].iter().chain(headers).copied().collect();
        self.send("POST", path, &headers, body.to_string().as_bytes())
    }

    /// POSTs `body`; the JSON of a response that must have status 200.
    #[track_caller]
    pub(crate) fn ok(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body);
        assert_eq!(response.status, 200, "{path} {body}: {}", response.text());
        response.json()
    }

    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        let mut stream = self.open(method, path, headers, body);
        read_response(&mut stream)
    }

    /// Sends a request and leaves the connection open.
    pub(crate) fn open(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        stream.set_read_timeout(Some(LIMIT)).expect("a socket");
        let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
        if !headers.iter().any(|(name, _)| *name == "host") {
            head += &format!("host: {}\r\n", self.address);
        }
        headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
        stream.write_all((head + "\r\n").as_bytes()).expect("a request");
        // a server that refuses the headers may have closed the connection
        let _ = stream.write_all(body);
        stream
    }

    pub(crate) fn stats(&self) -> Value {
        self.get("/server/stats").json()
    }

    /// Waits until `is_so` holds for `/server/stats`.
    #[track_caller]
    pub(crate) fn wait(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Duration {
        let start = Instant::now();
        while !is_so(&self.stats()) {
            assert!(start.elapsed() < LIMIT, "{what}: {}", self.stats());
            thread::sleep(Duration::from_millis(2));
        }
        start.elapsed()
    }

    /// Waits until the metrics contain `line`, and returns them: numbers of the engine are published after its step.
    #[track_caller]
    pub(crate) fn wait_metrics(&self, line: &str) -> String {
        let start = Instant::now();
        loop {
            let metrics = self.get("/metrics").text();
            if metrics.contains(line) {
                return metrics;
            }
            assert!(start.elapsed() < LIMIT, "{line}: {metrics}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Process ID.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        assert!(status.expect("kill").success());
    }

    /// Waits until the process exits.
    pub(crate) fn wait_end(mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a status") {
                return status;
            }
            assert!(start.elapsed() < LIMIT, "the server does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a response to its end.
pub(crate) fn read_response(stream: &mut TcpStream) -> Response {
    let mut reader = BufReader::new(stream);
    let (status, headers) = read_head(&mut reader);
    let has = |name: &str, value: &str| headers.iter().any(|(n, v)| n == name && v.contains(value));
    let mut body = Vec::new();
    if has("transfer-encoding", "chunked") {
        while let Some(mut chunk) = read_chunk(&mut reader) {
            body.append(&mut chunk);
        }
    } else {
        reader.read_to_end(&mut body).expect("a body");
    }
    Response { status, headers, body }
}

pub(crate) fn read_head(reader: &mut impl BufRead) -> (u16, Vec<(String, String)>) {
    let mut line = String::new();
    reader.read_line(&mut line).expect("a status line");
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no status: {line:?}")).parse().expect("a number");
    let mut headers = Vec::new();
    loop {
        line.clear();
        reader.read_line(&mut line).expect("a header");
        let Some((name, value)) = line.trim_end().split_once(':') else { return (status, headers) };
        headers.push((name.to_ascii_lowercase(), value.trim().to_string()));
    }
}

/// The next chunk of a chunked body; `None` at its end.
pub(crate) fn read_chunk(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut line = String::new();
    reader.read_line(&mut line).expect("a length");
    let n = usize::from_str_radix(line.trim(), 16).unwrap_or_else(|_| panic!("a length, not {line:?}"));
    let mut chunk = vec![0; n + 2];
    reader.read_exact(&mut chunk).expect("a chunk");
    chunk.truncate(n);
    (n > 0).then_some(chunk)
}
