//! `POST /v1/tokenize`, `/v1/detokenize` and `/v1/apply-template`.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use starling::model::Model;
use starling::tokenizer::{DecodeOptions, EncodeOptions, StreamDecoder, Tokenizer};

use crate::answer::token_text_lossy;
use crate::error::ApiError;
use crate::parse_whole;
use crate::pieces::{JsonPieces, text, write, write_escaped};

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

/// A rendered prompt and its tokens, to be written in pieces.
pub struct Rendered {
    prompt: String,
    tokens: Vec<u32>,
}

/// Bytes of a prompt that are written at once.
const PROMPT_PART: usize = 4 << 10;

impl Rendered {
    /// A rendered prompt.
    pub fn new(prompt: String, tokens: Vec<u32>) -> Rendered {
        Rendered { prompt, tokens }
    }

    /// Bytes of memory.
    pub fn n_bytes(&self) -> usize {
        self.prompt.len() + size_of::<u32>() * self.tokens.len()
    }

    /// The [`TemplateResponse`].
    pub fn response(self) -> JsonPieces<Rendered> {
        let (n_parts, n_tokens) = (self.prompt.len().div_ceil(PROMPT_PART), self.tokens.len());
        JsonPieces::new(self)
            .string("{\"prompt\":\"".into(), n_parts, |rendered, i, to| write_escaped(rendered.part(i), to))
            .list("\",\"tokens\":[".into(), n_tokens, |rendered, i, to| write(&rendered.tokens[i], to))
            .end("]}".into())
    }

    /// A part of the prompt, which ends between two characters.
    fn part(&self, i: usize) -> &str {
        let boundary = |at: usize| {
            let at = at.min(self.prompt.len());
            (0..=at).rev().find(|at| self.prompt.is_char_boundary(*at)).unwrap_or(0)
        };
        &self.prompt[boundary(i * PROMPT_PART)..boundary((i + 1) * PROMPT_PART)]
    }
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

/// Tokens of a text, to be written in pieces.
pub struct TokenList {
    model: Arc<Model>,
    tokens: Vec<u32>,
    /// Byte range of each token; the text is far below 4 GiB.
    offsets: Vec<[u32; 2]>,
}

impl TokenList {
    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Bytes of memory.
    pub fn n_bytes(&self) -> usize {
        size_of::<u32>() * self.tokens.len() + size_of::<[u32; 2]>() * self.offsets.len()
    }

    /// The [`TokenizeResponse`] of a server with the context length `max_model_len`.
    pub fn response(self, max_model_len: usize) -> JsonPieces<TokenList> {
        let n = self.tokens.len();
        JsonPieces::new(self)
            .list("{\"tokens\":[".into(), n, |list, i, to| write(&list.tokens[i], to))
            .list("],\"pieces\":[".into(), n, |list, i, to| {
                write(&token_text_lossy(&list.model.tokenizer, list.tokens[i]), to);
            })
            .list("],\"offsets\":[".into(), n, |list, i, to| write(&list.offsets[i], to))
            .end(format!("],\"count\":{n},\"max_model_len\":{max_model_len}}}"))
    }
}

impl TokenizeRequest {
    /// Tokenises the text, to write the response in pieces.
    pub fn list(&self, model: Arc<Model>) -> TokenList {
        let options = EncodeOptions {
            add_special: self.add_special.unwrap_or(true),
            parse_special: self.parse_special.unwrap_or(false),
        };
        let (tokens, ranges) = model.tokenizer.encode_with_offsets(&self.text, options);
        let offset = |at| u32::try_from(at).unwrap_or(u32::MAX);
        let offsets = ranges.into_iter().map(|range| [offset(range.start), offset(range.end)]).collect();
        TokenList { model, tokens, offsets }
    }
}

/// Tokens to decode, to write their text in pieces.
pub struct DecodeList {
    model: Arc<Model>,
    tokens: Vec<u32>,
    options: DecodeOptions,
    /// Whether the next token is the first of the text.
    is_first: bool,
    text: StreamDecoder,
    bytes: Vec<u8>,
}

/// Tokens that are decoded at once.
const DECODED_AT_ONCE: usize = 64;

impl DecodeList {
    /// The text under these names, once for each: `{"NAME":"…",…}`.
    pub fn response(self, names: &[&str]) -> JsonPieces<DecodeList> {
        // one more part for the end of a character that is not complete
        let n_parts = self.tokens.len().div_ceil(DECODED_AT_ONCE) + 1;
        let mut pieces = JsonPieces::new(self);
        for (i, name) in names.iter().enumerate() {
            let before = if i == 0 { "{" } else { "\"," };
            pieces = pieces.string(format!("{before}{}:\"", text(name)), n_parts, DecodeList::write);
        }
        pieces.end("\"}".into())
    }

    fn write(&mut self, part: usize, to: &mut Vec<u8>) {
        if part == 0 {
            (self.is_first, self.text) = (true, StreamDecoder::new());
        }
        let mut parts = self.tokens.chunks(DECODED_AT_ONCE).skip(part);
        let Some(tokens) = parts.next() else { return write_escaped(&self.text.finish(), to) };
        self.bytes.clear();
        self.model.tokenizer.decode_part(tokens, self.options, &mut self.is_first, &mut self.bytes);
        write_escaped(&self.text.push(&self.bytes), to);
    }
}

impl DetokenizeRequest {
    /// The tokens, to write their text in pieces.
    ///
    /// # Errors
    /// A token that the model does not have.
    pub fn list(self, model: Arc<Model>) -> Result<DecodeList, ApiError> {
        self.check(&model.tokenizer)?;
        let options = DecodeOptions { skip_special: self.skip_special.unwrap_or(false) };
        let (is_first, text, bytes) = (true, StreamDecoder::new(), Vec::new());
        Ok(DecodeList { model, tokens: self.tokens, options, is_first, text, bytes })
    }

    /// Decodes the tokens.
    ///
    /// # Errors
    /// A token that the model does not have.
    pub fn detokenize(&self, tokenizer: &Tokenizer) -> Result<DetokenizeResponse, ApiError> {
        self.check(tokenizer)?;
        let options = DecodeOptions { skip_special: self.skip_special.unwrap_or(false) };
        Ok(DetokenizeResponse { text: String::from_utf8_lossy(&tokenizer.decode(&self.tokens, options)).into_owned() })
    }

    fn check(&self, tokenizer: &Tokenizer) -> Result<(), ApiError> {
        let n = tokenizer.n_vocab();
        if let Some((at, token)) = self.tokens.iter().enumerate().find(|(_, token)| **token as usize >= n) {
            let param = format!("tokens[{at}]");
            return Err(ApiError::param(&param, format!("{param} is {token}, expected one of the model's {n} tokens")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rendered_prompt_in_pieces_is_the_whole_response() {
        for n in [0, 1, 3000, 10_000] {
            let (prompt, tokens) = ("a\u{e9}\u{1f600}\"\n".repeat(n), (0..n as u32).collect::<Vec<_>>());
            let pieces: Vec<Vec<u8>> = Rendered::new(prompt.clone(), tokens.clone()).response().collect();
            assert_eq!(pieces.concat(), serde_json::to_vec(&TemplateResponse { prompt, tokens }).unwrap());
        }
    }
}
