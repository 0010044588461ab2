//! Hyper-parameters, read from untrusted metadata.

mod diffusion;
mod layers;
mod passes;

use alloc::format;
use alloc::vec::Vec;

use crate::model::ffn::activation::activation;
use crate::model::ffn::experts::experts;
pub use crate::model::ffn::experts::{AdjugatesConfig, ExpertsConfig};
pub use crate::model::mixers::attention::heads::{HeadConfig, TemperatureConfig};
use crate::model::mixers::attention::heads::{slopes, temperature};
pub use diffusion::DiffusionConfig;
use layers::{layers, place};
pub use passes::PassEnd;
use passes::passes;

use crate::error::{LoadError, RequestError};
use crate::gguf::Gguf;
use crate::kernels::attention::{AttentionWindow, Compressor, KvLayout, KvType};
use crate::kernels::elementwise::Xielu;
use crate::kernels::norm::NormKind;
use crate::kernels::rope::RopeStyle;
use crate::math::sqrt;
pub use crate::model::embeddings::ngrams::NgramConfig;
use crate::model::families::{ARCHS, Alibi, Arch, Mtp};
use crate::model::heads::mtp;
use crate::model::keys::Keys;
use crate::model::mixers;
use crate::model::mixers::attention::rope;
use crate::model::mixers::attention::rotary::{RopeConfig, ScalingKind};
pub use crate::model::mixers::{CompressedConfig, IndexerConfig, MixerKind, RecurrentConfig, Selection};
use crate::model::residual::attended::MAX_KEPT;
pub use crate::model::residual::hyper::HyperConfig;

/// Maximal number of layers: beyond any known model, and cheap to hold.
const MAX_LAYERS: u32 = 4096;
/// Maximal width of a vector: keeps every product of two widths below 2^48.
pub(crate) const MAX_WIDTH: u32 = 1 << 24;
/// Maximal context: f64 RoPE angles stay exact to 1e-12 well beyond.
pub(crate) const MAX_CONTEXT: u32 = 1 << 28;

/// Hyper-parameters of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The model family, a row of [`ARCHS`].
    pub arch: Arch,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Rows of the token embedding.
    pub n_vocab: usize,
    /// Context that the model was trained for, in tokens.
    pub n_ctx_train: usize,
    /// Kind of all norms.
    pub norm: NormKind,
    /// Epsilon of all norms.
    pub norm_eps: f32,
    /// Factor on token embeddings.
    pub embedding_scale: f32,
    /// Factor on the outputs of attention and feed-forward.
    pub residual_scale: f32,
    /// Factor on logits.
    pub logit_scale: f32,
    /// Factor on the output of attention.
    pub value_scale: f32,
    /// Width of the embeddings that each layer has of its own; 0 for none.
    pub n_embd_layer: usize,
    /// Number of residual streams; 0 if there is only the usual one.
    pub n_altup: usize,
    /// tanh soft cap on attention scores (Gemma 2).
    pub attn_soft_cap: Option<f32>,
    /// tanh soft cap on logits (Gemma 2).
    pub logit_soft_cap: Option<f32>,
    /// Whether attention and feed-forward of all layers read the same residual stream (GPT-NeoX).
    pub parallel_residual: bool,
    /// Whether attention is causal. If not, the model embeds whole texts, or generates by diffusion.
    pub causal: bool,
    /// Of models that generate by diffusion ([`crate::diffusion`]).
    pub diffusion: Option<DiffusionConfig>,
    /// Pooling of token states to an embedding, as numbered in the file ([`crate::embed::Pooling`]).
    pub pooling_type: Option<u32>,
    /// Pooling before the classification head, likewise.
    pub classifier_pooling: Option<u32>,
    /// Which elements of a head RoPE pairs; `None` without RoPE.
    pub rope: Option<RopeStyle>,
    /// Whether the model has learned position embeddings.
    pub learned_positions: bool,
    /// Number of buckets of distances that have biases on attention scores; 0 for none.
    pub relative_buckets: usize,
    /// Slopes of ALiBi, one per query head.
    pub alibi: Option<Vec<f32>>,
    /// Limit of the absolute values of queries, keys and values.
    pub qkv_limit: Option<f32>,
    /// Whether heads of layers with RoPE are normalised without weights.
    pub plain_head_norms: bool,
    /// Factor on queries by position.
    pub temperature: Option<TemperatureConfig>,
    /// The RoPE variants; layers refer to them by index.
    pub ropes: Vec<RopeConfig>,
    /// Experts, if the model has any.
    pub experts: Option<ExpertsConfig>,
    /// Betas of the activation SiTU of gate and up, if the model has it.
    pub situ: Option<[f32; 2]>,
    /// Layers after which the residual stream is kept for all later ones; 0 if it is not.
    pub residual_block: usize,
    /// Hyper-connections, if the model has them.
    pub hyper: Option<HyperConfig>,
    /// Embeddings of n-grams, if the model has them.
    pub ngrams: Option<NgramConfig>,
    /// Indexers of sparse attention, if the model has any.
    pub indexer: Option<IndexerConfig>,
    /// Attention with compressed keys, if the model has it.
    pub compressed: Option<CompressedConfig>,
    /// Recurrent layers, if the model has any.
    pub recurrent: Option<RecurrentConfig>,
    /// Per-layer parameters.
    pub layers: Vec<LayerConfig>,
    /// Layers of the file after these, which predict further tokens (NextN, multi-token prediction).
    pub n_nextn: usize,
    /// The first of those, if the engine can draft with it ([`Model::mtp_head`](crate::model::Model::mtp_head)).
    pub mtp_layer: Option<LayerConfig>,
    /// Whether this is such a layer alone: it also reads the hidden state of the token before.
    pub is_mtp_head: bool,
}

/// Parameters of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerConfig {
    /// Attention window of a token.
    pub window: AttentionWindow,
    /// Index in [`Config::ropes`]; `None` for a layer without RoPE.
    pub rope: Option<usize>,
    /// The positions that attention reads.
    pub selection: Selection,
    /// Positions of a block whose indexer keys are averaged.
    pub index_ratio: usize,
    /// The blocks of positions that have a compressed key.
    pub compressor: Option<Compressor>,
    /// Whether the token, instead of the router, selects the experts.
    pub routes_by_token: bool,
    /// What mixes the tokens of a sequence.
    pub mixer: MixerKind,
    /// Heads of attention; zero in layers without.
    pub heads: HeadConfig,
    /// Factor on attention scores.
    pub attn_scale: f32,
    /// Whether the layer has a feed-forward.
    pub has_ffn: bool,
    /// Width of the dense feed-forward.
    pub n_ff: usize,
    /// Index of the layer's weights, which several layers may have.
    pub block: usize,
    /// Index of the layer's keys and values in KV pages.
    pub kv_layer: usize,
    /// Whether the layer computes these keys and values. If not, it reads those of an earlier layer.
    pub owns_kv: bool,
    /// What follows the layer if it is the last of a pass, but not of the last one.
    pub after: Option<PassEnd>,
    /// Offset of the layer's state in the recurrent state of a sequence.
    pub state_at: usize,
    /// Limit of the products of an expert's gate and up; 0 for none.
    pub expert_limit: f32,
    /// The same for the shared expert.
    pub shared_limit: f32,
    /// Activation sparsity of the dense feed-forward: the gates below `mean + sparsity * deviation` become 0; 0 for none.
    pub sparsity: f32,
    /// Factor on the residual stream after the layer.
    pub output_scale: f32,
    /// The activation, where it is xIELU.
    pub xielu: Option<Xielu>,
}

impl LayerConfig {
    /// Number of layers of KV pages that attention writes, beside the keys of an indexer.
    pub(crate) fn kv_layers(&self) -> usize {
        // compressed keys and what they are made of, and the same of the indexer that selects overlapping blocks
        1 + self.compressor.map_or(0, |blocks| if blocks.overlaps { 4 } else { 2 })
    }
}

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
        let Some(arch) = ARCHS.iter().find(|a| a.name == name) else {
            return Err(LoadError::Unsupported {
                what: "architecture",
                found: name.into(),
                known: ARCHS.iter().map(|a| a.name).collect(),
            });
        };
        let keys = Keys { gguf, arch: arch.name };
        if let Some(name) = arch.required.iter().find(|name| !keys.has(name)) {
            return Err(keys.wrong(name, "nothing", "a number"));
        }
        let n_blocks = keys.size("block_count", 1..=MAX_LAYERS)?;
        let n_nextn = keys.u32("nextn_predict_layers")?.unwrap_or(0);
        let n_nextn = keys.in_range("nextn_predict_layers", Some(n_nextn), 0..=n_blocks as u32 - 1)?;
        let n_embd = keys.size("embedding_length", 1..=MAX_WIDTH)?;
        let kinds = mixers::layer_kinds(&keys, arch, n_blocks, shards)?;
        let n_nextn = if mixers::compressed::has_mtp(&kinds, shards, n_blocks - n_nextn) { n_nextn } else { 0 };
        let n_layer = n_blocks - n_nextn;
        let alibi = match arch.alibi {
            Alibi::Never => false,
            Alibi::Always => true,
            Alibi::Layers(n) => n == n_layer,
        };
        let rope = if alibi { None } else { rope::style(&keys, arch)? };
        let n_ctx_train = keys.size("context_length", 1..=MAX_CONTEXT)?;
        let (norm, norm_eps) = norm(&keys, arch)?;
        let embedding_scale = if arch.embeddings_by_width { sqrt(n_embd as f32) } else { 1.0 };
        let factors = arch.factors.map(|f| [f.embedding, f.depth / sqrt(n_layer as f32), f.width / n_embd as f32]);
        let [embedding_scale, residual_scale, logit_scale] = factors.unwrap_or([embedding_scale, 1.0, 1.0]);
        let logit_scale = keys.optional("logit_scale")?.unwrap_or(logit_scale);
        let causal = keys.bool("attention.causal")?.unwrap_or(!arch.bidirectional);
        let (mut ropes, mut layers) = layers(&keys, &Arch { rope, ..*arch }, &kinds, n_embd, n_ctx_train, causal)?;
        let next_layer = layers.get(n_layer).copied();
        layers.truncate(n_layer);
        let mut layers = passes(&keys, layers)?;
        let n_head = layers.iter().map(|l| l.heads.n_head).max().unwrap_or(0).max(1);
        if alibi && layers.iter().any(|l| l.heads.n_head != n_head) {
            return Err(keys.wrong("attention.head_count", "values that differ between layers", "the same for all"));
        }
        let alibi = if alibi { Some(slopes(keys.positive("attention.max_alibi_bias", 8.0)?, n_head)) } else { None };
        let widths = keys.per_layer_u32("feed_forward_length", n_blocks)?.unwrap_or_default();
        let experts = experts(&keys, arch, n_embd, widths.into_iter().max().unwrap_or(0) as usize, shards)?;
        let compressed = mixers::compressed::read(&keys, arch, n_ctx_train, &mut layers, &mut ropes)?;
        let original_context = ropes.iter().find_map(|r| r.scaling).map_or(n_ctx_train, |s| s.original_context);
        let recurrent = mixers::read(&keys, arch, n_embd, &kinds, shards)?;
        let indexer = mixers::indexer::read(&keys, arch, shards, &mut layers, &mut ropes)?;
        let index_layers = indexer.map_or(0, |indexer| indexer.kv_heads().count());
        place(&keys, arch, &mut layers, recurrent.as_ref(), index_layers)?;
        let n_vocab = vocabulary(shards)?;
        let hyper = HyperConfig::read(&keys)?;
        let streams = hyper.map_or(n_embd, |hyper| hyper.n * n_embd);
        let state_at = layers_state_len(recurrent.as_ref(), &layers);
        let ngrams = NgramConfig::read(&keys, arch, &layers, (n_embd, streams), state_at)?;
        let mtp_layer =
            next_layer.filter(|l| arch.mtp != Mtp::Unsupported && mtp::is_supported(l) && indexer.is_none());
        Ok(Config {
            arch: Arch { act: activation(&keys, arch)?, ..*arch },
            n_embd,
            n_vocab,
            n_ctx_train,
            norm,
            norm_eps,
            embedding_scale: keys.optional("embedding_scale")?.unwrap_or(embedding_scale),
            residual_scale: keys.optional("residual_scale")?.unwrap_or(residual_scale),
            logit_scale: if arch.divided_logits { 1.0 / logit_scale } else { logit_scale },
            rope,
            learned_positions: rope.is_none() && alibi.is_none() && arch.relative_distance == 0,
            relative_buckets: match arch.relative_distance {
                0 => 0,
                _ => keys.size("attention.relative_buckets_count", 4..=1024)? / 2 * 2,
            },
            alibi,
            qkv_limit: keys.optional("attention.clamp_kqv")?,
            temperature: temperature(&keys, arch, original_context)?,
            value_scale: keys.optional("attention.value_scale")?.unwrap_or(1.0),
            n_altup: altup(&keys, arch)?,
            n_embd_layer: match keys.u32("embedding_length_per_layer_input")?.filter(|_| !arch.ngrams) {
                None => arch.layer_embeddings,
                v => keys.in_range("embedding_length_per_layer_input", v, 0..=MAX_WIDTH / n_layer as u32)?,
            },
            attn_soft_cap: keys.optional("attn_logit_softcapping")?,
            logit_soft_cap: keys.optional("final_logit_softcapping")?,
            parallel_residual: keys.bool("use_parallel_residual")?.unwrap_or(arch.parallel),
            causal,
            diffusion: match arch.diffusion && !causal {
                true => Some(DiffusionConfig::read(gguf, n_vocab)?),
                false => None,
            },
            pooling_type: keys.u32("pooling_type")?,
            classifier_pooling: keys.u32("classifier.pooling_type")?,
            ropes,
            plain_head_norms: arch.plain_head_norms && experts.is_none_or(|e| e.n != 128),
            experts,
            situ: situ(&keys)?,
            residual_block: residual_block(&keys, n_layer)?,
            hyper,
            ngrams,
            indexer,
            compressed,
            recurrent,
            layers,
            n_nextn,
            mtp_layer,
            is_mtp_head: false,
        })
    }

    /// The configuration of [`Config::mtp_layer`] as a model of its own.
    pub(crate) fn mtp_head(&self) -> Option<Config> {
        let layer = LayerConfig { block: 0, kv_layer: 0, state_at: 0, ..self.mtp_layer? };
        let (layers, n_nextn) = ([layer].into(), 0);
        Some(Config {
            layers,
            n_nextn,
            recurrent: None,
            ngrams: None,
            mtp_layer: None,
            is_mtp_head: true,
            ..self.clone()
        })
    }

    /// Whether a tensor belongs to a layer that only drafts ([`Config::n_nextn`]).
    pub(crate) fn is_unused(&self, tensor: &str) -> bool {
        let layer = tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.')?.0.parse().ok());
        layer.is_some_and(|layer| (self.n_layer()..self.n_layer() + self.n_nextn).contains(&layer))
    }

    /// Numbers of residual streams that are kept before layer `i`, and before its feed-forward.
    pub(crate) fn kept_residuals(&self, i: usize) -> [usize; 2] {
        match self.residual_block {
            0 => [0, 0],
            block => [i.div_ceil(block), i / block + 1],
        }
    }

    /// Why the model does not generate token by token, if it does not.
    pub fn check_generates(&self) -> Result<(), RequestError> {
        match (self.causal, self.diffusion) {
            (true, _) => Ok(()),
            (false, Some(_)) => Err(RequestError::Diffusion),
            (false, None) => Err(RequestError::Encoder),
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
        self.layers.iter().find(|l| l.block == block).unwrap_or(&self.layers[0])
    }

    /// Rows of the query projection of a layer: queries, and their gates if there are any.
    pub(crate) fn q_rows(&self, heads: &HeadConfig) -> usize {
        heads.q_width() * if self.arch.gated_queries { 2 } else { 1 }
    }

    /// Largest number of query heads of a layer.
    pub fn n_head(&self) -> usize {
        self.layers.iter().map(|l| l.heads.n_head).max().unwrap_or(0)
    }

    /// Largest number of key and value heads of a layer.
    pub fn n_head_kv(&self) -> usize {
        self.layers.iter().map(|l| l.heads.n_head_kv).max().unwrap_or(0)
    }

    /// Largest number of pairs that a RoPE variant rotates.
    pub(crate) fn rope_pairs(&self) -> usize {
        self.ropes.iter().map(|rope| rope.n_rot / 2).max().unwrap_or(0)
    }

    /// Floats of the recurrent state of a sequence; 0 for a model without recurrent layers.
    pub fn state_len(&self) -> usize {
        let ngrams = self.ngrams.as_ref().map_or(0, NgramConfig::state_len);
        layers_state_len(self.recurrent.as_ref(), &self.layers).saturating_add(ngrams)
    }

    /// Bytes of the recurrent state of a sequence; 0 for a model without recurrent layers.
    pub fn state_bytes(&self) -> usize {
        self.state_len().saturating_mul(size_of::<f32>())
    }

    /// The layout of the model's KV pages.
    pub fn kv_layout(&self, kv_type: KvType) -> KvLayout {
        let owners = self.layers.iter().filter(|l| l.mixer.has_attention() && l.owns_kv);
        let own = |l: &LayerConfig| match (&self.compressed, l.mixer) {
            (Some(c), MixerKind::Compressed) => mixers::compressed::kv_layers(c, l).collect(),
            _ => [l.heads.kv_heads()].to_vec(),
        };
        let index = |l: &LayerConfig| match (self.indexer, l.selection) {
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
            self.compressed.is_some()
                || self.indexer.is_some_and(|indexer| indexer.kv_heads().count() > 1)
                || self.layers.iter().any(|l| !l.owns_kv && l.kv_layer == kv_layer || l.selection == index)
        };
        self.kv_layout(kv_type).in_turn(is_shared)
    }

    /// Whether the model has LongRoPE: frequency divisors for short and for long contexts.
    pub(crate) fn is_longrope(&self) -> bool {
        self.ropes.iter().any(|r| r.scaling.is_some_and(|s| s.kind == ScalingKind::LongRope))
    }

    /// Longest context: with learned position embeddings their number, else unlimited.
    pub fn max_context(&self) -> usize {
        if self.learned_positions { self.n_ctx_train } else { usize::MAX }
    }

    /// The longest attention window in tokens, if every layer has one: keys before it are never read again.
    pub fn window(&self) -> Option<usize> {
        if self.recurrent.is_some() || self.compressed.is_some() {
            return None;
        }
        let before = self.layers.iter().map(|l| l.window.left).max()?;
        before.checked_add(1)
    }
}

/// Floats of the state of all recurrent layers.
fn layers_state_len(recurrent: Option<&RecurrentConfig>, layers: &[LayerConfig]) -> usize {
    let n = layers.iter().filter(|l| l.mixer.is_recurrent()).count();
    recurrent.map_or(0, |r| r.state_len().saturating_mul(n))
}

/// Betas of SiTU; the second is 0 if `up` is used as it is.
fn situ(keys: &Keys<'_, '_>) -> Result<Option<[f32; 2]>, LoadError> {
    let beta = keys.optional("activation.situ_beta")?;
    let linear = keys.f32("activation.situ_linear_beta")?.unwrap_or(0.0);
    Ok(beta.map(|beta| [beta, if linear > 0.0 { linear } else { 0.0 }]))
}

fn residual_block(keys: &Keys<'_, '_>, n_layer: usize) -> Result<usize, LoadError> {
    let name = "attn_res.block_size";
    match keys.u32(name)? {
        None | Some(0) => Ok(0),
        block => keys.in_range(name, block, n_layer.div_ceil(MAX_KEPT) as u32..=MAX_LAYERS),
    }
}

/// Kind and epsilon of the norms. The key of the epsilon tells the kind; if both keys exist, the family's kind applies.
fn norm(keys: &Keys<'_, '_>, arch: &Arch) -> Result<(NormKind, f32), LoadError> {
    const RMS: (NormKind, &str) = (NormKind::Rms, "attention.layer_norm_rms_epsilon");
    const LAYER: (NormKind, &str) = (NormKind::Layer, "attention.layer_norm_epsilon");
    let (usual, other) = if arch.norm == NormKind::Rms { (RMS, LAYER) } else { (LAYER, RMS) };
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
    Ok((if arch.always_rms { NormKind::Rms } else { kind }, eps))
}

/// Number of residual streams. The first one must be the one that blocks compute.
fn altup(keys: &Keys<'_, '_>, arch: &Arch) -> Result<usize, LoadError> {
    if arch.streams == 0 {
        return Ok(0);
    }
    keys.in_range("altup.active_idx", keys.u32("altup.active_idx")?.or(Some(0)), 0..=0)?;
    keys.in_range("altup.num_inputs", keys.u32("altup.num_inputs")?.or(Some(arch.streams)), 2..=16)
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
