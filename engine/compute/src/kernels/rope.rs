//! Rotary position embedding (Su et al. 2021), applied to heads with precomputed cosines and sines.

use super::Cpu;
use super::cpu::Op;
use super::simd::Simd;

/// Which elements of a head are rotated as pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// (0, 1), (2, 3), ...: the original layout, as in llama GGUF files (llama.cpp: NORM).
    Interleaved,
    /// (i, i + n_rot/2): GPT-NeoX layout (llama.cpp: NEOX).
    NeoX,
}

/// The rotation at one position.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// Which elements are pairs.
    pub style: RopeStyle,
    /// Cosine of each pair's angle.
    pub cos: &'a [f32],
    /// Sine of each pair's angle.
    pub sin: &'a [f32],
    /// Factor of the whole head.
    pub scale: f32,
}

/// Rotates the first `2 * cos.len()` elements of each head of one token, then multiplies the heads by `scale`: `(a, b)
/// -> (a*cos - b*sin, a*sin + b*cos)`. `heads` is (n_heads, head_dim);
/// both may be 0.
///
/// # Panics
/// If `cos` and `sin` differ in length or are longer than half a head, or `heads` is not whole heads.
pub fn rope(cpu: Cpu, rotation: Rotation<'_>, heads: &mut [f32], head_dim: usize) {
    let Rotation { style, cos, sin, scale } = rotation;
    assert!(cos.len() == sin.len() && cos.len() * 2 <= head_dim && heads.len().is_multiple_of(head_dim));
    if heads.is_empty() {
        return;
    }
    cpu.run(Rope { style, heads, head_dim, cos, sin, scale });
}

struct Rope<'a> {
    style: RopeStyle,
    heads: &'a mut [f32],
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    scale: f32,
}

impl Op for Rope<'_> {
    type Out = ();

    fn scalar(self) {
        self.rotate();
    }

    /// Plain loops: elementwise code gives the same bits however the compiler vectorises it.
    #[inline(always)]
    fn simd<S: Simd>(self, _: S) {
        self.rotate();
    }
}

impl Rope<'_> {
    #[inline(always)]
    fn rotate(self) {
        let half = self.cos.len();
        for head in self.heads.chunks_exact_mut(self.head_dim) {
            let (turn, _) = head.split_at_mut(2 * half);
            match self.style {
                RopeStyle::Interleaved => {
                    for ((pair, c), s) in turn.chunks_exact_mut(2).zip(self.cos).zip(self.sin) {
                        (pair[0], pair[1]) = (pair[0] * c - pair[1] * s, pair[0] * s + pair[1] * c);
                    }
                }
                RopeStyle::NeoX => {
                    let (first, second) = turn.split_at_mut(half);
                    for (((a, b), c), s) in first.iter_mut().zip(second).zip(self.cos).zip(self.sin) {
                        (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
                    }
                }
            }
            if self.scale != 1.0 {
                for v in head {
                    *v *= self.scale;
                }
            }
        }
    }
}
