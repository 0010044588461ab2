//! Pinned results: exact token ids, text and a digest of all logits. `fixtures/goldens/cases.json` has the cases,
//! `pinned/NAME.json` the results, which only the program `bless` writes.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use starling::draft::Speculation;
use starling::engine::{Engine, EngineOptions, Event, Request};
use starling::gguf::{Gguf, GgufWriter};
use starling::kernels::Cpu;
use starling::kernels::attention::KvType;
use starling::model::evaluate::{Evaluation, EvaluationError};
use starling::model::{Model, Stage};
use starling::pool::Pool;
use starling::quant::{self, Dtype, Quantiser};
use starling::receipt::Hex;
use starling::sampler::{ALL_TOKENS, Dry, SamplingOptions};
use starling::tokenizer::EncodeOptions;

use crate::architecture::{self, Recipe};
use crate::reference::fixtures;

/// A case of `cases.json`.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs)]
pub struct Case {
    pub name: String,
    /// File below `fixtures`.
    pub model: String,
    /// Type to which the matrices are quantised first, with equal importance weights.
    pub quantise: Option<String>,
    pub kv_type: String,
    pub prompt: String,
    pub max_tokens: usize,
    pub sampling: Sampling,
}

/// Sampling options of a case; missing ones are off.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Sampling {
    pub temperature: f32,
    pub seed: Option<u64>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub typical_p: Option<f32>,
    pub repeat_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub dry: Option<DryOptions>,
}

/// DRY options of a case.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct DryOptions {
    pub multiplier: f32,
    pub base: f32,
    pub allowed_length: u32,
}

/// Result of a case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pinned {
    /// The prompt's tokens.
    pub prompt_ids: Vec<u32>,
    /// SHA-256 of the logits after each prompt token, f32 little-endian, row by row.
    pub logits_sha256: String,
    /// Generated tokens.
    pub ids: Vec<u32>,
    /// Generated text.
    pub text: String,
}

#[derive(Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

/// Path of the pinned trace.
pub fn trace_path() -> std::path::PathBuf {
    fixtures().join("goldens/pinned/trace.txt")
}

/// Digests of the stages of a forward pass of the bundled model, one per line, as `starling logits --trace` prints them.
/// The first line that differs between two targets shows where they diverge.
///
/// # Panics
/// If the model does not load.
pub fn trace(cpu: Cpu, pool: &dyn Pool) -> String {
    let bytes = fs::read(fixtures().join("starling-tiny/starling-tiny-q8_0.gguf")).expect("a model");
    let model = Model::load(&bytes, pool).expect("a model");
    let ids = model.tokenizer.encode("Once upon a time", EncodeOptions { add_special: true, parse_special: false });
    let mut lines = String::new();
    let mut look = |stage: Stage, layer: Option<usize>, rows: &mut dyn Iterator<Item = &[f32]>| {
        let mut hash = Sha256::new();
        rows.flatten().for_each(|v| hash.update(v.to_le_bytes()));
        let layer = layer.map_or("-".into(), |layer| layer.to_string());
        lines += &format!("{layer:>3} {:10} {}\n", stage.name(), Hex::<32>(hash.finalize().into()));
    };
    let evaluation = Evaluation { model: &model, cpu, pool, kv_type: KvType::F16, batch: ids.len(), n_ctx: ids.len() };
    evaluation.run::<EvaluationError>(&ids, ids.len() - 1, Some(&mut look), &mut |_| Ok(())).expect("an evaluation");
    lines
}

/// Digests of the outputs of all recipes of [`architecture`] that the engine supports, by name.
pub type Architectures = BTreeMap<String, String>;

/// Path of [`Architectures`].
pub fn architectures_path() -> std::path::PathBuf {
    fixtures().join("goldens/pinned/architectures.json")
}

/// SHA-256 of the outputs after the first tokens of a recipe's prompt, f32 little-endian. Batches of `batch` tokens, f16 keys and
/// values.
pub fn architecture_digest(recipe: &Recipe, model: &Arc<Model>, cpu: Cpu, batch: usize) -> String {
    let outputs = architecture::outputs(recipe, model, (cpu, KvType::F16), &recipe.prompts[0][..8], batch);
    let mut hash = Sha256::new();
    outputs.iter().for_each(|v| hash.update(v.to_le_bytes()));
    Hex::<32>(hash.finalize().into()).to_string()
}

/// All cases.
///
/// # Panics
/// If the file cannot be read.
pub fn cases() -> Vec<Case> {
    let text = fs::read(fixtures().join("goldens/cases.json")).expect("fixtures/goldens/cases.json");
    serde_json::from_slice::<Cases>(&text).expect("cases").cases
}

impl Case {
    /// The pinned result.
    ///
    /// # Panics
    /// If there is none.
    pub fn pinned(&self) -> Pinned {
        let path = self.path();
        let text = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}; run `bless`", path.display()));
        serde_json::from_slice(&text).expect("a pinned result")
    }

    /// Path of the pinned result.
    pub fn path(&self) -> std::path::PathBuf {
        fixtures().join(format!("goldens/pinned/{}.json", self.name))
    }

    /// The model file.
    ///
    /// # Panics
    /// If it cannot be read.
    pub fn model_bytes(&self) -> Vec<u8> {
        let bytes = fs::read(fixtures().join(&self.model)).expect("a model");
        match &self.quantise {
            Some(name) => quantised(&bytes, Dtype::from_name(name).expect("a type")),
            None => bytes,
        }
    }

    /// Type of the KV cache.
    ///
    /// # Panics
    /// If the name is unknown.
    pub fn kv_type(&self) -> KvType {
        *KvType::ALL.iter().find(|t| t.name() == self.kv_type).expect("a KV type")
    }

    /// The sampling options.
    pub fn options(&self) -> SamplingOptions {
        let (s, off) = (&self.sampling, SamplingOptions::neutral());
        SamplingOptions {
            temperature: s.temperature,
            seed: s.seed.unwrap_or(off.seed),
            top_k: s.top_k.unwrap_or(off.top_k),
            top_p: s.top_p.unwrap_or(off.top_p),
            min_p: s.min_p.unwrap_or(off.min_p),
            typical_p: s.typical_p.unwrap_or(off.typical_p),
            repeat_penalty: s.repeat_penalty.unwrap_or(off.repeat_penalty),
            frequency_penalty: s.frequency_penalty.unwrap_or(off.frequency_penalty),
            presence_penalty: s.presence_penalty.unwrap_or(off.presence_penalty),
            dry: s.dry.as_ref().map(|d| Dry {
                multiplier: d.multiplier,
                base: d.base,
                allowed_length: d.allowed_length,
                last_n: ALL_TOKENS,
                breakers: Vec::new(),
            }),
            ..off
        }
    }

    /// Computes the case with steps of `batch` tokens and `neighbours` other requests; with any, all of them draft. The
    /// result must not depend on either.
    ///
    /// # Panics
    /// If there is no memory.
    pub fn compute(&self, model: &Arc<Model>, cpu: Cpu, pool: &dyn Pool, batch: usize, neighbours: usize) -> Pinned {
        let prompt_ids =
            model.tokenizer.encode(&self.prompt, EncodeOptions { add_special: true, parse_special: false });
        let logits_sha256 = self.logits_digest(model, cpu, pool, &prompt_ids, batch);
        let n_ctx = prompt_ids.len() + self.max_tokens;
        let options = EngineOptions {
            kv_type: self.kv_type(),
            n_ctx,
            max_seqs: 1 + neighbours,
            batch_tokens: batch,
            prefill_chunk: batch / 2,
            draft_rows: 8 * neighbours,
            kv_bytes: (1 + neighbours) * EngineOptions::kv_bytes_of(model, self.kv_type(), n_ctx),
            snapshots: Default::default(),
            model_sha256: None,
        };
        let mut engine = Engine::new(Arc::clone(model), pool, options).expect("memory");
        // drafts cost nothing, so that all that fit are computed
        engine.set_step_costs(&[1.0]);
        let speculation = Speculation { max: 6, ..Speculation::default() };
        for i in 0..neighbours {
            let tokens: Vec<u32> = prompt_ids.iter().rev().skip(i).copied().collect();
            let (max_tokens, speculation) = (Some(self.max_tokens), speculation.clone());
            let other = Request { max_tokens, speculation, ignore_eos: true, ..Request::new(tokens) };
            engine.submit(other).expect("room for a neighbour");
        }
        let (sampling, max_tokens) = (self.options(), Some(self.max_tokens));
        let request = Request { sampling, max_tokens, speculation, ..Request::new(prompt_ids.clone()) };
        let id = engine.submit(request).expect("a valid request");
        let (mut ids, mut text) = (Vec::new(), String::new());
        let mut done = false;
        while !done {
            engine.step(cpu, pool, &mut |event| match event {
                Event::Token { id: of, token, text: more, .. } if of == id => {
                    ids.push(token);
                    text.push_str(&more);
                }
                Event::Done { id: of, text: more, .. } if of == id => {
                    text.push_str(&more);
                    done = true;
                }
                _ => {}
            });
        }
        Pinned { prompt_ids, logits_sha256, ids, text }
    }

    fn logits_digest(&self, model: &Model, cpu: Cpu, pool: &dyn Pool, ids: &[u32], batch: usize) -> String {
        let evaluation = Evaluation { model, cpu, pool, kv_type: self.kv_type(), batch, n_ctx: ids.len() };
        let mut hash = Sha256::new();
        let done = evaluation.run::<EvaluationError>(ids, 0, None, &mut |row| {
            row.logits.iter().for_each(|v| hash.update(v.to_le_bytes()));
            Ok(())
        });
        done.expect("a text that fits");
        hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
    }
}

/// The file with all matrices quantised to `dtype`.
fn quantised(bytes: &[u8], dtype: Dtype) -> Vec<u8> {
    let gguf = Gguf::parse(bytes).expect("a model");
    let quantiser = Quantiser::new(dtype).expect("a type that is supported");
    let mut writer = GgufWriter::new();
    for (key, value) in gguf.metadata() {
        writer.metadata(key, value).expect("metadata");
    }
    let mut contents = Vec::new();
    for t in gguf.tensors() {
        let mut data = gguf.data(t).expect("data").to_vec();
        let to = if t.n_dims == 2 { dtype } else { t.dtype };
        writer.tensor(t.name, to, &t.dims[..t.n_dims as usize]).expect("a tensor");
        if to != t.dtype {
            let k = t.dims[0] as usize;
            let mut values = vec![0.0; t.n_elements() as usize];
            quant::dequantise(t.dtype, &data, &mut values).expect("values");
            data = vec![0; values.len() / dtype.block_len() as usize * dtype.block_bytes() as usize];
            quantiser.rows(&values, k, Some(&vec![1.0; k]), &mut data).expect("blocks");
        }
        contents.push(data);
    }
    writer.file(contents)
}
