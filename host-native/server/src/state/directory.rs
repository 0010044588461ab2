//! Directories that the server keeps its files in.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{self as sys, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::geteuid;

/// Flags that open a directory.
pub const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// An open directory, and who may use it.
pub struct Directory {
    pub root: OwnedFd,
    pub owner: u32,
    /// Permission bits.
    pub mode: u32,
}

impl Directory {
    /// Opens a directory; makes it with mode 0700 if it does not exist.
    ///
    /// # Errors
    /// If it cannot be made or opened.
    pub fn open(path: &Path) -> io::Result<Directory> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        match sys::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        let root = sys::open(path, DIRECTORY, Mode::empty())?;
        let stat = sys::fstat(&root)?;
        Ok(Directory { root, owner: stat.st_uid, mode: stat.st_mode & 0o7777 })
    }

    /// Whether it belongs to the server's user, and others have none of the permissions `others`.
    pub fn is_private(&self, others: u32) -> bool {
        self.owner == geteuid().as_raw() && self.mode & others == 0
    }
}
