//! The interface: quota, order of eviction, queues, counters, modes.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, SystemTime};

use super::{DEADLINE, INFO, NAMESPACE, TempDir, key, open, page, read, read_one, scanned, wait_for};
use crate::state::kv_disk::table::Table;
use crate::state::kv_disk::{Error, FilePath, KvDisk, MAX_PAGE, Options, Refusal};

const LEN: usize = 10_000;
const FILE_LEN: u64 = 14_096;

fn put(disk: &KvDisk, i: u32) {
    assert!(disk.put(key(i), page(i, LEN), INFO, false));
}

fn with(directory: &TempDir, options: Options) -> KvDisk {
    scanned(KvDisk::open(&directory.0, options).unwrap())
}

fn present(disk: &KvDisk, n: u32) -> Vec<u32> {
    (0..n).filter(|i| disk.contains(&key(*i))).collect()
}

#[test]
fn round_trip() {
    let directory = TempDir::new();
    let lens = [1, 4096, 65_536, 65_537, 458_752, 4 << 20];
    let keys: Vec<_> = (0..7).map(key).collect();
    let disk = open(&directory.0);
    for (i, len) in lens.iter().enumerate() {
        assert!(disk.put(keys[i], page(i as u32, *len), INFO, i == 2));
    }
    disk.flush();
    for disk in [disk, open(&directory.0)] {
        assert_eq!(disk.longest_prefix(&keys), 6);
        assert_eq!(disk.longest_prefix(&keys[6..]), 0);
        let pages = read(&disk, &keys);
        for (i, len) in lens.iter().enumerate() {
            assert!(pages[i].as_ref() == Some(&page(i as u32, *len)), "page {i}");
        }
        assert_eq!(pages[6], None);
        let stats = disk.stats();
        assert_eq!((stats.pages, stats.hits, stats.misses, stats.refused_total(), stats.io_errors), (6, 6, 1, 0, 0));
        let bytes: u64 = directory.files().iter().map(|file| fs::metadata(file).unwrap().len()).sum();
        assert_eq!(stats.bytes, bytes);
        assert!(disk.measured_rate().is_some_and(|rate| rate > 0.0));
        assert_eq!(read(&disk, &[]), Vec::<Option<Vec<u8>>>::new());
    }
}

#[test]
fn modes() {
    let directory = TempDir::new();
    let disk = open(&directory.0.join("a/b"));
    put(&disk, 1);
    disk.flush();
    let mode = |path: &str| fs::metadata(directory.0.join(path)).unwrap().permissions().mode() & 0o7777;
    let FilePath { name, .. } = FilePath::page(&key(1));
    assert_eq!((mode("a/b"), mode("a/b/01"), mode(&format!("a/b/01/{name}"))), (0o700, 0o700, 0o600));
    fs::set_permissions(directory.0.join("a/b"), Permissions::from_mode(0o777)).unwrap();
    let opened = KvDisk::open(&directory.0.join("a/b"), Options::default());
    assert!(matches!(opened, Err(Error::NotPrivate { mode: 0o777, .. })));
    let options = Options { key: Some([1; 32]), ..Options::default() };
    assert!(KvDisk::open(&directory.0.join("a/b"), options).is_ok());
    fs::write(directory.0.join("file"), "").unwrap();
    assert!(matches!(KvDisk::open(&directory.0.join("file"), Options::default()), Err(Error::Directory { .. })));
    let options = Options { max_page: MAX_PAGE + 1, ..Options::default() };
    assert!(matches!(KvDisk::open(&directory.0.join("c"), options), Err(Error::MaxPage { .. })));
}

#[test]
fn eviction() {
    let directory = TempDir::new();
    let options = Options { quota: 4 * FILE_LEN, ..Options::default() };
    let disk = with(&directory, options.clone());
    for i in 0..6 {
        put(&disk, i);
        disk.flush();
        if i == 3 {
            assert!(read_one(&disk, 0).is_some());
        }
    }
    assert_eq!(present(&disk, 6), [0, 3, 4, 5]);
    assert_eq!((disk.stats().evicted, disk.stats().bytes, directory.files().len()), (2, 4 * FILE_LEN, 4));
    drop(disk);
    // the next process evicts in the order of modification times, and at once if its quota is smaller
    for (age, i) in [5, 0, 3, 4].into_iter().enumerate() {
        let file = File::open(directory.path_of(&key(i))).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(1000 * (5 - age as u64))).unwrap();
    }
    let disk = with(&directory, Options { quota: 3 * FILE_LEN, ..options.clone() });
    assert_eq!(present(&disk, 6), [0, 3, 4]);
    // a read sets the time
    assert!(read_one(&disk, 0).is_some());
    drop(disk);
    let disk = with(&directory, Options { quota: 2 * FILE_LEN, ..options });
    assert_eq!(present(&disk, 6), [0, 4]);
}

#[test]
fn queue_is_bounded() {
    let directory = TempDir::new();
    let options = Options { max_queued: 3 * LEN, max_page: 2 * LEN, ..Options::default() };
    let disk = with(&directory, options);
    let (entered, leave) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    /// Blocks the writer, which calls this when it takes the page.
    struct Blocking(Vec<u8>, Arc<Barrier>, Arc<Barrier>);
    impl AsRef<[u8]> for Blocking {
        fn as_ref(&self) -> &[u8] {
            if thread::current().name() == Some("kv-disk-write") && Arc::strong_count(&self.1) == 2 {
                self.1.wait();
                self.2.wait();
            }
            &self.0
        }
    }
    let blocking = Blocking(page(0, LEN), entered.clone(), leave.clone());
    assert!(disk.put(key(0), blocking, INFO, false));
    entered.wait();
    put(&disk, 1);
    put(&disk, 2);
    assert!(!disk.put(key(3), page(3, LEN), INFO, false), "queue full");
    put(&disk, 2); // is queued already
    assert!(!disk.put(key(4), vec![0; 2 * LEN + 1], INFO, false), "too large");
    assert!(!disk.put(key(4), vec![], INFO, false), "empty");
    assert_eq!((disk.stats().queued_bytes, disk.stats().dropped), (3 * LEN as u64, 3));
    drop(entered);
    leave.wait();
    drop(leave);
    disk.flush();
    assert_eq!(present(&disk, 5), [0, 1, 2]);
    put(&disk, 0); // known: not written again
    disk.flush();
    assert_eq!((disk.stats().queued_bytes, disk.stats().written), (0, 3));
}

#[test]
fn remove_and_clear() {
    let directory = TempDir::new();
    let disk = open(&directory.0);
    (0..5).for_each(|i| put(&disk, i));
    disk.remove(&key(1));
    disk.flush();
    assert_eq!(present(&disk, 5), [0, 2, 3, 4]);
    disk.remove(&key(2));
    assert!(!disk.contains(&key(2)));
    put(&disk, 2);
    disk.flush();
    assert_eq!(present(&disk, 5), [0, 2, 3, 4]);
    put(&disk, 7);
    disk.clear();
    put(&disk, 7);
    disk.flush();
    assert_eq!((present(&disk, 8), directory.files().len()), (vec![7], 1));
    let stats = disk.stats();
    assert_eq!((stats.pages, stats.bytes, stats.io_errors), (1, FILE_LEN, 0));
}

#[test]
fn sweeps_leftovers() {
    let directory = TempDir::new();
    let disk = open(&directory.0);
    put(&disk, 1);
    drop(disk);
    let hour = Duration::from_secs(3700);
    let own = std::process::id();
    let leftover = |name: &str, age| {
        let path = directory.0.join("01").join(name);
        File::create(&path).unwrap().set_modified(SystemTime::now() - age).unwrap();
        path
    };
    let (now, alive) = (Duration::ZERO, std::os::unix::process::parent_id());
    let swept = [
        leftover("aa.2000000000.0000000000000001.1.tmp", now), // no such process
        leftover(&format!("aa.{own}.0000000000000001.1.tmp"), now), // an earlier process of this PID
        leftover(&format!("aa.{alive}.0000000000000001.1.tmp"), hour),
        leftover("x.tmp", hour),
    ];
    let kept = [
        leftover(&format!("aa.{alive}.0000000000000001.2.tmp"), now),
        leftover("y.tmp", now),
        leftover("readme", hour),
        directory.path_of(&key(1)),
    ];
    drop(open(&directory.0));
    assert_eq!(swept.map(|path| path.exists()), [false; 4]);
    assert_eq!(kept.map(|path| path.exists()), [true; 4]);
}

/// Dropping writes what is queued and answers each read.
#[test]
fn drop_ends() {
    let directory = TempDir::new();
    let disk = open(&directory.0);
    (0..20).for_each(|i| put(&disk, i));
    let (reply, replies) = channel();
    for _ in 0..20 {
        let reply = reply.clone();
        disk.read((0..20).map(key).collect(), NAMESPACE, move |pages| reply.send(pages.len()).unwrap());
    }
    drop((disk, reply));
    assert_eq!(replies.iter().collect::<Vec<_>>(), [20; 20]);
    assert_eq!(directory.files().len(), 20);
    // by the last reply
    let disk = Arc::new(open(&directory.0));
    let (done, is_done) = channel();
    let last = disk.clone();
    let (go, wait) = channel::<()>();
    disk.read(vec![key(1)], NAMESPACE, move |_| {
        let _ = wait.recv();
        drop(last);
        done.send(()).unwrap();
    });
    drop(disk);
    drop(go);
    is_done.recv_timeout(DEADLINE).unwrap();
}

#[test]
fn reply_that_panics() {
    let directory = TempDir::new();
    let disk = open(&directory.0);
    put(&disk, 1);
    disk.flush();
    (0..5).for_each(|_| disk.read(vec![key(1)], NAMESPACE, |_| panic!("expected by this test")));
    assert_eq!(read_one(&disk, 1), Some(page(1, LEN)));
}

#[test]
fn two_stores() {
    let directory = TempDir::new();
    let options = Options { rescan: Duration::from_millis(5), ..Options::default() };
    let (a, b) = (with(&directory, options.clone()), with(&directory, options));
    put(&a, 1);
    a.flush();
    // a page of the other is found by a read, and by the next scan
    assert_eq!(read_one(&b, 1), Some(page(1, LEN)));
    put(&a, 2);
    wait_for(&b, |stats| stats.pages == 2);
    b.remove(&key(1));
    wait_for(&a, |stats| stats.pages == 1);
    b.clear();
    b.flush();
    assert_eq!(read_one(&a, 2), None);
    put(&a, 2);
    a.flush();
    assert_eq!((read_one(&b, 2), b.stats().io_errors, a.stats().io_errors), (Some(page(2, LEN)), 0, 0));
}

/// Two stores that write, evict, remove and read the same keys.
#[test]
fn two_stores_in_turmoil() {
    let directory = TempDir::new();
    let options = Options { rescan: Duration::from_millis(2), quota: 10 * FILE_LEN, ..Options::default() };
    let stores = [with(&directory, options.clone()), with(&directory, options)];
    thread::scope(|scope| {
        for (seed, disk) in stores.iter().enumerate() {
            scope.spawn(move || {
                let mut state = seed as u32 + 1;
                for _ in 0..300 {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let i = state >> 8 & 31;
                    match state >> 28 {
                        0..8 => put(disk, i),
                        8 => disk.remove(&key(i)),
                        _ => assert!(read_one(disk, i).is_none_or(|found| found == page(i, LEN))),
                    }
                }
                disk.flush();
            });
        }
    });
    for disk in &stores {
        let stats = disk.stats();
        assert_eq!((stats.refused_total(), stats.io_errors), (0, 0), "{stats:?}");
        // a scan may just have found pages of the other store
        wait_for(disk, |stats| stats.bytes <= 10 * FILE_LEN);
    }
}

#[test]
fn keyed() {
    let directory = TempDir::new();
    let options = |byte| Options { key: Some([byte; 32]), ..Options::default() };
    let disk = with(&directory, options(1));
    put(&disk, 1);
    disk.flush();
    assert_eq!(read_one(&disk, 1), Some(page(1, LEN)));
    drop(disk);
    let disk = with(&directory, options(2));
    assert_eq!(read_one(&disk, 1), None);
    assert_eq!(disk.stats().refused[Refusal::HeaderChecksum as usize], 1);
    put(&disk, 1);
    drop(disk);
    let disk = open(&directory.0);
    assert_eq!(read_one(&disk, 1), None);
    assert_eq!(disk.stats().refused[Refusal::Format as usize], 1);
}

/// The order of eviction holds when the clock stands still or goes back.
#[test]
fn order_of_use() {
    let mut table = Table::new(|_| 0);
    table.insert_scanned(key(3), 1, u64::MAX, 50);
    for (i, now) in [(0, 100), (1, 100), (2, 90)] {
        table.insert_written(key(i), 10, now);
    }
    assert!(!table.record_use(key(0), 10, 80));
    assert!(table.record_use(key(2), 10, 60_000_000_090));
    assert!(!table.record_use(key(2), 10, 60_000_000_091));
    assert_eq!((table.len(), table.bytes()), (4, 31));
    let order = std::iter::from_fn(|| table.pop_oldest());
    assert!(order.eq([3, 1, 0, 2].map(key)));
    assert_eq!((table.len(), table.bytes()), (0, 0));
}
