//! Importance matrices as llama.cpp's `imatrix` writes them: a GGUF file with two F32 tensors per matrix of the model,
//! `NAME.in_sum2`, for each matrix in the tensor the sums of its inputs' squares, and `NAME.counts`, the number of
//! inputs. Source: <https://github.com/ggml-org/llama.cpp/blob/master/tools/imatrix/imatrix.cpp>.

use std::collections::BTreeMap;
use std::path::Path;

use starling::error::LoadError;
use starling::gguf::{Gguf, GgufWriter, TensorInfo, Value, WriteError};
use starling::quant::Dtype;
use starling_host::error::Failure;
use starling_host::model_file::ModelFile;

/// Importance of the input columns of a model's matrices.
pub struct Importance {
    /// Tensor name -> one number per column, for each matrix of the tensor.
    weights: BTreeMap<String, Vec<f32>>,
    file_name: String,
    dataset: Option<Vec<u8>>,
    chunks: u32,
}

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

impl Importance {
    /// # Errors
    /// If it cannot be read, or is not an importance matrix.
    pub fn read(path: &Path) -> Result<Importance, Failure> {
        let file = ModelFile::open(path).map_err(|source| Failure::File { path: path.into(), source })?;
        let file_name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        parse(&file, file_name).map_err(|source| Failure::Model { path: path.into(), source })
    }

    /// The importance of the columns of a tensor of `matrices` matrices with `k` columns: one slice per matrix.
    ///
    /// # Errors
    /// If the file has another number of values; for the token embedding such values are ignored.
    pub fn of(&self, name: &str, k: usize, matrices: usize) -> Result<Option<&[f32]>, Failure> {
        match self.weights.get(name) {
            Some(w) if w.len() == k * matrices => Ok(Some(w)),
            Some(w) if name != "token_embd.weight" => Err(Failure::Usage(format!(
                "tensor `{name}`: the importance matrix has {} numbers, expected {matrices} x {k}",
                w.len()
            ))),
            _ => Ok(None),
        }
    }

    /// Writes the metadata keys that name the importance matrix.
    ///
    /// # Errors
    /// If a key exists already.
    pub fn describe(&self, writer: &mut GgufWriter) -> Result<(), WriteError> {
        writer.metadata("quantize.imatrix.file", &Value::Str(self.file_name.as_bytes()))?;
        if let Some(dataset) = &self.dataset {
            writer.metadata("quantize.imatrix.dataset", &Value::Str(dataset))?;
        }
        writer.metadata("quantize.imatrix.entries_count", &Value::U32(self.weights.len() as u32))?;
        if self.chunks > 0 {
            writer.metadata("quantize.imatrix.chunks_count", &Value::U32(self.chunks))?;
        }
        Ok(())
    }
}

fn parse(bytes: &[u8], file_name: String) -> Result<Importance, LoadError> {
    let gguf = Gguf::parse(bytes)?;
    let missing = |key: &str| LoadError::Metadata {
        key: key.into(),
        found: "nothing".into(),
        expected: "the metadata of an importance matrix".into(),
    };
    let datasets = gguf.str_array("imatrix.datasets")?.ok_or_else(|| missing("imatrix.datasets"))?;
    let dataset = datasets.into_iter().next().map(<[u8]>::to_vec);
    let chunks = gguf.u32("imatrix.chunk_count")?.ok_or_else(|| missing("imatrix.chunk_count"))?;
    let mut weights = BTreeMap::new();
    for t in gguf.tensors() {
        let wrong = |found: &str, expected: &str| LoadError::Tensor {
            name: t.name.into(),
            found: found.into(),
            expected: expected.into(),
        };
        let Some(name) = t.name.strip_suffix(SUMS) else {
            let sums = t.name.strip_suffix(COUNTS).and_then(|name| gguf.tensor(&format!("{name}{SUMS}")));
            match sums {
                Some(_) => continue,
                None => return Err(wrong("it alone", "`NAME.in_sum2` and `NAME.counts`")),
            }
        };
        let counts = gguf.tensor(&format!("{name}{COUNTS}")).ok_or_else(|| wrong("no counts", "`NAME.counts`"))?;
        let (Some(mut sums), Some(counts)) = (floats(&gguf, t), floats(&gguf, counts)) else {
            return Err(wrong("other types", "sums and counts in F32"));
        };
        if !sums.len().is_multiple_of(counts.len()) {
            return Err(wrong(&format!("{} sums, {} counts", sums.len(), counts.len()), "as many sums per count"));
        }
        let per = sums.len() / counts.len();
        for (sums, count) in sums.chunks_exact_mut(per).zip(counts) {
            let count = count.round();
            sums.iter_mut().for_each(|sum| *sum = if count > 0.0 { *sum / count } else { 1.0 });
        }
        if !sums.iter().all(|v| v.is_finite() && *v >= 0.0) {
            return Err(wrong("a sum that is negative, infinite or NaN", "sums of squares"));
        }
        weights.insert(name.to_string(), sums);
    }
    Ok(Importance { weights, file_name, dataset, chunks })
}

/// The elements of an F32 tensor.
fn floats(gguf: &Gguf<'_>, t: &TensorInfo<'_>) -> Option<Vec<f32>> {
    if t.dtype != Dtype::F32 {
        return None;
    }
    let (words, _) = gguf.data(t)?.as_chunks::<4>();
    Some(words.iter().map(|b| f32::from_le_bytes(*b)).collect())
}
