//! Responses that are kept in the state store: continued, retrieved and deleted by ID.

use std::future::Future;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use starling::chat::Json;
use starling_api::answer::Answer;
use starling_api::openai::stored::{PageQuery, StoredList, check_metadata};
use starling_api::parts::{Part, WireFormat};
use starling_api::responses::request::{InputItems, ResponsesRequest};
use starling_api::responses::response::{ResponsesFormat, ResponsesResponse};
use starling_api::responses::stored::{DeletedResponse, StoredResponse, named_items};
use starling_api::stream::EventSink;
use starling_host::clock::unix_millis;

use super::stored::{PageParams, raw, remove};
use crate::guard::policy::{apply_to_messages, apply_to_text};
use crate::http::error::{ApiError, ErrorBody, HttpError, INVALID_REQUEST, json, quoted};
use crate::http::params::{PathParams, QueryParams};
use crate::routes::common::writes::{Writes, state_error};
use crate::schedule::offload::offload;
use crate::server::{Caller, Server};
use crate::state::store::{Kind, RowId, StateError, StateStore};

/// What a response that is kept needs besides itself.
pub struct Keeping {
    store: Arc<StateStore>,
    tenant: Arc<str>,
    /// Items of the responses before.
    before: Vec<Json>,
    input: Option<InputItems>,
    expiry: u64,
}

impl Keeping {
    /// `None` for a request whose response is not kept. What is kept has passed the policy. `before` are the items of the
    /// responses before.
    ///
    /// # Errors
    /// If the request asks to keep the response and the server keeps none, the metadata are invalid, or a text is not allowed.
    pub async fn of(
        server: &Server,
        caller: &Caller,
        body: &mut ResponsesRequest,
        before: &[Json],
    ) -> Result<Option<Keeping>, ApiError> {
        if !body.store.unwrap_or(server.has_state_store()) {
            return Ok(None);
        }
        let store = server.state_store("store: true");
        let store = Arc::clone(store.map_err(|e| ApiError { param: Some("store".into()), ..e })?);
        check_metadata(body.metadata.clone().map(Into::into))?;
        if caller.policy.is_some() {
            let instance = server.model(body.model.as_deref(), None, caller).await?;
            match &mut body.input {
                Some(InputItems::Text(text)) => apply_to_text(&caller.prompt_check(&instance), text).await?,
                Some(InputItems::Items(items)) => apply_to_messages(&caller.prompt_check(&instance), items).await?,
                None => {}
            }
            if let Some(instructions) = &mut body.instructions {
                apply_to_text(&caller.prompt_check(&instance), instructions).await?;
            }
        }
        let (tenant, expiry) = (Arc::clone(&caller.identity.tenant.name), server.answer_expiry(unix_millis()));
        Ok(Some(Keeping { store, tenant, before: before.to_vec(), input: body.input.clone(), expiry }))
    }

    /// Stores a response.
    pub fn write(self, response: ResponsesResponse) -> impl Future<Output = Result<(), StateError>> + Send + 'static {
        let Keeping { store, tenant, mut before, input, expiry } = self;
        async move {
            let id = Arc::clone(&response.id.0);
            let build = move || {
                before.extend(named_items(input.as_ref(), &response.id.0));
                StoredResponse::encode(&before, &response)
            };
            let row = offload(usize::MAX, build).await.map_err(|_| StateError::Ended)?;
            store.put(RowId { kind: Kind::Response, tenant, id }, row, unix_millis(), expiry).durable().await
        }
    }
}

/// Writes a response, and keeps it at its end.
pub struct StoredResponseFormat {
    form: ResponsesFormat,
    keeping: Option<Keeping>,
    writes: Writes,
}

impl StoredResponseFormat {
    /// The response waits for the `writes`.
    pub fn new(form: ResponsesFormat, keeping: Option<Keeping>, writes: Writes) -> StoredResponseFormat {
        StoredResponseFormat { form: form.stored(keeping.is_some()), keeping, writes }
    }

    pub fn into_response(self) -> ResponsesResponse {
        self.form.into_response()
    }

    /// Writes the response to a probe.
    pub fn finish_probe(&mut self, sink: &mut dyn EventSink) {
        self.form.finish_probe(sink);
        self.keep();
    }

    fn keep(&mut self) {
        if let Some(keeping) = self.keeping.take() {
            self.writes.add(keeping.write(self.form.response().clone()));
        }
    }
}

impl WireFormat for StoredResponseFormat {
    fn start(&mut self, sink: &mut dyn EventSink) {
        self.form.start(sink);
    }

    fn prefilled(&mut self, n_cached: usize) {
        self.form.prefilled(n_cached);
    }

    fn part(&mut self, part: Part, sink: &mut dyn EventSink) {
        self.form.part(part, sink);
    }

    fn finish(&mut self, answer: &Answer, sink: &mut dyn EventSink) {
        self.form.finish(answer, sink);
        self.keep();
    }

    fn fail(&mut self, error: &ErrorBody, sink: &mut dyn EventSink) {
        self.form.fail(error, sink);
    }

    fn keep_alive(&mut self, sink: &mut dyn EventSink) -> bool {
        self.form.keep_alive(sink)
    }
}

/// The items of a response before and of its predecessors.
///
/// # Errors
/// If it is not stored.
pub async fn previous_items(server: &Server, caller: &Caller, id: Option<&str>) -> Result<Vec<Json>, ApiError> {
    let Some(id) = id else { return Ok(Vec::new()) };
    let name = "previous_response_id";
    let of_field = |e: ApiError| ApiError { param: Some(name.into()), ..e };
    let store = server.state_store(name).map_err(of_field)?;
    let Some(stored) = read(store, row_id(caller, id)).await? else {
        let message = format!("{name}: there is no stored response {}; {WHY_NOT}", quoted(id));
        return Err(ApiError::param(name, message).code("previous_response_not_found"));
    };
    offload(usize::MAX, move || stored.context()).await?.ok_or_else(malformed)
}

const WHY_NOT: &str = "it was not stored, has expired, was deleted or made room for others";

fn row_id(caller: &Caller, id: &str) -> RowId {
    RowId { kind: Kind::Response, tenant: Arc::clone(&caller.identity.tenant.name), id: id.into() }
}

fn not_found(id: &str) -> ApiError {
    let message = format!("there is no stored response {}: {WHY_NOT}", quoted(id));
    let error = ApiError::new(StatusCode::NOT_FOUND.as_u16(), INVALID_REQUEST, message);
    ApiError { param: Some("response_id".into()), ..error }.code("response_not_found")
}

fn malformed() -> ApiError {
    ApiError::internal("internal error: a stored response has another format")
}

async fn read(store: &Arc<StateStore>, row: RowId) -> Result<Option<StoredResponse>, ApiError> {
    let Some(bytes) = store.get(row).await.map_err(|e| state_error(&e))? else { return Ok(None) };
    let stored = offload(bytes.len(), move || StoredResponse::decode(&bytes)).await?;
    stored.ok_or_else(malformed).map(Some)
}

async fn of_path(server: &Server, caller: &Caller, id: &str) -> Result<StoredResponse, ApiError> {
    let store = server.state_store("stored responses")?;
    read(store, row_id(caller, id)).await?.ok_or_else(|| not_found(id))
}

/// Retrieve a stored response.
///
/// # Errors
/// If there is none of this ID, the query asks for a stream, or the server stores none.
#[utoipa::path(get, path = "/v1/responses/{response_id}", tag = "OpenAI",
    params(("response_id" = String, Path, description = "ID of the response")), responses(
    (status = 200, description = "Response", body = ResponsesResponse),
    (status = "4XX", description = "No such response", body = ErrorBody),
))]
pub async fn retrieve(
    State(server): State<Arc<Server>>,
    caller: Caller,
    PathParams(id): PathParams<String>,
    QueryParams(query): QueryParams<Vec<(String, String)>>,
) -> Result<Response, HttpError> {
    if query.iter().any(|(name, value)| name == "stream" && value == "true") {
        let message = "stream: events of a response are not stored; expected false";
        return Err(ApiError::unsupported("stream", message).into());
    }
    Ok(raw(&of_path(&server, &caller, &id).await?.into_response()))
}

/// Delete a stored response. Responses that continue it stay as they are.
///
/// # Errors
/// If there is none of this ID, or the server stores none.
#[utoipa::path(delete, path = "/v1/responses/{response_id}", tag = "OpenAI",
    params(("response_id" = String, Path, description = "ID of the response")), responses(
    (status = 200, description = "The response is gone", body = DeletedResponse),
    (status = "4XX", description = "No such response", body = ErrorBody),
))]
pub async fn delete(
    State(server): State<Arc<Server>>,
    caller: Caller,
    PathParams(id): PathParams<String>,
) -> Result<Response, HttpError> {
    let store = server.state_store("stored responses")?;
    if !remove(store, row_id(&caller, &id)).await? {
        return Err(not_found(&id).into());
    }
    Ok(json(StatusCode::OK, &DeletedResponse { id, object: "response", deleted: true }))
}

/// List the items that a stored response was made from, the newest first: its input, after the items of previous responses.
///
/// # Errors
/// If there is no response of this ID, a parameter is wrong, or the server stores none.
#[utoipa::path(get, path = "/v1/responses/{response_id}/input_items", tag = "OpenAI",
    params(("response_id" = String, Path, description = "ID of the response"), PageParams), responses(
    (status = 200, description = "Items; `order` is `desc` by default", body = StoredList),
    (status = "4XX", description = "No such response", body = ErrorBody),
))]
pub async fn input_items(
    State(server): State<Arc<Server>>,
    caller: Caller,
    PathParams(id): PathParams<String>,
    QueryParams(query): QueryParams<Vec<(String, String)>>,
) -> Result<Response, HttpError> {
    let query = PageQuery::newest_first(query)?;
    let _turn = server.lists.take(&caller.identity.tenant.name).await.map_err(ApiError::from)?;
    let items = of_path(&server, &caller, &id).await?.into_input();
    let no_item = || ApiError::param("after", "after: the response has no item of this ID");
    let rest = query.rest(items, |(id, _)| id).ok_or_else(no_item)?;
    Ok(json(StatusCode::OK, &query.list(rest)))
}
