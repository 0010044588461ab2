//! Nemotron-H: Mamba 2, attention and feed-forwards as layers of their own. All norms are RMSNorm, even if the file states the
//! epsilon of LayerNorm; experts have no gate.
//!
//! Source: arXiv:2504.03624; llama.cpp, architectures `nemotron_h`, `nemotron_h_moe`; `NemotronHForCausalLM`.

use super::Entry;
use super::base::MAMBA;
use crate::error::LoadError;
use crate::kernels::elementwise::Activation;
use crate::kernels::norm::NormKind;
use crate::model::config::Config;
use crate::model::family::{Family, Gating};
use crate::model::keys::Keys;

const HYBRID: Family = Family { name: "nemotron_h", act: Activation::ReluSquared, ..MAMBA };
pub(super) const NEMOTRON_H: Entry = Entry::plain(HYBRID).composed(compose);
pub(super) const NEMOTRON_H_MOE: Entry =
    Entry::plain(Family { name: "nemotron_h_moe", gating: Gating::Sigmoid, ..HYBRID }).composed(compose);

fn compose(keys: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    c.norm.kind = NormKind::Rms;
    super::ungate_experts(keys, c)
}
