//! Paged KV cache with a prefix tree: full pages can be shared by sequences with the same prefix.
//!
//! A page holds keys and values of [`PAGE`] consecutive tokens in all layers. Its contents follow from the model and
//! all tokens up to its last one, so a full page is identified by a [`PageKey`]: a hash of its parent's key and its own
//! tokens. A sequence that begins with the same tokens reuses the pages and gets the same bits as if it had computed
//! them.
//!
//! A page is referenced by sequences (counted), or in the tree, or both, or free. Shared pages are never written:
//! [`KvArena::extend`] copies them first. A page in the tree is *busy* if a sequence references it or one of its
//! descendants, else *idle*. When no page is free, idle leaves are evicted, the least recently used first, by a
//! counter.

mod key;
mod new_pages;
mod page;
mod snapshots;
mod state_records;
#[cfg(test)]
mod tests;

use alloc::collections::{BTreeMap, BTreeSet, TryReserveError};
use alloc::vec::Vec;

use thiserror::Error;

pub use key::PageKey;
pub use new_pages::NewPage;
pub use page::PageError;
pub use snapshots::StateStats;

use crate::error::RequestError;
use crate::kernels::attention::KvMemory;
pub use crate::kernels::attention::{KvHeads, KvLayout, PAGE};
use new_pages::NewPages;
use snapshots::{Snapshot, StateSlots};

/// The pages of a sequence. Pass it to [`KvArena::release`] at the end: dropping it leaks the pages.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "release it"]
pub struct SeqPages {
    /// Page number of each [`PAGE`] positions, in order.
    pub pages: Vec<u32>,
    /// Leading tokens whose keys and values were found in the tree.
    pub n_cached: usize,
    /// Leading tokens whose pages were found in the tree; with recurrent states more than `n_cached` if there is no
    /// snapshot at their end.
    pub n_matched: usize,
    /// Slot of the recurrent state.
    pub state: Option<u32>,
    /// Slot of the state before the rows of a draft.
    saved: Option<u32>,
    /// Positions reserved.
    n_tokens: usize,
}

impl SeqPages {
    /// Number of positions reserved by [`KvArena::acquire`] and [`KvArena::extend`].
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }
}

/// The layout given differs from the layout of the arena.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("KV layout: found {found:?}, expected the arena's {expected:?}")]
pub struct LayoutMismatch {
    /// The layout given.
    pub found: KvLayout,
    /// The layout of the arena.
    pub expected: KvLayout,
}

/// Memory and counters of an arena.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KvStats {
    /// Capacity in pages.
    pub n_pages: usize,
    /// Bytes of one page.
    pub page_bytes: usize,
    /// Bytes of all pages.
    pub reserved_bytes: usize,
    /// Bytes of pages used at least once: the memory that the system has committed.
    pub committed_bytes: usize,
    /// Bytes of pages that sequences reference.
    pub in_use_bytes: usize,
    /// Bytes of pages in the tree that no sequence references.
    pub cached_bytes: usize,
    /// Bytes of free pages.
    pub free_bytes: usize,
    /// Bytes of unused slots in the last pages of sequences.
    pub fragmented_bytes: usize,
    /// Prompt pages found in the tree.
    pub hits: u64,
    /// Prompt pages not found in the tree.
    pub misses: u64,
    /// Pages evicted from the tree.
    pub evictions: u64,
    /// Recurrent states; all 0 for a model without recurrent layers.
    pub states: StateStats,
}

/// State of a page.
#[derive(Clone, Default)]
struct Page {
    /// Number of sequences that reference the page.
    refs: u32,
    /// Its node, if the page is in the tree.
    node: Option<Node>,
}

/// Node of the prefix tree.
#[derive(Clone)]
struct Node {
    key: PageKey,
    /// Page of the parent; `None` for the first page of a prefix.
    parent: Option<u32>,
    tokens: [u32; PAGE],
    /// Position of the page's first token.
    position: u32,
    salt: u64,
    /// Number of child nodes.
    children: u32,
    /// Number of busy child nodes.
    busy_children: u32,
    /// Value of the arena's counter when the last reference was released.
    last_used: u64,
    /// Order of insertion.
    serial: u64,
    /// Recurrent state after the page's last token.
    snapshot: Option<Snapshot>,
}

/// All KV pages of an engine, and the prefix tree over them.
pub struct KvArena {
    layout: KvLayout,
    root: [u8; 32],
    fingerprint: [u8; 32],
    memory: KvMemory,
    pages: Vec<Page>,
    /// Pages `0..n_committed` were used at least once.
    n_committed: usize,
    /// Free pages among those.
    free: Vec<u32>,
    tree: BTreeMap<PageKey, u32>,
    /// Idle leaves of the tree, as (last use, page).
    evictable: BTreeSet<(u64, u32)>,
    /// Number of idle pages in the tree: all of them can be evicted, leaves first.
    n_idle: usize,
    /// Number of unused slots in the last pages of sequences.
    n_unused_slots: usize,
    /// Counter that orders releases for LRU eviction.
    now: u64,
    new_pages: NewPages,
    states: StateSlots,
    hits: u64,
    misses: u64,
    evictions: u64,
}

impl KvArena {
    /// Reserves memory for `n_pages` pages; the system commits it as pages are first used.
    ///
    /// `fingerprint` identifies the model, e.g. the SHA-256 of its file; it is part of every page key.
    ///
    /// # Errors
    /// [`TryReserveError`] if the memory cannot be reserved.
    pub fn new(layout: KvLayout, n_pages: u32, fingerprint: [u8; 32]) -> Result<KvArena, TryReserveError> {
        let memory = KvMemory::new(&layout, n_pages as usize)?;
        let mut pages = Vec::new();
        pages.try_reserve_exact(n_pages as usize)?;
        pages.resize(n_pages as usize, Page::default());
        let mut free = Vec::new();
        free.try_reserve_exact(n_pages as usize)?;
        Ok(KvArena {
            root: key::root(&layout, &fingerprint),
            layout,
            fingerprint,
            memory,
            pages,
            n_committed: 0,
            free,
            tree: BTreeMap::new(),
            evictable: BTreeSet::new(),
            n_idle: 0,
            n_unused_slots: 0,
            now: 0,
            new_pages: NewPages::default(),
            states: StateSlots::default(),
            hits: 0,
            misses: 0,
            evictions: 0,
        })
    }

    /// Replaces the memory by fresh memory, which is not committed. No sequence may hold pages.
    ///
    /// # Errors
    /// [`TryReserveError`] if the memory cannot be reserved; the arena has not changed.
    pub(crate) fn renew(&mut self) -> Result<(), TryReserveError> {
        let n_pages = u32::try_from(self.n_pages()).unwrap_or(u32::MAX);
        let mut new = KvArena::new(self.layout.clone(), n_pages, self.fingerprint)?;
        new.reserve_states(self.memory.states.slot_len(), self.memory.states.n_slots())?;
        new.states.keep_counters(&self.states);
        let (hits, misses, evictions) = (self.hits, self.misses, self.evictions + self.tree.len() as u64);
        let new_pages = self.new_pages.renewed();
        *self = KvArena { hits, misses, evictions, new_pages, ..new };
        Ok(())
    }

    /// The layout of a page.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Capacity in pages.
    pub fn n_pages(&self) -> usize {
        self.pages.len()
    }

    /// The memory of all pages, for the forward pass.
    ///
    /// # Errors
    /// [`LayoutMismatch`] if the arena has another layout.
    pub fn memory_mut(&mut self, layout: &KvLayout) -> Result<&mut KvMemory, LayoutMismatch> {
        if *layout != self.layout {
            return Err(LayoutMismatch { found: layout.clone(), expected: self.layout.clone() });
        }
        Ok(&mut self.memory)
    }

    /// Starts a sequence with the pages of the longest cached prefix of `tokens`: whole pages, and never all tokens,
    /// since the logits of the last one must be computed. Pages of another `salt` do not match.
    pub fn acquire(&mut self, tokens: &[u32], salt: u64) -> SeqPages {
        let pages: Vec<u32> = self.cached_prefix(&tokens[..tokens.len().saturating_sub(1)], salt).collect();
        let mut seq = SeqPages { n_matched: pages.len() * PAGE, pages, ..SeqPages::default() };
        self.restore_state(&mut seq);
        seq.pages.iter().for_each(|page| self.retain(*page));
        seq.n_cached = seq.pages.len() * PAGE;
        seq.n_tokens = seq.n_cached;
        seq
    }

    /// Counts hits and misses of a prompt that was accepted; `n_cached` of its tokens were found by
    /// [`KvArena::acquire`].
    pub fn record_lookup(&mut self, tokens: &[u32], n_cached: usize) {
        let (all, found) = (tokens.len().saturating_sub(1) / PAGE, n_cached / PAGE);
        self.hits += found as u64;
        self.record_state_lookup(found > 0);
        self.misses += all.saturating_sub(found) as u64;
    }

    /// The pages of the longest cached prefix of `tokens`, in order.
    fn cached_prefix<'a>(&'a self, tokens: &'a [u32], salt: u64) -> impl Iterator<Item = u32> + 'a {
        let mut key = PageKey::root_of(&self.root, salt);
        tokens.chunks_exact(PAGE).map_while(move |page| {
            key = key.child(page);
            self.tree.get(&key).copied()
        })
    }

    /// Allocates pages so that positions `0..n_tokens` are reserved and those from [`SeqPages::n_tokens`] on can be
    /// written. Evicts idle pages if needed, and copies the page of the next token if it is shared.
    ///
    /// # Errors
    /// [`RequestError::NoCapacity`]; the sequence has not changed. Where the system overcommits memory, this can happen
    /// even if [`KvArena::available_pages`] suffices.
    pub fn extend(&mut self, seq: &mut SeqPages, n_tokens: usize) -> Result<(), RequestError> {
        if n_tokens <= seq.n_tokens {
            return Ok(());
        }
        let partial = seq.n_tokens / PAGE;
        let copied = seq.pages.get(partial).copied().filter(|p| self.is_shared(*p));
        let missing = n_tokens.div_ceil(PAGE) - seq.pages.len();
        let needed = missing + usize::from(copied.is_some());
        if needed > self.available_pages() {
            return Err(RequestError::NoCapacity { what: "KV pages", needed, free: self.available_pages() });
        }
        let mut new: Vec<u32> = Vec::with_capacity(needed);
        while new.len() < needed {
            let Some(page) = self.allocate() else {
                let free = new.len();
                new.into_iter().for_each(|page| self.release_page(page));
                return Err(RequestError::NoCapacity { what: "memory for KV pages", needed, free });
            };
            new.push(page);
        }
        if let Some(old) = copied {
            let copy = new.remove(0);
            self.memory.copy(old, copy);
            seq.pages[partial] = copy;
            self.now += 1;
            self.release_page(old);
        }
        seq.pages.extend(new);
        self.set_len(seq, n_tokens);
        Ok(())
    }

    /// Number of positions after those of a sequence that it can take without evicting a page.
    pub fn free_positions(&self, seq: &SeqPages) -> usize {
        seq.pages.len() * PAGE - seq.n_tokens + self.n_free() * PAGE
    }

    /// Inserts the full pages of `tokens` into the prefix tree. The keys and values of all these tokens must have been
    /// written to the pages of `seq`.
    pub fn publish(&mut self, seq: &SeqPages, tokens: &[u32], salt: u64) {
        debug_assert!(tokens.len() <= seq.n_tokens);
        let mut key = PageKey::root_of(&self.root, salt);
        let mut parent = None;
        for (i, (page, content)) in seq.pages.iter().zip(tokens.chunks_exact(PAGE)).enumerate() {
            key = key.child(content);
            parent = match self.tree.get(&key) {
                Some(known) => Some(*known),
                // a page already in the tree under another key was written to by mistake: do not insert it again
                None if self.pages[*page as usize].node.is_some() => return,
                None => {
                    let mut tokens = [0; PAGE];
                    tokens.copy_from_slice(content);
                    self.insert(*page, Node::new(key, parent, tokens, i * PAGE, salt));
                    Some(*page)
                }
            };
        }
    }

    /// Evicts the pages of a cached prefix from its end, up to the first page that a sequence references or another
    /// cached prefix continues. Returns the number of pages freed.
    pub fn evict_prefix(&mut self, tokens: &[u32], salt: u64) -> usize {
        let mut path: Vec<u32> = self.cached_prefix(tokens, salt).collect();
        let n_free = self.free.len();
        while let Some(page) = path.pop().filter(|page| self.remove_leaf(*page)) {
            self.free.push(page);
        }
        self.free.len() - n_free
    }

    /// Evicts up to `n` pages that no sequence references, the least recently used first. Returns the number evicted.
    pub fn evict_idle(&mut self, n: usize) -> usize {
        for evicted in 0..n {
            let Some(&(_, page)) = self.evictable.first() else { return evicted };
            if self.remove_leaf(page) {
                self.free.push(page);
                self.evictions += 1;
            }
        }
        n
    }

    /// Ends a sequence. Its pages in the tree stay cached until they are evicted.
    pub fn release(&mut self, mut seq: SeqPages) {
        self.release_state(&mut seq);
        self.truncate(&mut seq, 0);
    }

    /// Drops the positions from `n_tokens` on and releases the pages beyond.
    pub fn truncate(&mut self, seq: &mut SeqPages, n_tokens: usize) {
        if n_tokens >= seq.n_tokens {
            return;
        }
        self.now += 1;
        self.set_len(seq, n_tokens);
        seq.n_cached = seq.n_cached.min(n_tokens);
        while seq.pages.len() > n_tokens.div_ceil(PAGE) {
            if let Some(page) = seq.pages.pop() {
                self.release_page(page);
            }
        }
    }

    /// Number of pages that [`KvArena::extend`] can allocate: free and idle ones.
    pub fn available_pages(&self) -> usize {
        self.n_free() + self.n_idle
    }

    /// Memory and counters.
    pub fn stats(&self) -> KvStats {
        let (page_bytes, n_pages) = (self.layout.page_bytes(), self.pages.len());
        let cached = self.pages.iter().filter(|p| p.refs == 0 && p.node.is_some()).count();
        KvStats {
            n_pages,
            page_bytes,
            reserved_bytes: n_pages * page_bytes,
            committed_bytes: self.memory.committed_bytes(),
            in_use_bytes: (n_pages - self.n_free() - cached) * page_bytes,
            cached_bytes: cached * page_bytes,
            free_bytes: self.n_free() * page_bytes,
            fragmented_bytes: self.n_unused_slots * (page_bytes / PAGE),
            hits: self.hits,
            misses: self.misses,
            evictions: self.evictions,
            states: self.state_stats(),
        }
    }

    fn n_free(&self) -> usize {
        self.pages.len() - self.n_committed + self.free.len()
    }

    /// Whether a page that a sequence references is also in the tree or another sequence.
    fn is_shared(&self, page: u32) -> bool {
        let page = &self.pages[page as usize];
        page.refs > 1 || page.node.is_some()
    }

    fn set_len(&mut self, seq: &mut SeqPages, n_tokens: usize) {
        let unused = |n: usize| n.next_multiple_of(PAGE) - n;
        self.n_unused_slots = self.n_unused_slots - unused(seq.n_tokens) + unused(n_tokens);
        seq.n_tokens = n_tokens;
    }

    /// Allocates a page with one reference: a free page, a page never used, or an evicted one, in this order. `None` if
    /// no page is idle and no memory can be committed.
    fn allocate(&mut self) -> Option<u32> {
        let page = self.free.pop().or_else(|| self.commit_next()).or_else(|| self.evict())?;
        self.pages[page as usize].refs = 1;
        Some(page)
    }

    /// The next page that was never used, if there is one and the system commits its memory.
    fn commit_next(&mut self) -> Option<u32> {
        let page = self.n_committed as u32;
        if self.n_committed == self.pages.len() || self.memory.commit(page).is_err() {
            return None;
        }
        self.n_committed += 1;
        Some(page)
    }

    /// Evicts the least recently used idle leaf.
    fn evict(&mut self) -> Option<u32> {
        let (_, page) = *self.evictable.first()?;
        self.evictions += u64::from(self.remove_leaf(page));
        Some(page)
    }

    /// Removes a page from the tree if it is an idle leaf. Returns whether it was.
    fn remove_leaf(&mut self, page: u32) -> bool {
        let last_used = self.pages[page as usize].node.as_ref().map_or(0, |n| n.last_used);
        if !self.evictable.remove(&(last_used, page)) {
            return false;
        }
        self.free_snapshot(page);
        let p = &mut self.pages[page as usize];
        let Some(node) = p.node.take() else { return false };
        self.tree.remove(&node.key);
        self.new_pages.remove(node.serial);
        self.n_idle -= 1;
        if let Some(parent) = node.parent {
            if let Some(n) = &mut self.pages[parent as usize].node {
                n.children -= 1;
            }
            self.update_evictable(parent);
        }
        true
    }

    /// Inserts a page into the tree.
    fn insert(&mut self, page: u32, mut node: Node) {
        let parent = node.parent;
        node.serial = self.new_pages.insert(page);
        self.tree.insert(node.key, page);
        self.pages[page as usize].node = Some(node);
        if let Some(p) = parent {
            if let Some(n) = &mut self.pages[p as usize].node {
                n.children += 1;
            }
            self.update_evictable(p);
        }
        self.n_idle += 1;
        if self.pages[page as usize].refs > 0 {
            self.became_busy(page);
        } else {
            self.update_evictable(page);
        }
    }

    fn retain(&mut self, page: u32) {
        self.pages[page as usize].refs += 1;
        let p = &self.pages[page as usize];
        if p.refs == 1 && p.node.as_ref().is_some_and(|n| n.busy_children == 0) {
            self.became_busy(page);
        }
    }

    fn release_page(&mut self, page: u32) {
        let p = &mut self.pages[page as usize];
        p.refs -= 1;
        if p.refs > 0 {
            return;
        }
        match &mut p.node {
            None => self.free.push(page),
            Some(node) => {
                node.last_used = self.now;
                if node.busy_children == 0 {
                    self.became_idle(page);
                }
            }
        }
    }

    /// Marks a page and its ancestors busy.
    fn became_busy(&mut self, page: u32) {
        let mut at = Some(page);
        while let Some(page) = at {
            self.n_idle -= 1;
            self.update_evictable(page);
            at = self.pages[page as usize].node.as_ref().and_then(|n| n.parent);
            let Some(p) = at.map(|p| &mut self.pages[p as usize]) else { return };
            let was_busy = p.is_busy();
            if let Some(n) = &mut p.node {
                n.busy_children += 1;
            }
            if was_busy {
                return;
            }
        }
    }

    /// Marks a page idle, and its ancestors that have no other busy child and no reference.
    fn became_idle(&mut self, page: u32) {
        let mut at = Some(page);
        while let Some(page) = at {
            self.n_idle += 1;
            self.update_evictable(page);
            at = self.pages[page as usize].node.as_ref().and_then(|n| n.parent);
            let Some(p) = at.map(|p| &mut self.pages[p as usize]) else { return };
            if let Some(n) = &mut p.node {
                n.busy_children -= 1;
            }
            if p.is_busy() {
                return;
            }
        }
    }

    /// Updates `evictable`, which contains a page exactly if it is an idle leaf.
    fn update_evictable(&mut self, page: u32) {
        let p = &self.pages[page as usize];
        let Some(node) = &p.node else { return };
        if p.refs == 0 && node.children == 0 {
            self.evictable.insert((node.last_used, page));
        } else {
            self.evictable.remove(&(node.last_used, page));
        }
    }
}

impl Page {
    fn is_busy(&self) -> bool {
        self.refs > 0 || self.node.as_ref().is_some_and(|n| n.busy_children > 0)
    }
}

impl Node {
    fn new(key: PageKey, parent: Option<u32>, tokens: [u32; PAGE], position: usize, salt: u64) -> Node {
        let (position, snapshot) = (position as u32, None);
        Node { key, parent, tokens, position, salt, children: 0, busy_children: 0, last_used: 0, serial: 0, snapshot }
    }
}
