//! OpenAI's `POST /v1/responses` and `/v1/responses/input_tokens`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use starling_api::responses::request::{ConvertedResponse, InputTokens, ResponsesRequest};
use starling_api::responses::response::{ResponsesFormat, ResponsesResponse};
use starling_api::stream::{EventBuffer, Framing, NoEvents, ServerSentEvent};

use super::chat::{count_chat, start_chat};
use super::stored_responses::{Keeping, StoredResponseFormat, previous_items};
use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, json, with_skipped};
use crate::routes::common::answer::response_head;
use crate::routes::common::writes::Writes;
use crate::server::{Caller, Server};

/// Create a response.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/v1/responses", tag = "OpenAI", request_body = ResponsesRequest, responses(
    (status = 200, description = "Response; with `stream` server-sent events from `response.created` to `response.completed`", content(
        (ResponsesResponse = "application/json"), (ServerSentEvent = "text/event-stream"),
    )),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn responses(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(mut body): Body<ResponsesRequest>,
) -> Result<Response, HttpError> {
    body.check_supported()?;
    let before = previous_items(&server, &caller, body.previous_response_id.as_deref()).await?;
    let keeping = Keeping::of(&server, &caller, &mut body, &before).await?;
    if body.is_probe(!before.is_empty()) {
        return Ok(probe(&server, &caller, &body, keeping).await?);
    }
    let input = body.input.take();
    let echo = body.clone();
    body.input = input;
    let ConvertedResponse { chat, skipped } = body.into_chat(before)?;
    let chat = start_chat(&server, &caller, chat, "resp_").await?;
    let model = chat.plan.logprobs.then(|| Arc::clone(&chat.plan.model));
    let form = ResponsesFormat::new(chat.head.clone(), &echo, chat.plan.n_prompt).with_logprobs(model);
    let form = StoredResponseFormat::new(form, keeping, chat.writes.clone());
    let response = chat.respond(form, Framing::ServerSentEvents, StoredResponseFormat::into_response).await?;
    Ok(with_skipped(response, &skipped))
}

/// The response to a request that only probes the server.
async fn probe(
    server: &Server,
    caller: &Caller,
    body: &ResponsesRequest,
    keeping: Option<Keeping>,
) -> Result<Response, ApiError> {
    let instance = server.model(body.model.as_deref(), None, caller).await?;
    let seed = body.seed.map_or(0, |seed| seed.0);
    let (form, writes) =
        (ResponsesFormat::new(response_head(&instance, "resp_", seed, None), body, 0), Writes::default());
    let mut form = StoredResponseFormat::new(form, keeping, writes.clone());
    if body.stream != Some(true) {
        form.finish_probe(&mut NoEvents);
        writes.durable().await?;
        return Ok(json(StatusCode::OK, &form.into_response()));
    }
    let mut events = EventBuffer::default();
    form.finish_probe(&mut events);
    writes.durable().await?;
    Ok(([(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")], events.into_bytes()).into_response())
}

/// Count the tokens of a response's prompt.
///
/// # Errors
/// A wrong request.
#[utoipa::path(post, path = "/v1/responses/input_tokens", tag = "OpenAI", request_body = ResponsesRequest, responses(
    (status = 200, description = "Number of tokens", body = InputTokens),
    (status = "4XX", description = "The request is wrong", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn input_tokens(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<ResponsesRequest>,
) -> Result<Response, HttpError> {
    let before = previous_items(&server, &caller, body.previous_response_id.as_deref()).await?;
    let ConvertedResponse { chat, skipped } = body.into_chat(before)?;
    let input_tokens = count_chat(&server, &caller, chat).await?;
    let response = json(StatusCode::OK, &InputTokens { object: "response.input_tokens", input_tokens });
    Ok(with_skipped(response, &skipped))
}
