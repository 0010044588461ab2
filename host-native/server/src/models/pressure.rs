//! Memory pressure in levels, with hysteresis.
//!
//! | level | what the server does |
//! |---|---|
//! | 1 | smaller batches, cached KV pages are evicted |
//! | 2 | idle models are unloaded, idle workers release their KV memory |
//! | 3 | requests of low and normal priority are refused with status 503 |

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use starling_host::machine::Reading;

/// Usage at which each level begins, as a share of the limit.
const USAGE: [f64; 3] = [0.85, 0.92, 0.97];
/// Time that tasks wait for memory at which the first two levels begin, in percent of the last 10 s. Waiting alone sheds no
/// load.
const STALLED: [f64; 2] = [10.0, 30.0];
/// A level ends this far below its beginning.
const MARGIN: f64 = 0.05;
/// Time below a level before it ends.
const CALM: Duration = Duration::from_secs(10);
/// The highest level.
pub const MAX_LEVEL: u8 = 3;

/// The level of a reading, with thresholds lowered by a share of them.
fn level_of(reading: Reading, lower: f64) -> u8 {
    let reached = |value: Option<f64>, thresholds: &[f64], lower: f64| {
        let value = value.unwrap_or(0.0);
        thresholds.iter().take_while(|threshold| value >= **threshold * (1.0 - lower)).count() as u8
    };
    reached(reading.usage, &USAGE, lower).max(reached(reading.stalled, &STALLED, lower))
}

/// The level now.
#[derive(Debug, Default)]
pub struct Pressure {
    level: AtomicU8,
    /// Since when the readings were below the level.
    calm_since: Mutex<Option<Instant>>,
    /// A level set by an administrator, for tests; `u8::MAX`: none.
    forced: Mutex<Option<u8>>,
}

impl Pressure {
    pub fn level(&self) -> u8 {
        self.level.load(Ordering::Acquire)
    }

    /// Sets the level whatever the readings are; `None`: follow the readings.
    pub fn force(&self, level: Option<u8>) {
        *self.forced.lock().unwrap_or_else(PoisonError::into_inner) = level;
        self.level.store(level.unwrap_or(0), Ordering::Release);
    }

    /// Takes a reading. A level begins at once; it ends one at a time, after the readings were clearly below it for
    /// [`CALM`]. Returns the level.
    pub fn update(&self, reading: Reading, now: Instant) -> u8 {
        if let Some(level) = *self.forced.lock().unwrap_or_else(PoisonError::into_inner) {
            return level;
        }
        let mut calm_since = self.calm_since.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut level, reached) = (self.level(), level_of(reading, 0.0));
        if reached > level {
            (level, *calm_since) = (reached, None);
        } else if level_of(reading, MARGIN) >= level {
            *calm_since = None;
        } else if now.saturating_duration_since(*calm_since.get_or_insert(now)) >= CALM {
            (level, *calm_since) = (level - 1, Some(now));
        }
        self.level.store(level, Ordering::Release);
        level
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn usage(usage: f64) -> Reading {
        Reading { usage: Some(usage), stalled: None }
    }

    proptest! {
        #[test]
        fn hysteresis_rises_at_once_and_falls_one_level_after_a_calm_time(
            readings in prop::collection::vec((0.5f64..1.0, 1u64..6000), 1..60),
        ) {
            let pressure = Pressure::default();
            let mut now = Instant::now();
            let (mut before, mut last_high) = (0, now);
            for (value, ms) in readings {
                now += Duration::from_millis(ms);
                let level = pressure.update(usage(value), now);
                let reached = level_of(usage(value), 0.0);
                prop_assert!(level >= reached, "a level begins at once");
                prop_assert!(level >= before || level + 1 == before, "{before} to {level}");
                if level > before || level_of(usage(value), MARGIN) >= before {
                    prop_assert!(level >= before);
                    last_high = now;
                }
                if level < before {
                    prop_assert!(now - last_high >= CALM, "after {:?}", now - last_high);
                    last_high = now;
                }
                before = level;
            }
            // and it ends
            for _ in 0..4 {
                now += CALM;
                pressure.update(usage(0.1), now);
            }
            prop_assert_eq!(pressure.update(usage(0.1), now + CALM), 0);
        }
    }

    #[test]
    fn a_value_that_swings_around_a_threshold_does_not_switch() {
        let (pressure, start) = (Pressure::default(), Instant::now());
        let levels = (0..100).map(|i| pressure.update(usage(if i % 2 == 0 { 0.86 } else { 0.83 }), start + i * CALM));
        assert!(levels.into_iter().all(|level| level == 1));
    }

    #[test]
    fn waiting_for_memory_sheds_no_load() {
        let reading = Reading { usage: Some(0.1), stalled: Some(100.0) };
        assert_eq!(Pressure::default().update(reading, Instant::now()), 2);
    }
}
