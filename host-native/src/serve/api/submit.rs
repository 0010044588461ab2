//! From checked requests to the engine's queue.

use std::sync::Arc;
use std::time::Duration;

use starling::engine::Request;

use super::super::models::instance::ModelInstance;
use super::super::pressure::MAX_LEVEL;
pub use super::super::queue::Updates;
use super::super::queue::{Deadlines, Job, Progress, SequenceGroup, updates};
use super::super::scheduler::{Flow, Priority};
use super::super::state::Caller;
use super::super::trace::{Stages, Trace};
use super::error::{ApiError, request_id};

/// `Retry-After` under memory pressure.
const PRESSURE_RETRY: Duration = Duration::from_secs(10);

/// Puts `n` answers to each of `requests` into the queue, all or none: those to the first come first. `partial` answers end
/// with what they have at the time limit.
///
/// # Errors
/// If a limit is reached, or the server ends.
pub fn submit(
    instance: &ModelInstance,
    caller: &Caller,
    flow: &Flow,
    mut requests: Vec<Request>,
    n: usize,
    partial: bool,
) -> Result<Updates, ApiError> {
    let trace = Trace::current();
    if let Some(session) = &flow.session {
        trace.record("session", session);
    }
    if instance.pressure.level() >= MAX_LEVEL && flow.priority != Priority::High {
        instance.metrics.rejected("memory_pressure");
        let error =
            ApiError::unavailable("memory is short: only requests of high priority are accepted; try again later");
        return Err(ApiError { retry: Some(PRESSURE_RETRY), ..error }.code("memory_pressure"));
    }
    let settings = instance.settings();
    for request in &mut requests {
        request.speculation.max = settings.draft_max;
        request.speculation.min_acceptance = settings.draft_min_acceptance;
    }
    let max_tokens = |r: &Request| r.max_tokens.unwrap_or(1);
    let each = requests.iter().map(max_tokens).max().unwrap_or(1);
    let tokens: usize = requests.iter().map(|r| (r.tokens.len() + max_tokens(r)) * n).sum();
    let count = requests.len() * n;
    check_count(instance, count)?;
    caller
        .tenant
        .count_tokens(tokens, instance.settings().key_tokens)
        .inspect_err(|_| instance.metrics.rejected("key_tokens"))?;
    caller.usage.add_prompt(requests.iter().map(|request| request.tokens.len()).sum());
    let (to, mut updates) = updates(count, each, Arc::clone(&caller.usage));
    let (queue, total) = (instance.settings().queue_timeout, instance.settings().request_timeout);
    let times = Deadlines { arrival: caller.arrival, queue, total, partial };
    if let [request] = &requests[..]
        && n == 1
    {
        let slot = caller.slot.get().copied();
        updates.hold_slot(instance.slots.begin(slot, &caller.tenant.name, &request.tokens, request.cache_salt));
    }
    let request_id: Arc<str> = request_id().unwrap_or_default().into();
    let mut jobs = Vec::with_capacity(count);
    for (i, request) in requests.into_iter().enumerate() {
        let group = Arc::new(SequenceGroup::new(request));
        for sequence in 0..n {
            let (group, to, trace) = (Arc::clone(&group), to.clone(), trace.clone());
            let (index, stages, sequence) = (i * n + sequence, Stages::new(), sequence as u64);
            let (progress, request_id) = (Progress::default(), Arc::clone(&request_id));
            let (refused, is_looked_up) = (None, false);
            jobs.push(Job {
                group,
                sequence,
                refused,
                is_looked_up,
                progress,
                request_id,
                index,
                to,
                times,
                trace,
                stages,
            });
        }
    }
    let ticket = instance.queue.generate(flow, tokens.div_ceil(count.max(1)), times.deadline(), jobs);
    updates.hold(ticket.inspect_err(|closed| instance.metrics.rejected(closed.name()))?);
    Ok(updates)
}

/// Checks the number of answers of one HTTP request, before work is done for each.
///
/// # Errors
/// If there are more than ever wait.
pub fn check_count(instance: &ModelInstance, count: usize) -> Result<(), ApiError> {
    let most = instance.settings().queue_high;
    if count > most {
        return Err(ApiError::param("n", format!("{count} answers at once, this server takes at most {most}")));
    }
    Ok(())
}
