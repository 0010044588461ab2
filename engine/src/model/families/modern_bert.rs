//! ModernBERT, whose first layer may lack the norm before attention.
//!
//! Source: arXiv:2412.13663; llama.cpp, architecture `modern-bert`; `ModernBertModel`.

use super::Entry;
use super::base::LAYER_NORM;
use crate::error::LoadError;
use crate::kernels::elementwise::Activation;
use crate::model::config::Config;
use crate::model::family::{Family, HeadKind};
use crate::model::keys::Keys;

pub(super) const MODERN_BERT: Entry = Entry::plain(Family {
    name: "modern-bert",
    bidirectional: true,
    window_pattern: 3,
    global_first: true,
    act: Activation::GeluErf,
    head: HeadKind::Gelu,
    ..LAYER_NORM
})
.composed(compose);

fn compose(_: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    c.residual.optional_first_norm = true;
    Ok(())
}
