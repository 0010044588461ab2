//! KV pages and snapshots for storage that outlives the session: which a prompt lacks, and which are new.

use serde::Serialize;
use starling::kv::PageKey;
use starling::receipt::Hex;

use crate::session::{Error, RequestJson, Session};

/// What all exported pages of a session have in common.
#[derive(Serialize)]
pub(crate) struct PageFormat {
    /// Digest of numerics version, model and KV layout, in hexadecimal.
    namespace: String,
    page_bytes: usize,
    /// Records of a snapshot of recurrent states, each as long as a page; 0 for a model without recurrent layers.
    snapshot_records: usize,
}

/// A snapshot whose records are handed out.
pub(crate) struct NewSnapshot {
    page: PageKey,
    bytes: Vec<u8>,
    n_taken: u32,
}

impl Session {
    /// Notes new pages from now on, for [`Session::take_new_page`].
    ///
    /// # Errors
    /// If the loader computed no digest.
    pub(crate) fn track_pages(&mut self) -> Result<PageFormat, Error> {
        self.digest()?;
        self.engine.track_new_pages(true);
        let page_bytes = self.engine.exported_page_bytes();
        Ok(PageFormat {
            namespace: Hex(self.engine.page_namespace()).to_string(),
            page_bytes,
            snapshot_records: self.n_records(),
        })
    }

    fn n_records(&self) -> usize {
        self.engine.exported_snapshot_bytes() / self.engine.exported_page_bytes()
    }

    /// Keys of the pages of a prompt after those that it can continue from: [`Session::restore`] takes these pages, in this
    /// order. With recurrent layers, then the records of [`Session::snapshot_keys`] of the last one.
    pub(crate) fn missing_pages(&self, tokens: &[u32]) -> Vec<PageKey> {
        let mut keys = self.engine.page_keys(tokens, 0);
        keys.drain(..self.engine.n_resumable_pages(&keys));
        keys
    }

    /// Keys of the records of the snapshot after a page.
    pub(crate) fn snapshot_keys(&self, page: PageKey) -> Vec<PageKey> {
        (0..self.n_records() as u32).map(|i| page.snapshot_part(i)).collect()
    }

    /// As [`Session::missing_pages`], of the prompt of a request.
    ///
    /// # Errors
    /// If the prompt is invalid.
    pub(crate) fn missing_pages_of(&self, mut request: RequestJson) -> Result<Vec<PageKey>, Error> {
        Ok(self.missing_pages(&self.prompt(&mut request)?))
    }

    /// The oldest page that was computed and not taken before, or the next record of a snapshot: its key and the exported
    /// bytes.
    pub(crate) fn take_new_page(&mut self) -> Option<Vec<u8>> {
        self.engine.publish_running();
        loop {
            if let Some(record) = self.take_record() {
                return Some(record);
            }
            if let Some(page) = self.engine.take_new_page() {
                if let Some(bytes) = self.engine.export_page(&page.key) {
                    return Some([&page.key.0[..], &bytes].concat());
                }
                continue;
            }
            let page = self.engine.take_new_snapshot()?.key;
            self.new_snapshot = self.engine.export_snapshot(&page).map(|bytes| NewSnapshot { page, bytes, n_taken: 0 });
        }
    }

    /// The next record of the snapshot that is handed out.
    fn take_record(&mut self) -> Option<Vec<u8>> {
        let len = self.engine.exported_page_bytes();
        let snapshot = self.new_snapshot.as_mut()?;
        let Some(record) = snapshot.bytes.chunks(len).nth(snapshot.n_taken as usize) else {
            self.new_snapshot = None;
            return None;
        };
        let key = snapshot.page.snapshot_part(snapshot.n_taken);
        snapshot.n_taken += 1;
        Some([&key.0[..], record].concat())
    }
}
