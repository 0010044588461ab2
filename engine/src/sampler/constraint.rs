//! Constraints on generated text: the interface between grammars, which hosts provide, and the engine.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt::Debug;

use thiserror::Error;

/// State of a grammar within one text. Results must depend on the grammar and the accepted tokens only, not on time or
/// other texts, or outputs differ between runs.
pub trait Constraint: Debug + Send + Sync {
    /// An independent copy of the state.
    fn fork(&self) -> Box<dyn Constraint>;

    /// Computes which tokens are allowed next: sets bit `t % 32` of word `t / 32` for token `t`. The mask is zero on
    /// entry and has a bit for each token of the vocabulary. Returns whether the text may end here.
    ///
    /// # Errors
    /// [`ConstraintError`] if the mask cannot be computed.
    fn allow(&mut self, mask: &mut [u32]) -> Result<bool, ConstraintError>;

    /// Advances by the next token, which the last mask allowed. Returns whether the text is complete, so that no token
    /// can follow.
    ///
    /// # Errors
    /// [`ConstraintError`] if the grammar cannot accept the token.
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

/// The constraint state of one request, and its current mask.
pub(crate) struct Guide {
    constraint: Box<dyn Constraint>,
    /// Mask of allowed tokens (n_vocab bits in whole words).
    mask: Vec<u32>,
    /// Bits of the last word that stand for tokens.
    last: u32,
}

impl Guide {
    /// Forks `constraint` for a vocabulary of `n_vocab` tokens.
    pub(crate) fn new(constraint: &dyn Constraint, n_vocab: usize) -> Guide {
        let last = if n_vocab.is_multiple_of(32) { u32::MAX } else { (1 << (n_vocab % 32)) - 1 };
        Guide { constraint: constraint.fork(), mask: vec![0; n_vocab.div_ceil(32)], last }
    }

    /// Updates the mask. The tokens `ends` end the text and are allowed exactly where it may end. Returns whether any
    /// token is allowed; if none is, the text is complete.
    ///
    /// # Errors
    /// The error of the constraint, or [`ConstraintError::NoToken`] if no token is allowed but the text is not
    /// complete.
    pub(crate) fn update_mask(&mut self, ends: impl Iterator<Item = u32>) -> Result<bool, ConstraintError> {
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

    /// The mask of the last [`Guide::update_mask`].
    pub(crate) fn mask(&self) -> &[u32] {
        &self.mask
    }

    /// Advances by the sampled token, which must not end the text. Returns whether the text is complete.
    ///
    /// # Errors
    /// The error of the constraint.
    pub(crate) fn accept(&mut self, token: u32) -> Result<bool, ConstraintError> {
        self.constraint.accept(token)
    }
}
