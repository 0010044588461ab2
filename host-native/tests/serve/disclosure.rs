//! What a server does not tell: paths to clients, names of models to strangers.

use std::fs;

use serde_json::json;

use crate::admin_client::{Directory, Managed, completion};
use crate::server::Server;

#[test]
fn no_client_learns_a_path_of_the_server() {
    let directory = Directory::new();
    let path = directory.path().to_str().expect("a path").to_string();
    let model = directory.model("llama-k256-q4_k_m", "secret-file.gguf");
    let saved = directory.path().join("slots");
    fs::create_dir(&saved).expect("a directory");
    directory.write("broken.gguf", b"GGUF no model");
    let (good, broken, none) =
        (format!("good={model}"), format!("broken={path}/broken.gguf"), format!("none={path}/none.gguf"));
    let models = ["-m", &good, "-m", &broken, "-m", &none, "--load", "on-demand"];
    let managed = Managed::start(&[&models[..], &["--slot-save-path", saved.to_str().expect("a path")]].concat());
    let server = &managed.server;
    let mut seen = Vec::new();
    for (name, status) in [("good", 200), ("broken", 500), ("none", 500)] {
        for (path, body) in [
            ("/v1/completions", completion(name, "x", 1)),
            ("/api/show", json!({ "model": name })),
            ("/api/chat", json!({ "model": name, "messages": [] })),
        ] {
            let response = server.post(path, &body);
            assert_eq!(response.status, status, "{path} {name}: {}", response.text());
            seen.push(response.text());
        }
    }
    directory.write("slots/damaged", b"no slot");
    seen.push(server.post("/slots/0?action=restore", &json!({ "filename": "damaged", "model": "good" })).text());
    let paths = ["/v1/models", "/v1/models/broken", "/props", "/info", "/api/tags", "/api/ps", "/health", "/readyz"];
    seen.extend(paths.map(|path| server.get(path).text()));
    for text in seen {
        assert!(!text.contains(&path) && !text.contains("secret-file"), "{text}");
    }
    let list = server.get("/v1/models").json();
    let error = list["data"][2]["status"]["error"].as_str().expect("an error").to_string();
    assert!(error.contains("model `none` does not load") && error.contains("no such file"), "{error}");
    // administrators do
    let told = managed.ok("GET", "models/none", &json!({}));
    assert!(told["error"].as_str().expect("an error").contains(&path), "{told}");
    let told = managed.send("POST", "models/broken/load", &json!({})).text();
    assert!(told.contains(&path), "{told}");
}

#[test]
fn probes_name_no_model_without_a_key() {
    for (args, is_named) in [(&["--api-key", "sk-a"][..], false), (&[], true)] {
        let server = Server::start(&[&["--model-name", "secret-model"][..], args].concat());
        for path in ["/health", "/healthz", "/livez", "/readyz", "/ready"] {
            let response = server.get(path);
            let has_models = matches!(path, "/health" | "/readyz" | "/ready");
            assert_eq!(
                (response.status, response.text().contains("secret-model")),
                (200, is_named && has_models),
                "{path}"
            );
        }
        assert_eq!(server.get("/health").json()["model_loaded"], true);
    }
}

#[test]
fn pages_have_a_policy() {
    let server = Server::start(&[]);
    for path in ["/", "/docs"] {
        let response = server.get(path);
        let policy = response.header("content-security-policy").unwrap_or_else(|| panic!("{path}"));
        assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{path}: {policy}");
    }
}
