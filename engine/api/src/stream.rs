//! Streams: writers turn updates into JSON events; a sink sends them, as server-sent events or otherwise.

use std::sync::Arc;

use serde::Serialize;

use crate::error::ErrorBody;
use crate::update::Update;

/// Server-sent event.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ServerSentEvent {
    /// Event type, on endpoints that are not OpenAI's.
    pub event: Option<String>,
    /// JSON: a chunk or an error. OpenAI's endpoints end with `[DONE]`.
    pub data: String,
}

/// Takes the events of a stream.
pub trait EventSink {
    /// Sends an event: JSON on one line. `name` is its type, on endpoints that are not OpenAI's.
    fn event(&mut self, name: Option<&str>, json: &[u8]);

    /// Sends the event that ends a stream of OpenAI's endpoints.
    fn done(&mut self);

    /// Whether events go anywhere: if not, they are not serialised.
    fn is_read(&self) -> bool {
        true
    }
}

/// Drops all events: for responses that are written whole from the state of their [`StreamWriter`].
#[derive(Debug, Clone, Copy)]
pub struct NoEvents;

impl EventSink for NoEvents {
    fn event(&mut self, _: Option<&str>, _: &[u8]) {}

    fn done(&mut self) {}

    fn is_read(&self) -> bool {
        false
    }
}

/// Serialises and sends an event.
pub fn send<T: Serialize>(sink: &mut dyn EventSink, name: Option<&str>, data: &T) {
    if !sink.is_read() {
        return;
    }
    // our own types serialise without errors
    sink.event(name, &serde_json::to_vec(data).unwrap_or_else(|_| b"null".to_vec()));
}

/// Writes the response of one request as a stream.
pub trait StreamWriter {
    /// Writes the events of an update of the choice `index`, for which [`Update::error`] is `None`. Returns whether the
    /// stream is complete.
    fn update(&mut self, index: usize, update: Update, sink: &mut dyn EventSink) -> bool;

    /// Writes an event that keeps an idle connection open. Returns whether it did; if not, the host sends a comment.
    fn keep_alive(&mut self, _: &mut dyn EventSink) -> bool {
        false
    }

    /// Ends the stream with an error.
    fn fail(&mut self, error: &ErrorBody, sink: &mut dyn EventSink) {
        send(sink, None, error);
        sink.done();
    }
}

/// How the events of a stream are separated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Framing {
    /// Server-sent events.
    #[default]
    ServerSentEvents,
    /// JSON, each on a line of its own (NDJSON, Ollama): without names, IDs and comments.
    JsonLines,
}

/// Formats the events of a stream.
#[derive(Debug, Default)]
pub struct EventBuffer {
    bytes: Vec<u8>,
    framing: Framing,
    /// ID of the stream, if events have IDs.
    stream_id: Option<Arc<str>>,
    next_index: usize,
}

impl EventBuffer {
    /// Events with the IDs `STREAM:INDEX`, of which the first is `next_index`.
    pub fn with_ids(stream_id: Option<Arc<str>>, next_index: usize) -> EventBuffer {
        EventBuffer { stream_id, next_index, ..EventBuffer::default() }
    }

    /// An empty buffer for JSON lines.
    pub fn json_lines() -> EventBuffer {
        EventBuffer { framing: Framing::JsonLines, ..EventBuffer::default() }
    }

    /// Index of the next event.
    pub fn next_index(&self) -> usize {
        self.next_index
    }

    fn id(&mut self) {
        if let Some(id) = &self.stream_id {
            self.bytes.extend_from_slice(format!("id: {id}:{}\n", self.next_index).as_bytes());
        }
        self.next_index += 1;
    }

    /// Adds the events of another buffer, which begins with the next index of this one.
    pub fn append(&mut self, other: EventBuffer) {
        self.bytes.extend_from_slice(&other.bytes);
        self.next_index = other.next_index;
    }

    /// Bytes so far.
    pub fn n_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The formatted events.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Adds a comment line, which clients ignore.
    pub fn comment(&mut self, text: &str) {
        if self.framing == Framing::JsonLines {
            return;
        }
        self.bytes.extend_from_slice(format!(": {text}\n\n").as_bytes());
    }
}

impl EventSink for EventBuffer {
    fn event(&mut self, name: Option<&str>, json: &[u8]) {
        if self.framing == Framing::JsonLines {
            self.bytes.extend_from_slice(json);
            self.bytes.push(b'\n');
            return;
        }
        self.id();
        if let Some(name) = name {
            self.bytes.extend_from_slice(b"event: ");
            self.bytes.extend_from_slice(name.as_bytes());
            self.bytes.push(b'\n');
        }
        self.bytes.extend_from_slice(b"data: ");
        self.bytes.extend_from_slice(json);
        self.bytes.extend_from_slice(b"\n\n");
    }

    fn done(&mut self) {
        if self.framing == Framing::JsonLines {
            return;
        }
        self.id();
        self.bytes.extend_from_slice(b"data: [DONE]\n\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A client that parses events by the standard gets the texts back, however the bytes are cut.
        #[test]
        fn events_carry_any_text(texts in prop::collection::vec(".*|\\PC*[\r\n\u{2028}]\\PC*", 0..8), cut in 1usize..9) {
            let mut events = EventBuffer::default();
            texts.iter().for_each(|text| send(&mut events, None, text));
            events.done();
            let mut parsed = Vec::new();
            let mut buffer = Vec::new();
            for piece in events.into_bytes().chunks(cut) {
                buffer.extend_from_slice(piece);
                while let Some(end) = buffer.windows(2).position(|pair| pair == b"\n\n") {
                    let event: Vec<u8> = buffer.drain(..end + 2).collect();
                    let event = String::from_utf8(event).unwrap();
                    // one field, on one line
                    prop_assert_eq!(event.trim_end().lines().count(), 1);
                    parsed.push(event.strip_prefix("data: ").unwrap().trim_end_matches('\n').to_string());
                }
            }
            prop_assert!(buffer.is_empty());
            prop_assert_eq!(parsed.pop().unwrap(), "[DONE]");
            let back: Vec<String> = parsed.iter().map(|json| serde_json::from_str(json).unwrap()).collect();
            prop_assert_eq!(back, texts);
        }
    }
}
