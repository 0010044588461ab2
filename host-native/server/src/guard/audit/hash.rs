//! Hashes of lines, and the key of the HMAC.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::guard::key_file::{self, KeyFileError, MIN_KEY_BYTES, from_hex};

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

/// Key of the HMAC.
#[derive(Clone)]
pub struct Key(Hmac<Sha256>);

impl Key {
    /// Reads the file of a key.
    ///
    /// # Errors
    /// If its content is no key (`key_file::read`).
    pub fn read(path: &Path) -> Result<Key, KeyFileError> {
        let bytes = key_file::read(path)?;
        Key::new(&bytes).ok_or_else(|| KeyFileError::Invalid { path: path.into(), found: "an unusable key".into() })
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
}
