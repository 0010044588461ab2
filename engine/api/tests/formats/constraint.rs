//! Output constraints by the names of OpenAI, llama-server and vLLM.
#![cfg(feature = "grammar-sources")]

use serde_json::{Value, json};
use starling::grammar_source::GrammarSource;
use starling_api::error::ApiError;
use starling_api::parse::parse;
use starling_api::structure::OutputConstraint;

use crate::check_error;

fn source(body: &Value) -> Result<Option<(String, GrammarSource)>, ApiError> {
    parse::<OutputConstraint>(body.to_string().as_bytes())?.source()
}

#[test]
fn each_field_has_its_form() {
    let number = || json!({ "type": "number" });
    let schema = || GrammarSource::Schema(number());
    let (regex, choice) =
        (|| GrammarSource::Regex("a+".into()), || GrammarSource::Choice(vec!["a".into(), "b".into()]));
    let lark = || GrammarSource::Lark("start: \"a\"".into(), Vec::new());
    let format = |kind: &str, more: &Value| {
        let mut format = more.clone();
        format["type"] = kind.into();
        json!({ "response_format": format })
    };
    let cases = [
        (format("json_object", &json!({})), "response_format", GrammarSource::object()),
        (format("json_object", &json!({ "schema": number() })), "response_format.schema", schema()),
        (format("json_schema", &json!({ "schema": number() })), "response_format.schema", schema()),
        (
            format("json_schema", &json!({ "json_schema": { "name": "n", "strict": false, "schema": number() } })),
            "response_format.json_schema.schema",
            schema(),
        ),
        (json!({ "json_schema": number() }), "json_schema", schema()),
        (json!({ "grammar": "start: \"a\"" }), "grammar", lark()),
        (json!({ "structured_outputs": { "json": number() } }), "structured_outputs.json", schema()),
        (json!({ "structured_outputs": { "json": "{\"type\":\"number\"}" } }), "structured_outputs.json", schema()),
        (json!({ "structured_outputs": { "regex": "a+" } }), "structured_outputs.regex", regex()),
        (json!({ "structured_outputs": { "choice": ["a", "b"] } }), "structured_outputs.choice", choice()),
        (json!({ "structured_outputs": { "grammar": "start: \"a\"" } }), "structured_outputs.grammar", lark()),
        (
            json!({ "structured_outputs": { "json_object": true } }),
            "structured_outputs.json_object",
            GrammarSource::object(),
        ),
        (json!({ "guided_json": "{\"type\":\"number\"}" }), "guided_json", schema()),
        (json!({ "guided_regex": "a+" }), "guided_regex", regex()),
        (json!({ "guided_choice": ["a", "b"] }), "guided_choice", choice()),
        (json!({ "guided_grammar": "start: \"a\"" }), "guided_grammar", lark()),
    ];
    for (body, param, expected) in cases {
        assert_eq!(source(&body), Ok(Some((param.into(), expected))), "{body}");
    }
}

#[test]
fn free_text_has_no_form() {
    for body in [
        json!({}),
        json!({ "response_format": { "type": "text" } }),
        json!({ "response_format": null, "grammar": null }),
        json!({ "structured_outputs": {} }),
        json!({ "structured_outputs": { "json_object": false } }),
    ] {
        assert_eq!(source(&body), Ok(None), "{body}");
    }
}

#[test]
fn wrong_constraints_are_named() {
    let cases = [
        (json!({ "response_format": { "type": "xml" } }), "response_format.type", "xml"),
        (
            json!({ "response_format": { "type": "json_schema" } }),
            "response_format.json_schema.schema",
            "response_format.json_schema.schema is missing",
        ),
        (json!({ "guided_json": "{" }), "guided_json", "a string that is not JSON"),
        (json!({ "guided_choice": "a" }), "guided_choice", "expected a sequence"),
        (
            json!({ "guided_regex": "a", "structured_outputs": { "choice": ["a"] } }),
            "guided_regex",
            "guided_regex and structured_outputs.choice are both given",
        ),
        (
            json!({ "response_format": { "type": "json_object" }, "grammar": "g" }),
            "grammar",
            "grammar and response_format are both given",
        ),
    ];
    for (body, param, part) in cases {
        check_error(&source(&body).expect_err("a wrong constraint"), 400, Some(param), part);
    }
}
