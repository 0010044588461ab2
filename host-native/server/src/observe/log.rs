//! The log and its level.

use std::io::IsTerminal;

use starling_host::error::Failure;
use tracing_subscriber::EnvFilter;

use crate::config::Settings;
use crate::config::value::LogFormat;

/// Logs to standard error from now on.
///
/// # Errors
/// If `log_level` is invalid.
pub fn init_log(settings: &Settings) -> Result<LogFilter, Failure> {
    let filter = log_filter(&settings.log_level).map_err(Failure::Usage)?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let wrong = |e| Failure::Io(std::io::Error::other(e));
    // the handles of the two formats have different types
    Ok(match settings.log_format {
        LogFormat::Json => {
            let log = log.json().flatten_event(true).with_current_span(true).with_span_list(false);
            let log = log.with_filter_reloading();
            let handle = log.reload_handle();
            log.try_init().map_err(wrong)?;
            LogFilter(Box::new(move |filter| handle.reload(filter).map_err(|e| e.to_string())))
        }
        LogFormat::Pretty => {
            let log = log.with_ansi(std::io::stderr().is_terminal()).with_target(false).with_filter_reloading();
            let handle = log.reload_handle();
            log.try_init().map_err(wrong)?;
            LogFilter(Box::new(move |filter| handle.reload(filter).map_err(|e| e.to_string())))
        }
    })
}

/// Changes the log level.
pub struct LogFilter(Box<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync>);

impl LogFilter {
    /// The log is that of the program around the server, which filters it.
    pub fn of_program() -> LogFilter {
        LogFilter(Box::new(|_| Ok(())))
    }

    /// # Errors
    /// If the level is invalid.
    pub fn set(&self, level: &str) -> Result<(), String> {
        (self.0)(log_filter(level)?)
    }
}

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// # Errors
/// If the level is invalid. A word alone is a level: the filter would take another one for the name of a module, and log nothing.
pub fn log_filter(level: &str) -> Result<EnvFilter, String> {
    for part in level.split(',').filter(|part| !part.is_empty()) {
        let word = part.rsplit_once('=').map_or(part, |(_, level)| level);
        if !LEVELS.contains(&word.to_ascii_lowercase().as_str()) {
            return Err(format!("log-level: found {word:?}, expected {}, or MODULE=LEVEL", LEVELS.join(", ")));
        }
    }
    if level.split(',').all(str::is_empty) {
        return Err(format!("log-level: found nothing, expected {}", LEVELS.join(", ")));
    }
    EnvFilter::try_new(level).map_err(|e| format!("log-level: {e}"))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_log_level_is_a_level() {
        for level in ["off", "error", "INFO", "tower_http=debug,info", "warn,starling::serve=trace", "a=off"] {
            assert!(super::log_filter(level).is_ok(), "{level}");
        }
        for level in ["inf", "", ",", "tower_http", "tower_http=debg", "a=b=c", "info,inf", "2"] {
            let error = super::log_filter(level).expect_err("an error");
            assert!(error.starts_with("log-level"), "{level}: {error}");
        }
    }
}
