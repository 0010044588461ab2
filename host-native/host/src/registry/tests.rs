use std::fs;
use std::path::{Path, PathBuf};

use super::hub_cache::HubCache;
use super::source::{HubSource, Selection};
use super::{Registry, SourceError};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A directory under the system's temporary directory, removed when dropped.
struct Directory(PathBuf);

impl Directory {
    fn new(test: &str, files: &[&str]) -> Directory {
        let root = std::env::temp_dir().join(format!("starling-models-{test}-{}", std::process::id()));
        for file in files {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        Directory(root)
    }

    /// A Hugging Face cache with a snapshot of `o/r` on its branch `main`.
    fn hub(test: &str, files: &[&str]) -> Directory {
        let snapshot = format!("models--o--r/snapshots/{COMMIT}");
        let files: Vec<String> = files.iter().map(|file| format!("{snapshot}/{file}")).collect();
        let directory = Directory::new(test, &files.iter().map(String::as_str).collect::<Vec<_>>());
        let refs = directory.0.join("models--o--r/refs");
        fs::create_dir_all(&refs).unwrap();
        fs::write(refs.join("main"), format!("{COMMIT}\n")).unwrap();
        directory
    }

    fn resolve(&self, source: &str) -> Result<String, SourceError> {
        let registry = Registry {
            hub_cache: Some(HubCache::at(self.0.clone())),
            store: None,
            endpoint: String::new(),
            token: None,
            offline: true,
        };
        let path = registry.resolve(Path::new(source))?.path;
        Ok(path.file_name().unwrap().to_str().unwrap().into())
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn sources_are_parsed() {
    let source = |selection, revision: &str| {
        Some(HubSource { owner: "o".into(), repo: "r".into(), selection, revision: revision.into() })
    };
    assert_eq!(HubSource::parse("hf:o/r"), source(Selection::Default, "main"));
    assert_eq!(HubSource::parse("hf:o/r:q8_0@v1"), source(Selection::Quant("q8_0".into()), "v1"));
    assert_eq!(HubSource::parse("hf:o/r/d/a.gguf@pr/1"), source(Selection::File("d/a.gguf".into()), "pr/1"));
    let malformed = [
        "hf:",
        "hf:o",
        "hf:o/",
        "hf:/r",
        "hf:o/r:",
        "hf:o/r@",
        "hf:o/r/a.bin",
        "hf:../r",
        "hf:o/r/../a.gguf",
        "hf:o/r@../x",
    ];
    for text in malformed {
        assert_eq!(HubSource::parse(text), None, "{text}");
    }
}

#[test]
fn quantisation_selects_the_file() {
    let hub = Directory::hub("quant", &["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-Q8_0-imat.gguf", "mmproj-Q8_0.gguf"]);
    assert_eq!(hub.resolve("hf:o/r").unwrap(), "m-Q4_K_M.gguf");
    assert_eq!(hub.resolve("hf:o/r:q8_0").unwrap(), "m-Q8_0.gguf");
    assert_eq!(hub.resolve("hf:o/r/m-Q8_0-imat.gguf").unwrap(), "m-Q8_0-imat.gguf");
    assert_eq!(hub.resolve(&format!("hf:o/r:Q8_0@{COMMIT}")).unwrap(), "m-Q8_0.gguf");
    let error = hub.resolve("hf:o/r:K_M").unwrap_err().to_string();
    assert!(
        error.ends_with("no model file matches \"K_M\"; found: m-Q4_K_M.gguf, m-Q8_0-imat.gguf, m-Q8_0.gguf"),
        "{error}"
    );
}

#[test]
fn models_that_are_not_cached_are_refused() {
    let hub = Directory::hub("absent", &["m.gguf"]);
    for source in ["hf:o/other", "hf:o/r@v2"] {
        assert!(matches!(hub.resolve(source), Err(SourceError::Offline { .. })), "{source}");
    }
    assert!(matches!(hub.resolve("hf:o"), Err(SourceError::Syntax { .. })));
    fs::write(hub.0.join("models--o--r/refs/main"), "../../elsewhere").unwrap();
    assert!(matches!(hub.resolve("hf:o/r"), Err(SourceError::Io { .. })));
}

#[test]
fn split_models_are_complete() {
    let hub = Directory::hub("split", &["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"]);
    assert_eq!(hub.resolve("hf:o/r:Q8_0").unwrap(), "m-Q8_0-00001-of-00002.gguf");
    fs::remove_file(hub.0.join(format!("models--o--r/snapshots/{COMMIT}/Q8_0/m-Q8_0-00001-of-00002.gguf"))).unwrap();
    let error = hub.resolve("hf:o/r").unwrap_err();
    assert!(
        matches!(&error, SourceError::MissingShard { path } if path.ends_with("m-Q8_0-00001-of-00002.gguf")),
        "{error}"
    );
}

#[test]
fn directories_contain_one_model() {
    let directory = Directory::new("directory", &["one/a.gguf", "two/a.gguf", "two/b.gguf", "none/a.txt"]);
    let resolve = |name: &str| directory.resolve(directory.0.join(name).to_str().unwrap());
    assert_eq!(resolve("one").unwrap(), "a.gguf");
    assert!(matches!(resolve("two"), Err(SourceError::Ambiguous { found, .. }) if found == ["a.gguf", "b.gguf"]));
    assert!(matches!(resolve("none"), Err(SourceError::NoModel { .. })));
    assert_eq!(resolve("absent.gguf").unwrap(), "absent.gguf");
}
