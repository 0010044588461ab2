//! Errors, paths, headers, API keys and settings.

use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::server::{LIMIT, Server, command, fixture, read_head, read_response};

#[track_caller]
fn refused(server: &Server, path: &str, body: &Value, status: u16, param: &str, message: &str) {
    let response = server.post(path, body);
    assert_eq!(response.status, status, "{path} {body}: {}", response.text());
    let json = response.json();
    let error = &json["error"];
    assert!(error["message"].as_str().expect("a message").contains(message), "{body}: {error}");
    let expected = if param.is_empty() { Value::Null } else { json!(param) };
    assert_eq!(error["param"], expected, "{body}: {error}");
    assert!(error["type"].is_string() && error.get("code").is_some());
    assert_eq!(error["request_id"].as_str(), response.header("x-request-id"));
}

#[test]
fn invalid_requests_are_refused_before_the_engine() {
    let server = Server::start(&["--max-n", "4", "--kv-memory", "1MiB", "--max-inputs", "8"]);
    let chat = "/v1/chat/completions";
    let hi = json!([{ "role": "user", "content": "Hi" }]);
    let with = |name: &str, value: Value| {
        let mut body = json!({ "messages": hi });
        body[name] = value;
        body
    };
    refused(&server, chat, &json!({}), 400, "", "missing field `messages`");
    for (messages, param, message) in [
        (json!([]), "messages", "empty"),
        (json!("x"), "messages", "expected a sequence"),
        (json!([1]), "messages[0]", "not an object"),
        (json!([{ "content": "x" }]), "messages[0].role", "missing"),
        (json!([{ "role": "robot", "content": "x" }]), "messages[0].role", "robot"),
        (json!([{ "role": "user" }]), "messages[0].content", "missing"),
        (json!([{ "role": "user", "content": 3 }]), "messages[0].content", "neither"),
        (json!([{ "role": "user", "content": [{ "type": "image_url" }] }]), "messages[0].content[0]", "image_url"),
    ] {
        refused(&server, chat, &json!({ "messages": messages }), 400, param, message);
    }
    for (name, value, message) in [
        ("temperature", json!("hot"), "expected f32"),
        ("temperature", json!(2.5), "from 0 to 2"),
        ("temperature", json!(-0.1), "from 0 to 2"),
        ("top_p", json!(-0.1), "from 0 to 1"),
        ("top_p", json!(1.1), "from 0 to 1"),
        ("penalty_scope", json!("prompt"), "expected `all` or `answer`"),
        ("continue_final_message", json!(true), "role is not assistant"),
        ("top_k", json!(-2), "-1, 0 or more"),
        ("min_p", json!(1.5), "from 0 to 1"),
        ("n", json!(0), "from 1 to 4"),
        ("n", json!(5), "from 1 to 4"),
        ("max_tokens", json!(0), "at least 1"),
        ("max_tokens", json!(-2), "or -1 for no limit"),
        ("max_tokens", json!(1.5), "a whole number"),
        ("max_completion_tokens", json!(0), "at least 1"),
        ("frequency_penalty", json!(3), "from -2 to 2"),
        ("presence_penalty", json!(-3), "from -2 to 2"),
        ("repetition_penalty", json!(0), "above 0"),
        ("dry_multiplier", json!(-0.5), "0 or more"),
        ("dry_base", json!(0.5), "1 or more"),
        ("dry_allowed_length", json!(0), "1 or more"),
        ("dry_penalty_last_n", json!(-2), "-1 or more"),
        ("dry_sequence_breakers", json!([""]), "1 to 40 bytes"),
        ("dry_sequence_breakers", json!(vec!["a"; 17]), "at most 16"),
        ("seed", json!(1.5), "whole number"),
        ("stop", json!([1]), "expected a string"),
        ("stop", json!(1), "a string or a list of strings"),
        ("stop", json!(""), "empty"),
        ("logit_bias", json!({ "x": 1 }), "token IDs"),
        ("logit_bias", json!({ "1": 101 }), "from -100 to 100"),
        ("logit_bias", json!({ "9999999": 1 }), "ids of the vocabulary"),
        ("top_logprobs", json!(2), "logprobs to be true"),
        ("top_logprobs", json!(21), "from 0 to 20"),
        ("priority", json!("urgent"), "high, normal, low"),
        ("session_id", json!(""), "1 to 256"),
        ("cache_salt", json!("x".repeat(1025)), "at most 1024"),
        ("tools", json!({}), "not a list"),
        ("tools", json!([{ "type": "function", "function": { "name": "f" } }]), "does not render tools"),
        ("tool_choice", json!("required"), "no tools"),
        ("tool_choice", json!("some"), "auto, none, required"),
        ("stream", json!("yes"), "boolean"),
    ] {
        refused(
            &server,
            chat,
            &with(name, value),
            400,
            match (name, message) {
                ("stop", "expected a string") => "stop[0]",
                // the error is in the messages, which cannot be continued
                ("continue_final_message", _) => "messages",
                (name, _) => name,
            },
            message,
        );
    }
    refused(&server, chat, &with("model", json!("gpt-4")), 404, "model", "`gpt-4` does not exist");
    assert_eq!(server.post(chat, &with("model", json!("gpt-4"))).json()["error"]["code"], "model_not_found");
    let long = json!({ "prompt": "dog ".repeat(600), "max_tokens": 5 });
    refused(&server, "/v1/completions", &long, 400, "prompt", "maximum context length is 512 tokens");
    assert_eq!(server.post("/v1/completions", &long).json()["error"]["code"], "context_length_exceeded");
    // at most: cut to what fits the context, which 1 MiB holds
    for field in ["max_tokens", "max_completion_tokens"] {
        let more = json!({ "prompt": "dog ".repeat(150), field: 1_000_000, "ignore_eos": true });
        let answer = server.ok("/v1/completions", &more);
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        assert_eq!(answer["usage"]["total_tokens"], 513, "{}", answer["usage"]);
    }
    for (body, message) in [
        (json!({ "prompt": [] }), "at least one prompt"),
        (json!({ "prompt": "" , "max_tokens": 1, "add": 1 }), ""),
        (json!({ "prompt": ["a", 1] }), "mixed forms"),
        (json!({ "prompt": [99999] }), "expected an id below"),
        (json!({ "prompt": vec!["a"; 9] }), "at most 8"),
    ] {
        let response = server.post("/v1/completions", &body);
        // an empty text still has the model's BOS token
        if message.is_empty() {
            assert_eq!(response.status, 200)
        } else {
            refused(&server, "/v1/completions", &body, 400, "prompt", message)
        }
    }
    // the count is checked before the work for each prompt
    let many = json!({ "prompt": vec!["a"; 8], "n": 4, "logit_bias": { "x": 1 } });
    let few = Server::start(&["--queue-high", "31", "--queue-low", "1"]);
    refused(&few, "/v1/completions", &many, 400, "n", "32 answers at once");
    refused(&server, "/v1/completions", &json!({ "prompt": "a", "suffix": "x" }), 400, "suffix", "suffix");
    refused(&server, "/v1/embeddings", &json!({ "input": [] }), 400, "input", "1 to 8");
    refused(&server, "/v1/embeddings", &json!({ "input": "a", "dimensions": 0 }), 400, "dimensions", "1 to 256");
    refused(&server, "/v1/embeddings", &json!({ "input": ["a", [1]] }), 400, "input", "mixed");
    refused(&server, "/v1/detokenize", &json!({ "tokens": [1, 99999] }), 400, "tokens[1]", "99999");
    refused(&server, "/v1/generate", &json!({}), 400, "prompt", "either prompt or messages");
    assert_eq!(server.stats()["running"], 0);

    let small = Server::start(&["--kv-memory", "64KiB", "--max-tokens", "20"]);
    let tokens = json!({ "prompt": "dog ".repeat(60), "max_tokens": 5 });
    refused(&small, "/v1/completions", &tokens, 400, "prompt", "holds 32 tokens");
    let cut = small.ok("/v1/completions", &json!({ "prompt": "a", "max_tokens": 21, "ignore_eos": true }));
    assert_eq!(
        (&cut["usage"]["completion_tokens"], &cut["choices"][0]["finish_reason"]),
        (&20.into(), &"length".into())
    );
}

#[test]
fn malformed_tool_calls_in_messages_are_refused_by_name() {
    let server = Server::start(&["--chat-template", &fixture("chat/qwen-tools.jinja")]);
    let body = |calls: &Value| {
        json!({ "max_tokens": 1, "messages": [
            { "role": "user", "content": "Hi" }, { "role": "assistant", "content": null, "tool_calls": calls },
            { "role": "tool", "content": "12" },
        ] })
    };
    let call = |function: Value| json!([{ "id": "c", "type": "function", "function": function }]);
    let at = |rest: &str| format!("messages[1].tool_calls{rest}");
    for (calls, param, message) in [
        (json!({ "id": "c" }), "", "is not a list"),
        (json!("f()"), "", "is not a list"),
        (json!(["f"]), "[0]", "is not an object"),
        (json!([{ "id": "c" }]), "[0].function", "is missing"),
        (call(json!("f")), "[0].function", "is not an object"),
        (call(json!({ "arguments": "{}" })), "[0].function.name", "is missing"),
        (call(json!({ "name": 3 })), "[0].function.name", "is not a string"),
        (call(json!({ "name": "" })), "[0].function.name", "is empty"),
        (call(json!({ "name": "f", "arguments": 3 })), "[0].function.arguments", "neither a string nor an object"),
        (call(json!({ "name": "f", "arguments": [1] })), "[0].function.arguments", "neither a string nor an object"),
        (json!([{ "type": "code", "function": { "name": "f" } }]), "[0].type", "\"function\""),
        (json!([{ "id": 7, "function": { "name": "f" } }]), "[0].id", "is not a string"),
    ] {
        for path in ["/v1/chat/completions", "/v1/apply-template", "/v1/generate"] {
            refused(&server, path, &body(&calls), 400, &at(param), message);
        }
    }
    // arguments "" and null are an empty object; tool_calls null and [] are no calls
    let prompt = |calls: Value| server.ok("/v1/apply-template", &body(&calls))["prompt"].clone();
    let empty = prompt(call(json!({ "name": "f", "arguments": {} })));
    assert!(empty.as_str().expect("text").contains("\"arguments\": {}"), "{empty}");
    for arguments in [json!(""), json!(null), json!(" \n"), json!("{}")] {
        assert_eq!(prompt(call(json!({ "name": "f", "arguments": arguments }))), empty);
    }
    assert_eq!(prompt(call(json!({ "name": "f" }))), empty);
    let exact = prompt(call(json!({ "name": "f", "arguments": "{\"n\": 18446744073709551615}" })));
    assert!(exact.as_str().expect("text").contains("{\"n\": 18446744073709551615}"), "{exact}");
    assert!(!prompt(Value::Null).as_str().expect("text").contains("<tool_call>"));
}

#[test]
fn invalid_bodies_and_paths() {
    let server = Server::start(&["--max-body", "2000", "--body-timeout", "0.3", "--header-timeout", "0.3"]);
    let path = "/v1/chat/completions";
    let json = [("content-type", "application/json")];
    let status = |method, path, headers: &[(&str, &str)], body: &[u8]| server.send(method, path, headers, body).status;
    assert_eq!(status("POST", path, &json, b"{"), 400);
    assert_eq!(status("POST", path, &json, b"{} x"), 400);
    assert_eq!(status("POST", path, &json, b"\xff"), 400);
    assert_eq!(status("POST", path, &json, "[".repeat(1500).as_bytes()), 400);
    assert_eq!(status("POST", path, &[("content-type", "text/plain")], b"{}"), 415);
    // a page of another site cannot send a body without a type either: it has an origin
    let origin = ("origin", "http://localhost");
    let untyped = server.send("POST", path, &[origin], b"{}");
    assert_eq!(untyped.status, 415);
    let message = untyped.json()["error"]["message"].as_str().expect("a message").to_string();
    assert!(message.contains("no content type") && message.contains("Content-Type: application/json"), "{message}");
    // programs of this machine may leave it out, and curl names a type of its own
    let body = br#"{"prompt": "a", "max_tokens": 1}"#;
    assert_eq!(status("POST", "/v1/completions", &[], body), 200);
    assert_eq!(status("POST", "/v1/completions", &[("content-type", "application/x-www-form-urlencoded")], body), 200);
    assert_eq!(
        status("POST", "/v1/completions", &[("content-type", "application/x-www-form-urlencoded"), origin], body),
        415
    );
    assert_eq!(status("POST", path, &json, &[b' '; 3000]), 413);
    assert_eq!(status("GET", "/v1/completions", &[], b""), 405);
    assert_eq!(status("GET", "/v1/nothing", &[], b""), 404);
    assert_eq!(server.get("/v1/nothing").json()["error"]["code"], "unknown_url");
    assert_eq!(status("GET", "/v1/models/starling-tiny-q8_0", &[], b""), 200);
    assert_eq!(status("GET", "/v1/models/a/b", &[], b""), 404);
    for (path, part) in [("/", "<title>Starling"), ("/docs", "openapi.json"), ("/openapi.json", "\"openapi\":\"3.1")] {
        assert!(server.get(path).text().contains(part), "{path}");
    }
    // slow clients: the body stops, the headers stop
    let mut stream = TcpStream::connect(&server.address).expect("a connection");
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{{"
    );
    stream.write_all(head.as_bytes()).expect("sent");
    assert_eq!(read_head(&mut BufReader::new(&stream)).0, 408);
    let mut stream = TcpStream::connect(&server.address).expect("a connection");
    stream.set_read_timeout(Some(LIMIT)).expect("a socket");
    stream.write_all(b"GET / HT").expect("sent");
    let start = Instant::now();
    let _ = stream.read_to_end(&mut Vec::new());
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn request_and_session_ids_are_returned() {
    let server = Server::start(&["--metrics-compat", "vllm"]);
    let headers = [("x-request-id", "my-id-7"), ("x-session-id", "s1"), ("endpoint-load-metrics-format", "TEXT")];
    let body = json!({ "prompt": "a", "max_tokens": 1 });
    let response = server.post_with("/v1/completions", &headers, &body);
    assert_eq!(response.header("x-request-id"), Some("my-id-7"));
    assert_eq!(response.header("x-session-id"), Some("s1"));
    let load = response.header("endpoint-load-metrics").expect("a header");
    assert!(load.starts_with("TEXT named_metrics.kv_cache_usage_perc="), "{load}");
    let strange = server.send("GET", "/health", &[("x-request-id", "a b\tc")], b"");
    assert!(strange.header("x-request-id").expect("a name").starts_with("req-"));
    let old = server.get("/metrics");
    assert!(old.header("content-type").expect("a type").starts_with("text/plain"));
    let text = old.text();
    for part in [
        "# TYPE starling_requests_total counter",
        "vllm:num_requests_running",
        "starling_time_to_first_token_seconds_bucket",
    ] {
        assert!(text.contains(part), "{part}");
    }
    let new = server.send("GET", "/metrics", &[("accept", "application/openmetrics-text; version=1.0.0")], b"");
    assert!(new.header("content-type").expect("a type").starts_with("application/openmetrics-text"));
    assert!(new.text().ends_with("# EOF\n"));
}

#[test]
fn all_paths_but_probes_need_a_key() {
    let keys = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("keys");
    std::fs::write(&keys, "sk-a alice\nsk-b bob 2\n").expect("a file");
    let server = Server::start(&["--api-key-file", keys.to_str().expect("a path"), "--key-requests", "4"]);
    for path in ["/health", "/healthz", "/livez", "/readyz", "/ready"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    for path in ["/v1/models", "/metrics", "/server/stats", "/nothing"] {
        let response = server.get(path);
        assert_eq!((response.status, response.header("www-authenticate")), (401, Some("Bearer")), "{path}");
        assert_eq!(response.json()["error"]["code"], "invalid_api_key");
    }
    let body = json!({ "prompt": "Once upon a time there was a little dog who saw a tree and then ran to the big house", "max_tokens": 1 });
    let with = |key: &str| server.post_with("/v1/completions", &[("authorization", &format!("Bearer {key}"))], &body);
    assert_eq!(with("sk-c").status, 401);
    let cached = |key: &str| with(key).json()["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    // tenants share no cached prompts
    let (first, second, other) = (cached("sk-a"), cached("sk-a"), cached("sk-b"));
    assert_eq!((first, other), (json!(0), json!(0)));
    assert_eq!(second, 16);
    with("sk-a");
    with("sk-a");
    let fast = with("sk-a");
    assert_eq!(fast.status, 429, "{}", fast.text());
    assert!(fast.header("retry-after").expect("a header").parse::<u64>().expect("a number") >= 1);
    assert_eq!(with("sk-b").status, 200);
    // duplicate headers: a proxy in front could use the other value
    for twice in [
        [("authorization", "Bearer sk-b"), ("authorization", "Bearer sk-c")],
        [("authorization", "Bearer sk-b"), ("api-key", "sk-c")],
        [("host", "localhost"), ("host", "evil.example")],
    ] {
        let response = server.send("GET", "/v1/models", &twice, b"");
        assert_eq!(
            (response.status, &response.json()["error"]["code"]),
            (400, &json!("duplicate_header")),
            "{twice:?}"
        );
    }
    // a key from the environment
    let server = Server::start_with(&[], &[("STARLING_API_KEY", "k")]);
    assert_eq!(server.get("/v1/models").status, 401);
    assert_eq!(server.send("GET", "/v1/models", &[("authorization", "Bearer k")], b"").status, 200);
}

#[test]
fn unknown_hosts_and_origins_are_refused() {
    let server = Server::start(&[]);
    assert_eq!(server.send("GET", "/v1/models", &[("host", "evil.example")], b"").status, 403);
    assert_eq!(server.send("GET", "/v1/models", &[("host", "localhost:1")], b"").status, 200);
    let ask = [("origin", "https://a.example"), ("access-control-request-method", "POST")];
    assert_eq!(server.send("OPTIONS", "/v1/completions", &ask, b"").header("access-control-allow-origin"), None);
    let server = Server::start(&["--cors-origins", "https://a.example,https://b.example"]);
    let allowed = server.send("OPTIONS", "/v1/completions", &ask, b"");
    assert_eq!(allowed.header("access-control-allow-origin"), Some("https://a.example"));
    let ask = [("origin", "https://c.example"), ("access-control-request-method", "POST")];
    assert_eq!(server.send("OPTIONS", "/v1/completions", &ask, b"").header("access-control-allow-origin"), None);
}

#[test]
fn invalid_settings_are_reported_by_name() {
    let run = |args: &[&str], environment: &[(&str, &str)]| {
        let output = command(&["serve"]).args(args).envs(environment.iter().copied()).output().expect("the command");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("wrong.toml");
    std::fs::write(&file, "max-seqs = 0\n").expect("a file");
    let file = file.to_str().expect("a path");
    for (args, environment, parts) in [
        (&["--config", file][..], &[][..], &["wrong.toml", "max-seqs", "from 1 to 1024"][..]),
        (&["--port", "x"], &[], &["--port", "expected an integer from 0 to 65535"]),
        (&[], &[("STARLING_QUEUE_HIGH", "-1")], &["STARLING_QUEUE_HIGH"]),
        (&["--host", "0.0.0.0"], &[], &["0.0.0.0", "--allow-no-key"]),
        (&["--log-level", "=,="], &[], &["log-level"]),
        (&["--nonsense"], &[], &["--nonsense"]),
        (&["--tls-cert", "x"], &[], &["tls-key", "both"]),
        (&["--port", "0", "--otlp-endpoint", "localhost:4318"], &[], &["otlp-endpoint", "http://localhost:4318"]),
    ] {
        let (code, text) = run(args, environment);
        assert_eq!(code, Some(2), "{text}");
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
    let shown = command(&["serve", "--print-config", "--max-seqs", "7"]).output().expect("the command");
    let text = String::from_utf8(shown.stdout).expect("UTF-8");
    assert!(text.contains("\nmax-seqs = 7  # flag --max-seqs\n") && text.contains("\nport = 8080\n"), "{text}");
    // a port in use
    let server = Server::start(&[]);
    let port = server.address.rsplit_once(':').expect("a port").1;
    let (code, text) = run(&["--port", port], &[]);
    assert!(code == Some(3) && text.contains(port), "{text}");
    let (code, _) = run(&["-m", &fixture("starling-tiny/README.md"), "--port", "0"], &[]);
    assert_eq!(code, Some(1));
}

#[test]
fn errors_quote_little_of_a_request() {
    let server = Server::start(&[]);
    let long = "é".repeat(1 << 19);
    let hi = json!([{ "role": "user", "content": "Hi" }]);
    for (path, body) in [
        ("/v1/chat/completions", json!({ "model": long, "messages": hi })),
        ("/v1/chat/completions", json!({ "temperature": long, "messages": hi })),
        ("/v1/chat/completions", json!({ "priority": long, "messages": hi })),
        ("/v1/chat/completions", json!({ "logit_bias": { long.as_str(): 1 }, "messages": hi })),
        ("/v1/chat/completions", json!({ "logit_bias": { long.as_str(): "x" }, "messages": hi })),
        ("/v1/chat/completions", json!({ "messages": [{ "role": long, "content": "Hi" }] })),
        ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": [{ "type": long }] }] })),
        ("/v1/chat/completions", json!({ "messages": hi, "response_format": { "type": long } })),
        ("/v1/completions", json!({ "prompt": "a", "seed": long })),
        ("/v1/embeddings", json!({ "model": long, "input": "a" })),
        ("/v1/embeddings", json!({ "encoding_format": long, "input": "a" })),
        ("/v1/tokenize", json!({ "model": long, "text": "a" })),
        ("/v1/generate", json!({ "model": long, "prompt": "a" })),
    ] {
        let response = server.post(path, &body);
        assert!(matches!(response.status, 400 | 404), "{path}: {}", response.status);
        assert!(response.body.len() < 2000, "{path}: {} bytes: {:.300}", response.body.len(), response.text());
    }
    let path = format!("/v1/{}", "x".repeat(8000));
    assert!(server.get(&path).body.len() < 600);
}

#[test]
fn a_connection_serves_several_requests() {
    let server = Server::start(&[]);
    let mut stream = TcpStream::connect(&server.address).expect("a connection");
    stream.set_read_timeout(Some(LIMIT)).expect("a socket");
    for _ in 0..3 {
        stream.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("sent");
        let mut reader = BufReader::new(&stream);
        let (status, headers) = read_head(&mut reader);
        let length = headers.iter().find(|(name, _)| name == "content-length").expect("a length").1.parse();
        let mut body = vec![0; length.expect("a number")];
        reader.read_exact(&mut body).expect("a body");
        assert_eq!((status, body.as_slice()), (200, br#"{"status":"ok"}"#.as_slice()));
    }
    stream.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").expect("sent");
    assert_eq!(read_response(&mut stream).status, 200);
}

#[test]
fn parameters_of_path_and_query_have_errors_in_json() {
    let managed = crate::admin_client::Managed::start(&[]);
    let key = ("authorization", "Bearer administrator-key");
    for (method, path) in [
        ("POST", "/slots/0"),
        ("POST", "/slots/x?action=save"),
        ("DELETE", "/admin/models/m/workers/x"),
        ("POST", "/admin/models/m/workers/-1/fail"),
    ] {
        let response = managed.server.send(method, path, &[key, ("content-type", "application/json")], b"{}");
        assert_eq!(response.status, 400, "{path}");
        assert_eq!(response.json()["error"]["type"], "invalid_request_error", "{path}");
    }
}
