use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::guard::audit::disk::{rotated_numbers, rotated_path};
use crate::guard::audit::hash::Key;
use crate::guard::audit::testing::{TempDir, contents, event, reasons};
use crate::guard::audit::verify::{Defect, Problem, verify};

fn write(dir: &TempDir, options: &Options, events: std::ops::Range<u64>) {
    let log = AuditLog::open(&dir.log(), options.clone()).unwrap();
    events.for_each(|n| log.record(event(n)));
    log.flush().unwrap();
    assert_eq!((log.lost(), log.failures()), (0, 0));
}

#[test]
fn a_log_continues_after_it_is_opened_again() {
    for key in [None, Key::new(&[3; 32])] {
        let dir = TempDir::new();
        let options = Options { key: key.clone(), ..Options::default() };
        for i in 0..4 {
            write(&dir, &options, i * 5..i * 5 + 5);
        }
        assert_eq!(reasons(&dir), (0..20).collect::<Vec<_>>());
        assert_eq!(verify(&dir.log(), key.as_ref(), None).unwrap().last_seq, 20);
    }
}

#[test]
fn dropping_the_log_writes_the_queue() {
    let dir = TempDir::new();
    let log = AuditLog::open(&dir.log(), Options::default()).unwrap();
    (0..1000).for_each(|n| log.record(event(n)));
    drop(log);
    assert_eq!(reasons(&dir), (0..1000).collect::<Vec<_>>());
}

#[test]
fn threads_record_at_once() {
    let dir = TempDir::new();
    let log = AuditLog::open(&dir.log(), Options { max_bytes: 5000, ..Options::default() }).unwrap();
    thread::scope(|scope| {
        for t in 0..4 {
            let log = &log;
            scope.spawn(move || (0..200).for_each(|n| log.record(event(t * 1000 + n))));
        }
    });
    log.flush().unwrap();
    let mut found = reasons(&dir);
    found.sort_unstable();
    assert_eq!(found, (0..4).flat_map(|t| t * 1000..t * 1000 + 200).collect::<Vec<_>>());
    assert!(verify(&dir.log(), None, Some(log.head().hash)).unwrap().files > 10);
}

#[test]
fn files_are_rotated_and_the_oldest_removed() {
    let dir = TempDir::new();
    for i in 0..5 {
        write(&dir, &Options { max_bytes: 2000, ..Options::default() }, i * 10..i * 10 + 10);
    }
    let report = verify(&dir.log(), None, None).unwrap();
    assert_eq!((report.first_seq, reasons(&dir).len()), (1, 50));
    let numbers = rotated_numbers(&dir.log()).unwrap();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
    assert!(numbers.len() >= 5, "{numbers:?}");
    write(&dir, &Options { max_bytes: 2000, keep_files: 2, ..Options::default() }, 50..70);
    let report = verify(&dir.log(), None, None).unwrap();
    assert_eq!(report.files, 3);
    assert!(report.first_seq > 50, "{report:?}");
    assert_eq!(reasons(&dir).last(), Some(&69));
}

/// A crash between the rename and the creation of the next file, and one before the event `rotated` is whole.
#[test]
fn a_crash_during_a_rotation() {
    for tail in [None, Some(""), Some("{\"seq\":4")] {
        let dir = TempDir::new();
        write(&dir, &Options::default(), 0..3);
        fs::rename(dir.log(), rotated_path(&dir.log(), 1)).unwrap();
        if let Some(tail) = tail {
            fs::write(dir.log(), tail).unwrap();
        }
        let records = 3;
        assert_eq!(verify(&dir.log(), None, None).unwrap().records, records);
        write(&dir, &Options::default(), 3..5);
        let text = contents(&dir);
        assert!(text.contains("\"seq\":4,") && text.contains("\"event\":\"rotated\",\"number\":1,"), "{text}");
        assert_eq!(text.contains("recovered"), tail.is_some_and(|t| !t.is_empty()), "{text}");
        assert_eq!(reasons(&dir), [0, 1, 2, 3, 4]);
        verify(&dir.log(), None, None).unwrap();
    }
}

#[test]
fn a_torn_line_is_cut_off_at_every_length() {
    let dir = TempDir::new();
    write(&dir, &Options::default(), 0..3);
    let whole = fs::read(dir.log()).unwrap();
    let last = whole[..whole.len() - 1].iter().rposition(|&b| b == b'\n').unwrap() + 1;
    for end in last..whole.len() {
        fs::write(dir.log(), &whole[..end]).unwrap();
        assert_eq!(verify(&dir.log(), None, None).unwrap().torn_bytes, (end - last) as u64);
        write(&dir, &Options::default(), 7..8);
        let report = verify(&dir.log(), None, None).unwrap();
        let recovered = contents(&dir).contains(&format!("\"event\":\"recovered\",\"bytes\":{},", end - last));
        assert_eq!(recovered, end > last);
        assert_eq!((report.last_seq, report.torn_bytes), (3 + u64::from(recovered), 0));
        assert_eq!(reasons(&dir), [0, 1, 7]);
    }
}

/// Also a torn first line, and a tail of zeros as file systems leave it after a power failure.
#[test]
fn other_torn_ends() {
    for (tail, records) in [(&b"{"[..], 2), (&[0; 100_000], 2)] {
        let dir = TempDir::new();
        fs::write(dir.log(), tail).unwrap();
        write(&dir, &Options::default(), 0..1);
        assert_eq!(verify(&dir.log(), None, None).unwrap().records, records);
    }
}

#[test]
fn a_changed_last_line_or_another_key_is_refused() {
    let dir = TempDir::new();
    write(&dir, &Options::default(), 0..3);
    let options = Options { key: Key::new(&[3; 32]), ..Options::default() };
    let found = AuditLog::open(&dir.log(), options);
    assert!(matches!(found, Err(OpenError::LastLine { problem: Problem { defect: Defect::Hash { .. }, .. } })));
    let text = fs::read_to_string(dir.log()).unwrap();
    for other in
        [text.replace("\"reason\":\"2\"", "\"reason\":\"3\""), "not a log\n".into(), "x".repeat(100_000) + "\n"]
    {
        fs::write(dir.log(), &other).unwrap();
        assert!(AuditLog::open(&dir.log(), Options::default()).is_err());
        assert_eq!(fs::read_to_string(dir.log()).unwrap(), other);
    }
}

#[test]
fn one_writer_at_a_time() {
    let dir = TempDir::new();
    let options = Options { max_bytes: 1, ..Options::default() };
    let log = AuditLog::open(&dir.log(), options.clone()).unwrap();
    for n in 0..3 {
        assert!(matches!(AuditLog::open(&dir.log(), options.clone()), Err(OpenError::Locked { .. })));
        log.record(event(n));
        log.flush().unwrap();
    }
    drop(log);
    write(&dir, &options, 3..4);
    assert_eq!(reasons(&dir), [0, 1, 2, 3]);
}

#[cfg(unix)]
#[test]
fn other_kinds_of_files_are_refused() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let refused = |dir: &TempDir| {
        let error = AuditLog::open(&dir.log(), Options::default()).err().expect("an error");
        assert!(matches!(error, OpenError::File { .. }), "{error}");
        fs::remove_file(dir.log()).ok();
    };
    let dir = TempDir::new();
    let other = dir.path().join("other");
    symlink(&other, dir.log()).unwrap();
    refused(&dir);
    assert!(!other.exists());
    fs::write(&other, "").unwrap();
    symlink(&other, dir.log()).unwrap();
    refused(&dir);
    fs::hard_link(&other, dir.log()).unwrap();
    refused(&dir);
    fs::write(dir.log(), "").unwrap();
    fs::set_permissions(dir.log(), fs::Permissions::from_mode(0o666)).unwrap();
    refused(&dir);
    rustix::fs::mknodat(rustix::fs::CWD, dir.log(), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    refused(&dir);
    fs::create_dir(dir.log()).unwrap();
    refused(&dir);
    fs::remove_dir(dir.log()).unwrap();
    write(&dir, &Options { max_bytes: 1, ..Options::default() }, 0..3);
    for entry in fs::read_dir(dir.path()).unwrap().map(Result::unwrap).filter(|e| e.file_name() != "other") {
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{entry:?}");
    }
}

#[test]
fn a_full_disk_loses_what_does_not_fit_in_the_queue() {
    let dir = TempDir::new();
    let full = Arc::new(AtomicBool::new(true));
    let files = FaultyFiles::new(&dir, &full, &Arc::default());
    let log = AuditLog::start(Chain::empty(files, Options::default()), 4).unwrap();
    log.record(event(0));
    assert!(log.flush().is_err());
    // the writer holds event 0, the queue 4 more
    (1..20).for_each(|n| log.record(event(n)));
    assert_eq!(log.lost(), 15);
    assert!(log.flush().is_err());
    assert!(log.failures() >= 2);
    assert!(log.last_failure().is_some());
    assert_eq!(log.head().seq, 0);
    full.store(false, Ordering::Relaxed);
    log.flush().unwrap();
    log.record(event(20));
    log.flush().unwrap();
    assert_eq!(reasons(&dir), [0, 1, 2, 3, 4, 20]);
    assert!(contents(&dir).contains("\"event\":\"lost\",\"count\":15,"));
    assert_eq!(verify(&dir.log(), None, None).unwrap().last_seq, 7);
    full.store(true, Ordering::Relaxed);
    log.record(event(21));
    let start = Instant::now();
    drop(log);
    assert!(start.elapsed() < Duration::from_secs(3));
    assert_eq!(verify(&dir.log(), None, None).unwrap().last_seq, 7);
}

/// The log goes on in the current file, and counts the failures.
#[test]
fn a_rotation_overwrites_no_file() {
    let dir = TempDir::new();
    let log = AuditLog::open(&dir.log(), Options { max_bytes: 1, ..Options::default() }).unwrap();
    let other = rotated_path(&dir.log(), 1);
    fs::write(&other, "other").unwrap();
    for n in 0..3 {
        log.record(event(n));
        log.flush().unwrap();
    }
    assert_eq!((log.failures(), fs::read_to_string(&other).unwrap()), (2, "other".into()));
    fs::remove_file(other).unwrap();
    log.record(event(3));
    drop(log);
    assert_eq!(reasons(&dir), [0, 1, 2, 3]);
    assert_eq!(verify(&dir.log(), None, None).unwrap().files, 2);
}

/// Events are written even if the file system cannot sync.
#[test]
fn a_failed_sync_stops_no_writes() {
    let dir = TempDir::new();
    let no_sync = Arc::new(AtomicBool::new(true));
    let files = FaultyFiles::new(&dir, &Arc::default(), &no_sync);
    let log = AuditLog::start(Chain::empty(files, Options::default()), 4).unwrap();
    for n in 0..40 {
        log.record(event(n));
        assert!(log.flush().is_err());
    }
    assert_eq!((log.lost(), log.failures()), (0, 40));
    drop(log);
    assert_eq!(reasons(&dir), (0..40).collect::<Vec<_>>());
}

struct FaultyFiles {
    files: Files,
    full: Arc<AtomicBool>,
    no_sync: Arc<AtomicBool>,
}

impl FaultyFiles {
    fn new(dir: &TempDir, full: &Arc<AtomicBool>, no_sync: &Arc<AtomicBool>) -> FaultyFiles {
        let files = Files::open(&dir.log()).unwrap();
        FaultyFiles { files, full: Arc::clone(full), no_sync: Arc::clone(no_sync) }
    }

    fn call(&self) -> io::Result<()> {
        if self.full.load(Ordering::Relaxed) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

impl Disk for FaultyFiles {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.call()?;
        self.files.write(bytes)
    }

    fn truncate(&mut self, len_bytes: u64) -> io::Result<()> {
        self.files.truncate(len_bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.call()?;
        if self.no_sync.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.files.sync()
    }

    fn rename(&mut self, number: u64) -> io::Result<()> {
        self.files.rename(number)
    }

    fn create(&mut self) -> io::Result<()> {
        self.files.create()
    }

    fn remove(&mut self, number: u64) -> io::Result<()> {
        self.files.remove(number)
    }
}
