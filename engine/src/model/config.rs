//! Hyper-parameters of a model, one part for each sort of mechanism.

use alloc::vec::Vec;

use crate::error::RequestError;
use crate::kernels::attention::{KvLayout, KvType};
use crate::kernels::norm::NormKind;
pub use crate::model::embeddings::{EmbeddingConfig, NgramConfig};
pub use crate::model::family::Family;
use crate::model::ffn::FeedForwardConfig;
pub use crate::model::ffn::config::{FfnConfig, LayerFfn};
pub use crate::model::ffn::experts::{AdjugatesConfig, ExpertsConfig};
pub use crate::model::heads::OutputConfig;
pub use crate::model::heads::diffusion::DiffusionConfig;
use crate::model::keys::Keys;
use crate::model::mixers;
use crate::model::mixers::MixerConfig;
use crate::model::mixers::attention::layers::LayerPart;
pub use crate::model::mixers::attention::rotary::{RopeConfig, Scaling, ScalingKind};
pub use crate::model::mixers::attention::{
    AttentionConfig, DistanceConfig, HeadConfig, LayerAttention, OutputGate, TemperatureConfig,
};
pub use crate::model::mixers::{
    CompressedConfig, DeltaNetConfig, IndexerConfig, KdaConfig, LatentHeads, LightningConfig, MambaConfig, MixerKind,
    RecurrentConfig, RwkvConfig, Selection, ShortConvConfig,
};
use crate::model::pass::LayerAt;
use crate::model::residual::layer::LayerView;
pub use crate::model::residual::{HyperConfig, PassEnd, ResidualConfig};
pub use crate::model::tensors::TensorNames;

/// Hyper-parameters of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The model family.
    pub arch: Family,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Rows of the token embedding.
    pub n_vocab: usize,
    /// Context that the model was trained for, in tokens.
    pub n_ctx_train: usize,
    /// Whether attention is causal. If not, the model embeds whole texts, or generates by diffusion.
    pub causal: bool,
    /// Of models that generate by diffusion ([`crate::diffusion`]).
    pub diffusion: Option<DiffusionConfig>,
    /// Kind and epsilon that all norms share.
    pub norm: NormConfig,
    /// Names by which the family's files have tensors.
    pub names: TensorNames,
    /// Factors, positions and norms of what enters the first layer.
    pub embedding: EmbeddingConfig,
    /// What attention has in common in all layers.
    pub attention: AttentionConfig,
    /// Recurrent layers, if the model has any.
    pub recurrent: Option<RecurrentConfig>,
    /// Activation and experts, which all feed-forwards share.
    pub ffn: FfnConfig,
    /// Order of norms and residual sums, and number of residual streams.
    pub residual: ResidualConfig,
    /// Scale and soft cap of logits, pooling, classification, multi-token prediction.
    pub output: OutputConfig,
    /// Per-layer parameters.
    pub layers: Vec<LayerConfig>,
    /// Layers of the file after these, which predict further tokens (NextN, multi-token prediction).
    pub n_nextn: usize,
    /// The first of those, if the engine can draft with it ([`Model::mtp_head`](super::Model::mtp_head)).
    pub mtp_layer: Option<LayerConfig>,
    /// Whether this is such a layer alone: it also reads the hidden state of the token before.
    pub is_mtp_head: bool,
}

/// Norms of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormConfig {
    /// Kind of all norms.
    pub kind: NormKind,
    /// Epsilon of all norms.
    pub eps: f32,
    /// Whether norms that have no tensor are computed without weights, instead of left out.
    pub plain: bool,
}

/// Parameters of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerConfig {
    /// Index of the layer's weights, which several layers may have.
    pub block: usize,
    /// What mixes the tokens of a sequence.
    pub mixer: MixerKind,
    /// Heads, window, RoPE and KV cache of this layer's attention.
    pub attention: LayerAttention,
    /// Offset of the layer's state in the recurrent state of a sequence.
    pub state_at: usize,
    /// Width, limits and routing of this layer's feed-forward.
    pub ffn: LayerFfn,
    /// Factor on the residual stream after the layer.
    pub output_scale: f32,
    /// What follows the layer if it is the last of a pass, but not of the last one.
    pub after: Option<PassEnd>,
}

impl LayerConfig {
    pub(crate) fn attention_part(&mut self) -> LayerPart<'_> {
        LayerPart { block: self.block, mixer: self.mixer, attention: &mut self.attention }
    }
}

impl Config {
    /// Removes RoPE from the layers, of which `keeps` tells by index, that do not keep it. A pattern of the file takes
    /// precedence.
    pub(crate) fn rotate_only(&mut self, keys: &Keys<'_, '_>, keeps: impl Fn(usize, &LayerConfig) -> bool) {
        if keys.has("attention.rope_pattern") {
            return;
        }
        let kept: Vec<bool> = self.layers.iter().enumerate().map(|(i, layer)| keeps(i, layer)).collect();
        let layers = self.layers.iter_mut().map(|layer| &mut layer.attention).zip(kept);
        mixers::attention::layers::rotate_only(&mut self.attention.ropes, layers);
    }

    /// Limits dense feed-forwards and shared experts: without limits of their own as the other experts.
    pub(crate) fn limit_dense(&mut self, keys: &Keys<'_, '_>) {
        self.ffn.limits_dense = true;
        if !keys.has("swiglu_clamp_shexp") {
            self.layers.iter_mut().for_each(|layer| layer.ffn.shared_limit = layer.ffn.expert_limit);
        }
    }

    /// The configuration of [`Config::mtp_layer`] as a model of its own.
    pub(crate) fn mtp_head(&self) -> Option<Config> {
        let layer = self.mtp_layer?;
        let attention = LayerAttention { kv_layer: 0, ..layer.attention };
        let mut head = self.clone();
        head.layers = [LayerConfig { block: 0, state_at: 0, attention, ..layer }].into();
        (head.n_nextn, head.mtp_layer, head.is_mtp_head) = (0, None, true);
        (head.recurrent, head.embedding.ngrams) = (None, None);
        Some(head)
    }

    /// Whether a tensor belongs to a layer that only drafts ([`Config::n_nextn`]).
    pub(crate) fn is_unused(&self, tensor: &str) -> bool {
        let layer = tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.')?.0.parse().ok());
        layer.is_some_and(|layer| (self.n_layer()..self.n_layer() + self.n_nextn).contains(&layer))
    }

    /// Why the model does not generate token by token, if it does not.
    pub fn check_generates(&self) -> Result<(), RequestError> {
        match (self.causal, self.diffusion) {
            (true, _) => Ok(()),
            (false, Some(_)) => Err(RequestError::Diffusion),
            (false, None) => Err(RequestError::Encoder),
        }
    }

    /// What layer `i` knows of the model.
    pub(crate) fn view(&self, i: usize) -> LayerView<'_> {
        let layer = &self.layers[i];
        LayerView {
            at: LayerAt { index: i, state_at: layer.state_at },
            block: layer.block,
            d: self.n_embd,
            n_vocab: self.n_vocab,
            plain_norms: self.norm.plain,
            act: self.ffn.act,
            mixer: MixerConfig {
                kind: layer.mixer,
                attention: &self.attention,
                layer: &layer.attention,
                recurrent: self.recurrent.as_ref(),
            },
            ffn: FeedForwardConfig {
                model: &self.ffn,
                layer: &layer.ffn,
                channel_mix: self.recurrent.as_ref().and_then(RecurrentConfig::channel_mix),
            },
            residual: &self.residual,
            embedding: &self.embedding,
            ngram_table: None,
        }
    }

    /// Number of layers.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// Number of layers with weights of their own.
    pub fn n_blocks(&self) -> usize {
        self.layers.iter().map(|l| l.block + 1).max().unwrap_or(0)
    }

    /// The first layer with weights `block`, below [`Config::n_blocks`].
    pub(crate) fn block(&self, block: usize) -> &LayerConfig {
        &self.layers[self.block_index(block)]
    }

    /// The index of that layer.
    pub(crate) fn block_index(&self, block: usize) -> usize {
        self.layers.iter().position(|l| l.block == block).unwrap_or(0)
    }

    /// Largest number of query heads of a layer.
    pub fn n_head(&self) -> usize {
        self.layers.iter().map(|l| l.attention.heads.n_head).max().unwrap_or(0)
    }

    /// Largest number of key and value heads of a layer.
    pub fn n_head_kv(&self) -> usize {
        self.layers.iter().map(|l| l.attention.heads.n_head_kv).max().unwrap_or(0)
    }

    /// Floats of the recurrent state of a sequence; 0 for a model without recurrent layers.
    pub fn state_len(&self) -> usize {
        let ngrams = self.embedding.ngrams.as_ref().map_or(0, |ngrams| ngrams.state_len());
        self.layers_state_len().saturating_add(ngrams)
    }

    /// Floats of the state of all recurrent layers.
    pub(crate) fn layers_state_len(&self) -> usize {
        let n = self.layers.iter().filter(|l| l.mixer.is_recurrent()).count();
        self.recurrent.map_or(0, |r| r.state_len().saturating_mul(n))
    }

    /// Bytes of the recurrent state of a sequence; 0 for a model without recurrent layers.
    pub fn state_bytes(&self) -> usize {
        self.state_len().saturating_mul(size_of::<f32>())
    }

    /// The layout of the model's KV pages.
    pub fn kv_layout(&self, kv_type: KvType) -> KvLayout {
        let owners = self.layers.iter().filter(|l| l.mixer.has_attention() && l.attention.owns_kv);
        let own = |l: &LayerConfig| match (&self.attention.compressed, l.mixer) {
            (Some(c), MixerKind::Compressed) => {
                mixers::compressed::kv_layers(c, l.attention.heads.key_dim, l.attention.compressor).collect()
            }
            _ => [l.attention.heads.kv_heads()].to_vec(),
        };
        let index = |l: &LayerConfig| match (self.attention.indexer, l.attention.selection) {
            (Some(indexer), Selection::Own { .. }) => Some(indexer.kv_heads()),
            _ => None,
        };
        KvLayout::new(kv_type, owners.flat_map(|l| own(l).into_iter().chain(index(l).into_iter().flatten())))
    }

    /// The layout of pages for batches of whole texts whose keys and values no later batch reads: all layers have the
    /// same bytes in turn, but for those whose keys and values other layers read, and keys of indexers.
    pub fn batch_kv_layout(&self, kv_type: KvType) -> KvLayout {
        let is_shared = |kv_layer: usize| {
            let index = Selection::Own { kv_layer };
            // a layer with compressed keys reads several
            self.attention.compressed.is_some()
                || self.attention.indexer.is_some_and(|indexer| indexer.kv_heads().count() > 1)
                || self
                    .layers
                    .iter()
                    .any(|l| !l.attention.owns_kv && l.attention.kv_layer == kv_layer || l.attention.selection == index)
        };
        self.kv_layout(kv_type).in_turn(is_shared)
    }

    /// Longest context: with learned position embeddings their number, else unlimited.
    pub fn max_context(&self) -> usize {
        if self.embedding.learned_positions { self.n_ctx_train } else { usize::MAX }
    }

    /// The longest attention window in tokens, if every layer has one: keys before it are never read again.
    pub fn window(&self) -> Option<usize> {
        if self.recurrent.is_some() || self.attention.compressed.is_some() {
            return None;
        }
        let before = self.layers.iter().map(|l| l.attention.window.left).max()?;
        before.checked_add(1)
    }
}
