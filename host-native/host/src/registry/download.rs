//! Download of a file: in parts over several connections, resumed after a cut.
//!
//! The file grows under a temporary name. Beside it, a file of one byte per part says which parts are complete, and of which
//! version of the file, so that an interrupted download goes on with the others. SHA-256 is computed while the bytes arrive.
//!
//! Parts are put together only if they are of one version: its digest is known before, or the server names it (`ETag`,
//! `Last-Modified`) and sends other parts only of it (`If-Range`). Otherwise the file comes over one connection.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use backon::{BlockingRetryable, ExponentialBuilder};
use reqwest::StatusCode;
use reqwest::blocking::Response;
use reqwest::header::{CONTENT_RANGE, ETAG, LAST_MODIFIED};
use sha2::{Digest, Sha256};

use super::SourceError;
use super::http::{Http, HttpError, Options, content_type};
use super::names::Sha256Hex;
use super::pace::Pace;

/// Bytes of a part.
const PART: u64 = 16 << 20;
/// Bytes read at a time.
const BLOCK: usize = 1 << 18;
/// Attempts for a part.
const ATTEMPTS: usize = 5;
/// Attempts for a file that changes while it is downloaded.
const VERSIONS: usize = 3;
/// Magic bytes of a GGUF file.
const MAGIC: &[u8] = b"GGUF";

/// A file to download.
#[derive(Debug, Clone)]
pub struct Remote {
    pub url: String,
    /// Size, if it is known before.
    pub size: Option<u64>,
    /// Expected digest, if it is known before.
    pub sha256: Option<Sha256Hex>,
}

/// Why a download failed.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("{url}: received {found} of {expected} bytes; run the command again to go on from there")]
    Truncated { url: String, found: u64, expected: u64 },
    #[error("{url}: found SHA-256 {found}, expected {expected}; the download was deleted")]
    Digest { url: String, found: Sha256Hex, expected: Sha256Hex },
    #[error("{url}: found no GGUF model{}; the download was deleted", if kind.is_empty() { String::new() } else { format!(" but {kind}") })]
    NotGguf { url: String, kind: String },
    #[error("{url}: the file changed while it was downloaded, {VERSIONS} times; run the command again")]
    Changed { url: String },
    #[error(transparent)]
    Refused(Box<SourceError>),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: {needed} bytes are needed, {free} are free", path.display())]
    DiskFull { path: PathBuf, needed: u64, free: u64 },
}

/// Parameters of downloads.
pub struct Downloader<'a> {
    pub http: &'a Http,
    pub token: Option<&'a str>,
    pub connections: usize,
    /// Called with the number of bytes that have arrived, also with those of an earlier run.
    pub progress: &'a (dyn Fn(u64) + Sync),
    /// Called with the bytes that a file needs beyond those that were declared: it is refused, or there is room.
    pub more: &'a (dyn Fn(u64) -> Result<(), SourceError> + Sync),
}

/// Names the version of a file: a strong `ETag`, or else `Last-Modified`.
type Version = Option<String>;

fn version(response: &Response) -> Version {
    let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
    let etag = header(ETAG).filter(|etag| !etag.starts_with("W/"));
    etag.or_else(|| header(LAST_MODIFIED)).map(str::to_string)
}

/// Which parts of the file are complete.
struct Parts {
    done: Mutex<Vec<bool>>,
    changed: Condvar,
    failed: AtomicBool,
}

impl Downloader<'_> {
    /// Downloads a file to `to` (an absolute path without content before, or with that of an interrupted download).
    /// Returns its digest.
    ///
    /// # Errors
    /// What the server sent in place of the file, or what is missing.
    pub fn download(&self, remote: &Remote, to: &Path) -> Result<Sha256Hex, DownloadError> {
        let mut result = self.attempt(remote, to);
        for _ in 1..VERSIONS {
            match result {
                Err(DownloadError::Changed { .. }) => result = self.attempt(remote, to),
                _ => break,
            }
        }
        result
    }

    /// Downloads one version of the file.
    fn attempt(&self, remote: &Remote, to: &Path) -> Result<Sha256Hex, DownloadError> {
        let url = &remote.url;
        let mut first = self.get(url, Some((0, PART)), None)?;
        let version = version(&first).filter(|_| remote.sha256.is_none());
        let has_ranges = first.status() == StatusCode::PARTIAL_CONTENT
            && content_range(&first).is_some_and(|(from, _)| from == 0)
            && (version.is_some() || remote.sha256.is_some());
        if first.status() == StatusCode::PARTIAL_CONTENT && !has_ranges {
            first = self.get(url, None, None)?;
        }
        check_type(url, &first)?;
        let discard = |e: DownloadError| {
            let _ = std::fs::remove_file(to);
            let _ = std::fs::remove_file(index_path(to));
            e
        };
        let found = match total_size(&first).or(remote.size.filter(|_| has_ranges)) {
            Some(size) => self.sized(remote, to, first, Plan { size, has_ranges, version })?,
            // what was there has no end that could be checked
            None => self.unsized_file(remote, to, first).map_err(discard)?,
        };
        if let Some(expected) = remote.sha256.as_ref().filter(|expected| **expected != found) {
            return Err(discard(DownloadError::Digest { url: url.clone(), found, expected: expected.clone() }));
        }
        let io = |source| DownloadError::Io { path: to.into(), source };
        let (file, mut magic) = (File::open(to).map_err(io)?, [0; 4]);
        if file.read_exact_at(&mut magic, 0).is_err() || magic != MAGIC {
            return Err(discard(DownloadError::NotGguf { url: url.clone(), kind: String::new() }));
        }
        file.sync_all().map_err(io)?;
        let _ = std::fs::remove_file(index_path(to));
        Ok(found)
    }

    /// Downloads a file whose size is known.
    fn sized(&self, remote: &Remote, to: &Path, first: Response, plan: Plan) -> Result<Sha256Hex, DownloadError> {
        let (url, size) = (&remote.url, plan.size);
        let more = size.saturating_sub(remote.size.unwrap_or(0));
        if more > 0 {
            (self.more)(more).map_err(|e| DownloadError::Refused(Box::new(e)))?;
        }
        check_space(to, size)?;
        let io = |source| DownloadError::Io { path: to.into(), source };
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(to).map_err(io)?;
        let index_path = index_path(to);
        let n_parts = size.div_ceil(PART).max(1) as usize;
        let known = Index::read(&index_path, n_parts, &plan.version);
        let known = known.filter(|_| plan.has_ranges && file.metadata().is_ok_and(|known| known.len() == size));
        let is_resumed = known.is_some();
        let done = known.unwrap_or_else(|| vec![false; n_parts]);
        file.set_len(size).map_err(io)?;
        let index = Index::create(&index_path, &done, &plan.version).map_err(io)?;
        let parts = Parts { done: Mutex::new(done), changed: Condvar::new(), failed: AtomicBool::new(false) };
        let (version, has_ranges) = (plan.version.as_deref(), plan.has_ranges);
        let fetch = Fetch { downloader: self, url, file: &file, index: &index, size, version, parts: &parts };
        let digest = std::thread::scope(|scope| {
            let hasher = scope.spawn(|| fetch.hash());
            let result = if has_ranges { fetch.all_parts(first, is_resumed) } else { fetch.whole(first) };
            if result.is_err() {
                parts.failed.store(true, Ordering::Release);
                parts.changed.notify_all();
            }
            let digest = hasher.join().unwrap_or(Ok(None));
            result.and(digest)
        });
        if matches!(digest, Err(DownloadError::Changed { .. })) {
            let _ = std::fs::remove_file(to);
            let _ = std::fs::remove_file(&index_path);
        }
        digest?.ok_or_else(|| DownloadError::Truncated { url: url.clone(), found: 0, expected: size })
    }

    /// Downloads a file of unknown size over one connection. Its bytes are counted as they arrive.
    fn unsized_file(&self, remote: &Remote, to: &Path, mut response: Response) -> Result<Sha256Hex, DownloadError> {
        let io = |source| DownloadError::Io { path: to.into(), source };
        let cut = |e: std::io::Error| {
            let why = format!("{e}; the server does not say how large the file is, so it begins anew");
            HttpError::Connection { url: remote.url.clone(), why }
        };
        let mut file = File::create(to).map_err(io)?;
        let (mut hash, mut block) = (Sha256::new(), vec![0; BLOCK]);
        let mut pace = Pace::new(self.http.stall_timeout, Instant::now());
        let (mut allowed, mut at) = (remote.size.unwrap_or(0), 0);
        loop {
            let n = match response.read(&mut block).map_err(cut)? {
                0 => return Ok(Sha256Hex::of(&hash.finalize().into())),
                n => n,
            };
            at += n as u64;
            if at > allowed {
                (self.more)(PART).map_err(|e| DownloadError::Refused(Box::new(e)))?;
                allowed += PART;
                check_space(to, at)?;
            }
            hash.update(&block[..n]);
            file.write_all(&block[..n]).map_err(io)?;
            (self.progress)(n as u64);
            pace.add(n as u64, Instant::now()).map_err(cut)?;
        }
    }

    fn get(&self, url: &str, range: Option<(u64, u64)>, if_range: Option<&str>) -> Result<Response, DownloadError> {
        let get = || self.http.get(url, Options { token: self.token, range, etag: None, if_range });
        Ok(get.retry(backoff()).when(HttpError::is_temporary).call()?)
    }
}

/// How a file of known size comes.
struct Plan {
    size: u64,
    has_ranges: bool,
    /// `None` if the digest is known before, or the server names no version.
    version: Version,
}

/// The file that says which parts are complete, and of which version: a byte for each part, a line feed, the version.
struct Index;

impl Index {
    /// The complete parts, if the file is of this version and number of parts.
    fn read(path: &Path, n_parts: usize, version: &Version) -> Option<Vec<bool>> {
        let known = std::fs::read(path).ok()?;
        let (parts, rest) = known.split_at_checked(n_parts)?;
        let is_same = rest.strip_prefix(b"\n") == Some(version.as_deref().unwrap_or_default().as_bytes());
        is_same.then(|| parts.iter().map(|byte| *byte == b'1').collect())
    }

    fn create(path: &Path, done: &[bool], version: &Version) -> std::io::Result<File> {
        let mut text: Vec<u8> = done.iter().map(|done| if *done { b'1' } else { b'0' }).collect();
        text.push(b'\n');
        text.extend(version.as_deref().unwrap_or_default().as_bytes());
        let index = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
        index.set_len(text.len() as u64)?;
        index.write_all_at(&text, 0)?;
        Ok(index)
    }
}

/// A download in progress.
struct Fetch<'a> {
    downloader: &'a Downloader<'a>,
    url: &'a str,
    file: &'a File,
    index: &'a File,
    size: u64,
    /// The version that parts must be of.
    version: Option<&'a str>,
    parts: &'a Parts,
}

impl Fetch<'_> {
    /// Downloads all parts that are missing, the first from `first`.
    fn all_parts(&self, first: Response, is_resumed: bool) -> Result<(), DownloadError> {
        let missing: Vec<usize> = {
            let done = self.parts.done.lock().unwrap_or_else(PoisonError::into_inner);
            let arrived = done.iter().enumerate().filter(|(_, done)| **done).map(|(i, _)| self.range(i));
            (self.downloader.progress)(arrived.map(|(from, to)| to - from).sum());
            done.iter().enumerate().filter(|(_, done)| !**done).map(|(i, _)| i).collect()
        };
        let first = Mutex::new(Some(first).filter(|_| !is_resumed || missing.first() == Some(&0)));
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(&part) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                if self.parts.failed.load(Ordering::Acquire) {
                    break;
                }
                let begun = (part == 0).then(|| first.lock().unwrap_or_else(PoisonError::into_inner).take()).flatten();
                self.part(part, begun).inspect_err(|_| self.parts.failed.store(true, Ordering::Release))?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let n = self.downloader.connections.clamp(1, missing.len().max(1));
            let threads: Vec<_> = (0..n).map(|_| scope.spawn(work)).collect();
            let results = threads.into_iter().map(|thread| thread.join().unwrap_or(Ok(())));
            results.collect::<Vec<_>>().into_iter().collect()
        })
    }

    /// First byte of a part, and one after its last.
    fn range(&self, part: usize) -> (u64, u64) {
        let from = part as u64 * PART;
        (from, (from + PART).min(self.size))
    }

    /// Downloads a part, from where the last attempt was cut.
    fn part(&self, part: usize, mut begun: Option<Response>) -> Result<(), DownloadError> {
        let (from, to) = self.range(part);
        let mut at = from;
        let mut waits = backoff_waits();
        while at < to {
            let response = match begun.take() {
                Some(response) => response,
                None => self.downloader.get(self.url, Some((at, to)), self.version)?,
            };
            check_type(self.url, &response)?;
            self.check_version(&response, at)?;
            let before = at;
            let result = self.copy(response, &mut at, to);
            if at == before || result.is_err() {
                let wait = waits.next().ok_or_else(|| self.truncated())?;
                std::thread::sleep(wait);
            }
        }
        self.complete(part)
    }

    /// A response that is not the part at `from` of the same version is of another file.
    fn check_version(&self, response: &Response, from: u64) -> Result<(), DownloadError> {
        let is_part = response.status() == StatusCode::PARTIAL_CONTENT;
        let is_here = content_range(response).is_some_and(|(at, total)| at == from && total == self.size);
        let is_same = self.version.is_none() || version(response).as_deref() == self.version;
        if is_part && is_here && is_same { Ok(()) } else { Err(DownloadError::Changed { url: self.url.into() }) }
    }

    /// Downloads the file over one connection, from a server without ranges.
    fn whole(&self, response: Response) -> Result<(), DownloadError> {
        let mut at = 0;
        let _ = self.copy(response, &mut at, self.size);
        for part in 0..self.size.div_ceil(PART) as usize {
            if self.range(part).1 <= at {
                self.complete(part)?;
            }
        }
        if at < self.size {
            Err(DownloadError::Truncated { url: self.url.into(), found: at, expected: self.size })
        } else {
            Ok(())
        }
    }

    /// Writes the body of a response from position `at` on, up to `to`.
    fn copy(&self, mut response: Response, at: &mut u64, to: u64) -> std::io::Result<()> {
        let mut block = vec![0; BLOCK];
        let mut pace = Pace::new(self.downloader.http.stall_timeout, Instant::now());
        while *at < to {
            let most = ((to - *at) as usize).min(BLOCK);
            let n = response.read(&mut block[..most])?;
            if n == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            self.file.write_all_at(&block[..n], *at)?;
            *at += n as u64;
            (self.downloader.progress)(n as u64);
            pace.add(n as u64, Instant::now())?;
        }
        Ok(())
    }

    fn complete(&self, part: usize) -> Result<(), DownloadError> {
        let written = self.index.write_all_at(b"1", part as u64);
        written.map_err(|source| DownloadError::Io { path: "index of a download".into(), source })?;
        self.parts.done.lock().unwrap_or_else(PoisonError::into_inner)[part] = true;
        self.parts.changed.notify_all();
        Ok(())
    }

    fn truncated(&self) -> DownloadError {
        let done = self.parts.done.lock().unwrap_or_else(PoisonError::into_inner);
        let arrived = done.iter().enumerate().filter(|(_, done)| **done).map(|(i, _)| self.range(i));
        let found = arrived.map(|(from, to)| to - from).sum();
        DownloadError::Truncated { url: self.url.into(), found, expected: self.size }
    }

    /// SHA-256 of the file, part by part as they are complete; `None` if the download failed.
    fn hash(&self) -> Result<Option<Sha256Hex>, DownloadError> {
        let (mut hash, mut block) = (Sha256::new(), vec![0; BLOCK]);
        for part in 0..self.size.div_ceil(PART) as usize {
            let mut done = self.parts.done.lock().unwrap_or_else(PoisonError::into_inner);
            while !done[part] {
                if self.parts.failed.load(Ordering::Acquire) {
                    return Ok(None);
                }
                let waited = self.parts.changed.wait_timeout(done, Duration::from_millis(100));
                done = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            drop(done);
            let (mut at, to) = self.range(part);
            while at < to {
                let most = ((to - at) as usize).min(BLOCK);
                let read = self.file.read_exact_at(&mut block[..most], at);
                read.map_err(|source| DownloadError::Io { path: "download".into(), source })?;
                hash.update(&block[..most]);
                at += most as u64;
            }
        }
        Ok(Some(Sha256Hex::of(&hash.finalize().into())))
    }
}

/// Beside the file: one byte per part.
pub fn index_path(file: &Path) -> PathBuf {
    file.with_extension("parts")
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn backoff() -> ExponentialBuilder {
    let first = Duration::from_millis(200);
    ExponentialBuilder::new().with_min_delay(first).with_max_delay(Duration::from_secs(10)).with_max_times(ATTEMPTS - 1)
}

fn backoff_waits() -> impl Iterator<Item = Duration> {
    backon::BackoffBuilder::build(backoff())
}

/// Size of the whole file, by `Content-Range` or `Content-Length`.
pub fn total_size(response: &Response) -> Option<u64> {
    if response.status() == StatusCode::PARTIAL_CONTENT {
        return content_range(response).map(|(_, total)| total);
    }
    response.content_length()
}

/// First byte of a part, and the size of the whole file.
fn content_range(response: &Response) -> Option<(u64, u64)> {
    let range = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    let (part, total) = range.strip_prefix("bytes ")?.split_once('/')?;
    Some((part.split_once('-')?.0.parse().ok()?, total.parse().ok()?))
}

/// A page in place of the file has another type.
fn check_type(url: &str, response: &Response) -> Result<(), DownloadError> {
    let kind = content_type(response);
    let is_page =
        ["text/html", "application/json", "text/xml", "application/xml"].iter().any(|page| kind.starts_with(page));
    if is_page { Err(DownloadError::NotGguf { url: url.into(), kind }) } else { Ok(()) }
}

fn check_space(to: &Path, size: u64) -> Result<(), DownloadError> {
    let directory = to.parent().unwrap_or(to);
    let Ok(disk) = rustix::fs::statvfs(directory) else { return Ok(()) };
    let has = std::fs::metadata(to).map_or(0, |m| std::os::unix::fs::MetadataExt::blocks(&m) * 512);
    let (needed, free) = (size.saturating_sub(has), disk.f_bavail.saturating_mul(disk.f_frsize));
    if needed > free { Err(DownloadError::DiskFull { path: directory.into(), needed, free }) } else { Ok(()) }
}

/// SHA-256 of a file.
///
/// # Errors
/// If it cannot be read.
pub fn digest_of(path: &Path) -> std::io::Result<Sha256Hex> {
    let (mut file, mut hash) = (File::open(path)?, Sha256::new());
    let mut block = vec![0; BLOCK];
    loop {
        match file.read(&mut block)? {
            0 => return Ok(Sha256Hex::of(&hash.finalize().into())),
            n => hash.update(&block[..n]),
        }
    }
}

/// Writes a small file at once: under another name first.
pub fn write_atomically(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&new, path)
}
