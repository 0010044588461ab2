use std::collections::BTreeMap;
use std::fs;

use super::*;
use crate::guard::audit::testing::{TempDir, event, reasons};
use crate::guard::audit::verify::verify;

impl<D> Chain<D> {
    /// The chain of an empty log.
    pub(in super::super) fn empty(disk: D, options: Options) -> Chain<D> {
        Chain {
            disk,
            options,
            head: Head::default(),
            len_bytes: 0,
            state: State::Good,
            rotated: VecDeque::new(),
            pending: VecDeque::new(),
            failures: 0,
            last_failure: None,
        }
    }
}

/// Files in memory whose operations fail.
#[derive(Default)]
struct FaultyDisk {
    current: Option<Vec<u8>>,
    rotated: BTreeMap<u64, Vec<u8>>,
    /// Operations so far.
    n_calls: usize,
    /// Which operations fail.
    failing: std::ops::Range<usize>,
    /// Bytes that a write writes at most, and that a failing write writes nevertheless.
    max_write: usize,
}

impl FaultyDisk {
    fn call(&mut self) -> io::Result<()> {
        self.n_calls += 1;
        if self.failing.contains(&(self.n_calls - 1)) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    fn current(&mut self) -> io::Result<&mut Vec<u8>> {
        self.current.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Disk for FaultyDisk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(self.max_write);
        self.current()?.extend_from_slice(&bytes[..n]);
        self.call().map(|()| n)
    }

    fn truncate(&mut self, len_bytes: u64) -> io::Result<()> {
        self.call()?;
        self.current()?.truncate(len_bytes as usize);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.call()
    }

    fn rename(&mut self, number: u64) -> io::Result<()> {
        self.call()?;
        let current = self.current.take().ok_or(io::ErrorKind::NotFound)?;
        assert!(self.rotated.insert(number, current).is_none());
        Ok(())
    }

    fn create(&mut self) -> io::Result<()> {
        self.call()?;
        assert!(self.current.is_none());
        self.current = Some(Vec::new());
        Ok(())
    }

    fn remove(&mut self, number: u64) -> io::Result<()> {
        self.call()?;
        self.rotated.remove(&number).map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// Writes 8 events, each until it succeeds; the log must be valid after each attempt but for a torn line.
fn write_with_failures(failing: std::ops::Range<usize>, max_write: usize, keep_files: usize) -> (usize, u64) {
    let disk = FaultyDisk { current: Some(Vec::new()), failing: failing.clone(), max_write, ..FaultyDisk::default() };
    let mut chain = Chain::empty(disk, Options { max_bytes: 700, keep_files, key: None });
    let mut failures = 0;
    let dir = TempDir::new();
    for n in 0..8 {
        while chain.append(SystemTime::now(), &event(n)).is_err() {
            failures += 1;
            assert!(failures < 1000);
            check(&dir, &chain);
        }
    }
    check(&dir, &chain);
    let first = if keep_files == 0 { 0 } else { reasons(&dir)[0] };
    assert_eq!(reasons(&dir), (first..8).collect::<Vec<_>>());
    assert!(first < 7, "{first}");
    (chain.disk.n_calls, failures + chain.failures)
}

fn check(dir: &TempDir, chain: &Chain<FaultyDisk>) {
    for number in rotated_numbers(&dir.log()).unwrap() {
        fs::remove_file(rotated_path(&dir.log(), number)).unwrap();
    }
    fs::remove_file(dir.log()).ok();
    for (&number, bytes) in &chain.disk.rotated {
        fs::write(rotated_path(&dir.log(), number), bytes).unwrap();
    }
    if let Some(bytes) = &chain.disk.current {
        fs::write(dir.log(), bytes).unwrap();
    }
    let report = verify(&dir.log(), None, None).unwrap();
    // a write that failed may have written the whole line
    let torn = chain.state == State::Torn && report.last_seq == chain.head.seq + 1;
    assert!(torn || (report.last_seq, report.head) == (chain.head.seq, chain.head.hash));
}

#[test]
fn every_operation_may_fail_once_or_for_a_while() {
    for keep_files in [0, 2] {
        for max_write in [7, usize::MAX] {
            let (n_calls, failures) = write_with_failures(0..0, max_write, keep_files);
            assert_eq!(failures, 0);
            for n in 0..n_calls {
                assert_eq!(write_with_failures(n..n + 1, max_write, keep_files).1, 1, "call {n}");
            }
            for n in (0..n_calls).step_by(5) {
                assert!(write_with_failures(n..n + 9, max_write, keep_files).1 >= 1, "call {n}");
            }
        }
    }
}
