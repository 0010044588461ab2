//! Reads the configuration of a model from untrusted metadata.

use alloc::format;
use alloc::vec::Vec;

use super::kinds;
use super::table::FAMILIES;
use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::kernels::norm::NormKind;
use crate::model::config::{Config, LayerConfig, NormConfig};
use crate::model::embeddings::EmbeddingConfig;
use crate::model::family::{Family, Mtp};
use crate::model::ffn::config::{self as ffn, FfnConfig};
use crate::model::heads::diffusion::DiffusionConfig;
use crate::model::heads::{OutputConfig, mtp};
use crate::model::keys::{Keys, MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH};
use crate::model::mixers::attention::{AttentionConfig, heads, layers, rope};
use crate::model::mixers::{self, RecurrentConfig};
use crate::model::residual::{ResidualConfig, passes};
use crate::model::tensors::TensorNames;

impl Config {
    /// Reads and checks the metadata of `gguf`, the first of `shards`; the shards have the tensors.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for an unknown architecture, RoPE scaling or gating function; [`LoadError::Metadata`]
    /// for a value that is missing, out of range or contradicts another.
    pub fn from_gguf(gguf: &Gguf<'_>, shards: &[Gguf<'_>]) -> Result<Config, LoadError> {
        let key = "general.architecture";
        let name = gguf.str(key)?.ok_or_else(|| LoadError::Metadata {
            key: key.into(),
            found: "nothing".into(),
            expected: "the name of an architecture".into(),
        })?;
        let Some(entry) = FAMILIES.iter().find(|entry| entry.family.name == name) else {
            return Err(LoadError::Unsupported {
                what: "architecture",
                found: name.into(),
                known: FAMILIES.iter().map(|entry| entry.family.name).collect(),
            });
        };
        let (mut keys, mut family) = (Keys::new(gguf, entry.family.name), entry.family);
        if let Some(name) = family.required.iter().find(|name| !keys.has(name)) {
            return Err(keys.wrong(name, "nothing", "a number"));
        }
        (entry.prepare)(&mut keys, &mut family)?;
        let keys = keys;

        let n_blocks = keys.size("block_count", 1..=MAX_LAYERS)?;
        let n_nextn = keys.u32("nextn_predict_layers")?.unwrap_or(0);
        let n_nextn = keys.in_range("nextn_predict_layers", Some(n_nextn), 0..=n_blocks as u32 - 1)?;
        let n_embd = keys.size("embedding_length", 1..=MAX_WIDTH)?;
        let layer_kinds = kinds::layer_kinds(&keys, n_blocks, shards)?;
        let n_nextn = if kinds::has_mtp(&layer_kinds, shards, n_blocks - n_nextn) { n_nextn } else { 0 };
        let n_layer = n_blocks - n_nextn;
        family.rope = if family.alibi { None } else { rope::style(&keys, &family)? };
        let n_ctx_train = keys.size("context_length", 1..=MAX_CONTEXT)?;
        let norm = norm(&keys, &family)?;
        let causal = keys.bool("attention.causal")?.unwrap_or(!family.bidirectional);
        let (ropes, attention) = layers::read(&keys, &family, &layer_kinds, (n_embd, n_ctx_train), causal)?;
        let ffns = ffn::layers(&keys, &family, &layer_kinds, n_embd)?;
        let rescale = keys.u32("rescale_every_n_layers")?.unwrap_or(0) as usize;
        let parts = layer_kinds.iter().zip(attention).zip(ffns).enumerate();
        let layers = parts.map(|(block, ((kind, attention), ffn))| LayerConfig {
            block,
            mixer: kind.mixer,
            attention,
            state_at: 0,
            ffn,
            output_scale: if rescale > 0 && (block + 1) % rescale == 0 { 0.5 } else { 1.0 },
            after: None,
        });
        let layers: Vec<LayerConfig> = layers.collect();
        let has_positions = family.rope.is_some() || family.alibi;
        let n_vocab = vocabulary(shards)?;
        let mut config = Config {
            arch: family,
            n_embd,
            n_vocab,
            n_ctx_train,
            causal,
            diffusion: match family.diffusion && !causal {
                true => Some(DiffusionConfig::read(gguf, n_vocab)?),
                false => None,
            },
            norm,
            names: TensorNames { aliases: family.aliases, prefix: "", ignored: &[] },
            embedding: EmbeddingConfig::read(&keys, &family, (n_embd, n_layer), has_positions)?,
            attention: AttentionConfig::read(&keys, &family, family.rope, ropes, n_ctx_train)?,
            recurrent: kinds::recurrent(&keys, &family, (n_embd, norm.eps), &layer_kinds, shards)?,
            ffn: FfnConfig::read(&keys, &family, n_embd, n_blocks, shards)?,
            residual: ResidualConfig::read(&keys, &family, n_layer)?,
            output: OutputConfig::read(&keys, &family)?,
            layers,
            n_nextn,
            mtp_layer: None,
            is_mtp_head: false,
        };
        (entry.compose)(&keys, &mut config)?;
        config.complete(&keys, shards)?;
        Ok(config)
    }

    /// What depends on the order of the layers: passes, sparse attention, places in KV pages and states.
    fn complete(&mut self, keys: &Keys<'_, '_>, shards: &[Gguf<'_>]) -> Result<(), LoadError> {
        let n_layer = self.layers.len() - self.n_nextn;
        let next_layer = self.layers.get(n_layer).copied();
        let passes = passes::layers(keys, n_layer)?.into_iter();
        let layer =
            |pass: passes::PassLayer| LayerConfig { block: pass.block, after: pass.after, ..self.layers[pass.layer] };
        self.layers = passes.map(layer).collect();
        if self.arch.alibi {
            let n_head = self.n_head().max(1);
            if self.layers.iter().any(|l| l.attention.heads.n_head != n_head) {
                let found = "values that differ between layers";
                return Err(keys.wrong("attention.head_count", found, "the same for all"));
            }
            self.attention.alibi = Some(heads::slopes(keys.positive("attention.max_alibi_bias", 8.0)?, n_head));
        }
        let ropes = &mut self.attention.ropes;
        let mut parts: Vec<layers::LayerPart<'_>> = self.layers.iter_mut().map(LayerConfig::attention_part).collect();
        self.attention.compressed = mixers::compressed::read(keys, &self.arch, self.n_ctx_train, &mut parts, ropes)?;
        self.attention.indexer = mixers::indexer::read(keys, self.arch.indexer, shards, &mut parts, ropes)?;
        let index_layers = self.attention.indexer.map_or(0, |indexer| indexer.kv_heads().count());
        layers::place(keys, &mut parts, index_layers)?;
        let (mut state_at, state_len) = (0usize, self.recurrent.as_ref().map_or(0, RecurrentConfig::state_len));
        for layer in &mut self.layers {
            layer.state_at = state_at;
            state_at = state_at.saturating_add(if layer.mixer.is_recurrent() { state_len } else { 0 });
        }
        if let Some(ngrams) = &mut self.embedding.ngrams {
            ngrams.place(state_at);
        }
        let can_draft = self.output.mtp != Mtp::Unsupported && self.attention.indexer.is_none();
        self.mtp_layer = next_layer.filter(|l| can_draft && mtp::is_supported(l.mixer, l.ffn.exists));
        Ok(())
    }
}

/// Kind and epsilon of the norms. The key of the epsilon tells the kind; if both keys exist, the family's kind applies.
fn norm(keys: &Keys<'_, '_>, family: &Family) -> Result<NormConfig, LoadError> {
    const RMS: (NormKind, &str) = (NormKind::Rms, "attention.layer_norm_rms_epsilon");
    const LAYER: (NormKind, &str) = (NormKind::Layer, "attention.layer_norm_epsilon");
    let (usual, other) = if family.norm == NormKind::Rms { (RMS, LAYER) } else { (LAYER, RMS) };
    let ((kind, name), eps) = match keys.f32(usual.1)? {
        Some(eps) => (usual, eps),
        None => match keys.f32(other.1)? {
            Some(eps) => (other, eps),
            None => return Err(keys.wrong(usual.1, "nothing", format!("a positive number, or `{}`", other.1))),
        },
    };
    if eps <= 0.0 {
        return Err(keys.wrong(name, eps, "a positive number"));
    }
    Ok(NormConfig { kind, eps, plain: family.plain_norms })
}

/// The vocabulary size is the number of rows of the token embedding.
fn vocabulary(shards: &[Gguf<'_>]) -> Result<usize, LoadError> {
    let Some(t) = shards.iter().find_map(|gguf| gguf.tensor("token_embd.weight")) else {
        return Err(LoadError::MissingTensor { name: "token_embd.weight".into() });
    };
    if t.dims[1] > u64::from(MAX_WIDTH) {
        return Err(LoadError::Tensor {
            name: "token_embd.weight".into(),
            found: format!("{} rows", t.dims[1]),
            expected: format!("at most {MAX_WIDTH} rows"),
        });
    }
    Ok(t.dims[1] as usize)
}
