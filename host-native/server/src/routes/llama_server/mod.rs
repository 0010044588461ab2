//! llama-server's `/completion`, `/infill`, `/embedding`, `/props`, `/lora-adapters` and the count of a chat's tokens.

pub mod slots;

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use starling_api::llama_server::completion::{LlamaCompletion, LlamaPlan, LlamaWriter, generation_settings};
use starling_api::llama_server::prompt::LlamaPrompts;
use starling_api::llama_server::props::{
    ChatInputTokens, DefaultSettings, LlamaEmbedding, LlamaEmbeddingRequest, Modalities, Props,
};
use starling_api::llama_server::request::{LlamaCompletionRequest, RANDOM_SEED};
use starling_api::llama_server::tokenize::{LlamaText, LlamaTokenList, LlamaTokenizeRequest, Tokenized};
use starling_api::native::tokenize::DetokenizeRequest;
use starling_api::openai::chat::ChatCompletionRequest;
use starling_api::openai::embeddings::{EmbeddingRequest, Encoding, VectorList};
use starling_api::openai::options::{Logprobs, Options};
use starling_api::stream::{Framing, ServerSentEvent};

use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, json, with_skipped};
use crate::http::pieces::json_pieces;
use crate::routes::common::answer::{Delivery, SystemClock, respond};
use crate::routes::common::messages::offload_tokenize;
use crate::routes::common::options::sampling;
use crate::routes::common::text::{TextPrompt, TextRequest, start_text};
use crate::routes::common::writes::Writes;
use crate::routes::native::tokenize::{TokenMemory, decode};
use crate::routes::openai::chat::count_chat;
use crate::routes::openai::embeddings::embed_inputs;
use crate::server::{Caller, Server};

/// Continue prompts: the response is a list if there are several.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/completion", tag = "llama-server", request_body = LlamaCompletionRequest, responses(
    (status = 200, description = "Answer; with `stream` server-sent events of the same type", content(
        (LlamaCompletion = "application/json"), (ServerSentEvent = "text/event-stream"),
    )),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn completion(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(mut body): Body<LlamaCompletionRequest>,
) -> Result<Response, HttpError> {
    let Some(LlamaPrompts(prompts)) = body.completion.prompt.take() else {
        return Err(ApiError::param("prompt", "prompt is missing").into());
    };
    let prompts = prompts.into_iter().map(TextPrompt::Mixed).collect();
    Ok(answer(&server, &caller, body, prompts, "prompt").await?)
}

/// Fill a gap in a text.
///
/// # Errors
/// A wrong request, a model without the tokens for it, or a server that cannot answer now.
#[utoipa::path(post, path = "/infill", tag = "llama-server", request_body = LlamaCompletionRequest, responses(
    (status = 200, description = "Answer; with `stream` server-sent events of the same type", content(
        (LlamaCompletion = "application/json"), (ServerSentEvent = "text/event-stream"),
    )),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn infill(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(mut body): Body<LlamaCompletionRequest>,
) -> Result<Response, HttpError> {
    let gap = body.completion.infill()?;
    Ok(answer(&server, &caller, body, vec![TextPrompt::Infill(gap)], "input_prefix").await?)
}

async fn answer(
    server: &Server,
    caller: &Caller,
    body: LlamaCompletionRequest,
    prompts: Vec<TextPrompt>,
    param: &'static str,
) -> Result<Response, ApiError> {
    let LlamaCompletionRequest { options, constraint, completion } = body;
    let (logprobs, skipped) = (completion.check()?, completion.skipped());
    let n_predict = completion.n_predict.unwrap_or(-1);
    let text_biases = completion.text_biases;
    let request = TextRequest { options, constraint, logprobs, prompts, text_biases, param };
    let text = start_text(server, caller, request, "cmpl-").await?;
    let model = Arc::clone(&text.instance.model);
    let model_ends = model.tokenizer.end_tokens();
    let ends = if text.options.ignore_eos == Some(true) { &[] } else { model_ends };
    let plan = LlamaPlan {
        settings: generation_settings(&text.sampling, &text.options, n_predict, model_ends),
        n_ctx: text.instance.n_ctx(),
        end_tokens: ends.iter().chain(text.options.stop_token_ids.iter().flatten()).copied().collect(),
        model,
        prompts: text.prompts,
        stops: text.options.stops(),
        id_slot: text.options.id_slot.unwrap_or(-1),
        return_tokens: completion.return_tokens == Some(true) || text.options.is_stream(),
        logprobs: logprobs.is_requested,
        n_indent: completion.n_indent.unwrap_or(0),
        is_prompt_only: n_predict == 0,
        response_fields: completion.response_fields,
    };
    let size = if logprobs.is_requested { usize::MAX } else { 0 };
    let framing = text.options.is_stream().then_some(Framing::ServerSentEvents);
    let delivery = Delivery { framing, size, writes: Writes::default() };
    let writer = LlamaWriter::new(plan, &text.head, SystemClock { start: caller.arrival });
    let response = respond(&text.instance, text.updates, writer, delivery, LlamaWriter::into_response).await?;
    Ok(with_skipped(response, &skipped))
}

/// Create embeddings.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/embedding", tag = "llama-server", request_body = LlamaEmbeddingRequest, responses(
    (status = 200, description = "Embeddings", body = Vec<LlamaEmbedding>),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn embedding(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<LlamaEmbeddingRequest>,
) -> Result<Response, HttpError> {
    let encoding_format = Some(Encoding::Float);
    let request = EmbeddingRequest { model: None, input: body.content, encoding_format, dimensions: None, user: None };
    let vectors = embed_inputs(&server, &caller, request, false).await?.vectors;
    Ok(json_pieces(&caller.memory, VectorList::llama(vectors)))
}

/// Tokenise a text.
///
/// # Errors
/// A wrong request.
#[utoipa::path(post, path = "/tokenize", tag = "llama-server", request_body = LlamaTokenizeRequest, responses(
    (status = 200, description = "Tokens", body = Tokenized),
    (status = "4XX", description = "The request is wrong", body = ErrorBody),
))]
pub async fn tokenize(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<LlamaTokenizeRequest>,
) -> Result<Response, HttpError> {
    let instance = server.model(body.model.as_deref(), None, &caller).await?;
    let (max_model_len, body_len) = (instance.n_ctx(), body.len_bytes());
    let memory = TokenMemory::new(&caller, body_len)?;
    let list = offload_tokenize(body_len, move || body.list(Arc::clone(&instance.model))).await?;
    match list {
        LlamaTokenList::Llama(list) => {
            memory.settle(list.n_bytes())?;
            Ok(json_pieces(&caller.memory, list.response()))
        }
        LlamaTokenList::Native(list) => {
            memory.settle(list.n_bytes())?;
            Ok(json_pieces(&caller.memory, list.response(max_model_len)))
        }
    }
}

/// Decode tokens.
///
/// # Errors
/// A wrong request.
#[utoipa::path(post, path = "/detokenize", tag = "llama-server", request_body = DetokenizeRequest, responses(
    (status = 200, description = "Text", body = LlamaText),
    (status = "4XX", description = "The request is wrong", body = ErrorBody),
))]
pub async fn detokenize(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<DetokenizeRequest>,
) -> Result<Response, HttpError> {
    decode(&server, &caller, body, &["content", "text"]).await
}

/// Properties of the server and its default model.
///
/// # Errors
/// A model that does not load.
#[utoipa::path(get, path = "/props", tag = "llama-server", responses(
    (status = 200, description = "Properties", body = Props),
    (status = "4XX", description = "No API key", body = ErrorBody),
    (status = "5XX", description = "The model does not load", body = ErrorBody),
))]
pub async fn props(State(server): State<Arc<Server>>, caller: Caller) -> Result<Response, HttpError> {
    let instance = server.model(None, None, &caller).await?;
    let settings = instance.settings();
    let n_predict = i64::try_from(settings.max_tokens).ok().filter(|n| *n > 0).unwrap_or(-1);
    let options = Options::default();
    let seed = settings.seed.unwrap_or(RANDOM_SEED.0);
    let defaults = sampling(&options, &instance, Logprobs::default(), seed).await?;
    let tokenizer = &instance.model.tokenizer;
    let text = |token: Option<u32>| {
        let bytes = token.and_then(|token| tokenizer.token_text(token)).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    };
    let props = Props {
        default_generation_settings: DefaultSettings {
            n_ctx: instance.n_ctx(),
            params: generation_settings(&defaults, &options, n_predict, &[]),
        },
        total_slots: instance.engine.map_or(0, |options| options.max_seqs),
        model_alias: instance.name.to_string(),
        // not the path: it is the operator's
        model_path: instance.name.to_string(),
        chat_template: instance.template.source().into(),
        bos_token: text(tokenizer.bos()),
        eos_token: text(tokenizer.eos()),
        modalities: Modalities::default(),
        build_info: format!("starling-{}", env!("CARGO_PKG_VERSION")),
    };
    Ok(json(StatusCode::OK, &props))
}

/// List adapters: there are none.
#[utoipa::path(get, path = "/lora-adapters", tag = "llama-server", responses(
    (status = 200, description = "An empty list", body = Vec<String>),
    (status = "4XX", description = "No API key", body = ErrorBody),
))]
pub async fn lora_adapters() -> Response {
    json(StatusCode::OK, &[(); 0])
}

/// Count the tokens of a chat's prompt.
///
/// # Errors
/// A wrong request.
#[utoipa::path(post, path = "/v1/chat/completions/input_tokens", tag = "llama-server", request_body = ChatCompletionRequest, responses(
    (status = 200, description = "Number of tokens", body = ChatInputTokens),
    (status = "4XX", description = "The request is wrong", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn chat_input_tokens(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<ChatCompletionRequest>,
) -> Result<Response, HttpError> {
    let input_tokens = count_chat(&server, &caller, body).await?;
    Ok(json(StatusCode::OK, &ChatInputTokens { object: "response.input_tokens", input_tokens }))
}
