//! `starling pull`, `list`, `show`, `rm`, and `verify` of stored models.

use std::io::{Write, stdout};
use std::time::UNIX_EPOCH;

use indicatif::HumanBytes;
use serde_json::{Value, json};
use starling::gguf::Gguf;
use starling_host::error::Failure;
use starling_host::model_file::ModelFile;
use starling_host::progress::remark;
use starling_host::registry::download::digest_of;
use starling_host::registry::names::Sha256Hex;
use starling_host::registry::pull::PullOptions;
use starling_host::registry::source::RemoteSource;
use starling_host::registry::store::{Manifest, Store};
use starling_host::registry::{Registry, SourceError};

use crate::cli::{ListArgs, PullArgs, RmArgs, ShowArgs};

/// # Errors
/// If there is no such model, or the download fails.
pub fn pull(args: &PullArgs) -> Result<(), Failure> {
    let mut registry = Registry::from_env()?;
    if args.offline {
        registry.set_offline();
    }
    let expected = || Failure::Usage(format!("{:?}: expected hf:OWNER/REPO or an https URL", args.source));
    let source = RemoteSource::parse(&args.source).ok_or_else(expected)??;
    let sha256 = args.sha256.as_deref().map(Sha256Hex::parse).transpose();
    let sha256 = sha256.map_err(|_| Failure::Usage("--sha256: expected 64 hexadecimal digits".into()))?;
    let options = PullOptions {
        name: args.name.clone(),
        sha256,
        connections: args.connections.map(usize::from),
        force: args.force,
    };
    let (model, is_new) = registry.pull(&source, &options, &|_, _| {})?;
    let what = if is_new { "downloaded" } else { "up to date" };
    remark(format_args!("{}: {what}, {}", model.name, HumanBytes(model.size())));
    Ok(writeln!(stdout(), "{}", model.name)?)
}

/// # Errors
/// If standard output is closed.
pub fn list(args: &ListArgs) -> Result<(), Failure> {
    let registry = Registry::from_env()?;
    let store = registry.store()?;
    let models = store.list();
    if args.json {
        let info = |model| {
            let mut info = info(store, model);
            info["architecture"] = json!(architecture(store, model));
            info
        };
        let all: Vec<Value> = models.iter().map(info).collect();
        return Ok(writeln!(stdout(), "{:#}", json!({ "models": all }))?);
    }
    if models.is_empty() {
        remark(format_args!("the store {} is empty; `starling pull hf:OWNER/REPO` adds to it", store.root().display()));
        return Ok(());
    }
    let width = |of: fn(&Manifest) -> usize, least: usize| models.iter().map(of).max().unwrap_or(0).max(least);
    let architectures: Vec<String> =
        models.iter().map(|model| architecture(store, model).unwrap_or_else(|| "?".into())).collect();
    let family = architectures.iter().map(String::len).max().unwrap_or(0).max(12);
    let (name, source) = (width(|m| m.name.len(), 4), width(|m| m.source.len(), 6));
    writeln!(stdout(), "{:name$}  {:family$}  {:>10}  {:source$}", "NAME", "ARCHITECTURE", "SIZE", "SOURCE")?;
    for (model, architecture) in models.iter().zip(&architectures) {
        let size = HumanBytes(model.size()).to_string();
        writeln!(stdout(), "{:name$}  {architecture:family$}  {size:>10}  {:source$}", model.name, model.source)?;
    }
    Ok(())
}

/// # Errors
/// If there is no such model, or its file is damaged.
pub fn show(args: &ShowArgs) -> Result<(), Failure> {
    let registry = Registry::from_env()?;
    let model = find(registry.store()?, &args.name)?;
    let mut all = info(registry.store()?, &model);
    let path = registry.open(&model)?.path;
    let wrong = |source| Failure::File { path: path.clone(), source };
    let file = ModelFile::open(&path).map_err(wrong)?;
    let header = Gguf::parse(&file).map_err(|source| Failure::Model { path: path.clone(), source })?;
    let text = |key: &str| header.str(key).ok().flatten().map(str::to_string);
    all["architecture"] = json!(text("general.architecture"));
    all["title"] = json!(text("general.name"));
    all["path"] = json!(path);
    if args.json {
        return Ok(writeln!(stdout(), "{all:#}")?);
    }
    for key in ["name", "source", "revision", "title", "architecture", "size", "path"] {
        if let Some(value) = all.get(key).filter(|value| !value.is_null()) {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_string);
            writeln!(stdout(), "{key:14}{value}")?;
        }
    }
    for file in &model.files {
        writeln!(stdout(), "{:14}{}  {}  {}", "file", file.name, HumanBytes(file.size), file.sha256)?;
    }
    Ok(())
}

/// # Errors
/// If there is no such model, or a process uses it.
pub fn rm(args: &RmArgs) -> Result<(), Failure> {
    let registry = Registry::from_env()?;
    let store = registry.store()?;
    for name in &args.names {
        let freed = store.remove(&find(store, name)?, args.force)?;
        remark(format_args!("{name}: removed, {} freed", HumanBytes(freed)));
    }
    Ok(())
}

/// Compares stored models with their digests: those of `names`, or all.
///
/// # Errors
/// If a file is missing or damaged.
pub fn verify(names: &[String]) -> Result<(), Failure> {
    let registry = Registry::from_env()?;
    let store = registry.store()?;
    let models = match names {
        [] => store.list(),
        names => names.iter().map(|name| find(store, name)).collect::<Result<_, _>>()?,
    };
    let mut n_damaged = 0;
    for (model, file) in models.iter().flat_map(|model| model.files.iter().map(move |file| (model, file))) {
        let path = store.directory(&model.name).join(file.name.as_str());
        let problem = match digest_of(&path) {
            Ok(digest) if digest == file.sha256 => None,
            Ok(digest) => Some(format!("found SHA-256 {digest}, expected {}", file.sha256)),
            Err(e) => Some(e.to_string()),
        };
        match problem {
            None => writeln!(stdout(), "{}: ok", path.display())?,
            Some(problem) => {
                n_damaged += 1;
                writeln!(stdout(), "{}: DAMAGED: {problem}; `starling pull --force {}`", path.display(), model.source)?;
            }
        }
    }
    if n_damaged > 0 { Err(Failure::Usage(format!("{n_damaged} files are damaged or missing"))) } else { Ok(()) }
}

/// Whether the store has a model of this name.
pub fn is_stored(name: &str) -> bool {
    let registry = Registry::from_env();
    registry.is_ok_and(|registry| registry.store().is_ok_and(|store| store.find(name).is_some()))
}

/// The architecture in the header of a model's first file; `None` if the file is damaged.
fn architecture(store: &Store, model: &Manifest) -> Option<String> {
    let file = ModelFile::open(&store.directory(&model.name).join(model.files.first()?.name.as_str())).ok()?;
    let header = Gguf::parse(&file).ok()?;
    header.str("general.architecture").ok().flatten().map(str::to_string)
}

fn find(store: &Store, name: &str) -> Result<Manifest, SourceError> {
    store.find(name).ok_or_else(|| SourceError::Unknown { name: name.into(), near_name: None })
}

fn info(store: &Store, model: &Manifest) -> Value {
    let used = store.last_used(&model.name).duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let mut value = json!(model);
    value["size"] = json!(model.size());
    value["last_used"] = json!(used);
    value
}
