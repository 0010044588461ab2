//! `starling tokenize` and `starling detokenize`. A file without weights is enough.

use std::io::{Read, Write, stdin, stdout};
use std::path::Path;

use serde_json::json;
use starling::tokenizer::{DecodeOptions, EncodeOptions, Tokenizer};
use starling_host::error::Failure;
use starling_host::load;
use starling_host::load::ModelOptions;
use starling_host::text_file::{text_file, utf8};

use crate::cli::{DetokenizeArgs, TokenizeArgs};

fn tokenizer(args: &ModelOptions) -> Result<Tokenizer, Failure> {
    let wrong = |source| Failure::Model { path: load::path(args), source };
    let files = load::files(args)?;
    let headers = load::headers(&files[..files.len().min(1)])?;
    let first = headers.first().ok_or_else(|| Failure::Usage("expected a model file".into()))?;
    Tokenizer::from_gguf(first).map_err(wrong)
}

/// The text of an argument, a file or standard input, which must be UTF-8. The final newline of standard input, which the
/// shell's tools add, is not part of the text.
pub fn text(argument: Option<&str>, file: Option<&Path>) -> Result<String, Failure> {
    match (argument, file) {
        (Some(text), _) if text != "-" => Ok(text.into()),
        (_, Some(path)) => text_file(path),
        _ => {
            let mut bytes = Vec::new();
            stdin().lock().read_to_end(&mut bytes)?;
            utf8("standard input", bytes).map(without_final_newline)
        }
    }
}

/// The text without one newline at its end.
pub fn without_final_newline(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}

/// Parses a token id, with white space around it.
///
/// # Errors
/// The text, if it is not a token id.
pub fn token_id(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| format!("`{text}` is not a token id"))
}

/// # Errors
/// If the tokenizer is not supported, or the text cannot be read.
pub fn tokenize(model_args: &ModelOptions, args: &TokenizeArgs) -> Result<(), Failure> {
    let tokenizer = tokenizer(model_args)?;
    let text = text(args.text.text.as_deref(), args.file.as_deref())?;
    let options = EncodeOptions { add_special: !args.no_bos, parse_special: args.special };
    let mut out = stdout().lock();
    if args.batch {
        let texts: Vec<String> = serde_json::from_str(&text)
            .map_err(|e| Failure::Usage(format!("--batch takes a JSON array of strings: {e}")))?;
        let ids: Vec<Vec<u32>> = texts.iter().map(|t| tokenizer.encode(t, options)).collect();
        serde_json::to_writer(&mut out, &ids).map_err(std::io::Error::from)?;
        writeln!(out)?;
        return Ok(());
    }
    if !args.json {
        let ids: Vec<String> = tokenizer.encode(&text, options).iter().map(u32::to_string).collect();
        writeln!(out, "{}", ids.join(" "))?;
        return Ok(());
    }
    let (ids, ranges) = tokenizer.encode_with_offsets(&text, options);
    let pieces: Vec<_> =
        ids.iter().map(|&id| String::from_utf8_lossy(tokenizer.piece(id).unwrap_or_default()).into_owned()).collect();
    let offsets: Vec<_> = ranges.iter().map(|r| [r.start, r.end]).collect();
    writeln!(out, "{}", json!({ "ids": ids, "pieces": pieces, "offsets": offsets }))?;
    Ok(())
}

/// # Errors
/// If the tokenizer is not supported, or an id is out of range.
pub fn detokenize(model_args: &ModelOptions, args: &DetokenizeArgs) -> Result<(), Failure> {
    let tokenizer = tokenizer(model_args)?;
    let ids = if args.ids.is_empty() {
        let text = text(None, args.file.as_deref())?;
        let words = text.split(|c: char| c.is_whitespace() || "[],".contains(c)).filter(|w| !w.is_empty());
        words.map(|w| token_id(w).map_err(Failure::Usage)).collect::<Result<_, _>>()?
    } else {
        args.ids.clone()
    };
    if let Some(id) = ids.iter().find(|&&id| id as usize >= tokenizer.n_vocab()) {
        return Err(Failure::Usage(format!(
            "token {id} is out of range: the vocabulary has {} tokens",
            tokenizer.n_vocab()
        )));
    }
    let bytes = tokenizer.decode(&ids, DecodeOptions { skip_special: args.skip_special });
    let mut out = stdout().lock();
    out.write_all(&bytes)?;
    out.flush()?;
    Ok(())
}
