//! Matrices with biases, norms, and how they are loaded.

use alloc::vec;
use alloc::vec::Vec;

use super::memory::Size;
use crate::kernels::panel::{Matrix, PANEL};

/// A matrix and its bias: `y = w x + b`.
pub(crate) struct Linear {
    /// (rows, k) weights.
    pub w: Matrix,
    /// One value per row.
    pub bias: Option<Vec<f32>>,
}

/// Linears with the same input. Their outputs are side by side in one row, each padded to whole panels. A fused matrix
/// gives several parts.
pub(crate) struct LinearGroup {
    /// The linears, each with the offset of its output in the row.
    pub linears: Vec<(Linear, usize)>,
    /// Offset of each part in the row: q, k, v; or gate, up; or up.
    pub part_starts: Vec<usize>,
    /// Length of a row in floats.
    pub stride: usize,
}

/// RMSNorm or LayerNorm of vectors or of heads.
#[derive(Clone)]
pub(crate) struct Norm {
    /// A factor per element (width); or per element of all heads, where heads have their own factors.
    pub weight: Vec<f32>,
    /// Added after the scaling.
    pub bias: Option<Vec<f32>>,
    /// Epsilon, if it is not the model's.
    pub eps: Option<f32>,
    /// Elements that are normalised together.
    pub width: usize,
}

impl Norm {
    /// A norm without weights: a factor of 1 changes no bit.
    pub(crate) fn plain(width: usize) -> Norm {
        Norm { weight: vec![1.0; width], bias: None, eps: None, width }
    }
}

/// Rows of an output, padded to whole panels.
pub(crate) fn padded(rows: usize) -> usize {
    rows.next_multiple_of(PANEL)
}

impl LinearGroup {
    /// A group of separate linears, one part each.
    pub(crate) fn separate(linears: Vec<Linear>) -> LinearGroup {
        let mut group = LinearGroup { linears: Vec::with_capacity(linears.len()), part_starts: Vec::new(), stride: 0 };
        linears.into_iter().for_each(|linear| group.push(linear));
        group
    }

    /// Adds a part of this many rows without a linear.
    pub(crate) fn reserve(&mut self, rows: usize) {
        self.part_starts.push(self.stride);
        self.stride += padded(rows);
    }

    /// Adds a linear as a further part.
    pub(crate) fn push(&mut self, linear: Linear) {
        self.part_starts.push(self.stride);
        let rows = padded(linear.w.rows());
        self.linears.push((linear, self.stride));
        self.stride += rows;
    }

    /// A group of one fused linear, whose rows are parts of these lengths.
    pub(crate) fn fused(linear: Linear, rows: &[usize]) -> LinearGroup {
        let starts = rows.iter().scan(0, |at, n| {
            *at += n;
            Some(*at - n)
        });
        LinearGroup { part_starts: starts.collect(), ..LinearGroup::separate(vec![linear]) }
    }

    /// The matrices of the linears.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.linears.iter().map(|(l, _)| &l.w)
    }

    /// Elements of the input.
    pub(crate) fn k(&self) -> usize {
        self.linears.first().map_or(1, |(l, _)| l.w.k())
    }

    /// Number of activation layouts that the matrices may need.
    fn forms(&self) -> usize {
        forms(self.matrices())
    }

    /// Temporaries of the products of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        Size::packed(n, self.forms(), self.k())
    }
}

impl Linear {
    /// Temporaries of the products of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        Size::packed(n, 1, self.w.k())
    }
}

/// Maximal number of layouts of one input: the number of matrices that share it (q, k, v and the gate of the output; of a
/// delta net qkv, gate, rate and decay).
const MAX_FORMS: usize = 4;

/// Number of activation layouts that these matrices may need.
pub(crate) fn forms<'a>(of: impl Iterator<Item = &'a Matrix>) -> usize {
    let (mut types, mut n) = ([None; MAX_FORMS], 0);
    for matrix in of {
        let dtype = Some(matrix.dtype());
        if n < MAX_FORMS && !types[..n].contains(&dtype) {
            types[n] = dtype;
            n += 1;
        }
    }
    n
}

/// A norm of heads, with a factor per element if the file has one per head.
pub(crate) fn per_element(norm: Norm, dim: usize) -> Norm {
    if norm.width > 1 || norm.bias.is_some() {
        return norm;
    }
    let weight = norm.weight.iter().flat_map(|w| core::iter::repeat_n(*w, dim)).collect();
    Norm { weight, width: dim, ..norm }
}
