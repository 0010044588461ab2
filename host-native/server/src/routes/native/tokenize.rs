//! `POST /v1/tokenize`, `/v1/detokenize` and `/v1/apply-template`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use starling_api::native::tokenize::{
    DetokenizeRequest, DetokenizeResponse, Rendered, TemplateResponse, TokenizeRequest, TokenizeResponse,
};
use starling_api::openai::chat::ChatCompletionRequest;

use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError};
use crate::http::pieces::json_pieces;
use crate::routes::common::messages::{offload_tokenize, preview_chat};
use crate::routes::common::options::sticky;
use crate::schedule::offload::offload;
use crate::server::{Caller, Server};

/// Tokenise a text.
///
/// # Errors
/// A wrong request.
#[utoipa::path(post, path = "/v1/tokenize", tag = "Starling", request_body = TokenizeRequest, responses(
    (status = 200, description = "Tokens", body = TokenizeResponse),
    (status = "4XX", description = "The request is wrong", body = ErrorBody),
))]
pub async fn tokenize(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<TokenizeRequest>,
) -> Result<Response, HttpError> {
    let instance = server.model(body.model.as_deref(), None, &caller).await?;
    let max_model_len = instance.n_ctx();
    let size = body.text.len();
    let memory = TokenMemory::new(&caller, size)?;
    let list = offload_tokenize(size, move || Ok(body.list(Arc::clone(&instance.model)))).await?;
    memory.settle(list.n_bytes())?;
    Ok(json_pieces(&caller.memory, list.response(max_model_len)))
}

/// Memory for the tokens of a text.
pub struct TokenMemory<'a> {
    caller: &'a Caller,
    estimate: usize,
}

impl<'a> TokenMemory<'a> {
    /// Takes memory for the tokens of a text of `size` bytes, before it is tokenised.
    ///
    /// # Errors
    /// If there is too little.
    pub fn new(caller: &'a Caller, size: usize) -> Result<TokenMemory<'a>, ApiError> {
        // a token is four bytes long or more in most texts, and takes a number and a range
        let estimate = size.saturating_mul(8);
        caller.memory.grow(estimate)?;
        Ok(TokenMemory { caller, estimate })
    }

    /// The tokens have `n_bytes` bytes.
    ///
    /// # Errors
    /// If there is too little memory for them.
    pub fn settle(self, n_bytes: usize) -> Result<(), ApiError> {
        Ok(self.caller.memory.settle(self.estimate, n_bytes)?)
    }
}

/// Decode tokens.
///
/// # Errors
/// A wrong request.
#[utoipa::path(post, path = "/v1/detokenize", tag = "Starling", request_body = DetokenizeRequest, responses(
    (status = 200, description = "Text", body = DetokenizeResponse),
    (status = "4XX", description = "The request is wrong", body = ErrorBody),
))]
pub async fn detokenize(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<DetokenizeRequest>,
) -> Result<Response, HttpError> {
    decode(&server, &caller, body, &["text"]).await
}

/// Decodes tokens; the response has the text under each of `names`.
///
/// # Errors
/// A wrong request.
pub async fn decode(
    server: &Server,
    caller: &Caller,
    body: DetokenizeRequest,
    names: &[&str],
) -> Result<Response, HttpError> {
    let instance = server.model(body.model.as_deref(), None, caller).await?;
    let list = offload(body.tokens.len(), move || body.list(Arc::clone(&instance.model))).await??;
    Ok(json_pieces(&caller.memory, list.response(names)))
}

/// Render the prompt of a chat completion: a preview of the same request.
///
/// # Errors
/// A wrong request.
#[utoipa::path(post, path = "/v1/apply-template", tag = "Starling", request_body = ChatCompletionRequest, responses(
    (status = 200, description = "Rendered prompt", body = TemplateResponse),
    (status = "4XX", description = "The request is wrong", body = ErrorBody),
))]
pub async fn apply_template(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<ChatCompletionRequest>,
) -> Result<Response, HttpError> {
    render_template(&server, &caller, body, true).await
}

/// `POST /apply-template` of llama-server: a prompt for `POST /completion`, which adds BOS.
///
/// # Errors
/// A wrong request.
pub async fn apply_template_without_bos(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<ChatCompletionRequest>,
) -> Result<Response, HttpError> {
    render_template(&server, &caller, body, false).await
}

async fn render_template(
    server: &Server,
    caller: &Caller,
    body: ChatCompletionRequest,
    with_bos: bool,
) -> Result<Response, HttpError> {
    let ChatCompletionRequest { options, chat, .. } = body;
    let instance = server.model(options.model.as_deref(), sticky(&options), caller).await?;
    let rendered = preview_chat(caller, &instance, chat).await?;
    let rendered = offload_tokenize(rendered.text.len(), move || {
        let tokenizer = &instance.model.tokenizer;
        let (tokens, mut prompt) = (rendered.encode(tokenizer), rendered.text);
        let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos() && !with_bos);
        let bos = bos.and_then(|token| tokenizer.token_text(token)).and_then(|text| str::from_utf8(text).ok());
        if let Some(rest) = bos.and_then(|bos| prompt.strip_prefix(bos)) {
            prompt = rest.to_string();
        }
        Ok(Rendered::new(prompt, tokens))
    });
    let rendered = rendered.await?;
    caller.memory.grow(rendered.n_bytes()).map_err(ApiError::from)?;
    Ok(json_pieces(&caller.memory, rendered.response()))
}
