//! Baichuan. The model of 40 layers has ALiBi instead of RoPE.
//!
//! Source: llama.cpp, architecture `baichuan`; `BaichuanForCausalLM` of both sizes.

use super::Entry;
use super::base::LLAMA;
use crate::error::LoadError;
use crate::model::family::Family;
use crate::model::keys::Keys;

pub(super) const BAICHUAN: Entry = Entry::plain(Family { name: "baichuan", ..LLAMA }).prepared(prepare);

fn prepare(keys: &mut Keys<'_, '_>, family: &mut Family) -> Result<(), LoadError> {
    let n_blocks = keys.u32("block_count")?.unwrap_or(0);
    family.alibi = n_blocks.saturating_sub(keys.u32("nextn_predict_layers")?.unwrap_or(0)) == 40;
    Ok(())
}
