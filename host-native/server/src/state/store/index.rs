//! What rows there are, in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use super::{Kind, RowId, RowInfo};

/// All rows, without their values.
#[derive(Debug, Default)]
pub struct Index {
    rows: BTreeMap<RowId, RowInfo>,
    /// Rows by the time of their expiry.
    expiries: BTreeSet<(u64, RowId)>,
    /// Answers of each tenant.
    answers: BTreeMap<Arc<str>, Answers>,
    /// What answers are found by, sorted.
    labels: BTreeMap<RowId, Box<[u64]>>,
    /// Number of rows of each kind, and bytes of their values.
    sizes: BTreeMap<Kind, (usize, u64)>,
}

/// Which answers are meant.
#[derive(Debug, Clone, Copy)]
pub struct PageOf<'a> {
    /// Only what comes after this ID.
    pub after: Option<&'a str>,
    /// Whether the newest come first.
    pub is_descending: bool,
    /// Only those with all of these labels.
    pub labels: &'a [u64],
    /// Answers, at most.
    pub limit: usize,
}

#[derive(Debug, Default)]
struct Answers {
    n_bytes: u64,
    /// By the time of their creation.
    by_age: BTreeSet<(u64, RowId)>,
}

impl Index {
    pub fn get(&self, id: &RowId) -> Option<RowInfo> {
        self.rows.get(id).copied()
    }

    pub fn insert(&mut self, id: RowId, info: RowInfo) {
        self.remove(&id);
        self.expiries.insert((info.expires, id.clone()));
        if id.kind.is_answer() {
            let answers = self.answers.entry(Arc::clone(&id.tenant)).or_default();
            answers.n_bytes += info.n_bytes as u64;
            answers.by_age.insert((info.created, id.clone()));
        }
        let size = self.sizes.entry(id.kind).or_default();
        *size = (size.0 + 1, size.1 + info.n_bytes as u64);
        self.rows.insert(id, info);
    }

    pub fn remove(&mut self, id: &RowId) {
        let Some(info) = self.rows.remove(id) else { return };
        self.labels.remove(id);
        let size = self.sizes.entry(id.kind).or_default();
        *size = (size.0 - 1, size.1 - info.n_bytes as u64);
        self.expiries.remove(&(info.expires, id.clone()));
        if let Some(answers) = self.answers.get_mut(&id.tenant).filter(|_| id.kind.is_answer()) {
            answers.n_bytes -= info.n_bytes as u64;
            answers.by_age.remove(&(info.created, id.clone()));
            if answers.by_age.is_empty() {
                self.answers.remove(&id.tenant);
            }
        }
    }

    /// Sets the labels of a row.
    pub fn label(&mut self, id: RowId, mut labels: Vec<u64>) {
        labels.sort_unstable();
        if !labels.is_empty() && self.rows.contains_key(&id) {
            self.labels.insert(id, labels.into());
        }
    }

    /// A page of a tenant's answers that have not expired, in the order of their creation. `None` if that of
    /// [`PageOf::after`] does not exist.
    pub fn page(&self, kind: Kind, tenant: &str, page: &PageOf<'_>, now: u64) -> Option<Vec<RowId>> {
        let row = |id: &str| RowId { kind, tenant: tenant.into(), id: id.into() };
        let after = match page.after.map(row) {
            None => None,
            Some(id) => Some((self.rows.get(&id).filter(|info| info.expires > now)?.created, id)),
        };
        let Some(answers) = self.answers.get(tenant) else { return Some(Vec::new()) };
        let (from, to) = match (after, page.is_descending) {
            (None, _) => (Bound::Unbounded, Bound::Unbounded),
            (Some(after), false) => (Bound::Excluded(after), Bound::Unbounded),
            (Some(after), true) => (Bound::Unbounded, Bound::Excluded(after)),
        };
        let rows = answers.by_age.range((from, to)).map(|(_, id)| id);
        let is_meant = |id: &&RowId| {
            let is_alive = self.rows.get(*id).is_some_and(|info| info.expires > now);
            let labels = self.labels.get(*id).map_or(&[][..], |labels| labels);
            id.kind == kind && is_alive && page.labels.iter().all(|label| labels.binary_search(label).is_ok())
        };
        Some(match page.is_descending {
            true => rows.rev().filter(is_meant).take(page.limit).cloned().collect(),
            false => rows.filter(is_meant).take(page.limit).cloned().collect(),
        })
    }

    /// Rows that have expired.
    pub fn expired(&self, now: u64) -> Vec<RowId> {
        self.expiries.iter().take_while(|(expires, _)| *expires <= now).map(|(_, id)| id.clone()).collect()
    }

    /// The oldest answers of tenants that have more than `limit` bytes.
    pub fn over_quota(&self, limit: u64) -> Vec<RowId> {
        let mut over = Vec::new();
        for answers in self.answers.values() {
            let mut n_bytes = answers.n_bytes;
            for (_, id) in &answers.by_age {
                if n_bytes <= limit {
                    break;
                }
                n_bytes -= self.rows.get(id).map_or(0, |info| info.n_bytes as u64);
                over.push(id.clone());
            }
        }
        over
    }

    /// Rows of a kind, of a tenant or of all.
    pub fn list(&self, kind: Kind, tenant: Option<&str>) -> Vec<(RowId, RowInfo)> {
        let first = RowId { kind, tenant: tenant.unwrap_or_default().into(), id: "".into() };
        let is_meant = |id: &RowId| id.kind == kind && tenant.is_none_or(|tenant| *id.tenant == *tenant);
        self.rows.range(first..).take_while(|(id, _)| is_meant(id)).map(|(id, info)| (id.clone(), *info)).collect()
    }

    /// Number of rows of a kind, and the bytes of their values.
    pub fn size(&self, kind: Kind) -> (usize, u64) {
        self.sizes.get(&kind).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_oldest_answers_go_and_sums_are_right(
            changes in prop::collection::vec((0usize..3, 0u8..3, 0u8..6, prop::option::of((0u64..50, 0u64..50, 0usize..20))), 0..60),
            limit in 0u64..40,
        ) {
            let (mut index, mut rows) = (Index::default(), BTreeMap::new());
            for (kind, tenant, id, info) in changes {
                let id = RowId { kind: Kind::ALL[kind], tenant: tenant.to_string().into(), id: id.to_string().into() };
                match info {
                    Some((created, expires, n_bytes)) => {
                        let info = RowInfo { created, expires, n_bytes };
                        index.insert(id.clone(), info);
                        rows.insert(id, info);
                    }
                    None => {
                        index.remove(&id);
                        rows.remove(&id);
                    }
                }
            }
            let mut expired: Vec<RowId> = rows.iter().filter(|(_, info)| info.expires <= 25).map(|(id, _)| id.clone()).collect();
            let mut found = index.expired(25);
            expired.sort();
            found.sort();
            prop_assert_eq!(found, expired);
            for kind in Kind::ALL {
                let of_kind: Vec<_> = rows.iter().filter(|(id, _)| id.kind == kind).map(|(id, info)| (id.clone(), *info)).collect();
                prop_assert_eq!(index.size(kind).0, of_kind.len());
                prop_assert_eq!(index.list(kind, None), of_kind.clone());
                let of_one: Vec<_> = of_kind.into_iter().filter(|(id, _)| &*id.tenant == "1").collect();
                prop_assert_eq!(index.list(kind, Some("1")), of_one);
            }
            for (is_descending, n, label) in [(false, 3, None), (true, 2, Some(1)), (false, 1, Some(0)), (true, 4, None)] {
                // labels of odd and even times of creation
                rows.iter().for_each(|(id, info)| index.label(id.clone(), vec![info.created % 2, 7]));
                let mut all: Vec<(u64, RowId)> = rows.iter().filter(|(id, info)| {
                    id.kind == Kind::Completion && &*id.tenant == "1" && info.expires > 25
                        && label.is_none_or(|label| info.created % 2 == label)
                }).map(|(id, info)| (info.created, id.clone())).collect();
                all.sort();
                if is_descending {
                    all.reverse();
                }
                let (mut found, mut after) = (Vec::new(), None);
                let labels: Vec<u64> = label.into_iter().collect();
                loop {
                    let page = PageOf { after: after.as_deref(), is_descending, labels: &labels, limit: n };
                    let page = index.page(Kind::Completion, "1", &page, 25).expect("the last row of a page");
                    prop_assert!(page.len() <= n);
                    let Some(last) = page.last() else { break };
                    after = Some(last.id.to_string());
                    found.extend(page);
                }
                prop_assert_eq!(found, all.into_iter().map(|(_, id)| id).collect::<Vec<_>>());
            }
            for id in index.over_quota(limit) {
                prop_assert!(id.kind.is_answer());
                index.remove(&id);
            }
            for tenant in ["0", "1", "2"] {
                let left: Vec<_> = [Kind::Completion, Kind::Response].into_iter().flat_map(|kind| index.list(kind, Some(tenant))).collect();
                prop_assert!(left.iter().map(|(_, info)| info.n_bytes as u64).sum::<u64>() <= limit);
                // nothing older than what has gone is left, but for equal times
                let gone = rows.iter().filter(|(id, _)| &*id.tenant == tenant && id.kind.is_answer() && index.get(id).is_none());
                let newest_gone = gone.map(|(_, info)| info.created).max();
                prop_assert!(left.iter().all(|(_, info)| newest_gone.is_none_or(|gone| info.created >= gone)));
            }
        }
    }
}
