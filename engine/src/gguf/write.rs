//! Writes GGUF files: [`GgufWriter`] builds the header and computes the place of the tensor data.

use alloc::collections::BTreeSet;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use thiserror::Error;

use super::read::{MAX_ALIGNMENT, MAX_KEY_LEN, MAX_TENSOR_NAME_LEN, tensor_len};
use super::value::{Array, Value, ValueType};
use super::{DEFAULT_ALIGNMENT, MAGIC};
use crate::quant::Dtype;

/// Why metadata or a tensor cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WriteError {
    /// A key or a tensor name is empty or too long.
    #[error("name `{name}`: found {} bytes, expected 1 to {max}", name.len())]
    Name {
        /// The key or tensor name.
        name: String,
        /// Most bytes allowed.
        max: u64,
    },
    /// A key or a tensor name was written before.
    #[error("name `{0}`: written twice, expected once")]
    Duplicate(String),
    /// Dimensions are zero, overflow, or do not make whole blocks.
    #[error(
        "tensor `{name}`: found shape {dims:?}, expected 1 to 4 non-zero dimensions, rows of whole blocks of {} ({})",
        dtype.block_len(),
        dtype.name()
    )]
    Shape {
        /// Name of the tensor.
        name: String,
        /// Type of its elements.
        dtype: Dtype,
        /// Its dimensions.
        dims: Vec<u64>,
    },
    /// `general.alignment` is not a power of two, is too small or too large, or was written as metadata.
    #[error("general.alignment: found {0}, expected a power of two from 8 to {MAX_ALIGNMENT}, set by with_alignment")]
    Alignment(u64),
}

/// Builds a GGUF file of version 3: metadata and tensor directory.
///
/// A file consists of [`GgufWriter::header`], then for each tensor, in the order added, its data and
/// [`GgufWriter::padding`] zero bytes. The data need not be in memory.
#[derive(Debug, Clone)]
pub struct GgufWriter {
    alignment: u64,
    n_metadata: u64,
    metadata: Vec<u8>,
    names: BTreeSet<String>,
    n_tensors: u64,
    directory: Vec<u8>,
    /// Length of the tensor data so far, with padding, in bytes.
    data_len: u64,
}

impl Default for GgufWriter {
    fn default() -> Self {
        GgufWriter::new()
    }
}

impl GgufWriter {
    /// An empty file with the default alignment.
    pub fn new() -> Self {
        GgufWriter {
            alignment: DEFAULT_ALIGNMENT,
            n_metadata: 0,
            metadata: Vec::new(),
            names: BTreeSet::new(),
            n_tensors: 0,
            directory: Vec::new(),
            data_len: 0,
        }
    }

    /// An empty file that aligns tensors to `alignment` bytes and records that in `general.alignment`.
    ///
    /// # Errors
    /// [`WriteError::Alignment`] if it is not a power of two from 8 to 2^21.
    pub fn with_alignment(alignment: u32) -> Result<Self, WriteError> {
        let mut writer = GgufWriter::new();
        writer.alignment = alignment.into();
        if !alignment.is_power_of_two() || alignment < 8 || writer.alignment > MAX_ALIGNMENT {
            return Err(WriteError::Alignment(writer.alignment));
        }
        let value = alignment.to_le_bytes();
        writer.entry("general.alignment", ValueType::U32, |out| out.extend_from_slice(&value))?;
        Ok(writer)
    }

    /// Adds metadata. A value of a [`super::Gguf`] is copied bit for bit.
    ///
    /// # Errors
    /// [`WriteError::Name`], [`WriteError::Duplicate`]; [`WriteError::Alignment`] for `general.alignment`, which only
    /// [`GgufWriter::with_alignment`] sets.
    pub fn metadata(&mut self, key: &str, value: &Value<'_>) -> Result<(), WriteError> {
        if key == "general.alignment" {
            return Err(WriteError::Alignment(self.alignment));
        }
        self.entry(key, value.value_type(), |out| match *value {
            Value::U8(v) => out.push(v),
            Value::I8(v) => out.push(v as u8),
            Value::U16(v) => out.extend_from_slice(&v.to_le_bytes()),
            Value::I16(v) => out.extend_from_slice(&v.to_le_bytes()),
            Value::U32(v) => out.extend_from_slice(&v.to_le_bytes()),
            Value::I32(v) => out.extend_from_slice(&v.to_le_bytes()),
            Value::F32(v) => out.extend_from_slice(&v.to_le_bytes()),
            Value::Bool(v) => out.push(v.into()),
            Value::Str(v) => string(out, v),
            Value::Array(v) => array(out, &v),
            Value::U64(v) => out.extend_from_slice(&v.to_le_bytes()),
            Value::I64(v) => out.extend_from_slice(&v.to_le_bytes()),
            Value::F64(v) => out.extend_from_slice(&v.to_le_bytes()),
        })
    }

    /// Adds a string. Errors as [`GgufWriter::metadata`].
    pub fn str(&mut self, key: &str, value: &str) -> Result<(), WriteError> {
        self.metadata(key, &Value::Str(value.as_bytes()))
    }

    /// Adds an array of strings. Errors as [`GgufWriter::metadata`].
    pub fn str_array<S: AsRef<[u8]>>(&mut self, key: &str, values: &[S]) -> Result<(), WriteError> {
        let mut bytes = Vec::new();
        values.iter().for_each(|v| string(&mut bytes, v.as_ref()));
        self.array(key, ValueType::Str, values.len(), &bytes)
    }

    /// Adds an array of I32. Errors as [`GgufWriter::metadata`].
    pub fn i32_array(&mut self, key: &str, values: &[i32]) -> Result<(), WriteError> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.array(key, ValueType::I32, values.len(), &bytes)
    }

    /// Adds an array of U32. Errors as [`GgufWriter::metadata`].
    pub fn u32_array(&mut self, key: &str, values: &[u32]) -> Result<(), WriteError> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.array(key, ValueType::U32, values.len(), &bytes)
    }

    /// Adds an array of F32. Errors as [`GgufWriter::metadata`].
    pub fn f32_array(&mut self, key: &str, values: &[f32]) -> Result<(), WriteError> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.array(key, ValueType::F32, values.len(), &bytes)
    }

    /// Adds an array of U64. Errors as [`GgufWriter::metadata`].
    pub fn u64_array(&mut self, key: &str, values: &[u64]) -> Result<(), WriteError> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.array(key, ValueType::U64, values.len(), &bytes)
    }

    /// Adds an array of booleans. Errors as [`GgufWriter::metadata`].
    pub fn bool_array(&mut self, key: &str, values: &[bool]) -> Result<(), WriteError> {
        let bytes: Vec<u8> = values.iter().map(|v| u8::from(*v)).collect();
        self.array(key, ValueType::Bool, values.len(), &bytes)
    }

    /// Adds a tensor with 1 to 4 dimensions, the fastest-varying first. Returns the length of its data in bytes.
    ///
    /// # Errors
    /// [`WriteError::Name`], [`WriteError::Duplicate`], [`WriteError::Shape`].
    pub fn tensor(&mut self, name: &str, dtype: Dtype, dims: &[u64]) -> Result<u64, WriteError> {
        let shape = || WriteError::Shape { name: name.to_string(), dtype, dims: dims.to_vec() };
        if !(1..=4).contains(&dims.len()) {
            return Err(shape());
        }
        let mut padded = [1; 4];
        padded[..dims.len()].copy_from_slice(dims);
        let len = tensor_len(dtype, padded).ok_or_else(shape)?;
        let end = self.data_len.checked_add(len).and_then(|n| n.checked_next_multiple_of(self.alignment));
        let end = end.filter(|&n| n <= i64::MAX as u64).ok_or_else(shape)?;
        self.unique(name, 't', MAX_TENSOR_NAME_LEN)?;
        let out = &mut self.directory;
        string(out, name.as_bytes());
        out.extend_from_slice(&(dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| out.extend_from_slice(&dim.to_le_bytes()));
        out.extend_from_slice(&dtype.ggml_id().to_le_bytes());
        out.extend_from_slice(&self.data_len.to_le_bytes());
        self.data_len = end;
        self.n_tensors += 1;
        Ok(len)
    }

    /// The header: everything before the tensor data, padded to the alignment.
    pub fn header(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(24 + self.metadata.len() + self.directory.len() + self.alignment as usize);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&3u32.to_le_bytes());
        out.extend_from_slice(&self.n_tensors.to_le_bytes());
        out.extend_from_slice(&self.n_metadata.to_le_bytes());
        out.extend_from_slice(&self.metadata);
        out.extend_from_slice(&self.directory);
        out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
        out
    }

    /// The whole file, given the data of the tensors in the order added.
    pub fn file(&self, contents: impl IntoIterator<Item: AsRef<[u8]>>) -> Vec<u8> {
        let mut file = self.header();
        for data in contents {
            file.extend_from_slice(data.as_ref());
            file.resize(file.len() + self.padding(data.as_ref().len() as u64), 0);
        }
        file
    }

    /// Number of zero bytes to write after a tensor of `len_bytes`.
    pub fn padding(&self, len_bytes: u64) -> usize {
        (len_bytes.wrapping_neg() & (self.alignment - 1)) as usize
    }

    /// Length of all tensor data with padding in bytes.
    pub fn data_len(&self) -> u64 {
        self.data_len
    }

    fn array(&mut self, key: &str, element_type: ValueType, len: usize, bytes: &[u8]) -> Result<(), WriteError> {
        self.metadata(key, &Value::Array(Array { element_type, len, bytes }))
    }

    fn entry(&mut self, key: &str, ty: ValueType, value: impl FnOnce(&mut Vec<u8>)) -> Result<(), WriteError> {
        self.unique(key, 'm', MAX_KEY_LEN)?;
        string(&mut self.metadata, key.as_bytes());
        self.metadata.extend_from_slice(&ty.id().to_le_bytes());
        value(&mut self.metadata);
        self.n_metadata += 1;
        Ok(())
    }

    /// Records a metadata key (`m`) or tensor name (`t`) and checks that it is new.
    fn unique(&mut self, name: &str, kind: char, max: u64) -> Result<(), WriteError> {
        if name.is_empty() || name.len() as u64 > max {
            return Err(WriteError::Name { name: name.into(), max });
        }
        let mut tagged = String::from(kind);
        tagged.push_str(name);
        if self.names.insert(tagged) { Ok(()) } else { Err(WriteError::Duplicate(name.into())) }
    }
}

fn string(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn array(out: &mut Vec<u8>, array: &Array<'_>) {
    out.extend_from_slice(&array.element_type().id().to_le_bytes());
    out.extend_from_slice(&(array.len() as u64).to_le_bytes());
    out.extend_from_slice(array.bytes());
}
