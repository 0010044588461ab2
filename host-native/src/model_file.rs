//! The only mapping of files.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

/// A model file in memory, mapped or (the bundled one) part of the binary.
pub struct ModelFile {
    path: PathBuf,
    bytes: Bytes,
}

enum Bytes {
    Mapped(Mmap),
    Embedded(&'static [u8]),
}

impl ModelFile {
    /// A file that is part of the binary; the name is for messages.
    pub fn embedded(name: &str, bytes: &'static [u8]) -> ModelFile {
        ModelFile { path: name.into(), bytes: Bytes::Embedded(bytes) }
    }

    /// Maps a file.
    ///
    /// # Errors
    /// If it cannot be opened or mapped.
    pub fn open(path: &Path) -> io::Result<ModelFile> {
        // asked before it is opened: a pipe would make this process wait for a writer
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

    /// Where it is, or its name in messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lets the system drop the pages of bytes that were read: they live on in another form.
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
