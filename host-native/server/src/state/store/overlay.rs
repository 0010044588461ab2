//! A file that is read as it is and written into memory: a database whose file cannot be written is opened on it, so that its rows
//! can still be read. What the database writes when it opens (a few pages, to mend what a failed commit left) is dropped with it.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use redb::StorageBackend;

/// Bytes of a block.
const BLOCK: u64 = 4096;
/// Maximum blocks that are written: a database that writes more does not open.
const MAX_BLOCKS: usize = 16 << 10;

#[derive(Debug)]
pub struct Overlay {
    file: Box<dyn StorageBackend>,
    written: Mutex<Written>,
}

#[derive(Debug)]
struct Written {
    /// By number, whole.
    blocks: BTreeMap<u64, Vec<u8>>,
    len: u64,
    /// Bytes of the file that still count: it was not cut before them.
    file_len: u64,
}

impl Overlay {
    /// # Errors
    /// If the length of the file cannot be read.
    pub fn new(file: Box<dyn StorageBackend>) -> io::Result<Overlay> {
        let len = file.len()?;
        Ok(Overlay { file, written: Mutex::new(Written { blocks: BTreeMap::new(), len, file_len: len }) })
    }

    fn lock(&self) -> MutexGuard<'_, Written> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first `file_len` bytes of the file, by block; zeros beyond them.
    fn block(&self, number: u64, file_len: u64) -> io::Result<Vec<u8>> {
        let mut block = vec![0; BLOCK as usize];
        let start = number * BLOCK;
        let n = file_len.saturating_sub(start).min(BLOCK) as usize;
        if n > 0 {
            self.file.read(start, &mut block[..n])?;
        }
        Ok(block)
    }
}

/// The parts of `offset..offset + len` by blocks: number, first byte in the block, first byte in the range, length.
fn parts(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, usize, usize)> {
    let end = offset + len as u64;
    (offset / BLOCK..end.div_ceil(BLOCK)).map(move |number| {
        let from = offset.max(number * BLOCK);
        let to = end.min((number + 1) * BLOCK);
        (number, (from - number * BLOCK) as usize, (from - offset) as usize, (to - from) as usize)
    })
}

impl StorageBackend for Overlay {
    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().len)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let written = self.lock();
        if offset.saturating_add(out.len() as u64) > written.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        for (number, at, i, n) in parts(offset, out.len()) {
            match written.blocks.get(&number) {
                Some(block) => out[i..i + n].copy_from_slice(&block[at..at + n]),
                None => out[i..i + n].copy_from_slice(&self.block(number, written.file_len)?[at..at + n]),
            }
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut written = self.lock();
        if len < written.len {
            // what is behind the end is zero if the file grows again
            written.blocks.retain(|number, _| number * BLOCK < len);
            if let Some(last) = written.blocks.get_mut(&(len / BLOCK)) {
                last[(len % BLOCK) as usize..].fill(0);
            }
            written.file_len = written.file_len.min(len);
        }
        written.len = len;
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut written = self.lock();
        for (number, at, i, n) in parts(offset, data.len()) {
            if !written.blocks.contains_key(&number) {
                if written.blocks.len() >= MAX_BLOCKS {
                    return Err(io::ErrorKind::OutOfMemory.into());
                }
                let block = self.block(number, written.file_len)?;
                written.blocks.insert(number, block);
            }
            if let Some(block) = written.blocks.get_mut(&number) {
                block[at..at + n].copy_from_slice(&data[i..i + n]);
            }
        }
        written.len = written.len.max(offset + data.len() as u64);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use redb::backends::InMemoryBackend;

    use super::*;

    #[test]
    fn writes_are_read_back_and_the_file_stays() {
        let file = InMemoryBackend::new();
        let content: Vec<u8> = (0..10_000u32).map(|i| i as u8).collect();
        file.set_len(10_000).unwrap();
        file.write(0, &content).unwrap();
        let overlay = Overlay::new(Box::new(file)).unwrap();
        let mut expected = content.clone();
        for (offset, len) in [(0, 1), (4095, 2), (4096, 4096), (100, 9000), (9_990, 30)] {
            let data = vec![len as u8 ^ 0x5a; len];
            overlay.write(offset as u64, &data).unwrap();
            expected.resize(expected.len().max(offset + len), 0);
            expected[offset..offset + len].copy_from_slice(&data);
            let mut found = vec![0; expected.len()];
            overlay.read(0, &mut found).unwrap();
            assert!(found == expected, "{offset} {len}");
        }
        assert_eq!(overlay.len().unwrap(), 10_020);
        assert!(overlay.read(10_000, &mut [0; 21]).is_err());
        overlay.set_len(5000).unwrap();
        overlay.set_len(9000).unwrap();
        expected.truncate(5000);
        expected.resize(9000, 0);
        let mut found = vec![1; 9000];
        overlay.read(0, &mut found).unwrap();
        assert!(found == expected);
        let mut found = vec![0; 10_000];
        overlay.file.read(0, &mut found).unwrap();
        assert!(found == content);
    }
}
