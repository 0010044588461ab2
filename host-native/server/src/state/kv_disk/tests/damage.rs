//! Files that are not what was written.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::fs::{CWD, Mode};

use super::{INFO, NAMESPACE, TempDir, key, open, page, read_one};
use crate::state::kv_disk::page_file::{Checksum, PageFormat};
use crate::state::kv_disk::worker::reader::{Failure, read_file};
use crate::state::kv_disk::{FileInfo, HEADER_LEN, KvDisk, Namespace, PageKey, ReadFile, Refusal};

/// A file in memory.
struct MemoryFile(Vec<u8>);

impl ReadFile for MemoryFile {
    fn info(&self) -> io::Result<FileInfo> {
        Ok(FileInfo { is_regular: true, is_own: true, len: self.0.len() as u64, modified: 0 })
    }

    fn read_at(&self, out: &mut Vec<u8>, offset: u64) -> io::Result<usize> {
        let rest = self.0.get(offset as usize..).unwrap_or_default();
        let n = rest.len().min(out.capacity() - out.len());
        out.extend(&rest[..n]);
        Ok(n)
    }

    fn touch(&self) -> io::Result<()> {
        Ok(())
    }
}

fn format(key: Option<[u8; 32]>) -> PageFormat {
    PageFormat { checksum: Checksum::new(key.as_ref()), numerics_version: 3, max_page: 1 << 20 }
}

fn file(format: &PageFormat, key: &PageKey, payload: &[u8]) -> Vec<u8> {
    let mut file = format.encode(key, &INFO, payload);
    file.extend(payload);
    file
}

fn refusal(format: &PageFormat, file: Vec<u8>, key: &PageKey, namespace: &Namespace) -> Option<Refusal> {
    match read_file(&MemoryFile(file), format, key, namespace) {
        Ok(_) => None,
        Err(Failure::Refused { reason, .. }) => Some(reason),
        Err(other) => panic!("{other:?}"),
    }
}

#[test]
fn intact() {
    for key_of_sums in [None, Some([9; 32])] {
        let format = format(key_of_sums);
        for len in [1, 65_535, 65_536, 65_537, 458_752, 1 << 20] {
            let payload = page(1, len);
            let found = read_file(&MemoryFile(file(&format, &key(1), &payload)), &format, &key(1), &NAMESPACE);
            assert_eq!(found.ok(), Some(payload));
        }
    }
}

#[test]
fn each_bit_and_each_length() {
    for key_of_sums in [None, Some([9; 32])] {
        let format = format(key_of_sums);
        let intact = file(&format, &key(1), &page(1, 300));
        for bit in 0..intact.len() * 8 {
            let mut damaged = intact.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(refusal(&format, damaged, &key(1), &NAMESPACE).is_some(), "bit {bit}");
        }
        for len in 0..intact.len() {
            let found = refusal(&format, intact[..len].to_vec(), &key(1), &NAMESPACE);
            assert_eq!(found, Some(Refusal::Size), "length {len}");
        }
        for garbage in [1, 2, 4096, 65_536] {
            let longer = [intact.clone(), vec![0; garbage]].concat();
            assert_eq!(refusal(&format, longer, &key(1), &NAMESPACE), Some(Refusal::Size));
        }
    }
}

#[test]
fn reasons() {
    let plain = format(None);
    let payload = page(1, 100_000);
    let intact = file(&plain, &key(1), &payload);
    let refused =
        |format: &PageFormat, key: &PageKey, namespace: &Namespace| refusal(format, intact.clone(), key, namespace);
    assert_eq!(refused(&plain, &key(1), &NAMESPACE), None);
    assert_eq!(refused(&plain, &key(2), &NAMESPACE), Some(Refusal::Identity));
    assert_eq!(refused(&plain, &key(1), &Namespace([8; 32])), Some(Refusal::Identity));
    assert_eq!(
        refused(&PageFormat { numerics_version: 4, ..format(None) }, &key(1), &NAMESPACE),
        Some(Refusal::NumericsVersion)
    );
    assert_eq!(refused(&PageFormat { max_page: 99_999, ..format(None) }, &key(1), &NAMESPACE), Some(Refusal::Size));
    assert_eq!(refused(&format(Some([1; 32])), &key(1), &NAMESPACE), Some(Refusal::Format));
    let keyed = file(&format(Some([1; 32])), &key(1), &payload);
    assert_eq!(refusal(&format(Some([2; 32])), keyed, &key(1), &NAMESPACE), Some(Refusal::HeaderChecksum));
    // blocks exchanged
    let mut exchanged = intact.clone();
    exchanged[HEADER_LEN..].rotate_left(65_536);
    assert_eq!(refusal(&plain, exchanged, &key(1), &NAMESPACE), Some(Refusal::BlockChecksum));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Bits flipped, bytes overwritten, inserted and removed anywhere.
    #[test]
    fn any_damage(
        len in 1_usize..200_000,
        is_keyed in any::<bool>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), 0..4_u8, any::<u8>()), 1..6),
    ) {
        let format = format(is_keyed.then_some([9; 32]));
        let payload = page(1, len);
        let mut damaged = file(&format, &key(1), &payload);
        for (at, kind, value) in damage {
            let at = at.index(damaged.len());
            match kind {
                0 => damaged[at] ^= 1 << (value % 8),
                1 => damaged[at] = value,
                2 => damaged.insert(at, value),
                _ => drop(damaged.remove(at)),
            }
        }
        if let Ok(found) = read_file(&MemoryFile(damaged), &format, &key(1), &NAMESPACE) {
            prop_assert_eq!(found, payload);
        }
    }

    /// Anything at all.
    #[test]
    fn any_file(bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
        prop_assert!(read_file(&MemoryFile(bytes), &format(None), &key(1), &NAMESPACE).is_err());
    }
}

const LEN: usize = 100_000;

/// Stores pages 1 and 2 and damages them. Page 1 must be refused for `reason`, `is_deleted` or not, and can be stored
/// again if `is_replaceable`.
fn check(damage: impl Fn(&TempDir), reason: Option<Refusal>, is_deleted: bool, is_replaceable: bool) {
    let directory = TempDir::new();
    let put = |disk: &KvDisk, i| assert!(disk.put(key(i), page(i, LEN), INFO, false));
    let disk = open(&directory.0);
    put(&disk, 1);
    put(&disk, 2);
    drop(disk);
    damage(&directory);
    let start = Instant::now();
    let disk = open(&directory.0);
    assert_eq!(read_one(&disk, 1), None);
    let stats = disk.stats();
    let expected = Refusal::ALL.map(|each| u64::from(Some(each) == reason));
    assert_eq!((stats.refused, stats.io_errors, stats.misses), (expected, 0, 1));
    assert!(!disk.contains(&key(1)));
    assert_eq!(fs::symlink_metadata(directory.path_of(&key(1))).is_err(), is_deleted);
    put(&disk, 1);
    disk.flush();
    assert_eq!(read_one(&disk, 1), is_replaceable.then(|| page(1, LEN)));
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn files() {
    let write = |directory: &TempDir, bytes: &[u8]| fs::write(directory.path_of(&key(1)), bytes).unwrap();
    let removed = |directory: &TempDir| {
        let path = directory.path_of(&key(1));
        fs::remove_file(&path).unwrap();
        path
    };
    let resized = |directory: &TempDir, len: u64| {
        OpenOptions::new().write(true).open(directory.path_of(&key(1))).unwrap().set_len(len).unwrap();
    };
    check(|d| drop(removed(d)), None, true, true);
    check(|d| write(d, b""), Some(Refusal::Size), true, true);
    check(|d| write(d, &[0; 50_000]), Some(Refusal::Format), true, true);
    check(|d| resized(d, 99_999), Some(Refusal::Size), true, true);
    check(|d| resized(d, 1 << 40), Some(Refusal::Size), true, true);
    check(|d| fs::create_dir(removed(d)).unwrap(), Some(Refusal::FileType), false, false);
    let link = |d: &TempDir| symlink(d.path_of(&key(2)), removed(d)).unwrap();
    check(link, Some(Refusal::FileType), false, true);
    let dangling = |d: &TempDir| symlink("/nonexistent", removed(d)).unwrap();
    check(dangling, Some(Refusal::FileType), false, true);
    let device = |d: &TempDir| symlink("/dev/zero", removed(d)).unwrap();
    check(device, Some(Refusal::FileType), false, true);
    let fifo = |d: &TempDir| {
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(CWD, removed(d), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    };
    check(fifo, Some(Refusal::FileType), false, true);
    let socket = |d: &TempDir| {
        // the name of a page is too long to bind
        let short = d.0.join("s");
        drop(std::os::unix::net::UnixListener::bind(&short).unwrap());
        fs::rename(short, removed(d)).unwrap();
    };
    check(socket, Some(Refusal::FileType), false, true);
    // the other page's file under this name, by copy and by hard link
    let copy = |d: &TempDir| assert!(fs::copy(d.path_of(&key(2)), removed(d)).is_ok());
    check(copy, Some(Refusal::Identity), true, true);
    let hard_link = |d: &TempDir| fs::hard_link(d.path_of(&key(2)), removed(d)).unwrap();
    check(hard_link, Some(Refusal::Identity), true, true);
    // the shard
    let shard = |d: &TempDir| fs::remove_dir_all(d.0.join("01")).unwrap();
    check(shard, None, true, true);
}

#[test]
fn exchanged_pages() {
    let directory = TempDir::new();
    let disk = open(&directory.0);
    (1..3).for_each(|i| assert!(disk.put(key(i), page(i, LEN), INFO, false)));
    disk.flush();
    let (one, two, other) = (directory.path_of(&key(1)), directory.path_of(&key(2)), directory.0.join("other"));
    fs::rename(&one, &other).unwrap();
    fs::rename(&two, &one).unwrap();
    fs::rename(&other, &two).unwrap();
    assert_eq!((read_one(&disk, 1), read_one(&disk, 2)), (None, None));
    assert_eq!(disk.stats().refused[Refusal::Identity as usize], 2);
    assert_eq!(directory.files(), Vec::<std::path::PathBuf>::new());
}

/// A link in place of a shard is not followed, neither by reads nor by writes.
#[test]
fn linked_shard() {
    let (directory, other) = (TempDir::new(), TempDir::new());
    for each in [&directory, &other] {
        let disk = open(&each.0);
        assert!(disk.put(key(1), page(1, LEN), INFO, false));
    }
    fs::remove_dir_all(directory.0.join("01")).unwrap();
    symlink(other.0.join("01"), directory.0.join("01")).unwrap();
    let disk = open(&directory.0);
    assert_eq!(read_one(&disk, 1), None);
    assert!(disk.put(key(5), page(5, LEN), INFO, false));
    disk.clear();
    disk.flush();
    drop(disk);
    assert_eq!(other.files(), [other.path_of(&key(1))]);
}
