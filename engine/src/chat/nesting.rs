//! Limits the nesting of a template before it is parsed: the parser of the template engine recurses for each operator
//! of an expression and each `elif` without a limit of its own. Counts tokens of the engine's own tokenizer, so that
//! comments, `raw` blocks and strings are recognised as the parser does.

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;

use super::{ChatError, ChatLimits, failure};

/// Maximal operators of one tag (`{{ … }}` or `{% … %}`). Parsing, compiling and dropping recurse once per operator,
/// within the 1 MiB of stack that threads and WebAssembly modules have at least.
const MAX_OPERATORS: usize = 1000;
/// Maximal `elif` tags of a template: each is parsed as a condition nested in the one before.
const MAX_ELIFS: usize = 250;

/// Refuses templates that nest too deeply to be parsed.
pub(super) fn check(source: &str, syntax: SyntaxConfig, limits: ChatLimits) -> Result<(), ChatError> {
    let (mut operators, mut elifs) = (0, 0);
    let mut starts_block = false;
    for token in tokenize(source, false, syntax) {
        let (token, _) = token.map_err(|e| failure(&e, limits))?;
        let is_first = core::mem::replace(&mut starts_block, matches!(token, Token::BlockStart));
        match token {
            Token::BlockStart | Token::VariableStart => operators = 0,
            Token::Ident("elif") if is_first => elifs += 1,
            Token::Ident("not" | "and" | "or" | "is" | "in" | "if" | "else") => operators += 1,
            Token::Plus
            | Token::Minus
            | Token::Mul
            | Token::Div
            | Token::FloorDiv
            | Token::Pow
            | Token::Mod
            | Token::Dot
            | Token::Tilde
            | Token::Pipe
            | Token::Eq
            | Token::Ne
            | Token::Gt
            | Token::Gte
            | Token::Lt
            | Token::Lte
            | Token::BracketOpen
            | Token::ParenOpen
            | Token::BraceOpen => operators += 1,
            _ => {}
        }
        for (what, found, limit) in
            [("operators in one tag", operators, MAX_OPERATORS), ("elif tags", elifs, MAX_ELIFS)]
        {
            if found > limit {
                return Err(ChatError::Limit { what, limit: limit as u64 });
            }
        }
    }
    Ok(())
}
