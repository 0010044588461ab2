//! Metadata values: scalars are decoded, strings and arrays borrow from the file.

use alloc::format;
use alloc::string::String;

/// Types of metadata values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // the names say it all
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Str,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    /// All types in the order of their ids: `ALL[id]`.
    pub const ALL: [ValueType; 13] = [
        ValueType::U8,
        ValueType::I8,
        ValueType::U16,
        ValueType::I16,
        ValueType::U32,
        ValueType::I32,
        ValueType::F32,
        ValueType::Bool,
        ValueType::Str,
        ValueType::Array,
        ValueType::U64,
        ValueType::I64,
        ValueType::F64,
    ];

    /// The type with this id.
    pub fn from_id(id: u32) -> Option<ValueType> {
        ValueType::ALL.get(id as usize).copied()
    }

    /// The type's id in files.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// Bytes of a scalar; for strings and arrays the minimum (their length fields).
    pub fn min_bytes(self) -> u64 {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 | ValueType::Str => 8,
            ValueType::Array => 12,
        }
    }
}

/// A metadata value.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)] // one variant per ValueType
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    /// The bytes of a string, which need not be UTF-8.
    Str(&'a [u8]),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> Value<'a> {
    /// The value's type.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::Str(_) => ValueType::Str,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// The value of an integer of any width.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// The value of a float; F64 is rounded to nearest.
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        }
    }

    /// The array, if the value is one.
    pub fn as_array(&self) -> Option<&Array<'a>> {
        match self {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }

    /// A short description for error messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Value::Str(bytes) => format!("a string of {} bytes", bytes.len()),
            Value::Array(array) => format!("an array of {} {:?}", array.len(), array.element_type()),
            scalar => format!("{scalar:?}"),
        }
    }

    /// A scalar of this type from exactly its bytes; `None` for strings, arrays and wrong lengths.
    /// A `Bool` must be 0 or 1.
    pub(crate) fn scalar(ty: ValueType, bytes: &[u8]) -> Option<Value<'static>> {
        Some(match ty {
            ValueType::U8 => Value::U8(u8::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::U32 => Value::U32(u32::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::I32 => Value::I32(i32::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::Bool => match bytes {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                _ => return None,
            },
            ValueType::U64 => Value::U64(u64::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::I64 => Value::I64(i64::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::Str | ValueType::Array => return None,
        })
    }
}

/// An array of metadata: its element type, its length, and its bytes in the file, already checked by the reader.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    pub(super) element_type: ValueType,
    pub(super) len: usize,
    /// The elements as stored: `len` values, back to back.
    pub(super) bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// The type of every element.
    pub fn element_type(&self) -> ValueType {
        self.element_type
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements as stored in the file, back to back.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements as scalars: nothing if this is an array of strings or of arrays.
    pub fn scalars(&self) -> impl Iterator<Item = Value<'static>> + use<'a> {
        let ty = self.element_type;
        self.bytes.chunks_exact(ty.min_bytes() as usize).map_while(move |bytes| Value::scalar(ty, bytes))
    }

    /// The elements as arrays: nothing if they are of another type.
    pub fn arrays(&self) -> impl Iterator<Item = Array<'a>> + use<'a> {
        let is_nested = self.element_type == ValueType::Array;
        let (mut left, mut rest) = (if is_nested { self.len } else { 0 }, self.bytes);
        core::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let (array, after) = Array::split_from(rest)?;
            rest = after;
            Some(array)
        })
    }

    /// The array that `bytes` begin with, and what follows it. Recurses as deep as arrays are nested, which the reader
    /// bounds.
    fn split_from(bytes: &'a [u8]) -> Option<(Array<'a>, &'a [u8])> {
        let (id, rest) = bytes.split_first_chunk()?;
        let (len, body) = rest.split_first_chunk()?;
        let element_type = ValueType::from_id(u32::from_le_bytes(*id))?;
        let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        let mut end = 0usize;
        match element_type {
            ValueType::Str => {
                for _ in 0..len {
                    let string = body.get(end..)?.first_chunk()?;
                    end = end.checked_add(8)?.checked_add(usize::try_from(u64::from_le_bytes(*string)).ok()?)?;
                }
            }
            ValueType::Array => {
                for _ in 0..len {
                    end = body.len() - Array::split_from(body.get(end..)?)?.1.len();
                }
            }
            scalar => end = len.checked_mul(scalar.min_bytes() as usize)?,
        }
        let (bytes, rest) = body.split_at_checked(end)?;
        Some((Array { element_type, len, bytes }, rest))
    }

    /// The elements as strings: `None` if they are of another type.
    pub fn strings(&self) -> Option<StrArray<'a>> {
        (self.element_type == ValueType::Str).then_some(StrArray { len: self.len, rest: self.bytes })
    }
}

/// Iterator over the strings of an array, as bytes: they need not be UTF-8. `len()` is exact.
#[derive(Debug, Clone)]
pub struct StrArray<'a> {
    len: usize,
    rest: &'a [u8],
}

impl<'a> Iterator for StrArray<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        if self.len == 0 {
            return None;
        }
        let (len_bytes, rest) = self.rest.split_first_chunk::<8>()?;
        let (string, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len_bytes)).ok()?)?;
        self.len -= 1;
        self.rest = rest;
        Some(string)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.len, Some(self.len))
    }
}

impl ExactSizeIterator for StrArray<'_> {}
