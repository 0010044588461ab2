//! What handlers share, and who a request is from.

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
use super::metrics::{Metrics, Standing};
use super::queue::Queue;
use super::scheduler::{Flow, Priority};
use super::sessions::Sessions;
use super::trace::Exporter;
use super::worker::Pulse;
use crate::structure::Grammars;

/// The server, as handlers see it.
pub struct App {
    /// Settings.
    pub settings: Settings,
    /// The model.
    pub model: Arc<Model>,
    /// Its name for clients.
    pub model_name: String,
    /// SHA-256 of its file.
    pub model_sha256: [u8; 32],
    /// Which model, engine and numbers answer.
    pub fingerprint: String,
    /// How conversations become text.
    pub template: ChatTemplate,
    /// What makes answers follow schemas and grammars.
    pub grammars: Grammars,
    /// Sizes of the engine, as it has them; of models that continue texts.
    pub engine: Option<EngineOptions>,
    /// Pages of keys and values.
    pub n_pages: usize,
    /// Sizes of batches of texts.
    pub embedder: EmbedderOptions,
    /// Instruction set.
    pub cpu: Cpu,
    /// Threads of the engine.
    pub threads: usize,
    /// What waits for the engine.
    pub queue: Arc<Queue>,
    /// How the engine's thread is.
    pub pulse: Arc<Pulse>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Where traces go.
    pub exporter: Exporter,
    /// Conversations.
    pub sessions: Arc<Sessions>,
    /// Who may call.
    pub keys: Keys,
    /// One receipt is replayed at a time.
    pub replay: Arc<tokio::sync::Semaphore>,
    /// When the server started.
    pub start: Instant,
    /// The same, in seconds since 1970.
    pub created: u64,
    /// Set when the end has begun.
    pub draining: AtomicBool,
}

impl App {
    /// Whether new requests are refused because the server ends.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// How things stand, without asking the engine's thread.
    pub fn standing(&self) -> Standing {
        let waiting = self.queue.lock();
        let depth = Priority::ALL.map(|p| waiting.prompts.depth(p));
        let texts = waiting.texts.waiting();
        drop(waiting);
        let (held, running) = (&self.pulse.held, &self.pulse.running);
        Standing {
            depth,
            texts,
            held: held.load(Ordering::Relaxed),
            running: running.load(Ordering::Relaxed),
            sessions: self.sessions.len(),
            kv: self.pulse.kv(),
        }
    }

    /// A salt for the prefix cache: tenants never share pages, and a tenant's salts keep its own apart.
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

/// Seconds since 1970.
pub fn unix_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// A name that nothing else has.
pub fn fresh_name(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random(), random())
}

/// A number that nobody can guess.
pub fn random() -> u64 {
    getrandom::u64().unwrap_or_else(|_| {
        // the system has no entropy: a number that is at least not the same again
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        time.as_nanos() as u64
    })
}

/// Who a request is from; the middleware finds the tenant by the key.
#[derive(Clone)]
pub struct Caller {
    /// Who pays.
    pub tenant: Arc<Tenant>,
    /// Whether it has shown a key.
    pub has_key: bool,
    /// The conversation, by a gateway's header.
    pub session: Option<String>,
    /// Who a gateway says that it is for.
    pub fairness: Option<String>,
    /// How urgent a gateway says that it is.
    pub objective: Option<String>,
    /// When it came.
    pub came: Instant,
}

/// Longest value of a header that names something.
const MAX_NAME: usize = 256;

impl Caller {
    /// Of a request with these headers.
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

    /// Its place among others. A gateway's word on whom a request is for counts where there are no keys; with keys it
    /// only tells conversations of one tenant apart.
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
        caller.ok_or_else(|| ApiError::internal("the request has no caller").into())
    }
}
