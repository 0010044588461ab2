//! Slots as in llama-server: a slot has the tokens of its last conversation, whose KV pages can be saved to a file and
//! restored. The prefix cache finds pages by their tokens, so a restored conversation serves requests of every slot.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use starling_api::update::Update;

/// Maximum bytes of a file name.
const MAX_NAME: usize = 200;

/// The slots of a model, as many as it has sequences.
#[derive(Debug)]
pub struct Slots {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    slots: Vec<Slot>,
    now: u64,
}

/// Last conversation of a slot.
#[derive(Debug, Clone, Default)]
pub struct Slot {
    pub tenant: Arc<str>,
    /// Prompt and answer.
    pub tokens: Vec<u32>,
    /// Cache salt of its request.
    pub salt: u64,
    /// Running requests.
    pub n_running: usize,
    last_used: u64,
}

impl Slot {
    /// That of another tenant is empty.
    fn seen_by(&self, tenant: &str) -> Slot {
        match &*self.tenant == tenant {
            true => self.clone(),
            false => Slot { n_running: self.n_running, ..Slot::default() },
        }
    }
}

impl Slots {
    pub fn new(n: usize) -> Slots {
        Slots { inner: Mutex::new(Inner { slots: vec![Slot::default(); n], now: 0 }) }
    }

    /// The slots as a tenant sees them: those of others are empty.
    pub fn list(&self, tenant: &str) -> Vec<Slot> {
        self.lock().slots.iter().map(|slot| slot.seen_by(tenant)).collect()
    }

    /// A slot as a tenant sees it; `None` if there is no such slot.
    pub fn get(&self, id: usize, tenant: &str) -> Option<Slot> {
        self.lock().slots.get(id).map(|slot| slot.seen_by(tenant))
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.lock().slots.len()
    }

    /// Begins a request in slot `id`, or in the idle one that was used least recently.
    pub fn begin(self: &Arc<Self>, id: Option<usize>, tenant: &Arc<str>, tokens: &[u32], salt: u64) -> Option<SlotUse> {
        let mut inner = self.lock();
        inner.now += 1;
        let now = inner.now;
        let least = inner.slots.iter().enumerate().min_by_key(|(_, slot)| (slot.n_running, slot.last_used));
        let id = id.or(least.map(|(id, _)| id))?;
        let slot = inner.slots.get_mut(id)?;
        (slot.n_running, slot.last_used) = (slot.n_running + 1, now);
        let (slots, tenant) = (Arc::clone(self), Arc::clone(tenant));
        Some(SlotUse { slots, id, tenant, tokens: tokens.to_vec(), salt })
    }

    /// Replaces the conversation of a slot; false if there is no such slot.
    pub fn set(&self, id: usize, tenant: &Arc<str>, tokens: Vec<u32>, salt: u64) -> bool {
        let mut inner = self.lock();
        inner.now += 1;
        let now = inner.now;
        let Some(slot) = inner.slots.get_mut(id) else { return false };
        (slot.tenant, slot.tokens, slot.salt, slot.last_used) = (Arc::clone(tenant), tokens, salt, now);
        true
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
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
        if let Some(slot) = self.slots.lock().slots.get_mut(self.id) {
            slot.n_running = slot.n_running.saturating_sub(1);
        }
    }
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
        assert!(slots.list("b").iter().all(|slot| slot.tokens.is_empty()));
        assert!(slots.begin(Some(2), &tenant, &[1], 7).is_none());
    }
}
