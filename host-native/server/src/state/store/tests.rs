//! Whatever happens to the file and the calls: a row that was durable comes back, or the store does not open.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use redb::StorageBackend;
use redb::backends::InMemoryBackend;
use starling_host::clock::unix_millis;

use super::*;

const NEVER: u64 = u64::MAX;
const FILE: &str = "state.redb";

struct TempDir(PathBuf);

impl TempDir {
    fn new() -> TempDir {
        static N: AtomicU32 = AtomicU32::new(0);
        let name = format!("starling-state-{}-{}", std::process::id(), N.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        TempDir(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn open(path: &Path) -> Result<StateStore, OpenError> {
    StateStore::open(path, Cipher::plain(), Options::default())
}

fn id(kind: Kind, tenant: &str, id: &str) -> RowId {
    RowId { kind, tenant: tenant.into(), id: id.into() }
}

fn session(name: &str) -> RowId {
    id(Kind::Session, "t", name)
}

fn value(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 7 + n) as u8).collect()
}

fn put(store: &StateStore, id: RowId, value: Vec<u8>) -> Result<(), StateError> {
    store.put(id, value, 1, NEVER).wait()
}

#[test]
fn rows_outlive_the_store() {
    for key in [None, Some([7; 32])] {
        let cipher = || key.as_ref().map_or_else(Cipher::plain, Cipher::with_key);
        let directory = TempDir::new();
        let open = || StateStore::open(&directory.0, cipher(), Options::default());
        let store = open().unwrap();
        put(&store, session("a"), value(10)).unwrap();
        put(&store, session("a"), value(5000)).unwrap();
        put(&store, session("b"), value(0)).unwrap();
        put(&store, id(Kind::Response, "t", "a"), value(3)).unwrap();
        put(&store, id(Kind::Response, "u", "a"), value(4)).unwrap();
        store.delete(session("none")).wait().unwrap();
        store.delete(session("b")).wait().unwrap();
        let mut first = Some(store);
        for _ in 0..2 {
            let store = first.take().unwrap_or_else(|| open().unwrap());
            assert_eq!(store.read(&session("a")), Ok(Some(value(5000))));
            assert_eq!(store.read(&session("b")), Ok(None));
            assert_eq!(store.read(&id(Kind::Response, "u", "a")), Ok(Some(value(4))));
            let list = store.list(Kind::Response, Some("t"));
            let info = RowInfo { created: 1, expires: NEVER, n_bytes: 3 };
            assert_eq!(list, [(id(Kind::Response, "t", "a"), info)]);
            assert_eq!((store.list(Kind::Response, None).len(), store.size(Kind::Session)), (2, (1, 5000)));
            drop(store);
        }
        let mode = |name: &str| fs::metadata(directory.0.join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(""), mode(FILE), mode("lock")), (0o700, 0o600, 0o600));
        // with a key the file tells neither texts nor names
        let bytes = fs::read(directory.0.join(FILE)).unwrap();
        let has = |part: &[u8]| bytes.windows(part.len()).any(|window| window == part);
        assert_eq!(has(&value(5000)[..40]), key.is_none());
    }
}

#[test]
fn rows_expire_and_the_oldest_answers_make_room() {
    let directory = TempDir::new();
    let options = Options { answers_quota: 100, ..Options::default() };
    let store = StateStore::open(&directory.0, Cipher::plain(), options).unwrap();
    let now = unix_millis();
    store.put(session("old"), value(1), 0, now).wait().unwrap();
    store.put(session("new"), value(1), 0, now + 60_000).wait().unwrap();
    assert_eq!((store.read(&session("old")), store.list(Kind::Session, None).len()), (Ok(None), 1));
    store.purge();
    assert!(store.flush_within(std::time::Duration::from_secs(60)));
    assert_eq!(store.size(Kind::Session), (1, 1));
    // found expired, and put again before it is deleted
    store.put(session("old"), value(1), 0, now).wait().unwrap();
    drop((store.purge(), store.put(session("old"), value(2), 0, NEVER)));
    store.purge();
    assert!(store.flush_within(std::time::Duration::from_secs(60)));
    assert_eq!(store.read(&session("old")), Ok(Some(value(2))));
    for i in 0..5 {
        let kind = if i % 2 == 0 { Kind::Completion } else { Kind::Response };
        store.put(id(kind, "t", &i.to_string()), value(30), i, NEVER).wait().unwrap();
        store.put(id(kind, "u", "one"), value(30), i, NEVER).wait().unwrap();
    }
    assert!(store.flush_within(std::time::Duration::from_secs(60)));
    let left = |kind| store.list(kind, Some("t")).into_iter().map(|(id, _)| id.id.to_string()).collect::<Vec<_>>();
    assert_eq!((left(Kind::Completion), left(Kind::Response)), (vec!["2".to_string(), "4".into()], vec!["3".into()]));
    assert_eq!(store.size(Kind::Session).0, 2);
}

#[test]
fn what_is_not_its_own_is_refused() {
    let directory = TempDir::new();
    let one = [1; 32];
    let with = |key: &[u8; 32]| StateStore::open(&directory.0, Cipher::with_key(key), Options::default());
    let store = with(&one).unwrap();
    put(&store, session("a"), value(10)).unwrap();
    // the lock names the process that has it
    let error = open(&directory.0).unwrap_err().to_string();
    assert!(error.contains(&format!("in use by the process {};", std::process::id())), "{error}");
    drop(store);
    assert!(matches!(with(&[2; 32]), Err(OpenError::WrongKey { .. })));
    assert!(matches!(open(&directory.0), Err(OpenError::NoKey { .. })));
    assert_eq!(with(&one).unwrap().read(&session("a")), Ok(Some(value(10))));
    let file = directory.0.join(FILE);
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, b"something else, longer than a header ".repeat(1000)).unwrap();
    assert!(matches!(with(&one), Err(OpenError::Foreign { .. })), "{:?}", with(&one));
    // another program's database
    fs::remove_file(&file).unwrap();
    drop(redb::Database::create(&file).unwrap());
    assert!(matches!(with(&one), Err(OpenError::Foreign { .. })));
    fs::remove_file(&file).unwrap();
    drop(open(&directory.0).unwrap());
    assert!(matches!(with(&one), Err(OpenError::NotEncrypted { .. })));
    fs::remove_file(&file).unwrap();
    fs::write(directory.0.join("target"), &bytes).unwrap();
    symlink(directory.0.join("target"), &file).unwrap();
    assert!(matches!(with(&one), Err(OpenError::Io { .. })));
    fs::remove_file(&file).unwrap();
    fs::write(&file, &bytes).unwrap();
    fs::set_permissions(&directory.0, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(matches!(with(&one), Err(OpenError::NotPrivate { mode: 0o755, .. })));
    fs::set_permissions(&directory.0, fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(with(&one).unwrap().read(&session("a")), Ok(Some(value(10))));
}

/// A byte of the file is changed, or its end is missing: an error at the start, or all rows.
#[test]
fn damage_is_an_error_and_loses_no_row() {
    for key in [None, Some([7; 32])] {
        let cipher = || key.as_ref().map_or_else(Cipher::plain, Cipher::with_key);
        let directory = TempDir::new();
        let open = || StateStore::open(&directory.0, cipher(), Options::default());
        let store = open().unwrap();
        let names: Vec<String> = (0..20).map(|i| format!("s{i}")).collect();
        names.iter().for_each(|name| put(&store, session(name), value(200)).unwrap());
        drop(store);
        let file = directory.0.join(FILE);
        let bytes = fs::read(&file).unwrap();
        let used: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] != 0).collect();
        let mut n_refused = 0;
        let mut check = |damaged: &[u8], what: &str| {
            fs::write(&file, damaged).unwrap();
            match open() {
                Ok(store) => {
                    for name in &names {
                        assert_eq!(store.read(&session(name)), Ok(Some(value(200))), "{what}");
                    }
                }
                Err(
                    OpenError::Damaged { .. }
                    | OpenError::Foreign { .. }
                    | OpenError::Version { .. }
                    | OpenError::Io { .. },
                ) => {
                    n_refused += 1;
                }
                Err(e) => panic!("{what}: {e}"),
            }
        };
        for at in used.iter().step_by(used.len() / 150) {
            let mut damaged = bytes.clone();
            damaged[*at] ^= 0x10;
            check(&damaged, &format!("byte {at}"));
        }
        for cut in [1, 100, 4096, bytes.len() / 2, bytes.len() - 10] {
            check(&bytes[..bytes.len() - cut], &format!("{cut} bytes less"));
        }
        assert!(n_refused > 20, "{n_refused}");
    }
}

/// Offset and bytes of a write.
type Write = (u64, Vec<u8>);

/// A file in memory whose calls fail from the `at`-th on, `n` of them.
#[derive(Debug, Clone)]
struct FaultBackend {
    file: Arc<InMemoryBackend>,
    calls: Arc<AtomicUsize>,
    at: usize,
    n: usize,
    /// Whether a failing write writes its first half.
    is_torn: bool,
    /// What was written since the last sync is lost.
    unsynced: Arc<Mutex<Vec<Write>>>,
    has_failed: Arc<AtomicBool>,
}

impl FaultBackend {
    fn call(&self) -> io::Result<()> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if call < self.at || call >= self.at.saturating_add(self.n) {
            return Ok(());
        }
        self.has_failed.store(true, Ordering::Relaxed);
        Err(io::Error::from_raw_os_error(28))
    }
}

impl StorageBackend for FaultBackend {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.call()?;
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.call()?;
        self.unsynced.lock().unwrap().clear();
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let result = self.call();
        let written = if result.is_ok() { data } else { &data[..if self.is_torn { data.len() / 2 } else { 0 }] };
        let mut before = vec![0; written.len()];
        self.file.read(offset, &mut before)?;
        self.unsynced.lock().unwrap().push((offset, before));
        self.file.write(offset, written)?;
        result
    }
}

fn faulty(at: usize, n: usize, is_torn: bool) -> FaultBackend {
    let (file, calls, unsynced, has_failed) =
        (Arc::new(InMemoryBackend::new()), Default::default(), Default::default(), Default::default());
    FaultBackend { file, calls, at, n, is_torn, unsynced, has_failed }
}

fn with_backend(backend: &FaultBackend) -> Result<StateStore, OpenError> {
    let backend = backend.clone();
    let opener: writer::Opener = Box::new(move || Ok(Box::new(backend.clone())));
    StateStore::with_opener(Path::new("memory"), opener, Cipher::plain(), Options::default())
}

/// Puts rows and deletes; the rows that must be there, and for those of failed writes what may be there.
fn write_rows(store: &StateStore) -> BTreeMap<String, Vec<Option<Vec<u8>>>> {
    let mut rows: BTreeMap<String, Vec<Option<Vec<u8>>>> = BTreeMap::new();
    for i in 0..12 {
        let name = format!("s{}", i % 5);
        let new = (i % 4 != 3).then(|| value(100 + 900 * (i % 3)));
        let result = match &new {
            Some(value) => put(store, session(&name), value.clone()),
            None => store.delete(session(&name)).wait(),
        };
        let known = rows.entry(name).or_insert_with(|| vec![None]);
        match result {
            Ok(()) => *known = vec![new],
            Err(StateError::Write(_)) => known.push(new),
            Err(e) => panic!("{e}"),
        }
    }
    rows
}

fn check_rows(store: &StateStore, rows: &BTreeMap<String, Vec<Option<Vec<u8>>>>, what: &str) {
    for (name, expected) in rows {
        let found = store.read(&session(name)).unwrap();
        assert!(expected.contains(&found), "{what}: {name}");
        assert_eq!(store.info(&session(name)).is_some(), found.is_some(), "{what}: {name}");
    }
}

/// Every call of the file fails once, or it and all later ones; power fails afterwards, or not.
#[test]
fn a_row_that_was_durable_outlives_every_failed_call() {
    let good = faulty(usize::MAX, 0, false);
    let store = with_backend(&good).unwrap();
    let n_open = good.calls.load(Ordering::Relaxed);
    write_rows(&store);
    drop(store);
    let n_calls = good.calls.load(Ordering::Relaxed);
    assert!(n_calls > 40, "{n_calls}");
    let mut n_failed = 0;
    for at in 0..n_calls {
        for (n, is_torn, is_power_lost) in
            [(1, false, false), (1, true, false), (usize::MAX, true, false), (usize::MAX, true, true)]
        {
            let what = format!("call {at}, {n} failures, {is_torn}, {is_power_lost}");
            let backend = faulty(at, n, is_torn);
            let rows = match with_backend(&backend) {
                Ok(store) => write_rows(&store),
                Err(e) => {
                    assert!(at < n_open, "{what}: {e}");
                    BTreeMap::new()
                }
            };
            n_failed += usize::from(backend.has_failed.load(Ordering::Relaxed));
            if is_power_lost {
                for (offset, before) in backend.unsynced.lock().unwrap().drain(..).rev() {
                    backend.file.write(offset, &before).unwrap();
                }
            }
            // the next process
            let next = FaultBackend { at: usize::MAX, ..backend };
            match with_backend(&next) {
                Ok(store) => check_rows(&store, &rows, &what),
                // a new file whose first write failed
                Err(e) => assert!(rows.is_empty(), "{what}: {e}"),
            }
        }
    }
    assert!(n_failed > n_calls, "{n_failed}");
}

#[test]
fn the_store_goes_on_after_a_failed_write() {
    let probe = faulty(usize::MAX, 0, false);
    let opened = with_backend(&probe).unwrap();
    let backend = faulty(probe.calls.load(Ordering::Relaxed), 1, true);
    drop(opened);
    let store = with_backend(&backend).unwrap();
    let first = put(&store, session("a"), value(10));
    let error = first.unwrap_err().to_string();
    assert!(error.contains("--state-dir") && error.contains("No space left"), "{error}");
    let start = std::time::Instant::now();
    while put(&store, session("a"), value(11)).is_err() {
        assert!(start.elapsed().as_secs() < 30);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(store.read(&session("a")), Ok(Some(value(11))));
    assert!(store.counts().1 > 0);
}

/// A full disk: what was written before is read meanwhile.
#[test]
fn rows_are_read_while_the_file_cannot_be_written() {
    for is_torn in [false, true] {
        let probe = faulty(usize::MAX, 0, false);
        let opened = with_backend(&probe).unwrap();
        put(&opened, session("a"), value(5000)).unwrap();
        let n_calls = probe.calls.load(Ordering::Relaxed);
        drop(opened);
        // each of the calls of the next write is the first that fails, and no later one succeeds
        for at in n_calls..n_calls + 3 {
            let backend = faulty(at, usize::MAX, is_torn);
            let store = with_backend(&backend).unwrap();
            put(&store, session("a"), value(5000)).unwrap();
            for i in 0..3 {
                let result = put(&store, session("b"), value(7000 + i));
                assert!(matches!(result, Err(StateError::Write(_))), "{at} {is_torn}: {result:?}");
                assert_eq!(store.read(&session("a")), Ok(Some(value(5000))), "{at} {is_torn}");
                assert!(store.read(&session("b")).is_ok(), "{at} {is_torn}");
                assert!(store.list(Kind::Session, None).iter().any(|(id, _)| *id == session("a")));
            }
        }
    }
}

#[test]
fn a_full_queue_refuses() {
    let directory = TempDir::new();
    let options = Options { max_queued: 100, ..Options::default() };
    let store = StateStore::open(&directory.0, Cipher::plain(), options).unwrap();
    assert_eq!(put(&store, session("a"), value(101)), Err(StateError::Busy));
    assert_eq!(put(&store, session("a"), value(99)), Ok(()));
    assert_eq!(put(&store, session("a"), value(100)), Ok(()));
}
