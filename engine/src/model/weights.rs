//! Weights of a model, put together from its tensors.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::config::Config;
use super::heads;
use super::loader::Parts;
use super::roles::tensor_error;
use crate::error::LoadError;
use crate::kernels::panel::{Matrix, PANEL};

/// A matrix and its bias: `y = w x + b`.
pub struct Linear {
    /// (rows, k) weights.
    pub w: Matrix,
    /// One number per row.
    pub bias: Option<Vec<f32>>,
}

/// Linears of one input, whose outputs stand side by side in a row, each in whole panels. A fused matrix gives several
/// parts.
pub struct Stack {
    /// The linears, and where the output of each starts.
    pub linears: Vec<(Linear, usize)>,
    /// Where each part starts: queries, keys and values; or gate and up; or up alone.
    pub parts: Vec<usize>,
    /// Floats of a row.
    pub stride: usize,
}

/// A norm of vectors, or of heads.
pub struct Norm {
    /// A factor for each element; where heads have norms of their own, for each element of all heads.
    pub weight: Vec<f32>,
    /// Added last.
    pub bias: Option<Vec<f32>>,
    /// Elements that are normed together.
    pub width: usize,
}

/// A feed-forward: `down(act(gate x) * up x)`, or `down(act(up x))`.
pub struct Dense {
    /// Gate and up, or up alone.
    pub up: Stack,
    /// (n_embd, n_ff)
    pub down: Linear,
}

/// Experts: feed-forwards of which each token goes through a few.
pub struct Experts {
    /// (n_expert, n_embd)
    pub router: Linear,
    /// (n_ff, n_embd), one per expert.
    pub gate: Vec<Matrix>,
    /// (n_ff, n_embd), one per expert.
    pub up: Vec<Matrix>,
    /// (n_embd, n_ff), one per expert.
    pub down: Vec<Matrix>,
    /// The one that all tokens go through.
    pub shared: Option<SharedExpert>,
}

/// An expert that all tokens go through.
pub struct SharedExpert {
    /// (1, n_embd): its output is multiplied by the logistic function of this product.
    pub gate: Option<Linear>,
    /// The feed-forward.
    pub ffn: Dense,
}

/// What a layer has after attention.
pub enum FeedForward {
    /// One for all tokens.
    Dense(Dense),
    /// A choice for each token.
    Experts(Box<Experts>),
}

/// Weights of one layer.
pub struct Layer {
    /// Before attention (n_embd).
    pub attn_norm: Option<Norm>,
    /// Queries (n_head * head_dim, n_embd), keys and values (n_head_kv * head_dim, n_embd).
    pub qkv: Stack,
    /// Norm of query heads.
    pub q_norm: Option<Norm>,
    /// Norm of key heads.
    pub k_norm: Option<Norm>,
    /// Back to the residual stream (n_embd, n_head * head_dim).
    pub o: Linear,
    /// After attention (n_embd).
    pub post_attn_norm: Option<Norm>,
    /// Before the feed-forward (n_embd).
    pub ffn_norm: Option<Norm>,
    /// The feed-forward.
    pub ffn: FeedForward,
    /// After the feed-forward (n_embd).
    pub post_ffn_norm: Option<Norm>,
    /// The order of its steps.
    pub order: Order,
}

/// In which order a layer's steps and norms come.
pub enum Order {
    /// Attention, then the feed-forward on what it added.
    Serial,
    /// Both read the same stream, side by side.
    Parallel,
    /// Serial, each sum normed by one of these (n_embd), and nothing before.
    PostNorm([Norm; 2]),
}

/// Divisors of the rotary frequencies (n_rot / 2).
pub enum RopeDivisors {
    /// None.
    None,
    /// For contexts of any length.
    All(Vec<f32>),
    /// For contexts up to the original length, and for longer ones.
    ByContext {
        /// Up to the original length.
        short: Vec<f32>,
        /// Longer ones.
        long: Vec<f32>,
    },
}

/// All weights of a model.
pub struct Weights {
    /// (n_vocab, n_embd)
    pub embedding: Matrix,
    /// (kinds of text, n_embd): the first row is added to every token.
    pub token_types: Option<Matrix>,
    /// (n_ctx_train, n_embd), where positions are embedded.
    pub positions: Option<Matrix>,
    /// Of the sum of embeddings (n_embd).
    pub embedding_norm: Option<Norm>,
    /// The layers.
    pub layers: Vec<Layer>,
    /// After the layers (n_embd).
    pub final_norm: Option<Norm>,
    /// (n_vocab, n_embd); `None` where the embedding serves.
    pub output: Option<Matrix>,
    /// One number per logit.
    pub output_bias: Option<Vec<f32>>,
    /// Divisors of the rotary frequencies.
    pub rope_divisors: RopeDivisors,
    /// What makes a pooled state (n_embd) into a text's vector, one after the other.
    pub heads: Vec<Linear>,
}

/// Rows of an output in whole panels.
pub(super) fn padded(rows: usize) -> usize {
    rows.next_multiple_of(PANEL)
}

impl Stack {
    /// Linears side by side, a part each.
    fn of(linears: Vec<Linear>) -> Stack {
        let mut stack = Stack { linears: Vec::with_capacity(linears.len()), parts: Vec::new(), stride: 0 };
        for linear in linears {
            stack.parts.push(stack.stride);
            let rows = padded(linear.w.rows());
            stack.linears.push((linear, stack.stride));
            stack.stride += rows;
        }
        stack
    }

    /// One linear whose rows are parts of these lengths.
    fn fused(linear: Linear, rows: &[usize]) -> Stack {
        let starts = rows.iter().scan(0, |at, n| {
            *at += n;
            Some(*at - n)
        });
        Stack { parts: starts.collect(), ..Stack::of(vec![linear]) }
    }

    /// Their matrices.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.linears.iter().map(|(l, _)| &l.w)
    }
}

impl Dense {
    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.up.matrices().chain([&self.down.w])
    }
}

impl Layer {
    /// Every matrix.
    pub(super) fn matrices(&self) -> Vec<&Matrix> {
        let mut all: Vec<&Matrix> = self.qkv.matrices().chain([&self.o.w]).collect();
        match &self.ffn {
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
    /// Puts the tensors of a file in their places.
    ///
    /// # Errors
    /// A tensor that is missing, or that does not go with another.
    pub(super) fn new(parts: &mut Parts, c: &Config) -> Result<Weights, LoadError> {
        let layers = (0..c.n_layer()).map(|i| layer(parts, c, i)).collect::<Result<Vec<_>, _>>()?;
        // without it a layer means something else: all lack it, or none
        if layers.iter().any(|l| l.ffn_norm.is_some())
            && let Some(i) = layers.iter().position(|l| l.ffn_norm.is_none())
        {
            return Err(missing(&format!("blk.{i}.ffn_norm.weight")));
        }
        let divisors = |parts: &mut Parts, name: &str| parts.optional(&format!("rope_{name}.weight"));
        let rope_divisors =
            match (divisors(parts, "freqs"), divisors(parts, "factors_short"), divisors(parts, "factors_long")) {
                (Some(all), ..) => RopeDivisors::All(all),
                (None, Some(short), Some(long)) => RopeDivisors::ByContext { short, long },
                _ => RopeDivisors::None,
            };
        Ok(Weights {
            embedding: parts.matrix("token_embd.weight")?,
            token_types: if parts.has("token_types.weight") { Some(parts.matrix("token_types.weight")?) } else { None },
            embedding_norm: norm(parts, "token_embd_norm")?,
            positions: if c.arch.rope.is_none() { Some(parts.matrix("position_embd.weight")?) } else { None },
            layers,
            final_norm: norm(parts, "output_norm")?,
            output_bias: parts.optional("output.bias"),
            output: if parts.has("output.weight") { Some(parts.matrix("output.weight")?) } else { None },
            rope_divisors,
            heads: heads(parts, c.n_embd)?,
        })
    }

    /// Bytes of the packed matrices.
    pub fn len_bytes(&self) -> usize {
        let outside = [Some(&self.embedding), self.token_types.as_ref(), self.positions.as_ref(), self.output.as_ref()];
        let layers = self.layers.iter().flat_map(Layer::matrices);
        let heads = self.heads.iter().map(|head| &head.w);
        outside.into_iter().flatten().chain(layers).chain(heads).map(Matrix::len_bytes).sum()
    }

    /// Bytes of the matrices that one decoded token reads whole: all but tables of rows and experts not chosen.
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

fn linear(parts: &mut Parts, name: &str) -> Result<Linear, LoadError> {
    let (w, bias) = (parts.matrix(&format!("{name}.weight"))?, parts.optional(&format!("{name}.bias")));
    match &bias {
        Some(b) if b.len() != w.rows() => Err(tensor_error(
            &format!("{name}.bias"),
            &format!("shape [{}]", b.len()),
            &format!("shape [{}]", w.rows()),
        )),
        _ => Ok(Linear { w, bias }),
    }
}

fn norm(parts: &mut Parts, name: &str) -> Result<Option<Norm>, LoadError> {
    let bias = parts.optional(&format!("{name}.bias"));
    let weight = format!("{name}.weight");
    match (parts.vector(&weight), bias) {
        (Some((weight, width)), bias) => Ok(Some(Norm { weight, bias, width })),
        (None, None) => Ok(None),
        (None, Some(_)) => Err(missing(&weight)),
    }
}

/// Heads, each of as many columns as the one before has rows.
fn heads(parts: &mut Parts, mut width: usize) -> Result<Vec<Linear>, LoadError> {
    let mut all = Vec::new();
    for name in heads::NAMES {
        let weight = format!("{name}.weight");
        if !parts.has(&weight) {
            continue;
        }
        let head = linear(parts, name)?;
        let (k, rows) = (head.w.k(), head.w.rows());
        if k != width {
            return Err(tensor_error(&weight, &format!("shape [{k}, {rows}]"), &format!("shape [{width}, {rows}]")));
        }
        width = rows;
        all.push(head);
    }
    Ok(all)
}

fn layer(parts: &mut Parts, c: &Config, i: usize) -> Result<Layer, LoadError> {
    let name = |part: &str| format!("blk.{i}.{part}");
    let qkv = if parts.has(&name("attn_qkv.weight")) {
        let (q, kv) = (c.n_head * c.head_dim, c.n_head_kv * c.head_dim);
        Stack::fused(linear(parts, &name("attn_qkv"))?, &[q, kv, kv])
    } else {
        Stack::of(
            ["attn_q", "attn_k", "attn_v"].map(|p| linear(parts, &name(p))).into_iter().collect::<Result<_, _>>()?,
        )
    };
    let attn_norm = norm(parts, &name("attn_norm"))?;
    let ffn_norm = norm(parts, &name("ffn_norm"))?;
    let ffn = match &c.experts {
        Some(e) if parts.has(&name("ffn_gate_inp.weight")) => {
            FeedForward::Experts(Box::new(experts(parts, e.n, &name)?))
        }
        _ => FeedForward::Dense(dense(parts, c.n_ff, "", &name)?),
    };
    // one norm before both, or a key that says so
    let parallel = !c.arch.post_norm && (c.parallel_residual || (attn_norm.is_some() && ffn_norm.is_none()));
    if parallel && attn_norm.is_none() {
        return Err(missing(&name("attn_norm.weight")));
    }
    for part in ["post_attention_norm.weight", "post_ffw_norm.weight"].map(name) {
        if parallel && parts.has(&part) {
            let found = "a norm after a sub-layer of a parallel block";
            return Err(tensor_error(&part, found, "no such norm where attention and feed-forward are parallel"));
        }
    }
    let order = match (norm(parts, &name("attn_output_norm"))?, norm(parts, &name("layer_output_norm"))?) {
        (Some(attn), Some(ffn)) => Order::PostNorm([attn, ffn]),
        _ if parallel => Order::Parallel,
        _ => Order::Serial,
    };
    Ok(Layer {
        order,
        qkv,
        q_norm: norm(parts, &name("attn_q_norm"))?,
        k_norm: norm(parts, &name("attn_k_norm"))?,
        o: linear(parts, &name("attn_output"))?,
        post_attn_norm: norm(parts, &name("post_attention_norm"))?,
        ffn,
        post_ffn_norm: norm(parts, &name("post_ffw_norm"))?,
        attn_norm,
        ffn_norm,
    })
}

/// A feed-forward of which the parts' names end in `suffix`.
fn dense(parts: &mut Parts, n_ff: usize, suffix: &str, name: &dyn Fn(&str) -> String) -> Result<Dense, LoadError> {
    let gate = name(&format!("ffn_gate{suffix}"));
    let has_gate = parts.has(&format!("{gate}.weight"));
    let up_name = name(&format!("ffn_up{suffix}"));
    let up = linear(parts, &up_name)?;
    let fused = up.w.rows() == 2 * n_ff;
    let up = match (has_gate, fused) {
        (true, false) => Stack::of(vec![linear(parts, &gate)?, up]),
        (false, true) => Stack::fused(up, &[n_ff, n_ff]),
        (false, false) => Stack::of(vec![up]),
        (true, true) => {
            let found = format!("{} rows beside `{gate}.weight`", 2 * n_ff);
            return Err(tensor_error(&format!("{up_name}.weight"), &found, &format!("{n_ff} rows")));
        }
    };
    Ok(Dense { up, down: linear(parts, &name(&format!("ffn_down{suffix}")))? })
}

fn experts(parts: &mut Parts, n: usize, name: &dyn Fn(&str) -> String) -> Result<Experts, LoadError> {
    let mut stack = |part: &str| match parts.matrices(&name(&format!("{part}_exps.weight"))) {
        Some(all) => Ok(all),
        None => (0..n).map(|i| parts.matrix(&name(&format!("{part}.{i}.weight")))).collect(),
    };
    let (gate, up, down) = (stack("ffn_gate")?, stack("ffn_up")?, stack("ffn_down")?);
    let shared_gate = name("ffn_gate_inp_shexp");
    let shared = if parts.has(&name("ffn_up_shexp.weight")) {
        let gate = match parts.has(&format!("{shared_gate}.weight")) {
            true => Some(linear(parts, &shared_gate)?),
            false => None,
        };
        // never fused: its width is not compared
        Some(SharedExpert { gate, ffn: dense(parts, usize::MAX / 2, "_shexp", name)? })
    } else {
        None
    };
    Ok(Experts { router: linear(parts, &name("ffn_gate_inp"))?, gate, up, down, shared })
}
