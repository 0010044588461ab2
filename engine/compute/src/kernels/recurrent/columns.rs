//! The loop of operations on columns that do not depend on each other: the tokens of a sequence one after another, in
//! each the columns of the task.

use super::super::cpu::Op;
use super::super::simd::Simd;
use super::StateSpan;

/// Vectors of columns computed side by side.
const SIDE: usize = 4;

/// The rows of one sequence for some columns. As the bodies of [`Op`], all functions must be `#[inline(always)]`.
pub(super) trait Columns<'a> {
    /// Inputs of the columns at one token.
    type Token;

    /// The rows.
    fn span(&self) -> StateSpan;

    /// The inputs and the outputs of the columns at `row`.
    fn token(&self, row: usize) -> (Self::Token, &'a mut [f32]);

    /// The definition: one token, column `j` of the task. Returns its output and updates its state.
    fn column(&self, token: &Self::Token, j: usize) -> f32;

    /// The same for `N` vectors of columns from `j` on.
    fn vectors<S: Simd, const N: usize>(&self, s: S, token: &Self::Token, j: usize, out: &mut [f32]);
}

/// A task on the rows of a sequence.
pub(super) struct ByColumns<T>(pub(super) T);

impl<'a, T: Columns<'a>> Op for ByColumns<T> {
    type Out = ();

    fn scalar(self) {
        let StateSpan { row: first, n, .. } = self.0.span();
        for row in first..first + n {
            let (token, out) = self.0.token(row);
            for (j, out) in out.iter_mut().enumerate() {
                *out = self.0.column(&token, j);
            }
        }
    }

    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        let StateSpan { row: first, n, .. } = self.0.span();
        for row in first..first + n {
            let (token, out) = self.0.token(row);
            let mut j = 0;
            while j + SIDE * S::LANES <= out.len() {
                self.0.vectors::<S, SIDE>(s, &token, j, out);
                j += SIDE * S::LANES;
            }
            while j + S::LANES <= out.len() {
                self.0.vectors::<S, 1>(s, &token, j, out);
                j += S::LANES;
            }
            for j in j..out.len() {
                out[j] = self.0.column(&token, j);
            }
        }
    }
}
