//! The cryptography of HTTPS clients.

/// Makes ring the provider of rustls, which clients without one of their own use. Does nothing if there is one already.
pub fn install() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}
