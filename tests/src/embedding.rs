//! Pinned embeddings: digests of vectors and states. `fixtures/goldens/embeddings.json` has the texts,
//! `pinned/embedding-NAME.json` the results, which only the program `bless` writes.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use starling::embed::{Embedder, EmbedderOptions, Pooling, Text};
use starling::kernels::Cpu;
use starling::model::Model;
use starling::pool::{Inline, Pool};

use crate::reference::fixtures;

/// A case of `embeddings.json`.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs)]
pub struct Case {
    pub name: String,
    /// File below `fixtures`.
    pub model: String,
    /// Token ids of each text.
    pub texts: Vec<Vec<u32>>,
}

/// Result of a case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pinned {
    /// Pooling type of the model file.
    pub pooling: String,
    /// SHA-256 of the normalised vectors, f32 little-endian, text by text.
    pub vectors_sha256: String,
    /// The same for the states of all tokens.
    pub states_sha256: String,
}

#[derive(Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

/// All cases.
///
/// # Panics
/// If the file cannot be read.
pub fn cases() -> Vec<Case> {
    let text = fs::read(fixtures().join("goldens/embeddings.json")).expect("fixtures/goldens/embeddings.json");
    serde_json::from_slice::<Cases>(&text).expect("cases").cases
}

/// An embedder for texts up to the model's training context.
///
/// # Panics
/// If there is no memory.
pub fn embedder(model: &Arc<Model>, pool: &dyn Pool, max_texts: usize, batch_tokens: usize) -> Embedder {
    let options = EmbedderOptions { max_texts, batch_tokens, n_ctx: model.config.n_ctx_train };
    Embedder::new(Arc::clone(model), pool, options).expect("memory")
}

/// The vectors of texts, in the largest batches that fit.
///
/// # Panics
/// If a text is invalid or a vector is not finite.
pub fn embed(e: &mut Embedder, cpu: Cpu, pool: &dyn Pool, mut texts: &[Text<'_>]) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    while !texts.is_empty() {
        let (batch, rest) = texts.split_at(e.fit(texts.iter().map(|t| t.tokens.len())).max(1));
        e.embed(cpu, pool, batch, &mut |_, v| all.push(v.expect("finite numbers").to_vec())).expect("valid texts");
        texts = rest;
    }
    all
}

/// The states of all tokens of a text after the final norm: (n_tokens, n_embd).
///
/// # Panics
/// If the text is invalid or a state is not finite.
pub fn states(model: &Arc<Model>, cpu: Cpu, ids: &[u32]) -> Vec<f32> {
    let mut e = embedder(model, &Inline, 1, ids.len());
    let text = Text { tokens: ids, pooling: Pooling::None, dimensions: None, normalise: false };
    embed(&mut e, cpu, &Inline, &[text]).concat()
}

/// SHA-256 of the concatenated vectors, f32 little-endian.
pub fn sha256(vectors: &[Vec<f32>]) -> String {
    let mut hash = Sha256::new();
    vectors.iter().flatten().for_each(|v| hash.update(v.to_le_bytes()));
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
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
    pub fn path(&self) -> PathBuf {
        fixtures().join(format!("goldens/pinned/embedding-{}.json", self.name))
    }

    /// The model file.
    ///
    /// # Panics
    /// If it cannot be read.
    pub fn model_bytes(&self) -> Vec<u8> {
        fs::read(fixtures().join(&self.model)).expect("a model")
    }

    /// Computes the case in batches of up to `max_texts`.
    ///
    /// # Panics
    /// If there is no memory.
    pub fn compute(&self, model: &Arc<Model>, cpu: Cpu, pool: &dyn Pool, max_texts: usize) -> Pinned {
        let longest = self.texts.iter().map(Vec::len).max().unwrap_or(0);
        let mut e = embedder(model, pool, max_texts, longest * max_texts);
        let pooling = Pooling::of(&model.config).expect("a known pooling");
        let mut digest = |pooling, normalise| {
            let text = |tokens| Text { tokens, pooling, dimensions: None, normalise };
            let texts: Vec<Text<'_>> = self.texts.iter().map(|t| text(t.as_slice())).collect();
            sha256(&embed(&mut e, cpu, pool, &texts))
        };
        Pinned {
            pooling: pooling.name().into(),
            vectors_sha256: digest(pooling, true),
            states_sha256: digest(Pooling::None, false),
        }
    }
}
