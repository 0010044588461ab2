//! Causal convolution of each channel over the last tokens of its sequence.
//!
//! ```text
//! y[t][c] = ((0 + w[0][c] x[t-K+1][c]) + ... + w[K-1][c] x[t][c]) + bias[c]
//! ```
//!
//! The state has the last K - 1 inputs, (K - 1, channels), the oldest first; zeros before the first token.
#![allow(unsafe_code)]

use super::super::cpu::Op;
use super::super::simd::Simd;
use super::super::{Cpu, SharedOut, tasks};
use super::{SharedStates, StateMemory, StateSpan};
use crate::pool::Pool;

/// Channels of one task.
const BLOCK: usize = 64;

/// Weights of a convolution.
#[derive(Clone, Copy)]
pub struct Conv<'a> {
    /// (K, channels), the weight of the oldest input first.
    pub weights: &'a [f32],
    /// One value per channel.
    pub bias: Option<&'a [f32]>,
    /// Number of channels.
    pub channels: usize,
}

impl Conv<'_> {
    /// Inputs of one output (K).
    fn len(&self) -> usize {
        self.weights.len() / self.channels
    }

    /// Floats of the state.
    pub fn state_len(&self) -> usize {
        (self.len() - 1) * self.channels
    }
}

/// Rows of floats, and where the channels begin in each.
pub struct ConvRows<'a> {
    /// The rows.
    pub x: &'a mut [f32],
    /// Length of a row.
    pub stride: usize,
    /// Offset of the first channel in a row.
    pub at: usize,
}

/// Replaces the channels of the rows by their convolution, sequence by sequence. The state of each sequence is at
/// `state_at` of its slot.
///
/// # Panics
/// If a row or a state is outside its memory.
pub fn causal_conv(
    cpu: Cpu,
    pool: &dyn Pool,
    conv: Conv<'_>,
    rows: ConvRows<'_>,
    spans: &[StateSpan],
    (states, state_at): (&mut StateMemory, usize),
) {
    let n_blocks = conv.channels.div_ceil(BLOCK);
    let (states, x) = (states.shared(), SharedOut::new(rows.x));
    tasks::run(pool, spans.len() * n_blocks, &|i, _| {
        let (span, first) = (spans[i / n_blocks], i % n_blocks * BLOCK);
        cpu.run(ConvTask {
            conv,
            x: &x,
            stride: rows.stride,
            at: rows.at,
            span,
            states: &states,
            state_at,
            channels: (first, BLOCK.min(conv.channels - first)),
        });
    });
}

/// The rows of one sequence for a block of channels: its first channel, and their number.
struct ConvTask<'a> {
    conv: Conv<'a>,
    x: &'a SharedOut<'a, f32>,
    stride: usize,
    at: usize,
    span: StateSpan,
    states: &'a SharedStates<'a>,
    state_at: usize,
    channels: (usize, usize),
}

impl ConvTask<'_> {
    /// Plain loops: elementwise code gives the same bits however the compiler vectorises it.
    #[inline(always)]
    fn convolve(self) {
        let (c, n) = self.channels;
        let (all, last) = (self.conv.channels, self.conv.len() - 1);
        // SAFETY: tasks have different spans or channels, so neither rows nor states overlap; one borrow at a time.
        let state = |j: usize| unsafe { self.states.slice(self.span.slot, self.state_at + j * all + c, n) };
        let weights = |j: usize| &self.conv.weights[j * all + c..][..n];
        for row in self.span.row..self.span.row + self.span.n {
            // SAFETY: tasks have different rows or channels, and this is the only borrow of the row.
            let x = unsafe { self.x.slice(row * self.stride + self.at + c, n) };
            let mut sum = [0.0f32; BLOCK];
            for j in 0..last {
                for ((sum, w), x) in sum.iter_mut().zip(weights(j)).zip(&*state(j)) {
                    *sum += w * x;
                }
            }
            for ((sum, w), x) in sum.iter_mut().zip(weights(last)).zip(&*x) {
                *sum += w * x;
            }
            for j in 1..last {
                let next: &[f32] = state(j);
                let mut kept = [0.0f32; BLOCK];
                kept[..n].copy_from_slice(next);
                state(j - 1).copy_from_slice(&kept[..n]);
            }
            if last > 0 {
                state(last - 1).copy_from_slice(x);
            }
            match self.conv.bias {
                Some(bias) => {
                    for ((x, sum), b) in x.iter_mut().zip(sum).zip(&bias[c..]) {
                        *x = sum + b;
                    }
                }
                None => x.copy_from_slice(&sum[..n]),
            }
        }
    }
}

impl Op for ConvTask<'_> {
    type Out = ();

    fn scalar(self) {
        self.convolve();
    }

    #[inline(always)]
    fn simd<S: Simd>(self, _: S) {
        self.convolve();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Inline;
    use alloc::vec;
    use alloc::vec::Vec;

    /// Any split of a sequence over calls, among other sequences, gives the bits of the formula.
    #[test]
    fn pieces_equal_the_formula() {
        let (channels, k, n, stride, at) = (75, 4, 19, 90, 7);
        let value = |i: usize| ((i * 7919 + 13) % 1009) as f32 * 0.002 - 1.0;
        let weights: Vec<f32> = (0..k * channels).map(value).collect();
        let bias: Vec<f32> = (0..channels).map(|i| value(i + 500)).collect();
        let x: Vec<f32> = (0..n * stride).map(|i| value(3 * i)).collect();
        let mut want = x.clone();
        for t in 0..n {
            for c in 0..channels {
                let mut sum = 0.0;
                for j in 0..k {
                    let x = if t + j >= k - 1 { x[(t + j + 1 - k) * stride + at + c] } else { 0.0 };
                    sum += weights[j * channels + c] * x;
                }
                want[t * stride + at + c] = sum + bias[c];
            }
        }
        for cpu in Cpu::available() {
            for pieces in [vec![19], vec![1; 19], vec![7, 2, 10]] {
                let conv = Conv { weights: &weights, bias: Some(&bias), channels };
                let mut states = StateMemory::new(conv.state_len() + 5, 3).expect("memory");
                states.reset(2).expect("memory");
                let (mut got, mut row) = (x.clone(), 0);
                for n in pieces {
                    let rows = ConvRows { x: &mut got, stride, at };
                    causal_conv(cpu, &Inline, conv, rows, &[StateSpan { row, n, slot: 2 }], (&mut states, 5));
                    row += n;
                }
                assert_eq!(got, want);
            }
        }
    }
}
