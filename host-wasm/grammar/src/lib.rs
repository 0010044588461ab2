//! Schemas and grammars for JavaScript: a module of its own, which pages fetch when an answer has to follow one. Its
//! constraints are what `constraints.js` has the engine's module ask.

use std::ops::Range;

use serde::Deserialize;
use serde_json::Value;
use starling::sampler::{self, ConstraintError};
use starling::structure::{Calls, CallsPart, Form, Limits, Structures};
use wasm_bindgen::prelude::*;

/// What an answer has to be, in JSON.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Wanted {
    /// A form.
    Form(Form),
    /// Calls of tools.
    Calls {
        tools: Vec<Value>,
        /// Which of them may be called.
        which: Range<usize>,
        forced: bool,
        parallel: bool,
        /// The form of an answer that calls none of them, and the part of the request that says it.
        answer: Option<(String, Form)>,
    },
}

/// Makes constraints for one model.
#[wasm_bindgen]
pub struct Grammars {
    structures: Structures,
    words: Vec<u8>,
}

#[wasm_bindgen]
impl Grammars {
    /// For the model with these words.
    #[wasm_bindgen(constructor)]
    pub fn new(words: Vec<u8>) -> Grammars {
        Grammars { structures: Structures::new(Limits::DEFAULT), words }
    }

    /// A constraint, at the beginning of an answer.
    ///
    /// # Errors
    /// What is wrong; with tools after the part of the request that it is wrong with.
    pub fn constraint(&self, wanted: &str) -> Result<Constraint, String> {
        let words = || self.words.clone();
        let made = match serde_json::from_str(wanted).map_err(|e| e.to_string())? {
            Wanted::Form(form) => self.structures.constraint(&words, &form).map_err(|e| e.to_string()),
            Wanted::Calls { tools, which, forced, parallel, answer } => {
                let calls = Calls::new(&tools, which, forced, parallel);
                let (param, form) = answer.unzip();
                self.structures.calls(&words, &calls, form.as_ref()).map_err(|(part, e)| match part {
                    CallsPart::Tool(i) => format!("tools[{i}].function.parameters: {e}"),
                    CallsPart::Tools => format!("tools: {e}"),
                    CallsPart::Answer => format!("{}: {e}", param.unwrap_or_default()),
                })
            }
        }?;
        Ok(Constraint(made.fork()))
    }
}

/// A grammar at a place in an answer.
#[wasm_bindgen]
pub struct Constraint(Box<dyn sampler::Constraint>);

/// What a constraint says: no or yes, or why it cannot go on.
fn told(answer: Result<bool, ConstraintError>) -> u32 {
    match answer {
        Ok(is_so) => is_so.into(),
        Err(ConstraintError::NoToken) => 2,
        Err(ConstraintError::TooComplex) => 3,
        Err(ConstraintError::Failed) => 4,
    }
}

#[wasm_bindgen]
impl Constraint {
    /// The same at the same place.
    pub fn fork(&self) -> Constraint {
        Constraint(self.0.fork())
    }

    /// Sets the bits of the tokens that may come next; says whether the answer may end.
    pub fn allow(&mut self, mask: &mut [u32]) -> u32 {
        told(self.0.allow(mask))
    }

    /// Takes the next token; says whether the answer is complete.
    pub fn accept(&mut self, token: u32) -> u32 {
        told(self.0.accept(token))
    }
}
