use std::sync::Arc;

use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

use super::*;
use crate::tools::CallIds;

/// A text that a model wrote, and what it means.
#[derive(Debug, Deserialize)]
struct Case {
    syntax: String,
    #[serde(default)]
    reasoning_syntax: Option<String>,
    /// Whether the prompt ends with the marker of reasoning.
    #[serde(default)]
    in_reasoning: bool,
    text: String,
    #[serde(default)]
    content: String,
    #[serde(default)]
    reasoning: String,
    #[serde(default)]
    calls: Vec<(String, Value)>,
    /// Whether the text of the call that is content begins anywhere in the call.
    #[serde(default)]
    lenient: bool,
}

fn cases() -> Vec<Case> {
    serde_json::from_str(include_str!("../../../../fixtures/chat/calls.json")).expect("the cases")
}

fn tools() -> Arc<[Value]> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "city": { "type": "string" }, "days": { "type": "integer" }, "level": { "$ref": "#/$defs/level" },
            "both": { "allOf": [{ "description": "x" }, { "$ref": "#/$defs/level" }] },
            "size": { "anyOf": [{ "oneOf": [{ "const": "7" }, { "type": "null" }] }, { "type": "integer" }] },
            "maybe": { "oneOf": [{ "type": "string" }, { "type": "null" }] }, "flag": { "type": "boolean" },
            "loop": { "$ref": "#/properties/loop" },
        },
        "$defs": { "level": { "type": "string", "enum": ["10", "20"] } },
    });
    let weather = json!({ "type": "function", "function": { "name": "weather", "parameters": parameters } });
    Arc::from([weather, json!({ "type": "function", "function": { "name": "clock" } })])
}

fn plan(syntax: &str, reasoning: Option<&str>) -> OutputPlan {
    let names = SyntaxNames { calls: Some(syntax), reasoning: reasoning.or(Some("none")) };
    names.check().expect("names of syntaxes");
    OutputPlan::new(ModelSyntax::default(), names).tools(tools(), CallIds::new(7))
}

impl Case {
    fn plan(&self) -> OutputPlan {
        let mut plan = plan(&self.syntax, self.reasoning_syntax.as_deref());
        plan.in_reasoning = self.in_reasoning;
        plan
    }
}

/// The pieces of a text, of which neighbouring texts are joined.
fn parse<'a>(plan: &OutputPlan, texts: impl IntoIterator<Item = &'a str>, truncated: bool) -> Vec<Piece> {
    let mut parser = plan.parser(0);
    let mut pieces: Vec<Piece> = texts.into_iter().flat_map(|text| parser.push(text)).collect();
    pieces.extend(parser.finish(truncated));
    pieces.into_iter().fold(Vec::new(), |mut joined, piece| {
        match (joined.last_mut(), piece) {
            (Some(Piece::Content(last)), Piece::Content(text))
            | (Some(Piece::Reasoning(last)), Piece::Reasoning(text)) => {
                last.push_str(&text);
            }
            (_, piece) => joined.push(piece),
        }
        joined
    })
}

fn output(pieces: Vec<Piece>) -> Output {
    let mut output = Output::default();
    output.extend(pieces);
    for call in &output.calls[..output.n_complete] {
        let arguments = serde_json::from_str::<Value>(&call.function.arguments);
        assert!(arguments.as_ref().is_ok_and(Value::is_object), "{call:?}: {arguments:?}");
    }
    output
}

#[test]
fn each_syntax_is_parsed() {
    let mut wrong = Vec::new();
    for case in cases() {
        let output = output(parse(&case.plan(), [&*case.text], false));
        let arguments = |call: &ToolCall| serde_json::from_str(&call.function.arguments).expect("JSON");
        let calls = output.calls.iter().map(|call| (call.function.name.clone(), arguments(call)));
        let content = if case.lenient { output.content.trim_start_matches([',', ' ']) } else { &output.content };
        let is_right = calls.collect::<Vec<_>>() == case.calls
            && (&*output.reasoning, content) == (&*case.reasoning, &*case.content)
            && output.n_complete == case.calls.len();
        if !is_right {
            wrong.push(format!("{case:?}\n{output:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn every_syntax_has_a_case() {
    let cases = cases();
    for syntax in CALL_SYNTAXES {
        assert!(cases.iter().any(|case| case.syntax == syntax.name && !case.calls.is_empty()), "{}", syntax.name);
    }
}

#[test]
fn cuts_do_not_matter() {
    for case in cases() {
        for truncated in [false, true] {
            let whole = parse(&case.plan(), [&*case.text], truncated);
            for at in (0..=case.text.len()).filter(|at| case.text.is_char_boundary(*at)) {
                let (before, after) = case.text.split_at(at);
                assert_eq!(parse(&case.plan(), [before, after], truncated), whole, "{before:?} | {after:?}");
            }
            let mut buffer = [0; 4];
            let characters: Vec<String> = case.text.chars().map(|c| c.encode_utf8(&mut buffer).to_string()).collect();
            assert_eq!(parse(&case.plan(), characters.iter().map(String::as_str), truncated), whole, "{}", case.text);
        }
    }
}

/// Of a text that is cut short, the calls before the cut are those of the whole, the last shows the cut, and texts begin as
/// those of the whole.
#[test]
fn a_truncated_answer_has_a_part_of_the_whole() {
    for case in cases() {
        let whole = output(parse(&case.plan(), [&*case.text], false));
        let is_bare = CALL_SYNTAXES.iter().any(|syntax| syntax.name == case.syntax && syntax.start == Start::Bare);
        for at in (0..case.text.len()).filter(|at| case.text.is_char_boundary(*at)) {
            let part = output(parse(&case.plan(), [&case.text[..at]], true));
            let label = format!("{}: {:?}", case.syntax, &case.text[..at]);
            assert!(whole.reasoning.starts_with(part.reasoning.trim_end()), "{label}: {part:?}");
            // a call that is no call at its end is content, and the beginning of one without a marker
            if !case.calls.is_empty() && !is_bare {
                let start = if case.content.starts_with(' ') { part.content.as_str() } else { part.content.trim() };
                assert!(whole.content.starts_with(start.trim_end()) || start.is_empty(), "{label}: {part:?}");
            }
            assert!(part.calls.len() <= part.n_complete + 1, "{label}: {part:?}");
            assert!(whole.calls.starts_with(&part.calls[..part.n_complete]), "{label}: {part:?}");
            let (Some(cut), true) = (part.calls.last(), part.calls.len() > part.n_complete) else { continue };
            let arguments = &cut.function.arguments;
            let is_same = |other: &&ToolCall| other.function.name == cut.function.name;
            let Some(other) = whole.calls.get(cut.index).filter(is_same) else {
                // the rest of the text makes it no call
                assert!(serde_json::from_str::<Value>(arguments).is_err(), "{label}: {arguments}");
                continue;
            };
            assert_eq!((cut.index, &cut.id, &cut.function.name), (other.index, &other.id, &other.function.name));
            let is_json = serde_json::from_str::<Value>(arguments).is_ok();
            assert!(!is_json || *arguments == other.function.arguments, "{label}: {arguments}");
        }
    }
}

#[test]
fn text_of_a_schema_may_contain_markers() {
    let plan = plan("hermes", Some("think")).schema(true);
    let text = "{\"a\": \"<tool_call>{\\\"name\\\": \\\"clock\\\"}</tool_call><think>\"}";
    let call = "<tool_call>\n{\"name\": \"clock\"}\n</tool_call>";
    for at in 0..text.len() {
        assert_eq!(parse(&plan, [&text[..at], &text[at..]], false), [Piece::Content(text.into())]);
    }
    for at in 0..call.len() {
        let output = output(parse(&plan, [&call[..at], &call[at..]], false));
        assert_eq!((output.calls.len(), &*output.content), (1, ""));
    }
}

#[test]
fn names_of_syntaxes_are_checked() {
    let names = SyntaxNames { calls: Some("qwen9"), reasoning: None };
    let error = names.check().expect_err("an unknown name");
    assert!(error.message.contains("expected auto, none or one of harmony, "), "{}", error.message);
}

#[test]
fn ids_are_those_that_templates_demand() {
    let first = |syntax: &str, text: &str| output(parse(&plan(syntax, None), [text], false)).calls[0].id.clone();
    assert_eq!(
        first("kimi-k2", "<|tool_call_begin|>functions.clock:3<|tool_call_argument_begin|>{}"),
        "functions.clock:0"
    );
    assert_eq!(first("mistral", "[TOOL_CALLS]clock[ARGS]{}").len(), 9);
    assert_eq!(first("hermes", "<tool_call>{\"name\": \"clock\"}"), format!("call_{:032x}", 7));
}

#[test]
fn work_is_linear_in_the_text() {
    // by characters, each of these would take minutes if it were read again for each
    for text in [
        "<tool_call>{\"name\": \"clock\", \"arguments\": {\"a\": \"",
        "<tool_call>{\"a\": [",
        "\n",
        "<",
        "<think>",
        "<tool_call><function=clock><parameter=a>",
        "</parameter>\n",
        "</parameter></function>",
        "<tool_call><function=clock><parameter=a>x</parameter><parameter=b></function></tool_call>",
    ] {
        for syntax in ["hermes", "qwen3-coder", "lfm2"] {
            let long = text.repeat(30_000 / text.len()) + &"x".repeat(30_000);
            let mut parser = plan(syntax, Some("think")).parser(0);
            for at in 0..long.len() {
                parser.push(&long[at..=at]);
            }
            parser.finish(false);
        }
    }
}

proptest! {
    /// No text causes a panic, cuts do not matter, and arguments are JSON.
    #[test]
    fn any_text_is_parsed(
        syntax in prop::sample::select((0..CALL_SYNTAXES.len()).collect::<Vec<_>>()),
        parts in prop::collection::vec(prop::sample::select(vec![
            "<tool_call>", "</tool_call>", "{\"name\": \"clock\"", ", \"arguments\": {", "\"é\": [1", "]", "}", "}}", "héllo ",
            "\n", " ", "<", "clock", "(", ")", "a=", "'x'", ",", "[", "\"", "\\", "<think>", "</think>", ":", "```", "call:",
            "<parameter=", "<function=", ">", "<arg_key>", "<|message|>", "<|channel|>", "<|end|>", " to=", "functions.",
        ]), 0..14),
        marks in any::<bool>(),
        n_chars in 1usize..5,
        truncated in any::<bool>(),
    ) {
        let syntax = &CALL_SYNTAXES[syntax];
        let markers: Vec<&str> = syntax.open.iter().chain(syntax.around).copied().collect();
        let mut text = String::new();
        for (i, part) in parts.iter().enumerate() {
            if marks && i % 4 == 0 && !markers.is_empty() {
                text.push_str(markers[i / 4 % markers.len()]);
            }
            text.push_str(part);
        }
        let plan = plan(syntax.name, Some("think"));
        let characters: Vec<char> = text.chars().collect();
        let pieces: Vec<String> = characters.chunks(n_chars).map(|c| c.iter().collect()).collect();
        let whole = parse(&plan, [&*text], truncated);
        prop_assert_eq!(&parse(&plan, pieces.iter().map(String::as_str), truncated), &whole);
        let output = output(whole);
        prop_assert!(truncated || output.n_complete == output.calls.len());
    }

    /// Literals of Python become the JSON of the same value.
    #[test]
    fn literals_of_python_become_json(text in "[ -~é\n]{0,12}", n in any::<i32>()) {
        let python = format!("{{'k': ({n}, True, None), 's': {}}}", python_string(&text));
        let expected = json!({ "k": [n, true, null], "s": text });
        let json = super::values::literal(&python, "").expect("a literal");
        prop_assert_eq!(serde_json::from_str::<Value>(&json).expect("JSON"), expected);
    }
}

fn python_string(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('\'', "\\'").replace('\n', "\\n");
    format!("'{escaped}'")
}
