//! Split models: names of their files, and [`GgufSet`], which joins their headers.
//!
//! The files are `NAME-00001-of-00005.gguf` and so on. Each has `split.no` (from 0), `split.count` and
//! `split.tensors.count` (of all files); the first holds the metadata of the model.
//! Source: <https://github.com/ggml-org/llama.cpp/blob/master/tools/gguf-split/README.md>.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use sha2::{Digest, Sha256};

use super::{Gguf, TensorInfo};
use crate::error::LoadError;

/// Maximal number of files of a model: file names have five digits.
pub const MAX_SHARDS: u32 = 99_999;

/// The digest that identifies a model: SHA-256 of its file; for a split model, SHA-256 of the concatenated SHA-256s (32
/// bytes each) of its files in shard order.
pub fn split_sha256(files: &[[u8; 32]]) -> [u8; 32] {
    match files {
        [one] => *one,
        all => Sha256::digest(all.as_flattened()).into(),
    }
}

/// A file name `STEM-00001-of-00005.gguf`, parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardName<'a> {
    /// Everything before the number, directories included.
    pub stem: &'a str,
    /// Number of the file, from 1 to `count`.
    pub number: u32,
    /// Number of files of the model.
    pub count: u32,
}

impl<'a> ShardName<'a> {
    /// Parses a file name; `None` if it does not have this form.
    pub fn parse(file_name: &'a str) -> Option<ShardName<'a>> {
        let (rest, count) = file_name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let (number, count) = (five_digits(number)?, five_digits(count)?);
        (1..=count).contains(&number).then_some(ShardName { stem, number, count })
    }

    /// Name of file `number` (from 1) of the same model.
    pub fn sibling(&self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count)
    }
}

fn five_digits(text: &str) -> Option<u32> {
    (text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok())?
}

/// Why a file does not fit the other files of the model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("file {}: {source}", file + 1)]
pub struct ShardError {
    /// Index of the file, from 0.
    pub file: usize,
    /// The key or tensor that does not fit.
    pub source: LoadError,
}

/// The headers of all files of a model, in order; a set may have one file.
#[derive(Debug, Clone)]
pub struct GgufSet<'a> {
    shards: Vec<Gguf<'a>>,
    /// (file, index in its directory), sorted by tensor name.
    order: Vec<(u32, u32)>,
}

impl<'a> GgufSet<'a> {
    /// Joins headers given in order of `split.no`.
    ///
    /// # Errors
    /// [`ShardError`] with [`LoadError::Metadata`] if a file is out of order or the number of tensors is wrong; with
    /// [`LoadError::Tensor`] if two files contain a tensor with the same name.
    pub fn new(shards: Vec<Gguf<'a>>) -> Result<Self, ShardError> {
        let n_tensors: usize = shards.iter().map(|shard| shard.tensors().len()).sum();
        if shards.is_empty() {
            let source = metadata("split.count", "no files".into(), "at least one".into());
            return Err(ShardError { file: 0, source });
        }
        // a single file need not have these keys
        let required = shards.len() > 1;
        let check = |key: &str, expected: &dyn Fn(usize) -> usize| {
            let check = |(file, shard)| {
                expect(shard, key, expected(file), required).map_err(|source| ShardError { file, source })
            };
            shards.iter().enumerate().try_for_each(check)
        };
        // check the order first: in a wrong order, errors about the counts would mislead
        check("split.no", &|file| file)?;
        check("split.count", &|_| shards.len())?;
        check("split.tensors.count", &|_| n_tensors)?;
        let mut order = Vec::with_capacity(n_tensors);
        for (i, shard) in shards.iter().enumerate() {
            order.extend((0..shard.tensors().len()).map(|j| (i as u32, j as u32)));
        }
        let set = GgufSet { shards, order: Vec::new() };
        order.sort_by(|&a, &b| set.at(a).name.cmp(set.at(b).name));
        if let Some(pair) = order.windows(2).find(|pair| set.at(pair[0]).name == set.at(pair[1]).name) {
            let source = LoadError::Tensor {
                name: set.at(pair[0]).name.to_string(),
                found: format!("a copy in each of files {} and {}", pair[0].0 + 1, pair[1].0 + 1),
                expected: "it in one file".into(),
            };
            return Err(ShardError { file: pair[1].0 as usize, source });
        }
        Ok(GgufSet { order, ..set })
    }

    /// The headers in order.
    pub fn shards(&self) -> &[Gguf<'a>] {
        &self.shards
    }

    /// The header with the metadata of the model.
    pub fn first(&self) -> &Gguf<'a> {
        &self.shards[0] // `new` refuses an empty set
    }

    /// All tensors with the index of their file.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, &TensorInfo<'a>)> {
        self.shards.iter().enumerate().flat_map(|(i, shard)| shard.tensors().iter().map(move |t| (i, t)))
    }

    /// The tensor with this name, and the index of its file.
    pub fn tensor(&self, name: &str) -> Option<(usize, &TensorInfo<'a>)> {
        let found = self.order.binary_search_by(|&at| self.at(at).name.cmp(name)).ok()?;
        Some((self.order[found].0 as usize, self.at(self.order[found])))
    }

    /// The data of the tensor with this name; `None` if it does not exist or only the header of its file was given.
    pub fn data(&self, name: &str) -> Option<&'a [u8]> {
        let (shard, tensor) = self.tensor(name)?;
        self.shards[shard].data(tensor)
    }

    fn at(&self, (shard, tensor): (u32, u32)) -> &TensorInfo<'a> {
        &self.shards[shard as usize].tensors()[tensor as usize]
    }
}

/// Checks that a number in the metadata is `expected`. The key may be missing unless it is `required`.
fn expect(shard: &Gguf<'_>, key: &str, expected: usize, required: bool) -> Result<(), LoadError> {
    match shard.u64(key)? {
        Some(found) if found == expected as u64 => Ok(()),
        Some(found) => Err(metadata(key, found.to_string(), expected.to_string())),
        None if required => Err(metadata(key, "nothing".into(), expected.to_string())),
        None => Ok(()),
    }
}

fn metadata(key: &str, found: String, expected: String) -> LoadError {
    LoadError::Metadata { key: key.to_string(), found, expected }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::{GgufWriter, Value};
    use crate::quant::Dtype;

    #[test]
    fn names() {
        let name = ShardName::parse("models/a-b-00002-of-00005.gguf").unwrap();
        assert_eq!(name, ShardName { stem: "models/a-b", number: 2, count: 5 });
        assert_eq!(name.sibling(1), "models/a-b-00001-of-00005.gguf");
        for bad in
            ["a.gguf", "a-1-of-5.gguf", "a-00006-of-00005.gguf", "a-00000-of-00005.gguf", "a-+0001-of-00005.gguf"]
        {
            assert_eq!(ShardName::parse(bad), None, "{bad}");
        }
    }

    fn shard(no: u16, count: u16, total: i32, tensors: &[&str]) -> Vec<u8> {
        let mut w = GgufWriter::new();
        w.metadata("split.no", &Value::U16(no)).unwrap();
        w.metadata("split.count", &Value::U16(count)).unwrap();
        w.metadata("split.tensors.count", &Value::I32(total)).unwrap();
        for name in tensors {
            w.tensor(name, Dtype::F32, &[8]).unwrap();
        }
        let mut file = w.header();
        file.resize(file.len() + w.data_len() as usize, 7 + no as u8);
        file
    }

    fn join(files: &[Vec<u8>]) -> Result<Vec<(usize, String)>, ShardError> {
        let set = GgufSet::new(files.iter().map(|f| Gguf::parse(f).unwrap()).collect())?;
        assert_eq!(set.first().u64("split.no"), Ok(Some(0)));
        for (shard, t) in set.tensors() {
            assert_eq!(set.tensor(t.name), Some((shard, t)));
            assert_eq!(set.data(t.name).unwrap(), [7 + shard as u8; 32]);
        }
        assert_eq!(set.tensor("missing"), None);
        Ok(set.tensors().map(|(i, t)| (i, t.name.to_string())).collect())
    }

    #[test]
    fn sets() {
        let two = [shard(0, 2, 3, &["b", "c"]), shard(1, 2, 3, &["a"])];
        assert_eq!(join(&two).unwrap(), [(0, "b".into()), (0, "c".into()), (1, "a".into())]);
        assert_eq!(join(&[shard(0, 1, 1, &["a"])]).unwrap().len(), 1);

        let wrong = |file: usize, key: &str, found: &str, expected: &str| {
            Err(ShardError { file, source: metadata(key, found.into(), expected.into()) })
        };
        assert_eq!(join(&[two[1].clone(), two[0].clone()]), wrong(0, "split.no", "1", "0"));
        assert_eq!(join(&[two[0].clone(), two[0].clone()]), wrong(1, "split.no", "0", "1"));
        assert_eq!(join(&two[..1]), wrong(0, "split.count", "2", "1"));
        assert_eq!(join(&[shard(0, 2, 4, &["b", "c"]), two[1].clone()]), wrong(0, "split.tensors.count", "4", "3"));
        assert_eq!(join(&[]), wrong(0, "split.count", "no files", "at least one"));
        let twice = join(&[shard(0, 2, 2, &["a"]), shard(1, 2, 2, &["a"])]);
        let (found, expected) = ("a copy in each of files 1 and 2".into(), "it in one file".into());
        assert_eq!(twice, Err(ShardError { file: 1, source: LoadError::Tensor { name: "a".into(), found, expected } }));
    }
}
