//! A directory whose n-th call goes wrong.

use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::state::kv_disk::worker::lock;
use crate::state::kv_disk::{DirectoryIo, FileInfo, FilePath, Io, ReadFile, WriteFile};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// No fault; calls are counted.
    None,
    /// The call fails with this error number.
    Error(i32),
    /// The call and all later calls fail: the process is killed.
    Killed,
    /// Writes the first `k` bytes, then the process is killed.
    KilledInWrite(usize),
    /// Writes the first `k` bytes and reports so.
    ShortWrite(usize),
    /// Writes the first `k` bytes and reports success: power fails before the rest reaches the disk.
    TornWrite(usize),
    /// Writes zeros and reports success.
    ZeroedWrite,
    /// Reports success.
    LostRename,
    /// Renames after the next rename.
    LateRename,
    /// Reads at most `k` bytes.
    ShortRead(usize),
    /// Reads nothing: the end of the file.
    EarlyEnd,
    /// Flips a bit of what was read.
    FlippedRead,
}

pub(super) const EIO: i32 = 5;
pub(super) const EINTR: i32 = 4;
pub(super) const ENOSPC: i32 = 28;
pub(super) const EMFILE: i32 = 24;

impl Fault {
    /// Whether it concerns this kind of call.
    pub(super) fn fits(self, call: Call) -> bool {
        match self {
            Fault::None => false,
            Fault::Error(_) | Fault::Killed => true,
            Fault::KilledInWrite(_) | Fault::ShortWrite(_) | Fault::TornWrite(_) | Fault::ZeroedWrite => {
                call == Call::Write
            }
            Fault::LostRename | Fault::LateRename => call == Call::Rename,
            Fault::ShortRead(_) | Fault::EarlyEnd | Fault::FlippedRead => call == Call::Read,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    List,
    Open,
    Info,
    Read,
    Touch,
    Create,
    Write,
    Sync,
    Rename,
    SyncDirectory,
    Remove,
}

struct State {
    at: usize,
    fault: Fault,
    calls: Mutex<Vec<Call>>,
    is_killed: AtomicBool,
    late: Mutex<Option<(FilePath, FilePath)>>,
}

impl State {
    /// Notes a call. Returns the fault to simulate.
    fn begin(&self, call: Call) -> io::Result<Fault> {
        let mut calls = lock(&self.calls);
        calls.push(call);
        if self.is_killed.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        match self.fault {
            fault if calls.len() - 1 != self.at || !fault.fits(call) => Ok(Fault::None),
            Fault::Error(number) => Err(io::Error::from_raw_os_error(number)),
            Fault::Killed => Err(self.kill()),
            fault => Ok(fault),
        }
    }

    fn kill(&self) -> io::Error {
        self.is_killed.store(true, Ordering::Relaxed);
        io::Error::from_raw_os_error(EIO)
    }
}

#[derive(Clone)]
pub(super) struct FaultIo {
    inner: Arc<DirectoryIo>,
    state: Arc<State>,
}

impl FaultIo {
    pub(super) fn new(directory: &Path, at: usize, fault: Fault) -> FaultIo {
        let (calls, is_killed, late) = Default::default();
        let state = State { at, fault, calls, is_killed, late };
        FaultIo { inner: Arc::new(DirectoryIo::open(directory, false).unwrap()), state: Arc::new(state) }
    }

    pub(super) fn calls(&self) -> Vec<Call> {
        lock(&self.state.calls).clone()
    }
}

impl Io for FaultIo {
    fn open_read(&self, path: &FilePath) -> io::Result<Box<dyn ReadFile>> {
        self.state.begin(Call::Open)?;
        Ok(Box::new(FaultRead { inner: self.inner.open_read(path)?, state: self.state.clone() }))
    }

    fn create_temporary(&self, path: &FilePath) -> io::Result<Box<dyn WriteFile>> {
        self.state.begin(Call::Create)?;
        Ok(Box::new(FaultWrite { inner: self.inner.create_temporary(path)?, state: self.state.clone() }))
    }

    fn rename(&self, from: &FilePath, to: &FilePath) -> io::Result<()> {
        match self.state.begin(Call::Rename)? {
            Fault::LostRename => return Ok(()),
            Fault::LateRename => {
                *lock(&self.state.late) = Some((from.clone(), to.clone()));
                return Ok(());
            }
            _ => {}
        }
        self.inner.rename(from, to)?;
        let late = lock(&self.state.late).take();
        late.map_or(Ok(()), |(from, to)| self.inner.rename(&from, &to))
    }

    fn sync_directory(&self, _: u8) -> io::Result<()> {
        // slow, and nothing here loses power
        self.state.begin(Call::SyncDirectory).map(drop)
    }

    fn remove(&self, path: &FilePath) -> io::Result<()> {
        self.state.begin(Call::Remove)?;
        self.inner.remove(path)
    }

    fn list(&self, shard: u8, found: &mut dyn FnMut(FilePath, FileInfo)) -> io::Result<()> {
        // the tests use four shards
        if shard < 4 {
            self.state.begin(Call::List)?;
        }
        self.inner.list(shard, found)
    }
}

struct FaultRead {
    inner: Box<dyn ReadFile>,
    state: Arc<State>,
}

impl ReadFile for FaultRead {
    fn info(&self) -> io::Result<FileInfo> {
        self.state.begin(Call::Info)?;
        self.inner.info()
    }

    fn read_at(&self, out: &mut Vec<u8>, offset: u64) -> io::Result<usize> {
        let begin = out.len();
        match self.state.begin(Call::Read)? {
            Fault::ShortRead(k) => {
                let mut part = Vec::with_capacity(k);
                let n = self.inner.read_at(&mut part, offset)?;
                out.extend(part);
                Ok(n)
            }
            Fault::EarlyEnd => Ok(0),
            Fault::FlippedRead => {
                let n = self.inner.read_at(out, offset)?;
                out[begin + n / 2] ^= 4;
                Ok(n)
            }
            _ => self.inner.read_at(out, offset),
        }
    }

    fn touch(&self) -> io::Result<()> {
        self.state.begin(Call::Touch)?;
        self.inner.touch()
    }
}

struct FaultWrite {
    inner: Box<dyn WriteFile>,
    state: Arc<State>,
}

impl Write for FaultWrite {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let first = |k: usize| &bytes[..k.min(bytes.len())];
        match self.state.begin(Call::Write)? {
            Fault::KilledInWrite(k) => {
                self.inner.write_all(first(k))?;
                Err(self.state.kill())
            }
            Fault::ShortWrite(k) => self.inner.write(first(k)),
            Fault::TornWrite(k) => self.inner.write_all(first(k)).map(|()| bytes.len()),
            Fault::ZeroedWrite => self.inner.write_all(&vec![0; bytes.len()]).map(|()| bytes.len()),
            _ => self.inner.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl WriteFile for FaultWrite {
    fn sync(&self) -> io::Result<()> {
        self.state.begin(Call::Sync).map(drop)
    }
}
