//! Step 3.5: global layers rotate half of the elements that the file states.
//!
//! Source: llama.cpp, architecture `step35`.

use super::Entry;
use super::base::RAW_EXPERTS;
use crate::error::LoadError;
use crate::model::config::Config;
use crate::model::family::{Family, Gating, LocalRope, Mtp};
use crate::model::keys::Keys;

pub(super) const STEP35: Entry = Entry::plain(Family {
    name: "step35",
    mtp: Mtp::Raw,
    local_rope: LocalRope::Unscaled,
    gating: Gating::Sigmoid,
    ..RAW_EXPERTS
})
.composed(compose);

fn compose(_: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    let global = c.layers.iter().find(|layer| !layer.attention.is_local() && layer.attention.rope.is_some());
    if let Some(i) = global.and_then(|layer| layer.attention.rope) {
        let rope = &mut c.attention.ropes[i];
        rope.n_rot = rope.n_rot / 4 * 2;
    }
    Ok(())
}
