//! Files of the log on disk.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::record::MAX_LINE_BYTES;

/// Bytes read at once in the search of the last line feed.
const BLOCK_BYTES: u64 = 16 * 1024;

/// File operations of the writer; a trait so that tests can inject failures.
pub(super) trait Disk: Send {
    /// Appends some of the bytes to the current file; the number of bytes written.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// Sets the length of the current file.
    fn truncate(&mut self, len_bytes: u64) -> io::Result<()>;
    fn sync(&mut self) -> io::Result<()>;
    /// Renames the current file to `NAME.number`.
    fn rename(&mut self, number: u64) -> io::Result<()>;
    /// Creates a new current file.
    fn create(&mut self) -> io::Result<()>;
    /// Removes `NAME.number`.
    fn remove(&mut self, number: u64) -> io::Result<()>;
}

/// The current file, and the lock of the log.
pub(super) struct Files {
    path: PathBuf,
    current: File,
    _lock: File,
}

/// The end of a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tail {
    /// The last line that ends with a line feed, without it.
    pub(super) last_line: Option<Vec<u8>>,
    /// Bytes up to the last line feed.
    pub(super) whole_bytes: u64,
    /// Bytes after the last line feed.
    pub(super) torn_bytes: u64,
}

impl Files {
    /// Locks the log and opens its current file or creates it.
    ///
    /// # Errors
    /// `WouldBlock` if another process holds the lock; `InvalidInput` if a file is a symbolic or hard link, is not
    /// regular, or others can write it.
    pub(super) fn open(path: &Path) -> io::Result<Files> {
        let lock_path = with_suffix(path, "lock");
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", lock_path.display()));
        let lock = open_regular(&lock_path).map_err(named)?;
        lock.try_lock().map_err(io::Error::from)?;
        let current = open_regular(path)?;
        Ok(Files { path: path.into(), current, _lock: lock })
    }

    pub(super) fn tail(&mut self) -> io::Result<Tail> {
        tail(&mut self.current)
    }
}

impl Disk for Files {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.current.write(bytes)
    }

    fn truncate(&mut self, len_bytes: u64) -> io::Result<()> {
        self.current.set_len(len_bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.current.sync_data()
    }

    fn rename(&mut self, number: u64) -> io::Result<()> {
        let to = rotated_path(&self.path, number);
        if fs::symlink_metadata(&to).is_ok() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("{}: exists already", to.display())));
        }
        fs::rename(&self.path, to)
    }

    fn create(&mut self) -> io::Result<()> {
        let file = open_regular(&self.path)?;
        let len_bytes = file.metadata()?.len();
        if len_bytes > 0 {
            let what = format!("found a new file of {len_bytes} bytes, expected none");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        self.current = file;
        // the new name survives a power failure; some file systems do not sync directories
        let _ = File::open(directory(&self.path)).and_then(|directory| directory.sync_all());
        Ok(())
    }

    fn remove(&mut self, number: u64) -> io::Result<()> {
        fs::remove_file(rotated_path(&self.path, number))
    }
}

/// The end of a file. Reads back to the line feed before the last line.
///
/// # Errors
/// `InvalidData` if the last whole line is longer than the limit.
pub(super) fn tail(file: &mut File) -> io::Result<Tail> {
    let len_bytes = file.seek(SeekFrom::End(0))?;
    let Some(end) = line_feed_before(file, len_bytes, u64::MAX)? else {
        return Ok(Tail { last_line: None, whole_bytes: 0, torn_bytes: len_bytes });
    };
    let start = line_feed_before(file, end, MAX_LINE_BYTES as u64 + 1)?.map_or(0, |at| at + 1);
    if end - start > MAX_LINE_BYTES as u64 {
        let what = format!("found a last line of more than {MAX_LINE_BYTES} bytes; this is not an audit log");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let mut line = Vec::new();
    file.seek(SeekFrom::Start(start))?;
    file.take(end - start).read_to_end(&mut line)?;
    Ok(Tail { last_line: Some(line), whole_bytes: end + 1, torn_bytes: len_bytes - end - 1 })
}

/// Position of the last line feed before `end`; looks at about `limit` bytes.
fn line_feed_before(file: &mut File, end: u64, limit: u64) -> io::Result<Option<u64>> {
    let mut at = end;
    let mut block = Vec::new();
    while at > 0 && end - at < limit {
        let start = at.saturating_sub(BLOCK_BYTES);
        block.clear();
        file.seek(SeekFrom::Start(start))?;
        file.take(at - start).read_to_end(&mut block)?;
        if let Some(i) = block.iter().rposition(|&b| b == b'\n') {
            return Ok(Some(start + i as u64));
        }
        at = start;
    }
    Ok(None)
}

/// Numbers of the rotated files, ascending.
pub(super) fn rotated_numbers(path: &Path) -> io::Result<Vec<u64>> {
    let Some(name) = path.file_name() else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "expected the path of a file"));
    };
    let prefix = format!("{}.", name.to_string_lossy());
    let mut numbers = Vec::new();
    for entry in fs::read_dir(directory(path))? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(&prefix)).and_then(parse_number);
        numbers.extend(number);
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// A number as it is in names: six digits, or more without leading zeros.
fn parse_number(text: &str) -> Option<u64> {
    let number: u64 = text.parse().ok()?;
    (format!("{number:06}") == text).then_some(number)
}

pub(super) fn rotated_path(path: &Path, number: u64) -> PathBuf {
    with_suffix(path, &format!("{number:06}"))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    name.into()
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens a file for reading and appending; creates it with mode 0600 if it does not exist.
fn open_regular(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;

        use rustix::fs::OFlags;
        // NONBLOCK: opening a FIFO does not wait for its other end
        options.mode(0o600).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32);
    }
    let invalid = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    if fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink()) {
        return invalid("found a symbolic link, expected a regular file");
    }
    let file = options.open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return invalid("found another kind of file, expected a regular file");
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        if metadata.nlink() > 1 {
            return invalid("found a file with several names (hard links), expected one");
        }
        if metadata.mode() & 0o022 != 0 {
            return invalid("found a file that others can write, expected mode 600 or 640; use chmod");
        }
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tails() {
        let path = std::env::temp_dir().join(format!("starling-audit-tail-{}", std::process::id()));
        let long = "x".repeat(BLOCK_BYTES as usize + 7);
        for (text, last, whole, torn) in [
            ("", None, 0, 0),
            ("abc", None, 0, 3),
            ("\n", Some(""), 1, 0),
            ("a\n", Some("a"), 2, 0),
            ("a\nbc\nd", Some("bc"), 5, 1),
            (&format!("a\n{long}\n"), Some(long.as_str()), 2 + long.len() as u64 + 1, 0),
            (&format!("a\n{long}"), Some("a"), 2, long.len() as u64),
        ] {
            fs::write(&path, text).unwrap();
            let expected =
                Tail { last_line: last.map(|l| l.as_bytes().to_vec()), whole_bytes: whole, torn_bytes: torn };
            assert_eq!(tail(&mut File::open(&path).unwrap()).unwrap(), expected);
        }
        fs::write(&path, "x".repeat(200_000) + "\n").unwrap();
        assert_eq!(tail(&mut File::open(&path).unwrap()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn numbers_in_names() {
        for (text, number) in [("000001", Some(1)), ("1000000", Some(1_000_000)), ("1", None), ("0000001", None)] {
            assert_eq!(parse_number(text), number, "{text}");
        }
        for text in ["", "lock", "+00001", "00000x", "99999999999999999999999"] {
            assert_eq!(parse_number(text), None, "{text}");
        }
    }
}
