//! GLM-5 with Kimi delta attention and sparse attention. Its delta rule has an epsilon of its own for unit vectors.
//!
//! Source: llama.cpp, architecture `glm5-next`.

use super::Entry;
use super::base::RAW_EXPERTS;
use crate::error::LoadError;
use crate::kernels::rope::RopeStyle;
use crate::model::config::Config;
use crate::model::family::{Family, Gating, IndexerKind, Rotated, Swiglu};
use crate::model::keys::Keys;
use crate::model::mixers::RecurrentConfig;

pub(super) const GLM5_NEXT: Entry = Entry::plain(Family {
    name: "glm5-next",
    rotated: Rotated::None,
    indexer: Some(IndexerKind::lightning(RopeStyle::NeoX)),
    gating: Gating::Sigmoid,
    swiglu: Swiglu::Limited(0.0),
    ..RAW_EXPERTS
})
.composed(compose);

/// Epsilon of unit vectors.
const UNIT_EPS: f32 = 1e-6;

fn compose(keys: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    match &mut c.recurrent {
        Some(RecurrentConfig::Kda(kda)) => kda.unit_eps = UNIT_EPS,
        Some(RecurrentConfig::DeltaNet(delta_net)) => delta_net.unit_eps = UNIT_EPS,
        _ => {}
    }
    c.limit_dense(keys);
    Ok(())
}
