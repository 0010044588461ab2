//! Replay cache: nonces that were seen within the window.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use sha2::{Digest, Sha256};

/// Nonces of each key until they expire, a bounded number per key. A full cache refuses requests: a nonce that is
/// forgotten early could be used again.
///
/// Times are in seconds since the Unix epoch. The cache is that of one process: behind a load balancer, a request can
/// be replayed once at each process.
pub struct ReplayCache {
    max_nonces_per_key: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    keys: HashMap<String, Nonces>,
    /// Nonces that expire up to this time may have been forgotten.
    forgotten_until: u64,
}

#[derive(Default)]
struct Nonces {
    /// 128 bits of the SHA-256 of each.
    seen: HashSet<u128>,
    by_expiry: BinaryHeap<Reverse<(u64, u128)>>,
}

/// A nonce is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    #[error("replayed: the nonce was used before with this key")]
    Seen,
    #[error("{limit} nonces of this key are in use; try again in {wait_seconds} s")]
    Full { limit: usize, wait_seconds: u64 },
    /// The process was started after the request was signed, or its clock was set back.
    #[error("cannot tell whether the nonce was used before; sign the request again")]
    Forgotten,
}

impl ReplayCache {
    pub fn new(max_nonces_per_key: usize) -> ReplayCache {
        ReplayCache { max_nonces_per_key, state: Mutex::default() }
    }

    /// Refuses nonces that expire at `time` or before, for example those of requests before the process was started.
    #[must_use]
    pub fn forgotten_until(self, time: u64) -> ReplayCache {
        let state = State { forgotten_until: time, ..State::default() };
        ReplayCache { state: Mutex::new(state), ..self }
    }

    /// Marks a nonce as used until `expires`. Call it only for requests whose signature is valid: others could use up
    /// the nonces of a key.
    ///
    /// # Errors
    /// If the nonce was used, the key has too many, or the cache cannot tell.
    pub fn consume(&self, key_id: &str, nonce: &str, expires: u64, now: u64) -> Result<(), ReplayError> {
        let digest: [u8; 32] = Sha256::digest(nonce).into();
        let nonce = digest.iter().take(16).fold(0, |bits: u128, &byte| bits << 8 | u128::from(byte));
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *state;
        if !state.keys.contains_key(key_id) {
            state.keys.insert(key_id.into(), Nonces::default());
        }
        let Some(nonces) = state.keys.get_mut(key_id) else { return Err(ReplayError::Forgotten) };
        while let Some(&Reverse((expires, oldest))) = nonces.by_expiry.peek() {
            if expires >= now {
                break;
            }
            nonces.by_expiry.pop();
            nonces.seen.remove(&oldest);
            state.forgotten_until = state.forgotten_until.max(expires);
        }
        if nonces.seen.contains(&nonce) {
            return Err(ReplayError::Seen);
        }
        // after the clock was set back; otherwise every fresh nonce expires later than the forgotten ones
        if expires <= state.forgotten_until {
            return Err(ReplayError::Forgotten);
        }
        if nonces.seen.len() >= self.max_nonces_per_key {
            let oldest = nonces.by_expiry.peek().map_or(now, |&Reverse((expires, _))| expires);
            let wait_seconds = oldest.saturating_sub(now) + 1;
            return Err(ReplayError::Full { limit: self.max_nonces_per_key, wait_seconds });
        }
        nonces.seen.insert(nonce);
        nonces.by_expiry.push(Reverse((expires, nonce)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nonce_is_used_once_per_key() {
        let cache = ReplayCache::new(10);
        assert_eq!(cache.consume("a", "n", 100, 50), Ok(()));
        for now in [50, 99, 100] {
            assert_eq!(cache.consume("a", "n", 200, now), Err(ReplayError::Seen));
        }
        assert_eq!(cache.consume("b", "n", 100, 50), Ok(()));
        assert_eq!(cache.consume("a", "m", 100, 50), Ok(()));
        assert_eq!(cache.consume("a", "n", 200, 101), Ok(()));
    }

    #[test]
    fn a_full_cache_refuses_and_does_not_forget() {
        let cache = ReplayCache::new(3);
        for i in 0..3 {
            assert_eq!(cache.consume("a", &i.to_string(), 100 + i, 50), Ok(()));
        }
        let full = |wait_seconds| Err(ReplayError::Full { limit: 3, wait_seconds });
        assert_eq!(cache.consume("a", "x", 150, 50), full(51));
        assert_eq!(cache.consume("a", "x", 150, 100), full(1));
        assert_eq!(cache.consume("a", "0", 150, 100), Err(ReplayError::Seen));
        assert_eq!(cache.consume("b", "x", 150, 50), Ok(()));
        assert_eq!(cache.consume("a", "x", 150, 101), Ok(()));
        assert_eq!(cache.consume("a", "y", 150, 101), full(1));
    }

    #[test]
    fn a_clock_that_is_set_back_opens_no_replay() {
        let cache = ReplayCache::new(10);
        assert_eq!(cache.consume("a", "n", 100, 50), Ok(()));
        assert_eq!(cache.consume("a", "m", 9100, 9000), Ok(()));
        assert_eq!(cache.consume("a", "n", 100, 50), Err(ReplayError::Forgotten));
        assert_eq!(cache.consume("a", "o", 101, 51), Ok(()));
    }

    #[test]
    fn requests_before_the_start_are_refused() {
        let cache = ReplayCache::new(10).forgotten_until(100);
        assert_eq!(cache.consume("a", "n", 100, 50), Err(ReplayError::Forgotten));
        assert_eq!(cache.consume("a", "n", 101, 50), Ok(()));
    }
}
