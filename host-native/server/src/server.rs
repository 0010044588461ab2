//! State that all handlers share, and the caller of a request.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use axum::http::HeaderMap;
use starling_api::error::ApiError;
use starling_host::clock::{random, random_id};
use starling_host::error::Failure;
use tokio_rustls::TlsAcceptor;

use crate::config::{ANYONE, Configuration};
use crate::config::{Live, Settings};
use crate::guard::administrator::Administrator;
use crate::guard::audit::AuditTrail;
use crate::guard::auth::{Client, Keys, Tenant};
use crate::guard::connection_memory::{ConnectionMemory, HeldMemory};
use crate::guard::policy::{PromptCheck, Subject, TextPolicy};
use crate::guard::rights::Rights;
use crate::guard::signature::Verifier;
use crate::models::instance::ModelInstance;
use crate::models::pool::ModelPool;
use crate::observe::failures::SharedFailures;
use crate::observe::log::LogFilter;
use crate::observe::metrics::Metrics;
use crate::observe::model_metrics::Snapshot;
use crate::observe::request_id::request_id;
use crate::observe::trace::Exporter;
use crate::observe::usage::Usage;
use crate::schedule::compile_slots::CompileSlots;
use crate::schedule::fair_turns::FairTurns;
use crate::schedule::scheduler::{Flow, Priority};
use crate::state::reuse::{Answers, Embeddings, Found, KeptResponses, Reuse};

/// Reads flags, environment and settings file.
pub type Configure = Box<dyn Fn() -> Result<Configuration, Failure> + Send + Sync>;

/// State that all handlers share.
pub struct Server {
    pub pool: Arc<ModelPool>,
    pub metrics: Arc<Metrics>,
    pub exporter: Exporter,
    pub keys: Live<Keys>,
    /// `None`: connections are not encrypted.
    pub tls: Option<Arc<Live<TlsAcceptor>>>,
    /// Keys of administrators; `None`: there is no admin interface.
    pub admin_keys: Option<Live<Keys>>,
    /// The policy on texts of prompts and answers.
    pub policy: Live<Option<Arc<TextPolicy>>>,
    /// Answers and embeddings that are used again.
    pub answers: Arc<Answers>,
    pub embeddings: Embeddings,
    /// Responses that outlive their connection.
    pub kept: KeptResponses,
    /// Lists of stored answers.
    pub lists: Arc<FairTurns>,
    /// Memory that all connections hold.
    pub memory: Arc<ConnectionMemory>,
    /// For output constraints.
    pub compile_slots: CompileSlots,
    /// Verifies signed requests.
    pub verifier: Verifier,
    /// Who did what; `None`: it is not recorded.
    pub audit: Option<Arc<AuditTrail>>,
    pub log_filter: LogFilter,
    pub failures: SharedFailures,
    /// Held from the look at the settings until they are changed.
    pub settings_change: Mutex<()>,
    pub start: Instant,
    /// Reads flags, environment and settings file again.
    pub configure: Configure,
    /// The settings file, if there is one.
    pub config_file: Option<PathBuf>,
    /// Names this process to an orchestrator and in the log.
    pub worker_id: Arc<str>,
    /// Start of the server in Unix time.
    pub created: u64,
    /// Set when the shutdown begins.
    pub shutting_down: AtomicBool,
    /// Set while an administrator has drained the server.
    pub drained: AtomicBool,
}

impl Server {
    pub fn is_draining(&self) -> bool {
        self.shutting_down.load(Ordering::Acquire) || self.drained.load(Ordering::Acquire)
    }

    /// The settings in effect.
    pub fn settings(&self) -> Arc<Settings> {
        self.pool.settings()
    }

    /// An administrator.
    pub fn administrator(&self, name: Arc<str>) -> Administrator {
        Administrator::new(name, self.audit.clone())
    }

    /// Whoever changes models by the paths of Ollama and llama-server: the administrator of the key, or a client on this machine.
    pub fn administrator_of(&self, caller: &Caller) -> Administrator {
        let name = &caller.identity.tenant.name;
        self.administrator(if **name == *ANYONE { "(local)".into() } else { Arc::clone(name) })
    }

    /// A signal, or a change of the settings file.
    pub fn system(&self) -> Administrator {
        self.administrator("(system)".into())
    }

    /// The model of a request: that of the name, or the default one. Among versions of the name, requests of the same
    /// `sticky` value (a session or user), or else session header, have the same one.
    ///
    /// # Errors
    /// If there is no such model, or it is not loaded in time.
    pub async fn model(
        &self,
        name: Option<&str>,
        sticky: Option<&str>,
        caller: &Caller,
    ) -> Result<Arc<ModelInstance>, ApiError> {
        let key = match sticky.or(caller.hints.session.as_deref()).or(caller.hints.fairness.as_deref()) {
            Some(key) => format!("{} {key}", caller.identity.tenant.name),
            None => random().to_string(),
        };
        // whoever may not load models can only forgo what the setting allows
        let autoload = caller.hints.autoload.filter(|loads| !loads || caller.identity.rights >= Rights::Load);
        let acquire = self.pool.acquire(name, &key, autoload);
        let instance = caller.within_time(acquire).await?.map_err(|e| {
            self.metrics.rejected(e.code());
            ApiError::from(e)
        })?;
        let _ = caller.notes.model.set(Arc::clone(&instance.name));
        Ok(instance)
    }

    /// Load in a response header (ORCA), in the requested format: `TEXT` or `JSON`; `None` for others.
    pub fn orca(&self, format: &str) -> Option<String> {
        let snapshot = self.snapshot();
        let (usage, waiting) = (snapshot.kv_usage(), snapshot.depth.iter().sum::<usize>());
        match format.to_ascii_uppercase().as_str() {
            "TEXT" => Some(format!(
                "TEXT named_metrics.kv_cache_usage_perc={usage}, named_metrics.num_requests_waiting={waiting}"
            )),
            "JSON" => Some(format!(
                "JSON {{\"named_metrics\":{{\"kv_cache_usage_perc\":{usage},\"num_requests_waiting\":{waiting}}}}}"
            )),
            _ => None,
        }
    }

    /// Sum of the gauges of all models.
    pub fn snapshot(&self) -> Snapshot {
        let instances = self.pool.entries().into_iter().filter_map(|entry| entry.instance());
        instances.map(|instance| instance.snapshot()).fold(Snapshot::default(), Snapshot::plus)
    }
}

/// Who sends a request, and what it may do.
#[derive(Clone)]
pub struct Identity {
    pub tenant: Arc<Tenant>,
    /// Names the credential in the audit log.
    pub key_id: Arc<str>,
    /// Whether the request was authenticated by an API key.
    pub has_key: bool,
    /// What the sender may do to models.
    pub rights: Rights,
    /// The highest priority of its requests across tenants.
    pub max_priority: Priority,
}

/// What headers and query of a request ask for.
#[derive(Clone)]
pub struct Hints {
    /// Header `x-session-id`.
    pub session: Option<String>,
    /// Header `x-gateway-inference-fairness-id` (Gateway API Inference Extension).
    pub fairness: Option<String>,
    /// Header `x-gateway-inference-objective`.
    pub objective: Option<String>,
    /// Query parameter `autoload` (llama-server): whether the request may load its model.
    pub autoload: Option<bool>,
    /// What the client allows of answers that are used again.
    pub reuses: Reuse,
}

/// What is found out about a request while it is answered. The response carries it to the middleware, for its headers.
#[derive(Debug, Default)]
pub struct ResponseNotes {
    /// The model that answers.
    pub model: OnceLock<Arc<str>>,
    /// Unknown fields of the request.
    pub ignored: OnceLock<String>,
    /// What of the request's schemas is not enforced.
    pub unenforced: OnceLock<String>,
    /// The answer that was found.
    pub found: OnceLock<Found>,
}

/// Sender of a request and what belongs to the request; the middleware adds it to the request's extensions.
#[derive(Clone)]
pub struct Caller {
    pub identity: Identity,
    pub hints: Hints,
    /// Time of arrival.
    pub arrival: Instant,
    /// Time limit of the request itself.
    pub time_limit: Arc<Mutex<Option<Duration>>>,
    pub usage: Arc<Usage>,
    /// Memory that the request and its response hold.
    pub memory: Arc<HeldMemory>,
    /// The policy on texts, if the server has one.
    pub policy: Option<Arc<TextPolicy>>,
    /// ID of a stream that the client may resume.
    pub stream_id: Option<Arc<str>>,
    pub notes: Arc<ResponseNotes>,
}

/// Maximum length of these headers; longer ones are ignored.
const MAX_NAME: usize = 256;

impl Caller {
    pub fn new(
        client: Client,
        server: &Server,
        address: Option<IpAddr>,
        headers: &HeaderMap,
        query: Option<&str>,
    ) -> Caller {
        let autoload = query.unwrap_or_default().split('&').find_map(|pair| pair.strip_prefix("autoload="));
        let text = |name: &str| {
            let value = headers.get(name)?.to_str().ok()?;
            (!value.is_empty() && value.len() <= MAX_NAME).then(|| value.to_string())
        };
        let memory = Arc::new(server.memory.part(Some(Arc::clone(&client.tenant.name)), address));
        Caller {
            identity: Identity {
                tenant: client.tenant,
                key_id: client.id,
                has_key: server.keys.get().are_needed(),
                rights: Rights::default(),
                max_priority: Priority::Normal,
            },
            hints: Hints {
                session: text("x-session-id"),
                fairness: text("x-gateway-inference-fairness-id"),
                objective: text("x-gateway-inference-objective"),
                autoload: autoload.map(|value| matches!(value, "1" | "true")),
                reuses: Reuse::of(headers),
            },
            arrival: Instant::now(),
            time_limit: Arc::default(),
            usage: Arc::default(),
            memory,
            policy: (*server.policy.get()).clone(),
            stream_id: (!server.settings().resume_window.is_zero()).then(|| random_id("").into()),
            notes: Arc::default(),
        }
    }

    /// The policy on texts of the request, if the server has one.
    pub fn prompt_check(&self, instance: &ModelInstance) -> PromptCheck {
        self.policy.clone().map(|policy| (policy, self.subject(instance)))
    }

    /// What texts of the request belong to, for the policy.
    pub fn subject(&self, instance: &ModelInstance) -> Arc<Subject> {
        Arc::new(Subject {
            model: Arc::clone(&instance.name),
            tenant: Arc::clone(&self.identity.tenant.name),
            request_id: request_id().unwrap_or_default().into(),
        })
    }

    /// The flow of a request: its priority among those of its tenant is free, across tenants it is at most that of the key.
    /// Without API keys the fairness id is the tenant; with keys, which a client cannot choose, it
    /// only separates sessions of the key's tenant.
    pub fn flow(&self, session: Option<&str>, priority: Option<Priority>) -> Flow {
        let fairness = self.hints.fairness.as_deref();
        let tenant = match fairness.filter(|_| !self.identity.has_key) {
            Some(name) => name.into(),
            None => Arc::clone(&self.identity.tenant.name),
        };
        let objective = || match self.hints.objective.as_deref() {
            Some("high" | "critical") => Priority::High,
            Some("low" | "sheddable" | "batch") => Priority::Low,
            _ => Priority::Normal,
        };
        let session =
            session.or(self.hints.session.as_deref()).or(fairness.filter(|_| self.identity.has_key)).map(Into::into);
        let rank = priority.unwrap_or_else(objective);
        // higher priorities are smaller
        Flow {
            tenant,
            share: self.identity.tenant.share,
            session,
            priority: rank.max(self.identity.max_priority),
            rank,
        }
    }
}
