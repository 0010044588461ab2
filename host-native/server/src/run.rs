//! The life of the server: start, signals, shutdown.

use std::io::{self, Write, stdout};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use starling_host::error::Failure;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};

use crate::config::{Configuration, ServeOptions, Settings};
use crate::guard::audit;
use crate::guard::auth::Hosts;
use crate::http::listener::{self, Listener};
use crate::models::loading;
use crate::observe::log::{LogFilter, init_log};
use crate::observe::{callback, trace};
use crate::routes::router::{Routes, router};
use crate::schedule::queue::Shutdown;
use crate::server::Server;
use crate::{admin, start};

/// Threads that serve connections; long work runs on blocking threads (`schedule/offload.rs`).
const HTTP_THREADS: usize = 2;
/// Minimum number of blocking threads. More than there are CPUs would slow down the HTTP threads.
const MIN_BLOCKING_THREADS: usize = 4;
/// Blocking threads for the load of a model and for supervision.
const LOADING_THREADS: usize = 2;
/// Time for connections to send the rest of their responses once the engine has finished.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time to write KV pages, and answers of the cache, to disk once all requests are complete.
const KV_FLUSH_TIMEOUT: Duration = Duration::from_secs(10);
/// Time to write sessions and answers likewise.
const STATE_FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which workers, idle models and sessions are looked after.
const SUPERVISION_INTERVAL: Duration = Duration::from_millis(500);
/// First backoff of the readiness callback.
const CALLBACK_BACKOFF: Duration = Duration::from_millis(500);

/// Serves until SIGTERM or SIGINT, with a log on standard error. Prints the address to standard output.
///
/// # Errors
/// If a setting is invalid, the model does not load, the address is in use, the engine panics, or the shutdown ends
/// running requests.
pub fn run(options: ServeOptions) -> Result<(), Failure> {
    let configuration = options.configuration()?;
    let log_filter = init_log(&configuration.settings)?;
    let sockets = Sockets::open(&configuration.settings)?;
    let n_blocking =
        std::thread::available_parallelism().map_or(1, usize::from).max(MIN_BLOCKING_THREADS) + LOADING_THREADS;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(HTTP_THREADS).max_blocking_threads(n_blocking).enable_all().build()?;
    let exporter = trace::Exporter::new(&configuration.settings, runtime.handle())?;
    let source = source(options, configuration);
    let server = runtime.block_on(start::open(source, exporter, log_filter))?;
    let result = runtime.block_on(serve(&server, sockets));
    flush(&server)?;
    runtime.shutdown_timeout(CLOSE_TIMEOUT);
    result
}

/// The configuration, and how it is read again.
fn source(options: ServeOptions, configuration: Configuration) -> start::Source {
    let config_file = options.config.clone();
    let configure = Box::new(move || options.configuration());
    start::Source { configuration, configure, config_file }
}

/// The listeners: of all, and of administrators if they have one of their own.
struct Sockets {
    all: std::net::TcpListener,
    admin: Option<std::net::TcpListener>,
}

impl Sockets {
    fn open(settings: &Settings) -> Result<Sockets, Failure> {
        Ok(Sockets { all: start::listen(settings)?, admin: start::listen_admin(settings)? })
    }
}

/// A server in the runtime of another program: it has no handlers of signals, and its log is the program's.
pub struct RunningServer {
    server: Arc<Server>,
    connections: Connections,
}

impl RunningServer {
    /// Loads the models, and serves from now on.
    ///
    /// # Errors
    /// If a setting is invalid, a model does not load, or the address is in use.
    pub async fn start(options: ServeOptions) -> Result<RunningServer, Failure> {
        let configuration = options.configuration()?;
        let sockets = Sockets::open(&configuration.settings)?;
        let exporter = trace::Exporter::new(&configuration.settings, &tokio::runtime::Handle::current())?;
        let server = start::open(source(options, configuration), exporter, LogFilter::of_program()).await?;
        let connections = Connections::accept(&server, sockets)?;
        Ok(RunningServer { server, connections })
    }

    /// The address, with the port that the system has chosen if the setting is 0.
    pub fn url(&self) -> &str {
        &self.connections.url
    }

    /// Refuses new requests, and ends once the running ones are complete or `drain-timeout` is over.
    ///
    /// # Errors
    /// If running requests were ended, or the audit log cannot be written.
    pub async fn stop(self) -> Result<(), Failure> {
        let RunningServer { server, connections } = self;
        let result = connections.shut_down(&server, std::future::pending).await;
        let flushed = tokio::task::spawn_blocking(move || flush(&server)).await;
        flushed.map_err(io::Error::other)??;
        result
    }
}

/// Writes what is to outlive the process.
fn flush(server: &Server) -> Result<(), Failure> {
    if let Some(log) = &server.audit {
        log.record(audit::Event::ServerStopped);
        log.flush()?;
    }
    if let Some(disk) = &server.pool.resources().disk
        && !disk.store.flush_within(KV_FLUSH_TIMEOUT)
    {
        tracing::warn!("kv-disk: some pages were not written within {} s", KV_FLUSH_TIMEOUT.as_secs());
    }
    if let Some(disk) = &server.answers.disk
        && !disk.flush_within(KV_FLUSH_TIMEOUT)
    {
        tracing::warn!("response-cache-disk: some answers were not written within {} s", KV_FLUSH_TIMEOUT.as_secs());
    }
    if let Some(store) = &server.pool.resources().state
        && !store.flush_within(STATE_FLUSH_TIMEOUT)
    {
        tracing::warn!("state-dir: some rows were not written within {} s", STATE_FLUSH_TIMEOUT.as_secs());
    }
    server.exporter.end();
    Ok(())
}

async fn serve(server: &Arc<Server>, sockets: Sockets) -> Result<(), Failure> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    // before the URL is printed: until then SIGHUP ends the process
    let mut hangup = signal(SignalKind::hangup())?;
    let connections = Connections::accept(server, sockets)?;
    // a program that starts the server with port 0 reads the port from here
    writeln!(stdout(), "{}", connections.url)?;
    stdout().flush()?;
    loop {
        tokio::select! {
            _ = term.recv() => break,
            _ = int.recv() => break,
            _ = hangup.recv() => reload(server).await,
        }
    }
    let interrupted = async || {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
    };
    connections.shut_down(server, interrupted).await
}

/// Listeners and supervision tasks of a server.
struct Connections {
    url: String,
    listeners: tokio::task::JoinSet<()>,
    supervision: tokio::task::JoinHandle<()>,
    /// Accept no more, and close those that are idle.
    stop: watch::Sender<bool>,
    /// Close all.
    now: watch::Sender<bool>,
}

impl Connections {
    fn accept(server: &Arc<Server>, Sockets { all, admin }: Sockets) -> Result<Connections, Failure> {
        let address = all.local_addr()?;
        let url = format!("{}://{address}", if server.tls.is_some() { "https" } else { "http" });
        let (stop, stopped) = watch::channel(false);
        let (now, at_once) = watch::channel(false);
        let which = if admin.is_some() { Routes::Public } else { Routes::All };
        let sockets = [Some((all, which)), admin.map(|listener| (listener, Routes::Admin))];
        let mut listeners = tokio::task::JoinSet::new();
        for (tcp, which) in sockets.into_iter().flatten() {
            let address = tcp.local_addr()?;
            if which == Routes::Admin {
                tracing::info!("administration on {address}");
            }
            let routes = router(server, Hosts::new(&server.settings(), address.ip()), which);
            let listener = Listener { tcp: tokio::net::TcpListener::from_std(tcp)?, tls: server.tls.clone() };
            let (settings, stopped, at_once) = (server.settings(), stopped.clone(), at_once.clone());
            listeners.spawn(async move { listener::serve(listener, routes, &settings, stopped, at_once).await });
        }
        let names: Vec<String> = server.pool.entries().iter().map(|entry| entry.name.to_string()).collect();
        tracing::info!(worker_id = &*server.worker_id, "listening on {url}, models: {}", names.join(", "));
        if let Some(callback) = server.settings().callback_url.clone() {
            tokio::spawn(callback::report(callback, start::readiness_report(server, &url), CALLBACK_BACKOFF));
        }
        let supervision = tokio::spawn(supervise(Arc::clone(server)));
        Ok(Connections { url, listeners, supervision, stop, now })
    }

    /// Drains the server. Each time that `interrupted` ends, running requests end at once.
    async fn shut_down(self, server: &Server, mut interrupted: impl AsyncFnMut()) -> Result<(), Failure> {
        tracing::info!("shutting down: {} requests running", server.snapshot().running);
        server.shutting_down.store(true, Ordering::Release);
        let mut poll = tokio::time::interval(Duration::from_millis(20));
        // a model that is being loaded now is not shut down, and not waited for
        let instances: Vec<_> = server.pool.entries().iter().filter_map(|entry| entry.instance()).collect();
        instances.iter().for_each(|instance| instance.queue.shut_down(Shutdown::Draining));
        let deadline = Instant::now() + server.settings().drain_timeout;
        let mut clean = true;
        while !instances.iter().all(|instance| instance.workers.have_ended()) {
            tokio::select! {
                () = interrupted() => clean = false,
                _ = poll.tick() => clean &= Instant::now() < deadline || server.snapshot().running == 0,
            }
            if !clean {
                instances.iter().for_each(|instance| instance.queue.shut_down(Shutdown::Now));
            }
        }
        let _ = self.stop.send(true);
        let connections = self.listeners.join_all();
        let timeout = tokio::time::sleep(if clean { CLOSE_TIMEOUT } else { Duration::from_millis(200) });
        tokio::pin!(connections, timeout);
        let done = tokio::select! {
            _ = &mut connections => true,
            () = &mut timeout => false,
        };
        if !done {
            let _ = self.now.send(true);
            connections.await;
        }
        self.supervision.abort();
        if !clean {
            return Err(io::Error::other("shutdown: running requests were ended before they were complete").into());
        }
        tracing::info!("shutdown: all requests are complete");
        Ok(())
    }
}

/// Reloads the settings; an error is logged, and nothing has changed.
async fn reload(server: &Arc<Server>) {
    let result = admin::reload(server).await;
    let error = result.as_ref().err().map(ToString::to_string);
    server.system().record("reload", "settings", error.as_deref());
    if let Err(e) = result {
        tracing::error!("settings not reloaded, the old ones stay: {e}");
    }
}

/// Supervises workers, idle models, sessions, and the settings file if it is watched.
async fn supervise(server: Arc<Server>) {
    let mut tick = tokio::time::interval(SUPERVISION_INTERVAL.min(server.settings().session_ttl));
    let file_stamp = || server.config_file.as_deref().and_then(loading::file_stamp);
    let mut known = file_stamp();
    let turns = match supervisor(&server) {
        Ok(turns) => turns,
        Err(e) => return tracing::error!("no thread for supervision: {e}"),
    };
    loop {
        tick.tick().await;
        let (done, is_done) = oneshot::channel();
        if turns.send(done).is_err() || is_done.await.is_err() {
            tracing::error!("supervision of workers panicked");
        }
        let now = file_stamp();
        if server.settings().watch_config && now.is_some() && std::mem::replace(&mut known, now) != now {
            reload(&server).await;
        }
    }
}

/// A thread of its own for what is looked after in turns: a lock that a stalled worker holds must not stop an HTTP thread, and
/// requests that occupy all blocking threads must not stop supervision.
fn supervisor(server: &Arc<Server>) -> io::Result<mpsc::Sender<oneshot::Sender<()>>> {
    let (sender, turns) = mpsc::channel::<oneshot::Sender<()>>();
    let inner = Arc::clone(server);
    let work = move || {
        for done in turns {
            let supervised = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                inner.pool.expire_sessions();
                inner.kept.expire();
                if let Some(store) = &inner.pool.resources().state {
                    store.purge();
                }
                if let Some(log) = &inner.audit {
                    log.tick();
                }
                inner.pool.supervise();
            }));
            if supervised.is_ok() {
                let _ = done.send(());
            }
        }
    };
    std::thread::Builder::new().name("starling-supervisor".into()).spawn(work)?;
    Ok(sender)
}
