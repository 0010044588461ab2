//! Slots as in llama-server: a slot has the tokens of its last conversation, whose KV pages can be saved to a file and
//! restored. The prefix cache finds pages by their tokens, so a restored conversation serves requests of every slot.
//!
//! Each tenant has slots and files of its own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};
use starling::receipt::Hex;
use starling_api::update::Update;

use crate::config::ANYONE;

/// Maximum bytes of a file name.
const MAX_NAME: usize = 200;

/// The slots of a model: for each tenant as many as the model has sequences.
#[derive(Debug)]
pub struct Slots {
    n: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    tenants: BTreeMap<Arc<str>, Vec<Slot>>,
    now: u64,
}

/// Last conversation of a slot.
#[derive(Debug, Clone, Default)]
pub struct Slot {
    /// Prompt and answer.
    pub tokens: Vec<u32>,
    /// Cache salt of its request.
    pub salt: u64,
    /// Running requests.
    pub n_running: usize,
    last_used: u64,
}

impl Slots {
    pub fn new(n: usize) -> Slots {
        Slots { n, inner: Mutex::default() }
    }

    /// The slots of a tenant.
    pub fn list(&self, tenant: &str) -> Vec<Slot> {
        self.lock().tenants.get(tenant).cloned().unwrap_or_else(|| vec![Slot::default(); self.n])
    }

    /// A slot of a tenant; `None` if there is no such slot.
    pub fn get(&self, id: usize, tenant: &str) -> Option<Slot> {
        let empty = (id < self.n).then(Slot::default);
        self.lock().tenants.get(tenant).map_or(empty, |slots| slots.get(id).cloned())
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.n
    }

    /// Begins a request in slot `id`, or in the idle one that was used least recently.
    pub fn begin(self: &Arc<Self>, id: Option<usize>, tenant: &Arc<str>, tokens: &[u32], salt: u64) -> Option<SlotUse> {
        let mut inner = self.lock();
        let now = inner.tick();
        let slots = inner.of(tenant, self.n);
        let least = slots.iter().enumerate().min_by_key(|(_, slot)| (slot.n_running, slot.last_used));
        let id = id.or(least.map(|(id, _)| id))?;
        let slot = slots.get_mut(id)?;
        (slot.n_running, slot.last_used) = (slot.n_running + 1, now);
        let (slots, tenant) = (Arc::clone(self), Arc::clone(tenant));
        Some(SlotUse { slots, id, tenant, tokens: tokens.to_vec(), salt })
    }

    /// Replaces the conversation of a slot; false if there is no such slot.
    pub fn set(&self, id: usize, tenant: &Arc<str>, tokens: Vec<u32>, salt: u64) -> bool {
        let mut inner = self.lock();
        let now = inner.tick();
        let Some(slot) = inner.of(tenant, self.n).get_mut(id) else { return false };
        (slot.tokens, slot.salt, slot.last_used) = (tokens, salt, now);
        true
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// The slots of a tenant; keys bound the number of tenants.
    fn of(&mut self, tenant: &Arc<str>, n: usize) -> &mut Vec<Slot> {
        self.tenants.entry(Arc::clone(tenant)).or_insert_with(|| vec![Slot::default(); n])
    }
}

/// A request in a slot. Dropping it leaves its conversation in the slot.
#[derive(Debug)]
pub struct SlotUse {
    slots: Arc<Slots>,
    id: usize,
    tenant: Arc<str>,
    tokens: Vec<u32>,
    salt: u64,
}

impl SlotUse {
    pub fn note(&mut self, update: &Update) {
        if let Update::Token { token, .. } = update {
            self.tokens.push(*token);
        }
    }
}

impl Drop for SlotUse {
    fn drop(&mut self) {
        self.slots.set(self.id, &self.tenant, std::mem::take(&mut self.tokens), self.salt);
        let mut inner = self.slots.lock();
        if let Some(slot) = inner.tenants.get_mut(&self.tenant).and_then(|slots| slots.get_mut(self.id)) {
            slot.n_running = slot.n_running.saturating_sub(1);
        }
    }
}

/// The directory of a tenant's files: that of a server without tenants is `directory` itself. Clients cannot name what begins
/// with a dot.
pub fn directory_of(directory: &Path, tenant: &str) -> PathBuf {
    if tenant == ANYONE {
        return directory.into();
    }
    let digest: [u8; 32] = Sha256::digest(tenant).into();
    let mut start = [0; 16];
    start.copy_from_slice(&digest[..16]);
    directory.join(format!(".tenant-{}", Hex(start)))
}

/// The path of a file that a client names; `None` unless it is the plain name of a visible file.
pub fn file_path(directory: &Path, name: &str) -> Option<PathBuf> {
    let is_plain = |c: char| !c.is_control() && !matches!(c, '/' | '\\' | ':' | '*' | '?' | '"' | '<' | '>' | '|');
    let is_valid = !name.is_empty() && name.len() <= MAX_NAME && !name.starts_with('.') && name.chars().all(is_plain);
    is_valid.then(|| directory.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_cannot_leave_the_directory() {
        let directory = Path::new("/saved");
        assert_eq!(file_path(directory, "a b-1.bin"), Some("/saved/a b-1.bin".into()));
        for name in ["", ".", "..", "../x", "a/b", "/x", "a\\b", ".hidden", "a\0b", "a\nb", "C:x", &"x".repeat(201)] {
            assert_eq!(file_path(directory, name), None, "{name:?}");
        }
    }

    #[test]
    fn each_tenant_has_files_of_its_own() {
        let directory = Path::new("/saved");
        let of = |tenant: &str| file_path(&directory_of(directory, tenant), "x").unwrap();
        assert_eq!(of(ANYONE), Path::new("/saved/x"));
        assert!(of("a") != of("b") && of("a").starts_with(directory) && of("../a").parent() != Some(Path::new("/a")));
        assert_eq!(of("../../a").components().count(), 4);
    }

    #[test]
    fn a_request_takes_the_idle_slot_unused_longest_and_leaves_its_tokens() {
        let slots = Arc::new(Slots::new(2));
        let tenant: Arc<str> = "a".into();
        let first = slots.begin(None, &tenant, &[1, 2], 7).unwrap();
        let second = slots.begin(None, &tenant, &[3], 7).unwrap();
        assert_eq!((first.id, second.id), (0, 1));
        drop(second);
        assert_eq!(slots.begin(None, &tenant, &[5], 7).map(|used| used.id), Some(1));
        drop(first);
        let list = slots.list("a");
        assert_eq!((&list[0].tokens[..], &list[1].tokens[..], list[0].n_running), (&[1, 2][..], &[5][..], 0));
        let other: Arc<str> = "b".into();
        for i in 0..5 {
            drop(slots.begin(Some(i % 2), &other, &[9], 8));
        }
        assert_eq!(
            (slots.list("a")[0].tokens.as_slice(), slots.list("b")[0].tokens.as_slice()),
            (&[1, 2][..], &[9][..])
        );
        assert!(slots.list("c").iter().all(|slot| slot.tokens.is_empty()) && slots.get(2, "c").is_none());
        assert!(slots.begin(Some(2), &tenant, &[1], 7).is_none());
    }
}
