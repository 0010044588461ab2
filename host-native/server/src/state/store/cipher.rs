//! Seals rows: AES-256-GCM with a key, a BLAKE3 hash without one.
//!
//! Each value is encrypted by a key of its own, HKDF-SHA256 (RFC 5869) of the key of the file with a random salt, and with a random
//! nonce, so that any number of values may be written. The associated data are the format, the key's ID and the row's key: a
//! value in the place of another is refused.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use starling::receipt::Hex;

/// Bytes of a key.
const KEY_LEN: usize = 32;
/// Bytes of the longest key file.
const MAX_KEY_FILE: u64 = 4096;
const SALT_LEN: usize = 16;
const TAG_LEN: usize = 16;
const CHECKSUM_LEN: usize = 32;
const CONTEXT: &[u8] = b"starling state 1";

/// Key of a row in the file: a hash of its kind, tenant and ID.
pub type RowKey = [u8; 32];
/// Names a key without telling it.
pub type KeyId = [u8; 8];

/// Seals and opens values.
pub struct Cipher {
    /// `None`: values are not encrypted.
    key: Option<Keys>,
}

struct Keys {
    master: Prk,
    /// Key of the hash of row keys, so that the file reveals neither tenants nor IDs.
    names: [u8; 32],
    id: KeyId,
}

/// A key file is unusable.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: found {found}, expected {} hex digits; `openssl rand -hex {KEY_LEN}` makes a key", path.display(), 2 * KEY_LEN)]
    Invalid { path: PathBuf, found: String },
}

/// The value is damaged, of another row, or of another key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unsealed;

impl Cipher {
    /// Values are not encrypted.
    pub fn plain() -> Cipher {
        Cipher { key: None }
    }

    /// Reads a key, written as 64 hex digits; white space around them is ignored.
    ///
    /// # Errors
    /// If the file cannot be read or has another content.
    pub fn read(path: &Path) -> Result<Cipher, KeyError> {
        let failed = |source| KeyError::Read { path: path.into(), source };
        let invalid = |found: String| KeyError::Invalid { path: path.into(), found };
        let mut bytes = Vec::new();
        File::open(path).map_err(failed)?.take(MAX_KEY_FILE + 1).read_to_end(&mut bytes).map_err(failed)?;
        let text = std::str::from_utf8(&bytes).map_err(|_| invalid("no text".into()))?.trim();
        let key = from_hex(text).ok_or_else(|| invalid(format!("{} characters", text.chars().count())))?;
        Ok(Cipher::with_key(&key))
    }

    pub fn with_key(key: &[u8; KEY_LEN]) -> Cipher {
        let master = Salt::new(HKDF_SHA256, CONTEXT).extract(key);
        let (mut names, mut id) = ([0; 32], KeyId::default());
        expand(&master, b"row names", &mut names);
        expand(&master, b"key id", &mut id);
        Cipher { key: Some(Keys { master, names, id }) }
    }

    /// ID of the key; `None` if values are not encrypted.
    pub fn key_id(&self) -> Option<KeyId> {
        self.key.as_ref().map(|key| key.id)
    }

    /// Key of a row.
    pub fn row_key(&self, name: &[u8]) -> RowKey {
        match &self.key {
            Some(key) => *blake3::keyed_hash(&key.names, name).as_bytes(),
            None => *blake3::hash(name).as_bytes(),
        }
    }

    /// The sealed form of the value of a row.
    ///
    /// # Errors
    /// If the system has no entropy.
    pub fn seal(&self, row: &RowKey, value: &[u8]) -> io::Result<Vec<u8>> {
        let Some(key) = &self.key else {
            return Ok([&checksum(row, value)[..], value].concat());
        };
        let mut random = [0; SALT_LEN + NONCE_LEN];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let mut sealed = Vec::with_capacity(random.len() + value.len() + TAG_LEN);
        sealed.extend_from_slice(&random);
        sealed.extend_from_slice(value);
        let tag = key.of_value(&random).and_then(|(aead, nonce)| {
            aead.seal_in_place_separate_tag(nonce, key.associated(row), &mut sealed[random.len()..]).ok()
        });
        let tag = tag.ok_or_else(|| io::Error::other("a value of the state store cannot be encrypted"))?;
        sealed.extend_from_slice(tag.as_ref());
        Ok(sealed)
    }

    /// The value of a row.
    ///
    /// # Errors
    /// If it is not what [`Cipher::seal`] made for this row with this key.
    pub fn open(&self, row: &RowKey, sealed: &[u8]) -> Result<Vec<u8>, Unsealed> {
        let Some(key) = &self.key else {
            let (sum, value) = sealed.split_at_checked(CHECKSUM_LEN).ok_or(Unsealed)?;
            return if checksum(row, value) == sum { Ok(value.to_vec()) } else { Err(Unsealed) };
        };
        let (random, value) = sealed.split_first_chunk::<{ SALT_LEN + NONCE_LEN }>().ok_or(Unsealed)?;
        let (aead, nonce) = key.of_value(random).ok_or(Unsealed)?;
        let mut value = value.to_vec();
        let n = aead.open_in_place(nonce, key.associated(row), &mut value).map_err(|_| Unsealed)?.len();
        value.truncate(n);
        Ok(value)
    }
}

impl fmt::Debug for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.key_id() {
            Some(id) => write!(f, "key {}", Hex(id)),
            None => f.write_str("no key"),
        }
    }
}

impl Keys {
    /// Key and nonce of a value with this salt and nonce.
    fn of_value(&self, random: &[u8; SALT_LEN + NONCE_LEN]) -> Option<(LessSafeKey, Nonce)> {
        let (salt, nonce) = random.split_at(SALT_LEN);
        let info = [b"value", salt];
        let key = UnboundKey::from(self.master.expand(&info, &AES_256_GCM).ok()?);
        Some((LessSafeKey::new(key), Nonce::try_assume_unique_for_key(nonce).ok()?))
    }

    fn associated(&self, row: &RowKey) -> Aad<Vec<u8>> {
        Aad::from([CONTEXT, &self.id, row].concat())
    }
}

/// Length of an output of HKDF.
struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

fn expand(master: &Prk, info: &[u8], out: &mut [u8]) {
    // fails only for outputs above 255 hashes
    let _ = master.expand(&[info], Length(out.len())).and_then(|okm| okm.fill(out));
}

fn checksum(row: &RowKey, value: &[u8]) -> [u8; CHECKSUM_LEN] {
    *blake3::Hasher::new().update(CONTEXT).update(row).update(value).finalize().as_bytes()
}

fn from_hex(text: &str) -> Option<[u8; KEY_LEN]> {
    let mut key = [0; KEY_LEN];
    if text.len() != 2 * KEY_LEN {
        return None;
    }
    for (byte, pair) in key.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let digit = |c: u8| char::from(c).to_digit(16);
        *byte = u8::try_from(digit(pair[0])? << 4 | digit(pair[1])?).ok()?;
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: RowKey = [3; 32];

    #[test]
    fn a_value_opens_in_its_row_with_its_key_only() {
        for cipher in [Cipher::plain(), Cipher::with_key(&[1; 32])] {
            for value in [&b""[..], b"a value", &[7; 5000]] {
                let sealed = cipher.seal(&ROW, value).unwrap();
                assert_eq!(cipher.open(&ROW, &sealed).as_deref(), Ok(value));
                assert_eq!(cipher.open(&[4; 32], &sealed), Err(Unsealed));
                assert_eq!(Cipher::with_key(&[2; 32]).open(&ROW, &sealed), Err(Unsealed));
                for at in 0..sealed.len().min(80) {
                    let mut wrong = sealed.clone();
                    wrong[at] ^= 1;
                    assert_eq!(cipher.open(&ROW, &wrong), Err(Unsealed), "byte {at}");
                    assert_eq!(cipher.open(&ROW, &sealed[..at]), Err(Unsealed), "{at} bytes");
                }
            }
        }
    }

    #[test]
    fn a_key_hides_values_and_names() {
        let cipher = Cipher::with_key(&[1; 32]);
        let value = b"a secret text that is long enough";
        let (one, two) = (cipher.seal(&ROW, value).unwrap(), cipher.seal(&ROW, value).unwrap());
        assert_ne!(one, two);
        assert!(!one.windows(6).any(|part| part == b"secret"));
        assert_ne!(cipher.row_key(b"name"), Cipher::plain().row_key(b"name"));
        assert_ne!(cipher.row_key(b"name"), Cipher::with_key(&[2; 32]).row_key(b"name"));
        assert_eq!(format!("{cipher:?}").len(), "key ".len() + 16);
    }

    #[test]
    fn key_files() {
        let path = std::env::temp_dir().join(format!("starling-state-key-{}", std::process::id()));
        let read = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            Cipher::read(&path)
        };
        let id = read(format!(" {}\n", "0A".repeat(32)).as_bytes()).unwrap().key_id();
        assert_eq!(id, Cipher::with_key(&[10; 32]).key_id());
        for wrong in [&b""[..], b"00", &[b'0'; 63], &[b'0'; 65], &[b'x'; 64], &[0xff; 64]] {
            assert!(matches!(read(wrong), Err(KeyError::Invalid { .. })), "{wrong:?}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(Cipher::read(&path), Err(KeyError::Read { .. })));
    }
}
