//! Granite 4: Mamba 2 and attention, which has RoPE unless the file says that it was trained without.
//!
//! Source: llama.cpp, architecture `granitehybrid`; `GraniteMoeHybridForCausalLM`.

use super::Entry;
use super::base::GRANITE;
use crate::error::LoadError;
use crate::model::config::Config;
use crate::model::family::Family;
use crate::model::keys::Keys;

pub(super) const GRANITEHYBRID: Entry = Entry::plain(Family { name: "granitehybrid", ..GRANITE }).composed(compose);

fn compose(keys: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    let is_finetuned = keys.bool("rope.scaling.finetuned")?.unwrap_or(true);
    c.rotate_only(keys, |_, _| is_finetuned);
    Ok(())
}
