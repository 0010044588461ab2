//! TLS configuration from PEM files.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::{Error, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::config::Settings;
use crate::error::Failure;

/// `None` without `tls_cert` and `tls_key`.
///
/// # Errors
/// If only one is given, a file cannot be read or is not PEM, or the key does not match the certificate.
pub fn acceptor(settings: &Settings) -> Result<Option<TlsAcceptor>, Failure> {
    let (certificate, key) = match (&settings.tls_cert, &settings.tls_key) {
        (None, None) => return Ok(None),
        (Some(certificate), Some(key)) => (certificate, key),
        _ => return Err(Failure::Usage("tls-cert, tls-key: found only one, expected both or none".into())),
    };
    let chain = CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let chain = chain.map_err(|e| wrong(certificate, e))?;
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|e| wrong(key, e))?;
    let invalid = |e| Failure::Usage(format!("tls-cert, tls-key: {e}"));
    let versions =
        ServerConfig::builder_with_provider(Arc::new(default_provider())).with_safe_default_protocol_versions();
    let config = versions.map_err(invalid)?.with_no_client_auth().with_single_cert(chain, secret);
    let mut config = config.map_err(invalid)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Some(TlsAcceptor::from(Arc::new(config))))
}

fn wrong(path: &Path, e: Error) -> Failure {
    match e {
        Error::Io(source) => Failure::File { path: path.into(), source },
        e => Failure::File { path: path.into(), source: io::Error::other(format!("invalid PEM: {e}")) },
    }
}
