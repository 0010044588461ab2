//! Published models: the metadata that llama.cpp's converter writes for each and the names and shapes of its tensors, without
//! weights (`fixtures/tensors`, written by `tests/scripts/make_tensor_lists.py`).

use std::collections::BTreeSet;
use std::fs;

use serde::Deserialize;
use starling::error::LoadError;
use starling::gguf::{Gguf, GgufWriter};
use starling::model::Config;
use starling::model::loader::check_tensors;
use starling::quant::Dtype;
use starling_tests::architecture::metadata;
use starling_tests::reference::fixtures;

#[derive(Deserialize)]
struct List {
    model: String,
    arch: String,
    /// Key, type and value.
    metadata: Vec<(String, String, serde_json::Value)>,
    /// Names and shapes; `blk.{0-2,4}.NAME` is a tensor of several layers.
    tensors: Vec<(String, Vec<u64>)>,
}

/// Tensors that tell what kind a layer is, so that a layer without one is another kind: it reads the positions that an earlier
/// indexer selected, has its keys as values, or has no experts. The loader refuses the last when the file is complete, for the
/// tensors that no layer took.
const TELL_A_KIND: &[&str] =
    &["deepseek32 indexer.attn_k.weight", "gemma4 attn_v.weight", "gemma4 ffn_gate_inp.weight"];

/// A tensor: its line in the list, its name, its shape.
type Tensor<'l> = (usize, String, &'l [u64]);

impl List {
    fn expanded(&self) -> Vec<Tensor<'_>> {
        let mut all = Vec::new();
        for (line, (name, shape)) in self.tensors.iter().enumerate() {
            let Some((head, rest)) = name.split_once('{') else {
                all.push((line, name.clone(), &shape[..]));
                continue;
            };
            let (layers, tail) = rest.split_once('}').expect("a range ends");
            for range in layers.split(',') {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let number = |text: &str| text.parse::<usize>().expect("a number");
                all.extend((number(first)..=number(last)).map(|i| (line, format!("{head}{i}{tail}"), &shape[..])));
            }
        }
        all
    }

    /// Checks the header of the model with these tensors.
    fn check<'t>(&self, tensors: impl Iterator<Item = &'t Tensor<'t>>) -> Result<(), LoadError> {
        let mut writer = GgufWriter::new();
        writer.str("general.architecture", &self.arch).expect("a value");
        for (key, kind, value) in &self.metadata {
            metadata(&mut writer, key, kind, value);
        }
        for (_, name, shape) in tensors {
            let dtype = if shape.len() == 1 { Dtype::F32 } else { Dtype::F16 };
            writer.tensor(name, dtype, shape).expect("a tensor");
        }
        let header = writer.header();
        let gguf = Gguf::parse_header(&header, 1 << 50).expect("a header");
        let shards = std::slice::from_ref(&gguf);
        check_tensors(shards, &Config::from_gguf(&gguf, shards)?)
    }
}

fn lists() -> Vec<List> {
    let files = fs::read_dir(fixtures().join("tensors")).expect("fixtures/tensors");
    let read = |path: std::path::PathBuf| {
        serde_json::from_slice(&fs::read(&path).expect("a file")).unwrap_or_else(|e| panic!("{path:?}: {e}"))
    };
    files.map(|file| read(file.expect("a file").path())).collect()
}

#[test]
fn headers_of_published_models_are_accepted() {
    let lists = lists();
    assert!(lists.len() >= 67, "lists are missing");
    let check = |list: &List| list.check(list.expanded().iter()).err().map(|e| format!("{}: {e}", list.model));
    let refused: Vec<String> = lists.iter().filter_map(check).collect();
    assert!(refused.is_empty(), "{refused:#?}");
}

/// A layer without a tensor that the others of its kind have is another block: each such file is refused by name.
#[test]
fn a_layer_that_lacks_a_tensor_is_refused() {
    let mut accepted = BTreeSet::new();
    for list in lists() {
        let all = list.expanded();
        for line in 0..list.tensors.len() {
            // the last layers may be for multi-token prediction, or read the keys of others
            let Some((_, dropped, _)) = all.iter().filter(|(l, ..)| *l == line).nth(1) else { continue };
            match list.check(all.iter().filter(|(_, name, _)| name != dropped)) {
                // without a tensor that tells its kind, a layer may contradict the metadata
                Err(LoadError::MissingTensor { .. } | LoadError::Tensor { .. } | LoadError::Metadata { .. }) => {}
                Err(e) => panic!("{}: {dropped}: {e}", list.model),
                Ok(()) => {
                    accepted.insert(format!(
                        "{} {}",
                        list.arch,
                        dropped.split('.').skip(2).collect::<Vec<_>>().join(".")
                    ));
                }
            }
        }
    }
    let accepted: Vec<&str> = accepted.iter().map(String::as_str).collect();
    assert_eq!(accepted, TELL_A_KIND);
}
