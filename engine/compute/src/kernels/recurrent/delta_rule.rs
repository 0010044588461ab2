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
#![allow(unsafe_code)]

use super::super::simd::Simd;
use super::super::{Cpu, SharedOut};
use super::columns::{Columns, HeadColumns, HeadStates, by_head, load};
use super::{StateMemory, StateSpan};
use crate::pool::Pool;

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
    on: (Cpu, &dyn Pool),
    heads: DeltaHeads,
    rows: DeltaRows<'_>,
    out: &mut [f32],
    spans: &[StateSpan],
    states: (&mut StateMemory, usize),
) {
    let out = SharedOut::new(out);
    let of_heads = HeadStates { n: heads.n_value, k_dim: heads.k_dim, v_dim: heads.v_dim };
    by_head(on, of_heads, &out, spans, states, |columns| DeltaTask { heads, rows, columns });
}

struct DeltaTask<'a> {
    heads: DeltaHeads,
    rows: DeltaRows<'a>,
    columns: HeadColumns<'a>,
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
        self.columns.span
    }

    #[inline(always)]
    fn token(&self, row: usize) -> (Token<'a>, &'a mut [f32]) {
        let DeltaHeads { n_value, k_dim, v_dim, .. } = self.heads;
        let DeltaRows { x, stride, at: [q, k, v], gates, n_decay } = self.rows;
        let HeadColumns { head, first, n, .. } = self.columns;
        let (x, key) = (&x[row * stride..][..stride], self.heads.key_of(head));
        let gates = &gates[row * (n_decay + n_value)..][..n_decay + n_value];
        let per_head = n_decay / n_value;
        let token = Token {
            q: &x[q + key * k_dim..][..k_dim],
            k: &x[k + key * k_dim..][..k_dim],
            v: &x[v + head * v_dim + first..][..n],
            decay: &gates[head * per_head..][..per_head],
            rate: gates[n_decay + head],
        };
        (token, self.columns.outputs(row))
    }

    #[inline(always)]
    fn column(&self, t: &Token<'_>, j: usize) -> f32 {
        let k_dim = self.heads.k_dim;
        // SAFETY: inside the state of the head (`j` is one of the task's columns), which no other task accesses.
        let state = |i: usize| unsafe { &mut *self.columns.state(j).add(i * self.heads.v_dim) };
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
    fn vectors<S: Simd, const N: usize>(&self, s: S, t: &Token<'_>, j: usize) -> [S::F; N] {
        let (k_dim, v_dim, state) = (self.heads.k_dim, self.heads.v_dim, self.columns.state(j));
        let (v, mut m, mut sum) = (load::<S, N>(s, &t.v[j..]), [s.splat(0.0); N], [s.splat(0.0); N]);
        let last = t.decay.len() - 1;
        // SAFETY: whole vectors of the task's columns, inside the state of the head.
        unsafe {
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
                m[c] = s.mul(s.sub(v[c], m[c]), s.splat(t.rate));
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
            check(n, v_len, heads.state_len(), |cpu, out, spans, states| {
                delta_rule((cpu, &Inline), heads, rows, out, spans, states);
            });
        }
    }
}
