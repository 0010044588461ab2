//! Constraints of answers that are somewhere else in JavaScript: `constraints.js` has them, by number.

use starling::sampler::{Constraint, ConstraintError};
use wasm_bindgen::prelude::*;

#[wasm_bindgen(raw_module = "./constraints.js")]
extern "C" {
    fn fork(constraint: u32) -> u32;
    fn allow(constraint: u32, mask: &mut [u32]) -> u32;
    fn accept(constraint: u32, token: u32) -> u32;
    // `drop` is a name that the macro itself uses
    #[wasm_bindgen(js_name = drop)]
    fn release(constraint: u32);
}

/// The constraint with a number.
#[derive(Debug)]
pub(crate) struct Elsewhere(pub(crate) u32);

/// What `grammar.rs` tells.
fn told(answer: u32) -> Result<bool, ConstraintError> {
    match answer {
        0 => Ok(false),
        1 => Ok(true),
        2 => Err(ConstraintError::NoToken),
        3 => Err(ConstraintError::TooComplex),
        _ => Err(ConstraintError::Failed),
    }
}

impl Constraint for Elsewhere {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Elsewhere(fork(self.0)))
    }

    fn allow(&mut self, mask: &mut [u32]) -> Result<bool, ConstraintError> {
        told(allow(self.0, mask))
    }

    fn accept(&mut self, token: u32) -> Result<bool, ConstraintError> {
        told(accept(self.0, token))
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        release(self.0);
    }
}
