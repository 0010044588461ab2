//! Sessions as rows: a session continues after a restart with the same tokens.
//!
//! | bytes  | field                                                                          |
//! |--------|--------------------------------------------------------------------------------|
//! | 0      | format version                                                                 |
//! | 1..33  | SHA-256 of the model whose tokens these are                                    |
//! | 33..41 | salt of the prefix cache                                                       |
//! | 41..   | number of tokens, tokens of 4 bytes; kind of the history; its text or messages |
//!
//! Raw text is stored as tokens and as text: if another model has the name after the restart, the session goes on with the text, as
//! it does when a model is replaced.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use starling::chat::Json;
use starling_host::clock::unix_millis;

use super::{Kind, RowId, StateStore, Written};
use crate::state::fields::{Malformed, Reader, push_len, push_text};
use crate::state::sessions::{Conversation, History, Journal, Sessions};

const VERSION: u8 = 1;
/// Nesting of messages, which the parser of requests bounds, too.
const MAX_DEPTH: usize = 128;

/// Writes the sessions of a model into the store.
#[derive(Debug)]
pub struct SessionJournal {
    store: Arc<StateStore>,
    model: Arc<str>,
    ttl: Duration,
    is_restored: AtomicBool,
}

impl SessionJournal {
    pub fn new(store: &Arc<StateStore>, model: &Arc<str>, ttl: Duration) -> SessionJournal {
        let (store, model, is_restored) = (Arc::clone(store), Arc::clone(model), AtomicBool::new(false));
        SessionJournal { store, model, ttl, is_restored }
    }

    /// The row of a conversation.
    pub fn encode(
        model_sha256: &[u8; 32],
        text: impl FnOnce(&[u32]) -> String,
        salt: u64,
        conversation: &Conversation,
    ) -> Vec<u8> {
        let text = match &conversation.history {
            History::Text => text(&conversation.tokens),
            _ => String::new(),
        };
        encode(model_sha256, salt, conversation, &text)
    }

    /// Writes the row of a session that was used now. Does not wait.
    pub fn put(&self, tenant: &str, name: &str, row: Vec<u8>) -> Written {
        let now = unix_millis();
        let ttl = u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX);
        self.store.put(self.id(tenant, name), row, now, now.saturating_add(ttl))
    }

    /// Deletes the row of a session, if it has one. Does not wait.
    pub fn delete(&self, tenant: &str, name: &str) -> Written {
        self.store.delete(self.id(tenant, name))
    }

    pub fn has(&self, tenant: &str, name: &str) -> bool {
        self.store.info(&self.id(tenant, name)).is_some()
    }

    /// Deletes the rows of all sessions.
    pub fn clear(&self) {
        self.rows().into_iter().for_each(|(id, _)| drop(self.store.delete(id)));
    }

    /// Opens the sessions of the store, at the first call. Waits for the file.
    pub fn restore(&self, sessions: &Sessions, model_sha256: &[u8; 32]) {
        if self.is_restored.swap(true, Ordering::AcqRel) {
            return;
        }
        let (now, unix_now) = (Instant::now(), unix_millis());
        let mut rows = self.rows();
        // the most recently used first: they stay if there are too many
        rows.sort_by_key(|(_, used)| std::cmp::Reverse(*used));
        let (mut n_restored, mut n_left) = (0, 0);
        for (id, used) in rows {
            let Some((_, name)) = id.id.split_once('\0') else { continue };
            let row = match self.store.read(&id) {
                Ok(Some(row)) => row,
                Ok(None) => continue,
                Err(e) => {
                    tracing::error!("a session was not restored: {e}");
                    continue;
                }
            };
            let Ok(row) = decode(&row) else {
                tracing::error!("a session was not restored: its row has another format");
                continue;
            };
            let conversation = if row.model_sha256 == *model_sha256 {
                row.conversation
            } else {
                row.conversation.detach(|_| row.text.clone())
            };
            let age = Duration::from_millis(unix_now.saturating_sub(used));
            let last_used = now.checked_sub(age).unwrap_or(now);
            if sessions.restore(&id.tenant, &Arc::from(name), row.salt, conversation, last_used) {
                n_restored += 1;
            } else {
                n_left += 1;
                drop(self.store.delete(id));
            }
        }
        if n_restored + n_left > 0 {
            tracing::info!(model = &*self.model, "{n_restored} sessions restored, {n_left} closed for lack of room");
        }
    }

    /// Rows of the model's sessions, and the times of their last use.
    fn rows(&self) -> Vec<(RowId, u64)> {
        let rows = self.store.list(Kind::Session, None).into_iter();
        let is_own = |id: &RowId| id.id.split_once('\0').is_some_and(|(model, _)| *model == *self.model);
        rows.filter(|(id, _)| is_own(id)).map(|(id, info)| (id, info.created)).collect()
    }

    /// Sessions of several models may have the same name. Names of models have no NUL.
    fn id(&self, tenant: &str, name: &str) -> RowId {
        RowId { kind: Kind::Session, tenant: tenant.into(), id: format!("{}\0{name}", self.model).into() }
    }
}

impl Journal for SessionJournal {
    fn removed(&self, tenant: &str, name: &str) {
        drop(self.delete(tenant, name));
    }
}

#[derive(Debug)]
struct SessionRow {
    model_sha256: [u8; 32],
    salt: u64,
    conversation: Conversation,
    /// Text of the tokens of [`History::Text`].
    text: String,
}

fn encode(model_sha256: &[u8; 32], salt: u64, conversation: &Conversation, text: &str) -> Vec<u8> {
    let mut out = vec![VERSION];
    out.extend_from_slice(model_sha256);
    out.extend(salt.to_le_bytes());
    push_len(&mut out, conversation.tokens.len());
    conversation.tokens.iter().for_each(|token| out.extend(token.to_le_bytes()));
    match &conversation.history {
        History::None => out.push(0),
        History::Text => {
            out.push(1);
            push_text(&mut out, text);
        }
        History::Decoded(text) => {
            out.push(2);
            push_text(&mut out, text);
        }
        History::Messages(messages) => {
            out.push(3);
            push_len(&mut out, messages.len());
            messages.iter().for_each(|message| push_json(&mut out, message));
        }
    }
    out
}

fn decode(row: &[u8]) -> Result<SessionRow, Malformed> {
    let mut reader = Reader(row);
    if reader.array()? != [VERSION] {
        return Err(Malformed);
    }
    let (model_sha256, salt) = (reader.array()?, reader.u64()?);
    let n_tokens = reader.u32()? as usize;
    let tokens = reader.bytes(n_tokens.checked_mul(4).ok_or(Malformed)?)?;
    let tokens = tokens.chunks_exact(4).map(|t| u32::from_le_bytes([t[0], t[1], t[2], t[3]])).collect();
    let mut text = String::new();
    let history = match reader.array()? {
        [0] => History::None,
        [1] => {
            text = reader.text()?.into();
            History::Text
        }
        [2] => History::Decoded(reader.text()?.into()),
        [3] => History::Messages(Arc::new(reader.list(|reader| read_json(reader, MAX_DEPTH))?)),
        _ => return Err(Malformed),
    };
    reader.end()?;
    Ok(SessionRow { model_sha256, salt, conversation: Conversation { tokens: Arc::new(tokens), history }, text })
}

/// Not as JSON: numbers would not come back bit by bit.
fn push_json(out: &mut Vec<u8>, value: &Json) {
    match value {
        Json::Null => out.push(0),
        Json::Bool(value) => out.extend([1, u8::from(*value)]),
        Json::Int(value) => {
            out.push(2);
            out.extend(value.to_le_bytes());
        }
        Json::UInt(value) => {
            out.push(3);
            out.extend(value.to_le_bytes());
        }
        Json::Float(value) => {
            out.push(4);
            out.extend(value.to_bits().to_le_bytes());
        }
        Json::Str(text) => {
            out.push(5);
            push_text(out, text);
        }
        Json::Array(items) => {
            out.push(6);
            push_len(out, items.len());
            items.iter().for_each(|item| push_json(out, item));
        }
        Json::Object(fields) => {
            out.push(7);
            push_len(out, fields.len());
            for (name, value) in fields {
                push_text(out, name);
                push_json(out, value);
            }
        }
    }
}

fn read_json(reader: &mut Reader<'_>, depth: usize) -> Result<Json, Malformed> {
    let depth = depth.checked_sub(1).ok_or(Malformed)?;
    Ok(match reader.array()? {
        [0] => Json::Null,
        [1] => Json::Bool(reader.array()? != [0]),
        [2] => Json::Int(i64::from_le_bytes(reader.array()?)),
        [3] => Json::UInt(reader.u64()?),
        [4] => Json::Float(f64::from_bits(reader.u64()?)),
        [5] => Json::Str(reader.text()?.into()),
        [6] => Json::Array(reader.list(|reader| read_json(reader, depth))?),
        [7] => Json::Object(reader.list(|reader| Ok((reader.text()?.to_string(), read_json(reader, depth)?)))?),
        _ => return Err(Malformed),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn json() -> impl Strategy<Value = Json> {
        let leaf = prop_oneof![
            Just(Json::Null),
            any::<bool>().prop_map(Json::Bool),
            any::<i64>().prop_map(Json::Int),
            any::<u64>().prop_map(Json::UInt),
            (-1e300..1e300).prop_map(Json::Float),
            ".{0,8}".prop_map(Json::Str),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Json::Array),
                prop::collection::vec((".{0,4}", inner), 0..4).prop_map(Json::Object),
            ]
        })
    }

    fn history() -> impl Strategy<Value = History> {
        prop_oneof![
            Just(History::None),
            Just(History::Text),
            ".{0,20}".prop_map(|text| History::Decoded(text.into())),
            prop::collection::vec(json(), 0..4).prop_map(|messages| History::Messages(Arc::new(messages))),
        ]
    }

    proptest! {
        #[test]
        fn conversations_come_back(
            salt in any::<u64>(), tokens in prop::collection::vec(any::<u32>(), 0..20), history in history(), text in ".{0,20}",
        ) {
            let text = if history == History::Text { text } else { String::new() };
            let conversation = Conversation { tokens: Arc::new(tokens), history };
            let row = encode(&[5; 32], salt, &conversation, &text);
            let (tokens, history) = (conversation.tokens, conversation.history);
            let found = decode(&row).unwrap();
            prop_assert_eq!((found.model_sha256, found.salt, found.text), ([5; 32], salt, text));
            prop_assert_eq!((found.conversation.tokens, found.conversation.history), (tokens, history));
            for n in 0..row.len() {
                prop_assert!(decode(&row[..n]).is_err());
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(0u8..9, 0..120)) {
            let _ = decode(&[&[VERSION][..], &[0; 40], &bytes].concat());
        }
    }

    #[test]
    fn deep_messages_are_refused() {
        let nested = |n: usize| (0..n).fold(Json::Null, |inner, _| Json::Array(vec![inner]));
        let row = |n| {
            let history = History::Messages(Arc::new(vec![nested(n)]));
            decode(&encode(&[0; 32], 0, &Conversation { tokens: Arc::default(), history }, "")).is_ok()
        };
        assert!(row(MAX_DEPTH - 1) && !row(MAX_DEPTH));
    }
}
