//! Who may change the models of the server, and which tenant a key is.

use serde_json::{Value, json};

use crate::admin_client::{Directory, KEY, Managed, completion, reference};
use crate::server::Server;

const COMPLETIONS: &str = "/v1/completions";

/// Requests that change models: method, path, body. The model is `m`, in a file.
fn changes() -> Vec<(&'static str, &'static str, Value)> {
    vec![
        ("POST", "/api/pull", json!({ "model": "http://127.0.0.1:9/secret", "stream": false })),
        ("POST", "/api/copy", json!({ "source": "m", "destination": "n" })),
        ("POST", "/api/create", json!({ "model": "n", "from": "m", "stream": false })),
        ("DELETE", "/api/delete", json!({ "model": "m" })),
    ]
}

/// Requests that unload `m`.
fn unloads() -> Vec<(&'static str, &'static str, Value)> {
    vec![
        ("POST", "/models/unload", json!({ "model": "m" })),
        ("POST", "/api/chat", json!({ "model": "m", "messages": [], "keep_alive": 0 })),
        ("POST", "/api/generate", json!({ "model": "m", "keep_alive": 0 })),
    ]
}

#[track_caller]
fn refused(server: &Server, requests: Vec<(&str, &str, Value)>, headers: &[(&str, &str)]) {
    for (method, path, body) in requests {
        let headers: Vec<_> = [("content-type", "application/json")].iter().chain(headers).copied().collect();
        let response = server.send(method, path, &headers, body.to_string().as_bytes());
        assert_eq!(response.status, 403, "{method} {path} {headers:?}: {}", response.text());
    }
    assert_eq!(server.get("/health").json()["model_loaded"], true);
}

fn source() -> String {
    format!("m={}", reference("llama-k256-q4_k_m"))
}

#[test]
fn a_proxy_or_a_page_makes_nobody_a_manager() {
    let plain = Server::start(&["-m", &source()]);
    refused(&plain, changes(), &[]);
    let server = Server::start(&["-m", &source(), "--manage-without-keys", "--cors-origins", "https://a.example"]);
    for header in [
        ("x-forwarded-for", "10.0.0.1"),
        ("forwarded", "for=10.0.0.1"),
        ("via", "1.1 proxy"),
        ("x-real-ip", "10.0.0.1"),
        ("origin", "https://a.example"),
    ] {
        refused(&server, changes().into_iter().chain(unloads()).collect(), &[header]);
    }
    // the page of the server itself, and programs on this machine
    let own = format!("http://{}", server.address);
    let copy = json!({ "source": "m", "destination": "n" });
    assert_eq!(server.post_with("/api/copy", &[("origin", &own)], &copy).status, 200);
    let delete = server.send("DELETE", "/api/delete", &[("content-type", "application/json")], br#"{"model": "n"}"#);
    assert_eq!(delete.status, 200, "{}", delete.text());
}

#[test]
fn clients_unload_no_model_of_others() {
    let keyed = Server::start(&["-m", &source(), "--pin", "--api-key", "sk-a"]);
    let key = [("authorization", "Bearer sk-a")];
    refused(&keyed, unloads(), &key);
    let unpinned = Server::start(&["-m", &source(), "--api-key", "sk-a"]);
    let load = ("POST", "/models/load", json!({ "model": "m" }));
    refused(&unpinned, changes().into_iter().chain(unloads()).chain([load]).collect(), &key);
    // without keys, programs on this machine unload models, but not pinned ones
    let pinned = Server::start(&["-m", &source(), "--pin"]);
    refused(&pinned, unloads(), &[]);
    let open = Server::start(&["-m", &source()]);
    assert_eq!(open.post("/models/unload", &json!({ "model": "m" })).status, 200);
    open.ok(COMPLETIONS, &completion("m", "x", 1));
}

#[test]
fn a_query_loads_no_model_for_a_client_with_a_key() {
    let key = [("authorization", "Bearer sk-a")];
    let server = Server::start(&["-m", &source(), "--load", "on-demand", "--autoload=false", "--api-key", "sk-a"]);
    let ask = |query: &str| {
        let path = format!("{COMPLETIONS}{query}");
        server.post_with(&path, &key, &completion("m", "x", 1)).status
    };
    assert_eq!((ask(""), ask("?autoload=true")), (409, 409));
}

#[test]
fn an_administrators_key_is_none_on_the_public_listener() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let mut managed = Managed::start(&["-m", &source(), "--pin", "--admin-listen", &free.to_string()]);
    let key = format!("Bearer {KEY}");
    refused(&managed.server, changes().into_iter().chain(unloads()).collect(), &[("authorization", &key)]);
    // with and without the key: nothing tells that it is one
    for headers in [&[][..], &[("authorization", key.as_str())]] {
        assert_eq!(managed.server.send("GET", "/admin/models", headers, b"").status, 404);
    }
    managed.server.address = free.to_string();
    assert_eq!(managed.send_to("POST", "/api/copy", &json!({ "source": "m", "destination": "n" })).status, 200);
    assert_eq!(managed.send_to("POST", "/models/unload", &json!({ "model": "m" })).status, 200);
    assert_eq!(managed.server.post("/models/load", &json!({ "model": "m" })).status, 403);
}

/// The documented rotation of a key without a name: B's line is added, A's is removed, and B has A's line.
#[test]
fn a_rotated_key_is_not_the_tenant_before_it() {
    let directory = Directory::new();
    let (keys, state) = (directory.write("keys-of-clients", "key-a\n"), directory.path().join("state"));
    let state = state.to_str().expect("a path");
    let managed = Managed::start(&["--api-key-file", &keys, "--state-dir", state]);
    let send = |key: &str, method: &str, path: &str, body: &Value| {
        let bearer = format!("Bearer {key}");
        let headers = [("authorization", bearer.as_str()), ("content-type", "application/json")];
        managed.server.send(method, path, &headers, body.to_string().as_bytes())
    };
    let body = json!({ "messages": [{ "role": "user", "content": "secret" }], "max_tokens": 2, "store": true });
    let id = send("key-a", "POST", "/v1/chat/completions", &body).json()["id"].as_str().expect("an id").to_string();
    let path = format!("/v1/chat/completions/{id}");
    for lines in ["key-a\nkey-b\n", "key-b\n"] {
        directory.write("keys-of-clients", lines);
        managed.ok("POST", "reload", &json!({}));
        assert_eq!(send("key-b", "GET", &path, &json!({})).status, 404, "{lines:?}");
    }
    directory.write("keys-of-clients", "# key-b has gone\nkey-c\nkey-a\n");
    managed.ok("POST", "reload", &json!({}));
    assert_eq!(send("key-a", "GET", &path, &json!({})).status, 200);
}
