//! Memory pressure, the circuit breaker of a model, and partial answers at the time limit.

use serde_json::{Value, json};

use crate::admin_client::{Directory, Managed, completion, reference};
use crate::server::{Server, fixture};

const COMPLETIONS: &str = "/v1/completions";

fn source(name: &str, of: &str) -> String {
    format!("{name}={}", reference(of))
}

#[test]
fn pressure_unloads_idle_models_then_refuses_by_priority() {
    let (a, b) = (source("a", "llama-k256-q4_k_m"), source("b", "qwen3-tied-f16"));
    let managed = Managed::start(&["-m", &a, "-m", &b, "--memory-pressure=false"]);
    let set = |level: Value| managed.ok("POST", "pressure", &json!({ "level": level }));
    let ask = |model: &str, priority: &str| {
        let mut body = completion(model, "x", 2);
        body["priority"] = json!(priority);
        managed.server.post(COMPLETIONS, &body)
    };
    let expected = ask("a", "normal").json()["choices"].clone();
    set(json!(1));
    assert_eq!(ask("a", "normal").json()["choices"], expected);
    set(json!(2));
    let list = managed.ok("GET", "models", &json!({}));
    assert!(list["models"].as_array().expect("a list").iter().all(|model| model["status"] == "unloaded"), "{list}");
    // and loaded again when it is asked for
    assert_eq!(ask("a", "low").json()["choices"], expected);
    set(json!(3));
    for priority in ["low", "normal"] {
        let response = ask("a", priority);
        assert_eq!((response.status, &response.json()["error"]["code"]), (503, &json!("memory_pressure")));
        assert!(response.header("retry-after").is_some());
    }
    assert_eq!(ask("a", "high").json()["choices"], expected);
    let ready = managed.server.get("/readyz");
    assert_eq!((ready.status, &ready.json()["memory_pressure"]), (503, &json!(3)));
    assert!(managed.server.get("/metrics").text().contains("starling_memory_pressure_level 3\n"));
    set(Value::Null);
    assert_eq!((ask("b", "low").status, managed.server.get("/readyz").status), (200, 200));
    assert_eq!(managed.send("POST", "pressure", &json!({ "level": 4 })).status, 400);
}

#[test]
fn a_breaker_opens_on_repeated_faults_and_closes_after_a_trial() {
    let managed =
        Managed::start(&["-m", &source("m", "llama-k256-q4_k_m"), "--breaker-faults", "2", "--breaker-open", "0.4"]);
    let ask = || managed.server.post(COMPLETIONS, &completion("m", "x", 30));
    for _ in 0..2 {
        managed.ok("POST", "models/m/workers/0/fail", &json!({ "fault": "panic", "after_steps": 3 }));
        assert_eq!(ask().status, 200, "the fault is invisible");
        managed.wait("models/m/workers", |list| list["workers"][0]["state"] == "healthy");
    }
    let response = ask();
    assert_eq!((response.status, &response.json()["error"]["code"]), (503, &json!("model_unavailable")));
    assert!(response.header("retry-after").is_some());
    assert_eq!(managed.server.get("/readyz").json()["models"]["m"]["breaker"], "open");
    std::thread::sleep(std::time::Duration::from_millis(450));
    assert_eq!((ask().status, ask().status), (200, 200));
    assert_eq!(managed.ok("GET", "models/m", &json!({}))["breaker"], "closed");
}

#[test]
fn only_the_right_of_a_key_passes_the_refusal_under_pressure() {
    let directory = Directory::new();
    let keys = directory.write("keys", "key-a a 1 max-priority=high\nkey-b b\n");
    let managed = Managed::start(&["--api-key-file", &keys, "--memory-pressure=false"]);
    let ask = |key: &str, body: Value, objective: &str| {
        let key = format!("Bearer {key}");
        let headers = [("authorization", key.as_str()), ("x-gateway-inference-objective", objective)];
        managed.server.post_with(COMPLETIONS, &headers, &body).status
    };
    let (plain, high) =
        (json!({ "prompt": "x", "max_tokens": 1 }), json!({ "prompt": "x", "max_tokens": 1, "priority": "high" }));
    assert_eq!((ask("key-b", high.clone(), "x"), ask("key-a", high.clone(), "x")), (200, 200));
    managed.ok("POST", "pressure", &json!({ "level": 3 }));
    let found = [
        ("key-a", &high, "x"),
        ("key-a", &plain, "critical"),
        ("key-a", &plain, "x"),
        ("key-b", &high, "x"),
        ("key-b", &plain, "critical"),
    ];
    assert_eq!(found.map(|(key, body, objective)| ask(key, body.clone(), objective)), [200, 200, 503, 503, 503]);
}

#[test]
fn texts_go_on_after_a_fault_and_end_the_trial_of_an_encoder() {
    let managed =
        Managed::start(&["-m", &source("e", "bert-mean-f32"), "--breaker-faults", "1", "--breaker-open", "2"]);
    let ask = || managed.server.post("/v1/embeddings", &json!({ "input": ["a b c", "d", "e f"] }));
    let expected = ask();
    assert_eq!(expected.status, 200);
    managed.ok("POST", "models/e/workers/0/fail", &json!({ "fault": "panic" }));
    let response = ask();
    assert_eq!((response.status, response.json()), (200, expected.json()));
    let refused = ask();
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (503, &json!("model_unavailable")));
    std::thread::sleep(std::time::Duration::from_millis(2100));
    assert_eq!((ask().status, ask().status), (200, 200));
    assert_eq!(managed.ok("GET", "models/e", &json!({}))["breaker"], "closed");
}

#[test]
fn answers_and_vectors_that_are_computed_together_are_the_same() {
    let server = Server::start(&[]);
    let embedding = json!({ "input": ["dog ".repeat(100), "a", "cat ".repeat(30)] });
    let answer = json!({ "prompt": "Once", "max_tokens": 60, "ignore_eos": true, "seed": 1 });
    let alone = (server.ok("/v1/embeddings", &embedding), server.ok(COMPLETIONS, &answer)["choices"].clone());
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.ok(COMPLETIONS, &answer)["choices"].clone());
        assert_eq!(server.ok("/v1/embeddings", &embedding), alone.0);
        assert_eq!(running.join().expect("an answer"), alone.1);
    });
}

#[test]
fn missed_deadlines_of_a_tenant_open_the_breaker_for_it_alone() {
    let directory = Directory::new();
    let keys = directory.write("keys", "key-a a\nkey-b b\n");
    let model = fixture("starling-tiny/starling-tiny-q8_0.gguf");
    let limits = ["--request-timeout", "1.5", "--max-n", "64", "--max-seqs", "64"];
    let breaker = ["--breaker-faults", "2", "--breaker-open", "2"];
    let args = [&["-m", &model, "--api-key-file", &keys][..], &limits, &breaker].concat();
    let managed = Managed::start(&args);
    let send = |method: &str, path: &str, key: &str, body: &Value| {
        let key = format!("Bearer {key}");
        let headers = [("authorization", key.as_str()), ("content-type", "application/json")];
        managed.server.send(method, path, &headers, body.to_string().as_bytes())
    };
    let ask = |key: &str| send("POST", COMPLETIONS, key, &json!({ "prompt": "Once", "max_tokens": 2 }));
    // administration counts for nobody
    let name = managed.ok("GET", "models", &json!({}))["models"][0]["name"].as_str().expect("a name").to_string();
    for _ in 0..3 {
        assert_ne!(
            managed.send("POST", &format!("models/{name}/swap"), &json!({ "source": "/none.gguf" })).status,
            200
        );
    }
    let long = json!({ "prompt": "Once", "max_tokens": 500, "n": 64, "temperature": 1, "ignore_eos": true });
    for _ in 0..2 {
        assert_eq!(send("POST", COMPLETIONS, "key-a", &long).status, 504);
    }
    let refused = ask("key-a");
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (503, &json!("model_unavailable")));
    assert_eq!(ask("key-b").status, 200);
    // what no worker answers is not refused, and takes no trial
    let other = || {
        assert_eq!(send("GET", "/slots", "key-a", &Value::Null).status, 200);
        assert_eq!(send("POST", "/v1/tokenize", "key-a", &json!({ "text": "a" })).status, 200);
    };
    other();
    std::thread::sleep(std::time::Duration::from_millis(2100));
    other();
    // nor does a request that ends before it has an answer
    let wrong = json!({ "prompt": "Once", "max_tokens": 2, "temperature": -1 });
    assert_eq!(send("POST", COMPLETIONS, "key-a", &wrong).status, 400);
    assert_eq!((ask("key-a").status, ask("key-a").status), (200, 200));
    assert_eq!(managed.ok("GET", "models", &json!({}))["models"][0]["breaker"], "closed");
}

#[test]
fn at_the_time_limit_there_is_an_error_or_what_there_is() {
    let model = fixture("starling-tiny/starling-tiny-q8_0.gguf");
    let server = Server::start(&["-m", &model, "--request-timeout", "0.5", "--max-n", "64", "--max-seqs", "64"]);
    let mut body =
        json!({ "prompt": "Once", "max_tokens": 500, "n": 64, "temperature": 1, "ignore_eos": true, "seed": 1 });
    let whole = server.post(COMPLETIONS, &body);
    assert_eq!((whole.status, &whole.json()["error"]["code"]), (504, &json!("request_timeout")));
    body["timeout_partial"] = json!(true);
    let choices = server.ok(COMPLETIONS, &body)["choices"].clone();
    let choices = choices.as_array().expect("a list").clone();
    let partial: Vec<&Value> = choices.iter().filter(|choice| choice["finish_reason"] == "timeout").collect();
    assert!(!partial.is_empty(), "{choices:?}");
    // what there is begins the whole answer
    let patient = Server::start(&["-m", &model]);
    let first = json!({ "prompt": "Once", "max_tokens": 500, "temperature": 1, "ignore_eos": true, "seed": 1 });
    let first = patient.ok(COMPLETIONS, &first)["choices"][0]["text"].as_str().expect("a text").to_string();
    let begun = choices[0]["text"].as_str().expect("a text");
    assert!(first.starts_with(begun.trim_end_matches('\u{fffd}')), "{begun:?} {first:?}");
}
