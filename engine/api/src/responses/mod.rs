//! OpenAI's Responses API. Source: <https://platform.openai.com/docs/api-reference/responses>.

mod namespaces;
pub mod request;
pub mod response;
pub mod stored;
