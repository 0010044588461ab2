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
    /// 0 if it is not known.
    total: AtomicU64,
    bar: ProgressBar,
    /// Tenths, or steps of [`STEP`], already printed; `None` on a terminal.
    said: Option<AtomicU64>,
}

impl Progress {
    /// `what` is the activity, such as `quantizing`; `total` is 0 if it is not known.
    pub fn new(what: &'static str, of: Of, total: u64) -> Progress {
        let amount: String = match of {
            Of::Bytes => "{bytes}/{total_bytes} {bytes_per_sec} {eta}".into(),
            Of::Count(things) => format!("{{pos}}/{{len}} {things}"),
        };
        let template = match total {
            0 => format!("{what} {{bytes}} {{bytes_per_sec}} {{msg}}"),
            _ => format!("{what} {{bar:32}} {amount} {{msg}}"),
        };
        let style = ProgressStyle::with_template(&template);
        let said = (!stderr().is_terminal()).then(|| AtomicU64::new(0));
        let bar = ProgressBar::new(total).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Progress { what, of, total: AtomicU64::new(total), bar, said }
    }

    /// As [`Progress::new`], but prints nothing if standard error is not a terminal.
    pub fn on_terminal(what: &'static str, of: Of, total: u64) -> Progress {
        Progress { said: None, ..Progress::new(what, of, total) }
    }

    /// Prints nothing.
    pub fn hidden() -> Progress {
        Progress { what: "", of: Of::Bytes, total: AtomicU64::new(0), bar: ProgressBar::hidden(), said: None }
    }

    /// Adds `n`; `message` names the current item.
    pub fn inc(&self, n: u64, message: &str) {
        self.bar.set_message(message.to_owned());
        self.bar.inc(n);
        let Some(said) = &self.said else { return };
        let (done, total) = (self.bar.position(), self.total.load(Ordering::Relaxed));
        if let Some(line) = line(self.what, self.of, (done, total), said.load(Ordering::Relaxed), message) {
            said.store(steps(done, total), Ordering::Relaxed);
            // stderr may be closed
            let _ = writeln!(stderr(), "{line}");
        }
    }

    /// Removes the bar.
    pub fn finish(self) {
        self.bar.finish_and_clear();
    }
}

/// Bytes, or items, from one line to the next if the total is not known.
const STEP: u64 = 64 << 20;

/// Tenths that are done, or steps.
fn steps(done: u64, total: u64) -> u64 {
    match total {
        0 => done / STEP,
        total => (u128::from(done) * 10 / u128::from(total)) as u64,
    }
}

/// The next line, if another tenth or step is done.
fn line(what: &str, of: Of, (done, total): (u64, u64), said: u64, message: &str) -> Option<String> {
    let now = steps(done, total);
    if now <= said {
        return None;
    }
    let amount = |n| match of {
        Of::Bytes => HumanBytes(n).to_string(),
        Of::Count(things) => format!("{n} {things}"),
    };
    let message = if message.is_empty() { String::new() } else { format!(", {message}") };
    Some(match total {
        0 => format!("{what}: {}{message}", amount(done)),
        total => format!("{what}: {} % of {}{message}", now * 10, amount(total)),
    })
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
        // of an unknown total there are no percents
        let line = |done, said| super::line("downloading", Of::Bytes, (done, 0), said, "");
        assert_eq!(line(81_920, 0), None);
        assert_eq!(line(130 << 20, 1).as_deref(), Some("downloading: 130.00 MiB"));
        assert_eq!(line(130 << 20, 2), None);
    }
}
