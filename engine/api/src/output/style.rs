//! Enforced tool calls: the texts of each syntax, for grammars.

use starling::grammar_source::{CallStyle, ParamStyle};
use starling::tokenizer::{EncodeOptions, Tokenizer};

use super::syntaxes::{Body, CallSyntax};

/// For each syntax: the text before all calls, before a name, between name and arguments, after the arguments, between two
/// calls, and after all calls. Without a text between calls an answer has one.
const TEXTS: &[(&str, [&str; 6])] = &[
    ("harmony", ["<|channel|>commentary to=functions.", "", " <|constrain|>json<|message|>", "", "", ""]),
    ("gemma4", ["<|tool_call>", "call:", "{", "}<tool_call|>", "<|tool_call>", ""]),
    ("functiongemma", ["<start_function_call>", "call:", "{", "}<end_function_call>", "<start_function_call>", ""]),
    (
        "kimi-k2",
        [
            "<|tool_calls_section_begin|><|tool_call_begin|>",
            "functions.",
            ":0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_begin|>",
            "<|tool_calls_section_end|>",
        ],
    ),
    (
        "deepseek-v4",
        [
            "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"",
            "",
            "\">",
            "\n</｜DSML｜invoke>\n",
            "<｜DSML｜invoke name=\"",
            "</｜DSML｜tool_calls>",
        ],
    ),
    (
        "deepseek-v3.2",
        [
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"",
            "",
            "\">",
            "\n</｜DSML｜invoke>\n",
            "<｜DSML｜invoke name=\"",
            "</｜DSML｜function_calls>",
        ],
    ),
    (
        "deepseek-v3",
        [
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            "function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            "\n<｜tool▁call▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ],
    ),
    (
        "deepseek-v3.1",
        [
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            "",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ],
    ),
    ("mistral", ["[TOOL_CALLS]", "", "[ARGS]", "", "[TOOL_CALLS]", ""]),
    ("mistral-json", ["[TOOL_CALLS][", NAME, ARGUMENTS, "}", ", ", "]"]),
    (
        "minimax",
        ["<minimax:tool_call>\n<invoke name=\"", "", "\">", "\n</invoke>\n", "<invoke name=\"", "</minimax:tool_call>"],
    ),
    ("seed", ["<seed:tool_call>\n<function=", "", ">", "\n</function>\n", "<function=", "</seed:tool_call>"]),
    (
        "qwen3-coder",
        ["<tool_call>\n<function=", "", ">", "\n</function>\n</tool_call>", "\n<tool_call>\n<function=", ""],
    ),
    ("glm", ["<tool_call>", "", "", "\n</tool_call>", "\n<tool_call>", ""]),
    ("lfm2", ["<|tool_call_start|>[", "", "(", ")", ", ", "]<|tool_call_end|>"]),
    ("apertus", ["<|tools_prefix|>[", "{", ": ", "}", ", ", "]<|tools_suffix|>"]),
    ("command-r7b", ["<|START_ACTION|>[", TOOL_NAME, PARAMETERS, "}", ", ", "]<|END_ACTION|>"]),
    ("command-r", ["Action: ```json\n[", TOOL_NAME, PARAMETERS, "}", ", ", "]\n```"]),
    ("phi4", ["<|tool_call|>[", NAME, ARGUMENTS, "}", ", ", "]<|/tool_call|>"]),
    ("granite", ["<|tool_call|>[", NAME, ARGUMENTS, "}", ", ", "]"]),
    ("nemotron", ["<TOOLCALL>[", NAME, ARGUMENTS, "}", ", ", "]</TOOLCALL>"]),
    ("jamba", ["<tool_calls>[\n", NAME, ARGUMENTS, "}", ",\n", "\n]</tool_calls>"]),
    ("functionary-v3.2", ["", "", "\n", "", ">>>", ""]),
    ("functionary-v3.1", ["<function=", "", ">", "</function>", "<function=", ""]),
    ("llama4", ["[", "", "(", ")", ", ", "]"]),
    ("pythonic", ["[", "", "(", ")", ", ", "]"]),
    ("llama3", ["", NAME, PARAMETERS, "}", "; ", ""]),
    ("llama3-json", ["", NAME, PARAMETERS, "}", "; ", ""]),
    ("gemma3", ["```tool_code\n", "", "(", ")", "\n", "\n```"]),
    ("fenced-json", ["```json\n", NAME, ARGUMENTS, "}", "", "\n```"]),
];
const NAME: &str = "{\"name\": ";
const TOOL_NAME: &str = "{\"tool_name\": ";
const ARGUMENTS: &str = ", \"arguments\": ";
const PARAMETERS: &str = ", \"parameters\": ";

/// The texts of enforced calls of a syntax; `tokenizer` tells which of them are control tokens.
pub(super) fn call_style(syntax: &CallSyntax, tokenizer: &Tokenizer) -> CallStyle {
    let style = texts(syntax);
    CallStyle { tokens: control_tokens(&style, tokenizer), ..style }
}

pub(super) fn texts(syntax: &CallSyntax) -> CallStyle {
    let Some((_, texts)) = TEXTS.iter().find(|(name, _)| *name == syntax.name) else { return CallStyle::default() };
    let [open, before_name, after_name, after_args, between, last] = texts.map(str::to_string);
    let (params, quotes_names, tokens) =
        (params(syntax.body), matches!(syntax.body, Body::Json | Body::Keyed), Vec::new());
    CallStyle { open, before_name, after_name, after_args, between, last, quotes_names, params, tokens }
}

fn params(body: Body) -> Option<ParamStyle> {
    let style = |texts: [&str; 4], quote: Option<&str>| {
        let [key, after_key, after_value, between] = texts.map(str::to_string);
        Some(ParamStyle { key, after_key, after_value, between, quote: quote.map(str::to_string) })
    };
    match body {
        Body::Json | Body::Keyed | Body::Named { .. } | Body::Harmony => None,
        // DeepSeek says beside the key that a value is a string; without it, values are read by the schema
        Body::Tags(tags) => {
            let line = if tags.has_layout { "\n" } else { "" };
            let between = if tags.value.is_empty() { "" } else { "\n" };
            let (after_key, after_value) =
                (format!("{}{between}{}{line}", tags.key_end, tags.value), format!("{line}{}", tags.value_end));
            style([&format!("\n{}", tags.key), &after_key, &after_value, ""], Some(""))
        }
        Body::Python => style(["", "=", "", ", "], None),
        Body::Pairs { quote } => style(["", ":", "", ","], Some(quote)),
    }
}

/// The control tokens in the texts of a style.
fn control_tokens(style: &CallStyle, tokenizer: &Tokenizer) -> Vec<(String, u32)> {
    let params = style.params.iter().flat_map(|params| {
        [Some(&params.key), Some(&params.after_key), Some(&params.after_value), params.quote.as_ref()]
            .into_iter()
            .flatten()
    });
    let CallStyle { open, before_name, after_name, after_args, between, last, .. } = style;
    let texts = [open, before_name, after_name, after_args, between, last].into_iter().chain(params);
    let options = EncodeOptions { add_special: false, parse_special: true };
    let mut tokens: Vec<u32> = texts.flat_map(|text| tokenizer.encode(text, options)).collect();
    tokens.sort_unstable();
    tokens.dedup();
    let text = |id: u32| Some((String::from_utf8(tokenizer.token_text(id)?.to_vec()).ok()?, id));
    tokens.into_iter().filter(|id| tokenizer.is_control(*id)).filter_map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::super::syntaxes::CALL_SYNTAXES;
    use super::*;

    #[test]
    fn every_form_has_texts() {
        let missing = CALL_SYNTAXES.iter().filter(|syntax| !TEXTS.iter().any(|(name, _)| *name == syntax.name));
        assert_eq!(missing.map(|syntax| syntax.name).collect::<Vec<_>>(), ["hermes"], "the default");
    }

    /// A vocabulary of all bytes, and an end token.
    #[cfg(feature = "structure")]
    fn bytes_vocabulary() -> Vec<u8> {
        let mut vocabulary = 257u32.to_le_bytes().to_vec();
        for byte in 0..=255u8 {
            // a control token has the mark of those first
            let token: &[u8] = if byte == 0xff { &[] } else { &[byte] };
            vocabulary.extend((token.len() as u32).to_le_bytes());
            vocabulary.extend(token);
        }
        vocabulary.extend(6u32.to_le_bytes());
        vocabulary.extend(b"\xFF<end>");
        vocabulary.extend(256u32.to_le_bytes());
        vocabulary
    }

    /// Texts that the grammar of enforced calls allows are calls of the syntax, with arguments of their schemas.
    #[cfg(feature = "structure")]
    #[test]
    fn enforced_calls_are_parsed() {
        use super::super::{ModelSyntax, Output, OutputPlan, SyntaxNames};
        use crate::tools::CallIds;
        use serde_json::{Value, json};
        use starling::structure::{Calls, Limits, Structures};

        let parameters = json!({ "type": "object", "required": ["city"], "additionalProperties": false, "properties": {
            "city": { "type": "string", "enum": ["Oslo", "New York"] }, "days": { "enum": [1, 2] },
            "more": { "type": "array", "items": { "$ref": "#/$defs/more" }, "maxItems": 1, "minItems": 1 },
        }, "$defs": { "more": { "enum": [true, null] } } });
        let tool = |name: &str, parameters: &Value| json!({ "function": { "name": name, "parameters": parameters } });
        let tools = [tool("weather", &parameters), tool("clock", &Value::Null)];
        let structures = Structures::new(Limits::DEFAULT);
        let mut random = 1u64;
        for syntax in CALL_SYNTAXES {
            let plan = OutputPlan::new(
                ModelSyntax::default(),
                SyntaxNames { calls: Some(syntax.name), reasoning: Some("none") },
            );
            let plan = plan.tools(tools.clone().into(), CallIds::default()).enforced(true);
            let calls = Calls::with_style(texts(syntax), &tools, 0..2, true, true);
            let compiled = structures.constraint(&bytes_vocabulary, &calls.source());
            let compiled = compiled.unwrap_or_else(|e| panic!("{}: {e}: {:?}", syntax.name, calls.source()));
            let mut n_calls = 0;
            for _ in 0..12 {
                let (mut constraint, mut text) = (compiled.fork(), Vec::new());
                loop {
                    let mut mask = [0u32; 9];
                    let may_end = constraint.allow(&mut mask).expect("a mask");
                    let allowed: Vec<u32> = (0..256).filter(|i| mask[*i as usize / 32] >> (i % 32) & 1 == 1).collect();
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    if allowed.is_empty() || (may_end && random >> 40 & 3 == 0) {
                        break;
                    }
                    let token = allowed[(random >> 33) as usize % allowed.len()];
                    text.push(token as u8);
                    if constraint.accept(token).expect("a token") {
                        break;
                    }
                }
                let text = String::from_utf8(text).expect("UTF-8");
                let mut output = Output::default();
                let mut parser = plan.parser(0);
                output.extend(parser.push(&text));
                output.extend(parser.finish(false));
                let label = format!("{}: {text:?}: {output:?}", syntax.name);
                assert!(!output.calls.is_empty() && output.content.is_empty(), "{label}");
                assert_eq!(output.n_complete, output.calls.len(), "{label}");
                n_calls += output.calls.len();
                for call in output.calls {
                    let arguments: Value = serde_json::from_str(&call.function.arguments).expect("JSON");
                    let is_right = match &*call.function.name {
                        "weather" => ["Oslo", "New York"].contains(&arguments["city"].as_str().unwrap_or_default()),
                        name => name == "clock" && arguments == json!({}),
                    };
                    assert!(is_right, "{label}");
                }
            }
            assert!(n_calls > 12 || texts(syntax).between.is_empty(), "{}: no answer has several calls", syntax.name);
        }
    }
}
