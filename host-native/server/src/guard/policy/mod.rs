//! Policy filters on prompts and answers: rules with patterns, personal data, and an external HTTP hook.
//!
//! The host reads a [`PolicyFile`] and compiles it to a [`Policy`]. It passes prompts to [`Filter::check`], and the text
//! of streamed answers to a [`StreamFilter`], which holds back only text in which a match may still be in progress.

mod answers;
mod automaton;
mod hook;
mod host;
mod personal;
mod rendered;
mod rules;
mod stream;
mod tracker;

use serde::{Deserialize, Serialize};

pub use answers::AnswerFilters;
pub use hook::{Call, CallError, Decision, HookRequest, Response};
pub use host::{PromptCheck, Subject, TextPolicy, apply_to_input, apply_to_messages, apply_to_text};
pub use rendered::{apply_to_joined, apply_to_rendered, apply_to_seam};
pub use rules::{Policy, PolicyFile};
pub use stream::{Filter, Piece, StreamFilter, Verdict};

/// Text that a filter is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    Prompt,
    Answer,
}

impl Stage {
    fn all() -> Vec<Stage> {
        vec![Stage::Prompt, Stage::Answer]
    }
}
