//! Circuit breaker of a model: after repeated faults requests are refused at once for a while, rather than each after its
//! time limit. Then single requests try whether the model answers again.
//!
//! Each tenant has a circuit of its own, and the model has one for all tenants:
//!
//! - A missed deadline opens the circuit of its tenant only: the request may have been too long.
//! - A lost worker counts for each tenant whose requests it had. It opens the circuit of the tenants that had requests in
//!   most of the faults. The circuit of the model opens when no single tenant explains the faults: for each tenant there are
//!   enough of them without its requests.
//!
//! The trial of an open circuit is taken by work that can end it with an answer. Dropping [`Trial`] gives it back.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::config::Settings;

/// When a breaker opens.
#[derive(Debug, Clone, Copy)]
pub struct BreakerLimits {
    /// Faults within `window`; 0: never.
    pub faults: usize,
    pub window: Duration,
    /// Time until the first trial.
    pub open: Duration,
}

/// Maximum number of faults that are kept, the latest, and of open circuits.
const MAX_KEPT: usize = 4096;
/// Maximum number of tenants of one fault.
const MAX_TENANTS: usize = 256;

impl BreakerLimits {
    pub fn new(settings: &Settings) -> BreakerLimits {
        let Settings { breaker_faults: faults, breaker_window: window, breaker_open: open, .. } = *settings;
        BreakerLimits { faults, window, open }
    }
}

#[derive(Debug)]
pub struct Breaker {
    limits: BreakerLimits,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Recent faults, the oldest first.
    faults: VecDeque<Fault>,
    /// Circuits that are not closed.
    circuits: BTreeMap<Scope, Circuit>,
    n_trials: u64,
}

/// Whose requests a circuit refuses: a tenant's, or all (`None`).
type Scope = Option<Arc<str>>;

#[derive(Debug)]
struct Fault {
    at: Instant,
    /// Tenants that may have caused it.
    tenants: Vec<Arc<str>>,
    /// Whether a worker was lost, rather than a deadline missed.
    is_worker: bool,
}

#[derive(Debug, Clone, Copy)]
enum Circuit {
    /// Requests are refused until then.
    Open(Instant),
    /// The request of this number was let through at this time.
    HalfOpen(u64, Instant),
}

/// The right of one request to try a model whose circuit was open.
#[derive(Debug)]
pub struct Trial {
    breaker: Arc<Breaker>,
    number: u64,
}

impl Drop for Trial {
    /// Without an answer or a fault the next request may try.
    fn drop(&mut self) {
        let now = Instant::now();
        for circuit in self.breaker.lock().circuits.values_mut() {
            if matches!(circuit, Circuit::HalfOpen(number, _) if *number == self.number) {
                *circuit = Circuit::Open(now);
            }
        }
    }
}

impl Fault {
    fn involves(&self, tenant: &str) -> bool {
        self.tenants.iter().any(|other| **other == *tenant)
    }
}

impl Circuit {
    /// The time for which requests are refused, if they are.
    fn wait(self, now: Instant, open: Duration) -> Option<Duration> {
        let until = match self {
            Circuit::Open(until) => until,
            // a trial that takes long is followed by another
            Circuit::HalfOpen(_, since) => since + open,
        };
        (now < until).then(|| until - now)
    }
}

impl Breaker {
    pub fn new(limits: BreakerLimits) -> Breaker {
        Breaker { limits, state: Mutex::default() }
    }

    /// Lets a request of a tenant pass that will end with [`Breaker::success`], a fault, or neither. If a circuit was open,
    /// the request is its trial as long as the value lives.
    ///
    /// # Errors
    /// The time after which to try again.
    pub fn admit(self: &Arc<Self>, tenant: &Arc<str>, now: Instant) -> Result<Option<Trial>, Duration> {
        let mut state = self.lock();
        let scopes = [None, Some(Arc::clone(tenant))];
        let found: Vec<_> =
            scopes.into_iter().filter_map(|scope| Some((*state.circuits.get(&scope)?, scope))).collect();
        if let Some(wait) = found.iter().filter_map(|(circuit, _)| circuit.wait(now, self.limits.open)).max() {
            return Err(wait);
        }
        if found.is_empty() {
            return Ok(None);
        }
        state.n_trials += 1;
        let number = state.n_trials;
        for (_, scope) in found {
            state.circuits.insert(scope, Circuit::HalfOpen(number, now));
        }
        Ok(Some(Trial { breaker: Arc::clone(self), number }))
    }

    /// Whether the circuit of all tenants is closed, or open for so long that a request may try. Takes no trial.
    ///
    /// # Errors
    /// The time after which to try again.
    #[cfg(test)]
    pub fn check(&self, now: Instant) -> Result<(), Duration> {
        let circuit = self.lock().circuits.get(&None).copied();
        circuit.and_then(|circuit| circuit.wait(now, self.limits.open)).map_or(Ok(()), Err)
    }

    /// Notes a request of a tenant that missed its deadline.
    pub fn deadline_missed(&self, tenant: &Arc<str>, now: Instant) {
        self.fault(vec![Arc::clone(tenant)], false, now);
    }

    /// Notes a fault of the model, such as a lost worker, with the tenants whose requests it had.
    pub fn model_fault(&self, tenants: Vec<Arc<str>>, now: Instant) {
        self.fault(tenants, true, now);
    }

    fn fault(&self, mut tenants: Vec<Arc<str>>, is_worker: bool, now: Instant) {
        if self.limits.faults == 0 {
            return;
        }
        tenants.sort();
        tenants.dedup();
        tenants.truncate(MAX_TENANTS);
        let mut state = self.lock();
        let window = self.limits.window;
        state.faults.retain(|fault| now.saturating_duration_since(fault.at) <= window);
        if state.faults.len() == MAX_KEPT {
            state.faults.pop_front();
        }
        state.faults.push_back(Fault { at: now, tenants: tenants.clone(), is_worker });
        let mut opens: Vec<Scope> = state.to_blame(&tenants, is_worker, self.limits.faults);
        if is_worker && state.is_models(self.limits.faults) {
            opens.push(None);
        }
        let scopes = tenants.into_iter().map(Some).chain(is_worker.then_some(None));
        let has_failed = |scope: &Scope| match state.circuits.get(scope) {
            Some(Circuit::HalfOpen(..)) => true,
            Some(Circuit::Open(until)) => *until <= now,
            None => false,
        };
        opens.extend(scopes.filter(has_failed));
        for scope in opens {
            state.open(scope, now, self.limits.open);
        }
    }

    /// Notes a complete answer to a request of a tenant.
    pub fn success(&self, tenant: &Arc<str>) {
        let mut state = self.lock();
        if state.circuits.is_empty() {
            return;
        }
        let is_half_open =
            |scope: &Scope, state: &State| matches!(state.circuits.get(scope), Some(Circuit::HalfOpen(..)));
        if is_half_open(&None, &state) {
            state.circuits.remove(&None);
            state.faults.retain(|fault| !fault.is_worker);
        }
        let scope = Some(Arc::clone(tenant));
        if is_half_open(&scope, &state) {
            state.circuits.remove(&scope);
            state.faults.retain(|fault| !fault.involves(tenant));
        }
    }

    /// `closed`, `open` or `half-open`; if circuits differ, the worst.
    pub fn name(&self) -> &'static str {
        let state = self.lock();
        let is_open = |circuit: &Circuit| matches!(circuit, Circuit::Open(_));
        match state.circuits.is_empty() {
            true => "closed",
            false if state.circuits.values().any(is_open) => "open",
            false => "half-open",
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Those of a fault's tenants with `limit` faults. Of lost workers only the tenants are to blame that had requests in
    /// most of them: the others may have been their neighbours.
    fn to_blame(&self, tenants: &[Arc<str>], is_worker: bool, limit: usize) -> Vec<Scope> {
        let count = |tenant: &str, is_worker: bool| {
            self.faults.iter().filter(|fault| fault.is_worker == is_worker && fault.involves(tenant)).count()
        };
        let most = self.worker_faults().values().copied().max().unwrap_or(0);
        let is_to_blame = |tenant: &&Arc<str>| {
            let n_workers = count(tenant, true);
            (!is_worker || n_workers == most) && n_workers + count(tenant, false) >= limit
        };
        tenants.iter().filter(is_to_blame).map(|tenant| Some(Arc::clone(tenant))).collect()
    }

    /// Lost workers of each tenant.
    fn worker_faults(&self) -> BTreeMap<&str, usize> {
        let mut counts = BTreeMap::new();
        for tenant in self.faults.iter().filter(|fault| fault.is_worker).flat_map(|fault| &fault.tenants) {
            *counts.entry(&**tenant).or_default() += 1;
        }
        counts
    }

    /// Whether no single tenant explains the lost workers: without any one of them there are `limit`.
    fn is_models(&self, limit: usize) -> bool {
        let n = self.faults.iter().filter(|fault| fault.is_worker).count();
        self.worker_faults().values().all(|of_tenant| n - of_tenant >= limit) && n >= limit
    }

    fn open(&mut self, scope: Scope, now: Instant, open: Duration) {
        if self.circuits.len() >= MAX_KEPT && !self.circuits.contains_key(&scope) {
            return;
        }
        let circuit = self.circuits.entry(scope).or_insert(Circuit::Open(now));
        // requests that were let in before add no time
        if circuit.wait(now, open).is_none() || matches!(circuit, Circuit::HalfOpen(..)) {
            *circuit = Circuit::Open(now + open);
        }
    }
}

#[cfg(test)]
mod tests;
