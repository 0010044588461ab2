//! The interface of administrators: keys, settings, reload, drain.

use serde_json::{Value, json};

use crate::admin_client::{Directory, Managed, completion, reference};
use crate::server::Server;

const COMPLETIONS: &str = "/v1/completions";

fn value(managed: &Managed, key: &str) -> (Value, String) {
    let all = managed.ok("GET", "config", &json!({}));
    let all = all["settings"].as_array().expect("a list").clone();
    let setting = all.into_iter().find(|setting| setting["key"] == key).expect("a setting");
    (setting["value"].clone(), setting["origin"].as_str().expect("an origin").to_string())
}

#[test]
fn only_administrators_get_in() {
    let server = Server::start(&[]);
    assert_eq!(server.get("/admin/models").status, 404);
    let managed = Managed::start(&["--api-key", "user"]);
    for key in [None, Some("Bearer user"), Some("Bearer wrong")] {
        let headers: Vec<_> = key.map(|key| ("authorization", key)).into_iter().collect();
        assert_eq!(managed.server.send("GET", "/admin/models", &headers, b"").status, 401, "{key:?}");
    }
    assert_eq!(managed.ok("GET", "models", &json!({}))["models"][0]["status"], "loaded");
    // an administrator's key is no API key
    let key = [("authorization", "Bearer administrator-key")];
    assert_eq!(managed.server.send("GET", "/v1/models", &key, b"").status, 401);
    // models are managed by administrators only
    let headers = [("authorization", "Bearer user")];
    let body = json!({ "model": "starling-tiny-q8_0" });
    assert_eq!(managed.server.post_with("/models/unload", &headers, &body).status, 403);
}

#[test]
fn settings_change_all_or_none() {
    let managed = Managed::start(&["--max-n", "4", "-m", &format!("m={}", reference("llama-k256-q4_k_m"))]);
    assert_eq!(value(&managed, "max-n"), (json!("4"), "flag --max-n".into()));
    let ask = |n: usize| {
        let mut body = completion("m", "x", 2);
        (body["n"], body["temperature"]) = (json!(n), json!(1));
        managed.server.post(COMPLETIONS, &body).status
    };
    assert_eq!((ask(4), ask(5)), (200, 400));
    let changed = managed.ok("PATCH", "config", &json!({ "max-n": 5, "queue_high": 300, "log-level": "warn" }));
    assert_eq!(changed["changed"], json!(["log-level", "max-n", "queue-high"]));
    assert_eq!((ask(5), value(&managed, "max-n")), (200, (json!("5"), "administrator anna".into())));
    managed.ok("PATCH", "config", &json!({ "models": { "m": { "max-n": 1 } } }));
    assert_eq!(ask(2), 400);
    for (body, param, part) in [
        (json!({ "max-n": 7, "queue-low": 1_000_000 }), Value::Null, "queue-high is 300"),
        (json!({ "max-n": 7, "port": 1 }), json!("port"), "restart"),
        (json!({ "max-n": 7, "queue-hgih": 1 }), json!("queue-hgih"), "did you mean queue-high?"),
        (json!({ "max-n": 0 }), json!("max-n"), "from 1 to 128"),
        (json!({ "max-n": 7, "log-level": "a=b=c" }), Value::Null, "log-level"),
        (json!({ "max-n": 7, "log-level": "inf" }), Value::Null, "found \"inf\""),
        (json!({ "max-n": 7, "batch-tokens": 60_000 }), Value::Null, "at most 128"),
        (json!({ "max-n": 7, "max-seqs": 33 }), Value::Null, "max-seqs: found 33, expected at most 32"),
        (json!({ "models": { "x": { "max-n": 7 } } }), json!("model"), "did you mean `m`?"),
        (json!({ "models": { "m": { "load-wait": 7 } } }), json!("load-wait"), "of the server"),
    ] {
        let response = managed.send("PATCH", "config", &body);
        let error = response.json()["error"].clone();
        assert!(matches!(response.status, 400 | 404), "{body}: {error}");
        assert_eq!(error["param"], param, "{body}: {error}");
        assert!(error["message"].as_str().expect("a message").contains(part), "{body}: {error}");
        assert_eq!(value(&managed, "max-n").0, json!("5"));
    }
}

#[test]
fn a_drained_server_refuses_requests_until_it_is_undrained() {
    let managed = Managed::start(&[]);
    let ask = || managed.server.post(COMPLETIONS, &json!({ "prompt": "x", "max_tokens": 1 })).status;
    assert_eq!((ask(), managed.server.get("/readyz").status), (200, 200));
    managed.ok("POST", "drain", &json!({}));
    assert_eq!((ask(), managed.server.get("/readyz").status, managed.server.get("/livez").status), (503, 503, 200));
    managed.ok("POST", "undrain", &json!({}));
    assert_eq!((ask(), managed.server.get("/readyz").status), (200, 200));
}

#[test]
fn a_reload_follows_the_file() {
    let directory = Directory::new();
    let model = |name: &str, of: &str| format!("[models.{name}]\nsource = {:?}\n", reference(of));
    let file = |text: String| directory.write("settings.toml", text);
    let one = model("one", "llama-k256-q4_k_m");
    let path = file(format!("max-n = 2\n{one}{}", model("two", "qwen3-tied-f16")));
    let managed = Managed::start(&["--config", &path]);
    let names = || {
        let list = managed.ok("GET", "models", &json!({}));
        list["models"].as_array().expect("a list").iter().map(|m| m["name"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(), ["one", "two"]);
    // an invalid file changes nothing, and the error has file, line and key
    file(format!("max-n = 3\nmax-body = \"many\"\n{one}"));
    let response = managed.send("POST", "reload", &json!({}));
    let message = response.json()["error"]["message"].clone();
    assert_eq!(response.status, 400);
    assert!(
        message.as_str().expect("a message").contains("settings.toml: line 2: max-body: found \"many\""),
        "{message}"
    );
    assert_eq!((value(&managed, "max-n").0, names().len()), (json!("2"), 2));
    file(format!("max-n = 3\nmax-connections = 7\n{one}{}", model("three", "llama-linear-bias-bf16")));
    let reloaded = managed.ok("POST", "reload", &json!({}));
    assert_eq!(reloaded["changed"], json!(["max-n"]));
    assert_eq!(reloaded["needs_restart"], json!(["max-connections"]));
    assert_eq!((&reloaded["added"], &reloaded["removed"]), (&json!(["three"]), &json!(["two"])));
    assert_eq!((value(&managed, "max-n").0, value(&managed, "max-connections").0), (json!("3"), json!("1024")));
    assert_eq!(names(), ["one", "three"]);
    managed.wait("models/three", |model| model["status"] == "loaded");
    managed.server.ok(COMPLETIONS, &completion("three", "x", 1));
}

/// What an administrator has added stays with its sessions; a file that cannot be followed whole is not followed at all.
#[test]
fn a_reload_is_whole_and_keeps_the_models_of_administrators() {
    let directory = Directory::new();
    let file = |text: String| directory.write("settings.toml", text);
    let model = |name: &str, more: &str| {
        format!("[models.{name}]\nsource = {:?}\nload = \"on-demand\"\n{more}", reference("llama-k256-q4_k_m"))
    };
    let path = file(format!("max-n = 2\n{}", model("one", "")));
    let state = directory.path().join("state");
    let managed = Managed::start(&["--config", &path, "--state-dir", state.to_str().expect("a path")]);
    let names = || {
        let list = managed.ok("GET", "models", &json!({}));
        list["models"].as_array().expect("a list").iter().map(|m| m["name"].clone()).collect::<Vec<_>>()
    };
    managed.ok("POST", "models", &json!({ "name": "mine", "source": reference("llama-k256-q4_k_m") }));
    let turn = json!({ "model": "mine", "prompt": "Once", "max_tokens": 2, "session_id": "s" });
    managed.server.ok("/v1/generate", &turn);
    let sessions = || managed.ok("GET", "models/mine", &json!({}))["sessions"].clone();
    assert_eq!(sessions(), 1);
    // SIGHUP with an unchanged file
    for _ in 0..2 {
        let reloaded = managed.ok("POST", "reload", &json!({}));
        assert_eq!((&reloaded["removed"], &reloaded["added"]), (&json!([]), &json!([])));
        assert_eq!((names(), sessions()), (vec![json!("one"), json!("mine")], json!(1)));
    }
    // the second new model has a name that is taken
    file(format!("max-n = 3\n{}{}{}", model("one", ""), model("two", ""), model("three", "aliases = [\"mine\"]\n")));
    let response = managed.send("POST", "reload", &json!({}));
    assert!(response.status == 400 && response.text().contains("`mine`"), "{}", response.text());
    assert_eq!((names(), value(&managed, "max-n").0), (vec![json!("one"), json!("mine")], json!("2")));
    // so has one that is known already
    file(format!("max-n = 3\n{}{}", model("one", "aliases = [\"mine\"]\n"), model("two", "")));
    assert_eq!(managed.send("POST", "reload", &json!({})).status, 400);
    assert_eq!((names(), value(&managed, "max-n").0), (vec![json!("one"), json!("mine")], json!("2")));
    // the place of a model that goes is free
    file(format!("max-n = 3\n{}", model("two", "aliases = [\"one\"]\n")));
    let reloaded = managed.ok("POST", "reload", &json!({}));
    assert_eq!((&reloaded["removed"], &reloaded["added"]), (&json!(["one"]), &json!(["two"])));
    assert_eq!((names(), value(&managed, "max-n").0), (vec![json!("mine"), json!("two")], json!("3")));
}

#[test]
fn models_are_added_and_removed() {
    let managed = Managed::start(&[]);
    let new =
        json!({ "name": "new", "source": reference("qwen3-tied-f16"), "settings": { "ctx-size": 64 }, "load": true });
    let added = managed.ok("POST", "models", &new);
    assert_eq!((&added["status"], &added["context"]), (&json!("loaded"), &json!(64)));
    assert_eq!(managed.send("POST", "models", &new).status, 400);
    managed.server.ok(COMPLETIONS, &completion("new", "x", 1));
    managed.ok("POST", "models/new/unload", &json!({}));
    assert_eq!(managed.ok("POST", "models/new/load", &json!({}))["status"], "loaded");
    managed.ok("DELETE", "models/new", &json!({}));
    assert_eq!(managed.server.post(COMPLETIONS, &completion("new", "x", 1)).status, 404);
    let caches = managed.ok("GET", "caches", &json!({}));
    assert_eq!(caches["caches"][0]["model"], "starling-tiny-q8_0");
    managed.ok("POST", "caches/invalidate", &json!({}));
}

#[test]
fn administration_has_a_listener_of_its_own() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let mut managed = Managed::start(&["--admin-listen", &free.to_string()]);
    assert_eq!(managed.send("GET", "models", &json!({})).status, 404);
    managed.server.address = free.to_string();
    assert_eq!(managed.ok("GET", "models", &json!({}))["models"][0]["status"], "loaded");
    assert_eq!(managed.server.get("/v1/models").status, 404);
    assert_eq!(managed.server.get("/livez").status, 200);
}

/// Runs `starling admin`; its standard output, or its error.
fn admin(managed: &Managed, args: &[&str]) -> Result<String, String> {
    let mut command = crate::server::command(&["admin", "--url", &format!("http://{}", managed.server.address)]);
    let output = command.args(args).env("STARLING_ADMIN_KEY", "administrator-key").output().expect("a process");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

#[test]
fn the_command_shows_and_changes_a_server() {
    let managed = Managed::start(&["-m", &format!("m={}", reference("llama-k256-q4_k_m"))]);
    let models = admin(&managed, &["models"]).expect("a table");
    assert!(models.starts_with("NAME  STATUS  SOURCE") && models.contains("\nm     loaded  /"), "{models}");
    let source = reference("qwen3-tied-f16");
    assert!(admin(&managed, &["swap", "m", &source]).expect("a summary").starts_with("name: m\nsha256: "));
    assert!(admin(&managed, &["workers", "m"]).expect("a table").contains("\n0   healthy  0 "));
    assert_eq!(
        admin(&managed, &["set", "max-n=2", "queue-high=99", "queue-low=9"]).as_deref(),
        Ok("changed: [\"max-n\",\"queue-high\",\"queue-low\"]\n")
    );
    assert_eq!(
        admin(&managed, &["add", "a/b", &source, "ctx-size=64"]).map(|text| text.contains("context: 64")),
        Ok(true)
    );
    assert!(admin(&managed, &["unload", "a/b"]).is_ok());
    let json: Value = serde_json::from_str(&admin(&managed, &["--json", "config"]).expect("JSON")).expect("JSON");
    assert!(json["settings"].as_array().expect("a list").len() > 40);
    let error = admin(&managed, &["set", "max-n=0"]).expect_err("an error");
    assert!(error.contains("status 400: max-n: found 0, expected a number from 1 to 128"), "{error}");
    let error = admin(&managed, &["swap", "x"]).expect_err("an error");
    assert!(error.contains("status 404: the model `x` does not exist"), "{error}");
}

/// Fewer requests run at once from the next step on, and as many as configured again.
#[test]
fn max_seqs_changes_while_the_server_runs() {
    let managed = Managed::start(&["--max-seqs", "2"]);
    let body = json!({ "prompt": "Once", "max_tokens": 400, "ignore_eos": true, "stream": true }).to_string();
    let json_type = [("content-type", "application/json")];
    let open = || managed.server.open("POST", COMPLETIONS, &json_type, body.as_bytes());
    let running = |n: usize, waiting: usize| {
        managed.server.wait("as many run", |stats| {
            (&stats["running"], &stats["waiting"]["normal"]) == (&json!(n), &json!(waiting))
        })
    };
    managed.ok("PATCH", "config", &json!({ "max-seqs": 1 }));
    let (first, second) = (open(), open());
    running(1, 1);
    managed.ok("PATCH", "config", &json!({ "max-seqs": 2 }));
    running(2, 0);
    drop((first, second));
    running(0, 0);
}

/// How much others ask is no tenant's business.
#[test]
fn a_tenant_sees_its_own_metrics() {
    let directory = Directory::new();
    let keys = directory.write("clients", "key-of-alice alice\nkey-of-bob bob\n");
    let managed = Managed::start(&["--api-key-file", &keys]);
    let get = |key: &str, path: &str| {
        let value = format!("Bearer {key}");
        managed.server.send("GET", path, &[("authorization", &value)], b"")
    };
    for key in ["key-of-alice", "key-of-bob"] {
        let value = format!("Bearer {key}");
        let body = json!({ "prompt": "a", "max_tokens": 3, "ignore_eos": true });
        assert_eq!(managed.server.post_with(COMPLETIONS, &[("authorization", &value)], &body).status, 200);
    }
    let line = |name: &str| format!("starling_tenant_output_tokens_total{{tenant=\"{name}\"}} 3\n");
    let start = std::time::Instant::now();
    // counted when the server has seen the end of a response
    while !["alice", "bob"].iter().all(|name| get("administrator-key", "/metrics").text().contains(&line(name))) {
        assert!(start.elapsed() < crate::server::LIMIT, "{}", get("administrator-key", "/metrics").text());
    }
    let seen = get("key-of-alice", "/metrics").text();
    assert!(seen.contains(&line("alice")) && !seen.contains("bob"), "{seen}");
    assert_eq!(get("wrong", "/metrics").status, 401);
}

/// One call shows the workers of all models.
#[test]
fn workers_of_all_models_are_listed() {
    let model = |name: &str, of: &str| format!("{name}={}", reference(of));
    let managed = Managed::start(&[
        "-m",
        &model("a", "llama-k256-q4_k_m"),
        "-m",
        &model("b", "qwen3-tied-f16"),
        "--workers",
        "2",
    ]);
    let all = managed.ok("GET", "workers", &json!({}));
    let found = |i: usize| (all["models"][i]["model"].clone(), all["models"][i]["workers"].as_array().map(Vec::len));
    assert_eq!([found(0), found(1)], [(json!("a"), Some(2)), (json!("b"), Some(2))]);
    let worker = &all["models"][1]["workers"][1];
    assert_eq!((&worker["id"], &worker["state"]), (&json!(1), &json!("healthy")), "{all}");
}

/// Drafts change no byte, and stop at once.
#[test]
fn draft_max_changes_while_the_server_runs() {
    let managed = Managed::start(&["--draft-min-acceptance", "0"]);
    let drafted = || {
        let metrics = managed.server.get("/metrics").text();
        let line = metrics.lines().find(|line| line.starts_with("starling_draft_tokens_total")).map(str::to_string);
        line.map_or(0.0, |line| line.rsplit(' ').next().and_then(|n| n.parse().ok()).expect("a number"))
    };
    // the answer repeats itself
    let prompt = "the dog saw a cat and the cat saw a dog. ".repeat(3) + "the dog";
    let body = json!({ "prompt": prompt, "max_tokens": 60, "temperature": 0 });
    let ask = || managed.server.ok("/v1/completions", &body)["choices"].clone();
    let with = ask();
    let before = drafted();
    assert!(before > 0.0);
    managed.ok("PATCH", "config", &json!({ "draft-max": 0 }));
    assert_eq!((ask(), drafted()), (with.clone(), before));
    managed.ok("PATCH", "config", &json!({ "draft-max": 4, "draft-min-acceptance": 0.01 }));
    assert_eq!(ask(), with);
    assert!(drafted() > before);
}
