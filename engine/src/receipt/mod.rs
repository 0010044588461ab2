//! Receipts: a chain of hashes that ties an answer to model, request and every step, for anyone to replay.
//!
//! ```text
//! h_0 = SHA-256("starling-receipt/1" || numerics version || model SHA-256 || canonical request)
//! h_i = SHA-256(h_{i-1} || final hidden state of step i, f32 little-endian || token i, u32 little-endian)
//! ```
//!
//! The hidden state after the final norm fixes every logit. The canonical request, numbers little-endian, floats as
//! their bits, every list preceded by its length as u64:
//!
//! ```text
//! u8 type of keys and values (0 f32, 1 f16, 2 k8)         list of u32: prompt
//! u64 sequence                                            list of (u32, f32): logit bias
//! f32 repeat penalty, u32 repeat last n, f32 frequency penalty, f32 presence penalty
//! u8 0 without DRY; else u8 1, f32 multiplier, f32 base, u32 allowed length, u32 last n, list of lists of u32: breakers
//! u32 top-k, f32 typical p, f32 top-p, f32 min-p, f32 temperature, u64 seed
//! u8 1 where keys were rotated for long contexts; otherwise nothing
//! u8 2 where frequency and presence penalty count the answer's tokens only; otherwise nothing
//! ```
//!
//! Which log-probabilities were reported is not part of it, as they change no token: a receipt has none. Token i of the
//! answer (from 0) is drawn at position `prompt length + i`, without a grammar.

mod hex;
mod verify;

use alloc::vec::Vec;

use sha2::{Digest, Sha256};

pub use hex::Hex;
pub use verify::{Mismatch, VerifyError, What, verify};

use crate::kernels::NUMERICS_VERSION;
use crate::kernels::attention::KvType;
use crate::sampler::{PenaltyScope, SamplingOptions};

/// The form of receipts, and the first bytes of every chain.
pub const FORMAT: &str = "starling-receipt/1";

/// What determines an answer, besides the model.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct ReceiptRequest {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Sampling options, with the seed that was in effect, and without log-probabilities.
    pub sampling: SamplingOptions,
    /// Which answer to the prompt this is: part of the key of each draw.
    pub sequence: u64,
    /// How keys and values were kept.
    pub kv_type: KvType,
    /// Whether keys were rotated for long contexts, in a model that does so
    /// ([`Model::is_long_context`](crate::model::Model::is_long_context)).
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "core::ops::Not::not"))]
    pub long_context: bool,
}

/// A claim that a model answered a request so, and what it takes to check it.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Receipt {
    /// [`FORMAT`].
    pub format: alloc::string::String,
    /// [`NUMERICS_VERSION`] of the engine that answered.
    pub numerics: u32,
    /// SHA-256 of the model's file, or [`split_sha256`].
    pub model: Hex<32>,
    /// The request.
    pub request: ReceiptRequest,
    /// Token ids of the answer.
    pub output: Vec<u32>,
    /// The first 8 bytes of h_0, h_1, ... h_n: they name the first step that differs.
    pub steps: Vec<Hex<8>>,
    /// h_n.
    pub digest: Hex<32>,
}

/// The chain of one answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    h: [u8; 32],
    steps: Vec<Hex<8>>,
}

/// The digest that names a model: of one file its SHA-256; of a split model the SHA-256 of the concatenation of its
/// files' SHA-256s (32 bytes each), in the order of the shards.
pub fn split_sha256(files: &[[u8; 32]]) -> [u8; 32] {
    match files {
        [one] => *one,
        all => Sha256::digest(all.as_flattened()).into(),
    }
}

/// Floats that are hashed at a time.
const BLOCK: usize = 64;

impl Chain {
    /// h_0.
    pub fn start(model_sha256: &[u8; 32], request: &ReceiptRequest) -> Chain {
        let mut out = Canonical(Sha256::new());
        out.0.update(FORMAT.as_bytes());
        out.u32(NUMERICS_VERSION);
        out.0.update(model_sha256);
        request.write(&mut out);
        let h = out.0.finalize().into();
        Chain { h, steps: alloc::vec![truncated(&h)] }
    }

    /// One step: the state (n_embd) that gave the logits, and the token drawn from them.
    pub fn step(&mut self, hidden: &[f32], token: u32) {
        let mut hash = Sha256::new();
        hash.update(self.h);
        for block in hidden.chunks(BLOCK) {
            let mut bytes = [0; BLOCK * 4];
            bytes.chunks_exact_mut(4).zip(block).for_each(|(b, x)| b.copy_from_slice(&x.to_le_bytes()));
            hash.update(&bytes[..block.len() * 4]);
        }
        hash.update(token.to_le_bytes());
        self.h = hash.finalize().into();
        self.steps.push(truncated(&self.h));
    }

    /// h of the last step.
    pub fn digest(&self) -> [u8; 32] {
        self.h
    }

    /// The receipt of an answer whose every token went through [`Chain::step`].
    pub fn receipt(self, model_sha256: &[u8; 32], request: ReceiptRequest, output: Vec<u32>) -> Receipt {
        debug_assert!(self.steps.len() == output.len() + 1);
        Receipt {
            format: FORMAT.into(),
            numerics: NUMERICS_VERSION,
            model: Hex(*model_sha256),
            request,
            output,
            steps: self.steps,
            digest: Hex(self.h),
        }
    }
}

fn truncated(h: &[u8; 32]) -> Hex<8> {
    let mut first = [0; 8];
    first.copy_from_slice(&h[..8]);
    Hex(first)
}

impl ReceiptRequest {
    /// Every field in the documented order: a field that is added must be named here or left out on purpose.
    fn write(&self, out: &mut Canonical) {
        let ReceiptRequest { prompt, sampling, sequence, kv_type, long_context } = self;
        out.0.update([match kv_type {
            KvType::F32 => 0,
            KvType::F16 => 1,
            KvType::K8 => 2,
        }]);
        out.ids(prompt);
        out.u64(*sequence);
        let SamplingOptions {
            logit_bias,
            repeat_penalty,
            repeat_last_n,
            frequency_penalty,
            presence_penalty,
            penalty_scope,
            dry,
            top_k,
            typical_p,
            top_p,
            min_p,
            temperature,
            seed,
            logprobs: _,
            top_logprobs: _,
        } = sampling;
        out.u64(logit_bias.len() as u64);
        for (token, bias) in logit_bias {
            out.u32(*token);
            out.f32(*bias);
        }
        out.f32(*repeat_penalty);
        out.u32(*repeat_last_n);
        out.f32(*frequency_penalty);
        out.f32(*presence_penalty);
        out.0.update([u8::from(dry.is_some())]);
        if let Some(dry) = dry {
            out.f32(dry.multiplier);
            out.f32(dry.base);
            out.u32(dry.allowed_length);
            out.u32(dry.last_n);
            out.u64(dry.breakers.len() as u64);
            dry.breakers.iter().for_each(|b| out.ids(b));
        }
        out.u32(*top_k);
        [typical_p, top_p, min_p, temperature].into_iter().for_each(|x| out.f32(*x));
        out.u64(*seed);
        if *long_context {
            out.0.update([1]);
        }
        if *penalty_scope != PenaltyScope::All {
            out.0.update([2]);
        }
    }
}

/// A hash that numbers go into.
struct Canonical(Sha256);

impl Canonical {
    fn u32(&mut self, x: u32) {
        self.0.update(x.to_le_bytes());
    }

    fn u64(&mut self, x: u64) {
        self.0.update(x.to_le_bytes());
    }

    fn f32(&mut self, x: f32) {
        self.u32(x.to_bits());
    }

    fn ids(&mut self, ids: &[u32]) {
        self.u64(ids.len() as u64);
        ids.iter().for_each(|id| self.u32(*id));
    }
}

#[cfg(test)]
mod tests;
