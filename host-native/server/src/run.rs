//! The life of the server: start, signals, shutdown.

use std::io::{self, Write, stdout};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use starling_host::error::Failure;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};

use crate::admin::Administrator;
use crate::config::ServeOptions;
use crate::guard::audit;
use crate::guard::auth::Hosts;
use crate::http::listener::{self, Listener};
use crate::models::loading;
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

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// If a setting is invalid, the model does not load, the address is in use, the engine panics, or the shutdown ends
/// running requests.
pub fn run(options: ServeOptions) -> Result<(), Failure> {
    let configuration = options.configuration()?;
    let settings = configuration.settings.clone();
    let log_filter = start::init_log(&settings)?;
    let listener = start::listen(&settings)?;
    let admin = start::listen_admin(&settings)?;
    let n_blocking =
        std::thread::available_parallelism().map_or(1, usize::from).max(MIN_BLOCKING_THREADS) + LOADING_THREADS;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(HTTP_THREADS).max_blocking_threads(n_blocking).enable_all().build()?;
    let exporter = trace::Exporter::new(&settings, runtime.handle())?;
    let config_file = options.config.clone();
    let configure = Box::new(move || options.configuration());
    let source = start::Source { configuration, configure, config_file };
    let server = runtime.block_on(start::open(source, exporter, log_filter))?;
    let result = runtime.block_on(serve(&server, listener, admin));
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
    runtime.shutdown_timeout(CLOSE_TIMEOUT);
    result
}

async fn serve(
    server: &Arc<Server>,
    listener: std::net::TcpListener,
    admin: Option<std::net::TcpListener>,
) -> Result<(), Failure> {
    let address = listener.local_addr()?;
    let url = format!("{}://{address}", if server.tls.is_some() { "https" } else { "http" });
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (stop, stopped) = watch::channel(false);
    let (now, at_once) = watch::channel(false);
    let which = if admin.is_some() { Routes::Public } else { Routes::All };
    let listeners = [Some((listener, which)), admin.map(|listener| (listener, Routes::Admin))];
    let mut connections = tokio::task::JoinSet::new();
    for (tcp, which) in listeners.into_iter().flatten() {
        let address = tcp.local_addr()?;
        if which == Routes::Admin {
            tracing::info!("administration on {address}");
        }
        let routes = router(server, Hosts::new(&server.settings(), address.ip()), which);
        let listener = Listener { tcp: tokio::net::TcpListener::from_std(tcp)?, tls: server.tls.clone() };
        let (settings, stopped, at_once) = (server.settings(), stopped.clone(), at_once.clone());
        connections.spawn(async move { listener::serve(listener, routes, &settings, stopped, at_once).await });
    }
    let connections = connections.join_all();
    let names: Vec<String> = server.pool.entries().iter().map(|entry| entry.name.to_string()).collect();
    tracing::info!(worker_id = &*server.worker_id, "listening on {url}, models: {}", names.join(", "));
    // a program that starts the server with port 0 reads the port from here
    writeln!(stdout(), "{url}")?;
    stdout().flush()?;
    if let Some(callback) = server.settings().callback_url.clone() {
        tokio::spawn(callback::report(callback, start::readiness_report(server, &url), CALLBACK_BACKOFF));
    }
    tokio::spawn(supervise(Arc::clone(server)));

    let mut hangup = signal(SignalKind::hangup())?;
    loop {
        tokio::select! {
            _ = term.recv() => break,
            _ = int.recv() => break,
            _ = hangup.recv() => reload(server).await,
        }
    }
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
            _ = term.recv() => clean = false,
            _ = int.recv() => clean = false,
            _ = poll.tick() => clean &= Instant::now() < deadline || server.snapshot().running == 0,
        }
        if !clean {
            instances.iter().for_each(|instance| instance.queue.shut_down(Shutdown::Now));
        }
    }
    let _ = stop.send(true);
    let timeout = tokio::time::sleep(if clean { CLOSE_TIMEOUT } else { Duration::from_millis(200) });
    tokio::pin!(connections, timeout);
    let done = tokio::select! {
        _ = &mut connections => true,
        () = &mut timeout => false,
    };
    if !done {
        let _ = now.send(true);
        connections.await;
    }
    if !clean {
        return Err(io::Error::other("shutdown: running requests were ended before they were complete").into());
    }
    tracing::info!("shutdown: all requests are complete");
    Ok(())
}

/// Reloads the settings; an error is logged, and nothing has changed.
async fn reload(server: &Arc<Server>) {
    let result = admin::reload(server).await;
    let error = result.as_ref().err().map(ToString::to_string);
    Administrator::system(server).record("reload", "settings", error.as_deref());
    if let Err(e) = result {
        tracing::error!("settings not reloaded, the old ones stay: {e}");
    }
}

/// Looks after workers, idle models, sessions, and the settings file if it is watched.
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
