//! Files with a secret key, written as hex digits.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Bytes of the shortest key.
pub const MIN_KEY_BYTES: usize = 32;
/// Bytes of the longest key file.
const MAX_FILE_BYTES: u64 = 4096;

/// A key file is unusable.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error(
        "{}: found {found}, expected at least {} hex digits; `openssl rand -hex {MIN_KEY_BYTES}` makes a key",
        path.display(),
        2 * MIN_KEY_BYTES
    )]
    Invalid { path: PathBuf, found: String },
}

/// Reads a key of at least 32 bytes, written as hex digits; white space around them is ignored.
///
/// # Errors
/// If the file cannot be read, has other characters, or has too few or more than 4096 bytes.
pub fn read(path: &Path) -> Result<Vec<u8>, KeyFileError> {
    let failed = |source| KeyFileError::Read { path: path.into(), source };
    let invalid = |found: String| KeyFileError::Invalid { path: path.into(), found };
    let mut bytes = Vec::new();
    File::open(path).map_err(failed)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(invalid(format!("more than {MAX_FILE_BYTES} bytes")));
    }
    let text = std::str::from_utf8(&bytes).map_err(|_| invalid("no text".into()))?.trim();
    let key = from_hex(text).ok_or_else(|| invalid("other characters or an odd number of digits".into()))?;
    if key.len() < MIN_KEY_BYTES {
        return Err(invalid(format!("{} hex digits", text.len())));
    }
    Ok(key)
}

/// The bytes of hex digits; `None` for other characters or an odd number of digits.
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |b: u8| char::from(b).to_digit(16).and_then(|d| u8::try_from(d).ok());
    let pair = |pair: &[u8]| match *pair {
        [high, low] => Some(digit(high)? << 4 | digit(low)?),
        _ => None,
    };
    text.as_bytes().chunks(2).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_keys_are_read() {
        let path = std::env::temp_dir().join(format!("starling-key-file-{}", std::process::id()));
        let read = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            read(&path)
        };
        assert_eq!(read(format!(" {}\n", "0a".repeat(32)).as_bytes()).unwrap(), [10; 32]);
        let long = "00".repeat(3000);
        for wrong in [&b""[..], b"00", &[b'0'; 62], &[b'0'; 65], &[b'x'; 64], &[0xff; 64], long.as_bytes()] {
            assert!(matches!(read(wrong), Err(KeyFileError::Invalid { .. })), "{wrong:?}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(super::read(&path), Err(KeyFileError::Read { .. })));
    }
}
