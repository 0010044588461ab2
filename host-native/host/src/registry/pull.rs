//! Downloads of models into the store.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use reqwest::StatusCode;
use reqwest::header::ETAG;
use serde_json::Value;
use sha2::{Digest, Sha256};
use starling::gguf::ShardName;

use super::download::{Downloader, Remote, hex, index_path, total_size};
use super::gguf_files::choose;
use super::http::{Http, Options};
use super::names::{Commit, FileName, RepoPath, Sha256Hex, is_name};
use super::source::{HubSource, RemoteSource};
use super::store::{Manifest, Store, StoredFile};
use super::{DownloadError, SourceError};
use crate::progress::{Of, Progress};

/// Files of a repository, at most.
const MAX_FILES: usize = 10_000;
pub const DEFAULT_CONNECTIONS: usize = 4;

/// How to pull a model.
#[derive(Debug, Clone, Default)]
pub struct PullOptions {
    /// Name in the store [default: after the file].
    pub name: Option<String>,
    /// Expected digest, of a model in one file.
    pub sha256: Option<Sha256Hex>,
    /// Connections for one file.
    pub connections: Option<usize>,
    /// Download again what is there.
    pub force: bool,
}

/// What there is to download.
struct Offer {
    files: Vec<(FileName, Remote)>,
    revision: Option<String>,
}

/// Called with the number of bytes that have arrived since the last call, and of the whole download; 0 if that is not known.
pub type Watch<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Downloads models.
pub struct Puller<'a> {
    pub store: &'a Store,
    /// Address of the hub.
    pub endpoint: &'a str,
    pub token: Option<&'a str>,
    pub watch: Watch<'a>,
}

impl Puller<'_> {
    /// Downloads a model unless the store has it in this revision. Returns it, and whether it was downloaded.
    ///
    /// # Errors
    /// If the source has no such model, or the download fails.
    pub fn pull(&self, source: &RemoteSource, options: &PullOptions) -> Result<(Manifest, bool), SourceError> {
        self.store.create()?;
        self.store.sweep();
        let (http, text) = (Http::new().map_err(DownloadError::from)?, source.to_string());
        let known = self.store.find(options.name.as_deref().unwrap_or(&text)).filter(|known| known.source == text);
        let old = known.as_ref().filter(|_| !options.force);
        let Some(offer) = self.offer(&http, source, old, options)? else {
            return old.cloned().map(|old| (old, false)).ok_or(SourceError::Nothing { source_text: text });
        };
        if let Some(old) = old.filter(|old| offer.revision.is_some() && old.revision == offer.revision) {
            return Ok((old.clone(), false));
        }
        let name = self.name(&offer, &text, options)?;
        // processes that want the same model wait for the first, and then have it
        let _lock = self.store.lock_download(&key(&text))?;
        if let Some(done) = self.store.find(&name).filter(|done| {
            done.source == text && done.revision.is_some() && done.revision == offer.revision && !options.force
        }) {
            return Ok((done, false));
        }
        let needed = AtomicU64::new(offer.files.iter().filter_map(|(_, remote)| remote.size).sum());
        let size = needed.load(Ordering::Relaxed);
        self.store.make_room(size)?;
        let is_known = offer.files.iter().all(|(_, remote)| remote.size.is_some());
        let size = if is_known { size } else { 0 };
        let progress = Progress::new("downloading", Of::Bytes, size);
        let downloader = Downloader {
            http: &http,
            token: self.token.filter(|_| matches!(source, RemoteSource::Hub(_))),
            connections: options.connections.unwrap_or(DEFAULT_CONNECTIONS),
            progress: &|n| {
                progress.inc(n, "");
                (self.watch)(n, size);
            },
            // a hub or server that declares too little gets no more room than there is
            more: &|n| self.store.make_room(needed.fetch_add(n, Ordering::Relaxed).saturating_add(n)),
        };
        let mut files = Vec::new();
        for (file, remote) in &offer.files {
            files.push(self.file(&downloader, file, remote)?);
        }
        progress.finish();
        let created = crate::clock::unix_now();
        let manifest = Manifest { name, source: text, revision: offer.revision, created, files };
        self.store.add(&manifest)?;
        Ok((manifest, true))
    }

    /// Downloads one file unless its content is there.
    fn file(&self, downloader: &Downloader<'_>, name: &FileName, remote: &Remote) -> Result<StoredFile, SourceError> {
        let name = name.clone();
        let known = remote.sha256.clone().map(|sha256| (self.store.blob(&sha256), sha256));
        if let Some((blob, sha256)) = known.filter(|(blob, _)| blob.is_file()) {
            let size = std::fs::metadata(&blob).map_err(|source| SourceError::Io { path: blob, source })?.len();
            (downloader.progress)(size);
            return Ok(StoredFile { name, sha256, size });
        }
        let sha256 = remote.sha256.as_ref().map(Sha256Hex::as_str);
        let partial = self.store.blobs().join(format!("{}.partial", key(&format!("{} {sha256:?}", remote.url))));
        let sha256 = downloader.download(remote, &partial)?;
        let blob = self.store.blob(&sha256);
        let io = |source| SourceError::Io { path: blob.clone(), source };
        let size = std::fs::metadata(&partial).map_err(io)?.len();
        std::fs::rename(&partial, &blob).map_err(io)?;
        let _ = std::fs::remove_file(index_path(&partial));
        Ok(StoredFile { name, sha256, size })
    }

    /// What the source has now; `None` if it has not changed since `old`.
    fn offer(
        &self,
        http: &Http,
        source: &RemoteSource,
        old: Option<&Manifest>,
        options: &PullOptions,
    ) -> Result<Option<Offer>, SourceError> {
        match source {
            RemoteSource::Hub(hub) => self.hub_offer(http, hub, options).map(Some),
            RemoteSource::Url(url) => url_offer(http, url, old, options),
        }
    }

    /// The files of a model in a repository. Source: <https://huggingface.co/docs/hub/api>.
    fn hub_offer(&self, http: &Http, hub: &HubSource, options: &PullOptions) -> Result<Offer, SourceError> {
        let (repo, endpoint) = (hub.repo_id(), self.endpoint.trim_end_matches('/'));
        let url = format!("{endpoint}/api/models/{repo}/revision/{}?blobs=true", hub.revision);
        let answer = http.json(&url, self.token).map_err(DownloadError::from)?;
        let foreign = |why| SourceError::Hub { url: url.clone(), why };
        let commit = answer["sha"].as_str().map(Commit::parse).transpose().map_err(foreign)?;
        let commit = commit.map_or_else(|| hub.revision.clone(), String::from);
        let siblings = answer["siblings"].as_array().map_or(&[][..], Vec::as_slice);
        // files with other names are none of a model
        let path = |file: &Value| RepoPath::parse(file["rfilename"].as_str()?).ok();
        let files: Vec<(RepoPath, &Value)> =
            siblings.iter().take(MAX_FILES).filter_map(|file| Some((path(file)?, file))).collect();
        let paths = files.iter().map(|(path, _)| PathBuf::from(path.as_str())).collect();
        let place = PathBuf::from(format!("hf:{repo}"));
        let chosen = choose(&place, paths, &hub.selection)?;
        let chosen: Vec<String> = shards(&chosen.to_string_lossy());
        let remote = |path: &String| {
            let file = files
                .iter()
                .find(|(known, _)| known.as_str() == path)
                .ok_or_else(|| SourceError::MissingShard { path: path.into() })?;
            let lfs = &file.1["lfs"];
            let size = file.1["size"].as_u64().or_else(|| lfs["size"].as_u64());
            let digest = lfs["sha256"].as_str().map(Sha256Hex::parse).transpose().map_err(foreign)?;
            let sha256 = options.sha256.clone().or(digest);
            let url = format!("{endpoint}/{repo}/resolve/{commit}/{path}");
            Ok((file.0.file_name().map_err(foreign)?, Remote { url, size, sha256 }))
        };
        let files = chosen.iter().map(remote).collect::<Result<Vec<_>, SourceError>>()?;
        Ok(Offer { files, revision: Some(commit) })
    }

    /// Name of a new model in the store.
    fn name(&self, offer: &Offer, source: &str, options: &PullOptions) -> Result<String, SourceError> {
        let file = offer.files.first().map(|(name, _)| name.as_str()).unwrap_or_default();
        let stem = ShardName::parse(file).map_or(file, |shard| shard.stem);
        let name = options.name.clone().unwrap_or_else(|| stem.strip_suffix(".gguf").unwrap_or(stem).into());
        if !is_name(&name) {
            return Err(SourceError::Name { name });
        }
        match self.store.find(&name) {
            Some(other) if other.source != source => Err(SourceError::NameTaken { name, source_text: other.source }),
            _ => Ok(name),
        }
    }
}

/// The file of a URL, or all files of the split model that it belongs to.
fn url_offer(
    http: &Http,
    url: &str,
    old: Option<&Manifest>,
    options: &PullOptions,
) -> Result<Option<Offer>, SourceError> {
    let url = url.split('#').next().unwrap_or(url);
    let (path, query) = url.find('?').map_or((url, ""), |at| url.split_at(at));
    let (base, file) = path.rsplit_once('/').unwrap_or(("", path));
    let names = shards(file);
    // each file with the query, which may be what grants access to it
    let address = |name: &str| format!("{base}/{name}{query}");
    let etag = old.and_then(|old| old.revision.as_deref());
    // the first byte only: size, ETag, and whether there is anything new
    let first = address(names.first().map_or(file, String::as_str));
    let request = Options { range: etag.is_none().then_some((0, 1)), etag, ..Options::default() };
    let response = http.get(&first, request).map_err(DownloadError::from)?;
    if response.status() == StatusCode::NOT_MODIFIED {
        return Ok(None);
    }
    let revision = response.headers().get(ETAG).and_then(|etag| etag.to_str().ok()).map(str::to_string);
    let first_size = total_size(&response);
    let remote = |(i, name): (usize, &String)| {
        let size = first_size.filter(|_| i == 0);
        let foreign = |why| SourceError::Hub { url: url.into(), why };
        let remote = Remote { url: address(name), size, sha256: options.sha256.clone() };
        Ok((FileName::parse(name).map_err(foreign)?, remote))
    };
    let files = names.iter().enumerate().map(remote).collect::<Result<Vec<_>, SourceError>>()?;
    Ok(Some(Offer { files, revision }))
}

/// Paths of all files of the split model that a file belongs to.
fn shards(path: &str) -> Vec<String> {
    let (directory, file) = path.rsplit_once('/').map_or(("", path), |(directory, file)| (directory, file));
    let join = |name: String| if directory.is_empty() { name } else { format!("{directory}/{name}") };
    match ShardName::parse(file) {
        Some(shard) => (1..=shard.count).map(|i| join(shard.sibling(i))).collect(),
        None => vec![path.into()],
    }
}

/// Name of a download in progress.
fn key(text: &str) -> String {
    hex(&Sha256::digest(text)[..16])
}
