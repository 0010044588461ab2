//! Connection limits: number, idle time, and clients that send or read nothing.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::net::TcpSocket;

use crate::admin_client::{KEY, Managed};
use crate::server::{LIMIT, Response, Server, read_response};

/// Opens `n` connections from the loopback address `from`.
fn connect(server: &Server, from: [u8; 4], n: usize) -> Vec<TcpStream> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
    let to: SocketAddr = server.address.parse().expect("an address");
    let open = || {
        let stream = runtime.block_on(async {
            let socket = TcpSocket::new_v4()?;
            socket.bind((from, 0).into())?;
            socket.connect(to).await?.into_std()
        });
        let stream = stream.expect("a connection");
        stream.set_nonblocking(false).expect("a socket");
        stream.set_read_timeout(Some(LIMIT)).expect("a socket");
        stream
    };
    (0..n).map(|_| open()).collect()
}

/// Waits until the server closes a connection.
#[track_caller]
fn closed(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset),
    }
}

#[test]
fn silent_connections_of_one_address_do_not_shut_out_others() {
    // a timeout that never fires here: only the limit per address keeps the server reachable
    let server = Server::start(&["--header-timeout", "600"]);
    let mut silent = connect(&server, [127, 0, 0, 2], 1024);
    assert_eq!(server.get("/livez").status, 200);
    // the limit is half of 1024; the server closes the others
    let closed = silent.split_off(512);
    for mut stream in closed {
        self::closed(&mut stream);
    }
    // below the limit, the same address is served
    drop(silent.pop());
    let request = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let start = Instant::now();
    loop {
        let mut stream = connect(&server, [127, 0, 0, 2], 1).remove(0);
        let mut response = String::new();
        // the server may not have noticed yet that the other connection was dropped
        if stream.write_all(request).and_then(|()| stream.read_to_string(&mut response)).is_ok() && !response.is_empty()
        {
            assert!(response.starts_with("HTTP/1.1 200"), "{response}");
            break;
        }
        assert!(start.elapsed() < LIMIT, "no response below the limit");
    }
}

/// The response to a request on a connection.
fn ask(stream: &mut TcpStream, head: &str) -> Response {
    let head = format!("{head}\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n\r\n");
    stream.write_all(head.as_bytes()).expect("sent");
    read_response(stream)
}

#[test]
fn probes_and_administrators_are_served_beyond_the_limits() {
    let managed = Managed::start(&["--max-connections", "4", "--header-timeout", "600"]);
    let server = &managed.server;
    let silent = [connect(server, [127, 0, 0, 2], 2), connect(server, [127, 0, 0, 3], 2)];
    // another address, and one at its limit
    for from in [[127, 0, 0, 1], [127, 0, 0, 2]] {
        let ask = |path: &str| ask(&mut connect(server, from, 1).remove(0), &format!("GET {path} HTTP/1.1"));
        for path in ["/livez", "/readyz", "/health", "/metrics", "/admin/models"] {
            let response = ask(path);
            assert_eq!((response.status, response.header("connection")), (200, Some("close")), "{path}");
        }
        let response = ask("/v1/models");
        assert_eq!((response.status, &response.json()["error"]["code"]), (503, &json!("too_many_connections")));
        assert!(response.header("retry-after").is_some());
    }
    // those that are silent do not keep the places of probes
    let mut more = connect(server, [127, 0, 0, 2], 20);
    assert_eq!(ask(&mut connect(server, [127, 0, 0, 3], 1).remove(0), "GET /livez HTTP/1.1").status, 200);
    more.iter_mut().for_each(closed);
    drop(silent);
}

#[test]
fn what_connections_hold_together_is_bounded() {
    let server = Server::start(&["--connection-memory", "1MiB"]);
    let body = format!("{{\"text\": \"{}", "a".repeat(100_000));
    let begin = |stream: &mut TcpStream| {
        let head =
            "POST /v1/tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 400000";
        stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).expect("sent");
    };
    // an address has half of it
    let mut first = connect(&server, [127, 0, 0, 2], 6);
    first.iter_mut().for_each(begin);
    let refused = |streams: &mut [TcpStream], status: u16| {
        // which of them comes too late is not determined
        let mut found = None;
        let start = Instant::now();
        while found.is_none() && start.elapsed() < LIMIT {
            for stream in streams.iter_mut() {
                stream.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket");
                if matches!(stream.peek(&mut [0]), Ok(n) if n > 0) {
                    stream.set_read_timeout(Some(LIMIT)).expect("a socket");
                    found = Some(read_response(stream));
                    break;
                }
            }
        }
        let found = found.expect("a refusal");
        assert_eq!((found.status, &found.json()["error"]["code"]), (status, &json!("connection_memory")));
        assert!(found.header("retry-after").is_some());
    };
    refused(&mut first, 429);
    // all have the whole of it
    let mut second = connect(&server, [127, 0, 0, 3], 6);
    second.iter_mut().for_each(begin);
    let mut third = connect(&server, [127, 0, 0, 4], 6);
    refused(&mut second, 429);
    third.iter_mut().for_each(begin);
    refused(&mut third, 503);
    assert_eq!((server.get("/livez").status, server.get("/metrics").status), (200, 200));
    drop((first, second, third));
    let start = Instant::now();
    let request = json!({ "text": "dog ".repeat(10_000) });
    while server.post("/v1/tokenize", &request).status != 200 {
        assert!(start.elapsed() < LIMIT, "the memory of closed connections is not given back");
    }
}

#[test]
fn large_responses_are_streamed_and_the_same() {
    let server = Server::start(&[]);
    let text = "The dog é \"ran\" home.\n".repeat(3000);
    let send = |path: &str, body: &Value| {
        let response = server.post(path, body);
        assert_eq!(response.status, 200, "{path}");
        assert_eq!(response.header("transfer-encoding"), Some("chunked"), "{path}");
        response.json()
    };
    let all = send("/v1/tokenize", &json!({ "text": text, "add_special": false }));
    let tokens = all["tokens"].as_array().expect("tokens");
    let n = tokens.len();
    assert!(n > 5000 && all["count"] == json!(n));
    assert_eq!((all["pieces"].as_array().map(Vec::len), all["offsets"].as_array().map(Vec::len)), (Some(n), Some(n)));
    assert_eq!(all["offsets"][n - 1][1], json!(text.len()));
    let llama = send("/tokenize", &json!({ "content": text }));
    assert_eq!(llama["tokens"], all["tokens"]);
    let with_pieces = send("/tokenize", &json!({ "content": text, "with_pieces": true }));
    assert_eq!(with_pieces["tokens"][n - 1]["id"], tokens[n - 1]);
    assert_eq!(send("/v1/detokenize", &json!({ "tokens": tokens })), json!({ "text": text }));
    assert_eq!(send("/detokenize", &json!({ "tokens": tokens })), json!({ "content": text, "text": text }));
    // part by part as the whole is decoded
    let few = server.ok("/v1/detokenize", &json!({ "tokens": tokens[..70] }));
    assert!(text.starts_with(few["text"].as_str().expect("a text").trim_end_matches('\u{fffd}')));
    let inputs = vec!["dog"; 300];
    let floats = send("/v1/embeddings", &json!({ "input": inputs }));
    let one = server.ok("/v1/embeddings", &json!({ "input": "dog" }));
    let vectors = floats["data"].as_array().expect("vectors");
    assert_eq!((vectors.len(), &floats["model"]), (300, &one["model"]));
    for (i, vector) in vectors.iter().enumerate() {
        assert_eq!((&vector["index"], &vector["embedding"]), (&json!(i), &one["data"][0]["embedding"]));
    }
    assert_eq!(send("/embed", &json!({ "inputs": inputs }))[299], one["data"][0]["embedding"]);
    assert_eq!(
        send("/api/embed", &json!({ "model": one["model"], "input": inputs }))["embeddings"][7],
        one["data"][0]["embedding"]
    );
    let base64 = server.ok("/v1/embeddings", &json!({ "input": inputs, "encoding_format": "base64" }));
    assert_eq!(base64["data"].as_array().map(Vec::len), Some(300));
}

#[test]
fn connections_without_a_request_are_closed() {
    let settings = ["--max-connections", "64", "--max-connections-per-address", "0", "--header-timeout", "0.5"];
    let server = Server::start(&settings);
    let mut all = connect(&server, [127, 0, 0, 1], 64);
    for (i, stream) in all.iter_mut().enumerate() {
        let begin: &[u8] = match i % 4 {
            0 => b"",
            // an incomplete HTTP/2 preface, an incomplete request, and a complete one with keep-alive
            1 => &PREFACE[..9],
            2 => b"GET / HTTP/1.1\r\nhost:",
            _ => b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
        };
        stream.write_all(begin).expect("sent");
    }
    // all connections are in use: this is served beyond the limit
    assert_eq!(server.get("/livez").status, 200);
    all.iter_mut().for_each(closed);
}

#[test]
fn idle_http2_connections_are_closed() {
    let server = Server::start(&["--header-timeout", "0.5"]);
    let mut silent = Http2::connect(&server, &[]);
    closed(&mut silent.0);
    // a connection that only answers pings is idle too
    let mut client = Http2::connect(&server, &[]);
    let mut went_away = false;
    while let Some((kind, flags, _, payload)) = client.frame() {
        went_away |= kind == GOAWAY;
        if kind == PING && flags & ACK == 0 {
            let _ = client.send(PING, ACK, 0, &payload);
        }
    }
    assert!(went_away);
}

#[test]
fn a_window_of_zero_holds_no_stream() {
    let server = Server::start(&["--write-timeout", "0.5"]);
    let length = server.get("/openapi.json").body.len();
    let mut client = Http2::connect(&server, &[(INITIAL_WINDOW_SIZE, 0)]);
    // flow-control windows: one byte too small, large enough, and 0
    client.get(1, "/openapi.json");
    client.window(1, length - 1);
    client.get(3, "/openapi.json");
    client.window(3, length);
    client.get(5, "/openapi.json");
    let (mut received, mut ended, mut reset) = ([0; 6], Vec::new(), Vec::new());
    while reset.len() < 2 || ended.is_empty() {
        let (kind, flags, stream, payload) = client.frame().expect("a frame");
        match kind {
            DATA => {
                received[stream as usize] += payload.len();
                client.window(0, payload.len().max(1));
                if flags & END_STREAM != 0 {
                    ended.push(stream);
                }
            }
            RST_STREAM => reset.push(stream),
            PING if flags & ACK == 0 => client.send(PING, ACK, 0, &payload).expect("sent"),
            _ => {}
        }
    }
    reset.sort_unstable();
    assert_eq!((reset, ended), (vec![1, 5], vec![3]));
    assert_eq!((received[1], received[3], received[5]), (length - 1, length, 0));
    // the connection stays usable
    client.get(7, "/livez");
    client.window(7, 1000);
    while !matches!(client.frame().expect("a frame"), (DATA, flags, 7, _) if flags & END_STREAM != 0) {}
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const INITIAL_WINDOW_SIZE: u16 = 4;

/// An HTTP/2 client with control over every frame.
struct Http2(TcpStream);

impl Http2 {
    fn connect(server: &Server, settings: &[(u16, u32)]) -> Http2 {
        let mut client = Http2(connect(server, [127, 0, 0, 1], 1).remove(0));
        client.0.write_all(PREFACE).expect("sent");
        let pair = |(key, value): &(u16, u32)| [&key.to_be_bytes()[..], &value.to_be_bytes()].concat();
        client.send(SETTINGS, 0, 0, &settings.iter().flat_map(pair).collect::<Vec<_>>()).expect("sent");
        client
    }

    fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> std::io::Result<()> {
        let length = (payload.len() as u32).to_be_bytes();
        let head = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
        self.0.write_all(&[&head, payload].concat())
    }

    /// Sends a GET, headers as HPACK static indices and literals.
    fn get(&mut self, stream: u32, path: &str) {
        let literal = |index: u8, text: &str| [&[index, text.len() as u8], text.as_bytes()].concat();
        let headers = [vec![0x82, 0x86], literal(0x04, path), literal(0x01, "localhost")].concat();
        self.send(HEADERS, END_STREAM | END_HEADERS, stream, &headers).expect("sent");
    }

    fn window(&mut self, stream: u32, more: usize) {
        self.send(WINDOW_UPDATE, 0, stream, &(more as u32).to_be_bytes()).expect("sent");
    }

    /// Kind, flags, stream and payload of the next frame; `None` at the end.
    fn frame(&mut self) -> Option<(u8, u8, u32, Vec<u8>)> {
        let mut head = [0; 9];
        self.0.read_exact(&mut head).ok()?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        self.0.read_exact(&mut payload).ok()?;
        let stream = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
        Some((head[3], head[4], stream, payload))
    }
}
