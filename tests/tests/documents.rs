//! Every path, link, type and item that a document names exists in the tree.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders of the tree that hold no sources of the project.
const SKIPPED: [&str; 5] = ["target", "node_modules", ".git", "web/wasm", "web/dist"];
/// Endings of files that documents name.
const ENDINGS: [&str; 12] = ["rs", "ts", "tsx", "md", "py", "mjs", "toml", "yaml", "json", "sh", "html", "wit"];
/// Names that stand for a file of the reader, or for a setting of another program.
const EXAMPLES: [&str; 7] =
    ["NAME.json", "MODEL.json", "index.json", "vite.config.js", "MemoryHigh", "MemoryMax", "MemoryDenyWriteExecute"];

struct Tree {
    root: PathBuf,
    /// Files and folders, relative to the root.
    paths: Vec<String>,
    /// Identifiers in the sources.
    words: HashSet<String>,
}

impl Tree {
    fn read() -> Tree {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the root");
        let mut tree = Tree { root, paths: Vec::new(), words: HashSet::new() };
        let mut folders = vec![PathBuf::new()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(tree.root.join(&folder)).expect("a folder") {
                let entry = entry.expect("an entry");
                let name = entry.file_name().into_string().expect("UTF-8");
                let path = folder.join(&name);
                if SKIPPED.iter().any(|skipped| path.ends_with(skipped)) {
                    continue;
                }
                if entry.file_type().expect("a type").is_dir() {
                    folders.push(path.clone());
                } else if ENDINGS.iter().any(|ending| name.ends_with(&format!(".{ending}"))) && !name.ends_with(".md") {
                    let text = String::from_utf8(fs::read(entry.path()).expect("a file")).unwrap_or_default();
                    tree.words.extend(words(&text).map(String::from));
                }
                tree.paths.push(path.to_str().expect("UTF-8").into());
            }
        }
        tree
    }

    fn has(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        self.root.join(path).exists()
            || self.paths.iter().any(|p| p.ends_with(path) && p[..p.len() - path.len()].ends_with('/'))
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// The text without fenced blocks.
fn prose(text: &str) -> String {
    let mut is_fenced = false;
    let keep = |line: &&str| {
        let is_fence = line.trim_start().starts_with("```");
        is_fenced ^= is_fence;
        !is_fenced && !is_fence
    };
    text.lines().filter(keep).collect::<Vec<_>>().join("\n")
}

/// Whether a code span is a path: of a file, or of a folder with `/` at its end.
fn is_path(span: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let is_file = span.rsplit_once('.').is_some_and(|(stem, ending)| !stem.is_empty() && ENDINGS.contains(&ending));
    span.chars().all(plain) && !span.starts_with('/') && !span.starts_with("path/") && (is_file || span.ends_with('/'))
}

/// Whether a word is the name of a type: at least two capital letters that begin parts of it.
fn is_type(word: &str) -> bool {
    let is_mixed = word.starts_with(|c: char| c.is_ascii_uppercase())
        && word.chars().zip(word.chars().skip(1)).any(|(a, b)| a.is_ascii_lowercase() && b.is_ascii_uppercase());
    is_mixed && word.chars().all(|c| c.is_ascii_alphanumeric())
}

/// What is wrong in a document.
fn missing(tree: &Tree, document: &str, text: &str) -> Vec<String> {
    let folder = Path::new(document).parent().unwrap_or(Path::new(""));
    let mut missing = Vec::new();
    for (i, link) in text.match_indices("](") {
        let target = text[i + link.len()..].split([')', '#']).next().unwrap_or_default();
        let is_local = !target.is_empty() && !target.contains(':');
        if is_local && !tree.root.join(folder).join(target).exists() {
            missing.push(format!("{document}: link to {target}"));
        }
    }
    for span in text.split('`').skip(1).step_by(2).filter(|span| !span.contains('\n')) {
        let is_known = |word: &str| tree.words.contains(word) || EXAMPLES.contains(&word);
        if is_path(span) {
            let beside = folder.join(span);
            if !EXAMPLES.contains(&span) && !tree.has(span) && !tree.root.join(beside).exists() {
                missing.push(format!("{document}: path `{span}`"));
            }
            continue;
        }
        let is_item = span.contains("::") && words(span).count() > 1 && !span.contains(' ');
        for word in words(span).filter(|word| (is_item || is_type(word)) && !is_known(word)) {
            missing.push(format!("{document}: `{word}` in `{span}`"));
        }
    }
    missing
}

#[test]
fn what_documents_name_exists() {
    let tree = Tree::read();
    let documents = tree.paths.iter().filter(|path| path.ends_with(".md") && !path.ends_with("CHANGELOG.md"));
    let missing: Vec<String> = documents
        .flat_map(|path| {
            let text = fs::read_to_string(tree.root.join(path)).expect("a document");
            missing(&tree, path, &prose(&text))
        })
        .collect();
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn a_name_that_is_gone_is_found() {
    let tree = Tree::read();
    let text = "`engine/src/gone.rs`, `lib.rs`, `GoneType::new`, `Vec`, [a](gone.md), [b](README.md), `gone/`, `core::gone_item`";
    let gone = ["link to gone.md", "path `engine/src/gone.rs`", "`GoneType`", "path `gone/`", "`gone_item`"];
    // this file names them, so that its own words do not count
    let words = tree.words.iter().filter(|word| !word.to_lowercase().contains("gone")).cloned().collect();
    let found = missing(&Tree { words, ..tree }, "ARCHITECTURE.md", text);
    assert_eq!(found.len(), gone.len(), "{found:?}");
    assert!(gone.iter().all(|gone| found.iter().any(|found| found.contains(gone))), "{found:?}");
}
