//! What a panic said, for the host: the module itself stops with a trap that says nothing.

use std::panic;
use std::sync::{Mutex, Once};

use crate::threads;

static HOOK: Once = Once::new();
static LAST: Mutex<String> = Mutex::new(String::new());

/// Keeps the message of a panic from now on.
pub(crate) fn watch() {
    HOOK.call_once(|| {
        panic::set_hook(Box::new(|info| {
            if let Ok(mut last) = LAST.lock() {
                *last = info.to_string();
            }
        }));
    });
}

/// The message of the panic that stopped the module, with its place; empty if there was none.
pub(crate) fn message() -> String {
    let said = LAST.lock().map(|last| last.clone()).unwrap_or_default();
    if said.is_empty() { threads::fault().unwrap_or_default().into() } else { said }
}

/// Panics, for hosts that test how they go on after it.
pub(crate) fn crash() {
    panic!("crash on request");
}
