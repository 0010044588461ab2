//! The owner of one model: what the configuration says of it, and the instance that serves. Loads, unloads and swaps of a
//! model happen one after another. Settings change at any time, and those in effect when a load ends are the new instance's.

use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::config::{ModelEntry, Settings};

/// A loaded model.
pub trait Instance: Send + Sync {
    /// Settings that may change while it serves take effect.
    fn set_settings(&self, settings: Settings);
    /// It serves from now on.
    fn publish(&self);
    /// No new request gets it from now on. Without a reason another is to take its place.
    fn withdraw(&self, reason: Option<&'static str>);
    /// Whether requests are queued or running.
    fn is_busy(&self) -> bool;
}

/// How instances are made.
pub trait Loader<I, E>: Send + Sync {
    /// Loads a model, which serves nobody yet.
    fn load(&self, model: ModelEntry) -> impl Future<Output = Result<Arc<I>, E>> + Send;
    /// Tests an instance that is to take the place of another.
    fn test(&self, new: &Arc<I>) -> impl Future<Output = Result<(), E>> + Send;
    /// Prepares what outlives instances for `new` in place of `old`; without it, of one that was unloaded.
    fn replace(&self, old: Option<Arc<I>>, new: &Arc<I>);
    /// Prepares what outlives instances for `new`, which serves next.
    fn adopt(&self, new: &Arc<I>) -> impl Future<Output = ()> + Send;
    /// Waits until the requests of an instance have finished and its memory is free.
    fn drain(&self, old: Arc<I>) -> impl Future<Output = ()> + Send;
}

/// Whether a model is loaded.
pub enum ModelState<I, E> {
    /// Not loaded; a request may load it.
    Unloaded,
    Loading,
    Loaded(Arc<I>),
    /// Its requests finish before another model takes its place; new ones wait.
    Draining,
    /// The last load failed; a request tries again.
    Failed(E),
}

impl<I, E> ModelState<I, E> {
    /// The state's name in the API.
    pub const fn name(&self) -> &'static str {
        match self {
            ModelState::Unloaded => "unloaded",
            ModelState::Loading => "loading",
            ModelState::Loaded(_) => "loaded",
            ModelState::Draining => "draining",
            ModelState::Failed(_) => "failed",
        }
    }

    pub fn is_changing(&self) -> bool {
        matches!(self, ModelState::Loading | ModelState::Draining)
    }
}

impl<I, E: Clone> Clone for ModelState<I, E> {
    fn clone(&self) -> Self {
        match self {
            ModelState::Unloaded => ModelState::Unloaded,
            ModelState::Loading => ModelState::Loading,
            ModelState::Loaded(instance) => ModelState::Loaded(Arc::clone(instance)),
            ModelState::Draining => ModelState::Draining,
            ModelState::Failed(e) => ModelState::Failed(e.clone()),
        }
    }
}

/// What is to be done with a model; see [`ModelActor::change`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Loads it unless it is loaded.
    Load,
    /// Replaces it by the model of another source, or loads its source again. If anything fails, the old one stays.
    Swap {
        source: Option<PathBuf>,
        /// Finish the running requests and free the old model first.
        drain: bool,
    },
}

/// Why a change was not made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChangeError<E> {
    /// The model was removed.
    Removed,
    Failed(E),
}

/// What the lock protects.
struct Inner {
    entry: Arc<ModelEntry>,
    /// The model has no name any more: nothing loads it.
    is_removed: bool,
}

/// Owner of the entry and the instance of a model. The state is published for those who wait; everything that changes both
/// happens under one lock, which is not held while a load, a test or a drain is awaited.
pub struct ModelActor<I, E> {
    inner: Mutex<Inner>,
    state: watch::Sender<ModelState<I, E>>,
    /// Held during a load, unload or swap.
    turn: tokio::sync::Mutex<()>,
}

impl<I: Instance, E: Clone> ModelActor<I, E> {
    pub fn new(entry: ModelEntry) -> ModelActor<I, E> {
        let inner = Inner { entry: Arc::new(entry), is_removed: false };
        ModelActor {
            inner: Mutex::new(inner),
            state: watch::Sender::new(ModelState::Unloaded),
            turn: tokio::sync::Mutex::default(),
        }
    }

    pub fn state(&self) -> ModelState<I, E> {
        self.state.borrow().clone()
    }

    /// The instance, if the model is loaded.
    pub fn instance(&self) -> Option<Arc<I>> {
        match &*self.state.borrow() {
            ModelState::Loaded(instance) => Some(Arc::clone(instance)),
            _ => None,
        }
    }

    /// Source and settings as they are now.
    pub fn entry(&self) -> Arc<ModelEntry> {
        Arc::clone(&self.lock().entry)
    }

    /// Whether a load, unload or swap is in progress.
    pub fn is_changing(&self) -> bool {
        self.turn.try_lock().is_err()
    }

    /// Changes the settings: those that may change at run time take effect at once, others at the next load.
    pub fn set_settings(&self, settings: Settings) {
        let mut inner = self.lock();
        Arc::make_mut(&mut inner.entry).settings = settings.clone();
        if let Some(instance) = self.instance() {
            instance.set_settings(settings);
        }
    }

    /// Loads or replaces the model.
    ///
    /// # Errors
    /// If the model was removed, does not load, or fails its test.
    pub async fn change(&self, change: Change, loader: &impl Loader<I, E>) -> Result<Arc<I>, ChangeError<E>> {
        let _turn = self.turn.lock().await;
        if self.lock().is_removed {
            return Err(ChangeError::Removed);
        }
        let _settled = Settled(&self.state);
        let result = match change {
            Change::Load => self.load(loader).await,
            Change::Swap { source, drain } => self.swap(source, drain, loader).await,
        };
        result.map_err(ChangeError::Failed)
    }

    async fn load(&self, loader: &impl Loader<I, E>) -> Result<Arc<I>, E> {
        if let Some(instance) = self.instance() {
            return Ok(instance);
        }
        self.state.send_replace(ModelState::Loading);
        self.load_source(ModelEntry::clone(&self.entry()), loader).await
    }

    /// Loads the source of `model`, which is the entry's, and serves it.
    async fn load_source(&self, model: ModelEntry, loader: &impl Loader<I, E>) -> Result<Arc<I>, E> {
        match loader.load(model).await {
            Ok(new) => {
                loader.adopt(&new).await;
                self.serve(None, &new);
                Ok(new)
            }
            Err(e) => {
                self.state.send_replace(ModelState::Failed(e.clone()));
                Err(e)
            }
        }
    }

    async fn swap(&self, source: Option<PathBuf>, drain: bool, loader: &impl Loader<I, E>) -> Result<Arc<I>, E> {
        let mut model = ModelEntry::clone(&self.entry());
        if source.is_some() {
            model.args.model.clone_from(&source);
        }
        let mut old = self.instance();
        let is_drained = drain && old.is_some();
        if let Some(old) = old.take_if(|_| is_drained) {
            self.withdraw(ModelState::Draining, &old, None);
            loader.drain(old).await;
        }
        let new = match loader.load(model).await {
            Ok(new) => loader.test(&new).await.map(|()| new),
            Err(e) => Err(e),
        };
        match new {
            Ok(new) => {
                if !is_drained {
                    loader.replace(old, &new);
                }
                loader.adopt(&new).await;
                self.serve(source, &new);
                Ok(new)
            }
            Err(e) => {
                if is_drained {
                    // the old one again, with the settings of now; if it does not load, the state says why
                    let _ = self.load_source(ModelEntry::clone(&self.entry()), loader).await;
                }
                Err(e)
            }
        }
    }

    /// Unloads the model. Returns its last instance, if it was loaded.
    pub async fn unload(&self, reason: &'static str) -> Option<Arc<I>> {
        let _turn = self.turn.lock().await;
        let old = self.instance()?;
        self.withdraw(ModelState::Unloaded, &old, Some(reason));
        Some(old)
    }

    /// As [`ModelActor::unload`]; nothing loads the model any more.
    pub async fn remove(&self, reason: &'static str) -> Option<Arc<I>> {
        self.lock().is_removed = true;
        self.unload(reason).await
    }

    /// Unloads the model if no request uses it. Returns whether it did.
    pub fn unload_idle(&self, reason: &'static str) -> bool {
        let _inner = self.lock();
        let mut idle = None;
        self.state.send_if_modified(|state| {
            let is_idle = |i: &Arc<I>| Arc::strong_count(i) == 1 && !i.is_busy();
            if matches!(state, ModelState::Loaded(instance) if is_idle(instance)) {
                idle = Some(std::mem::replace(state, ModelState::Unloaded));
            }
            idle.is_some()
        });
        let Some(ModelState::Loaded(old)) = idle else { return false };
        old.withdraw(Some(reason));
        true
    }

    /// Forgets the error of the last load.
    pub fn forget_failure(&self) {
        self.state.send_if_modified(|state| {
            let is_failed = matches!(state, ModelState::Failed(_));
            if is_failed {
                *state = ModelState::Unloaded;
            }
            is_failed
        });
    }

    /// Gives requests an instance, with the settings in effect.
    fn serve(&self, source: Option<PathBuf>, new: &Arc<I>) {
        let mut inner = self.lock();
        if source.is_some() {
            Arc::make_mut(&mut inner.entry).args.model = source;
        }
        new.set_settings(inner.entry.settings.clone());
        new.publish();
        self.state.send_replace(ModelState::Loaded(Arc::clone(new)));
    }

    fn withdraw(&self, state: ModelState<I, E>, old: &I, reason: Option<&'static str>) {
        let _inner = self.lock();
        self.state.send_replace(state);
        old.withdraw(reason);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends a change: if it panicked or was dropped, the model is not loaded.
struct Settled<'a, I, E>(&'a watch::Sender<ModelState<I, E>>);

impl<I, E> Drop for Settled<'_, I, E> {
    fn drop(&mut self) {
        self.0.send_if_modified(|state| {
            let is_changing = state.is_changing();
            if is_changing {
                *state = ModelState::Unloaded;
            }
            is_changing
        });
    }
}

#[cfg(test)]
mod tests;
