//! API keys, client certificates, keys of signed requests, tenants, rate limits, and the check of the `Host` header.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use governor::clock::{Clock, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use sha2::{Digest, Sha256};
use starling::receipt::Hex;
use starling_host::error::Failure;
use starling_host::text_file::text_file;
use subtle::{Choice, ConstantTimeEq};

use super::signature::MIN_SECRET_BYTES;
use crate::config::ANYONE;
use crate::config::Settings;
use crate::config::value::seconds;
use crate::priority::Priority;

const MAX_SHARE: u32 = 1000;

/// The clients that the server knows.
pub struct Keys {
    clients: Vec<(Proof, Client)>,
    /// Whether any certificate that the CA for clients has signed is enough: no line names one.
    any_certificate: bool,
    anyone: Client,
}

/// What a client shows.
enum Proof {
    /// SHA-256 of an API key: digests have equal length, for a comparison in constant time, and keys are not kept in memory.
    Key([u8; 32]),
    /// A name of a certificate.
    Certificate(String),
    /// The key of signed requests.
    Signature { id: String, secret: Arc<[u8]> },
}

/// A known client: one line of the file of keys.
#[derive(Clone)]
pub struct Client {
    /// Names the credential in the audit log, without revealing it.
    pub id: Arc<str>,
    pub tenant: Arc<Tenant>,
    /// The highest priority across tenants; `None`: that of [`Keys::max_priority`].
    max_priority: Option<Priority>,
}

/// What a request came with.
#[derive(Debug, Clone, Copy)]
pub enum Credential<'a> {
    Key(&'a str),
    /// Names of a client certificate that is valid.
    Certificate(&'a [String]),
    /// The id of the key that has signed the request; the signature is valid.
    Signature(&'a str),
}

/// Format of a line in a file of keys.
const LINE: &str = "KEY, cert:NAME or hmac:ID:SECRET, then [TENANT [SHARE]] [max-priority=high|normal|low]";
/// Option of a line: the highest priority across tenants.
const MAX_PRIORITY: &str = "max-priority=";

impl Proof {
    /// The proof in the first word of a line, and the id of its client.
    fn parse(word: &str) -> Result<(Proof, Arc<str>), String> {
        if let Some(name) = word.strip_prefix("cert:") {
            return Ok((Proof::Certificate(name.into()), word.into()));
        }
        let Some(rest) = word.strip_prefix("hmac:") else {
            let digest: [u8; 32] = Sha256::digest(word.as_bytes()).into();
            let start: [u8; 4] = [digest[0], digest[1], digest[2], digest[3]];
            return Ok((Proof::Key(digest), format!("key-{}", Hex(start)).into()));
        };
        match rest.split_once(':') {
            Some((id, secret)) if !id.is_empty() && secret.len() >= MIN_SECRET_BYTES => {
                let id = id.to_string();
                let name = format!("hmac:{id}").into();
                Ok((Proof::Signature { id, secret: secret.as_bytes().into() }, name))
            }
            _ => Err(format!("expected hmac:ID:SECRET with a secret of at least {MIN_SECRET_BYTES} bytes")),
        }
    }
}

/// The value of the option `max-priority`.
fn max_priority(options: &[&str]) -> Result<Option<Priority>, String> {
    let [option] = options else {
        let n = options.len();
        return if n == 0 { Ok(None) } else { Err(format!("found {n} times `{MAX_PRIORITY}`, expected one")) };
    };
    let name = &option[MAX_PRIORITY.len()..];
    let found = Priority::ALL.into_iter().find(|priority| priority.name() == name);
    found.map(Some).ok_or_else(|| format!("found {option:?}, expected {MAX_PRIORITY}high, normal or low"))
}

/// Reads a file of keys.
fn read_keys(path: &Path, settings: &Settings) -> Result<Vec<(Proof, Client)>, Failure> {
    let text = text_file(path)?;
    let wrong = |i: usize, what: String| Failure::Usage(format!("{}: line {}: {what}", path.display(), i + 1));
    let mut clients = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let (options, words): (Vec<&str>, Vec<&str>) =
            line.split_whitespace().partition(|word| word.starts_with(MAX_PRIORITY));
        let mut words = words.into_iter();
        let Some(first) = words.next().filter(|first| !first.starts_with('#')) else { continue };
        let (proof, id) = Proof::parse(first).map_err(|what| wrong(i, what))?;
        if clients.iter().any(|(_, known): &(Proof, Client)| known.id == id) {
            return Err(wrong(i, format!("found `{id}` again")));
        }
        // the id follows from the key: a name by the line's number would pass to another key when lines are removed
        let name = words.next().map_or_else(|| id.to_string(), Into::into);
        let share = match words.next().map(|word| (word, word.parse())) {
            None => 1,
            Some((_, Ok(share))) if (1..=MAX_SHARE).contains(&share) => share,
            Some((word, _)) => {
                return Err(wrong(i, format!("found share {word:?}, expected an integer from 1 to {MAX_SHARE}")));
            }
        };
        if let Some(word) = words.next() {
            return Err(wrong(i, format!("found a fourth field {word:?}, expected {LINE}")));
        }
        let max_priority = max_priority(&options).map_err(|what| wrong(i, what))?;
        let tenant = Arc::new(Tenant::new(&name, share, settings));
        clients.push((proof, Client { id, tenant, max_priority }));
    }
    if clients.is_empty() {
        return Err(Failure::Usage(format!("{}: found no key, expected lines of {LINE}", path.display())));
    }
    Ok(clients)
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

impl Keys {
    /// The clients of `api_key`, `api_key_file` and `tls_client_ca`.
    ///
    /// # Errors
    /// If the file cannot be read, has an invalid line, or has no key.
    pub fn new(settings: &Settings) -> Result<Keys, Failure> {
        let mut clients = Vec::new();
        if let Some(key) = settings.api_key.as_deref().filter(|key| !key.is_empty()) {
            let (proof, id) = Proof::parse(key).map_err(|what| Failure::Usage(format!("api-key: {what}")))?;
            let tenant = Arc::new(Tenant::new(ANYONE, 1, settings));
            clients.push((proof, Client { id, tenant, max_priority: None }));
        }
        if let Some(path) = &settings.api_key_file {
            clients.extend(read_keys(path, settings)?);
        }
        let names_certificate = clients.iter().any(|(proof, _)| matches!(proof, Proof::Certificate(_)));
        let any_certificate = settings.tls_client_ca.is_some() && !names_certificate;
        Ok(Keys { clients, any_certificate, anyone: Client::anyone(settings) })
    }

    /// The clients of a file, for a role that must have one.
    ///
    /// # Errors
    /// If the file cannot be read, has an invalid line, or has no key.
    pub fn of_file(path: &Path, settings: &Settings) -> Result<Keys, Failure> {
        Ok(Keys { clients: read_keys(path, settings)?, any_certificate: false, anyone: Client::anyone(settings) })
    }

    /// Whether requests need a credential.
    pub fn are_needed(&self) -> bool {
        !self.clients.is_empty() || self.any_certificate
    }

    /// Whether requests can be of different tenants.
    pub fn has_several_tenants(&self) -> bool {
        let mut names = self.clients.iter().map(|(_, client)| &client.tenant.name);
        let anyone = self.any_certificate.then_some(&self.anyone.tenant.name);
        let first = names.next().or(anyone);
        names.chain(anyone).any(|name| Some(name) != first)
    }

    /// The highest priority that requests of a client have across tenants. Without the option of its key it is normal; on a
    /// server of one tenant, high.
    pub fn max_priority(&self, client: &Client) -> Priority {
        let default = || if self.has_several_tenants() { Priority::Normal } else { Priority::High };
        client.max_priority.unwrap_or_else(default)
    }

    /// The client with a credential; anyone if none is needed. Compares with all keys in constant time.
    pub fn client(&self, credential: Option<Credential<'_>>) -> Option<Client> {
        if !self.are_needed() {
            return Some(self.anyone.clone());
        }
        let credential = credential?;
        let digest: [u8; 32] = match credential {
            Credential::Key(key) => Sha256::digest(key.as_bytes()).into(),
            _ => [0; 32],
        };
        let mut found = None;
        for (proof, client) in &self.clients {
            let same = match (proof, credential) {
                (Proof::Key(known), Credential::Key(_)) => known.ct_eq(&digest),
                (Proof::Certificate(known), Credential::Certificate(names)) => {
                    Choice::from(u8::from(names.contains(known)))
                }
                (Proof::Signature { id: known, .. }, Credential::Signature(id)) => Choice::from(u8::from(known == id)),
                _ => Choice::from(0),
            };
            if bool::from(same) {
                found = Some(client);
            }
        }
        let any_certificate = self.any_certificate && matches!(credential, Credential::Certificate(_));
        found.or(any_certificate.then_some(&self.anyone)).cloned()
    }

    /// The secret of the signing key `id`.
    pub fn secret(&self, id: &str) -> Option<Arc<[u8]>> {
        self.clients.iter().find_map(|(proof, _)| match proof {
            Proof::Signature { id: known, secret } if known == id => Some(Arc::clone(secret)),
            _ => None,
        })
    }
}

impl Client {
    fn anyone(settings: &Settings) -> Client {
        Client { id: ANYONE.into(), tenant: Arc::new(Tenant::new(ANYONE, 1, settings)), max_priority: None }
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

    /// Tenant of the key `sk-2` without a name.
    const UNNAMED: &str = "key-bbaae8c9";

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
        let name = |key: Option<&str>| {
            let client = keys.client(key.map(Credential::Key));
            client.map(|client| (client.tenant.name.to_string(), client.tenant.share))
        };
        assert_eq!(name(Some("sk-1")), Some(("alice".into(), 3)));
        assert_eq!(name(Some("sk-2")), Some((UNNAMED.into(), 1)));
        assert!([None, Some(""), Some("sk-"), Some("sk-11"), Some("#")].into_iter().all(|key| name(key).is_none()));
    }

    /// The documented rotation: B is added behind A, then A is removed, and B stands where A stood.
    #[test]
    fn a_key_without_a_name_is_the_same_tenant_on_any_line() {
        let tenant =
            |keys: &Keys, key| keys.client(Some(Credential::Key(key))).map(|client| client.tenant.name.to_string());
        let settings = Settings::default();
        let of_file = |text: &str| {
            let path = std::env::temp_dir().join(format!("starling-admins-{}-{}", std::process::id(), text.len()));
            fs::write(&path, text).unwrap();
            let keys = Keys::of_file(&path, &settings);
            fs::remove_file(path).unwrap();
            keys
        };
        for read in [&keys as &dyn Fn(&str) -> Result<Keys, Failure>, &of_file] {
            let both = read("sk-1\nsk-2\n").unwrap();
            let after = read("sk-2\n").unwrap();
            assert_eq!(tenant(&both, "sk-2").as_deref(), Some(UNNAMED));
            assert_eq!(tenant(&after, "sk-2").as_deref(), Some(UNNAMED));
            assert_ne!(tenant(&both, "sk-1").as_deref(), Some(UNNAMED));
        }
        let others = keys("cert:a.example\nhmac:k1:0123456789abcdef\n").unwrap();
        let name = ["a.example".to_string()];
        let of = |credential| others.client(Some(credential)).unwrap().tenant.name.to_string();
        assert_eq!(of(Credential::Certificate(&name)), "cert:a.example");
        assert_eq!(of(Credential::Signature("k1")), "hmac:k1");
    }

    #[test]
    fn a_line_may_name_a_certificate_or_a_signing_key() {
        let keys = keys("cert:a.example alice\ncert:spiffe://b bob 2\nhmac:k1:0123456789abcdef carol\nsk-1\n").unwrap();
        let tenant = |credential| keys.client(Some(credential)).map(|client| client.tenant.name.to_string());
        let names = ["x.example".to_string(), "spiffe://b".to_string()];
        assert_eq!(tenant(Credential::Certificate(&names)).as_deref(), Some("bob"));
        assert_eq!(tenant(Credential::Certificate(&names[..1])), None);
        assert_eq!(tenant(Credential::Signature("k1")).as_deref(), Some("carol"));
        assert_eq!(keys.secret("k1").as_deref(), Some(&b"0123456789abcdef"[..]));
        // what names a credential of another kind is no API key
        let no_keys = ["cert:a.example", "a.example", "hmac:k1:0123456789abcdef", "k1", "0123456789abcdef"];
        assert!(no_keys.into_iter().all(|key| tenant(Credential::Key(key)).is_none()));
        assert!(tenant(Credential::Signature("sk-1")).is_none() && keys.secret("sk-1").is_none());
        assert!(!keys.client(Some(Credential::Key("sk-1"))).unwrap().id.contains("sk-1"));
    }

    #[test]
    fn any_certificate_of_the_ca_is_enough_if_no_line_names_one() {
        let settings = Settings { tls_client_ca: Some("ca.pem".into()), ..Settings::default() };
        let keys = Keys::new(&settings).unwrap();
        assert!(keys.are_needed() && keys.client(None).is_none());
        assert!(keys.client(Some(Credential::Key(""))).is_none());
        assert_eq!(&*keys.client(Some(Credential::Certificate(&[]))).unwrap().tenant.name, ANYONE);
    }

    #[test]
    fn a_key_has_a_highest_priority_across_tenants() {
        let priority = |text: &str, key: &str| {
            let keys = keys(text).unwrap();
            keys.max_priority(&keys.client(Some(Credential::Key(key))).unwrap())
        };
        let text = "sk-1 alice 3 max-priority=high\nsk-2 bob max-priority=low\nmax-priority=high sk-3\nsk-4 carol 2\n";
        let found = ["sk-1", "sk-2", "sk-3", "sk-4"].map(|key| priority(text, key));
        assert_eq!(found, [Priority::High, Priority::Low, Priority::High, Priority::Normal]);
        // of one tenant, nobody else waits
        assert_eq!(priority("sk-1 alice\nsk-2 alice 1", "sk-1"), Priority::High);
        let open = Keys::new(&Settings::default()).unwrap();
        assert_eq!(open.max_priority(&open.client(None).unwrap()), Priority::High);
    }

    #[test]
    fn an_invalid_line_is_reported_with_its_number() {
        let cases = [
            ("k t x", "line 1: found share \"x\""),
            ("\nk t 1 2", "line 2"),
            ("#", "no key"),
            ("k t max-priority=urgent", "line 1: found \"max-priority=urgent\""),
            ("k max-priority=low max-priority=high", "line 1: found 2 times"),
            ("hmac:a:short", "line 1: expected hmac:ID:SECRET"),
            ("hmac:a:0123456789abcdef\nhmac:a:0123456789abcdeg", "line 2: found `hmac:a` again"),
        ];
        for (text, part) in cases {
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
