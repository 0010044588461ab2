//! Tokens of texts and texts of tokens, in Starling's form and llama-server's.

use serde_json::{Value, json};
use starling::tokenizer::Tokenizer;
use starling_api::llama_server::tokenize::LlamaTokenizeRequest;
use starling_api::native::tokenize::{DetokenizeRequest, TokenizeRequest};
use starling_api::parse::ParseBody;

use crate::check_error;
use crate::vocabulary::{BOS, FIRST_CONTROL, bytes, tokenizer};

/// Response of `/v1/tokenize`.
fn native(tokenizer: &Tokenizer, body: &Value) -> Value {
    let request = TokenizeRequest::parse_body(body.to_string().as_bytes()).expect("a request");
    json!(request.tokenize(tokenizer, 4096))
}

/// Response of `/tokenize`.
fn llama(tokenizer: &Tokenizer, body: &Value) -> Value {
    let request = LlamaTokenizeRequest::parse_body(body.to_string().as_bytes()).expect("a request");
    json!(request.tokenize(tokenizer, 4096).expect("tokens"))
}

#[test]
fn pieces_and_offsets_of_each_token() {
    let tokenizer = tokenizer(&["<x>"]);
    for name in ["text", "content", "prompt"] {
        let found = native(&tokenizer, &json!({ name: "é<x>", "add_special_tokens": false, "parse_special": true }));
        let mut tokens = bytes("é");
        tokens.push(FIRST_CONTROL);
        let expected = json!({
            "tokens": tokens,
            "pieces": ["\u{fffd}", "\u{fffd}", "<x>"],
            "offsets": [[0, 1], [1, 2], [2, 5]],
            "count": 3,
            "max_model_len": 4096,
        });
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn defaults_are_those_of_the_form() {
    let tokenizer = tokenizer(&["<x>"]);
    let tokens = |with_bos: bool| [if with_bos { &[BOS][..] } else { &[] }, &bytes("<x>")].concat();
    assert_eq!(native(&tokenizer, &json!({ "text": "<x>" }))["tokens"], json!(tokens(true)));
    // llama-server adds no BOS and parses control tokens; a request with `text` is one of Starling
    assert_eq!(llama(&tokenizer, &json!({ "content": "<x>" })), json!({ "tokens": [FIRST_CONTROL] }));
    let plain = json!({ "content": "<x>", "parse_special": false, "add_special": true });
    assert_eq!(llama(&tokenizer, &plain)["tokens"], json!(tokens(true)));
    assert_eq!(llama(&tokenizer, &json!({ "prompt": "<x>" }))["tokens"], json!(tokens(true)));
    assert_eq!(llama(&tokenizer, &json!({ "prompt": "<x>", "add_special": false }))["tokens"], json!(tokens(false)));
}

#[test]
fn pieces_that_are_not_utf8_are_bytes() {
    let found = llama(&tokenizer(&[]), &json!({ "content": "aé", "with_pieces": true }));
    let [a, first, second] = bytes("aé")[..] else { panic!("expected three tokens") };
    let expected =
        json!([{ "id": a, "piece": "a" }, { "id": first, "piece": [0xc3] }, { "id": second, "piece": [0xa9] }]);
    assert_eq!(found["tokens"], expected);
}

#[test]
fn a_request_without_text_is_refused() {
    let request = LlamaTokenizeRequest::parse_body(b"{}").expect("a request");
    assert_eq!(request.len_bytes(), 0);
    check_error(&request.tokenize(&tokenizer(&[]), 1).expect_err("no text"), 400, Some("content"), "missing");
}

#[test]
fn tokens_are_decoded_or_named() {
    let tokenizer = tokenizer(&["<x>"]);
    let decode = |tokens: &[u32], skip_special: bool| {
        let body = json!({ "tokens": tokens, "skip_special": skip_special }).to_string();
        let request = DetokenizeRequest::parse_body(body.as_bytes()).expect("a request");
        request.detokenize(&tokenizer).map(|response| response.text)
    };
    let tokens = [&bytes("aé"), &[FIRST_CONTROL][..]].concat();
    assert_eq!(decode(&tokens, false).as_deref(), Ok("aé<x>"));
    assert_eq!(decode(&tokens, true).as_deref(), Ok("aé"));
    assert_eq!(decode(&bytes("é")[..1], false).as_deref(), Ok("\u{fffd}"));
    assert_eq!(decode(&[], false).as_deref(), Ok(""));
    let n = tokenizer.n_vocab() as u32;
    check_error(&decode(&[0, n], false).expect_err("no such token"), 400, Some("tokens[1]"), &n.to_string());
}
