//! The threads that read. Several of them share the keys of a request.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use super::{Shared, lock, now};
use crate::state::kv_disk::page_file::{Header, PageFormat};
use crate::state::kv_disk::{FileInfo, FilePath, HEADER_LEN, Namespace, PageKey, ReadFile, Refusal};

pub(in super::super) type Reply = Box<dyn FnOnce(Vec<Option<Vec<u8>>>) + Send>;

pub(in super::super) struct ReadRequest {
    keys: Vec<PageKey>,
    namespace: Namespace,
    progress: Mutex<Progress>,
}

struct Progress {
    /// When the first key was taken.
    started: Option<Instant>,
    pages: Vec<Option<Vec<u8>>>,
    n_done: usize,
    /// Taken by the thread that reads the last page.
    reply: Option<Reply>,
}

impl ReadRequest {
    pub(in super::super) fn new(keys: Vec<PageKey>, namespace: Namespace, reply: Reply) -> ReadRequest {
        let pages = keys.iter().map(|_| None).collect();
        let progress = Progress { started: None, pages, n_done: 0, reply: Some(reply) };
        ReadRequest { keys, namespace, progress: Mutex::new(progress) }
    }

    /// Notes the result of a key, and replies after the last.
    fn finish(&self, key_idx: usize, page: Option<Vec<u8>>, shared: &Shared) {
        let mut progress = lock(&self.progress);
        if let Some(slot) = progress.pages.get_mut(key_idx) {
            *slot = page;
        }
        progress.n_done += 1;
        if progress.n_done < self.keys.len() {
            return;
        }
        let (pages, reply) = (std::mem::take(&mut progress.pages), progress.reply.take());
        let started = progress.started;
        drop(progress);
        let n_bytes = pages.iter().flatten().map(Vec::len).sum();
        if let Some(started) = started
            && n_bytes > 0
        {
            shared.counters.rate.add(n_bytes, started.elapsed());
        }
        if let Some(reply) = reply {
            // a panic of the caller's code ends its reply, not this thread
            let _ = catch_unwind(AssertUnwindSafe(|| reply(pages)));
        }
    }
}

#[derive(Default)]
pub(in super::super) struct ReadQueue {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    /// Requests with keys to read, and the index of the next key of the first.
    requests: VecDeque<Arc<ReadRequest>>,
    next_key: usize,
    is_closed: bool,
}

impl ReadQueue {
    pub(in super::super) fn push(&self, request: Arc<ReadRequest>) {
        lock(&self.queue).requests.push_back(request);
        self.changed.notify_all();
    }

    /// The remaining keys are answered with `None`, then the threads end.
    pub(in super::super) fn close(&self) {
        lock(&self.queue).is_closed = true;
        self.changed.notify_all();
    }

    /// Waits for the next key. Returns its request, its index, and whether the queue is closed.
    fn next(&self) -> Option<(Arc<ReadRequest>, usize, bool)> {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(request) = queue.requests.front().cloned() {
                let key_idx = queue.next_key;
                queue.next_key += 1;
                if queue.next_key >= request.keys.len() {
                    queue.requests.pop_front();
                    queue.next_key = 0;
                }
                return Some((request, key_idx, queue.is_closed));
            }
            if queue.is_closed {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

pub(in super::super) fn run(shared: &Shared) {
    while let Some((request, key_idx, is_closed)) = shared.reads.next() {
        lock(&request.progress).started.get_or_insert_with(Instant::now);
        let key = request.keys.get(key_idx).filter(|_| !is_closed);
        let page = key.and_then(|key| read_page(shared, key, &request.namespace));
        request.finish(key_idx, page, shared);
    }
}

/// Reads, verifies, counts.
fn read_page(shared: &Shared, key: &PageKey, namespace: &Namespace) -> Option<Vec<u8>> {
    let latest_use = lock(&shared.index).table.latest_use();
    let path = FilePath::page(key);
    let failure = match read_path(shared, &path, key, namespace) {
        Ok(page) => {
            shared.counters.hits.add(1);
            return Some(page);
        }
        Err(failure) => failure,
    };
    shared.counters.misses.add(1);
    match failure {
        Failure::Missing => {}
        Failure::Io => shared.counters.io_errors.add(1),
        Failure::Refused { reason, is_own_file } => {
            shared.counters.refused[reason as usize].add(1);
            if is_own_file {
                shared.count_error(shared.io.remove(&path));
            }
        }
    }
    // so that the caller computes the page and puts it again; unless another thread has done so
    lock(&shared.index).table.forget_unused_since(key, latest_use);
    None
}

#[derive(Debug)]
pub(in super::super) enum Failure {
    Missing,
    Io,
    /// `is_own_file`: a regular file of this user, to be deleted.
    Refused {
        reason: Refusal,
        is_own_file: bool,
    },
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Failure::Missing,
            io::ErrorKind::InvalidInput => Failure::Refused { reason: Refusal::FileType, is_own_file: false },
            _ => Failure::Io,
        }
    }
}

impl From<Refusal> for Failure {
    fn from(reason: Refusal) -> Self {
        let is_own_file = !matches!(reason, Refusal::FileType | Refusal::Owner);
        Failure::Refused { reason, is_own_file }
    }
}

fn read_path(shared: &Shared, path: &FilePath, key: &PageKey, namespace: &Namespace) -> Result<Vec<u8>, Failure> {
    let file = shared.io.open_read(path)?;
    let page = read_file(&*file, &shared.format, key, namespace)?;
    let file_len = (HEADER_LEN + page.len()) as u64;
    let is_touch_due = lock(&shared.index).table.record_use(*key, file_len, now());
    if is_touch_due {
        shared.count_error(file.touch());
    }
    Ok(page)
}

/// The payload of a valid page. Allocates after the size has been checked.
pub(in super::super) fn read_file(
    file: &dyn ReadFile,
    format: &PageFormat,
    key: &PageKey,
    namespace: &Namespace,
) -> Result<Vec<u8>, Failure> {
    let FileInfo { is_regular, is_own, len, .. } = file.info()?;
    if !is_regular {
        return Err(Refusal::FileType.into());
    }
    if !is_own {
        return Err(Refusal::Owner.into());
    }
    if !format.is_page_size(len) {
        return Err(Refusal::Size.into());
    }
    let mut header = read_exact(file, HEADER_LEN, 0)?;
    header.truncate(HEADER_LEN);
    let header: Header = format.decode(&header, len, key, namespace)?;
    let page = read_exact(file, header.payload_len, HEADER_LEN as u64)?;
    format.verify(&header, &page)?;
    Ok(page)
}

/// At least `len` bytes.
fn read_exact(file: &dyn ReadFile, len: usize, offset: u64) -> Result<Vec<u8>, Failure> {
    let mut out = Vec::new();
    out.try_reserve_exact(len).map_err(|_| Failure::Io)?;
    while out.len() < len {
        let at = offset + out.len() as u64;
        match file.read_at(&mut out, at) {
            // truncated after its size was read
            Ok(0) => return Err(Refusal::Size.into()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Err(Failure::Io),
        }
    }
    Ok(out)
}
