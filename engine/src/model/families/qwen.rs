//! The first Qwen, whose files state twice the width of the feed-forward.
//!
//! Source: llama.cpp, architecture `qwen`; `QWenLMHeadModel`.

use super::Entry;
use super::base::BASE;
use crate::error::LoadError;
use crate::model::family::Family;
use crate::model::keys::Keys;

pub(super) const QWEN: Entry = Entry::plain(Family { name: "qwen", ..BASE }).prepared(prepare);

fn prepare(keys: &mut Keys<'_, '_>, _: &mut Family) -> Result<(), LoadError> {
    let name = "feed_forward_length";
    match keys.u32(name)? {
        Some(1) => Err(keys.wrong(name, 1, "an even number")),
        Some(n) => {
            keys.set_u32(name, n / 2);
            Ok(())
        }
        None => Ok(()),
    }
}
