//! The tensor directory of a file: what mechanisms declare, compared with what the file has.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::gguf::TensorInfo;
use crate::model::config::{Config, LayerConfig};
use crate::model::family::IndexerKind;
use crate::model::ffn::experts::ROUTER;
use crate::model::heads::mtp::OUTPUT_NORM_STEMS;
use crate::model::mixers::attention::weights::OF_KEYS;
use crate::model::mixers::{Selection, indexer};
use crate::model::tensors::{Declaration, Declared, Shape, index, indexed_name, tensor_error};
use crate::model::weights::{self, prefix};

/// Suffixes of tensors that the forward pass ignores: precomputed tables of old converters.
const IGNORED: [&str; 1] = ["rotary_emb.inv_freq"];

/// Names that some converters write without a suffix.
const WITHOUT_SUFFIX: [(&str, &str); 3] = [
    ("exp_probs_b", "exp_probs_b.bias"),
    ("post_attention_norm", "post_attention_norm.weight"),
    ("post_ffw_norm", "post_ffw_norm.weight"),
];

/// The tensors that a model declares, by name.
pub(crate) struct Directory<'c> {
    config: &'c Config,
    rows: BTreeMap<String, Declaration>,
    missing: Option<String>,
}

/// The part of a name after the layer, and the index of that.
fn layer_part(name: &str) -> Option<(usize, &str)> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((index(layer)?, part))
}

impl<'c> Directory<'c> {
    /// The tensors of a model whose file has `names`, ascending.
    pub(crate) fn new(config: &'c Config, names: &[&str]) -> Directory<'c> {
        let has = |name: &str| names.binary_search(&name).is_ok();
        let (mut rows, mut missing) = (BTreeMap::new(), None);
        let mut add = |declared: Declared<'_>| {
            missing = missing.take().or_else(|| declared.missing().map(String::from));
            rows.extend(declared.into_rows());
        };
        // an MTP head has the others of its model
        if !config.is_mtp_head {
            let mut declared = Declared::new(String::new(), &has);
            weights::tensors(config, &mut declared);
            add(declared);
        }
        for block in 0..config.n_blocks() {
            let mut declared = Declared::new(prefix(block), &has);
            weights::layer_tensors(config, block, &mut declared);
            add(declared);
        }
        Directory { config, rows, missing }
    }

    /// The expected shape of a tensor, and its declaration; `None` if it is ignored.
    ///
    /// # Errors
    /// [`LoadError`] if the model has no tensor of this name.
    pub(crate) fn shape(&self, name: &str, t: &TensorInfo<'_>) -> Result<Option<(Shape, &Declaration)>, LoadError> {
        let c = self.config;
        let indexed = || {
            let (name, i) = indexed_name(name)?;
            self.rows.get(&name).filter(|declaration| i < declaration.n)
        };
        match self.rows.get(name).or_else(indexed) {
            Some(declaration) => Ok(Some((declaration.shape(&t.dims), declaration))),
            None if is_ignored(name, c) || c.is_unused(name) => Ok(None),
            None if IGNORED.iter().any(|s| t.name.ends_with(s)) => Ok(None),
            None => {
                let expected = format!("only tensors of the architecture `{}`", c.arch.name);
                Err(tensor_error(t.name, "a tensor that this architecture does not use", &expected))
            }
        }
    }

    /// The first tensor that a model needs and the file has not; `used` are those that the model uses, ascending.
    pub(crate) fn missing(&self, used: &[&str]) -> Option<String> {
        self.missing.clone().or_else(|| self.missing_in_layer(used))
    }

    /// The first tensor that a layer lacks although the layer before it of the same kind (mixer, dense or experts) has it.
    /// Such a layer would be computed as another kind of block.
    fn missing_in_layer(&self, names: &[&str]) -> Option<String> {
        let (c, mut last) = (self.config, BTreeMap::new());
        let has = |name: &str| names.binary_search(&name).is_ok();
        // twice around, so that the first layer of a kind is compared with the last
        for i in 0..2 * c.n_blocks() {
            let layer = i % c.n_blocks();
            let with_experts = has(&format!("{}{}", prefix(layer), ROUTER.weight().text()));
            let LayerConfig { mixer, ffn, .. } = *c.block(layer);
            let Some(before) = last.insert((mixer, ffn.exists, with_experts), layer) else { continue };
            let prefix_before = prefix(before);
            for name in &names[names.partition_point(|name| *name < &prefix_before[..])..] {
                let Some(part) = name.strip_prefix(&prefix_before[..]) else { break };
                let name = format!("{}{part}", prefix(layer));
                let must_have = self.rows.get(&name).is_some_and(|declaration| !declaration.is_free);
                if must_have && !has(&name) {
                    return Some(name);
                }
            }
        }
        None
    }
}

/// The name of a tensor as mechanisms have it: families have names of their own for some.
pub(crate) fn canonical(name: &str, c: &Config) -> String {
    let name = name.strip_prefix(c.names.prefix).unwrap_or(name);
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let (prefix, part) = layer.map_or((String::new(), name), |(layer, part)| (format!("blk.{layer}."), part));
    let part = WITHOUT_SUFFIX.iter().find(|(short, _)| *short == part).map_or(part, |(_, whole)| whole);
    let (stem, suffix) = part.rsplit_once('.').unwrap_or((part, ""));
    match c.names.aliases.iter().find(|(alias, _)| *alias == stem) {
        Some((_, stem)) => format!("{prefix}{stem}.{suffix}"),
        None => format!("{prefix}{part}"),
    }
}

/// The name in an MTP head of a tensor of its model's file.
pub(crate) fn name_in_head(name: &str, c: &Config) -> Option<String> {
    let part = name.strip_prefix(&prefix(c.n_layer())[..])?;
    // the norm before the output has several names
    let [other, own] = OUTPUT_NORM_STEMS;
    Some(format!("{}{}", prefix(0), part.replace(other, own)))
}

/// The inverse of [`name_in_head`].
pub(crate) fn name_in_file(name: &str, c: &Config) -> String {
    name.replacen(&prefix(0), &prefix(c.n_layer()), 1)
}

/// Whether text does not use the tensor.
fn is_ignored(name: &str, c: &Config) -> bool {
    let (layer, part) = layer_part(name).map_or((None, name), |(i, part)| (Some(c.block(i)), part));
    let is_of_keys = OF_KEYS.iter().any(|beginning| part.starts_with(beginning));
    (is_of_keys && layer.is_some_and(|l| l.mixer.has_attention() && !l.attention.owns_kv))
        || (part.starts_with(indexer::PREFIX) && layer.is_some_and(|l| !reads_indexer(c, l)))
        || c.names.ignored.iter().any(|beginning| part.starts_with(beginning))
}

/// Whether a layer has an indexer of its own, or must have none.
fn reads_indexer(c: &Config, layer: &LayerConfig) -> bool {
    match layer.attention.selection {
        Selection::Previous => false,
        // files have the tensors of all layers with attention
        Selection::All => c.arch.indexer != Some(IndexerKind::Means),
        Selection::Own { .. } => true,
    }
}

/// Names in ascending order.
pub(crate) fn sorted<'n>(names: impl Iterator<Item = &'n str>) -> Vec<&'n str> {
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    names
}
