//! Sessions: conversations by name, kept until they are closed, expire, or are evicted for newer ones.
//!
//! A session holds tokens and messages. Its KV pages are in the engine's prefix cache like any others; closing the session
//! evicts them. A session with a turn in progress neither expires nor is evicted. When the table is full, a session of the
//! tenant that holds most is closed: see [`share`].
//!
//! Each session has a unique generation number, so that a turn that ends after its session was closed does not write to a
//! new session of the same name.

use std::collections::BTreeMap;
use std::mem;
use std::time::{Duration, Instant};

use starling::chat::Json;

use super::share;
use crate::schedule::queue::PrefixEviction;
use crate::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum length of a session's name in bytes.
pub const MAX_NAME: usize = 256;

#[derive(Debug, Clone, Copy)]
pub struct SessionLimits {
    /// Time without use after which a session is closed.
    pub ttl: Duration,
    /// Number of sessions.
    pub count: usize,
    /// Bytes of one conversation.
    pub bytes: usize,
    /// Bytes of all conversations.
    pub total_bytes: usize,
}

/// Keeps sessions beyond the process.
pub trait Journal: std::fmt::Debug + Send + Sync {
    /// A session that was written is closed, has expired, or was evicted. Called under the table's lock, in the order of the
    /// changes: it must not wait.
    fn removed(&self, tenant: &str, name: &str);
}

#[derive(Debug)]
pub struct Sessions {
    table: Mutex<Table>,
    limits: SessionLimits,
}

#[derive(Debug, Default)]
struct Table {
    sessions: BTreeMap<Key, Session>,
    next_generation: u64,
    /// Number of times that the model was replaced.
    epoch: u64,
    /// Sum of [`Session::bytes`].
    bytes: usize,
    journal: Option<Arc<dyn Journal>>,
}

/// Tenant and name: tenants do not share names.
type Key = (Arc<str>, Arc<str>);

#[derive(Debug)]
struct Session {
    generation: u64,
    conversation: Conversation,
    /// Bytes of the conversation, with those that a turn in progress has reserved.
    bytes: usize,
    salt: u64,
    last_used: Instant,
    /// Whether a turn is in progress.
    is_busy: bool,
    /// Requests that use it and have not ended.
    n_requests: usize,
    /// Whether the journal may have it.
    is_written: bool,
}

#[derive(Debug, Clone, Default)]
pub struct Conversation {
    /// Tokens of prompts and answers so far.
    pub tokens: Arc<Vec<u32>>,
    pub history: History,
}

/// The conversation in the form of the session's requests.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum History {
    /// Empty, or the requests send the whole conversation each time.
    #[default]
    None,
    /// Raw text, kept as tokens only.
    Text,
    /// Raw text of a session whose model was replaced: another tokenizer may have other tokens.
    Decoded(Arc<str>),
    Messages(Arc<Vec<Json>>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    #[error("the session is answering another request; send one turn after the other")]
    Busy,
    #[error("all {0} sessions (--max-sessions) are answering requests; try again later")]
    Full(usize),
    #[error(
        "this turn needs {found} bytes for the session's messages and tokens, expected at most {limit} (--session-memory); \
         close the session or open another"
    )]
    TooLarge { found: usize, limit: usize },
    /// The sum of all conversations is too large, and no idle session is left to evict.
    #[error(
        "sessions would hold {found} bytes of messages and tokens with this turn, expected at most {limit} \
         (--sessions-memory), and no idle one of a tenant with more is left to close; try again later"
    )]
    NoMemory { found: usize, limit: usize },
}

/// Exclusive use of a session until it is dropped.
#[derive(Debug)]
pub struct Turn {
    guard: SessionGuard,
    /// [`Table::epoch`] at the begin of the turn.
    epoch: u64,
    /// The conversation so far.
    pub conversation: Conversation,
}

/// A request's use of one generation of a session, counted until it is dropped.
#[derive(Debug)]
pub struct SessionGuard {
    sessions: Arc<Sessions>,
    key: Key,
    generation: u64,
    salt: u64,
}

impl Sessions {
    pub fn new(limits: SessionLimits, journal: Option<Arc<dyn Journal>>) -> Sessions {
        Sessions { table: Mutex::new(Table { journal, ..Table::default() }), limits }
    }

    /// Opens a session of the journal, unless there is no room or one of that name. Returns whether it is open.
    pub fn restore(
        &self,
        tenant: &Arc<str>,
        name: &Arc<str>,
        salt: u64,
        conversation: Conversation,
        last_used: Instant,
    ) -> bool {
        let (bytes, mut table) = (conversation.bytes(), self.lock());
        let key = (Arc::clone(tenant), Arc::clone(name));
        if table.sessions.contains_key(&key) {
            return true;
        }
        // the rows come with the most recently used first: those of the tenant itself are not to give way
        while table.sessions.len() >= self.limits.count {
            match table.least(&key.0, 1, |_| 1, None).filter(|least| least.0 != key.0) {
                Some(least) => drop(table.remove(&least)),
                None => return false,
            }
        }
        while table.bytes.saturating_add(bytes) > self.limits.total_bytes {
            match table.least(&key.0, bytes, |session| session.bytes, None).filter(|least| least.0 != key.0) {
                Some(least) => drop(table.remove(&least)),
                None => return false,
            }
        }
        let generation = table.next_generation();
        table.bytes += bytes;
        let (is_busy, n_requests, is_written) = (false, 0, true);
        let session = Session { generation, conversation, bytes, salt, last_used, is_busy, n_requests, is_written };
        table.sessions.insert(key, session);
        true
    }

    /// Opens or continues a session for one turn. Returns the evicted sessions' conversations, to remove from the cache.
    ///
    /// # Errors
    /// If the session is busy, or there are too many and all are busy.
    pub fn begin(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        name: &Arc<str>,
        salt: u64,
        now: Instant,
    ) -> Result<(Turn, Vec<PrefixEviction>), SessionError> {
        let key = (Arc::clone(tenant), Arc::clone(name));
        let mut table = self.lock();
        let evicted = table.open(&key, salt, &self.limits, now)?;
        let session = table.sessions.get_mut(&key).filter(|session| !session.is_busy).ok_or(SessionError::Busy)?;
        session.is_busy = true;
        session.last_used = now;
        session.n_requests += 1;
        let (conversation, generation, epoch) = (session.conversation.clone(), session.generation, table.epoch);
        drop(table);
        Ok((
            Turn { guard: SessionGuard { sessions: Arc::clone(self), key, generation, salt }, epoch, conversation },
            evicted,
        ))
    }

    /// Opens a session, unless it exists, for a request that sends the whole conversation. Returns the evicted sessions'
    /// conversations, to remove from the cache.
    ///
    /// # Errors
    /// If there are too many sessions and all are busy.
    pub fn acquire(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        name: &Arc<str>,
        salt: u64,
        now: Instant,
    ) -> Result<(SessionGuard, Vec<PrefixEviction>), SessionError> {
        let key = (Arc::clone(tenant), Arc::clone(name));
        let mut table = self.lock();
        let evicted = table.open(&key, salt, &self.limits, now)?;
        let session = table.sessions.get_mut(&key).ok_or(SessionError::Full(self.limits.count))?;
        session.n_requests += 1;
        let generation = session.generation;
        drop(table);
        Ok((SessionGuard { sessions: Arc::clone(self), key, generation, salt }, evicted))
    }

    /// Closes a session. `None` if it does not exist; otherwise its conversation, to remove from the cache.
    pub fn close(&self, tenant: &Arc<str>, name: &Arc<str>) -> Option<Option<PrefixEviction>> {
        let session = self.lock().remove(&(Arc::clone(tenant), Arc::clone(name)))?;
        Some(session.into_eviction())
    }

    /// Closes the sessions unused for longer than `ttl`.
    pub fn expire(&self, now: Instant) -> Vec<PrefixEviction> {
        self.lock().expire(self.limits.ttl, now)
    }

    /// Keeps conversations as text, because another model takes the place of the one that made their tokens. Messages are
    /// rendered for each turn anyway; of requests that send the whole conversation nothing remains to be known.
    pub fn detach(&self, decode: impl Fn(&[u32]) -> String) {
        let mut table = self.lock();
        table.epoch += 1;
        let keys: Vec<Key> = table.sessions.keys().cloned().collect();
        for key in keys {
            let Some(session) = table.sessions.get_mut(&key) else { continue };
            let conversation = mem::take(&mut session.conversation).detach(&decode);
            let bytes = conversation.bytes();
            session.conversation = conversation;
            table.set_bytes(&key, bytes, usize::MAX);
        }
    }

    pub fn len(&self) -> usize {
        self.lock().sessions.len()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Adds a session unless it exists. Returns expired and evicted conversations.
    fn open(
        &mut self,
        key: &Key,
        salt: u64,
        limits: &SessionLimits,
        now: Instant,
    ) -> Result<Vec<PrefixEviction>, SessionError> {
        let mut evicted = self.expire(limits.ttl, now);
        if self.sessions.contains_key(key) {
            return Ok(evicted);
        }
        if self.sessions.len() >= limits.count {
            let oldest = self.least(&key.0, 1, |_| 1, None).ok_or(SessionError::Full(limits.count))?;
            evicted.extend(self.remove(&oldest).and_then(Session::into_eviction));
        }
        let (generation, conversation) = (self.next_generation(), Conversation::default());
        let (bytes, last_used, is_busy, n_requests, is_written) = (0, now, false, 0, false);
        let session = Session { generation, conversation, bytes, salt, last_used, is_busy, n_requests, is_written };
        self.sessions.insert(key.clone(), session);
        Ok(evicted)
    }

    fn next_generation(&mut self) -> u64 {
        self.next_generation += 1;
        self.next_generation
    }

    fn remove(&mut self, key: &Key) -> Option<Session> {
        let session = self.sessions.remove(key)?;
        self.bytes -= session.bytes;
        if let Some(journal) = self.journal.as_ref().filter(|_| session.is_written) {
            journal.removed(&key.0, &key.1);
        }
        Some(session)
    }

    fn expire(&mut self, ttl: Duration, now: Instant) -> Vec<PrefixEviction> {
        let is_old = |s: &Session| !s.is_busy && now.saturating_duration_since(s.last_used) > ttl;
        let keys: Vec<Key> = self.sessions.iter().filter(|(_, s)| is_old(s)).map(|(key, _)| key.clone()).collect();
        keys.iter().filter_map(|key| self.remove(key)?.into_eviction()).collect()
    }

    /// The idle session that is to give way to `more` of `amount` for a tenant, other than `except`: of the tenant that holds most
    /// of it, the least recently used.
    fn least(
        &self,
        tenant: &str,
        more: usize,
        amount: impl Fn(&Session) -> usize,
        except: Option<&Key>,
    ) -> Option<Key> {
        let mut held = BTreeMap::from([(tenant, more)]);
        for ((tenant, _), session) in &self.sessions {
            *held.entry(tenant).or_default() += amount(session);
        }
        let idle = self.sessions.iter().filter(|(key, s)| !s.is_busy && Some(*key) != except);
        share::victim(idle.map(|(key, s)| (key, &*key.0, s.last_used)), &held, tenant).cloned()
    }

    /// Sets a session's bytes, then evicts idle sessions until the sum is at most `limit`, and returns their conversations.
    /// If the others are busy, or of tenants that hold less, the sum stays above the limit.
    fn set_bytes(&mut self, key: &Key, bytes: usize, limit: usize) -> Vec<PrefixEviction> {
        let mut evicted = Vec::new();
        if let Some(session) = self.sessions.get_mut(key) {
            self.bytes = self.bytes - session.bytes + bytes;
            session.bytes = bytes;
        }
        while self.bytes > limit
            && let Some(least) = self.least(&key.0, 0, |session| session.bytes, Some(key))
        {
            evicted.extend(self.remove(&least).and_then(Session::into_eviction));
        }
        evicted
    }
}

impl Session {
    fn into_eviction(self) -> Option<PrefixEviction> {
        let tokens = self.conversation.tokens;
        (!tokens.is_empty()).then(|| PrefixEviction { tokens: Arc::unwrap_or_clone(tokens), salt: self.salt })
    }
}

impl Conversation {
    /// The conversation without tokens.
    pub fn detach(self, decode: impl Fn(&[u32]) -> String) -> Conversation {
        let history = match self.history {
            History::Text => History::Decoded(decode(&self.tokens).into()),
            history => history,
        };
        Conversation { tokens: Arc::default(), history }
    }

    /// Size in memory.
    pub fn bytes(&self) -> usize {
        let messages = match &self.history {
            History::None | History::Text => 0,
            History::Decoded(text) => text.len(),
            History::Messages(messages) => messages.iter().map(json_bytes).sum(),
        };
        messages + size_of_val(self.tokens.as_slice())
    }
}

/// Size in memory.
fn json_bytes(value: &Json) -> usize {
    let inside = match value {
        Json::Str(text) => text.len(),
        Json::Array(items) => items.iter().map(json_bytes).sum(),
        Json::Object(fields) => {
            fields.iter().map(|(name, value)| size_of::<String>() + name.len() + json_bytes(value)).sum()
        }
        _ => 0,
    };
    size_of::<Json>() + inside
}

impl SessionGuard {
    /// The session; `None` if it was closed since.
    fn session<'a>(&self, table: &'a mut Table) -> Option<&'a mut Session> {
        table.sessions.get_mut(&self.key).filter(|session| session.generation == self.generation)
    }

    /// Tenant of the session.
    pub fn tenant(&self) -> &str {
        &self.key.0
    }

    /// Name of the session.
    pub fn name(&self) -> &str {
        &self.key.1
    }

    /// Salt of its prefix cache.
    pub fn salt(&self) -> u64 {
        self.salt
    }

    /// Stores the tokens of a conversation that the session's requests send whole, and calls `write`, which must not wait.
    /// Returns conversations to remove from the cache: this one, if the session was closed since.
    pub fn store_tokens(self, tokens: Vec<u32>, write: Option<impl FnOnce()>) -> Vec<PrefixEviction> {
        let mut table = self.sessions.lock();
        let Some(session) = self.session(&mut table) else { return vec![PrefixEviction { tokens, salt: self.salt }] };
        if session.is_busy || session.conversation.history != History::None {
            // turns of `begin` own the conversation
            return Vec::new();
        }
        let bytes = size_of_val(tokens.as_slice());
        session.conversation.tokens = Arc::new(tokens);
        session.last_used = session.last_used.max(Instant::now());
        if let Some(write) = write {
            session.is_written = true;
            write();
        }
        table.set_bytes(&self.key, bytes, self.sessions.limits.total_bytes)
    }
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        let mut table = self.sessions.lock();
        let Some(session) = self.session(&mut table) else { return };
        session.n_requests -= 1;
        // none of its requests has produced an answer
        if session.n_requests == 0 && session.conversation.tokens.is_empty() {
            table.remove(&self.key);
        }
    }
}

impl Turn {
    /// Whether the model was replaced during the turn. Then its tokens are of the old one: see [`Conversation::detach`].
    pub fn is_detached(&self) -> bool {
        self.guard.sessions.lock().epoch != self.epoch
    }

    /// Writes the session into the journal, unless it was closed since. `write` must not wait: the table is locked, so that a
    /// later removal comes after it.
    pub fn write<T>(&self, write: impl FnOnce() -> T) -> Option<T> {
        let mut table = self.guard.sessions.lock();
        self.guard.session(&mut table)?.is_written = true;
        Some(write())
    }

    /// The use of the session.
    pub fn guard(&self) -> &SessionGuard {
        &self.guard
    }

    /// Reserves memory for the conversation with this turn. Returns the evicted sessions' conversations.
    ///
    /// # Errors
    /// If the limit of one session or of all sessions is exceeded.
    pub fn reserve(&self, conversation: &Conversation) -> Result<Vec<PrefixEviction>, SessionError> {
        let (found, limits) = (conversation.bytes(), self.guard.sessions.limits);
        if found > limits.bytes {
            return Err(SessionError::TooLarge { found, limit: limits.bytes });
        }
        let mut table = self.guard.sessions.lock();
        let Some(session) = self.guard.session(&mut table) else { return Ok(Vec::new()) };
        let before = session.bytes;
        let evicted = table.set_bytes(&self.guard.key, found, limits.total_bytes);
        if table.bytes > limits.total_bytes {
            let (found, limit) = (table.bytes, limits.total_bytes);
            table.set_bytes(&self.guard.key, before, usize::MAX);
            return Err(SessionError::NoMemory { found, limit });
        }
        Ok(evicted)
    }

    /// Stores the conversation after this turn. Returns conversations to remove from the cache: this one, if the session was
    /// closed since.
    pub fn end(self, conversation: Conversation) -> Vec<PrefixEviction> {
        let mut table = self.guard.sessions.lock();
        let Some(session) = self.guard.session(&mut table) else {
            let tokens = Arc::unwrap_or_clone(conversation.tokens);
            return vec![PrefixEviction { tokens, salt: self.guard.salt }];
        };
        let bytes = conversation.bytes();
        session.conversation = conversation;
        table.set_bytes(&self.guard.key, bytes, self.guard.sessions.limits.total_bytes)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut table = self.guard.sessions.lock();
        let Some(session) = self.guard.session(&mut table) else { return };
        session.is_busy = false;
        session.last_used = session.last_used.max(Instant::now());
        let bytes = session.conversation.bytes();
        // without `end` the turn added nothing: undo `reserve`
        table.set_bytes(&self.guard.key, bytes, usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: SessionLimits =
        SessionLimits { ttl: Duration::from_secs(10), count: 2, bytes: 1000, total_bytes: 1500 };

    fn name(text: &str) -> Arc<str> {
        text.into()
    }

    fn text(tokens: &[u32]) -> Conversation {
        Conversation { tokens: Arc::new(tokens.to_vec()), history: History::Text }
    }

    fn begin(sessions: &Arc<Sessions>, session: &str) -> Result<(Turn, Vec<PrefixEviction>), SessionError> {
        sessions.begin(&name("a"), &name(session), 7, Instant::now())
    }

    #[test]
    fn a_session_continues_until_it_is_closed_or_evicted() {
        let sessions = Arc::new(Sessions::new(LIMITS, None));
        let now = Instant::now();
        let (a, b) = (name("a"), name("b"));
        let (turn, _) = sessions.begin(&a, &name("x"), 7, now).unwrap();
        assert!(turn.conversation.tokens.is_empty());
        assert_eq!(sessions.begin(&a, &name("x"), 7, now).unwrap_err(), SessionError::Busy);
        assert!(turn.end(text(&[1, 2])).is_empty());
        // another tenant's session of the same name is another
        let (other, _) = sessions.begin(&b, &name("x"), 7, now).unwrap();
        assert!(other.conversation.tokens.is_empty());
        let (again, _) = sessions.begin(&a, &name("x"), 7, now).unwrap();
        assert_eq!(**again.conversation.tokens, [1, 2]);
        drop(again);
        // the other is busy, so the first is evicted
        let (new, out) = sessions.begin(&a, &name("y"), 7, now).unwrap();
        assert_eq!(out, [PrefixEviction { tokens: vec![1, 2], salt: 7 }]);
        assert_eq!(sessions.begin(&a, &name("z"), 7, now).unwrap_err(), SessionError::Full(2));
        drop((other, new));
        assert_eq!(sessions.close(&b, &name("x")), None);
    }

    #[test]
    fn idle_sessions_expire_and_busy_ones_do_not() {
        let sessions = Arc::new(Sessions::new(LIMITS, None));
        let now = Instant::now();
        let (turn, _) = sessions.begin(&name("a"), &name("x"), 0, now).unwrap();
        let (busy, _) = sessions.begin(&name("a"), &name("y"), 0, now).unwrap();
        turn.end(text(&[5]));
        assert!(sessions.expire(now + Duration::from_secs(5)).is_empty());
        assert_eq!(sessions.expire(now + Duration::from_secs(60)).len(), 1);
        assert_eq!(sessions.len(), 1);
        drop(busy);
    }

    #[test]
    fn a_turn_of_a_closed_session_does_not_reach_a_new_one() {
        let sessions = Arc::new(Sessions::new(LIMITS, None));
        let (old, _) = begin(&sessions, "x").unwrap();
        let (chat, _) = sessions.acquire(&name("a"), &name("x"), 7, Instant::now()).unwrap();
        assert_eq!(sessions.close(&name("a"), &name("x")), Some(None));
        let (new, _) = begin(&sessions, "x").unwrap();
        // its conversation is evicted, and the new session stays busy and empty
        assert_eq!(old.end(text(&[1, 2])), [PrefixEviction { tokens: vec![1, 2], salt: 7 }]);
        assert_eq!(begin(&sessions, "x").unwrap_err(), SessionError::Busy);
        drop(new);
        let (new, _) = begin(&sessions, "x").unwrap();
        assert!(new.conversation.tokens.is_empty() && new.conversation.history == History::None);
        drop(new);
        // likewise a request that sends the whole conversation
        assert_eq!(chat.store_tokens(vec![3], None::<fn()>), [PrefixEviction { tokens: vec![3], salt: 7 }]);
        assert_eq!(sessions.len(), 0);
    }

    #[test]
    fn a_tenant_evicts_its_own_sessions_once_it_has_its_share() {
        let sessions = Arc::new(Sessions::new(SessionLimits { count: 10, total_bytes: 10_000, ..LIMITS }, None));
        let now = Instant::now();
        let old = |seconds| now.checked_sub(Duration::from_secs(seconds)).unwrap_or(now);
        let (a, b) = (name("a"), name("b"));
        assert!(sessions.restore(&a, &name("durable"), 7, text(&[1; 25]), old(9)));
        for i in 0..1100 {
            let (turn, _) = sessions.begin(&b, &name(&i.to_string()), 7, now).unwrap();
            turn.end(text(&[2; 25]));
            assert!(sessions.lock().sessions.contains_key(&(name("a"), name("durable"))), "{i}");
        }
        // bytes are shared as well: large conversations of b displace others of b
        for i in 0..50 {
            let (turn, _) = sessions.begin(&b, &name(&format!("l{i}")), 7, now).unwrap();
            let large = text(&[3; 240]);
            assert!(turn.reserve(&large).is_ok());
            turn.end(large);
            assert!(sessions.lock().bytes <= 10_000);
        }
        assert_eq!(sessions.begin(&a, &name("durable"), 7, now).unwrap().0.conversation.tokens.len(), 25);
        // up to its share, a tenant takes room from those who hold more
        let n_of = |tenant: &str| sessions.lock().sessions.keys().filter(|(of, _)| &**of == tenant).count();
        for i in 0..20 {
            let (turn, _) = sessions.begin(&a, &name(&i.to_string()), 7, now).unwrap();
            turn.end(text(&[4]));
        }
        assert_eq!((n_of("a"), n_of("b")), (5, 5));
    }

    #[test]
    fn after_a_restart_each_tenant_has_its_share() {
        let sessions = Sessions::new(SessionLimits { count: 10, total_bytes: 10_000, ..LIMITS }, None);
        let now = Instant::now();
        // the most recently used first, as the journal gives them
        for i in 0..20 {
            let session = name(&i.to_string());
            assert_eq!(sessions.restore(&name("b"), &session, 7, text(&[1; 10]), now), i < 10, "{i}");
        }
        let before = now.checked_sub(Duration::from_secs(5)).unwrap_or(now);
        assert!(sessions.restore(&name("a"), &name("durable"), 7, text(&[1; 10]), before));
        assert_eq!(sessions.len(), 10);
    }

    #[derive(Debug, Default)]
    struct Names(Mutex<Vec<String>>);

    impl Journal for Names {
        fn removed(&self, tenant: &str, name: &str) {
            self.0.lock().unwrap().push(format!("{tenant}/{name}"));
        }
    }

    #[test]
    fn the_journal_hears_of_each_session_that_it_has() {
        let names = Arc::new(Names::default());
        let journal: Arc<dyn Journal> = Arc::<Names>::clone(&names);
        let sessions = Arc::new(Sessions::new(SessionLimits { count: 3, ..LIMITS }, Some(journal)));
        let now = Instant::now();
        let removed = || mem::take(&mut *names.0.lock().unwrap());
        let old = now - Duration::from_secs(5);
        for (name_of, tokens, is_open) in [("x", 10, true), ("y", 20, true), ("x", 30, true), ("z", 400, false)] {
            let conversation = text(&vec![1; tokens]);
            assert_eq!(sessions.restore(&name("a"), &name(name_of), 7, conversation, old), is_open, "{name_of}");
        }
        // closed while it answers, and then not written
        let (turn, _) = begin(&sessions, "x").unwrap();
        assert_eq!(turn.conversation.tokens.len(), 10);
        sessions.close(&name("a"), &name("x"));
        assert_eq!((turn.write(|| ()), removed()), (None, vec!["a/x".to_string()]));
        drop(turn);
        // without a turn that was written there is nothing to remove
        drop(begin(&sessions, "w").unwrap());
        let (turn, _) = begin(&sessions, "v").unwrap();
        assert_eq!((turn.write(|| 5), removed()), (Some(5), Vec::new()));
        drop(turn.end(text(&[1])));
        sessions.expire(now + Duration::from_secs(60));
        let mut all = removed();
        all.sort();
        assert_eq!(all, ["a/v", "a/y"]);
        assert_eq!((sessions.len(), sessions.lock().bytes), (0, 0));
    }

    #[test]
    fn bytes_are_counted_for_a_session_and_for_all() {
        let sessions = Arc::new(Sessions::new(SessionLimits { count: 9, ..LIMITS }, None));
        let (x, _) = begin(&sessions, "x").unwrap();
        let large = text(&[0; 251]);
        assert_eq!(x.reserve(&large).unwrap_err(), SessionError::TooLarge { found: 1004, limit: 1000 });
        let some = text(&[0; 200]);
        assert!(x.reserve(&some).unwrap().is_empty());
        let (y, _) = begin(&sessions, "y").unwrap();
        assert_eq!(y.reserve(&some).unwrap_err(), SessionError::NoMemory { found: 1600, limit: 1500 });
        // an idle session is evicted
        x.end(some.clone());
        assert_eq!(y.reserve(&some).unwrap().len(), 1);
        assert_eq!(sessions.len(), 1);
        // a turn without `end` releases its reservation
        drop(y);
        assert_eq!(sessions.len(), 0);
        assert_eq!(sessions.lock().bytes, 0);
        let field = |n: usize| ("x".to_string(), Json::Str("a".repeat(n)));
        let messages = |n| History::Messages(Arc::new(vec![Json::Object(vec![field(n)])]));
        let bytes = |n| Conversation { tokens: Arc::default(), history: messages(n) }.bytes();
        assert_eq!(bytes(500) - bytes(0), 500);
    }
}
