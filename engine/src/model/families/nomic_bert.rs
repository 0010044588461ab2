//! Nomic BERT with experts, which have no gate.
//!
//! Source: arXiv:2502.07972; llama.cpp, architecture `nomic-bert-moe`.

use super::Entry;
use super::base::BERT;
use crate::kernels::rope::RopeStyle;
use crate::model::family::Family;

pub(super) const NOMIC_BERT_MOE: Entry =
    Entry::plain(Family { name: "nomic-bert-moe", rope: Some(RopeStyle::NeoX), normalised_experts: false, ..BERT })
        .composed(super::ungate_experts);
