//! Orders with one residual stream: pre-norm, parallel, post-norm, and blocks whose residual stream is the output of their norms.

use super::batch::Batch;
use super::layer::{BlockRows, Layer, LayerView, add};
use crate::kernels::attention::KvMemory;
use crate::kernels::elementwise::{add_scaled, scale};
use crate::model::family::ExpertInput;
use crate::model::ffn::FfnInput;
use crate::model::linear::{Norm, padded};
use crate::model::memory::Stack;
use crate::model::pass::{Pass, Stage, SubLayerRows};
use crate::model::rows::columns;

/// Pre-norm block: the mixer, then the feed-forward, where the layer has them:
///
/// ```text
/// x = x + post_norm(attention(norm(x)));  x = x + post_norm(ffn(norm(x)))
/// ```
pub(super) fn serial(
    layer: &Layer,
    pass: &mut Pass<'_, '_>,
    c: LayerView<'_>,
    s: &mut Batch,
    memory: &mut KvMemory,
    stack: &mut Stack<'_>,
) {
    let Batch { x, mixers, tokens, layer_embeddings, embeddings, .. } = s;
    let x = &mut x[..pass.n * c.d];
    let mut rows = layer.take(pass.n, &c, x, stack);
    if !layer.mixer.is_none() {
        layer.mix(pass, c, (x, &mut rows), (mixers, memory), stack);
        add(pass, c, (layer.post_attn_norm.as_ref(), Stage::PostAttnNorm), x, &mut rows);
    }
    if layer.reads(&c) == ExpertInput::Residual {
        rows.input.copy_from_slice(x);
    }
    if !layer.ffn.is_none() {
        layer.feed_forward(pass, c, (x, &mut rows), (tokens, memory), stack);
        add(pass, c, (layer.post_ffn_norm.as_ref(), Stage::PostFfnNorm), x, &mut rows);
    }
    if let Some(embedding) = &layer.embedding {
        embedding.run(pass, c.act, layer_embeddings.of(c.block), SubLayerRows { x, y: rows.y }, stack);
        add(pass, c, (Some(&embedding.norm), Stage::LayerEmbedding), x, &mut rows);
    }
    layer.finish(pass, x, embeddings);
}

/// Parallel block: attention and feed-forward read the same residual stream. A feed-forward without a norm of its
/// own reads the input of attention:
///
/// ```text
/// x = (x + attention(norm(x))) + ffn(ffn_norm(x) or norm(x))
/// ```
pub(super) fn parallel(
    layer: &Layer,
    pass: &mut Pass<'_, '_>,
    c: LayerView<'_>,
    s: &mut Batch,
    memory: &mut KvMemory,
    stack: &mut Stack<'_>,
) {
    let Batch { x, mixers, tokens, .. } = s;
    let x = &mut x[..pass.n * c.d];
    let mut rows = layer.take(pass.n, &c, x, stack);
    layer.mix(pass, c, (x, &mut rows), (mixers, memory), stack);
    if let Some(norm) = &layer.ffn_norm {
        pass.rows.norm(norm, x, c.d, rows.h);
        pass.trace_stage(Stage::FfnNorm, Some(c.at.index), &mut columns(rows.h, c.d, 0, c.d));
    }
    add(pass, c, (None, Stage::PostAttnNorm), x, &mut rows);
    let BlockRows { h, y, input } = &mut rows;
    layer.run_ffn(pass, c, SubLayerRows { x: h, y }, FfnInput { layer: input, tokens }, memory, stack);
    add(pass, c, (None, Stage::PostFfnNorm), x, &mut rows);
}

/// Post-norm block: norms after the residual sums (Vaswani et al. 2017; BERT):
///
/// ```text
/// x = attn_norm(x + attention(x));  x = ffn_norm(x + ffn(x))
/// ```
pub(super) fn post_norm(
    layer: &Layer,
    norms: &[Norm; 2],
    pass: &mut Pass<'_, '_>,
    c: LayerView<'_>,
    s: &mut Batch,
    memory: &mut KvMemory,
    stack: &mut Stack<'_>,
) {
    let Batch { x, mixers, tokens, .. } = s;
    let (d, x, [attn_norm, ffn_norm]) = (c.d, &mut x[..pass.n * c.d], norms);
    let mut rows = layer.take(pass.n, &c, x, stack);
    layer.run_mixer(pass, c, SubLayerRows { x, y: rows.y }, (mixers, memory), stack);
    pass.rows.add_normed(attn_norm, x, rows.y);
    if let Some(norm) = &layer.second_norm {
        pass.rows.add(x, d, rows.input, d, 1.0);
        pass.rows.norm_each(norm, x);
    }
    pass.trace_stage(Stage::PostAttnNorm, Some(c.at.index), &mut columns(x, d, 0, d));
    let BlockRows { y, input, .. } = &mut rows;
    layer.run_ffn(pass, c, SubLayerRows { x, y }, FfnInput { layer: input, tokens }, memory, stack);
    pass.rows.add_normed(ffn_norm, x, rows.y);
    pass.trace_stage(Stage::PostFfnNorm, Some(c.at.index), &mut columns(x, d, 0, d));
}

/// Block whose residual stream is the output of its norms (MiniMax-01):
///
/// ```text
/// h = norm(x);  x = h * residual_scale + attention(h);  h = norm(x);  x = h * residual_scale + ffn(h)
/// ```
pub(super) fn normed(
    layer: &Layer,
    pass: &mut Pass<'_, '_>,
    c: LayerView<'_>,
    s: &mut Batch,
    memory: &mut KvMemory,
    stack: &mut Stack<'_>,
) {
    let Batch { x, mixers, tokens, .. } = s;
    let x = &mut x[..pass.n * c.d];
    let mut rows = layer.take(pass.n, &c, x, stack);
    layer.mix(pass, c, (x, &mut rows), (mixers, memory), stack);
    replace(pass, c, x, &rows);
    layer.feed_forward(pass, c, (x, &mut rows), (tokens, memory), stack);
    replace(pass, c, x, &rows);
}

/// `x = h * residual_scale + y`.
fn replace(pass: &Pass<'_, '_>, c: LayerView<'_>, x: &mut [f32], BlockRows { h, y, .. }: &BlockRows<'_>) {
    let (rows, d, factor) = (pass.rows, c.d, c.residual.scale);
    rows.each(x, d, &|r, x| {
        x.copy_from_slice(&h[r * d..][..d]);
        scale(rows.cpu, x, factor);
        add_scaled(rows.cpu, x, &y[r * padded(d)..][..d], 1.0);
    });
}
