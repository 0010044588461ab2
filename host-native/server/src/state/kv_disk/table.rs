//! The pages on disk: size and last use. Times are nanoseconds since 1970.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::PageKey;

/// Minimum interval in which a page's modification time is set.
const TOUCH_INTERVAL: u64 = 60_000_000_000;

struct Entry {
    /// Bytes of the file.
    len: u64,
    /// Last use.
    used: u64,
    /// Modification time of the file.
    modified: u64,
    /// Number of the last scan that found the file or that it was written after.
    scan: u32,
}

/// Owner of a page. When the disk limit is reached, pages of the owner that has most are evicted.
pub type HolderOf = fn(&PageKey) -> u32;

/// The pages of a holder by their last use, and their bytes.
#[derive(Default)]
struct Held {
    by_use: BTreeSet<(u64, PageKey)>,
    bytes: u64,
}

pub(super) struct Table {
    /// By the first byte of the key, as in the directory: a scan updates one of them at a time.
    shards: Vec<HashMap<PageKey, Entry>>,
    holder_of: HolderOf,
    holders: BTreeMap<u32, Held>,
    len: usize,
    bytes: u64,
    /// The latest last use: uses have different times.
    latest: u64,
    scan: u32,
}

impl Table {
    pub(super) fn new(holder_of: HolderOf) -> Table {
        let shards = (0..256).map(|_| HashMap::new()).collect();
        Table { shards, holder_of, holders: BTreeMap::new(), len: 0, bytes: 0, latest: 0, scan: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn latest_use(&self) -> u64 {
        self.latest
    }

    pub(super) fn contains(&self, key: &PageKey) -> bool {
        self.shards[key.0[0] as usize].contains_key(key)
    }

    /// A page was written.
    pub(super) fn insert_written(&mut self, key: PageKey, len: u64, now: u64) {
        self.remove(&key);
        let used = self.next_use(now);
        self.insert(key, Entry { len, used, modified: now, scan: self.scan });
    }

    /// A scan found a page. Keeps the later of the known uses.
    pub(super) fn insert_scanned(&mut self, key: PageKey, len: u64, modified: u64, now: u64) {
        let modified = modified.min(now);
        let used = self.remove(&key).map_or(modified, |known| known.used.max(modified));
        self.latest = self.latest.max(used);
        self.insert(key, Entry { len, used, modified, scan: self.scan });
    }

    /// A page was read. Returns whether the file's modification time is to be set.
    pub(super) fn record_use(&mut self, key: PageKey, len: u64, now: u64) -> bool {
        let modified = self.remove(&key).map_or(0, |known| known.modified);
        let is_due = now.saturating_sub(modified) >= TOUCH_INTERVAL;
        let used = self.next_use(now);
        let modified = if is_due { now } else { modified };
        self.insert(key, Entry { len, used, modified, scan: self.scan });
        is_due
    }

    pub(super) fn forget(&mut self, key: &PageKey) {
        self.remove(key);
    }

    /// Removes a page that was not used after `time`.
    pub(super) fn forget_unused_since(&mut self, key: &PageKey, time: u64) {
        if self.shards[key.0[0] as usize].get(key).is_some_and(|entry| entry.used <= time) {
            self.remove(key);
        }
    }

    /// Removes the least recently used page of the holder that has most.
    pub(super) fn pop_oldest(&mut self) -> Option<PageKey> {
        let most = self.holders.values().max_by_key(|held| held.bytes)?;
        let key = most.by_use.first()?.1;
        self.remove(&key);
        Some(key)
    }

    /// Notes a use of a page that is known.
    pub(super) fn touch(&mut self, key: &PageKey) {
        if let Some(entry) = self.remove(key) {
            let used = self.next_use(entry.used);
            self.insert(*key, Entry { used, ..entry });
        }
    }

    pub(super) fn forget_if(&mut self, is_forgotten: impl Fn(&PageKey) -> bool) {
        for i in 0..self.shards.len() {
            let gone: Vec<(PageKey, Entry)> = self.shards[i].extract_if(|key, _| is_forgotten(key)).collect();
            gone.iter().for_each(|(key, entry)| self.uncount(key, entry));
        }
    }

    /// Number and bytes of some pages.
    pub(super) fn usage(&self, is_counted: impl Fn(&PageKey) -> bool) -> (u64, u64) {
        let counted = self.shards.iter().flatten().filter(|(key, _)| is_counted(key));
        counted.fold((0, 0), |(pages, bytes), (_, entry)| (pages + 1, bytes + entry.len))
    }

    pub(super) fn begin_scan(&mut self) {
        self.scan = self.scan.wrapping_add(1);
    }

    /// Removes the pages of a shard that the scan has not found.
    pub(super) fn end_shard(&mut self, shard: u8) {
        let scan = self.scan;
        let gone: Vec<_> = self.shards[shard as usize].extract_if(|_, entry| entry.scan != scan).collect();
        gone.iter().for_each(|(key, entry)| self.uncount(key, entry));
    }

    fn next_use(&mut self, now: u64) -> u64 {
        self.latest = now.max(self.latest.saturating_add(1));
        self.latest
    }

    fn insert(&mut self, key: PageKey, entry: Entry) {
        let held = self.holders.entry((self.holder_of)(&key)).or_default();
        held.by_use.insert((entry.used, key));
        held.bytes += entry.len;
        self.len += 1;
        self.bytes += entry.len;
        self.shards[key.0[0] as usize].insert(key, entry);
    }

    fn remove(&mut self, key: &PageKey) -> Option<Entry> {
        let entry = self.shards[key.0[0] as usize].remove(key)?;
        self.uncount(key, &entry);
        Some(entry)
    }

    /// After a page has left its shard.
    fn uncount(&mut self, key: &PageKey, entry: &Entry) {
        self.len -= 1;
        self.bytes -= entry.len;
        let holder = (self.holder_of)(key);
        let Some(held) = self.holders.get_mut(&holder) else { return };
        held.by_use.remove(&(entry.used, *key));
        held.bytes -= entry.len;
        if held.by_use.is_empty() {
            self.holders.remove(&holder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(holder: u8, n: u8) -> PageKey {
        let mut key = [0; 32];
        (key[0], key[31]) = (n, holder);
        PageKey(key)
    }

    #[test]
    fn the_holder_that_has_most_gives_way_with_its_oldest_page() {
        let mut table = Table::new(|key| u32::from(key.0[31]));
        table.insert_written(key(1, 0), 10, 1);
        for n in 0..5 {
            table.insert_written(key(2, n), 10, 2 + u64::from(n));
        }
        table.touch(&key(2, 0));
        let gone: Vec<_> = (0..4).filter_map(|_| table.pop_oldest()).collect();
        assert_eq!(gone, [key(2, 1), key(2, 2), key(2, 3), key(2, 4)]);
        assert_eq!((table.len(), table.bytes(), table.contains(&key(1, 0))), (2, 20, true));
        table.forget_if(|key| key.0[31] == 2);
        assert_eq!((table.pop_oldest(), table.pop_oldest()), (Some(key(1, 0)), None));
        assert_eq!((table.len(), table.bytes(), table.holders.len()), (0, 0, 0));
    }
}
