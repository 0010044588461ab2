//! Settings: those in effect with their origin, and changes while the server runs.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::models::find;
use crate::config::{Configuration, LIVE, ModelEntry, Settings, TABLE, plain, setting};
use crate::guard::administrator::Administrator;
use crate::guard::auth::Keys;
use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, json};
use crate::models::entry::Entry;
use crate::observe::log::log_filter;
use crate::server::Server;

/// A setting.
#[derive(Debug, Serialize, ToSchema)]
pub struct SettingInfo {
    /// Key in the settings file.
    key: &'static str,
    /// Value in TOML; null if it is unset.
    value: Option<String>,
    /// Where the value comes from: `default`, a file, an environment variable, a flag, or an administrator.
    origin: String,
    /// Whether it may be changed while the server runs.
    live: bool,
}

/// The settings in effect.
#[derive(Debug, Serialize, ToSchema)]
pub struct SettingInfos {
    settings: Vec<SettingInfo>,
}

/// Settings in effect, and where each comes from; keys are not shown
#[utoipa::path(get, path = "/admin/config", tag = "Administration", responses(
    (status = 200, description = "Settings", body = SettingInfos),
))]
pub async fn show(State(server): State<Arc<Server>>) -> Response {
    let (settings, configuration) = (server.settings(), server.pool.configuration());
    let all = TABLE.iter().map(|setting| SettingInfo {
        key: setting.key,
        value: (setting.get)(&settings).filter(|_| setting.key != "api-key"),
        origin: configuration.origins.get(setting.key).cloned().unwrap_or_else(|| "default".into()),
        live: LIVE.contains(&setting.key),
    });
    json(StatusCode::OK, &SettingInfos { settings: all.collect() })
}

/// Changes of settings: `{"queue-high": 300, "models": {"NAME": {"max-tokens": 100}}}`. A setting that models may differ in
/// changes for all models, or for one under `models`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct Changes {
    #[serde(default)]
    #[schema(value_type = Object)]
    models: toml::map::Map<String, toml::Value>,
    #[serde(flatten)]
    #[schema(value_type = Object)]
    server: toml::map::Map<String, toml::Value>,
}

/// Keys that were changed.
#[derive(Debug, Serialize, ToSchema)]
pub struct Changed {
    changed: Vec<String>,
}

/// Change settings that may change while the server runs; all of them, or none if one is invalid
///
/// # Errors
/// The first invalid key or value.
#[utoipa::path(patch, path = "/admin/config", tag = "Administration", request_body = Changes, responses(
    (status = 200, description = "Changed", body = Changed),
    (status = "4XX", description = "A key or value is invalid; nothing has changed", body = ErrorBody),
))]
pub async fn patch(
    State(server): State<Arc<Server>>,
    Extension(administrator): Extension<Administrator>,
    Body(changes): Body<Changes>,
) -> Result<Response, HttpError> {
    let changed = apply(&server, &changes, &administrator);
    let keys: Vec<&str> = changes.server.keys().chain(changes.models.keys()).map(String::as_str).collect();
    let error = changed.as_ref().err().map(|e| e.message.clone());
    administrator.log("change settings", &keys.join(", "), error.as_deref().map_or(Ok(()), Err));
    Ok(json(StatusCode::OK, &Changed { changed: changed? }))
}

fn apply(server: &Server, changes: &Changes, administrator: &Administrator) -> Result<Vec<String>, ApiError> {
    let _change = server.settings_change.lock().unwrap_or_else(PoisonError::into_inner);
    let mut settings = Settings::clone(&server.settings());
    let mut models: Vec<(Arc<Entry>, Settings)> =
        server.pool.entries().into_iter().map(|entry| (Arc::clone(&entry), entry.settings())).collect();
    let mut changed = Vec::new();
    let mut configuration = Configuration::clone(&server.pool.configuration());
    for (name, value) in &changes.server {
        let key = set_live(&mut settings, name, value)?;
        if setting(key).is_some_and(|setting| setting.is_per_model) {
            for (_, model) in &mut models {
                set_live(model, name, value)?;
            }
        }
        configuration.origins.insert(key, format!("administrator {}", administrator.name));
        changed.push(key.to_string());
    }
    for (name, table) in &changes.models {
        let entry = find(server, name)?;
        let table =
            table.as_table().ok_or_else(|| ApiError::param("models", format!("models.{name}: expected a table")))?;
        let model = models.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &entry));
        let Some((_, model)) = model else { continue };
        for (name, value) in table {
            let key = set_live(model, name, value)?;
            if setting(key).is_some_and(|setting| !setting.is_per_model) {
                return Err(invalid(name, "a setting of the server, not of a model"));
            }
            changed.push(format!("{}.{key}", entry.name));
        }
    }
    check(&settings, &models)?;
    configuration.settings = settings;
    set_all(server, configuration, models).map_err(ApiError::invalid)?;
    Ok(changed)
}

fn check(settings: &Settings, models: &[(Arc<Entry>, Settings)]) -> Result<(), ApiError> {
    let at_start = |(entry, settings): &(Arc<Entry>, Settings)| {
        let limits = [
            ("batch-tokens", settings.batch_tokens, entry.batch_capacity),
            ("max-seqs", settings.max_seqs, entry.seqs_capacity),
        ];
        match limits.into_iter().find(|(_, found, most)| found > most) {
            None => Ok(()),
            Some((key, found, most)) => Err(format!("{key}: found {found}, expected at most {most}, as configured")),
        }
    };
    settings.check().and_then(|()| models.iter().try_for_each(|model| model.1.check())).map_err(ApiError::invalid)?;
    models.iter().try_for_each(at_start).map_err(ApiError::invalid)?;
    log_filter(&settings.log_level).map(drop).map_err(ApiError::invalid)
}

/// Makes checked settings take effect: those of the server with its rate limits and log level, and those of models.
///
/// # Errors
/// If the file of keys is invalid; then nothing has changed.
pub fn set_all(
    server: &Server,
    configuration: Configuration,
    models: Vec<(Arc<Entry>, Settings)>,
) -> Result<(), String> {
    let (before, settings) = (server.settings(), configuration.settings.clone());
    let limits = |settings: &Settings| (settings.key_requests, settings.key_tokens);
    if limits(&before) != limits(&settings) {
        server.keys.set(Keys::new(&settings).map_err(|e| e.to_string())?);
    }
    if before.log_level != settings.log_level {
        server.log_filter.set(&settings.log_level)?;
    }
    server.pool.set_settings(settings, models);
    server.pool.set_configuration(configuration);
    Ok(())
}

/// Sets a setting that may change at run time. Returns its key.
fn set_live(settings: &mut Settings, name: &str, value: &toml::Value) -> Result<&'static str, ApiError> {
    let key = name.replace('_', "-");
    let Some(setting) = setting(&key) else {
        let near = LIVE.iter().min_by_key(|known| strsim::levenshtein(known, &key)).copied().unwrap_or_default();
        return Err(invalid(name, &format!("unknown setting; did you mean {near}?")));
    };
    if !LIVE.contains(&setting.key) {
        return Err(invalid(name, "does not change while the server runs; restart it"));
    }
    let text = plain(value).ok_or_else(|| invalid(name, "expected a string, number, boolean or array of them"))?;
    (setting.set)(settings, &text).map_err(|e| invalid(name, &e))?;
    Ok(setting.key)
}

fn invalid(name: &str, what: &str) -> ApiError {
    ApiError::param(name, format!("{name}: {what}")).code("invalid_settings")
}

/// An entry with the settings of a `[models.NAME]` table.
///
/// # Errors
/// The first invalid key or value.
pub fn entry_of(
    configuration: &Configuration,
    name: &str,
    source: PathBuf,
    settings: &toml::Table,
) -> Result<ModelEntry, ApiError> {
    let mut entry = ModelEntry::named(name, source, configuration).map_err(|e| ApiError::param("name", e))?;
    for (key, value) in settings {
        let text = plain(value).ok_or_else(|| invalid(key, "expected a string, number, boolean or array of them"))?;
        entry.set(&key.replace('_', "-"), &text).map_err(|e| invalid(key, &e))?;
    }
    entry.settings.check().map_err(ApiError::invalid)?;
    Ok(entry)
}
