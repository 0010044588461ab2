//! Chat completions that are kept: `GET`, `POST` and `DELETE` of `/v1/chat/completions/{id}`, their list and messages.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use starling::chat::Json;

use crate::error::{ApiError, quoted};

/// Metadata of a completion.
pub type Metadata = BTreeMap<String, String>;

/// Pairs, and characters of a name and of a value, at most, as OpenAI has it.
const MAX_PAIRS: usize = 16;
const MAX_NAME: usize = 64;
const MAX_VALUE: usize = 512;
/// Objects of a page, at most, and by default.
const MAX_PAGE: usize = 100;
const DEFAULT_PAGE: usize = 20;

/// Metadata of a request.
///
/// # Errors
/// If it is no object of strings, or too large.
pub fn check_metadata(metadata: Option<Value>) -> Result<Metadata, ApiError> {
    let wrong = |what: String| ApiError::param("metadata", format!("metadata {what}"));
    let pairs = match metadata {
        None | Some(Value::Null) => return Ok(Metadata::new()),
        Some(Value::Object(pairs)) => pairs,
        Some(_) => return Err(wrong("is not an object of strings".into())),
    };
    if pairs.len() > MAX_PAIRS {
        return Err(wrong(format!("has {} pairs, expected at most {MAX_PAIRS}", pairs.len())));
    }
    let check = |(name, value): (String, Value)| {
        let Value::String(value) = value else {
            return Err(wrong(format!("has {:?} that is not a string", quoted(&name))));
        };
        if name.chars().count() > MAX_NAME || value.chars().count() > MAX_VALUE {
            let most = format!("expected at most {MAX_NAME} characters in a name and {MAX_VALUE} in a value");
            return Err(wrong(format!("has {:?} that is too long, {most}", quoted(&name))));
        }
        Ok((name, value))
    };
    pairs.into_iter().map(check).collect()
}

/// Change of the metadata of a completion.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MetadataChange {
    /// Metadata in place of what the completion has: at most 16 strings by name.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub metadata: Value,
}

crate::parse_whole!(MetadataChange);

/// A page of a list.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StoredList {
    /// Always `list`.
    pub object: &'static str,
    /// Completions, messages, or items.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<Object>))]
    pub data: Vec<Box<RawValue>>,
    /// ID of the first.
    pub first_id: Option<String>,
    /// ID of the last, for `after`.
    pub last_id: Option<String>,
    /// Whether there are more.
    pub has_more: bool,
}

impl StoredList {
    /// A page of objects with their IDs.
    pub fn new(objects: Vec<(String, Box<RawValue>)>, has_more: bool) -> StoredList {
        let id = |object: Option<&(String, Box<RawValue>)>| object.map(|(id, _)| id.clone());
        let (first_id, last_id) = (id(objects.first()), id(objects.last()));
        let data = objects.into_iter().map(|(_, object)| object).collect();
        StoredList { object: "list", data, first_id, last_id, has_more }
    }
}

/// A completion is gone.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Deleted {
    /// ID of the completion.
    pub id: String,
    /// Always `chat.completion.deleted`.
    pub object: &'static str,
    /// Always true.
    pub deleted: bool,
}

/// Which part of a list is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageQuery {
    /// Only what comes after the object of this ID.
    pub after: Option<String>,
    /// Objects, at most.
    pub limit: usize,
    /// Whether the newest come first.
    pub is_descending: bool,
    /// Only those of a model.
    pub model: Option<String>,
    /// Only those with this metadata.
    pub metadata: Metadata,
}

impl PageQuery {
    /// Reads the parameters of a query; unknown ones are ignored.
    ///
    /// # Errors
    /// The first value that is wrong.
    pub fn new(pairs: Vec<(String, String)>) -> Result<PageQuery, ApiError> {
        PageQuery::with_default(pairs, false)
    }

    /// As [`PageQuery::new`], with the newest first unless the query has an order.
    ///
    /// # Errors
    /// The first value that is wrong.
    pub fn newest_first(pairs: Vec<(String, String)>) -> Result<PageQuery, ApiError> {
        PageQuery::with_default(pairs, true)
    }

    fn with_default(pairs: Vec<(String, String)>, is_descending: bool) -> Result<PageQuery, ApiError> {
        let (after, limit, model, metadata) = (None, DEFAULT_PAGE, None, Metadata::new());
        let mut query = PageQuery { after, limit, is_descending, model, metadata };
        for (name, value) in pairs {
            match name.as_str() {
                "after" => query.after = Some(value),
                "model" => query.model = Some(value),
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=MAX_PAGE).contains(limit));
                    let wrong = || {
                        let found = quoted(&value);
                        ApiError::param("limit", format!("limit is {found:?}, expected a number from 1 to {MAX_PAGE}"))
                    };
                    query.limit = limit.ok_or_else(wrong)?;
                }
                "order" => {
                    query.is_descending = match value.as_str() {
                        "asc" => false,
                        "desc" => true,
                        _ => {
                            let message = format!("order is {:?}, expected asc or desc", quoted(&value));
                            return Err(ApiError::param("order", message));
                        }
                    };
                }
                name => {
                    if let Some(key) = name.strip_prefix("metadata[").and_then(|name| name.strip_suffix(']')) {
                        query.metadata.insert(key.to_string(), value);
                    }
                }
            }
        }
        Ok(query)
    }

    /// The list of a page, from the objects of [`PageQuery::rest`].
    pub fn list(&self, mut rest: Vec<(String, Box<RawValue>)>) -> StoredList {
        let has_more = rest.len() > self.limit;
        rest.truncate(self.limit);
        StoredList::new(rest, has_more)
    }

    /// The page of objects in ascending order that `id` names: all after [`PageQuery::after`]. `None` if that does not exist.
    pub fn rest<T>(&self, mut objects: Vec<T>, id: impl Fn(&T) -> &str) -> Option<Vec<T>> {
        if self.is_descending {
            objects.reverse();
        }
        if let Some(after) = &self.after {
            let at = objects.iter().position(|object| id(object) == after)?;
            objects.drain(..=at);
        }
        Some(objects)
    }
}

/// The messages of a request as they are kept. Content in parts is in `content_parts`.
pub fn stored_messages(completion: &str, messages: &[Json]) -> Vec<Value> {
    let stored = |(i, message): (usize, &Json)| {
        let mut fields = match to_value(message) {
            Value::Object(fields) => fields,
            _ => Map::new(),
        };
        let content = fields.remove("content").unwrap_or(Value::Null);
        let (content, parts) = if content.is_array() { (Value::Null, content) } else { (content, Value::Null) };
        let mut stored = Map::from_iter([("id".to_string(), json!(format!("{completion}-{i}")))]);
        stored.extend(fields);
        stored.extend([("content".to_string(), content), ("content_parts".to_string(), parts)]);
        Value::Object(stored)
    };
    messages.iter().enumerate().map(stored).collect()
}

/// A value of a request. The parser bounds its depth.
pub(crate) fn to_value(value: &Json) -> Value {
    match value {
        Json::Null => Value::Null,
        Json::Bool(value) => json!(value),
        Json::Int(value) => json!(value),
        Json::UInt(value) => json!(value),
        Json::Float(value) => json!(value),
        Json::Str(text) => json!(text),
        Json::Array(items) => items.iter().map(to_value).collect(),
        Json::Object(fields) => fields.iter().map(|(name, value)| (name.clone(), to_value(value))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &[(&str, &str)]) -> Vec<(String, String)> {
        text.iter().map(|(name, value)| ((*name).to_string(), (*value).to_string())).collect()
    }

    #[test]
    fn metadata_has_the_limits_of_openai() {
        let check = |value: Value| check_metadata(Some(value)).map_err(|e| e.param);
        assert_eq!(check_metadata(None), Ok(Metadata::new()));
        assert_eq!(check(Value::Null), Ok(Metadata::new()));
        let good = check(json!({ "a": "é".repeat(512), "b".repeat(64): "" })).unwrap();
        assert_eq!(good.len(), 2);
        let many: Map<String, Value> = (0..17).map(|i| (i.to_string(), json!(""))).collect();
        for wrong in [
            json!("a"),
            json!({ "a": 1 }),
            json!({ "a": "x".repeat(513) }),
            json!({ "b".repeat(65): "" }),
            Value::Object(many),
        ] {
            assert_eq!(check(wrong.clone()), Err(Some("metadata".into())), "{wrong}");
        }
    }

    #[test]
    fn pages_follow_one_another() {
        let all: Vec<String> = (0..7).map(|i| i.to_string()).collect();
        for order in ["asc", "desc"] {
            let mut found = Vec::new();
            let mut query = PageQuery::new(pairs(&[("limit", "3"), ("order", order), ("x", "y")])).unwrap();
            loop {
                let rest = query.rest(all.clone(), |id| id).unwrap();
                let page = &rest[..rest.len().min(query.limit)];
                found.extend(page.to_vec());
                query.after = page.last().cloned();
                if rest.len() <= query.limit {
                    break;
                }
            }
            let mut expected = all.clone();
            if order == "desc" {
                expected.reverse();
            }
            assert_eq!(found, expected);
        }
        let is_descending = |query: &[(&str, &str)]| PageQuery::newest_first(pairs(query)).unwrap().is_descending;
        assert!(is_descending(&[]) && !is_descending(&[("order", "asc")]));
        let query = PageQuery::new(pairs(&[("metadata[a]", "b"), ("model", "m"), ("after", "none")])).unwrap();
        assert_eq!((query.metadata.get("a").map(String::as_str), query.model.as_deref()), (Some("b"), Some("m")));
        assert_eq!(query.rest(all, |id| id), None);
        for wrong in [("limit", "0"), ("limit", "101"), ("limit", "x"), ("order", "up")] {
            assert_eq!(PageQuery::new(pairs(&[wrong])).map_err(|e| e.param), Err(Some(wrong.0.into())));
        }
    }

    #[test]
    fn messages_have_ids_and_parts() {
        let message: Vec<Json> = serde_json::from_str(
            r#"[{"role":"user","content":"a","name":"n"},{"role":"user","content":[{"type":"text","text":"b"}]},{"role":"assistant"}]"#,
        )
        .unwrap();
        let expected = json!([
            { "id": "c-0", "role": "user", "name": "n", "content": "a", "content_parts": null },
            { "id": "c-1", "role": "user", "content": null, "content_parts": [{ "type": "text", "text": "b" }] },
            { "id": "c-2", "role": "assistant", "content": null, "content_parts": null },
        ]);
        assert_eq!(json!(stored_messages("c", &message)), expected);
    }
}
