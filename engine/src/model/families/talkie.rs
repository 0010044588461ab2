//! Talkie: norms without weights, also of embeddings and heads, and the token's embedding is added after each layer.
//!
//! Source: llama.cpp, architecture `talkie`.

use super::Entry;
use super::base::BASE;
use crate::error::LoadError;
use crate::model::config::Config;
use crate::model::family::Family;
use crate::model::keys::Keys;

pub(super) const TALKIE: Entry =
    Entry::plain(Family { name: "talkie", plain_norms: true, rope_before_norm: true, ..BASE }).composed(compose);

fn compose(_: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    c.embedding.plain_norm = true;
    c.embedding.skips = true;
    c.attention.plain_head_norms = true;
    Ok(())
}
