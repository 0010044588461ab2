//! Cost of a step by its number of rows, and how many rows are worth drafting.

use alloc::vec::Vec;

/// Numbers of rows that are measured.
const MAX_ROWS: usize = 64;
/// Cost of a further row before any is measured, in steps of one row.
const ROW: f32 = 0.12;
/// A measurement counts for that many further ones.
const MAX_AGE: u32 = 1024;
/// How much a measurement may exceed the expected cost; longer steps were interrupted.
const MAX_RATIO: f32 = 1.5;
/// How much drafts may delay the other requests of a batch.
const MAX_DELAY: f32 = 1.1;

/// Measured or stated costs of steps of decode rows, in any unit.
#[derive(Debug, Clone)]
pub(crate) struct StepCosts {
    /// By number of rows less 1: the running mean, and when it was measured last.
    costs: Vec<Option<(f32, u32)>>,
    now: u32,
    /// Whether the costs were stated, so that none is measured.
    is_fixed: bool,
}

impl Default for StepCosts {
    fn default() -> StepCosts {
        StepCosts { costs: alloc::vec![None; MAX_ROWS], now: 0, is_fixed: false }
    }
}

impl StepCosts {
    /// Costs of steps of 1, 2, ... rows; further rows cost as much as the last.
    pub(crate) fn fixed(costs: &[f32]) -> StepCosts {
        let at = |i: usize| costs.get(i).or(costs.last()).map(|cost| (*cost, 0));
        StepCosts { costs: (0..MAX_ROWS).map(at).collect(), now: 0, is_fixed: true }
    }

    /// Records the duration of a step of `rows` decode rows.
    pub(crate) fn record(&mut self, rows: usize, cost: f32) {
        if self.is_fixed || !(1..=MAX_ROWS).contains(&rows) || !cost.is_finite() || cost <= 0.0 {
            return;
        }
        self.now = self.now.wrapping_add(1);
        let is_first = self.costs.iter().all(Option::is_none);
        let cost = if is_first { cost } else { cost.min(MAX_RATIO * self.at(rows)) };
        let mean = match self.measured(rows) {
            Some(mean) => mean + if cost < mean { 0.5 } else { 0.125 } * (cost - mean),
            None => cost,
        };
        self.costs[rows - 1] = Some((mean, self.now));
    }

    fn measured(&self, rows: usize) -> Option<f32> {
        let (cost, at) = (*self.costs.get(rows.checked_sub(1)?)?)?;
        (self.is_fixed || self.now.wrapping_sub(at) <= MAX_AGE).then_some(cost)
    }

    /// The cost of a step of `rows` rows: measured, between the nearest measured ones, or in proportion to the nearest.
    pub(crate) fn at(&self, rows: usize) -> f32 {
        let shape = |rows: usize| 1.0 + ROW * (rows.max(1) - 1) as f32;
        let below = (1..=rows.min(MAX_ROWS)).rev().find_map(|n| Some((n, self.measured(n)?)));
        let above = (rows..=MAX_ROWS).find_map(|n| Some((n, self.measured(n)?)));
        match (below, above) {
            (Some((n, cost)), _) if n == rows => cost,
            (Some((n, a)), Some((m, b))) => a + (b - a) * (rows - n) as f32 / (m - n) as f32,
            (Some((n, cost)), None) | (None, Some((n, cost))) => cost * shape(rows) / shape(n),
            (None, None) => shape(rows),
        }
    }
}

/// Shares draft rows among requests: how many tokens of each proposal to draft. `chances` has, per request, the chance
/// of each proposed token to be accepted. Without drafts the batch has `decode` decode rows and `prefill` prompt rows;
/// `free` more fit. The step has already spent `spent` on proposals.
///
/// The most probable token is drafted first, as long as the expected number of tokens per time grows. Drafts and proposals
/// may delay other requests by a tenth.
pub(crate) fn allot(
    chances: &[Vec<f32>],
    (decode, prefill): (usize, usize),
    free: usize,
    costs: &StepCosts,
    spent: f32,
) -> Vec<usize> {
    let has_others = decode > 1 || prefill > 0;
    let mut drafts = alloc::vec![0; chances.len()];
    let (mut best, mut n_best) = (decode as f32 / (costs.at(decode) + spent), 0);
    let (mut order, mut tokens) = (Vec::new(), decode as f32);
    while order.len() < free {
        let n = order.len() + 1;
        let cost = costs.at(decode + n) + spent;
        // prompt rows are bound by arithmetic: time grows with the rows
        let is_delay = if prefill > 0 { n * 10 > decode + prefill } else { cost > MAX_DELAY * costs.at(decode) };
        if has_others && is_delay {
            break;
        }
        let next = |i: usize| chances[i].get(drafts[i]).copied().unwrap_or(0.0);
        // the first of equals
        let Some(i) = (0..chances.len()).rev().max_by(|a, b| next(*a).total_cmp(&next(*b))) else { break };
        if drafts[i] >= chances[i].len() {
            break;
        }
        tokens += next(i);
        drafts[i] += 1;
        order.push(i);
        let rate = if prefill > 0 { tokens } else { tokens / cost };
        if rate >= best {
            (best, n_best) = (rate, order.len());
        }
    }
    order[n_best..].iter().for_each(|&i| drafts[i] -= 1);
    drafts
}

/// Cost of a step of a draft model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftCost {
    /// In steps of one row, until it is measured.
    relative: f32,
    /// In the unit of [`StepCosts`].
    measured: Option<f32>,
    is_fixed: bool,
}

impl DraftCost {
    /// An estimate, in steps of one row.
    pub(crate) fn estimated(relative: f32) -> DraftCost {
        DraftCost { relative, measured: None, is_fixed: false }
    }

    /// A stated cost, in steps of one row.
    pub(crate) fn fixed(relative: f32) -> DraftCost {
        DraftCost { relative, measured: None, is_fixed: true }
    }

    pub(crate) fn at(self, costs: &StepCosts) -> f32 {
        self.measured.unwrap_or(self.relative * costs.at(1))
    }

    /// Records the duration of a step of `rows` rows after `n` steps of the draft model.
    pub(crate) fn record(&mut self, costs: &StepCosts, rows: usize, n: usize, time: f32) {
        let cost = (time - costs.at(rows)) / n as f32;
        if self.is_fixed || !cost.is_finite() {
            return;
        }
        let mean = self.at(costs);
        self.measured = Some(mean + 0.125 * (cost.clamp(0.0, MAX_RATIO * mean.max(f32::MIN_POSITIVE)) - mean));
    }
}

/// What a draft model may do in a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DraftLimits {
    /// Tokens of a proposal: one batch of the draft model each.
    pub(crate) max: usize,
    /// Tokens to catch up with.
    pub(crate) rows: usize,
}

/// Limits of a draft model for proposals of up to `max` tokens in a step of `decode` decode rows. With other requests in
/// the batch, it may delay them by a tenth; a token to catch up with is taken to cost as much as a proposed one.
pub(crate) fn draft_limits(
    (decode, has_others): (usize, bool),
    (max, rows): (usize, usize),
    costs: &StepCosts,
    draft: DraftCost,
) -> DraftLimits {
    let (base, cost) = (costs.at(decode), draft.at(costs));
    let allowed = if has_others && cost > 0.0 { ((MAX_DELAY - 1.0) * base / cost) as usize } else { usize::MAX };
    DraftLimits { max: max.min(allowed), rows: rows.min(allowed) }
}

/// How many tokens of a draft model to propose to each of `decode` requests, at most `max`, if the first is accepted with
/// the chance `first` and each later one with `next`; 0 if none pays. The second value is the chance to be accepted below
/// which a further token does not pay: a token for each request costs a step of the draft model, and a row each.
pub(crate) fn worthwhile_length(
    (first, next): (f32, f32),
    decode: usize,
    max: usize,
    costs: &StepCosts,
    draft: DraftCost,
) -> (usize, f32) {
    let (base, cost) = (costs.at(decode), draft.at(costs));
    let (mut tokens, mut chance, mut best, mut n_best) = (1.0, first, 1.0 / base, 0);
    for n in 1..=max {
        tokens += chance;
        chance *= next;
        let rate = tokens / (costs.at(decode * (n + 1)) + n as f32 * cost);
        if rate >= best {
            (best, n_best) = (rate, n);
        }
    }
    let n = n_best.max(1);
    let rows = costs.at(decode * (n + 1)) - base;
    (n_best, (cost + rows / n as f32) / base)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn measures_costs() {
        let mut costs = StepCosts::default();
        assert_eq!(costs.at(1), 1.0);
        costs.record(1, 20.0);
        assert_eq!(costs.at(1), 20.0);
        assert!((costs.at(5) - 20.0 * (1.0 + 4.0 * ROW)).abs() < 1e-4);
        costs.record(5, 28.0);
        assert_eq!(costs.at(3), 24.0);
        // an interrupted step
        costs.record(5, 1e9);
        assert!(costs.at(5) < 30.0);
        costs.record(0, 1.0);
        costs.record(65, 1.0);
        costs.record(1, f32::NAN);
        assert_eq!((costs.at(1), StepCosts::fixed(&[2.0, 3.0]).at(9)), (20.0, 3.0));
    }

    #[test]
    fn drafts_where_it_pays() {
        let costs = StepCosts::fixed(&[1.0, 1.6, 1.7, 1.8, 1.9, 2.0]);
        // the first row alone does not pay, three do
        assert_eq!(allot(&[alloc::vec![0.5; 3]], (1, 0), 8, &costs, 0.0), [3]);
        assert_eq!(allot(&[alloc::vec![0.5]], (1, 0), 8, &costs, 0.0), [0]);
        assert_eq!(allot(&[alloc::vec![0.9; 3]], (1, 0), 2, &costs, 0.0), [2]);
        // with others, only what delays them little
        assert_eq!(allot(&[alloc::vec![0.9; 3]], (2, 0), 8, &costs, 0.0), [1]);
        assert_eq!(allot(&[alloc::vec![0.9; 9]], (1, 50), 8, &costs, 0.0), [5]);
        assert_eq!(allot(&[alloc::vec![0.9; 3], alloc::vec![0.95; 1]], (1, 20), 8, &costs, 0.0), [1, 1]);
        // a long proposal of the draft model pays where a short one does not
        let draft = DraftCost::fixed(0.2);
        assert_eq!(worthwhile_length((0.9, 0.9), 1, 5, &costs, draft).0, 5);
        assert_eq!(worthwhile_length((0.9, 0.9), 1, 1, &costs, draft).0, 1);
        assert_eq!(worthwhile_length((0.6, 0.5), 1, 5, &costs, draft).0, 0);
        assert_eq!(allot(&[], (1, 0), 8, &costs, 0.0), [0usize; 0]);
    }

    proptest! {
        /// Drafts stay within the proposals, the free rows and a tenth of the time of others.
        #[test]
        fn drafts_stay_within_limits(
            chances in prop::collection::vec(prop::collection::vec(0f32..=1.0, 0..9), 0..6),
            (extra, prefill, free) in (0usize..4, prop_oneof![Just(0usize), 1usize..100], 0usize..40),
            table in prop::collection::vec(1f32..4.0, 1..30),
        ) {
            let costs = StepCosts::fixed(&table);
            let decode = chances.len() + extra;
            let drafts = allot(&chances, (decode, prefill), free, &costs, 0.0);
            let n: usize = drafts.iter().sum();
            prop_assert!(n <= free && drafts.len() == chances.len());
            prop_assert!(drafts.iter().zip(&chances).all(|(n, c)| *n <= c.len()));
            if prefill > 0 {
                prop_assert!(n * 10 <= decode + prefill);
            } else if n > 0 && decode > 1 {
                prop_assert!(costs.at(decode + n) <= 1.1 * costs.at(decode));
            }
        }
    }
}
