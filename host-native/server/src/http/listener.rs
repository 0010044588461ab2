//! The accept loop, and connections.

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tower::Service;

use super::connection::{Activity, ResponseBody, StreamExecutor, WriteTimeout};
use super::gate::is_reserved;
use super::lanes::{Lanes, RESERVE_TIMEOUT, too_many_connections};
use super::tls;
use crate::config::{Live, Settings};
use crate::guard::peer::Peer;

pub struct Listener {
    pub tcp: TcpListener,
    pub tls: Option<Arc<Live<TlsAcceptor>>>,
}

/// A TCP or TLS stream.
trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> ByteStream for T {}

/// Time for the last bytes of a connection that is closed, once no request is in progress.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Bytes of bodies that a client may send ahead on an HTTP/2 connection. They are in memory before any request is known.
const HTTP2_WINDOW: u32 = 256 << 10;

/// Accepts connections until `stop`; returns once all of them are closed, or when `now` is set.
pub async fn serve(
    Listener { tcp, tls }: Listener,
    routes: Router,
    settings: &Settings,
    mut stop: watch::Receiver<bool>,
    mut now: watch::Receiver<bool>,
) {
    let listener = Arc::new(Connections::new(settings, tls.clone(), false));
    let reserve = Arc::new(Connections::new(settings, tls, true));
    let lanes = Lanes::new(settings);
    loop {
        let (stream, address) = tokio::select! {
            accepted = accept(&tcp) => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let Some((permit, share, is_reserve)) = lanes.acquire(address) else {
            tracing::debug!(
                "connection of {address} closed: too many connections (--max-connections, --max-connections-per-address)"
            );
            continue;
        };
        let (listener, routes, stop) =
            (Arc::clone(if is_reserve { &reserve } else { &listener }), routes.clone(), stop.clone());
        tokio::spawn(async move {
            listener.connection(stream, address, routes, stop).await;
            drop((permit, share));
        });
    }
    drop(tcp);
    tokio::select! {
        () = lanes.closed() => {}
        _ = now.wait_for(|now| *now) => {}
    }
}

/// Shared by all connections.
struct Connections {
    builder: auto::Builder<StreamExecutor>,
    /// Replaced when the settings are reloaded: certificates are renewed without a restart.
    tls: Option<Arc<Live<TlsAcceptor>>>,
    /// For a TLS handshake, and for a connection without a request in progress.
    idle_timeout: Duration,
    write_timeout: Duration,
    /// Whether only probes and administrators are served.
    is_reserve: bool,
}

impl Connections {
    /// `is_reserve`: for connections beyond the limits, which have little time.
    fn new(settings: &Settings, tls: Option<Arc<Live<TlsAcceptor>>>, is_reserve: bool) -> Connections {
        let least = |timeout: Duration| if is_reserve { timeout.min(RESERVE_TIMEOUT) } else { timeout };
        let (idle_timeout, write_timeout) = (least(settings.header_timeout), least(settings.write_timeout));
        let mut builder = auto::Builder::new(StreamExecutor { limit: write_timeout });
        let max_header = usize::try_from(settings.max_header.0).unwrap_or(usize::MAX);
        // without a timer hyper ignores its timeouts
        builder.http1().timer(TokioTimer::new()).header_read_timeout(idle_timeout).max_buf_size(max_header);
        builder.http1().keep_alive(!is_reserve);
        builder.http2().timer(TokioTimer::new()).keep_alive_interval(settings.header_timeout);
        builder.http2().initial_stream_window_size(HTTP2_WINDOW).initial_connection_window_size(HTTP2_WINDOW);
        builder.http2().max_header_list_size(u32::try_from(max_header).unwrap_or(u32::MAX));
        Connections { builder, tls, idle_timeout, write_timeout, is_reserve }
    }

    /// Serves a connection until it is closed, idle for `idle_timeout`, or `stop` is set and its requests are done.
    async fn connection(&self, stream: TcpStream, address: IpAddr, routes: Router, mut stop: watch::Receiver<bool>) {
        // Nagle's algorithm would delay small events
        let _ = stream.set_nodelay(true);
        let activity = Activity::new();
        let stream = WriteTimeout::new(stream, self.write_timeout, activity.clone());
        let mut peer = Peer { address, certificate: None };
        let stream: Box<dyn ByteStream> = match &self.tls {
            None => Box::new(stream),
            Some(tls) => match timeout(self.idle_timeout, tls.get().accept(stream)).await {
                Ok(Ok(stream)) => {
                    let certificates = stream.get_ref().1.peer_certificates();
                    peer.certificate = certificates.and_then(|chain| chain.first()).map(tls::names);
                    Box::new(stream)
                }
                Ok(Err(e)) => return tracing::debug!("TLS handshake with {address}: {e}"),
                Err(_) => return,
            },
        };
        let (requests, is_reserve) = (activity.clone(), self.is_reserve);
        let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
            let busy = requests.busy();
            let mut request = request.map(axum::body::Body::new);
            request.extensions_mut().insert(peer.clone());
            let is_refused = is_reserve && !is_reserved(request.uri().path());
            let mut routes = routes.clone();
            async move {
                let response = if is_refused { too_many_connections() } else { routes.call(request).await? };
                Ok::<_, Infallible>(response.map(|body| ResponseBody::new(body, busy)))
            }
        });
        let mut connection = pin!(self.builder.serve_connection(TokioIo::new(stream), service));
        // errors of a connection are mostly the client's: no warning
        let log = |e| tracing::debug!("connection: {e}");
        tokio::select! {
            result = &mut connection => return result.unwrap_or_else(log),
            () = activity.idle(self.idle_timeout) => tracing::debug!("connection closed: idle for {} s (--header-timeout)", self.idle_timeout.as_secs_f64()),
            _ = stop.wait_for(|stop| *stop) => {}
        }
        connection.as_mut().graceful_shutdown();
        tokio::select! {
            result = &mut connection => result.unwrap_or_else(log),
            () = activity.idle(CLOSE_TIMEOUT) => {}
        }
    }
}

async fn accept(listener: &TcpListener) -> (TcpStream, IpAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, address)) => return (stream, address.ip()),
            Err(e) => {
                // out of file descriptors, or the client disconnected: go on, without a busy loop
                tracing::warn!("cannot accept a connection: {e}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}
