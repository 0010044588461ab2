//! Verification of a log: the chain over all of its files.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::disk::{rotated_numbers, rotated_path};
use super::hash::{Hash, Key};
use super::record::{Link, MAX_LINE_BYTES};

/// Attempts when the oldest file is removed during verification.
const ATTEMPTS: usize = 5;

/// A log without a defect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    pub files: usize,
    pub records: u64,
    /// Above 1 if the oldest files were removed; 0 without records.
    pub first_seq: u64,
    /// 0 without records.
    pub last_seq: u64,
    /// Hash of the last line.
    pub head: Hash,
    /// Bytes of an incomplete last line, which is not verified: the process crashed, or is writing it now.
    pub torn_bytes: u64,
}

/// The first defect of a log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}:{line}: {defect}", file.display())]
pub struct Problem {
    pub file: PathBuf,
    /// From 1; 0 for the whole file.
    pub line: u64,
    pub defect: Defect,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Defect {
    #[error("cannot read the file: {error}")]
    Read { error: String },
    #[error("found a line of more than {limit} bytes")]
    Long { limit: usize },
    #[error("found an incomplete last line of {bytes} bytes in a file that is not the last")]
    Torn { bytes: u64 },
    #[error("lines were removed: found no line in a file that is not the last")]
    Empty,
    #[error("invalid record: {error}")]
    Json { error: String },
    #[error("invalid record: expected {expected}")]
    Format { expected: &'static str },
    #[error("the line was changed, or the key is another: found hash {found}, computed {computed}")]
    Hash { found: Hash, computed: Hash },
    #[error("lines were removed, moved or repeated: found seq {found}, expected {expected}")]
    Seq { found: u64, expected: u64 },
    #[error("the line does not follow the line before: found previous {found}, expected {expected}")]
    Previous { found: Hash, expected: Hash },
    #[error("lines were removed: the log starts with seq {found}, expected 1 or the event \"rotated\" with {expected}")]
    Start { found: u64, expected: String },
    #[error("lines were removed at the end: no line has the expected hash {expected}; the last has seq {last_seq}")]
    Head { expected: Hash, last_seq: u64 },
}

/// Checks every line of `path` and of its rotated files: its format and hash, `seq` and `previous`. A log whose oldest
/// files were removed is valid and starts with `first_seq` above 1.
///
/// `expect_head` is the hash of any line, noted earlier outside of the log: without it, lines removed at the end are
/// not detected. The process that writes the log may run meanwhile.
///
/// # Errors
/// The first defect, with its file and line.
pub fn verify(path: &Path, key: Option<&Key>, expect_head: Option<Hash>) -> Result<Report, Problem> {
    let mut result = verify_files(path, key, expect_head);
    for _ in 1..ATTEMPTS {
        match &result {
            // the writer removed the oldest file meanwhile
            Err(Problem { file, defect: Defect::Read { .. }, .. }) if file != path && !file.exists() => {
                result = verify_files(path, key, expect_head);
            }
            _ => break,
        }
    }
    result
}

fn verify_files(path: &Path, key: Option<&Key>, head: Option<Hash>) -> Result<Report, Problem> {
    let unreadable =
        |e: io::Error| Problem { file: path.into(), line: 0, defect: Defect::Read { error: e.to_string() } };
    let mut chain = Chain { key, head, head_seen: false, last: None, report: Report::empty() };
    let mut last_number = None;
    loop {
        // opened before the files are listed: if the list then has no new file, this one follows the last
        let current = open(path);
        let rotated = rotated_numbers(path).map_err(unreadable)?;
        let new: Vec<u64> = rotated.into_iter().filter(|&number| Some(number) > last_number).collect();
        for &number in &new {
            let path = rotated_path(path, number);
            chain.file(&path, open(&path), Some(number))?;
            last_number = Some(number);
        }
        match current {
            _ if !new.is_empty() => {}
            // a crash between the rename and the creation of the next file leaves none
            Err(e) if e.kind() == io::ErrorKind::NotFound && last_number.is_some() => break,
            current => {
                chain.file(path, current, None)?;
                break;
            }
        }
    }
    match head {
        Some(expected) if !chain.head_seen => {
            let last_seq = chain.report.last_seq;
            Err(Problem { file: path.into(), line: 0, defect: Defect::Head { expected, last_seq } })
        }
        _ => Ok(chain.report),
    }
}

struct Chain<'a> {
    key: Option<&'a Key>,
    head: Option<Hash>,
    head_seen: bool,
    last: Option<Link>,
    report: Report,
}

impl Report {
    fn empty() -> Report {
        Report { files: 0, records: 0, first_seq: 0, last_seq: 0, head: Hash::ZERO, torn_bytes: 0 }
    }
}

impl Chain<'_> {
    /// `number`: of a rotated file.
    fn file(&mut self, path: &Path, file: io::Result<File>, number: Option<u64>) -> Result<(), Problem> {
        let problem = |line, defect| Problem { file: path.into(), line, defect };
        let unreadable = |line, e: io::Error| problem(line, Defect::Read { error: e.to_string() });
        let mut reader = BufReader::new(file.map_err(|e| unreadable(0, e))?);
        let mut line = Vec::new();
        for at in 1.. {
            line.clear();
            let limit = MAX_LINE_BYTES as u64 + 1;
            reader.by_ref().take(limit).read_until(b'\n', &mut line).map_err(|e| unreadable(at, e))?;
            if line.pop_if(|last| *last == b'\n').is_some() {
                self.line(&line, number).map_err(|defect| problem(at, defect))?;
                continue;
            }
            // an incomplete last line may be long: a file system can leave zeros after a power failure
            let torn_bytes = if line.len() as u64 == limit {
                rest_without_line_feed(&mut reader).map_err(|e| unreadable(at, e))?.map(|rest| limit + rest)
            } else {
                Some(line.len() as u64)
            };
            match (torn_bytes, number) {
                (None, _) => return Err(problem(at, Defect::Long { limit: MAX_LINE_BYTES })),
                (Some(0), Some(_)) if at == 1 => return Err(problem(0, Defect::Empty)),
                (Some(0), _) => {}
                (Some(bytes), Some(_)) => return Err(problem(at, Defect::Torn { bytes })),
                (Some(bytes), None) => self.report.torn_bytes = bytes,
            }
            break;
        }
        self.report.files += 1;
        Ok(())
    }

    fn line(&mut self, line: &[u8], number: Option<u64>) -> Result<(), Defect> {
        let link = Link::parse(line, self.key)?;
        match &self.last {
            Some(last) => {
                let expected = last.seq.saturating_add(1);
                if link.seq != expected {
                    return Err(Defect::Seq { found: link.seq, expected });
                }
                if link.previous != last.hash {
                    return Err(Defect::Previous { found: link.previous, expected: last.hash });
                }
            }
            None => start(&link, number)?,
        }
        if self.report.records == 0 {
            self.report.first_seq = link.seq;
        }
        self.report.records += 1;
        self.report.last_seq = link.seq;
        self.report.head = link.hash;
        self.head_seen |= self.head == Some(link.hash);
        self.last = Some(link);
        Ok(())
    }
}

/// Checks the first line of the first file.
fn start(link: &Link, number: Option<u64>) -> Result<(), Defect> {
    if link.seq == 1 && link.previous == Hash::ZERO {
        return Ok(());
    }
    if link.seq == 1 {
        return Err(Defect::Previous { found: link.previous, expected: Hash::ZERO });
    }
    let expected = number.map(|number| number.saturating_sub(1));
    match link.rotated {
        Some(before) if expected.is_none_or(|number| number == before) => Ok(()),
        _ => {
            let expected = expected.map_or("any number".into(), |number| format!("number {number}"));
            Err(Defect::Start { found: link.seq, expected })
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    // opening a FIFO would wait
    if !path.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "expected a regular file"));
    }
    File::open(path)
}

/// Number of bytes up to the end of the file; `None` if there is a line feed among them.
fn rest_without_line_feed(reader: &mut impl BufRead) -> io::Result<Option<u64>> {
    let mut n = 0;
    loop {
        let block = reader.fill_buf()?;
        if block.is_empty() {
            return Ok(Some(n));
        }
        if block.contains(&b'\n') {
            return Ok(None);
        }
        let len = block.len();
        n += len as u64;
        reader.consume(len);
    }
}

#[cfg(test)]
mod tests;
