//! Selections and attention to them against plain definitions, on numbers whose products and sums are exact.

use alloc::vec;
use alloc::vec::Vec;
use proptest::prelude::*;

use super::super::{AttentionWindow, KvHeads, KvLayout, KvMemory, KvRows, KvType, Slot, write_kv};
use super::*;
use crate::kernels::tests::{Rng, Scoped};
use crate::pool::Inline;

const KEY: usize = 16;
const VALUE: usize = 16;

/// A sequence of `all` tokens, of which the last `tokens` are computed in batches of `batch`.
struct Case {
    kv_type: KvType,
    n_head: usize,
    kv_heads: usize,
    together: bool,
    rule: SelectionRule,
    all: usize,
    tokens: usize,
    /// (all, KEY)
    index_keys: Vec<f32>,
    /// (tokens, n_head, KEY)
    queries: Vec<f32>,
    /// (tokens, n_head)
    weights: Vec<f32>,
    /// (all, kv_heads * (KEY + VALUE))
    keys_and_values: Vec<f32>,
}

impl Case {
    fn lists(&self) -> usize {
        if self.together { 1 } else { self.n_head }
    }

    /// Scores of the positions up to a token's own, in any order of sums.
    fn scores(&self, token: usize, list: usize) -> Vec<f32> {
        let q = |h: usize| &self.queries[(token * self.n_head + h) * KEY..][..KEY];
        let score = |t: usize| {
            let k = &self.index_keys[t * KEY..][..KEY];
            let dot = |h: usize| q(h).iter().zip(k).map(|(q, k)| q * k).sum::<f32>();
            match self.together {
                true => (0..self.n_head).map(|h| dot(h).max(0.0) * self.weights[token * self.n_head + h]).sum(),
                false => dot(list),
            }
        };
        (0..=self.all - self.tokens + token).map(score).collect()
    }

    /// Whether positions are those of as many blocks as are selected, of which none has a lower score than one that is
    /// not.
    fn are_best(&self, token: usize, list: usize, selected: &[usize]) -> bool {
        let (scores, rule) = (self.scores(token, list), self.rule);
        let blocks: Vec<&[f32]> = scores.chunks(rule.block).collect();
        let is_selected = |j: &usize| selected.contains(&(j * rule.block));
        let (best, others): (Vec<usize>, Vec<usize>) = (0..blocks.len()).partition(is_selected);
        let score = |j: &usize| match j + rule.local >= blocks.len() {
            true => f32::INFINITY,
            false => blocks[*j].iter().copied().fold(f32::NEG_INFINITY, f32::max),
        };
        let least = best.iter().map(score).fold(f32::INFINITY, f32::min);
        let all: Vec<usize> = best.iter().flat_map(|j| j * rule.block..(j + 1) * rule.block).collect();
        let all: Vec<usize> = all.into_iter().filter(|t| *t < scores.len()).collect();
        all == selected && best.len() == rule.top_k.min(blocks.len()) && others.iter().all(|j| score(j) <= least)
    }

    /// Softmax over the selected positions, in f64.
    fn attention(&self, token: usize, head: usize, positions: &[usize]) -> Vec<f64> {
        let kv_head = head / (self.n_head / self.kv_heads);
        let width = self.kv_heads * (KEY + VALUE);
        let q = &self.queries[(token * self.n_head + head) * KEY..][..KEY];
        let row = |t: &usize| &self.keys_and_values[t * width..][..width];
        let dot = |t| q.iter().zip(&row(t)[kv_head * KEY..]).map(|(q, k)| f64::from(q * k)).sum::<f64>().exp();
        let weights: Vec<f64> = positions.iter().map(dot).collect();
        let value = |d: usize| {
            let at = self.kv_heads * KEY + kv_head * VALUE + d;
            let sum: f64 = positions.iter().zip(&weights).map(|(t, w)| w * f64::from(row(t)[at])).sum();
            sum / weights.iter().sum::<f64>()
        };
        (0..VALUE).map(value).collect()
    }

    /// Selected positions of each token and list, and the outputs of attention.
    fn run(&self, cpu: Cpu, pool: &dyn Pool, batch: usize) -> (Vec<Vec<usize>>, Vec<f32>) {
        let heads = [KvHeads::separate(self.kv_heads, KEY, VALUE), KvHeads::separate(1, KEY, 0)];
        let layout = KvLayout::new(self.kv_type, heads);
        let n_pages = self.all.div_ceil(PAGE);
        let pages: Vec<u32> = (0..n_pages as u32).rev().collect();
        let slots: Vec<Slot> =
            (0..self.all).map(|t| Slot { page: pages[t / PAGE], token: (t % PAGE) as u32 }).collect();
        let mut memory = KvMemory::zeroed(&layout, n_pages).expect("memory");
        let stride = self.kv_heads * (KEY + VALUE);
        let rows = KvRows { x: &self.keys_and_values, stride, k_at: 0, v_at: self.kv_heads * KEY, slots: &slots };
        write_kv(cpu, pool, &layout.layers()[0], rows, &mut memory);
        let rows = KvRows { x: &self.index_keys, stride: KEY, k_at: 0, v_at: 0, slots: &slots };
        write_kv(cpu, pool, &layout.layers()[1], rows, &mut memory);
        let mut threads: Vec<_> = (0..pool.threads()).map(|_| AttendScratch::new(layout.layers())).collect();
        let (lists, n_head) = (self.lists(), self.n_head);
        let (mut selected, mut outputs) = (Vec::new(), Vec::new());
        for first in (0..self.tokens).step_by(batch) {
            let n = batch.min(self.tokens - first);
            let [scores, blocks, words] = SelectionScratch::shapes(n, lists, self.all).map(|d| d.iter().product());
            let (scores, blocks) = (vec![f32::NAN; scores], vec![u32::MAX; blocks]);
            let mut s = SelectionScratch { lists, n_ctx: self.all, scores, blocks, words: vec![0x5555; words] };
            let spans = [Span { row: 0, n, pos: self.all - self.tokens + first, pages: &pages }];
            let attention = |kv, selected| Attention {
                kv,
                memory: &memory,
                n_head,
                window: AttentionWindow::CAUSAL,
                soft_cap: None,
                alibi: None,
                bias: None,
                sinks: None,
                selected,
                q: &self.queries[first * n_head * KEY..],
                q_stride: n_head * KEY,
                spans: &spans,
            };
            let weights = Floats { x: &self.weights[first * n_head..], stride: n_head };
            let weights = self.together.then_some(weights);
            let indexer = Indexer { attention: attention(layout.layers()[1], None), weights, rule: self.rule };
            indexer.run(cpu, pool, &mut threads, &mut s);
            for token in 0..n {
                for list in 0..lists {
                    let words = s.selected().of(token, list);
                    let is_selected = |t: &usize| words[t / PAGE] >> (t % PAGE) & 1 != 0;
                    selected.push((0..=spans[0].pos + token).filter(is_selected).collect());
                }
            }
            let attention = attention(layout.layers()[0], Some(s.selected()));
            let mut out = vec![f32::NAN; n * n_head * VALUE];
            let mut parts = vec![f32::NAN; Attention::parts_len(&layout.layers()[0], n_head, 1, self.all)];
            attention.run(cpu, pool, &mut out, &mut threads, &mut parts);
            outputs.extend(out);
        }
        (selected, outputs)
    }
}

/// What `std::partial_sort` of GCC 12 leaves in front, of scores 0 to 3.
#[test]
fn equal_scores_are_kept_as_in_gcc() {
    let wanted: [(usize, usize, &[u32]); 5] = [
        (7, 3, &[1, 5, 6]),
        (16, 5, &[2, 5, 8, 10, 13]),
        (40, 8, &[5, 10, 11, 13, 19, 20, 21, 25]),
        (64, 17, &[1, 4, 5, 9, 10, 11, 16, 21, 34, 36, 37, 43, 44, 49, 50, 56, 60]),
        (
            100,
            50,
            &[
                1, 6, 7, 10, 12, 13, 15, 18, 19, 21, 23, 26, 27, 28, 32, 37, 38, 39, 42, 44, 47, 49, 55, 58, 60, 62,
                63, 64, 65, 66, 68, 69, 70, 71, 73, 74, 77, 78, 81, 82, 83, 84, 85, 88, 89, 90, 92, 94, 95, 96,
            ],
        ),
    ];
    let mut state = 1u32;
    for (n, k, wanted) in wanted {
        let mut score = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 24) % 4) as f32
        };
        let scores: Vec<f32> = (0..n).map(|_| score()).collect();
        let mut heap = vec![9; k];
        keep_largest(&mut heap, n, |j| scores[j as usize]);
        heap.sort();
        assert_eq!(heap, wanted, "{k} of {n}");
    }
}

/// The positions after the last whole block, and those of the best blocks, of which the last one may be cut.
#[test]
fn positions_of_a_block_share_a_score() {
    for (shared, top_k) in [(4, 11), (4, 8), (5, 1), (7, 24), (1, 3)] {
        for pos in 0..200 {
            let rule = SelectionRule { top_k, shared, ..SelectionRule::ALL };
            // of other positions than the last of blocks nothing is read
            let score = |t: usize| match (t + 1).is_multiple_of(shared) {
                true => ((t * 131) % 211) as f32,
                false => panic!("a score of position {t}"),
            };
            let (mut memory, mut words) = (vec![0; 512], vec![0; 13]);
            choose(rule, pos, score, &mut memory, &mut words);
            let is_selected = |t: &usize| words[t / PAGE] >> (t % PAGE) & 1 != 0;
            let selected: Vec<usize> = (0..=pos).filter(is_selected).collect();
            assert_eq!(selected.len(), top_k.min(pos + 1), "{top_k} of {pos}");
            let n_whole = (pos + 1) / shared;
            let n_after = pos + 1 - n_whole * shared;
            assert!(n_after > top_k || (n_whole * shared..=pos).all(|t| selected.contains(&t)));
            let mut blocks: Vec<usize> = (0..n_whole).collect();
            blocks.sort_by(|a, b| score((b + 1) * shared - 1).total_cmp(&score((a + 1) * shared - 1)));
            let n_best = top_k.saturating_sub(n_after) / shared;
            for block in blocks.iter().take(n_best) {
                assert!((block * shared..(block + 1) * shared).all(|t| selected.contains(&t)), "{block} at {pos}");
            }
        }
    }
}

/// The best of the last positions of blocks, all that there are if none is left out, or none; or their whole blocks and the
/// positions after the last one.
#[test]
fn compressed_keys_stand_at_ends_of_blocks() {
    let cases = [(4, 3), (4, usize::MAX), (24, 2), (128, usize::MAX), (128, 1)];
    for (whole_blocks, (every, top_k)) in [false, true].into_iter().flat_map(|w| cases.map(|c| (w, c))) {
        for pos in 0..400 {
            let rule = SelectionRule { top_k, every, whole_blocks, ..SelectionRule::ALL };
            let score = |t: usize| ((t * 131) % 401) as f32;
            let (mut memory, mut words) = (vec![0; 1024], vec![u16::MAX; 400usize.div_ceil(PAGE)]);
            choose(rule, pos, score, &mut memory, &mut words);
            let selected = |t: &usize| words[t / PAGE] >> (t % PAGE) & 1 != 0;
            let end = if whole_blocks { pos + 1 } else { (pos / PAGE + 1) * PAGE };
            let got: Vec<usize> = (0..end).filter(selected).collect();
            let mut ends: Vec<usize> = (0..=pos).filter(|t| (t + 1).is_multiple_of(every)).collect();
            ends.sort_by(|a, b| score(*b).total_cmp(&score(*a)));
            ends.truncate(top_k);
            ends.sort();
            let want = match whole_blocks {
                true => {
                    let blocks = ends.iter().flat_map(|end| end + 1 - every..=*end);
                    blocks.chain((pos + 1) / every * every..pos + 1).collect()
                }
                false => ends,
            };
            assert_eq!(got, want, "{top_k} of blocks of {every} up to {pos}, whole: {whole_blocks}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn selected_positions_are_the_best_ones(
        t in 0usize..3, together: bool, (kv_heads, group) in (1usize..4, prop_oneof![8 => 1usize..5, 1 => 33usize..40]),
        (top_k, block, local) in (1usize..20, prop_oneof![2 => Just(1usize), 1 => 2usize..40], 0usize..3),
        past in prop_oneof![0usize..60, 240usize..300, 500usize..540], tokens in 1usize..20, spread in 1u64..6, seed: u64,
    ) {
        let (all, mut rng) = (past + tokens, Rng(seed));
        // each head selects for the KV head of its number
        let n_head = if together { kv_heads * group } else { kv_heads };
        // small integers: sums are exact in any order, and often equal
        let mut numbers = |n: usize| -> Vec<f32> {
            (0..n).map(|_| (rng.next() % (2 * spread + 1)) as f32 - spread as f32).collect()
        };
        let case = Case {
            kv_type: KvType::ALL[t],
            n_head,
            kv_heads,
            together,
            rule: SelectionRule { top_k: top_k.max(local), block, local, ..SelectionRule::ALL },
            all,
            tokens,
            index_keys: numbers(all * KEY),
            queries: numbers(tokens * n_head * KEY),
            weights: numbers(tokens * n_head),
            keys_and_values: numbers(all * kv_heads * (KEY + VALUE)).iter().map(|x| x / 16.0).collect(),
        };
        let (selected, out) = case.run(Cpu::SCALAR, &Inline, tokens);
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for cpu in Cpu::available() {
            for batch in [tokens, 1, 3] {
                let (other, other_out) = case.run(cpu, &Scoped(2), batch);
                prop_assert_eq!(&selected, &other);
                prop_assert_eq!(bits(&out), bits(&other_out));
            }
        }
        prop_assume!(case.kv_type != KvType::K8);
        for token in 0..tokens {
            for list in 0..case.lists() {
                prop_assert!(case.are_best(token, list, &selected[token * case.lists() + list]));
            }
            for head in 0..n_head {
                let list = if case.together { 0 } else { head / (n_head / kv_heads) };
                let positions = &selected[token * case.lists() + list];
                let got = &out[(token * n_head + head) * VALUE..][..VALUE];
                for (got, want) in got.iter().zip(case.attention(token, head, positions)) {
                    prop_assert!((f64::from(*got) - want).abs() < 2e-3, "{} instead of {}", got, want);
                }
            }
        }
    }
}
