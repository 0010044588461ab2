//! Events, and the format of a line.

use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::hash::{Hash, Key};
use super::verify::Defect;

/// Bytes of the longest line that is read, without its line feed. An event has at most 6 texts, whose bytes are written
/// as at most 6 bytes each (`\u0000`).
pub(super) const MAX_LINE_BYTES: usize = 32 * 1024;
/// Bytes of the longest text in an event.
const MAX_TEXT_BYTES: usize = 512;
/// 9999-12-31T23:59:59Z, the last second of RFC 3339, after the Unix epoch.
const MAX_TIME: Duration = Duration::from_secs(253_402_300_799);
/// Between the hashed bytes and the hash.
const HASH: &str = ",\"hash\":\"";
/// Bytes of `,"hash":"…"}`.
const HASH_BYTES: usize = HASH.len() + 64 + 2;

/// A text of at most 512 bytes; a longer one is cut at a character and ends with `…`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Text(Box<str>);

impl From<&str> for Text {
    fn from(text: &str) -> Text {
        if text.len() <= MAX_TEXT_BYTES {
            return Text(text.into());
        }
        let last = MAX_TEXT_BYTES - '…'.len_utf8();
        let end = text.char_indices().map(|(at, _)| at).take_while(|&at| at <= last).last().unwrap_or(0);
        Text(format!("{}…", &text[..end]).into())
    }
}

impl From<String> for Text {
    fn from(text: String) -> Text {
        text.as_str().into()
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What happened. No event holds text of prompts or answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    ServerStarted {
        version: Text,
    },
    ServerStopped,
    /// An administrator's request; `error` if it failed.
    Admin {
        administrator: Text,
        action: Text,
        target: Text,
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<Text>,
    },
    /// Requests that were refused before they had a client.
    Refused(Refusal),
    /// A request to a model has ended.
    Request {
        request_id: Text,
        #[serde(skip_serializing_if = "Option::is_none")]
        key_id: Option<Text>,
        tenant: Text,
        model: Text,
        endpoint: Text,
        prompt_tokens: u64,
        /// Prompt tokens that the prefix cache held.
        cached_tokens: u64,
        completion_tokens: u64,
        status: u16,
        /// Finish reasons, separated by commas, or the code of the error.
        outcome: Text,
        milliseconds: u64,
    },
    /// Written by the log: `count` events were dropped because the queue was full.
    Lost {
        count: u64,
    },
    /// Written by the log: an incomplete last line of `bytes` bytes was cut off when the log was opened.
    Recovered {
        bytes: u64,
    },
    /// Written by the log: first line of a file; the file before was renamed to `NAME.number`.
    Rotated {
        number: u64,
    },
}

/// A refused request, or several of its kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refusal {
    pub reason: Text,
    /// `None` if they came from several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// Of the first.
    pub path: Text,
    pub status: u16,
    /// How many, if there were more than one.
    #[serde(skip_serializing_if = "is_one")]
    pub count: u64,
}

impl Refusal {
    pub fn new(reason: &str, address: Option<IpAddr>, path: &str, status: u16) -> Refusal {
        Refusal { reason: reason.into(), address, path: path.into(), status, count: 1 }
    }
}

fn is_one(count: &u64) -> bool {
    *count == 1
}

/// The line of an event with its line feed, and its hash.
///
/// # Errors
/// Never for the events above; serde's are passed on.
pub(super) fn line(
    seq: u64,
    time: SystemTime,
    event: &Event,
    previous: Hash,
    key: Option<&Key>,
) -> Result<(Vec<u8>, Hash), serde_json::Error> {
    #[derive(Serialize)]
    struct Line<'a> {
        seq: u64,
        time: String,
        #[serde(flatten)]
        event: &'a Event,
        previous: String,
    }
    // humantime panics outside of these years
    let time = time.clamp(SystemTime::UNIX_EPOCH, SystemTime::UNIX_EPOCH + MAX_TIME);
    let time = humantime::format_rfc3339_millis(time).to_string();
    let mut bytes = serde_json::to_vec(&Line { seq, time, event, previous: previous.to_string() })?;
    bytes.truncate(bytes.len().saturating_sub(1)); // the closing brace
    let hash = Hash::of(&bytes, key);
    bytes.extend_from_slice(format!("{HASH}{hash}\"}}\n").as_bytes());
    Ok((bytes, hash))
}

/// The fields of a line that form the chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) seq: u64,
    pub(super) previous: Hash,
    pub(super) hash: Hash,
    /// Of the event `rotated`.
    pub(super) rotated: Option<u64>,
}

impl Link {
    /// Parses a line without its line feed and checks its hash.
    ///
    /// # Errors
    /// If it is not JSON, fields are missing or in another place, or its bytes do not have its hash.
    pub(super) fn parse(line: &[u8], key: Option<&Key>) -> Result<Link, Defect> {
        #[derive(Deserialize)]
        struct Line {
            seq: u64,
            time: String,
            event: String,
            number: Option<u64>,
            previous: String,
            hash: String,
        }
        let fields: Line = serde_json::from_slice(line).map_err(|e| Defect::Json { error: e.to_string() })?;
        let hash = |text: &str, name| text.parse().map_err(|_| Defect::Format { expected: name });
        let previous: Hash = hash(&fields.previous, "\"previous\" of 64 lower-case hex digits")?;
        let found: Hash = hash(&fields.hash, "\"hash\" of 64 lower-case hex digits")?;
        let start = format!("{{\"seq\":{},\"time\":\"{}\",\"event\":\"{}\"", fields.seq, fields.time, fields.event);
        let end = format!(",\"previous\":\"{previous}\"{HASH}{found}\"}}");
        if !line.starts_with(start.as_bytes()) {
            return Err(Defect::Format { expected: "seq, time, event as the first fields, without white space" });
        }
        if !line.ends_with(end.as_bytes()) {
            return Err(Defect::Format { expected: "previous, hash as the last fields, without white space" });
        }
        let computed = Hash::of(&line[..line.len().saturating_sub(HASH_BYTES)], key);
        if computed != found {
            return Err(Defect::Hash { found, computed });
        }
        let rotated = fields.number.filter(|_| fields.event == "rotated");
        Ok(Link { seq: fields.seq, previous, hash: found, rotated })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(event: &Event) -> String {
        let time = SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_123);
        let (bytes, hash) = line(7, time, event, Hash([1; 32]), None).unwrap();
        let text = String::from_utf8(bytes).unwrap();
        let link = Link::parse(text.trim_end().as_bytes(), None).unwrap();
        assert_eq!((link.seq, link.previous, link.hash), (7, Hash([1; 32]), hash));
        let previous = "01".repeat(32);
        let text = text.strip_suffix(&format!(",\"previous\":\"{previous}\",\"hash\":\"{hash}\"}}\n")).unwrap();
        text.strip_prefix(r#"{"seq":7,"time":"2023-11-14T22:13:20.123Z","event":"#).unwrap().into()
    }

    #[test]
    fn fields_of_events() {
        let admin =
            |error| Event::Admin { administrator: "a".into(), action: "load".into(), target: "m".into(), error };
        let refused = |address| Event::Refused(Refusal::new("unknown API key", address, "/v1/\"\n", 401));
        for (event, text) in [
            (Event::ServerStarted { version: "0.1".into() }, r#""server_started","version":"0.1""#),
            (Event::ServerStopped, r#""server_stopped""#),
            (admin(None), r#""admin","administrator":"a","action":"load","target":"m""#),
            (admin(Some("e".into())), r#""admin","administrator":"a","action":"load","target":"m","error":"e""#),
            (refused(None), r#""refused","reason":"unknown API key","path":"/v1/\"\n","status":401"#),
            (
                refused(Some([10, 0, 0, 1].into())),
                r#""refused","reason":"unknown API key","address":"10.0.0.1","path":"/v1/\"\n","status":401"#,
            ),
            (Event::Lost { count: 3 }, r#""lost","count":3"#),
            (Event::Recovered { bytes: 3 }, r#""recovered","bytes":3"#),
            (Event::Rotated { number: 3 }, r#""rotated","number":3"#),
        ] {
            assert_eq!(written(&event), text);
        }
    }

    #[test]
    fn texts_are_cut_at_a_character() {
        assert_eq!(Text::from("a".repeat(512)).0.len(), 512);
        for text in ["a".repeat(513), "ä".repeat(300), "語".repeat(9999)] {
            let cut = Text::from(text.as_str()).to_string();
            assert!(cut.len() <= 512 && cut.len() > 505, "{}", cut.len());
            assert!(text.starts_with(cut.strip_suffix('…').unwrap()));
        }
    }

    #[test]
    fn the_longest_line_is_below_the_limit() {
        let longest = || Text::from("\0".repeat(512));
        let event = Event::Request {
            request_id: longest(),
            key_id: Some(longest()),
            tenant: longest(),
            model: longest(),
            endpoint: longest(),
            prompt_tokens: u64::MAX,
            cached_tokens: u64::MAX,
            completion_tokens: u64::MAX,
            status: u16::MAX,
            outcome: longest(),
            milliseconds: u64::MAX,
        };
        let (bytes, _) = line(u64::MAX, SystemTime::now(), &event, Hash::ZERO, None).unwrap();
        assert!(bytes.len() <= MAX_LINE_BYTES, "{}", bytes.len());
    }

    #[test]
    fn times_outside_of_rfc_3339_are_clamped() {
        let far = SystemTime::UNIX_EPOCH + MAX_TIME * 2;
        for (time, text) in [
            (SystemTime::UNIX_EPOCH - Duration::from_secs(1), "1970-01-01T00:00:00.000Z"),
            (far, "9999-12-31T23:59:59.000Z"),
        ] {
            let (bytes, _) = line(1, time, &Event::ServerStopped, Hash::ZERO, None).unwrap();
            assert!(String::from_utf8(bytes).unwrap().contains(text));
        }
    }

    #[test]
    fn a_field_in_a_text_is_not_a_field() {
        let event = Event::ServerStarted { version: r#"","previous":"0","hash":"0"}"#.into() };
        written(&event);
    }

    #[test]
    fn other_formats_are_refused() {
        let (bytes, hash) = line(1, SystemTime::now(), &Event::ServerStopped, Hash::ZERO, None).unwrap();
        let good = String::from_utf8(bytes).unwrap().trim_end().to_owned();
        let spaced = good.replacen("{", "{ ", 1);
        let reordered = good.replacen(&format!(",\"hash\":\"{hash}\""), "", 1).replacen(
            "{\"seq\"",
            &format!("{{\"hash\":\"{hash}\",\"seq\""),
            1,
        );
        for line in [spaced, reordered, format!("{good} "), good.replace(&hash.to_string(), "ab")] {
            assert!(matches!(Link::parse(line.as_bytes(), None), Err(Defect::Format { .. })), "{line}");
        }
        let twice = good.replacen("\"seq\":1", "\"seq\":1,\"seq\":1", 1);
        for line in [twice.as_str(), "", "{}", "[]", "x", &good[1..], &"[".repeat(30_000)] {
            assert!(matches!(Link::parse(line.as_bytes(), None), Err(Defect::Json { .. })), "{line}");
        }
        let key = Key::new(&[7; 32]);
        assert!(matches!(Link::parse(good.as_bytes(), key.as_ref()), Err(Defect::Hash { .. })));
    }
}
