//! Options of requests, with the server's settings applied.

use std::borrow::Cow;
use std::sync::Arc;

use starling::model::{Model, RecommendedSampling};
use starling::sampler::SamplingOptions;
use starling_api::openai::options::{self, Limits, Logprobs, Options};
use starling_host::clock::random;

use crate::config::Settings;
use crate::http::error::ApiError;
use crate::models::instance::ModelInstance;
use crate::schedule::offload::offload;
use crate::schedule::scheduler::{Flow, Priority};
use crate::server::Caller;
use crate::state::sessions::MAX_NAME;

/// The session ID of the request, by its body or by a gateway's header.
///
/// # Errors
/// An empty or too long ID.
pub fn session<'a>(options: &'a Options, caller: &'a Caller) -> Result<Option<&'a str>, ApiError> {
    let id = options.session_id.as_deref().or(caller.hints.session.as_deref());
    match id {
        Some(id) if id.is_empty() || id.len() > MAX_NAME => {
            let message = format!("session_id has {} bytes, expected 1 to {MAX_NAME}", id.len());
            Err(ApiError::param("session_id", message))
        }
        id => Ok(id),
    }
}

/// What keeps a client at one version of a model: its session, or its user.
pub fn sticky(options: &Options) -> Option<&str> {
    options.session_id.as_deref().or(options.user.as_deref())
}

/// The slot that a request names.
pub fn slot(options: &Options) -> Option<usize> {
    options.id_slot.and_then(|id| usize::try_from(id).ok())
}

/// Tenant, session and priority for the scheduler.
///
/// # Errors
/// An unknown priority, a bad session ID.
pub fn flow(options: &Options, caller: &Caller) -> Result<Flow, ApiError> {
    let priority = options.priority()?.map(|priority| match priority {
        options::Priority::High => Priority::High,
        options::Priority::Normal => Priority::Normal,
        options::Priority::Low => Priority::Low,
    });
    // without a session, the users of one tenant are scheduled in turn
    Ok(caller.flow(session(options, caller)?.or(options.user.as_deref()), priority))
}

/// The seed of the request, else of the settings, else a random one.
pub fn seed(options: &Options, instance: &ModelInstance) -> u64 {
    // below 2^53: clients that parse numbers as floats get the same seed back
    options.seed.map(|s| s.0).or(instance.settings().seed).unwrap_or_else(|| random() >> 11)
}

/// Whether the seed is that of the request or the settings, and so the same each time.
pub fn is_seeded(options: &Options, instance: &ModelInstance) -> bool {
    options.seed.is_some() || instance.settings().seed.is_some()
}

/// Salt of the prefix cache, by tenant and `cache_salt`.
///
/// # Errors
/// If `cache_salt` is too long.
pub fn salt(options: &Options, instance: &ModelInstance, caller: &Caller) -> Result<u64, ApiError> {
    Ok(instance.salt(&caller.identity.tenant.name, options.check_salt()?))
}

/// Limits of the server on requests.
pub fn limits(instance: &ModelInstance) -> Limits<'_> {
    Limits {
        model: &instance.model,
        engine: instance.engine.as_ref(),
        n_pages: instance.n_pages,
        max_prompt: instance.settings().max_prompt,
        max_tokens: instance.settings().max_tokens,
    }
}

/// Sampling options of requests that give none: the settings, then what the model file recommends.
pub fn defaults(settings: &Settings, model: &Model) -> RecommendedSampling {
    let Settings { temperature, top_k, top_p, min_p, repetition_penalty, .. } = settings;
    let file = &model.recommended;
    RecommendedSampling {
        temperature: temperature.or(file.temperature),
        top_k: top_k.or(file.top_k),
        top_p: top_p.or(file.top_p),
        min_p: min_p.or(file.min_p),
        repeat_penalty: repetition_penalty.or(file.repeat_penalty),
        repeat_last_n: None,
    }
}

/// The options with the defaults for those that the request does not give.
fn with_defaults<'a>(options: &'a Options, defaults: &RecommendedSampling) -> Cow<'a, Options> {
    let mut all = Cow::Borrowed(options);
    if *defaults != RecommendedSampling::default() {
        let all = all.to_mut();
        all.temperature = all.temperature.or(defaults.temperature);
        all.top_k = all.top_k.or(defaults.top_k.map(i64::from));
        all.top_p = all.top_p.or(defaults.top_p);
        all.min_p = all.min_p.or(defaults.min_p);
        all.repetition_penalty = all.repetition_penalty.or(defaults.repeat_penalty);
    }
    all
}

/// The sampling options of a request, computed once for all of its prompts. DRY's sequence breakers are looked up on a
/// blocking thread.
///
/// # Errors
/// An option out of range.
pub async fn sampling(
    options: &Options,
    instance: &Arc<ModelInstance>,
    logprobs: Logprobs,
    seed: u64,
) -> Result<SamplingOptions, ApiError> {
    let options = &with_defaults(options, &defaults(&instance.settings(), &instance.model));
    let mut sampling = options.sampling(logprobs, seed)?;
    if let Some(dry) = &mut sampling.dry {
        let (model, options) = (Arc::clone(&instance.model), options.clone().into_owned());
        dry.breakers = offload(usize::MAX, move || options.dry_breakers(&model.tokenizer)).await?;
    }
    Ok(sampling)
}
