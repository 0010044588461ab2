//! The forward pass of all model families: a batch of tokens of one or more sequences in, logits out.
//!
//! ```text
//! x = norm(embedding[token] * scale + token_type + position_embedding[position])
//! for each layer: x = block(x)                              (`residual/`)
//! logits = soft_cap((W_out norm(x) + b) * scale)
//! ```
//!
//! Terms that a model does not have are skipped.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::Model;
use super::scratch::Scratch;
use crate::error::MemoryError;
use crate::kernels::attention::{KvLayout, KvMemory, Span};
use crate::kernels::elementwise::scale;
use crate::kernels::recurrent::StateSpan;
use crate::model::family::Mtp;
use crate::model::heads::classifier::Classifier;
use crate::model::heads::projection::ProjectionScratch;
use crate::model::linear::{Linear, padded};
use crate::model::pass::{Exec, KvRef, Pass, Run, Stage, Trace};
use crate::model::residual::layer::LayerView;
use crate::model::rows::{RowOps, columns};

/// Hidden states and logits of the rows of a batch that want logits, in order of the runs.
pub struct Logits<'a> {
    hidden: &'a [f32],
    logits: &'a [f32],
    n_embd: usize,
    n_vocab: usize,
}

impl<'a> Logits<'a> {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.hidden.len() / self.n_embd
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.hidden.is_empty()
    }

    /// Logits of a row (n_vocab).
    pub fn logits(&self, row: usize) -> &'a [f32] {
        &self.logits[row * padded(self.n_vocab)..][..self.n_vocab]
    }

    /// Hidden state of a row after the final norm (n_embd); it determines the logits.
    pub fn hidden(&self, row: usize) -> &'a [f32] {
        &self.hidden[row * self.n_embd..][..self.n_embd]
    }
}

impl Model {
    /// Runs a batch and returns the logits that its runs want. Writes the keys and values of its tokens to the pages of
    /// their sequences, and their recurrent states, which must be those before the runs' first tokens.
    ///
    /// # Panics
    /// If the batch exceeds the scratch memory, or a token, page or embedded position is out of range. `Engine::submit`
    /// checks these.
    pub fn forward<'s>(
        &self,
        exec: Exec<'_>,
        runs: &[Run<'_>],
        kv: KvRef<'_>,
        s: &'s mut Scratch,
        mut trace: Option<Trace<'_>>,
    ) -> Logits<'s> {
        self.batch(exec, runs, kv, s, trace.as_mut().map(|t| &mut **t as _));
        self.logits(exec, &logits_rows(runs), s, trace)
    }

    /// Runs a batch through the layers. [`Model::logits`] computes logits of its rows, until the next batch.
    ///
    /// # Panics
    /// As [`Model::forward`].
    pub fn batch(&self, exec: Exec<'_>, runs: &[Run<'_>], kv: KvRef<'_>, s: &mut Scratch, trace: Option<Trace<'_>>) {
        let (spans, states) = (spans(runs), self.state_spans(runs));
        let mut pass = self.pass(exec, (&spans, &states), kv.layout, trace);
        self.begin_layers(&mut pass, runs, s);
        self.run_layers(0..self.config.n_layer(), &mut pass, kv.memory, s);
        self.end_layers(&pass, s);
    }

    /// Runs some layers of a batch of whole texts whose keys and values no later batch reads, so that pages of
    /// [`Config::batch_kv_layout`](super::Config::batch_kv_layout) suffice. The layers of a batch are run in order, each once;
    /// between two parts nothing else may use `kv` and `s`. [`Model::final_states`] comes after the last.
    ///
    /// # Panics
    /// As [`Model::forward`].
    pub fn states_part(&self, exec: Exec<'_>, runs: &[Run<'_>], kv: KvRef<'_>, s: &mut Scratch, layers: Range<usize>) {
        let (spans, states) = (spans(runs), self.state_spans(runs));
        let mut pass = self.pass(exec, (&spans, &states), kv.layout, None);
        if layers.start == 0 {
            self.begin_layers(&mut pass, runs, s);
        }
        let is_last = layers.end == self.config.n_layer();
        self.run_layers(layers, &mut pass, kv.memory, s);
        if is_last {
            self.end_layers(&pass, s);
        }
    }

    /// The hidden states of a batch after the final norm, (rows, n_embd), once all layers were run.
    pub fn final_states<'s>(&self, exec: Exec<'_>, runs: &[Run<'_>], s: &'s mut Scratch) -> &'s mut [f32] {
        let len = runs.iter().map(|run| run.tokens.len()).sum::<usize>() * self.config.n_embd;
        let x = &mut s.batch.x[..len];
        let Some(norm) = &self.weights.output.norm else { return x };
        let h = s.memory.stack().floats(len);
        self.rows(exec).norm(norm, x, self.config.n_embd, h);
        h
    }

    /// The hidden states of `rows` of the last batch that an MTP head reads, (rows, n_embd).
    ///
    /// # Panics
    /// If a row is not in the batch.
    pub fn hidden_states(&self, exec: Exec<'_>, rows: Range<usize>, s: &Scratch) -> Vec<f32> {
        let d = self.config.n_embd;
        let x = &s.batch.x[rows.start * d..rows.end * d];
        match &self.weights.output.norm {
            Some(norm) if self.config.output.mtp == Mtp::Normed => {
                let mut out = vec![0.0; x.len()];
                self.rows(exec).norm(norm, x, d, &mut out);
                out
            }
            _ => x.to_vec(),
        }
    }

    fn pass<'a, 't>(
        &self,
        exec: Exec<'a>,
        (spans, states): (&'a [Span<'a>], &'a [StateSpan]),
        kv: &'a KvLayout,
        trace: Option<Trace<'t>>,
    ) -> Pass<'a, 't> {
        let n = spans.iter().map(|s| s.n).sum();
        Pass { rows: self.rows(exec), d: self.config.n_embd, kv, spans, states, n, trace }
    }

    /// The rows of each sequence, for recurrent layers.
    fn state_spans(&self, runs: &[Run<'_>]) -> Vec<StateSpan> {
        let mut row = 0;
        let spans = runs.iter().filter(|_| self.config.recurrent.is_some()).map(|run| {
            row += run.tokens.len();
            StateSpan { row: row - run.tokens.len(), n: run.tokens.len(), slot: run.state }
        });
        spans.collect()
    }

    pub(super) fn rows<'a>(&self, Exec { cpu, pool }: Exec<'a>) -> RowOps<'a> {
        RowOps { cpu, pool, kind: self.config.norm.kind, eps: self.config.norm.eps }
    }

    /// The residual streams before the first layer, from the tokens of the batch.
    fn begin_layers(&self, pass: &mut Pass<'_, '_>, runs: &[Run<'_>], s: &mut Scratch) {
        let (c, w, n) = (&self.config, &self.weights, pass.n);
        assert!(n <= s.max_rows, "the batch has more rows than the scratch memory");
        let Scratch { batch, joined, memory, .. } = s;
        let stack = &mut memory.stack();
        batch.mixers.attention.begin(&c.attention, runs);
        batch.tokens.clear();
        batch.tokens.extend(runs.iter().flat_map(|run| run.tokens));
        let x = &mut batch.x[..n * c.n_embd];
        w.embedding.run(pass, &c.embedding, runs, x, stack);
        if let Some(input) = &w.mtp_input {
            input.run(pass, x, joined, stack);
        }
        pass.trace_stage(Stage::Embedding, None, &mut columns(x, c.n_embd, 0, c.n_embd));
        if let Some(embeddings) = &w.layer_embeddings {
            embeddings.run(pass, (x, &batch.tokens), &mut batch.layer_embeddings, stack);
        }
        if c.embedding.skips {
            batch.embeddings[..x.len()].copy_from_slice(x);
        }
        w.streams.begin(pass, &c.residual, batch, stack);
    }

    fn run_layers(&self, layers: Range<usize>, pass: &mut Pass<'_, '_>, memory: &mut KvMemory, s: &mut Scratch) {
        let (d, n) = (self.config.n_embd, pass.n);
        let Scratch { batch, memory: temporaries, .. } = s;
        let stack = &mut temporaries.stack();
        for i in layers {
            let view = LayerView { ngram_table: self.weights.ngram_table.as_ref(), ..self.config.view(i) };
            self.layer(i).run(pass, view, batch, memory, stack);
            let output_scale = self.config.layers[i].output_scale;
            if output_scale != 1.0 {
                let rows = pass.rows;
                rows.each(&mut batch.x[..n * d], d, &|_, x| scale(rows.cpu, x, output_scale));
            }
            if let Some(end) = self.config.layers[i].after {
                self.weights.streams.end_pass(pass, end, self.weights.output.norm.as_ref(), batch);
            }
        }
    }

    /// The residual stream after the last layer.
    fn end_layers(&self, pass: &Pass<'_, '_>, s: &mut Scratch) {
        let of = (&self.config.residual, self.config.n_layer());
        self.weights.streams.end(pass, of, &mut s.batch, &mut s.memory.stack());
    }

    /// Hidden states after the final norm, and logits, of `rows` of the last batch.
    ///
    /// # Panics
    /// If there are more rows than the scratch memory has logits rows, or a row is not in the batch.
    pub fn logits<'s>(
        &self,
        exec: Exec<'_>,
        rows: &[Range<usize>],
        s: &'s mut Scratch,
        mut trace: Option<Trace<'_>>,
    ) -> Logits<'s> {
        let (c, w, on) = (&self.config, &self.weights, self.rows(exec));
        let (d, stride) = (c.n_embd, padded(c.n_vocab));
        let mut wanted = 0;
        for rows in rows {
            assert!(wanted + rows.len() <= s.max_logits, "more logits rows than the scratch memory");
            let from = &s.batch.x[rows.start * d..rows.end * d];
            let to = &mut s.hidden[wanted * d..(wanted + rows.len()) * d];
            match &w.output.norm {
                Some(norm) => on.norm(norm, from, d, to),
                None => to.copy_from_slice(from),
            }
            wanted += rows.len();
        }
        let (hidden, logits) = (&mut s.hidden[..wanted * d], &mut s.logits[..wanted * stride]);
        if wanted > 0 {
            let mut trace_stage = |stage, rows: &mut dyn Iterator<Item = &[f32]>| {
                if let Some(trace) = &mut trace {
                    trace(stage, None, rows);
                }
            };
            trace_stage(Stage::FinalNorm, &mut columns(hidden, d, 0, d));
            w.output.run(&on, (&c.output, w.output_matrix()), hidden, logits, &mut s.memory.stack());
            trace_stage(Stage::Logits, &mut columns(logits, stride, 0, c.n_vocab));
        }
        Logits { hidden, logits, n_embd: d, n_vocab: c.n_vocab }
    }

    /// Dimensions of an embedding: the rows of the last projection, or `n_embd` without projections.
    pub fn n_embd_out(&self) -> usize {
        self.weights.projections.last().map_or(self.config.n_embd, |projection| projection.w.rows())
    }

    /// Allocates memory to project `max_texts` vectors.
    ///
    /// # Errors
    /// [`MemoryError`] if the allocation fails, or would exceed [`Model::max_scratch_bytes`].
    pub(crate) fn projection_scratch(&self, max_texts: usize) -> Result<ProjectionScratch, MemoryError> {
        let layers: Vec<&Linear> = self.weights.projections.iter().collect();
        ProjectionScratch::new(&layers, max_texts, self.max_scratch_bytes)
    }

    /// Projects pooled vectors (n_embd): each then refers to [`Model::n_embd_out`] values in `s`.
    ///
    /// # Panics
    /// If there are more vectors than the scratch memory is for.
    pub(crate) fn project<'s>(&self, exec: Exec<'_>, vectors: &mut [&mut &'s mut [f32]], s: &'s mut ProjectionScratch) {
        let (n, on) = (vectors.len(), self.rows(exec));
        if n == 0 || self.weights.projections.is_empty() {
            return;
        }
        s.load(vectors, self.config.n_embd);
        for projection in &self.weights.projections {
            s.apply(&on, projection, n);
        }
        for (v, x) in vectors.iter_mut().zip(s.x.chunks_exact_mut(self.n_embd_out())) {
            **v = x;
        }
    }

    /// Number of scores of a text: the rows of the last layer of the classification head; 0 without one.
    pub fn n_classes(&self) -> usize {
        self.weights.classifier.as_ref().map_or(0, Classifier::n_classes)
    }

    /// Allocates memory to classify `max_texts` texts.
    ///
    /// # Errors
    /// [`MemoryError`] if the allocation fails, or would exceed [`Model::max_scratch_bytes`].
    pub(crate) fn classifier_scratch(&self, max_texts: usize) -> Result<ProjectionScratch, MemoryError> {
        match &self.weights.classifier {
            Some(head) => head.scratch(max_texts, self.max_scratch_bytes),
            None => ProjectionScratch::new(&[], max_texts, self.max_scratch_bytes),
        }
    }

    /// Classifies pooled vectors (n_embd): each then refers to [`Model::n_classes`] scores in `s`. Without a head
    /// nothing is done.
    ///
    /// # Panics
    /// If there are more vectors than the scratch memory is for.
    pub(crate) fn classify<'s>(
        &self,
        exec: Exec<'_>,
        vectors: &mut [&mut &'s mut [f32]],
        s: &'s mut ProjectionScratch,
    ) {
        let Some(head) = self.weights.classifier.as_ref().filter(|_| !vectors.is_empty()) else { return };
        head.run(&self.rows(exec), (self.config.output.classifier, self.config.n_embd), vectors, s);
    }
}

/// The rows of each sequence of a batch.
fn spans<'r>(runs: &[Run<'r>]) -> Vec<Span<'r>> {
    let mut row = 0;
    let span = |run: &Run<'r>| {
        let n = run.tokens.len();
        row += n;
        Span { row: row - n, n, pos: run.pos, pages: run.pages }
    };
    runs.iter().map(span).collect()
}

/// The rows of a batch that want logits: the last `n_logits` of each run.
pub(crate) fn logits_rows(runs: &[Run<'_>]) -> Vec<Range<usize>> {
    let mut end = 0;
    let rows = runs.iter().map(|run| {
        end += run.tokens.len();
        assert!(run.n_logits <= run.tokens.len(), "more logits than tokens");
        end - run.n_logits..end
    });
    rows.collect()
}
