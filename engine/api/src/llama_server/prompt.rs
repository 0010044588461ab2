//! Prompts of `POST /completion`: text, token IDs, texts among token IDs, an object with the text, or a list of prompts.

use std::fmt;

use serde::de::{self, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use starling::tokenizer::{EncodeOptions, Tokenizer};

use crate::input::{token, whole_token};

/// The prompts of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(value_type = Object))]
pub struct LlamaPrompts(pub Vec<LlamaPrompt>);

impl LlamaPrompts {
    /// The text, if there is one prompt and it has nothing else.
    pub fn into_text(self) -> Option<String> {
        let [prompt] = <[LlamaPrompt; 1]>::try_from(self.0).ok()?;
        match <[PromptPart; 1]>::try_from(prompt.0) {
            Ok([PromptPart::Text(text)]) => Some(text),
            _ => None,
        }
    }
}

/// A prompt: the parts of one sequence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LlamaPrompt(pub Vec<PromptPart>);

/// A part of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptPart {
    /// Text in which control tokens are parsed.
    Text(String),
    /// Token IDs.
    Tokens(Vec<u32>),
}

impl LlamaPrompt {
    /// The tokens of the prompt. Only a text at its start is preceded by BOS.
    pub fn encode(self, tokenizer: &Tokenizer) -> Vec<u32> {
        let mut all = Vec::new();
        for (i, part) in self.0.into_iter().enumerate() {
            let options = EncodeOptions { add_special: i == 0, parse_special: true };
            match part {
                PromptPart::Text(text) => all.extend(tokenizer.encode(&text, options)),
                PromptPart::Tokens(tokens) if all.is_empty() => all = tokens,
                PromptPart::Tokens(tokens) => all.extend(tokens),
            }
        }
        all
    }

    /// Bytes of text: a measure of the work.
    pub fn bytes(&self) -> usize {
        let bytes = |part: &PromptPart| if let PromptPart::Text(text) = part { text.len() } else { 0 };
        self.0.iter().map(bytes).sum()
    }

    fn add_token(&mut self, token: u32) {
        match self.0.last_mut() {
            Some(PromptPart::Tokens(tokens)) => tokens.push(token),
            _ => self.0.push(PromptPart::Tokens(vec![token])),
        }
    }

    /// A prompt of text.
    pub fn text(text: impl Into<String>) -> LlamaPrompt {
        LlamaPrompt(vec![PromptPart::Text(text.into())])
    }
}

const EXPECTED: &str = "a string, token ids and strings, an object with prompt_string, or a list of them";

/// Item of a list.
enum Item {
    Text(String),
    Token(u32),
    Prompt(LlamaPrompt),
}

/// Reads an object with `prompt_string`.
fn read_object<'de, A: MapAccess<'de>>(mut map: A) -> Result<LlamaPrompt, A::Error> {
    let mut prompt = None;
    while let Some(key) = map.next_key::<String>()? {
        match &key[..] {
            "prompt_string" => prompt = Some(map.next_value::<String>()?),
            "multimodal_data" => return Err(de::Error::custom("multimodal_data: this server reads text only")),
            _ => drop(map.next_value::<IgnoredAny>()?),
        }
    }
    let text = prompt.ok_or_else(|| de::Error::missing_field("prompt_string"))?;
    Ok(LlamaPrompt::text(text))
}

/// Token ID or text, in a prompt that is a list of both.
enum ListedPart {
    Text(String),
    Token(u32),
}

impl<'de> Deserialize<'de> for ListedPart {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl Visitor<'_> for Any {
            type Value = ListedPart;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token id or a string")
            }
            fn visit_str<E>(self, text: &str) -> Result<ListedPart, E> {
                Ok(ListedPart::Text(text.into()))
            }
            fn visit_u64<E: de::Error>(self, n: u64) -> Result<ListedPart, E> {
                token(n, &self).map(ListedPart::Token)
            }
            fn visit_f64<E: de::Error>(self, x: f64) -> Result<ListedPart, E> {
                whole_token(x, &self).map(ListedPart::Token)
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Item;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id, a list of both, or an object with prompt_string")
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
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Item, A::Error> {
                read_object(map).map(Item::Prompt)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Item, A::Error> {
                let mut prompt = LlamaPrompt::default();
                while let Some(part) = seq.next_element()? {
                    match part {
                        ListedPart::Token(token) => prompt.add_token(token),
                        ListedPart::Text(text) => prompt.0.push(PromptPart::Text(text)),
                    }
                }
                Ok(Item::Prompt(prompt))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl<'de> Deserialize<'de> for LlamaPrompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = LlamaPrompts;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EXPECTED)
            }
            fn visit_str<E>(self, text: &str) -> Result<LlamaPrompts, E> {
                Ok(LlamaPrompts(vec![LlamaPrompt::text(text)]))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LlamaPrompts, A::Error> {
                Ok(LlamaPrompts(vec![read_object(map)?]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<LlamaPrompts, A::Error> {
                let (mut all, mut mixed) = (Vec::new(), LlamaPrompt::default());
                let (mut has_token, mut has_prompt) = (false, false);
                while let Some(item) = seq.next_element()? {
                    match item {
                        Item::Token(token) => {
                            has_token = true;
                            mixed.add_token(token);
                        }
                        Item::Text(text) => mixed.0.push(PromptPart::Text(text)),
                        Item::Prompt(prompt) => {
                            has_prompt = true;
                            // the texts before are prompts
                            all.extend(mixed.0.drain(..).map(|part| LlamaPrompt(vec![part])));
                            all.push(prompt);
                        }
                    }
                }
                // strings alone are several prompts, with token IDs among them they are one
                match (has_token, has_prompt) {
                    (true, true) => {
                        return Err(de::Error::custom(format!("token ids beside prompts, expected {EXPECTED}")));
                    }
                    (true, false) => all.push(mixed),
                    (false, _) => all.extend(mixed.0.drain(..).map(|part| LlamaPrompt(vec![part]))),
                }
                Ok(LlamaPrompts(all))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_forms_are_read() {
        let read = |json: &str| serde_json::from_str::<LlamaPrompts>(json).map_err(|e| e.to_string());
        let text = |text: &str| PromptPart::Text(text.into());
        let prompts =
            |all: &[&[PromptPart]]| Ok(LlamaPrompts(all.iter().map(|parts| LlamaPrompt(parts.to_vec())).collect()));
        let tokens = PromptPart::Tokens(vec![1, 2]);
        assert_eq!(read("\"a\""), prompts(&[&[text("a")]]));
        assert_eq!(read("[\"a\",\"b\"]"), prompts(&[&[text("a")], &[text("b")]]));
        assert_eq!(read("[1,2]"), prompts(&[std::slice::from_ref(&tokens)]));
        let one = std::slice::from_ref(&tokens);
        assert_eq!(read("[[1.0,2],[1,2.0]]"), prompts(&[one, one]));
        assert_eq!(read("[1,2,\"a\"]"), prompts(&[&[tokens.clone(), text("a")]]));
        assert_eq!(
            read("[[1,2],\"a\",[\"b\",1,2]]"),
            prompts(&[std::slice::from_ref(&tokens), &[text("a")], &[text("b"), tokens.clone()]])
        );
        assert_eq!(read("{\"prompt_string\":\"a\"}"), prompts(&[&[text("a")]]));
        assert_eq!(read("[\"a\",{\"prompt_string\":\"b\"}]"), prompts(&[&[text("a")], &[text("b")]]));
        assert_eq!(read("[]"), prompts(&[]));
        for wrong in ["1", "[1,[1]]", "[-1]", "[1.5]", "{}", "null", "[[[1]]]", "[4294967296]"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        assert!(read("{\"prompt_string\":\"a\",\"multimodal_data\":[]}").unwrap_err().contains("text only"));
    }
}
