//! Small random models of many architectures. `fixtures/architectures/NAME.json` describes the metadata and the
//! tensors of a model, from which [`Recipe::file`] makes a GGUF file; `NAME.f32` has the outputs of llama.cpp.

use std::fs;
use std::sync::{Arc, Mutex};

use serde::Deserialize;
use sha2::{Digest, Sha256};
use starling::gguf::{GgufWriter, Value};
use starling::kernels::Cpu;
use starling::kernels::attention::{KvMemory, KvType, PAGE};
use starling::model::{Exec, KvRef, Model, Run, ScratchSize};
use starling::pool::Inline;
use starling::quant::{Dtype, Quantiser};

use crate::embedding;
use crate::numpy::Generator;
use crate::reference::{fixtures, logits_in_batches};

/// A recipe: `NAME.json`.
#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct Recipe {
    pub name: String,
    pub arch: String,
    /// `causal`, `not causal` or `embedding`.
    pub kind: String,
    pub n_vocab: usize,
    pub n_embd: usize,
    pub seed: u64,
    /// Whether llama.cpp computed GELU with a table of f16 values.
    pub gelu_f16_table: bool,
    /// Deviation of llama.cpp from its own F32 results, by type of the weights.
    pub nmse_by_type: std::collections::BTreeMap<String, f64>,
    /// Key, type and value.
    pub metadata: Vec<(String, String, serde_json::Value)>,
    pub tensors: Vec<TensorRecipe>,
    pub prompts: Vec<Vec<u32>>,
}

/// A tensor and how its values are drawn.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs)]
pub struct TensorRecipe {
    pub name: String,
    /// Fastest-varying dimension first.
    pub shape: Vec<u64>,
    pub rule: String,
    #[serde(default = "one")]
    pub gain: f64,
    #[serde(default)]
    pub lo: f64,
    #[serde(default)]
    pub hi: f64,
    /// Whether the type of the weights applies; other tensors are F32.
    #[serde(default)]
    pub w: bool,
}

fn one() -> f64 {
    1.0
}

/// Rows of a prompt that the expected outputs contain, counted from the last.
pub const ROWS: usize = 24;

/// Expected outputs of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    /// Logits, or hidden states of embedding models, of the last [`ROWS`] tokens.
    pub rows: Vec<f32>,
    /// Mean of the hidden states of all tokens, of embedding models.
    pub mean: Vec<f32>,
}

/// All recipes, sorted by name.
///
/// # Panics
/// If a file cannot be read.
pub fn recipes() -> Vec<Recipe> {
    let mut recipes: Vec<Recipe> = fs::read_dir(fixtures().join("architectures"))
        .expect("fixtures/architectures")
        .map(|e| e.expect("a file").path())
        .filter(|p| p.extension().is_some_and(|e| e == "json"))
        .map(|p| serde_json::from_slice(&fs::read(&p).expect("a file")).unwrap_or_else(|e| panic!("{p:?}: {e}")))
        .collect();
    recipes.sort_by(|a, b| a.name.cmp(&b.name));
    recipes
}

/// Squared difference over the squared reference.
pub fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let difference: f64 = got.iter().zip(want).map(|(g, w)| f64::from(g - w).powi(2)).sum();
    difference / want.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>()
}

/// Outputs after each token of a text: logits, computed in batches of `batch` tokens where these see the tokens before them
/// only; or the hidden states of an encoder.
///
/// # Panics
/// If the text does not fit.
pub fn outputs(
    recipe: &Recipe,
    model: &Arc<Model>,
    (cpu, kv_type): (Cpu, KvType),
    ids: &[u32],
    batch: usize,
) -> Vec<f32> {
    match &recipe.kind[..] {
        "embedding" => embedding::states(model, cpu, ids),
        "causal" => logits_in_batches(model, (cpu, &Inline), kv_type, batch, ids),
        _ => {
            let layout = model.kv_layout(kv_type);
            let pages: Vec<u32> = (0..ids.len().div_ceil(PAGE) as u32).collect();
            let mut memory = KvMemory::zeroed(&layout, pages.len()).expect("memory");
            let size = ScratchSize { rows: ids.len(), logits: ids.len(), seqs: 1, n_ctx: ids.len() };
            let mut scratch = model.scratch(&Inline, kv_type, size).expect("memory");
            let run = Run { tokens: ids, pos: 0, pages: &pages, state: 0, n_logits: ids.len() };
            let kv = KvRef { layout: &layout, memory: &mut memory };
            let out = model.forward(Exec { cpu, pool: &Inline }, &[run], kv, &mut scratch, None);
            (0..out.len()).flat_map(|row| out.logits(row).to_vec()).collect()
        }
    }
}

/// The recipe of a name.
///
/// # Panics
/// If the file cannot be read.
pub fn recipe(name: &str) -> Recipe {
    let path = fixtures().join(format!("architectures/{name}.json"));
    serde_json::from_slice(&fs::read(&path).expect("a file")).unwrap_or_else(|e| panic!("{path:?}: {e}"))
}

/// The model of a recipe in F32, made once.
///
/// # Panics
/// If the file cannot be read, or the model does not load.
pub fn model(name: &'static str) -> Arc<Model> {
    static MADE: Mutex<Vec<(&str, Arc<Model>)>> = Mutex::new(Vec::new());
    let mut made = MADE.lock().expect("no panic");
    if let Some((_, model)) = made.iter().find(|(n, _)| *n == name) {
        return Arc::clone(model);
    }
    let model = Arc::new(Model::load(&recipe(name).file(Dtype::F32), &Inline).expect("a model"));
    made.push((name, Arc::clone(&model)));
    model
}

/// The nearest bfloat16, ties to even; subnormals of f16 become zero.
fn round(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000);
    if rounded.abs() < 1.0 / 16384.0 { 0.0 } else { rounded }
}

impl TensorRecipe {
    /// The values of the tensor.
    ///
    /// # Panics
    /// If the rule is unknown.
    pub fn values(&self, seed: u64) -> Vec<f32> {
        let digest = Sha256::digest(format!("{seed}/{}", self.name));
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        let mut g = Generator::new(u128::from_le_bytes(bytes));
        let (n, gain) = (self.shape.iter().product::<u64>() as usize, self.gain as f32);
        let mut draw = |f: &mut dyn FnMut(&mut Generator) -> f32| -> Vec<f32> { (0..n).map(|_| f(&mut g)).collect() };
        let mut values = match &self.rule[..] {
            "matrix" => {
                let scale = (self.gain / (self.shape[0] as f64).sqrt()) as f32;
                draw(&mut |g| g.normal() * scale)
            }
            "normal" => draw(&mut |g| g.normal() * gain),
            "norm" => draw(&mut |g| gain * (1.0 + 0.1 * g.normal())),
            "bias" => {
                let scale = (0.1 * self.gain) as f32;
                draw(&mut |g| scale * g.normal())
            }
            "ssm_a" => draw(&mut |g| -gain * f64::from(g.uniform() * 3.0 - 2.0).exp() as f32),
            "dt_bias" => draw(&mut |g| {
                let dt = 0.02 * f64::from(g.uniform() * 25f64.ln() as f32).exp() as f32;
                f64::from(f64::from(dt).exp_m1() as f32).ln() as f32
            }),
            "factors" => {
                let mut all = draw(&mut Generator::uniform);
                all.sort_by(f32::total_cmp);
                all.iter().map(|u| 1.0 + gain * u).collect()
            }
            "uniform" => {
                let (lo, width) = (self.lo as f32, (self.hi - self.lo) as f32);
                draw(&mut |g| lo + width * g.uniform())
            }
            "ids" => {
                let (lo, width) = (self.lo as f32, (self.hi - self.lo) as f32);
                draw(&mut |g| f32::from((lo + width * g.uniform()) as u8))
            }
            rule => panic!("unknown rule {rule}"),
        };
        values.iter_mut().for_each(|x| *x = round(*x));
        values
    }
}

impl Recipe {
    /// Adds a layer that predicts a further token (NextN): a copy of the last one, and tensors of its own.
    ///
    /// # Panics
    /// If the recipe has no `block_count`.
    pub fn add_nextn_layer(&mut self) {
        let count = format!("{}.block_count", self.arch);
        let (_, _, blocks) = self.metadata.iter_mut().find(|(key, ..)| *key == count).expect("a number of layers");
        let n = blocks.as_u64().expect("a number");
        *blocks = (n + 1).into();
        // an array of as many values that has none per layer
        let of_layers = |key: &str| !key.ends_with("rope.dimension_sections");
        for (_, kind, value) in self.metadata.iter_mut().filter(|(key, ..)| of_layers(key)) {
            if let Some(all) = value.as_array_mut().filter(|all| kind.starts_with("ARRAY") && all.len() as u64 == n) {
                all.extend(all.last().cloned());
            }
        }
        self.metadata.push((format!("{}.nextn_predict_layers", self.arch), "UINT32".into(), 1.into()));
        let (last, new) = (format!("blk.{}.", n - 1), format!("blk.{n}."));
        let copies = self.tensors.iter().filter_map(|t| Some((t.clone(), t.name.strip_prefix(&last)?)));
        let copies: Vec<_> = copies.map(|(t, part)| TensorRecipe { name: format!("{new}{part}"), ..t }).collect();
        self.tensors.extend(copies);
        let width = self.n_embd as u64;
        for (part, shape) in [("eh_proj", vec![2 * width, width]), ("enorm", vec![width]), ("hnorm", vec![width])] {
            let is_matrix = shape.len() > 1;
            let rule = if is_matrix { "matrix" } else { "norm" }.into();
            let name = format!("{new}nextn.{part}.weight");
            self.tensors.push(TensorRecipe { name, shape, rule, gain: 1.0, lo: 0.0, hi: 0.0, w: is_matrix });
        }
    }

    /// The GGUF file with matrices of a type. Rows that are no whole number of blocks become F16.
    ///
    /// # Panics
    /// If the recipe is invalid.
    pub fn file(&self, dtype: Dtype) -> Vec<u8> {
        let mut writer = GgufWriter::new();
        writer.str("general.architecture", &self.arch).expect("a value");
        writer.str("general.name", "tiny random model").expect("a value");
        for (key, kind, value) in &self.metadata {
            metadata(&mut writer, key, kind, value);
        }
        vocabulary(&mut writer, self.n_vocab);
        let contents: Vec<Vec<u8>> = self.tensors.iter().map(|t| data(&mut writer, t, self.seed, dtype)).collect();
        writer.file(contents)
    }

    /// The expected outputs of each prompt.
    ///
    /// # Panics
    /// If the file cannot be read.
    pub fn expected(&self) -> Vec<Expected> {
        let path = fixtures().join(format!("architectures/{}.f32", self.name));
        let bytes = fs::read(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        let all: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let (width, mean) = if self.kind == "embedding" { (self.n_embd, self.n_embd) } else { (self.n_vocab, 0) };
        let each = ROWS * width + mean;
        assert_eq!(all.len(), each * self.prompts.len(), "{path:?}");
        let split = |all: &[f32]| Expected { rows: all[..ROWS * width].to_vec(), mean: all[ROWS * width..].to_vec() };
        all.chunks_exact(each).map(split).collect()
    }
}

/// Adds a tensor and returns its data.
fn data(writer: &mut GgufWriter, t: &TensorRecipe, seed: u64, dtype: Dtype) -> Vec<u8> {
    let (values, k) = (t.values(seed), t.shape[0]);
    let dtype = match t.w {
        _ if t.rule == "ids" => Dtype::I32,
        false => Dtype::F32,
        true if k.is_multiple_of(dtype.block_len()) => dtype,
        true => Dtype::F16,
    };
    writer.tensor(&t.name, dtype, &t.shape).expect("a tensor");
    let mut data = vec![0; values.len() / dtype.block_len() as usize * dtype.block_bytes() as usize];
    match dtype {
        Dtype::F32 => {
            values.iter().zip(data.chunks_exact_mut(4)).for_each(|(v, b)| b.copy_from_slice(&v.to_le_bytes()))
        }
        Dtype::I32 => {
            values.iter().zip(data.chunks_exact_mut(4)).for_each(|(v, b)| b.copy_from_slice(&(*v as i32).to_le_bytes()))
        }
        _ => Quantiser::new(dtype)
            .and_then(|quantiser| quantiser.rows(&values, k as usize, None, &mut data))
            .expect("a type to quantise to"),
    }
    data
}

/// Adds a key of a recipe to a file.
///
/// # Panics
/// If the value is not of the kind.
pub fn metadata(writer: &mut GgufWriter, key: &str, kind: &str, value: &serde_json::Value) {
    let integer = |v: &serde_json::Value| v.as_i64().expect("an integer");
    // infinities are text
    let float = |v: &serde_json::Value| v.as_f64().or_else(|| v.as_str()?.parse().ok()).expect("a number") as f32;
    if let Some(kind) = kind.strip_prefix("ARRAY/") {
        let all = value.as_array().expect("an array");
        let integers = || all.iter().map(integer);
        match kind {
            "INT32" => writer.i32_array(key, &integers().map(|v| v as i32).collect::<Vec<_>>()),
            "UINT32" => writer.u32_array(key, &integers().map(|v| v as u32).collect::<Vec<_>>()),
            "UINT64" => writer.u64_array(key, &all.iter().map(|v| v.as_u64().expect("an integer")).collect::<Vec<_>>()),
            "FLOAT32" => writer.f32_array(key, &all.iter().map(float).collect::<Vec<_>>()),
            "BOOL" => writer.bool_array(key, &all.iter().map(|v| v.as_bool().expect("a boolean")).collect::<Vec<_>>()),
            "STRING" => writer.str_array(key, &all.iter().map(|v| v.as_str().expect("text")).collect::<Vec<_>>()),
            kind => panic!("{key}: unknown type {kind}"),
        }
        .expect("a value");
        return;
    }
    let value = match kind {
        "UINT32" => Value::U32(integer(value) as u32),
        "INT32" => Value::I32(integer(value) as i32),
        "FLOAT32" => Value::F32(float(value)),
        "BOOL" => Value::Bool(value.as_bool().expect("a boolean")),
        "STRING" => Value::Str(value.as_str().expect("text").as_bytes()),
        kind => panic!("{key}: unknown type {kind}"),
    };
    writer.metadata(key, &value).expect("a value");
}

/// A SentencePiece vocabulary of `n` pieces; results do not depend on it.
fn vocabulary(writer: &mut GgufWriter, n: usize) {
    let pieces: Vec<String> = (0..n)
        .map(|i| match i {
            0 => "<unk>".into(),
            1 => "<s>".into(),
            2 => "</s>".into(),
            3 => "<0x0A>".into(),
            4 => "\u{2581}".into(),
            5..95 => char::from(b'!' + i as u8 - 5).into(),
            _ => format!("x{i}"),
        })
        .collect();
    let kinds: Vec<i32> = (0..n)
        .map(|i| match i {
            0 => 2,
            1 | 2 => 3,
            3 => 6,
            _ => 1,
        })
        .collect();
    let scores: Vec<f32> = (0..n).map(|i| if i < 4 { 0.0 } else { 4.0 - i as f32 }).collect();
    let ids = [("bos", 1), ("eos", 2), ("unknown", 0)];
    let mut write = || {
        writer.str("tokenizer.ggml.model", "llama")?;
        writer.str("tokenizer.ggml.pre", "default")?;
        writer.str_array("tokenizer.ggml.tokens", &pieces)?;
        writer.f32_array("tokenizer.ggml.scores", &scores)?;
        writer.i32_array("tokenizer.ggml.token_type", &kinds)?;
        ids.iter()
            .try_for_each(|(name, id)| writer.metadata(&format!("tokenizer.ggml.{name}_token_id"), &Value::U32(*id)))
    };
    write().expect("values");
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};
    use starling::receipt::Hex;

    use super::recipe;

    /// The values of all tensors, as the program that made the reference models draws them with NumPy 2.4.6.
    #[test]
    fn values_of_numpy() {
        for (name, digest) in [
            ("qwen3", "82586824686c17d4f515bdfe9128cccc416598356619d35455107e6ff74016d7"),
            ("gpt-oss", "5f235b1be2efb71ae17fa139180845b918089e44352e44d861f9bb6d77563a61"),
            ("qwen35", "04ba259f617350bb30c0cb2080eb63cc69e330a367e9587c95a6b7ee17217fd4"),
            ("rwkv7", "818513e83d32d77ca77a340cd3ee34d9758b69ea6c738a1d0c0ecc194486510e"),
            ("falcon-h1", "65d9f99f06bb51d84d0b5b584d61466348fe370b5e360bd8d1907c9660171997"),
            ("deepseek2", "a9a45444c7faadd908df8a7a8c546ebc0b3eb795907b1b9039c5132496b6cb41"),
        ] {
            let recipe = recipe(name);
            let mut hash = Sha256::new();
            for t in &recipe.tensors {
                t.values(recipe.seed).iter().for_each(|v| hash.update(v.to_le_bytes()));
            }
            assert_eq!(Hex::<32>(hash.finalize().into()).to_string(), digest, "{name}");
        }
    }
}
