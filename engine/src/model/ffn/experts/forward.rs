//! Experts: the steps of a batch.

use alloc::vec::Vec;

use super::ExpertsConfig;
use super::route::Routing;
use super::weights::{ExpertMatrices, Experts, SharedExpert};
use crate::kernels::act::Floats;
use crate::kernels::elementwise::{add_scaled, scale, sigmoid};
use crate::kernels::matmul::{MatmulJob, products};
use crate::kernels::panel::Matrix;
use crate::model::family::ExpertInput;
use crate::model::ffn::config::{FfnConfig, LayerFfn};
use crate::model::linear::{forms, padded};
use crate::model::memory::{Size, Stack, packed_words};
use crate::model::pass::{Pass, Stage, SubLayerRows};
use crate::model::rows::{FfnActivation, PackedColumns, RowOps, columns};

/// The configuration that experts of a layer have.
#[derive(Clone, Copy)]
pub(crate) struct ExpertsOf<'c> {
    pub(crate) c: &'c ExpertsConfig,
    pub(crate) ffn: &'c FfnConfig,
    pub(crate) l: &'c LayerFfn,
}

/// Rows of the experts: input, of which a row has `stride` floats, input of the router, output (n, padded width), tokens.
struct ExpertRows<'x> {
    x: &'x [f32],
    stride: usize,
    router: &'x [f32],
    y: &'x mut [f32],
    tokens: &'x [u32],
}

/// Rows of the selected experts.
struct ExpertIo<'m> {
    /// (expert rows, width)
    inputs: &'m mut [f32],
    /// (expert rows, padded width)
    outputs: &'m mut [f32],
}

/// Where gate and up are in a row.
struct Layout {
    stride: usize,
    /// Offset of up; 0 without a gate.
    up_at: usize,
    /// Offset of the rows of the up matrices.
    up_row: usize,
}

impl Experts {
    /// Floats of a row of the batch: inputs and outputs of the selected experts.
    fn parts(c: &ExpertsConfig) -> [usize; 2] {
        [c.n_used * c.width, c.n_used * padded(c.width)]
    }

    /// Floats of a row: input of the router, if it has a norm of its own; input and sum of experts in their latent space.
    fn outer_parts(&self, c: &ExpertsConfig, d: usize) -> [usize; 3] {
        let latent = if self.latent.is_some() { padded(c.width) } else { 0 };
        [if self.router_norm.is_some() { d } else { 0 }, latent, latent]
    }

    /// Temporaries of `n` rows of a model of width `d`.
    pub(crate) fn size(&self, c: &ExpertsConfig, n: usize, d: usize) -> Size {
        let matrices = [&self.matrices].into_iter().chain(&self.adjugates).map(|m| m.size(n.saturating_mul(c.n_used)));
        let selected = Size::rows(n, Experts::parts(c)).and(self.router.size(n).or(Size::any(matrices)));
        let selected = Routing::size(c, n).and(self.router.size(n).or(selected));
        let latent = self.latent.as_ref().map(|latent| Size::any(latent.iter().map(|l| l.size(n))));
        let experts = Size::rows(n, self.outer_parts(c, d)).and(latent.unwrap_or_default().or(selected));
        experts.or(self.shared.as_ref().map_or(Size::NONE, |shared| shared.size(n, d)))
    }

    /// `y = experts(x)`; `layer_input` is what experts read beside x.
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        (layer, of): (usize, ExpertsOf<'_>),
        SubLayerRows { x, y }: SubLayerRows<'_>,
        (layer_input, tokens): (&mut [f32], &[u32]),
        stack: &mut Stack<'_>,
    ) {
        let (rows, c, d) = (pass.rows, of.c, pass.d);
        {
            let mut stack = stack.scope();
            let [router, input, sum] = stack.rows(pass.n, self.outer_parts(c, d));
            if let Some(norm) = &self.router_norm {
                rows.norm(norm, layer_input, d, router);
            }
            let x_experts = match &self.input_norm {
                Some(norm) => {
                    rows.norm_each(norm, layer_input);
                    &*layer_input
                }
                None => x,
            };
            let router = match c.input {
                ExpertInput::LayerForRouter => &*layer_input,
                ExpertInput::Residual => &*router,
                _ => x_experts,
            };
            match &self.latent {
                Some(latent) => {
                    let ([down, up], stride) = (&**latent, padded(c.width));
                    rows.linear(down, x_experts, input, &mut stack);
                    let expert_rows = ExpertRows { x: input, stride, router, y: &mut *sum, tokens };
                    self.selected(pass, (layer, of), expert_rows, &mut stack);
                    if let Some(norm) = &self.latent_norm {
                        rows.norm_beginnings(norm, sum, stride);
                    }
                    let sum = Floats { x: sum, stride };
                    rows.matrix(&up.w, up.bias.as_deref(), sum, y, &mut stack);
                }
                None => {
                    let expert_rows = ExpertRows { x: x_experts, stride: d, router, y, tokens };
                    self.selected(pass, (layer, of), expert_rows, &mut stack);
                }
            }
        }
        if let Some(norm) = &self.post_norm {
            rows.norm_beginnings(norm, y, padded(d));
        }
        if let Some(shared) = &self.shared {
            shared.run(pass, of, SubLayerRows { x, y }, stack);
        }
    }

    /// `y = sum over the selected experts of weight * down(act(gate x) * up x)`, in order of selection. Adjugate experts
    /// add the same sum of theirs, whose input is y.
    fn selected(
        &self,
        pass: &mut Pass<'_, '_>,
        (layer, of): (usize, ExpertsOf<'_>),
        ExpertRows { x, stride: x_stride, router: router_input, y, tokens }: ExpertRows<'_>,
        stack: &mut Stack<'_>,
    ) {
        let (e, c) = (self, of.c);
        let (n, d, rows) = (pass.n, c.width, pass.rows);
        let mut stack = stack.scope();
        let mut routing = Routing::take(&mut stack, c, n);
        let s = &mut routing;
        rows.linear(&e.router, &router_input[..n * pass.d], s.router, &mut stack);
        pass.trace_stage(Stage::Router, Some(layer), &mut columns(s.router, padded(c.n), 0, c.n));
        s.route(rows.cpu, c, (e.selection_bias.as_deref(), e.by_token.as_deref()), tokens);
        let [inputs, outputs] = stack.rows(n, Experts::parts(c));
        let mut io = ExpertIo { inputs, outputs };
        e.matrices.run(rows, of, (x, x_stride), (s, &mut io), &mut stack);
        if let Some(scales) = &e.output_scale {
            let selected = s.selected.iter().zip(&mut *s.weights);
            selected.for_each(|(expert, weight)| *weight *= scales[*expert as usize]);
        }
        rows.each(y, padded(d), &|_, y| y[..d].fill(0.0));
        add_selected(rows, c, (s, io.outputs), y);
        if let (Some(adjugates), Some(a)) = (&e.adjugates, &c.adjugates) {
            s.route_adjugates(rows.cpu, c, a);
            adjugates.run(rows, of, (y, padded(d)), (s, &mut io), &mut stack);
            add_selected(rows, c, (s, io.outputs), y);
        }
    }
}

/// `y = y + sum over the selected experts of weight * output`.
fn add_selected(rows: RowOps<'_>, c: &ExpertsConfig, (s, outputs): (&Routing<'_>, &[f32]), y: &mut [f32]) {
    let (d, n_used) = (c.width, c.n_used);
    let (expert_rows, weights) = (&*s.expert_rows, &*s.weights);
    rows.each(y, padded(d), &|r, y| {
        for j in r * n_used..(r + 1) * n_used {
            let output = &outputs[expert_rows[j] as usize * padded(d)..][..d];
            add_scaled(rows.cpu, &mut y[..d], output, weights[j]);
        }
    });
}

impl SharedExpert {
    /// Floats of a row: output, gate.
    fn parts(d: usize) -> [usize; 2] {
        [padded(d), padded(1)]
    }

    fn size(&self, n: usize, d: usize) -> Size {
        let gate = self.gate.as_ref().map_or(Size::NONE, |gate| gate.size(n));
        Size::rows(n, SharedExpert::parts(d)).and(self.ffn.size(n).or(gate))
    }

    /// `y += sigmoid(gate x) * ffn(x)`.
    fn run(
        &self,
        pass: &Pass<'_, '_>,
        ExpertsOf { c, ffn, l }: ExpertsOf<'_>,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        stack: &mut Stack<'_>,
    ) {
        let (d, rows, factor) = (pass.d, pass.rows, c.shared_factor);
        let mut stack = stack.scope();
        let [out, gate] = stack.rows(pass.n, SharedExpert::parts(d));
        self.ffn.run(pass, (ffn, l), SubLayerRows { x, y: &mut *out }, &mut stack);
        if let Some(norm) = &self.post_norm {
            rows.norm_beginnings(norm, out, padded(d));
        }
        if let Some(g) = &self.gate {
            rows.linear(g, x, gate, &mut stack);
        }
        rows.each(y, padded(d), &|r, y| {
            let weight = if self.gate.is_some() { sigmoid(gate[r * padded(1)]) } else { 1.0 };
            add_scaled(rows.cpu, &mut y[..d], &out[r * padded(d)..][..d], weight);
            if factor != 1.0 {
                scale(rows.cpu, &mut y[..d], factor);
            }
        });
    }
}

impl ExpertMatrices {
    /// Width of an expert's feed-forward.
    fn n_ff(&self) -> usize {
        self.down.first().map_or(0, Matrix::k)
    }

    fn layout(&self) -> Layout {
        let n_ff = self.n_ff();
        let is_fused = self.gate.is_empty() && self.up.first().is_some_and(|up| up.rows() == 2 * n_ff);
        match (is_fused, self.gate.is_empty()) {
            (true, _) => Layout { stride: padded(2 * n_ff), up_at: n_ff, up_row: 0 },
            (false, true) => Layout { stride: padded(n_ff), up_at: 0, up_row: 0 },
            (false, false) => Layout { stride: 2 * padded(n_ff), up_at: padded(n_ff), up_row: padded(n_ff) },
        }
    }

    /// Words of the packed inputs of `total` expert rows.
    fn packed_words(&self, total: usize) -> usize {
        packed_words(total, forms(self.gate.iter().chain(&self.up)), self.up.first().map_or(0, Matrix::k))
    }

    /// Temporaries of `total` expert rows.
    fn size(&self, total: usize) -> Size {
        let products = Size::words(self.packed_words(total)).or(Size::packed(total, 1, self.n_ff()));
        Size::rows(total, [self.layout().stride]).and(products)
    }

    /// The outputs of the selected experts for the rows `x`, `x_stride` floats apart. The rows of an expert are gathered,
    /// so that each expert runs one matrix product.
    fn run(
        &self,
        rows: RowOps<'_>,
        ExpertsOf { c, ffn, l }: ExpertsOf<'_>,
        (x, x_stride): (&[f32], usize),
        (s, io): (&mut Routing<'_>, &mut ExpertIo<'_>),
        stack: &mut Stack<'_>,
    ) {
        let (e, n, d) = (self, s.n, c.width);
        let mut stack = stack.scope();
        let (n_experts, n_ff) = (e.up.len(), e.down.first().map_or(0, Matrix::k));

        // a single token is the input of all its experts: no gather, unless each input has its weight, or several of the
        // experts are the same
        let total = n * c.n_used;
        let weighted = c.weighted_inputs;
        let gathered = n > 1 || weighted || n_experts < c.n || l.routes_by_token;
        let inputs = &mut *io.inputs;
        if gathered {
            let source_rows = &s.source_rows;
            rows.each(inputs, d, &|r, input| input.copy_from_slice(&x[source_rows[r] as usize * x_stride..][..d]));
        }
        if weighted {
            for (&row, weight) in s.expert_rows.iter().zip(&mut *s.weights).take(total) {
                scale(rows.cpu, &mut inputs[row as usize * d..][..d], *weight);
                *weight = 1.0;
            }
        }
        let groups = || {
            (0..n_experts)
                .map(|e| (e, s.starts[e] as usize..s.starts[e + 1] as usize))
                .filter(|(_, rows)| !rows.is_empty())
        };

        let Layout { stride, up_at, up_row } = e.layout();
        let [wide] = stack.rows(total, [stride]);
        let mut packed = PackedColumns::new(stack.scope().words(e.packed_words(total)));
        let mut jobs = Vec::new();
        for (number, (expert, group)) in groups().enumerate() {
            let (x, number) = match gathered {
                true => (Floats { x: &inputs[group.start * d..group.end * d], stride: d }, number),
                false => (Floats { x, stride: x_stride }, 0),
            };
            for (w, at) in e.gate.get(expert).map(|w| (w, 0)).into_iter().chain([(&e.up[expert], up_row)]) {
                jobs.push(MatmulJob { w, x: packed.of(&rows, w, x, number), out_column: group.start, out_row: at });
            }
        }
        products(rows.cpu, rows.pool, &jobs, wide, stride);
        // the expert of a row
        let starts = &s.starts[..=n_experts];
        let expert_of = |row: usize| starts.partition_point(|start| *start as usize <= row) - 1;
        let add_biases = |x: &mut [f32], stride: usize, bias: &Option<Vec<f32>>, at: usize, width: usize| {
            if let Some(bias) = bias {
                let bias = |r| &bias[expert_of(r) * width..][..width];
                rows.each(x, stride, &|r, row| add_scaled(rows.cpu, &mut row[at..at + width], bias(r), 1.0));
            }
        };
        add_biases(wide, stride, &e.biases[0], 0, n_ff);
        add_biases(wide, stride, &e.biases[1], up_at, n_ff);
        let activation =
            FfnActivation { act: ffn.act, swiglu: ffn.swiglu, limit: l.expert_limit, xielu: None, situ: ffn.situ };
        rows.activate(activation, wide, stride, (up_at > 0).then_some(up_at), n_ff);

        let outputs = &mut *io.outputs;
        let mut packed = PackedColumns::new(stack.words(packed_words(total, 1, n_ff)));
        let mut jobs = Vec::new();
        for (number, (expert, group)) in groups().enumerate() {
            let (w, x) = (&e.down[expert], Floats { x: &wide[group.start * stride..group.end * stride], stride });
            jobs.push(MatmulJob { w, x: packed.of(&rows, w, x, number), out_column: group.start, out_row: 0 });
        }
        products(rows.cpu, rows.pool, &jobs, outputs, padded(d));
        add_biases(outputs, padded(d), &e.biases[2], 0, d);
    }
}
