//! State update of RWKV 7 (Peng et al., arXiv:2503.14456), a delta rule with its own decay, removal key and rate for each
//! key element. Each head has a matrix S (dim, dim), zero before the first token. For each token, with receptance r, decay
//! w, key k, value v, removal key z (of length 1) and rate a:
//!
//! ```text
//! m[j]    = sum_i -z[i] * S[i][j]
//! S[i][j] = (S[i][j] * w[i] + k[i] * v[j]) + (z[i] * a[i]) * m[j]
//! out[j]  = sum_i r[i] * S[i][j]
//! ```
//!
//! Sums start from 0 and add the elements in order.

use super::super::simd::Simd;
use super::super::{Cpu, SharedOut, tasks};
use super::columns::{ByColumns, Columns};
use super::scan::Operand;
use super::{StateMemory, StateSpan};
use crate::pool::Pool;

/// Columns of S of one task.
const COLUMNS: usize = 64;

/// Inputs, each (n_head * dim).
#[derive(Clone, Copy)]
pub struct Wkv7Rows<'a> {
    /// Receptance.
    pub r: Operand<'a>,
    /// Decays.
    pub w: Operand<'a>,
    /// Keys.
    pub k: Operand<'a>,
    /// Values.
    pub v: Operand<'a>,
    /// Removal keys.
    pub z: Operand<'a>,
    /// Rates.
    pub a: Operand<'a>,
}

/// Runs the update over the rows of each sequence, with heads of `dim` elements; `out` is (rows, n_head * dim). The state
/// of each sequence is at `state_at` of its slot.
///
/// # Panics
/// If a row or a state is outside its memory.
pub fn wkv7(
    (cpu, pool): (Cpu, &dyn Pool),
    (n_head, dim): (usize, usize),
    rows: Wkv7Rows<'_>,
    out: &mut [f32],
    spans: &[StateSpan],
    (states, state_at): (&mut StateMemory, usize),
) {
    let parts = dim.div_ceil(COLUMNS);
    let per_span = n_head * parts;
    let (states, out) = (states.shared(), SharedOut::new(out));
    tasks::run(pool, spans.len() * per_span, &|i, _| {
        let (span, head, first) = (spans[i / per_span], i % per_span / parts, i % parts * COLUMNS);
        // tasks of one head have different columns, which is all that they access through this pointer
        let state = states.ptr(span.slot, state_at + head * dim * dim, dim * dim);
        let columns = (first, COLUMNS.min(dim - first));
        cpu.run(ByColumns(Wkv7Task { dim, width: n_head * dim, rows, out: &out, span, head, state, columns }));
    });
}

/// The rows of one sequence for some columns of a head: the first column, and their number.
struct Wkv7Task<'a> {
    dim: usize,
    /// Floats of a row of `out`.
    width: usize,
    rows: Wkv7Rows<'a>,
    out: &'a SharedOut<'a, f32>,
    span: StateSpan,
    head: usize,
    state: *mut f32,
    columns: (usize, usize),
}

/// Inputs of a head at one token.
struct Token<'a> {
    r: &'a [f32],
    w: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    z: &'a [f32],
    a: &'a [f32],
}

impl<'a> Columns<'a> for Wkv7Task<'a> {
    type Token = Token<'a>;

    #[inline(always)]
    fn span(&self) -> StateSpan {
        self.span
    }

    #[inline(always)]
    fn token(&self, row: usize) -> (Token<'a>, &'a mut [f32]) {
        let ((first, n), at) = (self.columns, self.head * self.dim);
        let head = |operand: Operand<'a>| &operand.row(row)[at..][..self.dim];
        let Wkv7Rows { r, w, k, v, z, a } = self.rows;
        let v = &v.row(row)[at + first..][..n];
        let token = Token { r: head(r), w: head(w), k: head(k), v, z: head(z), a: head(a) };
        // SAFETY: tasks have different rows, heads or columns.
        (token, unsafe { self.out.slice(row * self.width + at + first, n) })
    }

    #[inline(always)]
    fn column(&self, t: &Token<'_>, j: usize) -> f32 {
        // SAFETY: inside the state of the head (`j` is one of the task's columns), which no other task accesses.
        let state = |i: usize| unsafe { &mut *self.state.add(i * self.dim + self.columns.0 + j) };
        let (mut m, mut out) = (0.0, 0.0);
        for i in 0..self.dim {
            m += -t.z[i] * *state(i);
        }
        for i in 0..self.dim {
            let s = state(i);
            *s = (*s * t.w[i] + t.k[i] * t.v[j]) + (t.z[i] * t.a[i]) * m;
            out += t.r[i] * *s;
        }
        out
    }

    #[inline(always)]
    fn vectors<S: Simd, const N: usize>(&self, s: S, t: &Token<'_>, j: usize, out: &mut [f32]) {
        let (mut m, mut sum, mut v) = ([s.splat(0.0); N], [s.splat(0.0); N], [s.splat(0.0); N]);
        // SAFETY: whole vectors of the task's columns, inside the state of the head, `v` and `out`.
        unsafe {
            for c in 0..N {
                v[c] = s.load(t.v.as_ptr().add(j + c * S::LANES));
            }
            let state = self.state.add(self.columns.0 + j);
            for i in 0..self.dim {
                let z = s.splat(-t.z[i]);
                for c in 0..N {
                    m[c] = s.add(m[c], s.mul(z, s.load(state.add(i * self.dim + c * S::LANES))));
                }
            }
            for i in 0..self.dim {
                let (r, w, k, b) = (s.splat(t.r[i]), s.splat(t.w[i]), s.splat(t.k[i]), s.splat(t.z[i] * t.a[i]));
                for c in 0..N {
                    let p = state.add(i * self.dim + c * S::LANES);
                    let kept = s.add(s.mul(s.load(p), w), s.mul(k, v[c]));
                    let x = s.add(kept, s.mul(b, m[c]));
                    s.store(p, x);
                    sum[c] = s.add(sum[c], s.mul(r, x));
                }
            }
            for c in 0..N {
                s.store(out.as_mut_ptr().add(j + c * S::LANES), sum[c]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Inline;
    use alloc::vec;
    use alloc::vec::Vec;

    #[test]
    fn every_instruction_set_and_split_gives_the_scalar_bits() {
        for (n_head, dim) in [(2, 100), (3, 19)] {
            let (n, width) = (11, n_head * dim);
            let value = |i: usize| ((i * 7919 + 13) % 1009) as f32 * 0.002 - 1.0;
            let x: Vec<f32> = (0..n * 6 * width).map(|i| value(i) * 0.3).collect();
            let operand = |i| Operand { x: &x, stride: 6 * width, at: i * width };
            let rows =
                Wkv7Rows { r: operand(0), w: operand(1), k: operand(2), v: operand(3), z: operand(4), a: operand(5) };
            let run = |cpu: Cpu, pieces: &[usize]| {
                let mut states = StateMemory::zeroed(width * dim + 3, 2).expect("memory");
                let (mut out, mut row) = (vec![0.0; n * width], 0);
                for &n in pieces {
                    let spans = [StateSpan { row, n, slot: 1 }];
                    wkv7((cpu, &Inline), (n_head, dim), rows, &mut out, &spans, (&mut states, 3));
                    row += n;
                }
                (out, states.slot(1).to_vec())
            };
            let want = run(Cpu::SCALAR, &[n]);
            assert!(want.0.iter().any(|v| v.abs() > 0.01) && want.0.iter().all(|v| v.is_finite()));
            for cpu in Cpu::available() {
                assert_eq!(run(cpu, &[n]), want);
                assert_eq!(run(cpu, &[1; 11]), want);
                assert_eq!(run(cpu, &[4, 7]), want);
            }
        }
    }
}
