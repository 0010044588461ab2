//! Models of the store, for the commands that show and verify them.

use std::io::{Write, stdout};
use std::time::UNIX_EPOCH;

use serde_json::{Value, json};
use starling::gguf::Gguf;
use starling_host::error::Failure;
use starling_host::model_file::ModelFile;
use starling_host::registry::download::digest_of;
use starling_host::registry::store::{Manifest, Store};
use starling_host::registry::{Registry, SourceError};

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
pub fn architecture(store: &Store, model: &Manifest) -> Option<String> {
    let file = ModelFile::open(&store.directory(&model.name).join(model.files.first()?.name.as_str())).ok()?;
    let header = Gguf::parse(&file).ok()?;
    header.str("general.architecture").ok().flatten().map(str::to_string)
}

pub fn find(store: &Store, name: &str) -> Result<Manifest, SourceError> {
    store.find(name).ok_or_else(|| SourceError::Unknown { name: name.into(), near_name: None })
}

pub fn info(store: &Store, model: &Manifest) -> Value {
    let used = store.last_used(&model.name).duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let mut value = json!(model);
    value["size"] = json!(model.size());
    value["last_used"] = json!(used);
    value
}
