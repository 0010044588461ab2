//! Unicode normalisation form C (NFC), with a map of offsets to the original text.
//! Source: <https://www.unicode.org/reports/tr15/>.

use alloc::string::String;
use alloc::vec::Vec;

use unicode_normalization::char::canonical_combining_class;
use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc, is_nfc_quick};

/// A text in NFC.
pub(super) struct NfcText {
    pub(super) text: String,
    /// Segments that normalisation changed, ascending.
    changed: Vec<Changed>,
}

/// A changed segment. A segment starts at a character that never combines with those before it.
struct Changed {
    /// Byte range in the normalised text.
    start: usize,
    end: usize,
    /// Byte range in the original text.
    original_start: usize,
    original_end: usize,
}

impl NfcText {
    /// Normalises a text; `None` if it is already in NFC.
    pub(super) fn new(text: &str) -> Option<NfcText> {
        if text.is_ascii() || is_nfc(text) {
            return None;
        }
        let mut out = NfcText { text: String::with_capacity(text.len()), changed: Vec::new() };
        let mut start = 0;
        for (at, c) in text.char_indices().skip(1) {
            if begins_segment(c) {
                out.push(&text[start..at], start);
                start = at;
            }
        }
        out.push(&text[start..], start);
        Some(out)
    }

    fn push(&mut self, segment: &str, original_start: usize) {
        let start = self.text.len();
        self.text.extend(segment.nfc());
        let end = self.text.len();
        if self.text[start..end] != *segment {
            self.changed.push(Changed { start, end, original_start, original_end: original_start + segment.len() });
        }
    }

    /// Maps a byte offset of the normalised text to the original. Offsets inside a changed segment map to its start.
    pub(super) fn original(&self, at: usize) -> usize {
        let next = self.changed.partition_point(|segment| segment.start < at);
        match next.checked_sub(1).map(|i| &self.changed[i]) {
            None => at,
            Some(segment) if at < segment.end => segment.original_start,
            Some(segment) => segment.original_end + (at - segment.end),
        }
    }
}

/// Whether no character before this one can combine or be reordered with it.
fn begins_segment(c: char) -> bool {
    c.is_ascii() || (canonical_combining_class(c) == 0 && is_nfc_quick(core::iter::once(c)) == IsNormalized::Yes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn offsets_of_the_original() {
        let text = NfcText::new("aé e\u{301}\u{323}x ｶ\u{1100}\u{1161}!").unwrap();
        assert_eq!(text.text, "aé ẹ\u{301}x ｶ가!");
        let original: Vec<usize> = (0..=text.text.len()).map(|at| text.original(at)).collect();
        assert_eq!(original, [0, 1, 2, 3, 4, 4, 4, 4, 4, 9, 10, 11, 12, 13, 14, 14, 14, 20, 21]);
        assert!(NfcText::new("é ascii").is_none());
    }

    proptest! {
        /// Normalising by segments equals normalising the whole text, and offsets never decrease.
        #[test]
        fn segments_make_the_whole(text in "[ae가각\u{300}-\u{345}\u{1d165}-\u{1d172}\u{9c7}\u{9be}\u{fb1d}\u{212b}x]{0,24}") {
            let whole: String = text.nfc().collect();
            match NfcText::new(&text) {
                None => prop_assert_eq!(whole, text),
                Some(normalised) => {
                    let ends: Vec<usize> = (0..=whole.len()).map(|at| normalised.original(at)).collect();
                    prop_assert!(ends.is_sorted() && ends.last() == Some(&text.len()), "{ends:?}");
                    prop_assert_eq!(whole, normalised.text);
                }
            }
        }
    }
}
