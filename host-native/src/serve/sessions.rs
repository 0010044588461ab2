//! Conversations by name: what was said so far, until they are closed, unused for long, or pushed out by newer ones.
//!
//! Keys and values of a conversation lie in the engine's prefix cache like any others; a session only remembers its
//! tokens, so that it can go on, and gives the cached pages back when it ends. A session that is being answered is
//! never removed by age.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use starling::chat::Json;

use super::queue::Forget;

/// Longest name of a session.
pub const MAX_NAME: usize = 256;

/// All sessions.
#[derive(Debug)]
pub struct Sessions {
    inner: Mutex<BTreeMap<Key, Session>>,
    ttl: Duration,
    most: usize,
}

/// Tenants have names of their own.
type Key = (Arc<str>, Arc<str>);

#[derive(Debug)]
struct Session {
    /// Prompt and answers so far.
    tokens: Vec<u32>,
    history: History,
    salt: u64,
    last_used: Instant,
    /// Requests that it answers now.
    in_flight: usize,
}

/// What was said, as the session's requests said it.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum History {
    /// Nothing yet, or by requests that bring all of it themselves.
    #[default]
    None,
    /// Text that goes on and on: its tokens are all there is.
    Text,
    /// Messages.
    Messages(Vec<Json>),
}

/// A session cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// It is answering.
    #[error("the session is answering another request; its turns come one after the other")]
    Busy,
    /// Too many, all of them busy.
    #[error("all {0} sessions are in use; try again later")]
    Full(usize),
}

/// A session in use: until it is dropped, nobody else has it.
#[derive(Debug)]
pub struct Turn {
    sessions: Arc<Sessions>,
    key: Key,
    /// The conversation so far.
    pub tokens: Vec<u32>,
    /// The same, as it was said.
    pub history: History,
}

impl Sessions {
    /// None yet.
    pub fn new(ttl: Duration, most: usize) -> Sessions {
        Sessions { inner: Mutex::default(), ttl, most }
    }

    /// Opens or continues a session for one turn. Says which others it pushed out.
    ///
    /// # Errors
    /// If it is in use, or too many are.
    pub fn begin(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        name: &Arc<str>,
        salt: u64,
        now: Instant,
    ) -> Result<(Turn, Vec<Forget>), SessionError> {
        let key = (Arc::clone(tenant), Arc::clone(name));
        let mut all = self.lock();
        let mut out = expire(&mut all, self.ttl, now);
        if !all.contains_key(&key) {
            if all.len() >= self.most {
                let idle = all.iter().filter(|(_, s)| s.in_flight == 0);
                let oldest = idle.min_by_key(|(_, s)| s.last_used).map(|(key, _)| key.clone());
                let oldest = oldest.ok_or(SessionError::Full(self.most))?;
                out.extend(all.remove(&oldest).and_then(Session::forget));
            }
            let (tokens, history) = (Vec::new(), History::None);
            let session = Session { tokens, history, salt, last_used: now, in_flight: 0 };
            all.insert(key.clone(), session);
        }
        let (tokens, history) = match all.get_mut(&key) {
            Some(session) if session.in_flight > 0 => return Err(SessionError::Busy),
            Some(session) => {
                session.in_flight += 1;
                session.last_used = now;
                (session.tokens.clone(), session.history.clone())
            }
            None => (Vec::new(), History::None),
        };
        drop(all);
        Ok((Turn { sessions: Arc::clone(self), key, tokens, history }, out))
    }

    /// Notes what a conversation is by now, for requests that bring all of it themselves. Says what was pushed out.
    pub fn note(&self, tenant: &Arc<str>, name: &Arc<str>, salt: u64, tokens: Vec<u32>, now: Instant) -> Vec<Forget> {
        let key = (Arc::clone(tenant), Arc::clone(name));
        let mut all = self.lock();
        let mut out = expire(&mut all, self.ttl, now);
        if !all.contains_key(&key) && all.len() >= self.most {
            let idle = all.iter().filter(|(_, s)| s.in_flight == 0);
            let Some(oldest) = idle.min_by_key(|(_, s)| s.last_used).map(|(key, _)| key.clone()) else { return out };
            out.extend(all.remove(&oldest).and_then(Session::forget));
        }
        if all.get(&key).is_some_and(|s| s.in_flight > 0 || s.history != History::None) {
            // its own turns say what it is
            return out;
        }
        all.insert(key, Session { tokens, history: History::None, salt, last_used: now, in_flight: 0 });
        out
    }

    /// Closes a session. `None` if there is none of that name; otherwise what it leaves in the cache.
    pub fn close(&self, tenant: &Arc<str>, name: &Arc<str>) -> Option<Option<Forget>> {
        let session = self.lock().remove(&(Arc::clone(tenant), Arc::clone(name)))?;
        Some(session.forget())
    }

    /// Closes those unused for too long.
    pub fn expire(&self, now: Instant) -> Vec<Forget> {
        expire(&mut self.lock(), self.ttl, now)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Session>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn expire(all: &mut BTreeMap<Key, Session>, ttl: Duration, now: Instant) -> Vec<Forget> {
    let old = |s: &Session| s.in_flight == 0 && now.saturating_duration_since(s.last_used) > ttl;
    let keys: Vec<Key> = all.iter().filter(|(_, s)| old(s)).map(|(key, _)| key.clone()).collect();
    keys.iter().filter_map(|key| all.remove(key)?.forget()).collect()
}

impl Session {
    fn forget(self) -> Option<Forget> {
        (!self.tokens.is_empty()).then_some(Forget { tokens: self.tokens, salt: self.salt })
    }
}

impl Turn {
    /// What the conversation is after this turn.
    pub fn end(self, tokens: Vec<u32>, history: History) {
        if let Some(session) = self.sessions.lock().get_mut(&self.key) {
            (session.tokens, session.history) = (tokens, history);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(session) = self.sessions.lock().get_mut(&self.key) {
            session.in_flight = session.in_flight.saturating_sub(1);
            session.last_used = session.last_used.max(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Arc<str> {
        text.into()
    }

    #[test]
    fn a_session_goes_on_and_ends() {
        let sessions = Arc::new(Sessions::new(Duration::from_secs(10), 2));
        let now = Instant::now();
        let (a, b) = (name("a"), name("b"));
        let (turn, _) = sessions.begin(&a, &name("x"), 7, now).unwrap();
        assert!(turn.tokens.is_empty());
        assert_eq!(sessions.begin(&a, &name("x"), 7, now).unwrap_err(), SessionError::Busy);
        turn.end(vec![1, 2], History::Text);
        // another tenant's session of the same name is another
        let (other, _) = sessions.begin(&b, &name("x"), 7, now).unwrap();
        assert!(other.tokens.is_empty());
        let (again, _) = sessions.begin(&a, &name("x"), 7, now).unwrap();
        assert_eq!(again.tokens, [1, 2]);
        drop(again);
        // the other is in use, so the first makes room
        let (new, out) = sessions.begin(&a, &name("y"), 7, now).unwrap();
        assert_eq!(out, [Forget { tokens: vec![1, 2], salt: 7 }]);
        assert_eq!(sessions.begin(&a, &name("z"), 7, now).unwrap_err(), SessionError::Full(2));
        drop((other, new));
        assert_eq!(sessions.close(&b, &name("x")), Some(None));
        assert_eq!(sessions.close(&b, &name("x")), None);
    }

    #[test]
    fn age_closes_what_is_not_in_use() {
        let sessions = Arc::new(Sessions::new(Duration::from_secs(10), 8));
        let now = Instant::now();
        let (turn, _) = sessions.begin(&name("a"), &name("x"), 0, now).unwrap();
        let (busy, _) = sessions.begin(&name("a"), &name("y"), 0, now).unwrap();
        turn.end(vec![5], History::Text);
        assert!(sessions.expire(now + Duration::from_secs(5)).is_empty());
        assert_eq!(sessions.expire(now + Duration::from_secs(60)).len(), 1);
        assert_eq!(sessions.len(), 1);
        drop(busy);
    }
}
