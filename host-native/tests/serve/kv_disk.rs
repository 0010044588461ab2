//! KV pages on disk: a conversation outlives the process, and whatever is done to the files, answers have the same bytes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::admin_client::{Directory, Managed, completion, continued, reference, text};
use crate::server::Server;

const COMPLETIONS: &str = "/v1/completions";
const PAGE: u64 = 16;

fn start(directory: &Directory, args: &[&str]) -> Managed {
    let path = directory.path().join("kv");
    let disk = ["--kv-disk", path.to_str().expect("a path"), "--ctx-size", "1024"];
    let managed = Managed::start(&[&disk[..], args].concat());
    managed.wait("caches", |caches| caches["kv_disk"]["is_scanned"] == true);
    managed
}

/// A prompt of some hundred tokens.
fn story(n: usize) -> String {
    let words = ["dog", "tree", "little", "Once upon a time", "the", "saw", "and ran to"];
    (0..n).map(|i| words[i * i % 5 + i % 3]).collect::<Vec<_>>().join(" ")
}

fn ask(server: &Server, prompt: &str) -> Value {
    server.ok(COMPLETIONS, &completion("starling-tiny-q8_0", prompt, 24))
}

fn usage(answer: &Value) -> (u64, u64) {
    let usage = &answer["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number");
    (usage["prompt_tokens"].as_u64().expect("a number"), cached)
}

/// Waits until all pages of the prefix cache are on disk.
fn wait_written(managed: &Managed) -> Value {
    managed.wait("caches", |caches| {
        let disk = &caches["kv_disk"];
        let known = caches["caches"].as_array().expect("a list").iter().map(|c| c["cached_bytes"].as_u64()).sum();
        let is_any: Option<u64> = known;
        disk["pages"].as_u64() > Some(0) && disk["queued_bytes"] == 0 && is_any > Some(0)
    })
}

/// Waits until there are `n` pages on disk.
fn wait_pages(managed: &Managed, n: u64) -> Value {
    managed.wait("caches", |caches| caches["kv_disk"]["pages"] == n && caches["kv_disk"]["queued_bytes"] == 0)
}

/// The second turn of a conversation and its answer by a server without disk.
fn conversation() -> (String, String, Value) {
    let server = Server::start(&["--ctx-size", "1024"]);
    // several reads, which may end in any order
    let first = story(330);
    let second = format!("{first}{} And then the dog", text(&ask(&server, &first)));
    let fresh = Server::start(&["--ctx-size", "1024"]);
    let answer = ask(&fresh, &second);
    assert_eq!(usage(&answer).1, 0);
    (first, second, answer)
}

fn files(directory: &Directory) -> Vec<PathBuf> {
    let shards = fs::read_dir(directory.path().join("kv")).expect("a directory");
    let shards = shards.map(|shard| shard.expect("an entry").path()).filter(|path| path.is_dir());
    let mut files: Vec<PathBuf> = shards
        .flat_map(|shard| fs::read_dir(shard).expect("a directory"))
        .map(|file| file.expect("an entry").path())
        .collect();
    files.sort();
    files
}

#[test]
fn a_conversation_outlives_a_killed_server() {
    let (first, second, expected) = conversation();
    let directory = Directory::new();
    let server = start(&directory, &[]);
    let n_first = usage(&ask(&server.server, &first)).0;
    // the last token of the answer was never input
    wait_pages(&server, (n_first + 23) / PAGE);
    // SIGKILL
    drop(server);
    for kind in ["killed", "ended"] {
        let server = start(&directory, &["--workers", "2"]);
        let answer = ask(&server.server, &second);
        assert_eq!(text(&answer), text(&expected), "{kind}");
        let (n_prompt, n_cached) = usage(&answer);
        // the text after the first prompt may have other tokens than the answer, and change the last of the prompt
        let least = if kind == "killed" { n_first - PAGE } else { n_prompt - 1 };
        assert!(n_cached + PAGE > least && n_cached < n_prompt, "{kind}: {n_cached} of {n_prompt} tokens, {n_first}");
        let caches = server.ok("GET", "caches", &json!({}));
        assert_eq!(caches["kv_disk"]["hits"], n_cached / PAGE, "{caches}");
        assert_eq!(caches["kv_disk"]["refused"], json!({}));
        let metrics = server.server.get("/metrics").text();
        assert!(metrics.contains(&format!("starling_kv_disk_hits_total {}\n", n_cached / PAGE)), "{metrics}");
        // writes what is left
        server.server.signal("TERM");
        let Managed { server, .. } = server;
        assert!(server.wait_end().success());
    }
}

#[test]
fn a_key_admits_a_directory_that_others_can_write() {
    use std::os::unix::fs::PermissionsExt;
    let (first, second, expected) = conversation();
    let directory = Directory::new();
    let kv = directory.path().join("kv");
    fs::create_dir(&kv).expect("a directory");
    fs::set_permissions(&kv, fs::Permissions::from_mode(0o777)).expect("permissions");
    let key = |name: &str, digit: &str| {
        let path = directory.path().join(name);
        fs::write(&path, digit.repeat(64)).expect("a file");
        path.to_str().expect("a path").to_owned()
    };
    let (own, other) = (key("own", "5"), key("other", "6"));
    let server = start(&directory, &["--kv-disk-key-file", &own]);
    let n_first = usage(&ask(&server.server, &first)).0;
    wait_pages(&server, (n_first + 23) / PAGE);
    drop(server);
    for (key, is_hit) in [(&own, true), (&other, false)] {
        let server = start(&directory, &["--kv-disk-key-file", key]);
        let answer = ask(&server.server, &second);
        assert_eq!(text(&answer), text(&expected));
        assert_eq!(usage(&answer).1 > 0, is_hit, "{answer}");
        let caches = server.ok("GET", "caches", &json!({}));
        assert_eq!(caches["kv_disk"]["refused"] == json!({}), is_hit, "{caches}");
    }
}

#[test]
fn damaged_and_exchanged_files_change_no_answer() {
    let (first, second, expected) = conversation();
    let directory = Directory::new();
    let fill = || {
        let _ = fs::remove_dir_all(directory.path().join("kv"));
        let server = start(&directory, &[]);
        let n = usage(&ask(&server.server, &first)).0;
        wait_pages(&server, (n + 23) / PAGE);
        drop(server);
        files(&directory)
    };
    let all = |files: &[PathBuf], change: &dyn Fn(&Path)| files.iter().for_each(|file| change(file));
    type Damage<'a> = (&'a str, &'a dyn Fn(&[PathBuf]), bool);
    let damages: [Damage<'_>; 8] = [
        (
            "bit",
            &|files| {
                all(files, &|file| {
                    let mut bytes = fs::read(file).expect("a file");
                    let at = bytes.len() - 100;
                    bytes[at] ^= 4;
                    fs::write(file, bytes).expect("a file");
                })
            },
            true,
        ),
        (
            "truncated",
            &|files| {
                all(files, &|file| {
                    let bytes = fs::read(file).expect("a file");
                    fs::write(file, &bytes[..bytes.len() / 2 + 2100]).expect("a file");
                })
            },
            true,
        ),
        (
            "appended",
            &|files| {
                all(files, &|file| {
                    let bytes = fs::read(file).expect("a file");
                    fs::write(file, [&bytes[..], b"more"].concat()).expect("a file");
                })
            },
            true,
        ),
        ("garbage", &|files| all(files, &|file| fs::write(file, [0xA5; 9000]).expect("a file")), true),
        (
            "exchanged",
            &|files| {
                let contents: Vec<_> = files.iter().map(|file| fs::read(file).expect("a file")).collect();
                for (file, content) in files.iter().zip(contents.iter().cycle().skip(1)) {
                    fs::write(file, content).expect("a file");
                }
            },
            true,
        ),
        (
            "links",
            &|files| {
                all(files, &|file| {
                    let target = file.with_extension("target");
                    fs::rename(file, &target).expect("a file");
                    symlink(&target, file).expect("a link");
                })
            },
            false,
        ),
        (
            "directories",
            &|files| {
                all(files, &|file| {
                    fs::remove_file(file).expect("a file");
                    fs::create_dir(file).expect("a directory");
                })
            },
            false,
        ),
        ("gone", &|files| all(files, &|file| fs::remove_file(file).expect("a file")), false),
    ];
    for (name, damage, is_refused) in damages {
        let files = fill();
        damage(&files);
        let server = start(&directory, &[]);
        let answer = ask(&server.server, &second);
        assert_eq!(text(&answer), text(&expected), "{name}");
        let caches = server.ok("GET", "caches", &json!({}));
        let refused = caches["kv_disk"]["refused"].as_object().expect("an object").len();
        assert_eq!(refused > 0, is_refused, "{name}: {caches}");
        assert_eq!(usage(&answer).1, 0, "{name}: {caches}");
        // what was computed replaces what was refused
        assert_eq!(text(&ask(&server.server, &second)), text(&expected), "{name}");
        if is_refused {
            wait_written(&server);
            let metrics = server.server.get("/metrics").text();
            assert!(metrics.contains("starling_kv_disk_refused_total{reason="), "{metrics}");
        }
    }
}

#[test]
fn a_small_disk_drops_pages_and_serves() {
    let (_, second, expected) = conversation();
    for size in ["0", "1", "20KB"] {
        let directory = Directory::new();
        let server = start(&directory, &["--kv-disk-size", size]);
        for _ in 0..2 {
            assert_eq!(text(&ask(&server.server, &second)), text(&expected), "{size}");
        }
        let caches = server.wait("caches", |caches| {
            let disk = &caches["kv_disk"];
            disk["dropped"].as_u64() > Some(0) || disk["evicted"].as_u64() > Some(0)
        });
        assert!(caches["kv_disk"]["bytes"].as_u64() <= Some(20_000), "{caches}");
        drop(server);
        let server = start(&directory, &["--kv-disk-size", size]);
        assert_eq!(text(&ask(&server.server, &second)), text(&expected), "{size}");
    }
}

#[test]
fn a_directory_that_cannot_be_used_is_an_error() {
    let directory = Directory::new();
    let file = directory.write("file", "");
    let output = crate::server::command(&["serve", "--port", "0", "--kv-disk", &file]).output().expect("the server");
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("kv-disk: KV directory"), "{error}");
}

#[test]
fn tenants_have_pages_of_their_own() {
    let directory = Directory::new();
    let keys = directory.write("api-keys", "key-a a\nkey-b b\n");
    let args = &["--api-key-file", keys.as_str()][..];
    let ask = |managed: &Managed, key: &str, salt: &str| {
        let authorization = format!("Bearer {key}");
        let headers = [("authorization", authorization.as_str()), ("content-type", "application/json")];
        let mut body = completion("starling-tiny-q8_0", &story(90), 8);
        body["cache_salt"] = json!(salt);
        let response = managed.server.send("POST", COMPLETIONS, &headers, body.to_string().as_bytes());
        assert_eq!(response.status, 200, "{}", response.text());
        response.json()
    };
    let server = start(&directory, args);
    let answer = ask(&server, "key-a", "x");
    let n_pages = (usage(&answer).0 + 7) / PAGE;
    wait_pages(&server, n_pages);
    drop(server);
    for (key, salt, is_hit) in [("key-b", "x", false), ("key-a", "y", false), ("key-a", "x", true)] {
        let server = start(&directory, args);
        let again = ask(&server, key, salt);
        assert_eq!((text(&again), usage(&again).1 > 0), (text(&answer), is_hit), "{key} {salt}");
    }
}

#[test]
fn models_share_a_directory_and_are_invalidated_apart() {
    let directory = Directory::new();
    let models = ["a", "b"].map(|name| {
        let file = if name == "a" { "mistral-hd32-f16" } else { "llama-gqa-untied-f16" };
        format!("{name}={}", reference(file))
    });
    let args = ["-m", &models[0], "-m", &models[1]];
    let prompt = "a b c d e f g ".repeat(8);
    let ask = |managed: &Managed, model: &str| managed.server.ok(COMPLETIONS, &completion(model, &prompt, 4));
    let pages = |caches: &Value, i: usize| caches["caches"][i]["disk_pages"].as_u64().expect("a number");
    let server = start(&directory, &args);
    let expected = ["a", "b"].map(|model| ask(&server, model));
    server.wait("caches", |c| c["kv_disk"]["queued_bytes"] == 0 && pages(c, 0) > 0 && pages(c, 1) > 0);
    drop(server);
    let server = start(&directory, &args);
    // models may be loaded at their first request
    for (i, model) in ["a", "b"].into_iter().enumerate() {
        let answer = ask(&server, model);
        assert_eq!(text(&answer), text(&expected[i]));
        assert!(usage(&answer).1 > 0, "{answer}");
    }
    server.ok("POST", "caches/invalidate", &json!({ "model": "a" }));
    server.wait("caches", |c| pages(c, 0) == 0 && c["caches"][0]["cached_bytes"] == 0 && pages(c, 1) > 0);
    let answer = ask(&server, "a");
    assert_eq!((text(&answer), usage(&answer).1), (text(&expected[0]), 0));
    server.ok("POST", "caches/invalidate", &json!({}));
    server.wait("caches", |c| c["kv_disk"]["pages"] == 0 && pages(c, 1) == 0);
}

#[test]
fn a_closed_session_leaves_no_pages() {
    let directory = Directory::new();
    let server = start(&directory, &[]);
    let turn = json!({ "session_id": "s", "prompt": story(60), "max_tokens": 4 });
    server.server.ok("/v1/generate", &turn);
    server.wait("caches", |caches| caches["kv_disk"]["pages"].as_u64() > Some(5));
    server.server.ok("/v1/session/close", &json!({ "session_id": "s" }));
    server.wait("caches", |caches| caches["kv_disk"]["pages"] == 0);
}

/// Pages evicted from a small KV cache come back while another answer streams.
#[test]
fn evicted_pages_come_back_while_others_run() {
    let directory = Directory::new();
    let alone = Server::start(&["--ctx-size", "1024"]);
    let prompts: Vec<String> = (0..4).map(|i| format!("{i} {}", story(60 + i))).collect();
    let expected: Vec<String> = prompts.iter().map(|prompt| text(&ask(&alone, prompt))).collect();
    let server = start(&directory, &["--kv-memory", "600KB", "--max-seqs", "2"]);
    for round in 0..3 {
        std::thread::scope(|scope| {
            let answers = prompts.iter().map(|prompt| scope.spawn(|| ask(&server.server, prompt))).collect::<Vec<_>>();
            for (answer, expected) in answers.into_iter().zip(&expected) {
                assert_eq!(&text(&answer.join().expect("an answer")), expected, "round {round}");
            }
        });
    }
    server.wait("caches", |caches| caches["kv_disk"]["written"].as_u64() > Some(20));
}

/// Workers that fail while pages are read and written: the same answers.
#[test]
fn workers_fail_while_pages_come_back() {
    let directory = Directory::new();
    let alone = Server::start(&["--ctx-size", "1024"]);
    let prompts: Vec<String> = (0..6).map(|i| format!("{i} {}", story(40 + i))).collect();
    let expected: Vec<String> = prompts.iter().map(|prompt| text(&ask(&alone, prompt))).collect();
    for round in 0..4 {
        let server = start(&directory, &["--workers", "2", "--max-seqs", "2", "--draft-max", "0"]);
        for worker in 0..2 {
            let body = json!({ "fault": "panic", "message": format!("fault {round} {worker}"), "after_steps": 3 * round + worker });
            server.ok("POST", &format!("models/starling-tiny-q8_0/workers/{worker}/fail"), &body);
        }
        std::thread::scope(|scope| {
            let answers = prompts.iter().map(|prompt| scope.spawn(|| ask(&server.server, prompt))).collect::<Vec<_>>();
            for (answer, expected) in answers.into_iter().zip(&expected) {
                assert_eq!(&text(&answer.join().expect("an answer")), expected, "round {round}");
            }
        });
        if round > 0 {
            let caches = server.ok("GET", "caches", &json!({}));
            assert!(caches["kv_disk"]["hits"].as_u64() > Some(0), "{caches}");
            assert_eq!(caches["kv_disk"]["refused"], json!({}));
        }
        // SIGKILL
    }
}

#[test]
fn a_model_that_is_not_loaded_is_invalidated_by_name() {
    let directory = Directory::new();
    let model = format!("a={}", reference("mistral-hd32-f16"));
    let server = start(&directory, &["-m", &model]);
    server.server.ok(COMPLETIONS, &completion("a", &"a b c d e f g ".repeat(8), 4));
    server.wait("caches", |caches| caches["kv_disk"]["pages"].as_u64() > Some(0));
    server.ok("POST", "models/a/unload", &json!({}));
    server.wait("caches", |caches| caches["kv_disk"]["queued_bytes"] == 0);
    server.ok("POST", "caches/prefix/invalidate", &json!({ "model": "a" }));
    server.wait("caches", |caches| caches["kv_disk"]["pages"] == 0);
    drop(server);
    let server = start(&directory, &["-m", &model, "--load", "on-demand"]);
    for path in ["caches/prefix/invalidate", "caches/invalidate"] {
        let refused = server.send("POST", path, &json!({ "model": "a" }));
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (409, &json!("model_not_loaded")));
    }
    server.ok("POST", "caches/invalidate", &json!({}));
}

/// With recurrent layers, snapshots of their states are on disk too. Whatever is done to them, answers have the same bytes.
#[test]
fn recurrent_states_outlive_a_killed_server() {
    const MODEL: &str = "qwen35-f32";
    let model = reference(MODEL);
    // snapshots at the ends of prompt and answer only
    let args = ["-m", &model, "--draft-max", "0", "--snapshot-interval", "1024"];
    let ask = |server: &Server, prompt: &[u64]| continued(server, MODEL, prompt, 24);
    let first: Vec<u64> = (0..210).map(|i| i * i * 31 % 300 + 20).collect();
    let directory = Directory::new();
    let server = start(&directory, &args);
    let (answer, _) = ask(&server.server, &first);
    let second: Vec<u64> = first.iter().copied().chain(answer).chain([33, 44, 55]).collect();
    // the last token of the answer was never input
    let n_pages = (first.len() as u64 + 23) / PAGE;
    server.wait("caches", |caches| {
        caches["kv_disk"]["pages"].as_u64() == Some(n_pages + 2) && caches["kv_disk"]["queued_bytes"] == 0
    });
    // SIGKILL
    drop(server);
    let (expected, none) = ask(&Server::start(&[&args[..], &["--ctx-size", "1024"]].concat()), &second);
    assert_eq!(none, 0);
    let whole: Vec<(PathBuf, Vec<u8>)> =
        files(&directory).into_iter().map(|file| (file.clone(), fs::read(file).expect("a file"))).collect();
    let is_snapshot = |bytes: &[u8]| bytes[4096..].starts_with(b"STKVSTAT");
    let snapshots: Vec<_> = whole.iter().filter(|(_, bytes)| is_snapshot(bytes)).collect();
    assert_eq!(whole.len() - snapshots.len(), n_pages as usize);

    let restart = |name: &str, is_hit: bool, refused: &[&str]| {
        let server = start(&directory, &[&args[..], &["--workers", "2"]].concat());
        let (answer, n_cached) = ask(&server.server, &second);
        assert_eq!(answer, expected, "{name}");
        let caches = server.ok("GET", "caches", &json!({}));
        assert_eq!(n_cached, if is_hit { n_pages * PAGE } else { 0 }, "{name}: {caches}");
        let found: Vec<_> = caches["kv_disk"]["refused"].as_object().expect("an object").keys().collect();
        assert_eq!(found, refused, "{name}: {caches}");
        let hits = format!("starling_state_snapshot_hits_total{{model_name=\"{MODEL}\"}} {}\n", u64::from(is_hit));
        let metrics = server.server.wait_metrics(&hits);
        assert!(metrics.contains("starling_recurrent_state_bytes{"), "{metrics}");
        // now from memory
        assert_eq!(ask(&server.server, &second).0, expected, "{name}");
    };
    restart("killed", true, &[]);
    type Damage<'a> = (&'a str, &'a dyn Fn(&Path, &[u8]), &'a [&'a str]);
    let damages: [Damage<'_>; 4] = [
        ("gone", &|file, _| fs::remove_file(file).expect("a file"), &[]),
        (
            "bit",
            &|file, bytes| {
                let mut bytes = bytes.to_vec();
                let at = bytes.len() - 50;
                bytes[at] ^= 1;
                fs::write(file, bytes).expect("a file");
            },
            &["block_checksum"],
        ),
        ("truncated", &|file, bytes| fs::write(file, &bytes[..bytes.len() - 9]).expect("a file"), &["size"]),
        (
            "exchanged",
            &|file, bytes| {
                let other = snapshots.iter().find(|(_, other)| other != bytes).expect("two snapshots");
                fs::write(file, &other.1).expect("a file");
            },
            &["identity"],
        ),
    ];
    for (name, damage, refused) in damages {
        fs::remove_dir_all(directory.path().join("kv")).expect("a directory");
        drop(start(&directory, &args));
        for (file, bytes) in &whole {
            fs::create_dir_all(file.parent().expect("a directory")).expect("a directory");
            fs::write(file, bytes).expect("a file");
        }
        snapshots.iter().for_each(|(file, bytes)| damage(file, bytes));
        restart(name, false, refused);
    }
}
