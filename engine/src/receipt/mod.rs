//! Receipts: a hash chain over model, request and every sampled token, which anyone can verify by replaying the
//! request.
//!
//! ```text
//! h_0 = SHA-256("starling-receipt/1" || numerics version || model SHA-256 || canonical request)
//! h_i = SHA-256(h_{i-1} || final hidden state of step i, f32 little-endian || token i, u32 little-endian)
//! ```
//!
//! The hidden state after the final norm determines every logit. The canonical request is serialised as follows,
//! numbers little-endian, floats as their bits, every list preceded by its length as u64:
//!
//! ```text
//! u8 KV type (0 f32, 1 f16, 2 k8, 3 q8)                         list of u32: prompt
//! u64 sequence                                            list of (u32, f32): logit bias
//! f32 repeat penalty, u32 repeat last n, f32 frequency penalty, f32 presence penalty
//! u8 0 without DRY; else u8 1, f32 multiplier, f32 base, u32 allowed length, u32 last n, list of lists of u32: breakers
//! u32 top-k, f32 typical p, f32 top-p, f32 min-p, f32 temperature, u64 seed
//! u8 1 if keys use the RoPE frequencies of long contexts; otherwise nothing
//! u8 2 if frequency and presence penalties count generated tokens only; otherwise nothing
//! ```
//!
//! Options of log-probabilities are not included, since they change no token; a receipt has none. Token i of the output
//! (from 0) is drawn at position `prompt length + i`, without a constraint.

mod hex;
mod verify;

use alloc::vec::Vec;

use sha2::{Digest, Sha256};

pub use hex::Hex;

pub use crate::gguf::split_sha256;
pub use verify::{Difference, Mismatch, VerifyError, verify};

use crate::kernels::NUMERICS_VERSION;
use crate::kernels::attention::KvType;
use crate::sampler::{PenaltyScope, SamplingOptions};

/// Format of receipts, and the first bytes of every chain.
pub const FORMAT: &str = "starling-receipt/1";

/// Everything that determines the output, besides the model.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct ReceiptRequest {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Sampling options with the seed that was used, without log-probabilities.
    pub sampling: SamplingOptions,
    /// Index of the answer among several to one prompt; part of the key of each draw.
    pub sequence: u64,
    /// Element type of the KV cache.
    pub kv_type: KvType,
    /// Whether keys use the RoPE frequencies of long contexts
    /// ([`Model::is_long_context`](crate::model::Model::is_long_context)).
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "core::ops::Not::not"))]
    pub long_context: bool,
}

/// The claim that a model gave this output for a request, with the hashes to verify it.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Receipt {
    /// The format, [`FORMAT`].
    pub format: alloc::string::String,
    /// [`NUMERICS_VERSION`] of the engine that answered.
    pub numerics: u32,
    /// SHA-256 of the model file, or [`split_sha256`].
    pub model: Hex<32>,
    /// The canonical request.
    pub request: ReceiptRequest,
    /// Token ids of the output.
    pub output: Vec<u32>,
    /// The first 8 bytes of h_0, h_1, ... h_n; they locate the first step that differs.
    pub steps: Vec<Hex<8>>,
    /// The last hash, h_n.
    pub digest: Hex<32>,
}

/// The hash chain of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    h: [u8; 32],
    steps: Vec<Hex<8>>,
}

/// Floats that are serialised at a time.
const BLOCK: usize = 64;

impl Chain {
    /// Starts the chain: h_0.
    pub fn start(model_sha256: &[u8; 32], request: &ReceiptRequest) -> Chain {
        let mut out = Canonical(Sha256::new());
        out.0.update(FORMAT.as_bytes());
        out.u32(NUMERICS_VERSION);
        out.0.update(model_sha256);
        request.write(&mut out);
        let h = out.0.finalize().into();
        Chain { h, steps: alloc::vec![truncated(&h)] }
    }

    /// Appends a step: the hidden state (n_embd) that gave the logits, and the sampled token.
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

    /// The hash of the last step.
    pub fn digest(&self) -> [u8; 32] {
        self.h
    }

    /// The receipt of an output whose tokens all went through [`Chain::step`].
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
    /// Serialises every field in the documented order. Destructuring makes the compiler report a new field.
    fn write(&self, out: &mut Canonical) {
        let ReceiptRequest { prompt, sampling, sequence, kv_type, long_context } = self;
        out.0.update([match kv_type {
            KvType::F32 => 0,
            KvType::F16 => 1,
            KvType::K8 => 2,
            KvType::Q8 => 3,
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

/// Serialises numbers into a hash.
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
