//! Shapes of hybrid models, as data: `shapes/NAME.json` has the metadata and the tensors.

use core::error::Error;
use std::collections::BTreeMap;

use serde::Deserialize;
use starling::gguf::{GgufWriter, Value};
use starling::quant::mix::ModelShape;

use crate::TensorList;

const FILES: [(&str, &str); 7] = [
    ("qwen35-0.8b", include_str!("shapes/qwen35-0.8b.json")),
    ("qwen35moe-a3b-eighth", include_str!("shapes/qwen35moe-a3b-eighth.json")),
    ("gpt-oss-sixth", include_str!("shapes/gpt-oss-sixth.json")),
    ("lfm2-350m", include_str!("shapes/lfm2-350m.json")),
    ("granite-4-h-1b", include_str!("shapes/granite-4-h-1b.json")),
    ("gemma4-e2b", include_str!("shapes/gemma4-e2b.json")),
    ("deepseek2-lite-quarter", include_str!("shapes/deepseek2-lite-quarter.json")),
];

/// Metadata without the prefix of the family, and tensors with their sizes, row length first.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Description {
    pub(crate) arch: String,
    n_layers: u32,
    pub(crate) n_vocab: u32,
    n_heads: u32,
    n_kv_heads: u32,
    n_experts: u32,
    metadata: BTreeMap<String, serde_json::Value>,
    tensors: BTreeMap<String, Vec<u64>>,
    layers: Vec<Layers>,
}

/// Tensors of some layers.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Layers {
    /// These layers; all if missing.
    at: Option<Vec<u32>>,
    /// All but these layers.
    #[serde(default)]
    except: Vec<u32>,
    tensors: BTreeMap<String, Vec<u64>>,
}

/// Names of all described shapes.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|(name, _)| *name)
}

impl Description {
    pub(crate) fn find(name: &str) -> Option<Result<Description, serde_json::Error>> {
        FILES.iter().find(|(known, _)| *known == name).map(|(_, text)| serde_json::from_str(text))
    }

    pub(crate) fn model_shape(&self) -> ModelShape {
        ModelShape {
            n_layers: self.n_layers,
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            n_experts: self.n_experts,
            importance: false,
        }
    }

    /// Names and sizes in file order: tensors of the model, then those of each layer.
    pub(crate) fn tensors(&self) -> TensorList {
        let mut all: TensorList = self.tensors.iter().map(|(name, dims)| (name.clone(), dims.clone())).collect();
        for i in 0..self.n_layers {
            let has = |l: &&Layers| l.at.as_ref().is_none_or(|at| at.contains(&i)) && !l.except.contains(&i);
            for (part, dims) in self.layers.iter().filter(has).flat_map(|l| &l.tensors) {
                all.push((format!("blk.{i}.{part}"), dims.clone()));
            }
        }
        all
    }

    /// Adds the metadata of the family.
    pub(crate) fn metadata(&self, w: &mut GgufWriter) -> Result<(), Box<dyn Error>> {
        let width = self.tensors.get("token_embd.weight").ok_or("no token_embd.weight")?[0];
        let sizes = [
            ("block_count", u64::from(self.n_layers)),
            ("embedding_length", width),
            ("attention.head_count", self.n_heads.into()),
            ("attention.head_count_kv", self.n_kv_heads.into()),
        ];
        let sizes = sizes.into_iter().filter(|(name, _)| !self.metadata.contains_key(*name));
        let sizes = sizes.map(|(name, size)| (name, serde_json::Value::from(size)));
        for (name, value) in sizes.collect::<Vec<_>>().iter().map(|(name, value)| (*name, value)).chain(self.given()) {
            add(w, &format!("{}.{name}", self.arch), value)?;
        }
        Ok(())
    }

    fn given(&self) -> impl Iterator<Item = (&str, &serde_json::Value)> {
        self.metadata.iter().map(|(name, value)| (&name[..], value))
    }
}

/// Adds a value: integers as u32, arrays of integers as i32.
fn add(w: &mut GgufWriter, key: &str, value: &serde_json::Value) -> Result<(), Box<dyn Error>> {
    let wrong = || format!("{key}: {value}");
    match value {
        serde_json::Value::Bool(b) => w.metadata(key, &Value::Bool(*b))?,
        serde_json::Value::String(text) => w.str(key, text)?,
        serde_json::Value::Number(n) => match n.as_u64() {
            Some(n) => w.metadata(key, &Value::U32(u32::try_from(n)?))?,
            None => w.metadata(key, &Value::F32(n.as_f64().ok_or_else(wrong)? as f32))?,
        },
        serde_json::Value::Array(all) if all.iter().all(serde_json::Value::is_boolean) => {
            w.bool_array(key, &all.iter().filter_map(serde_json::Value::as_bool).collect::<Vec<_>>())?;
        }
        serde_json::Value::Array(all) => {
            let integers = all.iter().map(|v| v.as_i64().and_then(|v| i32::try_from(v).ok()));
            w.i32_array(key, &integers.collect::<Option<Vec<_>>>().ok_or_else(wrong)?)?;
        }
        _ => return Err(wrong().into()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_shapes() {
        for name in names() {
            let shape = Description::find(name).unwrap().unwrap_or_else(|e| panic!("{name}: {e}"));
            let tensors = shape.tensors();
            assert!(tensors.len() > shape.n_layers as usize * 8, "{name}");
            shape.metadata(&mut GgufWriter::new()).unwrap();
        }
    }
}
