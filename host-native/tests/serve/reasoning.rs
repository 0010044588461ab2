//! Reasoning of models whose prompt opens it: its field, its budget, and forced calls after it.

use serde_json::{Value, json};

use crate::server::{Server, fixture};

const CHAT: &str = "/v1/chat/completions";

fn ask(more: &Value) -> Value {
    let mut body =
        json!({ "messages": [{ "role": "user", "content": "How are you?" }], "max_tokens": 120, "temperature": 0 });
    more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
    body
}

/// The response; checks that the parts of the stream add up to it.
fn answer(server: &Server, more: &Value) -> Value {
    let mut body = ask(more);
    let response = server.ok(CHAT, &body);
    (body["stream"], body["stream_options"]) = (json!(true), json!({ "include_usage": true }));
    let chunks = server.post(CHAT, &body).chunks();
    for field in ["content", "reasoning_content"] {
        let parts = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][field].as_str());
        let whole = response["choices"][0]["message"][field].as_str().unwrap_or_default();
        assert_eq!(parts.collect::<String>(), whole, "{field}");
    }
    let details = "completion_tokens_details";
    assert_eq!(chunks.last().expect("chunks")["usage"][details], response["usage"][details]);
    response
}

#[test]
fn reasoning_has_its_field_and_its_budget() {
    let server = Server::start(&["--chat-template", &fixture("chat/reasoning-calls.jinja")]);
    // the prompt opens the reasoning, and this model does not end it
    let free = answer(&server, &json!({}));
    let message = &free["choices"][0]["message"];
    let text = message["reasoning_content"].as_str().expect("reasoning");
    assert_eq!(message["content"], "", "{free}");
    let n = free["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().expect("a count");
    let n_end = u64::from(free["choices"][0]["finish_reason"] == "stop");
    assert_eq!(free["usage"]["completion_tokens"], n + n_end, "{free}");
    let content = answer(&server, &json!({ "reasoning_format": "none" }));
    assert!(content["choices"][0]["message"]["content"].as_str().expect("content").contains(text));
    for budget in [0, 5] {
        let limited = answer(&server, &json!({ "thinking_budget_tokens": budget }));
        let message = &limited["choices"][0]["message"];
        let start = message["reasoning_content"].as_str().unwrap_or_default();
        assert!(text.starts_with(start) && !message["content"].as_str().expect("content").is_empty(), "{limited}");
        let n = limited["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().expect("a count");
        // with the tokens of the marker
        assert!((budget + 1..budget + 10).contains(&n), "{limited}");
    }
    let off = answer(&server, &json!({ "reasoning_effort": "none" }));
    assert!(off["choices"][0]["message"].get("reasoning_content").is_none(), "{off}");
    let wrong = server.post(CHAT, &ask(&json!({ "reasoning_format": "aloud" })));
    assert_eq!((wrong.status, &wrong.json()["error"]["param"]), (400, &json!("reasoning_format")));
}

#[test]
fn forced_calls_and_schemas_come_after_the_reasoning() {
    let server = Server::start(&["--chat-template", &fixture("chat/reasoning-calls.jinja")]);
    let city = json!({ "type": "object", "properties": { "city": { "enum": ["Oslo", "Rome"] } }, "required": ["city"],
        "additionalProperties": false });
    let tools = json!([{ "type": "function", "function": { "name": "weather_of", "parameters": city } }]);
    for name in ["auto", "hermes", "qwen3-coder", "lfm2"] {
        let forced = json!({ "tools": tools, "tool_choice": "required", "parallel_tool_calls": false,
            "thinking_budget_tokens": 3, "tool_call_format": name });
        let response = answer(&server, &forced);
        let choice = &response["choices"][0];
        let call = &choice["message"]["tool_calls"][0]["function"];
        assert_eq!(
            (&call["name"], &choice["finish_reason"]),
            (&json!("weather_of"), &json!("tool_calls")),
            "{response}"
        );
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().expect("a text")).expect("JSON");
        assert!(["Oslo", "Rome"].contains(&arguments["city"].as_str().expect("a city")), "{response}");
        assert_eq!(choice["message"]["content"], Value::Null, "{response}");
    }
    let schema = json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "c", "schema": city } },
        "thinking_budget_tokens": 2 });
    let response = answer(&server, &schema);
    let content = response["choices"][0]["message"]["content"].as_str().expect("content");
    assert!(serde_json::from_str::<Value>(content).expect("JSON")["city"].is_string(), "{response}");
}
