//! Responses that are kept: `GET` and `DELETE` of `/v1/responses/{id}`, their input items, and what a response that
//! continues one begins with.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use starling::chat::Json;

use super::request::InputItems;
use super::response::ResponsesResponse;
use crate::fields::object;
use crate::openai::stored::to_value;

/// A response is gone.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DeletedResponse {
    /// ID of the response.
    pub id: String,
    /// Always `response`.
    pub object: &'static str,
    /// Always true.
    pub deleted: bool,
}

/// A response with all items before its output, those of previous responses included: it does not need them any more.
#[derive(Debug, Serialize, Deserialize)]
pub struct StoredResponse {
    input: Vec<Box<RawValue>>,
    response: Box<RawValue>,
}

/// The part of an item that is read here.
#[derive(Deserialize)]
struct ItemId {
    id: Option<String>,
}

/// The part of a response that is read here.
#[derive(Deserialize)]
struct Output {
    output: Vec<Json>,
}

impl StoredResponse {
    /// The bytes that are kept.
    pub fn encode(input: &[Json], response: &ResponsesResponse) -> Vec<u8> {
        #[derive(Serialize)]
        struct Row<'a> {
            input: Vec<serde_json::Value>,
            response: &'a ResponsesResponse,
        }
        // our own types serialise without errors
        serde_json::to_vec(&Row { input: input.iter().map(to_value).collect(), response }).unwrap_or_default()
    }

    /// Reads what [`StoredResponse::encode`] wrote; `None` if it is something else.
    pub fn decode(bytes: &[u8]) -> Option<StoredResponse> {
        serde_json::from_slice(bytes).ok()
    }

    /// The response; its bytes are those that were sent.
    pub fn into_response(self) -> Box<RawValue> {
        self.response
    }

    /// The items before the output, with their IDs.
    pub fn into_input(self) -> Vec<(String, Box<RawValue>)> {
        let id = |item: &RawValue| serde_json::from_str::<ItemId>(item.get()).ok().and_then(|item| item.id);
        self.input.into_iter().map(|item| (id(&item).unwrap_or_default(), item)).collect()
    }

    /// The items before the input of a response that continues this one; `None` if they cannot be read.
    pub fn context(&self) -> Option<Vec<Json>> {
        let input = self.input.iter().map(|item| serde_json::from_str::<Json>(item.get()));
        let mut items = input.collect::<Result<Vec<_>, _>>().ok()?;
        items.extend(serde_json::from_str::<Output>(self.response.get()).ok()?.output);
        Some(items)
    }
}

/// The input of the response `id` as a list of items with IDs, which are made from that ID where they are missing.
pub fn named_items(input: Option<&InputItems>, id: &str) -> Vec<Json> {
    let own = id.rsplit('_').next().unwrap_or_default();
    match input {
        None => Vec::new(),
        Some(InputItems::Text(text)) => vec![named(Json::message("user", text), own, 0)],
        Some(InputItems::Items(items)) => {
            items.iter().enumerate().map(|(index, item)| named(item.clone(), own, index)).collect()
        }
    }
}

/// An item with ID, type, and content in parts.
fn named(item: Json, own: &str, index: usize) -> Json {
    let Json::Object(fields) = item else { return item };
    let text = |name: &str| match fields.iter().find(|(known, _)| known == name) {
        Some((_, Json::Str(text))) => Some(text.clone()),
        _ => None,
    };
    let kind = text("type").unwrap_or_else(|| "message".into());
    let prefix = match kind.as_str() {
        "message" => "msg",
        "function_call" => "fc",
        "function_call_output" => "fco",
        "reasoning" => "rs",
        _ => "item",
    };
    let id = text("id").unwrap_or_else(|| format!("{prefix}_{own}i{index:04x}"));
    let is_assistant = text("role").is_some_and(|role| role == "assistant");
    let mut named = vec![("id".to_string(), Json::Str(id)), ("type".to_string(), Json::Str(kind.clone()))];
    for (name, value) in fields {
        let value = match (name.as_str(), value) {
            ("id" | "type", _) => continue,
            ("content", Json::Str(text)) if kind == "message" => Json::Array(vec![part(text, is_assistant)]),
            (_, value) => value,
        };
        named.push((name, value));
    }
    if !named.iter().any(|(name, _)| name == "status") {
        named.push(("status".into(), Json::Str("completed".into())));
    }
    Json::Object(named)
}

/// A text as a part of a message.
fn part(text: String, is_assistant: bool) -> Json {
    let kind = if is_assistant { "output_text" } else { "input_text" };
    let mut fields = vec![("type", Json::Str(kind.into())), ("text", Json::Str(text))];
    if is_assistant {
        fields.push(("annotations", Json::Array(Vec::new())));
    }
    object(fields)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::request::ResponsesRequest;
    use super::super::response::{OutputContent, OutputItem, ResponsesFormat};
    use super::*;
    use crate::openai::response::ResponseHead;

    fn input(items: &Value) -> InputItems {
        serde_json::from_value(items.clone()).expect("items")
    }

    #[test]
    fn items_have_ids_types_and_parts() {
        let items = json!([
            { "role": "user", "content": "Hi" },
            { "type": "message", "id": "msg_7", "role": "assistant", "content": "Ho", "status": "incomplete" },
            { "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}" },
            { "type": "function_call_output", "call_id": "c", "output": "4" },
            { "role": "user", "content": [{ "type": "input_text", "text": "and" }] },
        ]);
        let found: Vec<Value> = named_items(Some(&input(&items)), "resp_ab").iter().map(to_value).collect();
        let hi = json!([{ "type": "input_text", "text": "Hi" }]);
        let ho = json!([{ "type": "output_text", "text": "Ho", "annotations": [] }]);
        let expected = json!([
            { "id": "msg_abi0000", "type": "message", "role": "user", "content": hi, "status": "completed" },
            { "id": "msg_7", "type": "message", "role": "assistant", "content": ho, "status": "incomplete" },
            { "id": "fc_abi0002", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed" },
            { "id": "fco_abi0003", "type": "function_call_output", "call_id": "c", "output": "4", "status": "completed" },
            { "id": "msg_abi0004", "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "and" }], "status": "completed" },
        ]);
        assert_eq!(Value::Array(found), expected);
        let of_text = named_items(Some(&input(&json!("Hi"))), "resp_ab");
        assert_eq!(to_value(&of_text[0]), expected[0]);
        assert!(named_items(None, "resp_ab").is_empty());
    }

    #[test]
    fn a_stored_response_comes_back_and_is_continued() {
        let head = ResponseHead {
            id: "resp_1".into(),
            created: 7,
            model: "tiny".into(),
            system_fingerprint: "fp".into(),
            seed: 3,
            session_id: None,
        };
        let mut response = ResponsesFormat::new(head, &ResponsesRequest::default(), 6).into_response();
        let text = OutputContent::OutputText { text: "Ho".into(), annotations: Vec::new(), logprobs: Vec::new() };
        let (id, status, role) = ("msg_10000".to_string(), "completed", "assistant");
        response.output.push(OutputItem::Message { id, status, role, content: vec![text] });
        let result = json!({ "type": "function_call_output", "call_id": "c", "output": "4" });
        let items = named_items(Some(&input(&json!([result, { "role": "user", "content": "Hi" }]))), "resp_1");
        let stored = StoredResponse::decode(&StoredResponse::encode(&items, &response)).expect("a response");
        let context = stored.context().expect("items");
        assert_eq!((context.len(), &context[..2]), (3, &items[..]));
        let next = ResponsesRequest { input: Some(input(&json!("And?"))), ..ResponsesRequest::default() };
        let messages = next.into_chat(context).expect("a chat").chat.chat.messages;
        let expected = [("user", "Hi"), ("assistant", "Ho"), ("user", "And?")];
        assert_eq!(messages[1..], expected.map(|(role, text)| Json::message(role, text)));
        assert_eq!(stored.response.get(), serde_json::to_string(&response).expect("JSON"));
        let listed = stored.into_input();
        let ids: Vec<&str> = listed.iter().map(|(id, _)| id.as_str()).collect();
        assert_eq!(ids, ["fco_1i0000", "msg_1i0001"]);
        for other in ["", "{}", "[]", "{\"input\":[],\"response\""] {
            assert!(StoredResponse::decode(other.as_bytes()).is_none(), "{other}");
        }
    }
}
