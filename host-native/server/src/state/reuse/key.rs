//! What identifies a result. The keys of all caches of results are made here, so that none lacks a part: answers in memory and
//! on disk, equal requests in flight, embeddings. KV pages, in memory and on disk, have keys of the engine with the same parts
//! (`engine/src/kv/key.rs`).

use std::sync::Arc;

use sha2::{Digest, Sha256};
use starling::embed::Pooling;
use starling::kernels::NUMERICS_VERSION;
use starling::kernels::attention::KvType;
use starling::receipt::Hex;

/// Identifies a result: what it was computed from and how, and for whom.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ReuseKey {
    pub model: Arc<str>,
    pub tenant: Arc<str>,
    pub digest: [u8; 32],
}

/// Kind of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Answer,
    Embedding,
}

/// All that can change a byte of a result, besides the request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Computation {
    /// SHA-256 of the model file.
    pub model: [u8; 32],
    /// Of the definition of all numbers.
    pub numerics: u32,
    /// Version of this program: of tokenizer, sampler and grammars.
    pub program: &'static str,
    /// `None` for an encoder.
    pub kv_type: Option<KvType>,
    /// Context in tokens: where answers end, and texts are cut.
    pub n_ctx: [usize; 2],
    pub pooling: Pooling,
}

impl Computation {
    /// By this program, of a model file with this SHA-256.
    pub fn new(model: [u8; 32], kv_type: Option<KvType>, n_ctx: [usize; 2], pooling: Pooling) -> Computation {
        Computation { model, numerics: NUMERICS_VERSION, program: env!("CARGO_PKG_VERSION"), kv_type, n_ctx, pooling }
    }
}

impl ReuseKey {
    /// The key of a result of the model `name` for a tenant; `request` adds what the request says to the digest.
    pub fn new(
        name: &Arc<str>,
        computation: &Computation,
        tenant: &Arc<str>,
        kind: Kind,
        request: impl FnOnce(&mut Sha256),
    ) -> ReuseKey {
        let mut digest = digest(computation, kind);
        request(&mut digest);
        let (model, tenant) = (Arc::clone(name), Arc::clone(tenant));
        ReuseKey { model, tenant, digest: digest.finalize().into() }
    }

    /// The name of the result in `etag`.
    pub fn etag(&self) -> String {
        Hex(self.digest).to_string()
    }
}

/// The beginning of a digest. Every field is in the text, and equal computations have equal texts.
fn digest(computation: &Computation, kind: Kind) -> Sha256 {
    Sha256::new_with_prefix(format!("{kind:?} {computation:?}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_changes_a_byte_changes_the_key() {
        let first = Computation {
            model: [1; 32],
            numerics: 2,
            program: "0.1.0",
            kv_type: Some(KvType::F16),
            n_ctx: [512, 512],
            pooling: Pooling::Mean,
        };
        let all = [
            first,
            Computation { model: [2; 32], ..first },
            Computation { numerics: 3, ..first },
            Computation { program: "0.1.1", ..first },
            Computation { kv_type: Some(KvType::F32), ..first },
            Computation { kv_type: None, ..first },
            Computation { n_ctx: [511, 512], ..first },
            Computation { n_ctx: [512, 511], ..first },
            Computation { pooling: Pooling::Last, ..first },
        ];
        let of = |computation: &Computation, kind| -> [u8; 32] { digest(computation, kind).finalize().into() };
        let mut digests: Vec<_> = all.iter().map(|computation| of(computation, Kind::Answer)).collect();
        digests.push(of(&first, Kind::Embedding));
        digests.sort_unstable();
        assert!(digests.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!(of(&first, Kind::Answer), of(&first.clone(), Kind::Answer));
    }
}
