//! Ling and Ring with Kimi delta attention, whose files state the factors of decays as positive numbers.
//!
//! Source: llama.cpp, architecture `bailingmoe3`.

use super::Entry;
use super::base::RAW_EXPERTS;
use crate::error::LoadError;
use crate::kernels::rope::RopeStyle;
use crate::model::config::Config;
use crate::model::family::{Family, Sections};
use crate::model::keys::Keys;
use crate::model::mixers::RecurrentConfig;

pub(super) const BAILINGMOE3: Entry = Entry::plain(Family {
    name: "bailingmoe3",
    rope: Some(RopeStyle::Interleaved),
    sections: Sections::Refused,
    required: &["kda.gate_lower_bound"],
    ..RAW_EXPERTS
})
.composed(compose);

fn compose(_: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    if let Some(RecurrentConfig::Kda(kda)) = &mut c.recurrent {
        kda.state_positive_factors();
    }
    Ok(())
}
