//! How far a command is: a bar on a terminal, and elsewhere, such as in a log, a line for each tenth.

use std::cell::Cell;
use std::io::{IsTerminal, Write, stderr};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

/// Says something beside the output. Where nobody can hear it, that is no fault.
pub fn remark(what: std::fmt::Arguments<'_>) {
    let _ = writeln!(stderr(), "{what}");
}

/// What is counted.
#[derive(Debug, Clone, Copy)]
pub enum Of {
    /// Bytes.
    Bytes,
    /// Things of that name.
    Count(&'static str),
}

/// Work on its way.
pub struct Progress {
    what: &'static str,
    of: Of,
    total: u64,
    bar: ProgressBar,
    /// Tenths that have had their lines; `None` on a terminal.
    said: Option<Cell<u64>>,
}

impl Progress {
    /// Of so much of something, e.g. `quantizing`.
    pub fn new(what: &'static str, of: Of, total: u64) -> Progress {
        let amount = match of {
            Of::Bytes => "{bytes}/{total_bytes}".into(),
            Of::Count(things) => format!("{{pos}}/{{len}} {things}"),
        };
        let style = ProgressStyle::with_template(&format!("{what} {{bar:32}} {amount} {{msg}}"));
        let said = (!stderr().is_terminal()).then(|| Cell::new(0));
        let bar = ProgressBar::new(total).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Progress { what, of, total, bar, said }
    }

    /// The same, with nothing elsewhere than on a terminal.
    pub fn on_terminal(what: &'static str, of: Of, total: u64) -> Progress {
        Progress { said: None, ..Progress::new(what, of, total) }
    }

    /// Nothing.
    pub fn hidden() -> Progress {
        Progress { what: "", of: Of::Bytes, total: 0, bar: ProgressBar::hidden(), said: None }
    }

    /// So much more is done; `message` says what with.
    pub fn inc(&self, n: u64, message: &str) {
        self.bar.set_message(message.to_owned());
        self.bar.inc(n);
        let Some(said) = &self.said else { return };
        if let Some(line) = line(self.what, self.of, (self.bar.position(), self.total), said.get(), message) {
            said.set(tenths(self.bar.position(), self.total));
            // nobody may be listening
            let _ = writeln!(stderr(), "{line}");
        }
    }

    /// All is done, and the bar goes.
    pub fn finish(self) {
        self.bar.finish_and_clear();
    }
}

fn tenths(done: u64, total: u64) -> u64 {
    (u128::from(done) * 10 / u128::from(total.max(1))) as u64
}

/// What is to be said, if a tenth more is done than was said.
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
