//! TLS: configuration from PEM files, and the names in client certificates.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::server::WebPkiClientVerifier;
use sha2::{Digest, Sha256};
use starling::receipt::Hex;
use starling_host::error::Failure;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::{Error, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::config::Settings;

/// Maximum number of names of one certificate that are looked at.
const MAX_NAMES: usize = 64;

/// `None` without `tls_cert` and `tls_key`.
///
/// # Errors
/// If only one is given, a file cannot be read or is not PEM, the key does not match the certificate, or settings of client
/// certificates are given without TLS.
pub fn acceptor(settings: &Settings) -> Result<Option<TlsAcceptor>, Failure> {
    let wants_clients = settings.tls_client_ca.is_some() || settings.tls_client_required;
    let (certificate, key) = match (&settings.tls_cert, &settings.tls_key) {
        (None, None) if wants_clients => {
            return Err(Failure::Usage("tls-client-ca: expected tls-cert and tls-key with it".into()));
        }
        (None, None) => return Ok(None),
        (Some(certificate), Some(key)) => (certificate, key),
        _ => return Err(Failure::Usage("tls-cert, tls-key: found only one, expected both or none".into())),
    };
    let chain = certificates(certificate)?;
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|e| wrong(key, e))?;
    let invalid = |e: &dyn std::fmt::Display| Failure::Usage(format!("tls-cert, tls-key: {e}"));
    let provider = Arc::new(default_provider());
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
    let config = config.map_err(|e| invalid(&e))?;
    let config = match &settings.tls_client_ca {
        None if settings.tls_client_required => {
            return Err(Failure::Usage("tls-client-required: expected tls-client-ca with it".into()));
        }
        None => config.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for root in certificates(path)? {
                roots.add(root).map_err(|e| Failure::Usage(format!("{}: {e}", path.display())))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            let verifier = if settings.tls_client_required { verifier } else { verifier.allow_unauthenticated() };
            let verifier = verifier.build().map_err(|e| Failure::Usage(format!("{}: {e}", path.display())))?;
            config.with_client_cert_verifier(verifier)
        }
    };
    let mut config = config.with_single_cert(chain, secret).map_err(|e| invalid(&e))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Some(TlsAcceptor::from(Arc::new(config))))
}

/// Names of a certificate: its DNS names, its URIs (such as SPIFFE ids), and `sha256:` with the digest of the whole.
pub fn names(certificate: &CertificateDer<'_>) -> Arc<[String]> {
    let fingerprint = format!("sha256:{}", Hex(<[u8; 32]>::from(Sha256::digest(certificate))));
    let Ok(parsed) = webpki::EndEntityCert::try_from(certificate) else { return [fingerprint].into() };
    let names = parsed.valid_dns_names().chain(parsed.valid_uri_names()).take(MAX_NAMES).map(str::to_string);
    names.chain([fingerprint]).collect()
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let found = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let found = found.map_err(|e| wrong(path, e))?;
    if found.is_empty() {
        return Err(Failure::Usage(format!("{}: found no certificate, expected PEM", path.display())));
    }
    Ok(found)
}

fn wrong(path: &Path, e: Error) -> Failure {
    match e {
        Error::Io(source) => Failure::File { path: path.into(), source },
        e => Failure::File { path: path.into(), source: io::Error::other(format!("invalid PEM: {e}")) },
    }
}
