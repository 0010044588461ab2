//! Rerankers: the scores of the embedder through each form of the API.

use std::fs;
use std::sync::Arc;

use serde_json::{Value, json};
use starling::embed::{Pooling, Text};
use starling::kernels::Cpu;
use starling::model::Model;
use starling::pool::Inline;
use starling::quant::Dtype;
use starling_api::rerank::pair_tokens;
use starling_tests::architecture::{TensorRecipe, recipe};
use starling_tests::embedding::{embed, embedder};

use crate::admin_client::Directory;
use crate::server::Server;

const RERANK: &str = "/v1/rerank";
const QUERY: &str = "a b";
const TEMPLATE: &str = "<s>Q: {query} D: {document}</s>A:";

fn documents() -> [String; 3] {
    ["c d".into(), "e</s>f".into(), "g h ".repeat(20)]
}

/// A small random reranker of an architecture, in a file.
fn model(directory: &Directory, arch: &str, classes: u64, template: Option<&str>) -> String {
    let mut recipe = recipe(arch);
    recipe.metadata.retain(|(key, ..)| !key.ends_with(".pooling_type"));
    recipe.metadata.push((format!("{arch}.pooling_type"), "UINT32".into(), 4.into()));
    if let Some(template) = template {
        recipe.metadata.push(("tokenizer.chat_template.rerank".into(), "STRING".into(), template.into()));
    }
    let width = recipe.n_embd as u64;
    for (name, shape, rule) in
        [("cls.output.weight", vec![width, classes], "matrix"), ("cls.output.bias", vec![classes], "bias")]
    {
        let (name, rule) = (name.into(), rule.into());
        recipe.tensors.push(TensorRecipe { name, shape, rule, gain: 1.0, lo: 0.0, hi: 0.0, w: false });
    }
    directory.write(&format!("{arch}.gguf"), recipe.file(Dtype::F32))
}

/// The scores of the documents, computed here, and the tokens of all prompts.
fn expected(path: &str) -> (Vec<f32>, usize) {
    let model = Arc::new(Model::load(&fs::read(path).expect("a file"), &Inline).expect("a model"));
    let mut e = embedder(&model, &Inline, 1, 512);
    let mut n_tokens = 0;
    let scores = documents().map(|document| {
        let tokens = pair_tokens(&model, QUERY, &document, None);
        n_tokens += tokens.len();
        let text = Text { tokens: &tokens, pooling: Pooling::Rank, dimensions: None, normalise: false };
        embed(&mut e, Cpu::detect(), &Inline, &[text])[0][0]
    });
    (scores.to_vec(), n_tokens)
}

/// Scores in the order of the documents.
fn scores(results: &Value, name: &str) -> Vec<f32> {
    let results = results.as_array().expect("a list");
    let of = |i: usize| results.iter().find(|result| result["index"] == i).expect("a result");
    let all: Vec<f64> = results.iter().map(|result| result[name].as_f64().expect("a number")).collect();
    assert!(all.is_sorted_by(|a, b| a >= b), "{all:?}");
    (0..results.len()).map(|i| of(i)[name].as_f64().expect("a number") as f32).collect()
}

#[test]
fn each_form_has_the_scores_of_the_model() {
    let directory = Directory::new();
    for (arch, classes, template) in [("bert", 1, None), ("qwen3", 2, Some(TEMPLATE))] {
        let path = model(&directory, arch, classes, template);
        let (expected, n_tokens) = expected(&path);
        let server = Server::start(&["-m", &path]);
        let body = json!({ "query": QUERY, "documents": documents() });
        for path in [RERANK, "/v2/rerank", "/v1/reranking", "/rerank", "/reranking"] {
            let response = server.ok(path, &body);
            assert_eq!(scores(&response["results"], "relevance_score"), expected, "{path}: {response}");
            assert_eq!(response["usage"]["total_tokens"], n_tokens);
        }
        let more = json!({ "query": QUERY, "documents": documents().map(|text| json!({ "text": text })), "top_n": 1,
            "return_documents": true });
        let best = server.ok(RERANK, &more)["results"].clone();
        let index = best[0]["index"].as_u64().expect("an index") as usize;
        assert_eq!(
            (best.as_array().map(Vec::len), &best[0]["document"]["text"]),
            (Some(1), &json!(documents()[index]))
        );
        // Text Embeddings Inference
        let body = json!({ "query": QUERY, "texts": documents(), "raw_scores": true });
        assert_eq!(scores(&server.ok("/rerank", &body), "score"), expected);
        let body = json!({ "query": QUERY, "texts": documents() });
        let sigmoid = |x: &f32| (1.0 / (1.0 + (-f64::from(*x)).exp())) as f32;
        let logistic: Vec<f32> = expected.iter().map(sigmoid).collect();
        // of yes and no there are probabilities already
        let want = if classes == 1 { logistic } else { expected };
        assert_eq!(scores(&server.ok("/rerank", &body), "score"), want);
        assert!(server.get("/info").json()["model_type"]["reranker"]["id2label"]["0"].is_string());
        let embeddings = server.post("/v1/embeddings", &json!({ "input": "a" }));
        assert_eq!((embeddings.status, &embeddings.json()["error"]["code"]), (400, &json!("not_an_embedder")));
        // a document that is too long
        let long = json!({ "query": QUERY, "documents": ["c", "d ".repeat(900)] });
        let refused = server.post(RERANK, &long);
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("documents[1]")));
        let mut cut = long.clone();
        cut["truncate"] = json!(true);
        assert_eq!(server.ok(RERANK, &cut)["results"].as_array().map(Vec::len), Some(2));
    }
}

#[test]
fn other_models_are_refused() {
    let server = Server::start(&[]);
    let response = server.post(RERANK, &json!({ "query": QUERY, "documents": ["a"] }));
    assert_eq!((response.status, &response.json()["error"]["code"]), (400, &json!("not_a_reranker")));
}
