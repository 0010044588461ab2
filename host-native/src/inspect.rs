//! `starling inspect`: prints metadata and tensors of a model file.

use std::io::{Write, stdout};

use serde_json::{Map, Value as Json, json};
use starling::gguf::{Value, ValueType};
use starling::kernels::attention::{KvType, PAGE};
use starling::model::Config;
use starling_host::error::Failure;
use starling_host::load;
use starling_host::load::ModelOptions;

use crate::cli::InspectArgs;

/// Number of array elements and of string characters shown.
const SHOWN: usize = 8;
const SHOWN_CHARS: usize = 60;

/// # Errors
/// If the file is not a valid GGUF.
pub fn run(model_args: &ModelOptions, args: &InspectArgs) -> Result<(), Failure> {
    let files = load::files(model_args)?;
    let shards = load::headers(&files)?;
    let mut out = stdout().lock();
    let Some(first) = shards.first() else { return Ok(()) };
    let tensors: Vec<_> = shards.iter().flat_map(|g| g.tensors()).collect();
    let elements: u64 = tensors.iter().map(|t| t.n_elements()).sum();
    let bytes: u64 = tensors.iter().map(|t| t.len_bytes).sum();
    if args.json {
        let metadata: Map<String, Json> =
            first.metadata().iter().map(|(k, v)| ((*k).to_string(), value_json(v, args.full))).collect();
        let list: Vec<_> = tensors
            .iter()
            .map(|t| {
                json!({ "name": t.name, "type": t.dtype.name(), "shape": &t.dims[..t.n_dims as usize],
                        "offset": t.offset, "bytes": t.len_bytes })
            })
            .collect();
        let json = json!({ "version": first.version(), "alignment": first.alignment(), "files": files.len(),
                           "parameters": elements, "bytes": bytes, "metadata": metadata, "tensors": list });
        writeln!(out, "{json:#}")?;
        return Ok(());
    }
    let file_bytes: usize = files.iter().map(|f| f.len()).sum();
    writeln!(out, "GGUF v{}, {} file(s), {file_bytes} bytes, {} tensors", first.version(), files.len(), tensors.len())?;
    writeln!(
        out,
        "{elements} parameters in {bytes} bytes, {:.2} bits each",
        bytes as f64 * 8.0 / elements.max(1) as f64
    )?;
    // a file that the engine does not run can be inspected too
    if let Ok(config) = Config::from_gguf(first, &shards) {
        let page = config.kv_layout(KvType::F16).page_bytes();
        writeln!(out, "keys and values: {} bytes per token (f16)", page / PAGE)?;
        writeln!(out, "recurrent state: {} bytes per sequence", config.state_bytes())?;
        if let Some(unused) = load::unused_layers(&config, false, &shards) {
            writeln!(out, "{unused}")?;
        }
    }
    let mut types: Vec<(&str, u64, u64)> = Vec::new();
    for t in &tensors {
        match types.iter_mut().find(|(name, ..)| *name == t.dtype.name()) {
            Some((_, n, b)) => (*n, *b) = (*n + 1, *b + t.len_bytes),
            None => types.push((t.dtype.name(), 1, t.len_bytes)),
        }
    }
    for (name, n, b) in types {
        writeln!(out, "  {name:6} {n:5} tensors {b:14} bytes")?;
    }
    writeln!(out, "\nmetadata")?;
    for (key, value) in first.metadata() {
        writeln!(out, "  {key} = {}", line(value))?;
    }
    writeln!(out, "\ntensors")?;
    for t in &tensors {
        let shape: Vec<String> = t.dims[..t.n_dims as usize].iter().map(u64::to_string).collect();
        writeln!(out, "  {:36} {:6} [{}] {} bytes", t.name, t.dtype.name(), shape.join(", "), t.len_bytes)?;
    }
    Ok(())
}

/// A value on one short line.
fn line(v: &Value<'_>) -> String {
    match v {
        Value::Str(b) => {
            let text = String::from_utf8_lossy(b);
            let short: String = text.chars().take(SHOWN_CHARS).collect();
            let more = if short.len() < text.len() { format!("... ({} bytes)", b.len()) } else { String::new() };
            format!("{short:?}{more}")
        }
        Value::Array(a) => {
            let items = array(a, SHOWN);
            let more = if a.len() > items.len() { ", ..." } else { "" };
            let items: Vec<String> = items.iter().map(Json::to_string).collect();
            format!("{} x {:?} [{}{more}]", a.len(), a.element_type(), items.join(", "))
        }
        other => scalar(other).to_string(),
    }
}

fn scalar(v: &Value<'_>) -> Json {
    match v {
        Value::Bool(b) => json!(b),
        // JSON has no infinity and no NaN
        Value::F32(x) if x.is_finite() => json!(x),
        Value::F64(x) if x.is_finite() => json!(x),
        Value::F32(x) => json!(x.to_string()),
        Value::F64(x) => json!(x.to_string()),
        Value::Str(b) => json!(String::from_utf8_lossy(b)),
        Value::U64(n) => json!(n),
        other => other.as_integer().map_or(Json::Null, |i| json!(i as i64)),
    }
}

/// The first `n` elements. Arrays in arrays are shown whole: the format nests them once.
fn array(a: &starling::gguf::Array<'_>, n: usize) -> Vec<Json> {
    match (a.element_type(), a.strings()) {
        (_, Some(strings)) => strings.take(n).map(|s| json!(String::from_utf8_lossy(s))).collect(),
        (ValueType::Array, _) => a.arrays().take(n).map(|inner| Json::Array(array(&inner, usize::MAX))).collect(),
        _ => a.scalars().take(n).map(|v| scalar(&v)).collect(),
    }
}

fn value_json(v: &Value<'_>, full: bool) -> Json {
    match v {
        Value::Array(a) if full => Json::Array(array(a, usize::MAX)),
        Value::Array(a) => {
            json!({ "type": format!("{:?}", a.element_type()), "len": a.len(), "first": array(a, SHOWN) })
        }
        other => scalar(other),
    }
}
