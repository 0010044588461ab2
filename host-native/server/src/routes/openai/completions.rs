//! `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use starling_api::answer::Answer;
use starling_api::openai::completions::{
    CompletionChoice, CompletionPlan, CompletionRequest, CompletionWriter, DEFAULT_TOKENS, Prompt,
};
use starling_api::openai::options::{Options, RequestPlan, Scope};
use starling_api::openai::response::CompletionResponse;
use starling_api::stream::ServerSentEvent;

use crate::guard::policy::{apply_to_input, apply_to_joined, apply_to_text};
use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, json};
use crate::routes::common::answer::{collect, response_head};
use crate::routes::common::messages::offload_tokenize;
use crate::routes::common::options::{flow, is_seeded, limits, salt, sampling, seed, slot, sticky};
use crate::routes::common::sse::stream;
use crate::routes::common::structure::{Compilation, Compiled};
use crate::routes::common::submit::{Submission, check_count, submit};
use crate::schedule::offload::offload;
use crate::server::{Caller, Server};

/// Create completions of prompts.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/v1/completions", tag = "OpenAI", request_body = CompletionRequest, responses(
    (status = 200, description = "Completions; with `stream` server-sent events of the same type", content(
        (CompletionResponse<CompletionChoice> = "application/json"), (ServerSentEvent = "text/event-stream"),
    )),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn completions(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<CompletionRequest>,
) -> Result<Response, HttpError> {
    let CompletionRequest { mut options, constraint, mut completion } = body;
    caller.limit_time(options.timeout)?;
    let instance = server.model(options.model.as_deref(), sticky(&options), &caller).await?;
    options.penalty_scope.get_or_insert(Scope::Answer);
    let partial = options.timeout_partial == Some(true);
    let (n, flow) = (options.n_choices(instance.settings().max_n)?, flow(&options, &caller)?);
    let (echo, logprobs) = (completion.is_echo(), completion.check(n)?);
    let (n_prompts, max_inputs) = (completion.prompt.len(), instance.settings().max_inputs);
    if n_prompts > max_inputs {
        return Err(ApiError::param("prompt", format!("{n_prompts} prompts, expected at most {max_inputs}")).into());
    }
    check_count(&instance, n_prompts * n)?;
    apply_to_input(&caller.prompt_check(&instance), &instance, &mut completion.prompt).await?;
    let mut suffix = completion.suffix.take().filter(|suffix| !suffix.is_empty());
    if let Some(suffix) = &mut suffix {
        apply_to_text(&caller.prompt_check(&instance), suffix).await?;
    }
    let parse_special = completion.parse_special != Some(false);
    let (model, size, input) = (Arc::clone(&instance.model), completion.prompt.bytes(), completion.prompt);
    let is_infill = suffix.is_some();
    let encode = move || match suffix {
        Some(suffix) => Prompt::encode_infill(&model.tokenizer, input, &suffix),
        None => Ok(Prompt::encode(&model.tokenizer, input, parse_special, logprobs.of_prompt)),
    };
    let prompts = offload_tokenize(size, encode).await?;
    if is_infill {
        for prompt in &prompts {
            apply_to_joined(&caller.prompt_check(&instance), &instance, &prompt.tokens).await?;
        }
    }
    let (seed, is_seeded) = (seed(&options, &instance), is_seeded(&options, &instance));
    let is_prompt_only = !logprobs.of_prompt && options.is_prompt_only();
    let options = if is_prompt_only { Options { max_tokens: Some(1), ..options } } else { options };
    let (constraint, form) = Compiled::unzip(
        Compilation { server: &server, caller: &caller, instance: &instance }.constraint(constraint).await?,
    );
    let sampling = sampling(&options, &instance, logprobs, seed).await?;
    let request_plan = RequestPlan {
        sampling,
        constraint,
        prompt_logprobs: logprobs.of_prompt,
        default_tokens: Some(DEFAULT_TOKENS),
        cache_salt: salt(&options, &instance, &caller)?,
    };
    let (is_stream, stream_usage) = (options.is_stream(), options.includes_usage());
    let inner = Arc::clone(&instance);
    let slot = slot(&options);
    let build = move || {
        let limits = limits(&inner);
        let request = |prompt: &Prompt| options.request(&limits, &request_plan, prompt.tokens.clone(), "prompt");
        let requests = prompts.iter().map(request).collect::<Result<Vec<_>, _>>()?;
        Ok::<_, ApiError>((prompts, requests))
    };
    let (prompts, requests) = offload(usize::MAX, build).await??;
    if requests.is_empty() {
        return Err(ApiError::param("prompt", "prompt is empty, expected at least one prompt").into());
    }
    let plan = CompletionPlan { model: Arc::clone(&instance.model), prompts, n, echo, logprobs, stream_usage };
    let head = response_head(&instance, "cmpl-", seed, None);
    if is_prompt_only {
        return Ok(json(StatusCode::OK, &plan.prompt_response(head)));
    }
    let updates =
        submit(&server, &instance, &caller, &flow, Submission { requests, n, partial, is_seeded, form, slot }).await?;
    if is_stream {
        return Ok(stream(updates, CompletionWriter::new(plan, head), instance.settings().sse_keep_alive));
    }
    let answers = collect(updates, plan.n_choices()).await?;
    let size = answers.iter().map(Answer::n_logprobs).sum();
    Ok(offload(size, move || json(StatusCode::OK, &plan.response(head, answers))).await?)
}
