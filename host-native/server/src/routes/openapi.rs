//! The OpenAPI document and its reader page.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use starling_api::native::execute::{ExecuteEnd, ExecuteToken};
use starling_api::native::generate::GenerateToken;
use starling_api::openai::chat::ChatDelta;
use starling_api::openai::models::ModelEvent;
use starling_api::openai::response::CompletionResponse;
use utoipa::OpenApi;
use utoipa::openapi::{ContentBuilder, Ref, ResponseBuilder};

use super::llama_server::slots;
use super::native::{execute, generate, health, receipts, server_stats, tokenize};
use super::openai::{chat, completions, embeddings, models, responses, stored, stored_responses};
use super::{anthropic, llama_server, ollama, rerank, tei};
use crate::admin;
use crate::http::error::json;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Starling",
        description = "Inference server for GGUF language models on CPUs: the APIs of OpenAI, Anthropic, Ollama and llama-server, and Starling's own."
    ),
    paths(
        chat::chat_completions,
        stored::list,
        stored::retrieve,
        stored::change,
        stored::delete,
        stored::messages,
        completions::completions,
        responses::responses,
        responses::input_tokens,
        stored_responses::retrieve,
        stored_responses::delete,
        stored_responses::input_items,
        embeddings::embeddings,
        models::models,
        models::model,
        models::load,
        models::unload,
        models::events,
        slots::list,
        slots::act,
        generate::generate,
        generate::close_session,
        tokenize::tokenize,
        tokenize::detokenize,
        tokenize::apply_template,
        receipts::verify_receipt,
        llama_server::completion,
        llama_server::infill,
        llama_server::embedding,
        llama_server::tokenize,
        llama_server::detokenize,
        llama_server::props,
        llama_server::lora_adapters,
        llama_server::chat_input_tokens,
        rerank::rerank,
        tei::embed,
        tei::info,
        anthropic::messages,
        anthropic::count_tokens,
        ollama::generate::chat,
        ollama::generate::generate,
        ollama::embed::embed,
        ollama::embed::embeddings,
        ollama::models::tags,
        ollama::models::ps,
        ollama::models::version,
        ollama::models::show,
        ollama::pull::pull,
        ollama::pull::copy,
        ollama::pull::create,
        ollama::pull::delete,
        execute::execute,
        health::health,
        health::live,
        health::ready,
        server_stats::stats,
        health::metrics,
        admin::models::list,
        admin::models::show,
        admin::models::add,
        admin::models::remove,
        admin::models::load,
        admin::models::unload,
        admin::models::swap,
        admin::workers::all,
        admin::workers::list,
        admin::workers::add,
        admin::workers::drain,
        admin::workers::fail,
        admin::server::drain,
        admin::server::undrain,
        admin::server::reload,
        admin::server::pressure,
        admin::server::audit,
        admin::settings::show,
        admin::settings::patch,
        admin::caches::list,
        admin::caches::invalidate,
        admin::caches::invalidate_one,
        admin::failures::list,
    ),
    components(schemas(CompletionResponse<ChatDelta>, GenerateToken, ExecuteToken, ExecuteEnd, ModelEvent))
)]
struct Api;

/// `GET /openapi.json`
pub async fn document() -> Response {
    static DOCUMENT: LazyLock<Value> = LazyLock::new(|| with_examples(&with_errors()));
    json(StatusCode::OK, &*DOCUMENT)
}

/// A request that works, of each operation that has a body: method and path, body, values of path parameters.
const EXAMPLES: &str = include_str!("examples.json");

/// The name of a model in [`EXAMPLES`]. The reader page puts that of the first model in its place.
const MODEL: &str = "my-model";

#[derive(Deserialize)]
struct Example {
    body: Value,
    #[serde(default)]
    parameters: BTreeMap<String, String>,
}

/// The document with the examples of its operations.
fn with_examples(document: &utoipa::openapi::OpenApi) -> Value {
    // neither fails: the document has text keys, and a test parses the file
    let mut document = serde_json::to_value(document).unwrap_or_default();
    let examples: BTreeMap<String, Example> = serde_json::from_str(EXAMPLES).unwrap_or_default();
    for (path, methods) in document["paths"].as_object_mut().into_iter().flatten() {
        for (method, operation) in methods.as_object_mut().into_iter().flatten() {
            let example = examples.get(&format!("{} {path}", method.to_uppercase()));
            for parameter in operation.get_mut("parameters").and_then(Value::as_array_mut).into_iter().flatten() {
                let name = parameter["name"].as_str().unwrap_or_default();
                let given = example.and_then(|example| example.parameters.get(name));
                let is_model = name == "name" || path == "/v1/models/{id}";
                if let Some(value) = given.map(|given| &given[..]).or(is_model.then_some(MODEL)) {
                    parameter["example"] = value.into();
                }
            }
            if let Some(example) = example {
                operation["requestBody"]["content"]["application/json"]["example"] = example.body.clone();
            }
        }
    }
    document
}

/// Adds the error responses that the middleware can give on every path.
fn with_errors() -> utoipa::openapi::OpenApi {
    let mut document = Api::openapi();
    for item in document.paths.paths.values_mut() {
        for operation in [&mut item.get, &mut item.post, &mut item.patch, &mut item.delete].into_iter().flatten() {
            for (status, what) in [
                ("4XX", "Invalid, unauthorised or rate-limited request"),
                ("5XX", "Server error, overload or shutdown"),
            ] {
                let body = ContentBuilder::new().schema(Some(Ref::from_schema_name("ErrorBody"))).build();
                let response = ResponseBuilder::new().description(what).content("application/json", body).build();
                operation.responses.responses.entry(status.into()).or_insert_with(|| response.into());
            }
        }
    }
    document
}

/// `GET /docs`: a reader of the OpenAPI document
pub async fn docs() -> impl IntoResponse {
    ([(header::CONTENT_SECURITY_POLICY, DOCS_POLICY.as_str())], Html(DOCS))
}

const DOCS: &str = include_str!("docs.html");

/// As that of the chat page; script and style of the page itself are allowed by their digests.
static DOCS_POLICY: LazyLock<String> = LazyLock::new(|| {
    let digest = |tag: &str| {
        let inner = DOCS.split_once(&format!("<{tag}>")).and_then(|(_, rest)| rest.split_once(&format!("</{tag}>")));
        STANDARD.encode(Sha256::digest(inner.map_or("", |(inner, _)| inner)))
    };
    let [script, style] = ["script", "style"].map(digest);
    format!(
        "default-src 'none'; script-src 'self' 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
});

#[cfg(test)]
mod tests {
    use super::*;

    /// One script and one style, which the policy allows, and nothing in attributes.
    #[test]
    fn the_policy_of_the_page_allows_what_is_in_it() {
        assert_eq!((DOCS.matches("<script>").count(), DOCS.matches("<style>").count()), (1, 1));
        for inline in [" style=", " onclick=", " onload=", "javascript:", ".innerHTML", "setAttribute('style"] {
            assert!(!DOCS.contains(inline), "{inline}");
        }
        assert!(DOCS_POLICY.contains("script-src 'self' 'sha256-") && !DOCS_POLICY.contains("unsafe"));
    }

    #[test]
    fn every_field_of_a_request_is_described() {
        let document = serde_json::to_value(with_errors()).unwrap();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        let is_described = |about: &Value| about["description"].as_str().is_some_and(|text| !text.is_empty());
        let mut n_fields = 0;
        let suffixes = ["Request", "Options", "Fields", "OutputConstraint"];
        for (name, schema) in schemas.iter().filter(|(name, _)| suffixes.iter().any(|suffix| name.ends_with(suffix))) {
            let parts = schema["allOf"].as_array().into_iter().flatten().chain([schema]);
            for (field, about) in parts.filter_map(|part| part["properties"].as_object()).flatten() {
                // an optional field of another type has its description beside the reference
                let parts = ["oneOf", "anyOf", "allOf"].iter().filter_map(|key| about[*key].as_array()).flatten();
                assert!(parts.chain([about]).any(is_described), "{name}.{field}: {about}");
                n_fields += 1;
            }
        }
        assert!(n_fields > 60, "{n_fields}");
    }

    #[test]
    fn every_body_has_an_example() {
        let document = with_examples(&with_errors());
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                let content = &operation["requestBody"]["content"]["application/json"];
                assert!(content.is_null() || content["example"].is_object(), "{method} {path}: no example");
            }
        }
        let examples: BTreeMap<String, Example> = serde_json::from_str(EXAMPLES).unwrap();
        for name in examples.keys() {
            let (method, path) = name.split_once(' ').unwrap();
            assert!(document["paths"][path][method.to_lowercase()].is_object(), "{name}: no such operation");
        }
    }

    #[test]
    fn every_path_is_documented_and_every_reference_resolves() {
        let document = serde_json::to_value(with_errors()).unwrap();
        let paths = document["paths"].as_object().unwrap();
        for path in [
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/embeddings",
            "/v1/models/{id}",
            "/execute",
            "/admin/config",
        ] {
            assert!(paths.contains_key(path), "{path}");
        }
        let text = document.to_string();
        for part in text.split("\"#/components/schemas/").skip(1) {
            let name = part.split('"').next().unwrap();
            assert!(document["components"]["schemas"].get(name).is_some(), "{name}");
        }
    }
}
