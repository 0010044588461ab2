//! Access to the directory, as a trait so that tests can make each call fail.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process;

use rustix::buffer::spare_capacity;
use rustix::fs::{self as sys, AtFlags, Mode, OFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;
use rustix::process::{Pid, geteuid, test_kill_process};

use super::{Error, PageKey};
use crate::state::directory::{DIRECTORY, Directory};

/// A file of the directory: `SHARD/NAME`, the shard in hex.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePath {
    /// First byte of the key.
    pub shard: u8,
    pub name: String,
}

impl FilePath {
    pub fn page(key: &PageKey) -> FilePath {
        FilePath { shard: key.0[0], name: hex(&key.0) + ".page" }
    }

    /// The `n`-th temporary file of a process. `process_id` tells it from earlier processes of the same PID.
    pub(super) fn temporary(key: &PageKey, process_id: u64, n: u64) -> FilePath {
        let name = format!("{}.{}.{process_id:016x}.{n}.tmp", hex(&key.0), process::id());
        FilePath { shard: key.0[0], name }
    }

    /// The key of a page file.
    pub(super) fn key(&self) -> Option<PageKey> {
        let digits = self.name.strip_suffix(".page").filter(|digits| digits.len() == 64)?;
        let mut key = [0; 32];
        for (byte, pair) in key.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
            let digit = |c: u8| (c as char).to_digit(16).filter(|_| !c.is_ascii_uppercase());
            *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
        }
        (key[0] == self.shard).then_some(PageKey(key))
    }

    /// Whether this is a temporary file whose process has ended.
    pub(super) fn is_leftover(&self, process_id: u64) -> bool {
        let mut parts = self.name.split('.').skip(1);
        let pid = parts.next().and_then(|pid| pid.parse::<i32>().ok()).and_then(Pid::from_raw);
        let (Some(pid), Some(id), true) = (pid, parts.next(), self.is_temporary()) else { return false };
        if pid == rustix::process::getpid() {
            return id != format!("{process_id:016x}");
        }
        test_kill_process(pid) == Err(Errno::SRCH)
    }

    pub(super) fn is_temporary(&self) -> bool {
        self.name.ends_with(".tmp")
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileInfo {
    pub is_regular: bool,
    /// The file belongs to this user.
    pub is_own: bool,
    pub len: u64,
    /// Modification time in nanoseconds since 1970.
    pub modified: u64,
}

/// Operations on the directory. Several threads call it at once.
pub trait Io: Send + Sync {
    /// Opens without following links and without waiting.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`]; [`io::ErrorKind::InvalidInput`] for links and what cannot be opened as a file.
    fn open_read(&self, path: &FilePath) -> io::Result<Box<dyn ReadFile>>;

    /// Makes a file, which must not exist, and its shard.
    fn create_temporary(&self, path: &FilePath) -> io::Result<Box<dyn WriteFile>>;

    /// Replaces `to`.
    fn rename(&self, from: &FilePath, to: &FilePath) -> io::Result<()>;

    /// Makes the renames in a shard, and the shard itself, durable.
    fn sync_directory(&self, shard: u8) -> io::Result<()>;

    /// Removes a file, no directory.
    fn remove(&self, path: &FilePath) -> io::Result<()>;

    /// Lists the files of a shard, none if it does not exist. On an error some files may have been listed.
    fn list(&self, shard: u8, found: &mut dyn FnMut(FilePath, FileInfo)) -> io::Result<()>;
}

pub trait ReadFile {
    fn info(&self) -> io::Result<FileInfo>;

    /// Appends up to the spare capacity of `out`. Returns the number of bytes, 0 at the end of the file.
    fn read_at(&self, out: &mut Vec<u8>, offset: u64) -> io::Result<usize>;

    /// Sets the modification time to now.
    fn touch(&self) -> io::Result<()>;
}

pub trait WriteFile: Write {
    /// Makes the content durable.
    fn sync(&self) -> io::Result<()>;
}

/// A directory of the file system. All paths are opened relative to its descriptor.
pub struct DirectoryIo {
    root: OwnedFd,
}

impl DirectoryIo {
    /// Makes the directory with mode 0700 if it does not exist.
    ///
    /// # Errors
    /// If it cannot be made or opened. Unless `is_shared`, if it belongs to another user or others can write it.
    pub fn open(path: &Path, is_shared: bool) -> Result<DirectoryIo, Error> {
        let directory = Directory::open(path).map_err(|source| Error::Directory { path: path.to_owned(), source })?;
        if !is_shared && !directory.is_private(0o022) {
            let Directory { owner, mode, .. } = directory;
            return Err(Error::NotPrivate { path: path.to_owned(), owner, mode });
        }
        Ok(DirectoryIo { root: directory.root })
    }

    fn shard(&self, shard: u8) -> Result<OwnedFd, Errno> {
        sys::openat(&self.root, hex(&[shard]), DIRECTORY | OFlags::NOFOLLOW, Mode::empty())
    }
}

impl Io for DirectoryIo {
    fn open_read(&self, path: &FilePath) -> io::Result<Box<dyn ReadFile>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let open = || sys::openat(self.shard(path.shard)?, &path.name, flags, Mode::empty());
        match open() {
            Ok(file) => Ok(Box::new(File::from(file))),
            // a link, a file in place of the shard, a socket, a device without driver
            Err(errno @ (Errno::LOOP | Errno::MLINK | Errno::NOTDIR | Errno::NXIO | Errno::NODEV)) => {
                Err(io::Error::new(io::ErrorKind::InvalidInput, errno))
            }
            Err(errno) => Err(errno.into()),
        }
    }

    fn create_temporary(&self, path: &FilePath) -> io::Result<Box<dyn WriteFile>> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let shard = match self.shard(path.shard) {
            Err(Errno::NOENT) => {
                match sys::mkdirat(&self.root, hex(&[path.shard]), Mode::RWXU) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(errno.into()),
                }
                self.shard(path.shard)?
            }
            other => other?,
        };
        let file = sys::openat(shard, &path.name, flags, Mode::RUSR | Mode::WUSR)?;
        Ok(Box::new(File::from(file)))
    }

    fn rename(&self, from: &FilePath, to: &FilePath) -> io::Result<()> {
        Ok(sys::renameat(self.shard(from.shard)?, &from.name, self.shard(to.shard)?, &to.name)?)
    }

    fn sync_directory(&self, shard: u8) -> io::Result<()> {
        sys::fsync(self.shard(shard)?)?;
        Ok(sys::fsync(&self.root)?)
    }

    fn remove(&self, path: &FilePath) -> io::Result<()> {
        Ok(sys::unlinkat(self.shard(path.shard)?, &path.name, AtFlags::empty())?)
    }

    fn list(&self, shard: u8, found: &mut dyn FnMut(FilePath, FileInfo)) -> io::Result<()> {
        let directory = match self.shard(shard) {
            Err(Errno::NOENT) => return Ok(()),
            other => other?,
        };
        for entry in sys::Dir::read_from(&directory)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            // a file may be gone since it was listed
            if let Ok(stat) = sys::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                found(FilePath { shard, name: name.to_owned() }, info(&stat));
            }
        }
        Ok(())
    }
}

impl ReadFile for File {
    fn info(&self) -> io::Result<FileInfo> {
        Ok(info(&sys::fstat(self)?))
    }

    fn read_at(&self, out: &mut Vec<u8>, offset: u64) -> io::Result<usize> {
        Ok(rustix::io::pread(self, spare_capacity(out), offset)?)
    }

    fn touch(&self) -> io::Result<()> {
        let at = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
        let times = Timestamps { last_access: at(sys::UTIME_OMIT), last_modification: at(sys::UTIME_NOW) };
        Ok(sys::futimens(self, &times)?)
    }
}

impl WriteFile for File {
    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}

#[allow(clippy::unnecessary_cast)] // the nanoseconds are signed on some systems
fn info(stat: &Stat) -> FileInfo {
    FileInfo {
        is_regular: sys::FileType::from_raw_mode(stat.st_mode) == sys::FileType::RegularFile,
        is_own: stat.st_uid == geteuid().as_raw(),
        len: u64::try_from(stat.st_size).unwrap_or(0),
        modified: u64::try_from(stat.st_mtime)
            .unwrap_or(0)
            .saturating_mul(1_000_000_000)
            .saturating_add(stat.st_mtime_nsec as u64),
    }
}
