//! Texts in, vectors out: batches of encoders, and of decoders whose states are pooled.
//!
//! A batch is whole texts side by side, without padding; each sees itself alone. Nothing outlives a batch, so a host may
//! put texts of several requests into one. A text's vector does not depend on the others.
//!
//! ```text
//! h = states of its tokens after the final norm
//! none: each h[t]     mean: (h[0] + h[1] + ...) * (1 / n)     cls: h[0]     last: h[n - 1]
//! h = W h + b of each head of the model, unless pooled by none
//! v = the first `dimensions` numbers;  v = v * (1 / sqrt(sum of squares))
//! ```

use alloc::format;
use alloc::string::ToString;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::error::{LoadError, MemoryError, RequestError};

use crate::kernels::attention::{KvLayout, KvMemory, KvType, PAGE};
use crate::kernels::elementwise::{add_scaled, scale};
use crate::kernels::norm::normalise;
use crate::kernels::{Cpu, tasks};
use crate::model::{Config, Model, ProjectionScratch, Run, Scratch};
use crate::pool::Pool;

/// How a text's vector is made from the states of its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Pooling {
    /// Not at all: a vector for each token.
    None,
    /// Their mean.
    Mean,
    /// The first token's.
    Cls,
    /// The last token's.
    Last,
}

impl Pooling {
    /// In the order of the file's numbers (`pooling_type`, as llama.cpp has them).
    pub const ALL: [Pooling; 4] = [Pooling::None, Pooling::Mean, Pooling::Cls, Pooling::Last];

    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            Pooling::None => "none",
            Pooling::Mean => "mean",
            Pooling::Cls => "cls",
            Pooling::Last => "last",
        }
    }

    /// Numbers of a vector of `model`: with [`Pooling::None`] those of a state, else what its heads make of one.
    pub fn width(self, model: &Model) -> usize {
        if self == Pooling::None { model.config.n_embd } else { model.n_embd_out() }
    }

    /// What the model's file says; if it says nothing, the mean for encoders and the last token for decoders.
    ///
    /// # Errors
    /// A kind that is not known, by name.
    pub fn of(config: &Config) -> Result<Pooling, LoadError> {
        match config.pooling_type {
            None if config.causal => Ok(Pooling::Last),
            None => Ok(Pooling::Mean),
            Some(n) => Pooling::ALL.get(n as usize).copied().ok_or_else(|| LoadError::Unsupported {
                what: "pooling",
                found: if n == 4 { "rank".into() } else { n.to_string() },
                known: Pooling::ALL.map(Pooling::name).into(),
            }),
        }
    }
}

/// Sizes of an embedder; all memory is reserved from them at construction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmbedderOptions {
    /// Texts of a batch.
    pub max_texts: usize,
    /// Tokens of a batch, at most: several texts are several batches where that is quicker.
    pub batch_tokens: usize,
    /// Tokens of a text, at most; as many as the model can tell apart, if those are fewer. Changes numbers of models
    /// that rotate by other frequencies in long contexts ([`Model::is_long_context`]).
    pub n_ctx: usize,
}

/// A text to be embedded, and the form of its vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Text<'a> {
    /// Its tokens, with those that the model wants before and after a text.
    pub tokens: &'a [u32],
    /// Which states count.
    pub pooling: Pooling,
    /// How many numbers of the vector are wanted, from the first (Kusupati et al. 2022); `None` for all.
    pub dimensions: Option<usize>,
    /// Whether its length is to be 1.
    pub normalise: bool,
}

/// Tokens of a batch for each thread beyond which texts are quicker in several: numbers of a layer stay in the caches.
const QUICK_TOKENS: usize = 256;

/// A model that embeds texts.
pub struct Embedder {
    model: Arc<Model>,
    options: EmbedderOptions,
    /// Tokens of a batch of several texts, as [`Embedder::fit`] makes them.
    quick_tokens: usize,
    kv: KvLayout,
    /// Keys and values of one layer of the batch at hand.
    memory: KvMemory,
    pages: Vec<u32>,
    scratch: Scratch,
    projections: ProjectionScratch,
}

impl Embedder {
    /// An embedder with all its memory.
    ///
    /// # Errors
    /// If there is not enough, or the model may not have as much.
    pub fn new(model: Arc<Model>, pool: &dyn Pool, mut options: EmbedderOptions) -> Result<Embedder, MemoryError> {
        options.n_ctx = options.n_ctx.min(model.config.max_context());
        options.max_texts = options.max_texts.min(options.batch_tokens);
        // f32, since nothing is kept; a page belongs to one text
        let kv = KvLayout { n_layer: 1, ..model.kv_layout(KvType::F32) };
        let n_pages = (options.batch_tokens / PAGE).saturating_add(options.max_texts);
        let memory = KvMemory::zeroed(&kv, n_pages)?;
        let scratch = model.scratch(pool, KvType::F32, options.batch_tokens, 0, 0, options.n_ctx)?;
        let pages = (0..u32::try_from(n_pages).unwrap_or(u32::MAX)).collect();
        let projections = model.projection_scratch(options.max_texts)?;
        let quick_tokens = options.batch_tokens.min(QUICK_TOKENS.saturating_mul(pool.threads()));
        Ok(Embedder { model, options, quick_tokens, kv, memory, pages, scratch, projections })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The sizes.
    pub fn options(&self) -> &EmbedderOptions {
        &self.options
    }

    /// Tokens of a text, at most: it must fit the context and a batch.
    pub fn max_tokens(&self) -> usize {
        self.options.n_ctx.min(self.options.batch_tokens)
    }

    /// How many texts, of these numbers of tokens in this order, are best done in one batch; 0 if the first is too long.
    pub fn fit(&self, lens: impl IntoIterator<Item = usize>) -> usize {
        self.count(lens, self.quick_tokens)
    }

    /// How many texts of these lengths come to no more than so many tokens, or are one that a batch holds.
    fn count(&self, lens: impl IntoIterator<Item = usize>, most: usize) -> usize {
        let mut tokens = 0_usize;
        let fits = lens.into_iter().take(self.options.max_texts).take_while(|&n| {
            let most = if tokens == 0 { self.options.batch_tokens } else { most };
            tokens = tokens.saturating_add(n);
            tokens <= most
        });
        fits.count()
    }

    /// Cuts a text that is too long: its first tokens stay, and its last if that is a control token, such as the end
    /// that the model wants.
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

    /// Checks a text, before it waits for a batch.
    ///
    /// # Errors
    /// What is wrong with it.
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
        match text.dimensions {
            Some(d) if d == 0 || d > width => Err(RequestError::Option {
                name: "dimensions",
                found: format!("{d} (the model has {width})"),
                expected: "1 to the dimensions of the model",
            }),
            _ => Ok(()),
        }
    }

    /// Embeds a batch. `sink` is called for each text in order, with its number and its vector (with
    /// [`Pooling::None`] the vectors of its tokens, one after the other), or `None` where the numbers are not finite:
    /// a fault of the model's weights with this text.
    ///
    /// # Errors
    /// A text that is wrong, or more than a batch holds ([`EmbedderOptions`]); nothing was computed.
    pub fn embed(
        &mut self,
        cpu: Cpu,
        pool: &dyn Pool,
        texts: &[Text<'_>],
        sink: &mut dyn FnMut(usize, Option<&[f32]>),
    ) -> Result<(), RequestError> {
        texts.iter().try_for_each(|text| self.check(text))?;
        let fit = self.count(texts.iter().map(|t| t.tokens.len()), self.options.batch_tokens);
        if fit < texts.len() {
            return Err(RequestError::NoCapacity { what: "texts in one batch", needed: texts.len(), free: fit });
        }
        let mut pages = &self.pages[..];
        let mut runs = Vec::with_capacity(texts.len());
        for text in texts {
            let (mine, others) = pages.split_at(text.tokens.len().div_ceil(PAGE));
            runs.push(Run { tokens: text.tokens, pos: 0, pages: mine, n_logits: 0 });
            pages = others;
        }
        if runs.is_empty() {
            return Ok(());
        }
        let d = self.model.config.n_embd;
        let states = self.model.states(cpu, pool, &runs, &self.kv, &mut self.memory, &mut self.scratch);
        let (mut vectors, mut left) = (Vec::with_capacity(texts.len()), states);
        for text in texts {
            let (rows, others) = left.split_at_mut(text.tokens.len() * d);
            vectors.push(rows);
            left = others;
        }
        tasks::chunks(pool, &mut vectors, 1, &|i, rows, _| pooled(cpu, texts[i].pooling, &mut rows[0], d));
        let pairs = vectors.iter_mut().zip(texts);
        let mut through: Vec<_> = pairs.filter(|(_, t)| t.pooling != Pooling::None).map(|(rows, _)| rows).collect();
        self.model.project(cpu, pool, &mut through, &mut self.projections);
        tasks::chunks(pool, &mut vectors, 1, &|i, rows, _| finish(cpu, &texts[i], &mut rows[0], &self.model));
        for (i, v) in vectors.iter().enumerate() {
            sink(i, v.iter().all(|v| v.is_finite()).then_some(v));
        }
        Ok(())
    }
}

/// Leaves of the states of a text, rows of `d` numbers, the pooled one; all of them if they are not pooled.
fn pooled(cpu: Cpu, pooling: Pooling, rows: &mut &mut [f32], d: usize) {
    let n = rows.len() / d;
    match pooling {
        Pooling::None => return,
        Pooling::Cls => {}
        Pooling::Last => rows.copy_within((n - 1) * d.., 0),
        Pooling::Mean => {
            let (sum, others) = rows.split_at_mut(d);
            others.chunks_exact(d).for_each(|row| add_scaled(cpu, sum, row, 1.0));
            scale(cpu, sum, 1.0 / n as f32);
        }
    }
    shorten(rows, d);
}

/// Makes rows into the vectors that the text wants.
fn finish(cpu: Cpu, text: &Text<'_>, rows: &mut &mut [f32], model: &Model) {
    let full = text.pooling.width(model);
    let (n, width) = (rows.len() / full, text.dimensions.unwrap_or(full));
    for row in 0..n {
        rows.copy_within(row * full..row * full + width, row * width);
        if text.normalise {
            normalise(cpu, &mut rows[row * width..(row + 1) * width]);
        }
    }
    shorten(rows, n * width);
}

/// Leaves the first `n` numbers.
fn shorten(rows: &mut &mut [f32], n: usize) {
    let all = core::mem::take(rows);
    *rows = &mut all[..n];
}
