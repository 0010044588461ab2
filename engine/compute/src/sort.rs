//! One sort for all that is not hot. The library's sorts are fast and large, and there is one of them for each type and
//! order: a tenth of a module for browsers. This one is compiled once, and does fewer comparisons.

use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Ordering;

/// The numbers below `n` in the order of `compare`; equals stay in order. Time n log n.
pub fn order(n: usize, compare: &dyn Fn(u32, u32) -> Ordering) -> Vec<u32> {
    let mut from: Vec<u32> = (0..n as u32).collect();
    let mut to = vec![0; n];
    let mut width = 1;
    while width < n {
        for (from, to) in from.chunks(2 * width).zip(to.chunks_mut(2 * width)) {
            let (mut left, mut right) = from.split_at(width.min(from.len()));
            for slot in to {
                let side = match (left, right) {
                    ([a, ..], [b, ..]) if compare(*b, *a) == Ordering::Less => &mut right,
                    ([], _) => &mut right,
                    _ => &mut left,
                };
                if let [first, rest @ ..] = *side {
                    (*slot, *side) = (*first, rest);
                }
            }
        }
        core::mem::swap(&mut from, &mut to);
        width *= 2;
    }
    from
}

/// Sorts `items`; equals stay in order.
pub fn sort_by<T>(items: &mut [T], compare: impl Fn(&T, &T) -> Ordering) {
    let mut order = order(items.len(), &|a, b| compare(&items[a as usize], &items[b as usize]));
    // each cycle of the permutation in turn
    for start in 0..items.len() {
        let mut at = start;
        loop {
            let from = core::mem::replace(&mut order[at], at as u32) as usize;
            if from == start || from == at {
                break;
            }
            items.swap(at, from);
            at = from;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sorts_as_the_library_does(mut items in prop::collection::vec((0u8..20, any::<u16>()), 0..300)) {
            let mut expected = items.clone();
            expected.sort_by_key(|item| item.0);
            sort_by(&mut items, |a, b| a.0.cmp(&b.0));
            prop_assert_eq!(items, expected);
        }
    }
}
