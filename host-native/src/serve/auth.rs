//! API keys, tenants, rate limits, and the check of the `Host` header.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use governor::clock::{Clock, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use super::config::Settings;
use crate::error::Failure;
use crate::tokens::text_file;

/// Tenant of requests to a server without API keys.
pub const ANYONE: &str = "default";
const MAX_SHARE: u32 = 1000;

/// API keys and their tenants.
pub struct Keys {
    keys: Vec<Key>,
    anyone: Arc<Tenant>,
}

struct Key {
    /// SHA-256 of the key: digests have equal length, for a comparison in constant time, and keys are not kept in memory.
    digest: [u8; 32],
    tenant: Arc<Tenant>,
}

impl Key {
    fn new(key: &str, name: &str, share: u32, settings: &Settings) -> Key {
        let tenant = Arc::new(Tenant::new(name, share, settings));
        Key { digest: Sha256::digest(key.as_bytes()).into(), tenant }
    }
}

/// Reads a file of keys: lines of `KEY [TENANT [SHARE]]`.
fn read_keys(path: &Path, settings: &Settings) -> Result<Vec<Key>, Failure> {
    let text = text_file(path)?;
    let wrong = |i: usize, what: String| Failure::Usage(format!("{}: line {}: {what}", path.display(), i + 1));
    let mut keys = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let mut words = line.split_whitespace();
        let Some(key) = words.next().filter(|key| !key.starts_with('#')) else { continue };
        let name = words.next().map_or_else(|| format!("key-{}", i + 1), Into::into);
        let share = match words.next().map(|word| (word, word.parse())) {
            None => 1,
            Some((_, Ok(share))) if (1..=MAX_SHARE).contains(&share) => share,
            Some((word, _)) => {
                return Err(wrong(i, format!("found share {word:?}, expected an integer from 1 to {MAX_SHARE}")));
            }
        };
        if let Some(word) = words.next() {
            return Err(wrong(i, format!("found a fourth field {word:?}, expected KEY [TENANT [SHARE]]")));
        }
        keys.push(Key::new(key, &name, share, settings));
    }
    if keys.is_empty() {
        let expected = "found no key, expected lines of KEY [TENANT [SHARE]]";
        return Err(Failure::Usage(format!("{}: {expected}", path.display())));
    }
    Ok(keys)
}

/// A client of the server: the unit of fairness, rate limits, and separation of sessions and prefix caches.
pub struct Tenant {
    pub name: Arc<str>,
    /// Requests per turn of this tenant in the queue.
    pub share: u32,
    requests: Option<DefaultDirectRateLimiter>,
    tokens: Option<DefaultDirectRateLimiter>,
}

/// A rate limit is exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("rate limit: {limit} {what} per minute with this API key; try again in {} s", seconds(*.wait))]
pub struct TooFast {
    /// `requests` or `tokens`.
    pub what: &'static str,
    /// Per minute.
    pub limit: u32,
    pub wait: Duration,
}

/// Seconds for `Retry-After`: rounded up, at least 1.
pub fn seconds(wait: Duration) -> u64 {
    wait.as_secs_f64().ceil().max(1.0) as u64
}

impl Keys {
    /// The keys of `api_key` and `api_key_file`.
    ///
    /// # Errors
    /// If the file cannot be read, has an invalid line, or has no key.
    pub fn new(settings: &Settings) -> Result<Keys, Failure> {
        let mut keys = Vec::new();
        if let Some(key) = settings.api_key.as_deref().filter(|key| !key.is_empty()) {
            keys.push(Key::new(key, ANYONE, 1, settings));
        }
        if let Some(path) = &settings.api_key_file {
            keys.extend(read_keys(path, settings)?);
        }
        Ok(Keys { keys, anyone: Arc::new(Tenant::new(ANYONE, 1, settings)) })
    }

    /// The keys of a file, for a role that must have one.
    ///
    /// # Errors
    /// If the file cannot be read, has an invalid line, or has no key.
    pub fn of_file(path: &Path, settings: &Settings) -> Result<Keys, Failure> {
        Ok(Keys { keys: read_keys(path, settings)?, anyone: Arc::new(Tenant::new(ANYONE, 1, settings)) })
    }

    pub fn are_needed(&self) -> bool {
        !self.keys.is_empty()
    }

    /// The tenant of a key, or [`ANYONE`] if the server has no keys. Compares with all keys in constant time.
    pub fn tenant(&self, key: Option<&str>) -> Option<Arc<Tenant>> {
        if self.keys.is_empty() {
            return Some(Arc::clone(&self.anyone));
        }
        let digest: [u8; 32] = Sha256::digest(key?.as_bytes()).into();
        let mut found = None;
        for (i, known) in self.keys.iter().enumerate() {
            let same: Choice = known.digest.ct_eq(&digest);
            if bool::from(same) {
                found = Some(i);
            }
        }
        Some(Arc::clone(&self.keys.get(found?)?.tenant))
    }
}

impl Tenant {
    fn new(name: &str, share: u32, settings: &Settings) -> Tenant {
        let limiter = |n: u32| NonZeroU32::new(n).map(|n| RateLimiter::direct(Quota::per_minute(n)));
        Tenant {
            name: name.into(),
            share,
            requests: limiter(settings.key_requests),
            tokens: limiter(settings.key_tokens),
        }
    }

    /// # Errors
    /// If `key_requests` is exceeded.
    pub fn count_request(&self, limit: u32) -> Result<(), TooFast> {
        let Some(limiter) = &self.requests else { return Ok(()) };
        let wait = |until: governor::NotUntil<_>| until.wait_time_from(DefaultClock::default().now());
        limiter.check().map_err(|until| TooFast { what: "requests", limit, wait: wait(until) })
    }

    /// Counts `n` tokens, prompt and `max_tokens` together, before they are processed.
    ///
    /// # Errors
    /// If `key_tokens` is exceeded, or `n` alone is above it.
    pub fn count_tokens(&self, n: usize, limit: u32) -> Result<(), TooFast> {
        let (Some(limiter), Some(n)) = (&self.tokens, NonZeroU32::new(u32::try_from(n).unwrap_or(u32::MAX))) else {
            return Ok(());
        };
        let too_fast = |wait| TooFast { what: "tokens", limit, wait };
        match limiter.check_n(n) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(until)) => Err(too_fast(until.wait_time_from(DefaultClock::default().now()))),
            Err(_) => Err(too_fast(Duration::from_secs(60))),
        }
    }
}

/// Accepted names in the `Host` header. They stop DNS rebinding: a web page can make its own name resolve to this machine,
/// but the browser sends that name as `Host`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hosts {
    Any,
    /// Lower case, without ports.
    Only(Vec<String>),
}

impl Hosts {
    /// From `allowed_hosts`, for a server that listens on `address`.
    pub fn new(settings: &Settings, address: IpAddr) -> Hosts {
        let named = &settings.allowed_hosts;
        if named.iter().any(|name| name == "*") || (named.is_empty() && !address.is_loopback()) {
            return Hosts::Any;
        }
        let own = ["localhost", "127.0.0.1", "::1", settings.host.as_str()].map(str::to_lowercase);
        let address = address.to_string();
        Hosts::Only(named.iter().map(|n| n.to_lowercase()).chain(own).chain([address]).collect())
    }

    pub fn allow(&self, host: Option<&str>) -> bool {
        let Hosts::Only(names) = self else { return true };
        host.is_some_and(|host| names.iter().any(|name| *name == without_port(host).to_lowercase()))
    }
}

/// The name in `name`, `name:port`, `[v6]` or `[v6]:port`.
fn without_port(host: &str) -> &str {
    if let Some((address, _)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return address;
    }
    match host.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') && port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn keys(text: &str) -> Result<Keys, Failure> {
        let path = std::env::temp_dir().join(format!("starling-keys-{}-{}", std::process::id(), text.len()));
        fs::write(&path, text).unwrap();
        let keys = Keys::new(&Settings { api_key_file: Some(path.clone()), ..Settings::default() });
        fs::remove_file(path).unwrap();
        keys
    }

    #[test]
    fn a_key_names_its_tenant() {
        let keys = keys("# people\nsk-1 alice 3\n\nsk-2\n").unwrap();
        let name = |key| keys.tenant(key).map(|t| (t.name.to_string(), t.share));
        assert_eq!(name(Some("sk-1")), Some(("alice".into(), 3)));
        assert_eq!(name(Some("sk-2")), Some(("key-4".into(), 1)));
        assert!([None, Some(""), Some("sk-"), Some("sk-11"), Some("#")].into_iter().all(|key| name(key).is_none()));
    }

    #[test]
    fn an_invalid_line_is_reported_with_its_number() {
        for (text, part) in [("k t x", "line 1: found share \"x\""), ("\nk t 1 2", "line 2"), ("#", "no key")] {
            let error = keys(text).err().expect("an error").to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn limits_are_per_minute() {
        let settings = Settings { key_requests: 2, key_tokens: 100, ..Settings::default() };
        let tenant = Tenant::new("t", 1, &settings);
        assert!(tenant.count_request(2).is_ok() && tenant.count_request(2).is_ok());
        let wait = tenant.count_request(2).unwrap_err().wait;
        assert!(wait > Duration::from_secs(20) && wait <= Duration::from_secs(30), "{wait:?}");
        assert!(tenant.count_tokens(90, 100).is_ok());
        assert!(tenant.count_tokens(50, 100).is_err());
        assert!(tenant.count_tokens(1_000_000, 100).is_err());
        assert!(tenant.count_tokens(10, 100).is_ok());
    }

    #[test]
    fn other_names_are_refused_on_loopback() {
        let hosts = Hosts::new(&Settings::default(), [127, 0, 0, 1].into());
        for host in ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:8080", "[::1]"] {
            assert!(hosts.allow(Some(host)), "{host}");
        }
        for host in [None, Some(""), Some("evil.example"), Some("localhost.evil.example:8080"), Some("127.0.0.1.x")] {
            assert!(!hosts.allow(host), "{host:?}");
        }
        assert!(Hosts::new(&Settings::default(), [10, 0, 0, 1].into()).allow(None));
        let named = Settings { allowed_hosts: vec!["Api.example".into()], ..Settings::default() };
        assert!(Hosts::new(&named, [127, 0, 0, 1].into()).allow(Some("api.example")));
    }
}
