//! Weights of experts.

use alloc::boxed::Box;
use alloc::format;
use alloc::vec::Vec;

use super::ExpertsConfig;
use crate::error::LoadError;
use crate::kernels::panel::Matrix;
use crate::math::sqrt;
use crate::model::family::ExpertInput;
use crate::model::ffn::config::LayerFfn;
use crate::model::ffn::dense::{DENSE, Dense, SHARED};
use crate::model::linear::{Linear, Norm};
use crate::model::tensors::{Declared, LinearName, Loaded, Name, NormName, Shape, matrix, vector};

pub(crate) const ROUTER: LinearName = LinearName("ffn_gate_inp");
const ROUTER_SCALE: Name = Name::whole("ffn_gate_inp.scale");
const SELECTION_BIAS: Name = Name::bias("exp_probs_b");
const BY_TOKEN: Name = Name::weight("ffn_gate_tid2eid");
/// Gate, up and down, the last part of older files' names too, which have a tensor per expert.
const STEMS: [&str; 3] = ["ffn_gate", "ffn_up", "ffn_down"];
const GATE_EXPERTS: Name = Name::weight("ffn_gate_exps");
pub(crate) const UP_EXPERTS: Name = Name::weight("ffn_up_exps");
const DOWN_EXPERTS: Name = Name::weight("ffn_down_exps");
pub(crate) const FUSED_EXPERTS: Name = Name::weight("ffn_gate_up_exps");
const BIASES: [Name; 3] = [Name::bias("ffn_gate_exps"), Name::bias("ffn_up_exps"), Name::bias("ffn_down_exps")];
const OUTPUT_SCALE: Name = Name::whole("ffn_down_exps.scale");
const ADJUGATES: [Name; 3] =
    [Name::weight("ffn_gate_chexps"), Name::weight("ffn_up_chexps"), Name::weight("ffn_down_chexps")];
const LATENT_DOWN: LinearName = LinearName("ffn_latent_down");
const LATENT_NORM: NormName = NormName("ffn_latent_norm");
const LATENT_UP: LinearName = LinearName("ffn_latent_up");
const LAYER_NORM: NormName = NormName("ffn_norm_exps");
const RESIDUAL_NORM: NormName = NormName("pre_ffw_norm_2");
const DENSE_POST_NORM: NormName = NormName("post_ffw_norm_1");
const POST_NORM: NormName = NormName("post_ffw_norm_2");
const SHARED_GATE: LinearName = LinearName("ffn_gate_inp_shexp");

const ONE_KIND: &str = "either a dense feed-forward or experts";
const ONE_LAYOUT: &str = "either the fused or the separate tensors";

/// Mixture of experts.
pub(crate) struct Experts {
    /// (n_expert, n_embd)
    pub(super) router: Linear,
    /// The experts of each token (n_vocab, n_used), where the router does not select them.
    pub(super) by_token: Option<Vec<u32>>,
    /// Added to the scores by which experts are selected (n_expert).
    pub(super) selection_bias: Option<Vec<f32>>,
    /// The experts.
    pub(super) matrices: ExpertMatrices,
    /// Adjugate experts, which groups of experts share.
    pub(super) adjugates: Option<ExpertMatrices>,
    /// Projections to and from the latent space that experts work in (width, n_embd), (n_embd, width).
    pub(super) latent: Option<Box<[Linear; 2]>>,
    /// Norm of the experts' sum in that space (width).
    pub(super) latent_norm: Option<Norm>,
    /// Norm of the experts' input, where that is not the feed-forward's (n_embd).
    pub(super) input_norm: Option<Norm>,
    /// Norm of the router's input, where that is not the experts' (n_embd).
    pub(super) router_norm: Option<Norm>,
    /// Norm after the experts (n_embd).
    pub(super) post_norm: Option<Norm>,
    /// Factor on the output of each expert.
    pub(super) output_scale: Option<Vec<f32>>,
    /// An expert that all tokens go through.
    pub(super) shared: Option<SharedExpert>,
}

/// Experts that are selected for each token.
pub(super) struct ExpertMatrices {
    /// (n_ff, width), one per expert; empty without gates.
    pub(super) gate: Vec<Matrix>,
    /// (n_ff, width), one per expert.
    pub(super) up: Vec<Matrix>,
    /// (width, n_ff), one per expert.
    pub(super) down: Vec<Matrix>,
    /// Biases of gate, up and down: one row per expert.
    pub(super) biases: [Option<Vec<f32>>; 3],
}

impl ExpertMatrices {
    fn all(&self) -> impl Iterator<Item = &Matrix> {
        self.gate.iter().chain(&self.up).chain(&self.down)
    }

    /// Bytes that a token with `n_used` experts does not read.
    fn unused_bytes(&self, n_used: usize) -> usize {
        let (n, bytes) = (self.up.len(), self.all().map(Matrix::len_bytes).sum::<usize>());
        bytes / n.max(1) * n.saturating_sub(n_used)
    }
}

/// An expert that all tokens go through.
pub(super) struct SharedExpert {
    /// (1, n_embd): the expert's output is multiplied by the sigmoid of this product.
    pub(super) gate: Option<Linear>,
    /// Its feed-forward.
    pub(super) ffn: Dense,
    /// Norm after it (n_embd).
    pub(super) post_norm: Option<Norm>,
}

impl Experts {
    /// Declares the tensors of a layer of a model of width `d` and `n_vocab` tokens.
    pub(crate) fn tensors(t: &mut Declared<'_>, c: &ExpertsConfig, l: &LayerFfn, (d, n_vocab): (usize, usize)) {
        t.required(ROUTER.weight(), matrix(c.n, d));
        t.optional(ROUTER.bias(), vector(c.n));
        if l.routes_by_token {
            t.required(BY_TOKEN, Shape::Integers { width: c.n_used, rows: n_vocab });
        } else {
            t.optional(SELECTION_BIAS, vector(c.n));
        }
        c.declare_matrices(t, d);
        for (bias, width) in BIASES.into_iter().zip([c.n_ff, c.n_ff, c.width]) {
            t.optional(bias, Shape::Rows { n: c.n, width });
        }
        t.optional(OUTPUT_SCALE, vector(c.n));
        if let Some(adjugates) = &c.adjugates {
            let (n, n_ff) = (c.n_adjugates(), adjugates.n_ff);
            let [gate, up, down] = ADJUGATES;
            t.required(gate, Shape::Matrices { n, rows: n_ff, k: d });
            t.required(up, Shape::Matrices { n, rows: n_ff, k: d });
            t.required(down, Shape::Matrices { n, rows: d, k: n_ff });
        }
        t.optional(LATENT_DOWN.weight(), matrix(c.width, d));
        t.optional(LATENT_NORM.weight(), vector(c.width));
        t.optional(LATENT_UP.weight(), matrix(d, c.width));
        match c.input {
            ExpertInput::Layer => t.optional(LAYER_NORM.weight(), vector(d)),
            ExpertInput::Residual => {
                for name in [ROUTER_SCALE, RESIDUAL_NORM.weight(), DENSE_POST_NORM.weight(), POST_NORM.weight()] {
                    t.required(name, vector(d));
                }
            }
            ExpertInput::Same | ExpertInput::LayerForRouter => {}
        }
        t.optional(SHARED_GATE.weight(), matrix(1, d));
        t.all_optional(|t| Dense::tensors(t, &SHARED, (d, c.n_ff_shared)));
        match c.dense_beside {
            true => t.all_optional(|t| Dense::tensors(t, &DENSE, (d, l.width))),
            false => Dense::exclude(t, &DENSE, (d, l.width), (ROUTER.weight(), ONE_KIND)),
        }
    }

    /// Takes the tensors of a layer of a model of width `d`.
    pub(crate) fn load(t: &mut Loaded<'_>, c: &ExpertsConfig, l: &LayerFfn, d: usize) -> Result<Experts, LoadError> {
        let fused = t.matrices(FUSED_EXPERTS);
        let mut stack = |name: Name, stem: &str| match t.matrices(name) {
            Some(all) => Ok(all),
            None => (0..c.n).map(|i| t.indexed(stem, i)).collect(),
        };
        let [gate_stem, up_stem, down_stem] = STEMS;
        let is_separate = fused.is_none() && c.is_gated;
        let gate = if is_separate { stack(GATE_EXPERTS, gate_stem)? } else { Vec::new() };
        let up = if let Some(fused) = fused { fused } else { stack(UP_EXPERTS, up_stem)? };
        let down = stack(DOWN_EXPERTS, down_stem)?;
        let biases = BIASES.map(|bias| t.optional(bias));
        let adjugates = match c.adjugates {
            Some(_) => {
                let [gate, up, down] = ADJUGATES.map(|name| t.required_matrices(name));
                Some(ExpertMatrices { gate: gate?, up: up?, down: down?, biases: Default::default() })
            }
            None => None,
        };
        let input_norm = match t.norm(LAYER_NORM)? {
            None => t.norm(RESIDUAL_NORM)?,
            norm => norm,
        };
        let router_norm = t.optional(ROUTER_SCALE).map(|mut weight| {
            let factor = 1.0 / sqrt(d as f32);
            weight.iter_mut().for_each(|w| *w *= factor);
            Norm { weight, bias: None, eps: None, width: d }
        });
        let by_token = match t.optional(BY_TOKEN) {
            Some(ids) => Some(expert_ids(t, &ids, c.n)?),
            None => None,
        };
        let latent = if c.width != d || t.has(LATENT_DOWN.weight()) {
            Some(Box::new([t.linear(LATENT_DOWN)?, t.linear(LATENT_UP)?]))
        } else {
            None
        };
        Ok(Experts {
            shared: SharedExpert::load(t, c, l)?,
            by_token,
            selection_bias: t.optional(SELECTION_BIAS),
            router: t.linear(ROUTER)?,
            matrices: ExpertMatrices { gate, up, down, biases },
            adjugates,
            latent,
            latent_norm: t.norm(LATENT_NORM)?,
            input_norm,
            router_norm,
            post_norm: t.norm(POST_NORM)?,
            output_scale: t.optional(OUTPUT_SCALE),
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        let mut all: Vec<&Matrix> = [&self.router.w].into_iter().chain(self.matrices.all()).collect();
        all.extend(self.adjugates.iter().flat_map(ExpertMatrices::all));
        all.extend(self.latent.iter().flat_map(|latent| latent.iter().map(|l| &l.w)));
        if let Some(shared) = &self.shared {
            all.extend(shared.gate.iter().map(|g| &g.w).chain(shared.ffn.matrices()));
        }
        all
    }

    /// Bytes that a token does not read.
    pub(crate) fn unused_bytes(&self, c: &ExpertsConfig) -> usize {
        [&self.matrices].into_iter().chain(&self.adjugates).map(|m| m.unused_bytes(c.n_used)).sum()
    }
}

impl SharedExpert {
    fn load(t: &mut Loaded<'_>, c: &ExpertsConfig, l: &LayerFfn) -> Result<Option<SharedExpert>, LoadError> {
        if t.has(SHARED.up.weight()) {
            let gate = t.optional_linear(SHARED_GATE)?;
            // a shared expert is never fused
            return Ok(Some(SharedExpert { gate, ffn: Dense::load(t, &SHARED, None)?, post_norm: None }));
        }
        if !c.dense_beside || !t.has(DENSE.up.weight()) {
            return Ok(None);
        }
        let ffn = Dense::load(t, &DENSE, Some(l.width))?;
        Ok(Some(SharedExpert { gate: None, ffn, post_norm: t.norm(DENSE_POST_NORM)? }))
    }
}

impl ExpertsConfig {
    fn declare_matrices(&self, t: &mut Declared<'_>, d: usize) {
        let (n, input) = (self.n, Shape::Matrices { n: self.n, rows: self.n_ff, k: self.width });
        let is_fused = t.has(FUSED_EXPERTS);
        let fused = Shape::Matrices { n, rows: 2 * self.n_ff, k: d };
        if is_fused {
            t.required(FUSED_EXPERTS, fused);
        } else {
            t.optional(FUSED_EXPERTS, fused);
        }
        let rule = (FUSED_EXPERTS, ONE_LAYOUT);
        let inputs = [(UP_EXPERTS, STEMS[1]), (GATE_EXPERTS, STEMS[0])];
        for (name, stem) in inputs.into_iter().take(if self.is_gated { 2 } else { 1 }) {
            match is_fused {
                true => t.excluded(name, input, rule),
                false => self.declare_one(t, (name, stem), input, matrix(self.n_ff, self.width)),
            }
        }
        let down = Shape::Matrices { n, rows: self.width, k: self.n_ff };
        self.declare_one(t, (DOWN_EXPERTS, STEMS[2]), down, matrix(self.width, self.n_ff));
    }

    /// The tensor of all experts, or one per expert.
    fn declare_one(&self, t: &mut Declared<'_>, (name, stem): (Name, &str), all: Shape, one: Shape) {
        if t.has(name) || !t.has_indexed(stem, self.n) {
            t.required(name, all);
        }
        t.indexed(stem, self.n, one, (ROUTER.weight(), ONE_KIND));
    }
}

/// Numbers of experts, all below `n`.
fn expert_ids(t: &Loaded<'_>, ids: &[f32], n: usize) -> Result<Vec<u32>, LoadError> {
    match ids.iter().find(|id| !(0.0..n as f32).contains(*id)) {
        Some(id) => Err(t.error(BY_TOKEN, &format!("expert {id}"), &format!("0 to {}", n - 1))),
        None => Ok(ids.iter().map(|id| *id as u32).collect()),
    }
}
