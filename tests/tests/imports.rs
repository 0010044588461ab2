//! Modules of `model` import only what is below them: their files are in no circle.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Path of a module: `["model", "mixers", "latent"]`.
type Module = Vec<String>;

/// The sources of the modules in a folder, by their paths.
fn modules(folder: &Path, of: &[String], all: &mut BTreeMap<Module, String>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).expect("UTF-8").to_string();
        let mut module = of.to_vec();
        if path.is_dir() {
            module.push(stem);
            modules(&path, &module, all);
        } else if path.extension().is_some_and(|e| e == "rs") {
            if stem != "mod" && stem != "lib" {
                module.push(stem);
            }
            let source = fs::read_to_string(&path).expect("UTF-8");
            all.insert(module, source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default().into());
        }
    }
}

/// The paths that a `use` names, without braces.
fn expanded(path: &str, all: &mut Vec<String>) {
    let Some((head, rest)) = path.split_once('{') else {
        return all.push(path.split_whitespace().next().unwrap_or_default().into());
    };
    let (mut depth, mut start) = (0, 0);
    let inner = rest.trim_end().strip_suffix('}').unwrap_or(rest);
    for (i, c) in inner.char_indices().chain([(inner.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let part = inner[start..i].trim();
                if !part.is_empty() {
                    expanded(&format!("{head}{part}"), all);
                }
                start = i + 1;
            }
            _ => {}
        }
    }
}

/// The modules that a module imports.
fn imports(module: &Module, source: &str, all: &BTreeMap<Module, String>) -> BTreeSet<Module> {
    let mut paths = Vec::new();
    for statement in source.split("\nuse ").skip(1) {
        let path = statement.split(';').next().unwrap_or_default().replace('\n', " ");
        expanded(&path, &mut paths);
    }
    let resolve = |path: &String| {
        let mut full = match path.split("::").next() {
            Some("crate") => Vec::new(),
            Some("self") => module.clone(),
            Some("super") => module[..module.len() - path.matches("super::").count()].to_vec(),
            _ => return None,
        };
        full.extend(path.split("::").skip_while(|p| ["crate", "self", "super"].contains(p)).map(|p| p.trim().into()));
        while !all.contains_key(&full) {
            full.pop()?;
        }
        Some(full)
    };
    paths.iter().filter_map(resolve).filter(|to| to != module).collect()
}

#[test]
fn no_file_of_the_models_is_in_a_circle() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/src");
    let mut sources = BTreeMap::new();
    modules(&root, &[], &mut sources);
    let graph: BTreeMap<&Module, BTreeSet<Module>> =
        sources.iter().map(|(module, source)| (module, imports(module, source, &sources))).collect();
    let n_imports: usize = graph.values().map(BTreeSet::len).sum();
    assert!(graph.len() > 100 && n_imports > 300, "{n_imports} imports of {} modules", graph.len());
    for start in sources.keys().filter(|module| module[..].first().is_some_and(|first| first == "model")) {
        let (mut reached, mut next) = (BTreeSet::new(), vec![start.clone()]);
        while let Some(module) = next.pop() {
            for to in &graph[&module] {
                assert!(to != start, "{} imports {}, which imports it", module.join("::"), start.join("::"));
                if reached.insert(to.clone()) {
                    next.push(to.clone());
                }
            }
        }
    }
}
