use std::fs;

use proptest::prelude::*;

use super::*;
use crate::guard::audit::chain::Options;
use crate::guard::audit::record::{Event, line};
use crate::guard::audit::testing::TempDir;
use crate::guard::audit::writer::AuditLog;

/// A log in memory: lines of each file, the current file last.
type Files = Vec<Vec<Vec<u8>>>;

/// Lines of a log with a rotation before each seq in `rotations`.
fn lines(texts: &[String], rotations: &[usize], key: Option<&Key>) -> Files {
    let mut files = vec![Vec::new()];
    let (mut seq, mut previous) = (0, Hash::ZERO);
    let mut write = |files: &mut Files, event: &Event| {
        seq += 1;
        let (bytes, hash) = line(seq, std::time::SystemTime::now(), event, previous, key).unwrap();
        previous = hash;
        files.last_mut().unwrap().push(bytes);
    };
    for (i, text) in texts.iter().enumerate() {
        if i > 0 && rotations.contains(&i) {
            let number = files.len() as u64;
            files.push(Vec::new());
            write(&mut files, &Event::Rotated { number });
        }
        write(&mut files, &Event::ServerStarted { version: text.as_str().into() });
    }
    files
}

fn store(dir: &TempDir, files: &Files, first: usize) {
    let log = dir.log();
    for (i, file) in files.iter().enumerate().skip(first) {
        let path = if i + 1 == files.len() { log.clone() } else { rotated_path(&log, i as u64 + 1) };
        fs::write(path, file.concat()).unwrap();
    }
}

fn check(files: &Files, first: usize, key: Option<&Key>, head: Option<Hash>) -> Result<Report, Defect> {
    let dir = TempDir::new();
    store(&dir, files, first);
    verify(&dir.log(), key, head).map_err(|problem| problem.defect)
}

fn logs() -> impl Strategy<Value = (Vec<String>, Vec<usize>, bool)> {
    let texts = prop::collection::vec(any::<String>(), 2..12);
    (texts, prop::collection::vec(0..12usize, 0..4), any::<bool>())
}

/// File and line of the `n`-th line, modulo their number.
fn place(files: &Files, n: usize) -> (usize, usize) {
    let all: Vec<_> = files.iter().enumerate().flat_map(|(f, file)| (0..file.len()).map(move |l| (f, l))).collect();
    all[n % all.len()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn each_defect_is_found(
        (texts, rotations, with_key) in logs(), n in any::<prop::sample::Index>(), m in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(), flip in 1..=255u8,
    ) {
        let key = with_key.then(|| Key::new(&[9; 32])).flatten();
        let key = key.as_ref();
        let good = lines(&texts, &rotations, key);
        let n_lines: usize = good.iter().map(Vec::len).sum();
        let report = check(&good, 0, key, None).unwrap();
        prop_assert_eq!((report.records, report.last_seq, report.first_seq), (n_lines as u64, n_lines as u64, 1));
        prop_assert_eq!((report.files, report.torn_bytes), (good.len(), 0));
        prop_assert_eq!(check(&good, 0, key, Some(report.head)), Ok(report.clone()));
        let (n, m) = (n.index(n_lines), m.index(n_lines));
        let ((f, l), (g, k)) = (place(&good, n), place(&good, m));

        let mut removed = good.clone();
        removed[f].remove(l);
        let found = check(&removed, 0, key, None);
        if n + 1 < n_lines {
            let expected = matches!(found, Err(Defect::Seq { .. } | Defect::Start { .. } | Defect::Empty));
            prop_assert!(expected, "{:?}", found);
        } else {
            prop_assert!(found.is_ok());
            let found = check(&removed, 0, key, Some(report.head));
            prop_assert!(matches!(found, Err(Defect::Head { .. })), "{:?}", found);
        }

        let mut changed = good.clone();
        let i = at.index(changed[f][l].len());
        changed[f][l][i] ^= flip;
        prop_assert!(check(&changed, 0, key, Some(report.head)).is_err());
        if (n + 1, i + 1) != (n_lines, changed[f][l].len()) {
            prop_assert!(check(&changed, 0, key, None).is_err());
        }

        let mut duplicated = good.clone();
        let copy = duplicated[f][l].clone();
        duplicated[g].insert(k, copy);
        let found = check(&duplicated, 0, key, None);
        prop_assert!(matches!(found, Err(Defect::Seq { .. } | Defect::Start { .. })), "{:?}", found);

        if n != m {
            let mut swapped = good.clone();
            let (a, b) = (good[f][l].clone(), good[g][k].clone());
            swapped[f][l] = b;
            swapped[g][k] = a;
            let found = check(&swapped, 0, key, None);
            prop_assert!(matches!(found, Err(Defect::Seq { .. } | Defect::Start { .. })), "{:?}", found);
        }
    }

    /// A forger without the key cannot continue the log, nor make one.
    #[test]
    fn another_key_is_found((texts, rotations, _) in logs()) {
        let (key, other) = (Key::new(&[1; 32]), Key::new(&[2; 33]));
        let files = lines(&texts, &rotations, other.as_ref());
        for key in [None, key.as_ref()] {
            let found = check(&files, 0, key, None);
            prop_assert!(matches!(found, Err(Defect::Hash { .. })), "{:?}", found);
        }
    }

    /// Verification of any bytes ends without a panic, and only an empty log or a torn line is no defect.
    #[test]
    fn other_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let dir = TempDir::new();
        fs::write(dir.log(), &bytes).unwrap();
        prop_assert_eq!(verify(&dir.log(), None, None).is_ok(), !bytes.contains(&b'\n'));
    }
}

fn texts(n: usize) -> Vec<String> {
    (0..n).map(|i| i.to_string()).collect()
}

#[test]
fn lines_at_the_start_may_only_be_removed_by_whole_files() {
    let mut files = lines(&texts(9), &[3, 6], None);
    let report = check(&files, 1, None, None).unwrap();
    assert_eq!((report.files, report.records, report.first_seq, report.last_seq), (2, 8, 4, 11));
    assert_eq!(check(&files, 2, None, None).unwrap().first_seq, 8);
    files[1].remove(0);
    let expected = "number 1".into();
    assert_eq!(check(&files, 1, None, None), Err(Defect::Start { found: 5, expected }));
    files[0].clear();
    assert_eq!(check(&files, 0, None, None), Err(Defect::Empty));
}

/// Who can write the file can compute hashes without a key: a new chain is found by a noted head only.
#[test]
fn forged_lines_without_a_key() {
    let good = lines(&texts(5), &[], None);
    let head = check(&good, 0, None, None).unwrap().head;
    let other = lines(&["a", "b", "c", "d", "e"].map(String::from), &[], None);
    let mut forged = good.clone();
    forged[0][2] = other[0][2].clone();
    assert!(matches!(check(&forged, 0, None, None), Err(Defect::Previous { .. })));
    assert_eq!(check(&other, 0, None, None).unwrap().records, 5);
    assert_eq!(check(&other, 0, None, Some(head)), Err(Defect::Head { expected: head, last_seq: 5 }));
    let time = std::time::SystemTime::now();
    let (first, _) = line(1, time, &Event::ServerStopped, head, None).unwrap();
    assert!(matches!(check(&vec![vec![first]], 0, None, None), Err(Defect::Previous { .. })));
}

#[test]
fn a_removed_file_is_found() {
    let files = lines(&texts(9), &[3, 6], None);
    let dir = TempDir::new();
    store(&dir, &files, 0);
    fs::remove_file(rotated_path(&dir.log(), 2)).unwrap();
    let problem = verify(&dir.log(), None, None).unwrap_err();
    assert_eq!((problem.line, problem.defect), (1, Defect::Seq { found: 8, expected: 4 }));
    assert_eq!(problem.file, dir.log());
}

#[test]
fn a_problem_names_the_file_and_the_line() {
    let mut files = lines(&texts(9), &[3, 6], None);
    let i = files[1][2].iter().rposition(|&b| b == b'4').unwrap();
    files[1][2][i] = b'5';
    let dir = TempDir::new();
    store(&dir, &files, 0);
    let text = verify(&dir.log(), None, None).unwrap_err().to_string();
    assert!(text.contains("audit.jsonl.000002:3: the line was changed"), "{text}");
}

#[test]
fn a_torn_line_is_an_error_in_rotated_files_only() {
    let mut files = lines(&texts(6), &[3], None);
    files[1].push(b"{\"seq\"".to_vec());
    assert_eq!(check(&files, 0, None, None).unwrap().torn_bytes, 6);
    files[1].push(vec![0; 100_000]);
    assert_eq!(check(&files, 0, None, None).unwrap().torn_bytes, 100_006);
    files[1].push(b"\n".to_vec());
    assert_eq!(check(&files, 0, None, None), Err(Defect::Long { limit: MAX_LINE_BYTES }));
    let mut files = lines(&texts(6), &[3], None);
    files[0].push(b"{\"seq\"".to_vec());
    assert_eq!(check(&files, 0, None, None), Err(Defect::Torn { bytes: 6 }));
}

/// `expect_head` is any line, so that a log that has grown since is valid.
#[test]
fn a_noted_head_is_found_in_a_longer_log() {
    let dir = TempDir::new();
    let log = AuditLog::open(&dir.log(), Options::default()).unwrap();
    log.record(Event::ServerStopped);
    log.flush().unwrap();
    let head = log.head();
    log.record(Event::ServerStopped);
    drop(log);
    assert_eq!(head.seq, 1);
    assert_eq!(verify(&dir.log(), None, Some(head.hash)).unwrap().last_seq, 2);
}

#[test]
fn a_log_that_cannot_be_read() {
    let dir = TempDir::new();
    for path in [dir.log(), dir.path().to_owned(), "/".into(), dir.path().join("no/audit")] {
        let problem = verify(&path, None, None).unwrap_err();
        assert!(matches!(problem.defect, Defect::Read { .. }), "{problem}");
    }
    fs::write(dir.log(), "").unwrap();
    assert_eq!(verify(&dir.log(), None, None).unwrap(), Report { files: 1, ..Report::empty() });
}

/// Rotation and removal of files during the verification are no defects.
#[test]
fn a_log_is_verified_while_it_is_written() {
    for keep_files in [0, 3] {
        let dir = TempDir::new();
        let log = AuditLog::open(&dir.log(), Options { max_bytes: 2000, keep_files, key: None }).unwrap();
        log.record(Event::ServerStopped);
        log.flush().unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for _ in 0..300 {
                    log.record(Event::ServerStopped);
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            });
            while !writer.is_finished() {
                verify(&dir.log(), None, None).unwrap();
            }
        });
    }
}
