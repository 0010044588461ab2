//! The file of a model's KV pages in the origin private file system (OPFS). One tab at a time holds it open; where there is no
//! such storage, or another tab has it, there is no store.

use js_sys::{Array, Function, IteratorNext, Object, Promise, Reflect};
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;
use web_sys::{
    AbortSignal, File, FileSystemDirectoryHandle, FileSystemFileHandle, FileSystemGetDirectoryOptions,
    FileSystemGetFileOptions, FileSystemHandle, FileSystemReadWriteOptions, FileSystemRemoveOptions,
    FileSystemSyncAccessHandle, StorageManager,
};

use crate::page_store::{FileError, PageFile, PageStore};
use crate::runtime::{global, property};

const DIRECTORY: &str = "starling-kv";
/// Milliseconds to wait for another tab, or for the page before a reload, to close the file.
const LOCK_WAIT_MS: u32 = 1000;

#[wasm_bindgen]
extern "C" {
    /// Web locks: web-sys has them for unstable APIs only.
    type LockManager;
    #[wasm_bindgen(method, catch)]
    fn request(this: &LockManager, name: &str, options: &Object, granted: &Function) -> Result<Promise, JsValue>;

    /// The static methods of `AbortSignal`, which not every browser with such storage has.
    #[wasm_bindgen(js_name = AbortSignal)]
    type AbortSignals;
    #[wasm_bindgen(static_method_of = AbortSignals, js_class = "AbortSignal", catch)]
    fn timeout(ms: u32) -> Result<AbortSignal, JsValue>;
}

/// An open file, which no other tab can open.
pub(crate) struct OpfsFile {
    handle: FileSystemSyncAccessHandle,
    _lock: Option<Lock>,
}

impl OpfsFile {
    fn at(at: u64) -> FileSystemReadWriteOptions {
        let options = FileSystemReadWriteOptions::new();
        options.set_at(at as f64);
        options
    }
}

impl PageFile for OpfsFile {
    fn len(&self) -> Result<u64, FileError> {
        Ok(self.handle.get_size().map_err(file_error)? as u64)
    }

    fn truncate(&self, len: u64) -> Result<(), FileError> {
        self.handle.truncate_with_f64(len as f64).map_err(file_error)
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<usize, FileError> {
        let n = self.handle.read_with_u8_array_and_options(into, &OpfsFile::at(at));
        Ok(n.map_err(file_error)? as usize)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<usize, FileError> {
        let n = self.handle.write_with_u8_array_and_options(bytes, &OpfsFile::at(at));
        Ok(n.map_err(file_error)? as usize)
    }
}

impl Drop for OpfsFile {
    fn drop(&mut self) {
        self.handle.close();
    }
}

fn file_error(error: JsValue) -> FileError {
    let name = property::<JsValue>(&error, "name").and_then(|name| name.as_string());
    if name.as_deref() == Some("QuotaExceededError") { FileError::Full } else { FileError::Fault }
}

/// A lock of the origin, held until it is dropped.
struct Lock {
    release: Function,
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = self.release.call0(&JsValue::UNDEFINED);
    }
}

/// A promise and the function that resolves it.
fn resolvable() -> Result<(Promise, Function), JsValue> {
    let mut resolver = None;
    let promise = Promise::new(&mut |resolve, _| resolver = Some(resolve));
    Ok((promise, resolver.ok_or(JsValue::UNDEFINED)?.unchecked_into()))
}

/// Locks a name; `None` in a runtime without locks.
///
/// # Errors
/// If another tab has it.
async fn lock(navigator: &JsValue, name: &str) -> Result<Option<Lock>, JsValue> {
    let Some(locks) = property::<LockManager>(navigator, "locks") else { return Ok(None) };
    let options = Object::new();
    Reflect::set(&options, &"signal".into(), &AbortSignals::timeout(LOCK_WAIT_MS)?.into())?;
    let ((is_granted, grant), (held, release)) = (resolvable()?, resolvable()?);
    let granted = Closure::once(move || {
        let _ = grant.call0(&JsValue::UNDEFINED);
        held
    });
    let lock = Lock { release };
    // settles when the lock is released, or rejects when it was not granted
    let request = locks.request(&format!("{DIRECTORY}/{name}"), &options, granted.as_ref().unchecked_ref())?;
    JsFuture::from(Promise::race(&Array::of2(&is_granted, &request))).await?;
    Ok(Some(lock))
}

/// Opens the pages of a model, and removes those of others, least recently used first, where all together exceed `max_bytes`.
///
/// # Errors
/// If there is no such storage, another tab uses it, or it has no room for a page.
pub(crate) async fn open(namespace: &str, page_bytes: usize, max_bytes: f64) -> Result<PageStore<OpfsFile>, JsValue> {
    let slot_bytes = PageStore::<OpfsFile>::slot_bytes(page_bytes) as f64;
    if slot_bytes > max_bytes {
        return Err(JsValue::UNDEFINED);
    }
    let navigator = global::<JsValue>("navigator").ok_or(JsValue::UNDEFINED)?;
    let name = format!("{namespace}.pages");
    let directory = directory(&navigator).await?;
    let lock = lock(&navigator, &name).await?;
    let file = open_file(&directory, &name, lock).await?;
    let len = file.handle.get_size()?;
    let kept = evict_others(&directory, &name, max_bytes - len.max(max_bytes / 2.0)).await?;
    let max_bytes = (max_bytes - kept).max(slot_bytes) as u64;
    PageStore::new(file, page_bytes, max_bytes).map_err(|_| JsValue::UNDEFINED)
}

/// The directory of all models.
async fn directory(navigator: &JsValue) -> Result<FileSystemDirectoryHandle, JsValue> {
    let storage: StorageManager = property(navigator, "storage").ok_or(JsValue::UNDEFINED)?;
    property::<Function>(&storage, "getDirectory").ok_or(JsValue::UNDEFINED)?;
    let root: FileSystemDirectoryHandle = JsFuture::from(storage.get_directory()).await?.unchecked_into();
    let create = FileSystemGetDirectoryOptions::new();
    create.set_create(true);
    let directory = JsFuture::from(root.get_directory_handle_with_options(DIRECTORY, &create)).await?;
    Ok(directory.unchecked_into())
}

/// Opens a file, or makes it. Only workers have such files: reading blocks.
async fn open_file(directory: &FileSystemDirectoryHandle, name: &str, lock: Option<Lock>) -> Result<OpfsFile, JsValue> {
    let create = FileSystemGetFileOptions::new();
    create.set_create(true);
    let file = JsFuture::from(directory.get_file_handle_with_options(name, &create)).await?;
    property::<Function>(&file, "createSyncAccessHandle").ok_or(JsValue::UNDEFINED)?;
    let file: FileSystemFileHandle = file.unchecked_into();
    let handle = JsFuture::from(file.create_sync_access_handle()).await?.unchecked_into();
    Ok(OpfsFile { handle, _lock: lock })
}

/// A file of another model.
struct OtherFile {
    name: String,
    size: f64,
    modified: f64,
}

/// Keeps `room` bytes of the files of other models, those used last, and what another tab has open; returns their bytes.
async fn evict_others(directory: &FileSystemDirectoryHandle, own: &str, mut room: f64) -> Result<f64, JsValue> {
    let mut others = Vec::new();
    for handle in handles(directory).await? {
        let name = handle.name();
        if name == own {
            continue;
        }
        match file_of(&handle).await {
            Some(file) if is_page_file(&name) => {
                others.push(OtherFile { name, size: file.size(), modified: file.last_modified() });
            }
            // what is none of ours
            _ => {
                remove(directory, &name).await;
            }
        }
    }
    others.sort_by(|a, b| b.modified.total_cmp(&a.modified));
    let mut kept = 0.0;
    for OtherFile { name, size, .. } in others {
        if size > room && remove(directory, &name).await {
            continue;
        }
        room -= size;
        kept += size;
    }
    Ok(kept)
}

/// Whether a name is that of a model's file.
fn is_page_file(name: &str) -> bool {
    let is_hex = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
    name.strip_suffix(".pages").is_some_and(|digest| digest.len() == 64 && digest.bytes().all(is_hex))
}

/// The entries of a directory.
async fn handles(directory: &FileSystemDirectoryHandle) -> Result<Vec<FileSystemHandle>, JsValue> {
    let (values, mut handles) = (directory.values(), Vec::new());
    loop {
        let next: IteratorNext = JsFuture::from(values.next()?).await?.unchecked_into();
        if next.done() {
            return Ok(handles);
        }
        handles.push(next.value().unchecked_into());
    }
}

/// The file of an entry; `None` for a directory, or one that is gone.
async fn file_of(handle: &FileSystemHandle) -> Option<File> {
    property::<Function>(handle, "getFile")?;
    let file = JsFuture::from(handle.unchecked_ref::<FileSystemFileHandle>().get_file()).await;
    file.ok().map(|file| file.unchecked_into())
}

/// Removes an entry; returns whether it is gone: another tab may have it open.
async fn remove(directory: &FileSystemDirectoryHandle, name: &str) -> bool {
    let recursive = FileSystemRemoveOptions::new();
    recursive.set_recursive(true);
    JsFuture::from(directory.remove_entry_with_options(name, &recursive)).await.is_ok()
}

#[cfg(test)]
mod tests {
    use super::is_page_file;

    #[test]
    fn names_of_page_files() {
        let digest = "0123456789abcdef".repeat(4);
        assert!(is_page_file(&format!("{digest}.pages")));
        for name in [digest.clone(), format!("{}.pages", &digest[1..]), format!("{}.pages", digest.to_uppercase())] {
            assert!(!is_page_file(&name), "{name}");
        }
    }
}
