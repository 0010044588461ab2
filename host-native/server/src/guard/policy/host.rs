//! The policy of a server: its file, prompts before they are tokenised, and the hook's HTTP client.

use std::path::Path;
use std::sync::Arc;

use http_body_util::{BodyExt, Limited};
use starling::chat::Json;
use starling_api::error::ApiError;
use starling_api::input::Input;
use starling_host::error::Failure;
use starling_host::tls_provider;

use super::{Call, CallError, Decision, Filter, HookRequest, Policy, PolicyFile, Response, Stage, Verdict};
use crate::config::{Settings, SettingsFile};
use crate::models::instance::ModelInstance;
use crate::observe::metrics::Metrics;
use crate::schedule::offload::offload;

/// Fields of a message that hold no text of its author.
const NAMES: [&str; 7] = ["role", "type", "name", "id", "tool_call_id", "call_id", "status"];

/// What the server does with texts of prompts and answers.
pub struct TextPolicy {
    policy: Policy,
    client: HookClient,
    metrics: Arc<Metrics>,
}

/// What a text belongs to, for the hook.
pub struct Subject {
    pub model: Arc<str>,
    pub tenant: Arc<str>,
    pub request_id: Arc<str>,
}

/// The policy on texts of a request, and what they belong to; `None` where a server has no policy.
pub type PromptCheck = Option<(Arc<TextPolicy>, Arc<Subject>)>;

impl TextPolicy {
    /// The policy of the settings, if there is one.
    ///
    /// # Errors
    /// If its file is invalid.
    pub fn of(settings: &Settings, metrics: &Arc<Metrics>) -> Result<Option<Arc<TextPolicy>>, Failure> {
        let policy = settings.policy_file.as_deref().map(|path| TextPolicy::read(path, metrics));
        Ok(policy.transpose()?.map(Arc::new))
    }

    /// Reads a policy file: TOML, YAML or JSON.
    ///
    /// # Errors
    /// If it cannot be read, or a rule is invalid.
    pub fn read(path: &Path, metrics: &Arc<Metrics>) -> Result<TextPolicy, Failure> {
        let wrong = |e: &dyn std::fmt::Display| Failure::Usage(format!("{}: {e}", path.display()));
        let table = SettingsFile::read(path)?.table;
        let file: PolicyFile = table.try_into().map_err(|e: toml::de::Error| wrong(&e.message()))?;
        let policy = Policy::new(&file).map_err(|e| wrong(&e))?;
        let held = policy.filter(Stage::Answer).max_match();
        tracing::info!("policy: {}; streams hold back at most {held} bytes", path.display());
        Ok(TextPolicy { policy, client: HookClient::new()?, metrics: Arc::clone(metrics) })
    }

    pub fn filter(&self, stage: Stage) -> &Filter {
        self.policy.filter(stage)
    }

    pub fn has_hook(&self, stage: Stage) -> bool {
        self.policy.hook(stage).is_some()
    }

    /// Counts what was done with a text.
    pub fn count(&self, action: &'static str) {
        self.metrics.policy(action);
    }

    /// The hook's decision about a text.
    pub async fn ask(&self, stage: Stage, subject: &Subject, text: &str) -> Decision {
        let Some(hook) = self.policy.hook(stage) else { return Decision::Allow };
        let Subject { model, tenant, request_id } = subject;
        let request = HookRequest { stage, text, model, tenant, request_id };
        let outcome = hook.decide(&self.client, &request).await;
        if let Some(failure) = &outcome.failure {
            tracing::warn!(request_id = &**request_id, "{failure}");
            self.count("hook_failed");
        }
        outcome.decision
    }

    /// Checks the texts of a prompt, and returns them as they are to be used.
    async fn check(self: &Arc<Self>, subject: &Subject, texts: Vec<String>) -> Result<Vec<String>, ApiError> {
        let (policy, size) = (Arc::clone(self), texts.iter().map(String::len).sum());
        let filter =
            move || texts.into_iter().map(|text| policy.filter_text(text)).collect::<Result<Vec<_>, ApiError>>();
        let mut texts = offload(size, filter).await??;
        if self.has_hook(Stage::Prompt) {
            for text in &mut texts {
                match self.ask(Stage::Prompt, subject, text).await {
                    Decision::Allow => {}
                    Decision::Block { reason } => {
                        return Err(self.refused(reason.as_deref().unwrap_or("the policy service")));
                    }
                    Decision::Redact { text: new, .. } => {
                        self.count("prompt_redacted");
                        *text = new;
                    }
                }
            }
        }
        Ok(texts)
    }

    /// Applies the rules to a text of a prompt, and returns it as it is to be used.
    ///
    /// # Errors
    /// If it is blocked.
    pub(super) fn filter_text(&self, text: String) -> Result<String, ApiError> {
        match self.filter(Stage::Prompt).check(&text) {
            Verdict::Unchanged => Ok(text),
            Verdict::Redacted { text, .. } => {
                self.count("prompt_redacted");
                Ok(text)
            }
            Verdict::Blocked { rule } => Err(self.refused(&format!("rule `{rule}`"))),
        }
    }

    /// 400: a prompt is blocked.
    pub(super) fn refused(&self, by: &str) -> ApiError {
        self.count("prompt_blocked");
        ApiError::invalid(format!("the prompt is not allowed on this server: {by}")).code("content_filter")
    }
}

/// Applies the policy to the texts of messages.
///
/// # Errors
/// If one is blocked.
pub async fn apply_to_messages(check: &PromptCheck, messages: &mut [Json]) -> Result<(), ApiError> {
    let Some((policy, subject)) = check else { return Ok(()) };
    let mut places = Vec::new();
    messages.iter_mut().for_each(|message| texts(message, &mut places));
    let found = places.iter_mut().map(|text| std::mem::take(*text)).collect();
    let checked = policy.check(subject, found).await?;
    places.into_iter().zip(checked).for_each(|(place, text)| *place = text);
    Ok(())
}

/// Applies the policy to a text.
///
/// # Errors
/// If it is blocked.
pub async fn apply_to_text(check: &PromptCheck, text: &mut String) -> Result<(), ApiError> {
    let Some((policy, subject)) = check else { return Ok(()) };
    let mut checked = policy.check(subject, vec![std::mem::take(text)]).await?;
    *text = checked.pop().unwrap_or_default();
    Ok(())
}

/// Applies the policy to texts or token IDs. Tokens cannot be changed: they are refused where a text would be.
///
/// # Errors
/// If one is blocked.
pub async fn apply_to_input(check: &PromptCheck, instance: &ModelInstance, input: &mut Input) -> Result<(), ApiError> {
    let Some((policy, subject)) = check else { return Ok(()) };
    let of_tokens = match input {
        Input::Text(text) => return apply_to_text(check, text).await,
        Input::Texts(texts) => {
            *texts = policy.check(subject, std::mem::take(texts)).await?;
            return Ok(());
        }
        Input::Tokens(tokens) => vec![instance.text(tokens)],
        Input::TokenLists(lists) => lists.iter().map(|tokens| instance.text(tokens)).collect(),
    };
    if policy.check(subject, of_tokens.clone()).await? != of_tokens {
        return Err(policy.refused("its tokens have text that would be replaced; send it as text"));
    }
    Ok(())
}

/// The texts in a message. The parser has bounded its depth.
fn texts<'a>(value: &'a mut Json, found: &mut Vec<&'a mut String>) {
    match value {
        Json::Str(text) => found.push(text),
        Json::Array(values) => values.iter_mut().for_each(|value| texts(value, found)),
        Json::Object(fields) => {
            let fields = fields.iter_mut().filter(|(name, _)| !NAMES.contains(&name.as_str()));
            fields.for_each(|(_, value)| texts(value, found));
        }
        _ => {}
    }
}

/// The HTTP client of the hook: proxies of the environment, the roots of the system.
struct HookClient(reqwest::Client);

impl HookClient {
    fn new() -> Result<HookClient, Failure> {
        tls_provider::install();
        let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build();
        Ok(HookClient(client.map_err(|e| Failure::Usage(format!("policy-file: HTTP client: {e}")))?))
    }
}

impl Call for HookClient {
    async fn call(&self, url: &str, body: Vec<u8>, max_response: usize) -> Result<Response, CallError> {
        let transport = |e: &dyn std::fmt::Display| CallError::Transport(e.to_string());
        let request = self.0.post(url).header("content-type", "application/json").body(body);
        let response = request.send().await.map_err(|e| transport(&e))?;
        let status = response.status().as_u16();
        let body = Limited::new(reqwest::Body::from(response), max_response).collect().await;
        let body =
            body.map_err(
                |e| if e.is::<http_body_util::LengthLimitError>() { CallError::TooLarge } else { transport(&e) },
            )?;
        Ok(Response { status, body: body.to_bytes().into() })
    }
}
