//! Administrators, and the record of what they do.

use std::sync::Arc;

use super::audit::{AuditTrail, Event, Text};

/// Name of the administrator that sent a request; the middleware adds it to the request's extensions.
#[derive(Clone)]
pub struct Administrator {
    pub name: Arc<str>,
    audit: Option<Arc<AuditTrail>>,
}

impl Administrator {
    pub fn new(name: Arc<str>, audit: Option<Arc<AuditTrail>>) -> Administrator {
        Administrator { name, audit }
    }

    /// Records an action in the audit log.
    pub fn record(&self, action: &str, target: &str, error: Option<&str>) {
        let Some(log) = &self.audit else { return };
        let (administrator, error) = (Text::from(&*self.name), error.map(Text::from));
        log.record(Event::Admin { administrator, action: action.into(), target: target.into(), error });
    }

    /// Logs an action. `target` names what it was done to.
    pub fn log(&self, action: &str, target: &str, result: Result<(), &str>) {
        self.record(action, target, result.err());
        // `target` is the module in each line of the log
        match result {
            Ok(()) => tracing::info!(administrator = &*self.name, action, object = target, "administration"),
            Err(error) => {
                tracing::warn!(administrator = &*self.name, action, object = target, error, "administration failed");
            }
        }
    }
}
