//! PLaMo 2, whose Mamba layers have channels in heads.
//!
//! Source: llama.cpp, architecture `plamo2`; `Plamo2ForCausalLM`.

use super::Entry;
use super::base::BASE;
use crate::error::LoadError;
use crate::model::config::Config;
use crate::model::family::Family;
use crate::model::keys::Keys;
use crate::model::mixers::{MambaConfig, RecurrentConfig};

pub(super) const PLAMO2: Entry = Entry::plain(Family { name: "plamo2", ..BASE }).composed(compose);

fn compose(keys: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    if let Some(RecurrentConfig::Mamba(mamba)) = &mut c.recurrent {
        *mamba = MambaConfig::by_heads(keys, c.n_embd)?;
    }
    Ok(())
}
