//! Output constraints as data. `structure` compiles them; a host without it passes them to another module.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use self::values::ValueSchema;

mod values;

/// An output constraint: the text of the answer must match it.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GrammarSource {
    /// JSON that is valid against a schema.
    Schema(Value),
    /// A text that a regular expression matches from beginning to end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of a grammar in `llguidance`'s Lark syntax; `@schema_0` in it stands for JSON of the first schema.
    Lark(String, Vec<Value>),
    /// As [`GrammarSource::Lark`]; `@answer` in the grammar stands for a text of the other form. Built by `structure::Calls::or`.
    #[serde(skip)]
    LarkOr(String, Vec<Value>, Box<GrammarSource>),
}

/// The form of enforced tool calls: the texts around their parts.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct CallStyle {
    /// Before the first call. Text without calls does not contain it.
    pub open: String,
    /// Before a name.
    pub before_name: String,
    /// Between a name and its arguments.
    pub after_name: String,
    /// After the arguments.
    pub after_args: String,
    /// Between two calls; empty if an answer has only one.
    pub between: String,
    /// After the last call.
    pub last: String,
    /// Whether names are JSON strings.
    pub quotes_names: bool,
    /// Texts around the parameters; `None` if the arguments are a JSON object.
    pub params: Option<ParamStyle>,
    /// Control tokens that occur in these texts.
    pub tokens: Vec<(String, u32)>,
}

/// The texts around the parameters of an enforced tool call.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct ParamStyle {
    /// Before a parameter's name.
    pub key: String,
    /// Between a name and a value.
    pub after_key: String,
    /// After a value.
    pub after_value: String,
    /// Between two parameters.
    pub between: String,
    /// Around a string; with `None`, strings are JSON.
    pub quote: Option<String>,
}

impl Default for CallStyle {
    /// The form of Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`.
    fn default() -> CallStyle {
        CallStyle {
            open: "<tool_call>".into(),
            before_name: "\n{\"name\": ".into(),
            after_name: ", \"arguments\": ".into(),
            after_args: "}\n</tool_call>".into(),
            between: "\n<tool_call>".into(),
            last: String::new(),
            quotes_names: true,
            params: None,
            tokens: Vec::new(),
        }
    }
}

impl GrammarSource {
    /// The schema of any JSON object.
    pub fn object() -> GrammarSource {
        GrammarSource::Schema(json!({ "type": "object" }))
    }
}
