//! Search for grid points of the IQ types: a level for every element, then the nearest point of the grid.
//!
//! Level l stands for 2l + 1. Not every combination of levels is a grid point. For the others, the points at the few
//! smallest distances are listed in advance, and the one with the smallest weighted error is chosen.

use alloc::vec;
use alloc::vec::Vec;

use super::Dtype;
use super::fit::{nearest, positive, sqrt};
use super::grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};

/// A grid, with the list of near points for each combination of levels that is not a point.
#[derive(Debug)]
pub(super) struct Lattice {
    grid: &'static [u32],
    /// Bits per level.
    bits: usize,
    /// For each combination of levels the index of its point, or the start of its neighbour list minus `i32::MAX`.
    map: Vec<i32>,
    /// Lists of point indices, each preceded by its length: nearest first, then by index.
    neighbours: Vec<u16>,
}

impl Lattice {
    /// The grid of a type; `None` if it has none.
    pub(super) fn of(dtype: Dtype) -> Option<Lattice> {
        let (grid, bits, shells): (&[u32], _, _) = match dtype {
            Dtype::IQ1_S | Dtype::IQ1_M => (&IQ1, 2, 3),
            Dtype::IQ2_XXS => (&IQ2_XXS, 2, 2),
            Dtype::IQ2_XS => (&IQ2_XS, 2, 2),
            Dtype::IQ2_S => (&IQ2_S, 2, 1),
            Dtype::IQ3_XXS => (&IQ3_XXS, 3, 2),
            Dtype::IQ3_S => (&IQ3_S, 3, 3),
            _ => return None,
        };
        Some(Lattice::new(grid, bits, shells))
    }

    /// `shells`: how many different distances count as near.
    fn new(grid: &'static [u32], bits: usize, shells: usize) -> Lattice {
        let combinations = if bits == 2 { 0xaaab } else { 0x1000 };
        let mut map = vec![-1i32; combinations];
        for (i, &point) in grid.iter().enumerate() {
            map[point as usize] = i as i32;
        }
        let mut lattice = Lattice { grid, bits, map, neighbours: Vec::new() };
        let mut distances = vec![0u8; grid.len()];
        // level 3 of two bits does not occur
        let occurs = |at: usize| bits == 3 || at & at >> 1 & 0x5555 == 0;
        for at in (0..combinations).filter(|&at| occurs(at)) {
            if lattice.map[at] >= 0 {
                continue;
            }
            lattice.map[at] = lattice.neighbours.len() as i32 - i32::MAX;
            for (d, &point) in distances.iter_mut().zip(grid) {
                *d = distance(at as u32, point, bits);
            }
            let start = lattice.neighbours.len();
            lattice.neighbours.push(0);
            let mut nearer = None;
            for _ in 0..shells {
                let next = distances.iter().copied().filter(|&d| nearer.is_none_or(|n| d > n)).min();
                let Some(next) = next else { break };
                let shell = distances.iter().enumerate().filter(|(_, d)| **d == next);
                lattice.neighbours.extend(shell.map(|(i, _)| i as u16));
                nearer = Some(next);
            }
            lattice.neighbours[start] = (lattice.neighbours.len() - start - 1) as u16;
        }
        lattice
    }

    /// Elements of a point.
    pub(super) fn len(&self) -> usize {
        if self.bits == 2 { 8 } else { 4 }
    }

    /// Level `i` of a point.
    pub(super) fn level(&self, index: u16, i: usize) -> u8 {
        (self.grid[usize::from(index)] >> (self.bits * i)) as u8 & ((1 << self.bits) - 1)
    }

    /// The point with these levels, or else the near points.
    fn find(&self, levels: &[u8]) -> Result<u16, &[u16]> {
        let at = levels.iter().enumerate().fold(0, |at, (i, &l)| at | usize::from(l) << (self.bits * i));
        match self.map[at] {
            index if index >= 0 => Ok(index as u16),
            start => {
                let start = (start + i32::MAX) as usize;
                Err(&self.neighbours[start + 1..][..usize::from(self.neighbours[start])])
            }
        }
    }

    /// The point with these levels, or else the near one of smallest weighted error, where level l stands for
    /// `value(l)`; and whether it has exactly these levels.
    pub(super) fn nearest(
        &self,
        levels: &[u8],
        x: &[f32],
        w: &[f32],
        scale: f32,
        value: impl Fn(u8) -> f32,
    ) -> (u16, bool) {
        let near = match self.find(levels) {
            Ok(index) => return (index, true),
            Err(near) => near,
        };
        let mut best = (f32::MAX, near[0]);
        for &index in near {
            let mut error = 0.0;
            for i in 0..levels.len() {
                let diff = scale * value(self.level(index, i)) - x[i];
                error += w[i] * diff * diff;
            }
            if error < best.0 {
                best = (error, index);
            }
        }
        (best.1, false)
    }
}

/// Squared distance of two combinations of levels.
fn distance(a: u32, b: u32, bits: usize) -> u8 {
    let (mut sum, mask) = (0, (1 << bits) - 1);
    for i in (0..16 / bits * bits).step_by(bits) {
        let d = (a >> i & mask) as i16 - (b >> i & mask) as i16;
        sum += (d * d) as u8;
    }
    sum
}

/// Parameters of the search for scale and grid points of a sub-block.
pub(super) struct GridSearch {
    /// Elements of a sub-block.
    pub(super) len: usize,
    /// Number of levels.
    pub(super) levels: u8,
    /// Whether the number of minus signs of eight elements must be even.
    pub(super) even: bool,
    /// Number of attempts on either side, and the distance between them.
    pub(super) steps: i8,
    pub(super) step: f32,
    /// Sub-blocks with a smaller magnitude count as zero.
    pub(super) tiny: f32,
    /// Which points are searched again with the final scale.
    pub(super) refit: Refit,
}

/// Which points are searched again with the scale that was found.
#[derive(PartialEq)]
pub(super) enum Refit {
    /// All; and the first scale is fitted without the grid.
    Always,
    /// All, if one is off the grid or no attempt was good.
    AllIfOffGrid,
    /// Those off the grid.
    OffGrid,
}

/// A fitted sub-block: `x` is about `scale * sign * (2 * level + 1)`.
#[derive(Clone, Copy, Default)]
pub(super) struct GridFit {
    pub(super) scale: f32,
    /// Indices of the points.
    pub(super) index: [u16; 8],
    /// Signs, a byte per eight elements.
    pub(super) signs: [u8; 4],
}

impl GridSearch {
    /// The best scale and points for `x`, weighted by `w`; `None` for zeros.
    pub(super) fn run(&self, lattice: &Lattice, x: &[f32], w: &[f32]) -> Option<GridFit> {
        let (n, per) = (self.len, lattice.len());
        let points = n / per;
        let mut roots = [0.0; 32];
        roots.iter_mut().zip(w).for_each(|(root, w)| *root = sqrt(*w));
        let mut found = GridFit::default();
        let mut magnitude = [0.0; 32];
        for (k, signs) in found.signs[..n / 8].iter_mut().enumerate() {
            let at = 8 * k..8 * k + 8;
            *signs = fold_signs(&x[at.clone()], &w[at.clone()], self.even, &mut magnitude[at]);
        }
        let x = &magnitude[..n];
        let max = x.iter().fold(x[0], |max, &x| if x > max { x } else { max });
        if max < self.tiny || max == 0.0 {
            return None;
        }
        let top = f32::from(2 * self.levels - 1);
        let (mut scale, range) = match self.refit {
            Refit::Always => {
                let w: &[f32; 32] = w.try_into().ok()?;
                let scale = positive(&magnitude, w, f32::from(self.levels + 1)).0;
                (scale, scale * f32::from(self.levels))
            }
            _ => (max / top, max),
        };
        if range <= 0.0 {
            return None;
        }
        let level = |v: f32| nearest(0.5 * (v - 1.0), 0.0, f32::from(self.levels - 1)) as u8;
        let point = |k: usize, inverse: f32, scale: f32| {
            let mut levels = [0; 8];
            let at = per * k..per * (k + 1);
            levels.iter_mut().zip(&x[at.clone()]).for_each(|(l, x)| *l = level(inverse * x));
            lattice.nearest(&levels[..per], &x[at.clone()], &roots[at], scale, |l| f32::from(2 * l + 1))
        };
        let sums = |index: &[u16; 8]| {
            let (mut qx, mut q2) = (0.0, 0.0);
            for (i, (x, w)) in x.iter().zip(w).enumerate() {
                let q = f32::from(2 * lattice.level(index[i / per], i % per) + 1);
                qx += w * x * q;
                q2 += w * q * q;
            }
            (qx, q2)
        };
        let mut on_grid = [self.refit != Refit::AllIfOffGrid; 8];
        let mut best = 0.0;
        for step in -self.steps..=self.steps {
            let inverse = (top + f32::from(step) * self.step) / range;
            let (mut index, mut exact) = ([0; 8], [true; 8]);
            for k in 0..points {
                (index[k], exact[k]) = point(k, inverse, 1.0 / inverse);
            }
            let (qx, q2) = sums(&index);
            if q2 > 0.0 && qx * qx > best * q2 {
                scale = qx / q2;
                best = scale * qx;
                (found.index, on_grid) = (index, exact);
            }
        }
        let off_grid = on_grid[..points].iter().any(|on| !on);
        if (off_grid || self.refit == Refit::Always) && scale > 0.0 {
            for k in (0..points).filter(|&k| self.refit != Refit::OffGrid || !on_grid[k]) {
                found.index[k] = point(k, 1.0 / scale, scale).0;
            }
            let (qx, q2) = sums(&found.index);
            if q2 > 0.0 {
                scale = qx / q2;
            }
        }
        if scale < 0.0 {
            scale = -scale;
            found.signs = found.signs.map(|s| !s);
        }
        found.scale = scale;
        Some(found)
    }
}

/// Splits eight elements into magnitudes and signs. To make the number of minus signs even, the element with the
/// smallest weighted square changes its sign; its magnitude is then negative.
fn fold_signs(x: &[f32], w: &[f32], even: bool, magnitude: &mut [f32]) -> u8 {
    let mut signs = 0;
    for (i, x) in x.iter().enumerate() {
        magnitude[i] = if *x >= 0.0 { *x } else { -x };
        signs |= u8::from(*x < 0.0) << i;
    }
    if even && signs.count_ones() % 2 == 1 {
        let matter = |i: usize| w[i] * x[i] * x[i];
        let least = (1..8).fold(0, |least, i| if matter(i) < matter(least) { i } else { least });
        magnitude[least] = -magnitude[least];
        signs ^= 1 << least;
    }
    signs
}

/// Rounds scales to odd multiples `(2 * s + 1) * step`: returns the step and each `s`, at most `max`.
pub(super) fn odd_scales<const N: usize>(scales: &[f32; N], max: u8) -> (f32, [u8; N]) {
    let largest = scales.iter().fold(0.0, |largest: f32, &s| if s > largest { s } else { largest });
    if largest == 0.0 {
        return (0.0, [0; N]);
    }
    let step = largest / f32::from(2 * max + 1);
    let inverse = 1.0 / step;
    (step, scales.map(|s| nearest(0.5 * (inverse * s - 1.0), 0.0, f32::from(max)) as u8))
}
