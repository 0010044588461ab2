//! An answer has the same bytes alone and in a batch, streamed or not, with a cold or warm cache, on any number of threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::server::Server;

/// Random numbers (xorshift, Marsaglia 2003) for the order of requests.
struct Draws(u64);

impl Draws {
    fn next(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

const WORDS: [&str; 12] =
    ["Once", "upon", "a", "time", "the", "little", "dog", "saw", "tree", "and", "ran", "🐕 héllo"];

/// Requests of every kind: path and body.
fn requests(n: usize) -> Vec<(&'static str, Value)> {
    let mut draws = Draws(0x9E37_79B9_7F4A_7C15);
    let mut all = Vec::new();
    for i in 0..n {
        let words =
            |draws: &mut Draws, n: usize| (0..n).map(|_| WORDS[draws.next(WORDS.len())]).collect::<Vec<_>>().join(" ");
        let n_words = [3, 12, 40, 90][draws.next(4)];
        // some share a prefix, so that the prefix cache has hits
        let text = if draws.next(2) == 0 {
            "Once upon a time the little dog saw a tree and ran ".repeat(3)
        } else {
            String::new()
        };
        let text = text + &words(&mut draws, n_words);
        let mut body = json!({ "seed": i, "max_tokens": 1 + draws.next(24) });
        match draws.next(4) {
            0 => body["temperature"] = json!(0),
            1 => body["top_k"] = json!(20),
            2 => body["top_p"] = json!(0.9),
            _ => body["min_p"] = json!(0.05),
        }
        if draws.next(3) == 0 {
            body["stop"] = json!(["the", "."]);
        }
        if draws.next(3) == 0 {
            (body["frequency_penalty"], body["repetition_penalty"]) = (json!(0.5), json!(1.1));
        }
        if draws.next(4) == 0 {
            body["ignore_eos"] = json!(true);
        }
        if draws.next(2) == 0 {
            body["messages"] = json!([{ "role": "user", "content": text }]);
            if draws.next(2) == 0 {
                (body["logprobs"], body["top_logprobs"]) = (json!(true), json!(3));
            }
            all.push(("/v1/chat/completions", body));
        } else {
            body["prompt"] = json!(text);
            body["n"] = json!(1 + draws.next(3));
            if draws.next(2) == 0 {
                body["logprobs"] = json!(3);
            }
            if draws.next(3) == 0 {
                body["echo"] = json!(true);
                if body["logprobs"].is_number() && draws.next(2) == 0 {
                    body["max_tokens"] = json!(0);
                }
            }
            all.push(("/v1/completions", body));
        }
    }
    all
}

/// The parts that must be equal: texts, finish reasons, log-probabilities, token counts.
fn answer(server: &Server, path: &str, body: &Value, streamed: bool) -> Value {
    if !streamed {
        let mut response = server.ok(path, body);
        for choice in response["choices"].as_array_mut().expect("choices") {
            if choice["message"].is_object() {
                choice["text"] = choice["message"]["content"].take();
            }
            choice.as_object_mut().expect("a choice").remove("message");
        }
        return json!([response["choices"], response["usage"]["completion_tokens"]]);
    }
    let mut body = body.clone();
    (body["stream"], body["stream_options"]) = (json!(true), json!({ "include_usage": true }));
    let response = server.post(path, &body);
    assert_eq!(response.status, 200, "{}", response.text());
    let mut choices: Vec<Value> = Vec::new();
    let mut usage = Value::Null;
    for chunk in response.chunks() {
        if chunk["choices"].as_array().expect("choices").is_empty() {
            usage = chunk["usage"]["completion_tokens"].clone();
        }
        for part in chunk["choices"].as_array().expect("choices") {
            let index = part["index"].as_u64().expect("an index") as usize;
            while choices.len() <= index {
                choices.push(json!({ "index": choices.len(), "text": "", "logprobs": null, "finish_reason": null }));
            }
            let whole = &mut choices[index];
            let new = part["text"].as_str().or(part["delta"]["content"].as_str()).unwrap_or_default();
            whole["text"] = json!(whole["text"].as_str().expect("text").to_string() + new);
            if part["finish_reason"].is_string() {
                whole["finish_reason"] = part["finish_reason"].clone();
            }
            if let Value::Object(lists) = &part["logprobs"] {
                if whole["logprobs"].is_null() {
                    whole["logprobs"] = json!({});
                }
                for (name, list) in lists {
                    let before = whole["logprobs"][name].as_array().cloned().unwrap_or_default();
                    let list = before.into_iter().chain(list.as_array().expect("a list").clone());
                    whole["logprobs"][name] = list.collect();
                }
            }
        }
    }
    json!([choices, usage])
}

#[test]
fn requests_that_together_exceed_the_kv_cache_run_at_once() {
    let body = |seed| json!({ "prompt": "Once upon a time", "seed": seed, "max_tokens": 400, "ignore_eos": true });
    let path = "/v1/completions";
    let large = Server::start(&[]);
    let expected: Vec<Value> = (0..4).map(|seed| answer(&large, path, &body(seed), false)).collect();
    drop(large);
    let small = Server::start(&["--kv-memory", "1MiB", "--max-seqs", "4"]);
    thread::scope(|scope| {
        for (seed, expected) in expected.iter().enumerate() {
            let small = &small;
            scope.spawn(move || assert_eq!(answer(small, path, &body(seed), false), *expected));
        }
    });
    let metrics = small.get("/metrics").text();
    let preempted = metrics.lines().find(|l| l.starts_with("starling_preemptions_total"));
    assert!(preempted.is_some_and(|l| !l.ends_with(" 0")), "{preempted:?}");
}

#[test]
fn answers_are_equal_alone_and_in_any_batch() {
    let requests = requests(48);
    // one at a time, each prompt in one step, no shared cache
    let alone = Server::start(&["--max-seqs", "4", "--batch-tokens", "512", "--threads", "1"]);
    let salted = |body: &Value, salt: &str| {
        let mut body = body.clone();
        body["cache_salt"] = json!(salt);
        body
    };
    let expected: Vec<Value> = requests
        .iter()
        .enumerate()
        .map(|(i, (path, body))| answer(&alone, path, &salted(body, &i.to_string()), false))
        .collect();
    drop(alone);
    for (args, rounds) in [
        (["--max-seqs", "64", "--batch-tokens", "64", "--threads", "2", "--kv-memory", "24MiB"], 3),
        (["--max-seqs", "5", "--batch-tokens", "7", "--threads", "1", "--kv-memory", "1MiB"], 1),
    ] {
        let server = Server::start(&args);
        let next = AtomicUsize::new(0);
        let wrong = Mutex::new(Vec::new());
        thread::scope(|scope| {
            // some clients disconnect at random
            for t in 0..3 {
                let (server, next, requests) = (&server, &next, &requests);
                scope.spawn(move || {
                    let mut draws = Draws(1000 + t);
                    while next.load(Ordering::Relaxed) < rounds * requests.len() {
                        let (path, body) = &requests[draws.next(requests.len())];
                        let mut body = body.clone();
                        body["stream"] = json!(draws.next(2) == 0);
                        let json = [("content-type", "application/json")];
                        let stream = server.open("POST", path, &json, body.to_string().as_bytes());
                        thread::sleep(Duration::from_micros(draws.next(60_000) as u64));
                        drop(stream);
                    }
                });
            }
            for t in 0..24 {
                let (server, next, wrong, requests, expected) = (&server, &next, &wrong, &requests, &expected);
                scope.spawn(move || {
                    let mut draws = Draws(t + 1);
                    while next.fetch_add(1, Ordering::Relaxed) < rounds * requests.len() {
                        let i = draws.next(requests.len());
                        let (path, body) = &requests[i];
                        let mut body = body.clone();
                        match draws.next(4) {
                            0 => body["cache_salt"] = json!(draws.next(1000).to_string()),
                            1 => body["session_id"] = json!(draws.next(5).to_string()),
                            2 => body["priority"] = json!(["high", "low"][draws.next(2)]),
                            _ => {}
                        }
                        let got = answer(server, path, &body, draws.next(2) == 0);
                        if got != expected[i] {
                            wrong.lock().expect("no panic").push(format!("{body}\n{got}\n{}", expected[i]));
                        }
                    }
                });
            }
        });
        let wrong = wrong.into_inner().expect("no panic");
        assert!(wrong.is_empty(), "{} differ, as\n{}", wrong.len(), wrong[0]);
        server.wait("nothing is held", |s| s["running"] == 0 && s["held"] == 0 && s["kv"]["in_use_bytes"] == 0);
        let stats = server.stats();
        assert!(stats["cached_tokens"].as_u64() > Some(0), "the cache was never used: {stats}");
    }
}

#[test]
fn a_session_equals_one_prompt() {
    let server = Server::start(&[]);
    let first =
        json!({ "prompt": "Once upon a time", "max_tokens": 20, "seed": 3, "session_id": "s", "ignore_eos": true });
    let one = server.ok("/v1/generate", &first);
    let second = json!({ "prompt": " Then the dog", "max_tokens": 20, "seed": 4, "session_id": "s" });
    let two = server.ok("/v1/generate", &second);
    assert!(two["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() >= Some(16), "{two}");
    // the same conversation as one prompt of tokens
    let ids = |text: &str, add: bool| {
        server.ok("/v1/tokenize", &json!({ "text": text, "add_special": add }))["tokens"].clone()
    };
    let list = |value: &Value| value.as_array().expect("a list").clone();
    let all = [list(&ids("Once upon a time", true)), list(&one["tokens"]), list(&ids(" Then the dog", false))].concat();
    let whole = server.ok("/v1/completions", &json!({ "prompt": all, "max_tokens": 20, "seed": 4, "cache_salt": "x" }));
    assert_eq!(whole["choices"][0]["text"], two["text"]);
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 0);

    // messages: each turn sends only the new ones
    let turn = |content: &str| json!([{ "role": "user", "content": content }]);
    let ask = |content: &str, session: &str| {
        server.ok(
            "/v1/generate",
            &json!({ "messages": turn(content), "max_tokens": 12, "seed": 5, "session_id": session }),
        )
    };
    let (a, b) = (ask("Hello", "m"), ask("And then?", "m"));
    let messages = json!([
        { "role": "user", "content": "Hello" }, { "role": "assistant", "content": a["text"] },
        { "role": "user", "content": "And then?" },
    ]);
    let chat = server.ok("/v1/chat/completions", &json!({ "messages": messages, "max_tokens": 12, "seed": 5 }));
    assert_eq!(chat["choices"][0]["message"]["content"], b["text"]);

    let mixed = server.post("/v1/generate", &json!({ "prompt": "x", "session_id": "m" }));
    assert_eq!((mixed.status, mixed.json()["error"]["param"].clone()), (400, json!("prompt")));
    let cached = |s: &Value| s["kv"]["cached_bytes"].as_u64().expect("a number");
    server.wait("idle", |s| s["running"] == 0);
    let before = cached(&server.stats());
    for name in ["s", "m"] {
        assert_eq!(server.ok("/v1/session/close", &json!({ "session_id": name }))["closed"], true);
    }
    server.wait("pages of closed sessions are freed", |s| cached(s) < before);
    assert_eq!(server.post("/v1/session/close", &json!({ "session_id": "s" })).status, 404);
}
