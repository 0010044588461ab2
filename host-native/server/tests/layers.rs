//! Dependencies between the folders of the crate point down only.

use std::fs;
use std::path::Path;

/// Folders and files of `src`, each of which uses those behind it only.
const LAYERS: [&str; 15] = [
    "lib", "run", "start", "routes", "admin", "http", "server", "guard", "models", "state", "schedule", "observe",
    "config", "priority", "sync",
];

fn rank(name: &str) -> usize {
    LAYERS.iter().position(|layer| *layer == name).unwrap_or_else(|| panic!("src/{name}: a layer without a place"))
}

/// Names of the modules of the crate that a source uses, without its tests.
fn uses(source: &str) -> impl Iterator<Item = &str> {
    let code = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.flat_map(|line| line.split("crate::").skip(1)).flat_map(|path| {
        // `crate::{a::b, c}` on one line, or `crate::a::b`
        let inner = path.strip_prefix('{').map_or(path, |rest| rest.split('}').next().unwrap_or(rest));
        let names = if path.starts_with('{') { inner.split(", ").collect() } else { vec![inner] };
        names.into_iter().map(|name| name.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(name))
    })
}

fn check(layer: &str, path: &Path, n: &mut usize) {
    if path.is_dir() {
        for entry in fs::read_dir(path).expect("a folder") {
            check(layer, &entry.expect("an entry").path(), n);
        }
    } else if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("tests.rs") {
        let source = fs::read_to_string(path).expect("a source");
        for used in uses(&source).filter(|used| *used != layer) {
            *n += 1;
            assert!(rank(used) > rank(layer), "{}: {layer} uses {used}", path.display());
        }
    }
}

#[test]
fn folders_use_those_below_them_only() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut n = 0;
    for entry in fs::read_dir(&src).expect("src") {
        let path = entry.expect("an entry").path();
        let layer = path.file_stem().and_then(|name| name.to_str()).expect("a name").to_string();
        check(&layer, &path, &mut n);
    }
    assert!(n > 300, "{n} uses");
}
