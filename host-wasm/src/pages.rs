//! The KV pages and snapshots of a session in storage that outlives it: before a prompt is computed, what is stored of it is
//! imported; between steps, what is new is stored.

use starling::kv::PageKey;
use starling::receipt::Hex;
use wasm_bindgen::JsValue;

use crate::opfs::{self, OpfsFile};
use crate::page_store::{FileError, PageStore, Taken};
use crate::runtime::now_ms;
use crate::session::{Error, Session};

/// Share of a step's time, and milliseconds at most, in which pages are written between steps.
const SAVE_SHARE: f64 = 16.0;
const SAVE_MS: f64 = 20.0;

/// The store of a session's pages.
#[derive(Default)]
pub(crate) struct Pages {
    /// `None` where there is no storage, and from its first fault on.
    store: Option<PageStore<OpfsFile>>,
    /// The snapshot whose records are taken.
    new_snapshot: Option<NewSnapshot>,
    /// Milliseconds of the last step, NaN if they are not known.
    pub(crate) step_ms: f64,
}

/// A snapshot whose records are taken.
struct NewSnapshot {
    page: PageKey,
    bytes: Vec<u8>,
    n_taken: u32,
}

impl Pages {
    /// Bytes stored, and the number of pages that the engine refused.
    pub(crate) fn stored(&self) -> (u64, usize) {
        self.store.as_ref().map_or((0, 0), |store| (store.bytes(), store.refused()))
    }
}

impl Session {
    /// Opens the store of this model's pages, of at most `max_bytes` with those of other models; returns whether there is one.
    ///
    /// # Errors
    /// If the loader computed no digest.
    pub(crate) async fn open_pages(&mut self, max_bytes: f64) -> Result<bool, Error> {
        self.digest()?;
        let (namespace, page_bytes) =
            (Hex(self.engine.page_namespace()).to_string(), self.engine.exported_page_bytes());
        // private windows, runtimes without such storage, threads that may not block, a file that another tab has open
        let store: Result<_, JsValue> = opfs::open(&namespace, page_bytes, max_bytes).await;
        self.pages.store = store.ok();
        self.engine.track_new_pages(self.pages.store.is_some());
        Ok(self.pages.store.is_some())
    }

    /// Works with the store; closes it at its first fault.
    fn with_store<T>(
        &mut self,
        work: impl FnOnce(&mut Session, &mut PageStore<OpfsFile>) -> Result<T, FileError>,
    ) -> Option<T> {
        let mut store = self.pages.store.take()?;
        let result = work(self, &mut store).ok();
        if result.is_some() {
            self.pages.store = Some(store);
        } else {
            self.engine.track_new_pages(false);
        }
        result
    }

    /// Imports the stored pages of a prompt that the engine can continue from.
    pub(crate) fn restore_pages(&mut self, tokens: &[u32]) {
        self.with_store(|session, store| {
            let mut keys = session.engine.page_keys(tokens, 0);
            keys.drain(..session.engine.n_resumable_pages(&keys));
            if session.n_records() > 0 {
                keys = store.resumable(&keys, |page| session.snapshot_keys(page));
            }
            store.restore(&keys, |page| match session.restore(page) {
                Ok(_) => Taken::Imported,
                Err(e) if e.kind() == "capacity" => Taken::Full,
                Err(_) => Taken::Refused,
            })
        });
    }

    /// Stores new pages for a share of the last step's time, or for longer while no request runs; returns whether there may be
    /// more.
    pub(crate) fn save_pages(&mut self) -> bool {
        let ms = if self.engine.active() == 0 { SAVE_MS } else { (self.pages.step_ms / SAVE_SHARE).min(SAVE_MS) };
        let end = now_ms() + ms;
        let is_more = self.with_store(|session, store| {
            while let Some((key, page)) = session.take_new_page() {
                store.put(key, &page)?;
                // false also without a clock
                let is_time_left = now_ms() < end;
                if !is_time_left {
                    return Ok(true);
                }
            }
            Ok(false)
        });
        is_more.unwrap_or_default()
    }

    /// Removes all stored pages of this model.
    pub(crate) fn clear_pages(&mut self) {
        self.with_store(|_, store| store.clear());
    }

    /// Records of a snapshot of recurrent states, each as long as a page; 0 for a model without recurrent layers.
    fn n_records(&self) -> usize {
        self.engine.exported_snapshot_bytes() / self.engine.exported_page_bytes()
    }

    /// Keys of the records of the snapshot after a page.
    fn snapshot_keys(&self, page: PageKey) -> Vec<PageKey> {
        (0..self.n_records() as u32).map(|i| page.snapshot_part(i)).collect()
    }

    /// The oldest page that was computed and not taken before, or the next record of a snapshot: its key and the exported
    /// bytes.
    fn take_new_page(&mut self) -> Option<(PageKey, Vec<u8>)> {
        self.engine.publish_running();
        loop {
            if let Some(record) = self.take_record() {
                return Some(record);
            }
            if let Some(page) = self.engine.take_new_page() {
                if let Some(bytes) = self.engine.export_page(&page.key) {
                    return Some((page.key, bytes));
                }
                continue;
            }
            let page = self.engine.take_new_snapshot()?.key;
            let snapshot = self.engine.export_snapshot(&page);
            self.pages.new_snapshot = snapshot.map(|bytes| NewSnapshot { page, bytes, n_taken: 0 });
        }
    }

    /// The next record of the snapshot that is taken.
    fn take_record(&mut self) -> Option<(PageKey, Vec<u8>)> {
        let len = self.engine.exported_page_bytes();
        let snapshot = self.pages.new_snapshot.as_mut()?;
        let Some(record) = snapshot.bytes.chunks(len).nth(snapshot.n_taken as usize) else {
            self.pages.new_snapshot = None;
            return None;
        };
        let key = snapshot.page.snapshot_part(snapshot.n_taken);
        snapshot.n_taken += 1;
        Some((key, record.to_vec()))
    }
}
