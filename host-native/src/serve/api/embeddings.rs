//! `POST /v1/embeddings`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use serde::{Deserialize, Serialize};
use starling::error::RequestError;
use starling::tokenizer::EncodeOptions;
use utoipa::ToSchema;

use super::super::offload::offload;
use super::super::queue::{TextJob, Times, Update, updates};
use super::super::state::{App, Caller};
use super::super::trace::{Number, Trace};
use super::body::Body;
use super::error::{ApiError, ErrorBody, HttpError, json};
use super::messages::offload_tokenize;
use super::options::check_model;
use super::sse::engine_failed;
use starling_api::input::Input;
use starling_api::parse_whole;

/// Texts to be embedded.
#[derive(Debug, Deserialize, ToSchema)]
pub struct EmbeddingRequest {
    /// The model's name; the one that is served if there is none.
    pub model: Option<String>,
    /// A text, tokens, or a list of either.
    pub input: Input,
    /// `float`, the default, or `base64`: f32, little-endian.
    pub encoding_format: Option<Encoding>,
    /// How many numbers of each vector, from the first.
    #[schema(minimum = 1)]
    pub dimensions: Option<usize>,
    /// Who the request is for: the people of a tenant take turns.
    pub user: Option<String>,
}

/// How vectors are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// As numbers.
    #[default]
    Float,
    /// As bytes of f32, little-endian, in base64.
    Base64,
}

parse_whole!(EmbeddingRequest);

/// Vectors of texts.
#[derive(Debug, Serialize, ToSchema)]
pub struct EmbeddingResponse {
    /// `list`.
    pub object: &'static str,
    /// The vectors, in the order of the texts.
    pub data: Vec<Embedding>,
    /// The model's name.
    pub model: String,
    /// Numbers of tokens.
    pub usage: EmbeddingUsage,
}

/// The vector of a text.
#[derive(Debug, Serialize, ToSchema)]
pub struct Embedding {
    /// `embedding`.
    pub object: &'static str,
    /// Which text.
    pub index: usize,
    /// Its numbers, of length 1 together.
    pub embedding: Numbers,
}

/// Numbers, or their bytes.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Numbers {
    /// As they are.
    Float(Vec<f32>),
    /// In base64.
    Base64(String),
}

/// Numbers of tokens.
#[derive(Debug, Serialize, ToSchema)]
pub struct EmbeddingUsage {
    /// Tokens of the texts.
    pub prompt_tokens: usize,
    /// The same.
    pub total_tokens: usize,
}

/// Embeds texts.
///
/// # Errors
/// What is wrong with the request, or with the server now.
#[utoipa::path(post, path = "/v1/embeddings", tag = "OpenAI", request_body = EmbeddingRequest, responses(
    (status = 200, description = "The vectors", body = EmbeddingResponse),
    (status = "4XX", description = "The request is wrong, or too many wait", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn embeddings(
    State(app): State<Arc<App>>,
    caller: Caller,
    Body(body): Body<EmbeddingRequest>,
) -> Result<Response, HttpError> {
    check_model(&app, body.model.as_deref())?;
    let (n, most) = (body.input.len(), app.settings.max_inputs);
    if n == 0 || n > most {
        return Err(ApiError::param("input", format!("input has {n} texts, expected 1 to {most}")).into());
    }
    let (model, size, input) = (Arc::clone(&app.model), body.input.bytes(), body.input);
    let encode = move || {
        let options = EncodeOptions { add_special: true, parse_special: false };
        Ok(input.each(|text| model.tokenizer.encode(&text, options), |tokens| tokens))
    };
    let texts: Vec<Vec<u32>> = offload_tokenize(size, encode).await?;
    check(&app, &texts, body.dimensions)?;
    let tokens: usize = texts.iter().map(Vec::len).sum();
    caller.tenant.count_tokens(tokens, app.settings.key_tokens).inspect_err(|_| app.metrics.rejected("key_tokens"))?;
    let (to, mut updates) = updates(n, 1);
    let (queue, total) = (app.settings.queue_timeout, app.settings.request_timeout);
    let times = Times { came: caller.came, queue, total };
    let job = |(index, tokens)| TextJob { index, tokens, dimensions: body.dimensions, to: to.clone(), times };
    let jobs = texts.into_iter().enumerate().map(job).collect();
    let flow = caller.flow(body.user.as_deref(), None);
    let queued = Instant::now();
    let ticket = app.queue.embed(&flow, tokens.div_ceil(n), times.deadline(), jobs);
    updates.hold(ticket.inspect_err(|closed| app.metrics.rejected(closed.name()))?);
    drop(to);
    let mut vectors: Vec<Option<Vec<f32>>> = vec![None; n];
    for _ in 0..n {
        let (index, update) = updates.recv().await.ok_or_else(engine_failed)?;
        if let Some(error) = update.error() {
            return Err(error.into());
        }
        let Update::Vector { vector } = update else { return Err(engine_failed().into()) };
        vectors[index] = vector;
    }
    let numbers = [("texts", n), ("tokens", tokens)].map(|(key, n)| (key, Number::Count(n)));
    Trace::current().stage("embed", queued, Instant::now(), &numbers);
    let encoding = body.encoding_format.unwrap_or_default();
    let size = vectors.iter().flatten().map(Vec::len).sum();
    let build = move || {
        let embedding = |(index, vector): (usize, Option<Vec<f32>>)| {
            let vector = vector.unwrap_or_default();
            let embedding = match encoding {
                Encoding::Float => Numbers::Float(vector),
                Encoding::Base64 => {
                    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                    Numbers::Base64(base64::engine::general_purpose::STANDARD.encode(bytes))
                }
            };
            Embedding { object: "embedding", index, embedding }
        };
        let response = EmbeddingResponse {
            object: "list",
            data: vectors.into_iter().enumerate().map(embedding).collect(),
            model: app.model_name.clone(),
            usage: EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens },
        };
        json(StatusCode::OK, &response)
    };
    Ok(offload(size, build).await?)
}

/// Checks texts before they wait.
fn check(app: &App, texts: &[Vec<u32>], dimensions: Option<usize>) -> Result<(), ApiError> {
    let (config, sizes) = (&app.model.config, &app.embedder);
    let width = app.model.n_embd_out();
    if let Some(d) = dimensions.filter(|d| *d == 0 || *d > width) {
        let message = format!("dimensions is {d}, expected a number from 1 to {width}");
        return Err(ApiError::param("dimensions", message));
    }
    for (i, tokens) in texts.iter().enumerate() {
        let (n_ctx, batch_tokens, n_vocab) = (sizes.n_ctx, sizes.batch_tokens, config.n_vocab);
        let wrong = if tokens.is_empty() {
            Some(RequestError::EmptyText)
        } else if tokens.len() > n_ctx.min(batch_tokens) {
            Some(RequestError::TextLength { tokens: tokens.len(), n_ctx, batch_tokens })
        } else {
            let found = tokens.iter().enumerate().find(|(_, t)| **t as usize >= n_vocab);
            found.map(|(at, token)| RequestError::Token { token: *token, at, n_vocab })
        };
        if let Some(e) = wrong {
            let param = if texts.len() > 1 { format!("input[{i}]") } else { "input".into() };
            return Err(ApiError::refused(&e, &param));
        }
    }
    Ok(())
}
