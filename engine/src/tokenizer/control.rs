//! Control tokens recognised by name, because files do not reliably mark the tokens that end generation.

use alloc::vec::Vec;

use super::table::TextTable;
use super::vocab::{Kind, Vocab};

/// Names of end-of-turn and end-of-text tokens, as in llama.cpp. They are control tokens whatever the file says.
const END_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// The end-of-turn tokens among them, in order of preference.
const END_OF_TURN_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

/// Fill-in-the-middle tokens that end the filled-in text.
const FILL_END_NAMES: &[&str] = &[
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// Special tokens that absorb adjacent white space. Files do not state it; as in llama.cpp, names decide.
struct Absorbing {
    /// The rule applies if the value of this metadata key, in lower case,
    key: &'static str,
    /// contains one of these.
    contains: &'static [&'static str],
    side: Side,
    tokens: Tokens,
}

/// A side of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
}

enum Tokens {
    Only(&'static str),
    /// All special tokens except these.
    AllBut(&'static [&'static str]),
}

const MASK_ON_THE_LEFT: Absorbing =
    Absorbing { key: "", contains: &[], side: Side::Left, tokens: Tokens::Only("<mask>") };

#[rustfmt::skip]
static ABSORBING: &[Absorbing] = &[
    Absorbing {
        key: "tokenizer.ggml.pre", contains: &["jina-v2-de", "jina-v2-es", "jina-v2-code"], ..MASK_ON_THE_LEFT
    },
    Absorbing { key: "general.architecture", contains: &["nomic-bert-moe", "jina-bert-v3"], ..MASK_ON_THE_LEFT },
    Absorbing {
        key: "general.name", contains: &["phi-3", "phi3"], side: Side::Right,
        tokens: Tokens::AllBut(&["<unk>", "<s>", "<|endoftext|>"]),
    },
    Absorbing { key: "general.name", contains: &["modern-bert"], tokens: Tokens::Only("[MASK]"), ..MASK_ON_THE_LEFT },
];

/// Looks up tokens by name.
pub(super) struct TokenNames<'a> {
    pub(super) vocab: &'a Vocab,
    pub(super) texts: &'a TextTable,
}

impl TokenNames<'_> {
    fn find(&self, name: &str) -> Option<u32> {
        self.texts.get(name.as_bytes(), |id| self.vocab.text(id).unwrap_or_default())
    }

    /// The tokens that are control tokens by name.
    pub(super) fn controls(&self) -> Vec<u32> {
        END_NAMES.iter().filter_map(|name| self.find(name)).collect()
    }

    /// The end-of-turn token, if the file does not name one.
    pub(super) fn end_of_turn(&self) -> Option<u32> {
        END_OF_TURN_NAMES.iter().find_map(|name| self.find(name))
    }

    /// All tokens that end generation, ascending; `named` are those of the metadata.
    pub(super) fn ends(&self, named: impl Iterator<Item = u32>) -> Vec<u32> {
        let fill_ends = FILL_END_NAMES.iter().filter_map(|name| self.find(name));
        let fill_ends = fill_ends.filter(|&id| self.vocab.kind(id) == Some(Kind::Control));
        let mut ends: Vec<u32> = self.controls().into_iter().chain(fill_ends).chain(named).collect();
        ends.sort_unstable();
        ends.dedup();
        // in these vocabularies <|end|> ends a message, and generation continues
        let has = |name| self.find(name).is_some();
        if (has("<|return|>") && has("<|call|>")) || (has("<|calls|>") && has("<|flush|>")) {
            ends.retain(|&id| Some(id) != self.find("<|end|>"));
        }
        if has("<|tool_response>") {
            ends.retain(|&id| Some(id) != self.find("</s>"));
        }
        ends
    }

    /// Tokens that absorb white space, with the side, unordered; `value(key)` is the value of a metadata key.
    pub(super) fn absorbing<'v>(&self, value: impl Fn(&str) -> &'v str) -> Vec<(u32, Side)> {
        let applies = |row: &&Absorbing| {
            let value = value(row.key).to_ascii_lowercase();
            row.contains.iter().any(|part| value.contains(part))
        };
        let Some(row) = ABSORBING.iter().find(applies) else { return Vec::new() };
        let ids: Vec<u32> = match row.tokens {
            Tokens::Only(name) => self.find(name).into_iter().collect(),
            Tokens::AllBut(names) => {
                let others: Vec<u32> = names.iter().filter_map(|name| self.find(name)).collect();
                let special = |id: &u32| {
                    matches!(self.vocab.kind(*id), Some(Kind::Control | Kind::UserDefined | Kind::Unknown))
                        && !others.contains(id)
                };
                self.vocab.ids().filter(special).collect()
            }
        };
        ids.into_iter().map(|id| (id, row.side)).collect()
    }
}
