//! Refusals are counted by kind: the first of a kind in a period is recorded at once, the others together at its end.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::record::Refusal;

const PERIOD: Duration = Duration::from_secs(60);
/// Maximum kinds in a period; what is of none of them is counted together.
const MAX_KINDS: usize = 64;

/// What was refused in the present period.
#[derive(Debug, Default)]
pub struct Refusals(Mutex<Counted>);

#[derive(Debug, Default)]
struct Counted {
    since: Option<Instant>,
    /// The first of each kind, and how many came after it.
    kinds: BTreeMap<(String, Option<IpAddr>, u16), (Refusal, u64)>,
    /// One that is of none of these kinds, and how many such there were.
    others: Option<(Refusal, u64)>,
}

impl Refusals {
    /// Counts a refusal. Returns what is to be recorded now.
    pub fn add(&self, refusal: Refusal, now: Instant) -> Vec<Refusal> {
        let mut counted = self.lock();
        let mut lines = counted.take_old(now);
        counted.since.get_or_insert(now);
        let kind = (refusal.reason.to_string(), refusal.address, refusal.status);
        if let Some((_, n)) = counted.kinds.get_mut(&kind) {
            *n += 1;
        } else if counted.kinds.len() < MAX_KINDS {
            lines.push(refusal.clone());
            counted.kinds.insert(kind, (refusal, 0));
        } else {
            counted.others.get_or_insert((refusal, 0)).1 += 1;
        }
        lines
    }

    /// What was counted in a period that has ended.
    pub fn take_old(&self, now: Instant) -> Vec<Refusal> {
        self.lock().take_old(now)
    }

    /// What was counted so far.
    pub fn take_all(&self) -> Vec<Refusal> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counted {
    fn take_old(&mut self, now: Instant) -> Vec<Refusal> {
        let is_over = self.since.is_some_and(|since| now.saturating_duration_since(since) >= PERIOD);
        if is_over { self.take() } else { Vec::new() }
    }

    fn take(&mut self) -> Vec<Refusal> {
        self.since = None;
        let kinds = std::mem::take(&mut self.kinds).into_values().filter(|(_, n)| *n > 0);
        let kinds = kinds.map(|(refusal, count)| Refusal { count, ..refusal });
        let others = self.others.take().map(|(refusal, count)| Refusal { count, address: None, ..refusal });
        kinds.chain(others).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_a_line_at_once_and_one_at_the_end_of_its_period() {
        let refusals = Refusals::default();
        let begin = Instant::now();
        let address = |n: u32| Some(IpAddr::from(n.to_be_bytes()));
        let one = |n| Refusal::new("invalid_api_key", address(n), "/v1/models", 401);
        assert_eq!(refusals.add(one(1), begin), [one(1)]);
        assert_eq!(refusals.add(one(1), begin), []);
        assert_eq!(refusals.add(one(2), begin), [one(2)]);
        assert_eq!(refusals.add(one(1), begin), []);
        assert_eq!(refusals.take_old(begin + PERIOD / 2), []);
        assert_eq!(refusals.take_old(begin + PERIOD), [Refusal { count: 2, ..one(1) }]);
        assert_eq!(refusals.take_all(), []);
        // however many kinds there are
        let n: usize = (0..10_000).map(|n| refusals.add(one(n), begin).len()).sum();
        assert_eq!(n, MAX_KINDS);
        let all = refusals.take_all();
        assert_eq!((all.len(), all[0].count, all[0].address), (1, 10_000 - MAX_KINDS as u64, None));
    }
}
