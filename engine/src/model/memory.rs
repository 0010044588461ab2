//! Working memory: one stack of floats and one of words, from which each step of the forward pass takes its temporaries. A
//! mechanism states their sizes once, and the same statement gives the size of the stacks and the parts in the forward pass.

use alloc::vec::Vec;
use core::cell::Cell;
use core::mem;

use super::budget::Budget;
use crate::kernels::act::max_words;

/// Size of temporaries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) floats: usize,
    pub(crate) words: usize,
}

impl Size {
    pub(crate) const NONE: Size = Size { floats: 0, words: 0 };

    /// `n` rows of floats, one plane for each of these widths.
    pub(crate) fn rows<const N: usize>(n: usize, widths: [usize; N]) -> Size {
        let planes = widths.map(|width| aligned(n.saturating_mul(width)));
        Size { floats: planes.into_iter().fold(0, usize::saturating_add), words: 0 }
    }

    pub(crate) fn words(words: usize) -> Size {
        Size { floats: 0, words: aligned(words) }
    }

    /// Packed activations: `n` rows of `k` elements in as many layouts as `forms`.
    pub(crate) fn packed(n: usize, forms: usize, k: usize) -> Size {
        Size::words(packed_words(n, forms, k))
    }

    pub(crate) fn bytes(self) -> usize {
        self.floats.saturating_add(self.words).saturating_mul(4)
    }

    /// Both at the same time.
    pub(crate) fn and(self, other: Size) -> Size {
        Size { floats: self.floats.saturating_add(other.floats), words: self.words.saturating_add(other.words) }
    }

    /// One after the other.
    pub(crate) fn or(self, other: Size) -> Size {
        Size { floats: self.floats.max(other.floats), words: self.words.max(other.words) }
    }

    /// All of them one after the other.
    pub(crate) fn any(all: impl IntoIterator<Item = Size>) -> Size {
        all.into_iter().fold(Size::NONE, Size::or)
    }
}

/// Elements of a cache line, at whose multiples all parts begin.
const LINE: usize = 16;

fn aligned(len: usize) -> usize {
    len.saturating_add(LINE - 1) / LINE * LINE
}

/// Words that `n` rows of `k` elements take in `forms` layouts.
pub(crate) fn packed_words(n: usize, forms: usize, k: usize) -> usize {
    forms.saturating_mul(max_words(n, k))
}

/// The memory of the stacks.
pub(crate) struct Memory {
    floats: Vec<f32>,
    words: Vec<u32>,
    size: Size,
    /// What was never taken.
    unused: Cell<Size>,
}

impl Memory {
    pub(crate) fn new(size: Size, budget: &mut Budget) -> Memory {
        let (floats, words) = (budget.zeros(&[size.floats]), budget.zeros(&[size.words]));
        Memory { floats, words, size, unused: Cell::new(size) }
    }

    /// The stacks, empty.
    pub(crate) fn stack(&mut self) -> Stack<'_> {
        Stack { floats: &mut self.floats, words: &mut self.words, unused: &self.unused }
    }

    /// The size, and the most that was taken at the same time.
    pub(crate) fn usage(&self) -> [Size; 2] {
        let (size, unused) = (self.size, self.unused.get());
        [size, Size { floats: size.floats - unused.floats, words: size.words - unused.words }]
    }
}

/// The free part of both stacks.
pub(crate) struct Stack<'m> {
    floats: &'m mut [f32],
    words: &'m mut [u32],
    unused: &'m Cell<Size>,
}

impl<'m> Stack<'m> {
    /// The same part; what is taken from it is free again after its life.
    pub(crate) fn scope(&mut self) -> Stack<'_> {
        Stack { floats: &mut *self.floats, words: &mut *self.words, unused: self.unused }
    }

    /// Takes `n` rows of floats, one plane for each of these widths. Their values are those of earlier temporaries.
    ///
    /// # Panics
    /// If there is less than [`Size::rows`].
    pub(crate) fn rows<const N: usize>(&mut self, n: usize, widths: [usize; N]) -> [&'m mut [f32]; N] {
        widths.map(|width| self.floats(n * width))
    }

    pub(crate) fn floats(&mut self, len: usize) -> &'m mut [f32] {
        let (taken, rest) = mem::take(&mut self.floats).split_at_mut(aligned(len));
        self.floats = rest;
        self.count();
        &mut taken[..len]
    }

    /// Takes words.
    pub(crate) fn words(&mut self, len: usize) -> &'m mut [u32] {
        let (taken, rest) = mem::take(&mut self.words).split_at_mut(aligned(len));
        self.words = rest;
        self.count();
        &mut taken[..len]
    }

    fn count(&self) {
        let (floats, words) = (self.floats.len(), self.words.len());
        let unused = self.unused.get();
        self.unused.set(Size { floats: unused.floats.min(floats), words: unused.words.min(words) });
    }
}
