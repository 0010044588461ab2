//! Answers as typed pieces: content, reasoning and tool calls, found in the text that a model writes.
//!
//! ```text
//! text of an answer ─ OutputParser ─► Piece … ─► Output (whole)   or   the deltas of a wire format
//! ```

use crate::tools::{CallIds, FunctionCall, ToolCall, ToolCallParser};

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

/// How the text of an answer is parsed.
#[derive(Debug, Clone, Default)]
pub struct OutputPlan {
    ids: Option<CallIds>,
    has_schema: bool,
}

impl OutputPlan {
    /// Parses tool calls if there are `ids` for them. With `has_schema` an answer is either tool calls or text that follows
    /// a schema, in which nothing is a call.
    pub fn new(ids: Option<CallIds>, has_schema: bool) -> OutputPlan {
        OutputPlan { ids, has_schema }
    }

    /// A parser for the answer `choice` of the response.
    pub fn parser(&self, choice: usize) -> OutputParser {
        OutputParser { calls: self.ids.map(|ids| ToolCallParser::new(self.has_schema, ids.choice(choice))) }
    }
}

/// Parser of the text of one answer.
#[derive(Debug, Clone)]
pub struct OutputParser {
    calls: Option<ToolCallParser>,
}

impl OutputParser {
    /// Parses the next text.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        match &mut self.calls {
            Some(calls) => pieces(calls.push(text)),
            None => pieces((text.into(), Vec::new())),
        }
    }

    /// Ends the text. If it is `truncated`, an unfinished marker or call that has not started is dropped.
    pub fn finish(&mut self, truncated: bool) -> Vec<Piece> {
        self.calls.as_mut().map_or_else(Vec::new, |calls| pieces(calls.finish(truncated)))
    }
}

fn pieces((content, calls): (String, Vec<ToolCall>)) -> Vec<Piece> {
    let mut pieces = Vec::new();
    if !content.is_empty() {
        pieces.push(Piece::Content(content));
    }
    for ToolCall { index, id, function: FunctionCall { name, arguments }, .. } in calls {
        pieces.push(Piece::CallStart { index, id, name });
        pieces.push(Piece::CallArguments { index, json: arguments });
        pieces.push(Piece::CallEnd { index, is_complete: true });
    }
    pieces
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
