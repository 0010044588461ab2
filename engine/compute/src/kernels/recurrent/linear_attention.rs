//! Linear attention with decay: lightning attention (Qin et al., arXiv:2401.04658) and RWKV 6 (Peng et al.,
//! arXiv:2404.05892). Each head has a matrix S (k_dim, v_dim), zero before the first token. For each token, with query q,
//! key k, value v and decay d:
//!
//! ```text
//! S[i][j] = S[i][j] * d[i] + k[i] * v[j];  out[j] = sum_i q[i] * S[i][j]
//! ```
//!
//! d is of the head or of the key element. With a bonus u (RWKV 6) the output is that of the state before the update:
//!
//! ```text
//! out[j] = sum_i q[i] * (S[i][j] + (k[i] * v[j]) * u[i]);  S[i][j] = S[i][j] * d[i] + k[i] * v[j]
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

/// Heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearHeads {
    /// Number of heads.
    pub n: usize,
    /// Elements of a key and of a value.
    pub dim: usize,
    /// Floats from one head to the next in queries, keys and values.
    pub step: usize,
    /// Decays of a head: 1, or `dim`, one per key element.
    pub n_decay: usize,
}

impl LinearHeads {
    /// Floats of the state of a layer.
    pub fn state_len(&self) -> usize {
        self.n.saturating_mul(self.dim).saturating_mul(self.dim)
    }
}

/// Inputs.
#[derive(Clone, Copy)]
pub struct LinearRows<'a> {
    /// Queries.
    pub q: Operand<'a>,
    /// Keys.
    pub k: Operand<'a>,
    /// Values.
    pub v: Operand<'a>,
    /// (n * n_decay)
    pub decay: Operand<'a>,
    /// (n, dim), the same for all rows.
    pub bonus: Option<&'a [f32]>,
}

/// Runs linear attention over the rows of each sequence; `out` is (rows, n * dim). The state of each sequence is at
/// `state_at` of its slot.
///
/// # Panics
/// If a row or a state is outside its memory.
pub fn linear_attention(
    (cpu, pool): (Cpu, &dyn Pool),
    heads: LinearHeads,
    rows: LinearRows<'_>,
    out: &mut [f32],
    spans: &[StateSpan],
    (states, state_at): (&mut StateMemory, usize),
) {
    let parts = heads.dim.div_ceil(COLUMNS);
    let per_span = heads.n * parts;
    let (states, out) = (states.shared(), SharedOut::new(out));
    tasks::run(pool, spans.len() * per_span, &|i, _| {
        let (span, head, first) = (spans[i / per_span], i % per_span / parts, i % parts * COLUMNS);
        let size = heads.dim * heads.dim;
        // tasks of one head have different columns, which is all that they access through this pointer
        let state = states.ptr(span.slot, state_at + head * size, size);
        let columns = (first, COLUMNS.min(heads.dim - first));
        cpu.run(ByColumns(LinearTask { heads, rows, out: &out, span, head, state, columns }));
    });
}

/// The rows of one sequence for some columns of a head: the first column, and their number.
struct LinearTask<'a> {
    heads: LinearHeads,
    rows: LinearRows<'a>,
    out: &'a SharedOut<'a, f32>,
    span: StateSpan,
    head: usize,
    state: *mut f32,
    columns: (usize, usize),
}

/// Inputs of a head at one token.
struct Token<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    /// One per element of the key, or one.
    decay: &'a [f32],
    bonus: Option<&'a [f32]>,
}

impl<'a> Columns<'a> for LinearTask<'a> {
    type Token = Token<'a>;

    #[inline(always)]
    fn span(&self) -> StateSpan {
        self.span
    }

    #[inline(always)]
    fn token(&self, row: usize) -> (Token<'a>, &'a mut [f32]) {
        let LinearHeads { n: n_head, dim, step, n_decay } = self.heads;
        let LinearRows { q, k, v, decay, bonus } = self.rows;
        let ((first, n), head) = (self.columns, self.head);
        let token = Token {
            q: &q.row(row)[head * step..][..dim],
            k: &k.row(row)[head * step..][..dim],
            v: &v.row(row)[head * step + first..][..n],
            decay: &decay.row(row)[head * n_decay..][..n_decay],
            bonus: bonus.map(|bonus| &bonus[head * dim..][..dim]),
        };
        // SAFETY: tasks have different rows, heads or columns.
        (token, unsafe { self.out.slice((row * n_head + head) * dim + first, n) })
    }

    #[inline(always)]
    fn column(&self, t: &Token<'_>, j: usize) -> f32 {
        let (dim, mut out) = (self.heads.dim, 0.0);
        for i in 0..dim {
            // SAFETY: inside the state of the head (`j` is one of the task's columns), which no other task accesses.
            let s = unsafe { &mut *self.state.add(i * dim + self.columns.0 + j) };
            let (before, added) = (*s, t.k[i] * t.v[j]);
            *s = before * t.decay[i.min(t.decay.len() - 1)] + added;
            out += t.q[i]
                * match t.bonus {
                    Some(bonus) => before + added * bonus[i],
                    None => *s,
                };
        }
        out
    }

    #[inline(always)]
    fn vectors<S: Simd, const N: usize>(&self, s: S, t: &Token<'_>, j: usize, out: &mut [f32]) {
        let (dim, last) = (self.heads.dim, t.decay.len() - 1);
        let (mut v, mut sum) = ([s.splat(0.0); N], [s.splat(0.0); N]);
        // SAFETY: whole vectors of the task's columns, inside the state of the head, `v` and `out`.
        unsafe {
            for c in 0..N {
                v[c] = s.load(t.v.as_ptr().add(j + c * S::LANES));
            }
            let state = self.state.add(self.columns.0 + j);
            for i in 0..dim {
                let (q, k, decay) = (s.splat(t.q[i]), s.splat(t.k[i]), s.splat(t.decay[i.min(last)]));
                let bonus = t.bonus.map(|bonus| s.splat(bonus[i]));
                for c in 0..N {
                    let p = state.add(i * dim + c * S::LANES);
                    let (before, added) = (s.load(p), s.mul(k, v[c]));
                    let x = s.add(s.mul(before, decay), added);
                    s.store(p, x);
                    let seen = match bonus {
                        Some(bonus) => s.add(before, s.mul(added, bonus)),
                        None => x,
                    };
                    sum[c] = s.add(sum[c], s.mul(q, seen));
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
        for (heads, has_bonus) in [
            (LinearHeads { n: 2, dim: 100, step: 300, n_decay: 1 }, false),
            (LinearHeads { n: 3, dim: 19, step: 19, n_decay: 19 }, true),
        ] {
            let (n, width) = (11, heads.n * heads.step);
            let value = |i: usize| ((i * 7919 + 13) % 1009) as f32 * 0.002 - 1.0;
            let x: Vec<f32> = (0..n * 3 * width).map(value).collect();
            let decays: Vec<f32> = (0..n * heads.n * heads.n_decay).map(|i| value(i).abs()).collect();
            let bonus: Vec<f32> = (0..heads.n * heads.dim).map(|i| value(3 * i)).collect();
            let operand = |at| Operand { x: &x, stride: 3 * width, at };
            let rows = LinearRows {
                q: operand(0),
                k: operand(width),
                v: operand(2 * width),
                decay: Operand { x: &decays, stride: heads.n * heads.n_decay, at: 0 },
                bonus: has_bonus.then_some(&bonus),
            };
            let run = |cpu: Cpu, pieces: &[usize]| {
                let mut states = StateMemory::zeroed(heads.state_len() + 3, 2).expect("memory");
                let (mut out, mut row) = (vec![0.0; n * heads.n * heads.dim], 0);
                for &n in pieces {
                    let spans = [StateSpan { row, n, slot: 1 }];
                    linear_attention((cpu, &Inline), heads, rows, &mut out, &spans, (&mut states, 3));
                    row += n;
                }
                (out, states.slot(1).to_vec())
            };
            let want = run(Cpu::SCALAR, &[n]);
            assert!(want.0.iter().any(|v| v.abs() > 0.01));
            for cpu in Cpu::available() {
                assert_eq!(run(cpu, &[n]), want);
                assert_eq!(run(cpu, &[1; 11]), want);
                assert_eq!(run(cpu, &[4, 7]), want);
            }
        }
    }

    /// With queries and keys that are unit vectors, a head returns values as they decay.
    #[test]
    fn a_value_decays() {
        let heads = LinearHeads { n: 1, dim: 2, step: 2, n_decay: 1 };
        let (q, k, v) = ([0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0], [3.0, 5.0, 7.0, 11.0]);
        let operand = |x| Operand { x, stride: 2, at: 0 };
        for (bonus, want) in [(None, [3.0, 5.0, 1.5, 2.5]), (Some(&[0.5, 0.25][..]), [0.75, 1.25, 3.0, 5.0])] {
            let decay = Operand { x: &[0.5], stride: 0, at: 0 };
            let rows = LinearRows { q: operand(&q), k: operand(&k), v: operand(&v), decay, bonus };
            let mut states = StateMemory::zeroed(4, 1).expect("memory");
            let (mut out, spans) = ([0.0; 4], [StateSpan { row: 0, n: 2, slot: 0 }]);
            linear_attention((Cpu::SCALAR, &Inline), heads, rows, &mut out, &spans, (&mut states, 0));
            assert_eq!(out, want);
        }
    }
}
