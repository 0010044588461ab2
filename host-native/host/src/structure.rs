//! Compiles grammars on a thread with a large stack.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use serde_json::Value;
use starling::grammar_source::CallStyle;
use starling::model::Model;
use starling::sampler::Constraint;
use starling::structure::{Calls, CallsPart, GrammarSource, Limits, StructureError, Structures};

/// Compiles constraints for one model.
pub struct Grammars {
    limits: Limits,
    structures: Structures,
}

impl Grammars {
    pub fn new(limits: Limits) -> Grammars {
        Grammars { limits, structures: Structures::new(limits) }
    }

    /// See [`Structures::constraint_unless`]. `model` must be the same in all calls.
    ///
    /// # Errors
    /// The error in the schema or grammar, and its position.
    pub fn constraint(
        &self,
        model: &Model,
        source: &GrammarSource,
        stop: &AtomicBool,
    ) -> Result<Arc<dyn Constraint>, StructureError> {
        self.deep(|| self.structures.constraint_unless(&words(model), source, stop))?
    }

    /// See [`Structures::check_tools`].
    ///
    /// # Errors
    /// The tool whose schemas are too long.
    pub fn check_tools(
        &self,
        style: &CallStyle,
        tools: &[Value],
        callable: Range<usize>,
        is_forced: bool,
    ) -> Result<(), (CallsPart, StructureError)> {
        self.structures.check_tools(style, tools, callable, is_forced)
    }

    /// The constraint for tool calls, or for tool calls or an answer of the form `answer`; see [`Structures::calls_unless`].
    ///
    /// # Errors
    /// The error, and the part of the request that has it.
    pub fn calls(
        &self,
        model: &Model,
        calls: &Calls,
        answer: Option<&GrammarSource>,
        stop: &AtomicBool,
    ) -> Result<Arc<dyn Constraint>, (CallsPart, StructureError)> {
        self.deep(|| self.structures.calls_unless(&words(model), calls, answer, stop))
            .map_err(|e| (CallsPart::Tools, e))?
    }

    /// Runs `work` on a thread with a stack of [`Limits::stack`] bytes.
    fn deep<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, StructureError> {
        let done = thread::scope(|scope| {
            let reader = thread::Builder::new().name("starling-grammar".into()).stack_size(self.limits.stack());
            reader.spawn_scoped(scope, work).map(|reader| reader.join())
        });
        match done {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(_)) => Err(StructureError::Invalid("compiling the grammar failed".into())),
            Err(e) => Err(StructureError::Invalid(format!("cannot start a thread to compile the grammar: {e}"))),
        }
    }
}

/// The model's vocabulary, built on demand.
fn words(model: &Model) -> impl Fn() -> Vec<u8> {
    || model.tokenizer.grammar_vocabulary(model.config.n_vocab)
}
