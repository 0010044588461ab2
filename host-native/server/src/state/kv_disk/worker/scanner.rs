//! The thread that rebuilds the table from the directory and sweeps what crashes left. Reads no file.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};

use super::writer::Job;
use super::{Shared, lock, now};
use crate::state::kv_disk::FilePath;

/// Age in nanoseconds at which a temporary file is a leftover whatever its name says.
const MAX_WRITE_TIME: u64 = 3_600_000_000_000;

pub(in super::super) fn run(shared: &Shared, jobs: &Sender<Job>, stop: &Receiver<()>, process_id: u64) {
    loop {
        scan(shared, process_id);
        let _ = jobs.send(Job::Evict);
        shared.is_scanned.store(true, Ordering::Release);
        if stop.recv_timeout(shared.options.rescan) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

fn scan(shared: &Shared, process_id: u64) {
    lock(&shared.index).table.begin_scan();
    for shard in 0..=255 {
        if shared.is_closed.load(Ordering::Relaxed) {
            return;
        }
        scan_shard(shared, shard, process_id);
    }
}

fn scan_shard(shared: &Shared, shard: u8, process_id: u64) {
    let (mut pages, mut leftovers) = (Vec::new(), Vec::<FilePath>::new());
    let now = now();
    let listed = shared.io.list(shard, &mut |path, info| {
        if !info.is_regular || !info.is_own {
            return;
        }
        let is_old = now.saturating_sub(info.modified) > MAX_WRITE_TIME;
        if path.is_temporary() && (is_old || path.is_leftover(process_id)) {
            leftovers.push(path);
        } else if let Some(key) = path.key().filter(|_| shared.format.is_page_size(info.len)) {
            pages.push((key, info));
        }
    });
    let mut index = lock(&shared.index);
    for (key, info) in pages {
        index.table.insert_scanned(key, info.len, info.modified, now);
    }
    if listed.is_ok() {
        index.table.end_shard(shard);
    }
    drop(index);
    shared.count_error(listed);
    for path in leftovers {
        shared.count_error(shared.io.remove(&path));
    }
}
