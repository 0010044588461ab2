//! Ollama's requests about models: `tags`, `show`, `ps`, `version`, `pull`, `copy`, `delete`, `create`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use starling::quant::mix::Mix;

use crate::error::ApiError;
use crate::parse_whole;

/// Response of `GET /api/version`.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaVersion {
    /// Version of Ollama's API that Starling follows: clients compare it.
    pub version: &'static str,
    /// Version of Starling.
    pub starling: &'static str,
}

/// Version of Ollama's API that Starling follows.
pub const OLLAMA_VERSION: &str = "0.12.0";

/// Response of `GET /api/tags` and `GET /api/ps`.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaModels {
    /// The models.
    pub models: Vec<OllamaModel>,
}

/// A model.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaModel {
    /// Model name.
    pub name: String,
    /// Model name.
    pub model: String,
    /// Time of the load, or of the start of the server: RFC 3339.
    pub modified_at: String,
    /// Bytes of the weights; of a model that is not loaded, of its file, or 0 if that is not on this machine.
    pub size: u64,
    /// SHA-256 of the model file; empty if the model is not loaded.
    pub digest: String,
    /// Family, parameters and quantisation.
    pub details: OllamaDetails,
    /// `completion`, `tools`, `thinking`, `insert`, or `embedding`, or `rerank`; empty if the model is not loaded and its file is
    /// not on this machine.
    pub capabilities: Vec<&'static str>,
    /// Context length of this server, on `ps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_length: Option<usize>,
    /// Time when the model is unloaded if no request comes, on `ps`: RFC 3339, far in the future without a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    /// Always 0, on `ps`: Starling runs on CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_vram: Option<u64>,
}

/// Family, parameters and quantisation of a model.
#[derive(Debug, Clone, Default, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaDetails {
    /// Always empty.
    pub parent_model: &'static str,
    /// Always `gguf`.
    pub format: &'static str,
    /// Architecture; empty if it is not known.
    pub family: String,
    /// The family alone.
    pub families: Vec<String>,
    /// Number of parameters, such as `1.5B`; empty if it is not known.
    pub parameter_size: String,
    /// Quantisation, such as `Q4_K_M`; `unknown` if the file does not say.
    pub quantization_level: String,
}

/// Request of `POST /api/show`.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaShowRequest {
    /// Model name.
    #[serde(alias = "name")]
    pub model: String,
}

/// Response of `POST /api/show`.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaShow {
    /// Modelfile that describes the model.
    pub modelfile: String,
    /// Chat template, in Jinja syntax.
    pub template: String,
    /// Always empty: sampling defaults are settings of the server.
    pub parameters: String,
    /// Family, parameters and quantisation.
    pub details: OllamaDetails,
    /// Metadata of the model, by the names of GGUF.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub model_info: Map<String, Value>,
    /// `completion`, `tools`, `thinking`, `insert`, or `embedding`, or `rerank`.
    pub capabilities: Vec<&'static str>,
    /// Time of the load: RFC 3339.
    pub modified_at: String,
}

/// Request of `POST /api/pull`.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaPullRequest {
    /// Source, as `starling pull` takes it: `hf:OWNER/REPOSITORY`, `hf.co/OWNER/REPOSITORY:QUANT` or a URL.
    #[serde(alias = "name")]
    pub model: String,
    /// Stream the progress as lines of JSON. Default: true.
    pub stream: Option<bool>,
    /// Not supported.
    pub insecure: Option<bool>,
}

/// Progress of `POST /api/pull` and `POST /api/create`.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaProgress {
    /// What is done; `success` at the end.
    pub status: &'static str,
    /// Bytes of the download.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// Bytes that have arrived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed: Option<u64>,
}

impl OllamaProgress {
    /// A line without byte counts.
    pub fn new(status: &'static str) -> OllamaProgress {
        OllamaProgress { status, total: None, completed: None }
    }
}

/// Request of `POST /api/copy`.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaCopyRequest {
    /// Model name.
    pub source: String,
    /// New name.
    pub destination: String,
}

/// Request of `DELETE /api/delete`.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaDeleteRequest {
    /// Model name.
    #[serde(alias = "name")]
    pub model: String,
}

/// Request of `POST /api/create`: another name of a model. Fields that would change the model are refused.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaCreateRequest {
    /// New name.
    #[serde(alias = "name")]
    pub model: String,
    /// Model to name.
    pub from: Option<String>,
    /// Stream the progress as lines of JSON. Default: true.
    pub stream: Option<bool>,
    /// Other fields.
    #[serde(flatten)]
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub others: Map<String, Value>,
}

parse_whole!(OllamaShowRequest, OllamaPullRequest, OllamaCopyRequest, OllamaDeleteRequest, OllamaCreateRequest);

impl OllamaCreateRequest {
    /// The model to name.
    ///
    /// # Errors
    /// A field other than `from`.
    pub fn source(&self) -> Result<&str, ApiError> {
        let is_set = |value: &Value| match value {
            Value::Null => false,
            Value::String(text) => !text.is_empty(),
            Value::Array(items) => !items.is_empty(),
            Value::Object(fields) => !fields.is_empty(),
            _ => true,
        };
        if let Some((name, _)) = self.others.iter().find(|(_, value)| is_set(value)) {
            let message = format!("{name}: this server only gives models a name (`from`); see settings of a model");
            return Err(ApiError::unsupported(name, message));
        }
        self.from.as_deref().ok_or_else(|| ApiError::param("from", "from is missing"))
    }
}

/// The quantisation of a model file, by its `general.file_type`.
pub fn quantization_level(file_type: Option<u32>) -> &'static str {
    match file_type.and_then(Mix::from_file_type) {
        Some(Mix::MXFP4_MOE) => "MXFP4",
        Some(mix) => mix.name(),
        None => "unknown",
    }
}

/// A number of parameters as Ollama writes it.
pub fn parameter_size(n: u64) -> String {
    let n = n as f64;
    match n {
        n if n >= 1e9 => format!("{:.1}B", n / 1e9),
        n if n >= 1e6 => format!("{:.2}M", n / 1e6),
        n => format!("{:.2}K", n / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_are_created() {
        let source = |json: &str| {
            let request: OllamaCreateRequest = serde_json::from_str(json).expect("a request");
            request.source().map(str::to_string).map_err(|e| e.param)
        };
        assert_eq!(source(r#"{"model": "a", "from": "b", "parameters": {}}"#), Ok("b".into()));
        assert_eq!(source(r#"{"model": "a", "from": "b", "system": "x"}"#), Err(Some("system".into())));
        assert_eq!(source(r#"{"model": "a", "quantize": "q4_K_M"}"#), Err(Some("quantize".into())));
        assert_eq!(source(r#"{"model": "a"}"#), Err(Some("from".into())));
        assert_eq!([parameter_size(4_200_000), parameter_size(1_540_000_000)], ["4.20M", "1.5B"]);
        assert_eq!(
            [Some(15), Some(7), Some(99), None].map(quantization_level),
            ["Q4_K_M", "Q8_0", "unknown", "unknown"]
        );
    }
}
