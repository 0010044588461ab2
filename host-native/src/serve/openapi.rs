//! The interface described from its types, and a page to read it.

use axum::http::StatusCode;
use axum::response::{Html, Response};
use utoipa::OpenApi;
use utoipa::openapi::{ContentBuilder, Ref, ResponseBuilder};

use super::api::error::json;
use super::api::{chat, completions, embeddings, execute, generate, models, receipts, tokenize};
use super::health;
use starling_api::native::execute::ExecuteToken;
use starling_api::native::generate::GenerateToken;
use starling_api::openai::chat::ChatDelta;
use starling_api::openai::response::CompletionResponse;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Starling",
        description = "Language models on CPUs, the same bytes everywhere: OpenAI's interface and Starling's own."
    ),
    paths(
        chat::chat_completions,
        completions::completions,
        embeddings::embeddings,
        models::models,
        models::model,
        generate::generate,
        generate::close_session,
        tokenize::tokenize,
        tokenize::detokenize,
        tokenize::apply_template,
        receipts::verify_receipt,
        execute::execute,
        health::health,
        health::live,
        health::ready,
        health::stats,
        health::metrics,
    ),
    components(schemas(CompletionResponse<ChatDelta>, GenerateToken, ExecuteToken))
)]
struct Interface;

/// The description.
pub async fn document() -> Response {
    json(StatusCode::OK, &described())
}

/// Every path may refuse a request, by the key or the server's name in it, or fail.
fn described() -> utoipa::openapi::OpenApi {
    let mut document = Interface::openapi();
    for item in document.paths.paths.values_mut() {
        for operation in [&mut item.get, &mut item.post].into_iter().flatten() {
            for (status, what) in [("4XX", "The request is refused"), ("5XX", "The server cannot answer now")] {
                let body = ContentBuilder::new().schema(Some(Ref::from_schema_name("ErrorBody"))).build();
                let response = ResponseBuilder::new().description(what).content("application/json", body).build();
                operation.responses.responses.entry(status.into()).or_insert_with(|| response.into());
            }
        }
    }
    document
}

/// A page to read it.
pub async fn docs() -> Html<&'static str> {
    Html(include_str!("docs.html"))
}

/// A page to talk with the model.
pub async fn page() -> Html<&'static str> {
    Html(include_str!("page.html"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_and_type_is_described() {
        let document = serde_json::to_value(described()).unwrap();
        let paths = document["paths"].as_object().unwrap();
        for path in ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models/{id}", "/execute"] {
            assert!(paths.contains_key(path), "{path}");
        }
        // every reference leads somewhere
        let text = document.to_string();
        for part in text.split("\"#/components/schemas/").skip(1) {
            let name = part.split('"').next().unwrap();
            assert!(document["components"]["schemas"].get(name).is_some(), "{name}");
        }
    }
}
