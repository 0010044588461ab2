//! Sampling: from logits to a token. The stages and their order are a contract:
//!
//! ```text
//! logit bias -> grammar mask -> penalties (repeat, frequency, presence, DRY)
//!   -> top-k -> typical -> top-p -> min-p -> temperature -> draw
//! ```
//!
//! Filters see the probabilities of the tokens that the stage before left, at temperature 1. Ties go to the lower id.
//! Temperature 0 takes the arg-max after the penalties. The draw goes through the remaining tokens by ascending id. The
//! same options, logits, sequence and position give the same token on every target.

mod constraint;
mod draw;
mod dry;
mod options;
mod penalties;
mod recommended;
mod stages;
#[cfg(test)]
mod tests;

use alloc::vec;
use alloc::vec::Vec;

pub(crate) use constraint::Guide;
pub use constraint::{Constraint, ConstraintError};
pub use options::{ALL_TOKENS, DRY_BREAKERS, Dry, LogprobKind, MAX_TOP_LOGPROBS, PenaltyScope, SamplingOptions};

use crate::error::RequestError;
use crate::kernels::Cpu;
use crate::math;
use draw::WeightSums;
pub(crate) use draw::uniform;
use penalties::{History, finite};
use stages::{Candidate, LogitGroups, TypicalCandidate};

/// A sampled token, and the log-probabilities requested with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Pick {
    /// The token id.
    pub token: u32,
    /// Natural logarithm of the token's probability; 0 unless requested.
    pub logprob: f32,
    /// The most probable tokens with their log-probabilities, best first. Fewer than requested if filters left fewer.
    pub top: Vec<(u32, f32)>,
}

/// The sampler of one sequence: options, token history, and buffers for one vocabulary.
pub struct Sampler {
    options: SamplingOptions,
    history: History,
    /// Logits after bias, mask and penalties (n_vocab).
    adjusted: Vec<f32>,
    scratch: SamplerScratch,
}

/// Buffers that are reused between tokens.
struct SamplerScratch {
    groups: LogitGroups,
    kept: Vec<Candidate>,
    shifts: Vec<TypicalCandidate>,
    /// Logits of the kept tokens by ascending id.
    logits: Vec<f32>,
    weight_sums: WeightSums,
}

/// Top-p without top-k first sorts this many tokens, and all of them only if they do not reach p.
const FIRST_CANDIDATES: usize = 256;

impl Sampler {
    /// Creates a sampler for a vocabulary of `n_vocab` tokens.
    ///
    /// # Errors
    /// [`RequestError::Option`] of the first option that is out of range.
    pub fn new(options: SamplingOptions, n_vocab: usize) -> Result<Sampler, RequestError> {
        options.check(n_vocab)?;
        Ok(Sampler::checked(options, n_vocab))
    }

    /// Creates a sampler with options that were checked.
    pub(crate) fn checked(options: SamplingOptions, n_vocab: usize) -> Sampler {
        let scratch = SamplerScratch {
            groups: LogitGroups::new(n_vocab),
            kept: Vec::new(),
            shifts: Vec::new(),
            logits: Vec::new(),
            weight_sums: WeightSums::new(n_vocab),
        };
        Sampler { history: History::new(&options), options, adjusted: vec![0.0; n_vocab], scratch }
    }

    /// The sampling options.
    pub fn options(&self) -> &SamplingOptions {
        &self.options
    }

    /// Appends a token of the prompt to the history, in order, before the sampled tokens.
    pub fn accept_prompt(&mut self, token: u32) {
        self.history.accept(&self.options, token, true);
    }

    /// Appends a sampled token to the history, in order.
    pub fn accept(&mut self, token: u32) {
        self.history.accept(&self.options, token, false);
    }

    /// Samples the token at `position` of `sequence` from logits (n_vocab), which must be finite.
    ///
    /// `allowed` is the mask of a grammar: bit `t % 32` of word `t / 32` allows token `t`; tokens beyond its end are
    /// forbidden. A mask that allows no token is ignored, because callers end the sequence where a grammar ends.
    ///
    /// # Panics
    /// If `logits` is not n_vocab long.
    pub fn pick(&mut self, cpu: Cpu, logits: &[f32], sequence: u64, position: u64, allowed: Option<&[u32]>) -> Pick {
        assert!(logits.len() == self.adjusted.len(), "logits of another vocabulary");
        let (o, w) = (&self.options, &mut self.scratch);
        let mut x = logits;
        if !o.logit_bias.is_empty() || allowed.is_some() || self.history.is_used() {
            self.adjusted.copy_from_slice(logits);
            add_bias(&o.logit_bias, &mut self.adjusted);
            apply_mask(allowed, &mut self.adjusted);
            self.history.apply(o, &mut self.adjusted);
            x = &self.adjusted;
        }
        w.groups.scan(cpu, x);
        let mut pick = if o.temperature == 0.0 {
            let token = w.groups.arg_max(x);
            let n_top = (o.top_logprobs as usize).min(1);
            Pick { token, logprob: 0.0, top: vec![(token, 0.0); n_top] }
        } else {
            let u = draw::uniform(o.seed, sequence, position);
            if w.filter(cpu, o, x) { w.draw_kept(cpu, o, u) } else { w.draw_any(cpu, o, x, u) }
        };
        match o.logprobs {
            LogprobKind::None => (pick.logprob, pick.top) = (0.0, Vec::new()),
            LogprobKind::Raw => w.raw_logprobs(cpu, o, logits, &mut pick),
            LogprobKind::Final => {}
        }
        pick
    }

    /// Log-probability of `token` by the model's logits (n_vocab), which must be finite, and the most probable tokens,
    /// as many as the options request.
    ///
    /// # Panics
    /// If `logits` is not n_vocab long, or the token is outside the vocabulary.
    pub fn score(&mut self, cpu: Cpu, logits: &[f32], token: u32) -> (f32, Vec<(u32, f32)>) {
        assert!(logits.len() == self.adjusted.len(), "logits of another vocabulary");
        let mut pick = Pick { token, logprob: 0.0, top: Vec::new() };
        self.scratch.raw_logprobs(cpu, &self.options, logits, &mut pick);
        (pick.logprob, pick.top)
    }
}

impl SamplerScratch {
    /// Applies the filters and leaves the remaining tokens in `kept`, sorted. Returns false if all filters are off.
    fn filter(&mut self, cpu: Cpu, o: &SamplingOptions, x: &[f32]) -> bool {
        let (groups, kept) = (&mut self.groups, &mut self.kept);
        let is_top_k = o.top_k > 0 && (o.top_k as usize) < x.len();
        if is_top_k || o.typical_p < 1.0 {
            if is_top_k {
                groups.top(x, o.top_k as usize, kept);
            } else {
                stages::all(x, kept);
            }
            stages::drop_forbidden(kept);
            if o.typical_p < 1.0 {
                stages::typical(kept, o.typical_p, &mut self.shifts);
            }
            if o.top_p < 1.0 {
                stages::top_p(kept, o.top_p, stages::total(kept));
            }
        } else if o.top_p < 1.0 {
            let total = self.weight_sums.total(cpu, x, groups.max(), 1.0);
            groups.top(x, FIRST_CANDIDATES, kept);
            if !stages::top_p(kept, o.top_p, total) {
                groups.top(x, x.len(), kept);
                stages::drop_forbidden(kept);
                stages::top_p(kept, o.top_p, total);
            }
        } else if o.min_p > 0.0 {
            groups.min_p(x, o.min_p, kept);
            return true;
        } else {
            return false;
        }
        if o.min_p > 0.0 {
            stages::min_p(kept, o.min_p);
        }
        true
    }

    /// Draws a token from `kept`.
    fn draw_kept(&mut self, cpu: Cpu, o: &SamplingOptions, u: f64) -> Pick {
        let max = self.kept.first().map_or(0.0, |c| c.logit);
        let front = &self.kept[..self.kept.len().min(o.top_logprobs as usize)];
        let mut top: Vec<(u32, f32)> = front.iter().map(|c| (c.token, c.logit)).collect();
        self.kept.sort_unstable_by(Candidate::by_token);
        self.logits.clear();
        self.logits.extend(self.kept.iter().map(|c| c.logit));
        let total = self.weight_sums.total(cpu, &self.logits, max, o.temperature);
        let at = self.weight_sums.index_at(cpu, &self.logits, max, o.temperature, u);
        let of = Logprobs { max, temperature: o.temperature, ln_total: math::ln(total) };
        top.iter_mut().for_each(|(_, x)| *x = of.logit(*x));
        let (token, logit) = self.kept.get(at).map_or((0, max), |c| (c.token, c.logit));
        Pick { token, logprob: of.logit(logit), top }
    }

    /// Draws a token from the whole vocabulary.
    fn draw_any(&mut self, cpu: Cpu, o: &SamplingOptions, x: &[f32], u: f64) -> Pick {
        let max = self.groups.max();
        let total = self.weight_sums.total(cpu, x, max, o.temperature);
        let at = self.weight_sums.index_at(cpu, x, max, o.temperature, u);
        let of = Logprobs { max, temperature: o.temperature, ln_total: math::ln(total) };
        let top = self.top(o, x, &of);
        Pick { token: at as u32, logprob: of.logit(x[at]), top }
    }

    /// Fills in log-probabilities by the model's logits, before penalties and filters.
    fn raw_logprobs(&mut self, cpu: Cpu, o: &SamplingOptions, logits: &[f32], pick: &mut Pick) {
        self.groups.scan(cpu, logits);
        let max = self.groups.max();
        let total = self.weight_sums.total(cpu, logits, max, 1.0);
        let of = Logprobs { max, temperature: 1.0, ln_total: math::ln(total) };
        pick.logprob = of.logit(logits[pick.token as usize]);
        pick.top = self.top(o, logits, &of);
    }

    /// The most probable tokens of the logits that `groups` scanned last.
    fn top(&mut self, o: &SamplingOptions, x: &[f32], of: &Logprobs) -> Vec<(u32, f32)> {
        self.groups.top(x, o.top_logprobs as usize, &mut self.kept);
        stages::drop_forbidden(&mut self.kept);
        self.kept.iter().map(|c| (c.token, of.logit(c.logit))).collect()
    }
}

/// The softmax that log-probabilities are computed from.
struct Logprobs {
    max: f32,
    temperature: f32,
    ln_total: f64,
}

impl Logprobs {
    fn logit(&self, x: f32) -> f32 {
        (f64::from((x - self.max) / self.temperature) - self.ln_total) as f32
    }
}

fn add_bias(bias: &[(u32, f32)], x: &mut [f32]) {
    for (token, bias) in bias {
        let x = &mut x[*token as usize];
        *x = finite(*x + bias);
    }
}

/// Sets the logits of forbidden tokens to -inf.
fn apply_mask(allowed: Option<&[u32]>, x: &mut [f32]) {
    let Some(allowed) = allowed else { return };
    let is_allowed = |t: usize| allowed.get(t / 32).is_some_and(|word| word >> (t % 32) & 1 == 1);
    if !(0..x.len()).any(is_allowed) {
        return;
    }
    for (i, x) in x.chunks_mut(32).enumerate() {
        match allowed.get(i).copied().unwrap_or(0) {
            u32::MAX => {}
            0 => x.fill(f32::NEG_INFINITY),
            word => {
                let forbidden = x.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                forbidden.for_each(|(_, x)| *x = f32::NEG_INFINITY);
            }
        }
    }
}
