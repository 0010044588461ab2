//! Hashes of lines, and the key of the HMAC.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// Bytes of the shortest key: the length of the hash.
const MIN_KEY_BYTES: usize = 32;
/// Bytes of the longest key file.
const MAX_KEY_FILE_BYTES: u64 = 4096;

/// A SHA-256 or HMAC-SHA-256; written as 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hash(pub [u8; 32]);

impl Hash {
    /// `previous` of the first line.
    pub const ZERO: Hash = Hash([0; 32]);

    /// Of the bytes of a line before `,"hash"`.
    pub(super) fn of(bytes: &[u8], key: Option<&Key>) -> Hash {
        match key {
            None => Hash(Sha256::digest(bytes).into()),
            Some(key) => Hash(key.0.clone().chain_update(bytes).finalize().into_bytes().into()),
        }
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Expected 64 lower-case hex digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected 64 lower-case hex digits")]
pub struct NotAHash;

impl FromStr for Hash {
    type Err = NotAHash;

    fn from_str(text: &str) -> Result<Hash, NotAHash> {
        if text.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(NotAHash);
        }
        Ok(Hash(from_hex(text).and_then(|bytes| bytes.try_into().ok()).ok_or(NotAHash)?))
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |b: u8| char::from(b).to_digit(16).and_then(|d| u8::try_from(d).ok());
    let pair = |pair: &[u8]| match *pair {
        [high, low] => Some(digit(high)? << 4 | digit(low)?),
        _ => None,
    };
    text.as_bytes().chunks(2).map(pair).collect()
}

/// Key of the HMAC.
#[derive(Clone)]
pub struct Key(Hmac<Sha256>);

/// A key file is unusable.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error(
        "{}: found {found}, expected at least {} hex digits; `openssl rand -hex {MIN_KEY_BYTES}` makes a key",
        path.display(),
        2 * MIN_KEY_BYTES
    )]
    Invalid { path: PathBuf, found: String },
}

impl Key {
    /// Reads a key of at least 32 bytes, written as hex digits; white space around them is ignored.
    ///
    /// # Errors
    /// If the file cannot be read, has other characters, or has too few or more than 4096 bytes.
    pub fn read(path: &Path) -> Result<Key, KeyError> {
        let failed = |source| KeyError::Read { path: path.into(), source };
        let invalid = |found: String| KeyError::Invalid { path: path.into(), found };
        let mut bytes = Vec::new();
        File::open(path).map_err(failed)?.take(MAX_KEY_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > MAX_KEY_FILE_BYTES {
            return Err(invalid(format!("more than {MAX_KEY_FILE_BYTES} bytes")));
        }
        let text = std::str::from_utf8(&bytes).map_err(|_| invalid("no text".into()))?.trim();
        let key = from_hex(text).ok_or_else(|| invalid("other characters or an odd number of digits".into()))?;
        if key.len() < MIN_KEY_BYTES {
            return Err(invalid(format!("{} hex digits", text.len())));
        }
        Key::new(&key).ok_or_else(|| invalid("an unusable key".into()))
    }

    /// `None` if the key has less than 32 bytes.
    pub fn new(bytes: &[u8]) -> Option<Key> {
        if bytes.len() < MIN_KEY_BYTES {
            return None;
        }
        Hmac::new_from_slice(bytes).ok().map(Key)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_hex() {
        let text = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let hash = Hash::of(b"abc", None);
        assert_eq!(hash.to_string(), text);
        assert_eq!(text.parse(), Ok(hash));
        for wrong in ["", "0", &text[1..], &text.to_uppercase(), &text.replace('b', "g"), &format!("{text}00")] {
            assert_eq!(wrong.parse::<Hash>(), Err(NotAHash), "{wrong}");
        }
    }

    /// RFC 4231, test case 3, has a key of 20 bytes; this key is it with 12 zeros, which HMAC pads with anyway.
    #[test]
    fn hmac_of_rfc_4231() {
        let mut key = [0; 32];
        key[..20].fill(0xaa);
        let hash = Hash::of(&[0xdd; 50], Key::new(&key).as_ref());
        assert_eq!(hash.to_string(), "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
    }

    #[test]
    fn key_files() {
        let path = std::env::temp_dir().join(format!("starling-audit-key-{}", std::process::id()));
        let read = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            Key::read(&path)
        };
        assert!(read(format!(" {}\n", "0a".repeat(32)).as_bytes()).is_ok());
        let long = "00".repeat(3000);
        for wrong in [&b""[..], b"00", &[b'0'; 62], &[b'0'; 65], &[b'x'; 64], &[0xff; 64], long.as_bytes()] {
            assert!(matches!(read(wrong), Err(KeyError::Invalid { .. })), "{wrong:?}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(Key::read(&path), Err(KeyError::Read { .. })));
    }
}
