//! KV pages of the prefix cache as bytes: keys, export, import, and which are new.

use alloc::vec::Vec;
use core::mem;

use super::Engine;
use crate::kernels::attention::PAGE;
use crate::kv::{NewPage, PageError, PageKey};

impl Engine {
    /// Serialises the cached pages of the longest cached prefix of `tokens`, and its last snapshot, for
    /// [`Engine::import_pages`]; empty if no page is cached.
    pub fn export_pages(&self, tokens: &[u32], cache_salt: u64) -> Vec<u8> {
        self.arena.export_prefix(tokens, cache_salt)
    }

    /// Keys of the whole pages that a request with these tokens can take from the prefix cache, in order: all but the one
    /// with the last token.
    pub fn page_keys(&self, tokens: &[u32], cache_salt: u64) -> Vec<PageKey> {
        self.arena.page_keys(&tokens[..tokens.len().saturating_sub(1)], cache_salt)
    }

    /// Number of leading keys whose pages are in the prefix cache.
    pub fn n_cached_pages(&self, keys: &[PageKey]) -> usize {
        self.arena.n_cached(keys)
    }

    /// Number of leading keys after whose pages a prompt continues. With recurrent layers these may be fewer than are
    /// cached: those up to the last snapshot.
    pub fn n_resumable_pages(&self, keys: &[PageKey]) -> usize {
        self.arena.n_resumable(keys)
    }

    /// Digest of numerics version, model and KV layout, which all pages of this engine have in common.
    pub fn page_namespace(&self) -> [u8; 32] {
        self.arena.namespace()
    }

    /// Bytes of an exported page.
    pub fn exported_page_bytes(&self) -> usize {
        self.arena.exported_bytes()
    }

    /// Sets whether pages and snapshots that enter the prefix cache are noted for [`Engine::take_new_page`] and
    /// [`Engine::take_new_snapshot`]; off at construction. Forgets those noted so far.
    pub fn track_new_pages(&mut self, is_tracking: bool) {
        self.arena.track_new_pages(is_tracking);
    }

    /// The oldest page that has entered the prefix cache by computation, was not taken before, and is still cached.
    pub fn take_new_page(&mut self) -> Option<NewPage> {
        self.arena.take_new_page()
    }

    /// The page of the oldest snapshot of recurrent states that was not taken before and is still cached: at the ends of
    /// prompts and at intervals in long ones, and the last one of an answer when the request ends. A prompt continues only
    /// from a snapshot, so a host that keeps pages of models with recurrent layers keeps snapshots too.
    pub fn take_new_snapshot(&mut self) -> Option<NewPage> {
        self.arena.take_new_snapshot()
    }

    /// Serialises the snapshot of a page, as records of [`Engine::exported_page_bytes`] bytes: [`Engine::import_pages`] takes
    /// them, several at a time, in order, once the page is imported. `None` if there is no snapshot.
    pub fn export_snapshot(&self, key: &PageKey) -> Option<Vec<u8>> {
        self.arena.export_state_of(key)
    }

    /// Bytes of an exported snapshot; 0 for a model without recurrent layers.
    pub fn exported_snapshot_bytes(&self) -> usize {
        self.arena.exported_state_bytes()
    }

    /// Adds the full pages of running requests to the prefix cache. Without this call they enter it when the prompt is
    /// computed and when the request ends.
    pub fn publish_running(&mut self) {
        for a in self.active.iter_mut().filter(|a| a.ring.is_none()) {
            let n_pages = a.n_computed / PAGE;
            if mem::replace(&mut a.n_published, n_pages) < n_pages {
                self.arena.publish(&a.pages, &a.tokens[..a.n_computed], a.request.cache_salt);
            }
        }
    }

    /// Serialises a page of the prefix cache for [`Engine::import_page`]; `None` if it is not there.
    pub fn export_page(&self, key: &PageKey) -> Option<Vec<u8>> {
        self.arena.export_key(key)
    }

    /// Imports an exported page into the prefix cache, whose parent page must be there. May evict idle pages, never one
    /// that a request uses.
    ///
    /// # Errors
    /// [`PageError`] says what does not match; the engine has not changed. `bytes` need not be trusted.
    pub fn import_page(&mut self, bytes: &[u8]) -> Result<(), PageError> {
        self.arena.import_page(bytes).map(drop)
    }

    /// Imports exported pages into the prefix cache. Prompts of the same salt that begin with their tokens reuse them.
    /// Returns the number of tokens imported.
    ///
    /// # Errors
    /// [`PageError`] of the first page that is refused; the pages before it are imported. `bytes` need not be trusted.
    pub fn import_pages(&mut self, bytes: &[u8]) -> Result<usize, PageError> {
        Ok(self.arena.import_prefix(bytes)? * PAGE)
    }
}
