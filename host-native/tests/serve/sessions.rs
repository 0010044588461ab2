//! Sessions: close during a turn, and memory limits.

use serde_json::{Value, json};

use crate::server::{Server, read_response};

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

#[test]
fn a_turn_of_a_closed_session_leaves_the_new_one_alone() {
    let server = Server::start(&["--max-seqs", "2"]);
    let turn =
        |prompt: &str, n: usize| json!({ "session_id": "s", "prompt": prompt, "max_tokens": n, "ignore_eos": true });
    let first = turn("the first conversation", 300);
    let mut old = server.open("POST", "/v1/generate", &JSON, first.to_string().as_bytes());
    server.wait("it runs", |s| s["running"] == 1);
    server.ok("/v1/session/close", &json!({ "session_id": "s" }));
    let new = server.ok("/v1/generate", &turn("a", 2));
    assert_eq!(read_response(&mut old).status, 200);
    // continues the second conversation, not the closed one
    let third = server.ok("/v1/generate", &turn("b", 2));
    let tokens = |answer: &Value, part: &str| answer["usage"][part].as_u64().expect("a number");
    let expected = tokens(&new, "prompt_tokens") + tokens(&new, "completion_tokens");
    let found = tokens(&third, "prompt_tokens");
    assert!((expected..expected + 4).contains(&found), "{new} {third}");
}

#[test]
fn a_session_keeps_no_more_than_its_memory() {
    let server = Server::start(&["--session-memory", "64KiB", "--ctx-size", "512"]);
    let message = |content: &str, more: &str| json!({ "role": "user", "content": content, "extra": more });
    let turn = |message: Value| json!({ "session_id": "s", "messages": [message], "max_tokens": 1 });
    // fields that no template reads are not stored, whatever their size
    for _ in 0..3 {
        server.ok("/v1/generate", &turn(message("Hi", &"x".repeat(200_000))));
    }
    let response = server.post("/v1/generate", &turn(message(&"x".repeat(70_000), "")));
    assert_eq!(response.status, 400);
    let error = response.json()["error"].clone();
    assert_eq!((&error["code"], &error["param"]), (&json!("session_too_large"), &json!("session_id")), "{error}");
    let message_of = error["message"].as_str().expect("a message");
    assert!(message_of.contains("at most 65536 (--session-memory)"), "{message_of}");
    // the session stays usable
    server.ok("/v1/generate", &turn(message("Hi", "")));
}
