//! Speed of encoding: `tokenize_bench MODEL.gguf TEXT [IDS]`.
//!
//! Encodes the text several times on one thread, whole and in documents, and prints the best megabytes per second. With a third argument,
//! writes the ids there, one in a line. `tests/bench/tokenizer_vs_hf.py` compares both with Hugging Face tokenizers.
#![expect(clippy::std_instead_of_core, reason = "a program, not the engine")]

use std::error::Error;
use std::fmt::Write;
use std::time::{Duration, Instant};

use starling::gguf::Gguf;
use starling::tokenizer::{EncodeOptions, Tokenizer};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (Some(model), Some(text)) = (args.first(), args.get(1)) else {
        return Err("usage: tokenize_bench MODEL.gguf TEXT [IDS]".into());
    };
    let file = std::fs::read(model)?;
    let started = Instant::now();
    let tokenizer = Tokenizer::from_gguf(&Gguf::parse(&file)?)?;
    let load = started.elapsed();
    let text = std::fs::read_to_string(text)?;
    let options = EncodeOptions::default();
    let mut ids = Vec::new();
    let whole = best_of(|| ids = tokenizer.encode(&text, options));
    let documents = documents(&text);
    let parts = best_of(|| documents.iter().for_each(|document| drop(tokenizer.encode(document, options))));
    let mb_per_s = |time: Duration| text.len() as f64 / 1e6 / time.as_secs_f64();
    println!(
        "{:.2} MB/s whole; {:.2} MB/s in documents of {DOCUMENT} bytes; {} bytes, {} tokens, loaded in {load:.1?}",
        mb_per_s(whole),
        mb_per_s(parts),
        text.len(),
        ids.len()
    );
    if let Some(path) = args.get(2) {
        let mut lines = String::new();
        for id in ids {
            writeln!(lines, "{id}")?;
        }
        std::fs::write(path, lines)?;
    }
    Ok(())
}

/// Documents of the second measurement have at least this many bytes.
const DOCUMENT: usize = 4000;

/// Whole lines, of about [`DOCUMENT`] bytes together.
fn documents(text: &str) -> Vec<&str> {
    let (mut documents, mut start, mut end) = (Vec::new(), 0, 0);
    for line in text.split_inclusive('\n') {
        end += line.len();
        if end - start >= DOCUMENT {
            documents.push(&text[start..end]);
            start = end;
        }
    }
    documents.push(&text[start..]);
    documents
}

fn best_of(mut run: impl FnMut()) -> Duration {
    let time = |_| {
        let started = Instant::now();
        run();
        started.elapsed()
    };
    (0..7).map(time).min().unwrap_or(Duration::MAX)
}
