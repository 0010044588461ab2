//! Output constraints as data. `structure` compiles them; a host without it passes them to another module.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// An output constraint: the text of the answer must match it.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// JSON that is valid against a schema.
    Schema(Value),
    /// A text that a regular expression matches from beginning to end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of a grammar in `llguidance`'s Lark syntax; `@schema_0` in it stands for JSON of the first schema.
    Lark(String, Vec<Value>),
    /// As [`Form::Lark`]; `@answer` in the grammar stands for a text of the other form. Built by `structure::Calls::or`.
    #[serde(skip)]
    LarkOr(String, Vec<Value>, Box<Form>),
}

impl Form {
    /// The schema of any JSON object.
    pub fn object() -> Form {
        Form::Schema(json!({ "type": "object" }))
    }
}
