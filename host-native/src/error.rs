//! Why a command failed, and its exit code.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use starling::chat::ChatError;
use starling::error::{LoadError, MemoryError, RequestError};
use starling::kernels::UnknownIsa;
use starling::model::evaluate::EvaluationError;

/// A command that could not do what it was asked. The documented exit codes: 1 the model file, 2 the command line
/// (clap's own code too), 3 input or output, 4 no capacity or memory, 5 a receipt that does not verify.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A model file is wrong.
    #[error("{}: {source}", path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: LoadError,
    },
    /// The request cannot be taken.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// A text cannot be run.
    #[error(transparent)]
    Evaluation(EvaluationError),
    /// The chat template fails on the conversation.
    #[error(transparent)]
    Template(#[from] ChatError),
    /// `--isa` names something else.
    #[error(transparent)]
    Isa(#[from] UnknownIsa),
    /// An argument that the parser could not judge.
    #[error("{0}")]
    Usage(String),
    /// Standard input or output failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A receipt is not one, or not of this model, or the replay differs.
    #[error("{}: the receipt does not verify: {why}", path.display())]
    Receipt {
        /// The receipt's file.
        path: PathBuf,
        /// The first thing that is wrong, with its step if the replay came so far.
        why: String,
    },
    /// An answer that could not go on.
    #[error("the model's numbers are not finite with this prompt: a fault of its weights")]
    NotFinite,
    /// Weights that cannot be used: the file, the tensor or text, and what is wrong.
    #[error("{0}")]
    Weights(String),
    /// There is not enough memory.
    #[error("not enough memory for {0}")]
    Memory(&'static str),
    /// The model's widths and experts ask for more working memory than it may have.
    #[error("{0}: if you trust the model, allow more with --working-memory")]
    WorkingMemory(MemoryError),
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
    /// There was no memory for `what`, or the model may not have it.
    pub fn memory(what: &'static str) -> impl Fn(MemoryError) -> Failure {
        move |error| match error {
            MemoryError::Limit { .. } => Failure::WorkingMemory(error),
            _ => Failure::Memory(what),
        }
    }

    /// Whether the reader of standard output went away: no fault of anyone's.
    pub fn is_closed_pipe(&self) -> bool {
        matches!(self, Failure::Io(e) if e.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Failure::Model { source: LoadError::OutOfMemory { .. }, .. }
            | Failure::Request(RequestError::NoCapacity { .. })
            | Failure::Evaluation(EvaluationError::Memory { .. })
            | Failure::Memory(_)
            | Failure::WorkingMemory(_) => 4,
            // what a template refuses is the conversation
            Failure::Template(ChatError::Refused(_)) => 2,
            Failure::Model { .. } | Failure::Template(_) | Failure::NotFinite | Failure::Weights(_) => 1,
            Failure::Request(_) | Failure::Evaluation(_) | Failure::Isa(_) | Failure::Usage(_) => 2,
            Failure::File { .. } | Failure::Io(_) => 3,
            Failure::Receipt { .. } => 5,
        })
    }
}
