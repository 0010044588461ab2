//! The loop of operations on columns that do not depend on each other: the tokens of a sequence one after another, in
//! each the columns of the task. [`by_head`] cuts states that are a matrix per head into such tasks.
#![allow(unsafe_code)]

use super::super::cpu::Op;
use super::super::simd::Simd;
use super::super::{Cpu, SharedOut, tasks};
use super::{StateMemory, StateSpan};
use crate::pool::Pool;

/// Vectors of columns computed side by side.
const SIDE: usize = 4;
/// Columns of one task of [`by_head`].
const COLUMNS: usize = 64;

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

    /// The same for `N` vectors of columns from `j` on, all of them columns of the task.
    fn vectors<S: Simd, const N: usize>(&self, s: S, token: &Self::Token, j: usize) -> [S::F; N];
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
                store(s, self.0.vectors::<S, SIDE>(s, &token, j), &mut out[j..]);
                j += SIDE * S::LANES;
            }
            while j + S::LANES <= out.len() {
                store(s, self.0.vectors::<S, 1>(s, &token, j), &mut out[j..]);
                j += S::LANES;
            }
            for j in j..out.len() {
                out[j] = self.0.column(&token, j);
            }
        }
    }
}

#[inline(always)]
fn store<S: Simd, const N: usize>(s: S, vectors: [S::F; N], out: &mut [f32]) {
    let out = &mut out[..N * S::LANES];
    for (c, x) in vectors.into_iter().enumerate() {
        // SAFETY: `out` has N vectors.
        unsafe { s.store(out.as_mut_ptr().add(c * S::LANES), x) }
    }
}

/// `N` vectors from the beginning of `x`.
#[inline(always)]
pub(super) fn load<S: Simd, const N: usize>(s: S, x: &[f32]) -> [S::F; N] {
    let x = &x[..N * S::LANES];
    let mut vectors = [s.splat(0.0); N];
    for (c, v) in vectors.iter_mut().enumerate() {
        // SAFETY: `x` has N vectors.
        *v = unsafe { s.load(x.as_ptr().add(c * S::LANES)) };
    }
    vectors
}

/// Heads whose states are matrices (k_dim, v_dim).
#[derive(Clone, Copy)]
pub(super) struct HeadStates {
    pub(super) n: usize,
    pub(super) k_dim: usize,
    pub(super) v_dim: usize,
}

/// Some columns of the state of a head, for the rows of one sequence.
#[derive(Clone, Copy)]
pub(super) struct HeadColumns<'a> {
    pub(super) span: StateSpan,
    pub(super) head: usize,
    /// The first column.
    pub(super) first: usize,
    /// Number of columns.
    pub(super) n: usize,
    heads: HeadStates,
    state: *mut f32,
    out: &'a SharedOut<'a, f32>,
}

impl<'a> HeadColumns<'a> {
    /// The state from column `j` of the task on; its rows are `v_dim` floats apart. No other task accesses these columns.
    #[inline(always)]
    pub(super) fn state(&self, j: usize) -> *mut f32 {
        self.state.wrapping_add(self.first + j)
    }

    /// The outputs of the columns at `row`.
    #[inline(always)]
    pub(super) fn outputs(&self, row: usize) -> &'a mut [f32] {
        let at = (row * self.heads.n + self.head) * self.heads.v_dim + self.first;
        // SAFETY: tasks have different rows, heads or columns.
        unsafe { self.out.slice(at, self.n) }
    }
}

/// Runs an operation over the rows of each sequence, in tasks of some columns of a head. `out` is (rows, n * v_dim), the
/// state of each sequence is at `state_at` of its slot.
///
/// # Panics
/// If a row or a state is outside its memory.
pub(super) fn by_head<'a, T: Columns<'a>>(
    (cpu, pool): (Cpu, &dyn Pool),
    heads: HeadStates,
    out: &'a SharedOut<'a, f32>,
    spans: &[StateSpan],
    (states, state_at): (&mut StateMemory, usize),
    task: impl Fn(HeadColumns<'a>) -> T + Sync,
) {
    let parts = heads.v_dim.div_ceil(COLUMNS);
    let (per_span, size) = (heads.n * parts, heads.k_dim * heads.v_dim);
    let states = states.shared();
    tasks::run(pool, spans.len() * per_span, &|i, _| {
        let (span, head, first) = (spans[i / per_span], i % per_span / parts, i % parts * COLUMNS);
        // tasks of one head have different columns, which is all that they access through this pointer
        let state = states.ptr(span.slot, state_at + head * size, size);
        let n = COLUMNS.min(heads.v_dim - first);
        cpu.run(ByColumns(task(HeadColumns { span, head, first, n, heads, state, out })));
    });
}

#[cfg(test)]
pub(super) mod tests {
    use alloc::vec;

    use super::*;

    /// Runs an operation on `n` rows of `width` outputs, with states of `state_len`: each instruction set gives the scalar
    /// bits for the whole sequence, row by row, and in two pieces.
    pub(in super::super) fn check(
        n: usize,
        width: usize,
        state_len: usize,
        run: impl Fn(Cpu, &mut [f32], &[StateSpan], (&mut StateMemory, usize)),
    ) {
        let run = |cpu: Cpu, pieces: &[usize]| {
            let mut states = StateMemory::zeroed(state_len + 3, 2).expect("memory");
            let (mut out, mut row) = (vec![0.0; n * width], 0);
            for &n in pieces {
                run(cpu, &mut out, &[StateSpan { row, n, slot: 1 }], (&mut states, 3));
                row += n;
            }
            (out, states.slot(1).to_vec())
        };
        let want = run(Cpu::SCALAR, &[n]);
        assert!(want.0.iter().any(|v| v.abs() > 0.01) && want.0.iter().all(|v| v.is_finite()));
        for cpu in Cpu::available() {
            assert_eq!(run(cpu, &[n]), want);
            assert_eq!(run(cpu, &vec![1; n]), want);
            assert_eq!(run(cpu, &[4, n - 4]), want);
        }
    }
}
