//! Exit codes.

use std::process::ExitCode;

use starling::chat::ChatError;
use starling::error::{DraftModelError, LoadError, RequestError};
use starling::model::evaluate::EvaluationError;
use starling_host::error::Failure;
use starling_host::registry::SourceError;

use crate::interrupt::EXIT_CODE;

/// Exit codes: 1 invalid model file, 2 invalid arguments or request (also clap's code), 3 I/O error, 4 not enough memory
/// or capacity, 5 the receipt does not verify, 130 interrupted.
pub fn exit_code(failure: &Failure) -> ExitCode {
    ExitCode::from(match failure {
        Failure::Model { source: LoadError::OutOfMemory { .. }, .. }
        | Failure::Request(RequestError::NoCapacity { .. })
        | Failure::Evaluation(EvaluationError::Memory { .. })
        | Failure::DraftModel { source: DraftModelError::Memory(_), .. }
        | Failure::Memory(_)
        | Failure::WorkingMemory(_) => 4,
        // the template called raise_exception: the conversation is invalid, not the file
        Failure::Template(ChatError::Refused(_)) => 2,
        Failure::Model { .. }
        | Failure::Incomplete { .. }
        | Failure::Template(_)
        | Failure::NotFinite
        | Failure::Weights(_) => 1,
        Failure::Request(_)
        | Failure::DraftModel { .. }
        | Failure::Evaluation(_)
        | Failure::Isa(_)
        | Failure::Usage(_) => 2,
        Failure::Source(SourceError::Syntax { .. } | SourceError::Ambiguous { .. } | SourceError::NoMatch { .. }) => 2,
        Failure::File { .. } | Failure::Source(_) | Failure::Io(_) => 3,
        Failure::Receipt { .. } => 5,
        Failure::Interrupted => EXIT_CODE,
    })
}
