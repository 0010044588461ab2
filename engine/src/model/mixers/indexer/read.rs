//! Indexers: what the metadata tell about them.

use alloc::format;
use alloc::vec::Vec;

use super::config::{IndexerConfig, Selection};
use super::{INPUT_KEYS, KEYS};
use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::kernels::attention::{Compressor, MAX_GROUP, MAX_HEAD_DIM, SelectionRule};
use crate::model::family::IndexerKind;
use crate::model::keys::{Keys, MAX_CONTEXT};
use crate::model::mixers::attention::layers::LayerPart;
use crate::model::mixers::attention::rotary::RopeConfig;
use crate::model::mixers::kind::MixerKind;

/// Epsilon of the LayerNorm of keys, if the file does not state it.
const KEY_NORM_EPS: f32 = 1e-6;

/// Most positions of a block that has one key.
const MAX_RATIO: u32 = 64;

/// Reads the sizes of the indexers, and which layers have one: those that the file lists, or those with the tensors.
pub(crate) fn read(
    keys: &Keys<'_, '_>,
    kind: Option<IndexerKind>,
    shards: &[Gguf<'_>],
    layers: &mut [LayerPart<'_>],
    ropes: &mut Vec<RopeConfig>,
) -> Result<Option<IndexerConfig>, LoadError> {
    let Some(kind) = kind else { return Ok(None) };
    let rotated = ropes.iter().map(|rope| rope.n_rot).max().unwrap_or(0);
    let ratios = match kind {
        IndexerKind::Means => keys.per_layer_u32("attention.compress_ratios", layers.len())?,
        _ => None,
    };
    let n_head = keys.size("attention.indexer.head_count", 1..=MAX_GROUP as u32)?;
    let key_dim = keys.size("attention.indexer.key_length", 1..=MAX_HEAD_DIM as u32)?;
    if rotated > key_dim {
        return Err(keys.wrong(
            "attention.indexer.key_length",
            key_dim,
            format!("at least {rotated}, as RoPE rotates"),
        ));
    }
    let top_k = keys.size("attention.indexer.top_k", 1..=MAX_CONTEXT)?;
    let (block, local) = match kind {
        IndexerKind::Lightning { .. } | IndexerKind::Means => (1, 0),
        IndexerKind::Blocks => {
            let local = keys.u32("attention.indexer.local_blocks")?;
            (
                keys.size("attention.indexer.block_size", 1..=MAX_CONTEXT)?,
                keys.in_range("attention.indexer.local_blocks", local, 0..=top_k as u32)?,
            )
        }
    };
    let types = "attention.indexer.types";
    let listed = if keys.has(types) { Some(keys.pattern(types, layers.len(), 0)?) } else { None };
    let is_lightning = matches!(kind, IndexerKind::Lightning { .. });
    let marker = (if is_lightning { KEYS } else { INPUT_KEYS }).weight().text();
    let mut selects = false;
    for (i, layer) in layers.iter_mut().enumerate() {
        let (block, mixer) = (layer.block, layer.mixer);
        let layer = &mut *layer.attention;
        let has_tensors = || shards.iter().any(|gguf| gguf.tensor(&format!("blk.{block}.{marker}")).is_some());
        let has_indexer = listed.as_ref().map_or_else(has_tensors, |listed| listed[i]);
        let is_sparse = match kind {
            IndexerKind::Lightning { .. } => mixer == MixerKind::Latent && layer.window.left == usize::MAX,
            IndexerKind::Blocks => has_indexer,
            IndexerKind::Means => {
                let ratio = ratios.as_ref().map_or(0, |ratios| ratios[i]);
                let ratio = keys.in_range("attention.compress_ratios", Some(ratio), 0..=MAX_RATIO)?;
                layer.index_ratio = ratio.max(1);
                mixer == MixerKind::Attention && ratio > 0
            }
        };
        layer.selection = match (is_sparse, has_indexer) {
            (false, _) => continue,
            (true, true) => Selection::Own { kv_layer: 0 },
            (true, false) if selects && kind != IndexerKind::Means => Selection::Previous,
            (true, false) => return Err(LoadError::MissingTensor { name: format!("blk.{block}.{marker}") }),
        };
        selects = true;
        if kind == IndexerKind::Blocks && layer.heads.n_head_kv != n_head {
            let expected = format!("attention.head_count_kv, {}", layer.heads.n_head_kv);
            return Err(keys.wrong("attention.indexer.head_count", n_head, expected));
        }
        if is_lightning && layer.heads.latent.is_none_or(|latent| latent.q_rank.is_none()) {
            return Err(keys.wrong("attention.q_lora_rank", "nothing", "a number"));
        }
    }
    let eps = match kind {
        IndexerKind::Lightning { at_end: true, .. } => "attention.layer_norm_rms_epsilon",
        _ => "attention.layer_norm_epsilon",
    };
    let norm_eps = keys.positive(eps, KEY_NORM_EPS)?;
    let pool = pool(keys, top_k)?;
    let (every, whole_blocks) = (pool.map_or(1, |pool| pool.ratio), pool.is_some());
    let rule = SelectionRule { top_k: top_k / every, block, local, every, whole_blocks, shared: 1 };
    let mean_rope = if kind == IndexerKind::Means && selects { unsectioned(ropes) } else { 0 };
    Ok(Some(IndexerConfig { kind, n_head, key_dim, rule, norm_eps, pool, mean_rope })
        .filter(|_| selects || kind != IndexerKind::Means))
}

/// The index of the first RoPE variant with all pairs rotated.
fn unsectioned(ropes: &mut Vec<RopeConfig>) -> usize {
    let Some(first) = ropes.first() else { return 0 };
    let all = RopeConfig { unrotated: Vec::new(), ..first.clone() };
    ropes.iter().position(|rope| *rope == all).unwrap_or_else(|| {
        ropes.push(all);
        ropes.len() - 1
    })
}

/// Blocks of positions that have one key.
fn pool(keys: &Keys<'_, '_>, top_k: usize) -> Result<Option<Compressor>, LoadError> {
    let name = "attention.indexer.kpool";
    let Some(ratio) = keys.u32(name)? else { return Ok(None) };
    let ratio = keys.in_range(name, Some(ratio), 2..=MAX_RATIO)?;
    if !top_k.is_multiple_of(ratio) {
        return Err(keys.wrong("attention.indexer.top_k", top_k, format!("a multiple of kpool, {ratio}")));
    }
    let tail = "attention.indexer.kpool_select_tail";
    if keys.bool(tail)? != Some(true) {
        return Err(keys.wrong(tail, false, "true: a token must attend to its own position"));
    }
    Ok(Some(Compressor { ratio, overlaps: false }))
}
