//! Ctrl-C (SIGINT): a command ends with exit code 130. As the first process of a container it would not end without a handler.

use std::io;
use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};

use starling_host::error::Failure;

/// 128 and the number of the signal, as shells have it.
pub const EXIT_CODE: u8 = 130;

/// Whether the command itself ends soon after an interrupt.
static IS_DEFERRED: AtomicBool = AtomicBool::new(false);
static IS_REQUESTED: AtomicBool = AtomicBool::new(false);

/// Ends the process on SIGINT from now on.
///
/// # Errors
/// If the system refuses the handler.
pub fn exit_on_interrupt() -> Result<(), Failure> {
    let handler = || {
        // a second interrupt does not wait
        if !IS_DEFERRED.swap(false, Ordering::AcqRel) {
            exit(EXIT_CODE.into());
        }
        IS_REQUESTED.store(true, Ordering::Release);
    };
    Ok(ctrlc::set_handler(handler).map_err(io::Error::other)?)
}

/// From now on the command looks at [`is_requested`] and ends itself, so that its output ends with a whole line.
pub fn defer() {
    IS_DEFERRED.store(true, Ordering::Release);
}

/// Whether an interrupt has come since [`defer`].
pub fn is_requested() -> bool {
    IS_REQUESTED.load(Ordering::Acquire)
}
