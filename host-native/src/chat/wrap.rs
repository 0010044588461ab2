//! Wraps streamed text at words to the width of a terminal.

use unicode_width::UnicodeWidthStr;

/// A stream of text whose lines break between words. Lines of code blocks are left alone.
pub struct Wrap {
    /// Columns; `None`: text passes unchanged.
    width: Option<usize>,
    column: usize,
    /// The last word, which may go on in the next piece of text.
    word: String,
    /// White space before the word.
    space: String,
    /// The current line so far, at most the length of a fence.
    line_start: String,
    is_code: bool,
}

/// Begins and ends a code block.
const FENCE: &str = "```";

impl Wrap {
    pub fn new(width: Option<usize>) -> Wrap {
        let (word, space, line_start) = (String::new(), String::new(), String::new());
        Wrap { width, column: 0, word, space, line_start, is_code: false }
    }

    /// Adds text; returns what can be printed.
    pub fn push(&mut self, text: &str) -> String {
        if self.width.is_none() {
            return text.into();
        }
        let mut out = String::new();
        for c in text.chars() {
            if c == '\n' {
                self.flush(&mut out);
                out.push('\n');
                if self.line_start.starts_with(FENCE) {
                    self.is_code = !self.is_code;
                }
                self.line_start.clear();
                self.column = 0;
                continue;
            }
            if self.line_start.len() < FENCE.len() && !(self.line_start.is_empty() && c == ' ') {
                self.line_start.push(c);
            }
            if c == ' ' && !self.is_code {
                if !self.word.is_empty() {
                    self.flush(&mut out);
                }
                self.space.push(c);
            } else {
                self.word.push(c);
                if self.is_code {
                    self.flush(&mut out);
                }
            }
        }
        out
    }

    /// The text that is left.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        self.flush(&mut out);
        out
    }

    /// Prints space and word, on a new line if they do not fit on this one.
    fn flush(&mut self, out: &mut String) {
        let (space, word) = (self.space.width(), self.word.width());
        let width = self.width.unwrap_or(usize::MAX);
        let fits = self.is_code || word == 0 || self.column + space + word <= width;
        if fits || self.column == 0 {
            out.push_str(&self.space);
            self.column += space;
        } else {
            out.push('\n');
            self.column = 0;
        }
        out.push_str(&self.word);
        self.column += word;
        self.word.clear();
        self.space.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrapped(text: &str, width: Option<usize>) -> String {
        let mut wrap = Wrap::new(width);
        // one character at a time, as the worst case of a stream
        let mut out: String = text.chars().map(|c| wrap.push(&c.to_string())).collect();
        out.push_str(&wrap.finish());
        let mut whole = Wrap::new(width);
        assert_eq!(out, whole.push(text) + &whole.finish());
        out
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrapped("one two three", Some(8)), "one two\nthree");
        assert_eq!(wrapped("one two three", None), "one two three");
        assert_eq!(wrapped("a verylongword b", Some(6)), "a\nverylongword\nb");
        assert_eq!(wrapped("  indented\n\nnext", Some(20)), "  indented\n\nnext");
        assert_eq!(wrapped("犬犬 犬犬", Some(6)), "犬犬\n犬犬");
    }

    #[test]
    fn code_is_left_alone() {
        let code = "```\nlet a = b + c + d;\n```\n";
        assert_eq!(wrapped(code, Some(10)), code);
        assert_eq!(wrapped(&format!("{code}one two three"), Some(10)), format!("{code}one two\nthree"));
    }
}
