//! From checked requests to the engine's queue.

use std::sync::Arc;

use starling::engine::Request;

pub use super::super::queue::Updates;
use super::super::queue::{Job, SequenceGroup, Times, updates};
use super::super::scheduler::Flow;
use super::super::state::{App, Caller};
use super::super::trace::{Stages, Trace};
use super::error::ApiError;

/// Puts `n` answers to each of `requests` into the queue, all or none: those to the first come first.
///
/// # Errors
/// If a limit is reached, or the server ends.
pub fn submit(app: &App, caller: &Caller, flow: &Flow, requests: Vec<Request>, n: usize) -> Result<Updates, ApiError> {
    let trace = Trace::current();
    if let Some(session) = &flow.session {
        trace.record("session", session);
    }
    let max_tokens = |r: &Request| r.max_tokens.unwrap_or(1);
    let each = requests.iter().map(max_tokens).max().unwrap_or(1);
    let tokens: usize = requests.iter().map(|r| (r.tokens.len() + max_tokens(r)) * n).sum();
    let count = requests.len() * n;
    check_count(app, count)?;
    caller.tenant.count_tokens(tokens, app.settings.key_tokens).inspect_err(|_| app.metrics.rejected("key_tokens"))?;
    let (to, mut updates) = updates(count, each);
    let (queue, total) = (app.settings.queue_timeout, app.settings.request_timeout);
    let times = Times { came: caller.came, queue, total };
    let mut jobs = Vec::with_capacity(count);
    for (i, request) in requests.into_iter().enumerate() {
        let group = Arc::new(SequenceGroup::new(request));
        for sequence in 0..n {
            let (group, to, trace) = (Arc::clone(&group), to.clone(), trace.clone());
            let (index, stages, sequence) = (i * n + sequence, Stages::new(), sequence as u64);
            jobs.push(Job { group, sequence, refused: None, index, to, times, trace, stages });
        }
    }
    let ticket = app.queue.generate(flow, tokens.div_ceil(count.max(1)), times.deadline(), jobs);
    updates.hold(ticket.inspect_err(|closed| app.metrics.rejected(closed.name()))?);
    Ok(updates)
}

/// Checks the number of answers of one HTTP request, before work is done for each.
///
/// # Errors
/// If there are more than ever wait.
pub fn check_count(app: &App, count: usize) -> Result<(), ApiError> {
    let most = app.settings.queue_high;
    if count > most {
        return Err(ApiError::param("n", format!("{count} answers at once, this server takes at most {most}")));
    }
    Ok(())
}
