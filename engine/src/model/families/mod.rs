//! The model families. Numbers come from the metadata of a file, optional parts from the presence of their tensors, what several
//! families have in common from a [`Family`]. What one or two families do is code in a file of theirs.
//!
//! The key of the epsilon tells whether norms are RMSNorm or LayerNorm. Optional by presence: norms before and after
//! attention and feed-forward, biases, head norms, the feed-forward's gate, experts, the output matrix. A layer with
//! one norm for both sub-layers is a parallel block.

mod baichuan;
mod bailingmoe3;
mod base;
mod cogvlm;
mod cohere2moe;
mod deepseek;
mod falcon;
mod gemma;
mod gemma3n;
mod gemma4;
mod glm5_next;
mod granitehybrid;
mod grok;
mod kinds;
mod laguna;
mod llama4;
mod minicpm3;
mod minimax01;
mod modern_bert;
mod muse_glimmer;
mod nemotron_h;
mod nomic_bert;
mod plamo2;
mod qwen;
mod qwen4exp;
mod read;
mod smallthinker;
mod step35;
mod t5encoder;
mod table;
mod talkie;

pub use table::FAMILIES;

use crate::error::LoadError;
use crate::model::config::Config;
pub use crate::model::family::{Family, HeadKind};
use crate::model::keys::Keys;

/// A supported family, and its code.
pub struct Entry {
    /// What it has in common with others.
    pub family: Family,
    /// Completes metadata and description, before anything else is read.
    prepare: fn(&mut Keys<'_, '_>, &mut Family) -> Result<(), LoadError>,
    /// Completes the configuration that was read, whose layers are those of the file.
    compose: fn(&Keys<'_, '_>, &mut Config) -> Result<(), LoadError>,
}

impl Entry {
    /// A family without code of its own.
    const fn plain(family: Family) -> Entry {
        Entry { family, prepare: |_, _| Ok(()), compose: |_, _| Ok(()) }
    }

    const fn prepared(self, prepare: fn(&mut Keys<'_, '_>, &mut Family) -> Result<(), LoadError>) -> Entry {
        Entry { prepare, ..self }
    }

    const fn composed(self, compose: fn(&Keys<'_, '_>, &mut Config) -> Result<(), LoadError>) -> Entry {
        Entry { compose, ..self }
    }
}

/// Experts have no gate.
fn ungate_experts(_: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    if let Some(experts) = &mut c.ffn.experts {
        experts.is_gated = false;
    }
    Ok(())
}
