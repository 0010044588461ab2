use serde_json::json;

use super::*;
use crate::parse::ParseBody;

fn parse(fields: Value) -> Result<ConvertedResponse, ApiError> {
    ResponsesRequest::parse_body(fields.to_string().as_bytes())?.into_chat(Vec::new())
}

#[test]
fn items_become_chat_messages() {
    let converted = parse(json!({
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            { "role": "user", "content": [{ "type": "input_text", "text": "Weather in Oslo?" }] },
            { "type": "reasoning", "id": "rs_1", "summary": [], "content": [{ "type": "reasoning_text", "text": "Look it up." }] },
            { "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": "One moment." }] },
            { "type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{\"city\": \"Oslo\"}" },
            { "type": "function_call", "call_id": "c2", "name": "read", "namespace": "mcp__files", "arguments": "{}" },
            { "type": "function_call_output", "call_id": "c1", "output": "4 °C" },
            { "type": "function_call_output", "call_id": "c2", "output": [
                { "type": "input_text", "text": "noon" }, { "type": "input_image", "image_url": "data:" },
            ] },
            { "type": "web_search_call", "id": "w" },
            { "type": "message", "role": "developer", "content": "Metric." },
        ],
        "tools": [
            { "type": "function", "name": "weather", "parameters": { "type": "object" }, "strict": false },
            { "type": "web_search" },
            { "type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [
                { "type": "function", "name": "read", "parameters": { "type": "object" } },
            ] },
        ],
        "tool_choice": { "type": "function", "name": "weather" },
        "text": { "format": { "type": "json_schema", "name": "x", "schema": { "type": "object" } } },
        "reasoning": { "effort": "low" },
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "prompt_cache_key": "k", "store": true, "service_tier": "auto", "safety_identifier": "u",
    }))
    .expect("a request");
    let expected: Vec<Json> = serde_json::from_value(json!([
        { "role": "system", "content": "Be brief." },
        { "role": "user", "content": "Weather in Oslo?" },
        {
            "role": "assistant", "content": "One moment.", "reasoning_content": "Look it up.",
            "tool_calls": [
                { "id": "c1", "type": "function", "function": { "name": "weather", "arguments": "{\"city\": \"Oslo\"}" } },
                { "id": "c2", "type": "function", "function": { "name": "mcp__files__read", "arguments": "{}" } },
            ],
        },
        { "role": "tool", "tool_call_id": "c1", "content": "4 °C" },
        { "role": "tool", "tool_call_id": "c2", "content": format!("noon\n{}", unread_in_result("image")) },
        { "role": "developer", "content": "Metric." },
    ]))
    .expect("messages");
    let chat = converted.chat.chat;
    assert_eq!(chat.messages, expected);
    assert_eq!(converted.skipped, ["web_search", "web_search_call"]);
    let function = json!({ "name": "weather", "parameters": { "type": "object" }, "strict": false });
    let read = json!({ "name": "mcp__files__read", "parameters": { "type": "object" } });
    assert_eq!(
        chat.tools,
        Some(json!([{ "type": "function", "function": function }, { "type": "function", "function": read }]))
    );
    assert!(matches!(chat.tool_choice, Some(ToolChoice::Function { .. })));
    assert_eq!((chat.logprobs, converted.chat.options.user.as_deref()), (Some(true), Some("u")));
    let format = converted.chat.constraint.response_format.expect("a format");
    assert_eq!(format.json_schema.and_then(|named| named.schema), Some(json!({ "type": "object" })));
}

#[test]
fn probes_are_empty() {
    let is_probe = |json: Value| ResponsesRequest::parse_body(json.to_string().as_bytes()).expect("ok").is_probe(false);
    assert!(is_probe(json!({ "input": [] })) && is_probe(json!({})));
    assert!(is_probe(json!({ "input": "Hi", "generate": false })));
    assert!(!is_probe(json!({ "input": "Hi" })));
    let continued = |json: Value| ResponsesRequest::parse_body(json.to_string().as_bytes()).expect("ok").is_probe(true);
    assert!(!continued(json!({})) && continued(json!({ "generate": false })));
}

#[test]
fn errors_name_the_field() {
    let with = |item: Value| json!({ "input": [item] });
    for (fields, param) in [
        (json!({ "input": 1 }), "input"),
        (with(json!(1)), "input[0]"),
        (with(json!({ "role": "robot", "content": "x" })), "input[0].role"),
        (with(json!({ "role": "user" })), "input[0].content"),
        (with(json!({ "role": "user", "content": [{ "type": "input_image" }] })), "input[0].content[0]"),
        (with(json!({ "type": "function_call", "call_id": "c", "name": "f" })), "input[0].arguments"),
        (with(json!({ "type": "item_reference", "id": "x" })), "input[0]"),
        (with(json!({ "type": "web_search_call" })), "input"),
        (json!({ "input": "x", "background": true }), "background"),
        (json!({ "input": "x", "conversation": "c" }), "conversation"),
        (json!({ "input": "x", "prompt": { "id": "p" } }), "prompt"),
        (json!({ "input": "x", "truncation": "auto" }), "truncation"),
        (json!({ "input": "x", "tools": [{ "type": "function" }] }), "tools[0].name"),
        (json!({ "input": "x", "tools": [{}] }), "tools[0].type"),
        (
            json!({ "input": "x", "tools": [{ "type": "namespace", "name": "n", "tools": [{}] }] }),
            "tools[0].tools[0].type",
        ),
        (json!({ "input": "x", "tool_choice": "some" }), "tool_choice"),
        (json!({ "input": "x", "text": { "format": { "type": "xml" } } }), "text.format.type"),
        (json!({ "input": "x", "text": { "format": { "type": "json_schema" } } }), "text.format.schema"),
    ] {
        let error = parse(fields.clone()).expect_err("an error");
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{fields}: {}", error.message);
    }
}
