//! Signed requests and responses. The signatures are made here, by RFC 9421, with no code of the server.

use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::admin_client::Directory;
use crate::server::{Response, Server};

const SECRET: &str = "0123456789abcdef0123456789abcdef";
const PATH: &str = "/v1/completions";

fn mac(base: &str) -> String {
    let mac = Hmac::<Sha256>::new_from_slice(SECRET.as_bytes()).expect("a key").chain_update(base).finalize();
    STANDARD.encode(mac.into_bytes())
}

fn digest(body: &[u8]) -> String {
    format!("sha-256=:{}:", STANDARD.encode(Sha256::digest(body)))
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a time").as_secs()
}

/// The headers of a signed `POST`.
fn headers(body: &[u8], created: u64, nonce: &str, key: &str) -> [(&'static str, String); 4] {
    headers_to(PATH, body, created, nonce, key)
}

fn headers_to(path: &str, body: &[u8], created: u64, nonce: &str, key: &str) -> [(&'static str, String); 4] {
    let digest = digest(body);
    let input =
        format!("(\"@method\" \"@path\" \"content-digest\");created={created};nonce=\"{nonce}\";keyid=\"{key}\"");
    let base =
        format!("\"@method\": POST\n\"@path\": {path}\n\"content-digest\": {digest}\n\"@signature-params\": {input}");
    [
        ("content-type", "application/json".into()),
        ("content-digest", digest),
        ("signature-input", format!("sig1={input}")),
        ("signature", format!("sig1=:{}:", mac(&base))),
    ]
}

fn send(server: &Server, headers: &[(&'static str, String)], body: &[u8]) -> Response {
    send_to(server, PATH, headers, body)
}

fn send_to(server: &Server, path: &str, headers: &[(&'static str, String)], body: &[u8]) -> Response {
    let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
    server.send("POST", path, &headers, body)
}

/// Checks the signature of a response to a request with this signature.
fn check_response(response: &Response, of_request: &str, is_stream: bool) {
    check_response_of(PATH, response, of_request, is_stream);
}

fn check_response_of(path: &str, response: &Response, of_request: &str, is_stream: bool) {
    let header = |name: &str| response.header(name).unwrap_or_else(|| panic!("{name}: {response:?}"));
    let input = header("signature-input").strip_prefix("starling=").expect("the label");
    let covered = if is_stream { "" } else { " \"content-digest\"" };
    let start =
        format!("(\"@status\" \"content-type\"{covered} \"@method\";req \"@path\";req \"signature\";req);created=");
    assert!(input.starts_with(&start), "{input}");
    let mut base = format!("\"@status\": {}\n\"content-type\": {}\n", response.status, header("content-type"));
    if !is_stream {
        assert_eq!(header("content-digest"), digest(&response.body));
        base += &format!("\"content-digest\": {}\n", header("content-digest"));
    }
    base += &format!("\"@method\";req: POST\n\"@path\";req: {path}\n\"signature\";req: {of_request}\n");
    base += &format!("\"@signature-params\": {input}");
    assert_eq!(header("signature"), format!("starling=:{}:", mac(&base)));
}

#[test]
fn a_signed_request_is_answered_once_and_its_response_is_signed() {
    let directory = Directory::new();
    let keys = directory.0.join("keys").to_str().expect("a path").to_string();
    fs::write(&keys, format!("hmac:k1:{SECRET} alice\nplain-key bob\n")).expect("a file");
    let server = Server::start(&["--api-key-file", &keys, "--sign-responses", "--signature-window", "60"]);
    // what was signed in the second of the start may have been seen before
    std::thread::sleep(Duration::from_millis(1100));
    let body = json!({ "prompt": "Once", "max_tokens": 4, "seed": 1 }).to_string().into_bytes();
    let code = |response: &Response| response.json()["error"]["code"].clone();
    let good = headers(&body, now(), "n1", "k1");
    let response = send(&server, &good, &body);
    assert_eq!(response.status, 200, "{}", response.text());
    check_response(&response, &good[3].1, false);
    // the same text as with a plain key, whose response is not signed
    let plain =
        server.post_with(PATH, &[("authorization", "Bearer plain-key")], &serde_json::from_slice(&body).expect("JSON"));
    let text = |response: &Response| response.json()["choices"].clone();
    assert_eq!((text(&plain), plain.header("signature")), (text(&response), None));
    // compressed: the digest is of the bytes that are sent
    let mut zipped = headers(&body, now(), "n2", "k1").to_vec();
    zipped.push(("accept-encoding", "gzip".into()));
    let response = send(&server, &zipped, &body);
    check_response(&response, &zipped[3].1, false);
    // streamed
    let mut stream: Value = serde_json::from_slice(&body).expect("JSON");
    stream["stream"] = json!(true);
    let stream = stream.to_string().into_bytes();
    let streamed = headers(&stream, now(), "n3", "k1");
    check_response(&send(&server, &streamed, &stream), &streamed[3].1, true);

    // each line of Ollama's stream leaves when it is made, so a digest cannot be in the head
    let ollama = json!({ "model": "starling-tiny-q8_0", "prompt": "Once", "raw": true }).to_string().into_bytes();
    let streamed = headers_to("/api/generate", &ollama, now(), "n31", "k1");
    let response = send_to(&server, "/api/generate", &streamed, &ollama);
    assert!(response.text().lines().count() > 2, "{}", response.text());
    check_response_of("/api/generate", &response, &streamed[3].1, true);

    let replay = send(&server, &good, &body);
    assert_eq!((replay.status, code(&replay)), (401, json!("invalid_signature")));
    let other = json!({ "prompt": "Twice", "max_tokens": 4, "seed": 1 }).to_string().into_bytes();
    let changed = send(&server, &headers(&body, now(), "n4", "k1"), &other);
    assert_eq!((changed.status, code(&changed)), (401, json!("invalid_digest")));
    for (name, headers) in [
        ("an old one", headers(&body, now() - 70, "n5", "k1")),
        ("an unknown key", headers(&body, now(), "n6", "k2")),
        ("a plain key's name", headers(&body, now(), "n7", "plain-key")),
    ] {
        let response = send(&server, &headers, &body);
        assert_eq!((response.status, code(&response)), (401, json!("invalid_signature")), "{name}");
    }
    let mut forged = headers(&body, now(), "n8", "k1");
    forged[3].1 = forged[3].1.replace("sig1=:", "sig1=:AA");
    assert_eq!(send(&server, &forged, &body).status, 401);
    // an invalid signature uses up no nonce
    assert_eq!(send(&server, &headers(&body, now(), "n8", "k1"), &body).status, 200);
    // keys are rotated without a restart
    fs::write(&keys, format!("hmac:k2:{SECRET} alice\n")).expect("a file");
    server.signal("HUP");
    let start = SystemTime::now();
    let mut n = 0;
    while send(&server, &headers(&body, now(), &format!("r{n}"), "k2"), &body).status != 200 {
        assert!(start.elapsed().expect("a time") < crate::server::LIMIT);
        n += 1;
    }
    assert_eq!(send(&server, &headers(&body, now(), "n9", "k1"), &body).status, 401);
}

#[test]
fn signatures_may_be_required() {
    let directory = Directory::new();
    let keys = directory.0.join("keys").to_str().expect("a path").to_string();
    fs::write(&keys, format!("hmac:k1:{SECRET} alice\nplain-key bob\n")).expect("a file");
    let server = Server::start(&["--api-key-file", &keys, "--require-signature"]);
    let refused = server.post_with(PATH, &[("authorization", "Bearer plain-key")], &json!({ "prompt": "x" }));
    assert_eq!((refused.status, refused.json()["error"]["code"].clone()), (401, json!("no_signature")));
    assert_eq!(server.get("/livez").status, 200);
    std::thread::sleep(Duration::from_millis(1100));
    let body = json!({ "prompt": "Once", "max_tokens": 4 }).to_string().into_bytes();
    assert_eq!(send(&server, &headers(&body, now(), "n1", "k1"), &body).status, 200);
}
