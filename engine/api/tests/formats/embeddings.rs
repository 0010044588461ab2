//! Requests and responses of `/v1/embeddings`.

use serde_json::json;
use starling::embed::EmbedderOptions;
use starling_api::openai::embeddings::{EmbeddingRequest, EmbeddingResponse, Encoding, check_lengths, check_texts};
use starling_api::parse::ParseBody;

use crate::check_error;
use crate::vocabulary::MODEL;

const EMBEDDER: EmbedderOptions = EmbedderOptions { max_texts: 2, batch_tokens: 8, n_ctx: 16 };

#[test]
fn vectors_in_both_encodings() {
    let vectors = || vec![vec![1.0, -2.5], vec![]];
    let list = EmbeddingResponse::new("m", vectors(), Encoding::Float, 7);
    let expected = json!({
        "object": "list",
        "data": [
            { "object": "embedding", "index": 0, "embedding": [1.0, -2.5] },
            { "object": "embedding", "index": 1, "embedding": [] },
        ],
        "model": "m",
        "usage": { "prompt_tokens": 7, "total_tokens": 7 },
    });
    assert_eq!(json!(list), expected);
    // Python: base64.b64encode(struct.pack("<2f", 1.0, -2.5))
    let base64 = json!(EmbeddingResponse::new("m", vectors(), Encoding::Base64, 7));
    assert_eq!(base64["data"][0]["embedding"], "AACAPwAAIMA=");
    assert_eq!(base64["data"][1]["embedding"], "");
}

#[test]
fn requests_out_of_range_are_refused() {
    let request = |input: serde_json::Value| {
        let body = json!({ "input": input }).to_string();
        EmbeddingRequest::parse_body(body.as_bytes()).expect("a request")
    };
    assert_eq!(request(json!(["a", "b"])).check_inputs(2), Ok(()));
    for (input, n) in [(json!([]), 0), (json!(["a", "b", "c"]), 3)] {
        let error = request(input).check_inputs(2).expect_err("too few or too many");
        check_error(&error, 400, Some("input"), &format!("{n} texts, expected 1 to 2"));
    }
    let n = MODEL.n_embd_out();
    let check = |dimensions| check_texts(&MODEL, &EMBEDDER, &[vec![1]], dimensions);
    assert_eq!((check(None), check(Some(1)), check(Some(n))), (Ok(()), Ok(()), Ok(())));
    for d in [0, n + 1] {
        let error = check(Some(d)).expect_err("out of range");
        check_error(&error, 400, Some("dimensions"), &format!("dimensions is {d}, expected a number from 1 to {n}"));
    }
}

#[test]
fn the_wrong_text_of_several_is_named() {
    let check = |texts: &[Vec<u32>]| check_lengths(&MODEL, &EMBEDDER, texts, "texts");
    assert_eq!(check(&[vec![1; 8], vec![2]]), Ok(()));
    let n_vocab = MODEL.config.n_vocab as u32;
    for (tokens, part, code) in [
        (vec![], "no tokens", None),
        (vec![1; 9], "9 tokens, expected at most 8", Some("context_length_exceeded")),
        (vec![1, n_vocab], "at index 1", None),
    ] {
        for (texts, param) in [(vec![tokens.clone()], "texts"), (vec![vec![1], tokens.clone()], "texts[1]")] {
            let error = check(&texts).expect_err("a wrong text");
            check_error(&error, 400, Some(param), part);
            assert_eq!(error.code, code);
        }
    }
}
