//! Writes a model of random weights in a named shape, for speed measurements and load tests.
//!
//! ```text
//! make-model SHAPE MIX OUT.gguf [--seed N]
//! ```
//!
//! SHAPE is one of [`SHAPES`] or of the files in `shapes`, MIX a name that llama.cpp's quantiser knows ([`Mix`]). The same arguments give the same
//! bytes on every machine. The file is a valid model with a working tokenizer; its output is noise.

mod described;
mod encoder;
mod vocab;
mod weights;

use core::error::Error;
use std::env::args;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::process::ExitCode;

use starling::gguf::{GgufWriter, Value};
use starling::quant::Dtype;
use starling::quant::mix::{Mix, ModelShape, SourceTensor, tensor_types};

use described::Description;

/// Names and sizes of tensors, row length first, in file order.
type TensorList = Vec<(String, Vec<u64>)>;

/// Family and sizes of a model; the output matrix is the token embedding.
struct Shape {
    name: &'static str,
    arch: &'static str,
    n_layers: u32,
    width: u32,
    n_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
    ff_width: u32,
    n_vocab: u32,
    context: u32,
    rope_base: f32,
    /// Window of the layers that have one, 0 for none.
    window: u32,
    /// Norms that not every family has: of the heads, and after attention and feed-forward.
    head_norms: bool,
    post_norms: bool,
    /// Experts of a layer, and those that a token goes through; 0 for a dense model.
    n_experts: u32,
    n_experts_used: u32,
}

const TINY: Shape = Shape {
    name: "tiny",
    arch: "llama",
    n_layers: 2,
    width: 256,
    n_heads: 4,
    n_kv_heads: 4,
    head_dim: 64,
    ff_width: 512,
    n_vocab: 4096,
    context: 2048,
    rope_base: 10_000.0,
    window: 0,
    head_norms: false,
    post_norms: false,
    n_experts: 0,
    n_experts_used: 0,
};

const SHAPES: [Shape; 9] = [
    TINY,
    Shape {
        name: "smollm2-135m",
        n_layers: 30,
        width: 576,
        n_heads: 9,
        n_kv_heads: 3,
        ff_width: 1536,
        n_vocab: 49_152,
        context: 8192,
        rope_base: 100_000.0,
        ..TINY
    },
    Shape {
        name: "smollm2-360m",
        n_layers: 32,
        width: 960,
        n_heads: 15,
        n_kv_heads: 5,
        ff_width: 2560,
        n_vocab: 49_152,
        context: 8192,
        rope_base: 100_000.0,
        ..TINY
    },
    Shape {
        name: "llama-1b",
        n_layers: 16,
        width: 2048,
        n_heads: 32,
        n_kv_heads: 8,
        ff_width: 8192,
        n_vocab: 32_000,
        context: 8192,
        rope_base: 500_000.0,
        ..TINY
    },
    Shape {
        name: "gemma3-270m",
        arch: "gemma3",
        n_layers: 18,
        width: 640,
        n_heads: 4,
        n_kv_heads: 1,
        head_dim: 256,
        ff_width: 2048,
        n_vocab: 262_144,
        context: 32_768,
        rope_base: 1_000_000.0,
        window: 512,
        head_norms: true,
        post_norms: true,
        ..TINY
    },
    Shape {
        name: "qwen3-0.6b",
        arch: "qwen3",
        n_layers: 28,
        width: 1024,
        n_heads: 16,
        n_kv_heads: 8,
        head_dim: 128,
        ff_width: 3072,
        n_vocab: 151_936,
        context: 40_960,
        rope_base: 1_000_000.0,
        head_norms: true,
        ..TINY
    },
    Shape {
        name: "mixtral-8x57m",
        n_layers: 12,
        width: 768,
        n_heads: 12,
        n_kv_heads: 4,
        ff_width: 2048,
        n_vocab: 32_000,
        context: 8192,
        rope_base: 1_000_000.0,
        n_experts: 8,
        n_experts_used: 2,
        ..TINY
    },
    BERT,
    Shape { name: "minilm", n_layers: 6, width: 384, n_kv_heads: 12, head_dim: 32, ff_width: 1536, ..BERT },
];

const BERT: Shape = Shape {
    name: "bert-base",
    arch: "bert",
    n_layers: 12,
    width: 768,
    n_heads: 12,
    n_kv_heads: 12,
    ff_width: 3072,
    n_vocab: 30_522,
    context: 512,
    ..TINY
};

const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + \
     message['content'] + '<|im_end|>' + '\n' }}{% endfor %}\
     {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn main() -> ExitCode {
    match run(&args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("make-model: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<(), Box<dyn Error>> {
    let (shape, mix, out, seed) = match args {
        [shape, mix, out] => (shape, mix, out, 0),
        [shape, mix, out, flag, seed] if flag == "--seed" => (shape, mix, out, seed.parse()?),
        _ => return Err(usage().into()),
    };
    let mix = Mix::from_name(mix).ok_or_else(usage)?;
    let mut writer = GgufWriter::new();
    let (tensors, facts) = match Description::find(shape) {
        Some(described) => described_model(&mut writer, shape, &described?, mix)?,
        None => {
            let shape = SHAPES.iter().find(|s| s.name == shape).ok_or_else(usage)?;
            model(&mut writer, shape, mix)?
        }
    };
    write(writer, &tensors, &types(&facts, mix, &tensors), out, seed)
}

/// Adds the metadata of a described shape.
fn described_model(
    writer: &mut GgufWriter,
    name: &str,
    shape: &Description,
    mix: Mix,
) -> Result<(TensorList, ModelShape), Box<dyn Error>> {
    general(writer, &shape.arch, name, mix)?;
    shape.metadata(writer)?;
    writer.str("tokenizer.chat_template", CHAT_TEMPLATE)?;
    vocab::write(writer, shape.n_vocab as usize)?;
    Ok((shape.tensors(), shape.model_shape()))
}

/// Adds the metadata of a shape.
fn model(writer: &mut GgufWriter, shape: &Shape, mix: Mix) -> Result<(TensorList, ModelShape), Box<dyn Error>> {
    general(writer, shape.arch, shape.name, mix)?;
    sizes(writer, shape)?;
    let facts = ModelShape {
        n_layers: shape.n_layers,
        n_heads: shape.n_heads,
        n_kv_heads: shape.n_kv_heads,
        n_experts: shape.n_experts,
        importance: false,
    };
    let is_encoder = shape.arch == "bert";
    if is_encoder {
        encoder::metadata(writer)?;
        vocab::write_word_pieces(writer, shape.n_vocab as usize)?;
        Ok((encoder::tensors(shape), facts))
    } else {
        decoder_metadata(writer, shape)?;
        vocab::write(writer, shape.n_vocab as usize)?;
        Ok((tensors(shape), facts))
    }
}

fn write(
    mut writer: GgufWriter,
    tensors: &[(String, Vec<u64>)],
    types: &[Dtype],
    out: &str,
    seed: u64,
) -> Result<(), Box<dyn Error>> {
    for ((name, dims), dtype) in tensors.iter().zip(types) {
        writer.tensor(name, *dtype, dims)?;
    }
    let mut file = BufWriter::new(File::create(out)?);
    file.write_all(&writer.header())?;
    for ((name, dims), dtype) in tensors.iter().zip(types) {
        let data = weights::tensor(name, *dtype, dims, seed)?;
        file.write_all(&data)?;
        file.write_all(&vec![0; writer.padding(data.len() as u64)])?;
    }
    file.flush()?;
    Ok(())
}

fn usage() -> String {
    let shapes: Vec<&str> = SHAPES.iter().map(|s| s.name).chain(described::names()).collect();
    let mixes: Vec<&str> = Mix::all().map(Mix::name).collect();
    format!("SHAPE MIX OUT.gguf [--seed N]\nshapes: {}\nmixtures: {}", shapes.join(" "), mixes.join(" "))
}

fn general(w: &mut GgufWriter, arch: &str, name: &str, mix: Mix) -> Result<(), Box<dyn Error>> {
    w.str("general.architecture", arch)?;
    w.str("general.name", &format!("random {name}"))?;
    w.str("general.description", "random weights, for measurements only")?;
    for (key, value) in [("general.quantization_version", 2), ("general.file_type", mix.file_type())] {
        w.metadata(key, &Value::U32(value))?;
    }
    Ok(())
}

fn sizes(w: &mut GgufWriter, shape: &Shape) -> Result<(), Box<dyn Error>> {
    let key = |name: &str| format!("{}.{name}", shape.arch);
    for (name, value) in [
        ("block_count", shape.n_layers),
        ("context_length", shape.context),
        ("embedding_length", shape.width),
        ("feed_forward_length", shape.ff_width),
        ("attention.head_count", shape.n_heads),
        ("attention.head_count_kv", shape.n_kv_heads),
    ] {
        w.metadata(&key(name), &Value::U32(value))?;
    }
    Ok(())
}

fn decoder_metadata(w: &mut GgufWriter, shape: &Shape) -> Result<(), Box<dyn Error>> {
    let key = |name: &str| format!("{}.{name}", shape.arch);
    for (name, value) in [("rope.dimension_count", shape.head_dim), ("vocab_size", shape.n_vocab)] {
        w.metadata(&key(name), &Value::U32(value))?;
    }
    // only where they say something: other shapes stay the bytes they were
    for (name, value, said) in [
        ("attention.key_length", shape.head_dim, shape.head_dim * shape.n_heads != shape.width),
        ("attention.value_length", shape.head_dim, shape.head_dim * shape.n_heads != shape.width),
        ("attention.sliding_window", shape.window, shape.window > 0),
        ("expert_count", shape.n_experts, shape.n_experts > 0),
        ("expert_used_count", shape.n_experts_used, shape.n_experts > 0),
    ] {
        if said {
            w.metadata(&key(name), &Value::U32(value))?;
        }
    }
    w.metadata(&key("rope.freq_base"), &Value::F32(shape.rope_base))?;
    w.metadata(&key("attention.layer_norm_rms_epsilon"), &Value::F32(1e-5))?;
    w.str("tokenizer.chat_template", CHAT_TEMPLATE)?;
    Ok(())
}

/// Names and sizes (row length first) in file order.
fn tensors(shape: &Shape) -> TensorList {
    let [width, ff, experts] = [shape.width, shape.ff_width, shape.n_experts].map(u64::from);
    let [head, q_width, kv_width] =
        [1, shape.n_heads, shape.n_kv_heads].map(|n| u64::from(n) * u64::from(shape.head_dim));
    let mut all = vec![("token_embd.weight".into(), vec![width, u64::from(shape.n_vocab)])];
    for i in 0..shape.n_layers {
        let mut parts = vec![
            ("attn_norm", vec![width]),
            ("attn_q", vec![width, q_width]),
            ("attn_k", vec![width, kv_width]),
            ("attn_v", vec![width, kv_width]),
            ("attn_output", vec![q_width, width]),
            ("ffn_norm", vec![width]),
        ];
        if experts > 0 {
            parts.extend([
                ("ffn_gate_inp", vec![width, experts]),
                ("ffn_gate_exps", vec![width, ff, experts]),
                ("ffn_up_exps", vec![width, ff, experts]),
                ("ffn_down_exps", vec![ff, width, experts]),
            ]);
        } else {
            parts.extend([("ffn_gate", vec![width, ff]), ("ffn_up", vec![width, ff]), ("ffn_down", vec![ff, width])]);
        }
        if shape.head_norms {
            parts.extend([("attn_q_norm", vec![head]), ("attn_k_norm", vec![head])]);
        }
        if shape.post_norms {
            parts.extend([("post_attention_norm", vec![width]), ("post_ffw_norm", vec![width])]);
        }
        all.extend(parts.into_iter().map(|(part, dims)| (format!("blk.{i}.{part}.weight"), dims)));
    }
    all.push(("output_norm.weight".into(), vec![width]));
    all
}

fn types(facts: &ModelShape, mix: Mix, tensors: &[(String, Vec<u64>)]) -> Vec<Dtype> {
    let sources: Vec<SourceTensor<'_>> = tensors
        .iter()
        .map(|(name, dims)| SourceTensor {
            name,
            dtype: Dtype::F32,
            dims: [0, 1, 2, 3].map(|i| dims.get(i).copied().unwrap_or(1)),
        })
        .collect();
    tensor_types(mix, facts, &sources)
}
