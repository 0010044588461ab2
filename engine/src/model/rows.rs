//! Steps of the forward pass on rows of numbers, one row a token, shared among the threads.

use alloc::vec::Vec;

use super::weights::{Linear, Norm, Stack, padded};
use crate::kernels::act::{self, ActLayout, Floats, PackedActs, max_words};
use crate::kernels::elementwise::{Activation, activate, add_scaled, gated};
use crate::kernels::matmul::{Columns, MatmulJob, products};
use crate::kernels::norm::{NormKind, NormWeights, norm, norm_in_place};
use crate::kernels::panel::Matrix;
use crate::kernels::{Cpu, tasks};
use crate::pool::Pool;

/// Rows of a task.
pub(super) const TASK_ROWS: usize = act::TASK_COLUMNS;

/// Where rows are computed.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) cpu: Cpu,
    pub(super) pool: &'a dyn Pool,
    /// Of all norms.
    pub(super) kind: NormKind,
    pub(super) eps: f32,
}

/// Rows that are the columns of a product with `w`.
pub(super) fn whole<'x>(x: &'x [f32], w: &Matrix) -> Floats<'x> {
    Floats { x, stride: w.k() }
}

/// Columns `at..at + width` of rows of `stride` numbers.
pub(super) fn cut(x: &[f32], stride: usize, at: usize, width: usize) -> impl Iterator<Item = &[f32]> {
    x.chunks_exact(stride).map(move |row| &row[at..at + width])
}

impl<'a> Rows<'a> {
    /// Calls `f(row, numbers)` for each row of `stride` numbers.
    pub(super) fn each(&self, x: &mut [f32], stride: usize, f: &(dyn Fn(usize, &mut [f32]) + Sync)) {
        tasks::chunks(act::pool_for_rows(self.pool, x.len() / stride), x, TASK_ROWS * stride, &|i, rows, _| {
            for (r, row) in rows.chunks_exact_mut(stride).enumerate() {
                f(i * TASK_ROWS + r, row);
            }
        });
    }

    fn weights<'n>(&self, n: &'n Norm) -> NormWeights<'n> {
        NormWeights { kind: self.kind, eps: self.eps, w: &n.weight, b: n.bias.as_deref() }
    }

    /// `out = norm(x)`; `out` has rows of whole width, those of `x` are `stride` apart.
    pub(super) fn norm(&self, n: &Norm, x: &[f32], stride: usize, out: &mut [f32]) {
        let weights = self.weights(n);
        self.each(out, n.width, &|r, out| norm(self.cpu, &weights, &x[r * stride..][..n.width], out));
    }

    /// The norm of `x` (n, width) in `h`; `x` itself where there is no norm.
    pub(super) fn normed<'b>(&self, n: Option<&Norm>, x: &'b [f32], h: &'b mut [f32]) -> &'b [f32] {
        let Some(n) = n else { return x };
        self.norm(n, x, n.width, h);
        h
    }

    /// Norms of the heads of one token.
    pub(super) fn norm_heads(&self, n: &Norm, heads: &mut [f32]) {
        for (head, w) in heads.chunks_exact_mut(n.width).zip(n.weight.chunks_exact(n.width).cycle()) {
            norm_in_place(self.cpu, &NormWeights { kind: self.kind, eps: self.eps, w, b: None }, head);
        }
    }

    /// `x += y * scale`: rows of `d` numbers, those of `y` are `stride` apart.
    pub(super) fn add(&self, x: &mut [f32], d: usize, y: &[f32], stride: usize, scale: f32) {
        self.each(x, d, &|r, x| add_scaled(self.cpu, x, &y[r * stride..][..d], scale));
    }

    /// `x = norm(x)`: rows of whole width.
    pub(super) fn norm_each(&self, n: &Norm, x: &mut [f32]) {
        let weights = self.weights(n);
        self.each(x, n.width, &|_, x| norm_in_place(self.cpu, &weights, x));
    }

    /// `x = norm(x + y)`: rows of whole width, those of `y` in whole panels.
    pub(super) fn add_normed(&self, n: &Norm, x: &mut [f32], y: &[f32]) {
        let weights = self.weights(n);
        self.each(x, n.width, &|r, x| {
            add_scaled(self.cpu, x, &y[r * padded(n.width)..][..n.width], 1.0);
            norm_in_place(self.cpu, &weights, x);
        });
    }

    /// What a feed-forward sends down, in the first `width` of each row of `stride` numbers: the activation of the gate,
    /// which is there, times what goes up, which starts at `up`; or the activation of what goes up, without a gate.
    pub(super) fn activate(&self, act: Activation, x: &mut [f32], stride: usize, up: Option<usize>, width: usize) {
        self.each(x, stride, &|_, row| {
            let Some(up) = up else { return activate(self.cpu, act, &mut row[..width]) };
            let (gate, up) = row.split_at_mut(up);
            gated(self.cpu, act, &mut gate[..width], &up[..width]);
        });
    }

    /// `out = W x + b` of the linears of a stack for the rows `x` (n, k).
    pub(super) fn stack(&self, stack: &Stack, x: &[f32], out: &mut [f32], words: &mut [u32]) {
        let mut columns = PackedColumns::new(words);
        let jobs: Vec<MatmulJob<'_>> = stack
            .linears
            .iter()
            .map(|(l, at)| MatmulJob {
                w: &l.w,
                x: columns.of(self, &l.w, whole(x, &l.w), 0),
                out_column: 0,
                out_row: *at,
            })
            .collect();
        products(self.cpu, self.pool, &jobs, out, stack.stride);
        for (linear, at) in &stack.linears {
            self.add_bias(linear.bias.as_deref(), out, stack.stride, *at);
        }
    }

    /// `out = W x + b` for the rows `x` (n, k); rows of `out` are in whole panels.
    pub(super) fn linear(&self, linear: &Linear, x: &[f32], out: &mut [f32], words: &mut [u32]) {
        self.matrix(&linear.w, linear.bias.as_deref(), whole(x, &linear.w), out, words);
    }

    /// [`Rows::linear`] of a matrix, for the first numbers of rows.
    pub(super) fn matrix(&self, w: &Matrix, bias: Option<&[f32]>, x: Floats<'_>, out: &mut [f32], words: &mut [u32]) {
        let x = PackedColumns::new(words).of(self, w, x, 0);
        products(self.cpu, self.pool, &[MatmulJob { w, x, out_column: 0, out_row: 0 }], out, padded(w.rows()));
        self.add_bias(bias, out, padded(w.rows()), 0);
    }

    fn add_bias(&self, bias: Option<&[f32]>, out: &mut [f32], stride: usize, at: usize) {
        if let Some(bias) = bias {
            self.each(out, stride, &|_, row| add_scaled(self.cpu, &mut row[at..at + bias.len()], bias, 1.0));
        }
    }
}

/// Inputs of products, each packed once for every form that its matrices want.
pub(super) struct PackedColumns<'w> {
    left: &'w mut [u32],
    /// With the number of the input.
    packed: Vec<(usize, PackedActs<'w>)>,
}

/// Forms that one input is packed in, at most: as many as matrices take it together (q, k and v).
pub(super) const MAX_FORMS: usize = 3;

/// Words that rows of `k` elements take in so many forms.
pub(super) fn packed_words(rows: usize, forms: usize, k: usize) -> usize {
    forms.saturating_mul(max_words(rows, k))
}

impl<'w> PackedColumns<'w> {
    /// Packs into `words`, [`packed_words`] of all inputs.
    pub(super) fn new(words: &'w mut [u32]) -> PackedColumns<'w> {
        PackedColumns { left: words, packed: Vec::new() }
    }

    /// The rows `x`, which are input number `input`, as the matrix wants them. Inputs come in order.
    pub(super) fn of<'x: 'c, 'c>(&mut self, rows: &Rows<'_>, w: &Matrix, x: Floats<'x>, input: usize) -> Columns<'c>
    where
        'w: 'c,
    {
        let Some(layout) = ActLayout::of(rows.cpu, w.dtype()) else { return Columns::Plain(x) };
        let mut same = self.packed.iter().rev().take_while(|(i, _)| *i == input);
        if let Some((_, acts)) = same.find(|(_, acts)| acts.layout == layout) {
            return Columns::Packed(*acts);
        }
        let len = layout.len_words(x.n(), w.k());
        let (mine, left) = core::mem::take(&mut self.left).split_at_mut(len);
        self.left = left;
        let acts = act::pack(rows.cpu, rows.pool, layout, x, w.k(), mine);
        self.packed.push((input, acts));
        Columns::Packed(acts)
    }
}
