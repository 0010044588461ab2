//! Policy filters on prompts and answers: rules with patterns, personal data, and an external HTTP hook.
//!
//! The host reads a [`PolicyFile`] and compiles it to a [`Policy`]. It passes prompts to [`Filter::check`], and the text
//! of streamed answers to a [`StreamFilter`], which holds back only text in which a match may still be in progress.

#[cfg(not(feature = "text-policy"))]
mod absent;
#[cfg(feature = "text-policy")]
mod answers;
#[cfg(feature = "text-policy")]
mod automaton;
#[cfg(feature = "text-policy")]
mod hook;
#[cfg(feature = "text-policy")]
mod host;
#[cfg(feature = "text-policy")]
mod personal;
#[cfg(feature = "text-policy")]
mod rendered;
#[cfg(feature = "text-policy")]
mod rules;
#[cfg(feature = "text-policy")]
mod stream;
#[cfg(feature = "text-policy")]
mod tracker;

use serde::{Deserialize, Serialize};

#[cfg(not(feature = "text-policy"))]
pub use absent::{
    AnswerFilters, PromptCheck, Subject, TextPolicy, apply_to_input, apply_to_joined, apply_to_messages,
    apply_to_rendered, apply_to_seam, apply_to_text,
};
#[cfg(feature = "text-policy")]
pub use answers::AnswerFilters;
#[cfg(feature = "text-policy")]
pub use hook::{Call, CallError, Decision, HookRequest, Response};
#[cfg(feature = "text-policy")]
pub use host::{PromptCheck, Subject, TextPolicy, apply_to_input, apply_to_messages, apply_to_text};
#[cfg(feature = "text-policy")]
pub use rendered::{apply_to_joined, apply_to_rendered, apply_to_seam};
#[cfg(feature = "text-policy")]
pub use rules::{Policy, PolicyFile};
#[cfg(feature = "text-policy")]
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
