//! What mixes the tokens of a sequence in a layer: attention, a recurrent mixer, both, or nothing. The tensors of a file
//! tell which, or its numbers of heads.

pub(crate) mod attention;
mod blocks;
pub(crate) mod compressed;
pub(crate) mod delta_net;
pub(crate) mod indexer;
pub(crate) mod kda;
pub(crate) mod kind;
pub(crate) mod latent;
pub(crate) mod lightning;
mod low_rank;
pub(crate) mod mamba;
pub(crate) mod recurrent;
pub(crate) mod rwkv;
pub(crate) mod rwkv6;
pub(crate) mod rwkv7;
pub(crate) mod short_conv;

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

pub use compressed::CompressedConfig;
pub use delta_net::DeltaNetConfig;
pub use indexer::{IndexerConfig, Selection};
pub use kda::KdaConfig;
pub use kind::MixerKind;
pub use lightning::LightningConfig;
pub use mamba::MambaConfig;
pub(crate) use recurrent::Recurrent;
pub use recurrent::RecurrentConfig;
pub use rwkv::RwkvConfig;
pub use short_conv::ShortConvConfig;

pub use self::attention::LatentHeads;
use self::attention::batch::AttentionBatch;
use self::attention::config::{AttentionConfig, LayerAttention};
use self::attention::weights::{AttentionWeights, OUTPUT};
use self::compressed::CompressedWeights;
use self::indexer::IndexerWeights;
use self::latent::LatentWeights;
use crate::error::LoadError;
use crate::kernels::attention::KvMemory;
use crate::kernels::panel::Matrix;
use crate::model::linear::{Linear, padded};
use crate::model::memory::{Size, Stack};
use crate::model::pass::{LayerAt, Pass, SubLayerRows};
use crate::model::tensors::{Declared, Loaded, matrix, vector};

/// What mixes the tokens of a sequence in a layer.
pub(crate) enum Mixer {
    /// Attention.
    Attention(Box<AttentionWeights>),
    /// Multi-head latent attention.
    Latent(Box<LatentWeights>),
    /// Attention with compressed keys.
    Compressed(Box<CompressedWeights>),
    /// A recurrent mixer.
    Recurrent(Recurrent),
    /// A matrix (n_embd, n_embd) instead of attention.
    Linear(Box<Linear>),
    /// Both on the same input; their outputs are added.
    Both(Box<(AttentionWeights, Recurrent)>),
    /// Nothing.
    None,
}

/// A mixer, and the indexer that selects the positions that its attention reads.
pub(crate) struct MixerWeights {
    pub(crate) mixer: Mixer,
    indexer: Option<IndexerWeights>,
}

/// What a mixer knows of the model and its layer.
#[derive(Clone, Copy)]
pub(crate) struct MixerConfig<'c> {
    pub(crate) kind: MixerKind,
    pub(crate) attention: &'c AttentionConfig,
    pub(crate) layer: &'c LayerAttention,
    pub(crate) recurrent: Option<&'c RecurrentConfig>,
}

/// What mixers keep during a batch.
pub(crate) struct MixerBatch {
    pub(crate) attention: AttentionBatch,
    /// (rows, n_embd): values of the first layer, which later layers read (RWKV 7).
    pub(crate) first_values: Vec<f32>,
}

impl MixerConfig<'_> {
    /// Whether the layer has none.
    pub(crate) fn is_none(&self) -> bool {
        self.kind == MixerKind::None
    }

    /// The indexer of the layer, if it has one.
    fn indexer(&self) -> Option<&IndexerConfig> {
        self.attention.indexer.as_ref().filter(|_| matches!(self.layer.selection, Selection::Own { .. }))
    }

    fn recurrent(&self) -> Option<&RecurrentConfig> {
        self.recurrent.filter(|_| self.kind.is_recurrent())
    }

    /// Declares the tensors of the layer, of a model of width `d`.
    pub(crate) fn tensors(&self, t: &mut Declared<'_>, d: usize) {
        if let Some(recurrent) = self.recurrent() {
            recurrent.tensors(t, d);
        }
        match (self.kind, self.layer.heads.latent, &self.attention.compressed) {
            (MixerKind::Attention | MixerKind::Both, ..) => {
                AttentionWeights::tensors(t, self.attention, self.layer, d);
            }
            (MixerKind::Latent, Some(sizes), _) => LatentWeights::tensors(t, self.layer.heads, sizes, d),
            (MixerKind::Compressed, _, Some(c)) => CompressedWeights::tensors(t, c, self.layer, d),
            (MixerKind::Linear, ..) => {
                t.required(OUTPUT.weight(), matrix(d, d));
                t.optional(OUTPUT.bias(), vector(d));
            }
            _ => {}
        }
        if let Some(indexer) = self.indexer() {
            let q_rank = self.layer.heads.latent.and_then(|latent| latent.q_rank);
            IndexerWeights::tensors(t, indexer, q_rank, d);
        }
    }

    /// Takes the tensors of the layer, which has the number `i`.
    pub(crate) fn load(&self, i: usize, t: &mut Loaded<'_>) -> Result<MixerWeights, LoadError> {
        let recurrent = match self.recurrent() {
            Some(config) => Some(Recurrent::load(config, i, t)?),
            None => None,
        };
        let attention = |t: &mut Loaded<'_>| AttentionWeights::load(t, self.attention, self.layer);
        let mixer = match (self.kind, recurrent, self.layer.heads.latent) {
            (MixerKind::Latent, _, Some(sizes)) => {
                Mixer::Latent(Box::new(LatentWeights::load(t, self.layer.heads, sizes)?))
            }
            (MixerKind::Compressed, ..) => Mixer::Compressed(Box::new(CompressedWeights::load(t, self.layer)?)),
            (MixerKind::Linear, ..) => Mixer::Linear(Box::new(t.linear(OUTPUT)?)),
            (MixerKind::Both, Some(recurrent), _) => Mixer::Both(Box::new((attention(t)?, recurrent))),
            (MixerKind::Attention, ..) => Mixer::Attention(Box::new(attention(t)?)),
            (_, Some(recurrent), _) => Mixer::Recurrent(recurrent),
            _ => Mixer::None,
        };
        let indexer = match self.indexer() {
            Some(config) => Some(IndexerWeights::load(t, config)?),
            None => None,
        };
        Ok(MixerWeights { mixer, indexer })
    }
}

impl MixerWeights {
    /// Whether the layer has none.
    pub(crate) fn is_none(&self) -> bool {
        matches!(self.mixer, Mixer::None)
    }

    /// The attention of the layer, if it has such.
    pub(crate) fn attention_mut(&mut self) -> Option<&mut AttentionWeights> {
        if let Mixer::Attention(attention) = &mut self.mixer { Some(attention) } else { None }
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        let mut all: Vec<&Matrix> = match &self.mixer {
            Mixer::Attention(a) => a.matrices(),
            Mixer::Latent(a) => a.matrices(),
            Mixer::Compressed(a) => a.matrices(),
            Mixer::Recurrent(r) => r.matrices(),
            Mixer::Both(both) => both.0.matrices().into_iter().chain(both.1.matrices()).collect(),
            Mixer::Linear(linear) => vec![&linear.w],
            Mixer::None => Vec::new(),
        };
        all.extend(self.indexer.iter().flat_map(IndexerWeights::matrices));
        all
    }

    /// Temporaries of `n` rows of a model of width `d`.
    pub(crate) fn size(&self, n: usize, d: usize) -> Size {
        let indexer = self.indexer.as_ref();
        match &self.mixer {
            Mixer::Attention(a) => a.size(n, indexer),
            Mixer::Latent(a) => a.size(n, indexer),
            Mixer::Compressed(a) => a.size(n),
            Mixer::Recurrent(r) => r.size(n),
            Mixer::Both(both) => Size::rows(n, [padded(d)]).and(both.0.size(n, indexer).or(both.1.size(n))),
            Mixer::Linear(linear) => linear.size(n),
            Mixer::None => Size::NONE,
        }
    }

    /// `y = mixer(x)`. Writes keys, values and recurrent states to `memory`.
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        (at, c): (LayerAt, MixerConfig<'_>),
        SubLayerRows { x, y }: SubLayerRows<'_>,
        (s, memory): (&mut MixerBatch, &mut KvMemory),
        stack: &mut Stack<'_>,
    ) {
        let MixerBatch { attention: s, first_values } = s;
        let (of, indexer, mut stack) = ((at, c.attention, c.layer), self.indexer.as_ref(), stack.scope());
        let stack = &mut stack;
        match &self.mixer {
            Mixer::Attention(a) => a.run(pass, of, indexer, SubLayerRows { x, y }, (s, memory), stack),
            Mixer::Latent(a) => a.run(pass, of, indexer, SubLayerRows { x, y }, (s, memory), stack),
            Mixer::Compressed(a) => a.run(pass, of, SubLayerRows { x, y }, (s, memory), stack),
            Mixer::Recurrent(r) => {
                r.run(pass, at, SubLayerRows { x, y }, (&mut memory.states, first_values), stack);
            }
            Mixer::Both(both) => {
                let (attention, recurrent) = &**both;
                let (rows, stride) = (pass.rows, padded(pass.d));
                let [sum] = stack.rows(pass.n, [stride]);
                let rows_of_sum = SubLayerRows { x, y: &mut *sum };
                attention.run(pass, of, indexer, rows_of_sum, (s, &mut *memory), &mut stack.scope());
                let states = (&mut memory.states, &mut first_values[..]);
                recurrent.run(pass, at, SubLayerRows { x, y }, states, &mut stack.scope());
                rows.add(y, stride, sum, stride, 1.0);
            }
            Mixer::Linear(linear) => pass.rows.linear(linear, x, y, stack),
            Mixer::None => {}
        }
    }
}
