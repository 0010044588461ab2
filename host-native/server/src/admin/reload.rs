//! Reload of settings file and keys: on SIGHUP, on request, or when the file changes.
//!
//! Everything is read and checked before anything changes: a reload happens whole or not at all. Settings that do not change at
//! run time are reported. Models follow the file: new ones are added, others replaced if their source or their file has changed,
//! and those that the file had and no longer has are removed. Models that an administrator has added stay.

use std::sync::{Arc, PoisonError};

use serde::Serialize;
use starling_host::error::Failure;
use utoipa::ToSchema;

use super::settings::set_all;
use crate::config::value::LoadPolicy;
use crate::config::{LIVE, ModelEntry, TABLE};
use crate::guard::auth::Keys;
use crate::guard::connection_memory::MemoryLimits;
use crate::guard::policy::TextPolicy;
use crate::http::tls;
use crate::models::changes::SwapOptions;
use crate::models::entry::Entry;
use crate::models::loading;
use crate::models::pool::ModelPool;
use crate::observe::log::log_filter;
use crate::server::Server;

/// What a reload has changed.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct Reloaded {
    /// Settings that have changed.
    changed: Vec<&'static str>,
    /// Settings that have changed in the file and need a restart.
    needs_restart: Vec<&'static str>,
    /// Models that were added.
    added: Vec<String>,
    /// Models that are being replaced.
    replaced: Vec<String>,
    /// Models that were removed.
    removed: Vec<String>,
}

/// Reads the configuration again and applies it. Models are loaded and replaced in the background.
///
/// # Errors
/// If a file is invalid: nothing has changed.
pub async fn reload(server: &Arc<Server>) -> Result<Reloaded, Failure> {
    let mut new = (server.configure)()?;
    let keys = Keys::new(&new.settings)?;
    let admin_keys =
        new.settings.admin_key_file.as_deref().map(|path| Keys::of_file(path, &new.settings)).transpose()?;
    let tls = tls::acceptor(&new.settings)?;
    let policy = TextPolicy::of(&new.settings, &server.metrics)?;
    log_filter(&new.settings.log_level).map_err(Failure::Usage)?;
    let change = server.settings_change.lock().unwrap_or_else(PoisonError::into_inner);
    let before = server.settings();
    let mut reloaded = Reloaded::default();
    for setting in TABLE {
        if (setting.get)(&before) == (setting.get)(&new.settings) {
            continue;
        }
        let is_live = LIVE.contains(&setting.key);
        (if is_live { &mut reloaded.changed } else { &mut reloaded.needs_restart }).push(setting.key);
        // of settings of models, the others take effect at the next load
        if !is_live && !setting.is_per_model {
            (setting.copy)(&before, &mut new.settings);
        }
    }
    let (mut models, mut swaps, mut gone) = (Vec::new(), Vec::new(), server.pool.entries());
    let mut added = Vec::new();
    for model in std::mem::take(&mut new.models) {
        let name = loading::model_name(&model);
        let known = gone.iter().position(|entry| *entry.name == *name);
        match known.map(|i| gone.remove(i)) {
            Some(entry) => {
                if is_replaced(&entry, &model) {
                    swaps.push((Arc::clone(&entry), model.args.model.clone()));
                }
                models.push((entry, model.settings));
            }
            None => added.push(model),
        }
    }
    gone.retain(|entry| entry.is_configured());
    let known: Vec<Arc<Entry>> = models.iter().map(|(entry, _)| Arc::clone(entry)).collect();
    let settings = models.clone();
    let added =
        server.pool.change_models(added, &gone, &models, || set_all(server, new, settings).map_err(Failure::Usage))?;
    drop(change);
    known.iter().chain(&added).for_each(|entry| entry.set_configured());
    server.memory.set_limits(MemoryLimits::new(&server.settings(), &keys));
    server.keys.set(keys);
    server.policy.set(policy);
    if let (Some(live), Some(keys)) = (&server.admin_keys, admin_keys) {
        live.set(keys);
    }
    if let (Some(live), Some(acceptor)) = (&server.tls, tls) {
        live.set(acceptor);
    }
    for entry in added {
        reloaded.added.push(entry.name.to_string());
        if entry.settings().load != Some(LoadPolicy::OnDemand) {
            load(server, entry);
        }
    }
    for entry in gone {
        reloaded.removed.push(entry.name.to_string());
        server.pool.remove(&entry).await;
    }
    for (entry, source) in swaps {
        reloaded.replaced.push(entry.name.to_string());
        let pool = Arc::clone(&server.pool);
        // the result is in the log and the metrics
        tokio::spawn(async move { pool.swap(&entry, source, SwapOptions::default()).await.map(drop) });
    }
    let Reloaded { changed, needs_restart, added, replaced, removed } = &reloaded;
    tracing::info!(?changed, ?needs_restart, ?added, ?replaced, ?removed, "settings reloaded");
    Ok(reloaded)
}

fn load(server: &Arc<Server>, entry: Arc<Entry>) {
    let pool: Arc<ModelPool> = Arc::clone(&server.pool);
    tokio::spawn(async move { pool.load(&entry).await.map(drop) });
}

/// Whether the source or the file of a loaded model has changed.
fn is_replaced(entry: &Entry, model: &ModelEntry) -> bool {
    let Some(instance) = entry.instance() else { return entry.source() != model.args.model };
    entry.source() != model.args.model || instance.is_outdated()
}
