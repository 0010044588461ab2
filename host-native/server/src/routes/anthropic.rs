//! Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use starling_api::anthropic::error::AnthropicErrorBody;
use starling_api::anthropic::request::{MessagesRequest, TokenCount};
use starling_api::anthropic::response::{MessageFormat, MessageResponse};
use starling_api::stream::{Framing, ServerSentEvent};

use crate::http::body::Body;
use crate::http::error::{HttpError, json, with_skipped};
use crate::routes::openai::chat::{count_chat, start_chat};
use crate::server::{Caller, Server};

/// Create a message.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/v1/messages", tag = "Anthropic", request_body = MessagesRequest, responses(
    (status = 200, description = "Message; with `stream` server-sent events from `message_start` to `message_stop`", content(
        (MessageResponse = "application/json"), (ServerSentEvent = "text/event-stream"),
    )),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = AnthropicErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = AnthropicErrorBody),
))]
pub async fn messages(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<MessagesRequest>,
) -> Result<Response, HttpError> {
    body.check_max_tokens()?;
    let (request, skipped) = body.into_chat()?;
    let chat = start_chat(&server, &caller, request, "msg_").await?;
    let form = MessageFormat::new(chat.head.clone(), chat.plan.n_prompt, chat.stops.clone());
    let response = chat.respond(form, Framing::ServerSentEvents, MessageFormat::into_response).await?;
    Ok(with_skipped(response, &skipped))
}

/// Count the tokens of a message's prompt.
///
/// # Errors
/// A wrong request.
#[utoipa::path(post, path = "/v1/messages/count_tokens", tag = "Anthropic", request_body = MessagesRequest, responses(
    (status = 200, description = "Number of tokens", body = TokenCount),
    (status = "4XX", description = "The request is wrong", body = AnthropicErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = AnthropicErrorBody),
))]
pub async fn count_tokens(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<MessagesRequest>,
) -> Result<Response, HttpError> {
    let (request, skipped) = body.into_chat()?;
    let input_tokens = count_chat(&server, &caller, request).await?;
    Ok(with_skipped(json(StatusCode::OK, &TokenCount { input_tokens }), &skipped))
}
