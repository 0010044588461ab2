//! What the APIs share: from a checked request to an answer.

pub mod answer;
pub mod messages;
pub mod options;
pub mod sse;
pub mod structure;
pub mod submit;
pub mod text;
pub mod updates;
pub mod writes;
