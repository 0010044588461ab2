//! The least rate of a transfer: one that stands still, or sends a byte now and then, is ended.

use std::io::{self, ErrorKind, Read};
use std::time::{Duration, Instant};

/// Time without a byte after which a connection is given up, unless the environment says otherwise.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Least bytes a second, over [`STALL_TIMEOUT`].
const MIN_RATE: u64 = 1024;
/// Bytes read at a time.
const BLOCK: usize = 16 << 10;

/// What has arrived in the present period.
#[derive(Debug)]
pub struct Pace {
    period: Duration,
    since: Instant,
    n_bytes: u64,
}

impl Pace {
    /// Measures periods of `period` from now on.
    pub fn new(period: Duration, now: Instant) -> Pace {
        Pace { period, since: now, n_bytes: 0 }
    }

    /// Counts bytes that have arrived.
    ///
    /// # Errors
    /// If too few have arrived in a period that has ended.
    pub fn add(&mut self, n: u64, now: Instant) -> io::Result<()> {
        self.n_bytes += n;
        let took = now.saturating_duration_since(self.since);
        if took < self.period {
            return Ok(());
        }
        let (found, least) = (self.n_bytes as f64 / took.as_secs_f64().max(1e-3), MIN_RATE);
        (self.since, self.n_bytes) = (now, 0);
        if found < least as f64 {
            let what = format!("found {found:.0} bytes a second, expected at least {least}");
            return Err(io::Error::new(ErrorKind::TimedOut, what));
        }
        Ok(())
    }
}

/// Reads a body to its end, or up to `limit` bytes.
///
/// # Errors
/// If it cannot be read, or comes too slowly.
pub fn read_all(mut body: impl Read, limit: usize, period: Duration) -> io::Result<Vec<u8>> {
    let (mut all, mut block) = (Vec::new(), vec![0; BLOCK]);
    let mut pace = Pace::new(period, Instant::now());
    while all.len() < limit {
        let most = (limit - all.len()).min(BLOCK);
        match body.read(&mut block[..most])? {
            0 => break,
            n => {
                all.extend_from_slice(&block[..n]);
                pace.add(n as u64, Instant::now())?;
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_transfer_is_ended_at_the_end_of_a_period() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut pace = Pace::new(Duration::from_secs(10), begin);
        // 2048 bytes a second, then a byte a second
        assert!((1..=10).all(|second| pace.add(2048, at(second)).is_ok()));
        assert!((11..20).all(|second| pace.add(1, at(second)).is_ok()));
        let error = pace.add(1, at(20)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(error.to_string(), "found 1 bytes a second, expected at least 1024");
    }

    #[test]
    fn a_body_is_read_up_to_the_limit() {
        let body = vec![7; 3 * BLOCK];
        for (limit, found) in [(0, 0), (5, 5), (BLOCK + 1, BLOCK + 1), (usize::MAX, body.len())] {
            assert_eq!(read_all(&body[..], limit, STALL_TIMEOUT).unwrap().len(), found);
        }
    }
}
