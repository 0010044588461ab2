//! Writes a model of random weights in a named shape, for speed measurements and load tests.
//!
//! ```text
//! make-model SHAPE MIX OUT.gguf [--seed N]
//! ```
//!
//! SHAPE is one of [`SHAPES`], MIX a name that llama.cpp's quantiser knows ([`Mix`]). The same arguments give the same
//! bytes on every machine. The file is a valid llama model with a working tokenizer; its output is noise.

mod vocab;
mod weights;

use core::error::Error;
use std::env::args;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::process::ExitCode;

use starling::gguf::{GgufWriter, Value};
use starling::quant::Dtype;
use starling::quant::mix::{Facts, Mix, Source, tensor_types};

/// Sizes of a model; the output matrix is the token embedding.
struct Shape {
    name: &'static str,
    n_layers: u32,
    width: u32,
    n_heads: u32,
    n_kv_heads: u32,
    ff_width: u32,
    n_vocab: u32,
    context: u32,
    rope_base: f32,
}

const SHAPES: [Shape; 4] = [
    Shape {
        name: "tiny",
        n_layers: 2,
        width: 256,
        n_heads: 4,
        n_kv_heads: 4,
        ff_width: 512,
        n_vocab: 4096,
        context: 2048,
        rope_base: 10_000.0,
    },
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
    },
];

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
    let shape = SHAPES.iter().find(|s| s.name == shape).ok_or_else(usage)?;
    let mix = Mix::from_name(mix).ok_or_else(usage)?;
    let tensors = tensors(shape);
    let types = types(shape, mix, &tensors);

    let mut writer = GgufWriter::new();
    metadata(&mut writer, shape, mix)?;
    vocab::write(&mut writer, shape.n_vocab as usize)?;
    for ((name, dims), dtype) in tensors.iter().zip(&types) {
        writer.tensor(name, *dtype, dims)?;
    }
    let mut file = BufWriter::new(File::create(out)?);
    file.write_all(&writer.header())?;
    for ((name, dims), dtype) in tensors.iter().zip(types) {
        let data = weights::tensor(name, dtype, dims, seed)?;
        file.write_all(&data)?;
        file.write_all(&vec![0; writer.padding(data.len() as u64)])?;
    }
    file.flush()?;
    Ok(())
}

fn usage() -> String {
    let shapes: Vec<&str> = SHAPES.iter().map(|s| s.name).collect();
    let mixes: Vec<&str> = Mix::all().map(Mix::name).collect();
    format!("SHAPE MIX OUT.gguf [--seed N]\nshapes: {}\nmixtures: {}", shapes.join(" "), mixes.join(" "))
}

fn metadata(w: &mut GgufWriter, shape: &Shape, mix: Mix) -> Result<(), Box<dyn Error>> {
    w.str("general.architecture", "llama")?;
    w.str("general.name", &format!("random {}", shape.name))?;
    w.str("general.description", "random weights, for measurements only")?;
    for (key, value) in [
        ("general.quantization_version", 2),
        ("general.file_type", mix.file_type()),
        ("llama.block_count", shape.n_layers),
        ("llama.context_length", shape.context),
        ("llama.embedding_length", shape.width),
        ("llama.feed_forward_length", shape.ff_width),
        ("llama.attention.head_count", shape.n_heads),
        ("llama.attention.head_count_kv", shape.n_kv_heads),
        ("llama.rope.dimension_count", shape.width / shape.n_heads),
        ("llama.vocab_size", shape.n_vocab),
    ] {
        w.metadata(key, &Value::U32(value))?;
    }
    w.metadata("llama.rope.freq_base", &Value::F32(shape.rope_base))?;
    w.metadata("llama.attention.layer_norm_rms_epsilon", &Value::F32(1e-5))?;
    w.str("tokenizer.chat_template", CHAT_TEMPLATE)?;
    Ok(())
}

/// Names and sizes (row length first) in file order.
fn tensors(shape: &Shape) -> Vec<(String, Vec<u64>)> {
    let width = u64::from(shape.width);
    let kv_width = width / u64::from(shape.n_heads) * u64::from(shape.n_kv_heads);
    let ff = u64::from(shape.ff_width);
    let mut all = vec![("token_embd.weight".into(), vec![width, u64::from(shape.n_vocab)])];
    for i in 0..shape.n_layers {
        for (part, dims) in [
            ("attn_norm", vec![width]),
            ("attn_q", vec![width, width]),
            ("attn_k", vec![width, kv_width]),
            ("attn_v", vec![width, kv_width]),
            ("attn_output", vec![width, width]),
            ("ffn_norm", vec![width]),
            ("ffn_gate", vec![width, ff]),
            ("ffn_up", vec![width, ff]),
            ("ffn_down", vec![ff, width]),
        ] {
            all.push((format!("blk.{i}.{part}.weight"), dims));
        }
    }
    all.push(("output_norm.weight".into(), vec![width]));
    all
}

fn types(shape: &Shape, mix: Mix, tensors: &[(String, Vec<u64>)]) -> Vec<Dtype> {
    let sources: Vec<Source<'_>> = tensors
        .iter()
        .map(|(name, dims)| Source {
            name,
            dtype: Dtype::F32,
            dims: [dims[0], dims.get(1).copied().unwrap_or(1), 1, 1],
        })
        .collect();
    let facts = Facts {
        n_layers: shape.n_layers,
        n_heads: shape.n_heads,
        n_kv_heads: shape.n_kv_heads,
        n_experts: 0,
        importance: false,
    };
    tensor_types(mix, &facts, &sources)
}
