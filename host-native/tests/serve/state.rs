//! Sessions and answers that outlive the process.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::admin_client::{Directory, Managed, reference};
use crate::server::{Server, command};

const GENERATE: &str = "/v1/generate";
const KEY: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

/// Arguments for the state in a directory.
pub(crate) fn state(directory: &Directory) -> [String; 2] {
    ["--state-dir".into(), directory.path().join("state").to_str().expect("a path").into()]
}

fn start(directory: &Directory, args: &[&str]) -> Server {
    let state = state(directory);
    Server::start(&[&[&*state[0], &*state[1]], args].concat())
}

/// The exit message of a server that must not start.
fn refused(directory: &Directory, args: &[&str]) -> String {
    let state = state(directory);
    let output = command(&["serve", "--port", "0", &state[0], &state[1]]).args(args).output().expect("the server");
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn file(directory: &Directory) -> PathBuf {
    directory.path().join("state/state.redb")
}

fn text_turn(session: &str, prompt: &str) -> Value {
    json!({ "session_id": session, "prompt": prompt, "max_tokens": 12, "seed": 5, "ignore_eos": true })
}

fn chat_turn(session: &str, content: &str) -> Value {
    let message = json!({ "role": "user", "content": content });
    json!({ "session_id": session, "messages": [message], "max_tokens": 12, "seed": 5 })
}

/// What must be the same after a restart: text, reason and token counts but for cached tokens.
fn essence(answer: &Value) -> Value {
    let usage = &answer["usage"];
    json!([answer["text"], answer["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]])
}

/// Three turns of two sessions, and the answers of a server that is never restarted.
fn turns() -> Vec<(Value, Value)> {
    let server = Server::start(&[]);
    let turns = ["Once upon a time", " and then the dog", " but a cat"].into_iter().flat_map(|text| {
        let message = text.strip_prefix(' ').unwrap_or(text);
        [text_turn("text", text), chat_turn("chat", message)]
    });
    let answer = |turn: &Value| essence(&server.ok(GENERATE, turn));
    turns.map(|turn| (turn.clone(), answer(&turn))).collect()
}

#[test]
fn a_session_continues_after_sigkill_with_the_same_bytes() {
    let turns = turns();
    let directory = Directory::new();
    let key = directory.write("key", KEY);
    for args in [&[][..], &["--state-key-file", &key]] {
        let _ = fs::remove_dir_all(directory.path().join("state"));
        for (turn, expected) in &turns {
            // each turn by a server of its own, which is killed
            let server = start(&directory, args);
            assert_eq!(&essence(&server.ok(GENERATE, turn)), expected, "{turn}");
        }
        let server = start(&directory, args);
        assert_eq!(server.stats()["sessions"], 2);
        let close = json!({ "session_id": "text" });
        server.ok("/v1/session/close", &close);
        drop(server);
        let server = start(&directory, args);
        assert_eq!(server.post("/v1/session/close", &close).status, 404);
        // it begins anew
        assert_eq!(essence(&server.ok(GENERATE, &turns[0].0)), turns[0].1);
        let metrics = server.get("/metrics").text();
        assert!(metrics.contains("starling_state_rows{kind=\"session\"}"), "{metrics}");
        drop(server);
        let bytes = fs::read(file(&directory)).expect("a file");
        let has_text = bytes.windows(16).any(|part| part == b"Once upon a time");
        assert_eq!(has_text, args.is_empty());
        let mode = |path: PathBuf| fs::metadata(path).expect("a file").permissions().mode() & 0o777;
        assert_eq!((mode(file(&directory)), mode(directory.path().join("state"))), (0o600, 0o700));
    }
}

/// Killed at any moment of a stream: the session has the turn if its end arrived, else the turns before.
#[test]
fn a_turn_whose_end_arrived_is_never_lost() {
    let turns = turns();
    let directory = Directory::new();
    let [(first, _), _, (second, expected), ..] = &turns[..] else { panic!("{turns:?}") };
    let mut n_ended = 0;
    for n_bytes in [0, 1, 200, 900, 1000, 1100, 1200, 1400, usize::MAX, usize::MAX] {
        let _ = fs::remove_dir_all(directory.path().join("state"));
        let server = start(&directory, &[]);
        let mut body = first.clone();
        body["stream"] = json!(true);
        let headers = [("content-type", "application/json")];
        let mut stream = server.open("POST", GENERATE, &headers, body.to_string().as_bytes());
        let mut text = Vec::new();
        let _ = (&mut stream).take(n_bytes as u64).read_to_end(&mut text);
        // SIGKILL
        drop(server);
        let _ = stream.read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text).into_owned();
        let has_ended = text.contains("event: end");
        n_ended += usize::from(has_ended);
        let server = start(&directory, &[]);
        let answer = essence(&server.ok(GENERATE, second));
        // without the first turn, the prompt is shorter
        assert!(!has_ended || answer == *expected, "{n_bytes}: {answer} {expected} {text}");
    }
    assert!(n_ended >= 2, "{n_ended}");
}

#[test]
fn a_stored_session_finds_its_pages_on_disk() {
    let directory = Directory::new();
    let kv = directory.path().join("kv");
    let (kv, state) = (kv.to_str().expect("a path").to_string(), state(&directory));
    let args = [&*state[0], &*state[1], "--kv-disk", &kv, "--ctx-size", "1024"];
    let first = json!({ "session_id": "s", "prompt": "the dog saw a tree and ran to it ".repeat(12), "max_tokens": 8, "ignore_eos": true });
    let server = Managed::start(&args);
    let n_tokens = server.server.ok(GENERATE, &first)["usage"]["total_tokens"].as_u64().expect("a number");
    server.wait("caches", |caches| {
        caches["kv_disk"]["pages"] == (n_tokens - 1) / 16 && caches["kv_disk"]["queued_bytes"] == 0
    });
    drop(server);
    let server = Managed::start(&args);
    server.wait("caches", |caches| caches["kv_disk"]["is_scanned"] == true);
    let usage = server.server.ok(GENERATE, &text_turn("s", " and"))["usage"].clone();
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number");
    assert!(cached + 16 >= n_tokens, "{usage} {n_tokens}");
}

#[test]
fn a_session_goes_on_as_text_with_another_model() {
    let directory = Directory::new();
    let path = directory.model("mistral-hd32-f16", "model.gguf");
    let args = ["-m", &path];
    let server = start(&directory, &args);
    let prompt = "a b c d";
    let turn = |prompt: &str| json!({ "session_id": "s", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": true });
    let first = server.ok(GENERATE, &turn(prompt))["text"].as_str().expect("a text").to_string();
    drop(server);
    directory.model("llama-gqa-untied-f16", "model.gguf");
    let second = start(&directory, &args).ok(GENERATE, &turn(" e"));
    let fresh = Server::start(&["-m", &reference("llama-gqa-untied-f16")]);
    let n_before = fresh.ok("/v1/tokenize", &json!({ "text": format!("{prompt}{first}") }))["tokens"]
        .as_array()
        .expect("tokens")
        .len();
    let n_prompt = second["usage"]["prompt_tokens"].as_u64().expect("a number");
    assert!(n_prompt as usize > n_before, "{n_prompt} {n_before} {first:?}");
}

#[test]
fn expired_sessions_are_purged() {
    let directory = Directory::new();
    let server = start(&directory, &["--session-ttl", "1.5"]);
    server.ok(GENERATE, &text_turn("s", "Once"));
    drop(server);
    let server = start(&directory, &["--session-ttl", "1.5"]);
    server.wait("it expires", |stats| stats["sessions"] == 0);
    server.signal("TERM");
    server.wait_end();
    let server = start(&directory, &[]);
    assert_eq!(server.stats()["sessions"], 0);
}

#[test]
fn a_state_that_cannot_be_used_is_an_error() {
    let directory = Directory::new();
    let (key, other) = (directory.write("key", KEY), directory.write("other", KEY.replace('0', "1")));
    let short = directory.write("short", "00");
    let with_key = ["--state-key-file", key.as_str()];
    let server = start(&directory, &with_key);
    server.ok(GENERATE, &text_turn("s", "Once"));
    let error = refused(&directory, &with_key);
    assert!(error.contains(&format!("in use by the process {}", server.id())), "{error}");
    drop(server);
    for (args, expected) in [
        (&[][..], "expected its file as --state-key-file"),
        (&["--state-key-file", &other], "found the key"),
        (&["--state-key-file", &short], "expected 64 hex digits"),
    ] {
        let error = refused(&directory, args);
        assert!(error.contains(expected), "{error}");
    }
    let path = file(&directory);
    let good = fs::read(&path).expect("a file");
    let mut damaged = good.clone();
    // pages that are not in use any more may have any bytes
    damaged.iter_mut().skip(4096).step_by(100).for_each(|byte| *byte ^= 4);
    for bytes in [&damaged[..], &good[..good.len() / 2], b"something else"] {
        fs::write(&path, bytes).expect("a file");
        let error = refused(&directory, &with_key);
        assert!(error.contains("state-dir: ") && error.contains("state.redb"), "{error}");
        // and nothing has changed
        assert!(refused(&directory, &with_key).contains("state-dir: "));
    }
    fs::write(&path, good).expect("a file");
    assert_eq!(start(&directory, &with_key).stats()["sessions"], 1);
    let output = command(&["serve", "--port", "0", "--state-key-file", &key]).output().expect("the server");
    assert!(String::from_utf8_lossy(&output.stderr).contains("expected --state-dir with it"));
}

/// The disk is full: the turn fails by name, the session keeps the turns before, and later turns are stored.
#[test]
fn a_turn_that_cannot_be_stored_fails() {
    let directory = Directory::new();
    let state = state(&directory);
    // a limit on the size of files stands for a full disk; `ulimit` counts blocks of 512 bytes or 1 KiB
    let line = format!(
        "trap '' XFSZ; ulimit -f 800; exec \"$0\" serve --port 0 --log-level off --ctx-size 1024 {} {}",
        state[0], state[1]
    );
    let mut child = std::process::Command::new("sh")
        .args(["-c", &line, env!("CARGO_BIN_EXE_starling")])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the server");
    let mut address = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut address).expect("a line");
    let server = Server::of(child, &address);
    server.ok(GENERATE, &text_turn("s", "Once"));
    let mut failed = None;
    for i in 0..400 {
        let prompt = "ab ".repeat(250);
        let response =
            server.post(GENERATE, &json!({ "session_id": format!("s{i}"), "prompt": prompt, "max_tokens": 1 }));
        if response.status != 200 {
            failed = Some(response);
            break;
        }
    }
    let failed = failed.expect("a full disk");
    assert_eq!(
        (failed.status, &failed.json()["error"]["code"]),
        (503, &json!("state_unavailable")),
        "{}",
        failed.text()
    );
    assert!(failed.json()["error"]["message"].as_str().expect("a message").contains("--state-dir"));
    // without a session nothing is stored
    server.ok(GENERATE, &json!({ "prompt": "Once", "max_tokens": 1 }));
    drop(server);
    let server = start(&directory, &[]);
    assert!(server.stats()["sessions"].as_u64() >= Some(1));
    server.ok(GENERATE, &text_turn("s", " more"));
}

const COMPLETIONS: &str = "/v1/chat/completions";

fn chat(more: &Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "Once upon" }], "max_tokens": 6, "seed": 3 });
    let fields = more.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(fields);
    body
}

#[test]
fn completions_are_kept_and_retrieved() {
    let directory = Directory::new();
    let server = start(&directory, &[]);
    let stored = |more: &Value| {
        let mut body = chat(more);
        body["store"] = json!(true);
        body
    };
    let first = server
        .ok(COMPLETIONS, &stored(&json!({ "metadata": { "topic": "dogs" }, "logprobs": true, "top_logprobs": 2 })));
    let parts = json!([{ "role": "user", "content": [{ "type": "text", "text": "Hi" }] }, { "role": "assistant", "content": "Ho" }, { "role": "user", "content": "and" }]);
    let second = server.ok(COMPLETIONS, &stored(&json!({ "messages": parts, "n": 2 })));
    // a stream: what is kept is what came
    let stream =
        server.post(COMPLETIONS, &stored(&json!({ "stream": true, "metadata": { "topic": "dogs", "n": "3" } })));
    let (chunks, id) = (stream.chunks(), stream.chunks()[0]["id"].as_str().expect("an ID").to_string());
    let streamed: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    // not kept
    let third = server.ok(COMPLETIONS, &chat(&json!({ "store": false, "metadata": { "topic": "dogs" } })));
    drop(server);
    let server = start(&directory, &[]);
    let get = |path: &str| {
        let response = server.get(&format!("{COMPLETIONS}{path}"));
        (response.status, response.json())
    };
    let path = |completion: &Value| format!("/{}", completion["id"].as_str().expect("an ID"));
    let mut expected = first.clone();
    expected["metadata"] = json!({ "topic": "dogs" });
    assert_eq!(get(&path(&first)), (200, expected));
    assert_eq!(get(&path(&second)).1["choices"], second["choices"]);
    let (status, found) = get(&format!("/{id}"));
    assert_eq!((status, &found["choices"][0]["message"]["content"]), (200, &json!(streamed)));
    assert_eq!((&found["object"], &found["metadata"]["n"]), (&json!("chat.completion"), &json!("3")));
    let (status, error) = get(&path(&third));
    assert_eq!((status, &error["error"]["code"]), (404, &json!("completion_not_found")));
    // messages
    let (_, messages) = get(&(path(&second) + "/messages?limit=2"));
    assert_eq!((&messages["has_more"], &messages["data"][0]["content_parts"][0]["text"]), (&json!(true), &json!("Hi")));
    let after = messages["last_id"].as_str().expect("an ID");
    let (_, rest) = get(&(path(&second) + "/messages?after=" + after));
    assert_eq!(
        (&rest["has_more"], &rest["data"][0]["content"], &rest["data"][0]["role"]),
        (&json!(false), &json!("and"), &json!("user"))
    );
    // lists
    let ids = |query: &str| {
        let (status, list) = get(query);
        assert_eq!(status, 200, "{list}");
        list["data"].as_array().expect("a list").iter().map(|completion| completion["id"].clone()).collect::<Vec<_>>()
    };
    let all = [&first["id"], &second["id"], &json!(id)].map(Clone::clone);
    assert_eq!(ids(""), all);
    assert_eq!(ids("?order=desc&limit=2"), [all[2].clone(), all[1].clone()]);
    assert_eq!(ids(&format!("?after={}", all[0].as_str().expect("an ID"))), all[1..]);
    assert_eq!(ids("?metadata%5Btopic%5D=dogs"), [all[0].clone(), all[2].clone()]);
    assert!(ids("?model=none").is_empty());
    for query in ["?limit=0", "?order=up", "?limit=a"] {
        assert_eq!(get(query).0, 400, "{query}");
    }
    assert_eq!(get("?after=none").0, 404);
    // metadata
    let change =
        |metadata: Value| server.post(&(COMPLETIONS.to_string() + &path(&first)), &json!({ "metadata": metadata }));
    assert_eq!(change(json!({ "a": "b" })).json()["metadata"], json!({ "a": "b" }));
    assert_eq!(change(json!({ "a": 1 })).status, 400);
    assert_eq!(get(&path(&first)).1["metadata"], json!({ "a": "b" }));
    let delete = || server.send("DELETE", &(COMPLETIONS.to_string() + &path(&first)), &[], b"");
    assert_eq!(delete().json(), json!({ "id": first["id"], "object": "chat.completion.deleted", "deleted": true }));
    assert_eq!((delete().status, get(&path(&first)).0, ids("").len()), (404, 404, 2));
    let many = json!({ "store": true, "metadata": { "a": "x".repeat(600) } });
    assert_eq!(server.post(COMPLETIONS, &chat(&many)).json()["error"]["param"], "metadata");
}

#[test]
fn stored_completions_need_a_directory_and_belong_to_a_tenant() {
    let server = Server::start(&[]);
    let body = chat(&json!({ "store": true }));
    for response in [server.post(COMPLETIONS, &body), server.get(COMPLETIONS), server.get("/v1/chat/completions/a")] {
        let error = response.json()["error"].clone();
        assert_eq!((response.status, &error["code"]), (400, &json!("state_dir_needed")), "{error}");
        assert!(error["message"].as_str().expect("a message").contains("--state-dir"));
    }
    server.ok(COMPLETIONS, &chat(&json!({ "store": false })));
    let directory = Directory::new();
    let keys = directory.write("api-keys", "key-a a\nkey-b b\n");
    let server = start(&directory, &["--api-key-file", &keys, "--stored-answers-size", "3000"]);
    let send = |key: &str, method: &str, path: &str, body: &Value| {
        let authorization = format!("Bearer {key}");
        let headers = [("authorization", authorization.as_str()), ("content-type", "application/json")];
        server.send(method, path, &headers, body.to_string().as_bytes())
    };
    let completion = send("key-a", "POST", COMPLETIONS, &body).json();
    let path = format!("{COMPLETIONS}/{}", completion["id"].as_str().expect("an ID"));
    assert_eq!(send("key-b", "GET", &path, &json!({})).status, 404);
    assert_eq!(send("key-b", "DELETE", &path, &json!({})).status, 404);
    assert_eq!(send("key-b", "GET", COMPLETIONS, &json!({})).json()["data"], json!([]));
    assert_eq!(send("key-a", "GET", &path, &json!({})).status, 200);
    // the oldest make room
    for _ in 0..6 {
        send("key-a", "POST", COMPLETIONS, &body);
    }
    let left = send("key-a", "GET", COMPLETIONS, &json!({})).json()["data"].as_array().expect("a list").len();
    assert!((1..7).contains(&left), "{left}");
    assert_eq!(send("key-a", "GET", &path, &json!({})).status, 404);
}

#[test]
fn requests_for_what_is_stored_count_for_the_rate_of_a_key() {
    let directory = Directory::new();
    let keys = directory.write("api-keys", "key-a a\nkey-b b\n");
    let server = start(&directory, &["--api-key-file", &keys, "--key-requests", "2"]);
    let get = |key: &str, path: &str| {
        let authorization = format!("Bearer {key}");
        server.send("GET", path, &[("authorization", &authorization)], b"").status
    };
    assert_eq!([COMPLETIONS, "/v1/responses/none", COMPLETIONS].map(|path| get("key-a", path)), [200, 404, 429]);
    assert_eq!(get("key-b", COMPLETIONS), 200);
    // these cost nothing
    assert_eq!(["/v1/models", "/livez", "/metrics"].map(|path| get("key-a", path)), [200, 200, 200]);
}

const RESPONSES: &str = "/v1/responses";

/// A response to `input` that continues `previous`.
fn continued(previous: Option<&Value>, input: &str, more: &Value) -> Value {
    let mut body = json!({ "input": input, "max_output_tokens": 6, "temperature": 0 });
    if let Some(previous) = previous {
        body["previous_response_id"] = previous["id"].clone();
    }
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

#[test]
fn responses_are_continued_and_retrieved() {
    let directory = Directory::new();
    let server = start(&directory, &[]);
    let first = server.ok(RESPONSES, &continued(None, "Once upon", &json!({ "metadata": { "topic": "dogs" } })));
    assert_eq!((&first["store"], &first["metadata"]["topic"]), (&json!(true), &json!("dogs")));
    drop(server);
    let server = start(&directory, &[]);
    let get = |path: &str| {
        let response = server.get(&format!("{RESPONSES}{path}"));
        (response.status, response.json())
    };
    let path = |response: &Value| format!("/{}", response["id"].as_str().expect("an ID"));
    assert_eq!(get(&path(&first)), (200, first.clone()));
    // a stream continues it; what is kept is what came
    let body = continued(Some(&first), "and", &json!({ "stream": true, "instructions": "Be brief." }));
    let events = server.post(RESPONSES, &body).events();
    let (name, data) = events.last().expect("an event");
    let second = serde_json::from_str::<Value>(data).expect("JSON")["response"].clone();
    assert_eq!((name.as_str(), &second["previous_response_id"]), ("response.incomplete", &first["id"]));
    assert_eq!(get(&path(&second)), (200, second.clone()));
    // the whole conversation sent as items has the same answer
    let item = |role: &str, text: &Value| json!({ "role": role, "content": text });
    let text = |response: &Value| response["output"][0]["content"][0]["text"].clone();
    let all = json!([
        item("user", &json!("Once upon")),
        item("assistant", &text(&first)),
        item("user", &json!("and")),
        item("assistant", &text(&second)),
        item("user", &json!("then")),
    ]);
    let third = server.ok(RESPONSES, &continued(Some(&second), "then", &json!({})));
    let whole = server.ok(RESPONSES, &continued(None, "", &json!({ "input": all, "store": false })));
    assert_eq!((text(&third), &third["usage"]["input_tokens"]), (text(&whole), &whole["usage"]["input_tokens"]));
    assert_eq!((whole["store"].clone(), get(&path(&whole)).0), (json!(false), 404));
    let count =
        server.ok("/v1/responses/input_tokens", &json!({ "input": "then", "previous_response_id": second["id"] }));
    assert_eq!(count["input_tokens"], third["usage"]["input_tokens"]);
    // items, the newest first
    let roles = |query: &str| {
        let (status, list) = get(&(path(&third) + "/input_items" + query));
        assert_eq!(status, 200, "{list}");
        let items = list["data"].as_array().expect("a list").clone();
        let texts: Vec<Value> = items.iter().map(|item| item["content"][0]["text"].clone()).collect();
        (texts, list)
    };
    let in_order: Vec<Value> = all.as_array().expect("items").iter().map(|item| item["content"].clone()).collect();
    assert_eq!(roles("?order=asc").0, in_order);
    let (newest, list) = roles("?limit=2");
    assert_eq!((newest, &list["has_more"]), (vec![json!("then"), text(&second)], &json!(true)));
    let after = list["last_id"].as_str().expect("an ID");
    assert_eq!(roles(&format!("?limit=2&after={after}")).0, [json!("and"), text(&first)]);
    // a response whose predecessor is gone can still be continued
    let delete = || server.send("DELETE", &(RESPONSES.to_string() + &path(&first)), &[], b"");
    assert_eq!(delete().json(), json!({ "id": first["id"], "object": "response", "deleted": true }));
    assert_eq!((delete().status, get(&path(&first)).0), (404, 404));
    assert_eq!(server.post(RESPONSES, &continued(Some(&first), "x", &json!({}))).status, 400);
    assert_eq!(text(&server.ok(RESPONSES, &continued(Some(&second), "then", &json!({})))), text(&third));
    // a conversation that is prepared by a probe
    let probe = server.ok(RESPONSES, &continued(Some(&second), "then", &json!({ "generate": false })));
    assert_eq!(text(&server.ok(RESPONSES, &continued(Some(&probe), "", &json!({ "input": [] })))), text(&third));
    assert_eq!(get(&(path(&second) + "?stream=true")).1["error"]["param"], "stream");
    let many = json!({ "metadata": { "a": "x".repeat(600) } });
    assert_eq!(server.post(RESPONSES, &continued(None, "x", &many)).json()["error"]["param"], "metadata");
}

#[test]
fn stored_responses_need_a_directory_and_belong_to_a_tenant() {
    let server = Server::start(&[]);
    assert_eq!(server.ok(RESPONSES, &continued(None, "Hi", &json!({})))["store"], false);
    let previous = json!({ "id": "resp_1" });
    for (response, param) in [
        (server.post(RESPONSES, &continued(None, "Hi", &json!({ "store": true }))), json!("store")),
        (server.post(RESPONSES, &continued(Some(&previous), "Hi", &json!({}))), json!("previous_response_id")),
        (server.get("/v1/responses/resp_1"), json!(null)),
        (server.get("/v1/responses/resp_1/input_items"), json!(null)),
    ] {
        let error = response.json()["error"].clone();
        assert_eq!((response.status, &error["code"]), (400, &json!("state_dir_needed")), "{error}");
        assert_eq!(error["param"], param);
    }
    let directory = Directory::new();
    let keys = directory.write("api-keys", "key-a a\nkey-b b\n");
    let policy = "[[rules]]\nname = \"secrets\"\ndeny = [\"sk-[a-z]+\"]\naction = \"redact\"\n";
    let policy = directory.write("policy.toml", policy);
    let server = start(&directory, &["--api-key-file", &keys, "--policy-file", &policy]);
    let send = |key: &str, method: &str, path: &str, body: &Value| {
        let authorization = format!("Bearer {key}");
        let headers = [("authorization", authorization.as_str()), ("content-type", "application/json")];
        server.send(method, path, &headers, body.to_string().as_bytes())
    };
    let response = send("key-a", "POST", RESPONSES, &continued(None, "the key sk-abc", &json!({}))).json();
    let path = format!("{RESPONSES}/{}", response["id"].as_str().expect("an ID"));
    for (method, path) in [("GET", path.clone()), ("GET", path.clone() + "/input_items"), ("DELETE", path.clone())] {
        assert_eq!(send("key-b", method, &path, &json!({})).status, 404);
    }
    let stolen = send("key-b", "POST", RESPONSES, &continued(Some(&response), "Hi", &json!({})));
    assert_eq!((stolen.status, &stolen.json()["error"]["code"]), (400, &json!("previous_response_not_found")));
    // what is kept has passed the policy
    let items = send("key-a", "GET", &(path + "/input_items"), &json!({})).json();
    assert_eq!(items["data"][0]["content"][0]["text"], "the key [removed]");
}
