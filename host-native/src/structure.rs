//! Grammars are read on a thread with a stack that is deep enough for them.

use std::sync::Arc;
use std::thread;

use starling::model::Model;
use starling::sampler::Constraint;
use starling::structure::{Calls, Form, Limits, StructureError, Structures};

/// Makes constraints for one model.
pub struct Grammars {
    limits: Limits,
    structures: Structures,
}

impl Grammars {
    /// With these limits.
    pub fn new(limits: Limits) -> Grammars {
        Grammars { limits, structures: Structures::new(limits) }
    }

    /// A constraint for answers of `model`, which must be the same in all calls; see [`Structures::constraint`].
    ///
    /// # Errors
    /// What is wrong with the form, and where.
    pub fn constraint(&self, model: &Model, form: &Form) -> Result<Arc<dyn Constraint>, StructureError> {
        self.deep(|| self.structures.constraint(&words(model), form))?
    }

    /// A constraint for answers that call tools, as [`Grammars::constraint`].
    ///
    /// # Errors
    /// What is wrong, and if it is with a tool's parameters, which of the tools.
    pub fn calls(&self, model: &Model, calls: &Calls) -> Result<Arc<dyn Constraint>, (Option<usize>, StructureError)> {
        self.deep(|| self.structures.calls(&words(model), calls)).map_err(|e| (None, e))?
    }

    /// Does it on a thread of its own.
    fn deep<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, StructureError> {
        let done = thread::scope(|scope| {
            let reader = thread::Builder::new().name("starling-grammar".into()).stack_size(self.limits.stack());
            reader.spawn_scoped(scope, work).map(|reader| reader.join())
        });
        match done {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(_)) => Err(StructureError::Wrong("reading it has failed".into())),
            Err(e) => Err(StructureError::Wrong(format!("there is no thread to read it: {e}"))),
        }
    }
}

/// The model's vocabulary, when it is asked for.
fn words(model: &Model) -> impl Fn() -> Vec<u8> {
    || model.tokenizer.grammar_vocabulary(model.config.n_vocab)
}
