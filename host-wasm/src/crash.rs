//! Keeps the message of a panic for the host: the trap that follows has none.

use std::panic::{self, PanicHookInfo};
use std::sync::{Mutex, Once};

use crate::threads;

static HOOK: Once = Once::new();
static LAST: Mutex<String> = Mutex::new(String::new());

/// Installs the panic hook.
pub(crate) fn install_hook() {
    HOOK.call_once(|| {
        panic::set_hook(Box::new(|info| {
            if let Ok(mut last) = LAST.lock() {
                *last = describe(info);
            }
        }));
    });
}

/// Message and location of a panic.
fn describe(info: &PanicHookInfo<'_>) -> String {
    let payload = info.payload();
    let text = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
    let text = text.unwrap_or("a panic");
    match info.location() {
        Some(at) => format!("panicked at {at}: {text}"),
        None => format!("panicked: {text}"),
    }
}

/// The message of the panic, or that a thread has ended; empty if there was neither.
pub(crate) fn message() -> String {
    let last = LAST.lock().map(|last| last.clone()).unwrap_or_default();
    if last.is_empty() { threads::fault().unwrap_or_default().into() } else { last }
}

/// Panics: hosts use it to test their recovery.
pub(crate) fn panic_on_request() {
    panic!("crash on request");
}
