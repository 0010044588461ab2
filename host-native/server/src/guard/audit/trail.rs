//! The audit log of a server: three logs, each with a hash chain, rotation and queue of its own.
//!
//! ```text
//! FILE           what clients and administrators did
//! FILE.refused   requests that were refused before they had a client, counted by kind: whoever sends many of them pushes no other
//!                line out of rotation
//! FILE.admin     what administrators did, once more; its files are never removed
//! ```

use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::chain::{Head, OpenError, Options};
use super::record::Event;
use super::refusals::Refusals;
use super::writer::AuditLog;

/// Suffixes of the other logs.
const REFUSED: &str = "refused";
const ADMIN: &str = "admin";

/// An open audit log. Dropping it writes what waits.
pub struct AuditTrail {
    main: AuditLog,
    admin: AuditLog,
    refused: AuditLog,
    refusals: Refusals,
}

/// The log beside `path` of a suffix.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    name.into()
}

/// The other logs of an audit log that exist.
pub fn others(path: &Path) -> Vec<PathBuf> {
    [ADMIN, REFUSED].map(|suffix| beside(path, suffix)).into_iter().filter(|path| path.exists()).collect()
}

impl AuditTrail {
    /// Opens the logs or creates them; see `AuditLog::open`.
    ///
    /// # Errors
    /// If one of them cannot be opened.
    pub fn open(path: &Path, options: &Options) -> Result<AuditTrail, OpenError> {
        let admin = Options { keep_files: 0, ..options.clone() };
        Ok(AuditTrail {
            main: AuditLog::open(path, options.clone())?,
            admin: AuditLog::open(&beside(path, ADMIN), admin)?,
            refused: AuditLog::open(&beside(path, REFUSED), options.clone())?,
            refusals: Refusals::default(),
        })
    }

    /// Queues an event. Does not wait for the disk.
    pub fn record(&self, event: Event) {
        match event {
            Event::Refused(refusal) => {
                let lines = self.refusals.add(refusal, Instant::now());
                lines.into_iter().for_each(|refusal| self.refused.record(Event::Refused(refusal)));
            }
            Event::Admin { .. } => {
                self.admin.record(event.clone());
                self.main.record(event);
            }
            event => self.main.record(event),
        }
    }

    /// Records refusals that were counted, once their period is over. Called about once a second.
    pub fn tick(&self) {
        self.refusals
            .take_old(Instant::now())
            .into_iter()
            .for_each(|refusal| self.refused.record(Event::Refused(refusal)));
    }

    /// Waits until the events recorded before are on the disk.
    ///
    /// # Errors
    /// The first failure during the wait. The events stay in the queue.
    pub fn flush(&self) -> io::Result<()> {
        self.refusals.take_all().into_iter().for_each(|refusal| self.refused.record(Event::Refused(refusal)));
        [&self.main, &self.admin, &self.refused].into_iter().try_for_each(AuditLog::flush)
    }

    /// Failed operations on files since the logs were opened.
    pub fn failures(&self) -> u64 {
        [&self.main, &self.admin, &self.refused].map(AuditLog::failures).iter().sum()
    }

    /// Message of the last failure.
    pub fn last_failure(&self) -> Option<String> {
        [&self.main, &self.admin, &self.refused].into_iter().find_map(AuditLog::last_failure)
    }

    /// Events lost since the logs were opened.
    pub fn lost(&self) -> u64 {
        [&self.main, &self.admin, &self.refused].map(AuditLog::lost).iter().sum()
    }

    /// The last line of the main log.
    pub fn head(&self) -> Head {
        self.main.head()
    }
}

impl Drop for AuditTrail {
    fn drop(&mut self) {
        // the writers flush their queues when they are dropped
        self.refusals.take_all().into_iter().for_each(|refusal| self.refused.record(Event::Refused(refusal)));
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::record::{Refusal, Text};
    use super::super::verify;
    use super::*;

    /// Strangers send what is refused until every file of small logs has been rotated out many times.
    #[test]
    fn strangers_push_out_no_line_of_an_administrator() {
        let directory = std::env::temp_dir().join(format!("starling-audit-trail-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("audit.log");
        let options = Options { max_bytes: 2000, keep_files: 2, key: None };
        let trail = AuditTrail::open(&path, &options).unwrap();
        let text = |text: &str| Text::from(text);
        let admin = |n: u32| Event::Admin {
            administrator: text("anna"),
            action: text("load"),
            target: n.to_string().into(),
            error: None,
        };
        trail.record(admin(0));
        for i in 0..20_000u32 {
            let address = Some(std::net::IpAddr::from(i.to_be_bytes()));
            trail.record(Event::Refused(Refusal::new("invalid_api_key", address, &format!("/{i}"), 401)));
        }
        trail.flush().unwrap();
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        assert_eq!(read(&path).lines().count(), 1);
        assert!(read(&path).contains("\"target\":\"0\""));
        // all are counted in few lines
        let refused = fs::read_dir(&directory).unwrap().flatten().map(|entry| entry.path());
        let refused: String = refused
            .filter(|path| path.to_str().is_some_and(|name| name.contains("refused")))
            .map(|path| read(&path))
            .collect();
        assert!(refused.lines().count() < 200, "{}", refused.lines().count());
        assert_eq!(trail.lost(), 0);
        // a client with a key fills the main log; the line stays in the log of administrators
        for i in 0..40 {
            trail.record(Event::ServerStarted { version: i.to_string().into() });
            trail.flush().unwrap();
        }
        assert!(read(&directory.join("audit.log.admin")).contains("\"target\":\"0\""));
        drop(trail);
        let all = others(&path);
        assert_eq!(all.len(), 2);
        for path in all.iter().chain([&path]) {
            let report = verify(path, None, None).unwrap();
            assert!(report.records > 0, "{}", path.display());
        }
        fs::remove_dir_all(directory).unwrap();
    }
}
