//! Errors of what works with models and files.

use std::io;
use std::path::PathBuf;

use starling::chat::ChatError;
use starling::error::{DraftModelError, LoadError, MemoryError, RequestError};
use starling::kernels::UnknownIsa;
use starling::model::evaluate::EvaluationError;

use crate::registry::SourceError;

/// Why a command or a server failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{}: {}", path.display(), plain(source))]
    File { path: PathBuf, source: io::Error },
    /// The source in `--model` leads to no model file.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A model file is invalid.
    #[error("{}: {source}", path.display())]
    Model { path: PathBuf, source: LoadError },
    /// A model file ends before its last tensor.
    #[error("{}: incomplete download: {}; download the file again", path.display(), amount(*have, *total))]
    Incomplete {
        path: PathBuf,
        /// Bytes of the file.
        have: u64,
        /// Bytes that it should have.
        total: u64,
    },
    /// The model cannot draft for the other.
    #[error("{}: {source}", path.display())]
    DraftModel { path: PathBuf, source: DraftModelError },
    /// The request is invalid, or there is no capacity for it.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// A text cannot be evaluated.
    #[error(transparent)]
    Evaluation(EvaluationError),
    /// The chat template does not parse, or fails on the conversation.
    #[error(transparent)]
    Template(#[from] ChatError),
    /// Unknown or unsupported `--isa`.
    #[error(transparent)]
    Isa(#[from] UnknownIsa),
    /// An invalid argument that clap cannot detect.
    #[error("{0}")]
    Usage(String),
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The file is no receipt, is of another model, or the replay differs.
    #[error("{}: the receipt does not verify: {why}", path.display())]
    Receipt {
        path: PathBuf,
        /// The first difference, with its step.
        why: String,
    },
    /// Ctrl-C ended the command.
    #[error("interrupted")]
    Interrupted,
    #[error("the model produced infinite or NaN values (not finite) for this prompt; its weights are damaged")]
    NotFinite,
    /// Weights that cannot be used; the message names file and tensor.
    #[error("{0}")]
    Weights(String),
    #[error("not enough memory for {0}")]
    Memory(String),
    /// The model needs more working memory than `--working-memory` allows.
    #[error("{0}; raise it with --working-memory if you trust the model")]
    WorkingMemory(MemoryError),
}

impl Failure {
    /// The message for clients of a server: without paths, names of files and sources, which are the operator's.
    pub fn for_clients(&self) -> String {
        match self {
            Failure::File { source, .. } => format!("its file cannot be read: {}", plain(source)),
            Failure::Model { source, .. } => source.to_string(),
            Failure::DraftModel { source, .. } => format!("its draft model: {source}"),
            Failure::Incomplete { have, total, .. } => format!("incomplete download: {}", amount(*have, *total)),
            Failure::Source(_) => "its source leads to no model file; see the log of the server".into(),
            Failure::Usage(_) | Failure::Io(_) | Failure::Weights(_) | Failure::Receipt { .. } => {
                "see the log of the server".into()
            }
            other => other.to_string(),
        }
    }
}

/// The system's text, without its number for the two errors that everyone meets.
fn plain(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory".into(),
        io::ErrorKind::PermissionDenied => "permission denied".into(),
        _ => error.to_string(),
    }
}

/// `412 of 491 MB`, in bytes if that would be the same number twice.
fn amount(have: u64, total: u64) -> String {
    const MB: u64 = 1_000_000;
    if have / MB == total / MB {
        format!("{have} of {total} bytes")
    } else {
        format!("{} of {} MB", have / MB, total / MB)
    }
}

impl From<EvaluationError> for Failure {
    fn from(error: EvaluationError) -> Failure {
        match error {
            EvaluationError::Memory { source: source @ MemoryError::Limit { .. }, .. } => {
                Failure::WorkingMemory(source)
            }
            error => Failure::Evaluation(error),
        }
    }
}

impl Failure {
    /// Maps a failed allocation of `what`.
    pub fn memory(what: &'static str) -> impl Fn(MemoryError) -> Failure {
        move |error| match error {
            MemoryError::Limit { .. } => Failure::WorkingMemory(error),
            _ => Failure::Memory(what.into()),
        }
    }

    /// Whether the reader of standard output closed the pipe, which is not an error.
    pub fn is_closed_pipe(&self) -> bool {
        matches!(self, Failure::Io(e) if e.kind() == io::ErrorKind::BrokenPipe)
    }
}
