//! Muse Glimmer: embeddings are normalised without weights, and norms after sub-layers have an epsilon of their own.
//!
//! Source: llama.cpp, architecture `muse-glimmer`.

use super::Entry;
use super::base::LLAMA;
use crate::error::LoadError;
use crate::model::config::Config;
use crate::model::family::{Family, Rotated};
use crate::model::keys::Keys;

pub(super) const MUSE_GLIMMER: Entry =
    Entry::plain(Family { name: "muse-glimmer", window_pattern: 4, rotated: Rotated::Local, ..LLAMA })
        .composed(compose);

fn compose(_: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    c.embedding.plain_norm = true;
    c.residual.post_norm_eps = Some(1e-8);
    Ok(())
}
