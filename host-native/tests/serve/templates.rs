//! What chat templates are given: variables and tools of requests, and templates that do not parse.

use serde_json::{Value, json};
use starling::quant::Dtype;
use starling_tests::architecture::recipe;

use crate::admin_client::Directory;
use crate::server::{Server, fixture};

const CHAT: &str = "/v1/chat/completions";
const INPUT_TOKENS: &str = "/v1/chat/completions/input_tokens";
/// The endpoints that render a chat with `chat_template_kwargs`.
const RENDERING: [&str; 4] = [CHAT, INPUT_TOKENS, "/v1/apply-template", "/apply-template"];

fn hello(more: &Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 1, "seed": 1 });
    more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
    body
}

#[test]
fn variables_that_the_server_sets_are_refused() {
    let server = Server::start(&[]);
    for (name, value) in [
        ("messages", json!([{ "role": "evil", "content": "x" }])),
        ("tools", json!([])),
        ("bos_token", json!("<|im_start|>")),
        ("eos_token", json!("x")),
        ("add_generation_prompt", json!(false)),
        ("continue_final_message", json!(true)),
        ("raise_exception", json!("x")),
        ("strftime_now", json!("x")),
        ("namespace", json!({})),
    ] {
        for path in RENDERING {
            let response = server.post(path, &hello(&json!({ "chat_template_kwargs": { name: value } })));
            let error = response.json()["error"].clone();
            let param = json!(format!("chat_template_kwargs.{name}"));
            assert_eq!((response.status, &error["param"]), (400, &param), "{path}: {error}");
        }
    }
    for path in RENDERING {
        let kwargs = json!({ "chat_template_kwargs": { "enable_thinking": false, "documents": [{ "text": "x" }] } });
        assert_eq!(server.post(path, &hello(&kwargs)).status, 200, "{path}");
    }
}

/// Counts and previews are of the prompt that the same request computes.
#[test]
fn previews_go_the_way_of_chats() {
    let template = fixture("chat/reasoning-calls.jinja");
    let server = Server::start(&["--chat-template", &template]);
    let tools = json!([{ "type": "function", "function": { "name": "f", "description": "g", "parameters": { "type": "object", "properties": {} } } }]);
    for more in [
        json!({}),
        json!({ "chat_template_kwargs": { "enable_thinking": false } }),
        json!({ "reasoning_effort": "none" }),
        json!({ "tools": tools }),
        json!({ "tools": tools, "tool_choice": "none" }),
        json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] }] }),
        json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }], "continue_final_message": true }),
    ] {
        let body = hello(&more);
        let n = server.ok(CHAT, &body)["usage"]["prompt_tokens"].as_u64().expect("a number") as usize;
        assert_eq!(server.ok(INPUT_TOKENS, &body)["input_tokens"], n, "{more}");
        for path in ["/v1/apply-template", "/apply-template"] {
            let tokens = server.ok(path, &body)["tokens"].as_array().map(Vec::len);
            assert_eq!(tokens, Some(n), "{path} {more}");
        }
    }
    // a mistake is refused by all of them
    for more in [json!({ "tool_choice": "required" }), json!({ "tools": [{}] })] {
        for path in RENDERING {
            assert_eq!(server.post(path, &hello(&more)).status, 400, "{path} {more}");
        }
    }
}

#[test]
fn tools_are_filled_for_templates_that_need_it() {
    let directory = Directory::new();
    let needs = "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}\
                 {% for k in t.function.parameters.properties %}{{ k }}{% endfor %}{% endfor %}{{ messages[0].content }}";
    let template = directory.write("needs.jinja", needs);
    let server = Server::start(&["--chat-template", &template]);
    let preview = |tools: Value| server.ok("/v1/apply-template", &hello(&json!({ "tools": tools })))["prompt"].clone();
    let function = |function: Value| json!([{ "type": "function", "function": function }]);
    assert_eq!(preview(function(json!({ "name": "f" }))), "f: Hello");
    let with =
        json!({ "name": "f", "description": "d ", "parameters": { "type": "object", "properties": { "k": {} } } });
    assert_eq!(preview(function(with)), "f: d kHello");
    let body = hello(&json!({ "tools": function(json!({ "name": "f", "parameters": null })) }));
    assert_eq!(server.post(CHAT, &body).status, 200);
    // a template that prints tools as they are gets them as they are
    let prints = directory.write("prints.jinja", "{{ tools | tojson }}{{ messages[0].content }}");
    let server = Server::start(&["--chat-template", &prints]);
    let shown = server.ok("/v1/apply-template", &hello(&json!({ "tools": function(json!({ "name": "f" })) })));
    assert_eq!(shown["prompt"], "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]Hello");
}

#[test]
fn a_template_that_does_not_parse_blocks_chats_only() {
    let directory = Directory::new();
    let mut recipe = recipe("llama");
    let broken = "{% for m in messages %}{{ m.content }}\n{% if %}{% endfor %}";
    recipe.metadata.push(("tokenizer.chat_template".into(), "STRING".into(), broken.into()));
    let path = directory.write("broken.gguf", recipe.file(Dtype::F32));
    let server = Server::start(&["-m", &path]);
    assert_eq!(server.post("/v1/completions", &json!({ "prompt": "a", "max_tokens": 1 })).status, 200);
    assert_eq!(server.post("/v1/tokenize", &json!({ "text": "a" })).status, 200);
    for path in RENDERING {
        let response = server.post(path, &hello(&json!({})));
        let error = response.json()["error"].clone();
        assert_eq!((response.status, &error["code"]), (400, &json!("chat_template")), "{path}: {error}");
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains("line 2") && message.contains("--chat-template"), "{message}");
    }
    // a template that is asked for is checked at the start
    let wanted = directory.write("broken.jinja", broken);
    let mut command = crate::server::command(&["serve", "--port", "0", "--chat-template", &wanted]);
    assert!(!command.output().expect("an end").status.success());
}

#[test]
fn what_is_not_enforced_is_named() {
    let server = Server::start(&[]);
    let schema = json!({ "type": "object", "properties": { "a": { "type": "string", "format": "phone", "maxLength": 3 } },
        "required": ["a"], "additionalProperties": false, "propertyNames": { "type": "string" } });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
    for stream in [false, true] {
        let body = hello(&json!({ "response_format": format, "max_tokens": 40, "stream": stream }));
        let response = server.post(CHAT, &body);
        assert_eq!(
            (response.status, response.header("x-starling-unenforced")),
            (200, Some("format=phone")),
            "{stream}"
        );
    }
    let body = json!({ "prompt": "a", "max_tokens": 1, "json_schema": { "type": "integer", "format": "int32" } });
    let response = server.post("/v1/completions", &body);
    assert_eq!((response.status, response.header("x-starling-unenforced")), (200, Some("format=int32")));
    let response = server.post(CHAT, &hello(&json!({ "json_schema": { "type": "string", "format": "date" } })));
    assert_eq!((response.status, response.header("x-starling-unenforced")), (200, None));
    // a field of another endpoint is ignored and named
    let response = server.post("/v1/responses", &json!({ "input": "a", "max_output_tokens": 1, "top_k": 3 }));
    assert_eq!((response.status, response.header("x-starling-ignored-fields")), (200, Some("top_k")));
    let response = server.post("/v1/responses", &json!({ "input": "a", "top_pp": 3 }));
    assert_eq!(response.status, 400);
}
