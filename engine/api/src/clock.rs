//! Times in responses: the host's clock, and RFC 3339.

use starling::chat::Now;

/// The host's clock.
pub trait Clock {
    /// Seconds since 1970.
    fn unix_seconds(&self) -> u64;

    /// Nanoseconds since a fixed point in time.
    fn monotonic_ns(&self) -> u64;
}

/// Seconds since 1970 as an RFC 3339 time in UTC.
pub fn rfc3339(seconds: u64) -> String {
    let Now { year, month, day, hour, minute, second } = Now::from_unix(seconds.cast_signed());
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    #[test]
    fn times_are_as_rfc_3339_writes_them() {
        assert_eq!(super::rfc3339(951_827_696), "2000-02-29T12:34:56Z");
    }
}
