//! `POST /execute`: the protocol by which an orchestrator gives a worker jobs.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use starling::tokenizer::EncodeOptions;
use starling_api::native::execute::{ExecutePlan, ExecuteRequest, ExecuteWriter};
use starling_api::openai::options::{Logprobs, RequestPlan};
use starling_api::stream::ServerSentEvent;

use crate::guard::policy::apply_to_text;
use crate::http::body::Body;
use crate::http::error::{ErrorBody, HttpError, quoted};
use crate::routes::common::answer::SystemClock;
use crate::routes::common::messages::offload_tokenize;
use crate::routes::common::options::{flow, is_seeded, limits, salt, sampling, seed, slot, sticky};
use crate::routes::common::sse::stream;
use crate::routes::common::submit::{Submission, submit};
use crate::server::{Caller, Server};

/// Run a job.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/execute", tag = "Starling", request_body = ExecuteRequest, responses(
    (status = 200, description = "Server-sent events: `started`, `token` for each token (`ExecuteToken`), `end` (`ExecuteEnd`) or `error`", content(
        (ServerSentEvent = "text/event-stream"),
    )),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn execute(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<ExecuteRequest>,
) -> Result<Response, HttpError> {
    let ExecuteRequest { options, mut job } = body;
    caller.limit_time(options.timeout)?;
    let instance = server.model(options.model.as_deref(), sticky(&options), &caller).await?;
    let (flow, seed) = (flow(&options, &caller)?, seed(&options, &instance));
    let is_seeded = is_seeded(&options, &instance);
    apply_to_text(&caller.prompt_check(&instance), &mut job.prompt).await?;
    let special = EncodeOptions { add_special: true, parse_special: false };
    let (model, prompt) = (Arc::clone(&instance.model), job.prompt);
    let tokens = offload_tokenize(prompt.len(), move || Ok(model.tokenizer.encode(&prompt, special))).await?;
    let sampling = sampling(&options, &instance, Logprobs::default(), seed).await?;
    let cache_salt = salt(&options, &instance, &caller)?;
    let plan = RequestPlan { sampling, constraint: None, prompt_logprobs: false, default_tokens: None, cache_salt };
    let request = options.request(&limits(&instance), &plan, tokens, "prompt")?;
    let (stops, partial) = (request.stop.clone(), options.timeout_partial == Some(true));
    let updates = submit(
        &server,
        &instance,
        &caller,
        &flow,
        Submission { requests: vec![request], n: 1, partial, is_seeded, form: None, slot: slot(&options) },
    )
    .await?;
    tracing::info!(
        worker_id = &*server.worker_id,
        job_id = quoted(&job.job_id),
        model = &*instance.name,
        "job accepted"
    );
    let plan = ExecutePlan { job_id: job.job_id, model: instance.name.to_string(), seed, stops };
    let writer = ExecuteWriter::new(plan, SystemClock { start: server.start });
    Ok(stream(updates, writer, instance.settings().sse_keep_alive))
}
