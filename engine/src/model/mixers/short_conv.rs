//! Gated short convolution of LFM2:
//!
//! ```text
//! b, c, v = W_in x;  y = W_out (c * conv(b * v))
//! ```

use alloc::format;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::StateMemory;
use crate::kernels::recurrent::conv::{Conv, ConvRows, causal_conv};
use crate::model::config::Config;
use crate::model::forward::Stage;
use crate::model::keys::Keys;
use crate::model::loader::LoadedTensors;
use crate::model::mixers::{MAX_CONV, RecurrentConfig};
use crate::model::residual::orders::{ForwardPass, SubLayerRows};
use crate::model::roles::{Layout, Part, TensorRow, matrix, values};
use crate::model::rows::columns;
use crate::model::scratch::StepScratch;
use crate::model::weights::{Linear, LinearGroup, linear, transposed};

/// Sizes of a short convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConvConfig {
    /// Number of channels (n_embd).
    pub channels: usize,
    /// Inputs of the convolution.
    pub conv: usize,
}

impl ShortConvConfig {
    pub(crate) fn read(keys: &Keys<'_, '_>, n_embd: usize) -> Result<ShortConvConfig, LoadError> {
        Ok(ShortConvConfig { channels: n_embd, conv: keys.size("shortconv.l_cache", 1..=MAX_CONV)? })
    }

    pub(crate) fn state_len(&self) -> usize {
        (self.conv - 1).saturating_mul(self.channels)
    }
}

fn config(c: &Config) -> Option<&ShortConvConfig> {
    match &c.recurrent {
        Some(RecurrentConfig::ShortConv(c)) => Some(c),
        _ => None,
    }
}

const REQUIRED: &[Layout] = &[(Part::Recurrent, 0)];

/// The tensors of a layer.
pub(crate) const TENSORS: &[TensorRow] = &[
    TensorRow::new("shortconv.conv.weight", |c, _| values(config(c)?.conv, config(c)?.channels)).of(REQUIRED),
    TensorRow::new("shortconv.in_proj.weight", |c, _| matrix(3 * c.n_embd, c.n_embd)).of(REQUIRED),
    TensorRow::new("shortconv.out_proj.weight", |c, _| matrix(c.n_embd, c.n_embd)).of(REQUIRED),
];

/// Weights of a short convolution.
pub struct ShortConv {
    /// b, c and v in one.
    input: LinearGroup,
    /// (K, n_embd)
    conv: Vec<f32>,
    /// (n_embd, n_embd)
    output: Linear,
}

impl ShortConv {
    pub(crate) fn load(tensors: &mut LoadedTensors, i: usize) -> Result<ShortConv, LoadError> {
        let name = |part: &str| format!("blk.{i}.shortconv.{part}");
        Ok(ShortConv {
            input: LinearGroup::separate([linear(tensors, &name("in_proj"))?].into()),
            conv: transposed(tensors, &name("conv.weight"))?,
            output: linear(tensors, &name("out_proj"))?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        self.input.matrices().chain([&self.output.w]).collect()
    }

    pub(crate) fn widths(&self) -> (Vec<&Matrix>, usize, usize) {
        (self.input.matrices().collect(), self.input.stride + self.output.w.k(), self.output.w.k())
    }
}

impl ForwardPass<'_, '_> {
    pub(crate) fn short_conv(
        &mut self,
        i: usize,
        m: &ShortConv,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        StepScratch { wide, words, .. }: &mut StepScratch,
    ) {
        let (n, rows, d, stride) = (self.n, self.rows, self.model.config.n_embd, m.input.stride);
        let (input, out) = wide.split_at_mut(n * stride);
        let out = &mut out[..n * d];
        rows.linear_group(&m.input, x, input, words);
        rows.each(input, stride, &|_, row| {
            let (b, v) = row.split_at_mut(2 * d);
            b[..d].iter_mut().zip(v).for_each(|(b, v)| *b *= *v);
        });
        let conv = Conv { weights: &m.conv, bias: None, channels: d };
        let state_at = self.model.config.layers[i].state_at;
        let conv_rows = ConvRows { x: input, stride, at: 0 };
        causal_conv(rows.cpu, rows.pool, conv, conv_rows, self.states, (states, state_at));
        let input = &*input;
        rows.each(out, d, &|r, out| {
            let (conv, c) = input[r * stride..][..2 * d].split_at(d);
            out.iter_mut().zip(conv).zip(c).for_each(|((out, conv), c)| *out = conv * c);
        });
        self.trace_stage(Stage::AttnOut, Some(i), &mut columns(out, d, 0, d));
        rows.linear(&m.output, out, y, words);
    }
}
