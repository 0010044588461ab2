//! The system's clock and entropy.

use std::time::{Duration, SystemTime};

/// Unix time in seconds.
pub fn unix_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// Unix time in milliseconds.
pub fn unix_millis() -> u64 {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A random id of 128 bits with a prefix.
pub fn random_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random(), random())
}

/// A random number from the system's entropy; from the clock if it has none.
pub fn random() -> u64 {
    getrandom::u64().unwrap_or_else(|_| {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        time.as_nanos() as u64
    })
}
