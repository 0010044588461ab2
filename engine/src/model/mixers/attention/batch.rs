//! What attention of all layers needs of a batch.

use alloc::vec::Vec;

use super::config::{AttentionConfig, LayerAttention};
use super::rotary::Rotary;
use crate::kernels::attention::{AttendScratch, Attention, KvLayout, PAGE, SelectionScratch, Slot};
use crate::math::ln;
use crate::model::budget::Budget;
use crate::model::mixers::compressed::config::LISTS;
use crate::model::pass::Run;

/// The largest batch.
#[derive(Clone, Copy)]
pub(crate) struct BatchSize {
    pub(crate) rows: usize,
    pub(crate) seqs: usize,
    pub(crate) n_ctx: usize,
    pub(crate) threads: usize,
    /// Largest number of query heads of a layer.
    pub(crate) n_head: usize,
}

/// Buffers of attention.
pub(crate) struct AttentionBatch {
    /// RoPE frequencies of the model's variants, for the context that the working memory is for.
    pub(crate) rotary: Vec<Rotary>,
    /// Most pairs of a variant.
    pairs: usize,
    /// (rows, RoPE variants, pairs)
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Factor on the queries of each row; empty if it is 1.
    temperatures: Vec<f32>,
    /// KV slot of each row.
    pub(crate) slots: Vec<Slot>,
    /// One per thread.
    pub(crate) threads: Vec<AttendScratch>,
    pub(crate) parts: Vec<f32>,
    /// What an indexer selected.
    pub(crate) selection: SelectionScratch,
}

impl AttentionBatch {
    pub(crate) fn new(
        c: &AttentionConfig,
        rotary: Vec<Rotary>,
        layout: &KvLayout,
        size: BatchSize,
        budget: &mut Budget,
    ) -> AttentionBatch {
        let BatchSize { rows: n, seqs, n_ctx, threads, n_head } = size;
        let parts = layout.layers().iter().map(|kv| Attention::parts_len(kv, n_head, seqs, n_ctx));
        let parts_len = parts.max().unwrap_or(0);
        let turns = [n, c.ropes.len(), c.rope_pairs()];
        let (selecting, lists) = match (&c.indexer, &c.compressed) {
            (Some(indexer), _) => (n, indexer.lists()),
            (None, Some(_)) => (n, LISTS),
            (None, None) => (0, 1),
        };
        let [scores, blocks, words] = SelectionScratch::shapes(selecting, lists, n_ctx);
        AttentionBatch {
            rotary,
            pairs: c.rope_pairs(),
            cos: budget.zeros(&turns),
            sin: budget.zeros(&turns),
            temperatures: budget.zeros(&[if c.temperature.is_some() { n } else { 0 }]),
            slots: budget.zeros(&[n]),
            threads: (0..threads).map(|_| AttendScratch::new(layout.layers())).collect(),
            parts: budget.zeros(&[parts_len]),
            selection: SelectionScratch {
                lists,
                n_ctx,
                scores: budget.zeros(&scores),
                blocks: budget.zeros(&blocks),
                words: budget.zeros(&words),
            },
        }
    }

    /// Assigns each row of the batch its slot in a KV page, and computes cosines and sines of its position for each RoPE variant.
    pub(crate) fn begin(&mut self, c: &AttentionConfig, runs: &[Run<'_>]) {
        self.slots.clear();
        for run in runs {
            for pos in run.pos..run.pos + run.tokens.len() {
                for (i, rotary) in self.rotary.iter().enumerate() {
                    let at = (self.slots.len() * self.rotary.len() + i) * self.pairs;
                    rotary.at(pos, &mut self.cos[at..at + self.pairs], &mut self.sin[at..at + self.pairs]);
                }
                if let Some(t) = &c.temperature {
                    let steps = (pos + t.offset) / t.length;
                    self.temperatures[self.slots.len()] = (1.0 + f64::from(t.scale) * ln((steps + 1) as f64)) as f32;
                }
                self.slots.push(Slot { page: run.pages[pos / PAGE], token: (pos % PAGE) as u32 });
            }
        }
    }

    /// Cosines and sines of row `r` in a layer; empty without RoPE.
    pub(crate) fn turns(&self, layer: &LayerAttention, r: usize) -> (&[f32], &[f32]) {
        let Some(rope) = layer.rope else { return Default::default() };
        let at = (r * self.rotary.len() + rope) * self.pairs;
        let end = at + self.rotary[rope].pairs();
        (&self.cos[at..end], &self.sin[at..end])
    }

    /// Factor on the queries of row `r` in a layer.
    pub(crate) fn query_scale(&self, c: &AttentionConfig, layer: &LayerAttention, r: usize) -> f32 {
        let temperature = c.temperature.as_ref().filter(|t| t.with_rope || layer.rope.is_none());
        temperature.map_or(layer.scale, |_| layer.scale * self.temperatures[r])
    }
}
