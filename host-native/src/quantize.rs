//! `starling quantize`: a model file in another type.

use std::fs::{self, File};
use std::io::{BufWriter, Write, stderr};
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};
use starling::gguf::{Gguf, GgufWriter, TensorInfo, Value};
use starling::kernels::tasks;
use starling::quant::mix::{Facts, Mix, Source, tensor_types};
use starling::quant::{self, Dtype, QuantError};

use crate::cli::{ModelArgs, QuantizeArgs};
use crate::error::Failure;
use crate::load;
use crate::model_file::ModelFile;
use crate::pool::ThreadPool;

/// Elements that one task converts.
const TASK: usize = 1 << 16;

/// Runs the command. The output appears under its name only when it is complete.
///
/// # Errors
/// If the input is not a model file, holds a type without conversion, or the output cannot be written.
pub fn run(model_args: &ModelArgs, args: &QuantizeArgs) -> Result<(), Failure> {
    let pool = load::pool(model_args)?;
    let mix = Mix::from_name(&args.kind).ok_or_else(|| {
        let known: Vec<_> = Mix::all().map(Mix::name).collect();
        Failure::Usage(format!("type `{}` is unknown; known: {}", args.kind, known.join(", ")))
    })?;
    let input = Path::new(&args.input);
    let file = ModelFile::open(input).map_err(|source| Failure::File { path: input.into(), source })?;
    let gguf = Gguf::parse(&file).map_err(|source| Failure::Model { path: input.into(), source })?;
    let output = &args.output;
    let same = fs::canonicalize(input).ok().zip(fs::canonicalize(output).ok()).is_some_and(|(a, b)| a == b);
    if same {
        return Err(Failure::Usage("input and output are the same file".into()));
    }
    let part = output.with_extension("gguf.part");
    let written = write(&gguf, mix, &part, &pool, input);
    if let Err(e) = written {
        // nothing is left behind; the cause is what matters, not whether this works too
        let _ = fs::remove_file(&part);
        return Err(e);
    }
    fs::rename(&part, output).map_err(|source| Failure::File { path: output.clone(), source })
}

fn write(gguf: &Gguf<'_>, mix: Mix, path: &Path, pool: &ThreadPool, input: &Path) -> Result<(), Failure> {
    let io = |source| Failure::File { path: path.into(), source };
    let wrong = |source| Failure::Model { path: input.into(), source };
    let (writer, types) = plan(gguf, mix).map_err(|e| match e {
        PlanError::Load(e) => wrong(e),
        PlanError::Write(e) => Failure::Usage(e.to_string()),
    })?;
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path).map_err(io)?);
    out.write_all(&writer.header()).map_err(io)?;
    let total: u64 = gguf.tensors().iter().map(|t| t.len_bytes).sum();
    let bar = ProgressBar::new(total);
    let style = ProgressStyle::with_template("{bar:32} {bytes}/{total_bytes} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    for (t, &dtype) in gguf.tensors().iter().zip(&types) {
        bar.set_message(t.name.to_string());
        let bytes = convert(gguf, t, dtype, pool)
            .map_err(|e| Failure::Usage(format!("tensor `{}` to {}: {e}", t.name, dtype.name())))?;
        out.write_all(&bytes).map_err(io)?;
        out.write_all(&vec![0; writer.padding(bytes.len() as u64)]).map_err(io)?;
        bar.inc(t.len_bytes);
    }
    bar.finish_and_clear();
    out.flush().map_err(io)?;
    out.get_ref().sync_all().map_err(io)?;
    let size = fs::metadata(path).map_err(io)?.len();
    writeln!(stderr(), "{}: {total} bytes of tensors became {size} bytes of {}", input.display(), mix.name())?;
    Ok(())
}

enum PlanError {
    Load(starling::error::LoadError),
    Write(starling::gguf::WriteError),
}

impl From<starling::error::LoadError> for PlanError {
    fn from(e: starling::error::LoadError) -> Self {
        PlanError::Load(e)
    }
}

impl From<starling::gguf::WriteError> for PlanError {
    fn from(e: starling::gguf::WriteError) -> Self {
        PlanError::Write(e)
    }
}

/// The output's directory, and the type of each tensor.
fn plan(gguf: &Gguf<'_>, mix: Mix) -> Result<(GgufWriter, Vec<Dtype>), PlanError> {
    let arch = gguf.str("general.architecture")?.unwrap_or("llama");
    let number = |name: &str| Ok::<_, PlanError>(gguf.u32(&format!("{arch}.{name}")).ok().flatten().unwrap_or(0));
    let n_heads = number("attention.head_count")?;
    let n_kv_heads = gguf.u32(&format!("{arch}.attention.head_count_kv")).ok().flatten().unwrap_or(n_heads);
    let facts = Facts { n_layers: number("block_count")?, n_heads, n_kv_heads, n_experts: number("expert_count")? };
    let sources: Vec<Source<'_>> =
        gguf.tensors().iter().map(|t| Source { name: t.name, dims: t.dims, dtype: t.dtype }).collect();
    let types = tensor_types(mix, &facts, &sources);
    let mut writer = GgufWriter::new();
    for (key, value) in gguf.metadata() {
        match *key {
            // ours to say
            "general.alignment" | "general.file_type" | "general.quantization_version" => {}
            // one file comes out
            key if key.starts_with("split.") => {}
            key => writer.metadata(key, value)?,
        }
    }
    writer.metadata("general.quantization_version", &Value::U32(2))?;
    writer.metadata("general.file_type", &Value::U32(mix.file_type()))?;
    for (t, dtype) in gguf.tensors().iter().zip(&types) {
        writer.tensor(t.name, *dtype, &t.dims[..t.n_dims as usize])?;
    }
    Ok((writer, types))
}

/// The tensor's bytes in another type; its numbers pass through f32.
fn convert(gguf: &Gguf<'_>, t: &TensorInfo<'_>, dtype: Dtype, pool: &ThreadPool) -> Result<Vec<u8>, QuantError> {
    let src = gguf.data(t).unwrap_or_default();
    if t.dtype == dtype {
        return Ok(src.to_vec());
    }
    // whole rows of 256 divide into blocks of both types
    let elements = t.n_elements() as usize;
    let (from, to) = (
        |n: usize| n / t.dtype.block_len() as usize * t.dtype.block_bytes() as usize,
        |n: usize| n / dtype.block_len() as usize * dtype.block_bytes() as usize,
    );
    let mut out = vec![0; to(elements)];
    let failed = std::sync::Mutex::new(None);
    tasks::chunks(pool, &mut out, to(TASK), &|i, out, _| {
        let range = i * TASK..elements.min((i + 1) * TASK);
        let mut numbers = vec![0.0; range.len()];
        let done = quant::dequantise(t.dtype, &src[from(range.start)..from(range.end)], &mut numbers)
            .and_then(|()| quant::quantise(dtype, &numbers, out));
        if let Err(e) = done {
            failed.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(e);
        }
    });
    match failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
        Some(e) => Err(e),
        None => Ok(out),
    }
}
