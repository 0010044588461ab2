//! Parser of the header: a cursor over a prefix of the file, and the rules of the format.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::value::{Array, Value, ValueType};
use super::{DEFAULT_ALIGNMENT, Gguf, HeaderError, MAGIC, TensorInfo};
use crate::error::LoadError;
use crate::quant::Dtype;

/// Maximal length of a metadata key in bytes: the format's own limit.
pub(super) const MAX_KEY_LEN: u64 = 65_535;
/// Maximal length of a tensor name in bytes: the format says 64; some writers exceed that, but stay far below this.
pub(super) const MAX_TENSOR_NAME_LEN: u64 = 256;
/// Maximal nesting of arrays, which bounds the recursion: gguf-py writes lists of lists, llama.cpp writes no nested
/// ones.
pub(super) const MAX_ARRAY_DEPTH: u32 = 2;
/// Maximal `general.alignment`: the size of a huge page; more would only add padding.
pub(super) const MAX_ALIGNMENT: u64 = 1 << 21;
/// Maximal number of metadata entries: large files have hundreds; indices fit 32 bits.
pub(super) const MAX_METADATA: u64 = 1 << 20;
/// Maximal number of tensors: the largest models in use have a few thousand; indices fit 32 bits.
pub(super) const MAX_TENSORS: u64 = 1 << 20;

/// Bytes of the smallest metadata entry: key length, type, one byte of value.
const MIN_METADATA_BYTES: u64 = 8 + 4 + 1;
/// Bytes of the smallest tensor entry: name length, dimension count, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

pub(super) fn parse(prefix: &[u8], file_len: u64) -> Result<Gguf<'_>, HeaderError> {
    let mut r = Reader { prefix, file_len, pos: 0 };
    let version = r.preamble()?;
    let n_tensors = r.count("tensor count", MAX_TENSORS, MIN_TENSOR_BYTES)?;
    let n_metadata = r.count("metadata count", MAX_METADATA, MIN_METADATA_BYTES)?;

    let mut metadata = Vec::with_capacity(r.capacity(n_metadata, MIN_METADATA_BYTES));
    for _ in 0..n_metadata {
        metadata.push((r.key()?, r.typed_value()?));
    }
    let key_order = sorted(&metadata, |(key, _)| key);
    if let Some(key) = duplicate(&metadata, &key_order, |(key, _)| key) {
        let key = key.to_string();
        return Err(LoadError::Metadata { key, found: "two entries".into(), expected: "one".into() }.into());
    }
    let alignment = alignment(&metadata)?;

    let mut tensors = Vec::with_capacity(r.capacity(n_tensors, MIN_TENSOR_BYTES));
    for _ in 0..n_tensors {
        tensors.push(r.tensor_info(alignment)?);
    }
    let name_order = sorted(&tensors, |t| t.name);
    if let Some(name) = duplicate(&tensors, &name_order, |t| t.name) {
        return Err(tensor_error(name, "two tensors of this name".into(), "one".into()));
    }

    let aligned = r.pos.next_multiple_of(alignment);
    let header_len = if tensors.is_empty() { aligned.min(file_len) } else { aligned };
    resolve_offsets(&mut tensors, header_len, file_len)?;
    let data = (prefix.len() as u64 >= file_len).then_some(prefix);
    Ok(Gguf { version, alignment, header_len, metadata, key_order, tensors, name_order, data })
}

/// `general.alignment`, or the format's default.
fn alignment(metadata: &[(&str, Value<'_>)]) -> Result<u64, LoadError> {
    match metadata.iter().find(|(key, _)| *key == "general.alignment").map(|(_, value)| value) {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(&Value::U32(a)) if a.is_power_of_two() && a % 8 == 0 && u64::from(a) <= MAX_ALIGNMENT => Ok(a.into()),
        Some(other) => Err(LoadError::Metadata {
            key: "general.alignment".into(),
            found: other.describe(),
            expected: format!("a U32, a power of two from 8 to {MAX_ALIGNMENT}"),
        }),
    }
}

/// Turns offsets relative to the tensor data into offsets in the file; checks that every tensor is inside the file
/// and that none overlap.
fn resolve_offsets(tensors: &mut [TensorInfo<'_>], header_len: u64, file_len: u64) -> Result<(), HeaderError> {
    for t in tensors.iter_mut() {
        let start = header_len.checked_add(t.offset);
        match start.and_then(|start| start.checked_add(t.len_bytes)) {
            Some(end) if end <= file_len => t.offset += header_len,
            _ => {
                let found = format!("{} bytes of data at {} after the header", t.len_bytes, t.offset);
                let room = file_len.saturating_sub(header_len);
                let expected = format!("data within the {room} bytes that the file has after its header");
                return Err(tensor_error(t.name, found, expected));
            }
        }
    }
    let mut by_offset: Vec<&TensorInfo<'_>> = tensors.iter().collect();
    by_offset.sort_by_key(|t| t.offset);
    for pair in by_offset.windows(2) {
        let (a, b) = (pair[0], pair[1]);
        if a.offset + a.len_bytes > b.offset {
            let found = format!("offset {}", b.offset);
            let expected = format!("at least {}, the end of `{}`", a.offset + a.len_bytes, a.name);
            return Err(tensor_error(b.name, found, expected));
        }
    }
    Ok(())
}

/// Indices of `items` in order of their names.
fn sorted<T>(items: &[T], name: impl Fn(&T) -> &str) -> Vec<u32> {
    let mut order: Vec<u32> = (0..items.len() as u32).collect();
    order.sort_by_key(|&i| name(&items[i as usize]));
    order
}

/// A name that two of `items` have, if any; `order` sorts them.
fn duplicate<'t, T>(items: &'t [T], order: &[u32], name: impl Fn(&'t T) -> &'t str) -> Option<&'t str> {
    order
        .windows(2)
        .map(|w| (name(&items[w[0] as usize]), name(&items[w[1] as usize])))
        .find(|(a, b)| a == b)
        .map(|p| p.0)
}

fn tensor_error(name: &str, found: String, expected: String) -> HeaderError {
    LoadError::Tensor { name: name.to_string(), found, expected }.into()
}

/// A cursor in a file of `file_len` bytes, of which the first `prefix.len()` are available.
struct Reader<'a> {
    prefix: &'a [u8],
    file_len: u64,
    pos: u64,
}

impl<'a> Reader<'a> {
    /// The next `len` bytes. [`LoadError::Gguf`] if they exceed the file, [`HeaderError::NeedMore`] if the prefix.
    fn take(&mut self, len: u64, what: &'static str) -> Result<&'a [u8], HeaderError> {
        self.need(len, what)?;
        let start = self.pos as usize;
        self.pos += len;
        Ok(&self.prefix[start..self.pos as usize])
    }

    /// Checks that the prefix contains the next `len` bytes.
    fn need(&self, len: u64, what: &'static str) -> Result<(), HeaderError> {
        match self.pos.checked_add(len) {
            Some(end) if end <= self.prefix.len() as u64 && end <= self.file_len => Ok(()),
            Some(end) if end <= self.file_len => Err(HeaderError::NeedMore { at_least: end }),
            _ => {
                let left = self.file_len.saturating_sub(self.pos);
                Err(self.bad(self.pos, what, format!("{left} bytes to the end of the file"), format!("{len} bytes")))
            }
        }
    }

    fn bad(&self, at: u64, what: &'static str, found: String, expected: String) -> HeaderError {
        LoadError::Gguf { at, what, found, expected }.into()
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, HeaderError> {
        let bytes = self.take(4, what)?;
        Ok(bytes.iter().rev().fold(0, |n, &b| n << 8 | u32::from(b)))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, HeaderError> {
        let bytes = self.take(8, what)?;
        Ok(bytes.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
    }

    /// Reads a count of items of at least `min_bytes` each, which must fit the rest of the file.
    fn count(&mut self, what: &'static str, max: u64, min_bytes: u64) -> Result<u64, HeaderError> {
        let at = self.pos;
        let n = self.u64(what)?;
        let fits = self.file_len.saturating_sub(self.pos) / min_bytes;
        if n > max || n > fits {
            let expected = format!("at most {}", max.min(fits));
            return Err(self.bad(at, what, n.to_string(), expected));
        }
        Ok(n)
    }

    /// How many of `n` items of at least `min_bytes` each fit the rest of the prefix: a safe capacity to reserve.
    fn capacity(&self, n: u64, min_bytes: u64) -> usize {
        (n.min((self.prefix.len() as u64).saturating_sub(self.pos) / min_bytes)) as usize
    }

    /// Magic and version.
    fn preamble(&mut self) -> Result<u32, HeaderError> {
        let magic = self.take(4, "magic")?;
        if magic != MAGIC {
            return Err(self.bad(0, "magic", format!("{magic:02x?}"), "`GGUF`".into()));
        }
        let version = self.u32("version")?;
        match version {
            2 | 3 => Ok(version),
            1 => Err(self.bad(
                4,
                "version",
                "1".into(),
                "2 or 3 (version 1 is long obsolete: convert the model again)".into(),
            )),
            v if matches!(v.swap_bytes(), 1..=3) => {
                let found = format!("version {} in big-endian order", v.swap_bytes());
                Err(self.bad(4, "version", found, "a little-endian file".into()))
            }
            v => Err(self.bad(4, "version", v.to_string(), "2 or 3".into())),
        }
    }

    /// Reads a string: its length and its bytes.
    fn string(&mut self, what: &'static str, max: u64) -> Result<&'a [u8], HeaderError> {
        let at = self.pos;
        let len = self.u64(what)?;
        if len > max {
            return Err(self.bad(at, what, format!("{len} bytes"), format!("at most {max}")));
        }
        self.take(len, what)
    }

    /// Reads a non-empty UTF-8 string.
    fn name(&mut self, what: &'static str, max: u64) -> Result<&'a str, HeaderError> {
        let at = self.pos;
        let bytes = self.string(what, max)?;
        match core::str::from_utf8(bytes) {
            Ok("") => Err(self.bad(at, what, "an empty string".into(), "a name".into())),
            Ok(name) => Ok(name),
            Err(e) => {
                let found = format!("a bad byte at {} of {}", e.valid_up_to(), bytes.len());
                Err(self.bad(at, what, found, "UTF-8".into()))
            }
        }
    }

    fn key(&mut self) -> Result<&'a str, HeaderError> {
        self.name("metadata key", MAX_KEY_LEN)
    }

    fn value_type(&mut self) -> Result<ValueType, HeaderError> {
        let at = self.pos;
        let id = self.u32("value type")?;
        ValueType::from_id(id).ok_or_else(|| self.bad(at, "value type", id.to_string(), "0 to 12".into()))
    }

    fn typed_value(&mut self) -> Result<Value<'a>, HeaderError> {
        match self.value_type()? {
            ValueType::Str => Ok(Value::Str(self.string("string", u64::MAX)?)),
            ValueType::Array => Ok(Value::Array(self.array(1)?)),
            ty => {
                let at = self.pos;
                let bytes = self.take(ty.min_bytes(), "value")?;
                Value::scalar(ty, bytes).ok_or_else(|| self.bad_bool(at, bytes))
            }
        }
    }

    fn bad_bool(&self, at: u64, bytes: &[u8]) -> HeaderError {
        self.bad(at, "bool", format!("{bytes:?}"), "0 or 1".into())
    }

    /// Reads an array at this nesting depth (1 = not nested). Skips strings and nested arrays to find its end.
    fn array(&mut self, depth: u32) -> Result<Array<'a>, HeaderError> {
        if depth > MAX_ARRAY_DEPTH {
            return Err(self.bad(
                self.pos,
                "array",
                format!("nesting of {depth}"),
                format!("at most {MAX_ARRAY_DEPTH}"),
            ));
        }
        let element_type = self.value_type()?;
        let n = self.count("array length", u64::MAX, element_type.min_bytes())?;
        self.need(n * element_type.min_bytes(), "array")?; // no overflow: `count` has seen that it fits the file
        let start = self.pos;
        match element_type {
            ValueType::Str => {
                for _ in 0..n {
                    self.string("string in an array", u64::MAX)?;
                }
            }
            ValueType::Array => {
                for _ in 0..n {
                    self.array(depth + 1)?;
                }
            }
            scalar => {
                let bytes = self.take(n * scalar.min_bytes(), "array")?;
                if let (ValueType::Bool, Some(i)) = (scalar, bytes.iter().position(|&b| b > 1)) {
                    return Err(self.bad_bool(start + i as u64, &bytes[i..=i]));
                }
            }
        }
        let bytes = &self.prefix[start as usize..self.pos as usize];
        Ok(Array { element_type, len: n as usize, bytes }) // `n <= bytes.len()`, so it fits
    }

    /// Reads an entry of the tensor directory; its offset is relative to the tensor data.
    fn tensor_info(&mut self, alignment: u64) -> Result<TensorInfo<'a>, HeaderError> {
        let name = self.name("tensor name", MAX_TENSOR_NAME_LEN)?;
        let n_dims = self.u32("number of dimensions")?;
        if !(1..=4).contains(&n_dims) {
            return Err(tensor_error(name, format!("{n_dims} dimensions"), "1 to 4".into()));
        }
        let mut dims = [1; 4];
        for dim in &mut dims[..n_dims as usize] {
            *dim = self.u64("dimension")?;
        }
        let id = self.u32("tensor type")?;
        let dtype = Dtype::from_ggml(id).ok_or_else(|| {
            let name_of = Dtype::removed_name(id).map(|n| format!(" ({n}, removed from ggml)")).unwrap_or_default();
            tensor_error(name, format!("type {id}{name_of}"), "the id of a ggml type".into())
        })?;
        let len_bytes = tensor_len(dtype, dims).ok_or_else(|| {
            let expected =
                format!("non-zero sizes, rows of whole blocks of {}, and a total below 2^63", dtype.block_len());
            tensor_error(name, format!("{} {dims:?}", dtype.name()), expected)
        })?;
        let offset = self.u64("tensor offset")?;
        if offset % alignment != 0 {
            return Err(tensor_error(name, format!("offset {offset}"), format!("a multiple of {alignment}")));
        }
        Ok(TensorInfo { name, dtype, dims, n_dims, offset, len_bytes })
    }
}

/// Bytes of a tensor; `None` if a size is zero, the row is not of whole blocks, or elements or bytes exceed `i64`
/// (ggml's own limit).
pub(super) fn tensor_len(dtype: Dtype, dims: [u64; 4]) -> Option<u64> {
    let max = i64::MAX as u64;
    dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).filter(|&n| n != 0 && n <= max)?;
    let rows = dims[1..].iter().product::<u64>();
    dtype.row_bytes(dims[0])?.checked_mul(rows).filter(|&n| n <= max)
}
