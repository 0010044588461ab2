//! The policy on texts: prompts that are refused or changed, answers that are filtered as they stream, and the service.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::admin_client::Directory;
use crate::server::{LIMIT, Server};

const COMPLETIONS: &str = "/v1/completions";

fn with_policy(policy: &str, args: &[&str]) -> (Server, Directory) {
    let directory = Directory::new();
    let path = directory.0.join("policy.toml");
    fs::write(&path, policy).expect("a file");
    let args = [&["--policy-file", path.to_str().expect("a path")], args].concat();
    let server = Server::start_with(&args, &[("NO_PROXY", "127.0.0.1")]);
    (server, directory)
}

fn story() -> Value {
    json!({ "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0 })
}

fn text(value: &Value) -> String {
    value["choices"][0]["text"].as_str().expect("a text").into()
}

/// Text and finish reason of a stream.
fn streamed(server: &Server, mut body: Value) -> (String, Value) {
    body["stream"] = json!(true);
    let chunks = server.post(COMPLETIONS, &body).chunks();
    let reason =
        chunks.iter().map(|chunk| chunk["choices"][0]["finish_reason"].clone()).find(|reason| !reason.is_null());
    (
        chunks.iter().filter(|chunk| chunk["choices"][0]["text"].is_string()).map(text).collect(),
        reason.unwrap_or_default(),
    )
}

#[test]
fn prompts_are_refused_or_changed() {
    let rules = "[[rules]]\nname = \"bomb\"\non = [\"prompt\"]\ndeny = [\"(?i)bomb\"]\nallow = [\"bath bomb\"]\naction = \"block\"\n\
                 [personal-data]\nkinds = [\"email\"]\non = [\"prompt\"]\naction = \"redact\"\n";
    let (server, _directory) = with_policy(rules, &[]);
    let plain = Server::start(&[]);
    let chat = |content: Value| json!({ "messages": [{ "role": "user", "content": content }], "max_tokens": 2 });
    let tokens = plain.ok("/tokenize", &json!({ "text": "a bomb" }))["tokens"].clone();
    for (path, body) in [
        (COMPLETIONS, json!({ "prompt": "a Bomb", "max_tokens": 1 })),
        (COMPLETIONS, json!({ "prompt": ["x", "a bomb"], "max_tokens": 1 })),
        (COMPLETIONS, json!({ "prompt": tokens, "max_tokens": 1 })),
        ("/v1/chat/completions", chat(json!("a bomb"))),
        ("/v1/chat/completions", chat(json!([{ "type": "text", "text": "a bomb" }]))),
        ("/v1/generate", json!({ "prompt": "a bomb" })),
        ("/v1/generate", json!({ "messages": [{ "role": "user", "content": "a bomb" }] })),
        ("/v1/embeddings", json!({ "input": ["a bomb"] })),
        ("/execute", json!({ "job_id": "1", "prompt": "a bomb", "max_tokens": 1 })),
    ] {
        let response = server.post(path, &body);
        let error = &response.json()["error"];
        assert_eq!((response.status, &error["code"]), (400, &json!("content_filter")), "{path} {body}: {error}");
        assert!(error["message"].as_str().expect("a message").contains("`bomb`"), "{error}");
    }
    assert_eq!(server.post(COMPLETIONS, &json!({ "prompt": "a bath bomb", "max_tokens": 1 })).status, 200);
    let with_email = json!({ "prompt": "Mail a.b@example.com now", "max_tokens": 8, "temperature": 0, "echo": true });
    let changed = text(&server.ok(COMPLETIONS, &with_email));
    assert!(changed.starts_with("Mail [removed] now"), "{changed}");
    let same = json!({ "prompt": "Mail [removed] now", "max_tokens": 8, "temperature": 0, "echo": true });
    assert_eq!(changed, text(&plain.ok(COMPLETIONS, &same)));
    let metrics = server.get("/metrics").text();
    assert!(metrics.contains("starling_policy_actions_total{action=\"prompt_blocked\"} 9\n"), "{metrics}");
}

#[test]
fn answers_are_filtered_before_they_leave() {
    let plain = Server::start(&[]);
    let original = text(&plain.ok(COMPLETIONS, &story()));
    // a piece of the answer that spans several tokens
    let start = original.char_indices().nth(20).expect("a long answer").0;
    let secret: String = original[start..].chars().take(12).collect();
    let pattern: String = secret.chars().map(|c| format!("\\x{{{:x}}}", u32::from(c))).collect();
    let policy = |action: &str| {
        format!(
            "[[rules]]\nname = \"secret\"\non = [\"answer\"]\ndeny = ['{pattern}']\naction = \"{action}\"\nreplacement = \"[x]\"\n"
        )
    };
    let (redacting, directory) = with_policy(&policy("redact"), &[]);
    let expected = original.replace(&secret, "[x]");
    assert_eq!(text(&redacting.ok(COMPLETIONS, &story())), expected);
    assert_eq!(streamed(&redacting, story()), (expected.clone(), json!("length")));
    let mut with_logprobs = story();
    with_logprobs["logprobs"] = json!(1);
    let logprobs = redacting.ok(COMPLETIONS, &with_logprobs)["choices"][0]["logprobs"]["tokens"].clone();
    let tokens: String = logprobs.as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    assert!(!tokens.contains(&secret) && tokens.starts_with(&original[..start / 2]), "{tokens}");
    let generated = redacting.ok("/v1/generate", &story());
    assert!(generated["tokens"].as_array().expect("a list").len() < 40, "{generated}");

    // read again on SIGHUP
    fs::write(directory.0.join("policy.toml"), policy("block")).expect("a file");
    redacting.signal("HUP");
    let reason = |value: &Value| value["choices"][0]["finish_reason"].clone();
    let mut blocked = redacting.ok(COMPLETIONS, &story());
    for _ in 0..200 {
        if reason(&blocked) == "content_filter" {
            break;
        }
        thread::sleep(Duration::from_millis(10));
        blocked = redacting.ok(COMPLETIONS, &story());
    }
    assert_eq!((text(&blocked), reason(&blocked)), (original[..start].into(), json!("content_filter")));
    assert_eq!(streamed(&redacting, story()), (original[..start].into(), json!("content_filter")));
    let chat = json!({ "messages": [{ "role": "user", "content": "Once upon a time" }], "max_tokens": 4 });
    assert_eq!(redacting.post("/v1/chat/completions", &chat).status, 200);
    // an invalid file changes nothing
    fs::write(directory.0.join("policy.toml"), "[[rules]]\nname = \"x\"\ndeny = ['(']\naction = \"block\"\n")
        .expect("a file");
    redacting.signal("HUP");
    thread::sleep(Duration::from_millis(200));
    assert_eq!(reason(&redacting.ok(COMPLETIONS, &story())), json!("content_filter"));
    let done =
        crate::server::command(&["serve", "--policy-file", directory.0.join("policy.toml").to_str().expect("a path")]);
    let mut done = done;
    let done = done.output().expect("an end");
    let error = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.code() == Some(2) && error.contains("policy.toml") && error.contains("rule \"x\""), "{error}");
}

/// A service that decides by `decide`; the requests it saw.
fn service(decide: impl Fn(&Value) -> Option<Value> + Send + 'static) -> (String, Arc<Mutex<Vec<Value>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let url = format!("http://{}/check", listener.local_addr().expect("an address"));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let inner = Arc::clone(&seen);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream: TcpStream = stream.expect("a connection");
            stream.set_read_timeout(Some(LIMIT)).expect("a socket");
            let mut reader = BufReader::new(stream.try_clone().expect("a socket"));
            let head = reader.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty());
            let length =
                head.filter_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok()).last();
            let mut body = vec![0; length.expect("a length")];
            reader.read_exact(&mut body).expect("a body");
            let request: Value = serde_json::from_slice(&body).expect("JSON");
            let Some(answer) = decide(&request) else { continue };
            inner.lock().expect("a lock").push(request);
            let answer = answer.to_string();
            let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", answer.len());
            let _ = stream.write_all((head + &answer).as_bytes());
        }
    });
    (url, seen)
}

#[test]
fn a_service_decides() {
    let (url, seen) = service(|request| {
        let text = request["text"].as_str().expect("a text");
        Some(match (request["stage"].as_str(), text) {
            (Some("prompt"), text) if text.contains("never") => json!({ "action": "block", "reason": "never mind" }),
            (Some("prompt"), text) if text.contains("old") => json!({ "action": "redact", "text": "Once" }),
            (Some("answer"), _) if text.contains("[x]") => json!({ "action": "allow" }),
            (Some("answer"), _) => json!({ "action": "redact", "text": "all new" }),
            _ => json!({ "action": "allow" }),
        })
    });
    let policy = format!("[hook]\nurl = \"{url}\"\ndeadline = \"20s\"\non-failure = \"closed\"\n");
    let (server, _directory) = with_policy(&policy, &[]);
    let refused = server.post(COMPLETIONS, &json!({ "prompt": "never" }));
    assert_eq!(refused.status, 400);
    assert!(refused.json()["error"]["message"].as_str().expect("a message").contains("never mind"));
    let answer = server.ok(COMPLETIONS, &json!({ "prompt": "old", "max_tokens": 4, "temperature": 0, "seed": 3 }));
    assert_eq!((text(&answer), &answer["usage"]["completion_tokens"]), ("all new".into(), &json!(4)));
    assert_eq!(streamed(&server, story()), ("all new".into(), json!("length")));
    let seen = seen.lock().expect("a lock");
    let request = &seen[0];
    assert_eq!(
        (&request["stage"], &request["model"], &request["tenant"]),
        (&json!("prompt"), &json!("starling-tiny-q8_0"), &json!("default"))
    );
    assert!(request["request_id"].as_str().expect("an id").starts_with("req-"));
}

#[test]
fn without_the_service_it_is_as_set() {
    let (url, _) = service(|_| None);
    for (on_failure, status) in [("open", 200), ("closed", 400)] {
        let policy = format!(
            "[hook]\nurl = \"{url}\"\ndeadline = \"300ms\"\non-failure = \"{on_failure}\"\non = [\"prompt\"]\n"
        );
        let (server, _directory) = with_policy(&policy, &[]);
        assert_eq!(server.post(COMPLETIONS, &story()).status, status, "{on_failure}");
        assert!(server.get("/metrics").text().contains("starling_policy_actions_total{action=\"hook_failed\"} 1\n"));
    }
}

/// Counts are of the prompt as it is computed.
#[test]
fn counted_prompts_have_passed_the_policy() {
    let rule = "[[rules]]\nname = \"secrets\"\ndeny = [\"sk-[a-z]+\"]\naction = \"redact\"\nreplacement = \"[a long replacement]\"\n";
    let (server, _directory) = with_policy(rule, &[]);
    let (model, text) = ("starling-tiny-q8_0", "the key sk-abc");
    let messages = json!([{ "role": "user", "content": text }]);
    let body = json!({ "model": model, "messages": messages, "max_tokens": 1 });
    let n = server.ok("/v1/chat/completions", &body)["usage"]["prompt_tokens"].clone();
    let plain = json!({ "messages": [{ "role": "user", "content": "the key [a long replacement]" }] });
    assert_eq!(server.ok("/v1/chat/completions/input_tokens", &plain)["input_tokens"], n);
    for (path, body) in [
        ("/v1/chat/completions/input_tokens", body.clone()),
        ("/v1/messages/count_tokens", body),
        ("/v1/responses/input_tokens", json!({ "input": text })),
    ] {
        assert_eq!(server.ok(path, &body)["input_tokens"], n, "{path}");
    }
    // tokens cannot be changed
    let tokens = server.ok("/v1/tokenize", &json!({ "text": text }))["tokens"].clone();
    let refused = server.post("/completion", &json!({ "prompt": tokens, "n_predict": 1 }));
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("content_filter")));
}

/// A word that comes together only in the prompt as the model reads it, or that no message has, is found as well.
#[test]
fn rules_hold_where_texts_are_joined() {
    let rules = "[[rules]]\nname = \"button\"\non = [\"prompt\"]\ndeny = [\"red\\\\s+button\", \"im_start\"]\naction = \"block\"\n\
                 [[rules]]\nname = \"key\"\non = [\"prompt\"]\ndeny = [\"sk-[a-z]+\"]\naction = \"redact\"\nreplacement = \"[key]\"\n\
                 [personal-data]\nkinds = [\"email\"]\nmax = 1\non = [\"prompt\"]\naction = \"block\"\n";
    let template = crate::server::fixture("chat/qwen-tools.jinja");
    let (server, _directory) = with_policy(rules, &["--chat-template", &template]);
    let user = |content: Value| json!({ "role": "user", "content": content });
    let texts = |a: &str, b: &str| json!([{ "type": "text", "text": a }, { "type": "text", "text": b }]);
    let tool = |function: Value| json!({ "messages": [user(json!("Hi"))], "max_tokens": 1, "tools": [{ "type": "function", "function": function }] });
    let call = |arguments: Value| {
        let function = json!({ "name": "f", "arguments": arguments });
        let calls = json!([{ "id": "c", "type": "function", "function": function }]);
        json!({ "messages": [user(json!("Hi")), { "role": "assistant", "content": "", "tool_calls": calls }, user(json!("Go"))], "max_tokens": 1 })
    };
    let escaped = "{\"x\": \"red\\u0020button\"}";
    let chats = [
        json!({ "messages": [user(texts("the red", "button"))], "max_tokens": 1 }),
        json!({ "messages": [user(json!("an im_start"))], "max_tokens": 1 }),
        tool(json!({ "name": "f", "description": "a red button" })),
        tool(json!({ "name": "sk-abc" })),
        tool(json!({ "name": "f", "parameters": { "type": "object", "properties": { "red button": {} } } })),
        tool(
            json!({ "name": "f", "parameters": { "type": "object", "properties": { "description": { "enum": ["red button"] } } } }),
        ),
        call(json!({ "red button": 1 })),
        call(json!({ "name": "a red button" })),
        call(json!(escaped)),
        json!({ "messages": [user(json!("Hi"))], "max_tokens": 1, "chat_template_kwargs": { "x": ["red button"] } }),
        json!({ "messages": [user(json!("Hi")), { "role": "tool", "name": "red button", "content": "x" }], "max_tokens": 1 }),
    ];
    let is_refused = |path: &str, body: &Value| {
        let response = server.post(path, body);
        // errors of Anthropic have no code
        let is_blocked = response.text().contains("the prompt is not allowed on this server");
        assert_eq!((response.status, is_blocked), (400, true), "{path} {body}: {}", response.text());
    };
    for body in &chats {
        for path in ["/v1/chat/completions", "/v1/chat/completions/input_tokens", "/v1/apply-template"] {
            is_refused(path, body);
        }
    }
    let arguments = json!({ "type": "function_call", "call_id": "c", "name": "f", "arguments": escaped });
    let result = json!({ "type": "function_call_output", "call_id": "c", "output": "x" });
    is_refused("/v1/responses", &json!({ "input": [user(json!("Hi")), arguments, result], "max_output_tokens": 1 }));
    let (model, blocks) = ("starling-tiny-q8_0", texts("the red", "button"));
    is_refused("/v1/messages", &json!({ "model": model, "messages": [user(blocks)], "max_tokens": 1 }));
    let tools = json!([{ "name": "f", "description": "a red button", "input_schema": { "type": "object" } }]);
    is_refused(
        "/v1/messages",
        &json!({ "model": model, "messages": [user(json!("Hi"))], "tools": tools, "max_tokens": 1 }),
    );
    is_refused("/v1/generate", &json!({ "messages": [user(texts("the red", "button"))], "max_tokens": 1 }));
    // a text that continues a session
    let session = |prompt: &str| json!({ "prompt": prompt, "session_id": "s", "max_tokens": 1, "guided_regex": " " });
    assert_eq!(server.post("/v1/generate", &session("the red")).status, 200);
    is_refused("/v1/generate", &session("button"));
    // what passed before passes: words of the template, an address per text, texts that are replaced
    let mail = || user(json!("Mail a.b@example.com"));
    let fine = json!({ "messages": [mail(), { "role": "assistant", "content": "sk-abc" }, mail()], "max_tokens": 1 });
    let prompt = server.ok("/v1/apply-template", &fine)["prompt"].clone();
    assert!(prompt.as_str().is_some_and(|prompt| prompt.contains("[key]") && !prompt.contains("sk-")), "{prompt}");
    assert_eq!(server.post("/v1/chat/completions", &fine).status, 200);
    let described = tool(json!({ "name": "f", "description": "needs sk-abc" }));
    let prompt = server.ok("/v1/apply-template", &described)["prompt"].clone();
    assert!(prompt.as_str().is_some_and(|prompt| prompt.contains("needs [key]")), "{prompt}");
}
