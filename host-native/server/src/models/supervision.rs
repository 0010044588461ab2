//! What happens about once a second: idle models, workers that stall, memory pressure.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use starling_host::machine::{self, Reading};

use super::actor::Instance;
use super::pool::ModelPool;

/// Time after an unload in which freed memory is returned to the system.
const MEMORY_RETURN_TIME: Duration = Duration::from_secs(5);
/// Size of a block that the allocator takes from the system.
const LARGE_BLOCK: usize = 64 << 20;

impl ModelPool {
    /// Unloads models that have been idle for their `idle_timeout`, and supervises the workers of the others. Called
    /// about once a second.
    pub fn supervise(&self) {
        for entry in self.entries() {
            let settings = entry.settings();
            let is_idle = settings.idle_timeout.is_some_and(|limit| entry.idle_time() > limit) && !settings.pin;
            if is_idle && !entry.actor().is_changing() {
                entry.actor().unload_idle("idle");
            }
            entry.metrics.set_breaker(entry.breaker_name());
            let Some(instance) = entry.instance() else { continue };
            if instance.is_busy() {
                entry.touch();
            }
            instance.workers.supervise();
        }
        self.relieve();
        self.return_memory();
    }

    /// Makes the allocator return the memory of unloaded models to the system. It does so when it frees a large block, a
    /// second after the memory became free.
    fn return_memory(&self) {
        let used = self.resources().budget.used();
        let mut last = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if used < last.0 {
            *last = (used, Some(Instant::now()));
        }
        last.0 = used;
        if last.1.is_some_and(|freed| freed.elapsed() < MEMORY_RETURN_TIME) {
            drop(std::hint::black_box(Vec::<u8>::with_capacity(LARGE_BLOCK)));
        }
    }

    /// Reacts to memory pressure.
    fn relieve(&self) {
        let (pressure, budget) = (&self.resources().pressure, &self.resources().budget);
        let before = pressure.level();
        let reading = if self.settings().memory_pressure { machine::memory_reading() } else { Reading::default() };
        let level = pressure.update(reading, Instant::now());
        self.resources().metrics.set_memory(level, budget.used());
        if level != before {
            tracing::warn!(pressure = level, before, ?reading, "memory pressure has changed");
        }
        for entry in self.entries() {
            let is_unloaded = level >= 2 && !entry.settings().pin && entry.actor().unload_idle("memory_pressure");
            if let Some(instance) = entry.instance().filter(|_| !is_unloaded) {
                instance.workers.relieve(level);
            }
        }
    }
}
