//! Responses of each endpoint.

use base64::Engine as _;
use serde_json::{Value, json};

use crate::server::{Server, command, fixture};

fn pinned() -> Value {
    let path = fixture("goldens/pinned/tiny-q8_0-greedy.json");
    serde_json::from_slice(&std::fs::read(path).expect("a golden")).expect("JSON")
}

#[test]
fn completions_equal_the_pinned_goldens() {
    let server = Server::start(&[]);
    let pinned = pinned();
    let text = pinned["text"].as_str().expect("a text");
    let n = pinned["ids"].as_array().expect("ids").len();
    let body =
        json!({ "prompt": "Once upon a time", "temperature": 0, "max_tokens": n, "model": "starling-tiny-q8_0" });
    let response = server.ok("/v1/completions", &body);
    assert_eq!(response["choices"][0]["text"], text);
    assert_eq!(response["choices"][0]["finish_reason"], "length");
    assert_eq!(response["usage"]["completion_tokens"], n);
    assert_eq!(response["usage"]["prompt_tokens"], 5);
    assert_eq!(response["object"], "text_completion");
    assert!(response["system_fingerprint"].as_str().expect("a name").starts_with("fp_"));
    // a list of prompts with echo; then a prompt of token ids
    let ids = server.ok("/v1/tokenize", &json!({ "text": "Once upon a time" }));
    assert_eq!(ids["pieces"][1], "Once");
    assert_eq!(ids["offsets"].as_array().expect("offsets").last(), Some(&json!([11, 16])));
    let echoed =
        json!({ "prompt": ["Once upon a time", "The dog"], "temperature": 0, "max_tokens": 8, "echo": true, "n": 2 });
    let choices = server.ok("/v1/completions", &echoed)["choices"].clone();
    assert_eq!(choices.as_array().map(Vec::len), Some(4));
    for (i, choice) in choices.as_array().expect("choices").iter().enumerate() {
        let head = ["Once upon a time", "The dog"][i / 2];
        assert!(choice["text"].as_str().expect("text").starts_with(head) && choice["index"] == i, "{choice}");
    }
    let whole = format!("Once upon a time{text}");
    assert!(whole.starts_with(choices[0]["text"].as_str().expect("text")));
    let tokens = json!({ "prompt": [ids["tokens"]], "temperature": 0, "max_tokens": n });
    assert_eq!(server.ok("/v1/completions", &tokens)["choices"][0]["text"], text);
    // OpenAI's default of max_tokens is 16
    let default = server.ok("/v1/completions", &json!({ "prompt": ids["tokens"], "temperature": 0 }));
    assert_eq!(default["usage"]["completion_tokens"], 16);
    let nothing = server.ok("/v1/completions", &json!({ "prompt": "Once", "echo": true, "max_tokens": 0 }));
    assert_eq!((&nothing["choices"][0]["text"], &nothing["usage"]["completion_tokens"]), (&json!("Once"), &json!(0)));
}

#[test]
fn a_chat_streams_as_openai_does() {
    let server = Server::start(&[]);
    let body = json!({
        "messages": [{ "role": "user", "content": "Tell me a story" }], "max_completion_tokens": 12, "seed": 11,
        "stream": true, "stream_options": { "include_usage": true }, "n": 2,
    });
    let response = server.post("/v1/chat/completions", &body);
    assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let chunks = response.chunks();
    assert!(chunks.iter().all(|c| c["object"] == "chat.completion.chunk" && c["id"] == chunks[0]["id"]));
    assert!(chunks.iter().all(|c| c["seed"] == 11 && c["model"] == "starling-tiny-q8_0"));
    for index in 0..2 {
        let mine: Vec<&Value> =
            chunks.iter().filter_map(|c| c["choices"].get(0)).filter(|c| c["index"] == index).collect();
        assert_eq!(mine[0]["delta"], json!({ "role": "assistant", "content": "" }));
        let last = mine.last().expect("chunks");
        assert_eq!(last["delta"], json!({}));
        assert!(
            last["finish_reason"].is_string() && mine[..mine.len() - 1].iter().all(|c| c["finish_reason"].is_null())
        );
    }
    let (last, others) = chunks.split_last().expect("chunks");
    assert!(others.iter().all(|c| c["usage"].is_null() && c.get("usage").is_some()));
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["total_tokens"].as_u64(), last["usage"]["prompt_tokens"].as_u64().map(|n| n + 24));
    // without stream_options there is no usage
    let plain =
        server.post("/v1/chat/completions", &json!({ "messages": body["messages"], "max_tokens": 2, "stream": true }));
    assert!(plain.chunks().iter().all(|c| c.get("usage").is_none()));
    // content parts of type text
    let parts = json!([{ "role": "system", "content": "s" }, { "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] }]);
    let prompt = server.ok("/v1/apply-template", &json!({ "messages": parts }))["prompt"].clone();
    assert!(prompt.as_str().expect("text").contains("a\nb"), "{prompt}");
}

#[test]
fn log_probabilities_are_of_the_tokens_of_the_text() {
    let server = Server::start(&[]);
    let body =
        json!({ "prompt": "Once upon a time", "temperature": 0, "max_tokens": 10, "logprobs": 4, "ignore_eos": true });
    let choice = server.ok("/v1/completions", &body)["choices"][0].clone();
    let lists = &choice["logprobs"];
    let tokens: Vec<&str> = lists["tokens"].as_array().expect("tokens").iter().filter_map(Value::as_str).collect();
    assert_eq!(json!(tokens.concat()), choice["text"]);
    for (i, top) in lists["top_logprobs"].as_array().expect("lists").iter().enumerate() {
        let best = top.as_object().expect("a map").values().filter_map(Value::as_f64).fold(f64::NEG_INFINITY, f64::max);
        assert_eq!(lists["token_logprobs"][i].as_f64(), Some(best), "greedy takes the most probable");
        assert_eq!(top.as_object().map(serde_json::Map::len), Some(4));
    }
    let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 5, "logprobs": true, "top_logprobs": 2, "seed": 1 });
    let content = server.ok("/v1/chat/completions", &chat)["choices"][0]["logprobs"]["content"].clone();
    for token in content.as_array().expect("a list") {
        assert!(token["logprob"].as_f64() <= Some(0.0) && token["top_logprobs"].as_array().map(Vec::len) == Some(2));
        let bytes: Vec<u8> = serde_json::from_value(token["bytes"].clone()).expect("bytes");
        assert_eq!(token["token"], text_or(&bytes, ""));
    }
}

/// UTF-8 bytes as text, others as `prefix` and `\xNN` for each.
fn text_or(bytes: &[u8], prefix: &str) -> String {
    let escaped = || bytes.iter().fold(prefix.to_string(), |text, byte| format!("{text}\\x{byte:02x}"));
    std::str::from_utf8(bytes).map_or_else(|_| escaped(), str::to_string)
}

#[test]
fn tokens_that_are_not_utf8_are_named_by_their_bytes() {
    let server = Server::start(&[]);
    // characters that the vocabulary has only as byte tokens
    let body = json!({ "prompt": "\u{65e5}\u{672c}", "max_tokens": 1, "echo": true, "logprobs": 20, "temperature": 0 });
    let lists = server.ok("/v1/completions", &body)["choices"][0]["logprobs"].clone();
    let tokens: Vec<&str> = lists["tokens"].as_array().expect("tokens").iter().filter_map(Value::as_str).collect();
    let bytes: Vec<&&str> = tokens.iter().filter(|token| token.starts_with("bytes:")).collect();
    assert_eq!(bytes.len(), 6, "{tokens:?}");
    assert_eq!((*bytes[0], *bytes[5]), ("bytes:\\xe6", "bytes:\\xac"));
    // no alternative is lost
    for top in lists["top_logprobs"].as_array().expect("lists").iter().skip(1) {
        assert_eq!(top.as_object().map(serde_json::Map::len), Some(20), "{top}");
    }
}

#[test]
fn penalties_count_generated_tokens_in_openai_endpoints() {
    let server = Server::start(&[]);
    let prompt = "The dog ran to the tree. The cat saw. The dog ran to the tree. The cat saw. The dog ran";
    let ask = |path: &str, more: Value| {
        let mut body = json!({ "prompt": prompt, "max_tokens": 12, "temperature": 0 });
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        let response = server.ok(path, &body);
        let text = response["choices"][0].get("text").unwrap_or(&response["text"]).clone();
        text.as_str().expect("text").to_string()
    };
    let (openai, own) = ("/v1/completions", "/v1/generate");
    let penalised = |scope: Value| json!({ "presence_penalty": 2, "frequency_penalty": 2, "penalty_scope": scope });
    // tokens of the prompt do not count
    let one = |mut body: Value| {
        body["max_tokens"] = json!(1);
        ask(openai, body)
    };
    assert_eq!(one(penalised(Value::Null)), one(json!({})));
    assert_ne!(one(penalised(json!("all"))), one(json!({})));
    assert_eq!(ask(openai, penalised(Value::Null)), ask(openai, penalised(json!("answer"))));
    assert_eq!(ask(own, penalised(Value::Null)), ask(openai, penalised(json!("all"))));
    assert_eq!(ask(own, penalised(json!("answer"))), ask(openai, penalised(Value::Null)));
    assert_ne!(ask(openai, penalised(json!("all"))), ask(openai, penalised(json!("answer"))));
    // top_p 0 is greedy
    assert_eq!(ask(openai, json!({ "top_p": 0, "temperature": 1.5 })), ask(openai, json!({})));
    assert_eq!(ask(own, json!({ "top_p": 0.0, "temperature": 2 })), ask(own, json!({})));
    // a scope without penalties is not in the receipt
    let receipt = |more: Value| {
        let mut body = json!({ "prompt": "Once", "max_tokens": 4, "seed": 5, "receipt": true });
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        server.ok(openai, &body)["choices"][0]["receipt"].clone()
    };
    assert!(receipt(json!({}))["request"]["sampling"].get("penalty_scope").is_none());
    let scoped = receipt(json!({ "presence_penalty": 1 }));
    assert_eq!(scoped["request"]["sampling"]["penalty_scope"], "answer");
    assert_eq!(server.ok("/v1/verify", &json!({ "receipt": scoped }))["verified"], true);
}

#[test]
fn control_tokens_are_parsed_in_raw_prompts_only() {
    let server = Server::start(&[]);
    let count = |path: &str, body: Value| server.ok(path, &body)["usage"]["prompt_tokens"].as_u64().expect("a number");
    let tokens = |parse: bool| {
        let body = json!({ "text": "a<|im_end|>b", "parse_special": parse });
        server.ok("/v1/tokenize", &body)["count"].as_u64().expect("a number")
    };
    assert!(tokens(true) < tokens(false), "<|im_end|> is a control token of this model");
    for path in ["/v1/completions", "/v1/generate"] {
        let body = |parse: Value| json!({ "prompt": "a<|im_end|>b", "max_tokens": 1, "parse_special": parse });
        assert_eq!(count(path, body(Value::Null)), tokens(true), "{path}");
        assert_eq!(count(path, body(json!(true))), tokens(true), "{path}");
        assert_eq!(count(path, body(json!(false))), tokens(false), "{path}");
    }
    let chat = |content: &str| {
        let messages = json!([{ "role": "user", "content": content }]);
        let tokens = server.ok("/v1/apply-template", &json!({ "messages": messages }))["tokens"].clone();
        let used = count("/v1/chat/completions", json!({ "messages": messages, "max_tokens": 1 }));
        assert_eq!(tokens.as_array().map(|t| t.len() as u64), Some(used));
        used
    };
    assert!(chat("a<|im_end|>b") > chat("ab") + 1);
}

#[test]
fn a_final_message_is_continued() {
    let server = Server::start(&[]);
    let said =
        json!([{ "role": "user", "content": "Tell me a story" }, { "role": "assistant", "content": "Once upon" }]);
    let prompt = |more: Value| {
        let mut body = json!({ "messages": said });
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        server.ok("/v1/apply-template", &body)["prompt"].as_str().expect("text").to_string()
    };
    let continued = prompt(json!({ "continue_final_message": true }));
    assert!(continued.ends_with("Once upon"), "{continued}");
    assert_eq!(prompt(json!({ "continue_final_message": true, "add_generation_prompt": false })), continued);
    let opened = prompt(json!({ "continue_final_message": false }));
    assert!(opened.starts_with(&continued) && opened.len() > continued.len(), "{opened}");
    assert_eq!(prompt(json!({ "add_generation_prompt": true })), opened);
    assert_eq!(prompt(json!({})), opened);
    let closed = prompt(json!({ "add_generation_prompt": false }));
    assert!(opened.starts_with(&closed) && closed.len() < opened.len(), "{closed}");
    // the answer is only the continuation
    let body = json!({ "messages": said, "continue_final_message": true, "max_tokens": 8, "temperature": 0 });
    let answer = server.ok("/v1/chat/completions", &body)["choices"][0]["message"]["content"].clone();
    let continued = json!({ "messages": said, "continue_final_message": true });
    let tokens = server.ok("/v1/apply-template", &continued)["tokens"].clone();
    let by_tokens = json!({ "prompt": tokens, "max_tokens": 8, "temperature": 0 });
    assert_eq!(server.ok("/v1/completions", &by_tokens)["choices"][0]["text"], answer);
    let both = json!({ "messages": said, "continue_final_message": true, "add_generation_prompt": true });
    let response = server.post("/v1/chat/completions", &both);
    assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!("continue_final_message")));
}

#[test]
fn an_echo_has_log_probabilities_of_the_prompt() {
    let server = Server::start(&["--batch-tokens", "32", "--max-seqs", "4"]);
    let text = "Once upon a time there was a héllo dog";
    let body = json!({ "prompt": text, "temperature": 0, "max_tokens": 40, "logprobs": 3, "ignore_eos": true });
    let ids = server.ok("/v1/tokenize", &json!({ "text": text }));
    let n_prompt = ids["count"].as_u64().expect("a number") as usize;
    let plain = server.ok("/v1/completions", &body)["choices"][0].clone();
    let with = |more: Value| {
        let mut body = body.clone();
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        server.ok("/v1/completions", &body)
    };
    let echoed = with(json!({ "echo": true }))["choices"][0].clone();
    assert_eq!(echoed["text"], format!("{text}{}", plain["text"].as_str().expect("text")));
    let list = |choice: &Value, name: &str| choice["logprobs"][name].as_array().expect("a list").clone();
    // the first token has no log-probability; those of the answer are as without echo
    for name in ["tokens", "token_logprobs", "top_logprobs"] {
        assert_eq!(list(&echoed, name)[n_prompt..], list(&plain, name), "{name}");
        assert_eq!(list(&echoed, name).len(), n_prompt + 40);
    }
    let behind = |at: &Value| json!(at.as_u64().expect("a number") as usize + text.chars().count());
    let moved: Vec<Value> = list(&plain, "text_offset").iter().map(behind).collect();
    assert_eq!(list(&echoed, "text_offset")[n_prompt..], moved);
    let all = list(&echoed, "token_logprobs");
    assert!(all[0].is_null() && all[1..].iter().all(|p| p.as_f64() <= Some(0.0)), "{all:?}");
    // tokens that are not UTF-8 are `bytes:\xNN`
    let names = ids["pieces"].as_array().expect("pieces").iter().zip(list(&echoed, "tokens"));
    let is_named = |(piece, name): (&Value, Value)| {
        let (piece, name) = (piece.as_str().expect("text"), name.as_str().expect("text").to_string());
        if piece.contains('\u{fffd}') { name.starts_with("bytes:\\x") } else { name == piece }
    };
    assert!(names.clone().all(is_named), "{:?}", names.collect::<Vec<_>>());
    // text_offset counts characters, the tokenizer's offsets bytes, and a token may begin inside a character
    let before = |at: usize| text.char_indices().filter(|(i, c)| i + c.len_utf8() <= at).count();
    let bytes = ids["offsets"].as_array().expect("offsets").iter().map(|r| r[0].as_u64().expect("a number") as usize);
    let characters: Vec<usize> = bytes.map(before).collect();
    assert_eq!(json!(list(&echoed, "text_offset")[..n_prompt]), json!(characters));
    // the answer as part of a prompt (max_tokens 0): its tokens have the log-probabilities they were sampled with,
    // whatever is cached, and for each of n answers
    let generated =
        server.ok("/v1/generate", &json!({ "prompt": text, "temperature": 0, "max_tokens": 40, "ignore_eos": true }));
    let mut whole = ids["tokens"].as_array().expect("ids").clone();
    whole.extend(generated["tokens"].as_array().expect("ids").clone());
    assert_eq!(whole.len(), all.len());
    let zero = json!({ "prompt": [whole], "echo": true, "max_tokens": 0, "n": 2 });
    for _ in 0..2 {
        let response = with(zero.clone());
        assert_eq!(response["usage"]["completion_tokens"], 0);
        assert_eq!(response["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        for choice in response["choices"].as_array().expect("choices") {
            assert_eq!(list(choice, "token_logprobs"), all);
            assert_eq!(list(choice, "top_logprobs"), list(&echoed, "top_logprobs"));
            assert_eq!(choice["finish_reason"], "length");
        }
    }
    // streamed: the first chunk is the prompt
    let mut streamed = body.clone();
    (streamed["echo"], streamed["stream"]) = (json!(true), json!(true));
    let chunks = server.post("/v1/completions", &streamed).chunks();
    assert_eq!(chunks[0]["choices"][0]["text"], text);
    assert_eq!(chunks[0]["choices"][0]["logprobs"]["token_logprobs"], json!(all[..n_prompt]));
    // without logprobs max_tokens must be at least 1
    let nothing = server.post("/v1/completions", &json!({ "prompt": "a", "max_completion_tokens": 0, "echo": true }));
    assert_eq!(nothing.status, 400, "{}", nothing.text());
}

#[test]
fn the_seed_in_effect_repeats_an_answer() {
    let server = Server::start(&[]);
    let body = json!({ "prompt": "Once upon a time", "max_tokens": 24 });
    let (a, b) = (server.ok("/v1/completions", &body), server.ok("/v1/completions", &body));
    assert_ne!(a["seed"], b["seed"]);
    assert_ne!(a["choices"][0]["text"], b["choices"][0]["text"]);
    let again = json!({ "prompt": "Once upon a time", "max_tokens": 24, "seed": a["seed"] });
    assert_eq!(server.ok("/v1/completions", &again)["choices"][0]["text"], a["choices"][0]["text"]);
    let negative = json!({ "prompt": "Once upon a time", "max_tokens": 4, "seed": -2 });
    assert_eq!(server.ok("/v1/completions", &negative)["seed"], u64::MAX - 1);
    // the vendors' word for a random one
    let random =
        || server.ok("/v1/completions", &json!({ "prompt": "a", "max_tokens": 1, "seed": -1 }))["seed"].clone();
    assert_ne!(random(), random());
    let fixed = Server::start(&["--seed", "9"]);
    assert_eq!(fixed.ok("/v1/completions", &body)["seed"], 9);
}

#[test]
fn a_receipt_of_an_answer_verifies_and_a_changed_one_does_not() {
    let server = Server::start(&[]);
    let body = json!({ "prompt": "Once upon a time", "max_tokens": 12, "seed": 5, "receipt": true });
    let whole = server.ok("/v1/completions", &body)["choices"][0]["receipt"].clone();
    let verdict = server.ok("/v1/verify", &json!({ "receipt": whole }));
    assert_eq!((&verdict["verified"], &verdict["tokens"]), (&json!(true), &json!(12)), "{verdict}");
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let chunks = server.post("/v1/completions", &streamed).chunks();
    assert_eq!(chunks.last().expect("chunks")["choices"][0]["receipt"], whole);
    let mut changed = whole.clone();
    changed["output"][3] = json!(7);
    let verdict = server.ok("/v1/verify", &json!({ "receipt": changed }));
    assert!(verdict["verified"] == false && verdict["reason"].as_str().expect("why").contains("step 3"), "{verdict}");
    let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 4, "receipt": true });
    let receipt = server.ok("/chat", &chat)["choices"][0]["receipt"].clone();
    assert_eq!(server.ok("/v1/verify", &json!({ "receipt": receipt }))["verified"], true);
    assert_eq!(server.post("/v1/verify", &json!({ "receipt": { "format": "x" } })).status, 400);
}

#[test]
fn embeddings_equal_those_of_the_command_in_any_format_and_batch() {
    let model = fixture("reference/bert-mean-f32.gguf");
    let server = Server::start(&["-m", &model]);
    let texts = ["The birds moved", "Water flows", "a", "The birds moved"];
    let path = "/v1/embeddings";
    let response = server.ok(path, &json!({ "input": texts, "model": "bert-mean-f32" }));
    let vector = |value: &Value| serde_json::from_value::<Vec<f32>>(value["embedding"].clone()).expect("numbers");
    let all: Vec<Vec<f32>> = response["data"].as_array().expect("data").iter().map(vector).collect();
    assert_eq!(all[0], all[3]);
    let mut embed = command(&["embed", "-m", &model]);
    let printed = embed.args(texts).output().expect("the command").stdout;
    let printed: Vec<Value> = serde_json::from_slice(&printed).expect("JSON");
    for (i, text) in texts.iter().enumerate() {
        assert_eq!(vector(&printed[i]), all[i]);
        let alone = server.ok(path, &json!({ "input": text, "encoding_format": "base64" }));
        let bytes = base64::engine::general_purpose::STANDARD
            .decode(alone["data"][0]["embedding"].as_str().expect("base64"))
            .expect("base64");
        let floats: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        assert_eq!(floats, all[i]);
    }
    let ids = server.ok("/v1/tokenize", &json!({ "text": texts[0] }))["tokens"].clone();
    assert_eq!(vector(&server.ok(path, &json!({ "input": ids }))["data"][0]), all[0]);
    let short = vector(&server.ok("/embeddings", &json!({ "input": texts[0], "dimensions": 8 }))["data"][0]);
    assert!(short.len() == 8 && (short.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5);
    // an encoder does not generate
    let chat = server.post("/v1/chat/completions", &json!({ "messages": [{ "role": "user", "content": "Hi" }] }));
    assert_eq!(chat.status, 400, "{}", chat.text());
    // a decoder embeds too
    let decoder = Server::start(&[]);
    let usage = decoder.ok(path, &json!({ "input": ["one", "two"], "user": "u" }))["usage"].clone();
    assert_eq!(usage["prompt_tokens"], usage["total_tokens"]);
}

/// The refusal says what the model is and what generates with it.
#[test]
fn a_model_that_generates_by_diffusion_is_refused_by_name() {
    let recipe = starling_tests::architecture::recipe("llada");
    let model = std::env::temp_dir().join(format!("starling-llada-{}.gguf", std::process::id()));
    std::fs::write(&model, recipe.file(starling::quant::Dtype::F32)).expect("a file");
    let server = Server::start(&["-m", model.to_str().expect("a path")]);
    for (path, body) in [
        ("/v1/completions", json!({ "prompt": "HI" })),
        ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "HI" }] })),
    ] {
        let response = server.post(path, &body);
        let text = response.text();
        assert_eq!(response.status, 400, "{text}");
        assert!(text.contains("by diffusion") && text.contains("starling run"), "{path}: {text}");
    }
    std::fs::remove_file(model).expect("a file");
}

#[test]
fn a_job_reports_its_start_tokens_and_end() {
    let server = Server::start(&[]);
    let body = json!({ "job_id": "j1", "prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "stop": ["Lena", "Tom"] });
    let response = server.post("/execute", &body);
    let events: Vec<(String, Value)> =
        response.events().into_iter().map(|(name, data)| (name, serde_json::from_str(&data).expect("JSON"))).collect();
    assert_eq!((events[0].0.as_str(), &events[0].1["job_id"]), ("started", &json!("j1")));
    let started = events[0].1["started_at"].as_str().expect("a time");
    assert!(started.len() == 20 && started.starts_with("20") && started.ends_with('Z'), "{started}");
    assert_eq!(server.get("/health").json()["status"], "healthy");
    let (end, tokens) = events[1..].split_last().expect("an end");
    assert_eq!(end.0, "end");
    assert_eq!(end.1["stop_reason"], "STOP_SEQUENCE", "{end:?}");
    assert_eq!(end.1["stop_sequence_matched"], "Lena");
    assert_eq!(end.1["tokens_out"], tokens.len());
    let text: String = tokens.iter().map(|(_, data)| data["t"].as_str().expect("text")).collect();
    let plain = server.ok(
        "/v1/completions",
        &json!({ "prompt": body["prompt"], "max_tokens": 200, "temperature": 0, "stop": "Lena" }),
    );
    assert_eq!(plain["choices"][0]["text"], text);
    assert!(tokens.iter().enumerate().all(|(i, (name, data))| name == "token" && data["i"] == i));
    assert_eq!(server.post("/execute", &json!({ "job_id": "j" })).json()["error"]["message"], "missing field `prompt`");
}

#[test]
fn tools_are_rendered_by_the_template() {
    let server = Server::start(&["--chat-template", &fixture("chat/qwen-tools.jinja")]);
    let tools =
        json!([{ "type": "function", "function": { "name": "weather_of", "parameters": { "type": "object" } } }]);
    let call = json!({ "id": "c1", "type": "function", "function": { "name": "weather_of", "arguments": "{\"city\": \"Oslo\"}" } });
    let messages = json!([
        { "role": "user", "content": "Is it warm in Oslo?" },
        { "role": "assistant", "content": null, "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "c1", "content": "12 degrees" },
    ]);
    let prompt = server.ok("/v1/apply-template", &json!({ "messages": messages, "tools": tools }))["prompt"].clone();
    let prompt = prompt.as_str().expect("text");
    // the template gets the arguments as an object, not as a string
    for part in ["\"name\": \"weather_of\"", "<tool_call>", "{\"city\": \"Oslo\"}", "<tool_response>", "12 degrees"] {
        assert!(prompt.contains(part), "{part}: {prompt}");
    }
    let ask = |more: Value| {
        let mut body = json!({ "messages": messages, "max_tokens": 12, "seed": 4 });
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        body
    };
    let count = |body: &Value| server.ok("/v1/chat/completions", body)["usage"]["prompt_tokens"].as_u64();
    let (with, without) = (count(&ask(json!({ "tools": tools }))), count(&ask(json!({}))));
    assert!(with > without, "{with:?} {without:?}");
    assert_eq!(count(&ask(json!({ "tools": tools, "tool_choice": "none" }))), without);
    // text that is no call is content, streamed or not
    let whole = server.ok("/v1/chat/completions", &ask(json!({ "tools": tools })));
    let chunks = server.post("/v1/chat/completions", &ask(json!({ "tools": tools, "stream": true }))).chunks();
    let text: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(whole["choices"][0]["message"]["content"], text);
    assert!(!text.is_empty() && whole["choices"][0]["message"].get("tool_calls").is_none());
    let wrong = server.post("/v1/chat/completions", &ask(json!({ "tools": [{ "type": "function" }] })));
    assert_eq!((wrong.status, wrong.json()["error"]["param"].clone()), (400, json!("tools[0]")));
}

#[test]
fn dry_penalises_repetitions_up_to_a_breaker() {
    let server = Server::start(&[]);
    let ask = |more: Value| {
        // the prompt repeats a sentence, and the model would continue so
        let prompt = "The dog ran to the tree. The cat saw. The dog ran to the tree. The cat saw. The dog ran";
        let mut body = json!({ "prompt": prompt, "max_tokens": 12, "temperature": 0 });
        for (name, value) in more.as_object().expect("options") {
            body[name] = value.clone();
        }
        server.ok("/v1/completions", &body)["choices"][0]["text"].clone()
    };
    let plain = ask(json!({}));
    let penalised = ask(json!({ "dry_multiplier": 2 }));
    assert_ne!(plain, penalised);
    let texts = ["\n", ":", "\"", "*"];
    assert_eq!(penalised, ask(json!({ "dry_multiplier": 2, "dry_sequence_breakers": texts })));
    assert_eq!(plain, ask(json!({ "dry_multiplier": 2, "dry_allowed_length": 99 })));
    assert_eq!(plain, ask(json!({ "dry_multiplier": 2, "dry_penalty_last_n": 0 })));
    // after the breaker the repetition is shorter than the allowed length
    assert_eq!(plain, ask(json!({ "dry_multiplier": 2, "dry_allowed_length": 3, "dry_sequence_breakers": [" ran"] })));
}

#[test]
fn a_prediction_changes_no_byte() {
    let server = Server::start(&[]);
    let ask = |prediction: Value, stream: bool| {
        let mut body = json!({
            "messages": [{ "role": "user", "content": "Tell me a story" }], "max_tokens": 40, "seed": 3,
            "temperature": 0.8, "frequency_penalty": 0.3, "logprobs": true, "top_logprobs": 2, "stream": stream,
            "stream_options": { "include_usage": true },
        });
        body["prediction"] = prediction;
        body
    };
    let plain = server.ok("/v1/chat/completions", &ask(Value::Null, false));
    assert!(plain["usage"].get("completion_tokens_details").is_none());
    let text = plain["choices"][0]["message"]["content"].as_str().expect("a text");
    let parts =
        json!([{ "type": "text", "text": text.chars().take(50).collect::<String>() }, { "type": "text", "text": "?" }]);
    for content in [json!(text), parts, json!("something else"), json!("")] {
        let is_empty = content == "";
        let prediction = json!({ "type": "content", "content": content });
        let predicted = server.ok("/v1/chat/completions", &ask(prediction.clone(), false));
        assert_eq!(predicted["choices"], plain["choices"]);
        let details = &predicted["usage"]["completion_tokens_details"];
        let counts = ["accepted_prediction_tokens", "rejected_prediction_tokens"].map(|name| details[name].as_u64());
        assert!(counts.iter().all(|n| n.is_some() != is_empty), "{predicted}");
        assert!(counts[0].unwrap_or(0) < 40);
        assert!(content != text || counts[0] > Some(0), "{predicted}");
        let chunks = server.post("/v1/chat/completions", &ask(prediction, true)).chunks();
        let last = &chunks.last().expect("chunks")["usage"];
        assert_eq!(last["completion_tokens"], plain["usage"]["completion_tokens"]);
        assert_eq!(last.get("completion_tokens_details").is_some(), !is_empty);
    }
    for wrong in [json!("text"), json!({ "type": "image", "content": "" }), json!({ "type": "content" })] {
        let response = server.post("/v1/chat/completions", &ask(wrong, false));
        assert_eq!(response.status, 400, "{}", response.text());
    }
    let metrics = server.get("/metrics").text();
    let drafted = metrics.lines().find(|line| line.starts_with("starling_draft_tokens_total"));
    assert!(drafted.is_some(), "{metrics}");
}

#[test]
fn a_draft_model_changes_no_byte() {
    let draft = fixture("starling-tiny/starling-tiny-q4_0.gguf");
    let body = |seed: u64| {
        json!({
            "messages": [{ "role": "user", "content": "Tell me a story" }], "max_tokens": 60, "seed": seed,
            "temperature": 0.6, "presence_penalty": 0.2, "logprobs": true, "top_logprobs": 2,
        })
    };
    let answers = |args: &[&str]| {
        let server = Server::start(args);
        let alone: Vec<_> =
            (0..3).map(|seed| server.ok("/v1/chat/completions", &body(seed))["choices"].clone()).collect();
        std::thread::scope(|scope| {
            let ask = |seed| server.ok("/v1/chat/completions", &body(seed))["choices"].clone();
            let together: Vec<_> = (0..3).map(|seed| scope.spawn(move || ask(seed))).collect();
            for (together, alone) in together.into_iter().zip(&alone) {
                assert_eq!(together.join().expect("an answer"), *alone);
            }
        });
        alone
    };
    let plain = answers(&["--draft-max", "0"]);
    assert_eq!(answers(&["--draft-model", &draft]), plain);
    assert_eq!(answers(&["--draft-model", &draft, "--workers", "2", "--kv-memory", "4MiB"]), plain);
}

#[test]
fn the_memory_of_a_draft_model_counts() {
    let draft = fixture("starling-tiny/starling-tiny-f16.gguf");
    let args = ["--memory", "16MiB", "--kv-memory", "2MiB", "--max-seqs", "2"];
    let used = |args: &[&str]| {
        let server = Server::start(args);
        // set once a second
        std::thread::sleep(std::time::Duration::from_secs(3));
        let metrics = server.get("/metrics").text();
        let line = metrics.lines().find(|line| line.starts_with("starling_model_memory_used_bytes"));
        line.and_then(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).unwrap_or_else(|| panic!("{metrics}"))
    };
    let (plain, with) = (used(&args), used(&[&args[..], &["--draft-model", &draft]].concat()));
    // 7 MB of weights, and 2 MiB of keys and values
    assert!((8e6..12e6).contains(&(with - plain)), "{plain} {with}");
    let args = ["serve", "--port", "0", "--memory", "9MiB", "--kv-memory", "2MiB", "--draft-model", &draft];
    let output = command(&args).output().expect("the command");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && message.contains("memory"), "{message}");
}
