//! `POST /v1/tokenize`, `/v1/detokenize` and `/v1/apply-template`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use starling_api::native::tokenize::{
    DetokenizeRequest, DetokenizeResponse, TemplateResponse, TokenizeRequest, TokenizeResponse,
};
use starling_api::openai::chat::ChatCompletionRequest;

use super::super::offload::offload;
use super::super::state::{Caller, Server};
use super::body::Body;
use super::error::{ErrorBody, HttpError, json};
use super::messages::{offload_tokenize, preview_chat};
use super::options::sticky;

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
    let response = offload_tokenize(body.text.len(), move || {
        Ok(json(StatusCode::OK, &body.tokenize(&instance.model.tokenizer, max_model_len)))
    });
    Ok(response.await?)
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
    decode(&server, &caller, body, |text| text).await
}

/// Decodes tokens; the response is what `form` makes of the text.
///
/// # Errors
/// A wrong request.
pub async fn decode<T: Serialize>(
    server: &Server,
    caller: &Caller,
    body: DetokenizeRequest,
    form: impl FnOnce(DetokenizeResponse) -> T + Send + 'static,
) -> Result<Response, HttpError> {
    let instance = server.model(body.model.as_deref(), None, caller).await?;
    let n_tokens = body.tokens.len();
    let decode = move || Ok(json(StatusCode::OK, &form(body.detokenize(&instance.model.tokenizer)?)));
    offload(n_tokens, decode).await?
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
    let response = offload_tokenize(rendered.text.len(), move || {
        let tokenizer = &instance.model.tokenizer;
        let (tokens, mut prompt) = (rendered.encode(tokenizer), rendered.text);
        let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos() && !with_bos);
        let bos = bos.and_then(|token| tokenizer.token_text(token)).and_then(|text| str::from_utf8(text).ok());
        if let Some(rest) = bos.and_then(|bos| prompt.strip_prefix(bos)) {
            prompt = rest.to_string();
        }
        Ok(json(StatusCode::OK, &TemplateResponse { prompt, tokens }))
    });
    Ok(response.await?)
}
