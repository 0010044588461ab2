//! Weights: which tensors a model has, checked against its configuration, and packed panel by panel while they stream.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::config::Config;
use crate::error::LoadError;
use crate::gguf::{Gguf, TensorInfo};
use crate::kernels::panel::{Matrix, PANEL};
use crate::pool::Pool;
use crate::quant::{self, Dtype};

/// A matrix and its bias: `y = w x + b`.
pub struct Linear {
    /// (rows, k) weights.
    pub w: Matrix,
    /// One number per row.
    pub bias: Option<Vec<f32>>,
}

/// Weights of one layer.
pub struct Layer {
    /// Before attention (n_embd).
    pub attn_norm: Vec<f32>,
    /// Queries (n_head * head_dim, n_embd).
    pub q: Linear,
    /// Keys (n_head_kv * head_dim, n_embd).
    pub k: Linear,
    /// Values (n_head_kv * head_dim, n_embd).
    pub v: Linear,
    /// Norm of each query head (head_dim).
    pub q_norm: Option<Vec<f32>>,
    /// Norm of each key head (head_dim).
    pub k_norm: Option<Vec<f32>>,
    /// Back to the residual stream (n_embd, n_head * head_dim).
    pub o: Linear,
    /// Before the feed-forward (n_embd).
    pub ffn_norm: Vec<f32>,
    /// (n_ff, n_embd)
    pub gate: Linear,
    /// (n_ff, n_embd)
    pub up: Linear,
    /// (n_embd, n_ff)
    pub down: Linear,
}

/// All weights of a model.
pub struct Weights {
    /// (n_vocab, n_embd)
    pub embedding: Matrix,
    /// The layers.
    pub layers: Vec<Layer>,
    /// Before the output (n_embd).
    pub final_norm: Vec<f32>,
    /// (n_vocab, n_embd); `None` where the embedding serves.
    pub output: Option<Linear>,
    /// Divisors of the rotary frequencies (n_rot / 2).
    pub rope_divisors: Option<Vec<f32>>,
}

impl Weights {
    /// Bytes of the packed matrices.
    pub fn len_bytes(&self) -> usize {
        let layer = |l: &Layer| {
            [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down].map(|m| m.w.len_bytes()).iter().sum::<usize>()
        };
        let layers: usize = self.layers.iter().map(layer).sum();
        self.embedding.len_bytes() + layers + self.output.as_ref().map_or(0, |o| o.w.len_bytes())
    }
}

/// Bytes that are packed at a time: enough for all threads, little beside the model.
const LOAD_BYTES: usize = 4 << 20;

/// Tensors of no use to the forward pass: precomputed tables of old converters.
const IGNORED: [&str; 1] = ["rotary_emb.inv_freq"];

/// A tensor on its way in.
struct Pending {
    name: String,
    /// Which file of a split model.
    shard: usize,
    dtype: Dtype,
    /// Where it lies in the file.
    offset: u64,
    len_bytes: u64,
    into: Into,
}

enum Into {
    Matrix(Matrix),
    Vector(Vec<f32>),
}

/// Takes the bytes of a file's tensors, whole or in pieces in file order, and becomes [`Weights`].
pub struct Loader {
    config: Config,
    /// In file order.
    pending: Vec<Pending>,
    /// Index of the tensor that streaming is at, and how many of its bytes were packed.
    at: usize,
    done: u64,
    /// Bytes that are not yet a whole panel.
    carry: Vec<u8>,
    /// Where the tensor data of each file starts.
    starts: Vec<u64>,
    /// The file that `feed` is at, and the offset of its next byte.
    shard: usize,
    next: u64,
}

impl Loader {
    /// Checks names, types and shapes, and reserves memory for the matrices.
    ///
    /// # Errors
    /// [`LoadError`] names the tensor, what was found and what was expected.
    pub fn new(shards: &[Gguf<'_>], config: Config) -> Result<Loader, LoadError> {
        let mut pending = Vec::new();
        for (shard, t) in shards.iter().enumerate().flat_map(|(i, g)| g.tensors().iter().map(move |t| (i, t))) {
            let Some(role) = Role::of(t.name, &config) else {
                if IGNORED.iter().any(|s| t.name.ends_with(s)) {
                    continue;
                }
                return Err(tensor_error(t.name, "a tensor that this architecture does not use", "only known tensors"));
            };
            pending.push(Pending {
                name: t.name.into(),
                shard,
                dtype: t.dtype,
                offset: t.offset,
                len_bytes: t.len_bytes,
                into: role.reserve(t)?,
            });
        }
        pending.sort_by_key(|p| (p.shard, p.offset));
        let starts = shards.iter().map(Gguf::header_len).collect();
        let mut loader = Loader { config, pending, at: 0, done: 0, carry: Vec::new(), starts, shard: 0, next: 0 };
        loader.start_shard(0);
        loader.check_names()?;
        Ok(loader)
    }

    /// That every tensor the model cannot do without is there.
    fn check_names(&mut self) -> Result<(), LoadError> {
        let has = |name: &str| self.pending.iter().any(|p| p.name == name);
        let mut names: Vec<&str> = self.pending.iter().map(|p| p.name.as_str()).collect();
        names.sort_unstable();
        let missing = |name: &str| names.binary_search(&name).is_err();
        for name in ["token_embd.weight", "output_norm.weight"] {
            if !has(name) {
                return Err(tensor_error(name, "nothing", "a tensor of that name"));
            }
        }
        for layer in 0..self.config.n_layer {
            for part in REQUIRED {
                let name = format!("blk.{layer}.{part}.weight");
                if missing(&name) {
                    return Err(tensor_error(&name, "nothing", "a tensor of that name"));
                }
            }
        }
        Ok(())
    }

    /// Loads everything from whole files in memory, in the order of their shards; `packed` hears which bytes of which
    /// file are no longer needed, in pieces of some megabytes, so that a host can let go of a mapping's pages.
    ///
    /// # Errors
    /// A tensor with an infinite or NaN scale.
    pub fn load_all(
        &mut self,
        files: &[&[u8]],
        pool: &dyn Pool,
        packed: &mut dyn FnMut(usize, Range<usize>),
    ) -> Result<(), LoadError> {
        for p in &mut self.pending {
            let (start, shard) = (p.offset as usize, p.shard);
            let bytes = &files[shard][start..start + p.len_bytes as usize];
            p.load(bytes, pool, &mut |range| packed(shard, start + range.start..start + range.end))?;
        }
        self.at = self.pending.len();
        Ok(())
    }

    /// Says that the bytes fed next are from the start of the tensor data of that file.
    pub fn start_shard(&mut self, shard: usize) {
        (self.shard, self.next) = (shard, self.starts[shard]);
    }

    /// Takes the next bytes of the file, from the start of the tensor data on, in pieces of any size.
    ///
    /// # Errors
    /// A tensor with an infinite or NaN scale.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), LoadError> {
        while !bytes.is_empty() && self.at < self.pending.len() {
            let p = &mut self.pending[self.at];
            if p.shard != self.shard {
                break;
            }
            let start = p.offset + self.done + self.carry.len() as u64;
            if self.next < start {
                // padding between tensors
                let skip = (start - self.next).min(bytes.len() as u64);
                bytes = &bytes[skip as usize..];
                self.next += skip;
                continue;
            }
            let piece = p.piece_bytes(self.done);
            let take = (piece - self.carry.len()).min(bytes.len());
            let (head, rest) = bytes.split_at(take);
            bytes = rest;
            self.next += take as u64;
            if self.carry.is_empty() && take == piece {
                p.pack_piece(self.done, head)?;
            } else {
                self.carry.extend_from_slice(head);
                if self.carry.len() < piece {
                    continue;
                }
                p.pack_piece(self.done, &self.carry)?;
                self.carry.clear();
            }
            self.done += piece as u64;
            if self.done == p.len_bytes {
                (self.at, self.done) = (self.at + 1, 0);
            }
        }
        Ok(())
    }

    /// Whether every tensor has arrived.
    pub fn is_complete(&self) -> bool {
        self.at == self.pending.len()
    }

    /// The weights, once complete.
    ///
    /// # Errors
    /// The first tensor that has not arrived whole.
    pub fn finish(mut self) -> Result<(Config, Weights), LoadError> {
        if let Some(p) = self.pending.get(self.at) {
            let found = format!("{} of {} bytes", self.done + self.carry.len() as u64, p.len_bytes);
            return Err(tensor_error(&p.name, &found, "all of it"));
        }
        self.pending.sort_by(|a, b| a.name.cmp(&b.name));
        let mut parts = Parts(self.pending);
        let layers = (0..self.config.n_layer).map(|i| parts.layer(i)).collect::<Result<_, _>>()?;
        let output = if parts.has("output.weight") { Some(parts.linear("output")?) } else { None };
        let weights = Weights {
            embedding: parts.matrix("token_embd.weight")?,
            layers,
            final_norm: parts.vector("output_norm.weight")?,
            output,
            rope_divisors: parts.optional("rope_freqs.weight"),
        };
        Ok((self.config, weights))
    }
}

/// Tensors each layer must have.
const REQUIRED: [&str; 9] =
    ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"];

/// What a tensor is for: its shape.
#[derive(Clone, Copy)]
enum Role {
    Matrix { rows: usize, k: usize },
    Vector(usize),
}

impl Role {
    fn of(name: &str, c: &Config) -> Option<Role> {
        let (q, kv) = (c.n_head * c.head_dim, c.n_head_kv * c.head_dim);
        let matrix = |rows, k| Some(Role::Matrix { rows, k });
        match name {
            "token_embd.weight" | "output.weight" => return matrix(c.n_vocab, c.n_embd),
            "output.bias" => return Some(Role::Vector(c.n_vocab)),
            "output_norm.weight" => return Some(Role::Vector(c.n_embd)),
            "rope_freqs.weight" => return Some(Role::Vector(c.n_rot / 2)),
            _ => {}
        }
        let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
        let number: usize = layer.parse().ok()?;
        if number >= c.n_layer || (layer.len() > 1 && layer.starts_with('0')) {
            return None;
        }
        match part {
            "attn_norm.weight" | "ffn_norm.weight" => Some(Role::Vector(c.n_embd)),
            "attn_q_norm.weight" | "attn_k_norm.weight" => Some(Role::Vector(c.head_dim)),
            "attn_q.weight" => matrix(q, c.n_embd),
            "attn_k.weight" | "attn_v.weight" => matrix(kv, c.n_embd),
            "attn_output.weight" => matrix(c.n_embd, q),
            "ffn_gate.weight" | "ffn_up.weight" => matrix(c.n_ff, c.n_embd),
            "ffn_down.weight" => matrix(c.n_embd, c.n_ff),
            "attn_q.bias" => Some(Role::Vector(q)),
            "attn_k.bias" | "attn_v.bias" => Some(Role::Vector(kv)),
            "attn_output.bias" | "ffn_down.bias" => Some(Role::Vector(c.n_embd)),
            "ffn_gate.bias" | "ffn_up.bias" => Some(Role::Vector(c.n_ff)),
            _ => None,
        }
    }

    fn reserve(self, t: &TensorInfo<'_>) -> Result<Into, LoadError> {
        let (dims, expected) = match self {
            Role::Matrix { rows, k } => ([k as u64, rows as u64, 1, 1], format!("shape [{k}, {rows}]")),
            Role::Vector(n) => ([n as u64, 1, 1, 1], format!("shape [{n}]")),
        };
        if t.dims != dims {
            return Err(tensor_error(t.name, &format!("shape {:?}", &t.dims[..t.n_dims as usize]), &expected));
        }
        let out_of_memory =
            |_| LoadError::TooLarge { what: "the weights", needed: t.len_bytes, limit: usize::MAX as u64 };
        match self {
            Role::Vector(n) => {
                if !matches!(t.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
                    return Err(tensor_error(t.name, t.dtype.name(), "F32, F16 or BF16"));
                }
                let mut v = Vec::new();
                v.try_reserve_exact(n).map_err(out_of_memory)?;
                Ok(Into::Vector(v))
            }
            Role::Matrix { rows, k } => {
                if !t.dtype.supported() {
                    return Err(LoadError::Unsupported {
                        what: "tensor type",
                        found: t.dtype.name().into(),
                        known: Dtype::SUPPORTED.map(Dtype::name).into(),
                    });
                }
                Ok(Into::Matrix(Matrix::zeroed(t.dtype, rows, k).map_err(out_of_memory)?))
            }
        }
    }
}

fn tensor_error(name: &str, found: &str, expected: &str) -> LoadError {
    LoadError::Tensor { name: name.into(), found: found.into(), expected: expected.into() }
}

impl Pending {
    /// Bytes of the piece that starts after `done` bytes: a panel of a matrix, or the rest of a vector.
    fn piece_bytes(&self, done: u64) -> usize {
        let left = self.len_bytes - done;
        match &self.into {
            Into::Matrix(m) => left.min((PANEL * m.row_bytes()) as u64) as usize,
            Into::Vector(_) => left as usize,
        }
    }

    fn not_finite(&self, done: u64, fault: quant::BlockFault) -> LoadError {
        let block = done / self.dtype.block_bytes() + fault.index as u64;
        tensor_error(&self.name, &format!("an infinity or NaN in block {block}"), "finite numbers")
    }

    fn pack_piece(&mut self, done: u64, bytes: &[u8]) -> Result<(), LoadError> {
        quant::validate(self.dtype, bytes).map_err(|fault| self.not_finite(done, fault))?;
        match &mut self.into {
            Into::Matrix(m) => m.pack_panel((done / (PANEL * m.row_bytes()) as u64) as usize, bytes),
            Into::Vector(v) => {
                *v = vec![0.0; bytes.len() / self.dtype.block_bytes() as usize];
                quant::dequantise(self.dtype, bytes, v)
                    .map_err(|e| tensor_error(&self.name, &format!("{e}"), "numbers"))?;
            }
        }
        Ok(())
    }

    /// Packs a whole tensor, panels in parallel; `packed` hears the ranges that are done.
    fn load(&mut self, bytes: &[u8], pool: &dyn Pool, packed: &mut dyn FnMut(Range<usize>)) -> Result<(), LoadError> {
        let dtype = self.dtype;
        let Into::Matrix(m) = &mut self.into else {
            self.pack_piece(0, bytes)?;
            packed(0..bytes.len());
            return Ok(());
        };
        let panel = PANEL * m.row_bytes();
        let panels = (LOAD_BYTES / panel).max(1);
        for (i, rows) in bytes.chunks(panels * panel).enumerate() {
            let done = m.pack_panels(pool, i * panels, rows, &|rows| quant::validate(dtype, rows));
            if let Err((p, fault)) = done {
                return Err(self.not_finite((p * panel) as u64, fault));
            }
            packed(i * panels * panel..i * panels * panel + rows.len());
        }
        Ok(())
    }
}

/// Loaded tensors by name.
struct Parts(Vec<Pending>);

impl Parts {
    fn find(&self, name: &str) -> Option<usize> {
        self.0.binary_search_by(|p| p.name.as_str().cmp(name)).ok()
    }

    fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    fn take(&mut self, name: &str) -> Option<Into> {
        let i = self.find(name)?;
        Some(core::mem::replace(&mut self.0[i].into, Into::Vector(Vec::new())))
    }

    fn matrix(&mut self, name: &str) -> Result<Matrix, LoadError> {
        match self.take(name) {
            Some(Into::Matrix(m)) => Ok(m),
            _ => Err(tensor_error(name, "nothing", "a matrix")),
        }
    }

    fn optional(&mut self, name: &str) -> Option<Vec<f32>> {
        match self.take(name) {
            Some(Into::Vector(v)) => Some(v),
            _ => None,
        }
    }

    fn vector(&mut self, name: &str) -> Result<Vec<f32>, LoadError> {
        self.optional(name).ok_or_else(|| tensor_error(name, "nothing", "a vector"))
    }

    fn linear(&mut self, name: &str) -> Result<Linear, LoadError> {
        Ok(Linear { w: self.matrix(&format!("{name}.weight"))?, bias: self.optional(&format!("{name}.bias")) })
    }

    fn layer(&mut self, i: usize) -> Result<Layer, LoadError> {
        let name = |part: &str| format!("blk.{i}.{part}");
        Ok(Layer {
            attn_norm: self.vector(&name("attn_norm.weight"))?,
            q: self.linear(&name("attn_q"))?,
            k: self.linear(&name("attn_k"))?,
            v: self.linear(&name("attn_v"))?,
            q_norm: self.optional(&name("attn_q_norm.weight")),
            k_norm: self.optional(&name("attn_k_norm.weight")),
            o: self.linear(&name("attn_output"))?,
            ffn_norm: self.vector(&name("ffn_norm.weight"))?,
            gate: self.linear(&name("ffn_gate"))?,
            up: self.linear(&name("ffn_up"))?,
            down: self.linear(&name("ffn_down"))?,
        })
    }
}
