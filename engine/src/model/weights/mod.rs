//! Weights of a model, assembled from its tensors.

mod load;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

pub(crate) use load::{linear, missing, norm, required_norm, transposed};

use crate::kernels::panel::{Matrix, PANEL};
use crate::model::config::Config;
pub use crate::model::embeddings::ngrams::NgramWeights;
use crate::model::heads::classifier::Classifier;
pub use crate::model::heads::mtp::MtpInput;
pub use crate::model::mixers::{ChannelMix, CompressedWeights, IndexerWeights, LatentWeights, Recurrent};
use crate::model::residual::hyper::HyperWeights;

/// A matrix and its bias: `y = w x + b`.
pub struct Linear {
    /// (rows, k) weights.
    pub w: Matrix,
    /// One value per row.
    pub bias: Option<Vec<f32>>,
}

/// Linears with the same input. Their outputs are side by side in one row, each padded to whole panels. A fused matrix
/// gives several parts.
pub struct LinearGroup {
    /// The linears, each with the offset of its output in the row.
    pub linears: Vec<(Linear, usize)>,
    /// Offset of each part in the row: q, k, v; or gate, up; or up.
    pub part_starts: Vec<usize>,
    /// Length of a row in floats.
    pub stride: usize,
}

/// RMSNorm or LayerNorm of vectors or of heads.
#[derive(Clone)]
pub struct Norm {
    /// A factor per element (width); or per element of all heads, where heads have their own factors.
    pub weight: Vec<f32>,
    /// Added after the scaling.
    pub bias: Option<Vec<f32>>,
    /// Epsilon, if it is not the model's.
    pub eps: Option<f32>,
    /// Elements that are normalised together.
    pub width: usize,
}

impl Norm {
    /// A norm without weights: a factor of 1 changes no bit.
    pub(crate) fn plain(width: usize) -> Norm {
        Norm { weight: vec![1.0; width], bias: None, eps: None, width }
    }
}

/// A dense feed-forward: `down(act(gate x) * up x)`, or `down(act(up x))`.
pub struct Dense {
    /// Gate and up, or up without a gate.
    pub up: LinearGroup,
    /// Norm before the down projection (n_ff).
    pub sub_norm: Option<Norm>,
    /// (n_embd, n_ff)
    pub down: Linear,
}

/// Mixture of experts: each token is routed to a few feed-forwards.
pub struct Experts {
    /// (n_expert, n_embd)
    pub router: Linear,
    /// The experts of each token (n_vocab, n_used), where the router does not select them.
    pub by_token: Option<Vec<u32>>,
    /// Added to the scores by which experts are selected (n_expert).
    pub selection_bias: Option<Vec<f32>>,
    /// The experts.
    pub matrices: ExpertMatrices,
    /// Adjugate experts, which groups of experts share.
    pub adjugates: Option<ExpertMatrices>,
    /// Projections to and from the latent space that experts work in (width, n_embd), (n_embd, width).
    pub latent: Option<[Linear; 2]>,
    /// Norm of the experts' sum in that space (width).
    pub latent_norm: Option<Norm>,
    /// Norm of the experts' input, where that is not the feed-forward's (n_embd).
    pub input_norm: Option<Norm>,
    /// Norm of the router's input, where that is not the experts' (n_embd).
    pub router_norm: Option<Norm>,
    /// Norm after the experts (n_embd).
    pub post_norm: Option<Norm>,
    /// Factor on the output of each expert.
    pub output_scale: Option<Vec<f32>>,
    /// An expert that all tokens go through.
    pub shared: Option<SharedExpert>,
}

/// Experts that are selected for each token.
pub struct ExpertMatrices {
    /// (n_ff, width), one per expert; empty without gates.
    pub gate: Vec<Matrix>,
    /// (n_ff, width), one per expert.
    pub up: Vec<Matrix>,
    /// (width, n_ff), one per expert.
    pub down: Vec<Matrix>,
    /// Biases of gate, up and down: one row per expert.
    pub biases: [Option<Vec<f32>>; 3],
}

impl ExpertMatrices {
    fn all(&self) -> impl Iterator<Item = &Matrix> {
        self.gate.iter().chain(&self.up).chain(&self.down)
    }

    /// Bytes that a token with `n_used` experts does not read.
    fn unused_bytes(&self, n_used: usize) -> usize {
        let (n, bytes) = (self.up.len(), self.all().map(Matrix::len_bytes).sum::<usize>());
        bytes / n.max(1) * n.saturating_sub(n_used)
    }
}

/// An expert that all tokens go through.
pub struct SharedExpert {
    /// (1, n_embd): the expert's output is multiplied by the sigmoid of this product.
    pub gate: Option<Linear>,
    /// Its feed-forward.
    pub ffn: Dense,
    /// Norm after it (n_embd).
    pub post_norm: Option<Norm>,
}

/// Weights of AltUp in a layer.
pub struct AltUp {
    /// Norm of the router's input (n_embd).
    pub router_norm: Norm,
    /// (n_altup, n_embd)
    pub router: Linear,
    /// (n_altup, n_altup, n_altup): factors of the predictions, by stream, stream that it reads, and router output.
    pub predict: Vec<f32>,
    /// (n_altup, n_altup): factors of the corrections, by stream and router output.
    pub correct: Vec<f32>,
    /// Factor on the first stream before the layer's embedding (n_embd).
    pub correct_scale: Vec<f32>,
    /// A low-rank path beside attention.
    pub laurel: Laurel,
}

/// A low-rank residual path: `x + norm(right left x)`.
pub struct Laurel {
    /// (rank, n_embd)
    pub left: Linear,
    /// (n_embd, rank)
    pub right: Linear,
    /// (n_embd)
    pub norm: Norm,
}

/// Projections between the residual stream outside of the layers and the streams of AltUp but the first (n_embd, n_embd).
pub struct AltUpProjections {
    /// To the streams.
    pub split: Vec<Matrix>,
    /// From the streams.
    pub merge: Vec<Matrix>,
}

/// Embeddings of a layer: `x = x + norm(proj(act(gate x) * embedding))`.
pub struct LayerEmbedding {
    /// (n_embd_layer, n_embd)
    pub gate: Linear,
    /// (n_embd, n_embd_layer)
    pub proj: Linear,
    /// (n_embd)
    pub norm: Norm,
}

/// Embeddings of all layers: `(norm(proj(x) / sqrt(n_embd)) + table[token] * sqrt(n_embd_layer)) / sqrt(2)`, where x is the
/// token's embedding.
pub struct LayerEmbeddings {
    /// (n_vocab, n_layer * n_embd_layer)
    pub table: Matrix,
    /// (n_layer * n_embd_layer, n_embd)
    pub proj: Linear,
    /// (n_embd_layer)
    pub norm: Norm,
}

/// The feed-forward of a layer.
pub enum FeedForward {
    /// One network for all tokens.
    Dense(Box<Dense>),
    /// Experts selected for each token.
    Experts(Box<Experts>),
    /// One that also reads the token before (RWKV).
    ChannelMix(Box<ChannelMix>),
    /// None: the layer has a mixer only.
    None,
}

/// Weights of attention.
pub struct AttentionWeights {
    /// Queries (n_head * key_dim, n_embd), keys (n_head_kv * key_dim, n_embd) and values (n_head_kv * value_dim, n_embd);
    /// then the gate of the output, if there is one (n_head or n_head * value_dim, n_embd). With
    /// [`Arch::gated_queries`](crate::model::family::Arch::gated_queries) each query head is followed by its gate.
    pub qkv: LinearGroup,
    /// Offsets of keys and values in a row of `qkv`, where the layer has its own.
    pub kv_at: [usize; 2],
    /// Offset of the gate in a row of `qkv`.
    pub gate_at: Option<usize>,
    /// Whether values are copies of the keys before these are normalised and rotated.
    pub values_from_keys: bool,
    /// Norm of the heads of values.
    pub v_norm: Option<Norm>,
    /// Norm before the output projection (n_head * value_dim).
    pub attn_sub_norm: Option<Norm>,
    /// Biases on scores (n_head, 2 * relative_distance + 1), by distance of the key from `-relative_distance` on.
    pub distance_bias: Option<Vec<f32>>,
    /// Attention sinks (n_head).
    pub sinks: Option<Vec<f32>>,
    /// Norm of query heads.
    pub q_norm: Option<Norm>,
    /// Norm of key heads.
    pub k_norm: Option<Norm>,
    /// Output projection (n_embd, n_head * value_dim).
    pub o: Linear,
}

/// What mixes the tokens of a sequence in a layer.
pub enum Mixer {
    /// Attention.
    Attention(Box<AttentionWeights>),
    /// Multi-head latent attention.
    Latent(Box<LatentWeights>),
    /// Attention with compressed keys.
    Compressed(Box<CompressedWeights>),
    /// A recurrent mixer.
    Recurrent(Recurrent),
    /// A matrix (n_embd, n_embd) instead of attention.
    Linear(Box<Linear>),
    /// Both on the same input; their outputs are added.
    Both(Box<(AttentionWeights, Recurrent)>),
    /// Nothing.
    None,
}

/// Weights of one layer.
pub struct Layer {
    /// Norm before the mixer (n_embd).
    pub attn_norm: Option<Norm>,
    /// What mixes the tokens.
    pub mixer: Mixer,
    /// Selects the positions that attention reads.
    pub indexer: Option<IndexerWeights>,
    /// A second norm after the mixer, of the sum with the layer's input (n_embd).
    pub second_norm: Option<Norm>,
    /// Norm after the mixer (n_embd).
    pub post_attn_norm: Option<Norm>,
    /// Norm before the feed-forward (n_embd).
    pub ffn_norm: Option<Norm>,
    /// Dense feed-forward or experts.
    pub ffn: FeedForward,
    /// Norm after the feed-forward (n_embd).
    pub post_ffn_norm: Option<Norm>,
    /// Embeddings of n-grams, which are added to the residual streams before the mixer.
    pub ngrams: Option<Box<NgramWeights>>,
    /// The layer's own embedding, which is added after the feed-forward.
    pub embedding: Option<LayerEmbedding>,
    /// Factor on the residual stream after the layer.
    pub output_scale: Option<f32>,
    /// Factor on the token's embedding, which is added after the layer.
    pub embedding_skip: Option<f32>,
    /// Order of norms, sub-layers and residual sums.
    pub order: ResidualOrder,
}

/// Order of norms, sub-layers and residual sums of a layer.
pub enum ResidualOrder {
    /// Pre-norm: attention, then feed-forward (`ForwardPass::serial_block`).
    Serial,
    /// Attention and feed-forward read the same residual stream.
    Parallel,
    /// Several residual streams (`ForwardPass::altup_block`).
    AltUp(Box<AltUp>),
    /// Post-norm: these norms (n_embd) follow the two residual sums, and none comes before.
    PostNorm([Norm; 2]),
    /// The residual stream is the output of the norms.
    Normed,
    /// Attention and feed-forward read a mix of earlier residual streams, with these weights (n_embd).
    Attended([Vec<f32>; 2]),
    /// Several residual streams, with these connections of attention and feed-forward (`ForwardPass::hyper_block`).
    Hyper(Box<[HyperWeights; 2]>),
}

/// Divisors of the RoPE frequencies, one per pair.
#[derive(Clone)]
pub enum RopeDivisors {
    /// The file has none.
    None,
    /// The same for all contexts (Llama 3).
    All(Vec<f32>),
    /// LongRoPE: selected by the length of the context.
    ByContext {
        /// For contexts up to the original training context.
        short: Vec<f32>,
        /// For longer contexts.
        long: Vec<f32>,
    },
}

/// All weights of a model.
pub struct Weights {
    /// (n_vocab, n_embd)
    pub embedding: Arc<Matrix>,
    /// What an MTP head reads in place of embeddings.
    pub mtp_input: Option<MtpInput>,
    /// Whether embedding and output are those of another model.
    pub is_shared: [bool; 2],
    /// (token types, n_embd): the first row is added to every token (BERT).
    pub token_types: Option<Matrix>,
    /// Learned position embeddings (n_ctx_train, n_embd), for models without RoPE.
    pub positions: Option<Matrix>,
    /// Norm of the sum of embeddings (n_embd).
    pub embedding_norm: Option<Norm>,
    /// The low state before the first pass, in models with nested cycles (n_embd).
    pub low_state: Option<Vec<f32>>,
    /// Projections of the residual streams, if there are several.
    pub altup: Option<AltUpProjections>,
    /// Embeddings of the layers.
    pub layer_embeddings: Option<LayerEmbeddings>,
    /// Embeddings of n-grams, (rows, width of a head).
    pub ngram_table: Option<Matrix>,
    /// The layers, in order.
    pub layers: Vec<Layer>,
    /// Norm after the layers (n_embd).
    pub final_norm: Option<Norm>,
    /// (n_vocab, n_embd); `None` if tied to the embedding.
    pub output: Option<Arc<Matrix>>,
    /// Weights with which the output reads several residual streams.
    pub hyper_output: Option<HyperWeights>,
    /// Weights of the mix of residual streams before the final norm (n_embd).
    pub residual_score: Option<Vec<f32>>,
    /// One value per logit.
    pub output_bias: Option<Vec<f32>>,
    /// Divisors of the RoPE frequencies.
    pub rope_divisors: RopeDivisors,
    /// Projections of a pooled embedding (n_embd), applied in order.
    pub projections: Vec<Linear>,
    /// Classification head of rerankers.
    pub classifier: Option<Classifier>,
}

/// Rows of an output, padded to whole panels.
pub(crate) fn padded(rows: usize) -> usize {
    rows.next_multiple_of(PANEL)
}

impl LinearGroup {
    /// A group of separate linears, one part each.
    pub(crate) fn separate(linears: Vec<Linear>) -> LinearGroup {
        let mut group = LinearGroup { linears: Vec::with_capacity(linears.len()), part_starts: Vec::new(), stride: 0 };
        linears.into_iter().for_each(|linear| group.push(linear));
        group
    }

    /// Adds a part of this many rows without a linear.
    fn reserve(&mut self, rows: usize) {
        self.part_starts.push(self.stride);
        self.stride += padded(rows);
    }

    /// Adds a linear as a further part.
    fn push(&mut self, linear: Linear) {
        self.part_starts.push(self.stride);
        let rows = padded(linear.w.rows());
        self.linears.push((linear, self.stride));
        self.stride += rows;
    }

    /// A group of one fused linear, whose rows are parts of these lengths.
    fn fused(linear: Linear, rows: &[usize]) -> LinearGroup {
        let starts = rows.iter().scan(0, |at, n| {
            *at += n;
            Some(*at - n)
        });
        LinearGroup { part_starts: starts.collect(), ..LinearGroup::separate(vec![linear]) }
    }

    /// The matrices of the linears.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.linears.iter().map(|(l, _)| &l.w)
    }
}

impl Dense {
    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.up.matrices().chain([&self.down.w])
    }
}

impl AttentionWeights {
    fn matrices(&self) -> Vec<&Matrix> {
        self.qkv.matrices().chain([&self.o.w]).collect()
    }
}

impl Layer {
    /// All matrices of the layer.
    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        let mut all: Vec<&Matrix> = match &self.mixer {
            Mixer::Attention(a) => a.matrices(),
            Mixer::Latent(a) => a.matrices(),
            Mixer::Compressed(a) => a.matrices(),
            Mixer::Recurrent(r) => r.matrices(),
            Mixer::Both(both) => both.0.matrices().into_iter().chain(both.1.matrices()).collect(),
            Mixer::Linear(linear) => vec![&linear.w],
            Mixer::None => Vec::new(),
        };
        match &self.order {
            ResidualOrder::AltUp(altup) => all.extend([&altup.router.w, &altup.laurel.left.w, &altup.laurel.right.w]),
            ResidualOrder::Hyper(weights) => all.extend(weights.iter().flat_map(HyperWeights::matrices)),
            _ => {}
        }
        all.extend(self.indexer.iter().flat_map(IndexerWeights::matrices));
        all.extend(self.ngrams.iter().flat_map(|n| n.matrices()));
        all.extend(self.embedding.iter().flat_map(|e| [&e.gate.w, &e.proj.w]));
        match &self.ffn {
            FeedForward::None => {}
            FeedForward::Dense(ffn) => all.extend(ffn.matrices()),
            FeedForward::ChannelMix(mix) => all.extend(mix.matrices()),
            FeedForward::Experts(e) => {
                all.extend([&e.router.w].into_iter().chain(e.matrices.all()));
                all.extend(e.adjugates.iter().flat_map(ExpertMatrices::all));
                all.extend(e.latent.iter().flatten().map(|l| &l.w));
                if let Some(shared) = &e.shared {
                    all.extend(shared.gate.iter().map(|g| &g.w).chain(shared.ffn.matrices()));
                }
            }
        }
        all
    }
}

impl Weights {
    /// Bytes of the packed matrices.
    pub fn len_bytes(&self) -> usize {
        let [embedding, output] = self.is_shared.map(|is_shared| !is_shared);
        let outside = [
            Some(&*self.embedding).filter(|_| embedding),
            self.token_types.as_ref(),
            self.positions.as_ref(),
            self.output.as_deref().filter(|_| output),
            self.mtp_input.as_ref().map(|input| &input.proj.w),
        ];
        let layers = self.layers.iter().flat_map(Layer::matrices);
        let heads = self.classifier.iter().flat_map(Classifier::linears);
        let projections = self.projections.iter().chain(heads).map(|projection| &projection.w);
        let projections = projections.chain(self.altup.iter().flat_map(|a| a.split.iter().chain(&a.merge)));
        let projections = projections.chain(self.layer_embeddings.iter().flat_map(|e| [&e.table, &e.proj.w]));
        let projections = projections.chain(self.hyper_output.iter().flat_map(HyperWeights::matrices));
        let projections = projections.chain(self.ngram_table.as_ref());
        outside.into_iter().flatten().chain(layers).chain(projections).map(Matrix::len_bytes).sum()
    }

    /// Bytes of the matrices that one decoded token reads: all but embedding tables and experts that are not selected.
    pub fn decode_bytes(&self, c: &Config) -> usize {
        let layer = |layer: &Layer| -> usize {
            let all: usize = layer.matrices().into_iter().map(Matrix::len_bytes).sum();
            let (FeedForward::Experts(e), Some(experts)) = (&layer.ffn, &c.ffn.experts) else { return all };
            let choices = [&e.matrices].into_iter().chain(&e.adjugates);
            all - choices.map(|m| m.unused_bytes(experts.n_used)).sum::<usize>()
        };
        let projection = self.layer_embeddings.as_ref().map_or(0, |e| e.proj.w.len_bytes())
            + self.altup.iter().flat_map(|a| a.split.iter().chain(&a.merge)).map(Matrix::len_bytes).sum::<usize>();
        self.output.as_ref().unwrap_or(&self.embedding).len_bytes()
            + self.mtp_input.as_ref().map_or(0, |input| input.proj.w.len_bytes())
            + self.hyper_output.iter().flat_map(HyperWeights::matrices).map(Matrix::len_bytes).sum::<usize>()
            + projection
            + c.layers.iter().map(|config| layer(&self.layers[config.block])).sum::<usize>()
    }
}
