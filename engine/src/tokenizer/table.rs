//! Hash tables for untrusted vocabularies.
//!
//! Open addressing, at most three quarters full. The hash key is a digest of the vocabulary, so a file cannot contain
//! colliding entries. User text is only looked up, never inserted, so a lookup is no longer than the longest run of
//! occupied slots. Results do not depend on the order of slots.

use alloc::vec;
use alloc::vec::Vec;

/// Key of the hash functions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seed(u64, u64);

impl Seed {
    /// A key from a digest of everything that will be inserted.
    pub(super) fn new(digest: [u8; 32]) -> Seed {
        let word = |i: usize| u64::from_le_bytes(core::array::from_fn(|j| digest[i + j]));
        Seed(word(0), word(8) | 1)
    }

    #[inline(always)]
    fn mix(self, a: u64, b: u64) -> u64 {
        let product = u128::from(a ^ self.0) * u128::from(b ^ self.1);
        (product as u64) ^ (product >> 64) as u64
    }

    #[inline(always)]
    pub(super) fn hash_pair(self, a: u32, b: u32) -> u64 {
        let pair = u64::from(a) << 32 | u64::from(b);
        self.mix(pair, pair.rotate_left(32) ^ 0x9e37_79b9_7f4a_7c15)
    }

    #[inline(always)]
    pub(super) fn hash_bytes(self, bytes: &[u8]) -> u64 {
        let mut hash = bytes.len() as u64;
        let (chunks, rest) = bytes.as_chunks::<8>();
        for chunk in chunks {
            hash = self.mix(hash, u64::from_le_bytes(*chunk));
        }
        let mut last = 0;
        for &byte in rest {
            last = last << 8 | u64::from(byte);
        }
        self.mix(hash, last ^ 0x9e37_79b9_7f4a_7c15)
    }
}

/// Number of slots for `n` entries; at least one stays empty.
fn capacity(n: usize) -> usize {
    (n + n.div_ceil(3)).next_power_of_two()
}

/// Maps strings to ids. The strings are stored elsewhere; `text(id)` returns them.
#[derive(Debug, Clone)]
pub(super) struct TextTable {
    seed: Seed,
    /// id + 1 in the bits of `ids`, bits of the hash in the others; 0 is an empty slot.
    slots: Vec<u32>,
    ids: u32,
}

impl TextTable {
    /// A table of the ids below `n` for which `wanted` returns true. Of equal strings the first is kept.
    pub(super) fn new<'t>(
        seed: Seed,
        n: usize,
        wanted: impl Fn(u32) -> bool,
        text: impl Fn(u32) -> &'t [u8] + Copy,
    ) -> TextTable {
        let ids = (n + 1).next_power_of_two() as u32 - 1;
        let mut table = TextTable { seed, slots: vec![0; capacity(n)], ids };
        for id in (0..n as u32).filter(|&id| wanted(id)) {
            let hash = seed.hash_bytes(text(id));
            if let Err(free) = table.find(hash, text(id), text) {
                table.slots[free] = table.tag(hash) | (id + 1);
            }
        }
        table
    }

    /// The bits of a hash that are stored in slots.
    #[inline(always)]
    fn tag(&self, hash: u64) -> u32 {
        (hash >> 32) as u32 & !self.ids
    }

    #[inline]
    pub(super) fn get<'t>(&self, key: &[u8], text: impl Fn(u32) -> &'t [u8]) -> Option<u32> {
        self.find(self.seed.hash_bytes(key), key, text).ok()
    }

    #[inline]
    fn find<'t>(&self, hash: u64, key: &[u8], text: impl Fn(u32) -> &'t [u8]) -> Result<u32, usize> {
        let (mask, tag) = (self.slots.len() - 1, self.tag(hash));
        let mut at = hash as usize & mask;
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                return Err(at);
            }
            let id = (slot & self.ids).wrapping_sub(1);
            if slot & !self.ids == tag && text(id) == key {
                return Ok(id);
            }
            at = (at + 1) & mask;
        }
    }
}

/// Maps pairs of ids to merge ranks.
#[derive(Debug, Clone)]
pub(super) struct PairTable {
    seed: Seed,
    /// Left id, right id, rank; a rank of `u32::MAX` is an empty slot.
    slots: Vec<[u32; 3]>,
}

impl PairTable {
    /// A table of pairs, whose ranks are their indices. Of equal pairs the first is kept.
    pub(super) fn new(seed: Seed, pairs: &[(u32, u32)]) -> PairTable {
        let mut table = PairTable { seed, slots: vec![[0, 0, u32::MAX]; capacity(pairs.len())] };
        for (rank, &(a, b)) in (0..).zip(pairs) {
            if let Err(free) = table.find(a, b) {
                table.slots[free] = [a, b, rank];
            }
        }
        table
    }

    #[inline]
    pub(super) fn get(&self, a: u32, b: u32) -> Option<u32> {
        self.find(a, b).ok()
    }

    #[inline]
    fn find(&self, a: u32, b: u32) -> Result<u32, usize> {
        let mask = self.slots.len() - 1;
        let mut at = self.seed.hash_pair(a, b) as usize & mask;
        loop {
            let [left, right, rank] = self.slots[at];
            if rank == u32::MAX {
                return Err(at);
            }
            if left == a && right == b {
                return Ok(rank);
            }
            at = (at + 1) & mask;
        }
    }
}
