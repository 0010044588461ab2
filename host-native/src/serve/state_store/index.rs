//! What rows there are, in memory.

use std::collections::{BTreeMap, BTreeSet};
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
    /// Number of rows of each kind, and bytes of their values.
    sizes: BTreeMap<Kind, (usize, u64)>,
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
