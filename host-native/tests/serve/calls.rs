//! Tool calls and reasoning through the server, of a model that answers given texts.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::admin_client::Directory;
use crate::scripted::{Script, TEMPLATE};
use crate::server::{Response, Server, fixture};

const CHAT: &str = "/v1/chat/completions";

/// Control tokens of the syntaxes.
const CONTROLS: [&str; 60] = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|channel>",
    "<channel|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
    "｜DSML｜",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<seed:think>",
    "</seed:think>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|tool_call_start|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    "<|inner_prefix|>",
    "<|inner_suffix|>",
    "<TOOLCALL>",
];

#[derive(Debug, Deserialize)]
struct Case {
    syntax: String,
    #[serde(default)]
    reasoning_syntax: Option<String>,
    #[serde(default)]
    in_reasoning: bool,
    text: String,
    #[serde(default)]
    content: String,
    #[serde(default)]
    reasoning: String,
    #[serde(default)]
    calls: Vec<(String, Value)>,
}

/// The first case of each syntax, and those of it that are no calls.
fn cases() -> Vec<Case> {
    let text = std::fs::read_to_string(fixture("chat/calls.json")).expect("a file");
    let mut cases: Vec<Case> = serde_json::from_str(&text).expect("the cases");
    let mut seen: Vec<(String, bool)> = Vec::new();
    cases.retain(|case| {
        let key = (case.syntax.clone(), case.calls.is_empty());
        let is_new = !seen.contains(&key);
        seen.push(key);
        is_new
    });
    cases
}

fn tools() -> Value {
    let parameters =
        json!({ "type": "object", "properties": { "city": { "type": "string" }, "days": { "type": "integer" } } });
    json!([
        { "type": "function", "function": { "name": "weather", "parameters": parameters } },
        { "type": "function", "function": { "name": "clock", "parameters": { "type": "object", "properties": {} } } },
    ])
}

fn serve(script: &Script, syntax: &str) -> (Server, Directory) {
    let directory = Directory::new();
    let (model, template) = (script.write(&directory), directory.write("template.jinja", TEMPLATE));
    let server = Server::start(&["--model", &model, "--chat-template", &template, "--tool-call-format", syntax]);
    (server, directory)
}

fn with(body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    more.as_object().expect("an object").iter().for_each(|(name, value)| body[name] = value.clone());
    body
}

/// A user's text of `n` tokens.
fn user(n: usize) -> Value {
    json!([{ "role": "user", "content": "x".repeat(n) }])
}

/// The message, its calls and the finish reason of a chat, which are the same in a stream.
fn chat(server: &Server, body: &Value) -> (Value, Vec<(String, String)>, String) {
    let whole = server.ok(CHAT, body);
    let choice = &whole["choices"][0];
    let call = |call: &Value| {
        let text = |name: &str| call["function"][name].as_str().expect("a text").to_string();
        (text("name"), text("arguments"))
    };
    let list = |list: &Value| list.as_array().into_iter().flatten().map(call).collect::<Vec<_>>();
    let calls = list(&choice["message"]["tool_calls"]);
    let chunks = server.post(CHAT, &with(body, &json!({ "stream": true }))).chunks();
    let deltas = || chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
    for field in ["content", "reasoning_content"] {
        let text: String = deltas().filter_map(|delta| delta[field].as_str()).collect();
        assert_eq!(text, choice["message"][field].as_str().unwrap_or_default(), "{body}");
    }
    // a call is announced when it is known, so a stream has it in one piece
    assert_eq!(deltas().flat_map(|delta| list(&delta["tool_calls"])).collect::<Vec<_>>(), calls, "{body}");
    let last = chunks.last().expect("a chunk");
    assert_eq!(last["choices"][0]["finish_reason"], choice["finish_reason"], "{body}");
    (choice["message"].clone(), calls, choice["finish_reason"].as_str().expect("a reason").into())
}

#[test]
fn each_syntax_is_found_in_what_a_model_writes() {
    let mut script = Script::new(&CONTROLS);
    let cases: Vec<(usize, Case)> = cases().into_iter().map(|case| (script.answer(&case.text), case)).collect();
    let (server, _directory) = serve(&script, "none");
    for (n, case) in &cases {
        let body = json!({
            "messages": user(n - usize::from(case.in_reasoning)), "tools": tools(), "temperature": 0,
            "tool_call_format": case.syntax, "reasoning_format": case.reasoning_syntax.as_deref().unwrap_or("none"),
            "chat_template_kwargs": { "think": case.in_reasoning },
        });
        let (message, calls, reason) = chat(&server, &body);
        let parse = |(name, json): (String, String)| (name, serde_json::from_str::<Value>(&json).expect("JSON"));
        let calls: Vec<(String, Value)> = calls.into_iter().map(parse).collect();
        assert_eq!(calls, case.calls, "{case:?}: {message}");
        assert_eq!(reason, if calls.is_empty() { "stop" } else { "tool_calls" }, "{case:?}");
        assert_eq!(message["content"].as_str().unwrap_or_default(), script.plain(&case.content), "{case:?}");
        assert_eq!(message["reasoning_content"].as_str().unwrap_or_default(), case.reasoning, "{case:?}");
    }
}

/// The last event of a stream with this type, and the parts at `pointer` of all, joined.
fn stream(response: &Response, pointer: &str) -> (Value, String) {
    let events = response.events().into_iter().filter_map(|(_, data)| serde_json::from_str(&data).ok());
    let events: Vec<Value> = events.collect();
    let part = |event: &Value| event.pointer(pointer)?.as_str().map(str::to_string);
    let parts = events.iter().filter_map(part).collect();
    (events.last().cloned().unwrap_or_default(), parts)
}

#[test]
fn a_call_that_is_cut_is_no_complete_call_in_any_api() {
    let text =
        "Hm.<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"days\": 2, \"city\": \"New York\"}}\n</tool_call>";
    let mut script = Script::new(&CONTROLS);
    let n = script.answer(text);
    let n_tokens = script.tokens(text.split_once(" York").expect("a city").0).len();
    let (server, _directory) = serve(&script, "hermes");
    let cut = "{\"days\":2,\"city\":\"New";
    let base = json!({ "model": "scripted", "temperature": 0 });

    let body = with(&base, &json!({ "messages": user(n), "tools": tools(), "max_tokens": n_tokens }));
    let (message, calls, reason) = chat(&server, &body);
    assert_eq!((&message["content"], &*reason), (&json!("Hm."), "length"));
    assert_eq!(calls, [("weather".to_string(), cut.to_string())]);

    let functions: Vec<Value> =
        tools().as_array().expect("tools").iter().map(|tool| tool["function"].clone()).collect();
    let tools_of =
        |name: &str| functions.iter().map(|f| json!({ "name": f["name"], name: f["parameters"] })).collect::<Value>();
    let typed = functions.iter().map(|f| with(f, &json!({ "type": "function" }))).collect::<Value>();
    let body = with(&base, &json!({ "input": "x".repeat(n), "tools": typed, "max_output_tokens": n_tokens }));
    let check = |response: &Value| {
        assert_eq!(
            (&response["status"], &response["incomplete_details"]["reason"]),
            (&json!("incomplete"), &json!("max_output_tokens"))
        );
        let item = response["output"].as_array().and_then(|items| items.last()).expect("an item");
        assert_eq!(
            (&item["type"], &item["status"], &item["arguments"]),
            (&json!("function_call"), &json!("incomplete"), &json!(cut))
        );
    };
    check(&server.ok("/v1/responses", &body));
    let (last, _) = stream(&server.post("/v1/responses", &with(&body, &json!({ "stream": true }))), "/delta");
    assert_eq!(last["type"], "response.incomplete");
    check(&last["response"]);

    let body = with(&base, &json!({ "messages": user(n), "tools": tools_of("input_schema"), "max_tokens": n_tokens }));
    let whole = server.ok("/v1/messages", &body);
    assert_eq!((&whole["stop_reason"], &whole["content"][1]["type"]), (&json!("max_tokens"), &json!("tool_use")));
    assert_eq!(whole["content"][1]["input"], json!({ "arguments": cut }));
    let response = server.post("/v1/messages", &with(&body, &json!({ "stream": true })));
    assert_eq!(stream(&response, "/delta/partial_json").1, cut);
    assert_eq!(stream(&response, "/delta/stop_reason").1, "max_tokens");

    let options = json!({ "temperature": 0, "num_predict": n_tokens });
    let body =
        json!({ "model": "scripted", "messages": user(n), "tools": tools(), "options": options, "stream": false });
    let whole = server.ok("/api/chat", &body);
    assert_eq!(whole["done_reason"], "length");
    assert_eq!(whole["message"]["tool_calls"][0]["function"]["arguments"], json!({ "arguments": cut }));
}

#[test]
fn arguments_that_do_not_parse_are_text_in_every_api() {
    let text = "<tool_call>{\"name\":\"weather\",\"arguments\":{\"city\":\"C:\\dir\\x\"}}</tool_call>";
    let mut script = Script::new(&CONTROLS);
    let n = script.answer(text);
    let plain = json!(script.plain(text));
    let (server, _directory) = serve(&script, "hermes");
    let base = json!({ "model": "scripted", "temperature": 0 });

    let (message, calls, reason) = chat(&server, &with(&base, &json!({ "messages": user(n), "tools": tools() })));
    assert_eq!((&message["content"], &*reason, calls.len()), (&plain, "stop", 0));
    let tool = json!([{ "type": "function", "name": "weather", "parameters": {} }]);
    let whole = server.ok("/v1/responses", &with(&base, &json!({ "input": "x".repeat(n), "tools": tool })));
    assert_eq!((&whole["status"], &whole["output"][0]["content"][0]["text"]), (&json!("completed"), &plain));
    let tool = json!([{ "name": "weather", "input_schema": {} }]);
    let body = with(&base, &json!({ "messages": user(n), "tools": tool, "max_tokens": 200 }));
    let whole = server.ok("/v1/messages", &body);
    assert_eq!((&whole["stop_reason"], &whole["content"][0]["text"]), (&json!("end_turn"), &plain));
    let body = json!({ "model": "scripted", "messages": user(n), "tools": tools(), "stream": false, "options": { "temperature": 0 } });
    let whole = server.ok("/api/chat", &body);
    assert_eq!((&whole["done_reason"], &whole["message"]["content"]), (&json!("stop"), &plain));
    assert!(whole["message"].get("tool_calls").is_none(), "{whole}");
}

/// Reads earlier reasoning under two names, and refuses it beside text and calls, as gpt-oss's template does.
const NAMES: &str = "{%- for message in messages -%}\
    {%- if message.tool_calls and message.content and message.thinking -%}{{ raise_exception('both') }}{%- endif -%}\
    {{ message.content }}{%- if message.thinking -%}{{ message.thinking ~ message['thought'] }}{%- endif -%}\
    {%- endfor -%}{#- tools -#}";

#[test]
fn earlier_reasoning_has_the_names_that_the_template_reads() {
    let mut script = Script::new(&[]);
    script.answer(&"y".repeat(100));
    let directory = Directory::new();
    let (model, template) = (script.write(&directory), directory.write("template.jinja", NAMES));
    let server = Server::start(&["--model", &model, "--chat-template", &template]);
    let (question, answer, again, reason) = ("Hi", "Hello", "More", "think well");
    let n = question.len() + answer.len() + again.len() + 2 * reason.len();
    let user = |text: &str| json!({ "role": "user", "content": text });
    let base = json!({ "model": "scripted", "temperature": 0, "max_tokens": 1 });
    let of = |path: &str, pointers: &[&str], body: &Value| -> u64 {
        let response = server.ok(path, body);
        pointers.iter().filter_map(|pointer| response.pointer(pointer)?.as_u64()).sum()
    };
    for name in ["reasoning_content", "reasoning", "thinking", "thought"] {
        let messages = json!([user(question), { "role": "assistant", "content": answer, name: reason }, user(again)]);
        let body = with(&base, &json!({ "messages": messages }));
        assert_eq!(of(CHAT, &["/usage/prompt_tokens"], &body), n as u64, "{name}");
    }
    let reasoning =
        json!({ "type": "reasoning", "summary": [], "content": [{ "type": "reasoning_text", "text": reason }] });
    let input = json!([user(question), reasoning, { "role": "assistant", "content": answer }, user(again)]);
    let body = json!({ "temperature": 0, "max_output_tokens": 1, "input": input });
    assert_eq!(of("/v1/responses", &["/usage/input_tokens"], &body), n as u64);
    let thinking = json!({ "type": "thinking", "thinking": reason, "signature": "" });
    let blocks = json!([thinking, { "type": "text", "text": answer }]);
    let messages = json!([user(question), { "role": "assistant", "content": blocks }, user(again)]);
    let body = with(&base, &json!({ "messages": messages }));
    assert_eq!(of("/v1/messages", &["/usage/input_tokens", "/usage/cache_read_input_tokens"], &body), n as u64);
    let messages = json!([user(question), { "role": "assistant", "content": answer, "thinking": reason }, user(again)]);
    let body = json!({ "model": "scripted", "messages": messages, "stream": false, "options": { "num_predict": 1 } });
    assert_eq!(of("/api/chat", &["/prompt_eval_count"], &body), n as u64);

    let call = json!({ "id": "call_1", "type": "function", "function": { "name": "clock", "arguments": "{}" } });
    let message = json!({ "role": "assistant", "content": answer, "reasoning_content": reason, "tool_calls": [call] });
    let result = json!({ "role": "tool", "tool_call_id": "call_1", "content": "12" });
    let body = with(&base, &json!({ "messages": [user(question), message, result] }));
    let merged = format!("{reason}\n\n{answer}");
    assert_eq!(of(CHAT, &["/usage/prompt_tokens"], &body), (question.len() + 2 * merged.len() + 2) as u64);
}
