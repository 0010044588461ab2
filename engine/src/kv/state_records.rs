//! Serialised snapshots: records as long as an exported page, which follow the pages of a prefix. Numbers are little-endian:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `STKVSTAT` |
//! | 4 | version, 1 |
//! | 32 | namespace: digest of numerics version, model and KV layout |
//! | 8 | floats of the whole state |
//! | 8 | floats in the records before this one |
//! | 8 | floats in this record |
//! | 8 | position of the first token of the page that the snapshot follows, at the same offset as in a page |
//! | 32 | key of that page |
//! | `n` | the floats, f32, then zeros |
//! | 8 | XXH64 of everything before |

use alloc::vec::Vec;

use xxhash_rust::xxh64::xxh64;

use super::page::{Fields, PageError};
use super::{KvArena, PageKey};

pub(super) const MAGIC: [u8; 8] = *b"STKVSTAT";
const VERSION: u32 = 1;
const HEADER: usize = 8 + 4 + 32 + 4 * 8 + 32;
const CHECKSUM: usize = 8;

/// A snapshot whose first records are imported.
pub(super) struct PartialState {
    key: PageKey,
    floats: Vec<f32>,
}

impl KvArena {
    /// Floats of a record.
    fn record_floats(&self) -> usize {
        (self.exported_bytes() - HEADER - CHECKSUM) / 4
    }

    /// Bytes of an exported snapshot; 0 without recurrent states.
    pub fn exported_state_bytes(&self) -> usize {
        self.memory.states.slot_len().div_ceil(self.record_floats()).saturating_mul(self.exported_bytes())
    }

    /// Serialises the snapshot of the page with this key, for [`KvArena::import_prefix`]; `None` if there is none.
    pub fn export_state_of(&self, key: &PageKey) -> Option<Vec<u8>> {
        let page = self.tree.get(key)?;
        Some(self.export_state(*page)).filter(|bytes| !bytes.is_empty())
    }

    /// Serialises the snapshot of a page; empty if it has none.
    pub(super) fn export_state(&self, page: u32) -> Vec<u8> {
        let Some(node) = &self.pages[page as usize].node else { return Vec::new() };
        let Some(state) = self.snapshot_of(page) else { return Vec::new() };
        let n = self.record_floats();
        let mut out = Vec::with_capacity(state.len().div_ceil(n) * self.exported_bytes());
        for (i, part) in state.chunks(n).enumerate() {
            let start = out.len();
            out.extend(MAGIC);
            out.extend(VERSION.to_le_bytes());
            out.extend(self.root);
            let numbers = [state.len(), i * n, part.len(), node.position as usize];
            numbers.iter().for_each(|n| out.extend((*n as u64).to_le_bytes()));
            out.extend(node.key.0);
            part.iter().for_each(|v| out.extend(v.to_le_bytes()));
            out.resize(start + self.exported_bytes() - CHECKSUM, 0);
            let checksum = xxh64(&out[start..], 0);
            out.extend(checksum.to_le_bytes());
        }
        out
    }

    /// Imports the next record of a snapshot; after the last one, prompts resume from it. The records of a snapshot must be
    /// imported in order, after its page.
    ///
    /// # Errors
    /// [`PageError`] names the field that does not match. `bytes` need not be trusted.
    pub(super) fn import_state(&mut self, bytes: &[u8]) -> Result<(), PageError> {
        let (expected, len) = (self.exported_bytes(), self.memory.states.slot_len());
        if bytes.len() != expected {
            return Err(PageError::Length { found: bytes.len(), expected });
        }
        let (content, checksum) = bytes.split_at(expected - CHECKSUM);
        let (header, floats) = content.split_at(HEADER);
        let mut fields = Fields(&header[8..]);
        let version = u32::from_le_bytes(fields.array());
        if version != VERSION {
            return Err(PageError::Version(version));
        }
        if checksum != xxh64(content, 0).to_le_bytes() {
            return Err(PageError::Checksum);
        }
        let root: [u8; 32] = fields.array();
        let [all, before, n_floats, position] = core::array::from_fn(|_| u64::from_le_bytes(fields.array()));
        let key = PageKey(fields.array());
        if root != self.root || !self.has_states() || all != len as u64 {
            return Err(PageError::Layout);
        }
        let page = self.tree.get(&key).copied().ok_or(PageError::Parent(key))?;
        let node = self.pages[page as usize].node.as_ref();
        if node.is_none_or(|node| u64::from(node.position) != position) {
            return Err(PageError::Position(position));
        }
        let mut partial = match (before, self.states.partial.take()) {
            (0, _) => PartialState { key, floats: Vec::new() },
            (_, Some(partial)) if partial.key == key && partial.floats.len() as u64 == before => partial,
            _ => return Err(PageError::Position(before)),
        };
        let n = (len - partial.floats.len()).min(floats.len() / 4);
        if n as u64 != n_floats {
            return Err(PageError::Layout);
        }
        if partial.floats.try_reserve(n).is_err() {
            return Err(PageError::NoCapacity);
        }
        let values = floats.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        partial.floats.extend(values.take(n));
        if !partial.floats[partial.floats.len() - n..].iter().all(|v| v.is_finite()) {
            return Err(PageError::NotFinite);
        }
        if partial.floats.len() < len {
            self.states.partial = Some(partial);
            return Ok(());
        }
        self.insert_snapshot(page, &partial.floats).ok_or(PageError::NoCapacity)
    }
}
