//! Text of a growing answer: whole characters only, and never a byte that could begin a stop string.

use alloc::string::String;
use alloc::vec::Vec;

use crate::tokenizer::StreamDecoder;

/// Streams text up to the first stop string. What it gives out, put together, is the text before the stop string, or
/// all of it.
#[derive(Debug, Clone, Default)]
pub struct TextStream {
    decoder: StreamDecoder,
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
}

/// What some more bytes brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Text that is certain now.
    pub text: String,
    /// The stop string that ended the text, by its index.
    pub stopped: Option<usize>,
}

impl TextStream {
    /// A stream that ends before the first of `stops` to occur; empty ones are ignored.
    pub fn new(stops: Vec<String>) -> TextStream {
        TextStream { stops, ..TextStream::default() }
    }

    /// Takes the bytes of a token.
    pub fn push(&mut self, bytes: &[u8]) -> Piece {
        let text = self.decoder.push(bytes);
        self.take(&text)
    }

    /// The text still held, when no more bytes come.
    pub fn finish(&mut self) -> Piece {
        let text = self.decoder.finish();
        let mut piece = self.take(&text);
        if piece.stopped.is_none() {
            piece.text.push_str(&self.held);
        }
        self.held.clear();
        piece
    }

    fn take(&mut self, text: &str) -> Piece {
        self.held.push_str(text);
        let stops = || self.stops.iter().enumerate().filter(|(_, s)| !s.is_empty());
        // the earliest match wins, of several there the one listed first
        let found = stops().filter_map(|(i, s)| self.held.find(s.as_str()).map(|at| (at, i))).min();
        if let Some((at, stop)) = found {
            self.held.truncate(at);
            return Piece { text: core::mem::take(&mut self.held), stopped: Some(stop) };
        }
        let keep = stops().map(|(_, s)| overlap(&self.held, s)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Piece { text: core::mem::replace(&mut self.held, rest), stopped: None }
    }
}

/// Length of the longest end of `text` that is a proper beginning of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let from = text.len().saturating_sub(stop.len() - 1);
    let starts = (from..text.len()).filter(|&i| text.is_char_boundary(i));
    starts.map(|i| &text[i..]).find(|end| stop.starts_with(end)).map_or(0, str::len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn streamed_text_is_the_text_before_the_first_stop(
            text in "[ab€]{0,30}", stops in prop::collection::vec("[ab€]{0,4}", 0..4), cuts in prop::collection::vec(0usize..60, 0..12),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let mut stream = TextStream::new(stops.clone());
            let (mut got, mut stopped) = (String::new(), None);
            for cut in cuts.windows(2) {
                let piece = stream.push(&text.as_bytes()[cut[0]..cut[1]]);
                got.push_str(&piece.text);
                stopped = piece.stopped;
                if stopped.is_some() { break; }
            }
            if stopped.is_none() {
                let piece = stream.finish();
                got.push_str(&piece.text);
                stopped = piece.stopped;
            }
            // the naive definition: the shortest beginning of the text that ends with a stop string
            let ends = text.char_indices().map(|(i, c)| i + c.len_utf8());
            let hit = ends.filter_map(|end| {
                stops.iter().filter(|s| !s.is_empty() && text[..end].ends_with(s.as_str())).map(|s| end - s.len()).min()
            }).next();
            prop_assert_eq!(stopped.is_some(), hit.is_some());
            if let Some(at) = hit {
                prop_assert!(got.len() <= at && text.starts_with(&got));
                let stop = &stops[stopped.unwrap()];
                prop_assert!(text[got.len()..].starts_with(stop.as_str()));
            } else {
                prop_assert_eq!(got, text.to_string());
            }
        }
    }
}
