//! `starling show`: one model of the store.

use std::io::{Write, stdout};

use indicatif::HumanBytes;
use serde_json::json;
use starling::gguf::Gguf;
use starling_host::error::Failure;
use starling_host::model_file::ModelFile;
use starling_host::registry::Registry;

use crate::cli::ShowArgs;
use crate::stored::{find, info};

/// # Errors
/// If there is no such model, or its file is damaged.
pub fn run(args: &ShowArgs) -> Result<(), Failure> {
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
