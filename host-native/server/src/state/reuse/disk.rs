//! Answers on disk: what was computed before a restart, or made room in memory, is not computed again.
//!
//! It is a cache in the files of [`KvDisk`]: written behind, bounded, never trusted, and nothing waits for it. A file belongs to one
//! answer, by its [`Namespace`]: a hash of the request's digest, model, tenant and the program's version.

use std::path::Path;
use std::time::Duration;

use sha2::{Digest, Sha256};
use starling::kernels::NUMERICS_VERSION;
use tokio::sync::oneshot;

use super::answer_file::{self, Updates};
use super::key::ReuseKey;
use crate::state::kv_disk::{Error, KvDisk, MAX_PAGE, Namespace, Options, PageInfo, PageKey, Stats};

/// Parts of a key in the directory: the digest of the request, one of all of [`ReuseKey`], the model's name, the tenant's.
const DIGEST: std::ops::Range<usize> = 0..16;
const WHOLE: std::ops::Range<usize> = 16..24;
const MODEL: std::ops::Range<usize> = 24..28;
const TENANT: std::ops::Range<usize> = 28..32;

/// Answers in a directory.
pub struct AnswerDisk {
    store: KvDisk,
}

impl AnswerDisk {
    /// Keeps at most `quota` bytes.
    ///
    /// # Errors
    /// If the directory cannot be used.
    pub fn open(path: &Path, quota: u64) -> Result<AnswerDisk, Error> {
        let options = Options {
            quota,
            max_page: MAX_PAGE,
            numerics_version: NUMERICS_VERSION,
            readers: 1,
            holder_of: tenant_of,
            ..Options::default()
        };
        Ok(AnswerDisk { store: KvDisk::open(path, options)? })
    }

    /// The answer of a key, and the time of its computation in milliseconds since 1970.
    pub async fn get(&self, key: &ReuseKey) -> Option<(u64, Updates)> {
        let (page, namespace) = name(key);
        if self.store.stats().is_scanned && !self.store.contains(&page) {
            return None;
        }
        let (reply, answer) = oneshot::channel();
        let read = move |mut pages: Vec<Option<Vec<u8>>>| {
            let bytes = pages.pop().flatten();
            // decoded on the thread that reads; the request may be gone
            let _ = reply.send(bytes.and_then(|bytes| answer_file::decode(&bytes).ok()));
        };
        self.store.read(vec![page], namespace, read);
        answer.await.ok().flatten()
    }

    /// Writes an answer behind.
    pub fn put(&self, key: &ReuseKey, answer: Vec<u8>) {
        let (page, namespace) = name(key);
        // one that was refused is not known any more; an equal one is not written again
        self.store.put(page, answer, PageInfo { namespace, n_tokens: 0 }, false);
    }

    /// Deletes the answers of a model, of a tenant, of an `etag`, or all.
    pub fn invalidate(&self, model: Option<&str>, tenant: Option<&str>, etag: Option<&str>) {
        let (model, tenant) = (model.map(tag), tenant.map(tag));
        let etag = etag.map(|etag| etag.trim_matches('"').to_ascii_lowercase());
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        self.store.clear_if(move |PageKey(key)| {
            model.is_none_or(|tag| key[MODEL] == tag)
                && tenant.is_none_or(|tag| key[TENANT] == tag)
                && etag.as_ref().is_none_or(|etag| etag.starts_with(&hex(&key[DIGEST])))
        });
    }

    pub fn stats(&self) -> Stats {
        self.store.stats()
    }

    /// Waits until all answers are written, at most for `limit`. Returns whether they are.
    pub fn flush_within(&self, limit: Duration) -> bool {
        self.store.flush_within(limit)
    }
}

/// The tenant of an answer: each has a share of the directory.
fn tenant_of(PageKey(key): &PageKey) -> u32 {
    u32::from_le_bytes([key[TENANT.start], key[TENANT.start + 1], key[TENANT.start + 2], key[TENANT.start + 3]])
}

/// First bytes of a name's hash.
fn tag(name: &str) -> [u8; 4] {
    let digest: [u8; 32] = Sha256::digest(name).into();
    [digest[0], digest[1], digest[2], digest[3]]
}

fn name(key: &ReuseKey) -> (PageKey, Namespace) {
    let mut whole = Sha256::new_with_prefix(key.digest);
    for part in [&*key.model, &*key.tenant, env!("CARGO_PKG_VERSION")] {
        whole.update((part.len() as u64).to_le_bytes());
        whole.update(part);
    }
    let whole: [u8; 32] = whole.finalize().into();
    let mut page = [0; 32];
    page[DIGEST].copy_from_slice(&key.digest[DIGEST]);
    page[WHOLE].copy_from_slice(&whole[..WHOLE.len()]);
    page[MODEL].copy_from_slice(&tag(&key.model));
    page[TENANT].copy_from_slice(&tag(&key.tenant));
    (PageKey(page), Namespace(whole))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::schedule::queue::Update;

    const LIMIT: Duration = Duration::from_secs(60);

    fn key(model: &str, tenant: &str, n: u8) -> ReuseKey {
        ReuseKey { model: Arc::from(model), tenant: Arc::from(tenant), digest: [n; 32] }
    }

    #[tokio::test]
    async fn a_tenant_evicts_its_own_answers_once_it_has_its_share() {
        let path = std::env::temp_dir().join(format!("starling-answer-shares-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let disk = AnswerDisk::open(&path, 40 << 10).unwrap();
        let put = |key: &ReuseKey| {
            disk.put(key, vec![7; 4000]);
            assert!(disk.flush_within(LIMIT));
        };
        put(&key("m", "a", 0));
        (0..40).for_each(|n| put(&key("m", "b", n)));
        let has = |key: &ReuseKey| disk.store.contains(&name(key).0);
        assert!(has(&key("m", "a", 0)) && has(&key("m", "b", 39)) && !has(&key("m", "b", 0)));
        drop(disk);
        std::fs::remove_dir_all(path).unwrap();
    }

    #[tokio::test]
    async fn answers_are_found_by_all_of_their_key_and_invalidated_by_its_parts() {
        let path = std::env::temp_dir().join(format!("starling-answers-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let keys = [key("m", "a", 1), key("m", "b", 1), key("n", "a", 1), key("m", "a", 2)];
        let answer = |i: usize| answer_file::encode(i as u64, &[(i, Update::Started)]).unwrap();
        let found = async |disk: &AnswerDisk| {
            let mut found = Vec::new();
            for (i, key) in keys.iter().enumerate() {
                if let Some((since, updates)) = disk.get(key).await {
                    assert_eq!((since, updates[0].0), (i as u64, i));
                    found.push(i);
                }
            }
            found
        };
        let etag = keys[0].etag();
        for (model, tenant, etag, left) in [
            (Some("m"), None, None, vec![2]),
            (None, Some("a"), None, vec![1]),
            (Some("m"), Some("a"), None, vec![1, 2]),
            (None, None, Some(etag.as_str()), vec![3]),
            (None, None, None, vec![]),
        ] {
            let disk = AnswerDisk::open(&path, 1 << 20).unwrap();
            keys.iter().enumerate().for_each(|(i, key)| disk.put(key, answer(i)));
            assert!(disk.flush_within(LIMIT));
            drop(disk);
            let disk = AnswerDisk::open(&path, 1 << 20).unwrap();
            assert_eq!(found(&disk).await, [0, 1, 2, 3]);
            disk.invalidate(model, tenant, etag);
            assert!(disk.flush_within(LIMIT));
            assert_eq!(found(&disk).await, left);
        }
        std::fs::remove_dir_all(path).unwrap();
    }
}
