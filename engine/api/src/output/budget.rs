//! The constraint of answers with reasoning: reasoning is free up to a budget of tokens, then its end is forced. The
//! constraint of the answer itself begins after it.

use std::sync::Arc;

use starling::model::Model;
use starling::sampler::{Constraint, ConstraintError};
use starling::tokenizer::EncodeOptions;

use super::OutputPlan;

/// What the states of one answer share.
#[derive(Debug)]
struct Markers {
    model: ModelRef,
    open: &'static [u8],
    close: &'static [u8],
    /// The token of the opening marker, if it is one.
    open_token: Option<u32>,
    /// Forced when the budget is spent.
    end: Vec<u32>,
    budget: usize,
}

struct ModelRef(Arc<Model>);

impl std::fmt::Debug for ModelRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Model")
    }
}

#[derive(Debug, Clone)]
enum Phase {
    /// The text so far, which may be the beginning of the opening marker.
    Before(Vec<u8>),
    /// Tokens of reasoning, and the end of its text.
    Inside(usize, Vec<u8>),
    /// Number of forced tokens.
    Forced(usize),
    After,
}

#[derive(Debug)]
struct Reasoning {
    markers: Arc<Markers>,
    phase: Phase,
    /// The constraint of the text after the reasoning.
    answer: Option<Box<dyn Constraint>>,
}

/// The constraint of answers of `plan`: at most `budget` tokens of reasoning, then `answer`. `None` if nothing is
/// constrained.
pub fn reasoning_constraint(
    plan: &OutputPlan,
    model: &Arc<Model>,
    budget: Option<usize>,
    answer: Option<Arc<dyn Constraint>>,
) -> Option<Arc<dyn Constraint>> {
    let Some((open, close, end, in_reasoning)) = plan.reasoning_texts() else { return answer };
    let options = EncodeOptions { add_special: false, parse_special: true };
    let open_token = match model.tokenizer.encode(open, options)[..] {
        [token] => Some(token),
        _ => None,
    };
    let is_free = budget.is_none() && (answer.is_none() || (!in_reasoning && open_token.is_none()));
    if is_free {
        return answer;
    }
    let markers = Markers {
        model: ModelRef(Arc::clone(model)),
        open: open.as_bytes(),
        close: close.as_bytes(),
        open_token,
        end: model.tokenizer.encode(end, options),
        budget: budget.unwrap_or(usize::MAX),
    };
    let phase = if in_reasoning { markers.inside(0, Vec::new()) } else { Phase::Before(Vec::new()) };
    let answer = answer.map(|answer| answer.fork());
    Some(Arc::new(Reasoning { markers: Arc::new(markers), phase, answer }))
}

impl Markers {
    fn piece(&self, token: u32) -> &[u8] {
        self.model.0.tokenizer.piece(token).unwrap_or_default()
    }

    /// The phase after `n` tokens of reasoning whose text ends with `tail`.
    fn inside(&self, n: usize, mut tail: Vec<u8>) -> Phase {
        if tail.windows(self.close.len()).any(|text| text == self.close) {
            return Phase::After;
        }
        if n >= self.budget && !self.end.is_empty() {
            return Phase::Forced(0);
        }
        tail.drain(..tail.len().saturating_sub(self.close.len()));
        Phase::Inside(n, tail)
    }
}

impl Constraint for Reasoning {
    fn fork(&self) -> Box<dyn Constraint> {
        let answer = self.answer.as_ref().map(|answer| answer.fork());
        Box::new(Reasoning { markers: Arc::clone(&self.markers), phase: self.phase.clone(), answer })
    }

    fn allow(&mut self, mask: &mut [u32]) -> Result<bool, ConstraintError> {
        let mut set = |token: u32| {
            mask.get_mut(token as usize / 32).into_iter().for_each(|word| *word |= 1 << (token % 32));
        };
        match (&self.phase, &mut self.answer) {
            (Phase::Forced(n), _) => {
                self.markers.end.get(*n).into_iter().for_each(|token| set(*token));
                Ok(false)
            }
            (Phase::Inside(..), answer) => {
                mask.fill(u32::MAX);
                Ok(answer.is_none())
            }
            (Phase::Before(_) | Phase::After, None) => {
                mask.fill(u32::MAX);
                Ok(true)
            }
            (Phase::After, Some(answer)) => answer.allow(mask),
            (Phase::Before(_), Some(answer)) => {
                let may_end = answer.allow(mask)?;
                if let Some(token) = self.markers.open_token {
                    mask.get_mut(token as usize / 32).into_iter().for_each(|word| *word |= 1 << (token % 32));
                }
                Ok(may_end)
            }
        }
    }

    fn accept(&mut self, token: u32) -> Result<bool, ConstraintError> {
        let markers = Arc::clone(&self.markers);
        match &mut self.phase {
            Phase::Before(_) if self.answer.is_some() => {
                if markers.open_token == Some(token) {
                    self.phase = markers.inside(0, Vec::new());
                    return Ok(false);
                }
                self.phase = Phase::After;
            }
            Phase::Before(text) => {
                text.extend(markers.piece(token));
                let start = text.trim_ascii_start();
                if start.starts_with(markers.open) {
                    self.phase = markers.inside(0, start[markers.open.len()..].to_vec());
                } else if !markers.open.starts_with(start) {
                    self.phase = Phase::After;
                }
                return Ok(false);
            }
            Phase::Inside(n, tail) => {
                let mut tail = std::mem::take(tail);
                tail.extend(markers.piece(token));
                self.phase = markers.inside(*n + 1, tail);
                return Ok(false);
            }
            Phase::Forced(n) => {
                *n += 1;
                if *n >= markers.end.len() {
                    self.phase = Phase::After;
                }
                return Ok(false);
            }
            Phase::After => {}
        }
        match &mut self.answer {
            Some(answer) => answer.accept(token),
            None => Ok(false),
        }
    }
}
