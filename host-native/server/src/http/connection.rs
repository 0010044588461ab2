//! Limits of one connection: how long it may be idle, how long a client may leave a response unread, and how many
//! connections one address may hold.

use std::collections::HashMap;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use hyper::body::{Frame, SizeHint};
use hyper::rt::Executor;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep, timeout};

use crate::guard::peer::network;

/// Counts what keeps a connection busy: requests in progress and writes that the client does not take.
#[derive(Debug, Clone)]
pub struct Activity(watch::Sender<usize>);

/// Marks a connection as busy until it is dropped.
#[derive(Debug)]
pub struct Busy(watch::Sender<usize>);

impl Activity {
    /// A new connection is idle.
    pub fn new() -> Activity {
        Activity(watch::Sender::new(0))
    }

    /// The connection is busy until the value is dropped.
    pub fn busy(&self) -> Busy {
        self.0.send_modify(|n| *n += 1);
        Busy(self.0.clone())
    }

    /// Waits until the connection was idle for `limit` without interruption. This covers a silent connection, an incomplete
    /// HTTP/2 preface, an incomplete head, and connections kept alive, of any protocol version.
    pub async fn idle(&self, limit: Duration) {
        let mut changes = self.0.subscribe();
        loop {
            let idle = *changes.borrow_and_update() == 0;
            // `changed` returns at a change: `self` keeps the sender
            if !idle {
                let _ = changes.changed().await;
            } else if timeout(limit, changes.changed()).await.is_err() {
                return;
            }
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

/// A stream whose writes fail after the client has accepted no byte for `limit`.
#[derive(Debug)]
pub struct WriteTimeout<T> {
    inner: T,
    limit: Duration,
    activity: Activity,
    /// Timer since the stream stopped accepting bytes. It keeps the connection busy: the client may still read.
    waiting: Option<(Pin<Box<Sleep>>, Busy)>,
}

impl<T> WriteTimeout<T> {
    pub fn new(inner: T, limit: Duration, activity: Activity) -> WriteTimeout<T> {
        WriteTimeout { inner, limit, activity, waiting: None }
    }

    fn check<R>(&mut self, context: &mut Context<'_>, result: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if result.is_ready() {
            self.waiting = None;
            return result;
        }
        let (limit, activity) = (self.limit, &self.activity);
        let (timer, _) = self.waiting.get_or_insert_with(|| (Box::pin(sleep(limit)), activity.busy()));
        ready!(timer.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for WriteTimeout<T> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, to)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.check(context, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write_vectored(context, parts);
        self.check(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.inner).poll_flush(context);
        self.check(context, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.inner).poll_shutdown(context);
        self.check(context, result)
    }
}

tokio::task_local! {
    /// Of the task of an HTTP/2 stream: when the body handed hyper a frame that is not sent yet, for lack of room in the
    /// client's flow-control window. hyper polls for the next frame once it has sent the last.
    static UNSENT_SINCE: Arc<Mutex<Option<Instant>>>;
}

/// Spawns the tasks of HTTP/2 streams. A task ends, which resets its stream, when the client's flow-control window had no
/// room for a frame for `limit`.
#[derive(Debug, Clone)]
pub struct StreamExecutor {
    /// Maximum wait for room in the window.
    pub limit: Duration,
}

impl<F: Future<Output: Send + 'static> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        let (unsent_since, limit) = (Arc::new(Mutex::new(None)), self.limit);
        let watched = Arc::clone(&unsent_since);
        tokio::spawn(UNSENT_SINCE.scope(unsent_since, async move {
            let (mut stream, mut timer) = (pin!(stream), pin!(sleep(limit)));
            poll_fn(|context| {
                if stream.as_mut().poll(context).is_ready() {
                    return Poll::Ready(());
                }
                let Some(since) = *watched.lock().unwrap_or_else(PoisonError::into_inner) else {
                    return Poll::Pending;
                };
                if timer.deadline() != since + limit {
                    timer.as_mut().reset(since + limit);
                }
                timer.as_mut().poll(context)
            })
            .await;
        }));
    }
}

/// Maximum size of an HTTP/2 frame in bytes; [`StreamExecutor`] limits the time for each.
const MAX_FRAME: usize = 16 << 10;

/// A response body that keeps its connection busy until it is dropped.
#[derive(Debug)]
pub struct ResponseBody {
    inner: Body,
    /// Rest of a frame that was split.
    rest: Option<Bytes>,
    _busy: Busy,
}

impl ResponseBody {
    pub fn new(inner: Body, busy: Busy) -> ResponseBody {
        ResponseBody { inner, rest: None, _busy: busy }
    }
}

impl hyper::body::Body for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Ok(unsent_since) = UNSENT_SINCE.try_with(Arc::clone) else {
            // HTTP/1.1: `WriteTimeout` limits the time of each write
            return Pin::new(&mut self.inner).poll_frame(context);
        };
        let set_unsent = |since| *unsent_since.lock().unwrap_or_else(PoisonError::into_inner) = since;
        set_unsent(None);
        let mut data = match self.rest.take() {
            Some(rest) => rest,
            None => {
                match ready!(Pin::new(&mut self.inner).poll_frame(context)).map(|frame| frame.map(Frame::into_data)) {
                    Some(Ok(Ok(data))) => data,
                    Some(Ok(Err(trailers))) => return Poll::Ready(Some(Ok(trailers))),
                    Some(Err(e)) => return Poll::Ready(Some(Err(e))),
                    None => return Poll::Ready(None),
                }
            }
        };
        // h2 takes a whole frame as soon as the window has room for one byte of it. So the last byte is a frame of its
        // own: until hyper polls for it, this body is alive and the timer runs.
        let all = if self.inner.is_end_stream() { data.len().saturating_sub(1).max(1) } else { data.len() };
        let frame = data.split_to(all.min(MAX_FRAME).min(data.len()));
        self.rest = Some(data).filter(|rest| !rest.is_empty());
        set_unsent(Some(Instant::now()));
        Poll::Ready(Some(Ok(Frame::data(frame))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_none() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (inner, rest) = (self.inner.size_hint(), self.rest.as_ref().map_or(0, |rest| rest.len() as u64));
        let mut hint = SizeHint::new();
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + rest);
        }
        hint.set_lower(inner.lower() + rest);
        hint
    }
}

/// Counts the connections of each address.
#[derive(Debug)]
pub struct Addresses {
    counts: Mutex<HashMap<IpAddr, usize>>,
    limit: usize,
}

/// Counts as one connection of an address until it is dropped.
#[derive(Debug)]
pub struct AddressPermit {
    addresses: Arc<Addresses>,
    address: IpAddr,
}

impl Addresses {
    /// `limit` holds for each address.
    pub fn new(limit: usize) -> Addresses {
        Addresses { counts: Mutex::default(), limit }
    }

    /// Counts a connection; `None` if its address is at the limit.
    pub fn acquire(self: &Arc<Self>, address: IpAddr) -> Option<AddressPermit> {
        let address = network(address);
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(address).or_default();
        if *count >= self.limit {
            return None;
        }
        *count += 1;
        drop(counts);
        Some(AddressPermit { addresses: Arc::clone(self), address })
    }
}

impl Drop for AddressPermit {
    fn drop(&mut self) {
        let mut counts = self.addresses.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
    }

    #[test]
    fn a_stopped_reader_fails_the_write_and_a_slow_one_does_not() {
        runtime().block_on(async {
            let (stream, mut client) = duplex(8);
            let mut stream = WriteTimeout::new(stream, Duration::from_millis(300), Activity::new());
            let slow = tokio::spawn(async move {
                for _ in 0..8 {
                    sleep(Duration::from_millis(60)).await;
                    client.read_exact(&mut [0; 8]).await.unwrap();
                }
                client
            });
            stream.write_all(&[0; 64]).await.unwrap();
            let client = slow.await.unwrap();
            let error = stream.write_all(&[0; 64]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            drop(client);
        });
    }

    #[test]
    fn a_connection_is_idle_after_a_whole_limit_without_requests() {
        runtime().block_on(async {
            let (activity, limit) = (Activity::new(), Duration::from_secs(10));
            let start = Instant::now();
            activity.idle(limit).await;
            assert_eq!(start.elapsed(), limit);
            let (start, requests) = (Instant::now(), activity.clone());
            tokio::spawn(async move {
                sleep(Duration::from_secs(9)).await;
                let first = requests.busy();
                sleep(Duration::from_secs(60)).await;
                drop(first);
                sleep(Duration::from_secs(9)).await;
                // busy and idle again before the waiter is polled
                drop(requests.busy());
            });
            activity.idle(limit).await;
            assert_eq!(start.elapsed(), Duration::from_secs(9 + 60 + 9) + limit);
        });
    }

    #[test]
    fn an_address_is_limited() {
        let addresses = Arc::new(Addresses::new(2));
        let acquire = |text: &str| addresses.acquire(text.parse().unwrap());
        let (a, b) = (acquire("10.0.0.1"), acquire("::ffff:10.0.0.1"));
        assert!(a.is_some() && b.is_some() && acquire("10.0.0.1").is_none());
        assert!(acquire("10.0.0.2").is_some());
        drop(a);
        assert!(acquire("10.0.0.1").is_some());
        let (c, d) = (acquire("2001:db8::1"), acquire("2001:db8::2"));
        assert!(c.is_some() && d.is_some() && acquire("2001:db8::3").is_none() && acquire("2001:db8:0:1::1").is_some());
        drop((b, c, d));
        assert!(addresses.counts.lock().unwrap().is_empty());
    }
}
