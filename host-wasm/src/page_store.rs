//! KV pages in a file, so that a conversation goes on after a reload without computing its prompt again.
//!
//! A cache: it may be lost, is never trusted (the engine checks each page), and a failure only turns it off. One file for each
//! model and KV type, of slots of equal size:
//!
//! | bytes | content |
//! |---|---|
//! | 32 | key of the page; zeros if the slot is empty |
//! | 8 | turn in which it was used last, f64 little-endian |
//! | `page_bytes` | the page, as the engine exports it, with a checksum |

use std::collections::BTreeMap;

use starling::kv::PageKey;

const KEY_BYTES: usize = 32;
const HEADER_BYTES: usize = KEY_BYTES + 8;
/// Offset of the position in an exported page: u64 little-endian.
const POSITION_OFFSET: usize = 68;
/// The largest turn that an f64 counts to.
const MAX_TURN: f64 = 9_007_199_254_740_991.0;

/// A file that is read and written at offsets.
pub(crate) trait PageFile {
    fn len(&self) -> Result<u64, FileError>;
    fn truncate(&self, len: u64) -> Result<(), FileError>;
    /// Fills `into` as far as the file has bytes there; returns their number.
    fn read(&self, at: u64, into: &mut [u8]) -> Result<usize, FileError>;
    /// Returns the number of bytes written.
    fn write(&self, at: u64, bytes: &[u8]) -> Result<usize, FileError>;
}

/// Why a file cannot be read or written.
#[derive(Debug, PartialEq)]
pub(crate) enum FileError {
    /// No room: the quota of the origin.
    Full,
    /// A fault of the storage.
    Fault,
}

/// What came of a page that was read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Taken {
    Imported,
    /// Damaged, or of another model.
    Refused,
    /// The engine has no room for it.
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Slot {
    key: PageKey,
    turn: u64,
    /// Of the page in its conversation.
    position: u64,
}

/// The pages of one model.
#[derive(Debug)]
pub(crate) struct PageStore<F> {
    file: F,
    page_bytes: usize,
    max_slots: usize,
    /// By index in the file; `None` where empty.
    slots: Vec<Option<Slot>>,
    by_key: BTreeMap<PageKey, usize>,
    turn: u64,
    refused: usize,
}

impl<F: PageFile> PageStore<F> {
    /// Bytes of a slot for pages of `page_bytes` bytes.
    pub(crate) fn slot_bytes(page_bytes: usize) -> u64 {
        (HEADER_BYTES + page_bytes) as u64
    }

    /// The pages of a file; it is cut to whole slots, of `max_bytes` together.
    pub(crate) fn new(file: F, page_bytes: usize, max_bytes: u64) -> Result<PageStore<F>, FileError> {
        let slot_bytes = Self::slot_bytes(page_bytes);
        let max_slots = (max_bytes / slot_bytes) as usize;
        let (slots, by_key) = (Vec::new(), BTreeMap::new());
        let mut store = PageStore { file, page_bytes, max_slots, slots, by_key, turn: 0, refused: 0 };
        let len = store.file.len()?;
        let n_slots = (len / slot_bytes).min(max_slots as u64);
        if len != n_slots * slot_bytes {
            store.file.truncate(n_slots * slot_bytes)?;
        }
        for i in 0..n_slots as usize {
            let slot = store.read_slot(i)?.filter(|slot| !store.by_key.contains_key(&slot.key));
            store.slots.push(slot);
            if let Some(slot) = slot {
                store.by_key.insert(slot.key, i);
                store.turn = store.turn.max(slot.turn + 1);
            }
        }
        Ok(store)
    }

    /// What a slot of the file holds; `None` if it is empty or damaged.
    fn read_slot(&self, i: usize) -> Result<Option<Slot>, FileError> {
        let mut head = [0; HEADER_BYTES + POSITION_OFFSET + 8];
        let is_whole = self.file.read(self.offset(i), &mut head)? == head.len();
        let (mut key, mut turn) = ([0; KEY_BYTES], [0; 8]);
        key.copy_from_slice(&head[..KEY_BYTES]);
        turn.copy_from_slice(&head[KEY_BYTES..HEADER_BYTES]);
        let turn = f64::from_le_bytes(turn);
        let is_valid = is_whole && key != [0; KEY_BYTES] && turn.fract() == 0.0 && (0.0..=MAX_TURN).contains(&turn);
        let position = position_of(&head[HEADER_BYTES..]);
        Ok(is_valid.then_some(Slot { key: PageKey(key), turn: turn as u64, position }))
    }

    fn offset(&self, i: usize) -> u64 {
        i as u64 * Self::slot_bytes(self.page_bytes)
    }

    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.offset(self.slots.len())
    }

    /// Pages that the engine refused.
    pub(crate) fn refused(&self) -> usize {
        self.refused
    }

    /// Number of leading keys whose slots are there.
    fn n_known(&self, keys: &[PageKey]) -> usize {
        keys.iter().take_while(|key| self.by_key.contains_key(key)).count()
    }

    /// Keys of leading pages, and of the snapshot after the last of them, for a model that continues only from a snapshot.
    /// `snapshot_keys` returns the keys of the snapshot after a page. Empty if there is no whole snapshot.
    pub(crate) fn resumable(&self, keys: &[PageKey], snapshot_keys: impl Fn(PageKey) -> Vec<PageKey>) -> Vec<PageKey> {
        for pages in (1..=self.n_known(keys)).rev().map(|n| &keys[..n]) {
            let snapshot = snapshot_keys(pages[pages.len() - 1]);
            if self.n_known(&snapshot) == snapshot.len() {
                return [pages, &snapshot].concat();
            }
        }
        Vec::new()
    }

    /// Reads pages by their keys, in order, until one is missing. `take` imports a page; one that is refused is removed.
    pub(crate) fn restore(&mut self, keys: &[PageKey], mut take: impl FnMut(&[u8]) -> Taken) -> Result<(), FileError> {
        self.turn += 1;
        let mut page = vec![0; self.page_bytes];
        for key in keys {
            let Some(&i) = self.by_key.get(key) else { return Ok(()) };
            let is_read = self.file.read(self.offset(i) + HEADER_BYTES as u64, &mut page)? == page.len();
            match if is_read { take(&page) } else { Taken::Refused } {
                Taken::Imported => self.touch(i)?,
                Taken::Full => return Ok(()),
                Taken::Refused => {
                    self.refused += 1;
                    return self.empty(i);
                }
            }
        }
        Ok(())
    }

    /// Stores a page, in place of the one that was used least recently if there is no room.
    pub(crate) fn put(&mut self, key: PageKey, page: &[u8]) -> Result<(), FileError> {
        if page.len() != self.page_bytes {
            return Ok(());
        }
        if let Some(&i) = self.by_key.get(&key) {
            return self.touch(i);
        }
        let i = self.room();
        let slot = [&key.0[..], &(self.turn as f64).to_le_bytes(), page].concat();
        match self.file.write(self.offset(i), &slot) {
            Ok(n) if n == slot.len() => {}
            // the quota of the origin ends here
            Ok(_) | Err(FileError::Full) if i == self.slots.len() => {
                self.max_slots = i;
                return Ok(());
            }
            Ok(_) | Err(_) => return Err(FileError::Fault),
        }
        let slot = Slot { key, turn: self.turn, position: position_of(page) };
        if i == self.slots.len() {
            self.slots.push(None);
        }
        if let Some(before) = self.slots[i].replace(slot) {
            self.by_key.remove(&before.key);
        }
        self.by_key.insert(key, i);
        Ok(())
    }

    /// A slot for a new page. Of pages used in the same turn the last of a conversation goes first: those before it stay usable.
    fn room(&self) -> usize {
        let n_slots = self.slots.len();
        let free = self.slots.iter().position(Option::is_none);
        if let Some(i) = free.or_else(|| (n_slots < self.max_slots).then_some(n_slots)) {
            return i;
        }
        let age = |slot: &Option<Slot>| slot.map(|slot| (slot.turn, u64::MAX - slot.position));
        (0..n_slots).min_by_key(|&i| age(&self.slots[i])).unwrap_or_default()
    }

    fn touch(&mut self, i: usize) -> Result<(), FileError> {
        let at = self.offset(i) + KEY_BYTES as u64;
        match &mut self.slots[i] {
            Some(slot) if slot.turn != self.turn => slot.turn = self.turn,
            _ => return Ok(()),
        }
        self.file.write(at, &(self.turn as f64).to_le_bytes()).map(|_| ())
    }

    fn empty(&mut self, i: usize) -> Result<(), FileError> {
        if let Some(slot) = self.slots[i].take() {
            self.by_key.remove(&slot.key);
        }
        self.file.write(self.offset(i), &[0; KEY_BYTES]).map(|_| ())
    }

    /// Removes all pages.
    pub(crate) fn clear(&mut self) -> Result<(), FileError> {
        self.slots.clear();
        self.by_key.clear();
        self.file.truncate(0)
    }
}

/// The position of an exported page in its conversation.
fn position_of(page: &[u8]) -> u64 {
    let bytes = page.get(POSITION_OFFSET..POSITION_OFFSET + 8).and_then(|bytes| bytes.try_into().ok());
    bytes.map(u64::from_le_bytes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const PAGE_BYTES: usize = POSITION_OFFSET + 8 + 4;
    const SLOT: u64 = (HEADER_BYTES + PAGE_BYTES) as u64;

    /// A file in memory, with a quota.
    #[derive(Debug, Clone)]
    struct Memory {
        bytes: RefCell<Vec<u8>>,
        quota: usize,
    }

    impl PageFile for &Memory {
        fn len(&self) -> Result<u64, FileError> {
            Ok(self.bytes.borrow().len() as u64)
        }
        fn truncate(&self, len: u64) -> Result<(), FileError> {
            self.bytes.borrow_mut().resize(len as usize, 0);
            Ok(())
        }
        fn read(&self, at: u64, into: &mut [u8]) -> Result<usize, FileError> {
            let bytes = self.bytes.borrow();
            let from = bytes.get(at as usize..).unwrap_or_default();
            let n = from.len().min(into.len());
            into[..n].copy_from_slice(&from[..n]);
            Ok(n)
        }
        fn write(&self, at: u64, from: &[u8]) -> Result<usize, FileError> {
            let (at, mut bytes) = (at as usize, self.bytes.borrow_mut());
            if at + from.len() > self.quota {
                return Err(FileError::Full);
            }
            let len = bytes.len().max(at + from.len());
            bytes.resize(len, 0);
            bytes[at..at + from.len()].copy_from_slice(from);
            Ok(from.len())
        }
    }

    fn memory(quota: usize) -> Memory {
        Memory { bytes: RefCell::default(), quota }
    }

    fn key(n: u8) -> PageKey {
        PageKey([n; KEY_BYTES])
    }

    /// The page of a key, at a position.
    fn page(n: u8, position: u64) -> Vec<u8> {
        let mut page = vec![n; PAGE_BYTES];
        page[POSITION_OFFSET..POSITION_OFFSET + 8].copy_from_slice(&position.to_le_bytes());
        page
    }

    fn open(file: &Memory, n_slots: u64) -> PageStore<&Memory> {
        PageStore::new(file, PAGE_BYTES, n_slots * SLOT).unwrap()
    }

    /// First bytes of the pages that are read, and what remains known.
    fn restored(store: &mut PageStore<&Memory>, keys: &[u8], taken: Taken) -> Vec<u8> {
        let keys: Vec<_> = keys.iter().map(|&n| key(n)).collect();
        let mut read = Vec::new();
        store
            .restore(&keys, |page| {
                read.push(page[0]);
                taken
            })
            .unwrap();
        read
    }

    #[test]
    fn pages_are_read_after_a_restart() {
        let file = memory(usize::MAX);
        let mut store = open(&file, 8);
        (1..=4).for_each(|n| store.put(key(n), &page(n, n.into())).unwrap());
        store.put(key(5), b"of another length").unwrap();
        assert_eq!(store.bytes(), 4 * SLOT);
        let mut again = open(&file, 8);
        assert_eq!(again.slots, store.slots);
        assert_eq!(restored(&mut again, &[1, 2, 3, 5, 4], Taken::Imported), [1, 2, 3]);
        // the turn of what was used is written
        let turns = |store: &PageStore<&Memory>| store.slots.iter().map(|slot| slot.unwrap().turn).collect::<Vec<_>>();
        assert_eq!(turns(&open(&file, 8)), [2, 2, 2, 0]);
        again.clear().unwrap();
        assert_eq!((again.bytes(), open(&file, 8).bytes()), (0, 0));
    }

    #[test]
    fn damaged_slots_are_empty_and_used_again() {
        let file = memory(usize::MAX);
        let mut store = open(&file, 8);
        (1..=5).for_each(|n| store.put(key(n), &page(n, 0)).unwrap());
        let slot = SLOT as usize;
        {
            let mut bytes = file.bytes.borrow_mut();
            // a turn that is no whole number, one below 0, a key twice, and the end cut off
            bytes[KEY_BYTES..HEADER_BYTES].copy_from_slice(&0.5f64.to_le_bytes());
            bytes[slot + KEY_BYTES..slot + HEADER_BYTES].copy_from_slice(&(-1f64).to_le_bytes());
            bytes.copy_within(2 * slot..2 * slot + KEY_BYTES, 3 * slot);
            bytes.truncate(5 * slot - 1);
        }
        let mut store = open(&file, 8);
        let keys: Vec<_> = store.slots.iter().map(|slot| slot.map(|slot| slot.key)).collect();
        assert_eq!(keys, [None, None, Some(key(3)), None]);
        store.put(key(7), &page(7, 0)).unwrap();
        assert_eq!((store.by_key[&key(7)], store.bytes()), (0, 4 * SLOT));
    }

    #[test]
    fn a_refused_page_is_removed_and_a_full_engine_ends_the_reading() {
        let file = memory(usize::MAX);
        let mut store = open(&file, 8);
        (1..=3).for_each(|n| store.put(key(n), &page(n, 0)).unwrap());
        assert_eq!(restored(&mut store, &[1, 2], Taken::Full), [1]);
        assert_eq!((store.refused(), store.by_key.len()), (0, 3));
        assert_eq!(restored(&mut store, &[2, 3], Taken::Refused), [2]);
        assert_eq!((store.refused(), store.by_key.len()), (1, 2));
        assert_eq!(open(&file, 8).by_key.len(), 2);
    }

    #[test]
    fn the_least_recently_used_page_goes_first_and_of_a_turn_the_last() {
        let file = memory(usize::MAX);
        let mut store = open(&file, 4);
        (1..=4).for_each(|n| store.put(key(n), &page(n, n.into())).unwrap());
        restored(&mut store, &[1, 4], Taken::Imported);
        for (n, goes) in [(5, 3), (6, 2), (7, 5)] {
            store.put(key(n), &page(n, 0)).unwrap();
            assert!(!store.by_key.contains_key(&key(goes)), "{goes} stays when {n} comes");
            restored(&mut store, &[1, 4, 6], Taken::Imported);
        }
        assert_eq!(store.bytes(), 4 * SLOT);
        assert_eq!(open(&file, 2).bytes(), 2 * SLOT);
    }

    #[test]
    fn the_quota_of_the_origin_is_the_limit_and_other_faults_are_reported() {
        let file = memory(2 * SLOT as usize + 10);
        let mut store = open(&file, 8);
        (1..=4).for_each(|n| store.put(key(n), &page(n, 0)).unwrap());
        assert_eq!((store.bytes(), store.max_slots), (2 * SLOT, 2));
        let short = Memory { quota: 10, ..file.clone() };
        assert_eq!(open(&short, 2).put(key(9), &page(9, 0)), Err(FileError::Fault));
    }

    #[test]
    fn a_recurrent_model_continues_from_the_last_whole_snapshot() {
        let file = memory(usize::MAX);
        let mut store = open(&file, 16);
        for n in [1, 2, 3, 11, 12, 21] {
            store.put(key(n), &page(n, 0)).unwrap();
        }
        // two records after each page: those after page 2 are not whole
        let records = |page: PageKey| (1..=2).map(|i| key(10 * page.0[0] + i)).collect::<Vec<_>>();
        let keys = |n: &[u8]| n.iter().map(|&n| key(n)).collect::<Vec<_>>();
        assert_eq!(store.resumable(&keys(&[1, 2, 3, 4]), records), keys(&[1, 11, 12]));
        store.put(key(22), &page(22, 0)).unwrap();
        assert_eq!(store.resumable(&keys(&[1, 2, 3, 4]), records), keys(&[1, 2, 21, 22]));
        assert_eq!(store.resumable(&keys(&[4]), records), []);
    }
}
