//! Operations of the forward pass on rows of floats (one row per token), distributed over the threads of a pool.

use alloc::vec::Vec;

use crate::kernels::act::{self, ActLayout, Floats, PackedActs};
use crate::kernels::elementwise::{
    Activation, Xielu, activate, add_scaled, clamped_swiglu, gate_by_sigmoid, gated, limited_swiglu, multiply,
    silu_clamped, soft_cap, xielu,
};
use crate::kernels::matmul::{Columns, MatmulJob, products};
use crate::kernels::norm::{NormKind, NormWeights, norm, norm_in_place};
use crate::kernels::panel::Matrix;
use crate::kernels::{Cpu, tasks};
use crate::model::family::Swiglu;
use crate::model::linear::{Linear, LinearGroup, Norm, padded};
use crate::model::memory::{Stack, packed_words};
use crate::pool::Pool;

/// Rows of one task.
pub(crate) const TASK_ROWS: usize = act::TASK_COLUMNS;

/// Instruction set, pool and norm parameters of the operations.
#[derive(Clone, Copy)]
pub(crate) struct RowOps<'a> {
    pub(crate) cpu: Cpu,
    pub(crate) pool: &'a dyn Pool,
    /// Kind of all norms of the model.
    pub(crate) kind: NormKind,
    pub(crate) eps: f32,
}

/// Rows (n, k) as the columns of a product with `w` (rows, k).
pub(crate) fn as_columns<'x>(x: &'x [f32], w: &Matrix) -> Floats<'x> {
    Floats { x, stride: w.k() }
}

/// Columns `at..at + width` of rows of `stride` floats.
pub(crate) fn columns(x: &[f32], stride: usize, at: usize, width: usize) -> impl Iterator<Item = &[f32]> {
    x.chunks_exact(stride).map(move |row| &row[at..at + width])
}

impl<'a> RowOps<'a> {
    /// Calls `f(index, row)` for each row of `stride` floats.
    pub(crate) fn each(&self, x: &mut [f32], stride: usize, f: &(dyn Fn(usize, &mut [f32]) + Sync)) {
        tasks::chunks(act::pool_for_rows(self.pool, x.len() / stride), x, TASK_ROWS * stride, &|i, rows, _| {
            for (r, row) in rows.chunks_exact_mut(stride).enumerate() {
                f(i * TASK_ROWS + r, row);
            }
        });
    }

    fn weights<'n>(&self, n: &'n Norm) -> NormWeights<'n> {
        NormWeights { kind: self.kind, eps: n.eps.unwrap_or(self.eps), w: &n.weight, b: n.bias.as_deref() }
    }

    /// `out = norm(x)`; rows of `out` are contiguous, those of `x` are `stride` apart.
    pub(crate) fn norm(&self, n: &Norm, x: &[f32], stride: usize, out: &mut [f32]) {
        let weights = self.weights(n);
        self.each(out, n.width, &|r, out| norm(self.cpu, &weights, &x[r * stride..][..n.width], out));
    }

    /// `h = norm(x)`, both (n, width), and returns `h`; returns `x` if there is no norm.
    pub(crate) fn normed<'b>(&self, n: Option<&Norm>, x: &'b [f32], h: &'b mut [f32]) -> &'b [f32] {
        let Some(n) = n else { return x };
        self.norm(n, x, n.width, h);
        h
    }

    /// Normalises each head of one token, in place.
    pub(crate) fn norm_heads(&self, n: &Norm, heads: &mut [f32]) {
        for (i, (head, w)) in heads.chunks_exact_mut(n.width).zip(n.weight.chunks_exact(n.width).cycle()).enumerate() {
            let b = n.bias.as_ref().map(|b| &b[i * n.width % b.len()..][..n.width]);
            norm_in_place(self.cpu, &NormWeights { kind: self.kind, eps: self.eps, w, b }, head);
        }
    }

    /// `x += y * scale` on rows of `d` floats; rows of `x` are contiguous, those of `y` are `stride` apart.
    pub(crate) fn add(&self, x: &mut [f32], d: usize, y: &[f32], stride: usize, scale: f32) {
        self.each(x, d, &|r, x| add_scaled(self.cpu, x, &y[r * stride..][..d], scale));
    }

    /// `x = norm(x)` on contiguous rows.
    pub(crate) fn norm_each(&self, n: &Norm, x: &mut [f32]) {
        let weights = self.weights(n);
        self.each(x, n.width, &|_, x| norm_in_place(self.cpu, &weights, x));
    }

    /// [`RowOps::norm_each`] on the beginnings of rows of `stride` floats.
    pub(crate) fn norm_beginnings(&self, n: &Norm, x: &mut [f32], stride: usize) {
        let weights = self.weights(n);
        self.each(x, stride, &|_, x| norm_in_place(self.cpu, &weights, &mut x[..n.width]));
    }

    /// [`RowOps::norm_each`] on the ends of rows of `stride` floats.
    pub(crate) fn norm_ends(&self, n: &Norm, x: &mut [f32], stride: usize) {
        let weights = self.weights(n);
        self.each(x, stride, &|_, x| norm_in_place(self.cpu, &weights, &mut x[stride - n.width..]));
    }

    /// `x = norm(x + y)`; rows of `x` are contiguous, those of `y` padded to whole panels.
    pub(crate) fn add_normed(&self, n: &Norm, x: &mut [f32], y: &[f32]) {
        let weights = self.weights(n);
        self.each(x, n.width, &|r, x| {
            add_scaled(self.cpu, x, &y[r * padded(n.width)..][..n.width], 1.0);
            norm_in_place(self.cpu, &weights, x);
        });
    }

    /// Input of the down projection, in the first `width` floats of each row of `stride`: `act(gate) * up`, where
    /// `gate` starts at 0 and `up` at `up`; without a gate (`None`) `act(x)`.
    pub(crate) fn activate(&self, f: FfnActivation, x: &mut [f32], stride: usize, up: Option<usize>, width: usize) {
        self.each(x, stride, &|_, row| {
            let Some(up) = up else {
                let row = &mut row[..width];
                return match f.xielu {
                    Some(parameters) => xielu(self.cpu, row, parameters),
                    None => activate(self.cpu, f.act, row),
                };
            };
            let (gate, up) = row.split_at_mut(up);
            let (gate, up) = (&mut gate[..width], &mut up[..width]);
            if let Some([beta, linear_beta]) = f.situ {
                if linear_beta > 0.0 {
                    soft_cap(self.cpu, up, linear_beta);
                }
                gate_by_sigmoid(self.cpu, up, gate);
                soft_cap(self.cpu, gate, beta);
                return multiply(self.cpu, gate, up);
            }
            match f.swiglu {
                Swiglu::Clamped(limit) => clamped_swiglu(self.cpu, gate, up, limit),
                Swiglu::Limited(_) if f.limit > 0.0 => limited_swiglu(self.cpu, gate, up, f.limit),
                Swiglu::Plain if f.limit > 0.0 => silu_clamped(self.cpu, gate, up, f.limit),
                Swiglu::Limited(_) | Swiglu::Plain => gated(self.cpu, f.act, gate, up),
            }
        });
    }

    /// `out = W x + b` of each linear of the group for the rows `x` (n, k).
    pub(crate) fn linear_group(&self, group: &LinearGroup, x: &[f32], out: &mut [f32], stack: &mut Stack<'_>) {
        let size = group.size(x.len() / group.k());
        let mut stack = stack.scope();
        let mut packed = PackedColumns::new(stack.words(size.words));
        let jobs: Vec<MatmulJob<'_>> = group
            .linears
            .iter()
            .map(|(l, at)| MatmulJob {
                w: &l.w,
                x: packed.of(self, &l.w, as_columns(x, &l.w), 0),
                out_column: 0,
                out_row: *at,
            })
            .collect();
        products(self.cpu, self.pool, &jobs, out, group.stride);
        for (linear, at) in &group.linears {
            self.add_bias(linear.bias.as_deref(), out, group.stride, *at);
        }
    }

    /// `out = W x + b` for the rows `x` (n, k); rows of `out` are padded to whole panels.
    pub(crate) fn linear(&self, linear: &Linear, x: &[f32], out: &mut [f32], stack: &mut Stack<'_>) {
        self.matrix(&linear.w, linear.bias.as_deref(), as_columns(x, &linear.w), out, stack);
    }

    /// As [`RowOps::linear`], for rows with a stride of their own.
    pub(crate) fn matrix(
        &self,
        w: &Matrix,
        bias: Option<&[f32]>,
        x: Floats<'_>,
        out: &mut [f32],
        stack: &mut Stack<'_>,
    ) {
        let mut stack = stack.scope();
        let words = stack.words(packed_words(x.n(), 1, w.k()));
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

/// Activation of a feed-forward.
#[derive(Clone, Copy)]
pub(crate) struct FfnActivation {
    pub(crate) act: Activation,
    pub(crate) swiglu: Swiglu,
    /// Limit of the factors of gate and up; 0 for none.
    pub(crate) limit: f32,
    pub(crate) xielu: Option<Xielu>,
    /// Betas of SiTU, which replaces the activation of gated feed-forwards; the second one is 0 if `up` is used as it is.
    pub(crate) situ: Option<[f32; 2]>,
}

/// Inputs of products, each packed once per layout that the types of its matrices need.
pub(crate) struct PackedColumns<'w> {
    left: &'w mut [u32],
    /// Index of the input, and its packed form.
    packed: Vec<(usize, PackedActs<'w>)>,
}

impl<'w> PackedColumns<'w> {
    /// Packs into `words`, which holds [`packed_words`] of all inputs.
    pub(crate) fn new(words: &'w mut [u32]) -> PackedColumns<'w> {
        PackedColumns { left: words, packed: Vec::new() }
    }

    /// The rows `x`, input number `input`, in the layout that the matrix needs. Inputs must be given in ascending
    /// order.
    pub(crate) fn of<'x: 'c, 'c>(&mut self, rows: &RowOps<'_>, w: &Matrix, x: Floats<'x>, input: usize) -> Columns<'c>
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
