//! Chat completions of requests with `store: true`: kept in the state store, retrieved, changed and deleted by ID.

use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use serde_json::value::RawValue;
use starling::chat::Json;
use starling_api::answer::Answer;
use starling_api::openai::chat::{ChatChoice, ChatPlan};
use starling_api::openai::response::{CompletionResponse, ResponseHead};
use starling_api::openai::stored::{
    Deleted, Metadata, MetadataChange, PageQuery, StoredList, check_metadata, stored_messages,
};
use starling_host::clock::unix_millis;

use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, json};
use crate::http::params::{PathParams, QueryParams};
use crate::routes::common::writes::state_error;
use crate::schedule::offload::offload;
use crate::server::{Caller, Server};
use crate::state::store::{Kind, PageOf, RowId, RowInfo, StateError, StateStore};

impl Server {
    /// The state store.
    ///
    /// # Errors
    /// 400 without `--state-dir`; `what` needs it.
    pub fn state_store(&self, what: &str) -> Result<&Arc<StateStore>, ApiError> {
        let none = || ApiError::invalid(format!("{what} needs a server with --state-dir")).code("state_dir_needed");
        self.pool.resources().state.as_ref().ok_or_else(none)
    }

    /// Whether there is a state store.
    pub fn has_state_store(&self) -> bool {
        self.pool.resources().state.is_some()
    }

    /// Expiry of an answer that is stored now, in milliseconds since 1970.
    pub fn answer_expiry(&self, now: u64) -> u64 {
        let ttl = self.settings().stored_answers_ttl.as_millis();
        now.saturating_add(u64::try_from(ttl).unwrap_or(u64::MAX))
    }
}

/// Keeps a completion.
#[derive(Clone)]
pub struct Recorder {
    store: Arc<StateStore>,
    tenant: Arc<str>,
    messages: Arc<Vec<Json>>,
    metadata: Metadata,
    expiry: u64,
}

impl Recorder {
    /// For a request with `store: true`.
    ///
    /// # Errors
    /// If the server stores nothing, or the metadata are invalid.
    pub fn new(
        server: &Server,
        caller: &Caller,
        metadata: Option<Value>,
        messages: Vec<Json>,
    ) -> Result<Recorder, ApiError> {
        let store = server.state_store("store: true");
        let store = store.map_err(|e| ApiError { param: Some("store".into()), ..e })?;
        Ok(Recorder {
            store: Arc::clone(store),
            tenant: Arc::clone(&caller.identity.tenant.name),
            messages: Arc::new(messages),
            metadata: check_metadata(metadata)?,
            expiry: server.answer_expiry(unix_millis()),
        })
    }

    /// Stores the completion of these answers.
    pub fn write(
        &self,
        plan: ChatPlan,
        head: ResponseHead,
        answers: Vec<Answer>,
    ) -> impl Future<Output = Result<(), StateError>> + Send + 'static {
        let recorder = self.clone();
        async move {
            let id = Arc::clone(&head.id.0);
            let (inner, name) = (recorder.clone(), Arc::clone(&id));
            let build = move || inner.row(&name, &plan.response(head, answers));
            let row = offload(usize::MAX, build).await.map_err(|_| StateError::Ended)?;
            let id = RowId { kind: Kind::Completion, tenant: recorder.tenant, id };
            recorder.store.put(id, row, unix_millis(), recorder.expiry).durable().await
        }
    }

    fn row(&self, id: &str, completion: &CompletionResponse<ChatChoice>) -> Vec<u8> {
        // our own types serialise without errors
        let completion = serde_json::to_vec(completion).unwrap_or_default();
        let messages = serde_json::to_vec(&stored_messages(id, &self.messages)).unwrap_or_default();
        Stored { completion, messages, metadata: self.metadata.clone() }.encode()
    }
}

/// Value of a row: lengths of completion and messages in 4 bytes each, completion, messages, and metadata, all in JSON.
struct Stored {
    completion: Vec<u8>,
    messages: Vec<u8>,
    metadata: Metadata,
}

impl Stored {
    fn encode(&self) -> Vec<u8> {
        let metadata = serde_json::to_vec(&self.metadata).unwrap_or_default();
        // requests and answers are far below 4 GiB
        let lengths = [&self.completion, &self.messages].map(|part| (part.len() as u32).to_le_bytes());
        [&lengths[0][..], &lengths[1], &self.completion, &self.messages, &metadata].concat()
    }

    fn decode(row: &[u8]) -> Option<Stored> {
        let (first, rest) = row.split_first_chunk()?;
        let (second, rest) = rest.split_first_chunk()?;
        let (completion, rest) = rest.split_at_checked(u32::from_le_bytes(*first) as usize)?;
        let (messages, rest) = rest.split_at_checked(u32::from_le_bytes(*second) as usize)?;
        let metadata = serde_json::from_slice(rest).ok()?;
        Some(Stored { completion: completion.into(), messages: messages.into(), metadata })
    }

    /// The completion with its metadata. Its bytes are those of the response.
    fn json(&self) -> Option<Box<RawValue>> {
        let text = std::str::from_utf8(&self.completion).ok()?.strip_suffix('}')?;
        let metadata = serde_json::to_string(&self.metadata).ok()?;
        RawValue::from_string(format!("{text},\"metadata\":{metadata}}}")).ok()
    }

    fn model(&self) -> Option<String> {
        #[derive(serde::Deserialize)]
        struct Model {
            model: String,
        }
        serde_json::from_slice::<Model>(&self.completion).ok().map(|completion| completion.model)
    }

    fn fits(&self, query: &PageQuery) -> bool {
        query.metadata.iter().all(|(name, value)| self.metadata.get(name) == Some(value))
            && query.model.as_ref().is_none_or(|model| self.model().as_ref() == Some(model))
    }
}

/// Parameters of a list.
#[derive(Debug, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "describes the interface; PageQuery reads the parameters")]
pub struct PageParams {
    /// Only what comes after the object of this ID.
    after: Option<String>,
    /// Number of objects, at most. Default: 20.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<usize>,
    /// By the time of creation: `asc`, the default, or `desc`.
    #[param(inline)]
    order: Option<Order>,
}

/// Parameters of a list of completions.
#[derive(Debug, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "describes the interface; PageQuery reads the parameters")]
pub struct FilterParams {
    /// Only those of a model.
    model: Option<String>,
}

/// Order of a list.
#[derive(Debug, utoipa::ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "describes the interface; PageQuery reads the parameters")]
pub enum Order {
    Asc,
    Desc,
}

fn row_id(caller: &Caller, id: &str) -> RowId {
    RowId { kind: Kind::Completion, tenant: Arc::clone(&caller.identity.tenant.name), id: id.into() }
}

fn not_found(param: &str) -> ApiError {
    let message =
        "there is no such stored completion: it was not stored, has expired, was deleted or made room for others";
    let error = ApiError::new(StatusCode::NOT_FOUND.as_u16(), "invalid_request_error", message);
    ApiError { param: Some(param.into()), ..error }.code("completion_not_found")
}

fn malformed() -> ApiError {
    ApiError::internal("internal error: a stored completion has another format")
}

async fn read(server: &Server, caller: &Caller, id: &str) -> Result<(Stored, RowId, RowInfo), ApiError> {
    let store = server.state_store("stored completions")?;
    let row = row_id(caller, id);
    let info = store.info(&row).ok_or_else(|| not_found("completion_id"))?;
    let value = store.get(row.clone()).await.map_err(|e| state_error(&e))?.ok_or_else(|| not_found("completion_id"))?;
    Ok((Stored::decode(&value).ok_or_else(malformed)?, row, info))
}

/// Deletes a row durably. False if there is none.
///
/// # Errors
/// If the store cannot write.
pub async fn remove(store: &StateStore, row: RowId) -> Result<bool, ApiError> {
    if store.info(&row).is_none() {
        return Ok(false);
    }
    store.delete(row).durable().await.map_err(|e| state_error(&e))?;
    Ok(true)
}

/// A response of JSON that is serialised already.
pub fn raw(body: &RawValue) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body.get().to_string()).into_response()
}

/// Retrieve a stored chat completion.
///
/// # Errors
/// If there is none of this ID, or the server stores none.
#[utoipa::path(get, path = "/v1/chat/completions/{completion_id}", tag = "OpenAI",
    params(("completion_id" = String, Path, description = "ID of the completion")), responses(
    (status = 200, description = "Completion, with its metadata", body = CompletionResponse<ChatChoice>),
    (status = "4XX", description = "No such completion", body = ErrorBody),
))]
pub async fn retrieve(
    State(server): State<Arc<Server>>,
    caller: Caller,
    PathParams(id): PathParams<String>,
) -> Result<Response, HttpError> {
    let (stored, ..) = read(&server, &caller, &id).await?;
    Ok(raw(&stored.json().ok_or_else(malformed)?))
}

/// Replace the metadata of a stored chat completion.
///
/// # Errors
/// If there is none of this ID, the metadata are invalid, or the server stores none.
#[utoipa::path(post, path = "/v1/chat/completions/{completion_id}", tag = "OpenAI", request_body = MetadataChange,
    params(("completion_id" = String, Path, description = "ID of the completion")), responses(
    (status = 200, description = "Completion, with its new metadata", body = CompletionResponse<ChatChoice>),
    (status = "4XX", description = "No such completion, or invalid metadata", body = ErrorBody),
))]
pub async fn change(
    State(server): State<Arc<Server>>,
    caller: Caller,
    PathParams(id): PathParams<String>,
    Body(body): Body<MetadataChange>,
) -> Result<Response, HttpError> {
    let metadata = check_metadata(Some(body.metadata))?;
    let (stored, row, info) = read(&server, &caller, &id).await?;
    let stored = Stored { metadata, ..stored };
    let store = server.state_store("stored completions")?;
    let written = store.put(row, stored.encode(), info.created, info.expires);
    written.durable().await.map_err(|e| state_error(&e))?;
    Ok(raw(&stored.json().ok_or_else(malformed)?))
}

/// Delete a stored chat completion.
///
/// # Errors
/// If there is none of this ID, or the server stores none.
#[utoipa::path(delete, path = "/v1/chat/completions/{completion_id}", tag = "OpenAI",
    params(("completion_id" = String, Path, description = "ID of the completion")), responses(
    (status = 200, description = "The completion is gone", body = Deleted),
    (status = "4XX", description = "No such completion", body = ErrorBody),
))]
pub async fn delete(
    State(server): State<Arc<Server>>,
    caller: Caller,
    PathParams(id): PathParams<String>,
) -> Result<Response, HttpError> {
    let store = server.state_store("stored completions")?;
    if !remove(store, row_id(&caller, &id)).await? {
        return Err(not_found("completion_id").into());
    }
    Ok(json(StatusCode::OK, &Deleted { id, object: "chat.completion.deleted", deleted: true }))
}

/// List the messages of a stored chat completion's request.
///
/// # Errors
/// If there is none of this ID, a parameter is wrong, or the server stores none.
#[utoipa::path(get, path = "/v1/chat/completions/{completion_id}/messages", tag = "OpenAI",
    params(("completion_id" = String, Path, description = "ID of the completion"), PageParams), responses(
    (status = 200, description = "Messages", body = StoredList),
    (status = "4XX", description = "No such completion", body = ErrorBody),
))]
pub async fn messages(
    State(server): State<Arc<Server>>,
    caller: Caller,
    PathParams(id): PathParams<String>,
    QueryParams(query): QueryParams<Vec<(String, String)>>,
) -> Result<Response, HttpError> {
    let query = PageQuery::new(query)?;
    let _turn = server.lists.take(&caller.identity.tenant.name).await.map_err(ApiError::from)?;
    let (stored, ..) = read(&server, &caller, &id).await?;
    let messages: Vec<Box<RawValue>> = serde_json::from_slice(&stored.messages).map_err(|_| malformed())?;
    let messages = messages.into_iter().enumerate().map(|(i, message)| (format!("{id}-{i}"), message)).collect();
    let rest = query.rest(messages, |(id, _)| id).ok_or_else(|| not_found("after"))?;
    Ok(json(StatusCode::OK, &query.list(rest)))
}

/// List stored chat completions, the oldest first.
///
/// # Errors
/// If a parameter is wrong, or the server stores none.
#[utoipa::path(get, path = "/v1/chat/completions", tag = "OpenAI", params(PageParams, FilterParams), responses(
    (status = 200, description = "Completions with their metadata; `metadata[NAME]=VALUE` in the query filters", body = StoredList),
    (status = "4XX", description = "A parameter is wrong", body = ErrorBody),
))]
pub async fn list(
    State(server): State<Arc<Server>>,
    caller: Caller,
    QueryParams(query): QueryParams<Vec<(String, String)>>,
) -> Result<Response, HttpError> {
    let query = PageQuery::new(query)?;
    let store = Arc::clone(server.state_store("stored completions")?);
    let tenant = Arc::clone(&caller.identity.tenant.name);
    let _turn = server.lists.take(&tenant).await.map_err(ApiError::from)?;
    let list = offload(usize::MAX, move || page(&store, &tenant, &query)).await??;
    Ok(json(StatusCode::OK, &list))
}

/// Bytes of a page after which no further completion is added.
const PAGE_BYTES: usize = 4 << 20;

/// The page of a tenant's completions; reads the rows that it has.
fn page(store: &StateStore, tenant: &str, query: &PageQuery) -> Result<StoredList, ApiError> {
    let metadata = query.metadata.iter().map(|(name, value)| metadata_label(name, value));
    let labels: Vec<u64> = metadata.chain(query.model.as_deref().map(model_label)).collect();
    let PageQuery { after, limit, is_descending, .. } = query;
    let page = PageOf { after: after.as_deref(), is_descending: *is_descending, labels: &labels, limit: limit + 1 };
    let rows = store.page(Kind::Completion, tenant, &page).ok_or_else(|| not_found("after"))?;
    let (mut found, mut n_bytes) = (Vec::new(), 0);
    for row in rows {
        if n_bytes > PAGE_BYTES {
            return Ok(StoredList::new(found, true));
        }
        // one may be deleted meanwhile
        let Some(value) = store.read(&row).map_err(|e| state_error(&e))? else { continue };
        let stored = Stored::decode(&value).ok_or_else(malformed)?;
        if stored.fits(query) {
            n_bytes += stored.completion.len();
            found.push((row.id.to_string(), stored.json().ok_or_else(malformed)?));
        }
    }
    Ok(query.list(found))
}

/// What a stored row is found by: the model and the metadata of a completion.
pub fn labels(kind: Kind, value: &[u8]) -> Vec<u64> {
    let Some(stored) = Some(value).filter(|_| kind == Kind::Completion).and_then(Stored::decode) else {
        return Vec::new();
    };
    let metadata = stored.metadata.iter().map(|(name, value)| metadata_label(name, value));
    metadata.chain(stored.model().as_deref().map(model_label)).collect()
}

fn model_label(name: &str) -> u64 {
    label(&("model", name))
}

fn metadata_label(name: &str, value: &str) -> u64 {
    label(&("metadata", name, value))
}

/// A hash that two labels rarely share; what is found by it is compared.
fn label(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}
