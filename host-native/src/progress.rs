//! Progress on standard error: a bar on a terminal, otherwise one line per 10 %.

use std::io::{IsTerminal, Write, stderr};
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

/// Prints a line to standard error; a closed stderr is not an error.
pub fn remark(what: std::fmt::Arguments<'_>) {
    let _ = writeln!(stderr(), "{what}");
}

/// Unit of the progress.
#[derive(Debug, Clone, Copy)]
pub enum Of {
    Bytes,
    /// Items with this plural.
    Count(&'static str),
}

pub struct Progress {
    what: &'static str,
    of: Of,
    total: u64,
    bar: ProgressBar,
    /// Tenths already printed; `None` on a terminal.
    said: Option<AtomicU64>,
}

impl Progress {
    /// `what` is the activity, such as `quantizing`.
    pub fn new(what: &'static str, of: Of, total: u64) -> Progress {
        let amount = match of {
            Of::Bytes => "{bytes}/{total_bytes} {bytes_per_sec} {eta}".into(),
            Of::Count(things) => format!("{{pos}}/{{len}} {things}"),
        };
        let style = ProgressStyle::with_template(&format!("{what} {{bar:32}} {amount} {{msg}}"));
        let said = (!stderr().is_terminal()).then(|| AtomicU64::new(0));
        let bar = ProgressBar::new(total).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Progress { what, of, total, bar, said }
    }

    /// As [`Progress::new`], but prints nothing if standard error is not a terminal.
    pub fn on_terminal(what: &'static str, of: Of, total: u64) -> Progress {
        Progress { said: None, ..Progress::new(what, of, total) }
    }

    /// Prints nothing.
    pub fn hidden() -> Progress {
        Progress { what: "", of: Of::Bytes, total: 0, bar: ProgressBar::hidden(), said: None }
    }

    /// Adds `n`; `message` names the current item.
    pub fn inc(&self, n: u64, message: &str) {
        self.bar.set_message(message.to_owned());
        self.bar.inc(n);
        let Some(said) = &self.said else { return };
        if let Some(line) =
            line(self.what, self.of, (self.bar.position(), self.total), said.load(Ordering::Relaxed), message)
        {
            said.store(tenths(self.bar.position(), self.total), Ordering::Relaxed);
            // stderr may be closed
            let _ = writeln!(stderr(), "{line}");
        }
    }

    /// Removes the bar.
    pub fn finish(self) {
        self.bar.finish_and_clear();
    }
}

fn tenths(done: u64, total: u64) -> u64 {
    (u128::from(done) * 10 / u128::from(total.max(1))) as u64
}

/// The next line, if another tenth is done.
fn line(what: &str, of: Of, (done, total): (u64, u64), said: u64, message: &str) -> Option<String> {
    let now = tenths(done, total);
    if now <= said {
        return None;
    }
    let total = match of {
        Of::Bytes => HumanBytes(total).to_string(),
        Of::Count(things) => format!("{total} {things}"),
    };
    let message = if message.is_empty() { String::new() } else { format!(", {message}") };
    Some(format!("{what}: {} % of {total}{message}", now * 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_each_tenth() {
        let line = |done, said| line("measuring", Of::Count("windows"), (done, 25), said, "");
        assert_eq!(line(2, 0), None);
        assert_eq!(line(3, 0).as_deref(), Some("measuring: 10 % of 25 windows"));
        assert_eq!(line(4, 1), None);
        assert_eq!(line(13, 1).as_deref(), Some("measuring: 50 % of 25 windows"));
        assert_eq!(line(25, 9).as_deref(), Some("measuring: 100 % of 25 windows"));
        let line = super::line("quantizing", Of::Bytes, (3 << 20, 3 << 20), 0, "token_embd.weight");
        assert_eq!(line.as_deref(), Some("quantizing: 100 % of 3.00 MiB, token_embd.weight"));
        assert_eq!(super::line("loading", Of::Bytes, (0, 0), 0, ""), None);
    }
}
