//! Laguna: gates on attention outputs are `ln(1 + exp(x))`.
//!
//! Source: llama.cpp, architecture `laguna`.

use super::Entry;
use super::base::RAW_EXPERTS;
use crate::error::LoadError;
use crate::model::config::Config;
use crate::model::family::{Family, Gating, LocalRope};
use crate::model::keys::Keys;
use crate::model::mixers::attention::OutputGate;

pub(super) const LAGUNA: Entry = Entry::plain(Family {
    name: "laguna",
    window_pattern: 4,
    global_first: true,
    local_rope: LocalRope::Unscaled,
    gating: Gating::Sigmoid,
    shared_as_expert: true,
    ..RAW_EXPERTS
})
.composed(compose);

fn compose(_: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    c.attention.output_gate = OutputGate::Softplus;
    Ok(())
}
