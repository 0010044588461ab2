//! KV cache pages on disk.
//!
//! ```text
//! DIR/ab/abcdef….page              a page: header of 4 KiB, payload; the name is the key in hex
//! DIR/ab/abcdef….PID.ID.N.tmp      a page that a process is writing
//! ```
//!
//! It is a cache: pages may vanish at any time, and a file is never trusted. A read returns the bytes that were put
//! under the key, or nothing. No call waits for the disk, except `flush` and dropping [`KvDisk`].
//!
//! **Processes that share a directory** need no lock: files appear by rename and are never changed. Each process counts
//! the pages that it knows, so that together they can exceed the quota by what the others wrote since its last scan
//! (`Options::rescan`). They must have the same `Options::key`.
//!
//! **Eviction** removes the least recently used page. The order is kept in memory; a read sets the file's modification
//! time at most once a minute, and the next process orders the pages by that.

mod io;
mod page_file;
mod stats;
mod store;
mod table;
#[cfg(test)]
mod tests;
mod worker;

#[cfg(test)]
pub use io::WriteFile;
pub use io::{DirectoryIo, FileInfo, FilePath, Io, ReadFile};
pub use page_file::{HEADER_LEN, MAX_PAGE, Refusal};
pub use stats::Stats;
pub use store::{Error, KvDisk, Options};

/// Hash of a token prefix, model digest, numerics version, KV type, layout and tenant salt. Equal keys mean equal
/// pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageKey(pub [u8; 32]);

/// Bytes of a namespace at the end of a key.
const TAG_LEN: usize = 8;

impl PageKey {
    /// The first 192 bits of a hash, and the first 64 bits of the namespace: [`KvDisk::clear_namespace`] finds the pages by
    /// the names of their files.
    pub fn new(hash: &[u8; 32], namespace: &Namespace) -> PageKey {
        let mut key = *hash;
        key[32 - TAG_LEN..].copy_from_slice(&namespace.tag());
        PageKey(key)
    }

    fn has_tag(&self, tag: &[u8; TAG_LEN]) -> bool {
        self.0.ends_with(tag)
    }
}

/// Digest of what all pages of a model and tenant share: model digest, KV type, layout, tenant salt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Namespace(pub [u8; 32]);

impl Namespace {
    fn tag(&self) -> [u8; TAG_LEN] {
        std::array::from_fn(|i| self.0[i])
    }
}

/// Header fields of a page that the caller sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageInfo {
    pub namespace: Namespace,
    /// Length of the token prefix that ends with this page.
    pub n_tokens: u32,
}
