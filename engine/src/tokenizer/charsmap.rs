//! `tokenizer.ggml.precompiled_charsmap`: replacements of character sequences, as SentencePiece stores them.
//!
//! ```text
//! u32 n | n bytes: a double array of u32, little-endian | replacements, each ended by a zero byte
//! ```
//!
//! A unit of the double array has: bits 0-7 the byte that leads to it (and bit 31, set in value units); bit 8 whether a
//! value follows; bits 10-30 the offset of its children, times 256 if bit 9 is set. The value, in the unit at that
//! offset, is the byte offset of the replacement.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use crate::error::LoadError;

/// Maximal length of a sequence to look up: bounds the time that a file can cause.
const MAX_LEN: usize = 256;
/// Maximal length of a replacement: bounds the growth of a text. The longest in Unicode has 33 bytes.
const MAX_REPLACEMENT: usize = 64;

/// The replacements of a file.
#[derive(Debug, Clone)]
pub(super) struct CharsMap {
    units: Vec<u32>,
    replacements: String,
}

impl CharsMap {
    /// Parses the value of metadata key `key`; `None` if it is empty.
    ///
    /// # Errors
    /// [`LoadError::Metadata`] if the sizes are inconsistent, or a replacement is too long or not UTF-8.
    pub(super) fn new(key: &str, bytes: &[u8]) -> Result<Option<CharsMap>, LoadError> {
        let wrong = |found: String, expected: String| Err(LoadError::Metadata { key: key.to_owned(), found, expected });
        if bytes.is_empty() {
            return Ok(None);
        }
        let Some((size, rest)) = bytes.split_first_chunk::<4>() else {
            return wrong(format!("{} bytes", bytes.len()), "0 bytes, or at least 4".to_string());
        };
        let n = u32::from_le_bytes(*size) as usize;
        let Some((units, replacements)) = rest.split_at_checked(n).filter(|_| n.is_multiple_of(4)) else {
            let expected = format!("a multiple of 4, at most {} (the bytes that follow)", rest.len());
            return wrong(format!("a trie of {n} bytes"), expected);
        };
        let Ok(replacements) = core::str::from_utf8(replacements) else {
            return wrong("replacements that are not UTF-8".to_string(), "UTF-8".to_string());
        };
        let longest = replacements.split('\0').map(str::len).max().unwrap_or(0);
        if longest > MAX_REPLACEMENT {
            return wrong(format!("a replacement of {longest} bytes"), format!("at most {MAX_REPLACEMENT} bytes"));
        }
        let units = units.as_chunks().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
        Ok(Some(CharsMap { units, replacements: replacements.to_owned() }))
    }

    /// The replacement of the longest mapped prefix of `text`, and the length of that prefix.
    pub(super) fn longest(&self, text: &[u8]) -> Option<(&str, usize)> {
        let offset = |unit: u32| ((unit >> 10) << ((unit & 1 << 9) >> 6)) as usize;
        let mut at = offset(*self.units.first()?);
        let mut longest = None;
        for (i, &byte) in text.iter().take(MAX_LEN).enumerate() {
            at ^= usize::from(byte);
            let Some(&unit) = self.units.get(at).filter(|&unit| unit & (1 << 31 | 0xff) == u32::from(byte)) else {
                break;
            };
            at ^= offset(unit);
            if unit & 1 << 8 != 0 {
                longest = Some(((*self.units.get(at)? & !(1 << 31)) as usize, i + 1));
            }
        }
        let (place, len) = longest?;
        Some((self.replacements.get(place..)?.split('\0').next()?, len))
    }
}
