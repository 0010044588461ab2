//! `POST /v1/embeddings`.

use base64::Engine as _;
use serde::{Deserialize, Serialize};
use starling::embed::EmbedderOptions;
use starling::error::RequestError;
use starling::model::Model;

use crate::error::ApiError;
use crate::input::Input;
use crate::llama_server::props::LlamaEmbedding;
use crate::parse_whole;
use crate::pieces::{JsonPieces, text, write};

/// Request for embeddings.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EmbeddingRequest {
    /// Model name. Default: the model that the server has.
    pub model: Option<String>,
    /// Text or token IDs, or a list of inputs.
    pub input: Input,
    /// `float`, the default, or `base64` of little-endian f32.
    pub encoding_format: Option<Encoding>,
    /// Number of dimensions to return, from the first. Default: all.
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub dimensions: Option<usize>,
    /// End user: the users of a tenant are scheduled in turn.
    pub user: Option<String>,
}

/// Encoding of vectors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// List of numbers.
    #[default]
    Float,
    /// Base64 of little-endian f32.
    Base64,
}

parse_whole!(EmbeddingRequest);

/// Embeddings of the inputs.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EmbeddingResponse {
    /// Always `list`.
    pub object: &'static str,
    /// Embeddings, in the order of the inputs.
    pub data: Vec<Embedding>,
    /// Model name.
    pub model: String,
    /// Token counts.
    pub usage: EmbeddingUsage,
}

/// Embedding of an input.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Embedding {
    /// Always `embedding`.
    pub object: &'static str,
    /// Index of the input.
    pub index: usize,
    /// Vector of length 1.
    pub embedding: Vector,
}

/// Vector in the requested encoding.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum Vector {
    /// List of numbers.
    Float(Vec<f32>),
    /// Base64 of little-endian f32.
    Base64(String),
}

/// Token counts of embeddings.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EmbeddingUsage {
    /// Tokens of all inputs.
    pub prompt_tokens: usize,
    /// The same as `prompt_tokens`.
    pub total_tokens: usize,
}

impl EmbeddingRequest {
    /// Checks the number of inputs, 1 to `max`.
    ///
    /// # Errors
    /// A number out of range.
    pub fn check_inputs(&self, max: usize) -> Result<(), ApiError> {
        let n = self.input.len();
        if n == 0 || n > max {
            return Err(ApiError::param("input", format!("input has {n} texts, expected 1 to {max}")));
        }
        Ok(())
    }
}

/// Checks tokenised inputs and `dimensions` against the model and the embedder.
///
/// # Errors
/// `dimensions` out of range, an empty or too long input, a token that the model does not have.
pub fn check_texts(
    model: &Model,
    embedder: &EmbedderOptions,
    texts: &[Vec<u32>],
    dimensions: Option<usize>,
) -> Result<(), ApiError> {
    let n_dimensions = model.n_embd_out();
    if let Some(d) = dimensions.filter(|d| *d == 0 || *d > n_dimensions) {
        let message = format!("dimensions is {d}, expected a number from 1 to {n_dimensions}");
        return Err(ApiError::param("dimensions", message));
    }
    check_lengths(model, embedder, texts, "input")
}

/// Checks tokenised texts of the field `name` against the model and the embedder.
///
/// # Errors
/// An empty or too long text, a token that the model does not have.
pub fn check_lengths(
    model: &Model,
    embedder: &EmbedderOptions,
    texts: &[Vec<u32>],
    name: &str,
) -> Result<(), ApiError> {
    let (n_ctx, batch_tokens, n_vocab) = (embedder.n_ctx, embedder.batch_tokens, model.config.n_vocab);
    for (i, tokens) in texts.iter().enumerate() {
        let error = if tokens.is_empty() {
            Some(RequestError::EmptyText)
        } else if tokens.len() > n_ctx.min(batch_tokens) {
            Some(RequestError::TextLength { tokens: tokens.len(), n_ctx, batch_tokens })
        } else {
            let found = tokens.iter().enumerate().find(|(_, token)| **token as usize >= n_vocab);
            found.map(|(at, token)| RequestError::Token { token: *token, at, n_vocab })
        };
        if let Some(e) = error {
            let param = if texts.len() > 1 { format!("{name}[{i}]") } else { name.into() };
            return Err(ApiError::refused(&e, &param));
        }
    }
    Ok(())
}

impl Embedding {
    fn new(index: usize, vector: Vec<f32>, encoding: Encoding) -> Embedding {
        let embedding = match encoding {
            Encoding::Float => Vector::Float(vector),
            Encoding::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                Vector::Base64(base64::engine::general_purpose::STANDARD.encode(bytes))
            }
        };
        Embedding { object: "embedding", index, embedding }
    }
}

/// Vectors that are written in pieces; each is freed once it was written.
pub struct VectorList {
    vectors: Vec<Vec<f32>>,
    encoding: Encoding,
}

impl VectorList {
    /// The vectors as JSON lists between `before`, which ends with `[`, and `end`.
    pub fn lists(vectors: Vec<Vec<f32>>, before: String, end: String) -> JsonPieces<VectorList> {
        let list = VectorList { vectors, encoding: Encoding::Float };
        let n = list.vectors.len();
        JsonPieces::new(list).list(before, n, |list, i, to| write(&list.take(i), to)).end(end)
    }

    /// The vectors as objects of llama-server.
    pub fn llama(vectors: Vec<Vec<f32>>) -> JsonPieces<VectorList> {
        let list = VectorList { vectors, encoding: Encoding::Float };
        let n = list.vectors.len();
        let write = |list: &mut VectorList, index: usize, to: &mut Vec<u8>| {
            write(&LlamaEmbedding { index, embedding: vec![list.take(index)] }, to);
        };
        JsonPieces::new(list).list("[".into(), n, write).end("]".into())
    }

    fn take(&mut self, index: usize) -> Vec<f32> {
        std::mem::take(&mut self.vectors[index])
    }
}

impl EmbeddingResponse {
    /// The response of [`EmbeddingResponse::new`] in pieces.
    pub fn pieces(model: &str, vectors: Vec<Vec<f32>>, encoding: Encoding, n_tokens: usize) -> JsonPieces<VectorList> {
        let list = VectorList { vectors, encoding };
        let usage = EmbeddingUsage { prompt_tokens: n_tokens, total_tokens: n_tokens };
        let (n, end) = (list.vectors.len(), format!("],\"model\":{},\"usage\":{}}}", text(model), text(&usage)));
        let write = |list: &mut VectorList, index: usize, to: &mut Vec<u8>| {
            let vector = list.take(index);
            write(&Embedding::new(index, vector, list.encoding), to);
        };
        JsonPieces::new(list).list("{\"object\":\"list\",\"data\":[".into(), n, write).end(end)
    }

    /// The response with `vectors`, of inputs of `n_tokens` tokens in all.
    pub fn new(model: &str, vectors: Vec<Vec<f32>>, encoding: Encoding, n_tokens: usize) -> EmbeddingResponse {
        let embedding = |(index, vector)| Embedding::new(index, vector, encoding);
        EmbeddingResponse {
            object: "list",
            data: vectors.into_iter().enumerate().map(embedding).collect(),
            model: model.into(),
            usage: EmbeddingUsage { prompt_tokens: n_tokens, total_tokens: n_tokens },
        }
    }
}
