//! CogVLM, its text model. llama.cpp does not read the base of RoPE.
//!
//! Source: llama.cpp, architecture `cogvlm`; `CogVLMForCausalLM`.

use super::Entry;
use super::base::BASE;
use crate::error::LoadError;
use crate::model::config::Config;
use crate::model::family::Family;
use crate::model::keys::Keys;

pub(super) const COGVLM: Entry = Entry::plain(Family { name: "cogvlm", ..BASE }).composed(compose);

fn compose(_: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    c.names.ignored = &["vis_"];
    c.attention.ropes.iter_mut().for_each(|rope| rope.base = 10_000.0);
    Ok(())
}
