//! The tensors of a model file: their names, the shape that each must have, when it is required, and what takes its place.

mod tables;

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Deref;

use crate::error::LoadError;
use crate::gguf::TensorInfo;
use crate::kernels::WeightArena;
use crate::kernels::panel::Matrix;
use crate::model::config::{Config, LayerConfig, MixerKind, RecurrentConfig};
use crate::model::embeddings::ngrams;
use crate::model::family::IndexerKind;
use crate::model::mixers::{Selection, compressed, indexer, latent};
use crate::model::residual::hyper;
use crate::model::roles::tables::{LAYER_TENSORS, MODEL_TENSORS};
use crate::quant::Dtype;

/// How the names of tensors in files of a family differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorNames {
    /// Names without the suffix, and the names of the same tensors in others.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Beginning of names.
    pub prefix: &'static str,
    /// Beginnings of the names of layer tensors that text does not use.
    pub ignored: &'static [&'static str],
}

/// Suffixes of tensors that the forward pass ignores: precomputed tables of old converters.
const IGNORED: [&str; 1] = ["rotary_emb.inv_freq"];

/// Expected shape of a tensor.
#[derive(Clone, Copy)]
pub(crate) enum Role {
    /// `n` matrices (rows, k), concatenated; `n` is a dimension unless it is 1.
    Matrices { n: usize, rows: usize, k: usize },
    /// `n` matrices (rows, k) in one dimension of the file.
    Stacked { n: usize, rows: usize, k: usize },
    /// A vector of this length.
    Vector(usize),
    /// Rows of vectors, one per expert.
    Rows { n: usize, width: usize },
    /// Weights of a norm of heads: (head_dim), (n_head, head_dim) or (n_head * head_dim), or one per head, (n_head, 1).
    HeadNorm { n_head: usize, head_dim: usize },
    /// Values in rows of this width; dimensions of 1 may be between.
    Values { width: usize, rows: usize },
    /// Rows of integers, I32.
    Integers { width: usize, rows: usize },
}

/// Memory of a tensor.
pub(crate) enum TensorStorage {
    /// One matrix, or one per expert.
    Matrices(Vec<Matrix>),
    /// Values, and the length of a row.
    Vector { values: Vec<f32>, width: usize },
}

impl Role {
    /// The role of a tensor by its name; `None` if the model has no tensor of this name.
    fn of(name: &str, t: &TensorInfo<'_>, c: &Config) -> Option<Role> {
        let (row, scope) = match name.strip_prefix("blk.") {
            Some(rest) => {
                let (layer, part) = rest.split_once('.')?;
                let n_experts = c.ffn.experts.map_or(0, |e| e.n);
                let i = index(layer)?;
                let row = layer_tables(c, i)?.into_iter().find_map(|rows| find(rows, part, n_experts));
                (row?, Scope { config: c, layer: c.block(i) })
            }
            None => (model_row(name)?, Scope::of_model(c)),
        };
        (row.role)(&scope, &t.dims)
    }

    /// Checks shape and type of a tensor.
    fn check(self, t: &TensorInfo<'_>) -> Result<(), LoadError> {
        let fits = match self {
            Role::Matrices { n, rows, k } => t.dims == [k as u64, rows as u64, n as u64, 1],
            Role::Stacked { n, rows, k } => t.dims == [k as u64, (rows * n) as u64, 1, 1],
            Role::Vector(n) => t.dims == [n as u64, 1, 1, 1],
            Role::Rows { n: rows, width } | Role::Integers { width, rows } => {
                t.dims == [width as u64, rows as u64, 1, 1]
            }
            Role::HeadNorm { n_head, head_dim } => {
                let (d, n) = (head_dim as u64, n_head as u64);
                [[d, 1, 1, 1], [d, n, 1, 1], [d * n, 1, 1, 1], [1, n, 1, 1]].contains(&t.dims)
            }
            Role::Values { width, rows } => {
                let (w, n) = (width as u64, rows as u64);
                let rows = [[w, n, 1, 1], [w, 1, n, 1], [w, 1, 1, n]].contains(&t.dims);
                rows || (w == 1 && t.dims == [n, 1, 1, 1])
            }
        };
        if !fits {
            let expected = match self {
                Role::Matrices { n: 1, rows, k } => format!("shape [{k}, {rows}]"),
                Role::Matrices { n, rows, k } => format!("shape [{k}, {rows}, {n}]"),
                Role::Stacked { n, rows, k } => format!("shape [{k}, {}]", rows * n),
                Role::Vector(n) => format!("shape [{n}]"),
                Role::Rows { n, width } => format!("shape [{width}, {n}]"),
                Role::HeadNorm { n_head, head_dim: d } => format!("shape [{d}], [{d}, {n_head}] or [{}]", d * n_head),
                Role::Values { width, rows } | Role::Integers { width, rows } => format!("shape [{width}, {rows}]"),
            };
            return Err(tensor_error(t.name, &format!("shape {:?}", &t.dims[..t.n_dims as usize]), &expected));
        }
        let (fits, expected) = match self {
            Role::Matrices { .. } | Role::Stacked { .. } if !t.dtype.supported() => {
                return Err(LoadError::Unsupported {
                    what: "tensor type",
                    found: format!("{} ({})", t.dtype.name(), t.name),
                    known: Dtype::SUPPORTED.map(Dtype::name).into(),
                });
            }
            Role::Matrices { .. } | Role::Stacked { .. } => (true, ""),
            Role::Integers { .. } => (t.dtype == Dtype::I32, "I32"),
            _ => (matches!(t.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16), "F32, F16 or BF16"),
        };
        if fits { Ok(()) } else { Err(tensor_error(t.name, t.dtype.name(), expected)) }
    }

    fn reserve(self, t: &TensorInfo<'_>, arena: &mut WeightArena) -> Result<TensorStorage, LoadError> {
        self.check(t)?;
        let out_of_memory = |_| LoadError::OutOfMemory { what: "the weights", needed: t.len_bytes };
        if let Role::Matrices { n, rows, k } | Role::Stacked { n, rows, k } = self {
            let matrices = (0..n).map(|_| Matrix::zeroed_in(arena, t.dtype, rows, k)).collect::<Result<_, _>>();
            return Ok(TensorStorage::Matrices(matrices.map_err(out_of_memory)?));
        }
        let mut values = Vec::new();
        values.try_reserve_exact(t.n_elements() as usize).map_err(out_of_memory)?;
        Ok(TensorStorage::Vector { values, width: t.dims[0] as usize })
    }
}

/// A configuration and one of its layers.
pub(crate) struct Scope<'a> {
    config: &'a Config,
    pub(crate) layer: &'a LayerConfig,
}

impl<'a> Scope<'a> {
    /// For tensors outside of layers, which do not depend on one.
    fn of_model(config: &'a Config) -> Scope<'a> {
        Scope { config, layer: &config.layers[0] }
    }
}

impl Deref for Scope<'_> {
    type Target = Config;

    fn deref(&self) -> &Config {
        self.config
    }
}

/// A tensor of the table: its name, its shape, when it is required, and which tensors it cannot be beside.
pub(crate) struct TensorRow {
    /// The name; in a layer the part after `blk.N.`. `#` is the index of an expert.
    name: &'static str,
    /// The expected shape, of a layer and the dimensions in the file; `None` where the model has no such tensor.
    role: fn(&Scope<'_>, &[u64; 4]) -> Option<Role>,
    need: Need,
    /// A tensor that takes the place of this one, and the rule in an error's words.
    excludes: Option<(&'static str, &'static str)>,
}

/// When a tensor is required.
pub(crate) enum Need {
    Optional,
    /// Wherever the model has a tensor of this name.
    Always,
    /// In every layer, if the model has tensors of this name.
    EachLayer,
    /// With the other set of LongRoPE divisors, or because the metadata asks for it.
    LongRope {
        other: &'static str,
    },
    /// In these layouts of a sub-layer.
    Layouts(&'static [Layout]),
}

/// One of the alternative layouts of a part of a layer: of those whose first tensor exists, the one with the lowest
/// number applies; if there is none, the one with the highest.
pub(crate) type Layout = (Part, usize);

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Part {
    PreNorm,
    PostNorm,
    Qkv,
    AttnOutput,
    LatentInput,
    LatentQuery,
    LatentHeads,
    Indexer,
    Compressed,
    Recurrent,
    FeedForward,
    ExpertInput,
}

impl TensorRow {
    pub(crate) const fn new(name: &'static str, role: fn(&Scope<'_>, &[u64; 4]) -> Option<Role>) -> TensorRow {
        TensorRow { name, role, need: Need::Optional, excludes: None }
    }

    pub(crate) const fn need(self, need: Need) -> TensorRow {
        TensorRow { need, ..self }
    }

    pub(crate) const fn of(self, layouts: &'static [Layout]) -> TensorRow {
        self.need(Need::Layouts(layouts))
    }

    pub(crate) const fn excludes(self, rule: (&'static str, &'static str)) -> TensorRow {
        TensorRow { excludes: Some(rule), ..self }
    }

    fn is_of(&self, layout: Layout) -> bool {
        matches!(self.need, Need::Layouts(all) if all.contains(&layout))
    }
}

pub(crate) fn matrix(rows: usize, k: usize) -> Option<Role> {
    Some(Role::Matrices { n: 1, rows, k })
}

pub(crate) fn vector(n: usize) -> Option<Role> {
    Some(Role::Vector(n))
}

pub(crate) fn values(width: usize, rows: usize) -> Option<Role> {
    Some(Role::Values { width, rows })
}

/// The tables of the tensors outside of layers.
fn model_tables() -> impl Iterator<Item = &'static [TensorRow]> {
    [MODEL_TENSORS, hyper::MODEL_TENSORS, hyper::gated::MODEL_TENSORS].into_iter()
}

/// The row of a tensor outside of layers.
fn model_row(name: &str) -> Option<&'static TensorRow> {
    model_tables().find_map(|rows| find(rows, name, 0))
}

/// The tables of the tensors of a layer, those of its mixer first; `None` if there is no such layer.
fn layer_tables(c: &Config, layer: usize) -> Option<[&'static [TensorRow]; 7]> {
    if layer >= c.n_blocks() {
        return None;
    }
    let mixer = c.block(layer).mixer;
    let recurrent = c.recurrent.as_ref().filter(|_| mixer.is_recurrent());
    let latent = match mixer {
        MixerKind::Latent => latent::TENSORS,
        MixerKind::Compressed => compressed::TENSORS,
        _ => &[],
    };
    let indexer = if c.attention.indexer.is_some() { indexer::TENSORS } else { &[] };
    let recurrent = recurrent.map_or(&[][..], RecurrentConfig::tensors);
    let [hyper, gated] = [hyper::TENSORS, hyper::gated::TENSORS];
    Some([recurrent, latent, indexer, hyper, gated, ngrams::TENSORS, LAYER_TENSORS])
}

/// The row of a tensor; experts have indices below `n_experts`.
fn find(rows: &'static [TensorRow], name: &str, n_experts: usize) -> Option<&'static TensorRow> {
    rows.iter().find(|row| match row.name.split_once('#') {
        Some((head, tail)) => {
            let number = name.strip_prefix(head).and_then(|rest| rest.strip_suffix(tail));
            number.and_then(index).is_some_and(|i| i < n_experts)
        }
        None => row.name == name,
    })
}

/// The error for a tensor that no layer took, because the file also has the tensors that take its place.
pub(crate) fn conflict(name: &str, c: &Config) -> LoadError {
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let (prefix, row) = match layer {
        Some((layer, part)) => {
            let tables = index(layer).and_then(|layer| layer_tables(c, layer)).unwrap_or_default();
            (format!("blk.{layer}."), tables.into_iter().find_map(|rows| find(rows, part, usize::MAX)))
        }
        None => (String::new(), model_row(name)),
    };
    match row.and_then(|row| row.excludes) {
        Some((other, expected)) => tensor_error(name, &format!("both it and `{prefix}{other}.weight`"), expected),
        None => tensor_error(name, "a tensor that no layer uses", "only tensors that the model uses"),
    }
}

impl TensorStorage {
    /// Allocates memory for a tensor, matrices from `arena`; `None` if the tensor is ignored.
    ///
    /// # Errors
    /// [`LoadError`] if the model has no tensor of this name, or its shape or type is not accepted.
    pub(crate) fn reserve(
        name: &str,
        t: &TensorInfo<'_>,
        c: &Config,
        arena: &mut WeightArena,
    ) -> Result<Option<TensorStorage>, LoadError> {
        role(name, t, c)?.map(|role| role.reserve(t, arena)).transpose()
    }
}

/// The role of a tensor; `None` if it is ignored.
fn role(name: &str, t: &TensorInfo<'_>, c: &Config) -> Result<Option<Role>, LoadError> {
    match Role::of(name, t, c) {
        Some(role) => Ok(Some(role)),
        None if is_ignored(name, c) || c.is_unused(name) => Ok(None),
        None if IGNORED.iter().any(|s| t.name.ends_with(s)) => Ok(None),
        None => {
            let expected = format!("only tensors of the architecture `{}`", c.arch.name);
            Err(tensor_error(t.name, "a tensor that this architecture does not use", &expected))
        }
    }
}

/// Checks a tensor; returns whether the model uses it.
pub(crate) fn check(name: &str, t: &TensorInfo<'_>, c: &Config) -> Result<bool, LoadError> {
    match role(name, t, c)? {
        Some(role) => role.check(t).map(|()| true),
        None => Ok(false),
    }
}

/// Names that some converters write without a suffix.
const WITHOUT_SUFFIX: [(&str, &str); 3] = [
    ("exp_probs_b", "exp_probs_b.bias"),
    ("post_attention_norm", "post_attention_norm.weight"),
    ("post_ffw_norm", "post_ffw_norm.weight"),
];

/// The name of a tensor in the table: families have names of their own for some.
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

/// Whether text does not use the tensor.
fn is_ignored(name: &str, c: &Config) -> bool {
    let part = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map_or(name, |(_, part)| part);
    let layer = name.strip_prefix("blk.").and_then(|rest| index(rest.split_once('.')?.0)).map(|i| c.block(i));
    let is_of_keys = ["attn_k.", "attn_v.", "attn_k_norm."].iter().any(|beginning| part.starts_with(beginning));
    (is_of_keys && layer.is_some_and(|l| l.mixer.has_attention() && !l.attention.owns_kv))
        || (part.starts_with("indexer.") && layer.is_some_and(|l| !reads_indexer(c, l)))
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

/// Parses an index in a tensor name: decimal without leading zeros.
fn index(text: &str) -> Option<usize> {
    if text.len() > 1 && text.starts_with('0') {
        return None;
    }
    text.parse().ok()
}

/// The first required tensor that is missing; `has` tells which exist.
pub(crate) fn missing(c: &Config, has_tensor: impl Fn(&str) -> bool) -> Option<String> {
    let is_required = |row: &&TensorRow| match row.need {
        // an MTP head has those of its model
        _ if c.is_mtp_head => false,
        Need::Optional | Need::EachLayer | Need::Layouts(_) => false,
        Need::Always => (row.role)(&Scope::of_model(c), &[0; 4]).is_some(),
        Need::LongRope { other } => c.attention.is_longrope() || has_tensor(other),
    };
    if let Some(row) = model_tables().flatten().filter(is_required).find(|row| !has_tensor(row.name)) {
        return Some(row.name.into());
    }
    let norm = if c.residual.post_norm { Part::PostNorm } else { Part::PreNorm };
    for layer in 0..c.n_blocks() {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let has = |row: &TensorRow| match row.name.strip_suffix("_exps.weight") {
            Some(one) => {
                let n = c.ffn.experts.map_or(0, |e| e.n);
                has_tensor(&name(row.name)) || (0..n).all(|i| has_tensor(&name(&format!("{one}.{i}.weight"))))
            }
            None => has_tensor(&name(row.name)),
        };
        let kind = c.block(layer);
        let scope = Scope { config: c, layer: kind };
        let (attention, recurrent) = (kind.mixer.has_attention(), kind.mixer.is_recurrent());
        let exists = |part: &str| has_tensor(&name(part));
        let is_each = |row: &&TensorRow| matches!(row.need, Need::EachLayer) && (row.role)(&scope, &[0; 4]).is_some();
        let each = layer_tables(c, layer).unwrap_or_default().into_iter().flatten();
        if let Some(row) = each.filter(is_each).find(|row| !exists(row.name)) {
            return Some(name(row.name));
        }
        let (latent, compressed) = (kind.mixer == MixerKind::Latent, kind.mixer == MixerKind::Compressed);
        let parts = [
            (norm, kind.mixer != MixerKind::None || !exists("ffn_norm.weight")),
            (Part::Qkv, attention && !latent && !compressed),
            (Part::LatentInput, latent),
            (Part::LatentQuery, latent),
            (Part::LatentHeads, latent),
            (Part::Indexer, matches!(kind.attention.selection, Selection::Own { .. })),
            (Part::Compressed, compressed),
            (Part::AttnOutput, attention && !compressed || kind.mixer == MixerKind::Linear),
            (Part::Recurrent, recurrent),
            (Part::FeedForward, kind.ffn.exists),
            // without these a layer seems to have no feed-forward
            (Part::ExpertInput, exists("ffn_gate_inp.weight")),
        ];
        for part in parts.into_iter().filter_map(|(part, is_there)| is_there.then_some(part)) {
            let tables = layer_tables(c, layer).unwrap_or_default();
            let rows = |i| tables.into_iter().flatten().filter(move |row| row.is_of((part, i)));
            let n = (0..).take_while(|&i| rows(i).next().is_some()).count();
            let layout = (0..n).find(|&i| rows(i).next().is_some_and(has)).unwrap_or(n.saturating_sub(1));
            if let Some(row) = rows(layout).find(|row| !has(row) && (row.role)(&scope, &[0; 4]).is_some()) {
                return Some(name(row.name));
            }
        }
    }
    None
}

/// The first tensor that a layer lacks although the layer before it of the same kind (mixer, dense or experts) has it.
/// Such a layer would be computed as another kind of block. `names` are the existing tensors, ascending.
pub(crate) fn missing_in_layer(c: &Config, names: &[&str], has: impl Fn(&str) -> bool) -> Option<String> {
    let mut last = BTreeMap::new();
    // twice around, so that the first layer of a kind is compared with the last
    for i in 0..2 * c.n_blocks() {
        let layer = i % c.n_blocks();
        let with_experts = has(&format!("blk.{layer}.ffn_gate_inp.weight"));
        let LayerConfig { mixer, ffn, .. } = *c.block(layer);
        let Some(before) = last.insert((mixer, ffn.exists, with_experts), layer) else { continue };
        let prefix = format!("blk.{before}.");
        for name in &names[names.partition_point(|name| *name < &prefix[..])..] {
            let Some(part) = name.strip_prefix(&prefix[..]) else { break };
            if !may_have(c, layer, part) {
                continue;
            }
            let name = format!("blk.{layer}.{part}");
            if !has(&name) {
                return Some(name);
            }
        }
    }
    None
}

/// Whether a layer may have a tensor that another layer of its kind has.
fn may_have(c: &Config, layer: usize, part: &str) -> bool {
    let scope = Scope { config: c, layer: c.block(layer) };
    let row = layer_tables(c, layer).and_then(|tables| tables.into_iter().find_map(|rows| find(rows, part, 0)));
    row.is_none_or(|row| (row.role)(&scope, &[0; 4]).is_some())
}

pub(crate) fn tensor_error(name: &str, found: &str, expected: &str) -> LoadError {
    LoadError::Tensor { name: name.into(), found: found.into(), expected: expected.into() }
}
