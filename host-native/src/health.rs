//! `starling health`: asks a server whether it lives, for health checks of containers.

use std::io::Error;
use std::time::Duration;

use reqwest::blocking::Client;
use starling_host::error::Failure;
use starling_host::tls_provider;

use crate::cli::HealthArgs;

/// Time for a response.
const TIMEOUT: Duration = Duration::from_secs(4);

/// # Errors
/// If there is no response within [`TIMEOUT`], or its status is not 200.
pub fn run(args: &HealthArgs) -> Result<(), Failure> {
    let url = format!("{}/{}", args.url.trim_end_matches('/'), if args.ready { "readyz" } else { "livez" });
    let failed = |what: String| Failure::Io(Error::other(format!("{url}: {what}")));
    tls_provider::install();
    // the certificate is of the server's public name, not of this address
    let client = Client::builder().no_proxy().timeout(TIMEOUT).danger_accept_invalid_certs(true).build();
    let response = client.and_then(|client| client.get(&url).send()).map_err(|e| failed(unreachable(&e)))?;
    let status = response.status().as_u16();
    if status == 200 { Ok(()) } else { Err(failed(format!("status {status}, expected 200"))) }
}

/// Why a server did not answer.
pub fn unreachable(error: &reqwest::Error) -> String {
    if error.is_connect() {
        "no server answers at this address".into()
    } else if error.is_timeout() {
        "the server does not answer in time".into()
    } else {
        error.to_string()
    }
}
