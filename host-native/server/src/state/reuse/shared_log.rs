//! A sequence that is written once and read by many, each from its beginning, while it grows.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::sync::watch;

/// The sequence.
pub struct SharedLog<T> {
    state: Mutex<State<T>>,
    n_readers: watch::Sender<usize>,
}

struct State<T> {
    items: Vec<T>,
    n_bytes: usize,
    is_closed: bool,
    wakers: Vec<Waker>,
}

/// Reads a log. The log knows how many readers it has.
pub struct Reader<T> {
    log: Arc<SharedLog<T>>,
    next: usize,
}

impl<T: Clone> SharedLog<T> {
    pub fn new() -> Arc<SharedLog<T>> {
        let state = State { items: Vec::new(), n_bytes: 0, is_closed: false, wakers: Vec::new() };
        Arc::new(SharedLog { state: Mutex::new(state), n_readers: watch::Sender::new(0) })
    }

    /// Adds an item of about `n_bytes`.
    pub fn push(&self, item: T, n_bytes: usize) {
        let mut state = self.lock();
        state.items.push(item);
        state.n_bytes += n_bytes;
        state.wakers.drain(..).for_each(Waker::wake);
    }

    /// Nothing more is added.
    pub fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.wakers.drain(..).for_each(Waker::wake);
    }

    /// Whether all items are there.
    pub fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// Memory of all items.
    pub fn n_bytes(&self) -> usize {
        self.lock().n_bytes
    }

    /// The items so far.
    pub fn items(&self) -> Vec<T> {
        self.lock().items.clone()
    }

    /// A reader that begins with the item `from`.
    pub fn reader(self: &Arc<Self>, from: usize) -> Reader<T> {
        self.n_readers.send_modify(|n| *n += 1);
        Reader { log: Arc::clone(self), next: from }
    }

    /// Waits until there is no reader.
    pub async fn unread(&self) {
        // the sender lives as long as `self`
        let _ = self.n_readers.subscribe().wait_for(|n| *n == 0).await;
    }

    /// Waits until there is a reader.
    pub async fn read(&self) {
        let _ = self.n_readers.subscribe().wait_for(|n| *n > 0).await;
    }

    pub fn has_readers(&self) -> bool {
        *self.n_readers.borrow() > 0
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Clone> Reader<T> {
    /// The next item; `None` at the end.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut state = self.log.lock();
        if let Some(item) = state.items.get(self.next) {
            self.next += 1;
            return Poll::Ready(Some(item.clone()));
        }
        if state.is_closed {
            return Poll::Ready(None);
        }
        if !state.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            state.wakers.push(context.waker().clone());
        }
        Poll::Pending
    }
}

impl<T> Drop for Reader<T> {
    fn drop(&mut self) {
        self.log.n_readers.send_modify(|n| *n -= 1);
    }
}
