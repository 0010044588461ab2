//! Serialised KV pages, for hosts that move them to disk or to another process. Numbers are little-endian:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `STKVPAGE` |
//! | 4 | version, 2 |
//! | 16 | layout: layers, KV heads, head dimension (or 8 bytes of a digest where layers differ), KV type (0 f32, 1 f16, 2 k8, 3 q8), u32 each |
//! | 32 | fingerprint of the model |
//! | 8 | salt |
//! | 8 | position of the first token, a multiple of 16 |
//! | 32 | key of the parent page; at position 0 the root key of the salt |
//! | 64 | 16 token ids |
//! | `page_bytes` | the page |
//! | 8 | XXH64 of everything before |
//!
//! The checksum detects damage, not forgery: whoever can write pages controls what the model attends to. Storage that
//! others can write to needs a signature around each page. XXH64 is several times as fast as CRC-32 and SHA-256, and a
//! third of the WebAssembly code of XXH3.

use alloc::vec::Vec;

use thiserror::Error;
use xxhash_rust::xxh64::xxh64;

use super::key::{PageKey, layout_bytes};
use super::{KvArena, Node, state_records};
use crate::kernels::attention::PAGE;

const MAGIC: [u8; 8] = *b"STKVPAGE";
const VERSION: u32 = 2;
const HEADER: usize = 8 + 4 + 16 + 32 + 8 + 8 + 32 + PAGE * 4;
const CHECKSUM: usize = 8;
/// Longest context of a model ([`crate::model::config`]).
const MAX_POSITION: u64 = 1 << 28;

/// Why exported bytes were not imported as a page. The arena is unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PageError {
    /// The bytes are not as long as an exported page of this arena.
    #[error("exported KV page: found {found} bytes, expected {expected}")]
    Length {
        /// Bytes given.
        found: usize,
        /// Bytes of a page with its header and checksum.
        expected: usize,
    },
    /// The bytes do not start with the magic of exported pages.
    #[error("exported KV page: the bytes do not start with `STKVPAGE`")]
    Magic,
    /// The page was written in another version of the format.
    #[error("exported KV page: found format version {0}, expected {VERSION}")]
    Version(u32),
    /// The checksum does not match.
    #[error("exported KV page: the checksum does not match, the bytes are damaged")]
    Checksum,
    /// The page has other layers, heads, head size or KV type than the arena.
    #[error("exported KV page: layers, heads, head size or KV type differ from this engine's")]
    Layout,
    /// Another model wrote the page.
    #[error("exported KV page: written by another model")]
    Fingerprint,
    /// The position is not a multiple of 16, beyond every context, or does not follow the parent page.
    #[error(
        "exported KV page: found position {0}, expected a multiple of {PAGE} below {MAX_POSITION} after its parent page"
    )]
    Position(u64),
    /// The parent page is not in the arena.
    #[error("exported KV page: the page before it is not in the cache: import that page first")]
    Parent(PageKey),
    /// The page contains an infinity or NaN, which the engine never writes.
    #[error("exported KV page: contains an infinity or NaN")]
    NotFinite,
    /// All pages are held by sequences, or the allocation of one more failed.
    #[error("no free KV page: running requests hold all of them")]
    NoCapacity,
}

/// A cursor over the fields of the header.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    /// The next `N` bytes; zeros beyond the end, which the length check excludes.
    pub(super) fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        if let Some((field, rest)) = self.0.split_at_checked(N) {
            out.copy_from_slice(field);
            self.0 = rest;
        }
        out
    }
}

impl KvArena {
    /// Bytes of an exported page, with header and checksum.
    pub fn exported_bytes(&self) -> usize {
        self.layout.page_bytes().saturating_add(HEADER + CHECKSUM)
    }

    /// Serialises a page of the tree; `None` if the page is not in the tree.
    pub fn export_page(&self, page: u32) -> Option<Vec<u8>> {
        let node = self.pages.get(page as usize)?.node.as_ref()?;
        let parent_key = match node.parent {
            Some(parent) => self.pages[parent as usize].node.as_ref()?.key,
            None => PageKey::root_of(&self.root, node.salt),
        };
        let mut out = Vec::with_capacity(self.exported_bytes());
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(layout_bytes(&self.layout));
        out.extend(self.fingerprint);
        out.extend(node.salt.to_le_bytes());
        out.extend((u64::from(node.position)).to_le_bytes());
        out.extend(parent_key.0);
        node.tokens.iter().for_each(|t| out.extend(t.to_le_bytes()));
        out.extend_from_slice(self.memory.page(page));
        let checksum = xxh64(&out, 0);
        out.extend(checksum.to_le_bytes());
        Some(out)
    }

    /// Serialises the page of a key; `None` if it is not in the tree.
    pub fn export_key(&self, key: &PageKey) -> Option<Vec<u8>> {
        self.export_page(*self.tree.get(key)?)
    }

    /// Serialises the pages of the longest cached prefix of `tokens`, in the order in which they can be imported. With
    /// recurrent states, of the longest prefix with a snapshot at its end, which follows the pages.
    pub fn export_prefix(&self, tokens: &[u32], salt: u64) -> Vec<u8> {
        let mut pages: Vec<u32> = self.cached_prefix(tokens, salt).collect();
        if self.has_states() {
            let last = pages.iter().rposition(|page| self.snapshot_of(*page).is_some());
            pages.truncate(last.map_or(0, |i| i + 1));
        }
        let mut out = Vec::new();
        pages.iter().filter_map(|page| self.export_page(*page)).for_each(|page| out.extend(page));
        if let Some(last) = pages.last() {
            out.extend(self.export_state(*last));
        }
        out
    }

    /// Imports what [`KvArena::export_prefix`] has exported, or whole records of it. Returns the number of pages.
    ///
    /// # Errors
    /// [`PageError`] of the first record that is refused. `bytes` need not be trusted.
    pub fn import_prefix(&mut self, bytes: &[u8]) -> Result<usize, PageError> {
        let mut n_pages = 0;
        for record in bytes.chunks(self.exported_bytes()) {
            if record.starts_with(&state_records::MAGIC) {
                self.import_state(record)?;
            } else {
                self.import_page(record)?;
                n_pages += 1;
            }
        }
        Ok(n_pages)
    }

    /// Imports an exported page into the tree and returns its number. The parent page must be in the tree. A page that
    /// is already cached is not replaced.
    ///
    /// # Errors
    /// [`PageError`] names the field that does not match. `bytes` need not be trusted.
    pub fn import_page(&mut self, bytes: &[u8]) -> Result<u32, PageError> {
        let expected = self.exported_bytes();
        if bytes.len() != expected {
            return Err(PageError::Length { found: bytes.len(), expected });
        }
        let (content, checksum) = bytes.split_at(expected - CHECKSUM);
        let (header, page) = content.split_at(HEADER);
        let mut fields = Fields(header);
        if fields.array() != MAGIC {
            return Err(PageError::Magic);
        }
        let version = u32::from_le_bytes(fields.array());
        if version != VERSION {
            return Err(PageError::Version(version));
        }
        if checksum != xxh64(content, 0).to_le_bytes() {
            return Err(PageError::Checksum);
        }
        if fields.array() != layout_bytes(&self.layout) {
            return Err(PageError::Layout);
        }
        if fields.array() != self.fingerprint {
            return Err(PageError::Fingerprint);
        }
        let salt = u64::from_le_bytes(fields.array());
        let position = u64::from_le_bytes(fields.array());
        let parent_key = PageKey(fields.array());
        let tokens = core::array::from_fn(|_| u32::from_le_bytes(fields.array()));
        if position >= MAX_POSITION || !position.is_multiple_of(PAGE as u64) {
            return Err(PageError::Position(position));
        }
        let parent = self.parent(parent_key, position, salt)?;
        let key = parent_key.child(&tokens);
        if let Some(known) = self.tree.get(&key) {
            return Ok(*known);
        }
        if !self.layout.is_finite(page) {
            return Err(PageError::NotFinite);
        }
        // referenced, so that the allocation does not evict it
        parent.iter().for_each(|p| self.retain(*p));
        let new = self.allocate();
        if let Some(new) = new {
            self.memory.page_mut(new).copy_from_slice(page);
            self.insert(new, Node::new(key, parent, tokens, position as usize, salt));
            if let Some(node) = &self.pages[new as usize].node {
                self.new_pages.remove(node.serial);
            }
        }
        self.now += 1;
        new.into_iter().chain(parent).for_each(|p| self.release_page(p));
        new.ok_or(PageError::NoCapacity)
    }

    /// The parent of a page at `position`; `None` at position 0.
    fn parent(&self, parent_key: PageKey, position: u64, salt: u64) -> Result<Option<u32>, PageError> {
        if position == 0 {
            let is_first = parent_key == PageKey::root_of(&self.root, salt);
            return if is_first { Ok(None) } else { Err(PageError::Parent(parent_key)) };
        }
        let parent = self.tree.get(&parent_key).copied().ok_or(PageError::Parent(parent_key))?;
        match &self.pages[parent as usize].node {
            Some(node) if u64::from(node.position) + PAGE as u64 == position && node.salt == salt => Ok(Some(parent)),
            _ => Err(PageError::Position(position)),
        }
    }
}
