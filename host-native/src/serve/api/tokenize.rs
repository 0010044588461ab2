//! Texts to tokens and back, and conversations to text.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use starling::chat::Json;
use starling::tokenizer::{DecodeOptions, EncodeOptions};
use utoipa::ToSchema;

use super::super::offload::offload;
use super::super::state::App;
use super::body::Body;
use super::error::{ApiError, ErrorBody, HttpError, json};
use super::messages::{offload_tokenize, render};
use super::options::check_model;
use starling_api::answer::token_text_lossy as piece;
use starling_api::messages::{chat_end, check_messages};
use starling_api::parse_whole;
use starling_api::tools::parse_tool_choice;

/// A text to be cut into tokens.
#[derive(Debug, Deserialize, ToSchema)]
pub struct TokenizeRequest {
    /// The model's name; the one that is served if there is none.
    pub model: Option<String>,
    /// The text.
    #[serde(alias = "content", alias = "prompt")]
    pub text: String,
    /// Whether tokens are added that the model wants before and after a text; true by default.
    #[serde(alias = "add_special_tokens")]
    pub add_special: Option<bool>,
    /// Whether names of control tokens in the text stand for those tokens; false by default.
    pub parse_special: Option<bool>,
}

/// The tokens of a text.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenizeResponse {
    /// Their ids.
    pub tokens: Vec<u32>,
    /// Their texts; where a token ends inside a character, with replacement characters.
    pub pieces: Vec<String>,
    /// Bytes of the text that each stands for: first, and one past the last.
    pub offsets: Vec<[usize; 2]>,
    /// How many.
    pub count: usize,
    /// How many the model's context holds here.
    pub max_model_len: usize,
}

/// Tokens to be put together.
#[derive(Debug, Deserialize, ToSchema)]
pub struct DetokenizeRequest {
    /// The model's name; the one that is served if there is none.
    pub model: Option<String>,
    /// Their ids.
    pub tokens: Vec<u32>,
    /// Whether control tokens are left out; false by default.
    pub skip_special: Option<bool>,
}

/// The text of tokens.
#[derive(Debug, Serialize, ToSchema)]
pub struct DetokenizeResponse {
    /// The text; where its bytes are not UTF-8, with replacement characters.
    pub text: String,
}

/// A conversation to be rendered.
#[derive(Debug, Deserialize, ToSchema)]
pub struct TemplateRequest {
    /// The model's name; the one that is served if there is none.
    pub model: Option<String>,
    /// Messages with `role` and `content`.
    #[schema(value_type = Vec<Object>, min_items = 1)]
    pub messages: Vec<Json>,
    /// Tools that the model may call.
    #[schema(value_type = Option<Vec<Object>>)]
    pub tools: Option<Value>,
    /// As in a chat completion.
    pub continue_final_message: Option<bool>,
    /// As in a chat completion.
    pub add_generation_prompt: Option<bool>,
}

/// The text of a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub struct TemplateResponse {
    /// The text, as an answer follows it.
    pub prompt: String,
    /// Its tokens. Text of the messages that spells a control token is none, so these are not those of `prompt` then.
    pub tokens: Vec<u32>,
}

parse_whole!(TokenizeRequest, DetokenizeRequest, TemplateRequest);

/// Cuts a text into tokens.
///
/// # Errors
/// What is wrong with the request.
#[utoipa::path(post, path = "/v1/tokenize", tag = "Starling", request_body = TokenizeRequest, responses(
    (status = 200, description = "The tokens", body = TokenizeResponse),
    (status = "4XX", description = "The request is wrong", body = ErrorBody),
))]
pub async fn tokenize(State(app): State<Arc<App>>, Body(body): Body<TokenizeRequest>) -> Result<Response, HttpError> {
    check_model(&app, body.model.as_deref())?;
    let options = EncodeOptions {
        add_special: body.add_special.unwrap_or(true),
        parse_special: body.parse_special.unwrap_or(false),
    };
    let max_model_len = app.engine.as_ref().map_or(app.embedder.n_ctx, |e| e.n_ctx);
    let response = offload_tokenize(body.text.len(), move || {
        let tokenizer = &app.model.tokenizer;
        let (tokens, ranges) = tokenizer.encode_with_offsets(&body.text, options);
        let response = TokenizeResponse {
            pieces: tokens.iter().map(|t| piece(tokenizer, *t)).collect(),
            offsets: ranges.into_iter().map(|r| [r.start, r.end]).collect(),
            count: tokens.len(),
            tokens,
            max_model_len,
        };
        Ok(json(StatusCode::OK, &response))
    });
    Ok(response.await?)
}

/// Puts tokens together.
///
/// # Errors
/// What is wrong with the request.
#[utoipa::path(post, path = "/v1/detokenize", tag = "Starling", request_body = DetokenizeRequest, responses(
    (status = 200, description = "The text", body = DetokenizeResponse),
    (status = "4XX", description = "The request is wrong", body = ErrorBody),
))]
pub async fn detokenize(
    State(app): State<Arc<App>>,
    Body(body): Body<DetokenizeRequest>,
) -> Result<Response, HttpError> {
    check_model(&app, body.model.as_deref())?;
    let n_tokens = body.tokens.len();
    let decode = move || {
        let tokenizer = &app.model.tokenizer;
        let n = tokenizer.n_vocab();
        if let Some((at, token)) = body.tokens.iter().enumerate().find(|(_, t)| **t as usize >= n) {
            let param = format!("tokens[{at}]");
            return Err(ApiError::param(&param, format!("{param} is {token}, expected one of the model's {n} tokens")));
        }
        let options = DecodeOptions { skip_special: body.skip_special.unwrap_or(false) };
        let text = String::from_utf8_lossy(&tokenizer.decode(&body.tokens, options)).into_owned();
        Ok(json(StatusCode::OK, &DetokenizeResponse { text }))
    };
    Ok(offload(n_tokens, decode).await??)
}

/// Renders a conversation by the model's chat template.
///
/// # Errors
/// What is wrong with the request.
#[utoipa::path(post, path = "/v1/apply-template", tag = "Starling", request_body = TemplateRequest, responses(
    (status = 200, description = "The text", body = TemplateResponse),
    (status = "4XX", description = "The request is wrong", body = ErrorBody),
))]
pub async fn apply_template(
    State(app): State<Arc<App>>,
    Body(body): Body<TemplateRequest>,
) -> Result<Response, HttpError> {
    check_model(&app, body.model.as_deref())?;
    let end = chat_end(body.continue_final_message, body.add_generation_prompt)?;
    let tools = parse_tool_choice(app.template.source(), body.tools, None, true)?.tools;
    // a template is a program: never on a thread that serves connections
    let response = offload_tokenize(usize::MAX, move || {
        let rendered = render(&app, check_messages(body.messages)?, tools, Vec::new(), end)?;
        let tokens = rendered.encode(&app.model.tokenizer);
        Ok(json(StatusCode::OK, &TemplateResponse { prompt: rendered.text, tokens }))
    });
    Ok(response.await?)
}
