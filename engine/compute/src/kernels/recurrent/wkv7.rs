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
#![allow(unsafe_code)]

use super::super::simd::Simd;
use super::super::{Cpu, SharedOut};
use super::columns::{Columns, HeadColumns, HeadStates, by_head, load};
use super::scan::Operand;
use super::{StateMemory, StateSpan};
use crate::pool::Pool;

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
    on: (Cpu, &dyn Pool),
    (n_head, dim): (usize, usize),
    rows: Wkv7Rows<'_>,
    out: &mut [f32],
    spans: &[StateSpan],
    states: (&mut StateMemory, usize),
) {
    let (out, of_heads) = (SharedOut::new(out), HeadStates { n: n_head, k_dim: dim, v_dim: dim });
    by_head(on, of_heads, &out, spans, states, |columns| Wkv7Task { dim, rows, columns });
}

struct Wkv7Task<'a> {
    dim: usize,
    rows: Wkv7Rows<'a>,
    columns: HeadColumns<'a>,
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
        self.columns.span
    }

    #[inline(always)]
    fn token(&self, row: usize) -> (Token<'a>, &'a mut [f32]) {
        let HeadColumns { head, first, n, .. } = self.columns;
        let at = head * self.dim;
        let head = |operand: Operand<'a>| &operand.row(row)[at..][..self.dim];
        let Wkv7Rows { r, w, k, v, z, a } = self.rows;
        let v = &v.row(row)[at + first..][..n];
        let token = Token { r: head(r), w: head(w), k: head(k), v, z: head(z), a: head(a) };
        (token, self.columns.outputs(row))
    }

    #[inline(always)]
    fn column(&self, t: &Token<'_>, j: usize) -> f32 {
        // SAFETY: inside the state of the head (`j` is one of the task's columns), which no other task accesses.
        let state = |i: usize| unsafe { &mut *self.columns.state(j).add(i * self.dim) };
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
    fn vectors<S: Simd, const N: usize>(&self, s: S, t: &Token<'_>, j: usize) -> [S::F; N] {
        let (v, mut m, mut sum) = (load::<S, N>(s, &t.v[j..]), [s.splat(0.0); N], [s.splat(0.0); N]);
        let state = self.columns.state(j);
        // SAFETY: whole vectors of the task's columns, inside the state of the head.
        unsafe {
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
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::super::columns::tests::check;
    use super::*;
    use crate::pool::Inline;
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
            check(n, width, width * dim, |cpu, out, spans, states| {
                wkv7((cpu, &Inline), (n_head, dim), rows, out, spans, states);
            });
        }
    }
}
