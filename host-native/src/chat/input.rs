//! Messages from a terminal, with line editing and history, or from a pipe.

use std::fs;
use std::io::{self, BufRead, IsTerminal, StdinLock, Write, stdin, stdout};
use std::path::PathBuf;
use std::{env, iter};

use rustyline::error::ReadlineError;
use rustyline::history::{FileHistory, History};
use rustyline::{Cmd, Config, Editor, KeyCode, KeyEvent, Modifiers};
use starling_host::error::Failure;
use starling_host::text_file::utf8;

const PROMPT: &str = "> ";
/// Prompt of further lines of a message.
const MORE: &str = ". ";
/// Messages in the history.
const MAX_HISTORY: usize = 1000;

/// Source of messages.
pub enum Input {
    Terminal(Box<Terminal>),
    Pipe { lines: iter::Enumerate<io::Split<StdinLock<'static>>> },
}

/// A terminal with its history.
pub struct Terminal {
    editor: Editor<(), FileHistory>,
    history: Option<PathBuf>,
}

impl Input {
    /// Standard input; a terminal has the history of earlier chats if `has_history`.
    ///
    /// # Errors
    /// If the terminal cannot be used.
    pub fn new(has_history: bool) -> Result<Input, Failure> {
        if !stdin().is_terminal() {
            return Ok(Input::Pipe { lines: stdin().lock().split(b'\n').enumerate() });
        }
        let config = Config::builder().max_history_size(MAX_HISTORY).map_err(io::Error::other)?.build();
        let mut editor = Editor::<(), FileHistory>::with_config(config).map_err(io::Error::other)?;
        editor.bind_sequence(KeyEvent(KeyCode::Enter, Modifiers::ALT), Cmd::Newline);
        let history = history_path().filter(|_| has_history);
        if let Some(path) = &history {
            // a history that cannot be read is none
            let _ = editor.load_history(path);
        }
        Ok(Input::Terminal(Box::new(Terminal { editor, history })))
    }

    pub fn is_terminal(&self) -> bool {
        matches!(self, Input::Terminal(_))
    }

    /// The next message, which may have several lines; `None` at the end of the input.
    ///
    /// # Errors
    /// If the input cannot be read, or is not UTF-8.
    pub fn message(&mut self) -> Result<Option<String>, Failure> {
        let mut lines = Lines::default();
        match self {
            Input::Pipe { lines: pipe } => {
                for (i, line) in pipe {
                    let line = utf8(&format!("standard input, line {}", i + 1), line?)?;
                    if let Some(message) = lines.push(line.trim_end_matches('\r')) {
                        return Ok(Some(message));
                    }
                }
                Ok(lines.rest())
            }
            Input::Terminal(terminal) => loop {
                match terminal.editor.readline(if lines.is_empty() { PROMPT } else { MORE }) {
                    Ok(line) => {
                        if let Some(message) = lines.push(&line) {
                            terminal.remember(&message);
                            return Ok(Some(message));
                        }
                    }
                    Err(ReadlineError::Interrupted) if lines.is_empty() => {
                        writeln!(stdout(), "(Ctrl-D or /exit to exit)")?;
                    }
                    Err(ReadlineError::Interrupted) => lines = Lines::default(),
                    Err(ReadlineError::Eof) => return Ok(lines.rest()),
                    Err(e) => return Err(io::Error::other(e).into()),
                }
            },
        }
    }

    /// Lets the user change a text; `None` if it was not changed, or there is no terminal.
    ///
    /// # Errors
    /// If the terminal fails.
    pub fn edit(&mut self, text: &str) -> Result<Option<String>, Failure> {
        let Input::Terminal(terminal) = self else {
            return Err(Failure::Usage("/edit takes the new text where input is not a terminal".into()));
        };
        match terminal.editor.readline_with_initial(PROMPT, (text, "")) {
            Ok(text) => Ok(Some(text)),
            Err(ReadlineError::Interrupted | ReadlineError::Eof) => Ok(None),
            Err(e) => Err(io::Error::other(e).into()),
        }
    }
}

impl Terminal {
    /// Adds a message to the history and its file.
    fn remember(&mut self, message: &str) {
        if !self.editor.history_mut().add(message).unwrap_or(false) {
            return;
        }
        let Some(path) = &self.history else { return };
        if let Some(directory) = path.parent() {
            let _ = fs::create_dir_all(directory);
        }
        // a history that cannot be written must not end the conversation
        let _ = self.editor.append_history(path);
    }
}

/// The file of the history: `$XDG_STATE_HOME/starling/chat_history`, by default in `~/.local/state`.
fn history_path() -> Option<PathBuf> {
    let state = env::var_os("XDG_STATE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    Some(state.or_else(|| Some(env::home_dir()?.join(".local/state")))?.join("starling/chat_history"))
}

/// Columns of the terminal.
pub fn width() -> Option<usize> {
    rustix::termios::tcgetwinsize(stdout()).ok().map(|size| size.ws_col.into()).filter(|width| *width > 0)
}

/// Joins the lines of one message.
#[derive(Debug, Default)]
struct Lines {
    text: String,
    /// Between `"""` and `"""`.
    is_quoted: bool,
    /// After a line that ends with a backslash.
    is_continued: bool,
}

const QUOTES: &str = "\"\"\"";

impl Lines {
    fn is_empty(&self) -> bool {
        !self.is_quoted && !self.is_continued
    }

    /// Adds a line; returns the message if it is complete.
    fn push(&mut self, line: &str) -> Option<String> {
        let mut line = line;
        if self.is_empty()
            && let Some(rest) = line.trim_start().strip_prefix(QUOTES)
        {
            (self.is_quoted, line) = (true, rest);
            if line.is_empty() {
                return None;
            }
        }
        if self.is_quoted {
            let (text, is_last) = match line.trim_end().strip_suffix(QUOTES) {
                Some(text) => (text, true),
                None => (line, false),
            };
            self.text.push_str(text);
            if !is_last {
                self.text.push('\n');
            }
            return is_last.then(|| self.take());
        }
        let (text, is_continued) = match line.strip_suffix('\\') {
            Some(text) => (text, true),
            None => (line, false),
        };
        self.text.push_str(text);
        self.is_continued = is_continued;
        if is_continued {
            self.text.push('\n');
            return None;
        }
        Some(self.take())
    }

    fn take(&mut self) -> String {
        std::mem::take(self).text
    }

    /// What is left at the end of the input.
    fn rest(mut self) -> Option<String> {
        (!self.is_empty()).then(|| self.take()).filter(|text| !text.trim().is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(lines: &[&str]) -> Vec<String> {
        let mut joined = Lines::default();
        let mut all: Vec<String> = lines.iter().filter_map(|line| joined.push(line)).collect();
        all.extend(joined.rest());
        all
    }

    #[test]
    fn lines_are_joined() {
        assert_eq!(messages(&["a", "", "b"]), ["a", "", "b"]);
        assert_eq!(messages(&["a\\", "b\\", "c", "d"]), ["a\nb\nc", "d"]);
        assert_eq!(messages(&["\"\"\"a", "", "b \\", "c\"\"\"", "d"]), ["a\n\nb \\\nc", "d"]);
        assert_eq!(messages(&["\"\"\"", "a", "\"\"\""]), ["a\n"]);
        assert_eq!(messages(&["\"\"\"a b\"\"\"", "c"]), ["a b", "c"]);
        assert_eq!(messages(&["\"\"\"a", "b"]), ["a\nb\n"]);
        assert_eq!(messages(&["a\\"]), ["a\n"]);
        assert_eq!(messages(&["say \"\"\" now"]), ["say \"\"\" now"]);
    }
}
