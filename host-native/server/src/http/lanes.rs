//! Which connections are served: those within the limits, and some beyond them for probes and administrators.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::connection::{AddressPermit, Addresses};
use crate::config::Settings;
use crate::http::error::{ApiError, HttpError};

/// Connections beyond the limits that are served for probes and administrators, in all and of one address.
const RESERVE: (usize, usize) = (64, 4);
/// Time for the headers of such a connection, and for a byte of its response to be taken.
pub const RESERVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Counts connections: up to the limits, and some beyond them.
pub struct Lanes {
    max_connections: usize,
    connections: Arc<Semaphore>,
    addresses: Arc<Addresses>,
    reserve: Arc<Semaphore>,
    reserve_addresses: Arc<Addresses>,
}

impl Lanes {
    pub fn new(settings: &Settings) -> Lanes {
        Lanes {
            max_connections: settings.max_connections,
            connections: Arc::new(Semaphore::new(settings.max_connections)),
            addresses: Arc::new(Addresses::new(settings.connections_per_address())),
            reserve: Arc::new(Semaphore::new(RESERVE.0)),
            reserve_addresses: Arc::new(Addresses::new(RESERVE.1)),
        }
    }

    /// Counts a connection, and returns whether it is beyond the limits. `None`: it must be closed.
    pub fn acquire(&self, address: IpAddr) -> Option<(OwnedSemaphorePermit, AddressPermit, bool)> {
        let acquire = |connections: &Arc<Semaphore>, addresses: &Arc<Addresses>| {
            Some((Arc::clone(connections).try_acquire_owned().ok()?, addresses.acquire(address)?))
        };
        if let Some((permit, share)) = acquire(&self.connections, &self.addresses) {
            return Some((permit, share, false));
        }
        acquire(&self.reserve, &self.reserve_addresses).map(|(permit, share)| (permit, share, true))
    }

    /// Waits until the connections within the limits are closed.
    pub async fn closed(&self) {
        let all = u32::try_from(self.max_connections).unwrap_or(u32::MAX);
        let _ = self.connections.acquire_many(all).await;
    }
}

/// 503: the connection is beyond the limits.
pub fn too_many_connections() -> Response {
    let message = "there are too many connections (--max-connections, --max-connections-per-address); try again later";
    let error = ApiError::unavailable(message).code("too_many_connections");
    HttpError(ApiError { retry: Some(RESERVE_TIMEOUT), ..error }).into_response()
}
