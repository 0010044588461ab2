use serde_json::json;

use super::*;
use crate::parse::ParseBody;

/// A request with these fields beside `model` and `max_tokens`.
fn chat(fields: Value) -> Result<(ChatCompletionRequest, Vec<String>), ApiError> {
    let mut body = json!({ "model": "m", "max_tokens": 9, "messages": [{ "role": "user", "content": "Hi" }] });
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    MessagesRequest::parse_body(body.to_string().as_bytes())?.into_chat()
}

fn same(messages: &[Json], expected: Value) {
    let expected: Vec<Json> = serde_json::from_value(expected).expect("messages");
    assert_eq!(messages, expected);
}

#[test]
fn an_agent_loop_becomes_chat_messages() {
    let (request, skipped) = chat(json!({
        "system": [
            { "type": "text", "text": "x-anthropic-billing-header: cch=1;" },
            { "type": "text", "text": "Be brief.", "cache_control": { "type": "ephemeral" } },
        ],
        "messages": [
            { "role": "user", "content": [{ "type": "text", "text": "Weather in Oslo?" }] },
            { "role": "assistant", "content": [
                { "type": "thinking", "thinking": "Look it up.", "signature": "x" },
                { "type": "redacted_thinking", "data": "x" },
                { "type": "text", "text": "One moment." },
                { "type": "tool_use", "id": "toolu_1", "name": "weather", "input": { "city": "Oslo" } },
            ] },
            { "role": "user", "content": [
                { "type": "tool_result", "tool_use_id": "toolu_1", "content": [{ "type": "text", "text": "4 °C" }] },
                { "type": "tool_result", "tool_use_id": "toolu_2", "is_error": true },
                { "type": "tool_result", "tool_use_id": "toolu_3", "content": [
                    { "type": "text", "text": "a page" }, { "type": "image", "source": { "type": "base64", "data": "AA==" } },
                    { "type": "document", "source": { "type": "base64", "data": "AA==" } },
                ] },
                { "type": "text", "text": "In Fahrenheit?" },
                { "type": "document", "source": { "type": "text", "media_type": "text/plain", "data": "F = C" } },
            ] },
            { "role": "system", "content": "Use metric units." },
        ],
        "tools": [
            { "name": "weather", "description": "Weather", "input_schema": { "type": "object" } },
            { "type": "web_search_20250305", "name": "web_search" },
        ],
        "tool_choice": { "type": "any", "disable_parallel_tool_use": true },
        "thinking": { "type": "enabled", "budget_tokens": 1024 },
        "metadata": { "user_id": "u" },
        "stop_sequences": ["END"],
        "service_tier": "auto",
    }))
    .expect("a request");
    let result = ["a page", unread_in_result("image"), unread_in_result("file")].join("\n");
    same(
        &request.chat.messages,
        json!([
            { "role": "system", "content": "Be brief.\nx-anthropic-billing-header: cch=1;" },
            { "role": "user", "content": "Weather in Oslo?" },
            {
                "role": "assistant", "content": "One moment.", "reasoning_content": "Look it up.",
                "tool_calls": [
                    { "id": "toolu_1", "type": "function", "function": { "name": "weather", "arguments": { "city": "Oslo" } } },
                ],
            },
            { "role": "tool", "tool_call_id": "toolu_1", "content": "4 °C" },
            { "role": "tool", "tool_call_id": "toolu_2", "content": "" },
            { "role": "tool", "tool_call_id": "toolu_3", "content": result },
            { "role": "user", "content": "In Fahrenheit?\nF = C" },
            { "role": "system", "content": "Use metric units." },
        ]),
    );
    assert_eq!(skipped, ["web_search_20250305"]);
    assert_eq!(
        request.chat.tools,
        Some(json!([{ "type": "function", "function": {
            "name": "weather", "description": "Weather", "parameters": { "type": "object" },
        } }]))
    );
    assert_eq!(request.chat.tool_choice, Some(ToolChoice::Mode(ToolMode::Required)));
    assert_eq!(request.chat.parallel_tool_calls, Some(false));
    assert_eq!(
        request.chat.chat_template_kwargs,
        Some(Json::Object(vec![("enable_thinking".into(), Json::Bool(true))]))
    );
    assert_eq!((request.options.user.as_deref(), request.options.max_tokens), (Some("u"), Some(9)));
    assert_eq!(request.chat.continue_final_message, None);
}

#[test]
fn a_last_text_of_the_assistant_is_continued() {
    let last = |content: Value| {
        let messages = json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": content }]);
        chat(json!({ "messages": messages })).expect("a request").0.chat.continue_final_message
    };
    assert_eq!(last(json!("Once")), Some(true));
    assert_eq!(last(json!([{ "type": "text", "text": "Once" }])), Some(true));
    assert_eq!(last(json!([{ "type": "tool_use", "id": "t", "name": "f", "input": {} }])), None);
}

#[test]
fn errors_name_the_field() {
    let user = |block: Value| json!({ "messages": [{ "role": "user", "content": [block] }] });
    for (fields, param) in [
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": [1] }), "messages[0]"),
        (json!({ "messages": [{ "role": "tool", "content": "x" }] }), "messages[0].role"),
        (json!({ "messages": [{ "role": "user" }] }), "messages[0].content"),
        (json!({ "messages": [{ "role": "user", "content": 1 }] }), "messages[0].content"),
        (user(json!({ "type": "image", "source": {} })), "messages[0].content[0]"),
        (user(json!({ "type": "text" })), "messages[0].content[0].text"),
        (user(json!({ "type": "tool_result" })), "messages[0].content[0].tool_use_id"),
        (user(json!({ "type": "document", "source": { "type": "base64" } })), "messages[0].content[0].source"),
        (json!({ "system": 1 }), "system"),
        (json!({ "system": [{ "type": "image" }] }), "system[0]"),
        (json!({ "tools": [{ "input_schema": {} }] }), "tools[0].name"),
        (json!({ "tools": [{ "name": "f" }] }), "tools[0].input_schema"),
        (json!({ "tool_choice": { "type": "tool" } }), "tool_choice.name"),
        (json!({ "tool_choice": { "type": "some" } }), "tool_choice.type"),
        (json!({ "thinking": { "type": "some" } }), "thinking.type"),
        (json!({ "mcp_servers": [{}] }), "mcp_servers"),
        (json!({ "container": "c" }), "container"),
        (json!({ "stop_sequences": "x" }), "stop_sequences"),
        (json!({ "output_config": { "format": { "type": "text" } } }), "output_config.format.type"),
    ] {
        let error = chat(fields.clone()).expect_err("an error");
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{fields}: {}", error.message);
    }
    assert!(chat(json!({ "mcp_servers": [], "container": null, "system": null })).is_ok());
}
