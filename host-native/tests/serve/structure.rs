//! Structured output by schema, regular expression and grammar, and forced tool calls. `tests/clients/structure.py`
//! validates answers to many schemas with jsonschema.

use std::thread;

use serde_json::{Value, json};

use crate::server::{Server, fixture};

const CHAT: &str = "/v1/chat/completions";

/// Whether an answer satisfies its constraint.
type Judge<'a> = &'a dyn Fn(&str) -> bool;

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "minLength": 1, "maxLength": 9 },
            "age": { "type": "integer", "minimum": 0, "maximum": 120 },
            "kind": { "enum": ["cat", "dog"] },
            "tags": { "type": "array", "items": { "type": "boolean" }, "minItems": 1, "maxItems": 3 },
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": false,
    })
}

/// Checks that a text is JSON valid by [`schema`].
#[track_caller]
fn check(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    let keys: Vec<&str> = value.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!(keys, ["name", "age", "kind", "tags"], "{text}");
    assert!((1..=9).contains(&value["name"].as_str().expect("a name").chars().count()), "{text}");
    assert!(value["age"].as_u64().expect("an age") <= 120, "{text}");
    assert!(["cat", "dog"].contains(&value["kind"].as_str().expect("a kind")), "{text}");
    let tags = value["tags"].as_array().expect("tags");
    assert!((1..=3).contains(&tags.len()) && tags.iter().all(Value::is_boolean), "{text}");
}

fn ask(more: &Value) -> Value {
    let mut body =
        json!({ "messages": [{ "role": "user", "content": "Tell me of a cat" }], "max_tokens": 200, "seed": 1 });
    more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
    body
}

/// Content and finish reason of a chat answer; checks that the streamed one is equal.
#[track_caller]
fn chat(server: &Server, more: &Value) -> (String, String) {
    let body = ask(more);
    let choice = server.ok(CHAT, &body)["choices"][0].clone();
    let text = choice["message"]["content"].as_str().unwrap_or_else(|| panic!("{choice}")).to_string();
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let chunks = server.post(CHAT, &streamed).chunks();
    let pieces: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(pieces, text);
    assert_eq!(chunks.last().expect("chunks")["choices"][0]["finish_reason"], choice["finish_reason"]);
    (text, choice["finish_reason"].as_str().expect("an end").into())
}

fn response_format() -> Value {
    json!({ "type": "json_schema", "json_schema": { "name": "pet", "schema": schema(), "strict": true } })
}

#[test]
fn answers_follow_a_schema() {
    let server = Server::start(&[]);
    let format = response_format();
    for (seed, temperature) in [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.5), (5, 2.0)] {
        let (text, end) =
            chat(&server, &json!({ "response_format": format, "seed": seed, "temperature": temperature }));
        check(&text);
        assert_eq!(end, "stop", "{text}");
    }
    let several = server.ok(CHAT, &ask(&json!({ "response_format": format, "n": 3, "logprobs": true })));
    for choice in several["choices"].as_array().expect("choices") {
        let text = choice["message"]["content"].as_str().expect("a text");
        check(text);
        let tokens = choice["logprobs"]["content"].as_array().expect("a list").iter();
        assert_eq!(tokens.filter_map(|t| t["token"].as_str()).collect::<String>(), text);
    }
    let body = json!({ "prompt": "A cat: ", "response_format": format, "max_tokens": 200, "seed": 7 });
    let response = server.ok("/v1/completions", &body);
    check(response["choices"][0]["text"].as_str().expect("a text"));
    let response = server.ok("/v1/generate", &body);
    check(response["text"].as_str().expect("a text"));
    assert_eq!(response["finish_reason"], "stop");
    // max_tokens cuts the answer
    let (text, end) = chat(&server, &json!({ "response_format": format, "max_tokens": 4 }));
    assert!(end == "length" && serde_json::from_str::<Value>(&text).is_err(), "{text}");
    // the same bytes in a batch as alone
    let seeds = 0..8;
    let asked = |seed: u64| match seed % 4 {
        3 => ask(&json!({ "seed": seed, "max_tokens": 40 })),
        _ => ask(&json!({ "seed": seed, "response_format": format })),
    };
    let answer = |seed| server.ok(CHAT, &asked(seed))["choices"][0].clone();
    let alone: Vec<Value> = seeds.clone().map(answer).collect();
    let together: Vec<Value> = thread::scope(|scope| {
        let askers: Vec<_> = seeds.map(|seed| scope.spawn(move || answer(seed))).collect();
        askers.into_iter().map(|asker| asker.join().expect("an answer")).collect()
    });
    assert_eq!(together, alone);
}

#[test]
fn every_field_name_of_a_constraint_is_known() {
    let server = Server::start(&[]);
    let lark = "start: \"<\" WORD \">\"\nWORD: /[a-z]{2,5}/";
    let is_tagged = |text: &str| {
        let word = text.strip_prefix('<').and_then(|t| t.strip_suffix('>')).unwrap_or_default();
        (2..=5).contains(&word.len()) && word.bytes().all(|b| b.is_ascii_lowercase())
    };
    let is_date = |text: &str| {
        text.len() == 7
            && text.as_bytes()[4] == b'-'
            && text.bytes().enumerate().all(|(i, b)| i == 4 || b.is_ascii_digit())
    };
    let choices = ["yes", "no", "say \"maybe\"\n\\/\u{7f}é"];
    let is_choice = |text: &str| choices.contains(&text);
    let is_pet = |text: &str| {
        check(text);
        true
    };
    let is_object = |text: &str| serde_json::from_str::<Value>(text).is_ok_and(|v| v.is_object());
    let forms: &[(Value, Judge<'_>)] = &[
        (json!({ "json_schema": schema() }), &is_pet),
        (json!({ "response_format": { "type": "json_object", "schema": schema() } }), &is_pet),
        (json!({ "response_format": { "type": "json_schema", "schema": schema() } }), &is_pet),
        (json!({ "grammar": lark }), &is_tagged),
        (json!({ "structured_outputs": { "json": schema() } }), &is_pet),
        (json!({ "structured_outputs": { "json": schema().to_string() } }), &is_pet),
        (json!({ "structured_outputs": { "regex": "[0-9]{4}-[0-9]{2}" } }), &is_date),
        (json!({ "structured_outputs": { "choice": choices } }), &is_choice),
        (json!({ "structured_outputs": { "grammar": lark } }), &is_tagged),
        (json!({ "guided_json": schema() }), &is_pet),
        (json!({ "guided_regex": "\\d\\d\\d\\d-(0|1)\\d", "temperature": 2 }), &is_date),
        (json!({ "guided_choice": choices }), &is_choice),
        (json!({ "guided_grammar": lark }), &is_tagged),
    ];
    for (form, is_so) in forms {
        for seed in 0..3 {
            let mut form = form.clone();
            form["seed"] = json!(seed);
            let (text, end) = chat(&server, &form);
            assert!(is_so(&text) && end == "stop", "{form}: {text:?}");
        }
    }
    // an unconstrained object may be long: check that the cut answer is a prefix of one
    for form in [
        json!({ "response_format": { "type": "json_object" } }),
        json!({ "structured_outputs": { "json_object": true } }),
    ] {
        let (text, end) = chat(&server, &form);
        assert!(text.starts_with('{') && (end == "length" || is_object(&text)), "{text}");
    }
    let (text, _) = chat(&server, &json!({ "response_format": { "type": "text" }, "seed": 4 }));
    assert_eq!(text, chat(&server, &json!({ "seed": 4 })).0);
}

#[test]
fn constraints_that_cannot_be_enforced_are_refused() {
    let server = Server::start(&["--max-grammar", "4096", "--grammar-items", "2000"]);
    let format = |schema: Value| json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": schema } } });
    let inner = "response_format.json_schema.schema";
    let deep = (0..100).fold(json!({ "type": "string" }), |inner, _| json!({ "type": "array", "items": inner }));
    let chain: String = (0..300).map(|i| format!("T{i}: T{}\n", i + 1)).collect();
    for (form, param, message) in [
        (format(json!({ "not": { "type": "string" } })), inner, "\"not\""),
        (
            format(json!({ "type": "object", "properties": { "a": { "type": "array", "uniqueItems": true } } })),
            inner,
            "uniqueItems",
        ),
        (format(json!({ "type": "text" })), inner, "text"),
        (format(json!({ "$ref": "#/$defs/absent" })), inner, "absent"),
        (format(json!({ "$ref": "https://example.org/x.json" })), inner, "example.org"),
        (format(json!({ "type": "integer", "minimum": 3, "maximum": 2 })), inner, "nsatisfiable"),
        (format(json!({ "const": 175_928_847_299_117_063_u64 })), inner, "64-bit float"),
        (format(json!({ "$ref": "#/$defs/a~1b" })), inner, "names no part"),
        (format(json!({ "$ref": "#" })), inner, "has no finite text"),
        (format(json!(3)), inner, "not a schema"),
        (format(Value::Null), inner, "missing"),
        (format(json!({ "description": "x".repeat(5000) })), inner, "at most 4096"),
        (json!({ "response_format": { "type": "xml" } }), "response_format.type", "json_object or json_schema"),
        (json!({ "response_format": {} }), "response_format", "missing field `type`"),
        (json!({ "response_format": "json" }), "response_format", "invalid type"),
        (json!({ "guided_regex": "(" }), "guided_regex", "("),
        (json!({ "guided_regex": "" }), "guided_regex", "empty"),
        (json!({ "guided_regex": "(?=a)b" }), "guided_regex", "look"),
        (json!({ "guided_choice": [] }), "guided_choice", "no texts"),
        (json!({ "guided_json": "{" }), "guided_json", "not JSON"),
        (json!({ "grammar": "root ::= (" }), "grammar", "GBNF: line 1"),
        (json!({ "grammar": "start: absent" }), "grammar", "absent"),
        (json!({ "grammar": "" }), "grammar", ""),
        (json!({ "grammar": format!("start: T0\n{chain}") }), "grammar", "T300"),
        (json!({ "grammar": format!("start: {}\"a\"{}", "(".repeat(1500), ")".repeat(1500)) }), "grammar", "nested"),
        (
            json!({ "guided_regex": format!("{}a{}", "(".repeat(1500), ")".repeat(1500)) }),
            "guided_regex",
            "invalid regex",
        ),
        (json!({ "structured_outputs": { "regex": "[" } }), "structured_outputs.regex", "["),
        (json!({ "json_schema": schema(), "grammar": "start: \"a\"" }), "grammar", "json_schema are both given"),
        (json!({ "json_schema": schema(), "receipt": true }), "receipt", "constraint"),
    ] {
        let response = server.post(CHAT, &ask(&form));
        assert_eq!(response.status, 400, "{form}: {}", response.text());
        let error = response.json()["error"].clone();
        assert_eq!(error["param"], param, "{form}: {error}");
        assert!(error["message"].as_str().expect("a message").contains(message), "{form}: {error}");
        assert!(!response.text().contains("backtrace") && response.text().len() < 2000, "{error}");
    }
    // an expensive expression is an error or slow, and the server stays alive
    let heavy = ["(a|b|ab)*c{1,1000}(d?){500}d{500}", "(.{0,400}a.{0,400}){20}", "[a-z]{0,4000}[^b]{0,4000}x"];
    for regex in heavy {
        let response = server.post(CHAT, &ask(&json!({ "guided_regex": regex, "max_tokens": 8 })));
        assert!([200, 400].contains(&response.status), "{regex}: {}", response.text());
    }
    let response = server.post(CHAT, &ask(&json!({ "json_schema": deep, "max_tokens": 8 })));
    assert!([200, 400].contains(&response.status), "{}", response.text());
    let (text, _) = chat(&server, &json!({ "guided_choice": ["alive"] }));
    assert_eq!(text, "alive");
}

#[test]
fn tool_choice_forces_calls() {
    let server = Server::start(&["--chat-template", &fixture("chat/qwen-tools.jinja")]);
    let weather = json!({ "type": "function", "function": { "name": "weather_of", "parameters": {
        "type": "object", "properties": { "city": { "$ref": "#/$defs/city" }, "days": { "type": "integer", "minimum": 1, "maximum": 9 } },
        "required": ["city", "days"], "additionalProperties": false, "$defs": { "city": { "enum": ["Oslo", "Rome"] } },
    } } });
    let now = json!({ "type": "function", "function": { "name": "say \"now\"" } });
    let tools = json!([weather, now]);
    let named = json!({ "type": "function", "function": { "name": "weather_of" } });
    // names and arguments of the tool calls; checks that the streamed ones are equal
    let calls = |more: &Value| {
        let mut body = ask(&json!({ "tools": tools }));
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        let choice = server.ok(CHAT, &body)["choices"][0].clone();
        body["stream"] = json!(true);
        let chunks = server.post(CHAT, &body).chunks();
        let deltas = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["tool_calls"].as_array()).flatten();
        let of = |call: &Value| {
            let text = |name: &str| call["function"][name].as_str().expect("a text").to_string();
            // those of a call that is cut are no JSON
            (text("name"), serde_json::from_str::<Value>(&text("arguments")).unwrap_or_default())
        };
        let whole = choice["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
        let whole: Vec<(String, Value)> = whole.iter().map(of).collect();
        // the parts of a call add up to it
        let mut parts: Vec<Value> = Vec::new();
        for delta in deltas {
            let arguments = |call: &Value| call["function"]["arguments"].as_str().expect("a text").to_string();
            match parts.iter_mut().find(|call| call["index"] == delta["index"]) {
                Some(call) => call["function"]["arguments"] = (arguments(call) + &arguments(delta)).into(),
                None => parts.push(delta.clone()),
            }
        }
        let mut whole = whole;
        assert_eq!(parts.iter().map(of).collect::<Vec<_>>(), whole);
        // the last call may be cut
        if choice["finish_reason"] == "length" {
            whole.pop();
        }
        (whole, choice)
    };
    let is_right = |(name, arguments): &(String, Value)| {
        if name == "weather_of" {
            let city = arguments["city"].as_str().expect("a city");
            ["Oslo", "Rome"].contains(&city) && (1..=9).contains(&arguments["days"].as_u64().expect("days"))
        } else {
            name == "say \"now\"" && *arguments == json!({})
        }
    };
    let mut names = std::collections::BTreeSet::new();
    for seed in 0..6 {
        let (made, choice) = calls(&json!({ "tool_choice": named, "seed": seed, "temperature": 1.5 }));
        assert!(made.len() == 1 && made[0].0 == "weather_of" && is_right(&made[0]), "{choice}");
        assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &Value::Null));
        let one = json!({ "tool_choice": "required", "parallel_tool_calls": false, "seed": seed, "temperature": 2 });
        let (made, choice) = calls(&one);
        assert!(made.len() == 1 && is_right(&made[0]), "{choice}");
        names.insert(made[0].0.clone());
        let (made, choice) = calls(&json!({ "tool_choice": "required", "seed": seed }));
        assert!(!made.is_empty() && made.iter().all(is_right), "{choice}");
    }
    assert_eq!(names.len(), 2, "both are called");
    // calls of a strict function follow its schema; text stays unconstrained
    let mut strict = tools.clone();
    strict[0]["function"]["strict"] = json!(true);
    let (made, said) = calls(&json!({ "max_tokens": 30, "temperature": 0, "tools": strict }));
    assert!(made.is_empty() && said["message"]["content"].as_str().is_some_and(|text| text.contains(' ')), "{said}");
    for (more, param, message) in [
        (json!({ "tool_choice": { "type": "function", "function": { "name": "absent" } } }), "tool_choice", "absent"),
        (json!({ "tool_choice": { "type": "tool" } }), "tool_choice", "auto, none, required"),
        (json!({ "tool_choice": "required", "tools": [] }), "tool_choice", "no tools"),
        (
            json!({ "tool_choice": "required", "response_format": response_format() }),
            "response_format.json_schema.schema",
            "tool_choice",
        ),
        (
            json!({ "tool_choice": "required", "tools": [now, { "type": "function", "function": {
            "name": "f", "parameters": { "type": "object", "not": {} } } }] }),
            "tools[1].function.parameters",
            "not",
        ),
    ] {
        let mut body = ask(&json!({ "tools": tools }));
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        let response = server.post(CHAT, &body);
        let error = response.json()["error"].clone();
        assert_eq!((response.status, &error["param"]), (400, &json!(param)), "{more}: {error}");
        assert!(error["message"].as_str().expect("a message").contains(message), "{more}: {error}");
    }
}

/// The id of the first token of `text` in the middle of a text.
fn first_token(server: &Server, text: &str) -> String {
    let whole = server.ok("/v1/tokenize", &json!({ "text": format!("a{text}"), "add_special": false }));
    let at = whole["offsets"].as_array().expect("offsets").iter().position(|range| range[0] == 1);
    whole["tokens"][at.expect("a token of its own")].to_string()
}

#[test]
fn an_answer_is_a_call_or_follows_the_schema() {
    let server = Server::start(&["--chat-template", &fixture("chat/qwen-tools.jinja")]);
    let parameters = json!({ "type": "object", "properties": { "city": { "enum": ["Oslo", "Rome"] } }, "required": ["city"],
        "additionalProperties": false });
    let function = |strict: bool| json!({ "name": "weather_of", "strict": strict, "parameters": parameters });
    let tools = |strict: bool| json!([{ "type": "function", "function": function(strict) }]);
    let bias = |first: &str, strict: bool| {
        json!({ "tools": tools(strict), "response_format": response_format(), "max_tokens": 300, "parallel_tool_calls": false,
            "logit_bias": { first_token(&server, first): 100 } })
    };
    for strict in [true, false] {
        let (text, end) = chat(&server, &bias("{", strict));
        check(&text);
        assert_eq!(end, "stop");
    }
    // the model may call a tool instead, a strict one by its schema
    let body = ask(&bias("<", true));
    let choice = server.ok(CHAT, &body)["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
    assert_eq!(choice["message"]["content"], Value::Null);
    let call = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!(call["name"], "weather_of");
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().expect("a text")).expect("JSON");
    assert!(["Oslo", "Rome"].contains(&arguments["city"].as_str().expect("a city")), "{arguments}");
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let chunks = server.post(CHAT, &streamed).chunks();
    assert_eq!(chunks.last().expect("chunks")["choices"][0]["finish_reason"], "tool_calls");
    // the error names the part of the request that has it
    for (more, param) in [
        (json!({ "json_schema": { "not": {} } }), "json_schema"),
        (json!({ "guided_regex": "(" }), "guided_regex"),
        (
            json!({ "json_schema": {}, "tools": [{ "type": "function", "function": { "name": "f", "strict": true,
                "parameters": { "type": "object", "not": {} } } }] }),
            "tools[0].function.parameters",
        ),
    ] {
        let mut body = ask(&json!({ "tools": tools(true) }));
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        let response = server.post(CHAT, &body);
        assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!(param)), "{more}");
    }
}

#[test]
fn a_cut_call_leaves_no_markup() {
    let server = Server::start(&["--chat-template", &fixture("chat/qwen-tools.jinja")]);
    let tools = json!([{ "type": "function", "function": { "name": "weather_of" } }]);
    let mut n_cut = 0;
    for max_tokens in 1..40 {
        let body = json!({ "tools": tools, "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": max_tokens });
        let choice = server.ok(CHAT, &ask(&body))["choices"][0].clone();
        let mut streamed = ask(&body);
        streamed["stream"] = json!(true);
        let chunks = server.post(CHAT, &streamed).chunks();
        let text: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(text, "", "{max_tokens}");
        assert_eq!(choice["message"]["content"].as_str().unwrap_or_default(), "", "{max_tokens}");
        n_cut += usize::from(choice["finish_reason"] == "length");
    }
    assert!(n_cut > 5, "{n_cut} answers were cut");
    // a stop string cuts as well
    let body = json!({ "tools": tools, "tool_choice": "required", "stop": "name", "max_tokens": 40 });
    let choice = server.ok(CHAT, &ask(&body))["choices"][0].clone();
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(""), &json!("stop")));
}
