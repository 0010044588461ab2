//! Workers of a model: several at once, faults, failover.

use std::thread;

use serde_json::{Value, json};

use crate::admin_client::{Managed, completion, reference, text};
use crate::server::Server;

const COMPLETIONS: &str = "/v1/completions";

fn source() -> String {
    format!("m={}", reference("llama-k256-q4_k_m"))
}

/// Requests of several kinds, with their answers by a server of one worker.
fn requests(n: usize) -> Vec<(Value, Value)> {
    let server = Server::start(&["-m", &source(), "--max-seqs", "4"]);
    let request = |i: usize| {
        let mut body = completion("m", &"the cat and ".repeat(1 + i % 5), 30 + 7 * (i % 4));
        (body["temperature"], body["seed"]) = (json!(0.9), json!(i));
        match i % 5 {
            1 => body["stop"] = json!(["e", "x"]),
            2 => (body["n"], body["logprobs"]) = (json!(2), json!(3)),
            3 => (body["repetition_penalty"], body["frequency_penalty"]) = (json!(1.3), json!(0.4)),
            4 => body["response_format"] = json!({ "type": "json_object" }),
            _ => {}
        }
        body
    };
    let answer = |body: Value| {
        let response = server.ok(COMPLETIONS, &body);
        (body, response["choices"].clone())
    };
    (0..n).map(request).map(answer).collect()
}

/// Sends all requests from four threads, checks every answer, and does `meanwhile` beside it.
fn check_all(server: &Server, requests: &[(Value, Value)], meanwhile: impl FnOnce()) {
    thread::scope(|scope| {
        for part in 0..4 {
            scope.spawn(move || {
                for (body, expected) in requests.iter().skip(part).step_by(4) {
                    let response = server.ok(COMPLETIONS, body);
                    assert_eq!(&response["choices"], expected, "{body}");
                }
            });
        }
        meanwhile();
    });
}

fn states(managed: &Managed) -> Vec<(u64, String)> {
    let list = managed.ok("GET", "models/m/workers", &json!({}));
    let workers = list["workers"].as_array().expect("a list");
    let state = |w: &Value| (w["id"].as_u64().expect("a number"), w["state"].as_str().expect("a state").to_string());
    workers.iter().map(state).collect()
}

#[test]
fn workers_come_and_go_and_change_no_answer() {
    let requests = requests(24);
    let managed = Managed::start(&["-m", &source(), "--workers", "2", "--max-seqs", "2", "--kv-memory", "2MiB"]);
    assert_eq!(states(&managed).len(), 2);
    check_all(&managed.server, &requests, || {
        let added = managed.ok("POST", "models/m/workers", &json!({}));
        assert_eq!((&added["id"], &added["state"]), (&json!(2), &json!("healthy")));
        managed.ok("DELETE", "models/m/workers/0", &json!({}));
        for strategy in ["round-robin", "least-loaded", "memory-aware", "prefix-aware"] {
            managed.ok("PATCH", "config", &json!({ "strategy": strategy }));
            assert_eq!(managed.ok("GET", "models/m/workers", &json!({}))["strategy"], strategy);
        }
    });
    managed.wait("models/m/workers", |list| list["workers"].as_array().expect("a list").len() == 2);
    managed.ok("DELETE", "models/m/workers/1", &json!({}));
    let last = managed.send("DELETE", "models/m/workers/2", &json!({}));
    assert_eq!((last.status, &last.json()["error"]["code"]), (400, &json!("last_worker")));
    assert_eq!(managed.send("DELETE", "models/m/workers/9", &json!({})).status, 404);
    managed.wait("models/m/workers", |list| list["workers"].as_array().expect("a list").len() == 1);
    let (body, expected) = &requests[0];
    assert_eq!(&managed.server.ok(COMPLETIONS, body)["choices"], expected);
}

/// Whatever workers are lost, every answer has the bytes that it has without a fault.
#[test]
fn answers_of_a_lost_worker_go_on_with_the_same_bytes() {
    let requests = requests(20);
    for workers in ["1", "2"] {
        let args = ["-m", &source(), "--workers", workers, "--max-seqs", "4", "--kv-memory", "2MiB"];
        let managed = Managed::start(&args);
        managed.ok("POST", "models/m/workers/0/fail", &json!({ "fault": "panic", "after_steps": 50 }));
        check_all(&managed.server, &requests, || {});
        managed.wait("models/m/workers", |list| {
            list["workers"].as_array().expect("a list").iter().all(|worker| worker["state"] == "healthy")
        });
        let metrics = managed.server.get("/metrics").text();
        assert!(metrics.contains("starling_worker_faults_total{model_name=\"m\",kind=\"panic\"} 1\n"), "{metrics}");
        let resumed =
            metrics.lines().find_map(|line| line.strip_prefix("starling_requests_resumed_total{model_name=\"m\"} "));
        assert_ne!(resumed, Some("0"), "{metrics}");
        assert_eq!(managed.ok("GET", "failures", &json!({}))["failures"], json!([]));
    }
}

#[test]
fn a_receipt_verifies_after_failover() {
    let managed = Managed::start(&["-m", &source()]);
    let mut body = completion("m", "one two", 200);
    (body["receipt"], body["seed"]) = (json!(true), json!(5));
    let expected = managed.server.ok(COMPLETIONS, &body);
    managed.ok("POST", "models/m/workers/0/fail", &json!({ "fault": "panic", "after_steps": 90 }));
    let response = managed.server.ok(COMPLETIONS, &body);
    assert_eq!(response["choices"], expected["choices"]);
    let receipt = &response["choices"][0]["receipt"];
    assert!(receipt.is_object(), "{response}");
    assert_eq!(managed.server.ok("/v1/verify", &json!({ "receipt": receipt }))["verified"], true);
}

#[test]
fn what_fails_twice_in_the_same_way_ends_with_an_error() {
    let managed = Managed::start(&["-m", &source()]);
    let fail = || managed.ok("POST", "models/m/workers/0/fail", &json!({ "fault": "panic", "after_steps": 20 }));
    let response = thread::scope(|scope| {
        fail();
        let asking = scope.spawn(|| managed.server.post(COMPLETIONS, &completion("m", "one two", 400)));
        managed.wait("models/m/workers", |list| list["workers"][0]["state"] != "healthy");
        fail();
        asking.join().expect("a response")
    });
    assert_eq!((response.status, &response.json()["error"]["code"]), (500, &json!("worker_failed")));
    let failures = managed.ok("GET", "failures", &json!({}));
    let failure = &failures["failures"][0];
    assert_eq!((&failure["model"], &failure["fault"]), (&json!("m"), &json!("injected fault")));
    assert_eq!(failure["request_id"].as_str(), response.header("x-request-id"));
    // others are served
    text(&managed.server.ok(COMPLETIONS, &completion("m", "one", 3)));
}

#[test]
fn a_stalled_worker_loses_its_requests_and_returns() {
    let expected = text(&Server::start(&["-m", &source()]).ok(COMPLETIONS, &completion("m", "one two", 120)));
    // without drafts each token takes a step
    let args = ["--workers", "2", "--kv-memory", "2MiB", "--stall-timeout", "1", "--draft-max", "0"];
    let managed = Managed::start(&[&["-m", &source()], &args[..]].concat());
    // the first request goes to the first worker
    managed.ok("POST", "models/m/workers/0/fail", &json!({ "fault": "stall", "after_steps": 10 }));
    let answer = managed.server.ok(COMPLETIONS, &completion("m", "one two", 120));
    assert_eq!(text(&answer), expected);
    managed.wait("models/m/workers", |list| {
        list["workers"].as_array().expect("a list").iter().all(|worker| worker["state"] == "healthy")
    });
    let metrics = managed.server.get("/metrics").text();
    assert!(metrics.contains("starling_worker_faults_total{model_name=\"m\",kind=\"stall\"} 1\n"), "{metrics}");
}
