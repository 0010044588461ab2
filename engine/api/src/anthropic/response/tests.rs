use super::*;
use crate::output::OutputParser;
use crate::parts::AnswerWriter;
use crate::parts::testing::{Events, hermes, plain, run, updates};
use crate::update::Update;

fn head() -> ResponseHead {
    let text = |text: &str| SharedStr::from(text);
    let (id, model, system_fingerprint) = (text("msg_1"), text("tiny"), text("fp"));
    ResponseHead { id, created: 7, model, system_fingerprint, seed: 3, session_id: None }
}

/// A message as a client adds it up from the events.
fn add_up(events: &Events) -> Value {
    let mut message = Value::Null;
    let mut inputs = Vec::new();
    for (name, data) in &events.0 {
        let index = usize::try_from(data["index"].as_u64().unwrap_or(0)).expect("an index");
        assert_eq!(name.as_deref(), data["type"].as_str(), "the name of an event is its type");
        match name.as_deref().expect("a name") {
            "message_start" => message = data["message"].clone(),
            "content_block_start" => {
                let content = message["content"].as_array_mut().expect("blocks");
                assert_eq!(content.len(), index);
                content.push(data["content_block"].clone());
                inputs.push(String::new());
            }
            "content_block_delta" => {
                let (block, delta) = (&mut message["content"][index], &data["delta"]);
                let mut add = |field: &str| {
                    let all = block[field].as_str().expect("a text").to_string();
                    block[field] = Value::from(all + delta[field].as_str().expect("a text"));
                };
                match delta["type"].as_str().expect("a type") {
                    "text_delta" => add("text"),
                    "thinking_delta" => add("thinking"),
                    "signature_delta" => add("signature"),
                    "input_json_delta" => inputs[index] += delta["partial_json"].as_str().expect("a text"),
                    kind => panic!("{kind}"),
                }
            }
            "content_block_stop" if !inputs[index].is_empty() => {
                message["content"][index]["input"] = serde_json::from_str(&inputs[index]).expect("JSON");
            }
            "message_delta" => {
                for (name, value) in data["delta"].as_object().expect("an object") {
                    message[name] = value.clone();
                }
                message["usage"] = data["usage"].clone();
            }
            "content_block_stop" | "ping" | "message_stop" => {}
            name => panic!("{name}"),
        }
    }
    message
}

fn check(form: MessageFormat, parser: OutputParser, updates: &[Update]) -> Value {
    let (events, form) = run(AnswerWriter::new(parser, form), updates);
    let names: Vec<&str> = events.0.iter().filter_map(|(name, _)| name.as_deref()).collect();
    assert_eq!(names[..2], ["message_start", "ping"]);
    assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);
    let response = serde_json::to_value(form.into_response()).expect("JSON");
    assert_eq!(add_up(&events), response);
    response
}

#[test]
fn events_add_up_to_the_message() {
    let form = || MessageFormat::new(head(), 6, vec!["x".into(), "END".into()]);
    let text = check(form(), plain(), &updates(&["Hi", " there"], FinishReason::StopToken(5)));
    assert_eq!(text["content"], json!([{ "type": "text", "text": "Hi there" }]));
    assert_eq!(text["stop_reason"], "end_turn");
    assert_eq!(
        text["usage"],
        json!({ "input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 2 })
    );
    let stopped = check(form(), plain(), &updates(&["Hi"], FinishReason::StopString(1)));
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&"stop_sequence".into(), &"END".into()));
    assert_eq!(check(form(), plain(), &updates(&["Hi"], FinishReason::Length))["stop_reason"], "max_tokens");
    assert_eq!(check(form(), plain(), &updates(&[], FinishReason::StopToken(5)))["content"], json!([]));
}

#[test]
fn calls_and_reasoning_are_blocks() {
    let texts = [
        "Hm.",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>",
        "<tool_call>{\"name\": \"g\"}</tool_call>",
    ];
    let form = MessageFormat::new(head(), 6, Vec::new());
    let called = check(form, hermes(), &updates(&texts, FinishReason::StopToken(5)));
    assert_eq!(called["stop_reason"], "tool_use");
    let content = called["content"].as_array().expect("blocks");
    assert_eq!(content[0], json!({ "type": "text", "text": "Hm." }));
    assert_eq!((&content[1]["name"], &content[1]["input"]), (&"f".into(), &json!({ "a": 1 })));
    assert_eq!((&content[2]["name"], &content[2]["input"]), (&"g".into(), &json!({})));
    assert!(content[1]["id"].as_str().is_some_and(|id| id.starts_with("toolu_")));

    let mut form = MessageFormat::new(head(), 6, Vec::new());
    let mut events = Events::default();
    form.start(&mut events);
    for text in ["Let me", " think."] {
        form.part(Part::Reasoning(text.into()), &mut events);
    }
    form.part(Part::Text("Yes.".into()), &mut events);
    form.finish(&Answer::default(), &mut events);
    let response = serde_json::to_value(form.into_response()).expect("JSON");
    assert_eq!(add_up(&events), response);
    assert_eq!(response["content"][0]["thinking"], "Let me think.");
    assert_eq!(response["content"][0]["signature"].as_str().map(str::len), Some(64));
    assert_eq!(response["content"][1]["text"], "Yes.");
}

#[test]
fn errors_have_the_types_of_the_vendor() {
    use crate::error::ApiError;
    for (error, kind) in [
        (ApiError::param("x", "x"), "invalid_request_error"),
        (ApiError::new(401, "authentication_error", "x").code("invalid_api_key"), "authentication_error"),
        (ApiError::new(404, "invalid_request_error", "x").code("model_not_found"), "not_found_error"),
        (ApiError::new(429, "rate_limit_error", "x").code("queue_full"), "rate_limit_error"),
        (ApiError::unavailable("x"), "overloaded_error"),
        (ApiError::internal("x"), "api_error"),
    ] {
        let mut events = Events::default();
        MessageFormat::new(head(), 6, Vec::new()).fail(&error.body(Some("req-1".into())), &mut events);
        let data = json!({ "type": "error", "error": { "type": kind, "message": "x" }, "request_id": "req-1" });
        assert_eq!(events.0, [(Some("error".to_string()), data)]);
    }
}
