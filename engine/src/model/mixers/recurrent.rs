//! Recurrent mixers: the kinds, of which a model has one.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::delta_net::{DeltaNet, DeltaNetConfig};
use super::kda::{Kda, KdaConfig};
use super::lightning::{Lightning, LightningConfig};
use super::mamba::{Mamba, MambaConfig};
use super::rwkv::RwkvConfig;
use super::rwkv6::{self, Rwkv6};
use super::rwkv7::{self, Rwkv7};
use super::short_conv::{ShortConv, ShortConvConfig};
use crate::error::LoadError;
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::StateMemory;
use crate::model::memory::{Size, Stack};
use crate::model::pass::{LayerAt, Pass, SubLayerRows};
use crate::model::tensors::{Declared, Loaded};

/// Kind and sizes of a model's recurrent mixers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RecurrentConfig {
    /// Gated delta net (Yang et al., arXiv:2412.06464).
    DeltaNet(DeltaNetConfig),
    /// Mamba or Mamba 2.
    Mamba(MambaConfig),
    /// Gated short convolution (LFM2).
    ShortConv(ShortConvConfig),
    /// Lightning attention.
    Lightning(LightningConfig),
    /// Kimi delta attention.
    Kda(KdaConfig),
    /// Time mix of RWKV 6.
    Rwkv6(RwkvConfig),
    /// Time mix of RWKV 7.
    Rwkv7(RwkvConfig),
}

impl RecurrentConfig {
    /// Floats of the state of a layer.
    pub fn state_len(&self) -> usize {
        match self {
            RecurrentConfig::DeltaNet(c) => c.state_len(),
            RecurrentConfig::Mamba(c) => c.state_len(),
            RecurrentConfig::ShortConv(c) => c.state_len(),
            RecurrentConfig::Lightning(c) => c.state_len(),
            RecurrentConfig::Kda(c) => c.state_len(),
            RecurrentConfig::Rwkv6(c) | RecurrentConfig::Rwkv7(c) => c.state_len(),
        }
    }

    /// Declares the tensors of a layer of a model of width `d`.
    pub(crate) fn tensors(&self, t: &mut Declared<'_>, d: usize) {
        match self {
            RecurrentConfig::DeltaNet(c) => c.tensors(t, d),
            RecurrentConfig::Mamba(c) => c.tensors(t, d),
            RecurrentConfig::ShortConv(c) => c.tensors(t, d),
            RecurrentConfig::Lightning(c) => c.tensors(t, d),
            RecurrentConfig::Kda(c) => c.tensors(t, d),
            RecurrentConfig::Rwkv6(c) => rwkv6::tensors(c, t, d),
            RecurrentConfig::Rwkv7(_) => rwkv7::tensors(t, d),
        }
    }

    /// Whether the feed-forwards are channel mixes, and whether these have gates.
    pub(crate) fn channel_mix(&self) -> Option<bool> {
        match self {
            RecurrentConfig::Rwkv6(c) if c.channel_mix => Some(true),
            RecurrentConfig::Rwkv7(c) if c.channel_mix => Some(false),
            _ => None,
        }
    }

    /// Floats of the values of the first layer that later ones read, in a model of width `d`.
    pub(crate) fn first_values(&self, d: usize) -> usize {
        if let RecurrentConfig::Rwkv7(_) = self { d } else { 0 }
    }
}

/// Weights of a recurrent mixer.
pub(crate) enum Recurrent {
    /// Gated delta net.
    DeltaNet(Box<DeltaNet>),
    /// Mamba or Mamba 2.
    Mamba(Box<Mamba>),
    /// Gated short convolution.
    ShortConv(Box<ShortConv>),
    /// Lightning attention.
    Lightning(Box<Lightning>),
    /// Kimi delta attention.
    Kda(Box<Kda>),
    /// Time mix of RWKV 6.
    Rwkv6(Box<Rwkv6>),
    /// Time mix of RWKV 7.
    Rwkv7(Box<Rwkv7>),
}

impl Recurrent {
    /// Takes the tensors of layer `i`.
    pub(crate) fn load(c: &RecurrentConfig, i: usize, t: &mut Loaded<'_>) -> Result<Recurrent, LoadError> {
        Ok(match c {
            RecurrentConfig::DeltaNet(c) => Recurrent::DeltaNet(DeltaNet::load(c, t)?.into()),
            RecurrentConfig::Mamba(c) => Recurrent::Mamba(Mamba::load(c, t)?.into()),
            RecurrentConfig::ShortConv(_) => Recurrent::ShortConv(ShortConv::load(t)?.into()),
            RecurrentConfig::Lightning(c) => Recurrent::Lightning(Lightning::load(c, i, t)?.into()),
            RecurrentConfig::Kda(c) => Recurrent::Kda(Kda::load(c, t)?.into()),
            RecurrentConfig::Rwkv6(c) => Recurrent::Rwkv6(Rwkv6::load(c, t)?.into()),
            RecurrentConfig::Rwkv7(c) => Recurrent::Rwkv7(Rwkv7::load(c, i == 0, t)?.into()),
        })
    }

    /// All matrices.
    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        match self {
            Recurrent::DeltaNet(m) => m.matrices(),
            Recurrent::Mamba(m) => m.matrices(),
            Recurrent::ShortConv(m) => m.matrices(),
            Recurrent::Lightning(m) => m.matrices(),
            Recurrent::Kda(m) => m.matrices(),
            Recurrent::Rwkv6(m) => m.matrices(),
            Recurrent::Rwkv7(m) => m.matrices(),
        }
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        match self {
            Recurrent::DeltaNet(m) => m.size(n),
            Recurrent::Mamba(m) => m.size(n),
            Recurrent::ShortConv(m) => m.size(n),
            Recurrent::Lightning(m) => m.size(n),
            Recurrent::Kda(m) => m.size(n),
            Recurrent::Rwkv6(m) => m.size(n),
            Recurrent::Rwkv7(m) => m.size(n),
        }
    }

    /// `y = mixer(x)`. Reads and writes the states of the sequences, and values of the first layer, (rows, n_embd).
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        at: LayerAt,
        rows: SubLayerRows<'_>,
        (states, first_values): (&mut StateMemory, &mut [f32]),
        stack: &mut Stack<'_>,
    ) {
        match self {
            Recurrent::DeltaNet(m) => m.run(pass, at, rows, states, stack),
            Recurrent::Mamba(m) => m.run(pass, at, rows, states, stack),
            Recurrent::ShortConv(m) => m.run(pass, at, rows, states, stack),
            Recurrent::Lightning(m) => m.run(pass, at, rows, states, stack),
            Recurrent::Kda(m) => m.run(pass, at, rows, states, stack),
            Recurrent::Rwkv6(m) => m.run(pass, at, rows, states, stack),
            Recurrent::Rwkv7(m) => m.run(pass, at, rows, (states, first_values), stack),
        }
    }
}
