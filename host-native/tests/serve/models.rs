//! Several models in one server: names, loading on demand, memory, unloading.

use std::io::Read;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::admin_client::{Directory, Managed, completion, reference, text};
use crate::server::{Server, read_head};

const COMPLETIONS: &str = "/v1/completions";

/// States of all models, by `/v1/models`.
fn states(server: &Server) -> Vec<(String, String)> {
    let list = server.get("/v1/models").json();
    let text = |value: &Value| value.as_str().expect("a string").to_string();
    list["data"].as_array().expect("a list").iter().map(|m| (text(&m["id"]), text(&m["status"]["value"]))).collect()
}

fn state(server: &Server, name: &str) -> String {
    states(server).into_iter().find(|(id, _)| id == name).expect("a model").1
}

/// Starts a server of two models.
fn two(more: &[&str]) -> Server {
    let (llama, qwen) = (reference("llama-k256-q4_k_m"), reference("qwen2-tied-f16"));
    let (llama, qwen) = (format!("llama={llama}"), format!("qwen={qwen}"));
    Server::start(&[&["-m", &llama, "-m", &qwen], more].concat())
}

#[test]
fn a_request_reaches_the_model_that_it_names() {
    let server = two(&[]);
    let alone = |name: &str| {
        let server = Server::start(&["-m", &reference(name)]);
        text(
            &server.ok(COMPLETIONS, &json!({ "prompt": "the", "max_tokens": 9, "temperature": 0, "ignore_eos": true })),
        )
    };
    let (llama, qwen) = (alone("llama-k256-q4_k_m"), alone("qwen2-tied-f16"));
    assert_ne!(llama, qwen);
    for (name, expected) in [("llama", &llama), ("qwen", &qwen), ("llama", &llama)] {
        let response = server.ok(COMPLETIONS, &completion(name, "the", 9));
        assert_eq!((&text(&response), &response["model"]), (expected, &json!(name)));
    }
    // without a name: the first
    let response = server.ok(COMPLETIONS, &json!({ "prompt": "the", "max_tokens": 1 }));
    assert_eq!(response["model"], "llama");
    let error = server.post(COMPLETIONS, &completion("lama", "the", 1));
    assert_eq!(error.status, 404);
    assert!(error.text().contains("did you mean `llama`?"), "{}", error.text());
    assert_eq!(server.get("/v1/models/qwen").json()["status"]["value"], "loaded");
    assert_eq!(server.get("/v1/models/no").status, 404);
    let one = server.get("/server/stats?model=qwen").json();
    assert_eq!((&one["model"], one["models"].as_object().map(serde_json::Map::len)), (&json!("qwen"), Some(1)));
    let all = server.stats();
    for name in ["llama", "qwen"] {
        let model = &all["models"][name];
        let worker = &model["workers"][0];
        assert_eq!((&model["status"], &worker["state"]), (&json!("loaded"), &json!("healthy")), "{all}");
        assert!(worker["utilisation"].as_f64().is_some_and(|share| (0.0..=1.0).contains(&share)), "{all}");
        assert_eq!(model["threads"], all["threads"], "both models share the threads");
    }
    let tokens = |stats: &Value| stats["output_tokens"].as_u64().expect("a number");
    assert_eq!(tokens(&all), tokens(&all["models"]["llama"]) + tokens(&all["models"]["qwen"]));
    let latency = &all["time_to_first_token"];
    assert!(latency["p95"].as_f64() >= latency["p90"].as_f64() && latency["p95"].as_f64() > Some(0.0), "{all}");
    let metrics = server.get("/metrics").text();
    for name in ["llama", "qwen"] {
        assert!(metrics.contains(&format!("starling_model_loaded{{model_name=\"{name}\"}} 1\n")), "{metrics}");
        assert!(metrics.contains(&format!("starling_output_tokens_total{{model_name=\"{name}\"}}")), "{metrics}");
        let utilisation = format!("starling_worker_utilisation_ratio{{model_name=\"{name}\",worker=\"0\"}}");
        assert!(metrics.contains(&utilisation), "{metrics}");
    }
}

#[test]
fn models_of_one_server_answer_at_once_as_alone() {
    let server = two(&["--max-seqs", "4"]);
    let expected = ["llama", "qwen"].map(|name| text(&server.ok(COMPLETIONS, &completion(name, "a b c", 40))));
    thread::scope(|scope| {
        let threads: Vec<_> = (0..12)
            .map(|i| {
                let (server, expected) = (&server, &expected);
                scope.spawn(move || {
                    let name = ["llama", "qwen"][i % 2];
                    assert_eq!(text(&server.ok(COMPLETIONS, &completion(name, "a b c", 40))), expected[i % 2]);
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().expect("an answer"));
    });
}

#[test]
fn a_model_is_loaded_by_the_first_request_and_found_while_the_server_runs() {
    let directory = Directory::new();
    directory.write("notes.txt", "no model");
    let server = Server::start(&["--models-dir", directory.path().to_str().expect("a path")]);
    // a router must not send requests to a server without models
    let ready = server.get("/readyz");
    assert_eq!((ready.status, server.get("/livez").status), (503, 200));
    assert!(ready.json()["status"].as_str().expect("a reason").contains("no GGUF file"), "{}", ready.text());
    directory.model("llama-linear-bias-bf16", "a.gguf");
    assert_eq!(server.get("/readyz").status, 200);
    let tags = server.get("/api/tags").json()["models"][0].clone();
    assert_eq!(
        (&tags["capabilities"][0], &tags["details"]["family"]),
        (&json!("completion"), &json!("llama")),
        "{tags}"
    );
    assert_eq!(tags["size"], std::fs::metadata(directory.path().join("a.gguf")).expect("a file").len());
    assert_eq!(states(&server), [("a".to_string(), "unloaded".to_string())]);
    assert_eq!(server.get("/readyz").status, 200);
    // all models in one call, loaded or not
    let stats = server.stats();
    assert_eq!((&stats["models"]["a"]["status"], &stats["running"]), (&json!("unloaded"), &json!(0)));
    assert_eq!(server.get("/server/stats?model=a").status, 409);
    server.ok(COMPLETIONS, &completion("a", "x", 2));
    assert_eq!(state(&server, "a"), "loaded");
    directory.model("qwen3-tied-f16", "b.gguf");
    // eight requests for a model that is not loaded wait for one load
    thread::scope(|scope| {
        let threads: Vec<_> =
            (0..8).map(|_| scope.spawn(|| text(&server.ok(COMPLETIONS, &completion("b", "x", 3))))).collect();
        let texts: Vec<String> = threads.into_iter().map(|t| t.join().expect("an answer")).collect();
        assert!(texts.iter().all(|text| *text == texts[0]));
    });
    assert_eq!(states(&server), [("a", "loaded"), ("b", "loaded")].map(|(a, b)| (a.to_string(), b.to_string())));
    assert!(server.get("/metrics").text().contains("starling_model_loads_total{model_name=\"b\",result=\"ok\"} 1\n"));
    directory.write("c.gguf", "GGUF");
    let response = server.post(COMPLETIONS, &completion("c", "x", 1));
    assert_eq!((response.status, &response.json()["error"]["code"]), (500, &json!("model_load_failed")));
    assert_eq!(state(&server, "c"), "failed");
    // a mended file is loaded by the next request
    directory.model("qwen3-tied-f16", "c.gguf");
    server.ok(COMPLETIONS, &completion("c", "x", 1));
}

#[test]
fn requests_do_not_load_models_if_they_may_not() {
    let directory = Directory::new();
    directory.model("llama-linear-bias-bf16", "a.gguf");
    let path = directory.path().to_str().expect("a path");
    let server = Server::start(&["--models-dir", path, "--autoload=false"]);
    let response = server.post(COMPLETIONS, &completion("a", "x", 1));
    assert_eq!((response.status, &response.json()["error"]["code"]), (409, &json!("model_not_loaded")));
    server.ok(&format!("{COMPLETIONS}?autoload=true"), &completion("a", "x", 1));
    // llama-server's forms
    assert_eq!(server.ok("/models/unload", &json!({ "model": "a" })), json!({ "success": true }));
    assert_eq!(state(&server, "a"), "unloaded");
    assert_eq!(server.post("/models/unload", &json!({ "model": "a" })).status, 400);
    assert_eq!(server.post(&format!("{COMPLETIONS}?autoload=false"), &completion("a", "x", 1)).status, 409);
    let mut events = server.open("GET", "/models/sse", &[], b"");
    let mut reader = std::io::BufReader::new(&mut events);
    assert_eq!(read_head(&mut reader).0, 200);
    let mut seen = String::new();
    let mut read_until = |what: &str| {
        while !seen.contains(what) {
            let mut bytes = [0; 256];
            let n = reader.read(&mut bytes).expect("events");
            assert!(n > 0, "{seen}");
            seen += &String::from_utf8_lossy(&bytes[..n]);
        }
    };
    read_until("data: {\"model\":\"a\",\"event\":\"status_change\",\"data\":{\"status\":\"unloaded\"}}");
    assert_eq!(server.ok("/models/load", &json!({ "model": "a" })), json!({ "success": true }));
    read_until("\"loaded\"");
    assert_eq!(server.get("/models").json()["data"][0]["status"]["value"], "loaded");
}

#[test]
fn idle_models_make_room_the_least_recently_used_first() {
    // each needs about 0.4 MB of weights and 64 KiB for its KV cache
    let source = |name: &str| format!("{name}={}", reference("llama-k256-q4_k_m"));
    let names = ["a", "b", "c"].map(source);
    let mut args = vec!["--memory", "1400KiB", "--kv-memory", "64KiB", "--load", "on-demand", "--max-seqs", "2"];
    names.iter().for_each(|name| args.extend(["-m", name]));
    let server = Server::start(&args);
    let ask = |name: &str| server.post(COMPLETIONS, &completion(name, "x", 2));
    for name in ["a", "b", "a", "c"] {
        assert_eq!(ask(name).status, 200, "{name}");
    }
    let now: Vec<String> = states(&server).into_iter().map(|(_, state)| state).collect();
    assert_eq!(now, ["loaded", "unloaded", "loaded"]);
    assert!(
        server.get("/metrics").text().contains("starling_model_unloads_total{model_name=\"b\",reason=\"memory\"} 1\n")
    );
    assert_eq!(ask("b").status, 200);
    assert_eq!(state(&server, "a"), "unloaded");
}

#[test]
fn what_does_not_fit_is_said_and_busy_or_pinned_models_stay() {
    let directory = Directory::new();
    let config = directory.write(
        "models.toml",
        format!(
            "memory = \"900KiB\"\nkv-memory = \"128KiB\"\n[models.small]\nsource = {:?}\npin = true\n[models.large]\n\
             source = {:?}\nload = \"on-demand\"\n",
            reference("llama-k256-q4_k_m"),
            reference("llama-k256-q8_0"),
        ),
    );
    let server = Server::start(&["--config", &config]);
    let response = server.post(COMPLETIONS, &completion("large", "x", 1));
    let error = response.json()["error"].clone();
    assert_eq!((response.status, &error["code"]), (503, &json!("not_enough_memory")), "{error}");
    assert!(response.header("retry-after").is_some());
    let message = error["message"].as_str().expect("a message");
    assert!(message.contains("needs 1 MiB") && message.contains("small"), "{message}");
    assert_eq!(state(&server, "small"), "loaded");
    assert_eq!(server.post(COMPLETIONS, &completion("small", "x", 1)).status, 200);
}

#[test]
fn an_idle_model_sleeps_and_its_session_goes_on() {
    let source = format!("a={}", reference("llama-k256-q4_k_m"));
    let always = Server::start(&["-m", &source]);
    let managed = Managed::start(&["-m", &source, "--idle-timeout", "0.3"]);
    let turn = |prompt: &str| json!({ "session_id": "s", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": true });
    let talk = |server: &Server| {
        let first = server.ok("/v1/generate", &turn("one two"));
        thread::sleep(Duration::from_millis(10));
        first
    };
    let text = |value: &Value| value["text"].as_str().map(str::to_string).expect("a text");
    assert_eq!(text(&talk(&always)), text(&talk(&managed.server)));
    managed.wait("models", |all| all["models"][0]["status"] == "unloaded");
    let next = |server: &Server| text(&server.ok("/v1/generate", &turn("three")));
    assert_eq!(next(&always), next(&managed.server));
}

#[test]
fn versions_of_a_name_share_its_requests() {
    let source = |name: &str, of: &str| format!("{name}={}", reference(of));
    let (one, two) = (source("m@1", "llama-k256-q4_k_m"), source("m@2", "llama-k256-q8_0"));
    let managed = Managed::start(&["-m", &one, "-m", &two]);
    let ask = |name: &str, user: Option<usize>| {
        let mut body = completion(name, "x", 1);
        if let Some(user) = user {
            body["user"] = json!(format!("user-{user}"));
        }
        let response = managed.server.post(COMPLETIONS, &body);
        assert_eq!(response.status, 200, "{}", response.text());
        let chosen = response.header("x-starling-model").expect("a header").to_string();
        assert_eq!(response.json()["model"], json!(chosen));
        chosen
    };
    assert_eq!((ask("m@1", None), ask("m@2", None)), ("m@1".into(), "m@2".into()));
    let first: Vec<String> = (0..40).map(|user| ask("m", Some(user))).collect();
    let count = |all: &[String], name: &str| all.iter().filter(|chosen| *chosen == name).count();
    assert!((8..32).contains(&count(&first, "m@1")), "{first:?}");
    let again: Vec<String> = (0..40).map(|user| ask("m", Some(user))).collect();
    assert_eq!(first, again);
    // more weight moves users to a version and none away from it
    managed.ok("PATCH", "config", &json!({ "models": { "m@2": { "weight": 9 } } }));
    let moved: Vec<String> = (0..40).map(|user| ask("m", Some(user))).collect();
    assert!(count(&moved, "m@2") > count(&first, "m@2"));
    assert!(first.iter().zip(&moved).all(|(before, after)| before == after || after == "m@2"));
    managed.ok("PATCH", "config", &json!({ "models": { "m@1": { "weight": 0 } } }));
    assert!((0..20).all(|_| ask("m", None) == "m@2"));
    let ids: Vec<String> = states(&managed.server).into_iter().map(|(id, _)| id).collect();
    assert_eq!(ids, ["m@1", "m@2", "m"]);
}

#[test]
fn a_model_has_sampling_defaults_of_its_own() {
    let directory = Directory::new();
    let file = directory.path().join("settings.toml");
    let settings = format!(
        "top-k = 1\n[models.m]\nsource = \"{0}\"\n[models.n]\nsource = \"{0}\"\ntop-k = 0\ntemperature = 0\n",
        reference("llama-k256-q4_k_m")
    );
    std::fs::write(&file, settings).expect("a file");
    let server = Server::start(&["--config", file.to_str().expect("a path")]);
    let text = |model: &str, more: Value| {
        let mut body = json!({ "model": model, "prompt": "one", "max_tokens": 12, "ignore_eos": true });
        more.as_object().expect("an object").iter().for_each(|(key, value)| body[key] = value.clone());
        server.ok(COMPLETIONS, &body)["choices"][0]["text"].clone()
    };
    let greedy = text("m", json!({ "temperature": 0, "top_k": 0 }));
    // the random seeds of these requests differ
    assert_eq!((&text("m", json!({})), &text("n", json!({}))), (&greedy, &greedy));
    // the request has the last word
    let sampled = json!({ "temperature": 1, "top_k": 0, "seed": 4 });
    assert_eq!(text("m", sampled.clone()), text("n", sampled.clone()));
    assert_ne!(text("n", sampled), greedy);
}
