//! Properties of the server, each a test of its own name, on a running server: what is accepted and refused, forms of responses
//! and errors, time limits, where settings come from, and replacement of a model. Those of the engine are in
//! `tests/tests/properties.rs`.

use std::fmt::Write;
use std::thread;

use proptest::prelude::*;
use proptest::test_runner::{TestCaseError, TestCaseResult, TestRunner};
use serde_json::{Value, json};

use crate::admin_client::{Directory, Managed, completion, reference, text};
use crate::server::{Response, Server, command, fixture};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const OLD: &str = "llama-k256-q4_k_m";
const NEW: &str = "llama-k256-q8_0";

/// A server with the bundled model.
fn server() -> Server {
    let model = format!("m={}", fixture("starling-tiny/starling-tiny-q8_0.gguf"));
    Server::start(&["-m", &model, "--ctx-size", "512", "--max-seqs", "4", "--max-n", "3"])
}

/// Runs a test on random values.
fn property<S: Strategy>(cases: u32, values: S, test: impl Fn(S::Value) -> TestCaseResult) {
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    TestRunner::new(config).run(&values, test).unwrap_or_else(|e| panic!("{e}"));
}

/// Fields of a completion that are in range.
fn fields() -> impl Strategy<Value = Value> {
    let numbers = (0.0f64..2.0, 0.01f64..=1.0, -2.0f64..2.0, -2.0f64..2.0, 1u64..24);
    let rest = (any::<i64>(), prop::collection::vec("[a-z .]{1,4}", 0..4), 1u64..=3, any::<bool>(), 0u64..5);
    (numbers, rest, "[ -~]{1,60}").prop_map(|(n, (seed, stop, choices, echo, logprobs), prompt)| {
        json!({ "model": "m", "prompt": prompt, "temperature": n.0, "top_p": n.1, "presence_penalty": n.2,
                "frequency_penalty": n.3, "max_tokens": n.4, "seed": seed, "stop": stop, "n": choices, "echo": echo,
                "logprobs": logprobs })
    })
}

/// A field of a request out of range or of another type, and the name that the error must give.
fn faults() -> impl Strategy<Value = (&'static str, Value)> {
    prop::sample::select(vec![
        ("temperature", json!(-0.1)),
        ("temperature", json!(2.5)),
        ("temperature", json!("warm")),
        ("top_p", json!(-0.01)),
        ("top_p", json!(1.01)),
        ("presence_penalty", json!(2.1)),
        ("frequency_penalty", json!([])),
        ("max_tokens", json!(-2)),
        ("n", json!(0)),
        ("n", json!(4)),
        ("seed", json!(1.5)),
        ("stop", json!([1])),
        ("stop", json!(vec!["x"; 65])),
        ("logprobs", json!(-1)),
        ("stream", json!("yes")),
        ("priority", json!("urgent")),
        ("response_format", json!({ "type": "xml" })),
    ])
}

/// The text that an OpenAI stream of one answer sends.
fn streamed(response: &Response, pointer: &str) -> String {
    response.chunks().iter().filter_map(|chunk| chunk.pointer(pointer)?.as_str()).collect()
}

/// The error of a response in the form of the API at `path`: its message.
fn error_message(path: &str, response: &Response) -> Result<String, TestCaseError> {
    let body = response.json();
    let message = match path {
        "/v1/messages" => {
            prop_assert_eq!(&body["type"], "error");
            prop_assert!(body["error"]["type"].is_string());
            &body["error"]["message"]
        }
        "/api/chat" | "/api/generate" => &body["error"],
        "/embed" => {
            prop_assert!(body["error_type"].is_string());
            &body["error"]
        }
        _ => {
            prop_assert!(body["error"]["type"].is_string() && body["error"].get("param").is_some());
            &body["error"]["message"]
        }
    };
    message.as_str().map(Into::into).ok_or_else(|| TestCaseError::fail(format!("{path}: {body}")))
}

/// A request within all ranges is answered with `n` choices.
#[test]
fn valid_accepted() {
    let server = server();
    property(32, fields(), |body| {
        let answer = server.post(COMPLETIONS, &body);
        prop_assert_eq!(answer.status, 200, "{}: {}", body, answer.text());
        prop_assert_eq!(answer.json()["choices"].as_array().map(Vec::len), body["n"].as_u64().map(|n| n as usize));
        Ok(())
    });
}

/// A field out of range is refused with status 400 and its name, by both endpoints.
#[test]
fn invalid_rejected() {
    let server = server();
    property(32, (fields(), faults(), any::<bool>()), |(mut body, (field, value), is_chat)| {
        body[field] = value;
        let path = if is_chat {
            body["messages"] = json!([{ "role": "user", "content": "Hi" }]);
            ["prompt", "echo", "logprobs"].iter().filter(|name| **name != field).for_each(|name| {
                body.as_object_mut().expect("an object").remove(*name);
            });
            CHAT
        } else {
            COMPLETIONS
        };
        let response = server.post(path, &body);
        prop_assert_eq!(response.status, 400, "{}: {}", body, response.text());
        let error = &response.json()["error"];
        let named = error["param"].as_str().unwrap_or_default().starts_with(field);
        prop_assert!(named || error["message"].as_str().unwrap_or_default().contains(field), "{}: {}", field, error);
        Ok(())
    });
}

/// Answers have at most `max_tokens` tokens; those that have as many ended by `length`.
#[test]
fn token_limit() {
    let server = server();
    property(32, fields(), |mut body| {
        body["n"] = json!(1);
        let answer = server.ok(COMPLETIONS, &body);
        let (found, max) =
            (answer["usage"]["completion_tokens"].as_u64().unwrap(), body["max_tokens"].as_u64().unwrap());
        let reason = answer["choices"][0]["finish_reason"].as_str().unwrap();
        prop_assert!(found <= max && (found == max || reason == "stop"), "{}", answer);
        Ok(())
    });
}

/// Text, and the same answer as a stream: the pieces together are the whole, the usage is the same.
#[test]
fn response_format() {
    let server = server();
    property(32, fields(), |mut body| {
        body["n"] = json!(1);
        body["seed"] = json!(7);
        let whole = server.ok(COMPLETIONS, &body);
        prop_assert!(whole["id"].is_string() && whole["created"].is_u64() && whole["object"] == "text_completion");
        let usage = &whole["usage"];
        let count = |name: &str| usage[name].as_u64().unwrap();
        prop_assert_eq!(count("prompt_tokens") + count("completion_tokens"), count("total_tokens"));
        body["stream"] = json!(true);
        body["stream_options"] = json!({ "include_usage": true });
        let stream = server.post(COMPLETIONS, &body);
        prop_assert_eq!(&streamed(&stream, "/choices/0/text"), whole["choices"][0]["text"].as_str().unwrap());
        let chunks = stream.chunks();
        let same = |name: &str| chunks[chunks.len() - 1]["usage"][name] == usage[name];
        prop_assert!(["prompt_tokens", "completion_tokens", "total_tokens"].into_iter().all(same));
        Ok(())
    });
}

/// An answer can be sent back as a message, also as it was received, and continues the same conversation.
#[test]
fn response_round_trip() {
    let server = server();
    property(32, ("[ -~]{1,40}", "[ -~]{1,20}", 1u64..12), |(question, next, max)| {
        let body = |messages: Value| json!({ "model": "m", "messages": messages, "max_tokens": max, "temperature": 0 });
        let user = json!({ "role": "user", "content": question });
        let answer = server.ok(CHAT, &body(json!([user])));
        let message = answer["choices"][0]["message"].clone();
        let plain = json!({ "role": "assistant", "content": message["content"] });
        let follow = |message: &Value| {
            let mut answer = server.ok(CHAT, &body(json!([user, message, { "role": "user", "content": next }])));
            (answer["choices"].take(), answer["usage"]["prompt_tokens"].take())
        };
        prop_assert_eq!(follow(&message), follow(&plain));
        // parsed and written again, the response has the same bytes of JSON values
        prop_assert_eq!(serde_json::from_str::<Value>(&answer.to_string()).unwrap(), answer);
        Ok(())
    });
}

/// Each API reports a body that it cannot read in its own form, with a message that says what was expected.
#[test]
fn error_format() {
    let server = server();
    property(
        32,
        (
            prop::sample::select(&[COMPLETIONS, CHAT, "/v1/messages", "/v1/responses", "/api/chat", "/embed"][..]),
            prop_oneof![
                Just("{"),
                Just("[]"),
                Just("{}"),
                Just("{\"model\": 1}"),
                Just("\u{0}"),
                Just("{\"model\": \"m\", \"model\": \"m\"}")
            ],
        ),
        |(path, body)| {
            // a probe, which is answered
            prop_assume!((path, body) != ("/v1/responses", "{}"));
            let response = server.send("POST", path, &[("content-type", "application/json")], body.as_bytes());
            prop_assert!((400..500).contains(&response.status), "{} {}: {}", path, body, response.text());
            prop_assert!(!error_message(path, &response)?.is_empty());
            Ok(())
        },
    );
}

/// At its time limit a request ends, by an error or with the tokens that there are, and a neighbour has the bytes that it
/// has alone.
#[test]
fn timeout() {
    let server = server();
    let neighbour = json!({ "model": "m", "prompt": "One day", "max_tokens": 40, "temperature": 0 });
    let alone = text(&server.ok(COMPLETIONS, &neighbour));
    property(32, (1u64..60, 200u64..400), |(millis, tokens)| {
        let long = json!({ "model": "m", "prompt": "x", "max_tokens": tokens, "ignore_eos": true, "timeout": millis as f64 / 1e3 });
        let (response, found) = thread::scope(|scope| {
            let response = scope.spawn(|| server.post(COMPLETIONS, &long));
            let found = text(&server.ok(COMPLETIONS, &neighbour));
            (response.join().expect("a response"), found)
        });
        prop_assert_eq!(&found, &alone);
        match response.status {
            200 => prop_assert!(
                ["timeout", "length"].contains(&response.json()["choices"][0]["finish_reason"].as_str().unwrap())
            ),
            status => prop_assert!(status == 503 || status == 504 || status == 408, "{}: {}", status, response.text()),
        }
        Ok(())
    });
}

/// A setting comes from the flag, else the environment, else the file, else its default; the printed settings say which.
#[test]
fn configuration_precedence() {
    property(
        32,
        prop::collection::vec(
            (prop::option::of(1u32..1000), prop::option::of(1u32..1000), prop::option::of(1u32..1000)),
            3,
        ),
        |given| {
            const NAMES: [&str; 3] = ["max-seqs", "prefill-chunk", "queue-high"];
            const DEFAULTS: [u32; 3] = [32, 24, 256];
            let directory = Directory::new();
            let mut file = String::new();
            // steps must have room for all sequences
            let mut command = command(&["serve", "--print-config", "--batch-tokens", "65536"]);
            for (name, (in_file, in_environment, flag)) in NAMES.iter().zip(&given) {
                if let Some(value) = in_file {
                    writeln!(file, "{name} = {value}").expect("a string");
                }
                if let Some(value) = in_environment {
                    command.env(format!("STARLING_{}", name.replace('-', "_").to_uppercase()), value.to_string());
                }
                if let Some(value) = flag {
                    command.args([format!("--{name}"), value.to_string()]);
                }
            }
            command.args(["--config", &directory.write("settings.toml", file)]);
            let output = command.output().expect("the command");
            prop_assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let printed: toml::Table = String::from_utf8_lossy(&output.stdout).parse().expect("TOML");
            for ((name, default), (in_file, in_environment, flag)) in NAMES.iter().zip(DEFAULTS).zip(&given) {
                let expected = flag.or(*in_environment).or(*in_file).unwrap_or(default);
                prop_assert_eq!(
                    printed.get(*name).and_then(toml::Value::as_integer),
                    Some(i64::from(expected)),
                    "{}",
                    name
                );
            }
            Ok(())
        },
    );
}

/// An invalid setting keeps the server from starting, wherever it comes from; the message has its name.
#[test]
fn invalid_configuration_rejected() {
    property(
        32,
        (
            prop::sample::select(
                &[
                    ("max-seqs", "0"),
                    ("max-seqs", "many"),
                    ("batch-tokens", "-1"),
                    ("queue-timeout", "0"),
                    ("temperature", "9"),
                    ("top-p", "1.1"),
                    ("stall-timeout", "soon"),
                    ("log-format", "xml"),
                    ("max-body", "1 elephant"),
                    ("worker-idd", "x"),
                ][..],
            ),
            0usize..3,
        ),
        |((name, value), source)| {
            let directory = Directory::new();
            let mut command = command(&["serve", "--print-config"]);
            let is_known = name != "worker-idd";
            match source {
                0 => command.args([format!("--{name}"), value.into()]),
                1 if is_known => command.env(format!("STARLING_{}", name.replace('-', "_").to_uppercase()), value),
                _ => command.args(["--config", &directory.write("settings.toml", format!("{name} = \"{value}\"\n"))]),
            };
            let output = command.output().expect("the command");
            let message = String::from_utf8_lossy(&output.stderr).to_lowercase();
            let names = [name.to_string(), name.replace('-', "_")];
            prop_assert!(!output.status.success() && names.iter().any(|name| message.contains(name)), "{}", message);
            Ok(())
        },
    );
}

/// A server with an administrator, and the answers of both models.
fn replaced() -> (Managed, [String; 2]) {
    let managed = Managed::start(&["-m", &format!("m={}", reference(OLD)), "--max-seqs", "4"]);
    let answer = |source: &str| {
        managed.ok("POST", "models/m/swap", &json!({ "source": reference(source) }));
        text(&managed.server.ok(COMPLETIONS, &completion("m", "one two", 16)))
    };
    let [new, old] = [NEW, OLD].map(answer);
    (managed, [old, new])
}

/// While a model is replaced, by either strategy and any number of times, no request fails and each is answered by one model
/// whole; afterwards the last one answers.
#[test]
fn swap_continuity() {
    let (managed, answers) = replaced();
    property(8, (prop::collection::vec((any::<bool>(), any::<bool>()), 1..4), 1usize..4), |(swaps, clients)| {
        let body = completion("m", "one two", 16);
        thread::scope(|scope| {
            let asking: Vec<_> = (0..clients)
                .map(|_| {
                    scope.spawn(|| (0..6).map(|_| text(&managed.server.ok(COMPLETIONS, &body))).collect::<Vec<_>>())
                })
                .collect();
            for (is_new, drains) in &swaps {
                let source = reference(if *is_new { NEW } else { OLD });
                let strategy = if *drains { "drain" } else { "parallel" };
                managed.ok("POST", "models/m/swap", &json!({ "source": source, "strategy": strategy }));
            }
            for found in asking.into_iter().flat_map(|client| client.join().expect("answers")) {
                assert!(answers.contains(&found), "{found}");
            }
        });
        let last = swaps.last().expect("a swap").0;
        prop_assert_eq!(&text(&managed.server.ok(COMPLETIONS, &body)), &answers[usize::from(last)]);
        Ok(())
    });
}

/// A replacement that fails, by either strategy and for any reason, leaves the model that served, and no request notices.
#[test]
fn swap_failure_recovery() {
    let (managed, answers) = replaced();
    property(8, prop::collection::vec((0usize..3, any::<bool>()), 1..4), |reasons| {
        let body = completion("m", "one two", 16);
        let before = text(&managed.server.ok(COMPLETIONS, &body));
        prop_assert!(answers.contains(&before));
        let directory = Directory::new();
        let broken = directory.write("broken.gguf", "no model");
        for (reason, drains) in reasons {
            let mut swap = match reason {
                0 => json!({ "source": broken }),
                1 => json!({ "source": directory.path().join("absent.gguf") }),
                _ => json!({ "source": reference(NEW), "test": { "prompt": "a", "expect": "not this" } }),
            };
            swap["strategy"] = json!(if drains { "drain" } else { "parallel" });
            thread::scope(|scope| {
                let client =
                    scope.spawn(|| (0..4).map(|_| text(&managed.server.ok(COMPLETIONS, &body))).collect::<Vec<_>>());
                let response = managed.send("POST", "models/m/swap", &swap);
                assert!(response.status >= 400, "{swap}: {}", response.text());
                assert!(client.join().expect("answers").iter().all(|found| *found == before));
            });
            prop_assert_eq!(&text(&managed.server.ok(COMPLETIONS, &body)), &before);
        }
        Ok(())
    });
}
