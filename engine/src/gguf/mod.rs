//! GGUF files: parses and writes metadata and tensor directory.
//!
//! A file contains, little-endian: magic `GGUF`, version (u32), number of tensors (u64), number of metadata entries
//! (u64), the entries (key, type, value), the tensor directory (name, dimensions, type, offset), padding to
//! `general.alignment`, and the tensor data, each tensor padded. Strings and arrays are preceded by their length (u64).
//! Source: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.
//!
//! Files are not trusted. Every length is checked against the remaining bytes before it is used. Parsing takes O(n log
//! n) time in the size of the header, and a small multiple of its memory. Tensor contents are checked by
//! [`crate::quant::validate`].

mod read;
mod split;
#[cfg(test)]
mod tests;
mod value;
mod write;

use alloc::format;
use alloc::string::ToString;
use alloc::vec::Vec;

use thiserror::Error;

pub use self::split::{GgufSet, MAX_SHARDS, ShardError, ShardName, split_sha256};
pub use self::value::{Array, StrArray, Value, ValueType};
pub use self::write::{GgufWriter, WriteError};
use crate::error::LoadError;
use crate::quant::Dtype;

/// The first four bytes of a file.
pub const MAGIC: &[u8; 4] = b"GGUF";
/// Default alignment of the tensor data in bytes.
pub const DEFAULT_ALIGNMENT: u64 = 32;

/// Why the header could not be parsed from the first bytes of a file.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HeaderError {
    /// The header continues beyond the bytes given. Parsing starts over with more bytes; at least double them each
    /// time, so that the total time stays linear.
    #[error("the header needs at least {at_least} bytes of the file")]
    NeedMore {
        /// Lower bound of the bytes needed from the start of the file, at most its length.
        at_least: u64,
    },
    /// The file is malformed or unsupported.
    #[error(transparent)]
    Load(#[from] LoadError),
}

/// Metadata and tensor directory of a file, borrowed from its bytes.
#[derive(Debug, Clone)]
pub struct Gguf<'a> {
    version: u32,
    alignment: u64,
    header_len: u64,
    metadata: Vec<(&'a str, Value<'a>)>,
    /// Indices of `metadata`, sorted by key.
    key_order: Vec<u32>,
    tensors: Vec<TensorInfo<'a>>,
    /// Indices of `tensors`, sorted by name.
    name_order: Vec<u32>,
    /// The whole file, if it was given.
    data: Option<&'a [u8]>,
}

/// An entry of the tensor directory. Its data lies inside the file and overlaps no other tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Name, unique in the file.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, the fastest-varying first (`ne` in ggml), non-zero, padded with 1. A row has `dims[0]` elements, in
    /// whole blocks. The product fits `i64`.
    pub dims: [u64; 4],
    /// Number of dimensions in the file, 1 to 4.
    pub n_dims: u32,
    /// Offset of the data from the start of the file in bytes.
    pub offset: u64,
    /// Length of the data in bytes, without padding.
    pub len_bytes: u64,
}

impl TensorInfo<'_> {
    /// Number of elements.
    pub fn n_elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Number of rows: the product of all dimensions but the first.
    pub fn n_rows(&self) -> u64 {
        self.dims[1..].iter().product()
    }
}

impl<'a> Gguf<'a> {
    /// Parses the header of a file in memory.
    ///
    /// # Errors
    /// [`LoadError`] names the offset, key or tensor that is invalid.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, LoadError> {
        let file_len = bytes.len() as u64;
        read::parse(bytes, file_len).map_err(|e| match e {
            HeaderError::Load(e) => e,
            HeaderError::NeedMore { at_least } => LoadError::Gguf {
                at: file_len,
                what: "file",
                found: format!("{file_len} bytes"),
                expected: format!("{at_least} bytes"),
            },
        })
    }

    /// Parses the header from the first bytes of a file of `file_len` bytes, e.g. during a download.
    ///
    /// # Errors
    /// [`HeaderError::NeedMore`] if `prefix` does not contain the whole header.
    pub fn parse_header(prefix: &'a [u8], file_len: u64) -> Result<Self, HeaderError> {
        read::parse(prefix, file_len)
    }

    /// Version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of the tensor data in bytes.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Offset of the tensor data from the start of the file in bytes.
    pub fn header_len(&self) -> u64 {
        self.header_len
    }

    /// All metadata in file order.
    pub fn metadata(&self) -> &[(&'a str, Value<'a>)] {
        &self.metadata
    }

    /// The value of a metadata key.
    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        let found = self.key_order.binary_search_by(|&i| self.metadata[i as usize].0.cmp(key)).ok()?;
        Some(&self.metadata[self.key_order[found] as usize].1)
    }

    /// All tensors in file order.
    pub fn tensors(&self) -> &[TensorInfo<'a>] {
        &self.tensors
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo<'a>> {
        let found = self.name_order.binary_search_by(|&i| self.tensors[i as usize].name.cmp(name)).ok()?;
        Some(&self.tensors[self.name_order[found] as usize])
    }

    /// The data of a tensor; `None` if only the header was given.
    pub fn data(&self, tensor: &TensorInfo<'a>) -> Option<&'a [u8]> {
        let start = usize::try_from(tensor.offset).ok()?;
        let len = usize::try_from(tensor.len_bytes).ok()?;
        self.data?.get(start..start.checked_add(len)?)
    }

    /// A non-negative integer of any width.
    ///
    /// # Errors
    /// [`LoadError::Metadata`] if the value is of another type or negative; `Ok(None)` if the key is missing.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, LoadError> {
        self.typed(key, "a non-negative integer", |v| v.as_integer()?.try_into().ok())
    }

    /// A non-negative integer of any width that fits 32 bits. Errors as [`Gguf::u64`].
    pub fn u32(&self, key: &str) -> Result<Option<u32>, LoadError> {
        self.typed(key, "a non-negative integer below 2^32", |v| v.as_integer()?.try_into().ok())
    }

    /// A float; an F64 is rounded. Errors as [`Gguf::u64`].
    pub fn f32(&self, key: &str) -> Result<Option<f32>, LoadError> {
        self.typed(key, "a float", Value::as_f32)
    }

    /// A boolean. Errors as [`Gguf::u64`].
    pub fn bool(&self, key: &str) -> Result<Option<bool>, LoadError> {
        self.typed(key, "a bool", |v| match *v {
            Value::Bool(b) => Some(b),
            _ => None,
        })
    }

    /// A string, which must be UTF-8. Errors as [`Gguf::u64`].
    pub fn str(&self, key: &str) -> Result<Option<&'a str>, LoadError> {
        self.typed(key, "a UTF-8 string", |v| match *v {
            Value::Str(bytes) => core::str::from_utf8(bytes).ok(),
            _ => None,
        })
    }

    /// A string as bytes, which need not be UTF-8. Errors as [`Gguf::u64`].
    pub fn bytes(&self, key: &str) -> Result<Option<&'a [u8]>, LoadError> {
        self.typed(key, "a string", |v| match *v {
            Value::Str(bytes) => Some(bytes),
            _ => None,
        })
    }

    /// An array of strings, as bytes. Errors as [`Gguf::u64`].
    pub fn str_array(&self, key: &str) -> Result<Option<StrArray<'a>>, LoadError> {
        self.typed(key, "an array of strings", |v| v.as_array()?.strings())
    }

    /// An array of 8-bit integers, signed or not, as bytes. Errors as [`Gguf::u64`].
    pub fn byte_array(&self, key: &str) -> Result<Option<&'a [u8]>, LoadError> {
        self.typed(key, "an array of 8-bit integers", |v| {
            let array = v.as_array()?;
            matches!(array.element_type(), ValueType::U8 | ValueType::I8).then(|| array.bytes())
        })
    }

    /// An array of floats; F64 are rounded. Errors as [`Gguf::u64`].
    pub fn f32_array(&self, key: &str) -> Result<Option<Vec<f32>>, LoadError> {
        self.typed(key, "an array of floats", |v| numbers(v.as_array()?, |v| v.as_f32()))
    }

    /// An array of integers of any width that fit `u32`. Errors as [`Gguf::u64`].
    pub fn u32_array(&self, key: &str) -> Result<Option<Vec<u32>>, LoadError> {
        self.typed(key, "an array of integers from 0 to 2^32 - 1", |v| {
            numbers(v.as_array()?, |v| v.as_integer()?.try_into().ok())
        })
    }

    /// An array of integers of any width that fit `u64`. Errors as [`Gguf::u64`].
    pub fn u64_array(&self, key: &str) -> Result<Option<Vec<u64>>, LoadError> {
        self.typed(key, "an array of integers from 0 to 2^64 - 1", |v| {
            numbers(v.as_array()?, |v| v.as_integer()?.try_into().ok())
        })
    }

    /// An array of integers of any width that fit `i32`. Errors as [`Gguf::u64`].
    pub fn i32_array(&self, key: &str) -> Result<Option<Vec<i32>>, LoadError> {
        self.typed(key, "an array of integers from -2^31 to 2^31 - 1", |v| {
            numbers(v.as_array()?, |v| v.as_integer()?.try_into().ok())
        })
    }

    /// The value of `key`, converted.
    fn typed<T>(
        &self,
        key: &str,
        expected: &'static str,
        convert: impl Fn(&Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| LoadError::Metadata {
            key: key.to_string(),
            found: value.describe(),
            expected: expected.into(),
        })
    }
}

/// Converts all elements; `None` if one cannot be converted or they are not scalars.
fn numbers<T>(array: &Array<'_>, convert: impl Fn(&Value<'static>) -> Option<T>) -> Option<Vec<T>> {
    if matches!(array.element_type(), ValueType::Str | ValueType::Array) {
        return None;
    }
    array.scalars().map(|v| convert(&v)).collect()
}
