//! Working memory of the forward pass, allocated once.

use alloc::collections::TryReserveError;
use alloc::vec;
use alloc::vec::Vec;

use crate::error::MemoryError;
use crate::kernels::attention::{AttendScratch, Attention, KvLayout, KvType, SelectionScratch, Slot};
use crate::kernels::panel::Matrix;
use crate::model::Model;
use crate::model::config::{Config, MixerKind, RecurrentConfig};
use crate::model::family::ExpertInput;
use crate::model::mixers::attention::LayerAttention;
use crate::model::mixers::attention::rotary::Rotary;
use crate::model::residual::altup::AltUpScratch;
use crate::model::residual::hyper::HyperScratch;
use crate::model::residual::passes::PassScratch;
use crate::model::rows::{MAX_FORMS, packed_words};
use crate::model::weights::{AttentionWeights, Dense, FeedForward, Mixer, ResidualOrder, RopeDivisors, padded};
use crate::pool::Pool;

/// The largest batch that working memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScratchSize {
    /// Tokens.
    pub rows: usize,
    /// Rows with logits.
    pub logits: usize,
    /// Sequences.
    pub seqs: usize,
    /// Tokens of a sequence. With LongRoPE, selects the frequencies ([`Model::is_long_context`]).
    pub n_ctx: usize,
}

/// Working memory for batches up to a [`ScratchSize`].
pub struct Scratch {
    /// Maximal rows and logits rows of a batch.
    pub(crate) max_rows: usize,
    pub(crate) max_logits: usize,
    /// (rows, n_embd): the residual stream, and its norm.
    pub(crate) x: Vec<f32>,
    pub(crate) h: Vec<f32>,
    /// (rows, padded n_embd): output of attention or feed-forward.
    pub(crate) y: Vec<f32>,
    /// (kept streams, rows, n_embd): residual streams that later layers read.
    pub(crate) residuals: Vec<f32>,
    /// (rows, 2 * n_embd): what an MTP head reads, the token's embedding and the hidden state before it.
    pub(crate) joined: Vec<f32>,
    pub(crate) step: StepScratch,
    pub(crate) attention: AttentionScratch,
    pub(crate) experts: ExpertsScratch,
    pub(crate) embeddings: LayerEmbeddingScratch,
    pub(crate) altup: AltUpScratch,
    pub(crate) hyper: HyperScratch,
    pub(crate) passes: PassScratch,
    /// (rows, n_embd): embeddings of the tokens, where layers add them again.
    pub(crate) skips: Vec<f32>,
    /// (logits rows, n_embd) after the final norm, and (logits rows, padded n_vocab).
    pub(crate) hidden: Vec<f32>,
    pub(crate) logits: Vec<f32>,
    /// A dequantised row of the token-type or position embedding (n_embd).
    pub(crate) row: Vec<f32>,
}

/// Buffers of one sub-layer.
pub(crate) struct StepScratch {
    /// (rows, stride of q, k and v), then (rows, n_head * value_dim); or (rows, stride of gate and up). With experts, a
    /// row per token and selected expert.
    pub(crate) wide: Vec<f32>,
    /// Packed activations.
    pub(crate) words: Vec<u32>,
    /// (rows, padded n_embd): output of attention in layers that have a recurrent mixer too.
    pub(crate) sum: Vec<f32>,
    /// (rows, n_embd): values of the first layer, which later layers read (RWKV 7).
    pub(crate) first_values: Vec<f32>,
}

/// Buffers of attention.
pub(crate) struct AttentionScratch {
    /// RoPE frequencies of the model's variants, for the context that the scratch memory is for.
    pub(crate) rotary: Vec<Rotary>,
    /// (rows, RoPE variants, pairs)
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
    /// Factor on the queries of each row; empty if it is 1.
    pub(crate) temperatures: Vec<f32>,
    /// KV slot of each row.
    pub(crate) slots: Vec<Slot>,
    /// One per thread.
    pub(crate) threads: Vec<AttendScratch>,
    pub(crate) parts: Vec<f32>,
    /// Keys, queries and factors of an indexer, and what it selected.
    pub(crate) index_rows: Vec<f32>,
    pub(crate) selection: SelectionScratch,
}

impl AttentionScratch {
    /// Cosines and sines of row `r` in layer `i`; empty without RoPE.
    pub(crate) fn turns(&self, c: &Config, i: usize, r: usize) -> (&[f32], &[f32]) {
        let Some(rope) = c.layers[i].attention.rope else { return Default::default() };
        let at = (r * c.attention.ropes.len() + rope) * c.attention.rope_pairs();
        let end = at + c.attention.ropes[rope].n_rot / 2;
        (&self.cos[at..end], &self.sin[at..end])
    }

    /// Factor on the queries of row `r` in layer `i`.
    pub(crate) fn query_scale(&self, c: &Config, i: usize, r: usize) -> f32 {
        let LayerAttention { scale, rope, .. } = c.layers[i].attention;
        let temperature = c.attention.temperature.as_ref().filter(|t| t.with_rope || rope.is_none());
        temperature.map_or(scale, |_| scale * self.temperatures[r])
    }
}

/// Buffers of expert routing.
pub(crate) struct ExpertsScratch {
    /// The tokens of the batch.
    pub(crate) tokens: Vec<u32>,
    /// (rows, n_embd): the input of the layer, where something after attention reads it.
    pub(crate) layer_input: Vec<f32>,
    /// (rows, n_embd): the input of the router, if it has a norm of its own.
    pub(crate) router_input: Vec<f32>,
    /// (rows, 2 * padded width): input and output of experts in their latent space.
    pub(crate) latent: Vec<f32>,
    /// (rows, padded n_expert)
    pub(crate) router: Vec<f32>,
    /// (n_expert)
    pub(crate) probabilities: Vec<f32>,
    /// (n_expert): scores by which experts are selected, if these are not the router's.
    pub(crate) scores: Vec<f32>,
    /// (groups), (used groups): scores of groups, and the groups that experts are selected from.
    pub(crate) group_scores: Vec<f32>,
    pub(crate) groups: Vec<u32>,
    /// (rows, n_used): selected experts of each row, their weights, and the index of their rows in `inputs`.
    pub(crate) selected: Vec<u32>,
    pub(crate) weights: Vec<f32>,
    pub(crate) expert_rows: Vec<u32>,
    /// (n_expert + 1): index of the first row of each expert.
    pub(crate) starts: Vec<usize>,
    /// (expert rows): the batch row that each is a copy of.
    pub(crate) source_rows: Vec<u32>,
    /// (expert rows, width)
    pub(crate) inputs: Vec<f32>,
    /// (expert rows, padded width), or of the shared expert (rows, padded n_embd).
    pub(crate) outputs: Vec<f32>,
}

/// Embeddings of the layers.
pub(crate) struct LayerEmbeddingScratch {
    /// (rows, stride): those of all layers, (n_layer, n_embd_layer).
    pub(crate) embeddings: Vec<f32>,
    pub(crate) stride: usize,
    /// A dequantised row of the table (n_layer * n_embd_layer).
    pub(crate) row: Vec<f32>,
}

/// Maximal buffer lengths per row over all layers.
#[derive(Default)]
struct Widths {
    wide: usize,
    words: usize,
    index: usize,
    /// Weights of hyper-connections.
    hyper: usize,
}

/// A zeroed vector; the system commits its memory on first touch, so an oversized batch limit costs little.
pub(crate) fn zeros<T: Clone + Default>(shape: &[usize]) -> Result<Vec<T>, TryReserveError> {
    let n = shape.iter().fold(1usize, |n, d| n.saturating_mul(*d));
    // `vec!` gets zeroed memory from the system but aborts if there is none, so reserve first
    Vec::<T>::new().try_reserve_exact(n)?;
    Ok(vec![T::default(); n])
}

/// Allocates buffers up to a limit in bytes. After the first failure it allocates nothing but keeps counting, so that
/// the error can state the total.
pub(crate) struct Budget {
    limit: usize,
    needed: usize,
    exhausted: Option<TryReserveError>,
}

impl Budget {
    pub(crate) fn new(limit: usize) -> Budget {
        Budget { limit, needed: 0, exhausted: None }
    }

    /// As [`zeros`]; an empty vector after a failure, which [`Budget::check`] reports.
    pub(crate) fn zeros<T: Clone + Default>(&mut self, shape: &[usize]) -> Vec<T> {
        let bytes = shape.iter().fold(size_of::<T>(), |n, d| n.saturating_mul(*d));
        self.needed = self.needed.saturating_add(bytes);
        if self.needed > self.limit || self.exhausted.is_some() {
            return Vec::new();
        }
        zeros(shape).unwrap_or_else(|e| {
            self.exhausted = Some(e);
            Vec::new()
        })
    }

    /// Returns the error if an allocation failed; `rows` is the batch size for the message.
    pub(crate) fn check(self, rows: usize) -> Result<(), MemoryError> {
        let Budget { limit, needed, exhausted } = self;
        if needed > limit {
            return Err(MemoryError::Limit { rows, needed, limit });
        }
        exhausted.map_or(Ok(()), |e| Err(e.into()))
    }
}

impl Model {
    /// The layout of this model's KV pages.
    pub fn kv_layout(&self, kv_type: KvType) -> KvLayout {
        self.config.kv_layout(kv_type)
    }

    /// Whether contexts of `n_ctx` tokens use the LongRoPE frequencies for long contexts. Keys of long and short
    /// contexts are not interchangeable.
    pub fn is_long_context(&self, n_ctx: usize) -> bool {
        match &self.weights.rope_divisors {
            RopeDivisors::ByContext { .. } => n_ctx > self.original_context(),
            _ => false,
        }
    }

    /// The training context before RoPE scaling, in tokens.
    pub(crate) fn original_context(&self) -> usize {
        let stretched = self.config.attention.ropes.iter().find_map(|r| r.scaling);
        stretched.map_or(self.config.n_ctx_train, |s| s.original_context)
    }

    /// Allocates working memory for batches of up to `size`.
    ///
    /// # Errors
    /// [`MemoryError`] if the allocation fails, or would exceed [`Model::max_scratch_bytes`].
    pub fn scratch(&self, pool: &dyn Pool, kv_type: KvType, size: ScratchSize) -> Result<Scratch, MemoryError> {
        let ScratchSize { rows: max_rows, logits: max_logits, seqs: max_seqs, n_ctx } = size;
        let mut budget = Budget::new(self.max_scratch_bytes);
        let c = &self.config;
        let (n, d) = (max_rows, c.n_embd);
        let layout = self.kv_layout(kv_type);
        let widths = self.widths();
        let has_row = self.weights.token_types.is_some() || self.weights.positions.is_some();
        let n_head = c.n_head();
        let parts = layout.layers().iter().map(|kv| Attention::parts_len(kv, n_head, max_seqs, n_ctx));
        let parts_len = parts.max().unwrap_or(0);
        let attention = AttentionScratch {
            rotary: self.rotary(n_ctx),
            cos: budget.zeros(&[n, c.attention.ropes.len(), c.attention.rope_pairs()]),
            sin: budget.zeros(&[n, c.attention.ropes.len(), c.attention.rope_pairs()]),
            temperatures: budget.zeros(&[if c.attention.temperature.is_some() { n } else { 0 }]),
            slots: budget.zeros(&[n]),
            threads: (0..pool.threads()).map(|_| AttendScratch::new(layout.layers())).collect(),
            parts: budget.zeros(&[parts_len]),
            index_rows: budget.zeros(&[n, widths.index]),
            selection: self.selection_scratch(n, n_ctx, &mut budget),
        };
        let scratch = Scratch {
            max_rows,
            max_logits,
            x: budget.zeros(&[n, d]),
            h: budget.zeros(&[n, d]),
            y: budget.zeros(&[n, padded(d)]),
            residuals: budget.zeros(&[c.residual.kept(c.n_layer() - 1)[1], n, d]),
            joined: budget.zeros(&[if c.is_mtp_head { n } else { 0 }, 2 * d]),
            step: StepScratch {
                wide: budget.zeros(&[n, widths.wide]),
                words: budget.zeros(&[n.max(max_logits), widths.words]),
                sum: budget.zeros(&[if self.has_both_mixers() { n } else { 0 }, padded(d)]),
                first_values: budget.zeros(&[if self.reads_first_values() { n } else { 0 }, d]),
            },
            attention,
            experts: self.experts_scratch(n, &mut budget),
            passes: {
                let rows = if self.weights.low_state.is_some() { n } else { 0 };
                PassScratch { low: budget.zeros(&[rows, d]), high: budget.zeros(&[rows, d]) }
            },
            skips: budget.zeros(&[if c.embedding.skips { n } else { 0 }, d]),
            altup: {
                let (rows, streams) = (if c.residual.n_altup > 0 { n } else { 0 }, c.residual.n_altup);
                AltUpScratch {
                    streams: budget.zeros(&[rows, streams, d]),
                    predictions: budget.zeros(&[rows, streams, d]),
                    router: budget.zeros(&[rows, padded(streams)]),
                    laurel: budget.zeros(&[rows, padded(d)]),
                }
            },
            hyper: {
                let (rows, streams) = c.residual.hyper.map_or((0, 0), |hyper| (n, hyper.n));
                let (gated, rank) = c.residual.hyper.and_then(|hyper| hyper.rank).map_or((0, 0), |rank| (n, rank));
                HyperScratch {
                    streams: budget.zeros(&[rows, streams, d]),
                    next: budget.zeros(&[rows, streams, d]),
                    weights: budget.zeros(&[rows, padded(widths.hyper)]),
                    low: budget.zeros(&[gated, padded(rank)]),
                    gates: budget.zeros(&[gated, padded(streams * d)]),
                }
            },
            embeddings: {
                let width = c.embedding.per_layer.saturating_mul(c.n_blocks());
                let (stride, embeddings) = (padded(width), budget.zeros(&[n, padded(width)]));
                LayerEmbeddingScratch { embeddings, stride, row: budget.zeros(&[width]) }
            },
            hidden: budget.zeros(&[max_logits, d]),
            logits: budget.zeros(&[max_logits, padded(c.n_vocab)]),
            row: budget.zeros(&[if has_row { d } else { 0 }]),
        };
        budget.check(max_rows)?;
        Ok(scratch)
    }

    /// Whether something after attention reads the input of the layer.
    pub(crate) fn reads_layer_input(&self) -> bool {
        (self.config.ffn.experts.is_some_and(|experts| experts.input != ExpertInput::Same))
            || self.weights.layers.iter().any(|layer| layer.second_norm.is_some())
    }

    fn has_router_norm(&self) -> bool {
        let experts = |ffn: &FeedForward| matches!(ffn, FeedForward::Experts(e) if e.router_norm.is_some());
        self.weights.layers.iter().any(|layer| experts(&layer.ffn))
    }

    fn has_latent_experts(&self) -> bool {
        self.weights.layers.iter().any(|l| matches!(&l.ffn, FeedForward::Experts(e) if e.latent.is_some()))
    }

    fn reads_first_values(&self) -> bool {
        matches!(self.config.recurrent, Some(RecurrentConfig::Rwkv7(_)))
    }

    fn has_both_mixers(&self) -> bool {
        self.config.layers.iter().any(|l| l.mixer == MixerKind::Both)
    }

    /// Bytes of the recurrent state of a sequence; 0 for a model without recurrent layers.
    pub fn state_bytes(&self) -> usize {
        self.config.state_bytes()
    }

    fn selection_scratch(&self, n: usize, n_ctx: usize, budget: &mut Budget) -> SelectionScratch {
        let (n, lists) = match (&self.config.attention.indexer, &self.config.attention.compressed) {
            (Some(indexer), _) => (n, indexer.lists()),
            (None, Some(_)) => (n, 1),
            (None, None) => (0, 1),
        };
        let [scores, blocks, words] = SelectionScratch::shapes(n, lists, n_ctx);
        let (scores, blocks, words) = (budget.zeros(&scores), budget.zeros(&blocks), budget.zeros(&words));
        SelectionScratch { lists, n_ctx, scores, blocks, words }
    }

    fn experts_scratch(&self, n: usize, budget: &mut Budget) -> ExpertsScratch {
        let d = self.config.n_embd;
        let (experts, used, width) = self.config.ffn.experts.map_or((0, 0, 0), |e| (e.n, e.n_used, e.width));
        let (groups, used_groups) = self.config.ffn.experts.and_then(|e| e.groups).unwrap_or_default();
        ExpertsScratch {
            tokens: budget.zeros(&[n]),
            layer_input: budget.zeros(&[if self.reads_layer_input() { n } else { 0 }, d]),
            router_input: budget.zeros(&[if self.has_router_norm() { n } else { 0 }, d]),
            latent: budget.zeros(&[if self.has_latent_experts() { n } else { 0 }, 2 * padded(width)]),
            router: budget.zeros(&[n, padded(experts)]),
            probabilities: budget.zeros(&[experts]),
            scores: budget.zeros(&[experts]),
            group_scores: budget.zeros(&[groups]),
            groups: budget.zeros(&[used_groups]),
            selected: budget.zeros(&[n, used]),
            weights: budget.zeros(&[n, used]),
            expert_rows: budget.zeros(&[n, used]),
            starts: budget.zeros(&[experts + 1]),
            source_rows: budget.zeros(&[n, used]),
            inputs: budget.zeros(&[n, used, width]),
            outputs: budget.zeros(&[n, (used * padded(width)).max(if used > 0 { padded(d) } else { 0 })]),
        }
    }

    /// RoPE frequencies of the model's variants for contexts of `n_ctx` tokens.
    fn rotary(&self, n_ctx: usize) -> Vec<Rotary> {
        let divisors = match &self.weights.rope_divisors {
            RopeDivisors::None => None,
            RopeDivisors::All(all) => Some(all),
            RopeDivisors::ByContext { short, long } => Some(if self.is_long_context(n_ctx) { long } else { short }),
        };
        let divisors = divisors.map(Vec::as_slice);
        let c = &self.config;
        c.attention.ropes.iter().map(|rope| Rotary::new(rope, divisors)).collect()
    }

    fn widths(&self) -> Widths {
        let (c, mut w) = (&self.config, Widths::default());
        let d = c.n_embd;
        let mut latent_words = 0;
        // per row: `wide` floats for each of `rows` expert rows, then activations of width `k`
        let mut step = |forms, (wide, k): (usize, usize), rows: usize| {
            w.wide = w.wide.max(wide.saturating_mul(rows));
            w.words = w.words.max(packed_words(rows, forms, d)).max(packed_words(rows, 1, k));
        };
        if let Some(input) = &self.weights.mtp_input {
            step(1, (0, input.proj.w.k()), 1);
        }
        for (layer, config) in c.layers.iter().map(|config| (&self.weights.layers[config.block], config)) {
            let out = config.attention.heads.out_width();
            let gates = if c.attention.gated_queries { out } else { 0 };
            let mut attention = |a: &AttentionWeights| {
                step(forms(a.qkv.matrices()), (a.qkv.stride.saturating_add(out).saturating_add(gates), out), 1);
            };
            match &layer.mixer {
                Mixer::Attention(a) => attention(a),
                Mixer::Both(both) => attention(&both.0),
                Mixer::Linear(linear) => step(forms([&linear.w].into_iter()), (0, d), 1),
                Mixer::Latent(_) | Mixer::Compressed(_) | Mixer::Recurrent(_) | Mixer::None => {}
            }
            let widths = match &layer.mixer {
                Mixer::Latent(a) => Some(a.widths()),
                Mixer::Compressed(a) => Some(a.widths()),
                _ => None,
            };
            if let Some((inputs, wide, words)) = widths {
                step(forms(inputs.into_iter()), (wide, 0), 1);
                latent_words = latent_words.max(words);
            }
            let recurrent = match &layer.mixer {
                Mixer::Recurrent(r) => Some(r),
                Mixer::Both(both) => Some(&both.1),
                _ => None,
            };
            if let Some(recurrent) = recurrent {
                let (inputs, wide, k) = recurrent.widths();
                step(forms(inputs.into_iter()) * recurrent.n_inputs(), (wide, k), 1);
            }
            if let Some(ngrams) = &layer.ngrams {
                step(2, ngrams.widths(), 1);
            }
            if layer.embedding.is_some() {
                let width = c.embedding.per_layer;
                step(1, (padded(width), width), 1);
            }
            if let ResidualOrder::AltUp(altup) = &layer.order {
                let left = &altup.laurel.left.w;
                step(1, (padded(left.rows()), left.rows()), 1);
            }
            let mut dense = |ffn: &Dense| step(forms(ffn.up.matrices()), (ffn.up.stride, ffn.down.w.k()), 1);
            match &layer.ffn {
                FeedForward::None => {}
                FeedForward::Dense(ffn) => dense(ffn),
                FeedForward::ChannelMix(mix) => step(1, (mix.width(), mix.n_ff()), 1),
                FeedForward::Experts(e) => {
                    if let Some(s) = &e.shared {
                        dense(&s.ffn);
                    }
                    if let Some(x) = &c.ffn.experts {
                        for m in [&e.matrices].into_iter().chain(&e.adjugates) {
                            let (n_ff, n_forms) =
                                (m.down.first().map_or(0, Matrix::k), forms(m.gate.iter().chain(&m.up)));
                            step(1, (0, x.width), n_forms * x.n_used);
                            step(n_forms, (2 * padded(n_ff), n_ff), x.n_used);
                        }
                    }
                }
            }
        }
        w.words = w.words.max(latent_words);
        let of_layers = self.weights.layers.iter().filter_map(|layer| match &layer.order {
            ResidualOrder::Hyper(weights) => Some(&weights[..]),
            _ => None,
        });
        for weights in of_layers.flatten().chain(&self.weights.hyper_output) {
            w.hyper = w.hyper.max(weights.n_weights());
            let words = weights.matrices().into_iter().map(|matrix| packed_words(1, 1, matrix.k()));
            w.words = words.fold(w.words, usize::max);
        }
        for indexer in self.weights.layers.iter().filter_map(|layer| layer.indexer.as_ref()) {
            let (inputs, wide, k) = indexer.widths();
            w.index = w.index.max(wide);
            w.words = w.words.max(packed_words(1, forms(inputs.into_iter()), d)).max(packed_words(1, 1, k));
        }
        w
    }
}

/// Number of activation layouts that these matrices may need.
fn forms<'a>(of: impl Iterator<Item = &'a Matrix>) -> usize {
    let mut types = Vec::new();
    for matrix in of {
        if !types.contains(&matrix.dtype()) {
            types.push(matrix.dtype());
        }
    }
    types.len().min(MAX_FORMS)
}
