//! Dense feed-forwards: `down(act(gate x) * up x)`, or `down(act(up x))`.

use alloc::format;
use alloc::vec;

use super::config::{FfnConfig, LayerFfn};
use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::norm::sparsify;
use crate::kernels::panel::Matrix;
use crate::model::family::Swiglu;
use crate::model::linear::{Linear, LinearGroup, Norm};
use crate::model::memory::{Size, Stack};
use crate::model::pass::{Pass, SubLayerRows};
use crate::model::rows::FfnActivation;
use crate::model::tensors::{Declared, LinearName, Loaded, Name, NormName, matrix, vector};

/// Names of a dense feed-forward.
pub(crate) struct DenseNames {
    gate: LinearName,
    pub(crate) up: LinearName,
    down: LinearName,
    /// Shared experts have neither such a norm nor biases.
    sub_norm: Option<NormName>,
}

pub(crate) const UP: LinearName = LinearName("ffn_up");
pub(crate) const DENSE: DenseNames = DenseNames {
    gate: LinearName("ffn_gate"),
    up: UP,
    down: LinearName("ffn_down"),
    sub_norm: Some(NormName("ffn_sub_norm")),
};
pub(crate) const SHARED: DenseNames = DenseNames {
    gate: LinearName("ffn_gate_shexp"),
    up: LinearName("ffn_up_shexp"),
    down: LinearName("ffn_down_shexp"),
    sub_norm: None,
};

/// A dense feed-forward.
pub(crate) struct Dense {
    /// Gate and up, or up without a gate.
    up: LinearGroup,
    /// Norm before the down projection (n_ff).
    sub_norm: Option<Norm>,
    /// (n_embd, n_ff)
    down: Linear,
}

impl Dense {
    /// Declares the tensors of a feed-forward of a model of width `d`; `up` may have the rows of the gate too.
    pub(crate) fn tensors(t: &mut Declared<'_>, names: &DenseNames, (d, n_ff): (usize, usize)) {
        let rows = move |dim: u64| if dim == 2 * n_ff as u64 { 2 * n_ff } else { n_ff };
        t.optional(names.gate.weight(), matrix(n_ff, d));
        t.required_by(names.up.weight(), move |dims| matrix(rows(dims[1]), d));
        t.required(names.down.weight(), matrix(d, n_ff));
        if let Some(norm) = names.sub_norm {
            t.optional(norm.weight(), vector(n_ff));
            t.optional(names.gate.bias(), vector(n_ff));
            t.optional_by(names.up.bias(), move |dims| vector(rows(dims[0])));
            t.optional(names.down.bias(), vector(d));
        }
    }

    /// The same where another tensor takes their place, by this rule.
    pub(crate) fn exclude(
        t: &mut Declared<'_>,
        names: &DenseNames,
        (d, n_ff): (usize, usize),
        by: (Name, &'static str),
    ) {
        let rows = move |dim: u64| if dim == 2 * n_ff as u64 { 2 * n_ff } else { n_ff };
        t.excluded(names.gate.weight(), matrix(n_ff, d), by);
        t.excluded(names.gate.bias(), vector(n_ff), by);
        t.excluded_by(names.up.weight(), move |dims| matrix(rows(dims[1]), d), by);
        t.excluded_by(names.up.bias(), move |dims| vector(rows(dims[0])), by);
        t.excluded(names.down.weight(), matrix(d, n_ff), by);
        t.excluded(names.down.bias(), vector(d), by);
        names.sub_norm.iter().for_each(|norm| t.optional(norm.weight(), vector(n_ff)));
    }

    /// Takes the tensors of a feed-forward of this width; `up` may have the rows of the gate too, but in shared experts.
    pub(crate) fn load(t: &mut Loaded<'_>, names: &DenseNames, n_ff: Option<usize>) -> Result<Dense, LoadError> {
        let has_gate = t.has(names.gate.weight());
        let up = t.linear(names.up)?;
        let fused = n_ff.filter(|n_ff| up.w.rows() == 2 * n_ff);
        let up = match (has_gate, fused) {
            (true, None) => LinearGroup::separate(vec![t.linear(names.gate)?, up]),
            (false, Some(n_ff)) => LinearGroup::fused(up, &[n_ff, n_ff]),
            (false, None) => LinearGroup::separate(vec![up]),
            (true, Some(n_ff)) => {
                let found = format!("{} rows beside `{}`", 2 * n_ff, t.name(names.gate.weight()));
                return Err(t.error(names.up.weight(), &found, &format!("{n_ff} rows")));
            }
        };
        let sub_norm = match names.sub_norm {
            Some(name) => t.norm(name)?,
            None => None,
        };
        Ok(Dense { up, sub_norm, down: t.linear(names.down)? })
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.up.matrices().chain([&self.down.w])
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        Size::rows(n, [self.up.stride]).and(self.up.size(n).or(self.down.size(n)))
    }

    /// `y = ffn(x)`.
    pub(crate) fn run(
        &self,
        pass: &Pass<'_, '_>,
        (c, l): (&FfnConfig, &LayerFfn),
        SubLayerRows { x, y }: SubLayerRows<'_>,
        stack: &mut Stack<'_>,
    ) {
        let (rows, stride, Linear { w, bias }) = (pass.rows, self.up.stride, &self.down);
        let mut stack = stack.scope();
        let [wide] = stack.rows(pass.n, [stride]);
        rows.linear_group(&self.up, x, wide, &mut stack);
        if l.sparsity > 0.0 {
            rows.each(wide, stride, &|_, row| sparsify(rows.cpu, &mut row[..w.k()], l.sparsity));
        }
        let activation = FfnActivation {
            act: if self.up.part_starts.len() == 1 { c.ungated_act } else { c.act },
            swiglu: match c.swiglu {
                Swiglu::Limited(_) if !c.limits_dense => Swiglu::Plain,
                swiglu => swiglu,
            },
            // the limit of the layer's shared experts, as in llama.cpp
            limit: l.shared_limit,
            xielu: l.xielu,
            situ: c.situ,
        };
        rows.activate(activation, wide, stride, self.up.part_starts.get(1).copied(), w.k());
        if let Some(norm) = &self.sub_norm {
            rows.norm_beginnings(norm, wide, stride);
        }
        rows.matrix(w, bias.as_deref(), Floats { x: wide, stride }, y, &mut stack);
    }
}
