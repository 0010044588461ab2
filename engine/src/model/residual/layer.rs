//! A layer: norms, mixer and feed-forward, whatever the order in which they are computed.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::config::ResidualConfig;
use crate::error::LoadError;
use crate::kernels::attention::KvMemory;
use crate::kernels::elementwise::{Activation, scale};
use crate::kernels::panel::Matrix;
use crate::model::embeddings::ngrams::NgramWeights;
use crate::model::embeddings::per_layer::LayerEmbedding;
use crate::model::embeddings::{EmbeddingConfig, ngrams};
use crate::model::family::ExpertInput;
use crate::model::ffn::{FeedForward, FeedForwardConfig, FfnInput};
use crate::model::linear::{Norm, padded};
use crate::model::memory::{Size, Stack};
use crate::model::mixers::{MixerBatch, MixerConfig, MixerWeights};
use crate::model::pass::{LayerAt, Pass, Stage, SubLayerRows};
use crate::model::rows::columns;
use crate::model::tensors::{Declared, Loaded, Name, NormName, vector};

const ATTN_NORM: NormName = NormName("attn_norm");
const POST_ATTN_NORM: NormName = NormName("post_attention_norm");
pub(super) const FFN_NORM: NormName = NormName("ffn_norm");
const POST_FFN_NORM: NormName = NormName("post_ffw_norm");
/// Norms of post-norm blocks: after attention, a second one after attention, after the feed-forward.
pub(super) const ATTN_OUTPUT_NORM: NormName = NormName("attn_output_norm");
const SECOND_NORM: NormName = NormName("attn_norm_2");
pub(super) const LAYER_OUTPUT_NORM: NormName = NormName("layer_output_norm");
const OUTPUT_SCALE: Name = Name::weight("layer_output_scale");

/// Weights of one layer.
pub(crate) struct Layer {
    /// Norm before the mixer (n_embd).
    pub(super) attn_norm: Option<Norm>,
    /// What mixes the tokens.
    pub(crate) mixer: MixerWeights,
    /// A second norm after the mixer, of the sum with the layer's input (n_embd).
    pub(super) second_norm: Option<Norm>,
    /// Norm after the mixer (n_embd).
    pub(super) post_attn_norm: Option<Norm>,
    /// Norm before the feed-forward (n_embd).
    pub(super) ffn_norm: Option<Norm>,
    /// The feed-forward.
    pub(crate) ffn: FeedForward,
    /// Norm after the feed-forward (n_embd).
    pub(super) post_ffn_norm: Option<Norm>,
    /// Embeddings of n-grams, which are added to the residual streams before the mixer.
    pub(super) ngrams: Option<Box<NgramWeights>>,
    /// The layer's own embedding, which is added after the feed-forward.
    pub(super) embedding: Option<LayerEmbedding>,
    /// Factor on the residual stream after the layer.
    pub(super) output_scale: Option<f32>,
    /// Factor on the token's embedding, which is added after the layer.
    pub(super) embedding_skip: Option<f32>,
    /// Whether attention and feed-forward read the same residual stream.
    pub(super) is_parallel: bool,
}

/// What a layer knows of the model and itself.
#[derive(Clone, Copy)]
pub(crate) struct LayerView<'c> {
    pub(crate) at: LayerAt,
    /// Index of the weights.
    pub(crate) block: usize,
    /// Width of the model (n_embd), and rows of the token embedding.
    pub(crate) d: usize,
    pub(crate) n_vocab: usize,
    /// Whether norms that have no tensor are computed without weights.
    pub(crate) plain_norms: bool,
    pub(crate) act: Activation,
    pub(crate) mixer: MixerConfig<'c>,
    pub(crate) ffn: FeedForwardConfig<'c>,
    pub(crate) residual: &'c ResidualConfig,
    pub(crate) embedding: &'c EmbeddingConfig,
    /// Embeddings of n-grams, once they are loaded.
    pub(crate) ngram_table: Option<&'c Matrix>,
}

impl LayerView<'_> {
    /// Declares the tensors of the layer.
    pub(crate) fn tensors(&self, t: &mut Declared<'_>) {
        let (c, wide) = (self.residual, vector(self.d));
        let has_norms = !self.plain_norms && !c.has_gated_streams();
        if c.post_norm {
            for norm in [ATTN_OUTPUT_NORM, LAYER_OUTPUT_NORM] {
                t.required(norm.weight(), wide);
                t.optional(norm.bias(), wide);
            }
            t.optional(SECOND_NORM.weight(), wide);
            t.optional(SECOND_NORM.bias(), wide);
        }
        if has_norms {
            let has_mixer = !self.mixer.is_none() || !t.has(FFN_NORM.weight());
            let is_pre_norm = !c.post_norm && !t.has(POST_ATTN_NORM.weight());
            if c.optional_first_norm && self.block == 0 {
                t.free(ATTN_NORM.weight(), wide);
            } else if has_mixer && is_pre_norm {
                t.required(ATTN_NORM.weight(), wide);
            } else {
                t.optional(ATTN_NORM.weight(), wide);
            }
            t.optional(FFN_NORM.weight(), wide);
        }
        t.optional(ATTN_NORM.bias(), wide);
        t.optional(FFN_NORM.bias(), wide);
        // the names in files of Falcon-H1 and PLaMo 2
        t.optional(FFN_NORM.bare(), wide);
        for norm in [POST_ATTN_NORM, POST_FFN_NORM] {
            t.optional(norm.weight(), wide);
            t.optional(norm.bare(), wide);
        }
        t.optional(OUTPUT_SCALE, vector(1));
        self.mixer.tensors(t, self.d);
        self.ffn.tensors(t, self.d, self.n_vocab);
        if self.embedding.per_layer > 0 {
            LayerEmbedding::tensors(t, self.embedding.per_layer, self.d);
        }
        if let Some(ngrams) = ngrams::of_layer(self.embedding, self.block) {
            ngrams.tensors(t, self.d);
        }
    }

    /// Takes the tensors of the layer.
    pub(crate) fn load(&self, t: &mut Loaded<'_>) -> Result<Layer, LoadError> {
        let (c, d) = (self.residual, self.d);
        let plain = || self.plain_norms.then(|| Norm::plain(d));
        let mixer = self.mixer.load(self.block, t)?;
        let mut attn_norm = t.norm(ATTN_NORM)?.or_else(plain);
        let mut ffn_norm = t.norm(FFN_NORM)?.or_else(plain);
        if c.swapped_norms && ffn_norm.is_some() {
            core::mem::swap(&mut attn_norm, &mut ffn_norm);
        }
        let ffn = self.ffn.load(t, d)?;
        let is_partial = mixer.is_none() || ffn.is_none();
        if mixer.is_none() && ffn_norm.is_none() {
            ffn_norm = attn_norm.take();
        }
        // a block is parallel if it has one norm for both sub-layers, or if the metadata says so
        let has_one_norm = attn_norm.is_some() && ffn_norm.is_none() && !is_partial;
        let parallel = !c.post_norm && (c.parallel || has_one_norm);
        if parallel && attn_norm.is_none() {
            return Err(t.missing(ATTN_NORM.weight()));
        }
        for part in [POST_ATTN_NORM.weight(), POST_FFN_NORM.weight()] {
            if parallel && t.has(part) {
                let found = "a norm after a sub-layer of a parallel block";
                return Err(t.error(part, found, "no such norm where attention and feed-forward are parallel"));
            }
        }
        let embedding = if self.embedding.per_layer > 0 { Some(LayerEmbedding::load(t)?) } else { None };
        let ngrams = match ngrams::of_layer(self.embedding, self.block) {
            Some(ngrams) => Some(Box::new(NgramWeights::load(ngrams, t, d)?)),
            None => None,
        };
        let output_scale = t.optional(OUTPUT_SCALE).and_then(|v| v.first().copied());
        let with_eps = |norm: Norm| Norm { eps: c.post_norm_eps, ..norm };
        Ok(Layer {
            is_parallel: parallel,
            mixer,
            ngrams,
            second_norm: t.norm(SECOND_NORM)?,
            post_attn_norm: t.norm(POST_ATTN_NORM)?.map(with_eps),
            ffn,
            post_ffn_norm: t.norm(POST_FFN_NORM)?.map(with_eps),
            embedding,
            output_scale: output_scale.filter(|_| !self.embedding.skips),
            embedding_skip: output_scale.filter(|_| self.embedding.skips),
            attn_norm,
            ffn_norm,
        })
    }
}

/// Temporaries of a block, which live as long as it.
pub(super) struct BlockRows<'m> {
    /// (rows, n_embd): a norm of the residual stream.
    pub(super) h: &'m mut [f32],
    /// (rows, padded n_embd): output of a sub-layer.
    pub(super) y: &'m mut [f32],
    /// (rows, n_embd): input of the layer, where something after attention reads it.
    pub(super) input: &'m mut [f32],
}

impl Layer {
    /// What experts read beside their input.
    pub(super) fn reads(&self, c: &LayerView<'_>) -> ExpertInput {
        self.ffn.reads(c.ffn.model)
    }

    /// Floats of a row of [`BlockRows`].
    fn parts(&self, c: &LayerView<'_>) -> [usize; 3] {
        let has_input = self.reads(c) != ExpertInput::Same || self.second_norm.is_some();
        [c.d, padded(c.d), if has_input { c.d } else { 0 }]
    }

    /// Takes the temporaries of a block. The input of the layer is the residual stream `x`.
    pub(super) fn take<'m>(&self, n: usize, c: &LayerView<'_>, x: &[f32], stack: &mut Stack<'m>) -> BlockRows<'m> {
        let [h, y, input] = stack.rows(n, self.parts(c));
        if !input.is_empty() {
            input.copy_from_slice(x);
        }
        BlockRows { h, y, input }
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        let mut all = self.mixer.matrices();
        all.extend(self.ngrams.iter().flat_map(|n| n.matrices()));
        all.extend(self.embedding.iter().flat_map(LayerEmbedding::matrices));
        all.extend(self.ffn.matrices());
        all
    }

    /// Temporaries of what the layer computes with `n` rows, of which none lives longer than another.
    pub(super) fn inner_size(&self, c: &LayerView<'_>, n: usize) -> Size {
        let embedding = self.embedding.as_ref().map_or(Size::NONE, |embedding| embedding.size(n));
        let ngrams = self.ngrams.as_ref().map_or(Size::NONE, |ngrams| ngrams.size(n));
        self.mixer.size(n, c.d).or(self.ffn.size(c.ffn.model, n, c.d)).or(embedding).or(ngrams)
    }

    /// Temporaries of `n` rows that live as long as the block.
    pub(super) fn block_size(&self, c: &LayerView<'_>, n: usize) -> Size {
        Size::rows(n, self.parts(c))
    }

    /// `y = mixer(norm(x))`; `h` is memory for the norm.
    pub(super) fn mix(
        &self,
        pass: &mut Pass<'_, '_>,
        c: LayerView<'_>,
        (x, BlockRows { h, y, .. }): (&[f32], &mut BlockRows<'_>),
        (mixers, memory): (&mut MixerBatch, &mut KvMemory),
        stack: &mut Stack<'_>,
    ) {
        let input = pass.rows.normed(self.attn_norm.as_ref(), x, h);
        pass.trace_stage(Stage::AttnNorm, Some(c.at.index), &mut columns(input, c.d, 0, c.d));
        self.run_mixer(pass, c, SubLayerRows { x: input, y }, (mixers, memory), stack);
    }

    /// `y = mixer(x)`.
    pub(super) fn run_mixer(
        &self,
        pass: &mut Pass<'_, '_>,
        c: LayerView<'_>,
        rows: SubLayerRows<'_>,
        (mixers, memory): (&mut MixerBatch, &mut KvMemory),
        stack: &mut Stack<'_>,
    ) {
        self.mixer.run(pass, (c.at, c.mixer), rows, (mixers, memory), stack);
    }

    /// `y = ffn(norm(x))`; `h` is memory for the norm.
    pub(super) fn feed_forward(
        &self,
        pass: &mut Pass<'_, '_>,
        c: LayerView<'_>,
        (x, BlockRows { h, y, input: layer }): (&[f32], &mut BlockRows<'_>),
        (tokens, memory): (&[u32], &mut KvMemory),
        stack: &mut Stack<'_>,
    ) {
        let input = pass.rows.normed(self.ffn_norm.as_ref(), x, h);
        pass.trace_stage(Stage::FfnNorm, Some(c.at.index), &mut columns(input, c.d, 0, c.d));
        self.run_ffn(pass, c, SubLayerRows { x: input, y }, FfnInput { layer, tokens }, memory, stack);
    }

    /// `y = ffn(x)`.
    pub(super) fn run_ffn(
        &self,
        pass: &mut Pass<'_, '_>,
        c: LayerView<'_>,
        rows: SubLayerRows<'_>,
        input: FfnInput<'_>,
        memory: &mut KvMemory,
        stack: &mut Stack<'_>,
    ) {
        self.ffn.run(pass, (c.at, c.ffn), rows, (input, &mut memory.states), stack);
    }

    /// What is added to and multiplied with the residual stream after the layer.
    pub(super) fn finish(&self, pass: &Pass<'_, '_>, x: &mut [f32], embeddings: &[f32]) {
        let (rows, d) = (pass.rows, pass.d);
        if let Some(factor) = self.embedding_skip {
            rows.add(x, d, embeddings, d, factor);
        }
        if let Some(factor) = self.output_scale {
            rows.each(x, d, &|_, x| scale(rows.cpu, x, factor));
        }
    }
}

/// `x = x + post_norm(y) * residual_scale`; `h` is overwritten if there is a norm.
pub(super) fn add(
    pass: &mut Pass<'_, '_>,
    c: LayerView<'_>,
    (norm, stage): (Option<&Norm>, Stage),
    x: &mut [f32],
    BlockRows { h, y, .. }: &mut BlockRows<'_>,
) {
    let (d, scale) = (c.d, c.residual.scale);
    let Some(norm) = norm else { return pass.rows.add(x, d, y, padded(d), scale) };
    pass.rows.norm(norm, y, padded(d), h);
    pass.trace_stage(stage, Some(c.at.index), &mut columns(h, d, 0, d));
    pass.rows.add(x, d, h, d, scale);
}
