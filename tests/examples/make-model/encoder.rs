//! What an encoder of the bert family has: embedded positions, biases everywhere, norms after the sums.

use core::error::Error;

use starling::gguf::{GgufWriter, Value};

use crate::Shape;

/// The metadata that only encoders have.
pub(crate) fn metadata(w: &mut GgufWriter) -> Result<(), Box<dyn Error>> {
    const MEAN: u32 = 1;
    w.metadata("bert.attention.causal", &Value::Bool(false))?;
    w.metadata("bert.attention.layer_norm_epsilon", &Value::F32(1e-12))?;
    w.metadata("bert.pooling_type", &Value::U32(MEAN))?;
    w.metadata("tokenizer.ggml.token_type_count", &Value::U32(2))?;
    Ok(())
}

/// Names and sizes (row length first) in file order.
pub(crate) fn tensors(shape: &Shape) -> Vec<(String, Vec<u64>)> {
    let [width, ff, vocab, context] = [shape.width, shape.ff_width, shape.n_vocab, shape.context].map(u64::from);
    let mut all = vec![
        ("token_embd.weight".into(), vec![width, vocab]),
        ("token_types.weight".into(), vec![width, 2]),
        ("position_embd.weight".into(), vec![width, context]),
        ("token_embd_norm.weight".into(), vec![width]),
        ("token_embd_norm.bias".into(), vec![width]),
    ];
    for i in 0..shape.n_layers {
        for (part, k, rows) in [
            ("attn_q", width, width),
            ("attn_k", width, width),
            ("attn_v", width, width),
            ("attn_output", width, width),
            ("ffn_up", width, ff),
            ("ffn_down", ff, width),
        ] {
            all.push((format!("blk.{i}.{part}.weight"), vec![k, rows]));
            all.push((format!("blk.{i}.{part}.bias"), vec![rows]));
        }
        for norm in ["attn_output_norm", "layer_output_norm"] {
            all.push((format!("blk.{i}.{norm}.weight"), vec![width]));
            all.push((format!("blk.{i}.{norm}.bias"), vec![width]));
        }
    }
    all
}
