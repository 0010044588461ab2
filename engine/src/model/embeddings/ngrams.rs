//! Embeddings of n-grams (Qwen4-Exp), which one layer adds to the residual streams x_j before anything else:
//!
//! ```text
//! t_0 = token, t_1, t_2, ... = the tokens before it; from an end of text on, or before the first token, end of text
//! r_h = ((t_0 * m_0) ^ ... ^ (t_n-1 * m_n-1)) mod size_h + offset_h       in u64; heads of 2-grams, of 3-grams, ...
//! e = table rows r_0, r_1, ... side by side;  v = W_v e
//! s_j = sum(norm(W_k e)_j * norm(x_j)) * (1 / sqrt(n_embd));  g_j = sigmoid(sign(s_j) * sqrt(max(|s_j|, 1e-6)))
//! x_j = x_j + (v * g_j + silu(conv(norm(v * g_j))))   conv: causal, of each channel, over every N-th token
//! ```
//!
//! N is the number of tokens of the longest n-gram. The sum of s_j is in f64, the dimensions ascending. The state of a sequence
//! has the inputs of the convolution and the last N - 1 tokens.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use super::EmbeddingConfig;
use crate::error::LoadError;
use crate::kernels::attention::KvMemory;
use crate::kernels::elementwise::{Activation, activate, add_scaled, scale, sigmoid};
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::conv::{Conv, ConvRows, causal_conv};
use crate::math::sqrt;
use crate::model::keys::Keys;
use crate::model::keys::MAX_WIDTH;
use crate::model::linear::{Linear, Norm, padded};
use crate::model::memory::{Size, Stack};
use crate::model::pass::Pass;
use crate::model::tensors::{Declared, LinearName, Loaded, Name, matrix, values, vector};

/// Most tokens of an n-gram, and heads.
const MAX_TOKENS: usize = 8;
const MAX_HEADS: u32 = 64;
/// Longest convolution.
const MAX_CONV: u32 = 64;
/// Least absolute value under the root.
const LEAST_SCORE: f32 = 1e-6;

/// Which rows of the table an n-gram has.
#[derive(Debug, Clone, PartialEq)]
pub struct NgramConfig {
    /// The layer that adds the embeddings.
    layer: usize,
    /// Tokens of the longest n-gram.
    n: usize,
    /// Heads of the n-grams of each length.
    per_length: usize,
    /// First row and number of rows of each head.
    heads: Vec<(u64, u64)>,
    /// Factors of the tokens, the last token first.
    multipliers: Vec<u64>,
    /// The token that ends a text.
    end: u32,
    /// Elements of a row of the table.
    width: usize,
    /// Inputs of the convolution.
    conv: usize,
    /// Width of all residual streams.
    streams: usize,
    /// Offset in the recurrent state of a sequence.
    state_at: usize,
}

impl NgramConfig {
    /// Reads the configuration, if the model has such embeddings; `is_recurrent` tells of each layer whether it is recurrent,
    /// `streams` is the width of all residual streams.
    pub(crate) fn read(
        keys: &Keys<'_, '_>,
        is_recurrent: &[bool],
        (n_embd, streams): (usize, usize),
    ) -> Result<Option<NgramConfig>, LoadError> {
        let of_layers = keys.u32_array("ple.layers")?.unwrap_or_default();
        if of_layers.is_empty() {
            return Ok(None);
        }
        let layer = match of_layers[..] {
            [layer] if is_recurrent.get(layer as usize) == Some(&true) => layer as usize,
            _ => return Err(keys.wrong("ple.layers", format!("{of_layers:?}"), "one layer with linear attention")),
        };
        let n = keys.size("ple.ngram_size", 2..=MAX_TOKENS as u32)?;
        let per_length = keys.size("ple.heads_per_ngram", 1..=MAX_HEADS / (n as u32 - 1))?;
        let n_heads = (n - 1) * per_length;
        let array = |name: &'static str, len: usize| {
            let mut numbers = keys.u64_array(name)?.unwrap_or_default();
            if numbers.len() < len {
                return Err(keys.wrong(name, format!("{} numbers", numbers.len()), format!("{len} numbers")));
            }
            numbers.truncate(len);
            Ok(numbers)
        };
        let (offsets, sizes) = (array("ple.head_offsets", n_heads)?, array("ple.head_vocab_sizes", n_heads)?);
        let heads: Vec<(u64, u64)> = offsets.into_iter().zip(sizes).collect();
        let most = i32::MAX as u64;
        if let Some((offset, size)) = heads.iter().find(|(o, s)| *s == 0 || *o > most || *s > most || o + s > most) {
            let found = format!("{size} rows from row {offset} on");
            return Err(keys.wrong("ple.head_vocab_sizes", found, format!("1 to {most} rows in all")));
        }
        let width = keys.size("embedding_length_per_layer_input", 1..=MAX_WIDTH)?;
        if width * n_heads != n_embd {
            let expected = format!("{n_embd} (embedding_length) / {n_heads} heads");
            return Err(keys.wrong("embedding_length_per_layer_input", width, expected));
        }
        Ok(Some(NgramConfig {
            layer,
            n,
            per_length,
            heads,
            multipliers: array("ple.layer_multipliers", n)?,
            end: keys.size("ple.eos_token_id", 0..=u32::MAX)? as u32,
            width,
            conv: keys.size("ple.conv_kernel", 1..=MAX_CONV)?,
            streams,
            state_at: 0,
        }))
    }

    /// Puts the state of a sequence at this offset in its recurrent state.
    pub(crate) fn place(&mut self, state_at: usize) {
        self.state_at = state_at;
    }

    /// Floats of the state of the convolution.
    fn conv_state_len(&self) -> usize {
        ((self.conv - 1) * self.n).saturating_mul(self.streams)
    }

    /// Floats of the state of a sequence.
    pub(crate) fn state_len(&self) -> usize {
        self.conv_state_len().saturating_add(self.n - 1)
    }

    /// Declares the table of embeddings; files may have rows that no head has.
    pub(crate) fn table(&self, t: &mut Declared<'_>) {
        let needed = self.heads.iter().map(|(offset, size)| offset + size).max().unwrap_or(1);
        let width = self.width;
        t.required_by(TABLE, move |dims| matrix(dims[1].clamp(needed, i32::MAX as u64) as usize, width));
    }

    /// Declares the tensors of the layer that adds the embeddings, of a model of width `d`.
    pub(crate) fn tensors(&self, t: &mut Declared<'_>, d: usize) {
        t.required(KEY.weight(), matrix(self.streams, d));
        t.required(VALUE.weight(), matrix(d, d));
        NORMS.into_iter().for_each(|norm| stream_norm(t, norm, self.streams / d, d));
        t.required(CONV, values(self.conv, self.streams));
    }

    /// The rows of the table for a token; `before` gives the token that is so many tokens before it, if there is one.
    fn rows(&self, token: u32, before: impl Fn(usize) -> Option<u32>, rows: &mut [usize]) {
        let end = u64::from(self.end);
        let mut is_cut = false;
        let mut mixed = u64::from(token).wrapping_mul(self.multipliers[0]);
        let lengths = rows.chunks_exact_mut(self.per_length).zip(self.heads.chunks_exact(self.per_length));
        for (i, (rows, heads)) in (1..).zip(lengths) {
            let token = before(i).map_or(end, u64::from);
            is_cut |= token == end;
            mixed ^= (if is_cut { end } else { token }).wrapping_mul(self.multipliers[i]);
            for (row, (offset, size)) in rows.iter_mut().zip(heads) {
                *row = (mixed % size + offset) as usize;
            }
        }
    }
}

/// (rows, width of a head)
pub(crate) const TABLE: Name = Name::weight("per_layer_token_embd");
const KEY: LinearName = LinearName("ple_key");
const VALUE: LinearName = LinearName("ple_value");
/// Norms of each stream: of keys, of queries, of the inputs of the convolution.
const NORMS: [Name; 3] = [Name::weight("ple_norm_key"), Name::weight("ple_norm_query"), Name::weight("ple_norm_conv")];
const CONV: Name = Name::weight("ple_conv1d");

/// The n-grams of a model, if the layer with these weights adds them.
pub(crate) fn of_layer(c: &EmbeddingConfig, block: usize) -> Option<&NgramConfig> {
    c.ngrams.as_ref().filter(|ngrams| ngrams.layer == block)
}

/// Declares the norm of `n` streams of `d` elements, in one dimension or two.
pub(crate) fn stream_norm(t: &mut Declared<'_>, name: Name, n: usize, d: usize) {
    t.required_by(name, move |dims| if dims[0] == (n * d) as u64 { vector(n * d) } else { values(d, n) });
}

/// Takes a norm of all streams, each of `d` elements.
pub(crate) fn take_stream_norm(t: &mut Loaded<'_>, name: Name, d: usize) -> Result<Norm, LoadError> {
    Ok(Norm { weight: t.required(name)?, bias: None, eps: None, width: d })
}

/// Weights of the layer.
pub(crate) struct NgramWeights {
    /// (n * n_embd, n_embd)
    key: Linear,
    /// (n_embd, n_embd)
    value: Linear,
    /// Norms of each stream (n, n_embd).
    key_norm: Norm,
    query_norm: Norm,
    conv_norm: Norm,
    /// (inputs, n * n_embd), with zeros for the tokens that are left out.
    conv: Vec<f32>,
}

impl NgramWeights {
    /// Takes the tensors of the layer.
    pub(crate) fn load(c: &NgramConfig, t: &mut Loaded<'_>, d: usize) -> Result<NgramWeights, LoadError> {
        let taps = t.transposed(CONV)?;
        let streams = c.streams;
        let mut conv = vec![0.0; (c.conv - 1) * c.n * streams + streams];
        for (tap, to) in taps.chunks_exact(streams).zip(conv.chunks_mut(c.n * streams)) {
            to[..streams].copy_from_slice(tap);
        }
        let [key_norm, query_norm, conv_norm] = NORMS.map(|norm| take_stream_norm(t, norm, d));
        let (key, value) = (t.linear(KEY)?, t.linear(VALUE)?);
        Ok(NgramWeights { key, value, key_norm: key_norm?, query_norm: query_norm?, conv_norm: conv_norm?, conv })
    }

    pub(crate) fn matrices(&self) -> [&Matrix; 2] {
        [&self.key.w, &self.value.w]
    }

    /// Floats of a row: embeddings, keys, value, convolution, queries, gates of the streams.
    fn parts(&self) -> [usize; 6] {
        let (streams, d) = (self.key.w.rows(), self.value.w.rows());
        [d, padded(streams), padded(d), streams, streams, padded(streams / d)]
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        Size::rows(n, self.parts()).and(self.key.size(n).or(self.value.size(n)))
    }

    /// Adds the embeddings of the n-grams that end with the tokens to the residual streams.
    pub(crate) fn run(
        &self,
        pass: &Pass<'_, '_>,
        (c, table): (&NgramConfig, &Matrix),
        (x, tokens): (&mut [f32], &[u32]),
        memory: &mut KvMemory,
        stack: &mut Stack<'_>,
    ) {
        let (w, d, n, on, streams) = (self, pass.d, pass.n, pass.rows, c.streams);
        let table_rows = c.table_rows(pass, tokens, memory);
        let mut stack = stack.scope();
        let [embeddings, keys, value, conv, queries, gates] = stack.rows(n, w.parts());
        on.each(embeddings, d, &|r, row| {
            let table_rows = &table_rows[r * c.heads.len()..];
            row.chunks_exact_mut(c.width).zip(table_rows).for_each(|(out, row)| table.row(*row, out));
        });
        on.linear(&w.key, embeddings, keys, &mut stack);
        on.linear(&w.value, embeddings, value, &mut stack);
        let x = &mut x[..n * streams];
        queries.copy_from_slice(x);
        on.each(queries, streams, &|_, query| on.norm_heads(&w.query_norm, query));
        let (queries, count) = (&*queries, streams / d);
        let factor = 1.0 / sqrt(d as f32);
        on.each(keys, padded(streams), &|_, keys| on.norm_heads(&w.key_norm, &mut keys[..streams]));
        on.each(gates, padded(count), &|r, gates| {
            let (keys, queries) = (&keys[r * padded(streams)..], &queries[r * streams..]);
            for ((gate, k), q) in gates[..count].iter_mut().zip(keys.chunks_exact(d)).zip(queries.chunks_exact(d)) {
                let sum = k.iter().zip(q).fold(0.0, |sum, (k, q)| sum + f64::from(*k) * f64::from(*q));
                *gate = gate_of(sum as f32 * factor);
            }
        });
        let (gates, value) = (&*gates, &*value);
        on.each(conv, streams, &|r, row| {
            for (stream, gate) in row.chunks_exact_mut(d).zip(&gates[r * padded(count)..]) {
                stream.copy_from_slice(&value[r * padded(d)..][..d]);
                scale(on.cpu, stream, *gate);
            }
            on.norm_heads(&w.conv_norm, row);
        });
        let weights = Conv { weights: &w.conv, bias: None, channels: streams };
        let conv_rows = ConvRows { x: conv, stride: streams, at: 0 };
        causal_conv(on.cpu, on.pool, weights, conv_rows, pass.states, (&mut memory.states, c.state_at));
        on.each(conv, streams, &|r, row| {
            activate(on.cpu, Activation::Silu, row);
            for (stream, gate) in row.chunks_exact_mut(d).zip(&gates[r * padded(count)..]) {
                add_scaled(on.cpu, stream, &value[r * padded(d)..][..d], *gate);
            }
        });
        on.add(x, streams, conv, streams, 1.0);
    }
}

impl NgramConfig {
    /// The rows of the table, (rows, heads). Reads the tokens before the batch from the states of the sequences, and writes
    /// the last ones to them, as numbers above 0.
    fn table_rows(&self, pass: &Pass<'_, '_>, tokens: &[u32], memory: &mut KvMemory) -> Vec<usize> {
        let c = self;
        let (n_heads, n_kept) = (c.heads.len(), c.n - 1);
        let mut table_rows = vec![0; pass.n * n_heads];
        for span in pass.states {
            let at = c.state_at + c.conv_state_len();
            let kept = &mut memory.states.slot_mut(span.slot)[at..at + n_kept];
            let tokens = &tokens[span.row..span.row + span.n];
            let rows = table_rows[span.row * n_heads..].chunks_exact_mut(n_heads);
            for (i, (token, rows)) in tokens.iter().zip(rows).enumerate() {
                let before = |distance: usize| match i.checked_sub(distance) {
                    Some(i) => Some(tokens[i]),
                    None => (kept[n_kept + i - distance] as u32).checked_sub(1),
                };
                c.rows(*token, before, rows);
            }
            for i in 0..n_kept {
                // the token so many tokens before the next one
                let distance = n_kept - i;
                kept[i] = match span.n.checked_sub(distance) {
                    Some(i) => (tokens[i] + 1) as f32,
                    None => kept[i + span.n],
                };
            }
        }
        table_rows
    }
}

/// The factor of the values in a stream.
fn gate_of(score: f32) -> f32 {
    let size = score.abs();
    let root = sqrt(if size > LEAST_SCORE { size } else { LEAST_SCORE });
    sigmoid(match score {
        score if score > 0.0 => root,
        score if score < 0.0 => -root,
        _ => 0.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> NgramConfig {
        NgramConfig {
            layer: 0,
            n: 3,
            per_length: 2,
            heads: vec![(0, 128), (128, 127), (256, 126), (384, 125)],
            multipliers: vec![1, 3, 5],
            end: 2,
            width: 64,
            conv: 4,
            streams: 1024,
            state_at: 0,
        }
    }

    /// Rows of the last token of a text.
    fn rows(c: &NgramConfig, text: &[u32]) -> [usize; 4] {
        let (token, before) = text.split_last().expect("a token");
        let mut rows = [0; 4];
        c.rows(*token, |i| before.len().checked_sub(i).map(|i| before[i]), &mut rows);
        rows
    }

    #[test]
    fn an_end_of_text_hides_the_tokens_before_it() {
        let c = config();
        let of = |t: [u64; 3]| {
            let two = t[0] ^ (t[1] * 3);
            let three = two ^ (t[2] * 5);
            [two % 128, two % 127 + 128, three % 126 + 256, three % 125 + 384].map(|row| row as usize)
        };
        assert_eq!(rows(&c, &[40, 50, 60]), of([60, 50, 40]));
        assert_eq!(rows(&c, &[40, 2, 60]), of([60, 2, 2]));
        assert_eq!(rows(&c, &[2, 50, 60]), of([60, 50, 2]));
        assert_eq!(rows(&c, &[50, 60]), of([60, 50, 2]));
        assert_eq!(rows(&c, &[60]), of([60, 2, 2]));
        // its own end of text hides nothing
        assert_eq!(rows(&c, &[40, 50, 2]), of([2, 50, 40]));
    }

    #[test]
    fn products_wrap() {
        let c = NgramConfig { multipliers: vec![u64::MAX, 1 << 63, 3], ..config() };
        let two = 60u64.wrapping_mul(u64::MAX) ^ 51u64.wrapping_mul(1 << 63);
        assert_eq!(rows(&c, &[51, 60])[0], (two % 128) as usize);
    }
}
