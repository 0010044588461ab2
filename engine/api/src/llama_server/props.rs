//! `GET /props` and `/lora-adapters`, and the requests of `/tokenize`, `/detokenize` and `/embedding` in llama-server's form.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::input::Input;
use crate::parse_whole;

/// Properties of the server.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Props {
    /// Options of a request that gives none.
    pub default_generation_settings: DefaultSettings,
    /// Number of slots: requests that run at once.
    pub total_slots: usize,
    /// Name of the default model.
    pub model_alias: String,
    /// Source of the default model.
    pub model_path: String,
    /// Chat template, in Jinja.
    pub chat_template: String,
    /// Text of the token that begins a text.
    pub bos_token: String,
    /// Text of the token that ends an answer.
    pub eos_token: String,
    /// What the model reads beside text: nothing.
    pub modalities: Modalities,
    /// Version of Starling.
    pub build_info: String,
}

/// Options of a request that gives none.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DefaultSettings {
    /// Context length in tokens.
    pub n_ctx: usize,
    /// Sampling options.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub params: Value,
}

/// What the model reads beside text.
#[derive(Debug, Default, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Modalities {
    /// Always false.
    pub vision: bool,
    /// Always false.
    pub audio: bool,
}

/// Request of `POST /embedding`.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LlamaEmbeddingRequest {
    /// Text or token IDs, or a list of inputs.
    #[serde(alias = "input")]
    pub content: Input,
}

/// Embedding of an input.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LlamaEmbedding {
    /// Index of the input.
    pub index: usize,
    /// One vector, of length 1.
    pub embedding: Vec<Vec<f32>>,
}

/// Number of prompt tokens.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ChatInputTokens {
    /// Always `response.input_tokens`, as llama-server has it.
    pub object: &'static str,
    /// Tokens of the prompt.
    pub input_tokens: usize,
}

parse_whole!(LlamaEmbeddingRequest);
