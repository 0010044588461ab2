//! Embeddings: texts to vectors, with encoders or with decoders whose hidden states are pooled.
//!
//! A batch is several whole texts without padding; attention does not cross texts. No state remains after a batch, so a
//! host may batch texts of several requests. A vector does not depend on the other texts. A batch may be computed layer by
//! layer ([`Embedder::advance`]), so that a host can do other work in between; the vectors are the same.
//!
//! ```text
//! h = hidden states of the text's tokens after the final norm
//! none: each h[t]     mean: (h[0] + h[1] + ...) * (1 / n)     cls: h[0]     last: h[n - 1]
//! h = W h + b for each projection of the model, except with pooling none
//! rank: the scores of the classification head
//! v = the first `dimensions` values;  v = v * (1 / sqrt(sum of squares))
//! ```

use alloc::format;
use alloc::string::ToString;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::error::{LoadError, MemoryError, RequestError};

use crate::kernels::attention::{KvLayout, KvMemory, KvType, PAGE};
use crate::kernels::elementwise::{add_scaled, scale};
use crate::kernels::norm::normalise;
use crate::kernels::recurrent::StateMemory;
use crate::kernels::{Cpu, tasks};
use crate::model::{Config, Exec, KvRef, Model, ProjectionScratch, Run, Scratch, ScratchSize};
use crate::pool::Pool;

/// Pooling of token states to the vector of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Pooling {
    /// No pooling: a vector per token.
    None,
    /// Mean over all tokens.
    Mean,
    /// The state of the first token.
    Cls,
    /// The state of the last token.
    Last,
    /// The scores of the classification head: the first is that of a reranker. They are never normalised.
    Rank,
}

impl Pooling {
    /// In the order of `pooling_type` in files, as llama.cpp numbers them.
    pub const ALL: [Pooling; 5] = [Pooling::None, Pooling::Mean, Pooling::Cls, Pooling::Last, Pooling::Rank];

    /// The pooling's name.
    pub const fn name(self) -> &'static str {
        match self {
            Pooling::None => "none",
            Pooling::Mean => "mean",
            Pooling::Cls => "cls",
            Pooling::Last => "last",
            Pooling::Rank => "rank",
        }
    }

    /// Dimensions of a vector of `model`: `n_embd` with [`Pooling::None`], the number of classes with [`Pooling::Rank`],
    /// else those after the projections.
    pub fn width(self, model: &Model) -> usize {
        match self {
            Pooling::None => model.config.n_embd,
            Pooling::Rank => model.n_classes(),
            _ => model.n_embd_out(),
        }
    }

    /// The pooling before the classification head.
    fn before_head(config: &Config) -> Pooling {
        match config.output.classifier_pooling {
            Some(1) => Pooling::Mean,
            _ if config.causal => Pooling::Last,
            _ => Pooling::Cls,
        }
    }

    /// The pooling that the model file asks for; by default the mean for encoders and the last token for decoders.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for another pooling type.
    pub fn of(config: &Config) -> Result<Pooling, LoadError> {
        match config.output.pooling_type {
            None if config.causal => Ok(Pooling::Last),
            None => Ok(Pooling::Mean),
            Some(n) => Pooling::ALL.get(n as usize).copied().ok_or_else(|| LoadError::Unsupported {
                what: "pooling",
                found: n.to_string(),
                known: Pooling::ALL.map(Pooling::name).into(),
            }),
        }
    }
}

/// Sizes of an embedder. All memory is reserved at construction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmbedderOptions {
    /// Maximal texts of a batch.
    pub max_texts: usize,
    /// Maximal tokens of a batch; [`Embedder::fit`] may choose smaller batches where they are faster.
    pub batch_tokens: usize,
    /// Maximal tokens of a text; reduced to [`Config::max_context`]. With LongRoPE it selects the frequencies
    /// ([`Model::is_long_context`]).
    pub n_ctx: usize,
}

/// A text to embed, and the form of its vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Text<'a> {
    /// Token ids, including the special tokens that the model expects around a text.
    pub tokens: &'a [u32],
    /// Pooling of the token states.
    pub pooling: Pooling,
    /// Number of leading dimensions to keep (Matryoshka embeddings, Kusupati et al. 2022); `None` for all.
    pub dimensions: Option<usize>,
    /// Whether the vector is scaled to length 1.
    pub normalise: bool,
}

/// Tokens per thread above which several texts are split into batches: then the activations of a layer stay in the
/// caches.
const QUICK_TOKENS: usize = 256;

/// Embeds texts with a model.
pub struct Embedder {
    model: Arc<Model>,
    options: EmbedderOptions,
    /// Maximal tokens of a batch of several texts ([`Embedder::fit`]).
    quick_tokens: usize,
    kv: KvLayout,
    /// Keys and values of the current batch.
    memory: KvMemory,
    pages: Vec<u32>,
    scratch: Scratch,
    projections: ProjectionScratch,
    classifier: ProjectionScratch,
    /// The batch that is computed layer by layer.
    begun: Option<Begun>,
}

/// A batch between two of its layers.
#[derive(Debug, Clone, Copy)]
struct Begun {
    n_tokens: usize,
    /// The next layer.
    layer: usize,
}

impl Embedder {
    /// Creates an embedder for `model` and reserves its memory.
    ///
    /// # Errors
    /// [`MemoryError`] if an allocation fails, or working memory would exceed [`Model::max_scratch_bytes`].
    pub fn new(model: Arc<Model>, pool: &dyn Pool, mut options: EmbedderOptions) -> Result<Embedder, MemoryError> {
        options.n_ctx = options.n_ctx.min(model.config.max_context());
        options.max_texts = options.max_texts.min(options.batch_tokens);
        // f32, because keys and values live for one batch only; a page belongs to one text
        let kv = model.config.batch_kv_layout(KvType::F32);
        let n_pages = (options.batch_tokens / PAGE).saturating_add(options.max_texts);
        let mut memory = KvMemory::zeroed(&kv, n_pages)?;
        memory.states = StateMemory::zeroed(model.config.state_len(), options.max_texts)?;
        let size = ScratchSize { rows: options.batch_tokens, logits: 0, seqs: 0, n_ctx: options.n_ctx };
        let scratch = model.scratch(pool, KvType::F32, size)?;
        let pages = (0..u32::try_from(n_pages).unwrap_or(u32::MAX)).collect();
        let projections = model.projection_scratch(options.max_texts)?;
        let classifier = model.classifier_scratch(options.max_texts)?;
        let quick_tokens = options.batch_tokens.min(QUICK_TOKENS.saturating_mul(pool.threads()));
        Ok(Embedder { model, options, quick_tokens, kv, memory, pages, scratch, projections, classifier, begun: None })
    }

    /// The model that the embedder runs.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The options given to [`Embedder::new`], with `n_ctx` and `max_texts` as reduced there.
    pub fn options(&self) -> &EmbedderOptions {
        &self.options
    }

    /// Maximal tokens of a text: it must fit the context and a batch.
    pub fn max_tokens(&self) -> usize {
        self.options.n_ctx.min(self.options.batch_tokens)
    }

    /// Number of leading texts, of these lengths in tokens, to embed in the next batch for best speed; 0 if the first
    /// is too long.
    pub fn fit(&self, lens: impl IntoIterator<Item = usize>) -> usize {
        self.count(lens, self.quick_tokens)
    }

    /// Number of leading texts of these lengths with at most `most` tokens in total; a single text may fill a whole
    /// batch.
    fn count(&self, lens: impl IntoIterator<Item = usize>, most: usize) -> usize {
        let mut tokens = 0_usize;
        let fits = lens.into_iter().take(self.options.max_texts).take_while(|&n| {
            let most = if tokens == 0 { self.options.batch_tokens } else { most };
            tokens = tokens.saturating_add(n);
            tokens <= most
        });
        fits.count()
    }

    /// Truncates a text that is too long. Its last token is kept if it is a control token, such as the end token that
    /// the model expects.
    pub fn truncate(&self, tokens: &mut Vec<u32>) {
        let (n, last) = (self.max_tokens(), tokens.last().copied());
        if tokens.len() <= n {
            return;
        }
        tokens.truncate(n);
        if let (Some(end), Some(last)) = (tokens.last_mut(), last.filter(|&t| self.model.tokenizer.is_control(t))) {
            *end = last;
        }
    }

    /// Checks a text, e.g. before it is queued.
    ///
    /// # Errors
    /// [`RequestError`] names what is invalid.
    pub fn check(&self, text: &Text<'_>) -> Result<(), RequestError> {
        let (n, width) = (text.tokens.len(), text.pooling.width(&self.model));
        let EmbedderOptions { n_ctx, batch_tokens, .. } = self.options;
        if n == 0 {
            return Err(RequestError::EmptyText);
        }
        if n > self.max_tokens() {
            return Err(RequestError::TextLength { tokens: n, n_ctx, batch_tokens });
        }
        self.model.check_tokens(text.tokens)?;
        if width == 0 {
            let (found, expected) = ("rank (the model has no classification head)".into(), "none, mean, cls or last");
            return Err(RequestError::Option { name: "pooling", found, expected });
        }
        match text.dimensions {
            Some(d) if d == 0 || d > width => Err(RequestError::Option {
                name: "dimensions",
                found: format!("{d} (the model has {width})"),
                expected: "1 to the dimensions of the model",
            }),
            _ => Ok(()),
        }
    }

    /// Embeds a batch and calls `sink` for each text in order with its index and vector (with [`Pooling::None`] the
    /// concatenated vectors of its tokens), or `None` if a value is infinite or NaN because of the model's weights.
    ///
    /// # Errors
    /// [`RequestError`] of a text that is invalid, or if the texts exceed a batch ([`EmbedderOptions`]). Nothing was
    /// computed.
    pub fn embed(
        &mut self,
        cpu: Cpu,
        pool: &dyn Pool,
        texts: &[Text<'_>],
        sink: &mut dyn FnMut(usize, Option<&[f32]>),
    ) -> Result<(), RequestError> {
        self.begin(texts)?;
        while !self.advance(cpu, pool, texts, usize::MAX, sink) {}
        Ok(())
    }

    /// Begins a batch that [`Embedder::advance`] computes. One that was not finished is given up.
    ///
    /// # Errors
    /// As [`Embedder::embed`].
    pub fn begin(&mut self, texts: &[Text<'_>]) -> Result<(), RequestError> {
        self.begun = None;
        texts.iter().try_for_each(|text| self.check(text))?;
        let fit = self.count(texts.iter().map(|t| t.tokens.len()), self.options.batch_tokens);
        if fit < texts.len() {
            return Err(RequestError::NoCapacity { what: "texts in one batch", needed: texts.len(), free: fit });
        }
        let n_states = texts.len().min(self.memory.states.n_slots());
        (0..n_states as u32).for_each(|slot| self.memory.states.slot_mut(slot).fill(0.0));
        self.begun = Some(Begun { n_tokens: n_tokens(texts), layer: 0 });
        Ok(())
    }

    /// Layers of the model, the parts in which a batch can be computed.
    pub fn n_layers(&self) -> usize {
        self.model.config.n_layer()
    }

    /// Computes the next `n_layers` layers, at least one, of the batch that was begun with `texts`. After the last it calls
    /// `sink` as [`Embedder::embed`] and returns true.
    ///
    /// # Panics
    /// If no batch was begun, or with texts of another length.
    pub fn advance(
        &mut self,
        cpu: Cpu,
        pool: &dyn Pool,
        texts: &[Text<'_>],
        n_layers: usize,
        sink: &mut dyn FnMut(usize, Option<&[f32]>),
    ) -> bool {
        let Some(begun) = self.begun.filter(|begun| begun.n_tokens == n_tokens(texts)) else {
            panic!("the batch was not begun with these texts")
        };
        let mut pages = &self.pages[..];
        let mut runs = Vec::with_capacity(texts.len());
        for text in texts {
            let (mine, others) = pages.split_at(text.tokens.len().div_ceil(PAGE));
            let state = runs.len() as u32;
            runs.push(Run { tokens: text.tokens, pos: 0, pages: mine, state, n_logits: 0 });
            pages = others;
        }
        if runs.is_empty() {
            self.begun = None;
            return true;
        }
        let d = self.model.config.n_embd;
        let kv = KvRef { layout: &self.kv, memory: &mut self.memory };
        let exec = Exec { cpu, pool };
        let end = begun.layer.saturating_add(n_layers.max(1)).min(self.model.config.n_layer());
        self.model.states_part(exec, &runs, kv, &mut self.scratch, begun.layer..end);
        self.begun = Some(Begun { layer: end, ..begun });
        if end < self.model.config.n_layer() {
            return false;
        }
        self.begun = None;
        let states = self.model.final_states(exec, &runs, &mut self.scratch);
        let (mut vectors, mut left) = (Vec::with_capacity(texts.len()), states);
        for text in texts {
            let (rows, others) = left.split_at_mut(text.tokens.len() * d);
            vectors.push(rows);
            left = others;
        }
        let before_head = Pooling::before_head(&self.model.config);
        let pooling = |text: &Text<'_>| if text.pooling == Pooling::Rank { before_head } else { text.pooling };
        tasks::chunks(pool, &mut vectors, 1, &|i, rows, _| pooled(cpu, pooling(&texts[i]), &mut rows[0], d));
        let (mut through, mut ranked) = (Vec::new(), Vec::new());
        for (rows, text) in vectors.iter_mut().zip(texts) {
            match text.pooling {
                Pooling::None => {}
                Pooling::Rank => ranked.push(rows),
                _ => through.push(rows),
            }
        }
        self.model.project(exec, &mut through, &mut self.projections);
        self.model.classify(exec, &mut ranked, &mut self.classifier);
        tasks::chunks(pool, &mut vectors, 1, &|i, rows, _| finish(cpu, &texts[i], &mut rows[0], &self.model));
        for (i, v) in vectors.iter().enumerate() {
            sink(i, v.iter().all(|v| v.is_finite()).then_some(v));
        }
        true
    }
}

fn n_tokens(texts: &[Text<'_>]) -> usize {
    texts.iter().map(|text| text.tokens.len()).sum()
}

/// Pools the hidden states of a text, rows of `d` values, in place; keeps all rows with [`Pooling::None`].
fn pooled(cpu: Cpu, pooling: Pooling, rows: &mut &mut [f32], d: usize) {
    let n = rows.len() / d;
    match pooling {
        Pooling::None => return,
        Pooling::Cls | Pooling::Rank => {}
        Pooling::Last => rows.copy_within((n - 1) * d.., 0),
        Pooling::Mean => {
            let (sum, others) = rows.split_at_mut(d);
            others.chunks_exact(d).for_each(|row| add_scaled(cpu, sum, row, 1.0));
            scale(cpu, sum, 1.0 / n as f32);
        }
    }
    shorten(rows, d);
}

/// Truncates each row to the requested dimensions and normalises it, if requested.
fn finish(cpu: Cpu, text: &Text<'_>, rows: &mut &mut [f32], model: &Model) {
    let full = text.pooling.width(model);
    let (n, width) = (rows.len() / full, text.dimensions.unwrap_or(full));
    for row in 0..n {
        rows.copy_within(row * full..row * full + width, row * width);
        if text.normalise && text.pooling != Pooling::Rank {
            normalise(cpu, &mut rows[row * width..(row + 1) * width]);
        }
    }
    shorten(rows, n * width);
}

/// Keeps the first `n` values.
fn shorten(rows: &mut &mut [f32], n: usize) {
    let all = core::mem::take(rows);
    *rows = &mut all[..n];
}
