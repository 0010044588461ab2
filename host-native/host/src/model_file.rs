//! Memory-mapped model files; the only file that maps memory.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

/// Bytes of a model file: memory-mapped, or embedded in the binary.
pub struct ModelFile {
    path: PathBuf,
    bytes: Bytes,
}

enum Bytes {
    Mapped(Mmap),
    Embedded(&'static [u8]),
}

impl ModelFile {
    /// A file embedded in the binary; `name` is for messages.
    pub fn embedded(name: &str, bytes: &'static [u8]) -> ModelFile {
        ModelFile { path: name.into(), bytes: Bytes::Embedded(bytes) }
    }

    /// # Errors
    /// If it cannot be opened or mapped.
    pub fn open(path: &Path) -> io::Result<ModelFile> {
        // checked before opening: opening a pipe would block until there is a writer
        let kind = fs::metadata(path)?.file_type();
        if !kind.is_file() {
            return Err(io::Error::other(if kind.is_dir() { "is a directory" } else { "is not a regular file" }));
        }
        let file = File::open(path)?;
        // SAFETY: the mapping is read-only and private. If another process shortens the file while it is read, the
        // system ends this process with a signal; if it changes the contents, the loader sees other bytes, which it
        // treats as untrusted anyway. Nothing borrows the mapping once the weights are packed.
        let map = unsafe { Mmap::map(&file)? };
        Ok(ModelFile { path: path.into(), bytes: Bytes::Mapped(map) })
    }

    /// The path, or the name in messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Advises the system to drop the pages of a range whose weights are packed.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Bytes::Mapped(map) = &self.bytes {
            // SAFETY: dropping clean pages of a read-only file mapping loses nothing; they are read again when touched.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len()) };
        }
    }
}

impl Deref for ModelFile {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Embedded(bytes) => bytes,
        }
    }
}
