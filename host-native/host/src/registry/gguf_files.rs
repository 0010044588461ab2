//! Chooses a model among the GGUF files of a directory.

use std::fs;
use std::path::{Path, PathBuf};

use starling::gguf::ShardName;

use super::SourceError;
use super::source::Selection;
use crate::load;

/// Directories are searched to this depth: repositories put the files of a split model into a directory per type.
const MAX_DEPTH: usize = 3;
/// Entries read of a directory and those below it.
const MAX_ENTRIES: usize = 10_000;
/// Type taken from several if the source names none, as llama.cpp does.
const DEFAULT_QUANT: &str = "Q4_K_M";

/// The selected model in `directory`: its file, or the first file of a split model.
///
/// # Errors
/// If no model or several fit, or a file of the split model is missing.
pub fn find(directory: &Path, selection: &Selection) -> Result<PathBuf, SourceError> {
    let chosen = choose(directory, list(directory)?, selection)?;
    match load::paths(&chosen).into_iter().find(|path| !path.is_file()) {
        Some(path) => Err(SourceError::MissingShard { path }),
        None => Ok(chosen),
    }
}

/// The selected model among the files of `directory`, or of a repository.
///
/// # Errors
/// If no model or several fit.
pub fn choose(directory: &Path, files: Vec<PathBuf>, selection: &Selection) -> Result<PathBuf, SourceError> {
    let named = |file: &String| files.iter().find(|path| **path == directory.join(file) || **path == Path::new(file));
    let models = models(files.clone());
    Ok(match selection {
        Selection::File(file) => named(file).cloned().ok_or_else(|| no_match(directory, file, &models))?,
        Selection::Quant(quant) => match &matching(&models, quant)[..] {
            [] => return Err(no_match(directory, quant, &models)),
            [model] => (*model).clone(),
            several => return Err(ambiguous(directory, several)),
        },
        Selection::Default => match (&models[..], &matching(&models, DEFAULT_QUANT)[..]) {
            ([], _) => return Err(SourceError::NoModel { directory: directory.into() }),
            ([model], _) => model.clone(),
            (_, [model]) => (*model).clone(),
            _ => return Err(ambiguous(directory, &models.iter().collect::<Vec<_>>())),
        },
    })
}

/// The models among files, sorted: of a split model the file with the lowest number there is.
fn models(mut files: Vec<PathBuf>) -> Vec<PathBuf> {
    files.retain(|path| is_model(path));
    files.sort();
    files.dedup_by(|next, first| stem(next) == stem(first) && next.parent() == first.parent());
    files
}

/// Files of a directory.
fn list(directory: &Path) -> Result<Vec<PathBuf>, SourceError> {
    let mut files = Vec::new();
    let (mut pending, mut n_entries) = (vec![(directory.to_path_buf(), 1)], 0);
    while let Some((path, depth)) = pending.pop() {
        let failed = |source| SourceError::Io { path: path.clone(), source };
        for entry in fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?.path();
            n_entries += 1;
            if n_entries > MAX_ENTRIES {
                return Err(SourceError::TooLarge { directory: directory.into(), limit: MAX_ENTRIES });
            }
            if entry.is_dir() {
                if depth < MAX_DEPTH {
                    pending.push((entry, depth + 1));
                }
            } else {
                files.push(entry);
            }
        }
    }
    Ok(files)
}

/// Whether a file is named like a model; `mmproj` files are vision projectors.
fn is_model(path: &Path) -> bool {
    let name = file_name(path);
    name.ends_with(".gguf") && !name.starts_with("mmproj")
}

/// Models whose name ends in `quant`; if there are none, those that have it as a word.
fn matching<'a>(models: &'a [PathBuf], quant: &str) -> Vec<&'a PathBuf> {
    let quant = quant.to_ascii_lowercase();
    let separator = |c: char| matches!(c, '-' | '.');
    let filter = |fits: &dyn Fn(&str) -> bool| {
        models.iter().filter(|path| fits(&stem(path).to_ascii_lowercase())).collect::<Vec<_>>()
    };
    let exact =
        filter(&|stem| stem.strip_suffix(&quant).is_some_and(|rest| rest.is_empty() || rest.ends_with(separator)));
    if exact.is_empty() { filter(&|stem| stem.split(separator).any(|word| word == quant)) } else { exact }
}

/// File name without `.gguf` and the numbers of a split model.
fn stem(path: &Path) -> &str {
    let name = file_name(path);
    ShardName::parse(name).map_or_else(|| name.strip_suffix(".gguf").unwrap_or(name), |shard| shard.stem)
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

fn no_match(directory: &Path, wanted: &str, models: &[PathBuf]) -> SourceError {
    let found = names(directory, models.iter());
    SourceError::NoMatch { directory: directory.into(), wanted: wanted.into(), found }
}

fn ambiguous(directory: &Path, models: &[&PathBuf]) -> SourceError {
    SourceError::Ambiguous { directory: directory.into(), found: names(directory, models.iter().copied()) }
}

/// Paths relative to the directory.
fn names<'a>(directory: &Path, models: impl Iterator<Item = &'a PathBuf>) -> Vec<String> {
    models.map(|path| path.strip_prefix(directory).unwrap_or(path).display().to_string()).collect()
}
