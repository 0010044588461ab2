//! A block: a layer, and the order of its norms, sub-layers and residual sums.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::altup::{self, AltUp};
use super::batch::Batch;
use super::hyper::{self, HyperWeights};
use super::layer::{ATTN_OUTPUT_NORM, FFN_NORM, LAYER_OUTPUT_NORM, Layer, LayerView};
use super::{attended, orders};
use crate::error::LoadError;
use crate::kernels::attention::KvMemory;
use crate::kernels::panel::Matrix;
use crate::model::linear::Norm;
use crate::model::memory::{Size, Stack};
use crate::model::pass::Pass;
use crate::model::tensors::{Declared, Loaded, Name};

/// A layer and its order.
pub(crate) struct Block {
    pub(crate) layer: Layer,
    order: Order,
}

/// Order of norms, sub-layers and residual sums of a layer.
enum Order {
    /// Pre-norm: attention, then feed-forward.
    Serial,
    /// Attention and feed-forward read the same residual stream.
    Parallel,
    /// Several residual streams.
    AltUp(Box<AltUp>),
    /// Post-norm: these norms (n_embd) follow the two residual sums, and none comes before.
    PostNorm([Norm; 2]),
    /// The residual stream is the output of the norms.
    Normed,
    /// Attention and feed-forward read a mix of earlier residual streams, with these weights (n_embd).
    Attended([Vec<f32>; 2]),
    /// Several residual streams, with these connections of attention and feed-forward.
    Hyper(Box<[HyperWeights; 2]>),
}

/// Declares the tensors of a block.
pub(crate) fn tensors(c: &LayerView<'_>, t: &mut Declared<'_>) {
    c.tensors(t);
    if let Some(hyper) = &c.residual.hyper {
        hyper.tensors(t, c.d);
    }
    if c.residual.n_altup > 0 {
        AltUp::tensors(t, c.residual.n_altup, c.d);
    }
    if c.residual.block > 0 {
        attended::tensors(t, c.d);
    }
}

/// What the blocks of a model must agree on: without a norm before the feed-forward one is parallel, so all have it, or none.
///
/// # Errors
/// The index of the block that lacks it, and its name.
pub(crate) fn check(blocks: &[Block]) -> Result<(), (usize, Name)> {
    let lacks_norm = |b: &Block| b.layer.ffn_norm.is_none() && !b.layer.ffn.is_none();
    match blocks.iter().position(lacks_norm) {
        Some(i) if blocks.iter().any(|b| b.layer.ffn_norm.is_some()) => Err((i, FFN_NORM.weight())),
        _ => Ok(()),
    }
}

impl Block {
    /// Takes the tensors.
    pub(crate) fn load(view: &LayerView<'_>, t: &mut Loaded<'_>) -> Result<Block, LoadError> {
        let (c, d, layer) = (view.residual, view.d, view.load(t)?);
        let order = match (t.norm(ATTN_OUTPUT_NORM)?, t.norm(LAYER_OUTPUT_NORM)?) {
            (Some(attn), Some(ffn)) => Order::PostNorm([attn, ffn]),
            _ if layer.is_parallel => Order::Parallel,
            _ if c.hyper.is_some() => Order::Hyper(Box::new(HyperWeights::of_layer(t, d)?)),
            _ if c.n_altup > 0 => Order::AltUp(Box::new(AltUp::load(t)?)),
            _ if c.normed => Order::Normed,
            _ if c.block > 0 => Order::Attended(attended::load(t)?),
            _ => Order::Serial,
        };
        Ok(Block { layer, order })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        let mut all = self.layer.matrices();
        match &self.order {
            Order::AltUp(altup) => all.extend(altup.matrices()),
            Order::Hyper(weights) => all.extend(weights.iter().flat_map(HyperWeights::matrices)),
            _ => {}
        }
        all
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, c: &LayerView<'_>, n: usize) -> Size {
        let inner = self.layer.inner_size(c, n);
        let inner = match &self.order {
            Order::AltUp(altup) => altup.size(c, n, inner),
            Order::Hyper(weights) => hyper::size(weights, c, n, inner),
            _ => inner,
        };
        self.layer.block_size(c, n).and(inner)
    }

    /// Runs the block on the residual stream.
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        c: LayerView<'_>,
        s: &mut Batch,
        memory: &mut KvMemory,
        stack: &mut Stack<'_>,
    ) {
        let (layer, stack) = (&self.layer, &mut stack.scope());
        match &self.order {
            Order::AltUp(altup) => altup::block(layer, altup, pass, c, s, memory, stack),
            Order::Serial => orders::serial(layer, pass, c, s, memory, stack),
            Order::Parallel => orders::parallel(layer, pass, c, s, memory, stack),
            Order::PostNorm(norms) => orders::post_norm(layer, norms, pass, c, s, memory, stack),
            Order::Normed => orders::normed(layer, pass, c, s, memory, stack),
            Order::Attended(scores) => attended::block(layer, scores, pass, c, s, memory, stack),
            Order::Hyper(weights) => hyper::block(layer, weights, pass, c, s, memory, stack),
        }
    }
}
