//! The other end of a connection.

use std::net::IpAddr;
use std::sync::Arc;

/// The other end of a connection; an extension of its requests.
#[derive(Debug, Clone)]
pub struct Peer {
    pub address: IpAddr,
    /// Names of its certificate, if it has shown one that is valid.
    pub certificate: Option<Arc<[String]>>,
}

/// The address under which connections are counted: of IPv6 the /64 prefix, as one client usually owns all of it.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() & !u128::from(u64::MAX)).into()),
        v4 => v4,
    }
}
