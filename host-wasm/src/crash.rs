//! What a panic said, for the host: the module itself stops with a trap that says nothing.

use std::panic::{self, PanicHookInfo};
use std::sync::{Mutex, Once};

use crate::threads;

static HOOK: Once = Once::new();
static LAST: Mutex<String> = Mutex::new(String::new());

/// Keeps the message of a panic from now on.
pub(crate) fn watch() {
    HOOK.call_once(|| {
        panic::set_hook(Box::new(|info| {
            if let Ok(mut last) = LAST.lock() {
                *last = said(info);
            }
        }));
    });
}

/// What a panic says, and where, unless the module was built without places.
fn said(info: &PanicHookInfo<'_>) -> String {
    let payload = info.payload();
    let text = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
    let text = text.unwrap_or("a panic");
    match info.location() {
        Some(at) if at.line() > 0 => format!("panicked at {at}: {text}"),
        _ => format!("panicked: {text}"),
    }
}

/// The message of the panic that stopped the module; empty if there was none.
pub(crate) fn message() -> String {
    let said = LAST.lock().map(|last| last.clone()).unwrap_or_default();
    if said.is_empty() { threads::fault().unwrap_or_default().into() } else { said }
}

/// Panics, for hosts that test how they go on after it.
pub(crate) fn crash() {
    panic!("crash on request");
}
