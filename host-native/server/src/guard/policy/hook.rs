//! External HTTP hook: a service that allows, blocks or replaces a text.
//!
//! The host sends the request with its HTTP client ([`Call`]); the deadline, the check of the response and the decision
//! after a failure are here. The hook sees whole texts: an answer must be complete before it is sent.

use std::future::Future;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use super::Stage;

/// Limit of the body of a response in bytes.
pub const MAX_HOOK_RESPONSE: usize = 4 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct HookSettings {
    pub url: String,
    /// Time limit of a request with its response, for example `2s`.
    #[serde(deserialize_with = "duration")]
    pub deadline: Duration,
    pub on_failure: OnFailure,
    #[serde(default = "Stage::all")]
    pub on: Vec<Stage>,
}

/// Decision after a failure of the hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFailure {
    /// Allow the text.
    Open,
    /// Block the text.
    Closed,
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text).map_err(|_| {
        serde::de::Error::custom(format!("found {text:?}, expected a duration such as \"2s\" or \"500ms\""))
    })
}

/// Why the settings of the hook were refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HookError {
    #[error("url {found:?}, expected http:// or https:// with a host")]
    Url { found: String },
    #[error("deadline 0, expected more")]
    Deadline,
}

/// Body of a request, in JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HookRequest<'a> {
    pub stage: Stage,
    pub text: &'a str,
    pub model: &'a str,
    pub tenant: &'a str,
    pub request_id: &'a str,
}

/// Body of a response, in JSON. Unknown fields are ignored.
#[derive(Debug, Deserialize)]
struct Reply {
    action: ReplyAction,
    /// Required if the action is `redact`.
    text: Option<String>,
    reason: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ReplyAction {
    Allow,
    Block,
    Redact,
}

/// HTTP client of the host.
pub trait Call {
    /// Sends `body` as `application/json` with POST to `url`. The client stops reading a response after `max_response`
    /// bytes with [`CallError::TooLarge`]. The future is dropped at the deadline.
    fn call(
        &self,
        url: &str,
        body: Vec<u8>,
        max_response: usize,
    ) -> impl Future<Output = Result<Response, CallError>> + Send;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// HTTP status code.
    pub status: u16,
    pub body: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    #[error("response exceeds {MAX_HOOK_RESPONSE} bytes")]
    TooLarge,
    /// Connection, TLS or protocol.
    #[error("{0}")]
    Transport(String),
}

/// Why the hook gave no decision.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("policy hook: no response within {0:?}")]
    Deadline(Duration),
    #[error("policy hook: {0}")]
    Call(#[from] CallError),
    #[error("policy hook: status {found}, expected 200")]
    Status { found: u16 },
    #[error("policy hook: invalid JSON: {0}")]
    Json(String),
    #[error("policy hook: action \"redact\" without \"text\"")]
    NoText,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    Allow,
    Block {
        reason: Option<String>,
    },
    /// Use `text` instead.
    Redact {
        text: String,
        reason: Option<String>,
    },
}

/// Decision about a text; `failure` is for the log if the hook gave none and [`OnFailure`] decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub decision: Decision,
    pub failure: Option<Failure>,
}

#[derive(Debug, Clone)]
pub struct Hook {
    settings: HookSettings,
}

impl Hook {
    /// # Errors
    /// If the URL is not HTTP, or the deadline is 0.
    pub fn new(settings: &HookSettings) -> Result<Hook, HookError> {
        let rest = settings.url.strip_prefix("https://").or_else(|| settings.url.strip_prefix("http://"));
        let is_host = |rest: &str| !rest.is_empty() && !rest.starts_with(['/', '?', '#', ':', '@']);
        if !rest.is_some_and(is_host) || settings.url.contains(char::is_whitespace) {
            return Err(HookError::Url { found: settings.url.clone() });
        }
        if settings.deadline.is_zero() {
            return Err(HookError::Deadline);
        }
        Ok(Hook { settings: settings.clone() })
    }

    #[must_use]
    pub fn is_on(&self, stage: Stage) -> bool {
        self.settings.on.contains(&stage)
    }

    /// Asks the hook about a text. Requires the timers of a tokio runtime.
    pub async fn decide<C: Call>(&self, client: &C, request: &HookRequest<'_>) -> Outcome {
        match self.ask(client, request).await {
            Ok(decision) => Outcome { decision, failure: None },
            Err(failure) => {
                let decision = match self.settings.on_failure {
                    OnFailure::Open => Decision::Allow,
                    OnFailure::Closed => Decision::Block { reason: None },
                };
                Outcome { decision, failure: Some(failure) }
            }
        }
    }

    async fn ask<C: Call>(&self, client: &C, request: &HookRequest<'_>) -> Result<Decision, Failure> {
        let body = serde_json::to_vec(request).map_err(|error| Failure::Json(error.to_string()))?;
        let call = client.call(&self.settings.url, body, MAX_HOOK_RESPONSE);
        let deadline = self.settings.deadline;
        let response = tokio::time::timeout(deadline, call).await.map_err(|_| Failure::Deadline(deadline))??;
        read_decision(&response)
    }
}

fn read_decision(response: &Response) -> Result<Decision, Failure> {
    if response.status != 200 {
        return Err(Failure::Status { found: response.status });
    }
    if response.body.len() > MAX_HOOK_RESPONSE {
        return Err(CallError::TooLarge.into());
    }
    let reply: Reply = serde_json::from_slice(&response.body).map_err(|error| Failure::Json(error.to_string()))?;
    let Reply { action, text, reason } = reply;
    match action {
        ReplyAction::Allow => Ok(Decision::Allow),
        ReplyAction::Block => Ok(Decision::Block { reason }),
        ReplyAction::Redact => Ok(Decision::Redact { text: text.ok_or(Failure::NoText)?, reason }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Answers after `delay` and keeps the request.
    struct Fake {
        delay: Duration,
        response: Result<Response, CallError>,
        sent: Mutex<Vec<u8>>,
    }

    impl Fake {
        fn new(status: u16, body: &str) -> Fake {
            let response = Ok(Response { status, body: body.into() });
            Fake { delay: Duration::ZERO, response, sent: Mutex::default() }
        }
    }

    impl Call for Fake {
        async fn call(&self, url: &str, body: Vec<u8>, max_response: usize) -> Result<Response, CallError> {
            assert_eq!((url, max_response), ("http://hook/check", MAX_HOOK_RESPONSE));
            *self.sent.lock().unwrap() = body;
            tokio::time::sleep(self.delay).await;
            self.response.clone()
        }
    }

    fn settings(on_failure: OnFailure) -> HookSettings {
        let url = "http://hook/check".into();
        HookSettings { url, deadline: Duration::from_secs(2), on_failure, on: vec![Stage::Answer] }
    }

    const REQUEST: HookRequest<'_> =
        HookRequest { stage: Stage::Answer, text: "a \"b\"", model: "m", tenant: "t", request_id: "r" };

    async fn outcome(fake: &Fake, on_failure: OnFailure) -> Outcome {
        Hook::new(&settings(on_failure)).unwrap().decide(fake, &REQUEST).await
    }

    #[tokio::test(start_paused = true)]
    async fn responses_decide() {
        let block = |reason: Option<&str>| Decision::Block { reason: reason.map(Into::into) };
        let redact = |reason: Option<&str>| Decision::Redact { text: "x".into(), reason: reason.map(Into::into) };
        for (body, expected) in [
            (r#"{"action":"allow"}"#, Decision::Allow),
            (r#"{"action":"allow","score":0.1}"#, Decision::Allow),
            (r#"{"action":"block","reason":"no"}"#, block(Some("no"))),
            (r#"{"action":"block"}"#, block(None)),
            (r#"{"action":"redact","text":"x","reason":"y"}"#, redact(Some("y"))),
            (r#"{"action":"redact","text":"x"}"#, redact(None)),
        ] {
            let outcome = outcome(&Fake::new(200, body), OnFailure::Closed).await;
            assert_eq!(outcome, Outcome { decision: expected, failure: None }, "{body}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_request_is_json() {
        let fake = Fake::new(200, r#"{"action":"allow"}"#);
        outcome(&fake, OnFailure::Closed).await;
        let sent = String::from_utf8(fake.sent.lock().unwrap().clone()).unwrap();
        assert_eq!(sent, r#"{"stage":"answer","text":"a \"b\"","model":"m","tenant":"t","request_id":"r"}"#);
    }

    #[tokio::test(start_paused = true)]
    async fn failures_decide_as_set() {
        let late = Fake { delay: Duration::from_millis(2001), ..Fake::new(200, r#"{"action":"allow"}"#) };
        let lost = Fake { response: Err(CallError::Transport("reset".into())), ..Fake::new(200, "") };
        let long = Fake::new(200, &format!(r#"{{"action":"allow","reason":"{}"}}"#, "x".repeat(MAX_HOOK_RESPONSE)));
        let cases = [
            (late, Some(Failure::Deadline(Duration::from_secs(2)))),
            (lost, Some(CallError::Transport("reset".into()).into())),
            (long, Some(CallError::TooLarge.into())),
            (Fake::new(500, r#"{"action":"allow"}"#), Some(Failure::Status { found: 500 })),
            (Fake::new(200, r#"{"action":"redact"}"#), Some(Failure::NoText)),
            (Fake::new(200, r#"{"action":"Allow"}"#), None),
            (Fake::new(200, r#"{"text":"x"}"#), None),
            (Fake::new(200, ""), None),
        ];
        for (fake, expected) in cases {
            let open = outcome(&fake, OnFailure::Open).await;
            let closed = outcome(&fake, OnFailure::Closed).await;
            assert_eq!(open.decision, Decision::Allow);
            assert_eq!(closed.decision, Decision::Block { reason: None });
            assert_eq!(open.failure, closed.failure);
            match expected {
                Some(_) => assert_eq!(closed.failure, expected),
                None => assert!(matches!(closed.failure, Some(Failure::Json(_)))),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_response_within_the_deadline_counts() {
        let fake = Fake { delay: Duration::from_millis(1999), ..Fake::new(200, r#"{"action":"block"}"#) };
        assert_eq!(outcome(&fake, OnFailure::Open).await.failure, None);
    }

    #[test]
    fn settings_are_checked() {
        for url in ["", "hook", "ftp://hook", "http://", "https:///check", "http://a b"] {
            let bad = HookSettings { url: url.into(), ..settings(OnFailure::Open) };
            assert_eq!(Hook::new(&bad).err(), Some(HookError::Url { found: url.into() }));
        }
        let bad = HookSettings { deadline: Duration::ZERO, ..settings(OnFailure::Open) };
        assert_eq!(Hook::new(&bad).err(), Some(HookError::Deadline));
        let hook = Hook::new(&settings(OnFailure::Open)).unwrap();
        assert_eq!([hook.is_on(Stage::Prompt), hook.is_on(Stage::Answer)], [false, true]);
    }
}
