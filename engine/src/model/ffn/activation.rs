//! The activation of the feed-forward.

use crate::error::LoadError;
use crate::kernels::elementwise::Activation;
use crate::model::family::Family;
use crate::model::keys::Keys;

const KEY: &str = "hidden_activation";

/// The activation that the file names, or the family's. `gelu` is the family's kind of GELU, if it has one.
pub(crate) fn activation(keys: &Keys<'_, '_>, family: &Family) -> Result<Activation, LoadError> {
    Ok(match keys.str(KEY)? {
        None => family.act,
        Some("silu" | "swish" | "swiglu") => Activation::Silu,
        Some("gelu" | "geglu") if family.act == Activation::GeluTanh => Activation::GeluTanh,
        Some("gelu" | "geglu") => Activation::GeluErf,
        Some("gelu_pytorch_tanh" | "gelu_new") => Activation::GeluTanh,
        Some("relu" | "reglu") => Activation::Relu,
        Some(other) => {
            let known = ["silu", "gelu", "gelu_pytorch_tanh", "relu"].into();
            return Err(LoadError::Unsupported { what: "activation", found: other.into(), known });
        }
    })
}
