//! Weights of a model, assembled from its tensors.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::classifier::Classifier;
use super::config::Config;
use super::loader::LoadedTensors;
pub use super::mixers::Recurrent;
use super::projection;
use super::roles::tensor_error;
use crate::error::LoadError;
use crate::kernels::panel::{Matrix, PANEL};

/// A matrix and its bias: `y = w x + b`.
pub struct Linear {
    /// (rows, k) weights.
    pub w: Matrix,
    /// One value per row.
    pub bias: Option<Vec<f32>>,
}

/// Linears with the same input. Their outputs are side by side in one row, each padded to whole panels. A fused matrix
/// gives several parts.
pub struct LinearGroup {
    /// The linears, each with the offset of its output in the row.
    pub linears: Vec<(Linear, usize)>,
    /// Offset of each part in the row: q, k, v; or gate, up; or up.
    pub part_starts: Vec<usize>,
    /// Length of a row in floats.
    pub stride: usize,
}

/// RMSNorm or LayerNorm of vectors or of heads.
pub struct Norm {
    /// A factor per element (width); or per element of all heads, where heads have their own factors.
    pub weight: Vec<f32>,
    /// Added after the scaling.
    pub bias: Option<Vec<f32>>,
    /// Epsilon, if it is not the model's.
    pub eps: Option<f32>,
    /// Elements that are normalised together.
    pub width: usize,
}

/// A dense feed-forward: `down(act(gate x) * up x)`, or `down(act(up x))`.
pub struct Dense {
    /// Gate and up, or up without a gate.
    pub up: LinearGroup,
    /// Norm before the down projection (n_ff).
    pub sub_norm: Option<Norm>,
    /// (n_embd, n_ff)
    pub down: Linear,
}

/// Mixture of experts: each token is routed to a few feed-forwards.
pub struct Experts {
    /// (n_expert, n_embd)
    pub router: Linear,
    /// Added to the scores by which experts are selected (n_expert).
    pub selection_bias: Option<Vec<f32>>,
    /// (n_ff, n_embd), one per expert; empty without gates.
    pub gate: Vec<Matrix>,
    /// (n_ff, n_embd), one per expert.
    pub up: Vec<Matrix>,
    /// (n_embd, n_ff), one per expert.
    pub down: Vec<Matrix>,
    /// Norm of the experts' input, where that is the layer's (n_embd).
    pub input_norm: Option<Norm>,
    /// Biases of gate, up and down: one row per expert.
    pub biases: [Option<Vec<f32>>; 3],
    /// An expert that all tokens go through.
    pub shared: Option<SharedExpert>,
}

/// An expert that all tokens go through.
pub struct SharedExpert {
    /// (1, n_embd): the expert's output is multiplied by the sigmoid of this product.
    pub gate: Option<Linear>,
    /// Its feed-forward.
    pub ffn: Dense,
}

/// The feed-forward of a layer.
pub enum FeedForward {
    /// One network for all tokens.
    Dense(Box<Dense>),
    /// Experts selected for each token.
    Experts(Box<Experts>),
    /// None: the layer has a mixer only.
    None,
}

/// Weights of attention.
pub struct AttentionWeights {
    /// Queries (n_head * head_dim, n_embd), keys and values (n_head_kv * head_dim, n_embd); then the gate of the output,
    /// if there is one (n_head or n_head * head_dim, n_embd). With
    /// [`Arch::gated_queries`](super::arch::Arch::gated_queries) each query head is followed by its gate.
    pub qkv: LinearGroup,
    /// Norm before the output projection (n_head * head_dim).
    pub attn_sub_norm: Option<Norm>,
    /// Attention sinks (n_head).
    pub sinks: Option<Vec<f32>>,
    /// Norm of query heads.
    pub q_norm: Option<Norm>,
    /// Norm of key heads.
    pub k_norm: Option<Norm>,
    /// Output projection (n_embd, n_head * head_dim).
    pub o: Linear,
}

/// What mixes the tokens of a sequence in a layer.
pub enum Mixer {
    /// Attention.
    Attention(Box<AttentionWeights>),
    /// A recurrent mixer.
    Recurrent(Recurrent),
    /// Both on the same input; their outputs are added.
    Both(Box<(AttentionWeights, Recurrent)>),
    /// Nothing.
    None,
}

/// Weights of one layer.
pub struct Layer {
    /// Norm before the mixer (n_embd).
    pub attn_norm: Option<Norm>,
    /// What mixes the tokens.
    pub mixer: Mixer,
    /// A second norm after the mixer, of the sum with the layer's input (n_embd).
    pub second_norm: Option<Norm>,
    /// Norm after the mixer (n_embd).
    pub post_attn_norm: Option<Norm>,
    /// Norm before the feed-forward (n_embd).
    pub ffn_norm: Option<Norm>,
    /// Dense feed-forward or experts.
    pub ffn: FeedForward,
    /// Norm after the feed-forward (n_embd).
    pub post_ffn_norm: Option<Norm>,
    /// Order of norms, sub-layers and residual sums.
    pub order: ResidualOrder,
}

/// Order of norms, sub-layers and residual sums of a layer.
pub enum ResidualOrder {
    /// Pre-norm: attention, then feed-forward (`ForwardPass::serial_block`).
    Serial,
    /// Attention and feed-forward read the same residual stream.
    Parallel,
    /// Post-norm: these norms (n_embd) follow the two residual sums, and none comes before.
    PostNorm([Norm; 2]),
}

/// Divisors of the RoPE frequencies (n_rot / 2).
pub enum RopeDivisors {
    /// The file has none.
    None,
    /// The same for all contexts (Llama 3).
    All(Vec<f32>),
    /// LongRoPE: selected by the length of the context.
    ByContext {
        /// For contexts up to the original training context.
        short: Vec<f32>,
        /// For longer contexts.
        long: Vec<f32>,
    },
}

/// All weights of a model.
pub struct Weights {
    /// (n_vocab, n_embd)
    pub embedding: Matrix,
    /// (token types, n_embd): the first row is added to every token (BERT).
    pub token_types: Option<Matrix>,
    /// Learned position embeddings (n_ctx_train, n_embd), for models without RoPE.
    pub positions: Option<Matrix>,
    /// Norm of the sum of embeddings (n_embd).
    pub embedding_norm: Option<Norm>,
    /// The layers, in order.
    pub layers: Vec<Layer>,
    /// Norm after the layers (n_embd).
    pub final_norm: Option<Norm>,
    /// (n_vocab, n_embd); `None` if tied to the embedding.
    pub output: Option<Matrix>,
    /// One value per logit.
    pub output_bias: Option<Vec<f32>>,
    /// Divisors of the RoPE frequencies.
    pub rope_divisors: RopeDivisors,
    /// Projections of a pooled embedding (n_embd), applied in order.
    pub projections: Vec<Linear>,
    /// Classification head of rerankers.
    pub classifier: Option<Classifier>,
}

/// Rows of an output, padded to whole panels.
pub(super) fn padded(rows: usize) -> usize {
    rows.next_multiple_of(PANEL)
}

impl LinearGroup {
    /// A group of separate linears, one part each.
    pub(super) fn separate(linears: Vec<Linear>) -> LinearGroup {
        let mut group = LinearGroup { linears: Vec::with_capacity(linears.len()), part_starts: Vec::new(), stride: 0 };
        linears.into_iter().for_each(|linear| group.push(linear));
        group
    }

    /// Adds a linear as a further part.
    fn push(&mut self, linear: Linear) {
        self.part_starts.push(self.stride);
        let rows = padded(linear.w.rows());
        self.linears.push((linear, self.stride));
        self.stride += rows;
    }

    /// A group of one fused linear, whose rows are parts of these lengths.
    fn fused(linear: Linear, rows: &[usize]) -> LinearGroup {
        let starts = rows.iter().scan(0, |at, n| {
            *at += n;
            Some(*at - n)
        });
        LinearGroup { part_starts: starts.collect(), ..LinearGroup::separate(vec![linear]) }
    }

    /// The matrices of the linears.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.linears.iter().map(|(l, _)| &l.w)
    }
}

impl Dense {
    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.up.matrices().chain([&self.down.w])
    }
}

impl AttentionWeights {
    fn matrices(&self) -> Vec<&Matrix> {
        self.qkv.matrices().chain([&self.o.w]).collect()
    }
}

impl Layer {
    /// All matrices of the layer.
    pub(super) fn matrices(&self) -> Vec<&Matrix> {
        let mut all: Vec<&Matrix> = match &self.mixer {
            Mixer::Attention(a) => a.matrices(),
            Mixer::Recurrent(r) => r.matrices(),
            Mixer::Both(both) => both.0.matrices().into_iter().chain(both.1.matrices()).collect(),
            Mixer::None => Vec::new(),
        };
        match &self.ffn {
            FeedForward::None => {}
            FeedForward::Dense(ffn) => all.extend(ffn.matrices()),
            FeedForward::Experts(e) => {
                all.extend([&e.router.w].into_iter().chain(&e.gate).chain(&e.up).chain(&e.down));
                if let Some(shared) = &e.shared {
                    all.extend(shared.gate.iter().map(|g| &g.w).chain(shared.ffn.matrices()));
                }
            }
        }
        all
    }
}

impl Weights {
    /// Takes the tensors of a file and assembles the weights.
    ///
    /// # Errors
    /// [`LoadError`] of a tensor that is missing, or whose shape does not fit another's.
    pub(super) fn new(tensors: &mut LoadedTensors, c: &Config) -> Result<Weights, LoadError> {
        let layers = (0..c.n_layer()).map(|i| layer(tensors, c, i)).collect::<Result<Vec<_>, _>>()?;
        // without this norm a block is parallel: all layers must have it, or none
        let lacks_norm = |l: &Layer| l.ffn_norm.is_none() && !matches!(l.ffn, FeedForward::None);
        if layers.iter().any(|l| l.ffn_norm.is_some())
            && let Some(i) = layers.iter().position(lacks_norm)
        {
            return Err(missing(&format!("blk.{i}.ffn_norm.weight")));
        }
        let divisors = |tensors: &mut LoadedTensors, name: &str| tensors.optional(&format!("rope_{name}.weight"));
        let rope_divisors =
            match (divisors(tensors, "freqs"), divisors(tensors, "factors_short"), divisors(tensors, "factors_long")) {
                (Some(all), ..) => RopeDivisors::All(all),
                (None, Some(short), Some(long)) => RopeDivisors::ByContext { short, long },
                _ => RopeDivisors::None,
            };
        Ok(Weights {
            embedding: tensors.matrix("token_embd.weight")?,
            token_types: if tensors.has("token_types.weight") {
                Some(tensors.matrix("token_types.weight")?)
            } else {
                None
            },
            embedding_norm: norm(tensors, "token_embd_norm")?.or(plain(c.arch.plain_embedding_norm, c.n_embd)),
            positions: if c.learned_positions { Some(tensors.matrix("position_embd.weight")?) } else { None },
            layers,
            final_norm: norm(tensors, "output_norm")?.or(plain(c.arch.plain_norms, c.n_embd)),
            output_bias: tensors.optional("output.bias"),
            output: if tensors.has("output.weight") { Some(tensors.matrix("output.weight")?) } else { None },
            rope_divisors,
            projections: projections(tensors, c.n_embd)?,
            classifier: Classifier::load(tensors, c)?,
        })
    }

    /// Bytes of the packed matrices.
    pub fn len_bytes(&self) -> usize {
        let outside = [Some(&self.embedding), self.token_types.as_ref(), self.positions.as_ref(), self.output.as_ref()];
        let layers = self.layers.iter().flat_map(Layer::matrices);
        let heads = self.classifier.iter().flat_map(Classifier::linears);
        let projections = self.projections.iter().chain(heads).map(|projection| &projection.w);
        outside.into_iter().flatten().chain(layers).chain(projections).map(Matrix::len_bytes).sum()
    }

    /// Bytes of the matrices that one decoded token reads: all but embedding tables and experts that are not selected.
    pub fn decode_bytes(&self, c: &Config) -> usize {
        let layer = |layer: &Layer| -> usize {
            let all: usize = layer.matrices().into_iter().map(Matrix::len_bytes).sum();
            let (FeedForward::Experts(e), Some(experts)) = (&layer.ffn, &c.experts) else { return all };
            let choice: usize = e.gate.iter().chain(&e.up).chain(&e.down).map(Matrix::len_bytes).sum();
            all - choice / experts.n * (experts.n - experts.n_used)
        };
        self.output.as_ref().unwrap_or(&self.embedding).len_bytes() + self.layers.iter().map(layer).sum::<usize>()
    }
}

fn missing(name: &str) -> LoadError {
    LoadError::MissingTensor { name: name.into() }
}

pub(super) fn linear(tensors: &mut LoadedTensors, name: &str) -> Result<Linear, LoadError> {
    let (w, bias) = (tensors.matrix(&format!("{name}.weight"))?, tensors.optional(&format!("{name}.bias")));
    match &bias {
        Some(b) if b.len() != w.rows() => Err(tensor_error(
            &format!("{name}.bias"),
            &format!("shape [{}]", b.len()),
            &format!("shape [{}]", w.rows()),
        )),
        _ => Ok(Linear { w, bias }),
    }
}

pub(super) fn norm(tensors: &mut LoadedTensors, name: &str) -> Result<Option<Norm>, LoadError> {
    let bias = tensors.optional(&format!("{name}.bias"));
    let weight = format!("{name}.weight");
    // in files of some families a norm is named without the suffix
    match (tensors.vector(&weight).or_else(|| tensors.vector(name)), bias) {
        (Some((weight, width)), bias) => Ok(Some(Norm { weight, bias, eps: None, width })),
        (None, None) => Ok(None),
        (None, Some(_)) => Err(missing(&weight)),
    }
}

/// A norm without weights: a factor of 1 changes no bit.
fn plain(exists: bool, width: usize) -> Option<Norm> {
    exists.then(|| Norm { weight: vec![1.0; width], bias: None, eps: None, width })
}

/// A norm that must be there.
pub(super) fn required_norm(tensors: &mut LoadedTensors, name: &str) -> Result<Norm, LoadError> {
    norm(tensors, name)?.ok_or_else(|| missing(&format!("{name}.weight")))
}

/// Values with rows and columns exchanged.
pub(super) fn transposed(tensors: &mut LoadedTensors, name: &str) -> Result<Vec<f32>, LoadError> {
    let (values, width) = tensors.vector(name).ok_or_else(|| missing(name))?;
    Ok((0..width).flat_map(|i| values.iter().skip(i).step_by(width).copied()).collect())
}

/// The projections of pooled embeddings; each has as many columns as the one before has rows.
fn projections(tensors: &mut LoadedTensors, mut width: usize) -> Result<Vec<Linear>, LoadError> {
    let mut all = Vec::new();
    for name in projection::NAMES {
        let weight = format!("{name}.weight");
        if !tensors.has(&weight) {
            continue;
        }
        let projection = linear(tensors, name)?;
        let (k, rows) = (projection.w.k(), projection.w.rows());
        if k != width {
            return Err(tensor_error(&weight, &format!("shape [{k}, {rows}]"), &format!("shape [{width}, {rows}]")));
        }
        width = rows;
        all.push(projection);
    }
    Ok(all)
}

fn attention(tensors: &mut LoadedTensors, c: &Config, i: usize) -> Result<AttentionWeights, LoadError> {
    let name = |part: &str| format!("blk.{i}.{part}");
    let mut qkv = if tensors.has(&name("attn_qkv.weight")) {
        let (q, kv) = (c.q_stride(), c.n_head_kv * c.head_dim);
        LinearGroup::fused(linear(tensors, &name("attn_qkv"))?, &[q, kv, kv])
    } else {
        LinearGroup::separate(
            ["attn_q", "attn_k", "attn_v"].map(|p| linear(tensors, &name(p))).into_iter().collect::<Result<_, _>>()?,
        )
    };
    if tensors.has(&name("attn_gate.weight")) {
        qkv.push(linear(tensors, &name("attn_gate"))?);
    }
    let head_norm = || plain(c.plain_head_norms && c.layers[i].rope.is_some(), c.head_dim);
    Ok(AttentionWeights {
        qkv,
        attn_sub_norm: norm(tensors, &name("attn_sub_norm"))?,
        sinks: tensors.optional(&name("attn_sinks.weight")),
        q_norm: norm(tensors, &name("attn_q_norm"))?.or_else(head_norm),
        k_norm: norm(tensors, &name("attn_k_norm"))?.or_else(head_norm),
        o: linear(tensors, &name("attn_output"))?,
    })
}

fn mixer(tensors: &mut LoadedTensors, c: &Config, i: usize) -> Result<Mixer, LoadError> {
    let kind = c.layers[i].mixer;
    let recurrent = match c.recurrent.as_ref().filter(|_| kind.is_recurrent()) {
        Some(config) => Some(Recurrent::load(config, tensors, i)?),
        None => None,
    };
    let attention = if kind.has_attention() { Some(attention(tensors, c, i)?) } else { None };
    Ok(match (attention, recurrent) {
        (Some(a), Some(r)) => Mixer::Both(Box::new((a, r))),
        (Some(a), None) => Mixer::Attention(Box::new(a)),
        (None, Some(r)) => Mixer::Recurrent(r),
        (None, None) => Mixer::None,
    })
}

fn layer(tensors: &mut LoadedTensors, c: &Config, i: usize) -> Result<Layer, LoadError> {
    let name = |part: &str| format!("blk.{i}.{part}");
    let mixer = mixer(tensors, c, i)?;
    let mut attn_norm = norm(tensors, &name("attn_norm"))?.or(plain(c.arch.plain_norms, c.n_embd));
    let mut ffn_norm = norm(tensors, &name("ffn_norm"))?.or(plain(c.arch.plain_norms, c.n_embd));
    if c.arch.swapped_norms && ffn_norm.is_some() {
        core::mem::swap(&mut attn_norm, &mut ffn_norm);
    }
    let ffn = match &c.experts {
        _ if !c.layers[i].has_ffn => FeedForward::None,
        Some(e) if tensors.has(&name("ffn_gate_inp.weight")) => {
            FeedForward::Experts(Box::new(experts(tensors, c, e.n, &name)?))
        }
        _ => FeedForward::Dense(Box::new(dense(tensors, c.n_ff, "", &name)?)),
    };
    let is_partial = matches!(mixer, Mixer::None) || matches!(ffn, FeedForward::None);
    if matches!(mixer, Mixer::None) && ffn_norm.is_none() {
        ffn_norm = attn_norm.take();
    }
    // a block is parallel if it has one norm for both sub-layers, or if the metadata says so
    let has_one_norm = attn_norm.is_some() && ffn_norm.is_none() && !is_partial;
    let parallel = !c.arch.post_norm && (c.parallel_residual || has_one_norm);
    if parallel && attn_norm.is_none() {
        return Err(missing(&name("attn_norm.weight")));
    }
    for part in ["post_attention_norm.weight", "post_ffw_norm.weight"].map(name) {
        if parallel && tensors.has(&part) {
            let found = "a norm after a sub-layer of a parallel block";
            return Err(tensor_error(&part, found, "no such norm where attention and feed-forward are parallel"));
        }
    }
    let order = match (norm(tensors, &name("attn_output_norm"))?, norm(tensors, &name("layer_output_norm"))?) {
        (Some(attn), Some(ffn)) => ResidualOrder::PostNorm([attn, ffn]),
        _ if parallel => ResidualOrder::Parallel,
        _ => ResidualOrder::Serial,
    };
    let with_eps = |norm: Norm| Norm { eps: c.arch.post_norm_eps, ..norm };
    Ok(Layer {
        order,
        mixer,
        second_norm: norm(tensors, &name("attn_norm_2"))?,
        post_attn_norm: norm(tensors, &name("post_attention_norm"))?.map(with_eps),
        ffn,
        post_ffn_norm: norm(tensors, &name("post_ffw_norm"))?.map(with_eps),
        attn_norm,
        ffn_norm,
    })
}

/// A dense feed-forward whose tensor names end in `suffix`.
fn dense(
    tensors: &mut LoadedTensors,
    n_ff: usize,
    suffix: &str,
    name: &dyn Fn(&str) -> String,
) -> Result<Dense, LoadError> {
    let gate = name(&format!("ffn_gate{suffix}"));
    let has_gate = tensors.has(&format!("{gate}.weight"));
    let up_name = name(&format!("ffn_up{suffix}"));
    let up = linear(tensors, &up_name)?;
    let fused = up.w.rows() == 2 * n_ff;
    let up = match (has_gate, fused) {
        (true, false) => LinearGroup::separate(vec![linear(tensors, &gate)?, up]),
        (false, true) => LinearGroup::fused(up, &[n_ff, n_ff]),
        (false, false) => LinearGroup::separate(vec![up]),
        (true, true) => {
            let found = format!("{} rows beside `{gate}.weight`", 2 * n_ff);
            return Err(tensor_error(&format!("{up_name}.weight"), &found, &format!("{n_ff} rows")));
        }
    };
    let sub_norm = if suffix.is_empty() { norm(tensors, &name("ffn_sub_norm"))? } else { None };
    Ok(Dense { up, sub_norm, down: linear(tensors, &name(&format!("ffn_down{suffix}")))? })
}

fn experts(
    tensors: &mut LoadedTensors,
    c: &Config,
    n: usize,
    name: &dyn Fn(&str) -> String,
) -> Result<Experts, LoadError> {
    let mut stack = |part: &str| match tensors.matrices(&name(&format!("{part}_exps.weight"))) {
        Some(all) => Ok(all),
        None => (0..n).map(|i| tensors.matrix(&name(&format!("{part}.{i}.weight")))).collect(),
    };
    let gate = if !c.arch.plain_experts { stack("ffn_gate")? } else { Vec::new() };
    let (up, down) = (stack("ffn_up")?, stack("ffn_down")?);
    let biases = ["gate", "up", "down"].map(|part| tensors.optional(&name(&format!("ffn_{part}_exps.bias"))));
    let shared_gate = name("ffn_gate_inp_shexp");
    let shared = if tensors.has(&name("ffn_up_shexp.weight")) {
        let gate = match tensors.has(&format!("{shared_gate}.weight")) {
            true => Some(linear(tensors, &shared_gate)?),
            false => None,
        };
        // a shared expert is never fused, so its width must not match `2 * n_ff`
        Some(SharedExpert { gate, ffn: dense(tensors, usize::MAX / 2, "_shexp", name)? })
    } else if c.arch.dense_beside_experts && tensors.has(&name("ffn_up.weight")) {
        Some(SharedExpert { gate: None, ffn: dense(tensors, c.n_ff, "", name)? })
    } else {
        None
    };
    let input_norm = norm(tensors, &name("ffn_norm_exps"))?;
    let selection_bias = tensors.optional(&name("exp_probs_b.bias"));
    Ok(Experts {
        router: linear(tensors, &name("ffn_gate_inp"))?,
        selection_bias,
        gate,
        up,
        down,
        input_norm,
        biases,
        shared,
    })
}
