//! Fields of a request body that its type does not have.

use std::any::type_name;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use serde::de::IgnoredAny;
use starling_api::anthropic::request::MessagesRequest;
use starling_api::llama_server::request::LlamaCompletionRequest;
use starling_api::native::execute::ExecuteRequest;
use starling_api::native::generate::GenerateRequest;
use starling_api::ollama::request::{OllamaChatRequest, OllamaGenerateRequest};
use starling_api::openai::chat::ChatCompletionRequest;
use starling_api::openai::completions::CompletionRequest;
use starling_api::openai::embeddings::EmbeddingRequest;
use starling_api::rerank::RerankRequest;
use starling_api::responses::request::ResponsesRequest;
use utoipa::ToSchema;
use utoipa::openapi::{Ref, RefOr, Schema};

use crate::http::error::{ApiError, quoted};

/// Fields of OpenAI's and Anthropic's APIs that change nothing here, and that their clients send as a matter of course.
const HARMLESS: [&str; 14] = [
    "cache_control",
    "context_management",
    "metadata",
    "modalities",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
    "verbosity",
];
/// Fields of other servers, which are no misspelt fields of this one.
const FOREIGN: [&str; 10] = [
    "cache_prompt",
    "keep_alive",
    "min_keep",
    "min_new_tokens",
    "min_tokens",
    "n_keep",
    "n_predict",
    "n_probs",
    "top_a",
    "top_n",
];
/// Further names of fields (`serde(alias)`), which the description of the interface does not have, by their type.
const ALIASES: [(&str, &str); 13] = [
    ("LlamaEmbeddingRequest", "input"),
    ("LlamaFields", "max_completion_tokens"),
    ("LlamaFields", "max_tokens"),
    ("LlamaTokenizeRequest", "add_special_tokens"),
    ("LlamaTokenizeRequest", "prompt"),
    ("OllamaCreateRequest", "name"),
    ("OllamaDeleteRequest", "name"),
    ("OllamaPullRequest", "name"),
    ("OllamaShowRequest", "name"),
    ("Options", "repeat_penalty"),
    ("TokenizeRequest", "add_special_tokens"),
    ("TokenizeRequest", "content"),
    ("TokenizeRequest", "prompt"),
];
/// Names in the response header.
const MAX_NAMES: usize = 16;
/// Bytes of such a name.
const MAX_NAME: usize = 64;

/// The unknown fields of a JSON object, in their order; none if the body is not an object.
///
/// # Errors
/// A field whose name is close to a known one, or any if `are_refused`.
pub fn unknown<T: ToSchema>(json: &[u8], are_refused: bool) -> Result<Vec<String>, ApiError> {
    let Some(known) = known::<T>() else { return Ok(Vec::new()) };
    let Ok(fields) = serde_json::from_slice::<BTreeMap<String, IgnoredAny>>(json) else { return Ok(Vec::new()) };
    let is_unknown = |name: &String| !known.contains(name) && !HARMLESS.contains(&&**name);
    let unknown: Vec<String> = fields.into_keys().filter(is_unknown).collect();
    for name in &unknown {
        let near = nearest(name, &known);
        if near.is_none() && !are_refused {
            continue;
        }
        let tip = near.map_or_else(String::new, |near| format!("; did you mean {near}?"));
        let name = quoted(name);
        return Err(ApiError::param(&name, format!("{name}: unknown field{tip}")).code("unknown_field"));
    }
    Ok(unknown)
}

/// The value of the header that names ignored fields.
pub fn header(names: &[String]) -> String {
    let is_plain = |name: &&String| name.len() <= MAX_NAME && name.bytes().all(|b| b.is_ascii_graphic() && b != b',');
    names.iter().filter(is_plain).take(MAX_NAMES).map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// The known field that `name` is a misspelling of: one edit away, or two if it is long.
fn nearest<'a>(name: &str, known: &'a BTreeSet<String>) -> Option<&'a str> {
    if FOREIGN.contains(&name) || name.len() > MAX_NAME || elsewhere().contains(name) {
        return None;
    }
    let plain = |text: &str| text.to_ascii_lowercase().replace(['-', '_'], "");
    let (wanted, most) = (plain(name), if name.len() >= 8 { 2 } else { 1 });
    let distances = known.iter().map(|known| (strsim::damerau_levenshtein(&wanted, &plain(known)), known));
    let near = distances.filter(|(distance, known)| *distance <= most && known.len() >= 4).min();
    near.map(|(_, known)| known.as_str())
}

/// Names of the fields of the generating endpoints and of embeddings: clients send those of one to another.
fn elsewhere() -> &'static BTreeSet<String> {
    static NAMES: OnceLock<BTreeSet<String>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let types = [
            known::<ChatCompletionRequest>,
            known::<CompletionRequest>,
            known::<EmbeddingRequest>,
            known::<ExecuteRequest>,
            known::<GenerateRequest>,
            known::<LlamaCompletionRequest>,
            known::<MessagesRequest>,
            known::<OllamaChatRequest>,
            known::<OllamaGenerateRequest>,
            known::<RerankRequest>,
            known::<ResponsesRequest>,
        ];
        types.into_iter().filter_map(|names| names()).flat_map(|names| (*names).clone()).collect()
    })
}

/// Names of the fields of a type; `None` if it may have any.
fn known<T: ToSchema>() -> Option<Arc<BTreeSet<String>>> {
    type Known = BTreeMap<&'static str, Option<Arc<BTreeSet<String>>>>;
    static CACHE: Mutex<Known> = Mutex::new(BTreeMap::new());
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    let fields = cache.entry(type_name::<T>()).or_insert_with(|| {
        let mut parts = vec![(T::name().into_owned(), T::schema())];
        T::schemas(&mut parts);
        let mut names = BTreeSet::new();
        collect(&T::schema(), &parts, 0, &mut names)?;
        let is_part = |name: &str| parts.iter().any(|(part, _)| part == name);
        names.extend(ALIASES.iter().filter(|(part, _)| is_part(part)).map(|(_, alias)| (*alias).to_string()));
        Some(Arc::new(names))
    });
    fields.clone()
}

/// Parts of parts, at most.
const MAX_DEPTH: usize = 8;

/// Adds the properties of an object and of the objects that it is made of.
fn collect(
    schema: &RefOr<Schema>,
    parts: &[(String, RefOr<Schema>)],
    depth: usize,
    names: &mut BTreeSet<String>,
) -> Option<()> {
    if depth > MAX_DEPTH {
        return None;
    }
    match schema {
        RefOr::Ref(Ref { ref_location, .. }) => {
            let name = ref_location.rsplit('/').next()?;
            let (_, part) = parts.iter().find(|(known, _)| known == name)?;
            collect(part, parts, depth + 1, names)
        }
        RefOr::T(Schema::Object(object)) => {
            if object.properties.is_empty() {
                return None;
            }
            names.extend(object.properties.keys().cloned());
            Some(())
        }
        RefOr::T(Schema::AllOf(all)) => all.items.iter().try_for_each(|part| collect(part, parts, depth + 1, names)),
        RefOr::T(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<T: ToSchema>(names: &[&str], are_refused: bool) -> Result<Vec<String>, String> {
        let body: serde_json::Map<_, _> = names.iter().map(|name| ((*name).into(), 1.into())).collect();
        unknown::<T>(serde_json::to_string(&body).unwrap().as_bytes(), are_refused).map_err(|e| e.message)
    }

    #[test]
    fn known_fields_are_those_of_the_description() {
        for known in ["messages", "model", "temperature", "response_format", "logit_bias", "store", "repeat_penalty"] {
            assert_eq!(of::<ChatCompletionRequest>(&[known], true), Ok(vec![]), "{known}");
        }
        assert_eq!(of::<CompletionRequest>(&["prompt", "echo", "logprobs", "seed"], true), Ok(vec![]));
        assert_eq!(of::<EmbeddingRequest>(&["input", "encoding_format", "dimensions"], true), Ok(vec![]));
    }

    #[test]
    fn misspelt_fields_are_refused_and_foreign_ones_are_named() {
        for (wrong, right) in [
            ("temprature", "temperature"),
            ("max_token", "max_tokens"),
            ("maxTokens", "max_tokens"),
            ("tools_choice", "tool_choice"),
        ] {
            let expected = Err(format!("{wrong}: unknown field; did you mean {right}?"));
            assert_eq!(of::<ChatCompletionRequest>(&[wrong], false), expected);
        }
        // fields of other endpoints, one letter from those of this one
        assert_eq!(of::<ResponsesRequest>(&["min_p", "stop", "top_k"], false).unwrap(), ["min_p", "stop", "top_k"]);
        assert_eq!(of::<ChatCompletionRequest>(&["input", "suffix"], false).unwrap(), ["input", "suffix"]);
        assert!(of::<ResponsesRequest>(&["top_q"], false).is_err());
        let foreign = ["min_tokens", "mirostat", "n_predict", "top_a"];
        assert_eq!(of::<GenerateRequest>(&foreign, false).unwrap(), foreign);
        assert_eq!(of::<GenerateRequest>(&["mirostat"], true), Err("mirostat: unknown field".into()));
        assert_eq!(header(&["a".into(), "b\n".into(), "c".into()]), "a, c");
    }
}
