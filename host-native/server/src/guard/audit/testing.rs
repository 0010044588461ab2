//! Directories, events and contents of logs in tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::disk::{rotated_numbers, rotated_path};
use super::record::{Event, Refusal};

/// A directory that is removed at the end of a test.
pub(super) struct TempDir(PathBuf);

impl TempDir {
    pub(super) fn new() -> TempDir {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("starling-audit-{}-{n}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        TempDir(path)
    }

    pub(super) fn log(&self) -> PathBuf {
        self.0.join("audit.jsonl")
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(super) fn event(n: u64) -> Event {
    Event::Refused(Refusal::new(&n.to_string(), None, "/", 401))
}

/// Values of `reason`, in the order of the log.
pub(super) fn reasons(dir: &TempDir) -> Vec<u64> {
    let reason = |line: &str| line.split_once("\"reason\":\"")?.1.split_once('"')?.0.parse().ok();
    contents(dir).lines().filter_map(reason).collect()
}

pub(super) fn contents(dir: &TempDir) -> String {
    let log = dir.log();
    let files = rotated_numbers(&log).unwrap().into_iter().map(|n| rotated_path(&log, n)).chain([log.clone()]);
    files.map(|path| fs::read_to_string(path).unwrap()).collect()
}
