//! The chain: appends lines to the current file, repairs it after failures, and rotates it.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::disk::{Disk, Files, rotated_numbers, rotated_path, tail};
use super::hash::{Hash, Key};
use super::record::{Event, Link, line};
use super::verify::{Defect, Problem};

/// Settings of a log.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// A file of at least this many bytes is rotated before the next record; 0: never.
    pub max_bytes: u64,
    /// Rotated files that are kept; 0: all.
    pub keep_files: usize,
    /// With a key, hashes are HMACs.
    pub key: Option<Key>,
}

/// A log cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("{}: another process writes this audit log", path.display())]
    Locked { path: PathBuf },
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    /// The last line was changed, or the key is another.
    #[error("last line: {problem}; check the key, or move all files of the log away")]
    LastLine { problem: Problem },
}

/// The last line that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// 0 before the first line.
    pub seq: u64,
    pub hash: Hash,
}

impl Default for Head {
    fn default() -> Head {
        Head { seq: 0, hash: Hash::ZERO }
    }
}

/// The end of the chain, and the state of the files.
pub(super) struct Chain<D> {
    pub(super) disk: D,
    options: Options,
    /// Of the last line that was written as a whole.
    pub(super) head: Head,
    /// Of the current file, up to that line.
    len_bytes: u64,
    state: State,
    /// Numbers of rotated files, ascending.
    rotated: VecDeque<u64>,
    /// Events of the log itself, written before the next event.
    pending: VecDeque<Event>,
    /// Failures that did not keep a record from being written.
    pub(super) failures: u64,
    pub(super) last_failure: Option<String>,
}

/// Repair that a failure makes necessary before the next write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Good,
    /// The current file may have bytes after `len_bytes`.
    Torn,
    /// The current file was renamed, and the next does not exist yet.
    Renamed {
        number: u64,
    },
}

impl Chain<Files> {
    pub(super) fn open(path: &Path, mut files: Files, options: Options) -> Result<Chain<Files>, OpenError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            |source| OpenError::File { path, source }
        };
        let rotated = rotated_numbers(path).map_err(failed(path))?;
        let end = files.tail().map_err(failed(path))?;
        let mut pending = VecDeque::new();
        let mut last = (path.to_owned(), end.last_line);
        if let (None, Some(&number)) = (&last.1, rotated.last()) {
            pending.push_back(Event::Rotated { number });
            let before = rotated_path(path, number);
            let mut file = std::fs::File::open(&before).map_err(failed(&before))?;
            last = (before.clone(), tail(&mut file).map_err(failed(&before))?.last_line);
        }
        let mut state = State::Good;
        if end.torn_bytes > 0 {
            state = State::Torn;
            pending.push_back(Event::Recovered { bytes: end.torn_bytes });
        }
        let head = match last {
            (_, None) => Head::default(),
            (file, Some(line)) => match Link::parse(&line, options.key.as_ref()) {
                Ok(link) => Head { seq: link.seq, hash: link.hash },
                Err(defect) => return Err(last_line(file, defect)),
            },
        };
        Ok(Chain {
            disk: files,
            options,
            head,
            len_bytes: end.whole_bytes,
            state,
            rotated: rotated.into(),
            pending,
            failures: 0,
            last_failure: None,
        })
    }
}

fn last_line(file: PathBuf, defect: Defect) -> OpenError {
    OpenError::LastLine { problem: Problem { file, line: 0, defect } }
}

impl<D: Disk> Chain<D> {
    /// # Errors
    /// If the event is not written; `append` may be called again with it.
    pub(super) fn append(&mut self, time: SystemTime, event: &Event) -> io::Result<()> {
        self.write_pending()?;
        self.write_line(time, event)
    }

    /// Repairs the current file after a failure, rotates it, and writes the pending events.
    pub(super) fn write_pending(&mut self) -> io::Result<()> {
        match self.state {
            State::Good => {}
            State::Torn => {
                self.disk.truncate(self.len_bytes)?;
                self.state = State::Good;
            }
            State::Renamed { number } => self.create(number)?,
        }
        if self.options.max_bytes > 0 && self.len_bytes >= self.options.max_bytes {
            self.rotate()?;
        }
        while let Some(event) = self.pending.front().cloned() {
            self.write_line(SystemTime::now(), &event)?;
            self.pending.pop_front();
        }
        Ok(())
    }

    /// `head` changes only if the whole line was written.
    fn write_line(&mut self, time: SystemTime, event: &Event) -> io::Result<()> {
        let seq = self.head.seq + 1;
        let (bytes, hash) = line(seq, time, event, self.head.hash, self.options.key.as_ref())?;
        self.state = State::Torn;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match self.disk.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => rest = rest.get(n..).unwrap_or_default(),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        self.state = State::Good;
        self.len_bytes += bytes.len() as u64;
        self.head = Head { seq, hash };
        Ok(())
    }

    /// If the file cannot be renamed, the log continues in it, and the next record tries again.
    fn rotate(&mut self) -> io::Result<()> {
        let number = self.rotated.back().map_or(1, |last| last.saturating_add(1));
        if let Err(e) = self.disk.sync().and_then(|()| self.disk.rename(number)) {
            self.note(&e);
            return Ok(());
        }
        self.rotated.push_back(number);
        self.state = State::Renamed { number };
        self.create(number)?;
        while self.options.keep_files > 0 && self.rotated.len() > self.options.keep_files {
            let Some(&oldest) = self.rotated.front() else { break };
            match self.disk.remove(oldest) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    self.note(&e);
                    break;
                }
                _ => self.rotated.pop_front(),
            };
        }
        Ok(())
    }

    fn create(&mut self, number: u64) -> io::Result<()> {
        self.disk.create()?;
        self.state = State::Good;
        self.len_bytes = 0;
        self.pending.push_front(Event::Rotated { number });
        Ok(())
    }

    fn note(&mut self, error: &io::Error) {
        self.failures += 1;
        self.last_failure = Some(error.to_string());
    }
}

#[cfg(test)]
mod tests;
