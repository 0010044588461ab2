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
#![allow(unsafe_code)]

use super::super::simd::Simd;
use super::super::{Cpu, SharedOut};
use super::columns::{Columns, HeadColumns, HeadStates, by_head, load};
use super::scan::Operand;
use super::{StateMemory, StateSpan};
use crate::pool::Pool;

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
    on: (Cpu, &dyn Pool),
    heads: LinearHeads,
    rows: LinearRows<'_>,
    out: &mut [f32],
    spans: &[StateSpan],
    states: (&mut StateMemory, usize),
) {
    let (out, of_heads) = (SharedOut::new(out), HeadStates { n: heads.n, k_dim: heads.dim, v_dim: heads.dim });
    by_head(on, of_heads, &out, spans, states, |columns| LinearTask { heads, rows, columns });
}

struct LinearTask<'a> {
    heads: LinearHeads,
    rows: LinearRows<'a>,
    columns: HeadColumns<'a>,
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
        self.columns.span
    }

    #[inline(always)]
    fn token(&self, row: usize) -> (Token<'a>, &'a mut [f32]) {
        let LinearHeads { dim, step, n_decay, .. } = self.heads;
        let LinearRows { q, k, v, decay, bonus } = self.rows;
        let HeadColumns { head, first, n, .. } = self.columns;
        let token = Token {
            q: &q.row(row)[head * step..][..dim],
            k: &k.row(row)[head * step..][..dim],
            v: &v.row(row)[head * step + first..][..n],
            decay: &decay.row(row)[head * n_decay..][..n_decay],
            bonus: bonus.map(|bonus| &bonus[head * dim..][..dim]),
        };
        (token, self.columns.outputs(row))
    }

    #[inline(always)]
    fn column(&self, t: &Token<'_>, j: usize) -> f32 {
        let (dim, mut out) = (self.heads.dim, 0.0);
        for i in 0..dim {
            // SAFETY: inside the state of the head (`j` is one of the task's columns), which no other task accesses.
            let s = unsafe { &mut *self.columns.state(j).add(i * dim) };
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
    fn vectors<S: Simd, const N: usize>(&self, s: S, t: &Token<'_>, j: usize) -> [S::F; N] {
        let (dim, last, state) = (self.heads.dim, t.decay.len() - 1, self.columns.state(j));
        let (v, mut sum) = (load::<S, N>(s, &t.v[j..]), [s.splat(0.0); N]);
        // SAFETY: whole vectors of the task's columns, inside the state of the head.
        unsafe {
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
            check(n, heads.n * heads.dim, heads.state_len(), |cpu, out, spans, states| {
                linear_attention((cpu, &Inline), heads, rows, out, spans, states);
            });
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
