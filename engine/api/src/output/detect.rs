//! The syntaxes of a model's calls and reasoning: by what its chat template renders for a known call, by what the template
//! tells the model about calls, and by the control tokens of the vocabulary.

use std::sync::Arc;

use serde_json::{Value, json};
use starling::chat::{ChatRequest, ChatTemplate, Json, Now};
use starling::tokenizer::{EncodeOptions, Tokenizer};

use super::plan::{OutputPlan, SyntaxNames};
use super::syntaxes::{Body, CALL_SYNTAXES, CallSyntax, REASONING, ReasoningSyntax};
use super::{Output, Piece};
use crate::tools::CallIds;

/// The syntaxes of a model.
#[derive(Debug, Clone, Copy)]
pub struct ModelSyntax {
    /// Syntax of tool calls.
    pub calls: &'static CallSyntax,
    /// Syntax of reasoning.
    pub reasoning: Option<&'static ReasoningSyntax>,
}

impl Default for ModelSyntax {
    /// Calls of Hermes, the most common syntax, and no reasoning.
    fn default() -> ModelSyntax {
        let hermes = CALL_SYNTAXES.iter().find(|syntax| syntax.name == "hermes");
        ModelSyntax { calls: hermes.unwrap_or(&CALL_SYNTAXES[0]), reasoning: None }
    }
}

const TOOL: &str = "probe_called";
const KEY: &str = "probe_key";
const VALUE: &str = "probe value";
const REASON: &str = "probe_reason";

/// What a template renders for a conversation that ends with a call.
#[derive(Debug, Default)]
struct Probe {
    /// The whole text.
    text: String,
    /// The assistant's message with the call.
    answer: String,
    /// The same with reasoning before the call; empty if the template refuses that.
    reasoned: String,
}

/// The syntaxes of models with this chat template and tokenizer. A template that fails on a conversation with a call is judged
/// by its source.
pub fn detect_syntaxes(template: &ChatTemplate, tokenizer: &Tokenizer) -> ModelSyntax {
    let probe = probe(template, tokenizer).unwrap_or_default();
    let is_written = |text: &str| probe.text.contains(text) || template.source().contains(text);
    let options = EncodeOptions { add_special: false, parse_special: true };
    let is_token = |text: &str| tokenizer.encode(text, options).len() == 1 && text.len() > 1;
    let has_all = |syntax: &&&'static CallSyntax, has: &dyn Fn(&str) -> bool| {
        !syntax.template.is_empty() && syntax.template.iter().all(|text| has(text))
    };
    let find = |has: &dyn Fn(&str) -> bool| CALL_SYNTAXES.iter().find(|syntax| has_all(&syntax, has));
    let is_known = |text: &str| is_written(text) || is_token(text);
    let calls = form_of_call(&probe.answer, &is_known).or_else(|| find(&is_written)).or_else(|| find(&is_token));
    let reasoning = reasoning_of(&probe.reasoned)
        .or_else(|| REASONING.iter().find(|syntax| is_written(syntax.open)))
        .or_else(|| REASONING.iter().find(|syntax| is_token(syntax.open)));
    ModelSyntax { calls: calls.unwrap_or(ModelSyntax::default().calls), reasoning }
}

/// The syntax in which `answer` has the probe's call: of those that find it the one that leaves the least text beside it, and
/// of these the one whose own body and first marker it has. `is_known` says which texts the model knows.
fn form_of_call(answer: &str, is_known: &dyn Fn(&str) -> bool) -> Option<&'static CallSyntax> {
    let rank = |syntax: &'static CallSyntax| {
        let n = parse(syntax, answer)?;
        let first = syntax.open.first();
        // most syntaxes read JSON, but write something else
        let is_lenient = syntax.body != Body::Json && answer.contains("\"name\"");
        let has_first = first.is_none_or(|marker| answer.contains(marker));
        let is_told = syntax.template.iter().all(|text| is_known(text));
        Some(((n, is_lenient, !has_first, !is_told), syntax))
    };
    CALL_SYNTAXES.iter().filter_map(rank).min_by_key(|(rank, _)| *rank).map(|(_, syntax)| syntax)
}

/// The bytes of text beside the probe's call in `answer`; `None` if the syntax does not find the call.
fn parse(syntax: &'static CallSyntax, answer: &str) -> Option<usize> {
    let tool = json!({ "type": "function", "function": { "name": TOOL,
        "parameters": { "type": "object", "properties": { KEY: { "type": "string" } } } } });
    let names = SyntaxNames { calls: Some(syntax.name), reasoning: Some("none") };
    let plan = OutputPlan::new(ModelSyntax::default(), names).tools(Arc::from([tool]), CallIds::default());
    let mut parser = plan.parser(0);
    let mut output = Output::default();
    let pieces: Vec<Piece> = parser.push(answer).into_iter().chain(parser.finish(false)).collect();
    output.extend(pieces);
    let [call] = &output.calls[..] else { return None };
    let arguments: Value = serde_json::from_str(&call.function.arguments).ok()?;
    (call.function.name == TOOL && arguments == json!({ KEY: VALUE })).then_some(output.content.len())
}

/// The syntax in which `answer` has the probe's reasoning.
fn reasoning_of(answer: &str) -> Option<&'static ReasoningSyntax> {
    let before = answer.split_once(REASON)?.0.trim_end();
    REASONING.iter().find(|syntax| before.ends_with(syntax.open))
}

/// Renders a question and a call; the text that a generation prompt has, too, is not the answer's.
fn probe(template: &ChatTemplate, tokenizer: &Tokenizer) -> Option<Probe> {
    let render = |messages: &[&Value], add_generation_prompt: bool| {
        let messages = messages.iter().map(|message| to_json(message)).collect::<Option<Vec<Json>>>()?;
        let tool = json!({ "type": "function", "function": { "name": "probe_listed", "description": "Probe.",
            "parameters": { "type": "object", "properties": { KEY: { "type": "string", "description": "Probe." } },
                "required": [KEY] } } });
        let (tools, now) = (to_json(&Value::Array(vec![tool])), Some(Now::from_unix(0)));
        let request = ChatRequest { messages, tools, add_generation_prompt, now, ..ChatRequest::default() };
        Some(template.render(&request, tokenizer).ok()?.text)
    };
    let question = json!({ "role": "user", "content": "probe_question" });
    let prompt = render(&[&question], true)?;
    let answer_of = |text: &str| text[common_prefix(&prompt, text)..].to_string();
    // most templates take arguments as an object, some as its text
    let arguments = json!({ KEY: VALUE });
    [arguments.clone(), Value::from(arguments.to_string())].into_iter().find_map(|arguments| {
        let mut call = json!({ "role": "assistant", "content": "", "tool_calls": [{ "id": "probe0001", "type": "function",
            "function": { "name": TOOL, "arguments": arguments } }] });
        let text = render(&[&question, &call], false)?;
        call["reasoning_content"] = REASON.into();
        let reasoned = render(&[&question, &call], false).map_or(String::new(), |text| answer_of(&text));
        Some(Probe { answer: answer_of(&text), reasoned, text })
    })
}

fn to_json(value: &Value) -> Option<Json> {
    serde_json::from_value(value.clone()).ok()
}

/// The length of what two texts begin with. Where it ends within a marker of both, it ends before that.
fn common_prefix(a: &str, b: &str) -> usize {
    let n = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    let n = (0..=n).rev().find(|n| a.is_char_boundary(*n) && b.is_char_boundary(*n)).unwrap_or(0);
    if n == a.len() {
        return n;
    }
    let is_end = |c: char| matches!(c, '>' | ']' | '\n' | ' ');
    a[..n].rfind(is_end).map_or(0, |at| at + 1)
}

#[cfg(all(test, feature = "grammar-sources"))]
mod tests {
    use starling::gguf::{Gguf, GgufWriter, Value as GgufValue};
    use starling::grammar_source::CallStyle;

    use super::super::style::texts;
    use super::*;

    /// A tokenizer of bytes and control tokens.
    fn tokenizer(controls: &[&str]) -> Tokenizer {
        let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
        let tokens: Vec<String> =
            bytes.chain(["<s>", "</s>"].iter().chain(controls).map(|text| (*text).to_string())).collect();
        let kinds: Vec<i32> = (0..tokens.len()).map(|id| if id < 256 { 6 } else { 3 }).collect();
        let mut w = GgufWriter::new();
        w.str("tokenizer.ggml.model", "llama").expect("valid");
        w.str_array("tokenizer.ggml.tokens", &tokens).expect("valid");
        w.i32_array("tokenizer.ggml.token_type", &kinds).expect("valid");
        w.f32_array("tokenizer.ggml.scores", &vec![0.0; tokens.len()]).expect("valid");
        w.metadata("tokenizer.ggml.bos_token_id", &GgufValue::U32(256)).expect("valid");
        w.metadata("tokenizer.ggml.eos_token_id", &GgufValue::U32(257)).expect("valid");
        w.metadata("tokenizer.ggml.add_space_prefix", &GgufValue::Bool(false)).expect("valid");
        Tokenizer::from_gguf(&Gguf::parse(&w.header()).expect("valid")).expect("valid")
    }

    /// A template that renders calls as `call`, an expression.
    fn template(tools: &str, call: &str) -> ChatTemplate {
        let source = format!(
            "{{%- if tools -%}}{{{{ 'system: ' ~ {tools} ~ '\n' }}}}{{%- endif -%}}\
             {{%- for message in messages -%}}{{{{ '<|start_of|>' ~ message.role ~ '\n' }}}}\
             {{%- if message.thinking -%}}{{{{ '<|thinks|>' ~ message.thinking ~ '<|thought|>' }}}}{{%- endif -%}}\
             {{%- if message.tool_calls -%}}{{%- set call = message.tool_calls[0].function -%}}{{{{ {call} }}}}\
             {{%- else -%}}{{{{ message.content }}}}{{%- endif -%}}{{{{ '<|end_of|>\n' }}}}{{%- endfor -%}}\
             {{%- if add_generation_prompt -%}}{{{{ '<|start_of|>assistant\n' }}}}{{%- endif -%}}"
        );
        ChatTemplate::new(&source).unwrap_or_else(|e| panic!("{e}: {source}"))
    }

    /// The probe's call in a style, as an expression.
    fn call(style: &CallStyle) -> String {
        let CallStyle { open, before_name, after_name, after_args, last, quotes_names, params, .. } = style;
        let name = if *quotes_names { json!(TOOL).to_string() } else { TOOL.into() };
        let args = match params {
            None => json!({ KEY: VALUE }).to_string(),
            Some(style) => {
                let value = match &style.quote {
                    Some(quote) => format!("{quote}{VALUE}{quote}"),
                    None => json!(VALUE).to_string(),
                };
                format!("{}{KEY}{}{value}{}", style.key, style.after_key, style.after_value)
            }
        };
        Value::from(format!("{open}{before_name}{name}{after_name}{args}{after_args}{last}")).to_string()
    }

    #[test]
    fn a_form_is_found_in_a_rendered_call() {
        for syntax in CALL_SYNTAXES {
            // which of these reads a call depends on markers that it does not have, and calls in fences are not told from text
            let same = match syntax.name {
                "pythonic" => "llama4",
                "llama3-json" => "llama3",
                "gemma3" | "fenced-json" => continue,
                name => name,
            };
            let syntaxes = detect_syntaxes(&template("'none'", &call(&texts(syntax))), &tokenizer(&[]));
            assert_eq!(syntaxes.calls.name, same, "{}", syntax.name);
        }
        let lists =
            "'[TOOL_CALLS] [{\"name\": \"' ~ call.name ~ '\", \"arguments\": ' ~ call.arguments | tojson ~ '}]'";
        assert_eq!(detect_syntaxes(&template("'none'", lists), &tokenizer(&[])).calls.name, "mistral-json");
        let command = "'Action:\n```json\n[\n    {\n        \"tool_name\": \"' ~ call.name ~ '\",\n        \"parameters\": ' ~ call.arguments \
            | tojson ~ '\n    }\n]```'";
        assert_eq!(detect_syntaxes(&template("'none'", command), &tokenizer(&[])).calls.name, "command-r");
    }

    #[test]
    fn a_form_is_found_in_what_a_template_tells_or_in_the_vocabulary() {
        let lfm = ["<|tool_list_start|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|im_end|>"];
        let apertus = ["<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"];
        let action = "'Write \\'Action:\\' followed by a list'";
        for (tools, controls, calls, reasoning) in [
            // LFM2 lists its tools and drops earlier calls
            ("'List of tools: <|tool_list_start|>' ~ tools | tojson", &lfm[..], "lfm2", None),
            ("'List of tools: ' ~ tools | tojson", &lfm[..], "lfm2", None),
            (action, &[], "command-r", None),
            ("tools | tojson", &apertus[..], "apertus", Some("apertus")),
            ("'a \"<｜DSML｜tool_calls>\" block'", &["｜DSML｜"], "deepseek-v4", None),
            ("'a \"<｜DSML｜function_calls>\" block'", &["｜DSML｜"], "deepseek-v3.2", None),
            ("tools | tojson", &[], "hermes", None),
            ("tools | tojson", &["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"], "mistral", Some("mistral")),
            ("'<tool_call>' ~ tools | tojson", &["<|python_tag|>", "<think>"], "hermes", Some("think")),
        ] {
            let syntaxes = detect_syntaxes(&template(tools, "message.content"), &tokenizer(controls));
            assert_eq!(
                (syntaxes.calls.name, syntaxes.reasoning.map(|syntax| syntax.name)),
                (calls, reasoning),
                "{tools}"
            );
        }
    }

    #[test]
    fn the_marker_of_rendered_reasoning_is_its_form() {
        let source = "{%- for message in messages -%}{{ message.role ~ ': ' }}{%- if message.reasoning_content -%}\
            {{ ['<', 'thought', '>'] | join ~ message.reasoning_content }}{%- endif -%}{{ message.content }}{%- endfor -%}";
        let template = ChatTemplate::new(source).expect("valid");
        assert_eq!(detect_syntaxes(&template, &tokenizer(&[])).reasoning.map(|syntax| syntax.name), Some("exaone"));
        // a template that fails is judged by its source
        let template = ChatTemplate::new("{{ raise_exception('[TOOL_CALLS]') }}").expect("valid");
        assert_eq!(detect_syntaxes(&template, &tokenizer(&[])).calls.name, "mistral-json");
    }
}
