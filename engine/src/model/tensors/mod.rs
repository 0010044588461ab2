//! The tensors of a mechanism: each is named once, by a constant. Its shape and whether it must be there are declared from the
//! sizes of the mechanism, and it is taken by the same constant once it is loaded.

mod loaded;

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

pub(crate) use loaded::{Loaded, LoadedTensors, PendingTensor};

use crate::error::LoadError;
use crate::gguf::TensorInfo;
use crate::kernels::WeightArena;
use crate::kernels::panel::Matrix;
use crate::model::keys::MAX_WIDTH;
use crate::quant::Dtype;

/// A name: stem and suffix; in a layer the part after `blk.N.`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Name(&'static str, &'static str);

impl Name {
    /// `STEM.weight`.
    pub(crate) const fn weight(stem: &'static str) -> Name {
        Name(stem, ".weight")
    }

    /// `STEM.bias`.
    pub(crate) const fn bias(stem: &'static str) -> Name {
        Name(stem, ".bias")
    }

    /// A name without suffix.
    pub(crate) const fn whole(name: &'static str) -> Name {
        Name(name, "")
    }

    pub(crate) fn text(self) -> String {
        format!("{}{}", self.0, self.1)
    }
}

/// A matrix `STEM.weight`, perhaps with a bias `STEM.bias`.
#[derive(Clone, Copy)]
pub(crate) struct LinearName(pub(crate) &'static str);

impl LinearName {
    pub(crate) const fn weight(self) -> Name {
        Name::weight(self.0)
    }

    pub(crate) const fn bias(self) -> Name {
        Name::bias(self.0)
    }
}

/// A norm `STEM.weight`, perhaps with a bias `STEM.bias`.
#[derive(Clone, Copy)]
pub(crate) struct NormName(pub(crate) &'static str);

impl NormName {
    pub(crate) const fn weight(self) -> Name {
        Name::weight(self.0)
    }

    pub(crate) const fn bias(self) -> Name {
        Name::bias(self.0)
    }

    /// The name in files that have it without suffix.
    pub(crate) const fn bare(self) -> Name {
        Name::whole(self.0)
    }
}

/// How the names of tensors in files of a family differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorNames {
    /// Names without the suffix, and the names of the same tensors in others.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Beginning of names.
    pub prefix: &'static str,
    /// Beginnings of the names of layer tensors that text does not use.
    pub ignored: &'static [&'static str],
}

/// Expected shape of a tensor.
#[derive(Clone, Copy)]
pub(crate) enum Shape {
    /// `n` matrices (rows, k), concatenated; `n` is a dimension unless it is 1.
    Matrices { n: usize, rows: usize, k: usize },
    /// `n` matrices (rows, k) in one dimension of the file.
    Stacked { n: usize, rows: usize, k: usize },
    /// A vector of this length.
    Vector(usize),
    /// Rows of vectors, one per expert.
    Rows { n: usize, width: usize },
    /// Weights of a norm of heads: (head_dim), (n_head, head_dim) or (n_head * head_dim), or one per head, (n_head, 1).
    HeadNorm { n_head: usize, head_dim: usize },
    /// Values in rows of this width; dimensions of 1 may be between.
    Values { width: usize, rows: usize },
    /// Rows of integers, I32.
    Integers { width: usize, rows: usize },
}

pub(crate) const fn matrix(rows: usize, k: usize) -> Shape {
    Shape::Matrices { n: 1, rows, k }
}

pub(crate) const fn vector(n: usize) -> Shape {
    Shape::Vector(n)
}

pub(crate) const fn values(width: usize, rows: usize) -> Shape {
    Shape::Values { width, rows }
}

/// A width that only the tensor itself states.
pub(crate) fn any_width(dim: u64) -> usize {
    dim.min(u64::from(MAX_WIDTH)) as usize
}

/// Memory of a tensor.
pub(crate) enum TensorStorage {
    /// One matrix, or one per expert.
    Matrices(Vec<Matrix>),
    /// Values, and the length of a row.
    Vector { values: Vec<f32>, width: usize },
}

impl Shape {
    /// Checks shape and type of a tensor.
    pub(crate) fn check(self, t: &TensorInfo<'_>) -> Result<(), LoadError> {
        let fits = match self {
            Shape::Matrices { n, rows, k } => t.dims == [k as u64, rows as u64, n as u64, 1],
            Shape::Stacked { n, rows, k } => t.dims == [k as u64, (rows * n) as u64, 1, 1],
            Shape::Vector(n) => t.dims == [n as u64, 1, 1, 1],
            Shape::Rows { n: rows, width } | Shape::Integers { width, rows } => {
                t.dims == [width as u64, rows as u64, 1, 1]
            }
            Shape::HeadNorm { n_head, head_dim } => {
                let (d, n) = (head_dim as u64, n_head as u64);
                [[d, 1, 1, 1], [d, n, 1, 1], [d * n, 1, 1, 1], [1, n, 1, 1]].contains(&t.dims)
            }
            Shape::Values { width, rows } => {
                let (w, n) = (width as u64, rows as u64);
                let rows = [[w, n, 1, 1], [w, 1, n, 1], [w, 1, 1, n]].contains(&t.dims);
                rows || (w == 1 && t.dims == [n, 1, 1, 1])
            }
        };
        if !fits {
            let expected = match self {
                Shape::Matrices { n: 1, rows, k } => format!("shape [{k}, {rows}]"),
                Shape::Matrices { n, rows, k } => format!("shape [{k}, {rows}, {n}]"),
                Shape::Stacked { n, rows, k } => format!("shape [{k}, {}]", rows * n),
                Shape::Vector(n) => format!("shape [{n}]"),
                Shape::Rows { n, width } => format!("shape [{width}, {n}]"),
                Shape::HeadNorm { n_head, head_dim: d } => format!("shape [{d}], [{d}, {n_head}] or [{}]", d * n_head),
                Shape::Values { width, rows } | Shape::Integers { width, rows } => format!("shape [{width}, {rows}]"),
            };
            return Err(tensor_error(t.name, &format!("shape {:?}", &t.dims[..t.n_dims as usize]), &expected));
        }
        let (fits, expected) = match self {
            Shape::Matrices { .. } | Shape::Stacked { .. } if !t.dtype.supported() => {
                return Err(LoadError::Unsupported {
                    what: "tensor type",
                    found: format!("{} ({})", t.dtype.name(), t.name),
                    known: Dtype::SUPPORTED.map(Dtype::name).into(),
                });
            }
            Shape::Matrices { .. } | Shape::Stacked { .. } => (true, ""),
            Shape::Integers { .. } => (t.dtype == Dtype::I32, "I32"),
            _ => (matches!(t.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16), "F32, F16 or BF16"),
        };
        if fits { Ok(()) } else { Err(tensor_error(t.name, t.dtype.name(), expected)) }
    }

    /// Allocates memory for a tensor, matrices from `arena`.
    ///
    /// # Errors
    /// [`LoadError`] if its shape or type is not accepted.
    pub(crate) fn reserve(self, t: &TensorInfo<'_>, arena: &mut WeightArena) -> Result<TensorStorage, LoadError> {
        self.check(t)?;
        let out_of_memory = |_| LoadError::OutOfMemory { what: "the weights", needed: t.len_bytes };
        if let Shape::Matrices { n, rows, k } | Shape::Stacked { n, rows, k } = self {
            let matrices = (0..n).map(|_| Matrix::zeroed_in(arena, t.dtype, rows, k)).collect::<Result<_, _>>();
            return Ok(TensorStorage::Matrices(matrices.map_err(out_of_memory)?));
        }
        let mut values = Vec::new();
        values.try_reserve_exact(t.n_elements() as usize).map_err(out_of_memory)?;
        Ok(TensorStorage::Vector { values, width: t.dims[0] as usize })
    }
}

/// The shape that follows from the dimensions in the file.
type ByDims = dyn Fn(&[u64; 4]) -> Shape;

/// The expected shape of a tensor.
enum ShapeOf {
    Fixed(Shape),
    /// The dimensions in the file decide.
    By(Box<ByDims>),
}

/// What a mechanism says about a tensor.
pub(crate) struct Declaration {
    shape: ShapeOf,
    /// Whether a layer may have it although another of its kind has not.
    pub(crate) is_free: bool,
    /// A tensor that takes the place of this one, and the rule in an error's words.
    pub(crate) excluded_by: Option<(String, &'static str)>,
    /// Number of tensors, one per expert; 0 for one without an index in its name.
    pub(crate) n: usize,
}

impl Declaration {
    pub(crate) fn shape(&self, dims: &[u64; 4]) -> Shape {
        match &self.shape {
            ShapeOf::Fixed(shape) => *shape,
            ShapeOf::By(shape) => shape(dims),
        }
    }
}

/// The tensors of a layer, or of what is outside of layers.
pub(crate) struct Declared<'f> {
    prefix: String,
    has: &'f dyn Fn(&str) -> bool,
    rows: BTreeMap<String, Declaration>,
    missing: Option<String>,
    /// Whether no tensor must be there.
    all_optional: bool,
}

impl<'f> Declared<'f> {
    /// For tensors whose names begin with `prefix`; `has` tells which tensors the file has.
    pub(crate) fn new(prefix: String, has: &'f dyn Fn(&str) -> bool) -> Declared<'f> {
        Declared { prefix, has, rows: BTreeMap::new(), missing: None, all_optional: false }
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Whether the file has a tensor.
    pub(crate) fn has(&self, name: Name) -> bool {
        (self.has)(&self.name(&name.text()))
    }

    fn add(&mut self, name: String, shape: ShapeOf, is_free: bool, excluded_by: Option<(Name, &'static str)>) {
        let excluded_by = excluded_by.map(|(other, rule)| (self.name(&other.text()), rule));
        // a mechanism's own tensor has precedence
        self.rows.entry(name).or_insert(Declaration { shape, is_free, excluded_by, n: 0 });
    }

    fn require(&mut self, name: Name, shape: ShapeOf) {
        let name = self.name(&name.text());
        if self.missing.is_none() && !self.all_optional && !(self.has)(&name) {
            self.missing = Some(name.clone());
        }
        self.add(name, shape, false, None);
    }

    /// Declares tensors of which none must be there.
    pub(crate) fn all_optional(&mut self, declare: impl FnOnce(&mut Declared<'f>)) {
        let before = core::mem::replace(&mut self.all_optional, true);
        declare(self);
        self.all_optional = before;
    }

    /// A tensor that must be there.
    pub(crate) fn required(&mut self, name: Name, shape: Shape) {
        self.require(name, ShapeOf::Fixed(shape));
    }

    pub(crate) fn required_by(&mut self, name: Name, shape: impl Fn(&[u64; 4]) -> Shape + 'static) {
        self.require(name, ShapeOf::By(Box::new(shape)));
    }

    /// A tensor that all layers of a kind have, or none.
    pub(crate) fn optional(&mut self, name: Name, shape: Shape) {
        self.add(self.name(&name.text()), ShapeOf::Fixed(shape), false, None);
    }

    pub(crate) fn optional_by(&mut self, name: Name, shape: impl Fn(&[u64; 4]) -> Shape + 'static) {
        self.add(self.name(&name.text()), ShapeOf::By(Box::new(shape)), false, None);
    }

    /// A tensor that any layer may have or lack.
    pub(crate) fn free(&mut self, name: Name, shape: Shape) {
        self.add(self.name(&name.text()), ShapeOf::Fixed(shape), true, None);
    }

    /// A tensor whose place another takes: its presence is an error, in the words of the rule.
    pub(crate) fn excluded(&mut self, name: Name, shape: Shape, by: (Name, &'static str)) {
        self.add(self.name(&name.text()), ShapeOf::Fixed(shape), false, Some(by));
    }

    pub(crate) fn excluded_by(
        &mut self,
        name: Name,
        shape: impl Fn(&[u64; 4]) -> Shape + 'static,
        by: (Name, &'static str),
    ) {
        self.add(self.name(&name.text()), ShapeOf::By(Box::new(shape)), false, Some(by));
    }

    /// `n` tensors named `STEM.INDEX.weight`, as older files have one per expert.
    pub(crate) fn indexed(&mut self, stem: &str, n: usize, shape: Shape, by: (Name, &'static str)) {
        let name = self.name(&format!("{stem}.{INDEX}.weight"));
        self.add(name.clone(), ShapeOf::Fixed(shape), false, Some(by));
        self.rows.entry(name).and_modify(|declaration| declaration.n = n);
    }

    /// Whether the file has all of `n` such tensors.
    pub(crate) fn has_indexed(&self, stem: &str, n: usize) -> bool {
        (0..n).all(|i| (self.has)(&self.name(&format!("{stem}.{i}.weight"))))
    }

    /// The first required tensor that is missing.
    pub(crate) fn missing(&self) -> Option<&str> {
        self.missing.as_deref()
    }

    /// All tensors by their names.
    pub(crate) fn into_rows(self) -> BTreeMap<String, Declaration> {
        self.rows
    }
}

/// Stands for the index of an expert in the names of declared tensors.
const INDEX: &str = "#";

/// The name of the declaration of a tensor `STEM.INDEX.weight`, and the index.
pub(crate) fn indexed_name(name: &str) -> Option<(String, usize)> {
    let (stem, i) = name.strip_suffix(".weight")?.rsplit_once('.')?;
    Some((format!("{stem}.{INDEX}.weight"), index(i)?))
}

/// Parses an index in a tensor name: decimal without leading zeros.
pub(crate) fn index(text: &str) -> Option<usize> {
    if text.len() > 1 && text.starts_with('0') {
        return None;
    }
    text.parse().ok()
}

pub(crate) fn missing(name: String) -> LoadError {
    LoadError::MissingTensor { name }
}

pub(crate) fn tensor_error(name: &str, found: &str, expected: &str) -> LoadError {
    LoadError::Tensor { name: name.into(), found: found.into(), expected: expected.into() }
}
