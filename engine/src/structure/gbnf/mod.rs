//! llama.cpp's GBNF, translated to Lark. A translated grammar matches the same texts.
//!
//! GBNF has no lexemes: rules go down to characters. `llguidance` takes the longest lexeme at each place, so that
//! `("a" | "ab") "bc"` with lexemes `"a"` and `"ab"` would not match `abc`. Therefore parts of rules become a lexeme only
//! if no character that can follow it continues it or another lexeme ([`lexemes`]); the rest are single characters.

mod chars;
mod first_follow;
mod lexemes;
mod nfa;
mod parse;
mod print;
mod regular;
#[cfg(test)]
mod tests;

use alloc::string::String;

use self::lexemes::Lexemes;
use self::parse::parse;

/// Translates a grammar.
///
/// # Errors
/// What is invalid, and in which line; or that the grammar is too complex.
pub(super) fn lark(text: &str) -> Result<String, String> {
    let grammar = parse(text)?;
    print::lark(&grammar, &Lexemes::new(&grammar)?)
}

/// Work that a translation may still do, in visits of expressions.
struct Work(usize);

impl Work {
    fn spend(&mut self, n: usize) -> Result<(), String> {
        self.0 = self.0.checked_sub(n).ok_or("the grammar is too complex")?;
        Ok(())
    }
}
