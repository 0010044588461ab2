//! Recurrent layers: operations whose result for a token depends on a state that the tokens before it have left.
//!
//! The state of a layer is a slice of the sequence's slot in [`StateMemory`]. An operation processes the rows of a
//! sequence one after another, so a prompt computed in pieces of any size gives the same bits. SIMD and threads run
//! across the columns of the state, never across a sum.

mod columns;
pub mod conv;
pub mod delta_rule;
pub mod linear_attention;
pub mod scan;
pub mod shift;
mod state;
pub mod wkv7;

pub use state::{SharedStates, StateMemory};

use super::exp::exp;
use crate::math::ln;

/// Rows of one sequence in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateSpan {
    /// Index of the first row.
    pub row: usize,
    /// Number of rows.
    pub n: usize,
    /// The sequence's slot in [`StateMemory`].
    pub slot: u32,
}

/// `ln(1 + exp(x))`; x itself above 20, where the difference is below half an ulp.
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 {
        return x;
    }
    let e = f64::from(exp(x));
    // ln(1 + e) = e - e^2/2 + ... where 1 + e would lose the bits of e
    if e < 1e-5 { (e - e * e * 0.5) as f32 } else { ln(1.0 + e) as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::elementwise::sigmoid;

    #[test]
    fn softplus_and_sigmoid_agree_with_f64() {
        for i in -4000..4000 {
            let x = i as f32 * 0.01;
            let want = f64::from(x).exp().ln_1p();
            assert!((f64::from(softplus(x)) - want).abs() <= 2e-7 * want.max(1e-30), "softplus {x}");
            let want = 1.0 / (1.0 + (-f64::from(x)).exp());
            assert!((f64::from(sigmoid(x)) - want).abs() <= 3e-7 * want, "sigmoid {x}");
        }
    }
}
