//! MiniMax-01: lightning attention in most layers, and blocks whose residual stream is the output of their norms.
//!
//! Source: arXiv:2501.08313; llama.cpp, architecture `minimax-01`.

use super::Entry;
use super::base::BASE;
use crate::error::LoadError;
use crate::model::config::Config;
use crate::model::family::Family;
use crate::model::keys::Keys;

pub(super) const MINIMAX01: Entry = Entry::plain(Family { name: "minimax-01", ..BASE }).composed(compose);

fn compose(_: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    c.residual.normed = true;
    Ok(())
}
