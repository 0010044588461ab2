//! `starling list`: the models of the store.

use std::io::{Write, stdout};

use indicatif::HumanBytes;
use serde_json::{Value, json};
use starling_host::error::Failure;
use starling_host::progress::remark;
use starling_host::registry::Registry;
use starling_host::registry::store::Manifest;

use crate::cli::ListArgs;
use crate::stored::{architecture, info};

/// # Errors
/// If standard output is closed.
pub fn run(args: &ListArgs) -> Result<(), Failure> {
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
