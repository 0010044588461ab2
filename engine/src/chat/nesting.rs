//! How deeply a template may nest, before it is read: the library that reads it goes down its own stack for each operator of an
//! expression and each branch of a condition, without an end.

use super::ChatError;

/// Bytes of one tag, texts and blanks not counted: some thousands of operators take a thread's stack.
const MAX_TAG: u64 = 2000;
/// Tags that begin with `elif` in a template: each is a condition inside of the one before.
const MAX_BRANCHES: u64 = 250;

/// Refuses what nests too deeply.
pub(super) fn check(source: &str) -> Result<(), ChatError> {
    let (mut rest, mut branches) = (source.as_bytes(), 0);
    while let [first, after @ ..] = rest {
        rest = after;
        let (b'{', [b'{' | b'%', tag @ ..]) = (first, after) else { continue };
        let word = tag.strip_prefix(b"-").unwrap_or(tag).trim_ascii_start();
        branches += u64::from(word.starts_with(b"elif"));
        // in a tag, to its end
        let (mut len, mut brackets, mut quote) = (0, 0i64, 0);
        rest = tag;
        while let [c, after @ ..] = rest {
            rest = after;
            if quote != 0 {
                match *c {
                    b'\\' => rest = rest.get(1..).unwrap_or_default(),
                    c if c == quote => quote = 0,
                    _ => {}
                }
                continue;
            }
            match c {
                b'}' | b'%' if brackets <= 0 && rest.first() == Some(&b'}') => break,
                b'"' | b'\'' => quote = *c,
                b'(' | b'[' | b'{' => brackets += 1,
                b')' | b']' | b'}' => brackets -= 1,
                _ => {}
            }
            len += u64::from(!c.is_ascii_whitespace());
        }
        if len > MAX_TAG || branches > MAX_BRANCHES {
            return Err(ChatError::Limit { what: "nesting", limit: MAX_TAG });
        }
    }
    Ok(())
}
