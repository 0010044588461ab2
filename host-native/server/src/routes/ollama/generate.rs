//! `POST /api/chat` and `/api/generate`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use starling_api::infill::Infill;
use starling_api::llama_server::prompt::LlamaPrompt;
use starling_api::ollama::error::OllamaError;
use starling_api::ollama::request::{
    GeneratePrompt, LoadOrUnload, OllamaChatRequest, OllamaGenerateRequest, RawPrompt, model_name,
};
use starling_api::ollama::response::{OllamaEndpoint, OllamaFormat, OllamaResponse, loaded};
use starling_api::openai::chat::ChatCompletionRequest;
use starling_api::openai::options::Logprobs;
use starling_api::output::OutputPlan;
use starling_api::parts::AnswerWriter;
use starling_api::stream::Framing;

use crate::http::body::Body;
use crate::http::error::{ApiError, HttpError, json};
use crate::routes::common::answer::{Delivery, SystemClock, respond};
use crate::routes::common::text::{TextPrompt, TextRequest, start_text};
use crate::routes::common::writes::Writes;
use crate::routes::openai::chat::start_chat;
use crate::server::{Caller, Server};

/// Chat.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/api/chat", tag = "Ollama", request_body = OllamaChatRequest, responses(
    (status = 200, description = "Answer; unless `stream` is false, lines of JSON of the same type", content(
        (OllamaResponse = "application/json"), (OllamaResponse = "application/x-ndjson"),
    )),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = OllamaError),
    (status = "5XX", description = "The server cannot answer now", body = OllamaError),
))]
pub async fn chat(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<OllamaChatRequest>,
) -> Result<Response, HttpError> {
    if let Some(what) = body.load_only() {
        return Ok(load_only(&server, &caller, OllamaEndpoint::Chat, &body.model, what).await?);
    }
    Ok(answer_chat(&server, &caller, body.into_chat()?, OllamaEndpoint::Chat).await?)
}

/// Continue a prompt.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/api/generate", tag = "Ollama", request_body = OllamaGenerateRequest, responses(
    (status = 200, description = "Answer; unless `stream` is false, lines of JSON of the same type", content(
        (OllamaResponse = "application/json"), (OllamaResponse = "application/x-ndjson"),
    )),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = OllamaError),
    (status = "5XX", description = "The server cannot answer now", body = OllamaError),
))]
pub async fn generate(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<OllamaGenerateRequest>,
) -> Result<Response, HttpError> {
    if let Some(what) = body.load_only() {
        return Ok(load_only(&server, &caller, OllamaEndpoint::Generate, &body.model, what).await?);
    }
    let RawPrompt { options, constraint, prompt, suffix } = match body.into_prompt()? {
        GeneratePrompt::Chat(request) => {
            return Ok(answer_chat(&server, &caller, *request, OllamaEndpoint::Generate).await?);
        }
        GeneratePrompt::Raw(raw) => *raw,
    };
    let (prompt, param) = match suffix {
        Some(suffix) => (TextPrompt::Infill(Infill { prefix: prompt, suffix, files: Vec::new() }), "suffix"),
        None => (TextPrompt::Mixed(LlamaPrompt::text(prompt)), "prompt"),
    };
    let request = TextRequest {
        options,
        constraint,
        logprobs: Logprobs::default(),
        prompts: vec![prompt],
        text_biases: Vec::new(),
        param,
    };
    let text = start_text(&server, &caller, request, "gen-").await?;
    let clock = SystemClock { start: caller.arrival };
    let form = OllamaFormat::new(OllamaEndpoint::Generate, &text.head, text.prompts.iter().map(Vec::len).sum(), clock);
    let framing = text.options.is_stream().then_some(Framing::JsonLines);
    let delivery = Delivery { framing, size: 0, writes: Writes::default() };
    let build = |writer: AnswerWriter<OllamaFormat<SystemClock>>| writer.into_format().into_response();
    Ok(respond(&text.instance, text.updates, AnswerWriter::new(OutputPlan::default().parser(0), form), delivery, build)
        .await?)
}

async fn answer_chat(
    server: &Server,
    caller: &Caller,
    request: ChatCompletionRequest,
    endpoint: OllamaEndpoint,
) -> Result<Response, ApiError> {
    let chat = start_chat(server, caller, request, "chat-").await?;
    let form = OllamaFormat::new(endpoint, &chat.head, chat.plan.n_prompt, SystemClock { start: caller.arrival });
    chat.respond(form, Framing::JsonLines, OllamaFormat::into_response).await
}

/// A request without a prompt: loads or unloads the model.
async fn load_only(
    server: &Server,
    caller: &Caller,
    endpoint: OllamaEndpoint,
    model: &str,
    what: LoadOrUnload,
) -> Result<Response, ApiError> {
    let name = model_name(model);
    match what {
        LoadOrUnload::Load => drop(server.model(Some(name), None, caller).await?),
        LoadOrUnload::Unload => {
            let entry = server.pool.find(Some(name))?;
            caller.identity.rights.check_loads(entry.settings().pin)?;
            server.pool.unload(&entry, false).await;
            server.administrator_of(caller).log("unload model", &entry.name, Ok(()));
        }
    }
    let clock = SystemClock { start: caller.arrival };
    Ok(json(StatusCode::OK, &loaded(endpoint, model, what, &clock)))
}
