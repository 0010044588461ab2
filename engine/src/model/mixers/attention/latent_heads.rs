//! Heads of latent attention.

use alloc::format;

use crate::error::LoadError;
use crate::kernels::attention::{MAX_GROUP, MAX_HEAD_DIM, MAX_LATENT_DIM};
use crate::kernels::panel::PANEL;
use crate::model::keys::{Keys, MAX_WIDTH};

/// Sizes of latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentHeads {
    /// Elements that queries are projected from, if not from the input.
    pub q_rank: Option<usize>,
    /// Elements of a query that are projected into the space of the keys.
    pub nope: usize,
    /// Elements of a query and key after these, which RoPE rotates.
    pub rope: usize,
    /// Elements of a head's output.
    pub value: usize,
}

impl LatentHeads {
    /// Elements of a query before its projection.
    pub fn query(&self) -> usize {
        self.nope + self.rope
    }
}

/// Keys of the sizes of layers with a window, which may differ, and of all layers.
const RANK: [&str; 2] = ["attention.kv_lora_rank_swa", "attention.kv_lora_rank"];
const ROPE: [&str; 2] = ["rope.dimension_count_swa", "rope.dimension_count"];
const QUERY: [&str; 3] = ["attention.key_length_mla_swa", "attention.key_length_mla", "attention.key_length"];
const VALUE: [&str; 3] = ["attention.value_length_mla_swa", "attention.value_length_mla", "attention.value_length"];

/// Reads number of heads, rank of keys and other sizes of a layer of a model of width `n_embd`; `local` if the layer has a window.
pub(crate) fn heads(
    keys: &Keys<'_, '_>,
    n_embd: usize,
    n_head: u32,
    local: bool,
) -> Result<(usize, usize, LatentHeads), LoadError> {
    let n_head = keys.in_range("attention.head_count", Some(n_head), 1..=MAX_GROUP as u32)?;
    let given = |names: &[&'static str]| {
        let names = &names[usize::from(!local)..];
        names.iter().copied().find(|name| keys.has(name)).unwrap_or(names[names.len() - 1])
    };
    let rank_name = given(&RANK);
    let rank = keys.size(rank_name, 1..=MAX_HEAD_DIM as u32)?;
    if !rank.is_multiple_of(PANEL) {
        return Err(keys.wrong(rank_name, rank, format!("a multiple of {PANEL}")));
    }
    let rope = keys.size(given(&ROPE), 0..=(MAX_LATENT_DIM - MAX_HEAD_DIM) as u32)?;
    // without the sizes of expanded heads, the others are meant
    let size = |names: &[&'static str]| {
        let given = given(names);
        let size = keys.u32(given)?.or(Some((n_embd / n_head) as u32));
        Ok::<_, LoadError>((given, keys.in_range(given, size, 1..=MAX_WIDTH / n_head as u32)?))
    };
    let (name, query) = size(&QUERY)?;
    let (_, value) = size(&VALUE)?;
    if query <= rope {
        return Err(keys.wrong(name, query, format!("more than rope.dimension_count, {rope}")));
    }
    let q_rank = match keys.u32("attention.q_lora_rank")? {
        None | Some(0) => None,
        v => Some(keys.in_range("attention.q_lora_rank", v, 1..=MAX_WIDTH)?),
    };
    Ok((n_head, rank, LatentHeads { q_rank, nope: query - rope, rope, value }))
}
