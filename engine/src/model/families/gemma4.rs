//! Gemma 4: values are normalised and may be the keys; experts read the residual stream, beside a dense feed-forward.
//!
//! Source: llama.cpp, architecture `gemma4`.

use super::Entry;
use super::gemma::GEMMA;
use crate::error::LoadError;
use crate::model::config::Config;
use crate::model::family::{ExpertInput, Family, LocalRope, ScoreScale};
use crate::model::keys::Keys;

pub(super) const GEMMA4: Entry = Entry::plain(Family {
    name: "gemma4",
    local_rope: LocalRope::Base(10_000.0),
    score_scale: ScoreScale::One,
    dense_beside_experts: true,
    expert_input: ExpertInput::Residual,
    ..GEMMA
})
.composed(compose);

fn compose(_: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    c.attention.plain_value_norm = true;
    c.attention.values_from_keys = true;
    Ok(())
}
