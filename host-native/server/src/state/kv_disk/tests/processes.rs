//! Processes that are killed, and processes that share a directory.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use super::{INFO, TempDir, key, open, page, read, scanned};
use crate::state::kv_disk::{KvDisk, Options};

const LEN: usize = 100_000;
const N_PAGES: u32 = 40;
const VARIABLE: &str = "KV_DISK_TEST_CHILD";

fn options() -> Options {
    let rescan = Duration::from_millis(5);
    Options { quota: u64::from(N_PAGES / 2) * 104_096, rescan, ..Options::default() }
}

/// Not a test: what the other processes run, until they are killed.
#[test]
fn child() {
    let Some(directory) = std::env::var_os(VARIABLE) else { return };
    let disk = KvDisk::open(&PathBuf::from(directory), options()).unwrap();
    for i in (0..N_PAGES).cycle() {
        disk.put(key(i), page(i, LEN), INFO, i.is_multiple_of(16));
        check(&disk);
    }
}

fn start_child(directory: &TempDir) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "state::kv_disk::tests::processes::child"]).env(VARIABLE, &directory.0);
    command.stdout(Stdio::null()).spawn().unwrap()
}

fn check(disk: &KvDisk) -> usize {
    let keys: Vec<_> = (0..N_PAGES).map(key).collect();
    let pages = read(disk, &keys);
    for (i, found) in pages.iter().enumerate() {
        assert!(found.as_ref().is_none_or(|found| *found == page(i as u32, LEN)), "page {i}");
    }
    pages.iter().flatten().count()
}

#[test]
fn killed() {
    let directory = TempDir::new();
    for i in 0..12 {
        let mut child = start_child(&directory);
        sleep(Duration::from_millis(30 + 17 * i));
        child.kill().unwrap();
        child.wait().unwrap();
        let disk = scanned(KvDisk::open(&directory.0, options()).unwrap());
        check(&disk);
        assert_eq!(disk.stats().refused_total(), 0);
        drop(disk);
        assert!(directory.files().iter().all(|file| file.extension().is_some_and(|end| end == "page")));
    }
    let disk = open(&directory.0);
    assert!(check(&disk) > 0);
}

#[test]
fn shared_directory() {
    let directory = TempDir::new();
    let mut children = [start_child(&directory), start_child(&directory)];
    let disk = scanned(KvDisk::open(&directory.0, options()).unwrap());
    let mut n_hits = 0;
    for i in (0..N_PAGES).cycle().take(60) {
        assert!(disk.put(key(i), page(i, LEN), INFO, false));
        n_hits += check(&disk);
        sleep(Duration::from_millis(5));
    }
    let stats = disk.stats();
    for child in &mut children {
        assert_eq!(child.try_wait().unwrap(), None, "still running: its checks have passed");
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(n_hits > 0);
    assert_eq!((stats.refused_total(), stats.io_errors), (0, 0), "{stats:?}");
}
