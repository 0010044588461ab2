//! JSON documents of unbounded size, written in pieces of bounded size: the host asks for the next piece when its client has
//! taken the last, and never holds the whole document.

use std::collections::VecDeque;

use serde::Serialize;

/// A piece ends with the item that makes it this long, in bytes.
pub const PIECE_BYTES: usize = 32 << 10;

/// Part of a document: items in a row, written one at a time.
struct Section<S> {
    /// JSON before the first item.
    before: String,
    separator: &'static str,
    n_items: usize,
    write: fn(&mut S, usize, &mut Vec<u8>),
}

/// A document that is written from `S`. The iterator gives its bytes.
pub struct JsonPieces<S> {
    source: S,
    sections: VecDeque<Section<S>>,
    /// The next item of the first section.
    next: usize,
    /// Whether what comes before its first item was written.
    is_begun: bool,
    /// JSON after the last item; `None` once it was written.
    end: Option<String>,
}

impl<S> JsonPieces<S> {
    /// A document without sections.
    pub fn new(source: S) -> JsonPieces<S> {
        JsonPieces { source, sections: VecDeque::new(), next: 0, is_begun: false, end: Some(String::new()) }
    }

    /// Adds a list of `n_items`: `before` ends with `[`. `write` appends the item of an index; it is called once for each, in
    /// order, so that it may take the item.
    #[must_use]
    pub fn list(mut self, before: String, n_items: usize, write: fn(&mut S, usize, &mut Vec<u8>)) -> JsonPieces<S> {
        self.sections.push_back(Section { before, separator: ",", n_items, write });
        self
    }

    /// Adds a string in `n_parts`: `before` ends with `"`. `write` appends a part, escaped.
    #[must_use]
    pub fn string(mut self, before: String, n_parts: usize, write: fn(&mut S, usize, &mut Vec<u8>)) -> JsonPieces<S> {
        self.sections.push_back(Section { before, separator: "", n_items: n_parts, write });
        self
    }

    /// Sets what comes after the last section.
    #[must_use]
    pub fn end(mut self, end: String) -> JsonPieces<S> {
        self.end = Some(end);
        self
    }
}

impl<S> Iterator for JsonPieces<S> {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        self.end.as_ref()?;
        let mut piece = Vec::with_capacity(PIECE_BYTES + PIECE_BYTES / 8);
        while let Some(section) = self.sections.front() {
            if !std::mem::replace(&mut self.is_begun, true) {
                piece.extend_from_slice(section.before.as_bytes());
            }
            while self.next < section.n_items && piece.len() < PIECE_BYTES {
                if self.next > 0 {
                    piece.extend_from_slice(section.separator.as_bytes());
                }
                (section.write)(&mut self.source, self.next, &mut piece);
                self.next += 1;
            }
            if self.next < section.n_items {
                return Some(piece);
            }
            (self.next, self.is_begun) = (0, false);
            self.sections.pop_front();
        }
        piece.extend_from_slice(self.end.take()?.as_bytes());
        Some(piece)
    }
}

/// Appends a value as JSON.
pub(crate) fn write<T: Serialize + ?Sized>(value: &T, to: &mut Vec<u8>) {
    // writing to memory does not fail, and our own types have text keys
    let _ = serde_json::to_writer(to, value);
}

/// Appends a text as JSON, without quotation marks.
pub(crate) fn write_escaped(text: &str, to: &mut Vec<u8>) {
    let start = to.len();
    write(text, to);
    to.pop();
    to.remove(start);
}

/// A value as JSON.
pub(crate) fn text<T: Serialize + ?Sized>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_is_its_pieces_and_each_is_bounded() {
        let number = |source: &mut Vec<usize>, i: usize, to: &mut Vec<u8>| write(&source[i], to);
        let part = |_: &mut Vec<usize>, i: usize, to: &mut Vec<u8>| {
            write_escaped(if i.is_multiple_of(2) { "\"" } else { "é" }, to)
        };
        // some of them end a piece just before or after a section begins
        for n in [0, 1, 2, 5000, 50_000].into_iter().chain(7000..7200) {
            let pieces = JsonPieces::new((0..n).collect::<Vec<usize>>())
                .list("{\"a\":[".into(), n, number)
                .list("],\"b\":[".into(), n / 2, number)
                .string("],\"c\":\"".into(), n, part)
                .end("\"}".into());
            let pieces: Vec<Vec<u8>> = pieces.collect();
            assert!(pieces.iter().all(|piece| piece.len() < PIECE_BYTES + 64));
            let value: serde_json::Value = serde_json::from_slice(&pieces.concat()).unwrap();
            let [a, b] = ["a", "b"].map(|key| value[key].as_array().unwrap().len());
            assert_eq!((a, b, value["c"].as_str().unwrap().chars().count()), (n, n / 2, n));
        }
    }
}
