//! Keys and values of all sequences: fixed pages, and a tree of pages that later sequences can reuse.
//!
//! A page holds [`PAGE`] consecutive tokens of all layers. Its contents follow from the model and from all tokens up to
//! its last, so full pages are known by a [`PageKey`]: the hash of the key of the page before and its own tokens. A
//! sequence that begins with the same tokens takes the pages instead of computing them, and gets the same bits.
//!
//! A page is held by sequences (counted), or known in the tree, or both, or free. A page that others may read is never
//! written: [`KvArena::extend`] copies it first. Pages in the tree that no sequence needs, their successors' included,
//! are given away when room is short: leaves first, the longest unused before others, by a counter and not a clock.

mod key;
mod page;
#[cfg(test)]
mod tests;

use alloc::collections::{BTreeMap, BTreeSet, TryReserveError};
use alloc::vec::Vec;

use thiserror::Error;

pub use key::PageKey;
pub use page::PageError;

use crate::error::RequestError;
use crate::kernels::attention::KvMemory;
pub use crate::kernels::attention::{KvLayout, PAGE};

/// The pages of a sequence. Give it back with [`KvArena::release`]: dropping it would leak them.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "release it"]
pub struct SeqPages {
    /// Page of each [`PAGE`] positions, in order.
    pub pages: Vec<u32>,
    /// Tokens whose keys and values were found in the tree.
    pub n_cached: usize,
    /// Positions there is room for, or that hold tokens.
    n_tokens: usize,
}

impl SeqPages {
    /// Positions reserved so far: what [`KvArena::acquire`] found and [`KvArena::extend`] added.
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

/// Memory and counts of an arena.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KvStats {
    /// Pages there may be.
    pub n_pages: usize,
    /// Bytes of one page.
    pub page_bytes: usize,
    /// Bytes reserved.
    pub reserved_bytes: usize,
    /// Bytes touched so far.
    pub committed_bytes: usize,
    /// Bytes of pages held by sequences.
    pub in_use_bytes: usize,
    /// Bytes of pages in the tree that no sequence holds.
    pub cached_bytes: usize,
    /// Bytes of pages that are neither.
    pub free_bytes: usize,
    /// Bytes of the slots without a token in the last pages of sequences.
    pub fragmented_bytes: usize,
    /// Pages that [`KvArena::acquire`] found.
    pub hits: u64,
    /// Pages that it looked for and did not find.
    pub misses: u64,
    /// Pages given away from the tree.
    pub evictions: u64,
}

/// A page's life.
#[derive(Clone, Default)]
struct Page {
    /// Sequences that hold it.
    refs: u32,
    /// Its place in the tree.
    node: Option<Node>,
}

/// A page's place in the tree.
#[derive(Clone)]
struct Node {
    key: PageKey,
    /// The page before, unless this is a first one.
    parent: Option<u32>,
    tokens: [u32; PAGE],
    /// Tokens before the page's first.
    position: u32,
    salt: u64,
    /// Pages known to follow.
    children: u32,
    /// Of those, how many are held or lead to one that is.
    busy_children: u32,
    /// When it was last let go of.
    last_used: u64,
}

/// The arena.
pub struct KvArena {
    layout: KvLayout,
    root: [u8; 32],
    fingerprint: [u8; 32],
    memory: KvMemory,
    pages: Vec<Page>,
    /// Pages given away so far, from the first on.
    n_given: usize,
    /// Of those, the free ones.
    free: Vec<u32>,
    tree: BTreeMap<PageKey, u32>,
    /// Leaves of the tree that no sequence holds, by (last use, page).
    evictable: BTreeSet<(u64, u32)>,
    /// Pages in the tree that are not busy: all of them can be evicted, leaves first.
    n_idle: usize,
    /// Empty slots in the last pages of sequences.
    n_unused_slots: usize,
    now: u64,
    hits: u64,
    misses: u64,
    evictions: u64,
}

impl KvArena {
    /// Reserves room for `n_pages`; memory is touched as pages are first used.
    ///
    /// `fingerprint` names the model whose keys and values these are, e.g. its file's SHA-256.
    ///
    /// # Errors
    /// If the memory cannot be reserved.
    pub fn new(layout: KvLayout, n_pages: u32, fingerprint: [u8; 32]) -> Result<KvArena, TryReserveError> {
        let memory = KvMemory::new(&layout, n_pages as usize)?;
        let mut pages = Vec::new();
        pages.try_reserve_exact(n_pages as usize)?;
        pages.resize(n_pages as usize, Page::default());
        let mut free = Vec::new();
        free.try_reserve_exact(n_pages as usize)?;
        Ok(KvArena {
            layout,
            root: key::root(&layout, &fingerprint),
            fingerprint,
            memory,
            pages,
            n_given: 0,
            free,
            tree: BTreeMap::new(),
            evictable: BTreeSet::new(),
            n_idle: 0,
            n_unused_slots: 0,
            now: 0,
            hits: 0,
            misses: 0,
            evictions: 0,
        })
    }

    /// How a page is laid out.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Pages in all.
    pub fn n_pages(&self) -> usize {
        self.pages.len()
    }

    /// All pages used so far, for the forward pass.
    ///
    /// # Errors
    /// If the arena has another layout.
    pub fn memory_mut(&mut self, layout: &KvLayout) -> Result<&mut KvMemory, LayoutMismatch> {
        if *layout != self.layout {
            return Err(LayoutMismatch { found: *layout, expected: self.layout });
        }
        Ok(&mut self.memory)
    }

    /// Starts a sequence with the pages of the longest known prefix of `tokens`: whole pages, and never all tokens,
    /// since the last one's logits must be computed. Pages of another `salt` do not match.
    pub fn acquire(&mut self, tokens: &[u32], salt: u64) -> SeqPages {
        let pages = self.known(&tokens[..tokens.len().saturating_sub(1)], salt).collect();
        let mut seq = SeqPages { pages, n_cached: 0, n_tokens: 0 };
        seq.pages.iter().for_each(|page| self.hold(*page));
        seq.n_cached = seq.pages.len() * PAGE;
        seq.n_tokens = seq.n_cached;
        seq
    }

    /// Counts what [`KvArena::acquire`] found of a prompt's tokens, once the prompt is taken.
    pub fn count(&mut self, tokens: &[u32], n_cached: usize) {
        let (all, found) = (tokens.len().saturating_sub(1) / PAGE, n_cached / PAGE);
        self.hits += found as u64;
        self.misses += all.saturating_sub(found) as u64;
    }

    /// The pages of the longest known prefix of `tokens`, in order.
    fn known<'a>(&'a self, tokens: &'a [u32], salt: u64) -> impl Iterator<Item = u32> + 'a {
        let mut key = PageKey::first(&self.root, salt);
        tokens.chunks_exact(PAGE).map_while(move |page| {
            key = key.then(page);
            self.tree.get(&key).copied()
        })
    }

    /// Makes room for positions `0..n_tokens`, of which those from [`SeqPages::n_tokens`] on may be written. Evicts
    /// idle pages if need be; copies the page that the next token goes to if others may read it.
    ///
    /// # Errors
    /// [`RequestError::NoCapacity`], and the sequence has not changed. Where memory cannot be reserved unused, that may be
    /// although there are [`KvArena::available_pages`].
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
            let Some(page) = self.take() else {
                let free = new.len();
                new.into_iter().for_each(|page| self.let_go(page));
                return Err(RequestError::NoCapacity { what: "memory for KV pages", needed, free });
            };
            new.push(page);
        }
        if let Some(old) = copied {
            let copy = new.remove(0);
            self.memory.copy(old, copy);
            seq.pages[partial] = copy;
            self.now += 1;
            self.let_go(old);
        }
        seq.pages.extend(new);
        self.set_len(seq, n_tokens);
        Ok(())
    }

    /// Makes the full pages of `tokens` known to later sequences. The keys and values of all these tokens must have
    /// been written to `seq`'s pages.
    pub fn publish(&mut self, seq: &SeqPages, tokens: &[u32], salt: u64) {
        debug_assert!(tokens.len() <= seq.n_tokens);
        let mut key = PageKey::first(&self.root, salt);
        let mut parent = None;
        for (i, (page, content)) in seq.pages.iter().zip(tokens.chunks_exact(PAGE)).enumerate() {
            key = key.then(content);
            parent = match self.tree.get(&key) {
                Some(known) => Some(*known),
                // a page that already stands elsewhere was written to against the rules: it stays what it was
                None if self.pages[*page as usize].node.is_some() => return,
                None => {
                    let mut tokens = [0; PAGE];
                    tokens.copy_from_slice(content);
                    self.plant(*page, Node::new(key, parent, tokens, i * PAGE, salt));
                    Some(*page)
                }
            };
        }
    }

    /// Frees the pages of a known prefix, from its end on, as far as no sequence holds them and no other prefix goes on
    /// from them. Returns how many.
    pub fn forget(&mut self, tokens: &[u32], salt: u64) -> usize {
        let mut path: Vec<u32> = self.known(tokens, salt).collect();
        let n_free = self.free.len();
        while let Some(page) = path.pop().filter(|page| self.uproot(*page)) {
            self.free.push(page);
        }
        self.free.len() - n_free
    }

    /// Ends a sequence. Its pages in the tree stay there until room is short.
    pub fn release(&mut self, mut seq: SeqPages) {
        self.truncate(&mut seq, 0);
    }

    /// Forgets positions from `n_tokens` on and lets go of pages no longer needed.
    pub fn truncate(&mut self, seq: &mut SeqPages, n_tokens: usize) {
        if n_tokens >= seq.n_tokens {
            return;
        }
        self.now += 1;
        self.set_len(seq, n_tokens);
        seq.n_cached = seq.n_cached.min(n_tokens);
        while seq.pages.len() > n_tokens.div_ceil(PAGE) {
            if let Some(page) = seq.pages.pop() {
                self.let_go(page);
            }
        }
    }

    /// Pages that [`KvArena::extend`] can still give: free ones and those it may evict.
    pub fn available_pages(&self) -> usize {
        self.n_free() + self.n_idle
    }

    /// Memory and counts.
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
        }
    }

    fn n_free(&self) -> usize {
        self.pages.len() - self.n_given + self.free.len()
    }

    /// Whether someone else may read the page.
    fn is_shared(&self, page: u32) -> bool {
        let page = &self.pages[page as usize];
        page.refs > 1 || page.node.is_some()
    }

    fn set_len(&mut self, seq: &mut SeqPages, n_tokens: usize) {
        let unused = |n: usize| n.next_multiple_of(PAGE) - n;
        self.n_unused_slots = self.n_unused_slots - unused(seq.n_tokens) + unused(n_tokens);
        seq.n_tokens = n_tokens;
    }

    /// A page for one holder: used before, never used, or evicted, in this order. None if there is neither an idle page
    /// nor memory for one more.
    fn take(&mut self) -> Option<u32> {
        let page = self.free.pop().or_else(|| self.first_use()).or_else(|| self.evict())?;
        self.pages[page as usize].refs = 1;
        Some(page)
    }

    /// A page that was never used, if there is one and the system has memory for it.
    fn first_use(&mut self) -> Option<u32> {
        let page = self.n_given as u32;
        if self.n_given == self.pages.len() || self.memory.commit(page).is_err() {
            return None;
        }
        self.n_given += 1;
        Some(page)
    }

    /// Takes the longest unused idle leaf out of the tree.
    fn evict(&mut self) -> Option<u32> {
        let (_, page) = *self.evictable.first()?;
        self.evictions += u64::from(self.uproot(page));
        Some(page)
    }

    /// Takes a page out of the tree, if it is an idle leaf; says whether it was.
    fn uproot(&mut self, page: u32) -> bool {
        let p = &mut self.pages[page as usize];
        let last_used = p.node.as_ref().map_or(0, |n| n.last_used);
        if !self.evictable.remove(&(last_used, page)) {
            return false;
        }
        let Some(node) = p.node.take() else { return false };
        self.tree.remove(&node.key);
        self.n_idle -= 1;
        if let Some(parent) = node.parent {
            if let Some(n) = &mut self.pages[parent as usize].node {
                n.children -= 1;
            }
            self.update_evictable(parent);
        }
        true
    }

    /// Puts a held page into the tree.
    fn plant(&mut self, page: u32, node: Node) {
        let parent = node.parent;
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

    fn hold(&mut self, page: u32) {
        self.pages[page as usize].refs += 1;
        let p = &self.pages[page as usize];
        if p.refs == 1 && p.node.as_ref().is_some_and(|n| n.busy_children == 0) {
            self.became_busy(page);
        }
    }

    fn let_go(&mut self, page: u32) {
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

    /// The first holder of the page or of one after it: so are all before it.
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

    /// The last holder of the page or of one after it has gone.
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

    /// Lists the page for eviction if it is an idle leaf, and only then.
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
        let position = position as u32;
        Node { key, parent, tokens, position, salt, children: 0, busy_children: 0, last_used: 0 }
    }
}
