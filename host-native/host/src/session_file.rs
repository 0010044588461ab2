//! Conversation of `starling run --session`, or a slot of the server, in one file. Numbers are little-endian:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `STRLSESS` |
//! | 4 | version, 1 |
//! | 8 | length of the conversation |
//! | 32 | BLAKE3 of the conversation |
//! | … | the conversation in JSON: SHA-256 of the model, messages of a chat, tokens |
//! | … | KV pages as the engine exports them, each with its own checksum |
//!
//! Damage of the conversation is an error. Damaged pages, and pages of another KV type, are computed again: the answer has
//! the same bytes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use starling::engine::Engine;
use starling::receipt::Hex;

use crate::error::Failure;
use crate::progress::remark;

const MAGIC: [u8; 8] = *b"STRLSESS";
const VERSION: u32 = 1;
const HEADER_LEN: usize = 8 + 4 + 8 + 32;

/// What was said so far.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conversation {
    /// SHA-256 of the model in hexadecimal digits.
    pub model_sha256: String,
    /// Role and content of the messages of a chat; empty without `--chat`.
    pub messages: Vec<(String, String)>,
    /// Prompts and answers.
    pub tokens: Vec<u32>,
    /// Tenant and cache salt of a server's slot.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tenant: String,
    #[serde(default)]
    pub cache_salt: u64,
}

impl Conversation {
    pub fn new(model_sha256: &[u8; 32]) -> Conversation {
        Conversation { model_sha256: Hex(*model_sha256).to_string(), ..Conversation::default() }
    }
}

/// Why a file is no session.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Damage {
    #[error("not a session file: it does not start with `STRLSESS`")]
    Magic,
    #[error("session format version {0}, expected {VERSION}")]
    Version(u32),
    #[error("the session file is damaged: {0}; delete it to start a new conversation")]
    Damaged(String),
    #[error("the session is of another model: SHA-256 {found}, expected {expected}")]
    Model { found: String, expected: String },
}

/// Reads the conversation of a file, and its pages. A file that does not exist is a new conversation.
///
/// # Errors
/// If the file cannot be read, its conversation is damaged, or it is of another model.
pub fn read(path: &Path, model_sha256: &[u8; 32]) -> Result<(Conversation, Vec<u8>), Failure> {
    let file = |source| Failure::File { path: path.into(), source };
    let expected = Hex(*model_sha256).to_string();
    let mut bytes = Vec::new();
    match File::open(path) {
        Ok(mut open) => open.read_to_end(&mut bytes).map_err(file)?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Ok((Conversation::new(model_sha256), Vec::new()));
        }
        Err(e) => return Err(file(e)),
    };
    let (conversation, at) = decode(&bytes, expected).map_err(|damage| file(io::Error::other(damage.to_string())))?;
    bytes.drain(..at);
    Ok((conversation, bytes))
}

/// The conversation, and where the pages begin.
fn decode(bytes: &[u8], expected: String) -> Result<(Conversation, usize), Damage> {
    let damaged = |what: &str| Damage::Damaged(what.into());
    let (header, rest) = bytes.split_at_checked(HEADER_LEN).ok_or(damaged("shorter than its header"))?;
    let field = |at: usize, n: usize| header[at..at + n].iter().rev().fold(0, |x, b| x << 8 | u64::from(*b));
    if header[..8] != MAGIC {
        return Err(Damage::Magic);
    }
    if field(8, 4) != u64::from(VERSION) {
        return Err(Damage::Version(field(8, 4) as u32));
    }
    let len = usize::try_from(field(12, 8)).unwrap_or(usize::MAX);
    let json = rest.get(..len).ok_or(damaged("shorter than its conversation"))?;
    if blake3::hash(json).as_bytes()[..] != header[20..] {
        return Err(damaged("the checksum of the conversation does not match"));
    }
    let conversation: Conversation = serde_json::from_slice(json).map_err(|e| Damage::Damaged(e.to_string()))?;
    if conversation.model_sha256 != expected {
        return Err(Damage::Model { found: conversation.model_sha256, expected });
    }
    Ok((conversation, HEADER_LEN + len))
}

/// Imports the pages of a file; reports those that are refused.
pub fn import(engine: &mut Engine, path: &Path, pages: &[u8]) {
    if let Err(error) = engine.import_pages(pages) {
        remark(format_args!("{}: {error}; the rest of the conversation is computed again", path.display()));
    }
}

/// Replaces the file, at once and synced, by the conversation and its pages.
///
/// # Errors
/// If it cannot be written; the old file stays.
pub fn write(path: &Path, conversation: &Conversation, pages: &[u8]) -> Result<(), Failure> {
    let json = serde_json::to_vec(conversation).map_err(io::Error::other)?;
    let mut header = Vec::with_capacity(HEADER_LEN);
    header.extend(MAGIC);
    header.extend(VERSION.to_le_bytes());
    header.extend((json.len() as u64).to_le_bytes());
    header.extend(blake3::hash(&json).as_bytes());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let replace = || {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        [&header[..], &json, pages].into_iter().try_for_each(|part| file.write_all(part))?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        File::open(directory)?.sync_all()
    };
    replace().map_err(|source| {
        let _ = fs::remove_file(&temporary);
        Failure::File { path: path.into(), source }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_conversation_is_refused() {
        let path = std::env::temp_dir().join(format!("starling-session-{}", std::process::id()));
        let (mut conversation, none) = read(&path, &[1; 32]).unwrap();
        assert!(none.is_empty());
        conversation.tokens = vec![1, 2, 3];
        conversation.messages.push(("user".into(), "Hi".into()));
        write(&path, &conversation, b"pages").unwrap();
        assert_eq!(read(&path, &[1; 32]).unwrap(), (conversation, b"pages".to_vec()));
        let bytes = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let expected = || Hex([1; 32]).to_string();
        assert!(matches!(decode(&bytes, Hex([2; 32]).to_string()), Err(Damage::Model { .. })));
        for cut in 0..bytes.len() - 5 {
            assert!(decode(&bytes[..cut], expected()).is_err(), "{cut}");
            let mut flipped = bytes.clone();
            flipped[cut] ^= 16;
            assert!(decode(&flipped, expected()).is_err(), "{cut}");
        }
    }
}
