//! Tensors while they are loaded, and how mechanisms take them.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::{LinearName, Name, NormName, TensorStorage, missing, tensor_error};
use crate::error::LoadError;
use crate::kernels::panel::{Matrix, PANEL};
use crate::model::linear::{Linear, Norm};
use crate::pool::Pool;
use crate::quant::{self, Dtype};

/// Bytes packed at a time: work for all threads, small next to the model.
const LOAD_BYTES: usize = 4 << 20;

/// A tensor to be loaded.
pub(crate) struct PendingTensor {
    pub(crate) name: String,
    /// Index of its file in a split model.
    pub(crate) shard: usize,
    pub(crate) dtype: Dtype,
    /// Offset in the file.
    pub(crate) offset: u64,
    pub(crate) len_bytes: u64,
    pub(crate) into: TensorStorage,
    /// Whether it belongs to the MTP head.
    pub(crate) of_head: bool,
    /// A tensor that takes its place, and the rule in an error's words.
    pub(crate) excluded_by: Option<(String, &'static str)>,
}

impl PendingTensor {
    /// Length of the piece that starts at byte `done`: a panel of a matrix, or the rest of a vector.
    pub(crate) fn piece_bytes(&self, done: u64) -> usize {
        match &self.into {
            TensorStorage::Matrices(all) => {
                let (panel, matrix) = (panel_bytes(&all[0]), matrix_bytes(&all[0]));
                (matrix - done % matrix).min(panel) as usize
            }
            TensorStorage::Vector { .. } => (self.len_bytes - done) as usize,
        }
    }

    fn not_finite(&self, done: u64, fault: quant::BlockFault) -> LoadError {
        let block = done / self.dtype.block_bytes() + fault.index as u64;
        tensor_error(&self.name, &format!("an infinity or NaN in block {block}"), "finite weights")
    }

    pub(crate) fn pack_piece(&mut self, done: u64, bytes: &[u8]) -> Result<(), LoadError> {
        quant::validate(self.dtype, bytes).map_err(|fault| self.not_finite(done, fault))?;
        match &mut self.into {
            TensorStorage::Matrices(all) => {
                let (panel, matrix) = (panel_bytes(&all[0]), matrix_bytes(&all[0]));
                all[(done / matrix) as usize].pack_panel((done % matrix / panel) as usize, bytes);
            }
            TensorStorage::Vector { values, .. } => {
                if self.dtype == Dtype::I32 {
                    // integers up to 2^24, which are exact; the role checks that
                    let integers = bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f32);
                    *values = integers.collect();
                    return Ok(());
                }
                *values = vec![0.0; bytes.len() / self.dtype.block_bytes() as usize];
                quant::widen(self.dtype, bytes, values)
                    .map_err(|e| tensor_error(&self.name, &format!("{e}"), "F32, F16 or BF16"))?;
            }
        }
        Ok(())
    }

    /// Packs a whole tensor, panels in parallel. `packed` is called with the byte ranges that are packed.
    pub(crate) fn load(
        &mut self,
        bytes: &[u8],
        pool: &dyn Pool,
        packed: &mut dyn FnMut(Range<usize>),
    ) -> Result<(), LoadError> {
        let dtype = self.dtype;
        let TensorStorage::Matrices(all) = &mut self.into else {
            self.pack_piece(0, bytes)?;
            packed(0..bytes.len());
            return Ok(());
        };
        let (panel, matrix) = (panel_bytes(&all[0]) as usize, matrix_bytes(&all[0]) as usize);
        let panels = (LOAD_BYTES / panel).max(1);
        let mut done = 0;
        for (j, (m, bytes)) in all.iter_mut().zip(bytes.chunks_exact(matrix)).enumerate() {
            for (i, rows) in bytes.chunks(panels * panel).enumerate() {
                let fault = m.pack_panels(pool, i * panels, rows, &|rows| quant::validate(dtype, rows));
                if let Err((p, fault)) = fault {
                    return Err(self.not_finite((j * matrix + p * panel) as u64, fault));
                }
                packed(done..done + rows.len());
                done += rows.len();
            }
        }
        Ok(())
    }
}

/// Bytes of a whole panel, and of a matrix, in the file.
fn panel_bytes(m: &Matrix) -> u64 {
    (PANEL * m.row_bytes()) as u64
}

fn matrix_bytes(m: &Matrix) -> u64 {
    m.rows() as u64 * m.row_bytes() as u64
}

/// Loaded tensors, sorted by name; those taken are empty.
pub(crate) struct LoadedTensors(Vec<PendingTensor>);

impl LoadedTensors {
    pub(crate) fn new(mut all: Vec<PendingTensor>) -> LoadedTensors {
        all.sort_by(|a, b| a.name.cmp(&b.name));
        LoadedTensors(all)
    }

    /// Those whose names begin with `prefix`.
    pub(crate) fn of(&mut self, prefix: &str) -> Loaded<'_> {
        Loaded { tensors: self, prefix: prefix.into() }
    }

    /// Ignoring a tensor would compute another model than the file describes.
    pub(crate) fn check_all_taken(&self) -> Result<(), LoadError> {
        let is_taken = |p: &&PendingTensor| matches!(&p.into, TensorStorage::Matrices(all) if all.is_empty());
        let Some(left) = self.0.iter().find(|p| !is_taken(p)) else { return Ok(()) };
        Err(match &left.excluded_by {
            Some((other, rule)) => tensor_error(&left.name, &format!("both it and `{other}`"), rule),
            None => tensor_error(&left.name, "a tensor that no layer uses", "only tensors that the model uses"),
        })
    }

    fn find(&self, name: &str) -> Option<usize> {
        self.0.binary_search_by(|p| p.name.as_str().cmp(name)).ok()
    }

    fn take(&mut self, name: &str) -> Option<TensorStorage> {
        let i = self.find(name)?;
        Some(core::mem::replace(&mut self.0[i].into, TensorStorage::Matrices(Vec::new())))
    }
}

/// The loaded tensors of a layer, or of what is outside of layers.
pub(crate) struct Loaded<'t> {
    tensors: &'t mut LoadedTensors,
    prefix: String,
}

impl Loaded<'_> {
    /// The whole name of a tensor.
    pub(crate) fn name(&self, name: Name) -> String {
        format!("{}{}", self.prefix, name.text())
    }

    pub(crate) fn missing(&self, name: Name) -> LoadError {
        missing(self.name(name))
    }

    pub(crate) fn error(&self, name: Name, found: &str, expected: &str) -> LoadError {
        tensor_error(&self.name(name), found, expected)
    }

    pub(crate) fn has(&self, name: Name) -> bool {
        self.tensors.find(&self.name(name)).is_some()
    }

    /// The matrices of a tensor: one, or one per expert.
    pub(crate) fn matrices(&mut self, name: Name) -> Option<Vec<Matrix>> {
        match self.tensors.take(&self.name(name)) {
            Some(TensorStorage::Matrices(all)) => Some(all),
            _ => None,
        }
    }

    pub(crate) fn required_matrices(&mut self, name: Name) -> Result<Vec<Matrix>, LoadError> {
        self.matrices(name).ok_or_else(|| self.missing(name))
    }

    pub(crate) fn matrix(&mut self, name: Name) -> Result<Matrix, LoadError> {
        self.matrices(name).and_then(|mut all| all.pop()).ok_or_else(|| self.missing(name))
    }

    pub(crate) fn optional_matrix(&mut self, name: Name) -> Option<Matrix> {
        self.matrices(name).and_then(|mut all| all.pop())
    }

    /// The matrix `STEM.INDEX.weight`.
    pub(crate) fn indexed(&mut self, stem: &str, index: usize) -> Result<Matrix, LoadError> {
        let name = format!("{}{stem}.{index}.weight", self.prefix);
        match self.tensors.take(&name) {
            Some(TensorStorage::Matrices(mut all)) => all.pop().ok_or_else(|| missing(name)),
            _ => Err(missing(name)),
        }
    }

    /// The values of a vector, and the length of a row: heads may have rows of their own.
    pub(crate) fn vector(&mut self, name: Name) -> Option<(Vec<f32>, usize)> {
        match self.tensors.take(&self.name(name)) {
            Some(TensorStorage::Vector { values, width }) => Some((values, width)),
            _ => None,
        }
    }

    pub(crate) fn required(&mut self, name: Name) -> Result<Vec<f32>, LoadError> {
        self.optional(name).ok_or_else(|| self.missing(name))
    }

    pub(crate) fn optional(&mut self, name: Name) -> Option<Vec<f32>> {
        self.vector(name).map(|(values, _)| values)
    }

    /// Values with rows and columns exchanged.
    pub(crate) fn transposed(&mut self, name: Name) -> Result<Vec<f32>, LoadError> {
        let (values, width) = self.vector(name).ok_or_else(|| self.missing(name))?;
        Ok((0..width).flat_map(|i| values.iter().skip(i).step_by(width).copied()).collect())
    }

    pub(crate) fn linear(&mut self, name: LinearName) -> Result<Linear, LoadError> {
        let (w, bias) = (self.matrix(name.weight())?, self.optional(name.bias()));
        match &bias {
            Some(b) if b.len() != w.rows() => {
                let (found, expected) = (format!("shape [{}]", b.len()), format!("shape [{}]", w.rows()));
                Err(self.error(name.bias(), &found, &expected))
            }
            _ => Ok(Linear { w, bias }),
        }
    }

    pub(crate) fn optional_linear(&mut self, name: LinearName) -> Result<Option<Linear>, LoadError> {
        if self.has(name.weight()) { self.linear(name).map(Some) } else { Ok(None) }
    }

    pub(crate) fn norm(&mut self, name: NormName) -> Result<Option<Norm>, LoadError> {
        let bias = self.optional(name.bias());
        // in files of some families a norm is named without the suffix
        match (self.vector(name.weight()).or_else(|| self.vector(name.bare())), bias) {
            (Some((weight, width)), bias) => Ok(Some(Norm { weight, bias, eps: None, width })),
            (None, None) => Ok(None),
            (None, Some(_)) => Err(self.missing(name.weight())),
        }
    }

    /// A norm that must be there.
    pub(crate) fn required_norm(&mut self, name: NormName) -> Result<Norm, LoadError> {
        self.norm(name)?.ok_or_else(|| self.missing(name.weight()))
    }
}
