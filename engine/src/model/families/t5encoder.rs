//! The encoder of T5: biases by the distance of tokens instead of positions.
//!
//! Source: arXiv:1910.10683; llama.cpp, architecture `t5encoder`; `T5EncoderModel`.

use super::Entry;
use super::base::BASE;
use crate::error::LoadError;
use crate::kernels::elementwise::Activation;
use crate::model::config::Config;
use crate::model::family::{Family, ScoreScale};
use crate::model::keys::Keys;
use crate::model::mixers::attention::distances::DistanceConfig;

pub(super) const T5ENCODER: Entry = Entry::plain(Family {
    name: "t5encoder",
    rope: None,
    bidirectional: true,
    act: Activation::GeluTanh,
    score_scale: ScoreScale::One,
    aliases: &[("attn_o", "attn_output")],
    ..BASE
})
.composed(compose);

fn compose(keys: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    c.names.prefix = "enc.";
    c.embedding.learned_positions = false;
    c.attention.distances = Some(DistanceConfig::read(keys)?);
    c.ffn.ungated_act = Activation::Relu;
    Ok(())
}
