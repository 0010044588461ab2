//! Shares of tenants in a table of limited size. A tenant that holds no more than its share, the limit divided by the number of
//! tenants, loses nothing to others: entries of the tenant that holds most are evicted.

use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The entry to evict for a newcomer: among those of tenants that hold at least as much, and of its own tenant, one of the
/// tenant that holds most; among equals the newcomer's own; then the oldest. `candidates` are the entries that may go, with tenant
/// and age; `held` is what each tenant holds, with that of the newcomer.
pub fn victim<'a, K, A: Ord>(
    candidates: impl Iterator<Item = (K, &'a str, A)>,
    held: &BTreeMap<&str, usize>,
    newcomer: &str,
) -> Option<K> {
    let of = |tenant: &str| held.get(tenant).copied().unwrap_or(0);
    let own = of(newcomer);
    let may_go = candidates.filter(|(_, tenant, _)| *tenant == newcomer || of(tenant) >= own);
    let ranked = may_go.map(|(key, tenant, age)| (key, (Reverse(of(tenant)), tenant != newcomer, age)));
    ranked.min_by(|a, b| a.1.cmp(&b.1)).map(|(key, _)| key)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_oldest_entry_of_the_tenant_that_holds_most_gives_way() {
        let entries = [(1, "a", 5), (2, "b", 1), (3, "b", 0), (4, "c", 0)];
        let victim = |held: [usize; 3], newcomer| {
            let held = super::BTreeMap::from([("a", held[0]), ("b", held[1]), ("c", held[2])]);
            super::victim(entries.into_iter(), &held, newcomer)
        };
        // who holds most, whoever comes
        assert_eq!(victim([1, 3, 1], "b"), Some(3));
        assert_eq!(victim([2, 3, 1], "a"), Some(3));
        // among equals one's own
        assert_eq!(victim([2, 2, 1], "a"), Some(1));
        assert_eq!(victim([2, 2, 1], "b"), Some(3));
        // never one of a tenant that holds less than the newcomer would
        assert_eq!(victim([0, 0, 9], "d"), Some(4));
        assert_eq!(super::victim([(1, "a", 0)].into_iter(), &super::BTreeMap::from([("a", 1), ("b", 2)]), "b"), None);
    }
}
