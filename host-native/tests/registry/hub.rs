//! A stand-in of the hub: an HTTP server that serves files with ranges, and misbehaves as a test wants.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the server answers requests for files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Good,
    /// Sends so many bytes of each of the first responses, then cuts the connection.
    Cut {
        bytes: usize,
        times: usize,
    },
    /// Ignores ranges.
    NoRanges,
    Html,
    Status(u16),
    RedirectLoop,
    /// Redirects to another host, on port `other`.
    Elsewhere,
    /// Changes a byte.
    Damaged,
    /// Does not say how large a file is.
    NoLength,
    /// Sends parts of whatever version there is now, whichever is asked for.
    NoIfRange,
    /// Accepts requests for files and sends nothing.
    Stalled,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) range: Option<String>,
    pub(crate) if_range: Option<String>,
    pub(crate) authorization: Option<String>,
    pub(crate) host: String,
}

struct State {
    files: Mutex<Vec<(String, Vec<u8>)>>,
    /// What the API says in place of the truth.
    api: Mutex<Option<Value>>,
    mode: Mutex<Mode>,
    seen: Mutex<Vec<Seen>>,
    port: u16,
}

pub(crate) struct Hub(Arc<State>);

impl Hub {
    /// Serves a repository with these files.
    pub(crate) fn start(files: Vec<(String, Vec<u8>)>) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let (mode, seen) = (Mutex::new(Mode::Good), Mutex::default());
        let (files, api) = (Mutex::new(files), Mutex::default());
        let state = Arc::new(State { files, api, mode, seen, port });
        let inner = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&inner);
                // a client that goes away is no error
                thread::spawn(move || drop(state.serve(stream)));
            }
        });
        Hub(state)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.0.port)
    }

    pub(crate) fn set(&self, mode: Mode) {
        *self.0.mode.lock().expect("a lock") = mode;
    }

    /// Replaces the content of a file.
    pub(crate) fn replace(&self, name: &str, content: &[u8]) {
        let mut files = self.0.files.lock().expect("a lock");
        files.iter_mut().filter(|(known, _)| known == name).for_each(|(_, old)| *old = content.to_vec());
    }

    /// Lets the API answer `value`.
    pub(crate) fn set_api(&self, value: Value) {
        *self.0.api.lock().expect("a lock") = Some(value);
    }

    /// Requests for files since the last call.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        let all = std::mem::take(&mut *self.0.seen.lock().expect("a lock"));
        all.into_iter().filter(|seen| !seen.path.starts_with("/api/")).collect()
    }
}

impl State {
    fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            let path = line.split(' ').nth(1).unwrap_or_default().to_string();
            let (mut seen, mut etag) = (Seen { path: path.clone(), ..Seen::default() }, None);
            loop {
                let mut line = String::new();
                reader.read_line(&mut line)?;
                let Some((name, value)) = line.trim_end().split_once(": ") else { break };
                match name.to_ascii_lowercase().as_str() {
                    "range" => seen.range = Some(value.into()),
                    "if-range" => seen.if_range = Some(value.into()),
                    "authorization" => seen.authorization = Some(value.into()),
                    "host" => seen.host = value.into(),
                    "if-none-match" => etag = Some(value.to_string()),
                    _ => {}
                }
            }
            self.seen.lock().expect("a lock").push(seen.clone());
            if !self.respond(&mut stream, &path, &seen, etag.as_deref())? {
                return Ok(());
            }
        }
    }

    /// Returns whether the connection stays open.
    fn respond(&self, stream: &mut TcpStream, path: &str, seen: &Seen, etag: Option<&str>) -> std::io::Result<bool> {
        let mode = *self.mode.lock().expect("a lock");
        let send = |stream: &mut TcpStream, status: u16, headers: &str, body: &[u8]| {
            let length = body.len();
            write!(stream, "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n{headers}\r\n")?;
            stream.write_all(body)?;
            Ok(true)
        };
        if path.starts_with("/api/models/o/r/") && !matches!(mode, Mode::Status(_)) {
            let known = self.api.lock().expect("a lock").clone().unwrap_or_else(|| self.api());
            return send(stream, 200, "content-type: application/json\r\n", known.to_string().as_bytes());
        }
        let path = path.split('?').next().unwrap_or(path);
        let name = path.split("/resolve/").last().unwrap_or_default().trim_start_matches(COMMIT).trim_matches('/');
        let file = self.files.lock().expect("a lock").iter().find(|(known, _)| known == name).cloned();
        let is_here = seen.host.starts_with("127.0.0.1");
        match mode {
            Mode::Html => send(stream, 200, "content-type: text/html\r\n", b"<html>Please log in</html>"),
            Mode::Status(status) => send(stream, status, "", b"no such thing"),
            // the client gives up, or its process ends
            Mode::Stalled => stream.read(&mut [0]).map(|_| false),
            Mode::RedirectLoop => send(stream, 302, &format!("location: {path}\r\n"), b""),
            Mode::Elsewhere if is_here => {
                send(stream, 302, &format!("location: http://localhost:{}{path}\r\n", self.port), b"")
            }
            _ => {
                let Some((_, content)) = file else { return send(stream, 404, "", b"not found") };
                let tag = format!("\"{}\"", &digest(&content)[..16]);
                if etag == Some(&tag) {
                    return send(stream, 304, "", b"");
                }
                let mut content = content;
                if mode == Mode::Damaged {
                    content[100] ^= 1;
                }
                let is_other = seen.if_range.as_ref().is_some_and(|version| *version != tag) && mode != Mode::NoIfRange;
                let has_ranges = !is_other && !matches!(mode, Mode::NoRanges | Mode::NoLength);
                self.send_file(stream, &content, seen.range.as_deref().filter(|_| has_ranges), &tag, mode)
            }
        }
    }

    fn send_file(
        &self,
        stream: &mut TcpStream,
        content: &[u8],
        range: Option<&str>,
        tag: &str,
        mode: Mode,
    ) -> std::io::Result<bool> {
        let size = content.len();
        let bounds = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        let part = bounds.map(|(from, to)| {
            let from: usize = from.parse().expect("a number");
            from..to.parse::<usize>().map_or(size, |to| (to + 1).min(size))
        });
        let (status, body) = part.clone().map_or((200, content), |part| (206, &content[part]));
        let range =
            part.map_or_else(String::new, |p| format!("content-range: bytes {}-{}/{size}\r\n", p.start, p.end - 1));
        let length = body.len();
        if mode == Mode::NoLength {
            write!(stream, "HTTP/1.1 200 X\r\nconnection: close\r\netag: {tag}\r\n\r\n")?;
            stream.write_all(body)?;
            return Ok(false);
        }
        write!(
            stream,
            "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\ncontent-type: application/octet-stream\r\netag: {tag}\r\n{range}\r\n"
        )?;
        if let Mode::Cut { bytes, times } = mode
            && times > 0
            && bytes < length
        {
            *self.mode.lock().expect("a lock") = Mode::Cut { bytes, times: times - 1 };
            stream.write_all(&body[..bytes])?;
            return Ok(false);
        }
        stream.write_all(body)?;
        Ok(true)
    }

    fn api(&self) -> Value {
        let file = |(name, content): &(String, Vec<u8>)| json!({ "rfilename": name, "size": content.len(), "lfs": { "sha256": digest(content), "size": content.len() } });
        let files: Vec<Value> = self.files.lock().expect("a lock").iter().map(file).collect();
        json!({ "sha": COMMIT, "siblings": files })
    }
}

pub(crate) fn digest(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}
