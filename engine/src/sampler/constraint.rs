//! What an answer has to be, decided token by token: hosts bring the grammar, the engine keeps to it.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt::Debug;

use thiserror::Error;

/// A grammar at a place in a text. It is asked for tokens and told of them in turns; what it says must follow from the
/// grammar and the tokens alone, not from time or from other texts, or answers differ from run to run.
pub trait Constraint: Debug + Send + Sync {
    /// The same grammar at the same place, independent of this one from now on.
    fn fork(&self) -> Box<dyn Constraint>;

    /// Says which tokens may come next: bit `t % 32` of word `t / 32` allows token `t`. The mask comes empty, with a
    /// bit for each token of the vocabulary. Returns whether the text may end here instead.
    ///
    /// # Errors
    /// If that cannot be found out.
    fn allow(&mut self, mask: &mut [u32]) -> Result<bool, ConstraintError>;

    /// Takes the next token, one of those allowed last. Returns whether the text is complete: nothing can follow.
    ///
    /// # Errors
    /// If the grammar cannot take it.
    fn accept(&mut self, token: u32) -> Result<bool, ConstraintError>;
}

/// Why a constraint failed. The request ends at that token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ConstraintError {
    /// The grammar requires text that no token of the vocabulary begins.
    #[error("dead end: the grammar allows no token of the vocabulary here, and no end of the text")]
    NoToken,
    /// The parser exceeded its limits of work or memory for one token.
    #[error("the grammar exceeds the parser's limits of work or memory for one token")]
    TooComplex,
    /// The grammar engine failed; an internal error.
    #[error("the grammar has failed: internal error of the grammar engine")]
    Failed,
}

/// The constraint of one answer.
pub(crate) struct Guide {
    constraint: Box<dyn Constraint>,
    /// Tokens that may come next (n_vocab bits, in whole words).
    mask: Vec<u32>,
    /// Bits of the last word that are tokens.
    last: u32,
}

impl Guide {
    /// For an answer in a vocabulary of `n_vocab` tokens.
    pub(crate) fn new(constraint: &dyn Constraint, n_vocab: usize) -> Guide {
        let last = if n_vocab.is_multiple_of(32) { u32::MAX } else { (1 << (n_vocab % 32)) - 1 };
        Guide { constraint: constraint.fork(), mask: vec![0; n_vocab.div_ceil(32)], last }
    }

    /// Finds out what may come next; of the tokens `ends`, which end an answer, any exactly where the text may end.
    /// Returns whether anything may come: if not, the text is complete.
    ///
    /// # Errors
    /// What the constraint says, or that nothing may come although the text is not complete.
    pub(crate) fn look(&mut self, ends: impl Iterator<Item = u32>) -> Result<bool, ConstraintError> {
        self.mask.fill(0);
        let may_end = self.constraint.allow(&mut self.mask)?;
        for token in ends {
            let Some(word) = self.mask.get_mut(token as usize / 32) else { continue };
            *word = *word & !(1 << (token % 32)) | u32::from(may_end) << (token % 32);
        }
        if let Some(word) = self.mask.last_mut() {
            *word &= self.last;
        }
        match self.mask.iter().any(|word| *word != 0) {
            false if !may_end => Err(ConstraintError::NoToken),
            any => Ok(any),
        }
    }

    /// What [`Guide::look`] found.
    pub(crate) fn mask(&self) -> &[u32] {
        &self.mask
    }

    /// Takes the token that was picked and does not end the answer. Returns whether the text is complete.
    ///
    /// # Errors
    /// What the constraint says.
    pub(crate) fn accept(&mut self, token: u32) -> Result<bool, ConstraintError> {
        self.constraint.accept(token)
    }
}
