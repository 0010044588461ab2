//! Each kind of fault at each call of a run.

use std::fs::File;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use super::fault_io::{Call, EINTR, EIO, EMFILE, ENOSPC, Fault, FaultIo};
use super::{INFO, TempDir, key, open, page, read, scanned};
use crate::state::kv_disk::{KvDisk, Options};

const LEN: usize = 70_000;
const OLD: u32 = 3;
const ALL: u32 = 7;
static PAGES: LazyLock<Vec<Arc<[u8]>>> = LazyLock::new(|| (0..ALL).map(|i| page(i, LEN).into()).collect());

/// Reads, writes, evicts, removes and reads again with a fault at call `at`, then with a sound disk. Returns the calls.
fn check(at: usize, fault: Fault) -> Vec<Call> {
    let directory = TempDir::new();
    let put = |disk: &KvDisk, i: u32, durable| disk.put(key(i), PAGES[i as usize].clone(), INFO, durable);
    let keys: Vec<_> = (0..ALL).map(key).collect();
    let check_pages = |disk: &KvDisk| {
        let pages = read(disk, &keys);
        for (i, found) in pages.iter().enumerate() {
            let is_valid = found.as_ref().is_none_or(|found| *found == *PAGES[i]);
            assert!(is_valid, "page {i} with {fault:?} at call {at}");
        }
        pages.iter().flatten().count()
    };

    let disk = open(&directory.0);
    (0..OLD).for_each(|i| assert!(put(&disk, i, false)));
    drop(disk);
    // so old that a read sets the time
    for path in directory.files() {
        File::open(path).unwrap().set_modified(SystemTime::now() - Duration::from_secs(100)).unwrap();
    }

    let io = FaultIo::new(&directory.0, at, fault);
    // room for five pages; one reader, so that the order of the calls is always the same
    let options = Options { quota: 5 * 75_000, readers: 1, ..Options::default() };
    let disk = scanned(KvDisk::with_io(options.clone(), Box::new(io.clone())).unwrap());
    check_pages(&disk);
    (OLD..ALL).for_each(|i| assert!(put(&disk, i, i.is_multiple_of(3))));
    disk.flush();
    let n = check_pages(&disk);
    if matches!(fault, Fault::None | Fault::ShortWrite(_) | Fault::ShortRead(_) | Fault::Error(EINTR)) {
        // what a caller of the system has to expect costs a page at most where a call cannot be repeated
        let expected = if matches!(fault, Fault::Error(_)) { 3 } else { 5 };
        assert!(n >= expected, "{n} pages with {fault:?} at call {at}");
    }
    disk.remove(&key(ALL - 1));
    disk.flush();
    check_pages(&disk);
    drop(disk);

    let disk = scanned(KvDisk::open(&directory.0, options).unwrap());
    check_pages(&disk);
    disk.clear();
    (0..4).for_each(|i| assert!(put(&disk, i, false)));
    disk.flush();
    assert_eq!(check_pages(&disk), 4, "after {fault:?} at call {at}");
    io.calls()
}

fn check_each_call(faults: &[Fault]) {
    let calls = check(usize::MAX, Fault::None);
    for fault in faults {
        for (at, _) in calls.iter().enumerate().filter(|(_, call)| fault.fits(**call)) {
            check(at, *fault);
        }
    }
}

#[test]
fn errors() {
    check_each_call(&[EIO, ENOSPC, EMFILE, EINTR].map(Fault::Error));
}

#[test]
fn kills() {
    check_each_call(&[Fault::Killed]);
    check_each_call(&[0, 1, 100, 4096, LEN - 1].map(Fault::KilledInWrite));
}

#[test]
fn writes() {
    check_each_call(&[1, 100, 65_536].map(Fault::ShortWrite));
    check_each_call(&[0, 1, 128, 4095, 65_536, LEN - 1].map(Fault::TornWrite));
    check_each_call(&[Fault::ZeroedWrite]);
}

#[test]
fn renames() {
    check_each_call(&[Fault::LostRename, Fault::LateRename]);
}

#[test]
fn reads() {
    check_each_call(&[Fault::ShortRead(1), Fault::ShortRead(4095), Fault::EarlyEnd, Fault::FlippedRead]);
}

/// A disk without space: pages are dropped, and what is there makes room for what comes.
#[test]
fn full_disk() {
    let directory = TempDir::new();
    let disk = open(&directory.0);
    (0..3).for_each(|i| assert!(disk.put(key(i), page(i, LEN), INFO, false)));
    drop(disk);
    let count = FaultIo::new(&directory.0, usize::MAX, Fault::None);
    drop(scanned(KvDisk::with_io(Options::default(), Box::new(count.clone())).unwrap()));
    // the call after the scan makes the temporary file, the next is a write
    let io = FaultIo::new(&directory.0, count.calls().len() + 1, Fault::Error(ENOSPC));
    let disk = scanned(KvDisk::with_io(Options::default(), Box::new(io)).unwrap());
    assert!(disk.put(key(5), page(5, LEN), INFO, false));
    disk.flush();
    let stats = disk.stats();
    assert_eq!((stats.evicted, stats.written, stats.pages), (1, 1, 3));
    assert_eq!(directory.files().len(), 3);
}

/// The calls of a durable page, and of one that is not. The scan opens no file.
#[test]
fn order_of_calls() {
    let directory = TempDir::new();
    let disk = open(&directory.0);
    assert!(disk.put(key(0), page(0, LEN), INFO, false));
    drop(disk);
    let io = FaultIo::new(&directory.0, usize::MAX, Fault::None);
    let disk = scanned(KvDisk::with_io(Options::default(), Box::new(io.clone())).unwrap());
    assert_eq!((io.calls(), disk.stats().pages), (vec![Call::List; 4], 1));
    assert!(disk.put(key(1), page(1, LEN), INFO, true));
    assert!(disk.put(key(2), page(2, LEN), INFO, false));
    disk.flush();
    let durable = [Call::Create, Call::Write, Call::Write, Call::Sync, Call::Rename, Call::SyncDirectory];
    let other = [Call::Create, Call::Write, Call::Write, Call::Rename];
    assert_eq!(io.calls()[4..], [&durable[..], &other[..]].concat());
    // a durable page whose sync fails is reported
    for at in 3..6 {
        let io = FaultIo::new(&directory.0, 4 + at, Fault::Error(EIO));
        let disk = scanned(KvDisk::with_io(Options::default(), Box::new(io)).unwrap());
        assert!(disk.put(key(1), page(1, LEN), INFO, true));
        disk.flush();
        let stats = disk.stats();
        assert_eq!((stats.durable_failed, stats.dropped, stats.io_errors), (1, 1, 1));
        assert_eq!(read(&disk, &[key(1)]), [Some(page(1, LEN))], "the page of before, or the new one");
    }
}
