//! The past as `/server/stats` tells it: percentiles of the last values, and rates of the last seconds.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use utoipa::ToSchema;

/// What has been done since the start, and how fast of late.
#[derive(Debug, Serialize, ToSchema)]
pub struct Past {
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Of those, found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub output_tokens: u64,
    /// Texts embedded.
    pub embedded_texts: u64,
    /// Over the last seconds.
    pub output_tokens_per_second: f64,
    /// From a request to its first token.
    pub time_to_first_token: Percentiles,
    /// From a token to the next.
    pub inter_token_latency: Percentiles,
    /// From a request to the end of its answer.
    pub request_latency: Percentiles,
}

/// Seconds, of the last 1024 of their kind; 0 where there are none.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct Percentiles {
    /// Median.
    pub p50: f64,
    /// 9 of 10 are below.
    pub p90: f64,
    /// 99 of 100 are below.
    pub p99: f64,
}

/// The last values of a kind.
#[derive(Debug, Default)]
pub struct Recent(Mutex<VecDeque<f32>>);

/// How many.
const RECENT: usize = 1024;

impl Recent {
    /// Takes a value.
    pub fn add(&self, time: Duration) {
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if values.len() == RECENT {
            values.pop_front();
        }
        values.push_back(time.as_secs_f32());
    }

    /// How they lie.
    pub fn percentiles(&self) -> Percentiles {
        let mut sorted: Vec<f32> = self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        sorted.sort_unstable_by(f32::total_cmp);
        let at = |q: f64| {
            let i = (q * sorted.len() as f64) as usize;
            sorted.get(i.min(sorted.len().saturating_sub(1))).map_or(0.0, |v| f64::from(*v))
        };
        Percentiles { p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }
}

/// Seconds that [`Rate`] looks back.
const WINDOW: usize = 10;

/// Events of the last whole seconds.
#[derive(Debug)]
pub struct Rate {
    slots: Mutex<Slots>,
    start: Instant,
}

/// Events of each second, in a ring, and the last second looked at.
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
    /// Counts events.
    pub fn add(&self, n: u64) {
        let mut slots = self.now();
        let slot = slots.slot();
        slots.events[slot] += n;
    }

    /// How many there were a second, of the last whole seconds.
    pub fn per_second(&self) -> f64 {
        let slots = self.now();
        let seconds = (slots.second as usize).clamp(1, WINDOW);
        (slots.events.iter().sum::<u64>() - slots.events[slots.slot()]) as f64 / seconds as f64
    }

    /// The slots, those of seconds gone by emptied.
    fn now(&self) -> MutexGuard<'_, Slots> {
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
    /// Where this second is.
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
        let p = recent.percentiles();
        assert!((p.p50 - 1.489).abs() < 0.002 && (p.p99 - 1.99).abs() < 0.002, "{p:?}");
        assert_eq!(Recent::default().percentiles().p99, 0.0);
    }
}
