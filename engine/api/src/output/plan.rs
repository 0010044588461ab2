//! How the answers of a request are parsed: by the syntaxes of the model, the prompt and the tools.

use std::sync::Arc;

use serde_json::Value;
#[cfg(feature = "grammar-sources")]
use starling::grammar_source::CallStyle;
use starling::grammar_source::ValueSchema;
use starling::tokenizer::{EncodeOptions, Tokenizer};

use super::detect::ModelSyntax;
use super::parser::{OutputParser, find};
use super::syntaxes::{Body, CALL_SYNTAXES, CallSyntax, REASONING, ReasoningSyntax};
use crate::answer::Answer;
use crate::error::{ApiError, quoted};
use crate::tools::CallIds;

/// Tokens at the end of a prompt that may be the marker of reasoning.
const PROMPT_END: usize = 24;

/// Kind of a marker in content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Marker {
    /// Begins a call.
    Open,
    /// Beside calls.
    Around,
    /// Begins reasoning.
    Reasoning,
    /// Any other control token that the answer's text has.
    Other,
}

/// How the text of an answer is parsed. The default takes all of it as content.
#[derive(Debug, Clone, Default)]
pub struct OutputPlan {
    pub(super) syntax: Option<&'static CallSyntax>,
    pub(super) reasoning: Option<&'static ReasoningSyntax>,
    /// Whether the prompt ends within the reasoning.
    pub(super) in_reasoning: bool,
    /// Whether the marker of reasoning begins with a control token.
    has_reasoning_token: bool,
    /// Whether a grammar enforces the calls, in which a value ends at the first closing tag that another tag follows.
    pub(super) is_enforced: bool,
    pub(super) ids: CallIds,
    tools: Option<Arc<[Value]>>,
    /// Whether text without calls follows a schema, so that nothing in it is a marker.
    pub(super) has_schema: bool,
    /// Markers that are control tokens: they are never content.
    pub(super) hidden: Vec<&'static str>,
    /// Those tokens.
    visible: Vec<u32>,
    texts: Vec<&'static str>,
    kinds: Vec<Marker>,
}

/// Names of syntaxes: `auto` by the chat template, `none`, or a name of the table.
#[derive(Debug, Clone, Copy, Default)]
pub struct SyntaxNames<'a> {
    /// Syntax of tool calls.
    pub calls: Option<&'a str>,
    /// Syntax of reasoning.
    pub reasoning: Option<&'a str>,
}

impl SyntaxNames<'_> {
    /// Checks the names.
    ///
    /// # Errors
    /// A name that is not in the tables; the message lists those that are.
    pub fn check(&self) -> Result<(), ApiError> {
        let all = |param: &str, name: Option<&str>, names: Vec<&str>| match name {
            Some(name) if !["auto", "none"].contains(&name) && !names.contains(&name) => {
                let message =
                    format!("{param} is {:?}, expected auto, none or one of {}", quoted(name), names.join(", "));
                Err(ApiError::param(param, message))
            }
            _ => Ok(()),
        };
        all("tool_call_format", self.calls, CALL_SYNTAXES.iter().map(|syntax| syntax.name).collect())?;
        all("reasoning_format", self.reasoning, REASONING.iter().map(|syntax| syntax.name).collect())
    }

    /// The syntax of tool calls of a model; `None` if they are not parsed.
    pub fn call_form(&self, syntaxes: ModelSyntax) -> Option<&'static CallSyntax> {
        match self.calls.unwrap_or("auto") {
            "none" => None,
            "auto" => Some(syntaxes.calls),
            name => CALL_SYNTAXES.iter().find(|syntax| syntax.name == name),
        }
    }

    /// The syntax of reasoning of a model.
    pub fn reasoning_form(&self, syntaxes: ModelSyntax) -> Option<&'static ReasoningSyntax> {
        match self.reasoning.unwrap_or("auto") {
            "none" => None,
            "auto" => syntaxes.reasoning,
            name => REASONING.iter().find(|syntax| syntax.name == name),
        }
    }
}

impl OutputPlan {
    /// The plan for a model with these syntaxes, without tools.
    pub fn new(syntaxes: ModelSyntax, names: SyntaxNames<'_>) -> OutputPlan {
        let reasoning = names.reasoning_form(syntaxes);
        let syntax = names.call_form(syntaxes);
        OutputPlan { syntax, reasoning, ..OutputPlan::default() }.with_markers()
    }

    /// With the tools of the request, and IDs for calls of them.
    #[must_use]
    pub fn tools(self, tools: Arc<[Value]>, ids: CallIds) -> OutputPlan {
        OutputPlan { tools: Some(tools), ids, ..self }.with_markers()
    }

    /// For answers that are calls, or text of a schema.
    #[must_use]
    pub fn schema(self, has_schema: bool) -> OutputPlan {
        OutputPlan { has_schema, ..self }
    }

    /// For answers whose calls a grammar enforces.
    #[must_use]
    pub fn enforced(self, is_enforced: bool) -> OutputPlan {
        OutputPlan { is_enforced, ..self }
    }

    /// For answers of a model with this tokenizer to the prompt `tokens`, whose end may be the start of the reasoning. See
    /// [`OutputPlan::visible`].
    #[must_use]
    pub fn prompt(mut self, tokenizer: &Tokenizer, tokens: &[u32]) -> OutputPlan {
        let end: Vec<u8> = tokens[tokens.len().saturating_sub(PROMPT_END)..]
            .iter()
            .flat_map(|token| tokenizer.piece(*token).unwrap_or_default().to_vec())
            .collect();
        let end = String::from_utf8_lossy(&end);
        self.in_reasoning = self.reasoning.is_some_and(|syntax| end.trim_end().ends_with(syntax.open));
        let options = EncodeOptions { add_special: false, parse_special: true };
        let first = self.reasoning.and_then(|syntax| tokenizer.encode(syntax.open, options).first().copied());
        self.has_reasoning_token = first.is_some_and(|token| tokenizer.is_control(token));
        let extra = self.reasoning.map(|syntax| syntax.close).into_iter().chain(self.inner_markers());
        let markers: Vec<&str> = self.texts.iter().copied().chain(extra).collect();
        for marker in markers {
            let tokens = tokenizer.encode(marker, options);
            self.visible.extend(tokens.iter().filter(|token| tokenizer.is_control(**token)));
            if tokens.len() == 1 && tokenizer.is_control(tokens[0]) {
                self.hidden.push(marker);
            }
        }
        self.visible.sort_unstable();
        self.visible.dedup();
        self.with_markers()
    }

    /// Control tokens whose text the answer must have, since they are markers.
    pub fn visible(&self) -> &[u32] {
        &self.visible
    }

    /// The markers before and after reasoning, the text that ends it when that is forced, and whether the prompt ends
    /// within it.
    pub(super) fn reasoning_texts(&self) -> Option<(&'static str, &'static str, &'static str, bool)> {
        if self.syntax.is_some_and(|syntax| syntax.body == Body::Harmony) {
            let end = "<|end|><|start|>assistant<|channel|>final<|message|>";
            return Some(("<|channel|>analysis<|message|>", "<|end|>", end, false));
        }
        self.reasoning.map(|syntax| (syntax.open, syntax.close, syntax.close, self.in_reasoning))
    }

    /// The syntax of enforced tool calls.
    #[cfg(feature = "grammar-sources")]
    pub fn call_style(&self, tokenizer: &Tokenizer) -> CallStyle {
        self.syntax.map_or_else(CallStyle::default, |syntax| super::style::call_style(syntax, tokenizer))
    }

    /// A parser for the answer `choice` of the response.
    pub fn parser(&self, choice: usize) -> OutputParser {
        OutputParser::new(self.clone(), choice)
    }

    /// The number of tokens of an answer that are reasoning, with the markers around it.
    pub fn n_reasoning(&self, choice: usize, answer: &Answer) -> usize {
        let may_reason = self.reasoning.is_some() || self.syntax.is_some_and(|syntax| syntax.body == Body::Harmony);
        if !may_reason {
            return 0;
        }
        let (mut parser, mut at) = (self.parser(choice), 0);
        let tokens = answer.tokens.iter().filter(|token| {
            let (_, is_reasoning) = parser.push_token(answer.text.get(at..at + token.n_bytes).unwrap_or_default());
            at += token.n_bytes;
            is_reasoning
        });
        tokens.count()
    }

    pub(super) fn has_tools(&self) -> bool {
        self.tools.is_some()
    }

    pub(super) fn tool(&self, name: &str) -> Option<&Value> {
        self.tools.iter().flat_map(|tools| tools.iter()).find(|tool| tool["function"]["name"] == *name)
    }

    pub(super) fn parameter_schema(&self, name: &str, key: &str) -> Option<ValueSchema<'_>> {
        ValueSchema::new(&self.tool(name)?["function"]["parameters"]).property(key)
    }

    /// Whether reasoning may begin after content.
    pub(super) fn reasoning_repeats(&self) -> bool {
        self.has_reasoning_token || self.reasoning.is_some_and(|syntax| syntax.repeats)
    }

    pub(super) fn find_marker(&self, text: &str, end: bool) -> (usize, Option<(&'static str, Marker)>) {
        let (at, found) = find(text, &self.texts, end);
        (at, found.map(|i| (self.texts[i], self.kinds[i])))
    }

    /// Markers within calls.
    fn inner_markers(&self) -> Vec<&'static str> {
        let harmony = ["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"];
        match self.syntax.map(|syntax| syntax.body) {
            Some(Body::Harmony) => harmony.into(),
            _ if !self.has_tools() => Vec::new(),
            Some(Body::Named { end, prefix }) => {
                let separators = ["<｜tool▁sep｜>"].into_iter().filter(|text| prefix.contains(text));
                end.iter().copied().chain(separators).collect()
            }
            Some(Body::Pairs { quote }) => vec![quote],
            Some(Body::Tags(tags)) => vec![tags.key, tags.key_end, tags.value, tags.value_end, tags.end],
            _ => Vec::new(),
        }
    }

    /// Lists the markers that are searched in content.
    fn with_markers(mut self) -> OutputPlan {
        let syntax = self.syntax.filter(|_| self.has_tools());
        let list = |texts: &'static [&'static str], kind| texts.iter().map(move |text| (*text, kind));
        let mut all: Vec<(&'static str, Marker)> =
            self.reasoning.iter().map(|syntax| (syntax.open, Marker::Reasoning)).collect();
        if let Some(syntax) = syntax {
            all.extend(list(syntax.open, Marker::Open).chain(list(syntax.around, Marker::Around)));
        }
        for hidden in &self.hidden {
            if !all.iter().any(|(text, _)| text == hidden) {
                all.push((hidden, Marker::Other));
            }
        }
        (self.texts, self.kinds) = all.into_iter().unzip();
        self
    }
}
