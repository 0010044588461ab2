//! 8-bit blocks of 32 with a matrix unit for the dots: a panel times up to 16 columns.

use crate::kernels::simd::{MATRIX_COLUMNS, Simd};

/// Dots of a block: 16 rows for each column.
#[repr(align(64))]
struct Dots<const NC: usize>([[i32; 16]; NC]);

/// Where the tile of one panel reads and writes.
pub(in super::super) struct MatrixTile {
    pub(in super::super) panel: *const u8,
    pub(in super::super) nb: usize,
    pub(in super::super) acts: *const u32,
    pub(in super::super) out: *mut f32,
    pub(in super::super) stride: usize,
}

impl MatrixTile {
    /// Computes 16 rows times `NC` columns over all of K.
    ///
    /// # Safety
    /// The unit is prepared for `NC` columns; `panel` points at a panel of `nb` blocks, `acts` at a tile of NC packed
    /// columns, and `out + c * stride` at 16 writable floats.
    #[inline(always)]
    pub(in super::super) unsafe fn run<S: Simd, const NC: usize>(&self, s: S) {
        const BLOCK: usize = 512;
        let words = (2 + 8) * NC;
        let mut dots = [const { Dots([[0; 16]; NC]) }; 2];
        // SAFETY: offsets stay inside the panel, the columns and the outputs that the caller vouches for.
        unsafe {
            let mut acc = [s.splat(0.0); NC];
            for b in 0..=self.nb {
                // the unit works on one block while the lanes work on the one before
                if b < self.nb {
                    let (acts, quants) = (self.acts.add(b * words + 2 * NC), self.panel.add(b * BLOCK));
                    let dots = dots[b % 2].0.as_mut_ptr().cast();
                    if NC == MATRIX_COLUMNS {
                        s.matrix_dots::<true>(acts, quants, dots);
                    } else {
                        s.matrix_dots::<false>(acts, quants, dots);
                    }
                }
                let Some(b) = b.checked_sub(1) else { continue };
                let (rec, dots) = (self.acts.add(b * words), &dots[b % 2].0);
                let d = s.load_f16(self.panel.add(self.nb * BLOCK + b * 32).cast());
                for c in 0..NC {
                    let da = s.splat(f32::from_bits(rec.add(c).read()));
                    let first = s.splat_i(rec.add(NC + c).read() as i32);
                    let isum = s.to_f32(s.add_i(s.bits(s.load(dots[c].as_ptr().cast())), first));
                    acc[c] = s.add(acc[c], s.mul(isum, s.mul(d, da)));
                }
            }
            for c in 0..NC {
                s.store(self.out.add(c * self.stride), acc[c]);
            }
        }
    }
}
