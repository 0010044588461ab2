//! JSON schemas and grammars for JavaScript: a module that pages fetch when the first request has one. Its constraints have
//! the methods that the engine's module calls (`Constraint` in host-wasm/src/constraint.rs).

use std::ops::Range;

use serde::Deserialize;
use serde_json::Value;
use starling::grammar_source::CallStyle;
use starling::sampler::{self, ConstraintError};
use starling::structure::{Calls, CallsPart, GrammarSource, Limits, Structures};
use wasm_bindgen::prelude::*;

/// A constraint of an answer, in JSON.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum OutputConstraint {
    Grammar(GrammarSource),
    /// Tool calls.
    Calls {
        tools: Vec<Value>,
        /// Indices of the tools that may be called.
        which: Range<usize>,
        forced: bool,
        parallel: bool,
        /// The form of the calls.
        #[serde(default)]
        style: Box<CallStyle>,
        /// The form of an answer that calls none of them, and the part of the request that says it.
        answer: Option<(String, GrammarSource)>,
    },
}

/// Compiles constraints for the vocabulary of one model.
#[wasm_bindgen]
pub struct Grammars {
    structures: Structures,
    words: Vec<u8>,
}

#[wasm_bindgen]
impl Grammars {
    /// `words` is the vocabulary, from `Model.words`.
    #[wasm_bindgen(constructor)]
    pub fn new(words: Vec<u8>) -> Grammars {
        Grammars { structures: Structures::new(Limits::DEFAULT), words }
    }

    /// Compiles a constraint.
    ///
    /// # Errors
    /// If a schema or grammar is invalid; the message of a tool's starts with its place in the request.
    pub fn constraint(&self, json: &str) -> Result<Constraint, String> {
        let words = || self.words.clone();
        let made = match serde_json::from_str(json).map_err(|e| e.to_string())? {
            OutputConstraint::Grammar(source) => self.structures.constraint(&words, &source).map_err(|e| e.to_string()),
            OutputConstraint::Calls { tools, which, forced, parallel, style, answer } => {
                let (param, source) = answer.unzip();
                let compile = || {
                    self.structures.check_tools(&style, &tools, which.clone(), forced)?;
                    let calls = Calls::with_style(*style, &tools, which, forced, parallel);
                    self.structures.calls(&words, &calls, source.as_ref())
                };
                compile().map_err(|(part, e)| match part {
                    CallsPart::Tool(i) => format!("tools[{i}].function.parameters: {e}"),
                    CallsPart::Tools => format!("tools: {e}"),
                    CallsPart::Answer => format!("{}: {e}", param.unwrap_or_default()),
                })
            }
        }?;
        Ok(Constraint(made.fork()))
    }
}

/// A grammar at a position of an answer.
#[wasm_bindgen]
pub struct Constraint(Box<dyn sampler::Constraint>);

/// Encodes a result for `Constraint` in host-wasm/src/constraint.rs.
fn encode(result: Result<bool, ConstraintError>) -> u32 {
    match result {
        Ok(yes) => yes.into(),
        Err(ConstraintError::NoToken) => 2,
        Err(ConstraintError::TooComplex) => 3,
        Err(ConstraintError::Failed) => 4,
    }
}

#[wasm_bindgen]
impl Constraint {
    /// The same grammar at the same position.
    pub fn fork(&self) -> Constraint {
        Constraint(self.0.fork())
    }

    /// Sets the bits of the tokens that may come next; returns whether the answer may end.
    pub fn allow(&mut self, mask: &mut [u32]) -> u32 {
        encode(self.0.allow(mask))
    }

    /// Takes the next token; returns whether the answer is complete.
    pub fn accept(&mut self, token: u32) -> u32 {
        encode(self.0.accept(token))
    }
}
