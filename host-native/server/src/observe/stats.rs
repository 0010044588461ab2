//! Totals, latency percentiles and token rate of `/server/stats`.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use utoipa::ToSchema;

/// Totals since the start, and recent latencies in seconds.
#[derive(Debug, Serialize, ToSchema)]
pub struct Totals {
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// Generated tokens.
    pub output_tokens: u64,
    /// Embedded texts.
    pub embedded_texts: u64,
    /// Average of the last 10 s.
    pub output_tokens_per_second: f64,
    /// Time from request arrival to its first token.
    pub time_to_first_token: Percentiles,
    /// Time between consecutive tokens of a request.
    pub inter_token_latency: Percentiles,
    /// Time from request arrival to its last token.
    pub request_latency: Percentiles,
}

/// Percentiles of the last 1024 values of each model, in seconds; 0 if there are none.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct Percentiles {
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
}

/// Ring buffer of the last [`RECENT`] values.
#[derive(Debug, Default)]
pub struct Recent(Mutex<VecDeque<f32>>);

const RECENT: usize = 1024;

impl Recent {
    pub fn add(&self, time: Duration) {
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if values.len() == RECENT {
            values.pop_front();
        }
        values.push_back(time.as_secs_f32());
    }

    pub fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn values(&self) -> Vec<f32> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }

    /// Percentiles of the last values of all of `recent` together.
    pub fn percentiles<'a>(recent: impl IntoIterator<Item = &'a Recent>) -> Percentiles {
        let mut sorted: Vec<f32> = recent.into_iter().flat_map(Recent::values).collect();
        sorted.sort_unstable_by(f32::total_cmp);
        let at = |q: f64| {
            let i = (q * sorted.len() as f64) as usize;
            sorted.get(i.min(sorted.len().saturating_sub(1))).map_or(0.0, |v| f64::from(*v))
        };
        Percentiles { p50: at(0.5), p90: at(0.9), p95: at(0.95), p99: at(0.99) }
    }
}

/// Window of [`Rate`] in seconds.
const WINDOW: usize = 10;

/// Rate of events over the last [`WINDOW`] whole seconds.
#[derive(Debug)]
pub struct Rate {
    slots: Mutex<Slots>,
    start: Instant,
}

/// Ring buffer of events per second, and the second of the last access.
#[derive(Debug, Default)]
struct Slots {
    events: [u64; WINDOW + 1],
    second: u64,
}

impl Default for Rate {
    fn default() -> Self {
        Rate { slots: Mutex::default(), start: Instant::now() }
    }
}

impl Rate {
    pub fn add(&self, n: u64) {
        let mut slots = self.advance();
        let slot = slots.slot();
        slots.events[slot] += n;
    }

    /// Average of the whole seconds in the window; the current second does not count.
    pub fn per_second(&self) -> f64 {
        let slots = self.advance();
        let seconds = (slots.second as usize).clamp(1, WINDOW);
        (slots.events.iter().sum::<u64>() - slots.events[slots.slot()]) as f64 / seconds as f64
    }

    /// Advances the ring to the current second.
    fn advance(&self) -> MutexGuard<'_, Slots> {
        let second = self.start.elapsed().as_secs();
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        for past in (slots.second + 1..=second).rev().take(WINDOW + 1) {
            slots.events[past as usize % (WINDOW + 1)] = 0;
        }
        slots.second = slots.second.max(second);
        slots
    }
}

impl Slots {
    /// Index of the current second.
    fn slot(&self) -> usize {
        self.second as usize % (WINDOW + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_last_values() {
        let recent = Recent::default();
        (1..=2000).for_each(|ms| recent.add(Duration::from_millis(ms)));
        let p = Recent::percentiles([&recent]);
        assert!((p.p50 - 1.489).abs() < 0.002 && (p.p99 - 1.99).abs() < 0.002, "{p:?}");
        assert!((p.p95 - 1.949).abs() < 0.002, "{p:?}");
        // of two models: half of the values of each
        let other = Recent::default();
        (1..=2000).for_each(|_| other.add(Duration::from_secs(9)));
        let both = Recent::percentiles([&recent, &other]);
        assert!((both.p50 - 9.0).abs() < 0.002 && (both.p99 - 9.0).abs() < 0.002, "{both:?}");
        assert_eq!(Recent::percentiles([]).p99, 0.0);
    }
}
