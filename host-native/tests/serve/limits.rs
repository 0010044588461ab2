//! Queue limits, fairness, timeouts, cancellation and shutdown.

use std::io::{BufReader, Write};
use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::server::{LIMIT, Server, read_chunk, read_head, read_response};

/// A streamed request of `n` tokens.
fn long(n: usize) -> Value {
    json!({ "prompt": "Once upon a time", "max_tokens": n, "ignore_eos": true, "stream": true, "seed": 1 })
}

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

#[test]
fn an_answer_ends_when_its_client_goes_away() {
    // one request at a time: the next runs only once the first has ended
    let server = Server::start(&["--max-seqs", "1", "--batch-tokens", "4"]);
    for streamed in [true, false] {
        let mut body = long(500);
        body["stream"] = json!(streamed);
        let stream = server.open("POST", "/v1/completions", &JSON, body.to_string().as_bytes());
        server.wait("it runs", |s| s["running"] == 1);
        // cancel a queued request, and one in the middle of its prefill
        let queued = server.open("POST", "/v1/completions", &JSON, body.to_string().as_bytes());
        server.wait("it waits", |s| s["waiting"]["normal"] == 1);
        drop(queued);
        server.wait("none waits", |s| s["waiting"]["normal"] == 0);
        drop(stream);
        let took = server.wait("none runs", |s| s["running"] == 0);
        assert!(took < Duration::from_secs(1), "{took:?}");
        let prompt = json!({ "prompt": "dog ".repeat(200), "max_tokens": 200, "cache_salt": streamed.to_string() });
        let stream = server.open("POST", "/v1/completions", &JSON, prompt.to_string().as_bytes());
        server.wait("it runs", |s| s["running"] == 1);
        drop(stream);
        server.wait("none runs", |s| s["running"] == 0 && s["kv"]["in_use_bytes"] == 0);
    }
    let text = server.get("/metrics").text();
    assert!(text.contains("outcome=\"cancelled\"} 6\n"), "{text}");
}

#[test]
fn a_full_queue_refuses_requests_with_429() {
    let server = Server::start(&["--max-seqs", "1", "--queue-high", "3", "--queue-low", "1", "--queue-timeout", "30"]);
    let open = || server.open("POST", "/v1/completions", &JSON, long(400).to_string().as_bytes());
    let running = open();
    server.wait("it runs", |s| s["running"] == 1);
    let waiting = [open(), open(), open()];
    server.wait("three wait", |s| s["waiting"]["normal"] == 3);
    assert_eq!(server.get("/readyz").status, 503);
    assert_eq!(server.get("/livez").status, 200);
    let refused = server.post("/v1/completions", &long(1));
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    let error = refused.json()["error"].clone();
    assert_eq!(error["code"], "queue_full");
    assert!(error["message"].as_str().expect("text").contains("3 requests are waiting"), "{error}");
    // above the low watermark requests are still refused
    let [a, b, c] = waiting;
    drop(a);
    server.wait("two wait", |s| s["waiting"]["normal"] == 2);
    assert_eq!(server.post("/v1/completions", &long(1)).status, 429);
    drop(b);
    server.wait("one waits", |s| s["waiting"]["normal"] == 1);
    assert_eq!(server.get("/readyz").status, 200);
    drop((running, c));
    assert_eq!(server.post("/v1/completions", &long(1)).status, 200);
}

/// A request says how long it may take, in a field or a header of every API; the server's limit stays.
#[test]
fn a_request_has_a_time_limit_of_its_own() {
    let server = Server::start(&["--request-timeout", "60", "--breaker-faults", "2"]);
    let (model, hi) = ("starling-tiny-q8_0", json!([{ "role": "user", "content": "Hi" }]));
    let prompt = json!({ "prompt": "Once", "max_tokens": 490, "ignore_eos": true });
    for (path, mut body) in [
        ("/v1/completions", prompt.clone()),
        ("/v1/generate", prompt.clone()),
        ("/completion", prompt),
        ("/v1/chat/completions", json!({ "messages": hi })),
        ("/v1/responses", json!({ "input": "Hi" })),
        ("/v1/messages", json!({ "model": model, "max_tokens": 490, "messages": hi })),
        ("/api/chat", json!({ "model": model, "messages": hi, "stream": false })),
        ("/api/generate", json!({ "model": model, "prompt": "Once", "stream": false })),
        ("/v1/embeddings", json!({ "input": "Hi" })),
    ] {
        // a nanosecond is over before anything is done
        let limited = |header: &str| server.post_with(path, &[("x-request-timeout", header)], &body);
        let refused = limited("0.000000001");
        assert_eq!(refused.status, 504, "{path}: {}", refused.text());
        assert_eq!(limited("soon").status, 400, "{path}");
        if path != "/v1/embeddings" {
            body["timeout"] = json!(1e-9);
            assert_eq!(server.post(path, &body).status, 504, "{path}");
            body["timeout"] = json!(-1);
            assert_eq!(server.post(path, &body).status, 400, "{path}");
        }
    }
    let job = server.post("/execute", &json!({ "job_id": "j", "prompt": "Once", "max_tokens": 490, "timeout": 1e-9 }));
    let (name, data) = job.events().pop().expect("an event");
    assert!(name == "error" && data.contains("request_timeout"), "{data}");
    // clients that are in a hurry close the model for nobody, and a long limit is none
    let body = json!({ "prompt": "Once", "max_tokens": 2, "timeout": 1e30 });
    assert_eq!(server.ok("/v1/completions", &body)["usage"]["completion_tokens"], 2);
    // with what there is at the limit
    let partial =
        json!({ "prompt": "Once", "max_tokens": 490, "ignore_eos": true, "timeout": 0.2, "timeout_partial": true });
    let answer = server.post("/v1/completions", &partial);
    let reason =
        if answer.status == 200 { answer.json()["choices"][0]["finish_reason"].clone() } else { json!("timeout") };
    assert!(reason == "timeout" || reason == "length", "{}", answer.text());
}

#[test]
fn a_tenant_is_limited_and_others_are_not() {
    let server = Server::start(&["--max-seqs", "1", "--tenant-requests", "2"]);
    let open = |tenant: &str| {
        let headers = [JSON[0], ("x-gateway-inference-fairness-id", tenant)];
        server.open("POST", "/v1/completions", &headers, long(300).to_string().as_bytes())
    };
    let (a, b) = (open("x"), open("x"));
    server.wait("one runs and one waits", |s| s["running"] == 1 && s["waiting"]["normal"] == 1);
    let mut third = open("x");
    assert_eq!(read_response(&mut third).status, 429);
    let other = open("y");
    server.wait("another tenant's waits too", |s| s["waiting"]["normal"] == 2);
    drop((a, b, other));
}

#[test]
fn urgent_requests_overtake() {
    let server = Server::start(&["--max-seqs", "1"]);
    let running = server.open("POST", "/v1/completions", &JSON, long(300).to_string().as_bytes());
    server.wait("it runs", |s| s["running"] == 1);
    let done = std::sync::Mutex::new(Vec::new());
    thread::scope(|scope| {
        for (i, priority) in ["low", "normal", "high"].iter().enumerate() {
            let (server, done) = (&server, &done);
            scope.spawn(move || {
                // long enough that even a client thread that wakes up late records its end before the next one
                let body = json!({ "prompt": "a", "max_tokens": 300, "ignore_eos": true, "priority": priority });
                server.ok("/v1/completions", &body);
                done.lock().expect("no panic").push(*priority);
            });
            server.wait("it waits", |s| ["low", "normal", "high"][..=i].iter().all(|p| s["waiting"][p] == 1));
        }
        drop(running);
    });
    assert_eq!(done.into_inner().expect("no panic"), ["high", "normal", "low"]);
}

#[test]
fn queue_and_request_timeouts_fail_the_request() {
    let server = Server::start(&[
        "--max-seqs",
        "1",
        "--queue-timeout",
        "0.2",
        "--request-timeout",
        "1.5",
        "--batch-tokens",
        "1",
    ]);
    let mut slow = server.open("POST", "/v1/completions", &JSON, long(500).to_string().as_bytes());
    server.wait("it runs", |s| s["running"] == 1);
    let start = Instant::now();
    let waited = server.post("/v1/completions", &json!({ "prompt": "a", "max_tokens": 1 }));
    if waited.status != 200 {
        assert_eq!((waited.status, waited.json()["error"]["code"].clone()), (503, json!("queue_timeout")));
        assert!(start.elapsed() >= Duration::from_millis(190) && waited.header("retry-after").is_some());
    }
    let first = read_response(&mut slow);
    assert_eq!(first.status, 200);
    // a fast machine may finish within the timeout; otherwise the stream ends with the error
    let chunks = first.chunks();
    let last = chunks.last().expect("chunks");
    assert!(last["error"]["code"] == "request_timeout" || last["choices"][0]["finish_reason"] == "length", "{last}");
    server.wait("none runs", |s| s["running"] == 0);
}

#[test]
fn health_answers_while_a_long_prompt_is_processed() {
    let server = Server::start(&["--batch-tokens", "512", "--threads", "1"]);
    let busy: Vec<_> = (0..8)
        .map(|i| {
            let body = json!({ "prompt": "dog ".repeat(400), "max_tokens": 1, "cache_salt": i.to_string() });
            server.open("POST", "/v1/completions", &JSON, body.to_string().as_bytes())
        })
        .collect();
    let mut times = Vec::new();
    for path in ["/health", "/livez", "/readyz", "/metrics"].iter().cycle().take(40) {
        let start = Instant::now();
        assert_eq!(server.get(path).status, 200);
        times.push(start.elapsed());
    }
    times.sort_unstable();
    assert!(times[20] < Duration::from_millis(100), "{times:?}");
    for mut stream in busy {
        assert_eq!(read_response(&mut stream).status, 200);
    }
}

#[test]
fn a_queued_stream_sends_headers_and_keep_alive_comments() {
    let server = Server::start(&["--max-seqs", "1", "--sse-keep-alive", "0.05"]);
    let running = server.open("POST", "/v1/completions", &JSON, long(500).to_string().as_bytes());
    server.wait("it runs", |s| s["running"] == 1);
    let stream = server.open(
        "POST",
        "/v1/chat/completions",
        &JSON,
        br#"{"messages":[{"role":"user","content":"Hi"}],"max_tokens":3,"stream":true}"#,
    );
    let mut reader = BufReader::new(&stream);
    let (status, headers) = read_head(&mut reader);
    assert_eq!(status, 200);
    assert!(headers.iter().any(|(name, value)| name == "content-type" && value.starts_with("text/event-stream")));
    assert_eq!(read_chunk(&mut reader).expect("a chunk"), b": keep-alive\n\n");
    drop(running);
    let mut text = Vec::new();
    while let Some(mut chunk) = read_chunk(&mut reader) {
        text.append(&mut chunk);
    }
    assert!(String::from_utf8(text).expect("UTF-8").ends_with("data: [DONE]\n\n"));
    // an error found before the queue has its own status
    let wrong = json!({ "prompt": "a ".repeat(2000), "max_tokens": 1, "stream": true });
    assert_eq!(server.post("/v1/completions", &wrong).status, 400);
}

#[test]
fn shutdown_waits_for_running_requests() {
    let server = Server::start(&["--max-seqs", "2"]);
    let stream = server.open("POST", "/v1/completions", &JSON, long(450).to_string().as_bytes());
    let mut reader = BufReader::new(&stream);
    assert_eq!(read_head(&mut reader).0, 200);
    let mut body = read_chunk(&mut reader).expect("a piece");
    server.signal("TERM");
    let start = Instant::now();
    while server.get("/readyz").status != 503 {
        assert!(start.elapsed() < Duration::from_secs(2), "still ready");
    }
    let late = server.post("/v1/completions", &long(1));
    assert_eq!((late.status, late.json()["error"]["code"].clone()), (503, json!("shutting_down")));
    while let Some(mut chunk) = read_chunk(&mut reader) {
        body.append(&mut chunk);
    }
    let text = String::from_utf8(body).expect("UTF-8");
    assert!(text.ends_with("data: [DONE]\n\n") && text.contains("\"finish_reason\":\"length\""), "{text}");
    assert_eq!(server.wait_end().code(), Some(0));
}

#[test]
fn a_second_signal_ends_running_requests() {
    let server = Server::start(&["--max-seqs", "1", "--batch-tokens", "1", "--drain-timeout", "60"]);
    let mut streams: Vec<_> =
        (0..30).map(|_| server.open("POST", "/v1/completions", &JSON, long(500).to_string().as_bytes())).collect();
    server.wait("they wait", |s| s["waiting"]["normal"].as_u64() > Some(20));
    server.signal("TERM");
    thread::sleep(Duration::from_millis(100));
    server.signal("TERM");
    let start = Instant::now();
    assert_eq!(server.wait_end().code(), Some(3));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    // each incomplete stream ends with the error
    let mut refused = 0;
    for response in streams.iter_mut().map(read_response) {
        if response.status == 503 {
            // it came after the first signal
            refused += 1;
            continue;
        }
        let last = response.chunks().pop().expect("chunks");
        let is_refused = last["error"]["code"] == "shutting_down";
        refused += u32::from(is_refused);
        let complete = last["choices"][0]["finish_reason"].is_string();
        assert!(response.status == 200 && (complete || is_refused), "{last}");
    }
    assert!(refused > 10, "{refused} of 30 were refused");
}

#[test]
fn the_readiness_callback_is_retried() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/ready", listener.local_addr().expect("an address"));
    let heard = thread::spawn(move || {
        let mut bodies = Vec::new();
        for status in ["500 No", "200 OK"] {
            let (stream, _) = listener.accept().expect("a connection");
            stream.set_read_timeout(Some(LIMIT)).expect("a socket");
            let mut reader = BufReader::new(stream);
            let mut line = String::new();
            std::io::BufRead::read_line(&mut reader, &mut line).expect("a line");
            assert_eq!(line, "POST /ready HTTP/1.1\r\n");
            let mut n = 0;
            loop {
                line.clear();
                std::io::BufRead::read_line(&mut reader, &mut line).expect("a header");
                if let Some(length) = line.to_lowercase().strip_prefix("content-length:") {
                    n = length.trim().parse().expect("a number");
                }
                if line.trim().is_empty() {
                    break;
                }
            }
            let mut body = vec![0; n];
            std::io::Read::read_exact(&mut reader, &mut body).expect("a body");
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            reader.get_mut().write_all(answer.as_bytes()).expect("an answer");
            bodies.push(serde_json::from_slice::<Value>(&body).expect("JSON"));
        }
        bodies
    });
    let server = Server::start(&["--worker-id", "w1", "--callback-url", &url]);
    let bodies = heard.join().expect("both");
    assert_eq!(bodies[0], bodies[1]);
    assert_eq!(bodies[0]["worker_id"], "w1");
    assert_eq!(bodies[0]["uri"], format!("http://{}", server.address));
    assert_eq!((&bodies[0]["memory_type"], &bodies[0]["model"]), (&json!("cpu"), &json!("starling-tiny-q8_0")));
    assert!(bodies[0]["memory_bytes"].as_u64() > Some(1 << 20));
}
