//! What differs between families, as data. Numbers come from the file's metadata, optional parts from the presence of
//! their tensors; a row says the rest.

use crate::kernels::elementwise::Gate;
use crate::kernels::rope::RopeStyle;

/// A family: `general.architecture` in the file, and how it differs from the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arch {
    /// The name in the file, which also prefixes the metadata keys.
    pub name: &'static str,
    /// Which elements of a head rotate together.
    pub rope: RopeStyle,
    /// Activation of the gated feed-forward.
    pub gate: Gate,
}

const BASE: Arch = Arch { name: "", rope: RopeStyle::Halves, gate: Gate::Silu };

/// Every family that loads. Mistral's files name themselves `llama`.
pub const ARCHS: [Arch; 3] = [
    Arch { name: "llama", rope: RopeStyle::Neighbours, ..BASE },
    Arch { name: "qwen2", ..BASE },
    Arch { name: "qwen3", ..BASE },
];
