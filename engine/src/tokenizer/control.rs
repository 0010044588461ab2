//! Tokens known by name: files do not always say which tokens end a generation.

use alloc::vec::Vec;

use super::table::TextTable;
use super::vocab::{Kind, Vocab};

/// Names of tokens that end a turn or a text, as in llama.cpp. They count as control tokens whatever the file says.
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

/// Of those, the ones that end a turn, in order of preference.
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

/// Tokens for filling in the middle that end what is filled in.
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

/// In Phi-3, the special tokens that do not take the white space after them.
const PHI3_NOT_ABSORBING: &[&str] = &["<unk>", "<s>", "<|endoftext|>"];

/// Looks tokens up by name.
pub(super) struct Names<'a> {
    pub(super) vocab: &'a Vocab,
    pub(super) texts: &'a TextTable,
}

impl Names<'_> {
    fn find(&self, name: &str) -> Option<u32> {
        self.texts.get(name.as_bytes(), |id| self.vocab.text(id).unwrap_or_default())
    }

    /// Tokens that are control tokens by name.
    pub(super) fn controls(&self) -> Vec<u32> {
        END_NAMES.iter().filter_map(|name| self.find(name)).collect()
    }

    /// The token that ends a turn, if the file does not say.
    pub(super) fn end_of_turn(&self) -> Option<u32> {
        END_OF_TURN_NAMES.iter().find_map(|name| self.find(name))
    }

    /// All tokens that end a generation, ascending; `named` are those of the file's metadata.
    pub(super) fn ends(&self, named: impl Iterator<Item = u32>) -> Vec<u32> {
        let fill_ends = FILL_END_NAMES.iter().filter_map(|name| self.find(name));
        let fill_ends = fill_ends.filter(|&id| self.vocab.kind(id) == Some(Kind::Control));
        let mut ends: Vec<u32> = self.controls().into_iter().chain(fill_ends).chain(named).collect();
        ends.sort_unstable();
        ends.dedup();
        // in these vocabularies a message ends with <|end|>, and the reply goes on
        let has = |name| self.find(name).is_some();
        if (has("<|return|>") && has("<|call|>")) || (has("<|calls|>") && has("<|flush|>")) {
            ends.retain(|&id| Some(id) != self.find("<|end|>"));
        }
        if has("<|tool_response>") {
            ends.retain(|&id| Some(id) != self.find("</s>"));
        }
        ends
    }

    /// Tokens that take the white space after them. Files do not say so; it is known of Phi-3 only.
    pub(super) fn absorbing(&self, model_name: &str) -> Vec<u32> {
        let name = model_name.to_ascii_lowercase();
        if !name.contains("phi-3") && !name.contains("phi3") {
            return Vec::new();
        }
        let others: Vec<u32> = PHI3_NOT_ABSORBING.iter().filter_map(|name| self.find(name)).collect();
        let special = |&id: &u32| {
            matches!(self.vocab.kind(id), Some(Kind::Control | Kind::UserDefined | Kind::Unknown))
                && !others.contains(&id)
        };
        self.vocab.ids().filter(special).collect()
    }
}
