//! The directory, its lock, and the file as redb uses it.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use redb::StorageBackend;
use rustix::fs::{self as sys, Mode, OFlags};

use super::OpenError;
use crate::state::directory::Directory;

const LOCK: &str = "lock";
const ROWS: &str = "state.redb";

/// A directory that this process has locked.
#[derive(Debug)]
pub struct StateDirectory {
    path: PathBuf,
    root: OwnedFd,
    _lock: File,
}

impl StateDirectory {
    /// Makes the directory with mode 0700 if it does not exist, and locks it.
    ///
    /// # Errors
    /// If it cannot be made or opened, others may read or write it, or another process has it.
    pub fn open(path: &Path) -> Result<StateDirectory, OpenError> {
        let directory = Directory::open(path).map_err(|source| OpenError::Io { path: path.to_owned(), source })?;
        if !directory.is_private(0o077) {
            let Directory { owner, mode, .. } = directory;
            return Err(OpenError::NotPrivate { path: path.to_owned(), owner, mode });
        }
        let root = directory.root;
        let lock = lock(&root, path)?;
        Ok(StateDirectory { path: path.to_owned(), root, _lock: lock })
    }

    /// Path of the file of rows.
    pub fn file(&self) -> PathBuf {
        self.path.join(ROWS)
    }

    /// Opens the file of rows, or makes it with mode 0600.
    ///
    /// # Errors
    /// If it cannot be opened, or is no regular file.
    pub fn rows(&self) -> io::Result<RowsFile> {
        let file = open_regular(&self.root, ROWS)?;
        // the name of a new file, too, is to survive a power failure
        sys::fsync(&self.root)?;
        Ok(RowsFile(file))
    }
}

fn lock(root: &OwnedFd, path: &Path) -> Result<File, OpenError> {
    let io = |source: io::Error| OpenError::Io { path: path.join(LOCK), source };
    let mut lock = open_regular(root, LOCK).map_err(io)?;
    match lock.try_lock() {
        Ok(()) => {
            let process = format!("{}\n", std::process::id());
            lock.set_len(0).and_then(|()| lock.write_all(process.as_bytes())).map_err(io)?;
            Ok(lock)
        }
        Err(TryLockError::WouldBlock) => {
            let mut process = String::new();
            let _ = lock.take(32).read_to_string(&mut process);
            Err(OpenError::InUse { path: path.to_owned(), process: process.trim().to_owned() })
        }
        Err(TryLockError::Error(source)) => Err(io(source)),
    }
}

fn open_regular(root: &OwnedFd, name: &str) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = sys::openat(root.as_fd(), name, flags, Mode::RUSR | Mode::WUSR)?;
    let stat = sys::fstat(&file)?;
    if sys::FileType::from_raw_mode(stat.st_mode) != sys::FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "found no regular file"));
    }
    Ok(File::from(file))
}

/// The file of rows. The directory is locked, so the file is not.
#[derive(Debug)]
pub struct RowsFile(File);

impl StorageBackend for RowsFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }
}
