//! Whatever happens to files and calls: a read returns the bytes that were put under the key, or nothing.

#![allow(clippy::unwrap_used)]

mod behaviour;
mod damage;
mod fault_io;
mod faults;
mod processes;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{FilePath, KvDisk, Namespace, Options, PageInfo, PageKey, Stats};

const NAMESPACE: Namespace = Namespace([7; 32]);
const INFO: PageInfo = PageInfo { namespace: NAMESPACE, n_tokens: 16 };
/// Nothing here takes as long, unless it hangs.
const DEADLINE: Duration = Duration::from_secs(60);

struct TempDir(PathBuf);

impl TempDir {
    fn new() -> TempDir {
        static N: AtomicU32 = AtomicU32::new(0);
        let name = format!("kv-disk-{}-{}", std::process::id(), N.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        TempDir(path)
    }

    fn path_of(&self, key: &PageKey) -> PathBuf {
        let FilePath { shard, name } = FilePath::page(key);
        self.0.join(format!("{shard:02x}")).join(name)
    }

    /// Paths of all files below.
    fn files(&self) -> Vec<PathBuf> {
        let shards = fs::read_dir(&self.0).unwrap();
        shards.flat_map(|shard| fs::read_dir(shard.unwrap().path()).unwrap()).map(|file| file.unwrap().path()).collect()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Key `i`; the first byte, the shard, is one of four.
fn key(i: u32) -> PageKey {
    let mut key = [i as u8 ^ 0x5a; 32];
    key[0] = (i % 4) as u8;
    key[1..5].copy_from_slice(&i.to_le_bytes());
    PageKey(key)
}

/// Page of key `i`, different for each.
fn page(i: u32, len: usize) -> Vec<u8> {
    let mut state = u64::from(i) + 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(next).collect()
}

fn open(directory: &Path) -> KvDisk {
    scanned(KvDisk::open(directory, Options::default()).unwrap())
}

/// Waits for the scan.
fn scanned(disk: KvDisk) -> KvDisk {
    wait_for(&disk, |stats| stats.is_scanned);
    disk.flush();
    disk
}

fn wait_for(disk: &KvDisk, condition: impl Fn(&Stats) -> bool) {
    let start = Instant::now();
    while !condition(&disk.stats()) {
        assert!(start.elapsed() < DEADLINE, "{:?}", disk.stats());
        sleep(Duration::from_micros(200));
    }
}

fn read(disk: &KvDisk, keys: &[PageKey]) -> Vec<Option<Vec<u8>>> {
    let (reply, pages) = channel();
    disk.read(keys.to_vec(), NAMESPACE, move |pages| reply.send(pages).unwrap());
    pages.recv_timeout(DEADLINE).unwrap()
}

fn read_one(disk: &KvDisk, i: u32) -> Option<Vec<u8>> {
    read(disk, &[key(i)]).remove(0)
}
