//! RoPE variants.

use alloc::format;
use alloc::vec::Vec;

use super::rotary::{RopeConfig, Scaling};
use crate::error::LoadError;
use crate::kernels::rope::RopeStyle;
use crate::model::family::{Family, LocalRope, Sections};
use crate::model::keys::Keys;

/// Key of the sections of multimodal RoPE.
const SECTIONS: &str = "rope.dimension_sections";

/// The RoPE variants of global and of local layers, whose keys have these dimensions.
pub(crate) fn rotations(
    keys: &Keys<'_, '_>,
    family: &Family,
    n_ctx_train: usize,
    key_dims: [Option<usize>; 2],
) -> Result<(RopeConfig, RopeConfig), LoadError> {
    let base = keys.above("rope.freq_base", 1.0, 10_000.0)?;
    let name = "rope.dimension_count";
    let [n_rot, near_n_rot] = match key_dims {
        [Some(dim), None] => [rotated(keys, name, dim, dim)?; 2],
        [None, Some(dim)] => [rotated(keys, name, dim, dim)?; 2],
        [Some(dim), Some(near)] => {
            let n_rot = rotated(keys, name, dim, dim)?;
            [n_rot, rotated(keys, "rope.dimension_count_swa", n_rot.min(near), near)?]
        }
        [None, None] => [0; 2],
    };
    let scaling = Some(Scaling::read(keys, n_ctx_train, family)?);
    let global = RopeConfig { base, scaling, n_rot, unrotated: unrotated(keys, family.sections, n_rot / 2)? };
    if key_dims[1].is_none() {
        let near = global.clone();
        return Ok((global, near));
    }
    let near = match family.local_rope {
        LocalRope::Same => global.clone(),
        LocalRope::Unscaled => RopeConfig { base, ..RopeConfig::default() },
        LocalRope::Base(base) => RopeConfig { base, ..RopeConfig::default() },
    };
    let near = RopeConfig {
        base: keys.above("rope.freq_base_swa", 1.0, near.base)?,
        n_rot: near_n_rot,
        unrotated: unrotated(keys, family.sections, near_n_rot / 2)?,
        ..near
    };
    Ok((global, near))
}

/// Leading elements of a head of `dim` elements that RoPE rotates.
fn rotated(keys: &Keys<'_, '_>, name: &str, default: usize, dim: usize) -> Result<usize, LoadError> {
    let n_rot = keys.in_range(name, keys.u32(name)?.or(Some(default as u32)), 0..=dim as u32)?;
    if !n_rot.is_multiple_of(2) {
        return Err(keys.wrong(name, n_rot, "an even number"));
    }
    Ok(n_rot)
}

/// Which elements of a head are a pair: with sections in blocks, as in [`RopeStyle::NeoX`] whatever the family has without.
pub(crate) fn style(keys: &Keys<'_, '_>, family: &Family) -> Result<Option<RopeStyle>, LoadError> {
    let has_blocks = family.sections == Sections::Blocks && sections(keys, family.sections)?.is_some();
    Ok(if has_blocks { family.rope.and(Some(RopeStyle::NeoX)) } else { family.rope })
}

/// The sections of multimodal RoPE, in pairs; `None` if all pairs rotate.
fn sections(keys: &Keys<'_, '_>, kind: Sections) -> Result<Option<Vec<u32>>, LoadError> {
    let Some(sections) = keys.u32_array(SECTIONS)?.filter(|_| kind != Sections::None) else { return Ok(None) };
    match (kind, &sections[..]) {
        (Sections::Refused, _) => Err(keys.wrong(SECTIONS, format!("{sections:?}"), "no such key")),
        (Sections::Blocks, [0, ..] | [_, 0, ..]) => Ok(None),
        (_, [_, _, _, ..]) => Ok(Some(sections)),
        _ => Err(keys.wrong(SECTIONS, format!("{sections:?}"), "the pairs of at least three sections")),
    }
}

/// The pairs of a head that do not rotate in text: those of the fourth section of multimodal RoPE. Pairs beyond the sections
/// begin with the first again.
fn unrotated(keys: &Keys<'_, '_>, kind: Sections, n_pairs: usize) -> Result<Vec<usize>, LoadError> {
    let Some(sections) = sections(keys, kind)?.filter(|_| n_pairs > 0) else { return Ok(Vec::new()) };
    let sum = sections.iter().fold(0u32, |sum, n| sum.saturating_add(*n)) as usize;
    if !(1..=2 * n_pairs).contains(&sum) {
        return Err(keys.wrong(SECTIONS, format!("{sections:?}"), format!("sections of {n_pairs} pairs")));
    }
    let size = |section: usize| sections[section] as usize;
    let is_still = |i: &usize| match (kind, i % sum) {
        (Sections::None | Sections::Refused, _) => false,
        (Sections::Blocks, i) => i >= size(0) + size(1) + size(2),
        (Sections::Interleaved, i) => i >= 3 * size(i % 3),
    };
    Ok((0..n_pairs).filter(is_still).collect())
}
