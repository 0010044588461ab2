//! The audit log: who did what, and whether lines are missing.

use std::fs;

use serde_json::{Value, json};

use crate::admin_client::{Directory, Managed};
use crate::server::{Server, command, fixture};

fn lines(path: &str) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("the log");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// `starling admin audit verify`: the exit code and what it prints.
fn verify(args: &[&str]) -> (Option<i32>, String) {
    let done = command(&[&["admin", "audit", "verify"], args].concat()).output().expect("an end");
    (done.status.code(), String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned())
}

#[test]
fn who_did_what_is_recorded_without_texts() {
    let directory = Directory::new();
    let path = |name: &str| directory.0.join(name).to_str().expect("a path").to_string();
    let (log, keys, admins, secret) = (path("audit.log"), path("keys"), path("admins"), path("secret"));
    fs::write(&keys, "the-key alice\n").expect("a file");
    fs::write(&admins, "admin-key anna\n").expect("a file");
    fs::write(&secret, "ab".repeat(32)).expect("a file");
    let args = ["--api-key-file", &keys, "--admin-key-file", &admins, "--audit-log", &log, "--audit-key-file", &secret];
    let server = Server::start(&[&args[..], &["-m", &fixture("starling-tiny/starling-tiny-q4_0.gguf")]].concat());
    let (alice, anna) = (("authorization", "Bearer the-key"), ("authorization", "Bearer admin-key"));
    let body = json!({ "prompt": "a secret story", "max_tokens": 3, "seed": 1, "ignore_eos": true });
    assert_eq!(server.post_with("/v1/completions", &[alice], &body).status, 200);
    let mut stream = body.clone();
    stream["stream"] = json!(true);
    assert_eq!(server.post_with("/v1/completions", &[alice], &stream).status, 200);
    assert_eq!(server.post_with("/v1/completions", &[alice], &json!({ "prompt": 7.5 })).status, 400);
    assert_eq!(server.post("/v1/completions", &body).status, 401);
    assert_eq!(server.post_with("/admin/config", &[("authorization", "Bearer the-key")], &json!({})).status, 401);
    let patch = json!({ "max-n": 2 }).to_string();
    let json_type = ("content-type", "application/json");
    assert_eq!(server.send("PATCH", "/admin/config", &[anna, json_type], patch.as_bytes()).status, 200);
    let head = server.send("GET", "/admin/audit", &[anna], b"").json();
    server.signal("TERM");
    assert!(server.wait_end().success());

    let all = lines(&log);
    let events: Vec<&str> = all.iter().map(|line| line["event"].as_str().expect("a name")).collect();
    let expected = ["server_started", "request", "request", "request", "admin", "server_stopped"];
    assert_eq!(events, expected, "{all:#?}");
    for line in &all[1..3] {
        let seen = (&line["tenant"], &line["model"], &line["endpoint"], &line["status"], &line["outcome"]);
        let model = json!("starling-tiny-q4_0");
        assert_eq!(seen, (&json!("alice"), &model, &json!("/v1/completions"), &json!(200), &json!("length")));
        assert_eq!((&line["completion_tokens"], line["prompt_tokens"].as_u64() > Some(2)), (&json!(3), true));
    }
    assert_eq!((&all[3]["status"], &all[3]["outcome"]), (&json!(400), &json!("invalid_request_error")));
    assert_eq!((&all[4]["administrator"], &all[4]["target"]), (&json!("anna"), &json!("max-n")));
    assert_eq!((&head["seq"], &head["hash"]), (&json!(5), &all[4]["hash"]));
    // what strangers did is in a log of its own, and what administrators did in a second one
    let refused = lines(&format!("{log}.refused"));
    assert_eq!((&refused[0]["reason"], &refused[0]["address"]), (&json!("invalid_api_key"), &json!("127.0.0.1")));
    assert_eq!((&refused[1]["reason"], &refused[1]["path"]), (&json!("invalid_admin_key"), &json!("/admin/config")));
    assert_eq!((refused.len(), &lines(&format!("{log}.admin"))[0]["target"]), (2, &json!("max-n")));
    let text = fs::read_to_string(&log).expect("the log");
    assert!(!["secret story", "the-key", "admin-key"].iter().any(|private| text.contains(private)), "{text}");

    let hash = head["hash"].as_str().expect("a hash").to_string();
    let with_key = ["--audit-key-file", &secret, "--expect", &hash, &log];
    let (code, said) = verify(&with_key);
    assert!(said.contains("audit.log.refused: 2 records in 1 files, 1 to 2: ok"), "{said}");
    assert!(code == Some(0) && said.contains("6 records in 1 files, 1 to 6: ok"), "{said}");
    // without the key no hash fits
    assert_eq!(verify(&[&log]).0, Some(2));
    let whole: Vec<&str> = text.lines().collect();
    for (name, left) in [("a line", [&whole[..4], &whole[5..]].concat()), ("the end", whole[..4].to_vec())] {
        fs::write(&log, left.join("\n") + "\n").expect("a file");
        let (code, said) = verify(&with_key);
        assert_eq!(code, Some(2), "without {name}: {said}");
    }
}

/// Changes by the paths of other APIs are an administrator's, and who reads or deletes what was stored is told.
#[test]
fn changes_of_models_and_uses_of_stored_answers_are_recorded() {
    let directory = Directory::new();
    let path = |name: &str| directory.0.join(name).to_str().expect("a path").to_string();
    let (log, state) = (path("audit.log"), path("state"));
    let source = format!("m={}", fixture("starling-tiny/starling-tiny-q4_0.gguf"));
    let managed = Managed::start(&["-m", &source, "--audit-log", &log, "--state-dir", &state]);
    let model = json!({ "model": "m" });
    let send = |method: &str, path: &str, body: &Value| {
        let response = managed.send_to(method, path, body);
        assert_eq!(response.status, 200, "{method} {path}: {}", response.text());
        response
    };
    send("POST", "/models/unload", &model);
    send("POST", "/api/chat", &json!({ "model": "m", "messages": [], "keep_alive": 0 }));
    send("POST", "/api/copy", &json!({ "source": "m", "destination": "n" }));
    send("DELETE", "/api/delete", &json!({ "model": "n" }));
    assert_eq!(managed.send_to("POST", "/api/copy", &json!({ "source": "m", "destination": "m" })).status, 400);
    let body =
        json!({ "model": "m", "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 1, "store": true });
    let stored = managed.server.ok("/v1/chat/completions", &body)["id"].as_str().expect("an id").to_string();
    let stored = format!("/v1/chat/completions/{stored}");
    assert_eq!(managed.server.get(&stored).status, 200);
    assert_eq!(managed.server.send("DELETE", &stored, &[("content-type", "application/json")], b"").status, 200);
    managed.ok("GET", "audit", &json!({}));
    let all = lines(&log);
    let of = |event: &str| all.iter().filter(|line| line["event"] == event).cloned().collect::<Vec<_>>();
    let actions: Vec<_> = of("admin").iter().map(|line| (line["action"].clone(), line["target"].clone())).collect();
    let expected = [("unload", "m"), ("unload", "m"), ("copy", "n"), ("remove", "n"), ("copy", "m")];
    assert_eq!(actions, expected.map(|(action, model)| (json!(format!("{action} model")), json!(model))), "{all:#?}");
    assert!(of("admin").iter().all(|line| line["administrator"] == "anna"), "{all:#?}");
    assert!(of("admin")[4]["error"].as_str().is_some_and(|error| error.contains("`m`")), "{all:#?}");
    assert_eq!(lines(&format!("{log}.admin")).len(), 5);
    let endpoints: Vec<_> = of("request").iter().map(|line| line["endpoint"].clone()).collect();
    for endpoint in [format!("GET {stored}"), format!("DELETE {stored}"), "DELETE /api/delete".into()] {
        assert!(endpoints.contains(&json!(endpoint)), "{endpoint}: {endpoints:?}");
    }
}
