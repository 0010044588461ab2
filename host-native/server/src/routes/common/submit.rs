//! From checked requests to the engine's queue.

use std::sync::Arc;
use std::time::Duration;

use starling::engine::Request;

pub use super::updates::Updates;
use crate::guard::policy::{AnswerFilters, TextPolicy};
use crate::http::error::{ApiError, request_id};
use crate::models::instance::ModelInstance;
use crate::models::pressure::MAX_LEVEL;
use crate::observe::trace::{Stages, Trace};
use crate::observe::usage::Usage;
use crate::schedule::queue::{EngineUpdates, Job, Progress, SequenceGroup, updates};
use crate::schedule::scheduler::{Flow, Priority};
use crate::server::{Caller, Server};
use crate::state::reuse::{AnswerReader, Answers, Determined, Found, Reuse, ReuseKey};

/// `Retry-After` under memory pressure.
const PRESSURE_RETRY: Duration = Duration::from_secs(10);

/// What is to be answered.
pub struct Submission {
    pub requests: Vec<Request>,
    /// Answers to each request.
    pub n: usize,
    /// Whether answers end with what they have at the time limit.
    pub partial: bool,
    /// Whether client or settings chose the seed: then the request determines its answers.
    pub is_seeded: bool,
    /// Digest of what the constraint was compiled from, if there is one.
    pub form: Option<[u8; 32]>,
    /// Slot that the request names.
    pub slot: Option<usize>,
}

/// The updates of `n` answers to each request; those to the first request come first. Answers that are known already, or are
/// being computed for an equal request, are used; else they go into the queue, all or none.
///
/// # Errors
/// If a limit is reached, or the server ends.
pub async fn submit(
    server: &Server,
    instance: &ModelInstance,
    caller: &Caller,
    flow: &Flow,
    submission: Submission,
) -> Result<Updates, ApiError> {
    let count = submission.requests.len() * submission.n;
    check_count(instance, count)?;
    caller.usage.add_prompt(submission.requests.iter().map(|request| request.tokens.len()).sum());
    let answers = &server.answers;
    // an answer that is cut by the limit of one request is none for the others
    let may_share = !caller.deadlines(&instance.settings(), submission.partial).is_own;
    let key = match caller.hints.reuses {
        Reuse::NoStore => None,
        _ => {
            let Submission { requests, n, is_seeded, form, .. } = &submission;
            let determined = Determined { requests, n: *n, is_seeded: *is_seeded, form: *form };
            answers.key((&instance.name, &instance.computation()), &caller.identity.tenant.name, determined)
        }
    };
    let known = match key.as_ref().filter(|_| caller.hints.reuses == Reuse::All) {
        None => None,
        Some(key) => find(answers, key, may_share).await,
    };
    let mut updates = match (known, key) {
        (Some((reader, found)), _) => {
            if let Some(found) = found {
                let _ = caller.notes.found.set(found);
            }
            Updates::of_log(reader, Arc::clone(&caller.usage))
        }
        (None, None) => Updates::of_engine(enqueue(instance, caller, flow, submission, Arc::clone(&caller.usage))?),
        (None, Some(key)) => {
            // counted by each of its readers
            let updates = enqueue(instance, caller, flow, submission, Arc::default())?;
            Updates::of_log(answers.share(key, updates, count, may_share), Arc::clone(&caller.usage))
        }
    };
    let filters = |policy: &Arc<TextPolicy>| AnswerFilters::new(Arc::clone(policy), caller.subject(instance), count);
    updates.filter(caller.policy.as_ref().and_then(filters));
    updates.set_stream_id(caller.stream_id.clone());
    Ok(updates)
}

/// An answer that is known already, or is being computed.
async fn find(answers: &Answers, key: &ReuseKey, may_share: bool) -> Option<(AnswerReader, Option<Found>)> {
    if let Some(known) = answers.find(key, may_share) {
        return Some(known);
    }
    let mut known = answers.find_on_disk(key).await;
    if known.is_none() && answers.disk.is_some() {
        // computed, or begun, while the disk was read
        known = answers.find(key, may_share);
    }
    if known.is_none() {
        answers.kept.metrics.reused("miss");
    }
    known
}

fn enqueue(
    instance: &ModelInstance,
    caller: &Caller,
    flow: &Flow,
    submission: Submission,
    usage: Arc<Usage>,
) -> Result<EngineUpdates, ApiError> {
    let Submission { mut requests, n, partial, slot, .. } = submission;
    let settings = instance.settings();
    for request in &mut requests {
        request.speculation.max = settings.draft_max;
        request.speculation.min_acceptance = settings.draft_min_acceptance;
    }
    let trace = Trace::current();
    if let Some(session) = &flow.session {
        trace.record("session", session);
    }
    if instance.pressure.level() >= MAX_LEVEL && flow.priority != Priority::High {
        instance.metrics.rejected("memory_pressure");
        let error = ApiError::unavailable(
            "memory is short: only requests of high priority are accepted, of keys with max-priority=high; try again later",
        );
        return Err(ApiError { retry: Some(PRESSURE_RETRY), ..error }.code("memory_pressure"));
    }
    let trial = instance.admit(&flow.tenant)?;
    let max_tokens = |r: &Request| r.max_tokens.unwrap_or(1);
    let each = requests.iter().map(max_tokens).max().unwrap_or(1);
    let tokens: usize = requests.iter().map(|r| (r.tokens.len() + max_tokens(r)) * n).sum();
    let count = requests.len() * n;
    caller
        .identity
        .tenant
        .count_tokens(tokens, instance.settings().key_tokens)
        .inspect_err(|_| instance.metrics.rejected("key_tokens"))?;
    let (to, mut updates) = updates(count, each, usage);
    updates.hold_trial(trial);
    let times = caller.deadlines(&instance.settings(), partial);
    if let [request] = &requests[..]
        && n == 1
    {
        let slot = instance.slots.begin(slot, &caller.identity.tenant.name, &request.tokens, request.cache_salt);
        if let Some(mut slot) = slot {
            updates.observe(move |update| slot.note(update));
        }
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
