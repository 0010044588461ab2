//! KV pages for storage that outlives the session: which a prompt lacks, and which are new.

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
}

impl Session {
    /// Notes new pages from now on, for [`Session::take_new_page`].
    ///
    /// # Errors
    /// If the loader computed no digest.
    pub(crate) fn track_pages(&mut self) -> Result<PageFormat, Error> {
        self.digest()?;
        // without snapshots, pages of a model with recurrent layers are of no use
        self.engine.track_new_pages(self.engine.exported_snapshot_bytes() == 0);
        Ok(PageFormat {
            namespace: Hex(self.engine.page_namespace()).to_string(),
            page_bytes: self.engine.exported_page_bytes(),
        })
    }

    /// Keys of the pages of a prompt that are not in the prefix cache: [`Session::restore`] takes these pages, in this order.
    pub(crate) fn missing_pages(&self, tokens: &[u32]) -> Vec<PageKey> {
        let mut keys = self.engine.page_keys(tokens, 0);
        keys.drain(..self.engine.n_cached_pages(&keys));
        keys
    }

    /// As [`Session::missing_pages`], of the prompt of a request.
    ///
    /// # Errors
    /// If the prompt is invalid.
    pub(crate) fn missing_pages_of(&self, mut request: RequestJson) -> Result<Vec<PageKey>, Error> {
        Ok(self.missing_pages(&self.prompt(&mut request)?))
    }

    /// The oldest page that was computed and not taken before: its key and the exported page.
    pub(crate) fn take_new_page(&mut self) -> Option<Vec<u8>> {
        self.engine.publish_running();
        loop {
            let page = self.engine.take_new_page()?;
            if let Some(bytes) = self.engine.export_page(&page.key) {
                return Some([&page.key.0[..], &bytes].concat());
            }
        }
    }
}
