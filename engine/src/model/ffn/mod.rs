//! Feed-forward networks: dense, mixture of experts (MoE), or the channel mix of RWKV.

pub(crate) mod activation;
pub(crate) mod channel_mix;
pub(crate) mod config;
pub(crate) mod dense;
pub(crate) mod experts;

use alloc::boxed::Box;
use alloc::vec::Vec;

use self::channel_mix::ChannelMix;
use self::config::{FfnConfig, LayerFfn};
use self::dense::{DENSE, Dense};
use self::experts::{Experts, ExpertsOf, ROUTER};
use crate::error::LoadError;
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::StateMemory;
use crate::model::family::ExpertInput;
use crate::model::linear::padded;
use crate::model::memory::{Size, Stack};
use crate::model::pass::{LayerAt, Pass, Stage, SubLayerRows};
use crate::model::rows::columns;
use crate::model::tensors::{Declared, Loaded};

/// The feed-forward of a layer.
pub(crate) enum FeedForward {
    /// One network for all tokens.
    Dense(Box<Dense>),
    /// Experts selected for each token.
    Experts(Box<Experts>),
    /// One that also reads the token before (RWKV).
    ChannelMix(Box<ChannelMix>),
    /// None: the layer has a mixer only.
    None,
}

/// What a feed-forward knows of the model and its layer.
#[derive(Clone, Copy)]
pub(crate) struct FeedForwardConfig<'c> {
    pub(crate) model: &'c FfnConfig,
    pub(crate) layer: &'c LayerFfn,
    /// Whether layers may have a channel mix, and whether it has gates.
    pub(crate) channel_mix: Option<bool>,
}

/// What feed-forwards read beside their input.
pub(crate) struct FfnInput<'b> {
    /// (rows, n_embd): the input of the layer or the residual stream, where [`FeedForward::reads`] says so.
    pub(crate) layer: &'b mut [f32],
    /// The tokens of the batch.
    pub(crate) tokens: &'b [u32],
}

impl FeedForwardConfig<'_> {
    /// Declares the tensors of the layer, of a model of width `d` and `n_vocab` tokens.
    pub(crate) fn tensors(&self, t: &mut Declared<'_>, d: usize, n_vocab: usize) {
        let widths = (d, self.layer.width);
        if !self.layer.exists {
            return;
        }
        let experts = self.model.experts.as_ref();
        let declare = |t: &mut Declared<'_>| {
            experts.iter().for_each(|experts| Experts::tensors(t, experts, self.layer, (d, n_vocab)));
        };
        match self.channel_mix {
            _ if experts.is_some() && t.has(ROUTER.weight()) => return declare(t),
            Some(has_gates) if !t.has(dense::UP.weight()) => ChannelMix::tensors(t, widths, has_gates),
            _ => Dense::tensors(t, &DENSE, widths),
        }
        // a layer that lacks its router has the others
        t.all_optional(declare);
    }

    /// Takes the tensors of the layer, of a model of width `d`.
    pub(crate) fn load(&self, t: &mut Loaded<'_>, d: usize) -> Result<FeedForward, LoadError> {
        Ok(match &self.model.experts {
            _ if !self.layer.exists => FeedForward::None,
            Some(c) if t.has(ROUTER.weight()) => FeedForward::Experts(Box::new(Experts::load(t, c, self.layer, d)?)),
            _ if t.has(channel_mix::KEYS) => FeedForward::ChannelMix(Box::new(ChannelMix::load(t)?)),
            _ => FeedForward::Dense(Box::new(Dense::load(t, &DENSE, Some(self.layer.width))?)),
        })
    }

    fn experts(&self) -> Option<ExpertsOf<'_>> {
        Some(ExpertsOf { c: self.model.experts.as_ref()?, ffn: self.model, l: self.layer })
    }
}

impl FeedForward {
    /// Whether the layer has none.
    pub(crate) fn is_none(&self) -> bool {
        matches!(self, FeedForward::None)
    }

    /// What it reads beside its input.
    pub(crate) fn reads(&self, c: &FfnConfig) -> ExpertInput {
        match (self, &c.experts) {
            (FeedForward::Experts(_), Some(experts)) => experts.input,
            _ => ExpertInput::Same,
        }
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        match self {
            FeedForward::None => Vec::new(),
            FeedForward::Dense(ffn) => ffn.matrices().collect(),
            FeedForward::ChannelMix(mix) => mix.matrices().collect(),
            FeedForward::Experts(e) => e.matrices(),
        }
    }

    /// Bytes that a token does not read.
    pub(crate) fn unused_bytes(&self, c: &FfnConfig) -> usize {
        match (self, &c.experts) {
            (FeedForward::Experts(e), Some(experts)) => e.unused_bytes(experts),
            _ => 0,
        }
    }

    /// Temporaries of `n` rows of a model of width `d`.
    pub(crate) fn size(&self, c: &FfnConfig, n: usize, d: usize) -> Size {
        match (self, &c.experts) {
            (FeedForward::Dense(ffn), _) => ffn.size(n),
            (FeedForward::ChannelMix(mix), _) => mix.size(n),
            (FeedForward::Experts(e), Some(experts)) => e.size(experts, n, d),
            _ => Size::NONE,
        }
    }

    /// `y = ffn(x)`. A channel mix reads and writes the states of the sequences.
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        (at, c): (LayerAt, FeedForwardConfig<'_>),
        SubLayerRows { x, y }: SubLayerRows<'_>,
        (input, states): (FfnInput<'_>, &mut StateMemory),
        stack: &mut Stack<'_>,
    ) {
        let (mut stack, d) = (stack.scope(), pass.d);
        match self {
            FeedForward::None => return,
            FeedForward::ChannelMix(m) => {
                m.run(pass, at.state_at, SubLayerRows { x, y: &mut *y }, states, &mut stack);
            }
            FeedForward::Dense(ffn) => ffn.run(pass, (c.model, c.layer), SubLayerRows { x, y: &mut *y }, &mut stack),
            FeedForward::Experts(experts) => {
                let Some(of) = c.experts() else { return };
                let rows = SubLayerRows { x, y: &mut *y };
                experts.run(pass, (at.index, of), rows, (input.layer, input.tokens), &mut stack);
            }
        }
        pass.trace_stage(Stage::FfnOut, Some(at.index), &mut columns(y, padded(d), 0, d));
    }
}
