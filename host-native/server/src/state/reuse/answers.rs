//! Answers that are computed once: identical requests in flight share one computation, and determined answers are kept.
//!
//! The answer to a request is determined if its seed is given or its temperature is 0. Then model, prompt and options say every
//! byte of it, so an answer that was computed before is as good as a new one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use axum::http::{HeaderMap, header};
use sha2::Digest;
use starling::draft::Speculation;
use starling::engine::{FinishReason, Request};
use starling::sampler::SamplingOptions;
use starling_host::clock::unix_millis;

use super::answer_file;
use super::cache::Cache;
use super::disk::AnswerDisk;
use super::key::{Computation, Kind, ReuseKey};
use super::shared_log::{Reader, SharedLog};
use crate::observe::metrics::Metrics;
use crate::schedule::offload::offload;
use crate::schedule::queue::{EngineUpdates, Update};

/// Updates of a request, shared by its readers.
pub type AnswerLog = SharedLog<(usize, Update)>;
/// Reads the updates of a request.
pub type AnswerReader = Reader<(usize, Update)>;

/// What a client allows, by its header `cache-control`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reuse {
    All,
    /// `no-cache`: computed anew, and kept.
    NoCache,
    /// `no-store`: computed anew, and not kept.
    NoStore,
}

impl Reuse {
    pub fn of(headers: &HeaderMap) -> Reuse {
        let has = |name: &str| {
            let values = headers.get_all(header::CACHE_CONTROL).iter().filter_map(|value| value.to_str().ok());
            values.flat_map(|value| value.split(',')).any(|value| value.trim().eq_ignore_ascii_case(name))
        };
        match (has("no-store"), has("no-cache")) {
            (true, _) => Reuse::NoStore,
            (_, true) => Reuse::NoCache,
            _ => Reuse::All,
        }
    }
}

/// What says whether the answers to requests are determined, and which they are.
#[derive(Debug, Clone, Copy)]
pub struct Determined<'a> {
    pub requests: &'a [Request],
    /// Answers to each.
    pub n: usize,
    /// Whether the client has given the seed.
    pub is_seeded: bool,
    /// Digest of what the constraint was compiled from, if there is one.
    pub form: Option<[u8; 32]>,
}

/// An answer that was found.
#[derive(Debug, Clone)]
pub struct Found {
    /// Seconds since it was computed.
    pub age: u64,
    /// Names it for `etag`.
    pub etag: String,
}

#[derive(Clone)]
pub struct KeptAnswer {
    log: Arc<AnswerLog>,
    /// Time of the computation, in milliseconds since 1970: it goes on after a restart.
    since: u64,
}

/// Answers in flight, and answers that are kept.
pub struct Answers {
    /// Whether identical requests in flight are computed once.
    shares: bool,
    in_flight: Mutex<HashMap<ReuseKey, Weak<AnswerLog>>>,
    pub kept: Cache<KeptAnswer>,
    /// Answers that outlive the process and memory.
    pub disk: Option<AnswerDisk>,
}

/// Memory of an update besides its text.
const UPDATE_BYTES: usize = std::mem::size_of::<(usize, Update)>();

impl Answers {
    /// Keeps at most `limit` bytes in memory.
    pub fn new(limit: usize, disk: Option<AnswerDisk>, shares: bool, metrics: Arc<Metrics>) -> Answers {
        Answers { shares, in_flight: Mutex::default(), kept: Cache::new("answers", limit, metrics), disk }
    }

    /// The key of the answers; `None` if they are not determined, or nothing is reused.
    pub fn key(
        &self,
        (name, computation): (&Arc<str>, &Computation),
        tenant: &Arc<str>,
        Determined { requests, n, is_seeded, form }: Determined<'_>,
    ) -> Option<ReuseKey> {
        let is_determined = |request: &Request| {
            (is_seeded || request.sampling.temperature == 0.0) && request.constraint.is_some() == form.is_some()
        };
        let is_on = self.shares || self.kept.is_on || self.disk.is_some();
        if !is_on || !requests.iter().all(is_determined) {
            return None;
        }
        Some(ReuseKey::new(name, computation, tenant, Kind::Answer, |digest| {
            digest.update(n.to_le_bytes());
            digest.update(form.unwrap_or_default());
            for request in requests {
                // a seed that is not used changes the receipt only, which names it
                let is_used = request.sampling.temperature != 0.0 || request.receipt;
                let seed = if is_used { request.sampling.seed } else { 0 };
                let sampling = SamplingOptions { seed, ..request.sampling.clone() };
                // drafts change no byte, and the constraint is what `form` says
                let (speculation, constraint) = (Speculation::default(), None);
                let request = Request { sampling, speculation, constraint, ..request.clone() };
                // every field is in the text, and equal requests have equal texts
                digest.update(format!("{request:?}\n"));
            }
        }))
    }

    /// The updates of an equal request that is in flight, or was answered. Without `may_share` only one that was answered.
    pub fn find(&self, key: &ReuseKey, may_share: bool) -> Option<(AnswerReader, Option<Found>)> {
        if let Some(kept) = self.kept.get(key) {
            self.kept.metrics.reused("hit");
            return Some((kept.log.reader(0), Some(found(key, kept.since))));
        }
        let in_flight = self.in_flight();
        let shared =
            in_flight.get(key).and_then(Weak::upgrade).filter(|_| self.shares && may_share).map(|log| log.reader(0))?;
        self.kept.metrics.reused("shared");
        Some((shared, None))
    }

    /// The updates of an equal request whose answer is on disk; from now on they are in memory.
    pub async fn find_on_disk(&self, key: &ReuseKey) -> Option<(AnswerReader, Option<Found>)> {
        let (since, updates) = self.disk.as_ref()?.get(key).await?;
        self.kept.metrics.reused("disk_hit");
        let log = SharedLog::new();
        for (index, update) in updates {
            let n_bytes = UPDATE_BYTES + bytes_of(&update);
            log.push((index, update), n_bytes);
        }
        log.close();
        let n_bytes = log.n_bytes();
        self.kept.insert(key.clone(), KeptAnswer { log: Arc::clone(&log), since }, n_bytes);
        Some((log.reader(0), Some(found(key, since))))
    }

    /// Forgets the answers of a model, of a tenant, of an `etag`, or all. Returns how many were in memory.
    pub fn invalidate(&self, model: Option<&str>, tenant: Option<&str>, etag: Option<&str>) -> usize {
        if let Some(disk) = &self.disk {
            disk.invalidate(model, tenant, etag);
        }
        self.kept.invalidate(model, tenant, etag)
    }

    /// Keeps an answer in memory and, written behind, on disk.
    async fn keep(&self, key: ReuseKey, log: Arc<AnswerLog>) {
        let (since, n_bytes) = (unix_millis(), log.n_bytes());
        self.kept.insert(key.clone(), KeptAnswer { log: Arc::clone(&log), since }, n_bytes);
        let Some(disk) = &self.disk else { return };
        let encoded = offload(n_bytes, move || answer_file::encode(since, &log.items())).await;
        if let Ok(Some(bytes)) = encoded {
            disk.put(&key, bytes);
        }
    }

    /// Makes the updates of a request those of a log that others can read too: with `may_share` while it is in flight.
    pub fn share(
        self: &Arc<Self>,
        key: ReuseKey,
        updates: EngineUpdates,
        n_answers: usize,
        may_share: bool,
    ) -> AnswerReader {
        let log = SharedLog::new();
        let reader = log.reader(0);
        if may_share {
            self.in_flight().insert(key.clone(), Arc::downgrade(&log));
        }
        let answers = Arc::clone(self);
        tokio::spawn(async move {
            let is_determined = answers.fill(&log, &key, updates, n_answers).await;
            log.close();
            end_flight(&mut answers.in_flight(), &key, &log);
            if is_determined {
                answers.keep(key, log).await;
            }
        });
        reader
    }

    /// Fills a log until all answers have ended or nobody reads. Returns whether the request alone determines them.
    async fn fill(&self, log: &Arc<AnswerLog>, key: &ReuseKey, mut updates: EngineUpdates, n_answers: usize) -> bool {
        let (mut n_left, mut is_determined) = (n_answers, true);
        while n_left > 0 {
            let next = tokio::select! {
                next = updates.recv() => next,
                () = log.unread() => {
                    // under this lock nobody begins to read
                    let mut in_flight = self.in_flight();
                    if log.has_readers() {
                        continue;
                    }
                    end_flight(&mut in_flight, key, log);
                    return false;
                }
            };
            let Some((index, update)) = next else { return false };
            let is_over = matches!(update, Update::Failed(_));
            if let Update::Done { reason, .. } = &update {
                n_left -= 1;
                is_determined &= is_by_options(reason);
            }
            let n_bytes = UPDATE_BYTES + bytes_of(&update);
            log.push((index, update), n_bytes);
            if is_over {
                return false;
            }
        }
        is_determined
    }

    fn in_flight(&self) -> MutexGuard<'_, HashMap<ReuseKey, Weak<AnswerLog>>> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn found(key: &ReuseKey, since: u64) -> Found {
    Found { age: unix_millis().saturating_sub(since) / 1000, etag: key.etag() }
}

/// Removes a log from those in flight, unless a later equal request has taken its place.
fn end_flight(in_flight: &mut HashMap<ReuseKey, Weak<AnswerLog>>, key: &ReuseKey, log: &Arc<AnswerLog>) {
    if in_flight.get(key).is_some_and(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(log))) {
        in_flight.remove(key);
    }
}

/// Whether an answer that ended so ends so each time.
fn is_by_options(reason: &FinishReason) -> bool {
    use FinishReason::{Complete, Length, StopString, StopToken};
    matches!(reason, StopToken(_) | StopString(_) | Complete | Length)
}

fn bytes_of(update: &Update) -> usize {
    match update {
        Update::Token { text, top, .. } => text.len() + top.len() * std::mem::size_of::<(u32, f32)>(),
        Update::Prefilled { prompt, .. } => {
            prompt.iter().map(|(_, top)| 32 + top.len() * std::mem::size_of::<(u32, f32)>()).sum()
        }
        Update::Done { text, receipt, .. } => {
            text.len() + receipt.as_ref().map_or(0, |receipt| 256 + 64 * receipt.steps.len())
        }
        _ => 0,
    }
}
