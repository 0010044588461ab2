//! What outlives a request: sessions, slots, KV pages on disk, stored rows, answers that are used again.

pub mod directory;
pub mod fields;
pub mod kv_disk;
pub mod reuse;
pub mod sessions;
pub mod share;
pub mod slots;
pub mod store;
