//! The APIs of Anthropic, OpenAI (Responses), Ollama and llama-server: the same greedy answer through each, streamed and not,
//! and errors in the form of each.

use serde_json::{Value, json};

use crate::admin_client::{self, Managed};
use crate::server::{Response, Server, fixture};

const MODEL: &str = "starling-tiny-q8_0";
const N: u64 = 12;

fn hi() -> Value {
    json!([{ "role": "user", "content": "Hi" }])
}

/// The answer to "Hi" by OpenAI's chat completions.
fn expected(server: &Server) -> String {
    let body = json!({ "messages": hi(), "max_tokens": N, "temperature": 0 });
    let answer = server.ok("/v1/chat/completions", &body);
    answer["choices"][0]["message"]["content"].as_str().expect("a text").to_string()
}

/// Names and data of the events of a stream.
fn events(response: &Response) -> Vec<(String, Value)> {
    assert_eq!(response.status, 200, "{}", response.text());
    let parse = |(name, data): (String, String)| (name, serde_json::from_str(&data).expect("JSON"));
    response.events().into_iter().map(parse).collect()
}

fn lines(response: &Response) -> Vec<Value> {
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("content-type"), Some("application/x-ndjson"));
    response.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// The texts at a path of each value, joined.
fn join<'a>(values: impl Iterator<Item = &'a Value>, pointer: &str) -> String {
    values.filter_map(|value| value.pointer(pointer)?.as_str()).collect()
}

fn with(body: &Value, more: Value) -> Value {
    let mut body = body.clone();
    more.as_object().expect("an object").iter().for_each(|(name, value)| body[name] = value.clone());
    body
}

#[test]
fn every_api_streams_the_same_answer() {
    let server = Server::start(&[]);
    let expected = expected(&server);

    let body = json!({ "model": MODEL, "max_tokens": N, "temperature": 0, "messages": hi() });
    let whole = server.ok("/v1/messages", &body);
    assert_eq!(whole["content"], json!([{ "type": "text", "text": expected }]));
    let stream = events(&server.post("/v1/messages", &with(&body, json!({ "stream": true }))));
    assert_eq!(join(stream.iter().map(|(_, data)| data), "/delta/text"), expected);
    assert_eq!(stream.last().expect("an event").0, "message_stop");
    let count = server.ok("/v1/messages/count_tokens", &json!({ "model": MODEL, "messages": hi() }));
    let usage = &whole["usage"];
    let n_prompt = usage["input_tokens"].as_u64().zip(usage["cache_read_input_tokens"].as_u64()).map(|(a, b)| a + b);
    assert_eq!(count["input_tokens"].as_u64(), n_prompt);

    let body = json!({ "model": MODEL, "max_output_tokens": N, "temperature": 0, "input": "Hi" });
    let whole = server.ok("/v1/responses", &body);
    assert_eq!(whole["output"][0]["content"][0]["text"], expected);
    let stream = events(&server.post("/v1/responses", &with(&body, json!({ "stream": true }))));
    let deltas = stream.iter().filter(|(name, _)| name == "response.output_text.delta").map(|(_, data)| data);
    assert_eq!(join(deltas, "/delta"), expected);
    let last = &stream.last().expect("an event").1["response"];
    assert_eq!(
        (&last["output"][0]["content"], &last["usage"]["total_tokens"]),
        (&whole["output"][0]["content"], &whole["usage"]["total_tokens"])
    );
    let count = server.ok("/v1/responses/input_tokens", &json!({ "input": "Hi" }));
    assert_eq!(count["input_tokens"], whole["usage"]["input_tokens"]);

    let body = json!({ "model": format!("{MODEL}:latest"), "messages": hi(), "options": { "temperature": 0, "num_predict": N } });
    let stream = lines(&server.post("/api/chat", &body));
    assert_eq!(join(stream.iter(), "/message/content"), expected);
    let whole = server.ok("/api/chat", &with(&body, json!({ "stream": false })));
    assert_eq!(whole["message"]["content"], json!(expected));
    let last = stream.last().expect("a line");
    for name in ["done", "done_reason", "eval_count", "prompt_eval_count"] {
        assert_eq!(last[name], whole[name], "{name}");
    }
    assert!(last["total_duration"].as_u64() > Some(0) && last["eval_duration"].as_u64() > Some(0), "{last}");
    let body = json!({ "model": MODEL, "prompt": "Hi", "options": { "temperature": 0, "num_predict": N } });
    assert_eq!(join(lines(&server.post("/api/generate", &body)).iter(), "/response"), expected);

    let prompt = server.ok("/apply-template", &json!({ "messages": hi() }));
    let body = json!({ "prompt": prompt["tokens"], "n_predict": N, "temperature": 0 });
    let whole = server.ok("/completion", &body);
    assert_eq!(whole["content"], json!(expected));
    assert_eq!(whole["tokens_predicted"], whole["timings"]["predicted_n"]);
    let stream = events(&server.post("/completion", &with(&body, json!({ "stream": true }))));
    assert_eq!(join(stream.iter().map(|(_, data)| data), "/content"), expected);
    let probable = server.ok("/completion", &with(&body, json!({ "n_probs": 2, "return_tokens": true })));
    assert!(probable["completion_probabilities"].as_array().is_some_and(|all| !all.is_empty()));
    assert_eq!(probable["completion_probabilities"][0]["top_logprobs"].as_array().map(Vec::len), Some(2));
    assert!(probable["tokens"].as_array().is_some_and(|all| !all.is_empty()));
    let fields = ["content", "generation_settings/n_predict", "nothing"];
    let chosen = server.ok("/completion", &with(&body, json!({ "response_fields": fields })));
    assert_eq!(chosen, json!({ "content": expected, "generation_settings/n_predict": N }));
    let all = server.ok("/completion", &with(&body, json!({ "response_fields": [] })));
    assert_eq!(all["content"], json!(expected));
    assert!(stream.iter().all(|(_, data)| data["stop"] == true || data["tokens"] != json!([])));

    // several prompts, of all forms
    let tokens = prompt["tokens"].as_array().expect("tokens").clone();
    let once = json!({ "prompt_string": "Once" });
    let body = with(&body, json!({ "prompt": [tokens, "Once", once, [0, "On", "ce"]] }));
    let all = server.ok("/completion", &body);
    let contents: Vec<&Value> = all.as_array().expect("a list").iter().map(|one| &one["content"]).collect();
    assert_eq!((contents[0], contents[1], contents.len()), (&json!(expected), contents[2], 4));
    let stream = events(&server.post("/completion", &with(&body, json!({ "stream": true }))));
    for (index, content) in contents.into_iter().enumerate() {
        let parts = stream.iter().map(|(_, data)| data).filter(|data| data["index"] == index);
        assert_eq!(&json!(join(parts, "/content")), content);
    }

    // texts whose tokens are biased, and end tokens that are not sampled
    let body = json!({ "prompt": "Once", "n_predict": 2, "ignore_eos": true, "logit_bias": { " upon": -100 }, "temperature": 0 });
    let settings = server.ok("/completion", &body)["generation_settings"].clone();
    assert_eq!(settings["logit_bias"][0]["bias"], -100.0);
    assert!(settings["logit_bias"].as_array().expect("a list").iter().any(|one| one["bias"].is_null()), "{settings}");

    // the context is full
    let full = server.ok("/completion", &json!({ "prompt": "Once", "ignore_eos": true }));
    assert_eq!((&full["truncated"], &full["stop_type"]), (&json!(true), &json!("limit")));
}

#[test]
fn raw_prompts_are_continued() {
    let server = Server::start(&[]);
    let prompt = "Once upon a time";
    let body = json!({ "prompt": prompt, "max_tokens": 9, "temperature": 0 });
    let text = server.ok("/v1/completions", &body)["choices"][0]["text"].clone();
    let body = json!({ "prompt": prompt, "n_predict": 9, "temperature": 0 });
    assert_eq!(server.ok("/completion", &body)["content"], text);
    assert_eq!(server.ok("/completions", &body)["content"], text);
    let body = json!({ "model": MODEL, "prompt": prompt, "raw": true, "stream": false, "options": { "num_predict": 9, "temperature": 0 } });
    assert_eq!(server.ok("/api/generate", &body)["response"], text);
    let stopped = json!({ "prompt": prompt, "temperature": 0, "stop": ["."] });
    let whole = server.ok("/completion", &stopped);
    assert_eq!((&whole["stop_type"], &whole["stopping_word"]), (&json!("word"), &json!(".")));
    // the model has no tokens for infill
    for (path, body) in [
        ("/infill", json!({ "input_prefix": "a", "input_suffix": "b" })),
        ("/api/generate", json!({ "model": MODEL, "prompt": "a", "suffix": "b" })),
    ] {
        let response = server.post(path, &body);
        assert!(response.status == 400 && response.text().contains("fill-in-the-middle"), "{}", response.text());
    }
}

#[test]
fn forced_calls_come_in_the_form_of_each_api() {
    let server = Server::start(&["--chat-template", &fixture("chat/qwen-tools.jinja")]);
    let schema = json!({ "type": "object", "properties": { "a": { "enum": [1, 2] } }, "required": ["a"], "additionalProperties": false });
    let body = json!({
        "model": MODEL, "max_tokens": 200, "temperature": 0, "messages": hi(),
        "tools": [{ "name": "f", "input_schema": schema }, { "type": "web_search_20250305", "name": "web_search" }],
        "tool_choice": { "type": "tool", "name": "f" },
    });
    let response = server.post("/v1/messages", &body);
    assert_eq!(response.header("x-starling-skipped"), Some("web_search_20250305"));
    let message = response.json();
    assert_eq!(
        (&message["stop_reason"], &message["content"][0]["type"]),
        (&json!("tool_use"), &json!("tool_use")),
        "{message}"
    );
    let input = &message["content"][0]["input"];
    assert!(input["a"].is_number(), "{message}");
    let stream = events(&server.post("/v1/messages", &with(&body, json!({ "stream": true }))));
    let json_text = join(stream.iter().map(|(_, data)| data), "/delta/partial_json");
    assert_eq!(&serde_json::from_str::<Value>(&json_text).expect("JSON"), input);
    // the result of the call in the next turn
    let more = json!([
        { "role": "user", "content": "Hi" },
        { "role": "assistant", "content": message["content"] },
        { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": message["content"][0]["id"], "content": "4" }] },
    ]);
    let body = with(&body, json!({ "messages": more, "max_tokens": 4, "tool_choice": { "type": "auto" } }));
    assert_eq!(server.ok("/v1/messages", &body)["role"], "assistant");

    let body = json!({
        "max_output_tokens": 200, "temperature": 0, "input": "Hi",
        "tools": [{ "type": "function", "name": "f", "parameters": schema }, { "type": "web_search" }],
        "tool_choice": { "type": "function", "name": "f" },
    });
    let response = server.post("/v1/responses", &body);
    assert_eq!(response.header("x-starling-skipped"), Some("web_search"));
    let item = response.json()["output"][0].clone();
    assert_eq!(item["type"], "function_call", "{item}");
    assert_eq!(&serde_json::from_str::<Value>(item["arguments"].as_str().expect("a text")).expect("JSON"), input);
    let result = json!({ "type": "function_call_output", "call_id": item["call_id"], "output": "4" });
    let body = json!({ "input": [{ "role": "user", "content": "Hi" }, item, result], "max_output_tokens": 4 });
    assert_eq!(server.ok("/v1/responses", &body)["object"], "response");
}

#[test]
fn output_formats_are_enforced() {
    let server = Server::start(&[]);
    let schema = json!({ "type": "object", "properties": { "a": { "enum": ["x"] } }, "required": ["a"], "additionalProperties": false });
    let parse = |text: &Value| serde_json::from_str::<Value>(text.as_str().expect("a text")).expect("JSON");
    let chat = server.ok("/api/chat", &json!({ "model": MODEL, "messages": hi(), "format": schema, "stream": false }));
    assert_eq!(parse(&chat["message"]["content"]), json!({ "a": "x" }));
    let format = json!({ "format": { "type": "json_schema", "name": "n", "schema": schema } });
    let response = server.ok("/v1/responses", &json!({ "input": "Hi", "text": format }));
    assert_eq!(parse(&response["output"][0]["content"][0]["text"]), json!({ "a": "x" }));
    let format = json!({ "format": { "type": "json_schema", "schema": schema } });
    let message = server
        .ok("/v1/messages", &json!({ "model": MODEL, "max_tokens": 50, "messages": hi(), "output_config": format }));
    assert_eq!(parse(&message["content"][0]["text"]), json!({ "a": "x" }));
    let text = server.ok("/completion", &json!({ "prompt": "Hi", "grammar": "root ::= (\"yes\" | \"no\") [.!]" }));
    assert!(["yes.", "yes!", "no.", "no!"].contains(&text["content"].as_str().expect("a text")), "{text}");
    let text = server.ok("/completion", &json!({ "prompt": "Hi", "json_schema": schema }));
    assert_eq!(parse(&text["content"]), json!({ "a": "x" }));
}

#[test]
fn errors_have_the_form_of_the_api() {
    let server = Server::start(&["--manage-without-keys"]);
    let anthropic = |body: Value, status: u16, kind: &str| {
        let response = server.post("/v1/messages", &body);
        assert_eq!(response.status, status, "{}", response.text());
        let json = response.json();
        assert_eq!((&json["type"], &json["error"]["type"]), (&json!("error"), &json!(kind)), "{json}");
        assert!(json["error"]["message"].is_string() && json["request_id"].as_str() == response.header("x-request-id"));
    };
    anthropic(json!({}), 400, "invalid_request_error");
    anthropic(json!({ "model": MODEL, "messages": hi() }), 400, "invalid_request_error");
    anthropic(json!({ "model": "x", "max_tokens": 1, "messages": hi() }), 404, "not_found_error");
    anthropic(
        json!({ "model": MODEL, "max_tokens": 1, "messages": [{ "role": "user", "content": "dog ".repeat(600) }] }),
        400,
        "invalid_request_error",
    );
    for (path, body, status) in [
        ("/api/chat", json!({}), 400),
        ("/api/chat", json!({ "model": "x", "messages": hi() }), 404),
        ("/api/generate", json!({ "model": MODEL, "prompt": "a", "images": ["AA=="] }), 400),
        ("/api/show", json!({ "model": "x" }), 404),
        ("/api/embed", json!({ "model": MODEL, "input": "dog ".repeat(600), "truncate": false }), 400),
        ("/api/nothing", json!({}), 404),
        ("/api/pull", json!({ "model": "no source", "stream": false }), 400),
        ("/api/create", json!({ "model": "a", "from": MODEL, "system": "x" }), 400),
    ] {
        let response = server.post(path, &body);
        assert_eq!(response.status, status, "{path} {body}: {}", response.text());
        assert!(response.json()["error"].is_string(), "{path}: {}", response.text());
    }
    let tei = server.post("/embed", &json!({ "inputs": "a", "normalize": false }));
    assert_eq!((tei.status, &tei.json()["error_type"]), (400, &json!("Validation")));
    for (path, body, param) in [
        ("/completion", json!({ "prompt": "a", "mirostat": 2 }), "mirostat"),
        ("/completion", json!({}), "prompt"),
        ("/v1/responses", json!({ "input": "a", "previous_response_id": "resp_1" }), "previous_response_id"),
        ("/v1/responses", json!({ "input": "a", "background": true }), "background"),
    ] {
        let response = server.post(path, &body);
        assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!(param)), "{path}");
    }
}

#[test]
fn llama_servers_requests_have_their_form() {
    let server = Server::start(&["--max-body", "4000"]);
    let (content, native) = ("<|im_start|> a dog", "/v1/tokenize");
    let ids = |special: bool, parse: bool| {
        server.ok(native, &json!({ "text": content, "add_special": special, "parse_special": parse }))["tokens"].clone()
    };
    assert_eq!(server.ok("/tokenize", &json!({ "content": content })), json!({ "tokens": ids(false, true) }));
    let all = json!({ "content": content, "add_special": true, "parse_special": false, "with_pieces": true });
    let tokens = server.ok("/tokenize", &all)["tokens"].as_array().expect("tokens").clone();
    assert_eq!(tokens.iter().map(|token| token["id"].clone()).collect::<Value>(), ids(true, false));
    assert!(join(tokens.iter(), "/piece").contains("dog"));
    // vLLM's request under the same path
    assert_eq!(server.ok("/tokenize", &json!({ "prompt": content }))["tokens"], ids(true, false));
    let text = server.ok("/detokenize", &json!({ "tokens": ids(false, false) }));
    assert_eq!((&text["content"], &text["text"]), (&json!(content), &json!(content)));
    assert_eq!(server.post("/tokenize", &json!({})).json()["error"]["param"], "content");

    let body = json!({ "prompt": "Once upon a time", "n_predict": 8, "temperature": 0 });
    let greedy = server.ok("/completion", &body)["content"].clone();
    // without the sampler of temperature, one token is left by another
    let one =
        with(&body, json!({ "temperature": 1.5, "top_k": 1, "samplers": ["top_k", "infill"], "t_max_predict_ms": 1 }));
    let response = server.post("/completion", &one);
    assert_eq!((response.header("x-starling-skipped"), &response.json()["content"]), (Some("infill"), &greedy));
    assert_eq!(response.json()["generation_settings"]["temperature"], 1.0);
    let warm = server.ok("/completion", &with(&body, json!({ "n_predict": 0, "samplers": [] })));
    assert_eq!((&warm["content"], &warm["tokens_predicted"]), (&json!(""), &json!(0)));
    assert!(warm["timings"]["prompt_n"].as_u64().is_some() && warm["stop"] == true, "{warm}");
    assert_eq!(server.ok("/completion", &with(&body, json!({ "n_predict": 0, "response_fields": [""] }))), json!({}));
    let lines = json!({ "n_predict": 99, "n_indent": 4, "grammar": "root ::= \"a\\n    b\\n  c\\n    d\"" });
    let cut = server.ok("/completion", &with(&body, lines.clone()));
    assert_eq!((&cut["content"], &cut["stop_type"]), (&json!("a\n    b\n  "), &json!("limit")));
    let stream = events(&server.post("/completion", &with(&with(&body, lines), json!({ "stream": true }))));
    assert_eq!(join(stream.iter().map(|(_, data)| data), "/content"), "a\n    b\n  ");
    // the line comes with the end of the answer, since it may begin a stop string
    let held = json!({ "n_predict": 99, "stop": ["\n  cX"], "return_tokens": true, "grammar": "root ::= \"a\\n    b\\n  c\"" });
    let [whole, cut] =
        [0, 4].map(|n| server.ok("/completion", &with(&with(&body, held.clone()), json!({ "n_indent": n }))));
    assert_eq!((&whole["content"], &cut["content"]), (&json!("a\n    b\n  c"), &json!("a\n    b\n  ")));
    assert_eq!((&cut["tokens"], &cut["tokens_predicted"]), (&whole["tokens"], &whole["tokens_predicted"]));

    let large =
        json!({ "model": MODEL, "max_tokens": 1, "messages": [{ "role": "user", "content": "x".repeat(5000) }] });
    let refused = server.post("/v1/messages", &large);
    assert_eq!((refused.status, &refused.json()["error"]["type"]), (413, &json!("request_too_large")));
}

#[test]
fn the_options_of_anthropic_and_ollama_hold() {
    let server = Server::start(&["--chat-template", &fixture("chat/reasoning-calls.jinja")]);
    let body = json!({ "model": MODEL, "max_tokens": 100, "temperature": 0, "messages": hi(),
        "context_management": { "edits": [] }, "cache_control": { "type": "ephemeral" } });
    let thinking = |more: Value| {
        let response = server.post("/v1/messages", &with(&body, more));
        assert_eq!(response.header("x-starling-ignored-fields"), None);
        let blocks = response.json()["content"].as_array().expect("blocks").clone();
        join(blocks.iter(), "/thinking")
    };
    let free = thinking(json!({}));
    let short = thinking(json!({ "thinking": { "type": "enabled", "budget_tokens": 5 } }));
    assert!(free.starts_with(&short) && short.len() < free.len() && !short.is_empty(), "{short:?} {free:?}");
    let schema = json!({ "type": "object", "properties": { "a": { "enum": ["x"] } }, "required": ["a"], "additionalProperties": false });
    let format = json!({ "type": "json_schema", "schema": schema });
    let budget = json!({ "type": "enabled", "budget_tokens": 3 });
    let answer = server.ok("/v1/messages", &with(&body, json!({ "output_format": format, "thinking": budget })));
    let text = join(answer["content"].as_array().expect("blocks").iter(), "/text");
    assert_eq!(serde_json::from_str::<Value>(&text).expect("JSON"), json!({ "a": "x" }));
    let both = with(&body, json!({ "output_format": format, "output_config": { "format": format } }));
    assert_eq!(server.post("/v1/messages", &both).status, 400);
    // counts are those of the same prompt
    let asked = json!({ "model": MODEL, "max_tokens": 4, "messages": hi(), "thinking": { "type": "disabled" },
        "system": "Be brief.", "tools": [{ "name": "f", "input_schema": schema }] });
    let usage = server.ok("/v1/messages", &asked)["usage"].clone();
    let n = usage["input_tokens"].as_u64().zip(usage["cache_read_input_tokens"].as_u64()).map(|(a, b)| a + b);
    assert_eq!(server.ok("/v1/messages/count_tokens", &asked)["input_tokens"].as_u64(), n);

    let details = server.get("/api/tags").json()["models"][0]["details"].clone();
    assert_eq!(details["quantization_level"], "Q8_0");
    assert!(details["parameter_size"].as_str().expect("a size").ends_with(['K', 'M']), "{details}");
    let show = server.ok("/api/show", &json!({ "model": MODEL }));
    assert_eq!(show["details"], details);
    assert!(show["model_info"]["general.parameter_count"].as_u64() > Some(1000));
    for n in [0, -1, -2] {
        let body = json!({ "model": MODEL, "prompt": "Once", "raw": true, "stream": false, "options": { "num_predict": n, "stop": ["."] } });
        assert!(server.ok("/api/generate", &body)["eval_count"].as_u64() > Some(1), "{n}");
    }
}

/// What the clients of each vendor send for a limit.
#[test]
fn limits_are_read_as_the_vendors_write_them() {
    let server = Server::start(&["--max-tokens", "7"]);
    let ask = |path: &str, fields: Value| {
        let body = with(&json!({ "model": MODEL, "prompt": "Once", "ignore_eos": true, "temperature": 0 }), fields);
        server.ok(path, &body)
    };
    let count = |answer: Value| answer["usage"]["completion_tokens"].as_u64();
    for (limit, n) in [(json!(-1), 7), (json!(5.0), 5), (json!(-1.0), 7)] {
        assert_eq!(count(ask("/v1/completions", json!({ "max_tokens": limit }))), Some(n), "{limit}");
        assert_eq!(count(ask("/v1/generate", json!({ "max_completion_tokens": limit }))), Some(n), "{limit}");
        let llama = ask("/completion", json!({ "n_predict": limit, "top_k": 40.0, "id_slot": -1 }));
        assert_eq!(llama["tokens_predicted"].as_u64(), Some(n), "{limit}");
        let options = json!({ "num_predict": limit, "num_ctx": 512.0, "seed": -1 });
        let chat = json!({ "model": MODEL, "messages": hi(), "stream": false, "options": options });
        assert!(server.ok("/api/chat", &chat)["eval_count"].as_u64() <= Some(n), "{limit}");
        let chat = json!({ "messages": hi(), "max_tokens": limit, "thinking_budget_tokens": -1, "n": 1.0 });
        assert!(count(server.ok("/v1/chat/completions", &chat)) <= Some(n), "{limit}");
    }
    assert_eq!(server.post("/v1/completions", &json!({ "prompt": "a", "max_tokens": 1.5 })).status, 400);
    assert_eq!(server.post("/v1/completions", &json!({ "prompt": "a", "max_tokens": -2 })).status, 400);
}

/// An agent whose tool returns a screenshot goes on: the conversation is not lost.
#[test]
fn an_image_in_a_result_is_no_error() {
    let server = Server::start(&["--chat-template", &fixture("chat/qwen-tools.jinja")]);
    let tool = json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,AA==" } });
    let call = json!({ "id": "c", "type": "function", "function": { "name": "see", "arguments": "{}" } });
    let messages = json!([
        { "role": "user", "content": "Look." },
        { "role": "assistant", "content": "", "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "c", "content": [tool] },
    ]);
    let rendered = server.ok("/v1/apply-template", &json!({ "messages": messages }))["prompt"].clone();
    assert!(rendered.as_str().is_some_and(|text| text.contains("an image is left out")), "{rendered}");
    server.ok("/v1/chat/completions", &json!({ "messages": messages, "max_tokens": 2 }));
    let items = json!([
        { "role": "user", "content": "Look." },
        { "type": "function_call", "call_id": "c", "name": "see", "arguments": "{}" },
        { "type": "function_call_output", "call_id": "c", "output": [{ "type": "input_image", "image_url": "data:" }] },
    ]);
    server.ok("/v1/responses", &json!({ "input": items, "max_output_tokens": 2 }));
    let blocks = json!([
        { "role": "user", "content": "Look." },
        { "role": "assistant", "content": [{ "type": "tool_use", "id": "c", "name": "see", "input": {} }] },
        { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "c", "content": [{ "type": "image" }] }] },
    ]);
    server.ok("/v1/messages", &json!({ "model": MODEL, "max_tokens": 2, "messages": blocks }));
    let ollama = json!([{ "role": "user", "content": "Look." }, { "role": "tool", "content": "", "images": ["AA=="] }]);
    server.ok(
        "/api/chat",
        &json!({ "model": MODEL, "messages": ollama, "stream": false, "options": { "num_predict": 2 } }),
    );
    // a question about an image has no answer without it
    let asked = json!({ "messages": [{ "role": "user", "content": [tool] }] });
    assert_eq!(server.post("/v1/chat/completions", &asked).status, 400);
}

#[test]
fn administrators_unload_models_of_ollama() {
    let server = Managed::start(&[]);
    let body = json!({ "model": MODEL, "messages": [], "keep_alive": 0 });
    assert_eq!(server.server.post("/api/chat", &body).status, 403);
    let key = format!("Bearer {}", admin_client::KEY);
    let unloaded = server.server.post_with("/api/chat", &[("authorization", &key)], &body);
    assert_eq!((unloaded.status, &unloaded.json()["done_reason"]), (200, &json!("unload")), "{}", unloaded.text());
}

#[test]
fn scripts_of_other_origins_see_the_headers() {
    let server = Server::start(&["--cors-origins", "https://a.example"]);
    let headers = [("origin", "https://a.example"), ("content-type", "application/json")];
    let body = json!({ "prompt": "a", "max_tokens": 1, "unknown": 1 }).to_string();
    let response = server.send("POST", "/v1/completions", &headers, body.as_bytes());
    let seen = response.header("access-control-expose-headers").expect("a header");
    for name in ["x-starling-model", "x-starling-skipped", "x-starling-ignored-fields", "x-request-id", "retry-after"] {
        assert!(seen.contains(name), "{seen}");
    }
}

#[test]
fn models_are_described_as_each_client_asks() {
    let server = Server::start(&[]);
    let headers = [("anthropic-version", "2023-06-01")];
    let list = server.send("GET", "/v1/models", &headers, b"").json();
    assert_eq!((&list["first_id"], &list["data"][0]["type"]), (&json!(MODEL), &json!("model")));
    assert_eq!(server.send("GET", &format!("/v1/models/{MODEL}"), &headers, b"").json()["display_name"], MODEL);
    let unknown = server.send("GET", "/v1/models/x", &headers, b"");
    assert_eq!((unknown.status, &unknown.json()["error"]["type"]), (404, &json!("not_found_error")));

    let tags = server.get("/api/tags").json();
    assert_eq!((&tags["models"][0]["name"], &tags["models"][0]["details"]["format"]), (&json!(MODEL), &json!("gguf")));
    assert_eq!(server.get("/api/ps").json()["models"][0]["model"], MODEL);
    assert!(server.get("/api/version").json()["version"].is_string());
    let show = server.ok("/api/show", &json!({ "model": MODEL }));
    assert!(show["capabilities"].as_array().is_some_and(|all| all.contains(&json!("completion"))), "{show}");
    assert_eq!(show["model_info"]["general.architecture"], show["details"]["family"]);
    assert_eq!(server.send("HEAD", "/", &[], b"").status, 200);
    assert_eq!(server.send("GET", "/", &[("user-agent", "ollama/0.12")], b"").text(), "Ollama is running");
    let load = server.ok("/api/chat", &json!({ "model": MODEL, "messages": [] }));
    assert_eq!((&load["done"], &load["done_reason"]), (&json!(true), &json!("load")));

    let props = server.get("/props").json();
    assert_eq!((&props["model_alias"], &props["default_generation_settings"]["n_ctx"]), (&json!(MODEL), &json!(512)));
    assert_eq!(server.get("/lora-adapters").json(), json!([]));
    assert_eq!(server.get("/info").json()["model_id"], MODEL);
    let count = server.ok("/v1/chat/completions/input_tokens", &json!({ "messages": hi() }));
    assert_eq!(
        count["input_tokens"],
        server.ok("/v1/responses/input_tokens", &json!({ "input": "Hi" }))["input_tokens"]
    );
}

#[test]
fn embeddings_are_the_same_in_each_api() {
    let server = Server::start(&[]);
    let vector = server.ok("/v1/embeddings", &json!({ "input": "a dog" }))["data"][0]["embedding"].clone();
    assert_eq!(server.ok("/api/embed", &json!({ "model": MODEL, "input": "a dog" }))["embeddings"][0], vector);
    assert_eq!(server.ok("/api/embeddings", &json!({ "model": MODEL, "prompt": "a dog" }))["embedding"], vector);
    assert_eq!(server.ok("/embed", &json!({ "inputs": ["a dog"] }))[0], vector);
    assert_eq!(server.ok("/embedding", &json!({ "content": "a dog" }))[0]["embedding"][0], vector);
    // Ollama cuts unless it is told not to
    let strict = json!({ "model": MODEL, "input": "dog ".repeat(600), "truncate": false });
    assert_eq!(server.post("/api/embed", &strict).status, 400);
    let older = json!({ "model": MODEL, "prompt": "dog ".repeat(600) });
    assert!(server.ok("/api/embeddings", &older)["embedding"].is_array());
    let long = json!({ "model": MODEL, "input": "dog ".repeat(600) });
    assert_eq!(
        server.ok("/api/embed", &long)["embeddings"][0].as_array().map(Vec::len),
        vector.as_array().map(Vec::len)
    );
}

#[test]
fn keys_and_probes_hold_for_every_api() {
    let server = Server::start(&["--api-key", "sk-a"]);
    let body = json!({ "model": MODEL, "max_tokens": 1, "messages": hi() });
    let status = |path: &str, headers: &[(&str, &str)]| server.post_with(path, headers, &body).status;
    for path in ["/v1/messages", "/api/chat", "/v1/responses", "/completion", "/embed", "/api/pull"] {
        assert_eq!(status(path, &[]), 401, "{path}");
    }
    assert_eq!(server.post("/v1/messages", &body).json()["error"]["type"], "authentication_error");
    assert!(server.post("/api/chat", &body).json()["error"].is_string());
    assert_eq!(status("/v1/messages", &[("x-api-key", "sk-a")]), 200);
    assert_eq!(status("/v1/messages", &[("x-api-key", "sk-b")]), 401);
    assert_eq!(status("/v1/messages", &[("x-api-key", "sk-a"), ("authorization", "Bearer sk-a")]), 400);
    // models are added by administrators only
    let pull = server.post_with("/api/pull", &[("x-api-key", "sk-a")], &json!({ "model": "hf:a/b" }));
    assert_eq!((pull.status, pull.json()["error"].is_string()), (403, true));

    let open = Server::start(&[]);
    for body in [json!({ "input": [] }), json!({ "input": "Hi", "generate": false })] {
        let whole = open.ok("/v1/responses", &body);
        assert_eq!((&whole["status"], &whole["output"]), (&json!("completed"), &json!([])));
        let stream = events(&open.post("/v1/responses", &with(&body, json!({ "stream": true }))));
        assert_eq!(stream.last().expect("an event").0, "response.completed");
    }
}
