//! Traces in the log and as an OTLP collector receives them. `tests/clients/traces.py` parses the spans.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use serde_json::{Value, json};

use crate::server::{Server, command, read_head};

/// Starts an OTLP collector; returns its URL and the bodies it receives.
fn collector() -> (String, Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let (to, bodies) = channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, to) = (stream.expect("a connection"), to.clone());
            thread::spawn(move || {
                let mut reader = BufReader::new(stream.try_clone().expect("a socket"));
                while !reader.fill_buf().unwrap_or_default().is_empty() {
                    let mut line = String::new();
                    reader.read_line(&mut line).expect("a line");
                    assert!(line.starts_with("POST /v1/traces "), "{line}");
                    let (_, headers) = read_head(&mut std::io::Cursor::new("x 0 x\r\n").chain(&mut reader));
                    let header = |name: &str| headers.iter().find(|(n, _)| n == name).expect("a header").1.clone();
                    assert_eq!(header("content-type"), "application/x-protobuf");
                    let mut body = vec![0; header("content-length").parse().expect("a number")];
                    reader.read_exact(&mut body).expect("a body");
                    to.send(body).expect("a test");
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").expect("sent");
                }
            });
        }
    });
    (url, bodies)
}

fn has(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[test]
fn a_collector_gets_the_stages_of_each_request() {
    let (url, bodies) = collector();
    let server = Server::start(&["--otlp-endpoint", &url, "--worker-id", "worker-7"]);
    let trace: Vec<u8> = (1..=16).collect();
    let hex: String = trace.iter().map(|b| format!("{b:02x}")).collect();
    let parent = format!("00-{hex}-00f067aa0ba902b7-01");
    let headers = [("traceparent", parent.as_str()), ("x-request-id", "request-9"), ("x-session-id", "session-5")];
    let body = json!({ "prompt": "A xylophone", "max_tokens": 8, "stream": true, "ignore_eos": true });
    let response = server.post_with("/v1/completions", &headers, &body);
    let text: String = response.chunks().iter().filter_map(|c| c["choices"][0]["text"].as_str()).collect();
    server.get("/metrics");
    server.signal("TERM");
    // the remaining spans are exported at shutdown
    assert!(server.wait_end().success());
    let sent: Vec<u8> = bodies.try_iter().flatten().collect();
    for part in
        ["gateway", "tokenize", "queue", "prefill", "decode", "sample", "stream", "request-9", "session-5", "worker-7"]
    {
        assert!(has(&sent, part.as_bytes()), "{part}");
    }
    assert!(has(&sent, &trace), "the client's trace goes on");
    assert!(!text.is_empty() && !has(&sent, text.as_bytes()) && !has(&sent, b"xylophone"), "text in a trace");
    assert!(!has(&sent, b"/metrics"), "probes are no requests");
}

#[test]
fn an_unreachable_collector_delays_no_request() {
    let server = Server::start(&["--otlp-endpoint", "http://127.0.0.1:9"]);
    for _ in 0..3 {
        server.ok("/v1/completions", &json!({ "prompt": "a", "max_tokens": 1 }));
    }
    server.signal("TERM");
    assert!(server.wait_end().success());
}

#[test]
fn the_log_has_the_stages_too() {
    let mut command = command(&["serve", "--port", "0", "--log-level", "starling=debug", "--log-format", "json"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the server");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let log = BufReader::new(child.stderr.take().expect("a pipe"));
    let server = Server::of(child, &line);
    let body = json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 4 });
    server.post_with("/v1/chat/completions", &[("x-request-id", "request-9")], &body);
    server.signal("TERM");
    server.wait_end();
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(&line.expect("text")).expect("JSON"));
    let stages: Vec<Value> = lines.filter(|l| l["stage"].is_string()).collect();
    let names: Vec<&str> = stages.iter().filter_map(|l| l["stage"].as_str()).collect();
    assert_eq!(names, ["tokenize", "queue", "prefill", "decode", "sample", "stream"]);
    for stage in &stages {
        assert_eq!(stage["span"]["request_id"], "request-9", "{stage}");
        assert!(stage["ms"].as_f64() >= Some(0.0), "{stage}");
    }
}
