//! TLS: client certificates in place of keys, and certificates renewed without a restart.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::admin_client::Directory;
use crate::server::{LIMIT, Server};

/// A certificate authority.
struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
struct Pair {
    certificate: String,
    key: String,
}

impl Authority {
    fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        Authority(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    /// A certificate for a DNS name or a URI.
    fn sign(&self, name: &str) -> Pair {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        let is_uri = name.contains("://");
        let name = name.to_string().try_into().expect("ASCII");
        params.subject_alt_names = vec![if is_uri { SanType::URI(name) } else { SanType::DnsName(name) }];
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.0).expect("a certificate").pem();
        Pair { certificate, key: key.serialize_pem() }
    }
}

/// `GET path`: the status, and the certificate that the server has shown. `None`: the connection failed.
fn get(server: &Server, ca: &Authority, client: Option<&Pair>, key: Option<&str>) -> Option<(u16, Vec<u8>)> {
    let mut roots = RootCertStore::empty();
    roots.add(ca.0.der().clone()).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().expect("versions");
    let config = config.with_root_certificates(roots);
    let config = match client {
        None => config.with_no_client_auth(),
        Some(pair) => {
            let certificate = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).expect("PEM");
            let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).expect("PEM");
            config.with_client_auth_cert(vec![certificate], key).expect("a certificate")
        }
    };
    let connection = ClientConnection::new(Arc::new(config), ServerName::try_from("localhost").expect("a name"));
    let socket = TcpStream::connect(&server.address).expect("a connection");
    socket.set_read_timeout(Some(LIMIT)).expect("a socket");
    let mut stream = StreamOwned::new(connection.expect("a connection"), socket);
    let key = key.map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
    let head = format!("GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{key}\r\n");
    stream.write_all(head.as_bytes()).ok()?;
    let mut response = Vec::new();
    let end = stream.read_to_end(&mut response);
    let text = String::from_utf8_lossy(&response);
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    if status.is_none() {
        assert!(end.is_err(), "an empty response");
        return None;
    }
    let shown = stream.conn.peer_certificates().and_then(<[_]>::first).map(|shown| shown.to_vec());
    Some((status?, shown.expect("a certificate")))
}

#[test]
fn a_client_certificate_is_as_good_as_a_key() {
    let directory = Directory::new();
    let path = |name: &str| directory.0.join(name).to_str().expect("a path").to_string();
    let (ca, stranger) = (Authority::new(), Authority::new());
    let own = ca.sign("localhost");
    fs::write(path("server.pem"), &own.certificate).expect("a file");
    fs::write(path("server.key"), &own.key).expect("a file");
    fs::write(path("ca.pem"), ca.0.pem()).expect("a file");
    fs::write(path("keys"), "cert:spiffe://cluster/alice alice\nthe-key bob\n").expect("a file");
    let tls = ["--tls-cert", &path("server.pem"), "--tls-key", &path("server.key"), "--tls-client-ca", &path("ca.pem")];
    let server = Server::start(&[&tls[..], &["--api-key-file", &path("keys")]].concat());
    let status = |client: Option<&Pair>, key| get(&server, &ca, client, key).map(|(status, _)| status);
    let (alice, carol) = (ca.sign("spiffe://cluster/alice"), ca.sign("carol.example"));
    assert_eq!(status(Some(&alice), None), Some(200));
    assert_eq!(status(Some(&carol), None), Some(401));
    assert_eq!(status(Some(&carol), Some("the-key")), Some(200));
    assert_eq!((status(None, Some("the-key")), status(None, None)), (Some(200), Some(401)));
    assert_eq!(status(Some(&alice), Some("wrong")), Some(401));
    let forged = stranger.sign("spiffe://cluster/alice");
    assert_eq!(status(Some(&forged), None), None);
    // certificate and keys are renewed
    let renewed = ca.sign("localhost");
    fs::write(path("server.pem"), &renewed.certificate).expect("a file");
    fs::write(path("server.key"), &renewed.key).expect("a file");
    fs::write(path("keys"), "cert:carol.example carol\n").expect("a file");
    server.signal("HUP");
    let shown = CertificateDer::from_pem_slice(renewed.certificate.as_bytes()).expect("PEM").to_vec();
    let start = Instant::now();
    while get(&server, &ca, Some(&carol), None) != Some((200, shown.clone())) {
        assert!(start.elapsed() < LIMIT, "the certificate is not renewed");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!((status(Some(&alice), None), status(None, Some("the-key"))), (Some(401), Some(401)));
}

#[test]
fn a_certificate_may_be_required() {
    let directory = Directory::new();
    let path = |name: &str| directory.0.join(name).to_str().expect("a path").to_string();
    let ca = Authority::new();
    let own = ca.sign("localhost");
    fs::write(path("server.pem"), own.certificate + &own.key).expect("a file");
    fs::write(path("ca.pem"), ca.0.pem()).expect("a file");
    let pem = path("server.pem");
    let tls = ["--tls-cert", &pem, "--tls-key", &pem, "--tls-client-ca", &path("ca.pem"), "--tls-client-required"];
    let server = Server::start(&tls);
    let status = |client: Option<&Pair>| get(&server, &ca, client, None).map(|(status, _)| status);
    // no line names a certificate: every certificate of the authority will do
    assert_eq!((status(None), status(Some(&ca.sign("a.example")))), (None, Some(200)));
    for args in [&tls[4..6], &tls[..4]] {
        let args = if args.len() == 4 { [args, &["--tls-client-required"]].concat() } else { args.to_vec() };
        let done = crate::server::command(&[&["serve", "--port", "0"][..], &args].concat()).output().expect("an end");
        let error = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.code() == Some(2) && error.contains("tls-client"), "{error}");
    }
}
