//! Access to metadata keys with the prefix of an architecture. Values are not trusted.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt::Display;
use core::ops::RangeInclusive;

use crate::error::LoadError;
use crate::gguf::{Gguf, Value, ValueType};

/// Maximal number of layers: beyond any known model, and cheap to hold.
pub(crate) const MAX_LAYERS: u32 = 4096;
/// Maximal width of a vector: keeps every product of two widths below 2^48.
pub(crate) const MAX_WIDTH: u32 = 1 << 24;
/// Maximal context: f64 RoPE angles stay exact to 1e-12 well beyond.
pub(crate) const MAX_CONTEXT: u32 = 1 << 28;

/// Reads keys `ARCH.name`.
pub(crate) struct Keys<'g, 'a> {
    gguf: &'g Gguf<'a>,
    arch: &'static str,
    /// Values that the family has in place of the file's.
    own: Vec<(&'static str, Value<'static>)>,
}

impl<'g, 'a> Keys<'g, 'a> {
    pub(crate) fn new(gguf: &'g Gguf<'a>, arch: &'static str) -> Keys<'g, 'a> {
        Keys { gguf, arch, own: Vec::new() }
    }

    /// The keys with another prefix.
    pub(crate) fn with_prefix(&self, arch: &'static str) -> Keys<'g, 'a> {
        Keys::new(self.gguf, arch)
    }

    /// Replaces the value of the file.
    pub(crate) fn set_u32(&mut self, name: &'static str, value: u32) {
        self.own.push((name, Value::U32(value)));
    }

    /// The same for a float.
    pub(crate) fn set_f32(&mut self, name: &'static str, value: f32) {
        self.own.push((name, Value::F32(value)));
    }

    fn own(&self, name: &str) -> Option<&Value<'static>> {
        self.own.iter().rev().find(|(own, _)| *own == name).map(|(_, value)| value)
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    pub(crate) fn wrong(&self, name: &str, found: impl ToString, expected: impl Display) -> LoadError {
        LoadError::Metadata { key: self.key(name), found: found.to_string(), expected: expected.to_string() }
    }

    pub(crate) fn str(&self, name: &str) -> Result<Option<&str>, LoadError> {
        self.gguf.str(&self.key(name))
    }

    pub(crate) fn bool(&self, name: &str) -> Result<Option<bool>, LoadError> {
        self.gguf.bool(&self.key(name))
    }

    /// An integer, or an array with the same integer for each of the `block_count` layers.
    pub(crate) fn u32(&self, name: &str) -> Result<Option<u32>, LoadError> {
        if let Some(Value::U32(own)) = self.own(name) {
            return Ok(Some(*own));
        }
        let key = self.key(name);
        let Some(Value::Array(_)) = self.gguf.get(&key) else { return self.gguf.u32(&key) };
        let layers = self.gguf.u32_array(&key)?.unwrap_or_default();
        let n_layer = self.gguf.u32(&self.key("block_count"))?.unwrap_or(0);
        if layers.len() != n_layer as usize {
            let expected = format!("{n_layer} elements, one per layer (block_count)");
            return Err(self.wrong(name, format!("an array of {} elements", layers.len()), expected));
        }
        match layers.first() {
            Some(&n) if layers.iter().all(|&other| other == n) => Ok(Some(n)),
            _ => Err(self.wrong(name, "values that differ between layers", "the same value for all layers")),
        }
    }

    pub(crate) fn u32_array(&self, name: &str) -> Result<Option<Vec<u32>>, LoadError> {
        self.gguf.u32_array(&self.key(name))
    }

    pub(crate) fn u64_array(&self, name: &str) -> Result<Option<Vec<u64>>, LoadError> {
        self.gguf.u64_array(&self.key(name))
    }

    /// An integer for each of `n` layers, from an array or the same for all.
    pub(crate) fn per_layer_u32(&self, name: &str, n: usize) -> Result<Option<Vec<u32>>, LoadError> {
        if let Some(Value::U32(own)) = self.own(name) {
            return Ok(Some(alloc::vec![*own; n]));
        }
        let key = self.key(name);
        let Some(Value::Array(_)) = self.gguf.get(&key) else {
            return Ok(self.gguf.u32(&key)?.map(|v| alloc::vec![v; n]));
        };
        let values = self.gguf.u32_array(&key)?.unwrap_or_default();
        if values.len() != n {
            let expected = format!("{n} elements, one per layer (block_count)");
            return Err(self.wrong(name, format!("an array of {} elements", values.len()), expected));
        }
        Ok(Some(values))
    }

    pub(crate) fn f32(&self, name: &str) -> Result<Option<f32>, LoadError> {
        if let Some(Value::F32(own)) = self.own(name) {
            return Ok(Some(*own));
        }
        match self.gguf.f32(&self.key(name))? {
            Some(v) if !v.is_finite() => Err(self.wrong(name, v, "a finite number")),
            v => Ok(v),
        }
    }

    pub(crate) fn f32_array(&self, name: &str) -> Result<Option<Vec<f32>>, LoadError> {
        self.gguf.f32_array(&self.key(name))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.own(name).is_some() || self.gguf.get(&self.key(name)).is_some()
    }

    pub(crate) fn is_array(&self, name: &str) -> bool {
        self.own(name).is_none() && matches!(self.gguf.get(&self.key(name)), Some(Value::Array(_)))
    }

    /// A number for each of `n` layers, from an array or the same for all; 0 if the key is missing.
    pub(crate) fn per_layer_f32(&self, name: &str, n: usize) -> Result<Vec<f32>, LoadError> {
        let key = self.key(name);
        let values = match self.gguf.get(&key) {
            None => return Ok(alloc::vec![0.0; n]),
            Some(Value::Array(_)) => self.gguf.f32_array(&key)?.unwrap_or_default(),
            Some(_) => alloc::vec![self.f32(name)?.unwrap_or(0.0); n],
        };
        match values.iter().find(|v| !v.is_finite()) {
            Some(v) => Err(self.wrong(name, v, "finite numbers")),
            None if values.len() != n => {
                Err(self.wrong(name, format!("an array of {} elements", values.len()), format!("{n} numbers")))
            }
            None => Ok(values),
        }
    }

    pub(crate) fn in_range(&self, name: &str, v: Option<u32>, range: RangeInclusive<u32>) -> Result<usize, LoadError> {
        let expected = format!("{} to {}", range.start(), range.end());
        match v {
            Some(v) if range.contains(&v) => Ok(v as usize),
            Some(v) => Err(self.wrong(name, v, expected)),
            None => Err(self.wrong(name, "nothing", expected)),
        }
    }

    pub(crate) fn size(&self, name: &str, range: RangeInclusive<u32>) -> Result<usize, LoadError> {
        self.in_range(name, self.u32(name)?, range)
    }

    /// A number above `limit`; `default` if the key is missing.
    pub(crate) fn above(&self, name: &str, limit: f32, default: f32) -> Result<f32, LoadError> {
        match self.f32(name)?.unwrap_or(default) {
            v if v > limit => Ok(v),
            v => Err(self.wrong(name, v, format!("a number above {limit}"))),
        }
    }

    /// A positive number; `default` if the key is missing.
    pub(crate) fn positive(&self, name: &str, default: f32) -> Result<f32, LoadError> {
        match self.f32(name)?.unwrap_or(default) {
            v if v > 0.0 => Ok(v),
            v => Err(self.wrong(name, v, "a positive number")),
        }
    }

    /// A positive number; `None` if the key is missing or 0.
    pub(crate) fn optional(&self, name: &str) -> Result<Option<f32>, LoadError> {
        match self.f32(name)? {
            None | Some(0.0) => Ok(None),
            Some(v) if v > 0.0 => Ok(Some(v)),
            Some(v) => Err(self.wrong(name, v, "a positive number")),
        }
    }

    /// A pattern over `n` layers, true for local ones: from an array with a value per layer, or from a period p
    /// (`default` if the key is missing), of which the last layer is global. Period 0: all are local.
    pub(crate) fn pattern(&self, name: &str, n: usize, default: usize) -> Result<Vec<bool>, LoadError> {
        let key = self.key(name);
        let period = match self.gguf.get(&key) {
            Some(Value::Array(a)) => {
                let values: Option<Vec<bool>> = match a.element_type() {
                    ValueType::Str | ValueType::Array => None,
                    _ => a
                        .scalars()
                        .map(|v| if let Value::Bool(b) = v { Some(b) } else { Some(v.as_integer()? != 0) })
                        .collect(),
                };
                return match values {
                    Some(v) if v.len() == n => Ok(v),
                    _ => {
                        let found = format!("an array of {} {:?}", a.len(), a.element_type());
                        Err(self.wrong(name, found, format!("{n} booleans, one per layer")))
                    }
                };
            }
            _ => self.gguf.u32(&key)?.map_or(default, |p| p as usize),
        };
        Ok((0..n).map(|i| period == 0 || i % period < period - 1).collect())
    }
}
