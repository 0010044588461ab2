//! Keys of KV pages.

use sha2::{Digest, Sha256};

use crate::kernels::NUMERICS_VERSION;
use crate::kernels::attention::{KvHeads, KvLayout};

/// SHA-256 over numerics version, model, layout, salt and all tokens up to the page's end, page by page:
/// `key_0 = H(root, salt)`, `key_i = H(key_{i-1}, tokens of page i)`, numbers little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageKey(pub [u8; 32]);

/// Hash that all keys of an arena start from.
pub(super) fn root(layout: &KvLayout, fingerprint: &[u8; 32]) -> [u8; 32] {
    let mut h = Sha256::new();
    h.update(b"starling-kv/1");
    // pages of another numerics version have other bits
    h.update(NUMERICS_VERSION.to_le_bytes());
    h.update(fingerprint);
    h.update(layout_bytes(layout));
    h.finalize().into()
}

/// A layout in 16 bytes: layers, KV heads, head dimension, KV type; u32 each. Where layers differ, or keys and values,
/// a digest of all of them takes the place of heads and dimension.
pub(super) fn layout_bytes(layout: &KvLayout) -> [u8; 16] {
    let all = layout.layers().iter().map(|layer| layer.heads);
    let first = all.clone().next().unwrap_or(KvHeads::separate(1, 1, 1));
    let is_plain = first == KvHeads::separate(first.n, first.key_dim, first.key_dim);
    let [heads, dim] = match is_plain && all.clone().all(|heads| heads == first) {
        true => [first.n as u32, first.key_dim as u32],
        false => {
            let mut h = Sha256::new();
            for heads in all {
                [heads.n, heads.key_dim, heads.value_dim, usize::from(heads.latent) + 2 * usize::from(heads.exact)]
                    .iter()
                    .for_each(|n| h.update((*n as u64).to_le_bytes()));
            }
            let digest = h.finalize();
            [0, 4].map(|at| u32::from_le_bytes([digest[at], digest[at + 1], digest[at + 2], digest[at + 3]]))
        }
    };
    let numbers = [layout.layers().len() as u32, heads, dim, layout.kv_type() as u32];
    let mut bytes = [0; 16];
    bytes.chunks_exact_mut(4).zip(numbers).for_each(|(b, n)| b.copy_from_slice(&n.to_le_bytes()));
    bytes
}

impl PageKey {
    /// The parent key of the first page of a prefix.
    pub(super) fn root_of(root: &[u8; 32], salt: u64) -> PageKey {
        let mut h = Sha256::new();
        h.update(root);
        h.update(salt.to_le_bytes());
        PageKey(h.finalize().into())
    }

    /// Key of part `i` of the page's snapshot, for hosts that keep parts under keys of their own: the page's key with other
    /// first bytes.
    pub fn snapshot_part(&self, i: u32) -> PageKey {
        let mut key = *self;
        key.0.iter_mut().zip(i.wrapping_add(1).to_le_bytes()).for_each(|(byte, i)| *byte ^= i);
        key
    }

    /// The key of the child page with `tokens`.
    pub(super) fn child(&self, tokens: &[u32]) -> PageKey {
        let mut h = Sha256::new();
        h.update(self.0);
        tokens.iter().for_each(|t| h.update(t.to_le_bytes()));
        PageKey(h.finalize().into())
    }
}
