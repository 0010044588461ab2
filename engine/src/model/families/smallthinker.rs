//! SmallThinker: routers read the input of the layer, and layers with a window have RoPE.
//!
//! Source: llama.cpp, architecture `smallthinker`, as which it does here; `SmallThinkerForCausalLM`.

use super::Entry;
use super::base::BASE;
use crate::error::LoadError;
use crate::kernels::elementwise::Activation;
use crate::model::config::Config;
use crate::model::family::{ExpertInput, Family};
use crate::model::keys::Keys;

pub(super) const SMALLTHINKER: Entry = Entry::plain(Family {
    name: "smallthinker",
    window_pattern: PERIOD,
    global_first: true,
    act: Activation::Relu,
    expert_input: ExpertInput::LayerForRouter,
    ..BASE
})
.prepared(prepare)
.composed(compose);

/// The first of this many layers is global.
const PERIOD: usize = 4;
/// The window of local layers if the file states one, whichever that is.
const WINDOW: u32 = 4096;

fn prepare(keys: &mut Keys<'_, '_>, _: &mut Family) -> Result<(), LoadError> {
    if keys.u32("attention.sliding_window")?.is_some_and(|window| window > 0) {
        keys.set_u32("attention.sliding_window", WINDOW);
    }
    Ok(())
}

fn compose(keys: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    let has_window = keys.u32("attention.sliding_window")?.is_some_and(|window| window > 0);
    let all = !has_window || c.layers.len() == PERIOD;
    c.rotate_only(keys, |i, _| all || i % PERIOD != 0);
    Ok(())
}
