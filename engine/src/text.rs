//! Streaming text output: emits complete characters only, and holds back text that may begin a stop string.

use alloc::string::String;
use alloc::vec::Vec;

use crate::tokenizer::StreamDecoder;

/// Decodes token bytes to text up to the first stop string. The emitted pieces concatenated are the text before the
/// stop string, or all of it.
#[derive(Debug, Clone, Default)]
pub struct TextStream {
    decoder: StreamDecoder,
    stops: Vec<String>,
    /// Decoded text that may be the beginning of a stop string.
    held: String,
}

/// Text to append to the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextDelta {
    /// New text; may be empty.
    pub text: String,
    /// Index of the stop string that ended the text.
    pub stopped: Option<usize>,
}

impl TextStream {
    /// A stream that ends before the first occurrence of one of `stops`; empty stop strings are ignored.
    pub fn new(stops: Vec<String>) -> TextStream {
        TextStream { stops, ..TextStream::default() }
    }

    /// Appends the bytes of a token and returns the text that can be emitted.
    pub fn push(&mut self, bytes: &[u8]) -> TextDelta {
        let text = self.decoder.push(bytes);
        self.take(&text)
    }

    /// Ends the stream and returns the text that was held back.
    pub fn finish(&mut self) -> TextDelta {
        let text = self.decoder.finish();
        let mut delta = self.take(&text);
        if delta.stopped.is_none() {
            delta.text.push_str(&self.held);
        }
        self.held.clear();
        delta
    }

    fn take(&mut self, text: &str) -> TextDelta {
        self.held.push_str(text);
        let stops = || self.stops.iter().enumerate().filter(|(_, s)| !s.is_empty());
        // the earliest match wins; of several at the same place, the one listed first
        let found = stops().filter_map(|(i, s)| self.held.find(s.as_str()).map(|at| (at, i))).min();
        if let Some((at, stop)) = found {
            self.held.truncate(at);
            return TextDelta { text: core::mem::take(&mut self.held), stopped: Some(stop) };
        }
        let keep = stops().map(|(_, s)| overlap(&self.held, s)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        TextDelta { text: core::mem::replace(&mut self.held, rest), stopped: None }
    }
}

/// Length of the longest suffix of `text` that is a proper prefix of `stop`.
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
                let delta = stream.push(&text.as_bytes()[cut[0]..cut[1]]);
                got.push_str(&delta.text);
                stopped = delta.stopped;
                if stopped.is_some() { break; }
            }
            if stopped.is_none() {
                let delta = stream.finish();
                got.push_str(&delta.text);
                stopped = delta.stopped;
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
