//! `POST /v1/tokenize`, `/v1/detokenize` and `/v1/apply-template`.

use serde::{Deserialize, Serialize};
use starling::tokenizer::{DecodeOptions, EncodeOptions, Tokenizer};

use crate::answer::token_text_lossy;
use crate::error::ApiError;
use crate::parse_whole;

/// Request to tokenise a text.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenizeRequest {
    /// Model name. Default: the model that the server has.
    pub model: Option<String>,
    /// Text.
    #[serde(alias = "content", alias = "prompt")]
    pub text: String,
    /// Add the model's BOS and EOS tokens. Default: true.
    #[serde(alias = "add_special_tokens")]
    pub add_special: Option<bool>,
    /// Parse control tokens in the text. Default: false.
    pub parse_special: Option<bool>,
}

/// Tokens of a text.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenizeResponse {
    /// Token IDs.
    pub tokens: Vec<u32>,
    /// Text of each token, with replacement characters where its bytes are not UTF-8.
    pub pieces: Vec<String>,
    /// Byte range of each token in the text: start and end.
    pub offsets: Vec<[usize; 2]>,
    /// Number of tokens.
    pub count: usize,
    /// Context length of this server, in tokens.
    pub max_model_len: usize,
}

/// Request to decode tokens.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DetokenizeRequest {
    /// Model name. Default: the model that the server has.
    pub model: Option<String>,
    /// Token IDs.
    pub tokens: Vec<u32>,
    /// Leave out control tokens. Default: false.
    pub skip_special: Option<bool>,
}

/// Text of tokens.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DetokenizeResponse {
    /// Text, with replacement characters where its bytes are not UTF-8.
    pub text: String,
}

/// Rendered messages.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TemplateResponse {
    /// Rendered prompt.
    pub prompt: String,
    /// Token IDs of the prompt. Control tokens spelled in the content of messages are tokenised as plain text, so that these
    /// may differ from the tokens of `prompt`.
    pub tokens: Vec<u32>,
}

parse_whole!(TokenizeRequest, DetokenizeRequest);

impl TokenizeRequest {
    /// Tokenises the text, for a server with the context length `max_model_len`.
    pub fn tokenize(&self, tokenizer: &Tokenizer, max_model_len: usize) -> TokenizeResponse {
        let options = EncodeOptions {
            add_special: self.add_special.unwrap_or(true),
            parse_special: self.parse_special.unwrap_or(false),
        };
        let (tokens, ranges) = tokenizer.encode_with_offsets(&self.text, options);
        TokenizeResponse {
            pieces: tokens.iter().map(|token| token_text_lossy(tokenizer, *token)).collect(),
            offsets: ranges.into_iter().map(|range| [range.start, range.end]).collect(),
            count: tokens.len(),
            tokens,
            max_model_len,
        }
    }
}

impl DetokenizeRequest {
    /// Decodes the tokens.
    ///
    /// # Errors
    /// A token that the model does not have.
    pub fn detokenize(&self, tokenizer: &Tokenizer) -> Result<DetokenizeResponse, ApiError> {
        let n = tokenizer.n_vocab();
        if let Some((at, token)) = self.tokens.iter().enumerate().find(|(_, token)| **token as usize >= n) {
            let param = format!("tokens[{at}]");
            return Err(ApiError::param(&param, format!("{param} is {token}, expected one of the model's {n} tokens")));
        }
        let options = DecodeOptions { skip_special: self.skip_special.unwrap_or(false) };
        Ok(DetokenizeResponse { text: String::from_utf8_lossy(&tokenizer.decode(&self.tokens, options)).into_owned() })
    }
}
