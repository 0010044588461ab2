//! llama-server's slot calls.

use std::fs;

use serde_json::json;

use crate::admin_client::{Directory, completion, continued, reference, text};
use crate::server::Server;

const COMPLETIONS: &str = "/v1/completions";

#[test]
fn a_slot_is_saved_and_restored() {
    let directory = Directory::new();
    let path = directory.path().to_str().expect("a path").to_string();
    let args = ["--slot-save-path", &path, "--max-seqs", "3"];
    let server = Server::start(&args);
    let prompt = "Once upon a time the little dog saw a tree and ".repeat(6);
    let ask = |server: &Server, prompt: &str| server.ok(COMPLETIONS, &completion("starling-tiny-q8_0", prompt, 20));
    let file = json!({ "filename": "dog.slot" });
    assert_eq!(server.post("/slots/0?action=save", &file).status, 400);
    let first = ask(&server, &prompt);
    let n = first["usage"]["prompt_tokens"].as_u64().expect("a number") + 20;
    let slots = server.get("/slots").json();
    assert_eq!((slots.as_array().map(Vec::len), &slots[0]["n_tokens"]), (Some(3), &json!(n)), "{slots}");
    let saved = server.ok("/slots/0?action=save", &file);
    assert_eq!((&saved["id_slot"], &saved["n_saved"], &saved["filename"]), (&json!(0), &json!(n), &json!("dog.slot")));
    let turn = format!("{prompt}{} And", text(&first));
    let expected = ask(&Server::start(&[]), &turn);

    let server = Server::start(&args);
    let restored = server.ok("/slots/2?action=restore", &file);
    assert_eq!(restored["n_restored"], (n - 1) / 16 * 16, "{restored}");
    assert_eq!(restored["n_read"], saved["n_written"]);
    let answer = ask(&server, &turn);
    assert_eq!(text(&answer), text(&expected));
    assert!(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() >= Some(n / 16 * 16 - 48), "{answer}");
    assert_eq!(server.ok("/slots/2?action=erase", &json!({}))["n_erased"], n);
    assert_eq!(server.get("/slots").json()[2]["n_tokens"], 0);

    // damage, and what is no file of the directory
    let bytes = fs::read(directory.path().join("dog.slot")).expect("a file");
    let mut damaged = bytes.clone();
    let end = damaged.len() - 100;
    damaged[end] ^= 1;
    directory.write("pages.slot", &damaged);
    damaged[80] ^= 1;
    directory.write("damaged.slot", &damaged);
    let fresh = Server::start(&args);
    let restored = fresh.ok("/slots/0?action=restore", &json!({ "filename": "pages.slot" }));
    assert!(restored["n_restored"].as_u64() < Some(n / 16 * 16), "{restored}");
    assert_eq!(text(&ask(&fresh, &turn)), text(&expected));
    for (path, filename, status) in [
        ("/slots/0?action=restore", "damaged.slot", 400),
        ("/slots/0?action=restore", "none.slot", 404),
        ("/slots/0?action=restore", "../dog.slot", 400),
        ("/slots/0?action=save", "a/b", 400),
        ("/slots/0?action=save", "", 400),
        ("/slots/9?action=save", "x", 400),
        ("/slots/0?action=load", "x", 400),
    ] {
        assert_eq!(fresh.post(path, &json!({ "filename": filename })).status, status, "{path} {filename}");
    }
    let other = Server::start(&["-m", &reference("mistral-hd32-f16"), "--slot-save-path", &path]);
    let refused = other.post("/slots/0?action=restore", &file);
    assert!(refused.status == 400 && refused.text().contains("of another model"), "{}", refused.text());
    let without = Server::start(&[]);
    ask(&without, "x");
    assert_eq!(without.post("/slots/0?action=save", &file).status, 501);
}

/// A slot of a model with recurrent layers has their state.
#[test]
fn a_slot_has_recurrent_states() {
    const MODEL: &str = "qwen35-f32";
    let directory = Directory::new();
    let (path, model) = (directory.path().to_str().expect("a path"), reference(MODEL));
    let args = ["-m", &model, "--slot-save-path", path, "--draft-max", "0"];
    let file = json!({ "filename": "dog.slot" });
    let mut prompt: Vec<u64> = (0..70).map(|i| i * i * 31 % 300 + 20).collect();
    let server = Server::start(&args);
    let (answer, _) = continued(&server, MODEL, &prompt, 20);
    let saved = server.ok("/slots/0?action=save", &file);
    prompt.extend(answer);
    prompt.extend([33, 44]);
    let expected = continued(&Server::start(&args), MODEL, &prompt, 20);
    assert_eq!(expected.1, 0);
    let server = Server::start(&args);
    let restored = server.ok("/slots/0?action=restore", &file);
    assert_eq!((&restored["n_restored"], &restored["n_read"]), (&json!(80), &saved["n_written"]));
    assert_eq!(continued(&server, MODEL, &prompt, 20), (expected.0, 80));
}

#[test]
fn slots_of_other_tenants_are_closed() {
    let directory = Directory::new();
    let keys = directory.write("keys", "key-a a\nkey-b b\n");
    let saved = directory.path().join("saved");
    fs::create_dir(&saved).expect("a directory");
    let server = Server::start(&["--api-key-file", &keys, "--slot-save-path", saved.to_str().expect("a path")]);
    let post = |key: &str, path: &str, body: &serde_json::Value| {
        let authorization = format!("Bearer {key}");
        server.post_with(path, &[("authorization", authorization.as_str())], body)
    };
    let file = json!({ "filename": "x" });
    assert_eq!(post("key-a", COMPLETIONS, &completion("starling-tiny-q8_0", &"dog ".repeat(40), 2)).status, 200);
    assert_eq!(post("key-b", "/slots/0?action=save", &file).status, 400);
    assert_eq!(post("key-a", "/slots/0?action=save", &file).status, 200);
    assert_eq!(post("key-b", "/slots/0?action=restore", &file).status, 404);
    assert_eq!(post("key-b", COMPLETIONS, &completion("starling-tiny-q8_0", &"cat ".repeat(30), 2)).status, 200);
    // b's first conversation is in b's first slot, and its file of the same name is another
    assert_eq!(post("key-b", "/slots/0?action=save", &file).status, 200);
    let n = |key: &str| {
        let restored = post(key, "/slots/0?action=restore", &file);
        assert_eq!(restored.status, 200, "{}", restored.text());
        let authorization = format!("Bearer {key}");
        let slots = server.send("GET", "/slots", &[("authorization", &authorization)], b"").json();
        slots[0]["n_tokens"].as_u64().expect("a number")
    };
    let (a, b) = (n("key-a"), n("key-b"));
    assert!(a != b && n("key-a") == a, "{a} {b}");
    drop(server);
    // what a tenant may save is bounded; other tenants' files do not count
    let size = fs::read_dir(&saved)
        .expect("a directory")
        .flatten()
        .map(|tenant| fs::metadata(tenant.path().join("x")).expect("a file").len());
    let limit = (size.max().expect("files") * 3 / 2).to_string();
    let args =
        ["--api-key-file", &keys, "--slot-save-path", saved.to_str().expect("a path"), "--slot-save-size", &limit];
    let server = Server::start(&args);
    let save = |filename: &str| {
        let (headers, body) = ([("authorization", "Bearer key-a")], json!({ "filename": filename }));
        server.post_with("/slots/0?action=save", &headers, &body)
    };
    let headers = [("authorization", "Bearer key-a")];
    let prompt = completion("starling-tiny-q8_0", &"dog ".repeat(40), 2);
    assert_eq!(server.post_with(COMPLETIONS, &headers, &prompt).status, 200);
    assert_eq!(save("x").status, 200);
    let refused = save("y");
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (413, &json!("slots_full")));
}
