//! The inputs of OpenAI's completions and embeddings: text, token IDs, or a list of either.

use std::fmt;

use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::whole::integer;

/// Text, a list of texts, a list of token IDs, or a list of such lists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum Input {
    /// One text.
    Text(String),
    /// Token IDs of one input.
    Tokens(Vec<u32>),
    /// Several texts.
    Texts(Vec<String>),
    /// Token IDs of several inputs.
    TokenLists(Vec<Vec<u32>>),
}

impl Input {
    /// Number of inputs.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        match self {
            Input::Text(_) | Input::Tokens(_) => 1,
            Input::Texts(texts) => texts.len(),
            Input::TokenLists(lists) => lists.len(),
        }
    }

    /// Bytes of text, or number of tokens: a measure of the work.
    pub fn bytes(&self) -> usize {
        match self {
            Input::Text(text) => text.len(),
            Input::Tokens(tokens) => tokens.len(),
            Input::Texts(texts) => texts.iter().map(String::len).sum(),
            Input::TokenLists(lists) => lists.iter().map(Vec::len).sum(),
        }
    }

    /// Maps each input: texts by `text`, token IDs by `tokens`.
    pub fn each<T>(self, text: impl FnMut(String) -> T, mut tokens: impl FnMut(Vec<u32>) -> T) -> Vec<T> {
        match self {
            Input::Text(one) => [one].map(text).into(),
            Input::Tokens(one) => vec![tokens(one)],
            Input::Texts(all) => all.into_iter().map(text).collect(),
            Input::TokenLists(all) => all.into_iter().map(tokens).collect(),
        }
    }
}

/// A token ID of JSON.
pub(crate) fn token<E: de::Error>(n: u64, expected: &dyn de::Expected) -> Result<u32, E> {
    u32::try_from(n).map_err(|_| E::invalid_value(de::Unexpected::Unsigned(n), expected))
}

/// A token ID that is written as a float.
pub(crate) fn whole_token<E: de::Error>(x: f64, expected: &dyn de::Expected) -> Result<u32, E> {
    let id = integer(x).and_then(|n| u32::try_from(n).ok());
    id.ok_or_else(|| E::invalid_type(de::Unexpected::Float(x), expected))
}

/// Item of a list.
#[derive(Debug)]
enum Item {
    Text(String),
    Token(u32),
    Tokens(Vec<u32>),
}

const EXPECTED: &str = "a string, a list of strings, a list of token ids, or a list of such lists";

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Item;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id, or a list of token ids")
            }
            fn visit_str<E>(self, text: &str) -> Result<Item, E> {
                Ok(Item::Text(text.into()))
            }
            fn visit_u64<E: de::Error>(self, n: u64) -> Result<Item, E> {
                token(n, &self).map(Item::Token)
            }
            fn visit_f64<E: de::Error>(self, x: f64) -> Result<Item, E> {
                whole_token(x, &self).map(Item::Token)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Item, A::Error> {
                let mut tokens = Vec::new();
                while let Some(token) = seq.next_element()? {
                    tokens.push(token);
                }
                Ok(Item::Tokens(tokens))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl<'de> Deserialize<'de> for Input {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Input;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EXPECTED)
            }
            fn visit_str<E>(self, text: &str) -> Result<Input, E> {
                Ok(Input::Text(text.into()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Input, A::Error> {
                let Some(first) = seq.next_element()? else { return Ok(Input::Texts(Vec::new())) };
                let mut input = match first {
                    Item::Text(text) => Input::Texts(vec![text]),
                    Item::Token(token) => Input::Tokens(vec![token]),
                    Item::Tokens(tokens) => Input::TokenLists(vec![tokens]),
                };
                while let Some(item) = seq.next_element()? {
                    match (&mut input, item) {
                        (Input::Texts(all), Item::Text(text)) => all.push(text),
                        (Input::Tokens(all), Item::Token(token)) => all.push(token),
                        (Input::TokenLists(all), Item::Tokens(tokens)) => all.push(tokens),
                        _ => return Err(de::Error::custom(format!("a list of mixed forms, expected {EXPECTED}"))),
                    }
                }
                Ok(input)
            }
        }
        deserializer.deserialize_any(Any)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_four_forms_are_read() {
        let read = |json: &str| serde_json::from_str::<Input>(json).map_err(|e| e.to_string());
        assert_eq!(read("\"a\""), Ok(Input::Text("a".into())));
        assert_eq!(read("[\"a\",\"b\"]"), Ok(Input::Texts(vec!["a".into(), "b".into()])));
        assert_eq!(read("[1,2]"), Ok(Input::Tokens(vec![1, 2])));
        assert_eq!(read("[1.0,2]"), Ok(Input::Tokens(vec![1, 2])));
        assert_eq!(read("[[1],[]]"), Ok(Input::TokenLists(vec![vec![1], vec![]])));
        for wrong in ["1", "[1,\"a\"]", "[-1]", "[1.5]", "{}", "null", "[[\"a\"]]", "[4294967296]"] {
            assert!(read(wrong).unwrap_err().contains("expected"), "{wrong}");
        }
    }
}
