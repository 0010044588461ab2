//! What is computed once: identical requests, answers that are kept, requests with an idempotency key, and streams that go on
//! after a cut.

use std::io::{BufRead, BufReader, Read};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::admin_client::Managed;
use crate::server::{Response, Server, read_head};

const COMPLETIONS: &str = "/v1/completions";
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

fn body(prompt: &str, more: &Value) -> Value {
    let mut body = json!({ "prompt": prompt, "max_tokens": 24, "seed": 5, "ignore_eos": true });
    for (key, value) in more.as_object().expect("an object") {
        body[key] = value.clone();
    }
    body
}

fn choices(response: &Response) -> Value {
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()["choices"].clone()
}

/// Texts of all chunks.
fn streamed(server: &Server, body: &Value) -> String {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let chunks = server.post(COMPLETIONS, &body).chunks();
    chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect()
}

fn computed(server: &Server) -> i64 {
    server.stats()["output_tokens"].as_i64().unwrap_or_else(|| panic!("{}", server.stats()))
}

#[test]
fn a_determined_answer_is_computed_once() {
    let managed = Managed::start(&["--response-cache", "1MiB"]);
    let server = &managed.server;
    let plain = Server::start(&[]);
    for more in [
        json!({}),
        json!({ "n": 3 }),
        json!({ "logprobs": 2 }),
        json!({ "stop": [" a"] }),
        json!({ "temperature": 0, "seed": null }),
        json!({ "prompt": ["one", "two"] }),
    ] {
        let body = body("Once", &more);
        let first = server.post(COMPLETIONS, &body);
        let before = computed(server);
        let again = server.post(COMPLETIONS, &body);
        assert_eq!((choices(&first), &choices(&first)), (choices(&again), &choices(&plain.post(COMPLETIONS, &body))));
        assert_eq!(first.json()["usage"], again.json()["usage"]);
        assert_eq!((computed(server), first.header("age")), (before, None), "{more}");
        assert!(again.header("age").is_some() && again.header("etag").is_some());
        assert_ne!(first.json()["id"], again.json()["id"]);
        if more.get("prompt").is_none() && more.get("n").is_none() {
            assert_eq!(streamed(server, &body), choices(&plain.post(COMPLETIONS, &body))[0]["text"]);
            assert_eq!(computed(server), before, "streamed: {more}");
        }
    }
    let body = body("Once", &json!({}));
    let is_found = |headers: &[(&str, &str)], body: &Value| {
        let before = computed(server);
        assert_eq!(server.post_with(COMPLETIONS, headers, body).status, 200);
        computed(server) == before
    };
    assert!(is_found(&[], &body));
    assert!(!is_found(&[("cache-control", "no-cache")], &body));
    assert!(!is_found(&[("cache-control", "max-age=0, no-store")], &body));
    for change in
        [json!({ "seed": 6 }), json!({ "max_tokens": 23 }), json!({ "prompt": "Twice" }), json!({ "top_k": 3 })]
    {
        let mut other = body.clone();
        for (key, value) in change.as_object().expect("an object") {
            other[key] = value.clone();
        }
        assert!(!is_found(&[], &other), "{change}");
    }
    let mut unseeded = body.clone();
    unseeded["seed"] = Value::Null;
    assert!(!is_found(&[], &unseeded) && !is_found(&[], &unseeded));
    let etag = server.post(COMPLETIONS, &body).header("etag").expect("a tag").to_string();
    managed.ok("POST", "caches/answers/invalidate", &json!({ "key": etag }));
    assert!(!is_found(&[], &body) && is_found(&[], &body));
    managed.ok("POST", "caches/answers/invalidate", &json!({ "tenant": "another" }));
    assert!(is_found(&[], &body));
    managed.ok("POST", "caches/invalidate", &json!({}));
    assert!(!is_found(&[], &body));
    let kept = managed.ok("GET", "caches", &json!({}))["kept"][0].clone();
    assert_eq!((&kept["name"], &kept["entries"]), (&json!("answers"), &json!(1)), "{kept}");
}

#[test]
fn identical_requests_in_flight_are_computed_once() {
    let server = Server::start(&["--share-identical"]);
    let body = body("Once upon", &json!({ "max_tokens": 300 }));
    let expected = choices(&Server::start(&[]).post(COMPLETIONS, &body));
    let before = computed(&server);
    thread::scope(|scope| {
        let asking: Vec<_> = (0..6).map(|_| scope.spawn(|| choices(&server.post(COMPLETIONS, &body)))).collect();
        // one that leaves takes nothing from the others
        drop(server.open("POST", COMPLETIONS, &JSON, body.to_string().as_bytes()));
        for answer in asking {
            assert_eq!(answer.join().expect("an answer"), expected);
        }
    });
    let n = computed(&server) - before;
    assert!(n < 6 * 300, "{n} tokens");
    // all readers have left: the request ends
    let before = computed(&server);
    let stream = server.open("POST", COMPLETIONS, &JSON, body.to_string().as_bytes());
    server.wait("it runs", |stats| stats["output_tokens"].as_i64() > Some(before));
    drop(stream);
    server.wait("it ends", |stats| stats["running"] == 0);
}

#[test]
fn texts_are_embedded_once() {
    let server = Server::start(&["--embedding-cache", "1MiB"]);
    let ask = |input: Value| server.ok("/v1/embeddings", &json!({ "input": input }))["data"].clone();
    let (one, two) = (ask(json!(["a b"])), ask(json!(["a b", "c d", "a b"])));
    assert_eq!((&one[0]["embedding"], &two[0]["embedding"]), (&two[2]["embedding"], &one[0]["embedding"]));
    let plain = Server::start(&[]).ok("/v1/embeddings", &json!({ "input": ["a b", "c d", "a b"] }));
    assert_eq!(plain["data"], two);
    assert_eq!(ask(json!(["c d"]))[0]["embedding"], two[1]["embedding"]);
    let metrics = server.get("/metrics").text();
    assert!(metrics.contains("starling_reuse_total{result=\"embedding_miss\"} 2\n"), "{metrics}");
}

#[test]
fn a_request_with_an_idempotency_key_runs_once() {
    let server = Server::start(&[]);
    let body = body("Once", &json!({ "seed": null }));
    let send = |key: &str, body: &Value| server.post_with(COMPLETIONS, &[("idempotency-key", key)], body);
    let first = send("k1", &body);
    let again = send("k1", &body);
    assert_eq!((first.status, &first.body), (200, &again.body));
    assert_eq!((first.header("idempotent-replayed"), again.header("idempotent-replayed")), (None, Some("true")));
    assert_ne!(send("k2", &body).body, first.body);
    let mut other = body.clone();
    other["max_tokens"] = json!(3);
    let refused = send("k1", &other);
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (409, &json!("idempotency_mismatch")));
    assert_eq!(send("", &body).status, 400);
    // a wrong request is wrong each time
    assert_eq!(
        (send("k3", &json!({ "prompt": 1.5 })).status, send("k3", &json!({ "prompt": 1.5 })).status),
        (400, 400)
    );
    // streams too, also while they run, and when the first client has gone
    let mut long = body.clone();
    (long["max_tokens"], long["stream"]) = (json!(200), json!(true));
    let headers = [("content-type", "application/json"), ("idempotency-key", "k4")];
    let before = computed(&server);
    let first = server.open("POST", COMPLETIONS, &headers, long.to_string().as_bytes());
    server.wait("it runs", |stats| stats["output_tokens"].as_i64() > Some(before));
    drop(first);
    let (second, third) = (send("k4", &long), send("k4", &long));
    assert_eq!(second.body, third.body);
    assert_eq!(second.chunks().len(), third.chunks().len());
    assert!(second.chunks().len() > 100);
}

#[test]
fn a_stream_goes_on_after_a_cut() {
    let server = Server::start(&["--resume-window", "20"]);
    let mut body = body("Once upon a time", &json!({ "max_tokens": 300 }));
    body["stream"] = json!(true);
    let expected = streamed(&server, &body);
    let mut stream = server.open("POST", COMPLETIONS, &JSON, body.to_string().as_bytes());
    let mut reader = BufReader::new(&mut stream);
    assert_eq!(read_head(&mut reader).0, 200);
    let (mut last, mut text) = (String::new(), String::new());
    for line in reader.lines().map_while(Result::ok) {
        if let Some(id) = line.strip_prefix("id: ") {
            last = id.to_string();
        }
        if let Some(data) = line.strip_prefix("data: ") {
            let chunk: Value = serde_json::from_str(data).expect("JSON");
            text += chunk["choices"][0]["text"].as_str().unwrap_or_default();
        }
        if line.is_empty() && last.ends_with(":7") {
            break;
        }
    }
    drop(stream);
    thread::sleep(Duration::from_millis(50));
    let rest = server.post_with(COMPLETIONS, &[("last-event-id", &last)], &body);
    assert!(rest.text().starts_with(&format!("id: {}8\n", last.strip_suffix('7').expect("an id"))), "{}", rest.text());
    let pieces = rest.text();
    let pieces = pieces.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    for data in pieces {
        let chunk: Value = serde_json::from_str(data).expect("JSON");
        text += chunk["choices"][0]["text"].as_str().unwrap_or_default();
    }
    assert_eq!(text, expected);
    let gone = server.post_with(COMPLETIONS, &[("last-event-id", "0123:4")], &body);
    assert_eq!((gone.status, &gone.json()["error"]["code"]), (410, &json!("stream_gone")));
    // without the setting events have no IDs, and an answer ends when its client goes
    let plain = Server::start(&[]);
    assert!(!plain.post(COMPLETIONS, &body).text().contains("id: "));
    let mut open = plain.open("POST", COMPLETIONS, &JSON, body.to_string().as_bytes());
    let _ = open.read(&mut [0; 64]);
}
