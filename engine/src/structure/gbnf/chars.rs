//! Sets of characters.

use alloc::vec::Vec;

const MAX: u32 = char::MAX as u32;

/// A set of code points: ranges with both ends, sorted, with gaps between them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct CharSet(Vec<(u32, u32)>);

impl CharSet {
    /// All code points.
    pub(super) fn any() -> CharSet {
        CharSet([(0, MAX)].into())
    }

    pub(super) fn one(c: char) -> CharSet {
        CharSet([(c.into(), c.into())].into())
    }

    /// The union of ranges with both ends.
    pub(super) fn of(mut ranges: Vec<(u32, u32)>) -> CharSet {
        ranges.sort_unstable();
        let mut out: Vec<(u32, u32)> = Vec::with_capacity(ranges.len());
        for (low, high) in ranges {
            match out.last_mut() {
                Some(last) if low <= last.1.saturating_add(1) => last.1 = last.1.max(high),
                _ => out.push((low, high)),
            }
        }
        CharSet(out)
    }

    pub(super) fn ranges(&self) -> &[(u32, u32)] {
        &self.0
    }

    /// All other code points.
    pub(super) fn complement(&self) -> CharSet {
        let (mut out, mut next) = (Vec::new(), 0);
        for &(low, high) in &self.0 {
            if next < low {
                out.push((next, low - 1));
            }
            next = high + 1;
        }
        if next <= MAX {
            out.push((next, MAX));
        }
        CharSet(out)
    }

    /// Adds a set. Returns whether that changed it.
    pub(super) fn add(&mut self, other: &CharSet) -> bool {
        if other.0.iter().all(|range| self.contains(*range)) {
            return false;
        }
        *self = CharSet::of([&self.0[..], &other.0].concat());
        true
    }

    fn contains(&self, (low, high): (u32, u32)) -> bool {
        let i = self.0.partition_point(|range| range.1 < low);
        self.0.get(i).is_some_and(|range| range.0 <= low && high <= range.1)
    }

    pub(super) fn intersects(&self, other: &CharSet) -> bool {
        let (mut a, mut b) = (self.0.iter().peekable(), other.0.iter().peekable());
        while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
            if x.0 <= y.1 && y.0 <= x.1 {
                return true;
            }
            if x.1 < y.1 {
                a.next()
            } else {
                b.next()
            };
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets() {
        let set = CharSet::of(alloc::vec![(5, 9), (1, 2), (3, 4), (20, 30), (25, 26)]);
        assert_eq!(set.ranges(), [(1, 9), (20, 30)]);
        assert_eq!(set.complement().ranges(), [(0, 0), (10, 19), (31, MAX)]);
        assert_eq!(set.complement().complement(), set);
        assert!(!set.intersects(&set.complement()));
        assert!(set.intersects(&CharSet::of(alloc::vec![(10, 20)])));
        assert!(!CharSet::default().intersects(&CharSet::any()));
        let mut sum = set.clone();
        assert!(!sum.add(&CharSet::of(alloc::vec![(2, 3), (30, 30)])));
        assert!(sum.add(&set.complement()));
        assert_eq!(sum, CharSet::any());
    }
}
