//! Grok: a dense feed-forward beside the experts, and the sum of both over the square root of 2.
//!
//! Source: llama.cpp, architecture `grok`.

use super::Entry;
use super::base::BASE;
use crate::error::LoadError;
use crate::kernels::elementwise::Activation;
use crate::model::config::Config;
use crate::model::family::Family;
use crate::model::keys::Keys;

pub(super) const GROK: Entry = Entry::plain(Family {
    name: "grok",
    act: Activation::GeluTanh,
    dense_beside_experts: true,
    aliases: &[("attn_output_norm", "post_attention_norm"), ("layer_output_norm", "post_ffw_norm")],
    required: &["logit_scale", "embedding_scale", "attention.output_scale", "attn_logit_softcapping"],
    ..BASE
})
.prepared(prepare)
.composed(compose);

fn prepare(keys: &mut Keys<'_, '_>, _: &mut Family) -> Result<(), LoadError> {
    if keys.f32("rope.scaling.yarn_beta_fast")?.is_none() {
        keys.set_f32("rope.scaling.yarn_beta_fast", 8.0);
    }
    Ok(())
}

fn compose(_: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    if let Some(experts) = &mut c.ffn.experts {
        experts.shared_factor = core::f32::consts::FRAC_1_SQRT_2;
    }
    Ok(())
}
