//! Memory that connections hold together: bodies of requests as they arrive, what is parsed from them, and responses that
//! their readers have not taken. All of it is in one account with a limit; a tenant and an address have a share of it.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use starling_api::error::ApiError;

use super::peer::network;
use crate::config::Settings;
use crate::guard::auth::Keys;

/// `Retry-After` of a refusal.
const RETRY: Duration = Duration::from_secs(2);

/// Limits in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimits {
    pub total: usize,
    pub tenant: usize,
    pub address: usize,
}

impl MemoryLimits {
    /// The limits of a server. Where all requests are of one tenant, it may have all.
    pub fn new(settings: &Settings, keys: &Keys) -> MemoryLimits {
        let total = usize::try_from(settings.connection_memory.0).unwrap_or(usize::MAX);
        let share = (total as f64 * f64::from(settings.connection_memory_share)) as usize;
        MemoryLimits { total, tenant: if keys.has_several_tenants() { share } else { total }, address: share }
    }
}

/// A limit is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MemoryRefused {
    #[error(
        "requests and responses of all connections hold {held} bytes, and {more} more exceed {limit} (--connection-memory); try again later"
    )]
    Total { held: usize, more: usize, limit: usize },
    #[error(
        "requests and responses of this tenant hold {held} bytes, and {more} more exceed its share {limit} (--connection-memory-share); read responses, or try again later"
    )]
    Tenant { held: usize, more: usize, limit: usize },
    #[error(
        "requests and responses of this address hold {held} bytes, and {more} more exceed its share {limit} (--connection-memory-share); read responses, or try again later"
    )]
    Address { held: usize, more: usize, limit: usize },
}

impl From<MemoryRefused> for ApiError {
    fn from(refused: MemoryRefused) -> ApiError {
        let message = refused.to_string();
        let error = match refused {
            MemoryRefused::Total { .. } => ApiError::unavailable(message),
            MemoryRefused::Tenant { .. } | MemoryRefused::Address { .. } => {
                ApiError::new(429, "rate_limit_error", message)
            }
        };
        ApiError { retry: Some(RETRY), ..error }.code("connection_memory")
    }
}

/// The account.
#[derive(Debug)]
pub struct ConnectionMemory(Mutex<Held>);

#[derive(Debug)]
struct Held {
    limits: MemoryLimits,
    total: usize,
    tenants: HashMap<Arc<str>, usize>,
    addresses: HashMap<IpAddr, usize>,
}

/// What one request holds, until it is dropped.
#[derive(Debug)]
pub struct HeldMemory {
    account: Arc<ConnectionMemory>,
    /// `None` before authentication.
    tenant: Option<Arc<str>>,
    address: Option<IpAddr>,
    n_bytes: Mutex<usize>,
}

impl ConnectionMemory {
    pub fn new(limits: MemoryLimits) -> ConnectionMemory {
        let (tenants, addresses) = (HashMap::new(), HashMap::new());
        ConnectionMemory(Mutex::new(Held { limits, total: 0, tenants, addresses }))
    }

    /// Changes the limits. What is held stays.
    pub fn set_limits(&self, limits: MemoryLimits) {
        self.lock().limits = limits;
    }

    /// The part of a request, which holds nothing yet.
    pub fn part(self: &Arc<Self>, tenant: Option<Arc<str>>, address: Option<IpAddr>) -> HeldMemory {
        let address = address.map(network);
        HeldMemory { account: Arc::clone(self), tenant, address, n_bytes: Mutex::new(0) }
    }

    /// Bytes that all connections hold.
    #[cfg(test)]
    pub fn n_bytes(&self) -> usize {
        self.lock().total
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HeldMemory {
    /// Takes `more` bytes.
    ///
    /// # Errors
    /// If they exceed a limit. Nothing has changed.
    pub fn grow(&self, more: usize) -> Result<(), MemoryRefused> {
        let mut own = self.n_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut held = self.account.lock();
        let MemoryLimits { total, tenant, address } = held.limits;
        let of_tenant = self.tenant.as_ref().and_then(|tenant| held.tenants.get(tenant)).copied().unwrap_or(0);
        let of_address = self.address.and_then(|address| held.addresses.get(&address)).copied().unwrap_or(0);
        // whose share is used up is told first: it can do something about it; a share of all is none
        if self.tenant.is_some() && tenant < total && of_tenant.saturating_add(more) > tenant {
            return Err(MemoryRefused::Tenant { held: of_tenant, more, limit: tenant });
        }
        if self.address.is_some() && address < total && of_address.saturating_add(more) > address {
            return Err(MemoryRefused::Address { held: of_address, more, limit: address });
        }
        if held.total.saturating_add(more) > total {
            return Err(MemoryRefused::Total { held: held.total, more, limit: total });
        }
        held.total += more;
        *own += more;
        if more > 0 {
            self.tenant.iter().for_each(|name| *held.tenants.entry(Arc::clone(name)).or_default() += more);
            self.address.iter().for_each(|address| *held.addresses.entry(*address).or_default() += more);
        }
        Ok(())
    }

    /// Gives bytes back, at most those that it has.
    pub fn shrink(&self, less: usize) {
        let mut own = self.n_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let less = less.min(*own);
        *own -= less;
        let mut held = self.account.lock();
        held.total -= less;
        self.tenant.iter().for_each(|name| subtract(&mut held.tenants, name, less));
        self.address.iter().for_each(|address| subtract(&mut held.addresses, address, less));
    }

    /// Changes what it holds from `before` to `now` bytes.
    ///
    /// # Errors
    /// If more would exceed a limit. Nothing has changed.
    pub fn settle(&self, before: usize, now: usize) -> Result<(), MemoryRefused> {
        if now > before {
            return self.grow(now - before);
        }
        self.shrink(before - now);
        Ok(())
    }
}

impl Drop for HeldMemory {
    fn drop(&mut self) {
        self.shrink(usize::MAX);
    }
}

fn subtract<K: Eq + Hash>(counts: &mut HashMap<K, usize>, key: &K, n: usize) {
    if let Some(count) = counts.get_mut(key) {
        *count -= n;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

/// Estimate of the memory for values that are parsed from JSON: the bytes of texts, and a value per separator.
pub fn parsed_bytes(json: &[u8]) -> usize {
    const VALUE_BYTES: usize = 32;
    json.len() + VALUE_BYTES * json.iter().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn account() -> Arc<ConnectionMemory> {
        Arc::new(ConnectionMemory::new(MemoryLimits { total: 100, tenant: 60, address: 50 }))
    }

    fn part(account: &Arc<ConnectionMemory>, tenant: &str, address: u8) -> HeldMemory {
        let tenant = (!tenant.is_empty()).then(|| tenant.into());
        account.part(tenant, Some(IpAddr::from([10, 0, 0, address])))
    }

    #[test]
    fn a_tenant_and_an_address_have_a_share_and_all_have_a_limit() {
        let account = account();
        let (first, second) = (part(&account, "a", 1), part(&account, "a", 2));
        first.grow(40).unwrap();
        assert!(matches!(first.grow(11), Err(MemoryRefused::Address { held: 40, .. })), "of the address");
        assert!(matches!(second.grow(21), Err(MemoryRefused::Tenant { held: 40, .. })), "of the tenant");
        second.grow(20).unwrap();
        // before authentication only the address counts
        let unknown = part(&account, "", 3);
        assert!(matches!(unknown.grow(41), Err(MemoryRefused::Total { held: 60, .. })), "of all");
        unknown.grow(40).unwrap();
        drop(first);
        assert_eq!(account.n_bytes(), 60);
        let codes =
            [MemoryRefused::Total { held: 0, more: 1, limit: 0 }, MemoryRefused::Tenant { held: 0, more: 1, limit: 0 }];
        assert_eq!(codes.map(|refused| ApiError::from(refused).status), [503, 429]);
    }

    proptest! {
        #[test]
        fn the_account_is_the_sum_of_its_parts(
            changes in prop::collection::vec((0usize..6, any::<bool>(), 0usize..40), 0..60),
        ) {
            let account = account();
            let parts: Vec<HeldMemory> = (0..6).map(|i| part(&account, ["a", "b", ""][i % 3], (i / 3) as u8)).collect();
            let mut held = [0; 6];
            for (i, grows, n) in changes {
                if grows {
                    held[i] += if parts[i].grow(n).is_ok() { n } else { 0 };
                } else {
                    parts[i].shrink(n);
                    held[i] -= n.min(held[i]);
                }
                prop_assert_eq!(account.n_bytes(), held.iter().sum::<usize>());
                prop_assert!(account.n_bytes() <= 100 && held[0] + held[3] <= 60 && held[..3].iter().sum::<usize>() <= 50);
            }
            drop(parts);
            let rest = account.lock();
            prop_assert!(rest.total == 0 && rest.tenants.is_empty() && rest.addresses.is_empty());
        }
    }

    #[test]
    fn parsed_values_count() {
        assert!(parsed_bytes(b"[[],[],[],[]]") >= 5 * 24);
        assert_eq!(parsed_bytes(b"\"text\""), 6);
    }
}
