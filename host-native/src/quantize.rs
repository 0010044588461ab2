//! `starling quantize`: converts the weights of a model file.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Mutex;

use starling::gguf::{GgufSet, GgufWriter, TensorInfo, Value};
use starling::kernels::tasks;
use starling::quant::mix::{Mix, ModelShape, SourceTensor, needs_importance, tensor_types};
use starling::quant::{self, Dtype, QuantError, Quantiser};
use starling_host::error::Failure;
use starling_host::load;
use starling_host::load::ModelOptions;
use starling_host::pool::ThreadPool;
use starling_host::progress::{Of, Progress, remark};

use crate::cli::QuantizeArgs;
use crate::imatrix::Importance;

/// Minimum number of elements per task; tasks are whole rows.
const TASK: usize = 1 << 16;

/// The output is written under a temporary name and renamed when complete.
///
/// # Errors
/// If the input is not a model file, has a type that cannot be converted, or the output cannot be written.
pub fn run(model_args: &ModelOptions, args: &QuantizeArgs) -> Result<(), Failure> {
    let pool = load::pool(model_args)?;
    let mix = Mix::from_name(&args.kind).ok_or_else(|| {
        let known: Vec<_> = Mix::all().map(Mix::name).collect();
        Failure::Usage(format!("type `{}` is unknown; known: {}", args.kind, known.join(", ")))
    })?;
    let input = Path::new(&args.input);
    let importance = args.imatrix.as_deref().map(Importance::read).transpose()?;
    let files = load::open_all(input)?;
    let set = load::joined_headers(&files)?;
    let full = |path: &Path| fs::canonicalize(path).ok();
    // follow symbolic links: the link itself stays
    let output = &full(&args.output).unwrap_or_else(|| args.output.clone());
    if files.iter().any(|file| full(file.path()).as_ref() == Some(output)) {
        return Err(Failure::Usage("input and output are the same file".into()));
    }
    // only a regular file may be replaced
    if fs::metadata(output).is_ok_and(|there| !there.is_file()) {
        return Err(Failure::Usage(format!("{} is not a file", args.output.display())));
    }
    let (writer, types) = plan(&set, mix, importance.as_ref()).map_err(|e| match e {
        PlanError::Load(source) => Failure::Model { path: input.into(), source },
        PlanError::Write(e) => Failure::Usage(e.to_string()),
    })?;
    check_importance(&set, &types, mix, importance.as_ref())?;
    warn_of_requantising(&set, &types);
    // unique per process
    let mut part = output.clone().into_os_string();
    part.push(format!(".{}.part", process::id()));
    let part = PathBuf::from(part);
    let file = File::create_new(&part).map_err(|source| Failure::File { path: part.clone(), source })?;
    let written = write(&set, (&writer, &types), importance.as_ref(), (&part, file), &pool)
        .and_then(|()| fs::rename(&part, output).map_err(|source| Failure::File { path: output.clone(), source }));
    if let Err(e) = written {
        // best effort; the first error is reported
        let _ = fs::remove_file(&part);
        return Err(e);
    }
    summarise(&set, &types, mix);
    Ok(())
}

/// Warns if tensors are quantised a second time.
fn warn_of_requantising(set: &GgufSet<'_>, types: &[Dtype]) {
    let is_exact = |dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16);
    let changes = set.tensors().zip(types).filter(|((_, t), to)| t.dtype != **to && !is_exact(t.dtype));
    let mut from: Vec<Dtype> = changes.map(|((_, t), _)| t.dtype).collect();
    let n = from.len();
    from.sort_by_key(|dtype| dtype.name());
    from.dedup();
    if n > 0 {
        let names: Vec<_> = from.iter().map(|dtype| dtype.name()).collect();
        remark(format_args!(
            "warning: {n} tensors are quantised already ({}); quantising them again loses precision: the F16, BF16 or F32 \
             file of the model gives a better result",
            names.join(", ")
        ));
    }
}

/// Tensors of one type that became another.
struct Converted {
    from: Dtype,
    to: Dtype,
    /// Weights of a row that does not divide into blocks of the mixture's type.
    odd_row: Option<u64>,
    count: usize,
    before: u64,
    after: u64,
}

/// Prints what became what, and why a type of the mixture was not used.
fn summarise(set: &GgufSet<'_>, types: &[Dtype], mix: Mix) {
    let mut all: Vec<Converted> = Vec::new();
    for ((_, t), &to) in set.tensors().zip(types) {
        let row = t.dims[0];
        let is_odd =
            t.n_dims > 1 && to.block_len() > 1 && to != mix.base() && !row.is_multiple_of(mix.base().block_len());
        let odd_row = is_odd.then_some(row);
        let after = to.row_bytes(row).unwrap_or(0) * t.n_rows();
        match all.iter_mut().find(|c| (c.from, c.to, c.odd_row) == (t.dtype, to, odd_row)) {
            Some(c) => (c.count, c.before, c.after) = (c.count + 1, c.before + t.len_bytes, c.after + after),
            None => all.push(Converted { from: t.dtype, to, odd_row, count: 1, before: t.len_bytes, after }),
        }
    }
    for Converted { from, to, odd_row, count, before, after } in &all {
        let (from, to) = (from.name(), to.name());
        let base = mix.base();
        let why = odd_row.map_or_else(String::new, |row| {
            format!(" (not {}: rows of {row} weights are no whole blocks of {})", base.name(), base.block_len())
        });
        let tensors = if *count == 1 { "tensor" } else { "tensors" };
        if from == to {
            remark(format_args!("{count:5} {tensors} {from} kept: {}{why}", size(*before)));
        } else {
            remark(format_args!("{count:5} {tensors} {from} -> {to}: {} -> {}{why}", size(*before), size(*after)));
        }
    }
    let (before, after) = all.iter().fold((0, 0), |sum, c| (sum.0 + c.before, sum.1 + c.after));
    let share = after as f64 * 100.0 / before.max(1) as f64;
    remark(format_args!("{}: tensors {} -> {} ({share:.0} %)", mix.name(), size(before), size(after)));
}

/// Bytes in kB, MB or GB with three digits.
fn size(bytes: u64) -> String {
    let (value, unit) = match bytes {
        0..1_000_000 => (bytes as f64 / 1e3, "kB"),
        1_000_000..1_000_000_000 => (bytes as f64 / 1e6, "MB"),
        _ => (bytes as f64 / 1e9, "GB"),
    };
    let digits = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {unit}")
}

/// Refuses types that require an importance matrix where there is none for the tensor.
fn check_importance(
    set: &GgufSet<'_>,
    types: &[Dtype],
    mix: Mix,
    importance: Option<&Importance>,
) -> Result<(), Failure> {
    for ((_, t), &dtype) in set.tensors().zip(types) {
        let weights = weights_of(importance, t)?;
        if t.dtype != dtype && weights.is_none() && needs_importance(mix, t.name, dtype) {
            let why =
                if importance.is_some() { "the given one has no entry for it" } else { "give one with --imatrix" };
            return Err(Failure::Usage(format!(
                "tensor `{}` to {}: this type requires an importance matrix; {why}",
                t.name,
                dtype.name()
            )));
        }
    }
    Ok(())
}

/// Writes the file. On failure the incomplete file stays for the caller to remove.
fn write(
    set: &GgufSet<'_>,
    (writer, types): (&GgufWriter, &[Dtype]),
    importance: Option<&Importance>,
    (path, file): (&Path, File),
    pool: &ThreadPool,
) -> Result<(), Failure> {
    let io = |source| Failure::File { path: path.into(), source };
    let mut out = BufWriter::with_capacity(1 << 20, file);
    out.write_all(&writer.header()).map_err(io)?;
    let total: u64 = set.tensors().map(|(_, t)| t.len_bytes).sum();
    let progress = Progress::new("quantizing", Of::Bytes, total);
    let mut quantisers: Vec<(Dtype, Quantiser)> = Vec::new();
    for ((shard, t), &dtype) in set.tensors().zip(types) {
        let failed = |e: QuantError| {
            let what = format!("tensor `{}` to {}: {e}", t.name, dtype.name());
            if matches!(e, QuantError::NotFinite { .. }) { Failure::Weights(what) } else { Failure::Usage(what) }
        };
        let i = match quantisers.iter().position(|q| q.0 == dtype) {
            Some(i) => i,
            None => {
                quantisers.push((dtype, Quantiser::new(dtype).map_err(failed)?));
                quantisers.len() - 1
            }
        };
        let src = set.shards()[shard].data(t).unwrap_or_default();
        let bytes = convert(src, t, &quantisers[i].1, dtype, weights_of(importance, t)?, pool).map_err(failed)?;
        out.write_all(&bytes).map_err(io)?;
        out.write_all(&vec![0; writer.padding(bytes.len() as u64)]).map_err(io)?;
        progress.inc(t.len_bytes, t.name);
    }
    progress.finish();
    out.flush().map_err(io)?;
    out.get_ref().sync_all().map_err(io)
}

/// Importance of a tensor's input columns, if known.
fn weights_of<'a>(importance: Option<&'a Importance>, t: &TensorInfo<'_>) -> Result<Option<&'a [f32]>, Failure> {
    importance.map_or(Ok(None), |i| i.of(t.name, t.dims[0] as usize, (t.dims[2] * t.dims[3]) as usize))
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

/// The output's header, and the type of each tensor.
fn plan(set: &GgufSet<'_>, mix: Mix, importance: Option<&Importance>) -> Result<(GgufWriter, Vec<Dtype>), PlanError> {
    let gguf = set.first();
    let arch = gguf.str("general.architecture")?.unwrap_or("llama");
    let number = |name: &str| Ok::<_, PlanError>(gguf.u32(&format!("{arch}.{name}")).ok().flatten().unwrap_or(0));
    let n_heads = number("attention.head_count")?;
    let n_kv_heads = gguf.u32(&format!("{arch}.attention.head_count_kv")).ok().flatten().unwrap_or(n_heads);
    let facts = ModelShape {
        n_layers: number("block_count")?,
        n_heads,
        n_kv_heads,
        n_experts: number("expert_count")?,
        importance: importance.is_some(),
    };
    let sources: Vec<SourceTensor<'_>> =
        set.tensors().map(|(_, t)| SourceTensor { name: t.name, dims: t.dims, dtype: t.dtype }).collect();
    let types = tensor_types(mix, &facts, &sources);
    let mut writer = GgufWriter::new();
    for (key, value) in gguf.metadata() {
        match *key {
            // written below
            "general.alignment" | "general.file_type" | "general.quantization_version" => {}
            // the output is one file
            key if key.starts_with("split.") || key.starts_with("quantize.imatrix.") => {}
            key => writer.metadata(key, value)?,
        }
    }
    writer.metadata("general.quantization_version", &Value::U32(2))?;
    writer.metadata("general.file_type", &Value::U32(mix.file_type()))?;
    if let Some(importance) = importance {
        importance.describe(&mut writer)?;
    }
    for ((_, t), dtype) in set.tensors().zip(&types) {
        writer.tensor(t.name, *dtype, &t.dims[..t.n_dims as usize])?;
    }
    Ok((writer, types))
}

/// Converts a tensor by way of f32. `importance` has one slice per matrix.
fn convert(
    src: &[u8],
    t: &TensorInfo<'_>,
    quantiser: &Quantiser,
    dtype: Dtype,
    importance: Option<&[f32]>,
    pool: &ThreadPool,
) -> Result<Vec<u8>, QuantError> {
    if t.dtype == dtype {
        return Ok(src.to_vec());
    }
    let k = t.dims[0] as usize;
    let length = |dtype| QuantError::Length { dtype, elements: k, bytes: src.len() };
    let row_bytes = |dtype: Dtype| dtype.row_bytes(k as u64).map(|n| n as usize).ok_or_else(|| length(dtype));
    let (from, to) = (row_bytes(t.dtype)?, row_bytes(dtype)?);
    let (rows, rows_of_matrix) = (t.n_rows() as usize, t.dims[1] as usize);
    // tasks of whole rows of one matrix
    let per = (TASK / k.max(1)).clamp(1, rows_of_matrix);
    let fits = |n: &usize| importance.is_none() || rows_of_matrix.is_multiple_of(*n);
    let per = (1..=per).rev().find(fits).unwrap_or(1);
    let mut out = vec![0; rows * to];
    let failed = Mutex::new(None);
    tasks::chunks(pool, &mut out, per * to, &|i, out, _| {
        let first = i * per;
        let n = per.min(rows - first);
        let mut numbers = vec![0.0; n * k];
        let weights = importance.map(|w| &w[first / rows_of_matrix * k..][..k]);
        let done = quant::dequantise(t.dtype, &src[first * from..(first + n) * from], &mut numbers)
            .and_then(|()| quantiser.rows(&numbers, k, weights, out));
        if let Err(e) = done {
            failed.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(e);
        }
    });
    match failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
        Some(e) => Err(e),
        None => Ok(out),
    }
}
