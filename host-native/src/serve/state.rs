//! State that all handlers share, and the caller of a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::request::Parts;
use sha2::{Digest, Sha256};
use starling::chat::ChatTemplate;
use starling::embed::EmbedderOptions;
use starling::engine::EngineOptions;
use starling::kernels::Cpu;
use starling::model::Model;

use super::api::error::{ApiError, HttpError};
use super::auth::{Keys, Tenant};
use super::config::Settings;
use super::metrics::{Metrics, Snapshot};
use super::queue::Queue;
use super::scheduler::{Flow, Priority};
use super::sessions::Sessions;
use super::trace::Exporter;
use super::worker::WorkerStatus;
use crate::structure::Grammars;

/// State that all handlers share.
pub struct App {
    pub settings: Settings,
    pub model: Arc<Model>,
    /// Model name in the API.
    pub model_name: String,
    /// SHA-256 of the model file.
    pub model_sha256: [u8; 32],
    /// OpenAI's `system_fingerprint`.
    pub fingerprint: String,
    pub template: ChatTemplate,
    pub grammars: Grammars,
    /// `None` for encoders, which only embed.
    pub engine: Option<EngineOptions>,
    /// KV pages.
    pub n_pages: usize,
    pub embedder: EmbedderOptions,
    pub cpu: Cpu,
    /// Compute threads.
    pub threads: usize,
    pub queue: Arc<Queue>,
    pub worker: Arc<WorkerStatus>,
    pub metrics: Arc<Metrics>,
    pub exporter: Exporter,
    pub sessions: Arc<Sessions>,
    pub keys: Keys,
    /// Receipts are replayed one at a time.
    pub replay: Arc<tokio::sync::Semaphore>,
    pub start: Instant,
    /// Start of the server in Unix time.
    pub created: u64,
    /// Set when the shutdown begins.
    pub draining: AtomicBool,
}

impl App {
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Values of the gauges. Does not wait for the engine thread.
    pub fn snapshot(&self) -> Snapshot {
        let waiting = self.queue.lock();
        let depth = Priority::ALL.map(|p| waiting.prompts.depth(p));
        let (held, texts) = (waiting.prompts.held(), waiting.texts.waiting());
        drop(waiting);
        Snapshot {
            depth,
            texts,
            held,
            running: self.worker.running.load(Ordering::Relaxed),
            sessions: self.sessions.len(),
            kv: self.worker.kv(),
        }
    }

    /// Salt of the prefix cache: a hash of tenant and `cache_salt`, so that tenants never share pages.
    pub fn salt(&self, tenant: &str, salt: Option<&str>) -> u64 {
        let mut hash = Sha256::new();
        hash.update((tenant.len() as u64).to_le_bytes());
        hash.update(tenant);
        if let Some(salt) = salt {
            hash.update(salt);
        }
        let digest: [u8; 32] = hash.finalize().into();
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        u64::from_le_bytes(first)
    }
}

/// Unix time in seconds.
pub fn unix_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// A random id of 128 bits with a prefix.
pub fn fresh_name(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random(), random())
}

/// A random number from the system's entropy; from the clock if it has none.
pub fn random() -> u64 {
    getrandom::u64().unwrap_or_else(|_| {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        time.as_nanos() as u64
    })
}

/// Sender of a request; the middleware adds it to the request's extensions.
#[derive(Clone)]
pub struct Caller {
    pub tenant: Arc<Tenant>,
    /// Whether the request was authenticated by an API key.
    pub has_key: bool,
    /// Header `x-session-id`.
    pub session: Option<String>,
    /// Header `x-gateway-inference-fairness-id` (Gateway API Inference Extension).
    pub fairness: Option<String>,
    /// Header `x-gateway-inference-objective`.
    pub objective: Option<String>,
    /// Time of arrival.
    pub came: Instant,
}

/// Maximum length of these headers; longer ones are ignored.
const MAX_NAME: usize = 256;

impl Caller {
    pub fn new(tenant: Arc<Tenant>, has_key: bool, headers: &HeaderMap) -> Caller {
        let text = |name: &str| {
            let value = headers.get(name)?.to_str().ok()?;
            (!value.is_empty() && value.len() <= MAX_NAME).then(|| value.to_string())
        };
        Caller {
            tenant,
            has_key,
            session: text("x-session-id"),
            fairness: text("x-gateway-inference-fairness-id"),
            objective: text("x-gateway-inference-objective"),
            came: Instant::now(),
        }
    }

    /// The flow of a request. Without API keys the fairness id is the tenant; with keys, which a client cannot choose, it
    /// only separates sessions of the key's tenant.
    pub fn flow(&self, session: Option<&str>, priority: Option<Priority>) -> Flow {
        let fairness = self.fairness.as_deref();
        let tenant = match fairness.filter(|_| !self.has_key) {
            Some(name) => name.into(),
            None => Arc::clone(&self.tenant.name),
        };
        let objective = || match self.objective.as_deref() {
            Some("high" | "critical") => Priority::High,
            Some("low" | "sheddable" | "batch") => Priority::Low,
            _ => Priority::Normal,
        };
        let session = session.or(self.session.as_deref()).or(fairness.filter(|_| self.has_key)).map(Into::into);
        Flow { tenant, share: self.tenant.share, session, priority: priority.unwrap_or_else(objective) }
    }
}

impl FromRequestParts<Arc<App>> for Caller {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, HttpError> {
        let caller = parts.extensions.get::<Caller>().cloned();
        caller.ok_or_else(|| ApiError::internal("internal error: the middleware set no caller").into())
    }
}
