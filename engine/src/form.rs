//! Output constraints as data. `structure` compiles them; a host without it hands them to another module.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// An output constraint: the text of the answer must match it.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// JSON that a schema describes.
    Schema(Value),
    /// A text that a regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of a grammar in Lark's syntax, as `llguidance` has it; `@schema_0` in it is JSON by the first schema.
    Lark(String, Vec<Value>),
    /// A grammar and its schemas as [`Form::Lark`] has them, where `@answer` is a text of the other form:
    /// `structure::Calls::or` makes it.
    #[serde(skip)]
    LarkOr(String, Vec<Value>, Box<Form>),
}

impl Form {
    /// The schema of any JSON object.
    pub fn object() -> Form {
        Form::Schema(json!({ "type": "object" }))
    }
}
