//! The session table.

#[path = "../../../src/state/sessions.rs"]
#[allow(dead_code, unreachable_pub)]
pub(crate) mod sessions;
#[path = "../../../src/state/share.rs"]
#[allow(dead_code, unreachable_pub)]
pub(crate) mod share;
