//! `POST /v1/rerank`, in the forms of Jina, Cohere, llama-server and Text Embeddings Inference.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use starling::embed::Pooling;
use starling::model::arch::HeadKind;
use starling_api::input::Input;
use starling_api::rerank::{RerankPlan, RerankRequest, Reranked, pair_tokens};
use starling_host::clock::random_id;

use crate::guard::policy::{apply_to_input, apply_to_text};
use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, json};
use crate::routes::common::messages::offload_tokenize;
use crate::routes::openai::embeddings::{EmbeddingOptions, check_lengths, compute};
use crate::server::{Caller, Server};

/// Rank documents by their relevance to a query.
///
/// # Errors
/// A wrong request, a model without a classification head, or a server that cannot answer now.
#[utoipa::path(post, path = "/v1/rerank", tag = "OpenAI", request_body = RerankRequest, responses(
    (status = 200, description = "Documents, the most relevant first", body = Reranked),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn rerank(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<RerankRequest>,
) -> Result<Response, HttpError> {
    let (name, user) = (body.model.clone(), body.user.clone());
    let instance = server.model(name.as_deref(), user.as_deref(), &caller).await?;
    let mut plan = body.into_plan(instance.settings().max_inputs)?;
    if instance.model.n_classes() == 0 {
        let message = "this model has no classification head, expected a reranker";
        return Err(ApiError::param("model", message).code("not_a_reranker").into());
    }
    apply_to_text(&caller.prompt_check(&instance), &mut plan.query).await?;
    let mut documents = Input::Texts(std::mem::take(&mut plan.documents));
    apply_to_input(&caller.prompt_check(&instance), &instance, &mut documents).await?;
    if let Input::Texts(documents) = documents {
        plan.documents = documents;
    }
    let (options, model) = (&instance.embedder, Arc::clone(&instance.model));
    let max = plan.truncate.then_some(options.n_ctx.min(options.batch_tokens));
    let size = plan.documents.iter().map(|document| document.len() + plan.query.len()).sum();
    let encode = move || {
        let tokens = plan.documents.iter().map(|document| pair_tokens(&model, &plan.query, document, max));
        let texts: Vec<Vec<u32>> = tokens.collect();
        Ok((texts, plan))
    };
    let (texts, plan): (Vec<Vec<u32>>, RerankPlan) = offload_tokenize(size, encode).await?;
    let param = if plan.tei.is_some() { "texts" } else { "documents" };
    check_lengths(&instance, &texts, param)?;
    let n_tokens = texts.iter().map(Vec::len).sum();
    let form = EmbeddingOptions { dimensions: None, user: user.as_deref(), pooling: Some(Pooling::Rank) };
    let vectors = compute(&instance, &caller, &form, texts).await?;
    let scores: Vec<f32> = vectors.iter().map(|vector| vector.first().copied().unwrap_or_default()).collect();
    if plan.tei.is_some() {
        let is_probability = instance.model.config.arch.head == HeadKind::Softmax;
        return Ok(json(StatusCode::OK, &Reranked::Texts(plan.tei_response(&scores, is_probability))));
    }
    let response = plan.response(random_id("rerank-"), &instance.name, &scores, n_tokens);
    Ok(json(StatusCode::OK, &Reranked::Documents(response)))
}
