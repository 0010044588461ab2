//! Residual streams outside of the layers: before the first, between passes, and after the last.

use alloc::vec::Vec;

use super::altup::AltUpProjections;
use super::batch::Batch;
use super::config::ResidualConfig;
use super::hyper::HyperWeights;
use super::passes::PassEnd;
use super::{attended, hyper, passes};
use crate::error::LoadError;
use crate::kernels::panel::Matrix;
use crate::model::linear::Norm;
use crate::model::memory::{Size, Stack};
use crate::model::pass::Pass;
use crate::model::tensors::{Declared, Loaded, Name, vector};

/// The low state before the first pass, in models with nested cycles.
const LOW_STATE: Name = Name::whole("hrm.z_l_init");

/// Weights of the streams.
#[derive(Default)]
pub(crate) struct StreamWeights {
    /// Projections of AltUp.
    altup: Option<AltUpProjections>,
    /// Weights with which the output reads the streams of hyper-connections.
    hyper: Option<HyperWeights>,
    /// Weights of the mix of kept streams (n_embd).
    score: Option<Vec<f32>>,
    /// (n_embd)
    low_state: Option<Vec<f32>>,
}

impl StreamWeights {
    /// Declares the tensors of a model of width `d`; `has_cycles` if its passes are nested.
    pub(crate) fn tensors(t: &mut Declared<'_>, c: &ResidualConfig, has_cycles: bool, d: usize) {
        if has_cycles {
            t.required(LOW_STATE, vector(d));
        }
        if c.n_altup > 0 {
            AltUpProjections::tensors(t, c.n_altup, d);
        }
        if let Some(hyper) = &c.hyper {
            hyper.output_tensors(t, d);
        }
        if c.block > 0 {
            t.required(attended::OUTPUT_SCORE, vector(d));
        }
    }

    /// Takes the tensors; `needs_hyper` if the output must have weights of its own.
    pub(crate) fn load(t: &mut Loaded<'_>, needs_hyper: bool, d: usize) -> Result<StreamWeights, LoadError> {
        Ok(StreamWeights {
            altup: AltUpProjections::load(t),
            hyper: HyperWeights::of_output(t, needs_hyper, d)?,
            score: t.optional(attended::OUTPUT_SCORE),
            low_state: t.optional(LOW_STATE),
        })
    }

    pub(crate) fn has_cycles(&self) -> bool {
        self.low_state.is_some()
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        let altup = self.altup.iter().flat_map(AltUpProjections::matrices);
        altup.chain(self.hyper.iter().flat_map(HyperWeights::matrices)).collect()
    }

    /// Temporaries of `n` rows of a model of width `d`.
    pub(crate) fn size(&self, c: &ResidualConfig, n: usize, d: usize) -> Size {
        let altup = self.altup.as_ref().map_or(Size::NONE, |altup| altup.size(n, d));
        let hyper = match (&self.hyper, &c.hyper) {
            (Some(weights), Some(config)) => weights.output_size(config, n, d),
            _ => Size::NONE,
        };
        let score = if self.score.is_some() { Size::rows(n, [d]) } else { Size::NONE };
        altup.or(hyper).or(score)
    }

    /// The streams before the first layer, from the residual stream.
    pub(crate) fn begin(&self, pass: &Pass<'_, '_>, c: &ResidualConfig, s: &mut Batch, stack: &mut Stack<'_>) {
        let stack = &mut stack.scope();
        let x = &mut s.x[..pass.n * pass.d];
        if let Some(altup) = &self.altup {
            altup.split(pass, x, &mut s.streams.all, stack);
        }
        if let Some(hyper) = &c.hyper {
            hyper::begin(pass, hyper, x, &mut s.streams.all);
        }
        if let Some(low) = &self.low_state {
            passes::begin(pass, low, x, &mut s.streams);
        }
    }

    /// What follows a pass that is not the last.
    pub(crate) fn end_pass(&self, pass: &Pass<'_, '_>, end: PassEnd, norm: Option<&Norm>, s: &mut Batch) {
        passes::end(pass, end, norm, &mut s.x[..pass.n * pass.d], &mut s.streams);
    }

    /// The residual stream after the last of `n_layer` layers.
    pub(crate) fn end(
        &self,
        pass: &Pass<'_, '_>,
        (c, n_layer): (&ResidualConfig, usize),
        s: &mut Batch,
        stack: &mut Stack<'_>,
    ) {
        let stack = &mut stack.scope();
        let (n, d) = (pass.n, pass.d);
        let x = &mut s.x[..n * d];
        if let Some(altup) = &self.altup {
            altup.merge(pass, x, &s.streams.all, stack);
        }
        if let Some(hyper) = &c.hyper {
            hyper::end(pass, hyper, self.hyper.as_ref(), x, &mut s.streams, stack);
        }
        if let Some(score) = &self.score {
            let [_, kept] = c.kept(n_layer - 1);
            let [h] = stack.rows(n, [d]);
            attended::mix(&pass.rows, score, x, &s.streams.kept[..kept * n * d], h);
            x.copy_from_slice(h);
        }
    }
}
