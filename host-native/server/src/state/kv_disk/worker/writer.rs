//! The thread that writes and deletes.

use std::io::{self, Write};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};

use super::{Shared, lock, now};
use crate::state::kv_disk::{FilePath, HEADER_LEN, PageInfo, PageKey};

pub(in super::super) enum Job {
    Put(Put),
    Remove(PageKey),
    /// Delete the pages of the keys for which this holds.
    Clear(Box<dyn Fn(&PageKey) -> bool + Send>),
    /// Evict what exceeds the quota.
    Evict,
    Flush(Sender<()>),
}

pub(in super::super) struct Put {
    pub(in super::super) key: PageKey,
    pub(in super::super) page: Box<dyn AsRef<[u8]> + Send>,
    pub(in super::super) info: PageInfo,
    pub(in super::super) durable: bool,
}

/// Ends when all senders are gone and the queue is empty.
pub(in super::super) fn run(shared: &Shared, jobs: &Receiver<Job>, process_id: u64) {
    let mut n_files = 0;
    for job in jobs {
        match job {
            Job::Put(put) => {
                n_files += 1;
                put_page(shared, &put, &FilePath::temporary(&put.key, process_id, n_files));
            }
            Job::Remove(key) => {
                lock(&shared.index).table.forget(&key);
                shared.count_error(shared.io.remove(&FilePath::page(&key)));
            }
            Job::Clear(is_cleared) => clear(shared, &*is_cleared),
            Job::Evict => evict(shared, 0),
            Job::Flush(done) => {
                let _ = done.send(());
            }
        }
    }
}

fn put_page(shared: &Shared, put: &Put, temporary: &FilePath) {
    let page = (*put.page).as_ref();
    let file_len = (HEADER_LEN + page.len()) as u64;
    evict(shared, file_len);
    let mut result = write_page(shared, put, temporary);
    if result.as_ref().is_err_and(is_disk_full) && free(shared, file_len) {
        result = write_page(shared, put, temporary);
    }
    let mut index = lock(&shared.index);
    index.queued.remove(&put.key);
    let counters = &shared.counters;
    match result {
        Ok(()) => {
            index.table.insert_written(put.key, file_len, now());
            counters.written.add(1);
        }
        Err(_) => {
            counters.io_errors.add(1);
            counters.dropped.add(1);
            counters.durable_failed.add(u64::from(put.durable));
        }
    }
    drop(index);
    shared.queued_bytes.fetch_sub(page.len(), Ordering::Relaxed);
}

fn write_page(shared: &Shared, put: &Put, temporary: &FilePath) -> io::Result<()> {
    let page = (*put.page).as_ref();
    let header = shared.format.encode(&put.key, &put.info, page);
    let write = || {
        let mut file = shared.io.create_temporary(temporary)?;
        file.write_all(&header)?;
        file.write_all(page)?;
        if put.durable {
            file.sync()?;
        }
        shared.io.rename(temporary, &FilePath::page(&put.key))
    };
    let written = write();
    if written.is_err() {
        let _ = shared.io.remove(temporary);
    } else if put.durable {
        return shared.io.sync_directory(put.key.0[0]);
    }
    written
}

fn is_disk_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Removes the least recently used pages until `new_len` more bytes are within the quota.
fn evict(shared: &Shared, new_len: u64) {
    loop {
        let mut index = lock(&shared.index);
        if index.table.bytes().saturating_add(new_len) <= shared.options.quota {
            return;
        }
        let Some(key) = index.table.pop_oldest() else { return };
        drop(index);
        remove_evicted(shared, &key);
    }
}

/// Removes the least recently used pages, at least `len` bytes if there are as many. Returns whether there was one.
fn free(shared: &Shared, len: u64) -> bool {
    let target = lock(&shared.index).table.bytes().saturating_sub(len);
    let mut is_any = false;
    loop {
        let mut index = lock(&shared.index);
        if index.table.bytes() <= target {
            return is_any;
        }
        let Some(key) = index.table.pop_oldest() else { return is_any };
        drop(index);
        remove_evicted(shared, &key);
        is_any = true;
    }
}

fn remove_evicted(shared: &Shared, key: &PageKey) {
    shared.count_error(shared.io.remove(&FilePath::page(key)));
    shared.counters.evicted.add(1);
}

fn clear(shared: &Shared, is_cleared: &dyn Fn(&PageKey) -> bool) {
    lock(&shared.index).table.forget_if(is_cleared);
    for shard in 0..=255 {
        let mut pages = Vec::new();
        let listed = shared.io.list(shard, &mut |path, info| {
            if path.key().is_some_and(|key| is_cleared(&key)) && info.is_regular && info.is_own {
                pages.push(path);
            }
        });
        shared.count_error(listed);
        for path in pages {
            shared.count_error(shared.io.remove(&path));
        }
    }
}
