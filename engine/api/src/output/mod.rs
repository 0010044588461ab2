//! Answers as typed pieces: content, reasoning and tool calls, found in the text that a model writes.
//!
//! ```text
//! text of an answer ─ OutputParser ─► Piece … ─► Output (whole)   or   the deltas of a wire format
//! ```

mod budget;
mod forms;
mod parser;
mod plan;
#[cfg(feature = "forms")]
mod style;
#[cfg(test)]
mod tests;
mod values;

pub use self::budget::reasoning_constraint;
pub use self::forms::{
    Body, CallForm, FORMS, IdForm, REASONING, ReasoningForm, Start, Tags, call_form, reasoning_form,
};
pub use self::parser::OutputParser;
pub use self::plan::{FormNames, OutputPlan};
use crate::tools::{FunctionCall, ToolCall};

/// Part of an answer. The pieces of an answer do not depend on how its text was cut, once neighbouring texts are joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text for the user.
    Content(String),
    /// Text of the model's reasoning.
    Reasoning(String),
    /// Start of a tool call.
    CallStart {
        /// Position among the calls of the answer, from 0.
        index: usize,
        /// ID of the call.
        id: String,
        /// Function to call.
        name: String,
    },
    /// Part of the arguments of the open call. The parts of a call joined are a JSON object.
    CallArguments {
        /// Position of the call.
        index: usize,
        /// Part of the JSON text.
        json: String,
    },
    /// End of the open call.
    CallEnd {
        /// Position of the call.
        index: usize,
        /// Whether the model wrote the whole call. If not, the arguments have only the parameters that it completed.
        is_complete: bool,
    },
}

/// Removes all of `markers` from a text.
fn strip_all(text: String, markers: &[&str]) -> String {
    markers.iter().fold(text, |text, marker| if text.contains(marker) { text.replace(marker, "") } else { text })
}

/// A parsed answer: its pieces joined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Output {
    /// Text for the user.
    pub content: String,
    /// Text of the model's reasoning.
    pub reasoning: String,
    /// Tool calls.
    pub calls: Vec<ToolCall>,
    /// Number of calls that the model wrote whole.
    pub n_complete: usize,
}

impl Output {
    /// Adds a piece.
    pub fn add(&mut self, piece: Piece) {
        match piece {
            Piece::Content(text) => self.content.push_str(&text),
            Piece::Reasoning(text) => self.reasoning.push_str(&text),
            Piece::CallStart { index, id, name } => {
                let function = FunctionCall { name, arguments: String::new() };
                self.calls.push(ToolCall { index, id, kind: "function", function });
            }
            Piece::CallArguments { json, .. } => {
                self.calls.last_mut().into_iter().for_each(|call| call.function.arguments.push_str(&json));
            }
            Piece::CallEnd { is_complete, .. } => self.n_complete += usize::from(is_complete),
        }
    }
}

impl Extend<Piece> for Output {
    fn extend<I: IntoIterator<Item = Piece>>(&mut self, pieces: I) {
        pieces.into_iter().for_each(|piece| self.add(piece));
    }
}
