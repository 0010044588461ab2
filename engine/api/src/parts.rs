//! Parts of an answer in their order, and the writer that all chat APIs but OpenAI's chat completions share: an API only
//! says how it writes a start, a part and the end ([`WireFormat`]).

use starling::engine::FinishReason;

use crate::answer::{Answer, Usage};
use crate::error::ErrorBody;
use crate::output::{OutputParser, Piece};
use crate::stream::{EventSink, StreamWriter};
use crate::tools::{ToolCall, is_truncated};
use crate::update::Update;

/// A part of an answer. Parts of the same kind in a row belong together, except calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// New reasoning.
    Reasoning(String),
    /// New text.
    Text(String),
    /// A tool call; not complete if the answer was cut within it.
    Call {
        /// The call.
        call: ToolCall,
        /// Whether the model wrote it whole.
        is_complete: bool,
    },
}

/// How one API writes an answer.
pub trait WireFormat {
    /// The request left the queue.
    fn start(&mut self, sink: &mut dyn EventSink);

    /// The prompt was processed; `n_cached` of its tokens were in the prefix cache.
    fn prefilled(&mut self, _n_cached: usize) {}

    /// Writes a part.
    fn part(&mut self, part: Part, sink: &mut dyn EventSink);

    /// Writes the end.
    fn finish(&mut self, answer: &Answer, sink: &mut dyn EventSink);

    /// Ends a stream with an error.
    fn fail(&mut self, error: &ErrorBody, sink: &mut dyn EventSink);

    /// As [`StreamWriter::keep_alive`].
    fn keep_alive(&mut self, _: &mut dyn EventSink) -> bool {
        false
    }
}

/// Writes one answer by a [`WireFormat`].
#[derive(Debug)]
pub struct AnswerWriter<F> {
    parser: OutputParser,
    answer: Answer,
    format: F,
    /// Whether the last token is one of reasoning.
    is_reasoning: bool,
}

impl<F: WireFormat> AnswerWriter<F> {
    /// A writer without parts yet.
    pub fn new(parser: OutputParser, format: F) -> AnswerWriter<F> {
        AnswerWriter { parser, answer: Answer::default(), format, is_reasoning: false }
    }

    /// The answer so far.
    pub fn answer(&self) -> &Answer {
        &self.answer
    }

    /// The format, for a response that is written whole.
    pub fn into_format(self) -> F {
        self.format
    }

    fn pieces(&mut self, pieces: Vec<Piece>, sink: &mut dyn EventSink) {
        for piece in pieces {
            match piece {
                Piece::Content(text) => self.format.part(Part::Text(text), sink),
                Piece::Reasoning(text) => self.format.part(Part::Reasoning(text), sink),
                Piece::Call { call, is_complete } => self.format.part(Part::Call { call, is_complete }, sink),
            }
        }
    }
}

impl<F: WireFormat> StreamWriter for AnswerWriter<F> {
    fn update(&mut self, _: usize, update: Update, sink: &mut dyn EventSink) -> bool {
        let mut end = None;
        match &update {
            Update::Started => self.format.start(sink),
            Update::Prefilled { n_cached, .. } => self.format.prefilled(*n_cached),
            Update::Token { text, .. } => {
                let (pieces, is_reasoning) = self.parser.push_token(text);
                self.is_reasoning = is_reasoning;
                self.answer.n_reasoning += usize::from(is_reasoning);
                self.pieces(pieces, sink);
            }
            Update::Done { text, reason, .. } => {
                let pieces = self.parser.push(text);
                self.pieces(pieces, sink);
                if matches!(reason, FinishReason::StopToken(_)) {
                    self.answer.n_reasoning -= usize::from(self.is_reasoning);
                }
                end = Some(*reason);
            }
            _ => {}
        }
        self.answer.add(update);
        if end.is_none() {
            return false;
        }
        let rest = self.parser.finish(is_truncated(end));
        self.pieces(rest, sink);
        self.format.finish(&self.answer, sink);
        true
    }

    fn keep_alive(&mut self, sink: &mut dyn EventSink) -> bool {
        self.format.keep_alive(sink)
    }

    fn fail(&mut self, error: &ErrorBody, sink: &mut dyn EventSink) {
        self.format.fail(error, sink);
    }
}

/// Token counts of one answer to a prompt of `n_prompt` tokens.
pub fn usage_of(n_prompt: usize, answer: &Answer) -> Usage {
    Usage::new(n_prompt, 1, [answer])
}

/// The stop string that ended the answer, if one did.
pub fn stop_string<'a>(answer: &Answer, stops: &'a [String]) -> Option<&'a str> {
    match answer.finish {
        Some(FinishReason::StopString(i)) => stops.get(i).map(String::as_str),
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use crate::output::{ModelSyntax, OutputPlan, SyntaxNames};
    use crate::tools::CallIds;
    use serde_json::Value;

    /// A parser of calls as Hermes writes them.
    pub(crate) fn hermes() -> OutputParser {
        let names = SyntaxNames { calls: Some("hermes"), reasoning: None };
        OutputPlan::new(ModelSyntax::default(), names).tools([].into(), CallIds::new(1)).parser(0)
    }

    /// A parser that takes all text as content.
    pub(crate) fn plain() -> OutputParser {
        OutputPlan::default().parser(0)
    }

    /// Events of a stream: name and JSON.
    #[derive(Default)]
    pub(crate) struct Events(pub(crate) Vec<(Option<String>, Value)>);

    impl EventSink for Events {
        fn event(&mut self, name: Option<&str>, json: &[u8]) {
            self.0.push((name.map(Into::into), serde_json::from_slice(json).expect("JSON")));
        }

        fn done(&mut self) {
            self.0.push((None, Value::from("[DONE]")));
        }
    }

    /// The updates of an answer of these texts that ends for `reason`.
    pub(crate) fn updates(texts: &[&str], reason: FinishReason) -> Vec<Update> {
        let token = |text: &str| Update::Token { token: 5, text: text.into(), logprob: -0.5, top: vec![(5, -0.5)] };
        let mut updates = vec![Update::Started, Update::Prefilled { n_cached: 2, prompt: Vec::new() }];
        updates.extend(texts.iter().map(|text| token(text)));
        let n_tokens = texts.len();
        updates.push(Update::Done { text: String::new(), reason, n_tokens, receipt: None });
        updates
    }

    /// The events of a stream of these updates, and the format at its end.
    pub(crate) fn run<F: WireFormat>(mut writer: AnswerWriter<F>, updates: &[Update]) -> (Events, F) {
        let mut events = Events::default();
        for (i, update) in updates.iter().enumerate() {
            assert_eq!(writer.update(0, update.clone(), &mut events), i + 1 == updates.len());
        }
        (events, writer.into_format())
    }
}
