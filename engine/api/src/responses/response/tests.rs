use super::*;
use crate::output::{ModelSyntax, OutputPlan, SyntaxNames};
use crate::parts::AnswerWriter;
use crate::parts::testing::{Events, hermes, plain, run, updates};

fn form() -> ResponsesFormat {
    let text = |text: &str| SharedStr::from(text);
    let (id, model, system_fingerprint) = (text("resp_1"), text("tiny"), text("fp"));
    let head = ResponseHead { id, created: 7, model, system_fingerprint, seed: 3, session_id: None };
    ResponsesFormat::new(head, &ResponsesRequest::default(), 6)
}

/// The items of a response as a client adds them up from the events.
fn add_up(events: &Events) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    for (number, (name, data)) in events.0.iter().enumerate() {
        assert_eq!((name.as_deref(), data["sequence_number"].as_u64()), (data["type"].as_str(), Some(number as u64)));
        let at = usize::try_from(data["output_index"].as_u64().unwrap_or(0)).expect("an index");
        let content = |items: &mut Vec<Value>| items[at]["content"][0]["text"].as_str().unwrap_or_default().to_string();
        match name.as_deref().expect("a name") {
            "response.output_item.added" => {
                assert_eq!((items.len(), &data["item"]["status"]), (at, &"in_progress".into()));
                items.push(data["item"].clone());
            }
            "response.content_part.added" => items[at]["content"] = json!([data["part"]]),
            "response.output_text.delta" | "response.reasoning_text.delta" => {
                let all = content(&mut items) + data["delta"].as_str().expect("a text");
                items[at]["content"][0]["text"] = all.into();
            }
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(data["text"], content(&mut items));
                assert_eq!(data["item_id"], items[at]["id"]);
            }
            "response.function_call_arguments.delta" => items[at]["arguments"] = data["delta"].clone(),
            "response.function_call_arguments.done" => assert_eq!(data["arguments"], items[at]["arguments"]),
            "response.output_item.done" => {
                items[at]["status"] = data["item"]["status"].clone();
                assert_eq!(items[at], data["item"]);
            }
            _ => {}
        }
    }
    items
}

#[test]
fn events_add_up_to_the_response() {
    let texts = ["Hm.", "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>"];
    for (texts, parser, reason, kinds, status) in [
        (&["Hi", " you"][..], plain(), FinishReason::StopToken(5), &["message"][..], "completed"),
        (&["Hi"], plain(), FinishReason::Length, &["message"], "incomplete"),
        (&texts, hermes(), FinishReason::StopToken(5), &["message", "function_call"], "completed"),
        (&[], plain(), FinishReason::StopToken(5), &[], "completed"),
    ] {
        let (events, form) = run(AnswerWriter::new(parser, form()), &updates(texts, reason));
        let names: Vec<&str> = events.0.iter().filter_map(|(name, _)| name.as_deref()).collect();
        assert_eq!(names[..2], ["response.created", "response.in_progress"]);
        let response = serde_json::to_value(form.into_response()).expect("JSON");
        let (name, last) = events.0.last().expect("an event");
        assert_eq!((name.as_deref(), &last["response"]), (Some(format!("response.{status}").as_str()), &response));
        assert_eq!(Value::from(add_up(&events)), response["output"]);
        let items = response["output"].as_array().expect("items");
        assert_eq!(items.iter().map(|item| item["type"].as_str().expect("a type")).collect::<Vec<_>>(), kinds);
        assert_eq!(
            (&response["status"], &response["usage"]["input_tokens_details"]["cached_tokens"]),
            (&status.into(), &2.into())
        );
    }
}

#[test]
fn tokens_of_reasoning_are_counted() {
    let names = SyntaxNames { calls: None, reasoning: Some("think") };
    let texts = ["<think>", "1 + 1 ", "is 2", "</think>", "\n\n2", ""];
    let writer = AnswerWriter::new(OutputPlan::new(ModelSyntax::default(), names).parser(0), form());
    let (_, form) = run(writer, &updates(&texts, FinishReason::StopToken(5)));
    let usage = form.into_response().usage.expect("counts");
    assert_eq!((usage.output_tokens, usage.output_tokens_details.reasoning_tokens), (6, 4));
}

#[test]
fn reasoning_is_an_item_before_the_message() {
    let (mut form, mut events) = (form(), Events::default());
    form.start(&mut events);
    for part in [Part::Reasoning("Let me".into()), Part::Reasoning(" think.".into()), Part::Text("Yes.".into())] {
        form.part(part, &mut events);
    }
    form.finish(&Answer { finish: Some(FinishReason::Complete), ..Answer::default() }, &mut events);
    let response = serde_json::to_value(form.into_response()).expect("JSON");
    assert_eq!(Value::from(add_up(&events)), response["output"]);
    assert_eq!(response["output"][0]["content"][0], json!({ "type": "reasoning_text", "text": "Let me think." }));
    assert_eq!(response["output"][1]["content"][0]["text"], "Yes.");
    assert_ne!(response["output"][0]["id"], response["output"][1]["id"]);
}

#[test]
fn probes_and_failures_end_the_stream() {
    let (mut form, mut events) = (form(), Events::default());
    form.finish_probe(&mut events);
    let names: Vec<&str> = events.0.iter().filter_map(|(name, _)| name.as_deref()).collect();
    assert_eq!(names, ["response.created", "response.in_progress", "response.completed"]);
    let error = crate::error::ApiError::internal("broken").code("worker_failed");
    form.fail(&error.body(None), &mut events);
    let last = &events.0.last().expect("an event").1;
    assert_eq!(
        (&last["type"], &last["response"]["error"]["code"]),
        (&"response.failed".into(), &"worker_failed".into())
    );
}

/// A client that groups its functions finds the one that is called by name and namespace.
#[test]
fn a_call_has_the_namespace_of_its_function() {
    let request = ResponsesRequest {
        tools: Some(vec![
            json!({ "type": "namespace", "name": "mcp__a", "tools": [{ "type": "function", "name": "run" }] }),
            json!({ "type": "function", "name": "run" }),
        ]),
        ..ResponsesRequest::default()
    };
    let text = |text: &str| SharedStr::from(text);
    let (id, model, system_fingerprint) = (text("resp_1"), text("tiny"), text("fp"));
    let head = ResponseHead { id, created: 7, model, system_fingerprint, seed: 3, session_id: None };
    let call = |name: &str| format!("<tool_call>{{\"name\": \"{name}\", \"arguments\": {{}}}}</tool_call>");
    let texts = [call("mcp__a__run"), call("run")];
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let form = ResponsesFormat::new(head, &request, 6);
    let (events, form) = run(AnswerWriter::new(hermes(), form), &updates(&texts, FinishReason::StopToken(5)));
    let output = serde_json::to_value(form.into_response()).expect("JSON")["output"].clone();
    let found = [0, 1].map(|i| (output[i]["name"].clone(), output[i].get("namespace").cloned()));
    assert_eq!(found, [(json!("run"), Some(json!("mcp__a"))), (json!("run"), None)]);
    assert_eq!(Value::Array(add_up(&events)), output);
}
