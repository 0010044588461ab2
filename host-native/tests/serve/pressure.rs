//! Memory pressure, the circuit breaker of a model, and partial answers at the time limit.

use serde_json::{Value, json};

use crate::admin_client::{Managed, completion, reference};
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
