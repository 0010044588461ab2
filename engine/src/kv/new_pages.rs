//! Pages that have entered the prefix tree and were not yet handed to the host, which may write them to disk.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::{KvArena, PAGE, PageKey};

/// A page that has entered the prefix cache. [`KvArena::export_key`] gives the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewPage {
    /// Key of the page.
    pub key: PageKey,
    /// Length of the token prefix that ends with the page.
    pub n_tokens: usize,
}

/// New pages by their order of insertion. Empty unless they are tracked.
#[derive(Default)]
pub(super) struct NewPages {
    is_tracking: bool,
    next_serial: u64,
    by_serial: BTreeMap<u64, u32>,
}

impl NewPages {
    /// Notes a page and returns its serial number.
    pub(super) fn insert(&mut self, page: u32) -> u64 {
        self.next_serial += 1;
        if self.is_tracking {
            self.by_serial.insert(self.next_serial, page);
        }
        self.next_serial
    }

    pub(super) fn remove(&mut self, serial: u64) {
        self.by_serial.remove(&serial);
    }

    /// For an arena without pages.
    pub(super) fn renewed(&self) -> NewPages {
        NewPages { is_tracking: self.is_tracking, next_serial: self.next_serial, by_serial: BTreeMap::new() }
    }
}

impl KvArena {
    /// Sets whether pages and snapshots that enter the tree are noted for [`KvArena::take_new_page`] and
    /// [`KvArena::take_new_snapshot`]; off in a new arena. Forgets those noted so far.
    pub fn track_new_pages(&mut self, is_tracking: bool) {
        self.new_pages = NewPages { is_tracking, ..self.new_pages.renewed() };
        self.states.track(is_tracking);
    }

    /// The page that entered the tree first among those not yet taken, if it is still there. Imported pages are not new.
    pub fn take_new_page(&mut self) -> Option<NewPage> {
        let (_, page) = self.new_pages.by_serial.pop_first()?;
        let node = self.pages[page as usize].node.as_ref()?;
        Some(NewPage { key: node.key, n_tokens: node.position as usize + PAGE })
    }

    /// Keys of the whole pages of `tokens`, in order.
    pub fn page_keys(&self, tokens: &[u32], salt: u64) -> Vec<PageKey> {
        let keys = tokens.chunks_exact(PAGE).scan(PageKey::root_of(&self.root, salt), |key, page| {
            *key = key.child(page);
            Some(*key)
        });
        keys.collect()
    }

    /// Number of leading keys whose pages are in the tree.
    pub fn n_cached(&self, keys: &[PageKey]) -> usize {
        keys.iter().take_while(|key| self.tree.contains_key(key)).count()
    }

    /// Digest of numerics version, model and layout: pages of another namespace cannot be imported.
    pub fn namespace(&self) -> [u8; 32] {
        self.root
    }
}
