//! What is computed once: identical requests, answers that are kept, requests with an idempotency key, and streams that go on
//! after a cut.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::admin_client::{Directory, Managed};
use crate::server::{Response, Server, command, fixture, read_head};

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

/// A server with answers on disk; its memory holds none unless `args` say so.
fn with_disk(directory: &Directory, args: &[&str]) -> Managed {
    let path = directory.path().join("answers");
    let template = fixture("chat/qwen-tools.jinja");
    let disk = ["--response-cache-disk", path.to_str().expect("a path"), "--chat-template", &template];
    let managed = Managed::start(&[&disk[..], args].concat());
    managed.wait("caches", |caches| caches["answers_disk"]["is_scanned"] == true);
    managed
}

/// Waits until `n` answers are on disk.
fn wait_answers(managed: &Managed, n: u64) {
    managed
        .wait("caches", |caches| caches["answers_disk"]["pages"] == n && caches["answers_disk"]["queued_bytes"] == 0);
}

fn answer_files(directory: &Directory) -> Vec<PathBuf> {
    let shards = fs::read_dir(directory.path().join("answers")).expect("a directory");
    let files = shards.flat_map(|shard| fs::read_dir(shard.expect("a shard").path()).expect("a directory"));
    files.map(|file| file.expect("a file").path()).collect()
}

#[test]
fn answers_on_disk_outlive_the_server() {
    const CHAT: &str = "/v1/chat/completions";
    let directory = Directory::new();
    let schema = json!({ "type": "object", "properties": { "a": { "enum": ["x", "y"] } }, "required": ["a"], "additionalProperties": false });
    let chat = |more: &Value| {
        let mut body = body("", more);
        body.as_object_mut().expect("an object").remove("prompt");
        body["messages"] = json!([{ "role": "user", "content": "Hi" }]);
        (CHAT, body)
    };
    let tool = json!([{ "type": "function", "function": { "name": "f", "parameters": schema } }]);
    let requests = [
        (COMPLETIONS, body("Once", &json!({ "logprobs": 2 }))),
        (COMPLETIONS, body("Once", &json!({ "n": 2, "stop": [" a"] }))),
        chat(
            &json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "s", "schema": schema, "strict": true } } }),
        ),
        chat(&json!({ "response_format": { "type": "json_object" } })),
        chat(&json!({ "tools": tool, "tool_choice": "required" })),
        chat(&json!({ "tools": tool })),
        chat(&json!({})),
        (COMPLETIONS, body("Once", &json!({ "grammar": "start: /[a-z]+/" }))),
        (COMPLETIONS, body("Once", &json!({ "grammar": "start: /[0-9]+/" }))),
    ];
    // IDs of calls are new each time
    let essence = |response: &Response| {
        let mut choices = choices(response);
        for choice in choices.as_array_mut().expect("choices") {
            for call in choice["message"]["tool_calls"].as_array_mut().into_iter().flatten() {
                call["id"] = Value::Null;
            }
        }
        (choices, response.json()["usage"].clone())
    };
    let server = with_disk(&directory, &[]);
    let first: Vec<_> = requests.iter().map(|(path, body)| server.server.post(path, body)).collect();
    first.iter().for_each(|response| assert_eq!(response.status, 200, "{}", response.text()));
    wait_answers(&server, requests.len() as u64);
    let etags: BTreeSet<String> = requests
        .iter()
        .zip(&first)
        .map(|((path, body), first)| {
            let again = server.server.post(path, body);
            assert_eq!(essence(&again), essence(first), "{body}");
            again.header("etag").unwrap_or_else(|| panic!("{body}")).to_string()
        })
        .collect();
    assert_eq!(etags.len(), requests.len());
    thread::sleep(Duration::from_millis(1100));
    // SIGKILL
    drop(server);
    for memory in ["0", "1MiB"] {
        let server = with_disk(&directory, &["--response-cache", memory]);
        for _ in 0..2 {
            for ((path, body), first) in requests.iter().zip(&first) {
                let again = server.server.post(path, body);
                assert_eq!(essence(&again), essence(first), "{body}");
                let age: u64 = again.header("age").expect("an age").parse().expect("a number");
                assert!(age >= 1 && etags.contains(again.header("etag").expect("an etag")), "{body}");
            }
        }
        assert_eq!(computed(&server.server), 0);
        let metrics = server.server.get("/metrics").text();
        let n = requests.len() * if memory == "0" { 2 } else { 1 };
        assert!(metrics.contains(&format!("starling_reuse_total{{result=\"disk_hit\"}} {n}\n")), "{metrics}");
    }
    // another model and another tenant have nothing to do with it
    let keys = directory.write("keys-of-clients", "key-b b\n");
    let server = with_disk(&directory, &["--api-key-file", &keys]);
    let headers = [("authorization", "Bearer key-b"), ("content-type", "application/json")];
    let (path, body) = &requests[0];
    let other = server.server.send("POST", path, &headers, body.to_string().as_bytes());
    assert_eq!((other.header("age"), choices(&other)), (None, choices(&first[0])));
    drop(server);
    // whatever is done to the files
    let damage = |bytes: &mut Vec<u8>| {
        let at = bytes.len() - 3;
        bytes[at] ^= 1;
    };
    for file in answer_files(&directory) {
        let mut bytes = fs::read(&file).expect("a file");
        damage(&mut bytes);
        fs::write(file, bytes).expect("a file");
    }
    let server = with_disk(&directory, &[]);
    let again = server.server.post(path, body);
    assert_eq!((essence(&again), again.header("age")), (essence(&first[0]), None));
    let caches = server.ok("GET", "caches", &json!({}));
    assert_eq!(caches["answers_disk"]["refused"], json!({ "block_checksum": 1 }), "{caches}");
    // it is written again, and forgotten by name
    server.wait("caches", |caches| caches["answers_disk"]["queued_bytes"] == 0);
    let again = server.server.post(path, body);
    assert!(again.header("age").is_some());
    let etag = again.header("etag").expect("an etag").to_string();
    server.ok("POST", "caches/answers/invalidate", &json!({ "key": etag }));
    assert!(server.server.post(path, body).header("age").is_none());
    server.ok("POST", "caches/invalidate", &json!({}));
    server.wait("caches", |caches| caches["answers_disk"]["pages"].as_u64() <= Some(1));
}

/// Another KV type has other bits.
#[test]
fn answers_on_disk_are_those_of_the_same_kv_type() {
    let directory = Directory::new();
    let ask = |kv_type: &str| {
        let server = with_disk(&directory, &["--kv-type", kv_type]);
        let response = server.server.post(COMPLETIONS, &body("Once", &json!({})));
        server.wait("caches", |caches| caches["answers_disk"]["queued_bytes"] == 0);
        let plain = Server::start(&["--kv-type", kv_type]);
        assert_eq!(choices(&response), choices(&plain.post(COMPLETIONS, &body("Once", &json!({})))), "{kv_type}");
        response.header("age").is_some()
    };
    assert_eq!(["f32", "q8", "f32", "q8"].map(ask), [false, false, true, true]);
}

/// The seed of a greedy answer changes no token, and the receipt names it.
#[test]
fn a_receipt_has_the_seed_of_its_request() {
    let server = Server::start(&["--response-cache", "1MiB", "--share-identical"]);
    let ask = |seed: u64, receipt: bool| {
        let more = json!({ "temperature": 0, "seed": seed, "receipt": receipt });
        server.ok("/v1/generate", &body("Once", &more))
    };
    for seed in [5, 6, 5] {
        let receipt = ask(seed, true)["receipt"].clone();
        assert!(receipt.is_object(), "{receipt}");
        assert_eq!(receipt["request"]["sampling"]["seed"], seed, "{receipt}");
    }
    ask(7, false);
    let before = computed(&server);
    ask(8, false);
    assert_eq!(computed(&server), before, "without a receipt the seed of a greedy answer is nothing");
}

#[test]
fn answers_on_disk_have_a_directory_of_their_own_and_a_size() {
    let directory = Directory::new();
    let path = directory.path().join("answers");
    let path = path.to_str().expect("a path");
    let output = command(&["serve", "--port", "0", "--kv-disk", path, "--response-cache-disk", path]).output();
    let error = String::from_utf8_lossy(&output.expect("the server").stderr).into_owned();
    assert!(error.contains("expected another"), "{error}");
    let server = with_disk(&directory, &["--response-cache-disk-size", "20KB"]);
    for i in 0..8 {
        server.server.ok(COMPLETIONS, &body(&format!("{i} times"), &json!({})));
    }
    let caches = server.wait("caches", |caches| caches["answers_disk"]["evicted"].as_u64() > Some(3));
    assert!(caches["answers_disk"]["bytes"].as_u64() <= Some(20_000), "{caches}");
    assert!(server.server.post(COMPLETIONS, &body("7 times", &json!({}))).header("age").is_some());
    assert!(server.server.post(COMPLETIONS, &body("0 times", &json!({}))).header("age").is_none());
}
