//! RoPE variants.

use alloc::format;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::model::arch::{Arch, LocalRope, Sections};
use crate::model::keys::Keys;
use crate::model::rotary::{RopeConfig, Scaling};

/// The RoPE variants of global layers, and of local ones if `has_windows`.
pub(super) fn rotations(
    keys: &Keys<'_, '_>,
    arch: &Arch,
    n_ctx_train: usize,
    has_windows: bool,
) -> Result<(RopeConfig, RopeConfig), LoadError> {
    let base = keys.above("rope.freq_base", 1.0, 10_000.0)?;
    let global =
        RopeConfig { base, scaling: Some(Scaling::read(keys, n_ctx_train, arch.beta_fast)?), unrotated: Vec::new() };
    if !has_windows {
        return Ok((global.clone(), global));
    }
    let near = match arch.local_rope {
        LocalRope::Same => global.clone(),
        LocalRope::Unscaled => RopeConfig { base, ..RopeConfig::default() },
        LocalRope::Base(base) => RopeConfig { base, ..RopeConfig::default() },
    };
    let near = RopeConfig { base: keys.above("rope.freq_base_swa", 1.0, near.base)?, ..near };
    Ok((global, near))
}

/// The pairs of a head that do not rotate in text: those of the fourth section of multimodal RoPE.
pub(super) fn unrotated(keys: &Keys<'_, '_>, kind: Sections, n_pairs: usize) -> Result<Vec<usize>, LoadError> {
    let name = "rope.dimension_sections";
    let Some(sections) = keys.u32_array(name)?.filter(|_| kind != Sections::None) else { return Ok(Vec::new()) };
    let sum = sections.iter().fold(0u32, |sum, n| sum.saturating_add(*n)) as usize;
    let [a, b, c] = match sections[..] {
        [a, b, c, ..] if sum == n_pairs => [a, b, c].map(|n| n as usize),
        _ => return Err(keys.wrong(name, format!("{sections:?}"), format!("sections of {n_pairs} pairs"))),
    };
    let is_still = |i: &usize| match kind {
        Sections::None => false,
        Sections::Blocks => *i >= a + b + c,
        Sections::Interleaved => *i >= 3 * [a, b, c][i % 3],
    };
    Ok((0..n_pairs).filter(is_still).collect())
}
