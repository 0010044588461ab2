//! Replacement of a model while it serves.

use std::io::BufReader;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use serde_json::{Value, json};

use crate::admin_client::{Directory, Managed, completion, reference, text};
use crate::server::{Server, read_chunk, read_head, read_response};

const COMPLETIONS: &str = "/v1/completions";
const OLD: &str = "llama-k256-q4_k_m";
const NEW: &str = "llama-k256-q8_0";
const PROMPT: &str = "one two three";

/// The answer of a reference model.
fn expected(model: &str, n: usize) -> String {
    let server = Server::start(&["-m", &format!("m={}", reference(model))]);
    text(&server.ok(COMPLETIONS, &completion("m", PROMPT, n)))
}

fn start(more: &[&str]) -> Managed {
    let source = format!("m={}", reference(OLD));
    Managed::start(&[&["-m", &source], more].concat())
}

fn swap(managed: &Managed, body: &Value) -> (u16, Value) {
    let response = managed.send("POST", "models/m/swap", body);
    (response.status, response.json())
}

#[test]
fn no_request_fails_while_models_are_replaced() {
    let (old, new) = (expected(OLD, 24), expected(NEW, 24));
    assert_ne!(old, new);
    let managed = start(&["--max-seqs", "8"]);
    let (stop, answers) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let answer = text(&managed.server.ok(COMPLETIONS, &completion("m", PROMPT, 24)));
                    assert!(answer == old || answer == new, "{answer:?}");
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for i in 0..10 {
            let (source, expected) = if i % 2 == 0 { (NEW, &new) } else { (OLD, &old) };
            let done = managed.ok("POST", "models/m/swap", &json!({ "source": reference(source) }));
            assert_eq!(done["name"], "m");
            // the switch is done: no new request meets the old model
            assert_eq!(&text(&managed.server.ok(COMPLETIONS, &completion("m", PROMPT, 24))), expected);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(answers.into_inner() > 10);
    // only one model is left in memory
    let list = managed.wait("models", |list| list["used_bytes"].as_u64() < Some(2 << 20) || list["limit_bytes"] == 0);
    let loaded = &list["models"][0];
    let sum = loaded["weight_bytes"].as_u64().expect("bytes") + loaded["kv_bytes"].as_u64().expect("bytes");
    managed.wait("models", |list| list["used_bytes"].as_u64().expect("bytes") <= sum);
    let metrics = managed.server.get("/metrics").text();
    assert!(metrics.contains("starling_model_swaps_total{model_name=\"m\",result=\"ok\"} 10\n"), "{metrics}");
}

/// Totals, rates and latencies are of the requests of clients.
#[test]
fn a_self_test_counts_nowhere() {
    let managed = start(&[]);
    managed.server.ok(COMPLETIONS, &completion("m", PROMPT, 3));
    managed.server.wait("the answer counts", |stats| stats["output_tokens"] == 3);
    managed.server.wait_metrics("starling_tenant_output_tokens_total{tenant=\"default\"} 3\n");
    let counted = |metrics: &str| {
        let families =
            ["requests_total", "output_tokens_total", "prompt_tokens_total", "step_seconds_count", "tenant_"];
        let is_counted = |line: &&str| families.iter().any(|family| line.starts_with(&format!("starling_{family}")));
        metrics.lines().filter(is_counted).map(str::to_string).collect::<Vec<_>>()
    };
    let before = counted(&managed.server.get("/metrics").text());
    let test = json!({ "prompt": "a b c", "text": "one two three", "max_perplexity": 1e9 });
    assert_eq!(swap(&managed, &json!({ "source": reference(NEW), "test": test })).0, 200);
    let after = counted(&managed.server.get("/metrics").text());
    assert_eq!(after, before);
    assert!(!before.is_empty());
    // the new model counts from its first request on
    managed.server.ok(COMPLETIONS, &completion("m", PROMPT, 4));
    managed.server.wait("the answer counts", |stats| stats["output_tokens"] == 7);
}

#[test]
fn a_running_answer_finishes_on_the_old_model() {
    let old = expected(OLD, 300);
    let managed = start(&[]);
    let body = completion("m", PROMPT, 300).to_string();
    let json_type = [("content-type", "application/json")];
    let mut stream = managed.server.open("POST", COMPLETIONS, &json_type, body.as_bytes());
    managed.server.wait("it runs", |stats| stats["running"] == 1);
    managed.ok("POST", "models/m/swap", &json!({ "source": reference(NEW) }));
    assert_eq!(text(&read_response(&mut stream).json()), old);
}

#[test]
fn a_swap_that_fails_keeps_the_old_model() {
    let directory = Directory::new();
    let broken = directory.write("broken.gguf", "no model");
    let old = expected(OLD, 8);
    let managed = start(&[]);
    let test = |test: Value| json!({ "source": reference(NEW), "test": test });
    let cases = [
        (json!({ "source": broken }), 500, "model_load_failed"),
        (json!({ "source": "/nowhere.gguf" }), 500, "model_load_failed"),
        (json!({ "source": broken, "strategy": "drain" }), 500, "model_load_failed"),
        (test(json!({ "prompt": "a", "expect": "not this" })), 500, "self_test_failed"),
        (test(json!({ "text": "one two three four", "max_perplexity": 1.5 })), 500, "self_test_failed"),
        (test(json!({ "expect": "needs a prompt" })), 500, "self_test_failed"),
        (json!({ "source": reference(NEW), "stratgy": "drain" }), 400, "null"),
    ];
    for (body, status, code) in &cases {
        let (found, response) = swap(&managed, body);
        assert_eq!(found, *status, "{body}: {response}");
        assert_eq!(response["error"]["code"].as_str().unwrap_or("null"), *code, "{response}");
        assert_eq!(text(&managed.server.ok(COMPLETIONS, &completion("m", PROMPT, 8))), old, "{body}");
    }
    let metrics = managed.server.get("/metrics").text();
    assert!(metrics.contains("starling_model_swaps_total{model_name=\"m\",result=\"failed\"} 6\n"), "{metrics}");
    // the same with tests that pass
    let expect: String = expected(NEW, 4).chars().take(3).collect();
    let passing = test(json!({ "prompt": PROMPT, "expect": expect, "text": PROMPT, "max_perplexity": 1e9 }));
    assert_eq!(swap(&managed, &passing).0, 200);
}

#[test]
fn models_that_do_not_fit_together_are_replaced_by_draining() {
    let managed = start(&["--memory", "1100KiB", "--kv-memory", "128KiB"]);
    let parallel = json!({ "source": reference(NEW) });
    let (status, response) = swap(&managed, &parallel);
    assert_eq!((status, &response["error"]["code"]), (503, &json!("not_enough_memory")), "{response}");
    let new = expected(NEW, 8);
    thread::scope(|scope| {
        // requests that come meanwhile wait for the new model
        let asking: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..5 {
                        managed.server.ok(COMPLETIONS, &completion("m", PROMPT, 8));
                    }
                })
            })
            .collect();
        managed.ok("POST", "models/m/swap", &json!({ "source": reference(NEW), "strategy": "drain" }));
        asking.into_iter().for_each(|t| t.join().expect("answers"));
    });
    assert_eq!(text(&managed.server.ok(COMPLETIONS, &completion("m", PROMPT, 8))), new);
}

#[test]
fn a_session_survives_a_swap() {
    let managed = start(&[]);
    let turn = |prompt: &str| json!({ "session_id": "s", "prompt": prompt, "max_tokens": 3, "temperature": 0 });
    let text_of = |value: Value| value["text"].as_str().map(str::to_string).expect("a text");
    let first = text_of(managed.server.ok("/v1/generate", &turn("one two")));
    managed.ok("POST", "models/m/swap", &json!({ "source": reference("qwen2-tied-f16") }));
    let second = text_of(managed.server.ok("/v1/generate", &turn(" three")));
    // the other tokenizer has read the whole conversation
    let whole = Server::start(&["-m", &reference("qwen2-tied-f16")]);
    let all = whole
        .ok("/v1/generate", &json!({ "prompt": format!("one two{first} three"), "max_tokens": 3, "temperature": 0 }));
    assert_eq!(second, text_of(all));
}

#[test]
fn a_file_that_was_replaced_is_loaded_on_sighup() {
    let directory = Directory::new();
    let path = directory.model(OLD, "m.gguf");
    let managed = Managed::start(&["-m", &format!("m={path}")]);
    let before = managed.ok("GET", "models/m", &json!({}));
    directory.model(NEW, "m.gguf");
    managed.server.signal("HUP");
    managed.wait("models/m", |model| model["sha256"] != before["sha256"] && model["status"] == "loaded");
    assert_eq!(text(&managed.server.ok(COMPLETIONS, &completion("m", PROMPT, 8))), expected(NEW, 8));
}

#[test]
fn a_stream_has_no_gap_in_its_text() {
    let old = expected(OLD, 200);
    let managed = start(&[]);
    let mut body = completion("m", PROMPT, 200);
    body["stream"] = json!(true);
    let json_type = [("content-type", "application/json")];
    let mut stream = managed.server.open("POST", COMPLETIONS, &json_type, body.to_string().as_bytes());
    let mut reader = BufReader::new(&mut stream);
    assert_eq!(read_head(&mut reader).0, 200);
    let mut seen = String::new();
    let mut swapped = false;
    while let Some(chunk) = read_chunk(&mut reader) {
        seen += &String::from_utf8_lossy(&chunk);
        if !swapped {
            managed.ok("POST", "models/m/swap", &json!({ "source": reference(NEW) }));
            swapped = true;
        }
    }
    let datas = seen.split("data: ").filter_map(|data| serde_json::from_str::<Value>(data.trim()).ok());
    assert_eq!(datas.map(|chunk| text(&chunk)).collect::<String>(), old);
}
