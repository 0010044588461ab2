//! Everything at once: clients that stream and disconnect, workers that fail, models that are replaced and unloaded,
//! settings that change, memory pressure. Every answer equals the one computed alone, or is refused with a status that
//! invites to try again, and nothing leaks. `STARLING_CHAOS_SECONDS` sets the duration, 600 for the full test.

use std::collections::BTreeMap;
use std::fs;
use std::io::BufReader;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::admin_client::{Managed, reference};
use crate::server::{Server, read_chunk, read_head};

const CLIENTS: usize = 16;
/// The models that take turns under the name `m`; `other` is the first of them.
const MODELS: [&str; 2] = ["llama-k256-q4_k_m", "llama-k256-q8_0"];

struct Draws(u64);

impl Draws {
    /// A number below `n` (xorshift).
    fn next(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

/// Request bodies of several kinds, without model and stream.
fn bodies() -> Vec<Value> {
    let mut draws = Draws(0x5EED_CA05);
    let body = |i: usize| {
        let prompt = "the dog and a tree ".repeat(1 + draws.next(8)) + &i.to_string();
        let mut body = json!({
            "prompt": prompt, "max_tokens": 1 + draws.next(60), "seed": i, "temperature": 0.8, "ignore_eos": true,
        });
        match draws.next(5) {
            0 => body["stop"] = json!(["e", " a"]),
            1 => body["n"] = json!(2),
            2 => body["repetition_penalty"] = json!(1.2),
            3 => body["response_format"] = json!({ "type": "json_object" }),
            _ => body["priority"] = json!(["high", "low"][draws.next(2)]),
        }
        body
    };
    (0..32).map(body).collect()
}

/// Text and reason of each choice.
type Choices = BTreeMap<u64, (String, String)>;

fn add(choices: &mut Choices, response: &Value) {
    for choice in response["choices"].as_array().into_iter().flatten() {
        let (text, reason) = choices.entry(choice["index"].as_u64().expect("an index")).or_default();
        *text += choice["text"].as_str().expect("a text");
        *reason += choice["finish_reason"].as_str().unwrap_or_default();
    }
}

/// What a client has seen of a request.
enum Seen {
    Whole(Choices),
    /// It has disconnected.
    Left,
    /// Status and code.
    Refused(u16, String),
}

fn ask(server: &Server, body: &Value, leaves: bool) -> Seen {
    let json_type = [("content-type", "application/json")];
    let mut stream = server.open("POST", "/v1/completions", &json_type, body.to_string().as_bytes());
    let mut reader = BufReader::new(&mut stream);
    let (status, headers) = read_head(&mut reader);
    let mut text = String::new();
    if headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked") {
        let mut n = 0;
        while let Some(chunk) = read_chunk(&mut reader) {
            text += &String::from_utf8_lossy(&chunk);
            n += 1;
            if leaves && n == 3 {
                return Seen::Left;
            }
        }
    } else {
        std::io::Read::read_to_string(&mut reader, &mut text).expect("a body");
    }
    let mut choices = Choices::new();
    if body["stream"] == true && status == 200 {
        for data in text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).filter(|data| *data != "[DONE]")
        {
            let value: Value = serde_json::from_str(data).expect("JSON");
            if let Some(code) = value["error"]["code"].as_str() {
                return Seen::Refused(503, code.into());
            }
            add(&mut choices, &value);
        }
    } else {
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        if status != 200 {
            return Seen::Refused(status, value["error"]["code"].as_str().unwrap_or_default().into());
        }
        add(&mut choices, &value);
    }
    Seen::Whole(choices)
}

/// Ends the clients when it is dropped, also by a failed assertion.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Threads and resident bytes of the server.
fn resources(managed: &Managed) -> (usize, u64) {
    let process = format!("/proc/{}", managed.server.id());
    let threads = fs::read_dir(format!("{process}/task")).expect("a process").count();
    let status = fs::read_to_string(format!("{process}/statm")).expect("a process");
    let pages: u64 = status.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("a number");
    (threads, pages * 4096)
}

#[test]
fn whatever_happens_an_answer_has_its_bytes() {
    let seconds = std::env::var("STARLING_CHAOS_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(8);
    let bodies = bodies();
    let expected = MODELS.map(|model| {
        let server = Server::start(&["-m", &format!("m={}", reference(model))]);
        let answer = |body: &Value| match ask(&server, body, false) {
            Seen::Whole(choices) => choices,
            _ => panic!("{body}"),
        };
        bodies.iter().map(answer).collect::<Vec<_>>()
    });
    let source = |name: &str, i: usize| format!("{name}={}", reference(MODELS[i]));
    let managed = Managed::start(&[
        "-m",
        &source("m", 0),
        "-m",
        &source("other", 0),
        "--workers",
        "2",
        "--max-seqs",
        "6",
        "--kv-memory",
        "1MiB",
        "--breaker-faults",
        "0",
        "--memory-pressure=false",
    ]);
    let before = resources(&managed);
    let (stop, answers, refused, left) =
        (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let start = Instant::now();
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (managed, bodies, expected, stop) = (&managed, &bodies, &expected, &stop);
            let (answers, refused, left) = (&answers, &refused, &left);
            scope.spawn(move || {
                let _stop = Stop(stop);
                let mut draws = Draws(client as u64 * 77 + 1);
                while !stop.load(Ordering::Relaxed) {
                    let (i, is_other, streams) = (draws.next(bodies.len()), draws.next(3) == 0, draws.next(3) > 0);
                    let mut body = bodies[i].clone();
                    body["model"] = json!(if is_other { "other" } else { "m" });
                    body["stream"] = json!(streams);
                    match ask(&managed.server, &body, streams && draws.next(8) == 0) {
                        Seen::Left => left.fetch_add(1, Ordering::Relaxed),
                        Seen::Whole(choices) => {
                            let allowed = if is_other { &expected[..1] } else { &expected[..] };
                            assert!(allowed.iter().any(|answers| answers[i] == choices), "{body}: {choices:?}");
                            answers.fetch_add(1, Ordering::Relaxed)
                        }
                        Seen::Refused(status, code) => {
                            assert!(matches!(status, 429 | 503), "{body}: {status} {code}");
                            thread::sleep(Duration::from_millis(20));
                            refused.fetch_add(1, Ordering::Relaxed)
                        }
                    };
                }
            });
        }
        let _stop = Stop(&stop);
        let mut draws = Draws(99);
        let mut n = 0;
        while start.elapsed() < Duration::from_secs(seconds) && !stop.load(Ordering::Relaxed) {
            n += 1;
            let name = ["m", "other"][draws.next(2)];
            match draws.next(9) {
                0 | 1 => {
                    let workers = managed.send("GET", &format!("models/{name}/workers"), &json!({})).json();
                    let ids: Vec<&Value> =
                        workers["workers"].as_array().into_iter().flatten().map(|w| &w["id"]).collect();
                    if !ids.is_empty() {
                        let id = ids[draws.next(ids.len())];
                        // faults that differ: no request meets the same one twice
                        let fault =
                            json!({ "fault": "panic", "after_steps": draws.next(9), "message": format!("fault {n}") });
                        managed.send("POST", &format!("models/{name}/workers/{id}/fail"), &fault);
                    }
                }
                2 | 3 => {
                    let new = json!({ "source": reference(MODELS[draws.next(2)]) });
                    managed.ok("POST", "models/m/swap", &new);
                }
                4 => {
                    let strategy = ["round-robin", "least-loaded", "memory-aware", "prefix-aware"][draws.next(4)];
                    let tokens = [32, 64, 128][draws.next(3)];
                    let patch =
                        json!({ "strategy": strategy, "batch-tokens": tokens, "prefill-chunk": 1 + draws.next(40) });
                    managed.ok("PATCH", "config", &patch);
                }
                5 => {
                    managed.ok("POST", "pressure", &json!({ "level": draws.next(4) }));
                    thread::sleep(Duration::from_millis(50));
                    managed.ok("POST", "pressure", &json!({ "level": null }));
                }
                6 => {
                    managed.ok("POST", "caches/invalidate", &json!({}));
                    managed.send("POST", &format!("models/{name}/unload"), &json!({}));
                }
                7 => {
                    // removed again by a later step, or by the swap
                    let added = managed.send("POST", &format!("models/{name}/workers"), &json!({}));
                    if let Some(id) = added.json()["id"].as_u64() {
                        managed.send("DELETE", &format!("models/{name}/workers/{id}"), &json!({}));
                    }
                }
                _ => thread::sleep(Duration::from_millis(30)),
            }
            thread::sleep(Duration::from_millis(10));
        }
    });
    let (answers, refused, left) = (answers.into_inner(), refused.into_inner(), left.into_inner());
    println!("{answers} answers, {refused} refused, {left} left, in {seconds} s");
    assert!(answers > seconds as usize && refused < answers, "{answers} answers, {refused} refused");
    assert_eq!(managed.ok("GET", "failures", &json!({}))["failures"], json!([]));
    // nothing is left behind: requests, pages, memory of old models, threads
    let models = ["m", "other"].map(|name| managed.ok("POST", &format!("models/{name}/load"), &json!({})));
    assert!(models.iter().all(|model| model["status"] == "loaded"));
    let list = managed.wait("models", |list| {
        let models = list["models"].as_array().expect("a list");
        let n = |model: &Value, key: &str| model[key].as_u64().expect("a number");
        let used: u64 = models.iter().map(|model| n(model, "weight_bytes") + n(model, "kv_bytes")).sum();
        models.iter().all(|model| n(model, "running") + n(model, "waiting") == 0)
            && list["used_bytes"].as_u64().expect("bytes") <= used
    });
    let workers = |model: &Value| model["workers"].as_array().expect("a list").clone();
    for worker in list["models"].as_array().expect("a list").iter().flat_map(workers) {
        assert_eq!(worker["kv_in_use_bytes"], 0, "{list}");
    }
    let after = resources(&managed);
    assert!(after.0 <= before.0 + 8, "threads: {before:?} {after:?}");
    println!("threads and resident bytes: {before:?} before, {after:?} after");
    // the allocator keeps some of what many threads have used; a leak would grow with the number of swaps
    assert!(after.1 <= before.1 + (512 << 20), "memory: {before:?} {after:?}");
}
