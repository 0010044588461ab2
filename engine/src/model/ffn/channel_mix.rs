//! Channel mix of RWKV, a feed-forward that also reads p, the input of the token before in the sequence:
//!
//! ```text
//! RWKV 6:  y = sigmoid(W_r (h + (p - h) * l_r)) * (W_v relu(W_k (h + (p - h) * l_k))^2)
//! RWKV 7:  y = W_v relu(W_k (h + (p - h) * l_k))^2
//! ```

use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::elementwise::{Activation, activate, multiply};
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::StateMemory;
use crate::kernels::recurrent::shift::token_shift;
use crate::model::linear::padded;
use crate::model::memory::{Size, Stack};
use crate::model::mixers::rwkv::mix;
use crate::model::pass::{Pass, SubLayerRows};
use crate::model::tensors::{Declared, Loaded, Name, matrix, vector};

const LERP_KEYS: Name = Name::weight("channel_mix_lerp_k");
const LERP_GATES: Name = Name::weight("channel_mix_lerp_r");
/// The marker of layers with a channel mix.
pub(crate) const KEYS: Name = Name::weight("channel_mix_key");
const VALUES: Name = Name::weight("channel_mix_value");
const GATES: Name = Name::weight("channel_mix_receptance");

/// A feed-forward that also reads the token before.
pub(crate) struct ChannelMix {
    /// Share of the token before in the input of keys (n_embd).
    lerp_k: Vec<f32>,
    /// (n_ff, n_embd)
    key: Matrix,
    /// (n_embd, n_ff)
    value: Matrix,
    /// RWKV 6: share of the token before in the input of the gate, and the gate (n_embd, n_embd).
    receptance: Option<(Vec<f32>, Matrix)>,
}

impl ChannelMix {
    /// Declares the tensors of a layer of a model of width `d`, whose keys have `n_ff` elements; of RWKV 6 if it `has_gates`.
    pub(crate) fn tensors(t: &mut Declared<'_>, (d, n_ff): (usize, usize), has_gates: bool) {
        t.required(LERP_KEYS, vector(d));
        if has_gates {
            t.required(LERP_GATES, vector(d));
        }
        t.required(KEYS, matrix(n_ff, d));
        t.required(VALUES, matrix(d, n_ff));
        if has_gates {
            t.required(GATES, matrix(d, d));
        }
    }

    pub(crate) fn load(t: &mut Loaded<'_>) -> Result<ChannelMix, LoadError> {
        let receptance = match t.optional(LERP_GATES) {
            Some(lerp) => Some((lerp, t.matrix(GATES)?)),
            None => None,
        };
        let lerp_k = t.required(LERP_KEYS)?;
        Ok(ChannelMix { lerp_k, key: t.matrix(KEYS)?, value: t.matrix(VALUES)?, receptance })
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        [&self.key, &self.value].into_iter().chain(self.receptance.iter().map(|(_, w)| w))
    }

    /// Floats of a row: inputs of the tokens before, mixed inputs, keys, gates.
    fn parts(&self) -> [usize; 4] {
        let d = self.key.k();
        [d, d, padded(self.key.rows()), padded(d)]
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        let products = self.matrices().map(|w| Size::packed(n, 1, w.k()));
        Size::rows(n, self.parts()).and(Size::any(products))
    }
}

impl ChannelMix {
    /// `y = channel_mix(x)`. Reads and writes the states of the sequences, at this offset.
    pub(crate) fn run(
        &self,
        pass: &Pass<'_, '_>,
        state_at: usize,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        stack: &mut Stack<'_>,
    ) {
        let (n, rows, d, stride) = (pass.n, pass.rows, self.key.k(), padded(self.key.rows()));
        let [before, mixed, keys, gates] = stack.rows(n, self.parts());
        token_shift(x, d, before, pass.states, (states, state_at + d));
        rows.each(mixed, d, &|r, out| mix(out, &x[r * d..][..d], &before[r * d..][..d], &self.lerp_k));
        rows.matrix(&self.key, None, Floats { x: mixed, stride: d }, keys, stack);
        rows.each(keys, stride, &|_, row| activate(rows.cpu, Activation::ReluSquared, &mut row[..self.key.rows()]));
        rows.matrix(&self.value, None, Floats { x: keys, stride }, y, stack);
        if let Some((lerp, w)) = &self.receptance {
            rows.each(mixed, d, &|r, out| mix(out, &x[r * d..][..d], &before[r * d..][..d], lerp));
            rows.matrix(w, None, Floats { x: mixed, stride: d }, gates, stack);
            rows.each(gates, padded(d), &|_, row| activate(rows.cpu, Activation::Sigmoid, &mut row[..d]));
            rows.each(y, padded(d), &|r, y| multiply(rows.cpu, &mut y[..d], &gates[r * padded(d)..][..d]));
        }
    }
}
