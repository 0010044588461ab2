//! Gated short convolution of LFM2:
//!
//! ```text
//! b, c, v = W_in x;  y = W_out (c * conv(b * v))
//! ```

use alloc::vec::Vec;

use super::kind::MAX_CONV;
use crate::error::LoadError;
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::StateMemory;
use crate::kernels::recurrent::conv::{Conv, ConvRows, causal_conv};
use crate::model::keys::Keys;
use crate::model::linear::{Linear, LinearGroup};
use crate::model::memory::{Size, Stack};
use crate::model::pass::{LayerAt, Pass, Stage, SubLayerRows};
use crate::model::rows::columns;
use crate::model::tensors::{Declared, LinearName, Loaded, Name, matrix, values};

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

pub(crate) const CONV: Name = Name::weight("shortconv.conv");
const INPUT: LinearName = LinearName("shortconv.in_proj");
const OUTPUT: LinearName = LinearName("shortconv.out_proj");

impl ShortConvConfig {
    /// Declares the tensors of a layer of a model of width `d`.
    pub(crate) fn tensors(&self, t: &mut Declared<'_>, d: usize) {
        t.required(CONV, values(self.conv, self.channels));
        t.required(INPUT.weight(), matrix(3 * d, d));
        t.required(OUTPUT.weight(), matrix(d, d));
    }
}

/// Weights of a short convolution.
pub(crate) struct ShortConv {
    /// b, c and v in one.
    input: LinearGroup,
    /// (K, n_embd)
    conv: Vec<f32>,
    /// (n_embd, n_embd)
    output: Linear,
}

impl ShortConv {
    pub(crate) fn load(t: &mut Loaded<'_>) -> Result<ShortConv, LoadError> {
        Ok(ShortConv {
            input: LinearGroup::separate([t.linear(INPUT)?].into()),
            conv: t.transposed(CONV)?,
            output: t.linear(OUTPUT)?,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        self.input.matrices().chain([&self.output.w]).collect()
    }

    /// Floats of a row: inputs, output.
    fn parts(&self) -> [usize; 2] {
        [self.input.stride, self.output.w.k()]
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        Size::rows(n, self.parts()).and(self.input.size(n).or(self.output.size(n)))
    }
}

impl ShortConv {
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        at: LayerAt,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        states: &mut StateMemory,
        stack: &mut Stack<'_>,
    ) {
        let (n, rows, d, stride) = (pass.n, pass.rows, pass.d, self.input.stride);
        let [input, out] = stack.rows(n, self.parts());
        rows.linear_group(&self.input, x, input, stack);
        rows.each(input, stride, &|_, row| {
            let (b, v) = row.split_at_mut(2 * d);
            b[..d].iter_mut().zip(v).for_each(|(b, v)| *b *= *v);
        });
        let conv = Conv { weights: &self.conv, bias: None, channels: d };
        let state_at = at.state_at;
        let conv_rows = ConvRows { x: input, stride, at: 0 };
        causal_conv(rows.cpu, rows.pool, conv, conv_rows, pass.states, (states, state_at));
        let input = &*input;
        rows.each(out, d, &|r, out| {
            let (conv, c) = input[r * stride..][..2 * d].split_at(d);
            out.iter_mut().zip(conv).zip(c).for_each(|((out, conv), c)| *out = conv * c);
        });
        pass.trace_stage(Stage::AttnOut, Some(at.index), &mut columns(out, d, 0, d));
        rows.linear(&self.output, out, y, stack);
    }
}
