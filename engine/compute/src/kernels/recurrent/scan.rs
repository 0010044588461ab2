//! Selective scan of state-space models: Mamba (Gu and Dao, arXiv:2312.00752) and Mamba 2 (arXiv:2405.21060). Each channel
//! c has a state of N values, zero before the first token. For each token, with step `t[c]`, input `x[c]`, and vectors B and C
//! that the channels of a group share:
//!
//! ```text
//! s[n][c] = s[n][c] * d[n][c] + B[n] * (x[c] * t[c]),  d[n][c] = exp(t[c] * A[n][c])
//! out[c]  = sum_n s[n][c] * C[n]
//! ```
//!
//! In Mamba 2 the channels of a head share t and A, which does not depend on n. Sums start from 0 and add in order of n.
#![allow(unsafe_code)]

use super::super::exp::{LOW, exp, exp_above_lanes};
use super::super::simd::Simd;
use super::super::{Cpu, SharedOut, tasks};
use super::columns::{ByColumns, Columns, load};
use super::{StateMemory, StateSpan};
use crate::pool::Pool;

/// Channels of one task.
const BLOCK: usize = 64;

/// Sizes of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanSize {
    /// Number of channels.
    pub channels: usize,
    /// Channels that share step and decay: those of a head, or 1.
    pub per_head: usize,
    /// Channels that share B and C.
    pub per_group: usize,
    /// Values of the state of a channel.
    pub n_state: usize,
}

impl ScanSize {
    /// Floats of the state of a layer.
    pub fn state_len(&self) -> usize {
        self.channels.saturating_mul(self.n_state)
    }
}

/// The rows of an input: those of one operand are `stride` floats apart and begin at `at`.
#[derive(Clone, Copy)]
pub struct Operand<'a> {
    /// The rows.
    pub x: &'a [f32],
    /// Length of a row.
    pub stride: usize,
    /// Offset in a row.
    pub at: usize,
}

impl<'a> Operand<'a> {
    pub(super) fn row(&self, row: usize) -> &'a [f32] {
        &self.x[row * self.stride + self.at..]
    }
}

/// Inputs of a scan.
#[derive(Clone, Copy)]
pub struct ScanRows<'a> {
    /// (channels)
    pub x: Operand<'a>,
    /// (groups, n_state)
    pub b: Operand<'a>,
    /// (groups, n_state)
    pub c: Operand<'a>,
    /// Steps: one per head, or one per channel if heads have one channel.
    pub dt: Operand<'a>,
    /// One per head; or (n_state, channels) if heads have one channel.
    pub a: &'a [f32],
}

/// Runs the scan over the rows of each sequence; `out` is (rows, channels). The state of each sequence is at `state_at` of
/// its slot.
///
/// # Panics
/// If a row or a state is outside its memory.
pub fn selective_scan(
    (cpu, pool): (Cpu, &dyn Pool),
    size: ScanSize,
    rows: ScanRows<'_>,
    out: &mut [f32],
    spans: &[StateSpan],
    (states, state_at): (&mut StateMemory, usize),
) {
    // a block has channels of one head, or of one group if heads have one channel
    let whole = if size.per_head > 1 { size.per_head } else { size.per_group };
    let parts = whole.div_ceil(BLOCK);
    let per_span = size.channels / whole * parts;
    let (states, out) = (states.shared(), SharedOut::new(out));
    tasks::run(pool, spans.len() * per_span, &|i, _| {
        let (span, first) = (spans[i / per_span], i % parts * BLOCK);
        let channels = (i % per_span / parts * whole + first, BLOCK.min(whole - first));
        // tasks have different channels, which is all that they access through this pointer
        let state = states.ptr(span.slot, state_at, size.state_len());
        cpu.run(ByColumns(ScanTask { size, rows, out: &out, span, state, channels }));
    });
}

/// The rows of one sequence for some channels: the first, and their number.
struct ScanTask<'a> {
    size: ScanSize,
    rows: ScanRows<'a>,
    out: &'a SharedOut<'a, f32>,
    span: StateSpan,
    state: *mut f32,
    channels: (usize, usize),
}

/// Inputs of a block of channels at one token.
struct Token<'a> {
    x: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
    /// One per channel, or one.
    dt: &'a [f32],
    /// The decay that all channels share, if they do.
    decay: f32,
}

impl ScanTask<'_> {
    fn shares_step(&self) -> bool {
        self.size.per_head > 1
    }
}

impl<'a> Columns<'a> for ScanTask<'a> {
    type Token = Token<'a>;

    #[inline(always)]
    fn span(&self) -> StateSpan {
        self.span
    }

    #[inline(always)]
    fn token(&self, row: usize) -> (Token<'a>, &'a mut [f32]) {
        let ScanSize { channels, per_head, per_group, n_state } = self.size;
        let (first, n) = self.channels;
        let group = first / per_group * n_state;
        let (b, c) = (&self.rows.b.row(row)[group..][..n_state], &self.rows.c.row(row)[group..][..n_state]);
        let (dt, decay) = if self.shares_step() {
            let dt = &self.rows.dt.row(row)[first / per_head..][..1];
            (dt, exp(dt[0] * self.rows.a[first / per_head]))
        } else {
            (&self.rows.dt.row(row)[first..][..n], 0.0)
        };
        // SAFETY: tasks have different rows or channels.
        let out = unsafe { self.out.slice(row * channels + first, n) };
        (Token { x: &self.rows.x.row(row)[first..][..n], b, c, dt, decay }, out)
    }

    #[inline(always)]
    fn column(&self, t: &Token<'_>, j: usize) -> f32 {
        let (all, first) = (self.size.channels, self.channels.0);
        let dt = t.dt[j.min(t.dt.len() - 1)];
        let (input, mut out) = (t.x[j] * dt, 0.0);
        for n in 0..self.size.n_state {
            let decay = match self.shares_step() {
                true => t.decay,
                false => exp(dt * self.rows.a[n * all + first + j]),
            };
            // SAFETY: inside the state of the layer; no other task accesses this channel.
            let s = unsafe { &mut *self.state.add(n * all + first + j) };
            *s = *s * decay + t.b[n] * input;
            out += *s * t.c[n];
        }
        out
    }

    #[inline(always)]
    fn vectors<S: Simd, const N: usize>(&self, s: S, t: &Token<'_>, j: usize) -> [S::F; N] {
        let (all, first) = (self.size.channels, self.channels.0);
        let dt = if self.shares_step() { [s.splat(t.dt[0]); N] } else { load::<S, N>(s, &t.dt[j..]) };
        let (mut input, mut sum) = (load::<S, N>(s, &t.x[j..]), [s.splat(0.0); N]);
        let mut decay = [s.splat(t.decay); N];
        for (input, dt) in input.iter_mut().zip(dt) {
            *input = s.mul(*input, dt);
        }
        // SAFETY: whole vectors of the task's channels, inside the state of the layer.
        unsafe {
            for n in 0..self.size.n_state {
                let at = n * all + first + j;
                if !self.shares_step() {
                    decay = load::<S, N>(s, &self.rows.a[at..]);
                    for (decay, dt) in decay.iter_mut().zip(dt) {
                        *decay = s.mul(dt, *decay);
                    }
                    decay = exp_above_lanes(s, LOW, decay);
                }
                let (b, c) = (s.splat(t.b[n]), s.splat(t.c[n]));
                for i in 0..N {
                    let p = self.state.add(at + i * S::LANES);
                    let x = s.add(s.mul(s.load(p), decay[i]), s.mul(b, input[i]));
                    s.store(p, x);
                    sum[i] = s.add(sum[i], s.mul(x, c));
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
        for size in [
            ScanSize { channels: 200, per_head: 100, per_group: 100, n_state: 5 },
            ScanSize { channels: 19 * 4, per_head: 19, per_group: 38, n_state: 8 },
            ScanSize { channels: 117, per_head: 1, per_group: 117, n_state: 7 },
        ] {
            let n = 9;
            let value = |i: usize| ((i * 7919 + 13) % 1009) as f32 * 0.002 - 1.0;
            let stride = size.channels + 2 * size.channels / size.per_group * size.n_state + 3;
            let x: Vec<f32> = (0..n * stride).map(value).collect();
            let dt: Vec<f32> = (0..n * size.channels).map(|i| value(i).abs()).collect();
            let a: Vec<f32> = (0..size.channels * size.n_state).map(|i| -value(i).abs() * 2.0).collect();
            let operand = |at| Operand { x: &x, stride, at };
            let c_at = size.channels + size.channels / size.per_group * size.n_state;
            let rows = ScanRows {
                x: operand(0),
                b: operand(size.channels),
                c: operand(c_at),
                dt: Operand { x: &dt, stride: size.channels / size.per_head, at: 0 },
                a: &a,
            };
            check(n, size.channels, size.state_len(), |cpu, out, spans, states| {
                selective_scan((cpu, &Inline), size, rows, out, spans, states);
            });
        }
    }
}
