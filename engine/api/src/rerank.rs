//! `POST /v1/rerank`: documents in the order of their relevance to a query, in the forms of Jina, Cohere, llama-server and
//! Text Embeddings Inference. Sources: <https://api.jina.ai/redoc>, <https://docs.cohere.com/reference/rerank>,
//! <https://huggingface.github.io/text-embeddings-inference/>.

use serde::{Deserialize, Serialize};
use starling::model::Model;
use starling::tokenizer::EncodeOptions;

use crate::error::ApiError;
use crate::openai::embeddings::EmbeddingUsage;
use crate::parse_whole;
use crate::tei::TruncationDirection;

/// Request for the relevance of documents to a query. With `texts` in place of `documents` it is one of Text Embeddings
/// Inference, and so is the response.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RerankRequest {
    /// Model name. Default: the model that the server has.
    pub model: Option<String>,
    /// The query.
    pub query: String,
    /// Documents: texts, or objects with a `text`.
    #[serde(default)]
    pub documents: Vec<Document>,
    /// Documents of a request of Text Embeddings Inference.
    #[serde(default)]
    pub texts: Vec<String>,
    /// Number of results, the most relevant ones. Default: all.
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub top_n: Option<usize>,
    /// Return the documents with the results. Default: false.
    pub return_documents: Option<bool>,
    /// The same, of a request with `texts`.
    pub return_text: Option<bool>,
    /// Of a request with `texts`: the scores as the model gives them, instead of their sigmoid. Default: false.
    pub raw_scores: Option<bool>,
    /// Cut documents that are too long, at their end. Default: false.
    pub truncate: Option<bool>,
    /// Side on which documents are cut: `Right`, the default; `Left` is not supported.
    pub truncation_direction: Option<TruncationDirection>,
    /// Not supported: tokens of a document, at most.
    pub max_tokens_per_doc: Option<usize>,
    /// Not supported: documents are not divided.
    pub max_chunks_per_doc: Option<usize>,
    /// Only `text` is supported.
    pub rank_fields: Option<Vec<String>>,
    /// End user: the users of a tenant are scheduled in turn.
    pub user: Option<String>,
}

parse_whole!(RerankRequest);

/// A document.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged, expecting = "expected a string, or an object with a `text`")]
pub enum Document {
    /// Its text.
    Text(String),
    /// An object with its text.
    Object {
        /// Its text.
        text: String,
    },
}

/// A request that is checked.
#[derive(Debug)]
pub struct RerankPlan {
    /// The query.
    pub query: String,
    /// The documents.
    pub documents: Vec<String>,
    /// Whether documents that are too long are cut.
    pub truncate: bool,
    /// Number of results.
    pub top_n: usize,
    /// Whether the results have the documents.
    pub return_documents: bool,
    /// Whether the response is one of Text Embeddings Inference; then whether its scores are raw.
    pub tei: Option<bool>,
}

impl RerankRequest {
    /// Checks the request; there are at most `max` documents.
    ///
    /// # Errors
    /// The first field that is wrong or not supported.
    pub fn into_plan(self, max: usize) -> Result<RerankPlan, ApiError> {
        let is_tei = !self.texts.is_empty();
        if is_tei && !self.documents.is_empty() {
            return Err(ApiError::param("texts", "both documents and texts are given, expected one of them"));
        }
        let refused = [
            ("max_tokens_per_doc", self.max_tokens_per_doc.is_some(), "expected truncate, which cuts to the context"),
            ("max_chunks_per_doc", self.max_chunks_per_doc.is_some(), "documents are not divided"),
            (
                "truncation_direction",
                self.truncate == Some(true) && self.truncation_direction == Some(TruncationDirection::Left),
                "found Left, expected Right",
            ),
            (
                "rank_fields",
                self.rank_fields.is_some_and(|fields| fields.iter().any(|field| field != "text")),
                "expected only text",
            ),
        ];
        if let Some((name, _, why)) = refused.into_iter().find(|(_, is_given, _)| *is_given) {
            return Err(ApiError::unsupported(name, format!("{name}: {why}")));
        }
        let text = |document| match document {
            Document::Text(text) | Document::Object { text } => text,
        };
        let documents = if is_tei { self.texts } else { self.documents.into_iter().map(text).collect() };
        let (name, n) = (if is_tei { "texts" } else { "documents" }, documents.len());
        if n == 0 || n > max {
            return Err(ApiError::param(name, format!("{name} has {n} texts, expected 1 to {max}")));
        }
        if self.top_n == Some(0) {
            return Err(ApiError::param("top_n", "top_n is 0, expected a number from 1"));
        }
        let return_documents = if is_tei { self.return_text } else { self.return_documents };
        Ok(RerankPlan {
            query: self.query,
            documents,
            truncate: self.truncate == Some(true),
            top_n: self.top_n.unwrap_or(n).min(n),
            return_documents: return_documents == Some(true),
            tei: is_tei.then_some(self.raw_scores == Some(true)),
        })
    }
}

/// Response in the form of Jina, Cohere and llama-server.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RerankResponse {
    /// ID of the response.
    pub id: String,
    /// Always `list`.
    pub object: &'static str,
    /// Model name.
    pub model: String,
    /// Token counts.
    pub usage: EmbeddingUsage,
    /// The most relevant documents, the best first.
    pub results: Vec<RerankResult>,
}

/// A document of the response.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RerankResult {
    /// Index of the document in the request.
    pub index: usize,
    /// Score, as the model gives it: for most models a logit, for Qwen 3 a probability.
    pub relevance_score: f32,
    /// The document, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document: Option<RerankText>,
}

/// Text of a document.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RerankText {
    /// The text.
    pub text: String,
}

/// A document of a response of Text Embeddings Inference.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TeiRank {
    /// Index of the text in the request.
    pub index: usize,
    /// Score.
    pub score: f32,
    /// The text, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// Response to a request with `documents`, or with `texts`.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum Reranked {
    /// With `documents`.
    Documents(RerankResponse),
    /// With `texts`.
    Texts(Vec<TeiRank>),
}

impl RerankPlan {
    /// Index, score and document of the results, the best first; of equal ones the first of the request.
    fn results(&mut self, scores: &[f32]) -> Vec<(usize, f32, Option<String>)> {
        let mut order: Vec<usize> = (0..scores.len().min(self.documents.len())).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        order.truncate(self.top_n);
        let mut document = |i: usize| self.return_documents.then(|| std::mem::take(&mut self.documents[i]));
        order.into_iter().map(|i| (i, scores[i], document(i))).collect()
    }

    /// The response with a score per document, for prompts of `n_tokens` tokens in all.
    pub fn response(mut self, id: String, model: &str, scores: &[f32], n_tokens: usize) -> RerankResponse {
        let result = |(index, relevance_score, text): (usize, f32, Option<String>)| RerankResult {
            index,
            relevance_score,
            document: text.map(|text| RerankText { text }),
        };
        RerankResponse {
            id,
            object: "list",
            model: model.into(),
            usage: EmbeddingUsage { prompt_tokens: n_tokens, total_tokens: n_tokens },
            results: self.results(scores).into_iter().map(result).collect(),
        }
    }

    /// The response in the form of Text Embeddings Inference. Scores are `probabilities` already, or logits.
    pub fn tei_response(mut self, scores: &[f32], probabilities: bool) -> Vec<TeiRank> {
        let is_raw = probabilities || self.tei == Some(true);
        let score = |x: f32| if is_raw { x } else { (1.0 / (1.0 + (-f64::from(x)).exp())) as f32 };
        let results = self.results(scores).into_iter();
        results.map(|(index, x, text)| TeiRank { index, score: score(x), text }).collect()
    }
}

/// The prompt of a query and a document: by the reranker's template, or as two texts with the tokens of the model around
/// them. With `max` the document is cut at its end until there are at most so many tokens.
pub fn pair_tokens(model: &Model, query: &str, document: &str, max: Option<usize>) -> Vec<u32> {
    let tokenizer = &model.tokenizer;
    let encode = |document: &str| match &model.rerank_template {
        None => tokenizer.encode_pair(query, document, EncodeOptions { add_special: true, parse_special: false }),
        Some(template) => {
            let (text, literals) = fill(template, query, document);
            let options = EncodeOptions { add_special: false, parse_special: true };
            tokenizer.encode_with_literals(&text, options, &literals)
        }
    };
    let mut document = document;
    loop {
        let tokens = encode(document);
        let Some(excess) = max.and_then(|max| tokens.len().checked_sub(max)).filter(|n| *n > 0) else { return tokens };
        if document.is_empty() {
            return tokens;
        }
        let (_, ranges) =
            tokenizer.encode_with_offsets(document, EncodeOptions { add_special: false, parse_special: false });
        let kept = ranges.len().saturating_sub(excess);
        let end = ranges[..kept].last().map_or(0, |range| range.end).min(document.len().saturating_sub(1));
        let boundary = (0..=end).rev().find(|at| document.is_char_boundary(*at));
        document = &document[..boundary.unwrap_or(0)];
    }
}

/// A template with the texts in place of `{query}` and `{document}`, and the offsets of their bytes.
fn fill(template: &str, query: &str, document: &str) -> (String, Vec<usize>) {
    let (mut text, mut places, mut rest) = (String::new(), Vec::new(), template);
    let names = [("{query}", query), ("{document}", document)];
    while let Some((at, name, value)) =
        names.iter().filter_map(|(name, value)| Some((rest.find(name)?, *name, *value))).min_by_key(|found| found.0)
    {
        text.push_str(&rest[..at]);
        places.extend(text.len()..text.len() + value.len());
        text.push_str(value);
        rest = &rest[at + name.len()..];
    }
    text.push_str(rest);
    (text, places)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::parse::ParseBody;

    fn plan(json: Value) -> Result<RerankPlan, ApiError> {
        RerankRequest::parse_body(json.to_string().as_bytes())?.into_plan(4)
    }

    #[test]
    fn results_are_sorted_and_cut() {
        let scores = [0.5, -2.0, 0.5, 3.0];
        let documents = json!(["a", { "text": "b" }, "c", "d"]);
        let plan = |more: Value| {
            let mut body = json!({ "query": "q", "documents": documents });
            body.as_object_mut().expect("fields").extend(more.as_object().expect("fields").clone());
            plan(body).expect("a plan")
        };
        let response = plan(json!({})).response("rerank-1".into(), "m", &scores, 12);
        let order: Vec<usize> = response.results.iter().map(|result| result.index).collect();
        assert_eq!(order, [3, 0, 2, 1]);
        let response = plan(json!({ "top_n": 2, "return_documents": true })).response("r".into(), "m", &scores, 12);
        let expected = json!({
            "id": "r", "object": "list", "model": "m", "usage": { "prompt_tokens": 12, "total_tokens": 12 },
            "results": [
                { "index": 3, "relevance_score": 3.0, "document": { "text": "d" } },
                { "index": 0, "relevance_score": 0.5, "document": { "text": "a" } },
            ],
        });
        assert_eq!(serde_json::to_value(response).expect("JSON"), expected);
    }

    #[test]
    fn texts_have_the_form_of_text_embeddings_inference() {
        let plan =
            |raw: bool| plan(json!({ "query": "q", "texts": ["a", "b"], "raw_scores": raw, "return_text": raw }));
        let ranks = serde_json::to_value(plan(true).expect("a plan").tei_response(&[-1.0, 2.0], false)).expect("JSON");
        let expected = json!([{ "index": 1, "score": 2.0, "text": "b" }, { "index": 0, "score": -1.0, "text": "a" }]);
        assert_eq!(ranks, expected);
        let ranks = plan(false).expect("a plan").tei_response(&[0.0, -1.0], false);
        assert!(ranks[0].score == 0.5 && (ranks[1].score - 0.268_941_42).abs() < 1e-7, "{ranks:?}");
        assert_eq!(plan(false).expect("a plan").tei_response(&[0.25, 0.75], true)[0].score, 0.75);
    }

    #[test]
    fn errors_name_the_field() {
        assert!(plan(json!({ "documents": ["a"] })).expect_err("an error").message.contains("query"));
        for (body, param) in [
            (json!({ "query": 1, "documents": ["a"] }), "query"),
            (json!({ "query": "q" }), "documents"),
            (json!({ "query": "q", "documents": [] }), "documents"),
            (json!({ "query": "q", "documents": ["a", 1] }), "documents[1]"),
            (json!({ "query": "q", "documents": ["a", "b", "c", "d", "e"] }), "documents"),
            (json!({ "query": "q", "documents": ["a"], "texts": ["a"] }), "texts"),
            (json!({ "query": "q", "documents": ["a"], "top_n": 0 }), "top_n"),
            (json!({ "query": "q", "documents": ["a"], "max_tokens_per_doc": 9 }), "max_tokens_per_doc"),
            (json!({ "query": "q", "documents": ["a"], "rank_fields": ["title"] }), "rank_fields"),
            (
                json!({ "query": "q", "texts": ["a"], "truncate": true, "truncation_direction": "Left" }),
                "truncation_direction",
            ),
        ] {
            let error = plan(body.clone()).expect_err("an error");
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{body}: {}", error.message);
        }
    }

    #[test]
    fn texts_of_the_request_are_not_filled_again() {
        let (text, places) = fill("Q: {query}\nD: {document}.{query}", "a{document}", "{query}b");
        assert_eq!(text, "Q: a{document}\nD: {query}b.a{document}");
        assert_eq!(places, [3..14, 18..26, 27..38].into_iter().flatten().collect::<Vec<_>>());
        assert_eq!(fill("x", "a", "b"), ("x".into(), Vec::new()));
    }
}
