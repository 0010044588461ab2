//! Answers as typed pieces: content, reasoning and tool calls, found in the text that a model writes.
//!
//! ```text
//! text of an answer ─ OutputParser ─► Piece … ─► Output (whole)   or   the deltas of a wire format
//! ```

mod budget;
mod detect;
mod parser;
mod plan;
#[cfg(feature = "grammar-sources")]
mod style;
mod syntaxes;
#[cfg(test)]
mod tests;
mod values;

pub use self::budget::reasoning_constraint;
pub use self::detect::{ModelSyntax, detect_syntaxes};
pub use self::parser::OutputParser;
pub use self::plan::{OutputPlan, SyntaxNames};
pub use self::syntaxes::{Body, CALL_SYNTAXES, CallIdSyntax, CallSyntax, REASONING, ReasoningSyntax, Start, Tags};
use crate::tools::ToolCall;

/// Part of an answer. The pieces of an answer do not depend on how its text was cut, once neighbouring texts are joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text for the user.
    Content(String),
    /// Text of the model's reasoning.
    Reasoning(String),
    /// A tool call. It comes once it is known whole, so that its arguments are a JSON object.
    Call {
        /// The call.
        call: ToolCall,
        /// False of the last call of an answer that was cut within it: its arguments end where the answer does, and are no
        /// JSON unless the model had closed them.
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
    /// Number of calls that are complete: all, or all but the last.
    pub n_complete: usize,
}

impl Output {
    /// Adds a piece.
    pub fn add(&mut self, piece: Piece) {
        match piece {
            Piece::Content(text) => self.content.push_str(&text),
            Piece::Reasoning(text) => self.reasoning.push_str(&text),
            Piece::Call { call, is_complete } => {
                self.calls.push(call);
                self.n_complete += usize::from(is_complete);
            }
        }
    }
}

impl Extend<Piece> for Output {
    fn extend<I: IntoIterator<Item = Piece>>(&mut self, pieces: I) {
        pieces.into_iter().for_each(|piece| self.add(piece));
    }
}
