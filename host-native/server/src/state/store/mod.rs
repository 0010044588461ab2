//! State that outlives the process: sessions, and answers that can be retrieved by ID.
//!
//! ```text
//! DIR/state.redb     rows in a redb file, which commits in two phases: what was committed survives a kill at any moment
//! DIR/lock           locked by the process that has the directory; its process ID
//! ```
//!
//! A row has a kind, a tenant and an ID, an expiry and a value. One thread writes: it commits all rows that wait in one
//! transaction, syncs the file, and only then tells those that wait for them. Nothing else waits for the disk. An index of all
//! rows is in memory; values are read from the file.
//!
//! Unlike a cache, the file is not thrown away when it is damaged: the server does not start.

#[cfg(not(feature = "state-store"))]
mod absent;
mod cipher;
#[cfg(feature = "state-store")]
mod files;
mod index;
#[cfg(feature = "state-store")]
mod overlay;
#[cfg(feature = "state-store")]
mod queued;
#[cfg(feature = "state-store")]
mod record;
mod session_row;
#[cfg(feature = "state-store")]
mod state_store;
#[cfg(all(test, feature = "state-store"))]
mod tests;
#[cfg(feature = "state-store")]
mod writer;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use starling::receipt::Hex;

#[cfg(not(feature = "state-store"))]
pub use absent::{Options, StateStore, Written};
pub use cipher::Cipher;
pub use index::PageOf;
pub use session_row::SessionJournal;
#[cfg(feature = "state-store")]
pub use state_store::{Options, StateStore, Written};

/// What a row is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Session,
    /// A chat completion that can be retrieved by its ID.
    Completion,
    /// A response of `/v1/responses`, likewise.
    Response,
}

impl Kind {
    pub const ALL: [Kind; 3] = [Kind::Session, Kind::Completion, Kind::Response];

    /// In the file.
    const fn code(self) -> u8 {
        match self {
            Kind::Session => 1,
            Kind::Completion => 2,
            Kind::Response => 3,
        }
    }

    fn of_code(code: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// Label of metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Session => "session",
            Kind::Completion => "completion",
            Kind::Response => "response",
        }
    }

    /// Whether the row counts for `stored-answers-size`.
    const fn is_answer(self) -> bool {
        !matches!(self, Kind::Session)
    }
}

/// Names a row.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowId {
    pub kind: Kind,
    pub tenant: Arc<str>,
    pub id: Arc<str>,
}

/// Times in milliseconds since 1970, and the length of the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowInfo {
    pub created: u64,
    pub expires: u64,
    pub n_bytes: usize,
}

/// The state cannot be used; the server does not start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[cfg(not(feature = "state-store"))]
    #[error("this build has no state store (feature `state-store`)")]
    Absent,
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: found owner {owner} and mode {mode:04o}, expected a directory of this user that others cannot read or write", path.display())]
    NotPrivate { path: PathBuf, owner: u32, mode: u32 },
    #[error("{} is in use by the process {process}; each server needs a directory of its own", path.display())]
    InUse { path: PathBuf, process: String },
    #[error("{}: found another kind of file, expected a state file of this program; move it away", path.display())]
    Foreign { path: PathBuf },
    #[error("{}: found format version {found}, expected {expected}", path.display())]
    Version { path: PathBuf, found: u32, expected: u32 },
    #[error("{} is damaged: {what}; restore a copy, or move it away to start without its sessions and answers", path.display())]
    Damaged { path: PathBuf, what: String },
    #[error("{} is encrypted with the key {}, expected its file as --state-key-file", path.display(), Hex(*file))]
    NoKey { path: PathBuf, file: [u8; 8] },
    #[error("{} is not encrypted: start without --state-key-file, or with an empty directory", path.display())]
    NotEncrypted { path: PathBuf },
    #[error("{} is encrypted with the key {}, found the key {} in --state-key-file", path.display(), Hex(*file), Hex(*given))]
    WrongKey { path: PathBuf, file: [u8; 8], given: [u8; 8] },
}

/// A row was not written or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    #[error("the state store (--state-dir) cannot be written: {0}")]
    Write(Arc<str>),
    #[error("the state store (--state-dir) cannot be read: {0}")]
    Read(Arc<str>),
    #[error("the state store (--state-dir) is slower than what is to be written; try again later")]
    Busy,
    #[error("the state store (--state-dir) has ended; the server must be restarted")]
    Ended,
}
