//! Sets of characters. Clones share their ranges, and [`Unions`] keeps equal unions once.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::rc::Rc;
use alloc::string::String;
use alloc::vec::Vec;

use super::Work;

const MAX: u32 = char::MAX as u32;
/// Ranges that the unions of a translation may have together, 8 bytes each: a class of 9000 ranges in a hundred unions.
pub(super) const MAX_UNION_RANGES: usize = 1 << 20;
/// Ranges that are compared in one unit of work.
const RANGES_PER_WORK: usize = 8;

/// A set of code points: ranges with both ends, sorted, with gaps between them.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CharSet(Rc<[(u32, u32)]>);

impl CharSet {
    /// All code points.
    pub(super) fn any() -> CharSet {
        CharSet(Rc::from([(0, MAX)]))
    }

    pub(super) fn one(c: char) -> CharSet {
        CharSet(Rc::from([(c.into(), c.into())]))
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
        CharSet(out.into())
    }

    pub(super) fn ranges(&self) -> &[(u32, u32)] {
        &self.0
    }

    /// All other code points.
    pub(super) fn complement(&self) -> CharSet {
        let (mut out, mut next) = (Vec::new(), 0);
        for &(low, high) in &*self.0 {
            if next < low {
                out.push((next, low - 1));
            }
            next = high + 1;
        }
        if next <= MAX {
            out.push((next, MAX));
        }
        CharSet(out.into())
    }

    fn contains_all(&self, other: &CharSet) -> bool {
        Rc::ptr_eq(&self.0, &other.0) || other.0.iter().all(|range| self.contains(*range))
    }

    fn contains(&self, (low, high): (u32, u32)) -> bool {
        let i = self.0.partition_point(|range| range.1 < low);
        self.0.get(i).is_some_and(|range| range.0 <= low && high <= range.1)
    }

    /// Whether the sets have a common character.
    ///
    /// # Errors
    /// If `work` is spent.
    pub(super) fn intersects(&self, other: &CharSet, work: &mut Work) -> Result<bool, String> {
        work.spend((self.0.len() + other.0.len()) / RANGES_PER_WORK)?;
        Ok(self.has_common(other))
    }

    fn has_common(&self, other: &CharSet) -> bool {
        if Rc::ptr_eq(&self.0, &other.0) {
            return !self.0.is_empty();
        }
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

/// Unions of sets. Equal ones are kept once, until the end of the translation.
#[derive(Debug, Default)]
pub(super) struct Unions {
    known: BTreeSet<CharSet>,
    /// Ranges of the known unions.
    n_ranges: usize,
}

impl Unions {
    /// Adds `other` to `set`. Returns whether that changed it.
    ///
    /// # Errors
    /// If `work` is spent, or the unions have more than [`MAX_UNION_RANGES`] ranges.
    pub(super) fn add(&mut self, set: &mut CharSet, other: &CharSet, work: &mut Work) -> Result<bool, String> {
        work.spend(other.0.len() / RANGES_PER_WORK)?;
        if set.contains_all(other) {
            return Ok(false);
        }
        work.spend((set.0.len() + other.0.len()) / RANGES_PER_WORK)?;
        *set = match other.contains_all(set) {
            true => other.clone(),
            false => self.keep(CharSet::of([&set.0[..], &other.0].concat()))?,
        };
        Ok(true)
    }

    /// The known set that equals `set`, which is kept if there is none.
    ///
    /// # Errors
    /// If the sets have more than [`MAX_UNION_RANGES`] ranges.
    pub(super) fn keep(&mut self, set: CharSet) -> Result<CharSet, String> {
        if let Some(known) = self.known.get(&set) {
            return Ok(known.clone());
        }
        self.n_ranges += set.0.len();
        if self.n_ranges > MAX_UNION_RANGES {
            return Err(format!("its sets of characters have more than {MAX_UNION_RANGES} ranges together"));
        }
        self.known.insert(set.clone());
        Ok(set)
    }

    /// Ranges that are kept.
    #[cfg(test)]
    pub(super) fn n_ranges(&self) -> usize {
        self.n_ranges
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
        assert!(!set.has_common(&set.complement()));
        assert!(set.has_common(&CharSet::of(alloc::vec![(10, 20)])));
        assert!(!CharSet::default().has_common(&CharSet::any()));
        let (mut unions, mut work) = (Unions::default(), Work(1000));
        let mut sum = set.clone();
        assert_eq!(unions.add(&mut sum, &CharSet::of(alloc::vec![(2, 3), (30, 30)]), &mut work), Ok(false));
        assert_eq!(unions.add(&mut sum, &set.complement(), &mut work), Ok(true));
        assert_eq!((&sum, unions.n_ranges()), (&CharSet::any(), 1));
        // an equal union is the same one
        let mut again = set.complement();
        assert_eq!(unions.add(&mut again, &set, &mut work), Ok(true));
        assert!(Rc::ptr_eq(&again.0, &sum.0) && unions.n_ranges() == 1);
        // a set that has all of the other is shared
        let mut small = CharSet::one('x');
        assert_eq!(unions.add(&mut small, &sum, &mut work), Ok(true));
        assert!(Rc::ptr_eq(&small.0, &sum.0) && unions.n_ranges() == 1);
    }
}
