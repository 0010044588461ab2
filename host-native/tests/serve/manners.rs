//! What someone meets who uses the server for the first time.

use serde_json::{Value, json};

use super::server::Server;

const CHAT: &str = "/v1/chat/completions";

fn ask() -> Value {
    json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 4, "seed": 1 })
}

fn with(field: &str, value: Value) -> Value {
    let mut body = ask();
    body[field] = value;
    body
}

#[test]
fn unknown_fields_are_named() {
    let server = Server::start(&[]);
    let response = server.post(CHAT, &ask());
    assert_eq!((response.status, response.header("x-starling-ignored-fields")), (200, None));
    // fields of OpenAI's API that change nothing here
    let mut body = with("store", json!(false));
    body["metadata"] = json!({ "a": "b" });
    assert_eq!(server.post(CHAT, &body).header("x-starling-ignored-fields"), None);
    let mut body = with("mirostat", json!(2));
    body["n_predict"] = json!(4);
    let response = server.post(CHAT, &body);
    assert_eq!((response.status, response.header("x-starling-ignored-fields")), (200, Some("mirostat, n_predict")));
    let response = server.post(CHAT, &with("temprature", json!(0)));
    let error = &response.json()["error"];
    assert_eq!(
        (response.status, &error["code"], &error["param"]),
        (400, &json!("unknown_field"), &json!("temprature"))
    );
    assert!(error["message"].as_str().expect("a message").contains("did you mean temperature?"), "{error}");
    let strict = Server::start(&["--refuse-unknown-fields"]);
    assert_eq!(strict.post(CHAT, &with("mirostat", json!(2))).status, 400);
    assert_eq!(strict.post(CHAT, &with("store", json!(false))).status, 200);
}

#[test]
fn pages_are_open_and_data_is_not() {
    let server = Server::start(&["--api-key", "sesame"]);
    for page in ["/", "/docs", "/openapi.json", "/assets/page.js"] {
        assert_eq!(server.get(page).status, 200, "{page}");
    }
    for none in ["/assets/", "/assets/none.js", "/assets/backend-server.js", "/assets/..%2findex.html"] {
        assert_ne!(server.get(none).status, 200, "{none}");
    }
    for data in ["/v1/models", "/server/stats", "/slots"] {
        assert_eq!(server.get(data).status, 401, "{data}");
    }
    assert_eq!(server.send("POST", "/", &[], b"").status, 401);
    assert_eq!(server.post(CHAT, &ask()).status, 401);
    let page = server.get("/").text();
    assert!(page.contains("API key") && server.get("/assets/backend.js").text().contains("sessionStorage"), "{page}");
    // nothing of other origins, and nothing of others' pages around it
    let response = server.get("/");
    let policy = response.header("content-security-policy").expect("a policy");
    assert!(policy.starts_with("default-src 'none'; script-src 'self';") && policy.contains("frame-ancestors 'none'"));
    // a browser that has a file is told so
    let tag = response.header("etag").expect("a tag").to_string();
    let again = server.send("GET", "/", &[("if-none-match", &tag)], b"");
    assert_eq!((again.status, again.text().len()), (304, 0));
}

#[test]
fn defaults_of_a_chat_are_told() {
    let server = Server::start(&["--temperature", "0.5"]);
    let sampling = &server.get("/v1/models").json()["data"][0]["chat_sampling"];
    assert_eq!((&sampling["temperature"], &sampling["top_k"]), (&json!(0.5), &json!(40)), "{sampling}");
}
