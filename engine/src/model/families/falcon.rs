//! Falcon: parallel blocks, whose norm of attention is named `attn_norm_2` where there are two.
//!
//! Source: llama.cpp, architecture `falcon`; `FalconForCausalLM`.

use super::Entry;
use super::base::{ATTN_NORM_2, LAYER_NORM};
use crate::error::LoadError;
use crate::kernels::elementwise::Activation;
use crate::model::config::Config;
use crate::model::family::Family;
use crate::model::keys::Keys;

pub(super) const FALCON: Entry =
    Entry::plain(Family { name: "falcon", act: Activation::GeluTanh, aliases: ATTN_NORM_2, ..LAYER_NORM })
        .composed(compose);

fn compose(keys: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    c.residual.swapped_norms = true;
    c.residual.parallel = keys.bool("use_parallel_residual")?.unwrap_or(true);
    Ok(())
}
