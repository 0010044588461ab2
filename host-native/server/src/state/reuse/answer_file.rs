//! An answer in a file: the time of its computation, and its updates.

use starling::engine::{FinishReason, TokenLogprobs};

use crate::schedule::queue::Update;
use crate::state::fields::{Malformed, Reader, push_len, push_text};

const VERSION: u8 = 1;

/// Updates of answers, each with the index of its answer.
pub type Updates = Vec<(usize, Update)>;

/// `since` is in milliseconds since 1970. `None` if an update has a receipt, or is none of an answer that is kept.
pub fn encode(since: u64, updates: &[(usize, Update)]) -> Option<Vec<u8>> {
    let mut out = vec![VERSION];
    out.extend(since.to_le_bytes());
    push_len(&mut out, updates.len());
    for (index, update) in updates {
        push_size(&mut out, *index);
        push_update(&mut out, update)?;
    }
    Some(out)
}

/// # Errors
/// If the bytes are not those of [`encode`].
pub fn decode(bytes: &[u8]) -> Result<(u64, Updates), Malformed> {
    let mut reader = Reader(bytes);
    if reader.array()? != [VERSION] {
        return Err(Malformed);
    }
    let since = reader.u64()?;
    let updates = reader.list(|reader| Ok((reader.size()?, read_update(reader)?)))?;
    reader.end()?;
    Ok((since, updates))
}

fn push_update(out: &mut Vec<u8>, update: &Update) -> Option<()> {
    match update {
        Update::Started => out.push(0),
        Update::Prefilled { n_cached, prompt } => {
            out.push(1);
            push_size(out, *n_cached);
            push_len(out, prompt.len());
            prompt.iter().for_each(|(logprob, top)| push_logprobs(out, *logprob, top));
        }
        Update::Token { token, text, logprob, top } => {
            out.push(2);
            out.extend(token.to_le_bytes());
            push_text(out, text);
            push_logprobs(out, *logprob, top);
        }
        Update::Drafted { n_accepted, n_rejected } => {
            out.push(3);
            push_size(out, *n_accepted);
            push_size(out, *n_rejected);
        }
        Update::Done { text, reason, n_tokens, receipt: None } => {
            out.push(4);
            push_text(out, text);
            push_size(out, *n_tokens);
            let (code, value) = match reason {
                FinishReason::StopToken(token) => (0, *token as usize),
                FinishReason::StopString(i) => (1, *i),
                FinishReason::Complete => (2, 0),
                FinishReason::Length => (3, 0),
                _ => return None,
            };
            out.push(code);
            push_size(out, value);
        }
        _ => return None,
    }
    Some(())
}

fn read_update(reader: &mut Reader<'_>) -> Result<Update, Malformed> {
    Ok(match reader.array()? {
        [0] => Update::Started,
        [1] => Update::Prefilled { n_cached: reader.size()?, prompt: reader.list(read_logprobs)? },
        [2] => {
            let (token, text) = (reader.u32()?, reader.text()?.to_string());
            let (logprob, top) = read_logprobs(reader)?;
            Update::Token { token, text, logprob, top }
        }
        [3] => Update::Drafted { n_accepted: reader.size()?, n_rejected: reader.size()? },
        [4] => {
            let (text, n_tokens) = (reader.text()?.to_string(), reader.size()?);
            let ([code], value) = (reader.array()?, reader.size()?);
            let reason = match code {
                0 => FinishReason::StopToken(u32::try_from(value).map_err(|_| Malformed)?),
                1 => FinishReason::StopString(value),
                2 => FinishReason::Complete,
                3 => FinishReason::Length,
                _ => return Err(Malformed),
            };
            Update::Done { text, reason, n_tokens, receipt: None }
        }
        _ => return Err(Malformed),
    })
}

fn push_size(out: &mut Vec<u8>, n: usize) {
    out.extend((n as u64).to_le_bytes());
}

fn push_logprobs(out: &mut Vec<u8>, logprob: f32, top: &[(u32, f32)]) {
    out.extend(logprob.to_le_bytes());
    push_len(out, top.len());
    for (token, logprob) in top {
        out.extend(token.to_le_bytes());
        out.extend(logprob.to_le_bytes());
    }
}

fn read_logprobs(reader: &mut Reader<'_>) -> Result<TokenLogprobs, Malformed> {
    Ok((reader.f32()?, reader.list(|reader| Ok((reader.u32()?, reader.f32()?)))?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn logprobs() -> impl Strategy<Value = TokenLogprobs> {
        (any::<f32>(), prop::collection::vec((any::<u32>(), any::<f32>()), 0..4))
    }

    fn update() -> impl Strategy<Value = Update> {
        let reason = prop_oneof![
            any::<u32>().prop_map(FinishReason::StopToken),
            any::<usize>().prop_map(FinishReason::StopString),
            Just(FinishReason::Complete),
            Just(FinishReason::Length),
        ];
        prop_oneof![
            Just(Update::Started),
            (any::<usize>(), prop::collection::vec(logprobs(), 0..4))
                .prop_map(|(n_cached, prompt)| Update::Prefilled { n_cached, prompt }),
            (any::<u32>(), ".{0,8}", logprobs()).prop_map(|(token, text, (logprob, top))| Update::Token {
                token,
                text,
                logprob,
                top
            }),
            (any::<usize>(), any::<usize>())
                .prop_map(|(n_accepted, n_rejected)| Update::Drafted { n_accepted, n_rejected }),
            (".{0,8}", reason, any::<usize>()).prop_map(|(text, reason, n_tokens)| Update::Done {
                text,
                reason,
                n_tokens,
                receipt: None
            }),
        ]
    }

    proptest! {
        /// Every bit of every number.
        #[test]
        fn answers_come_back(since in any::<u64>(), updates in prop::collection::vec((any::<usize>(), update()), 0..8)) {
            let bytes = encode(since, &updates).unwrap();
            let (found_since, found) = decode(&bytes).unwrap();
            prop_assert_eq!((found_since, encode(since, &found)), (since, Some(bytes.clone())));
            prop_assert_eq!(format!("{found:?}"), format!("{updates:?}"));
            for n in 0..bytes.len() {
                prop_assert!(decode(&bytes[..n]).is_err());
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(0u8..6, 0..120)) {
            let _ = decode(&[&[VERSION][..], &bytes].concat());
        }
    }

    #[test]
    fn what_is_not_kept_has_no_file() {
        let done = |reason| Update::Done { text: String::new(), reason, n_tokens: 1, receipt: None };
        for update in [done(FinishReason::Deadline), done(FinishReason::ContentFilter), Update::Vector { vector: None }]
        {
            assert_eq!(encode(0, &[(0, update)]), None);
        }
    }
}
