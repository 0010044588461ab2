//! Gated delta rule (Yang et al., arXiv:2412.06464). Each value head has a matrix S (k_dim, v_dim), zero before the first
//! token. For each token, with key k, query q, value v, decay d and rate b:
//!
//! ```text
//! S[i][j] = S[i][j] * d            (d of the head, or d[i] of the key element)
//! m[j]    = sum_i k[i] * S[i][j]
//! S[i][j] = S[i][j] + k[i] * ((v[j] - m[j]) * b)
//! out[j]  = sum_i q[i] * S[i][j]
//! ```
//!
//! Sums start from 0 and add the elements in order.

use super::super::simd::Simd;
use super::super::{Cpu, SharedOut, tasks};
use super::columns::{ByColumns, Columns};
use super::{StateMemory, StateSpan};
use crate::pool::Pool;

/// Columns of S of one task.
const COLUMNS: usize = 64;

/// Heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Number of key (and query) heads; divides `n_value`.
    pub n_key: usize,
    /// Number of value heads.
    pub n_value: usize,
    /// Elements of a key.
    pub k_dim: usize,
    /// Elements of a value.
    pub v_dim: usize,
    /// Whether value head h has the key head `h % n_key`, instead of `h / (n_value / n_key)`.
    pub tiled: bool,
}

impl DeltaHeads {
    /// Floats of the state of a layer.
    pub fn state_len(&self) -> usize {
        self.n_value * self.k_dim * self.v_dim
    }

    fn key_of(&self, value_head: usize) -> usize {
        if self.tiled { value_head % self.n_key } else { value_head / (self.n_value / self.n_key) }
    }
}

/// Inputs: rows of `stride` floats with the heads of queries, keys and values one after another.
#[derive(Clone, Copy)]
pub struct DeltaRows<'a> {
    /// The rows.
    pub x: &'a [f32],
    /// Length of a row.
    pub stride: usize,
    /// Offsets of queries, keys and values in a row.
    pub at: [usize; 3],
    /// (rows, decays, then one rate per value head). There is one decay per value head, or one per element of its key.
    pub gates: &'a [f32],
    /// Decays of a row.
    pub n_decay: usize,
}

/// Runs the delta rule over the rows of each sequence; `out` is (rows, n_value * v_dim). The state of each sequence is at
/// `state_at` of its slot.
///
/// # Panics
/// If a row or a state is outside its memory.
pub fn delta_rule(
    (cpu, pool): (Cpu, &dyn Pool),
    heads: DeltaHeads,
    rows: DeltaRows<'_>,
    out: &mut [f32],
    spans: &[StateSpan],
    (states, state_at): (&mut StateMemory, usize),
) {
    let parts = heads.v_dim.div_ceil(COLUMNS);
    let per_span = heads.n_value * parts;
    let (states, out) = (states.shared(), SharedOut::new(out));
    tasks::run(pool, spans.len() * per_span, &|i, _| {
        let (span, head, first) = (spans[i / per_span], i % per_span / parts, i % parts * COLUMNS);
        let size = heads.k_dim * heads.v_dim;
        // tasks of one head have different columns, which is all that they access through this pointer
        let state = states.ptr(span.slot, state_at + head * size, size);
        let columns = (first, COLUMNS.min(heads.v_dim - first));
        cpu.run(ByColumns(DeltaTask { heads, rows, out: &out, span, head, state, columns }));
    });
}

/// The rows of one sequence for some columns of a head: the first column, and their number.
struct DeltaTask<'a> {
    heads: DeltaHeads,
    rows: DeltaRows<'a>,
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
    rate: f32,
}

impl<'a> Columns<'a> for DeltaTask<'a> {
    type Token = Token<'a>;

    #[inline(always)]
    fn span(&self) -> StateSpan {
        self.span
    }

    #[inline(always)]
    fn token(&self, row: usize) -> (Token<'a>, &'a mut [f32]) {
        let DeltaHeads { n_value, k_dim, v_dim, .. } = self.heads;
        let DeltaRows { x, stride, at: [q, k, v], gates, n_decay } = self.rows;
        let (x, key) = (&x[row * stride..][..stride], self.heads.key_of(self.head));
        let gates = &gates[row * (n_decay + n_value)..][..n_decay + n_value];
        let per_head = n_decay / n_value;
        let (first, n) = self.columns;
        let token = Token {
            q: &x[q + key * k_dim..][..k_dim],
            k: &x[k + key * k_dim..][..k_dim],
            v: &x[v + self.head * v_dim + first..][..n],
            decay: &gates[self.head * per_head..][..per_head],
            rate: gates[n_decay + self.head],
        };
        // SAFETY: tasks have different rows, heads or columns.
        (token, unsafe { self.out.slice((row * n_value + self.head) * v_dim + first, n) })
    }

    #[inline(always)]
    fn column(&self, t: &Token<'_>, j: usize) -> f32 {
        let k_dim = self.heads.k_dim;
        // SAFETY: inside the state of the head (`j` is one of the task's columns), which no other task accesses.
        let state = |i: usize| unsafe { &mut *self.state.add(i * self.heads.v_dim + self.columns.0 + j) };
        let (mut m, mut out) = (0.0, 0.0);
        for i in 0..k_dim {
            let s = state(i);
            *s *= t.decay[i.min(t.decay.len() - 1)];
            m += t.k[i] * *s;
        }
        let change = (t.v[j] - m) * t.rate;
        for i in 0..k_dim {
            let s = state(i);
            *s += t.k[i] * change;
            out += t.q[i] * *s;
        }
        out
    }

    #[inline(always)]
    fn vectors<S: Simd, const N: usize>(&self, s: S, t: &Token<'_>, j: usize, out: &mut [f32]) {
        let (k_dim, v_dim) = (self.heads.k_dim, self.heads.v_dim);
        let (mut m, mut sum) = ([s.splat(0.0); N], [s.splat(0.0); N]);
        let last = t.decay.len() - 1;
        // SAFETY: whole vectors of the task's columns, inside the state of the head, `v` and `out`.
        unsafe {
            let state = self.state.add(self.columns.0 + j);
            for i in 0..k_dim {
                let (k, decay) = (s.splat(t.k[i]), s.splat(t.decay[i.min(last)]));
                for c in 0..N {
                    let p = state.add(i * v_dim + c * S::LANES);
                    let x = s.mul(s.load(p), decay);
                    s.store(p, x);
                    m[c] = s.add(m[c], s.mul(k, x));
                }
            }
            for c in 0..N {
                let v = s.load(t.v.as_ptr().add(j + c * S::LANES));
                m[c] = s.mul(s.sub(v, m[c]), s.splat(t.rate));
            }
            for i in 0..k_dim {
                let (k, q) = (s.splat(t.k[i]), s.splat(t.q[i]));
                for c in 0..N {
                    let p = state.add(i * v_dim + c * S::LANES);
                    let x = s.add(s.load(p), s.mul(k, m[c]));
                    s.store(p, x);
                    sum[c] = s.add(sum[c], s.mul(q, x));
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
        for (heads, per_key) in [
            (DeltaHeads { n_key: 2, n_value: 4, k_dim: 8, v_dim: 100, tiled: true }, false),
            (DeltaHeads { n_key: 1, n_value: 3, k_dim: 5, v_dim: 19, tiled: false }, true),
        ] {
            let n = 11;
            let n_decay = heads.n_value * if per_key { heads.k_dim } else { 1 };
            let (q_len, v_len) = (heads.n_key * heads.k_dim, heads.n_value * heads.v_dim);
            let (stride, at) = (2 * q_len + v_len + 3, [0, q_len, 2 * q_len]);
            let value = |i: usize| ((i * 7919 + 13) % 1009) as f32 * 0.002 - 1.0;
            let x: Vec<f32> = (0..n * stride).map(value).collect();
            let gates: Vec<f32> = (0..n * (n_decay + heads.n_value)).map(|i| value(i).abs()).collect();
            let rows = DeltaRows { x: &x, stride, at, gates: &gates, n_decay };
            let run = |cpu: Cpu, pieces: &[usize]| {
                let mut states = StateMemory::new(heads.state_len(), 1).expect("memory");
                states.reset(0).expect("memory");
                let (mut out, mut row) = (vec![0.0; n * v_len], 0);
                for &n in pieces {
                    let spans = [StateSpan { row, n, slot: 0 }];
                    delta_rule((cpu, &Inline), heads, rows, &mut out, &spans, (&mut states, 0));
                    row += n;
                }
                (out, states.slot(0).to_vec())
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
}
