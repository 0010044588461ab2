//! `POST /tokenize` and `/detokenize`, which llama-server and vLLM have under the same names.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use starling::model::Model;
use starling::tokenizer::{EncodeOptions, Tokenizer};

use crate::error::ApiError;
use crate::native::tokenize::{TokenList, TokenizeRequest, TokenizeResponse};
use crate::parse_whole;
use crate::pieces::{JsonPieces, write};

/// Request to tokenise a text. With `content` it is one of llama-server, with `text` or `prompt` as on `/v1/tokenize`.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LlamaTokenizeRequest {
    /// Model name. Default: the model that the server has.
    pub model: Option<String>,
    /// Text.
    pub content: Option<String>,
    /// Text of a request as on `/v1/tokenize`.
    #[serde(alias = "prompt")]
    pub text: Option<String>,
    /// Add the model's BOS and EOS tokens. Default: false; of a request with `text` true.
    #[serde(alias = "add_special_tokens")]
    pub add_special: Option<bool>,
    /// Parse control tokens in the text. Default: true; of a request with `text` false.
    pub parse_special: Option<bool>,
    /// Return the text of each token. Default: false.
    pub with_pieces: Option<bool>,
}

parse_whole!(LlamaTokenizeRequest);

/// Tokens of a text.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum Tokenized {
    /// To a request with `content`.
    Llama(LlamaTokens),
    /// To a request with `text`.
    Native(TokenizeResponse),
}

/// Tokens of a text, as llama-server returns them.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct LlamaTokens {
    /// Token IDs, or with `with_pieces` objects.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<serde_json::Value>))]
    pub tokens: Vec<LlamaToken>,
}

/// A token of a text.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum LlamaToken {
    /// Its ID.
    Id(u32),
    /// Its ID and text.
    WithPiece {
        /// Token ID.
        id: u32,
        /// Its text.
        piece: Piece,
    },
}

/// Text of a token.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Piece {
    /// UTF-8.
    Text(String),
    /// Bytes that are not UTF-8.
    Bytes(Vec<u8>),
}

/// Text of tokens, by the names of llama-server and Starling.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LlamaText {
    /// Text, with replacement characters where its bytes are not UTF-8.
    pub content: String,
    /// The same.
    pub text: String,
}

impl LlamaToken {
    fn new(tokenizer: &Tokenizer, id: u32, with_piece: bool) -> LlamaToken {
        if !with_piece {
            return LlamaToken::Id(id);
        }
        let bytes = tokenizer.piece(id).unwrap_or_default().to_vec();
        let piece = String::from_utf8(bytes).map_or_else(|e| Piece::Bytes(e.into_bytes()), Piece::Text);
        LlamaToken::WithPiece { id, piece }
    }
}

/// Tokens of a text, to be written in pieces.
pub enum LlamaTokenList {
    /// To a request with `content`.
    Llama(LlamaIds),
    /// To a request with `text`.
    Native(TokenList),
}

/// Token IDs, to be written as [`LlamaTokens`].
pub struct LlamaIds {
    model: Arc<Model>,
    tokens: Vec<u32>,
    with_pieces: bool,
}

impl LlamaIds {
    /// Bytes of memory.
    pub fn n_bytes(&self) -> usize {
        size_of::<u32>() * self.tokens.len()
    }

    /// The response.
    pub fn response(self) -> JsonPieces<LlamaIds> {
        let n = self.tokens.len();
        let write = |list: &mut LlamaIds, i: usize, to: &mut Vec<u8>| {
            write(&LlamaToken::new(&list.model.tokenizer, list.tokens[i], list.with_pieces), to);
        };
        JsonPieces::new(self).list("{\"tokens\":[".into(), n, write).end("]}".into())
    }
}

impl LlamaTokenizeRequest {
    /// Bytes of the text.
    pub fn len_bytes(&self) -> usize {
        self.content.as_ref().or(self.text.as_ref()).map_or(0, String::len)
    }

    /// Tokenises the text, to write the response in pieces.
    ///
    /// # Errors
    /// A request without text.
    pub fn list(self, model: Arc<Model>) -> Result<LlamaTokenList, ApiError> {
        let LlamaTokenizeRequest { model: name, content, text, add_special, parse_special, with_pieces } = self;
        let Some(content) = content else {
            let text = text.ok_or_else(|| ApiError::param("content", "content is missing"))?;
            let request = TokenizeRequest { model: name, text, add_special, parse_special };
            return Ok(LlamaTokenList::Native(request.list(model)));
        };
        let options =
            EncodeOptions { add_special: add_special.unwrap_or(false), parse_special: parse_special.unwrap_or(true) };
        let tokens = model.tokenizer.encode(&content, options);
        Ok(LlamaTokenList::Llama(LlamaIds { model, tokens, with_pieces: with_pieces == Some(true) }))
    }

    /// Tokenises the text, for a server with the context length `max_model_len`.
    ///
    /// # Errors
    /// A request without text.
    pub fn tokenize(self, tokenizer: &Tokenizer, max_model_len: usize) -> Result<Tokenized, ApiError> {
        let LlamaTokenizeRequest { model, content, text, add_special, parse_special, with_pieces } = self;
        let Some(content) = content else {
            let text = text.ok_or_else(|| ApiError::param("content", "content is missing"))?;
            let request = TokenizeRequest { model, text, add_special, parse_special };
            return Ok(Tokenized::Native(request.tokenize(tokenizer, max_model_len)));
        };
        let options =
            EncodeOptions { add_special: add_special.unwrap_or(false), parse_special: parse_special.unwrap_or(true) };
        let token = |id: u32| LlamaToken::new(tokenizer, id, with_pieces == Some(true));
        let tokens = tokenizer.encode(&content, options).into_iter().map(token).collect();
        Ok(Tokenized::Llama(LlamaTokens { tokens }))
    }
}
