//! Cache of the tokens of short words within one text.

use alloc::vec;
use alloc::vec::Vec;

/// Maximal length of a cached word in bytes: word and length fill the key.
const MAX_LEN: usize = 15;
const MAX_IDS: usize = 3;
const MAX_ENTRIES: usize = 1 << 12;

/// A direct-mapped cache. Keys contain the whole word, so a hit is exact.
#[derive(Debug)]
pub(super) struct WordCache {
    entries: Vec<Entry>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    /// The word, zero-padded, with its length in the last byte; 0 is an empty entry.
    key: u128,
    ids: [u32; MAX_IDS],
    n_ids: u32,
}

/// A word as an integer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Key(u128);

impl WordCache {
    /// A cache sized for a text of `len_bytes` bytes.
    pub(super) fn for_text(len_bytes: usize) -> WordCache {
        let n = (len_bytes / 16).clamp(1, MAX_ENTRIES).next_power_of_two();
        WordCache { entries: vec![Entry { key: 0, ids: [0; MAX_IDS], n_ids: 0 }; n] }
    }

    /// The key of `text[start..end]`; `None` if the word is too long.
    #[inline(always)]
    pub(super) fn key(text: &[u8], start: usize, end: usize) -> Option<Key> {
        let len = end - start;
        if len > MAX_LEN {
            return None;
        }
        let word = match text[start..].first_chunk::<16>() {
            Some(bytes) => u128::from_le_bytes(*bytes) & ((1 << (8 * len)) - 1),
            None => {
                let mut bytes = [0; 16];
                bytes[..len].copy_from_slice(&text[start..end]);
                u128::from_le_bytes(bytes)
            }
        };
        Some(Key(word | (len as u128) << 120))
    }

    #[inline(always)]
    fn slot(&self, key: Key) -> usize {
        let (low, high) = (key.0 as u64, (key.0 >> 64) as u64);
        let hash = (low ^ high.rotate_left(29)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash >> 40) as usize & (self.entries.len() - 1)
    }

    /// Appends the tokens of a cached word. Returns false on a miss.
    #[inline(always)]
    pub(super) fn append(&self, key: Key, ids: &mut Vec<u32>) -> bool {
        let entry = &self.entries[self.slot(key)];
        if entry.key != key.0 {
            return false;
        }
        if entry.n_ids == 1 {
            ids.push(entry.ids[0]);
        } else {
            ids.extend_from_slice(&entry.ids[..entry.n_ids as usize]);
        }
        true
    }

    /// Caches the tokens of a word, unless there are too many.
    pub(super) fn keep(&mut self, key: Key, ids: &[u32]) {
        if ids.len() <= MAX_IDS {
            let slot = self.slot(key);
            let mut entry = Entry { key: key.0, ids: [0; MAX_IDS], n_ids: ids.len() as u32 };
            entry.ids[..ids.len()].copy_from_slice(ids);
            self.entries[slot] = entry;
        }
    }
}
