//! What hubs and servers must not do to the store, and to a server.

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::hub::{COMMIT, Hub, Mode, digest};
use crate::{Home, fixture, model, repository};

/// Larger than two parts of a download, and different by `n`.
fn three_parts(n: u8) -> Vec<u8> {
    let mut content = model();
    content.resize(40 << 20, n);
    content
}

#[test]
fn a_hub_names_no_files_outside_of_the_store() {
    let (home, hub) = (Home::new(), repository());
    let victim = home.0.join("victim.gguf");
    fs::write(&victim, model()).expect("a file");
    let path = victim.to_str().expect("a path");
    let relative = format!("../../{}", "victim.gguf");
    let api = |commit: &str, name: &str, sha256: &str| json!({ "sha": commit, "siblings": [{ "rfilename": name, "size": 5, "lfs": { "sha256": sha256, "size": 5 } }] });
    let good = digest(&model());
    for (value, part) in [
        (api(COMMIT, "m.gguf", path), "expected 64 hexadecimal digits"),
        (api(COMMIT, "m.gguf", &relative), "expected 64 hexadecimal digits"),
        (api(COMMIT, "m.gguf", &good[1..]), "expected 64 hexadecimal digits"),
        (api("../../..", "m.gguf", &good), "expected 40 or 64 hexadecimal digits"),
        (api(COMMIT, "../../../victim.gguf", &good), "found no GGUF model file"),
        (api(COMMIT, path, &good), "found no GGUF model file"),
        (api(COMMIT, ".gguf", &good), "expected letters"),
    ] {
        hub.set_api(value.clone());
        let error = home.error(&hub, &["pull", "hf:o/r"]);
        assert!(error.contains(part), "{value}: {error}");
        assert_eq!(home.files(), [""; 0], "{value}");
    }
    // a name of the store's own files, by a URL
    for name in ["lock", "manifest.json"] {
        let error = home.error(&hub, &["pull", &format!("{}/o/r/resolve/{name}", hub.url())]);
        assert!(error.contains("status 404") || error.contains("expected letters"), "{error}");
    }
    // a manifest that another program wrote
    let directory = home.0.join("store/models/evil");
    fs::create_dir_all(&directory).expect("a directory");
    let file = json!({ "name": "m.gguf", "sha256": path, "size": 5 });
    let manifest = json!({ "name": "evil", "source": "x", "revision": null, "created": 0, "files": [file] });
    fs::write(directory.join("manifest.json"), manifest.to_string()).expect("a file");
    home.error(&hub, &["rm", "evil", "--force"]);
    assert!(fs::read(&victim).expect("the victim") == model());
}

/// A file that changed since its download was interrupted is begun anew: its parts are never put together with the old ones.
#[test]
fn a_download_is_of_one_version() {
    for mode in [Mode::Good, Mode::NoIfRange] {
        let (old, new) = (three_parts(1), three_parts(2));
        let (home, hub) = (Home::new(), Hub::start(vec![("large.gguf".into(), old)]));
        let url = format!("{}/o/r/resolve/large.gguf", hub.url());
        // the first part arrives, then every connection is cut
        hub.set(Mode::Cut { bytes: 15 << 20, times: 1_000_000 });
        let interrupt = || {
            let mut pull = home.command(&hub, &["pull", &url, "--connections", "1"]).spawn().expect("a process");
            let start = Instant::now();
            let is_begun = || {
                let files = fs::read_dir(home.0.join("store/blobs")).into_iter().flatten().flatten();
                let parts = files.map(|entry| entry.path()).find(|path| path.extension().is_some_and(|e| e == "parts"));
                parts.and_then(|path| fs::read_to_string(path).ok()).is_some_and(|parts| parts.starts_with('1'))
            };
            while !is_begun() && pull.try_wait().expect("a process").is_none() {
                assert!(start.elapsed() < Duration::from_secs(60));
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = pull.kill();
            let _ = pull.wait();
            is_begun()
        };
        assert!(interrupt(), "{mode:?}");
        hub.replace("large.gguf", &new);
        hub.set(mode);
        hub.seen();
        home.ok(&hub, &["pull", &url, "--connections", "1"]);
        let blob = home.0.join("store/blobs").join(digest(&new));
        assert!(fs::read(&blob).expect("the new file") == new, "{mode:?}");
        assert!(hub.seen().iter().any(|seen| seen.if_range.is_some()), "{mode:?}");
    }
}

#[test]
fn a_model_that_is_replaced_leaves_nothing() {
    let (home, hub) = (Home::new(), repository());
    let url = format!("{}/o/r/resolve/tiny-Q8_0.gguf", hub.url());
    home.ok(&hub, &["pull", &url]);
    let mut new = model();
    new.extend([7; 100]);
    hub.replace("tiny-Q8_0.gguf", &new);
    home.ok(&hub, &["pull", &url]);
    assert_eq!(home.files(), [digest(&new), "tiny-Q8_0".into()]);
    // a blob that another model has stays
    home.ok(&hub, &["pull", &url, "--name", "other"]);
    hub.replace("tiny-Q8_0.gguf", &model());
    home.ok(&hub, &["pull", &url]);
    let mut expected = vec![digest(&new), digest(&model()), "other".into(), "tiny-Q8_0".into()];
    expected.sort();
    assert_eq!(home.files(), expected);
}

#[test]
fn the_quota_holds_for_urls_whatever_they_say() {
    let hub = repository();
    let url = format!("{}/o/r/resolve/tiny-Q8_0.gguf", hub.url());
    for mode in [Mode::Good, Mode::NoRanges, Mode::NoLength] {
        let home = Home::new();
        hub.set(mode);
        let pull = |quota: &str| {
            let output = home.command(&hub, &["pull", &url]).env("STARLING_STORE_QUOTA", quota).output();
            let output = output.expect("a process");
            (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let (is_done, error) = pull("100KB");
        assert!(!is_done && error.contains("exceed its quota of 100000"), "{mode:?}: {error}");
        let (is_done, told) = pull("1GB");
        assert!(is_done, "{mode:?}: {told}");
        // percents of what is known only
        assert_eq!(told.contains("100 % of "), mode != Mode::NoLength, "{mode:?}: {told}");
        assert!(!told.contains("of 0 B"), "{mode:?}: {told}");
        let list: Value = serde_json::from_str(&home.ok(&hub, &["list", "--json"])).expect("JSON");
        let size = fs::metadata(fixture("reference/llama-k256-q8_0.gguf")).expect("a file").len();
        assert_eq!(list["models"][0]["size"], size, "{mode:?}");
    }
    // a hub that says too little
    let home = Home::new();
    hub.set(Mode::Good);
    let file = json!({ "rfilename": "tiny-Q8_0.gguf", "size": 5, "lfs": null });
    hub.set_api(json!({ "sha": COMMIT, "siblings": [file] }));
    let output =
        home.command(&hub, &["pull", "hf:o/r"]).env("STARLING_STORE_QUOTA", "100KB").output().expect("a process");
    assert!(String::from_utf8_lossy(&output.stderr).contains("exceed its quota"), "{output:?}");
}

#[test]
fn the_query_of_a_url_is_always_sent() {
    let (home, hub) = (Home::new(), repository());
    let url = format!("{}/o/r/resolve/tiny-Q8_0.gguf?token=secret", hub.url());
    for _ in 0..2 {
        assert_eq!(home.ok(&hub, &["pull", &url]), "tiny-Q8_0\n");
        let seen = hub.seen();
        assert!(!seen.is_empty() && seen.iter().all(|seen| seen.path.ends_with("gguf?token=secret")), "{seen:?}");
    }
}

#[test]
fn a_hub_that_stands_still_ends_the_pull() {
    let (home, hub) = (Home::new(), repository());
    hub.set(Mode::Stalled);
    let url = format!("{}/o/r/resolve/tiny-Q8_0.gguf", hub.url());
    let output = home.command(&hub, &["pull", &url]).env("HF_HUB_DOWNLOAD_TIMEOUT", "1").output().expect("a process");
    assert!(!output.status.success());
    assert_eq!(home.files(), [""; 0]);
}

/// More stalled pulls than the server has blocking threads: models load, and supervision goes on.
#[test]
fn stalled_pulls_do_not_stop_a_server() {
    let (home, hub) = (Home::new(), repository());
    hub.set(Mode::Stalled);
    let source = format!("m={}", fixture("reference/llama-k256-q4_k_m.gguf").to_str().expect("a path"));
    let args =
        ["serve", "--port", "0", "--log-level", "off", "--manage-without-keys", "-m", &source, "--load", "on-demand"];
    let server = crate::Running::start(home.command(&hub, &[&args[..], &["--idle-timeout", "0.1"]].concat()));
    let send = |path: &str, body: &Value| -> TcpStream {
        let mut stream = TcpStream::connect(&server.address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
        let body = body.to_string();
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json");
        write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).expect("a request");
        stream
    };
    let url = format!("{}/o/r/resolve/tiny-Q8_0.gguf", hub.url());
    let pulls: Vec<TcpStream> = (0..16).map(|i| send("/api/pull", &json!({ "model": format!("{url}?{i}") }))).collect();
    let (start, mut n_begun) = (Instant::now(), 0);
    while n_begun < 4 {
        n_begun += hub.seen().len();
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(5));
    }
    let read = |mut stream: TcpStream| {
        let mut response = String::new();
        std::io::Read::read_to_string(&mut stream, &mut response).expect("a response");
        response
    };
    let completion = json!({ "model": "m", "prompt": "x", "max_tokens": 1 });
    let response = read(send("/v1/completions", &completion));
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    // supervision unloads the idle model
    let is_unloaded = || {
        let mut stream = TcpStream::connect(&server.address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
        write!(stream, "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").expect("a request");
        read(stream).contains("\"unloaded\"")
    };
    let start = Instant::now();
    while !is_unloaded() {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(pulls);
}
