//! The model as an argument: `starling run MODEL PROMPT` beside `starling run -m MODEL PROMPT`.

use std::mem;
use std::path::{Path, PathBuf};

use starling_host::error::Failure;
use starling_host::registry::Registry;

use crate::cli::{Cli, Command, ModelAndText, ModelArgs};

/// Moves a model that was given as an argument to the place of `--model`, whose value may come from the environment.
/// `is_named` says whether `--model` is on the command line.
///
/// # Errors
/// If there are two models or two prompts.
pub fn arrange(cli: &mut Cli, is_named: bool) -> Result<(), Failure> {
    let model = &mut cli.model;
    match &mut cli.command {
        Command::Run(args) => {
            let has_text = args.prompt.is_some() || args.file.is_some();
            split(model, is_named, &mut args.text, has_text)?;
            if has_text && args.text.text.is_some() {
                return Err(Failure::Usage("found two prompts, expected one: an argument, --prompt or --file".into()));
            }
            if let Some(prompt) = args.prompt.take() {
                args.text.text = Some(prompt);
            }
            Ok(())
        }
        Command::Tokenize(args) => {
            split(model, is_named, &mut args.text, args.file.is_some())?;
            one_text(args.text.text.is_some(), args.file.is_some(), "--file")
        }
        Command::Logits(args) => {
            split(model, is_named, &mut args.text, args.ids.is_some())?;
            one_text(args.text.text.is_some(), args.ids.is_some(), "--ids")
        }
        Command::Chat(args) => one(model, is_named, args.model.source.take()),
        Command::Inspect(args) => one(model, is_named, args.model.source.take()),
        Command::Bench(args) => one(model, is_named, args.model.source.take()),
        Command::Embed(args) if !is_named => {
            if args.texts.first().is_some_and(|text| looks_like_model(text)) {
                model.sources = vec![args.texts.remove(0).into()];
            }
            Ok(())
        }
        Command::Serve(args) => {
            let given = mem::take(&mut args.models);
            if !is_named && !given.is_empty() {
                model.sources = given;
            } else {
                model.sources.extend(given);
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn one(model: &mut ModelArgs, is_named: bool, given: Option<PathBuf>) -> Result<(), Failure> {
    let Some(given) = given else { return Ok(()) };
    if is_named {
        let message = format!("found two models, {} and that of --model, expected one", given.display());
        return Err(Failure::Usage(message));
    }
    model.sources = vec![given];
    Ok(())
}

fn one_text(has_argument: bool, has_option: bool, option: &str) -> Result<(), Failure> {
    if has_argument && has_option {
        return Err(Failure::Usage(format!("found two texts, expected one: an argument or {option}")));
    }
    Ok(())
}

/// Takes the model out of one or two arguments. The first of two is a model. A single one is a model if it looks like one,
/// or if the text comes from elsewhere.
fn split(model: &mut ModelArgs, is_named: bool, args: &mut ModelAndText, has_text: bool) -> Result<(), Failure> {
    match (args.first.take(), args.text.take()) {
        (None, text) => args.text = text,
        (Some(_), Some(_)) if is_named => {
            return Err(Failure::Usage("found two texts beside --model, expected one: put the text in quotes".into()));
        }
        (Some(first), Some(text)) => {
            model.sources = vec![first.into()];
            args.text = Some(text);
        }
        (Some(first), None) if !is_named && (has_text || looks_like_model(&first)) => {
            model.sources = vec![first.into()];
        }
        (first, None) => args.text = first,
    }
    Ok(())
}

/// Whether a single argument is the source of a model rather than a text.
fn looks_like_model(text: &str) -> bool {
    let path = Path::new(text);
    if text == "-" || text.is_empty() {
        return false;
    }
    path.is_file()
        || has_model(path)
        || is_source(text)
        || Registry::from_env().is_ok_and(|registry| registry.is_stored(text))
}

/// Whether a directory contains a model file: others may have the name of a word.
fn has_model(directory: &Path) -> bool {
    let files = directory.read_dir().into_iter().flatten().flatten();
    files.map(|file| file.path()).any(|path| path.extension().is_some_and(|extension| extension == "gguf"))
}

/// Whether a text has the form of a source: `NAME.gguf`, a path, `hf:…`, a URL, or `name:tag`; no source has white space.
fn is_source(text: &str) -> bool {
    if text.contains(char::is_whitespace) {
        return false;
    }
    let is_tagged = |(name, tag): (&str, &str)| {
        let is_word = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        !name.is_empty() && !tag.is_empty() && name.chars().chain(tag.chars()).all(is_word)
    };
    text.to_ascii_lowercase().ends_with(".gguf")
        || text.contains(['/', std::path::MAIN_SEPARATOR])
        || text.starts_with("hf:")
        || text.split_once(':').is_some_and(is_tagged)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_told_from_prompts() {
        for text in ["qwen.gguf", "Q.GGUF", "dir/q", "hf:o/r:Q4_0", "https://h/x", "qwen2.5:0.5b", "./x"] {
            assert!(is_source(text), "{text}");
        }
        for text in ["Hello", "What is a .gguf file?", "either/or is hard", "Note: x", "Why:", ":-)", "x"] {
            assert!(!is_source(text), "{text}");
        }
    }
}
