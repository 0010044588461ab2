//! What someone meets who uses the server for the first time.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::sync::mpsc;
use std::thread;

use serde_json::{Value, json};

use super::admin_client::{Directory, Managed, completion};
use super::server::{LIMIT, Server, command, fixture};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn ask() -> Value {
    json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 4, "seed": 1 })
}

fn with(field: &str, value: Value) -> Value {
    let mut body = ask();
    body[field] = value;
    body
}

#[test]
fn unknown_fields_are_named() {
    let server = Server::start(&[]);
    let response = server.post(CHAT, &ask());
    assert_eq!((response.status, response.header("x-starling-ignored-fields")), (200, None));
    // fields of OpenAI's API that change nothing here
    let mut body = with("store", json!(false));
    body["metadata"] = json!({ "a": "b" });
    assert_eq!(server.post(CHAT, &body).header("x-starling-ignored-fields"), None);
    let mut body = with("mirostat", json!(2));
    body["n_predict"] = json!(4);
    let response = server.post(CHAT, &body);
    assert_eq!((response.status, response.header("x-starling-ignored-fields")), (200, Some("mirostat, n_predict")));
    let response = server.post(CHAT, &with("temprature", json!(0)));
    let error = &response.json()["error"];
    assert_eq!(
        (response.status, &error["code"], &error["param"]),
        (400, &json!("unknown_field"), &json!("temprature"))
    );
    assert!(error["message"].as_str().expect("a message").contains("did you mean temperature?"), "{error}");
    let strict = Server::start(&["--refuse-unknown-fields"]);
    assert_eq!(strict.post(CHAT, &with("mirostat", json!(2))).status, 400);
    assert_eq!(strict.post(CHAT, &with("store", json!(false))).status, 200);
}

#[test]
fn pages_are_open_and_data_is_not() {
    let server = Server::start(&["--api-key", "sesame"]);
    for page in ["/", "/docs", "/openapi.json", "/assets/page.js"] {
        assert_eq!(server.get(page).status, 200, "{page}");
    }
    for none in ["/assets/", "/assets/none.js", "/assets/backend-server.js", "/assets/..%2findex.html"] {
        assert_ne!(server.get(none).status, 200, "{none}");
    }
    for data in ["/v1/models", "/server/stats", "/slots"] {
        assert_eq!(server.get(data).status, 401, "{data}");
    }
    assert_eq!(server.send("POST", "/", &[], b"").status, 401);
    assert_eq!(server.post(CHAT, &ask()).status, 401);
    let page = server.get("/").text();
    assert!(page.contains("API key") && server.get("/assets/backend.js").text().contains("sessionStorage"), "{page}");
    // nothing of other origins, and nothing of others' pages around it
    let response = server.get("/");
    let policy = response.header("content-security-policy").expect("a policy");
    assert!(policy.starts_with("default-src 'none'; script-src 'self';") && policy.contains("frame-ancestors 'none'"));
    // a browser that has a file is told so
    let tag = response.header("etag").expect("a tag").to_string();
    let again = server.send("GET", "/", &[("if-none-match", &tag)], b"");
    assert_eq!((again.status, again.text().len()), (304, 0));
}

#[test]
fn defaults_of_a_chat_are_told() {
    let server = Server::start(&["--temperature", "0.5"]);
    let sampling = &server.get("/v1/models").json()["data"][0]["chat_sampling"];
    assert_eq!((&sampling["temperature"], &sampling["top_k"]), (&json!(0.5), &json!(40)), "{sampling}");
}

/// Operations whose example needs something that this server does not have, and the status without.
const WITHOUT_IT: [(&str, u16); 9] = [
    // a model that is loaded: the example before unloads it
    ("POST /admin/models/{name}/workers/{id}/fail", 409),
    // a model with a file
    ("POST /api/copy", 400),
    ("POST /api/create", 400),
    // a model with tokens for infilling
    ("POST /infill", 400),
    // a classification head
    ("POST /v1/rerank", 400),
    // --slot-save-path
    ("POST /slots/{id}", 400),
    // a state directory, a session, a receipt
    ("POST /v1/chat/completions/{completion_id}", 400),
    ("POST /v1/session/close", 404),
    ("POST /v1/verify", 400),
];

/// Examples that download.
const NOT_SENT: [&str; 1] = ["POST /api/pull"];

#[test]
fn examples_of_the_documentation_work() {
    let managed = Managed::start(&[]);
    let text = managed.server.get("/openapi.json").text().replace("my-model", "starling-tiny-q8_0");
    let document: Value = serde_json::from_str(&text).expect("JSON");
    let mut wrong = Vec::new();
    for (path, methods) in document["paths"].as_object().expect("paths") {
        for (method, operation) in methods.as_object().expect("methods") {
            let body = &operation["requestBody"]["content"]["application/json"]["example"];
            let Some(parameters) = body.is_object().then(|| operation["parameters"].as_array()) else { continue };
            let path_parameters = parameters.into_iter().flatten().filter(|p| p["in"] == "path");
            let url = path_parameters.fold(path.clone(), |url, p| {
                url.replace(
                    &format!("{{{}}}", p["name"].as_str().expect("a name")),
                    p["example"].as_str().unwrap_or("x"),
                )
            });
            let name = format!("{} {path}", method.to_uppercase());
            if NOT_SENT.contains(&&name[..]) {
                continue;
            }
            let response = managed.send_to(&method.to_uppercase(), &url, body);
            let expected = WITHOUT_IT.iter().find(|(known, _)| *known == name).map_or(200, |(_, status)| *status);
            if response.status != expected {
                wrong.push(format!("{name}: {} {}", response.status, response.text()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The first `n` lines of the access log of some requests, in any order.
fn access_log(more: &[&str], n: usize, requests: impl FnOnce(&Server)) -> Vec<Value> {
    let mut command = command(&["serve", "--port", "0", "--log-level", "info", "--log-format", "json"]);
    command.args(more);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the server");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let log = BufReader::new(child.stderr.take().expect("a pipe"));
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || log.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    let server = Server::of(child, &line);
    requests(&server);
    let mut found = Vec::new();
    // a line is written when the server has seen the end of its response
    while found.len() < n {
        let line = lines.recv_timeout(LIMIT).unwrap_or_else(|e| panic!("{n} lines: {e}, after {found:#?}"));
        let line: Value = serde_json::from_str(&line).expect("JSON");
        if line["message"] == "request finished" && line["span"]["path"] != "/server/stats" {
            found.push(line);
        }
    }
    found
}

#[test]
fn the_access_log_tells_tokens_and_times_of_an_answer() {
    let log = access_log(&[], 5, |server| {
        server.ok(CHAT, &ask());
        server.get("/v1/models");
        let mut streamed = ask();
        streamed["stream"] = json!(true);
        streamed["max_tokens"] = json!(6);
        assert_eq!(server.post(CHAT, &streamed).status, 200);
        // a client that leaves: the line comes when the server sees it
        let mut long = ask();
        long["stream"] = json!(true);
        long["max_tokens"] = json!(400);
        long["ignore_eos"] = json!(true);
        let body = long.to_string();
        let mut stream = server.open("POST", CHAT, &[("content-type", "application/json")], body.as_bytes());
        stream.read_exact(&mut [0; 200]).expect("a beginning");
        drop(stream);
        server.wait("no request runs", |stats| stats["running"] == 0);
        assert_eq!(server.post(CHAT, &json!({})).status, 400);
    });
    let line = |what: &str, is_it: &dyn Fn(&&Value) -> bool| {
        log.iter().find(is_it).unwrap_or_else(|| panic!("no line of {what}: {log:#?}"))
    };
    let whole = line("the answer", &|line| line["tokens"] == 4);
    let streamed = line("the stream", &|line| line["tokens"] == 6);
    let models = line("the list of models", &|line| line["span"]["path"] == "/v1/models");
    let left = line("the client that left", &|line| line["finish"] == "cancelled");
    let wrong = line("the wrong request", &|line| line["status"] == 400);
    for (line, tokens, finish) in [(whole, 4, "length"), (streamed, 6, "length")] {
        assert_eq!((&line["status"], &line["tokens"], &line["finish"]), (&json!(200), &json!(tokens), &json!(finish)));
        assert!(line["prompt_tokens"].as_u64() > Some(0) && line["cached_tokens"].is_u64(), "{line}");
        for time in ["ms", "first_token_ms", "tokens_per_second"] {
            assert!(line[time].as_f64() > Some(0.0), "{time} {line}");
        }
        assert!(line["first_token_ms"].as_f64() <= line["ms"].as_f64(), "{line}");
    }
    assert_eq!((&models["status"], &models["tokens"]), (&json!(200), &Value::Null), "{models}");
    assert_eq!(left["status"], 200, "{left}");
    assert_eq!(wrong["finish"], Value::Null, "{wrong}");
    assert_eq!((&wrong["error_class"], &wrong["level"]), (&json!("invalid_request_error"), &json!("INFO")), "{wrong}");
}

/// Whoever reads the log finds faults of the server by their level, and refusals by their code.
#[test]
fn the_access_log_tells_errors() {
    let directory = Directory::new();
    directory.write("broken.gguf", "GGUF");
    let path = directory.path().to_str().expect("a path");
    let small = format!("small={}", fixture("starling-tiny/starling-tiny-q8_0.gguf"));
    let log = access_log(&["-m", &small, "--models-dir", path, "--tenant-requests", "1"], 3, |server| {
        let ask = |model: &str, n: usize| completion(model, "a b", n);
        assert_eq!(server.post(COMPLETIONS, &ask("broken", 1)).status, 500);
        assert_eq!(server.post(COMPLETIONS, &ask("none", 1)).status, 404);
        let long = ask("small", 900).to_string();
        let stream = server.open("POST", COMPLETIONS, &[("content-type", "application/json")], long.as_bytes());
        server.wait("it runs", |stats| stats["running"] == 1);
        assert_eq!(server.post(COMPLETIONS, &ask("small", 1)).status, 429);
        drop(stream);
    });
    let line = |status: u16| log.iter().find(|line| line["status"] == status).unwrap_or_else(|| panic!("{log:#?}"));
    let failed = line(500);
    assert_eq!(
        (&failed["level"], &failed["error"], &failed["error_class"]),
        (&json!("ERROR"), &json!("model_load_failed"), &json!("server_error")),
        "{failed}"
    );
    let refused = line(429);
    assert_eq!(
        (&refused["level"], &refused["error"], &refused["error_class"], &refused["finish"]),
        (&json!("INFO"), &json!("tenant_requests"), &json!("rate_limit_error"), &Value::Null),
        "{refused}"
    );
    assert_eq!(line(404)["error"], "model_not_found");
}

/// Readers of JSON keep one of two values of a key, or refuse the line.
#[test]
fn lines_of_the_log_have_each_key_once() {
    let directory = Directory::new();
    let keys = directory.write("keys", "administrator-key anna\n");
    let args = ["serve", "--port", "0", "--log-level", "info", "--log-format", "json"];
    let mut command = command(&args);
    command.args(["--admin-key-file", &keys]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the server");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let log = child.stderr.take().expect("a pipe");
    let server = Server::of(child, &line);
    let headers = [("authorization", "Bearer administrator-key"), ("content-type", "application/json")];
    let admin = |method: &str, path: &str, body: &Value| {
        server.send(method, &format!("/admin/{path}"), &headers, body.to_string().as_bytes()).status
    };
    assert_eq!(admin("PATCH", "config", &json!({ "max-n": 3 })), 200);
    assert_eq!(admin("POST", "models/starling-tiny-q8_0/swap", &json!({ "source": "/nothing.gguf" })), 500);
    assert_eq!(server.post(CHAT, &ask()).status, 200);
    server.signal("TERM");
    let lines: Vec<String> = BufReader::new(log).lines().map_while(Result::ok).collect();
    let mut seen = String::new();
    for line in &lines {
        let Keys(keys) = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        let distinct: std::collections::BTreeSet<&String> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len(), "{line}");
        seen += line;
    }
    for message in ["administration", "model not replaced", "request finished", "worker_id"] {
        assert!(seen.contains(message), "{message}: {seen}");
    }
}

/// The same of lines that no test writes: no field of an event has the name of a key that each line has.
#[test]
fn no_field_of_the_log_has_a_reserved_name() {
    const RESERVED: [&str; 6] = ["timestamp", "level", "message", "target", "span", "spans"];
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut directories = ["src", "host/src", "server/src"].map(|part| root.join(part)).to_vec();
    let mut n_events = 0;
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).expect("a source");
            for event in text.split("tracing::").skip(1) {
                let Some((level, rest)) = event.split_once("!(") else { continue };
                if !["trace", "debug", "info", "warn", "error", "$level"].contains(&level) {
                    continue;
                }
                n_events += 1;
                // fields come before the message
                let fields = rest.split('"').next().unwrap_or_default();
                let names = fields.split(',').filter_map(|field| field.split('=').next());
                let wrong = names.map(str::trim).find(|name| RESERVED.contains(name));
                assert_eq!(wrong, None, "{}: {fields}", path.display());
            }
        }
    }
    assert!(n_events > 50, "{n_events}");
}

/// The keys of a JSON object, repeated ones too.
struct Keys(Vec<String>);

impl<'de> serde::Deserialize<'de> for Keys {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Keys, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Keys;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
                let mut keys = Vec::new();
                while let Some((key, _)) = map.next_entry::<String, serde::de::IgnoredAny>()? {
                    keys.push(key);
                }
                Ok(Keys(keys))
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}
