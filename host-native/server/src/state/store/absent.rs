//! The state store of a build without it: there is none, and so none of its methods is called.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::index::PageOf;
use super::{Cipher, Kind, OpenError, RowId, RowInfo, StateError};

#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub answers_quota: u64,
    pub labels: fn(Kind, &[u8]) -> Vec<u64>,
    pub max_queued: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { answers_quota: 0, labels: |_, _| Vec::new(), max_queued: 0 }
    }
}

/// Has no value.
#[derive(Debug)]
enum Never {}

#[derive(Debug)]
pub struct StateStore(Never);

#[derive(Debug)]
pub struct Written(Box<Never>);

impl Written {
    pub async fn durable(self) -> Result<(), StateError> {
        match *self.0 {}
    }
}

impl StateStore {
    /// # Errors
    /// Always.
    pub fn open(_: &Path, _: Cipher, _: Options) -> Result<StateStore, OpenError> {
        Err(OpenError::Absent)
    }

    pub fn put(&self, _: RowId, _: Vec<u8>, _: u64, _: u64) -> Written {
        match self.0 {}
    }

    pub fn delete(&self, _: RowId) -> Written {
        match self.0 {}
    }

    pub fn purge(&self) {
        match self.0 {}
    }

    pub async fn get(self: &Arc<Self>, _: RowId) -> Result<Option<Vec<u8>>, StateError> {
        match self.0 {}
    }

    pub fn read(&self, _: &RowId) -> Result<Option<Vec<u8>>, StateError> {
        match self.0 {}
    }

    pub fn info(&self, _: &RowId) -> Option<RowInfo> {
        match self.0 {}
    }

    pub fn list(&self, _: Kind, _: Option<&str>) -> Vec<(RowId, RowInfo)> {
        match self.0 {}
    }

    pub fn page(&self, _: Kind, _: &str, _: &PageOf<'_>) -> Option<Vec<RowId>> {
        match self.0 {}
    }

    pub fn size(&self, _: Kind) -> (usize, u64) {
        match self.0 {}
    }

    pub fn counts(&self) -> (u64, u64) {
        match self.0 {}
    }

    pub fn flush_within(&self, _: Duration) -> bool {
        match self.0 {}
    }
}
