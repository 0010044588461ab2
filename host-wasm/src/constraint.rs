//! Constraints that JavaScript implements: those of the grammar module, or any object with the same methods.

use send_wrapper::SendWrapper;
use starling::sampler::{Constraint, ConstraintError};
use wasm_bindgen::prelude::*;

#[wasm_bindgen(typescript_custom_section)]
const INTERFACE: &str = r#"
/**
 * A grammar at a position of a text. `allow` and `accept` return 0 for no and 1 for yes, 2 if no token of the vocabulary
 * continues the text, 3 if the grammar is too complex, and 4 if the constraint failed.
 */
export interface Constraint {
  /** The same grammar at the same position, independent of this object. */
  fork(): Constraint;
  /** Sets the bits of the tokens that may come next; returns whether the text may end here. */
  allow(mask: Uint32Array): number;
  /** Takes the next token; returns whether the text is complete. */
  accept(token: number): number;
  /** Called once, when no request needs it. */
  free(): void;
}
"#;

#[wasm_bindgen]
extern "C" {
    /// An object with the methods of the interface `Constraint`.
    #[derive(Debug)]
    #[wasm_bindgen(typescript_type = "Constraint")]
    pub type ConstraintObject;
    #[wasm_bindgen(method, catch)]
    fn fork(this: &ConstraintObject) -> Result<ConstraintObject, JsValue>;
    #[wasm_bindgen(method, catch)]
    fn allow(this: &ConstraintObject, mask: &mut [u32]) -> Result<u32, JsValue>;
    #[wasm_bindgen(method, catch)]
    fn accept(this: &ConstraintObject, token: u32) -> Result<u32, JsValue>;
    #[wasm_bindgen(method, catch)]
    fn free(this: &ConstraintObject) -> Result<(), JsValue>;
}

/// A constraint in JavaScript; `None` after a fork that failed. The engine asks constraints on its own thread only.
#[derive(Debug)]
pub(crate) struct JsConstraint(Option<SendWrapper<ConstraintObject>>);

impl JsConstraint {
    pub(crate) fn new(object: ConstraintObject) -> JsConstraint {
        JsConstraint(Some(SendWrapper::new(object)))
    }

    /// Calls a method that returns one of the numbers of `Constraint` in `host-wasm/grammar`.
    fn ask(&self, call: impl FnOnce(&ConstraintObject) -> Result<u32, JsValue>) -> Result<bool, ConstraintError> {
        match self.0.as_ref().map(|object| call(object)) {
            Some(Ok(0)) => Ok(false),
            Some(Ok(1)) => Ok(true),
            Some(Ok(2)) => Err(ConstraintError::NoToken),
            Some(Ok(3)) => Err(ConstraintError::TooComplex),
            _ => Err(ConstraintError::Failed),
        }
    }
}

impl Constraint for JsConstraint {
    fn fork(&self) -> Box<dyn Constraint> {
        let copy = self.0.as_ref().and_then(|object| object.fork().ok());
        Box::new(JsConstraint(copy.map(SendWrapper::new)))
    }

    fn allow(&mut self, mask: &mut [u32]) -> Result<bool, ConstraintError> {
        self.ask(|object| object.allow(mask))
    }

    fn accept(&mut self, token: u32) -> Result<bool, ConstraintError> {
        self.ask(|object| object.accept(token))
    }
}

impl Drop for JsConstraint {
    fn drop(&mut self) {
        // an object that cannot be freed is garbage all the same
        let _ = self.0.as_ref().map(|object| object.free());
    }
}
