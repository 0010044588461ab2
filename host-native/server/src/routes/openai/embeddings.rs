//! `POST /v1/embeddings`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use starling::embed::Pooling;
use starling::tokenizer::EncodeOptions;
use starling_api::input::Input;
use starling_api::openai::embeddings::{EmbeddingRequest, EmbeddingResponse, check_texts};

use crate::guard::policy::apply_to_input;
use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, request_id};
use crate::http::pieces::json_pieces;
use crate::models::instance::ModelInstance;
use crate::observe::trace::{Number, Trace};
use crate::routes::common::messages::offload_tokenize;
use crate::routes::common::sse::engine_failed;
use crate::schedule::queue::{TextJob, Update, updates};
use crate::server::{Caller, Server};
use crate::state::reuse::Reuse;

/// Create embeddings of texts.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/v1/embeddings", tag = "OpenAI", request_body = EmbeddingRequest, responses(
    (status = 200, description = "Embeddings", body = EmbeddingResponse),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn embeddings(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<EmbeddingRequest>,
) -> Result<Response, HttpError> {
    let encoding = body.encoding_format.unwrap_or_default();
    let Embedded { instance, vectors, n_tokens } = embed_inputs(&server, &caller, body, false).await?;
    Ok(json_pieces(&caller.memory, EmbeddingResponse::pieces(&instance.name, vectors, encoding, n_tokens)))
}

/// Vectors of the inputs of a request.
pub struct Embedded {
    pub instance: Arc<ModelInstance>,
    pub vectors: Vec<Vec<f32>>,
    /// Tokens of all inputs.
    pub n_tokens: usize,
}

/// The path of the embedding requests of all APIs. Inputs that are too long are cut at their end if `truncate`.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
pub async fn embed_inputs(
    server: &Server,
    caller: &Caller,
    mut body: EmbeddingRequest,
    truncate: bool,
) -> Result<Embedded, ApiError> {
    let instance = server.model(body.model.as_deref(), body.user.as_deref(), caller).await?;
    body.check_inputs(instance.settings().max_inputs)?;
    if instance.pooling == Pooling::Rank {
        let message = "this model ranks documents and has no embeddings; expected POST /v1/rerank";
        return Err(ApiError::param("model", message).code("not_an_embedder"));
    }
    let n = body.input.len();
    apply_to_input(&caller.prompt_check(&instance), &instance, &mut body.input).await?;
    let empty = Input::Texts(Vec::new());
    let (model, size, input) =
        (Arc::clone(&instance.model), body.input.bytes(), std::mem::replace(&mut body.input, empty));
    // vectors, and tokens as they are estimated
    let width = body.dimensions.unwrap_or(usize::MAX).min(instance.model.n_embd_out());
    caller.memory.grow(n.saturating_mul(size_of::<f32>() * width).saturating_add(2 * size))?;
    let encode = move || {
        let options = EncodeOptions { add_special: true, parse_special: false };
        Ok(input.each(|text| model.tokenizer.encode(&text, options), |tokens| tokens))
    };
    let mut texts: Vec<Vec<u32>> = offload_tokenize(size, encode).await?;
    if truncate {
        let options = &instance.embedder;
        truncate_texts(&mut texts, options.n_ctx.min(options.batch_tokens), instance.model.tokenizer.adds_eos());
    }
    check_texts(&instance.model, &instance.embedder, &texts, body.dimensions)?;
    let tokens: usize = texts.iter().map(Vec::len).sum();
    let (mut vectors, mut missing) = (vec![None; n], Vec::new());
    let computation = instance.computation();
    for (index, tokens) in texts.into_iter().enumerate() {
        let key = server.embeddings.key(
            (&instance.name, &computation),
            &caller.identity.tenant.name,
            &tokens,
            body.dimensions,
        );
        let key = key.filter(|_| caller.hints.reuses != Reuse::NoStore);
        match key.as_ref().filter(|_| caller.hints.reuses == Reuse::All).and_then(|key| server.embeddings.find(key)) {
            Some(vector) => vectors[index] = Some(vector.to_vec()),
            None => missing.push((index, tokens, key)),
        }
    }
    if !missing.is_empty() {
        let (texts, keys): (Vec<_>, Vec<_>) =
            missing.into_iter().map(|(index, tokens, key)| (tokens, (index, key))).unzip();
        let form = EmbeddingOptions { dimensions: body.dimensions, user: body.user.as_deref(), pooling: None };
        let computed = compute(&instance, caller, &form, texts).await?;
        for (vector, (index, key)) in computed.into_iter().zip(keys) {
            if let Some(key) = key {
                server.embeddings.insert(key, &vector);
            }
            vectors[index] = Some(vector);
        }
    }
    let vectors = vectors.into_iter().map(Option::unwrap_or_default).collect();
    Ok(Embedded { instance, vectors, n_tokens: tokens })
}

/// Cuts texts to `max` tokens. The last token stays if the tokenizer appends an end token.
fn truncate_texts(texts: &mut [Vec<u32>], max: usize, has_end: bool) {
    for tokens in texts.iter_mut().filter(|tokens| tokens.len() > max) {
        let last = tokens.last().copied().filter(|_| has_end);
        tokens.truncate(max);
        if let (Some(last), Some(end)) = (last, tokens.last_mut()) {
            *end = last;
        }
    }
}

/// The form of the vectors of a request.
pub struct EmbeddingOptions<'a> {
    pub dimensions: Option<usize>,
    /// End user.
    pub user: Option<&'a str>,
    /// `None` for that of the model.
    pub pooling: Option<Pooling>,
}

/// Checks tokenised texts of the field `name`.
///
/// # Errors
/// A text that the model does not take.
pub fn check_lengths(instance: &ModelInstance, texts: &[Vec<u32>], name: &str) -> Result<(), ApiError> {
    starling_api::openai::embeddings::check_lengths(&instance.model, &instance.embedder, texts, name)
}

/// The vectors of texts, by the model.
///
/// # Errors
/// A limit that is reached, or a model that fails.
pub async fn compute(
    instance: &ModelInstance,
    caller: &Caller,
    form: &EmbeddingOptions<'_>,
    texts: Vec<Vec<u32>>,
) -> Result<Vec<Vec<f32>>, ApiError> {
    let (n, tokens) = (texts.len(), texts.iter().map(Vec::len).sum::<usize>());
    let flow = caller.flow(form.user, None);
    let trial = instance.admit(&flow.tenant)?;
    caller
        .identity
        .tenant
        .count_tokens(tokens, instance.settings().key_tokens)
        .inspect_err(|_| instance.metrics.rejected("key_tokens"))?;
    caller.usage.add_prompt(tokens);
    let (to, mut updates) = updates(n, 1, Arc::clone(&caller.usage));
    let times = caller.deadlines(&instance.settings(), false);
    updates.hold_trial(trial);
    let EmbeddingOptions { dimensions, pooling, .. } = *form;
    let request_id: Arc<str> = request_id().unwrap_or_default().into();
    let job = |(index, tokens)| {
        let (to, request_id) = (to.clone(), Arc::clone(&request_id));
        TextJob { index, tokens, dimensions, pooling, to, times, request_id, n_faults: 0 }
    };
    let jobs = texts.into_iter().enumerate().map(job).collect();
    let queued = Instant::now();
    let ticket = instance.queue.embed(&flow, tokens.div_ceil(n), times.deadline(), jobs);
    updates.hold(ticket.inspect_err(|closed| instance.metrics.rejected(closed.name()))?);
    drop(to);
    let mut vectors = vec![Vec::new(); n];
    for _ in 0..n {
        let (index, update) = updates.recv().await.ok_or_else(engine_failed)?;
        if let Some(error) = update.error() {
            return Err(error);
        }
        let Update::Vector { vector } = update else { return Err(engine_failed()) };
        vectors[index] = vector.unwrap_or_default();
    }
    let numbers = [("texts", n), ("tokens", tokens)].map(|(key, n)| (key, Number::Count(n)));
    Trace::current().stage("embed", queued, Instant::now(), &numbers);
    Ok(vectors)
}
