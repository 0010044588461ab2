use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::kernels::Cpu;
use crate::kernels::attention::KvType;
use crate::model::{Exec, KvRef, Model, Run, ScratchSize};
use crate::pool::Inline;

fn layout(kv_type: KvType) -> KvLayout {
    KvLayout::new(kv_type, [KvHeads::separate(1, 8, 8); 2])
}

fn arena(n_pages: u32) -> KvArena {
    KvArena::new(layout(KvType::F16), n_pages, [1; 32]).expect("memory")
}

/// Expected contents of a page: a finite pattern of its tokens and all before them.
fn stamp(tokens: &[u32], salt: u64, filled: usize) -> u64 {
    let mix = |h: u64, t: u64| (h ^ t).wrapping_mul(0x0100_0000_01b3);
    tokens[..filled].iter().fold(salt, |h, t| mix(h, u64::from(*t))) & 0x3bff_3bff_3bff_3bff
}

/// A sequence and its expected tokens.
struct Live {
    pages: SeqPages,
    tokens: Vec<u32>,
    salt: u64,
}

/// An arena with sequences, compared with a naive model after every operation.
struct Account {
    arena: KvArena,
    live: Vec<Live>,
    /// Every prefix of whole pages that was ever published.
    published: BTreeSet<(u64, Vec<u32>)>,
}

impl Account {
    fn write(&mut self, i: usize, from: usize) {
        let live = &self.live[i];
        for p in from / PAGE..live.tokens.len().div_ceil(PAGE) {
            let page = live.pages.pages[p];
            assert!(!self.arena.is_shared(page), "a shared page is written");
            let filled = live.tokens.len().min((p + 1) * PAGE);
            let pattern = stamp(&live.tokens, live.salt, filled).to_le_bytes();
            self.arena.memory.page_mut(page).chunks_exact_mut(8).for_each(|b| b.copy_from_slice(&pattern));
        }
    }

    fn start(&mut self, tokens: Vec<u32>, salt: u64) {
        let mut pages = self.arena.acquire(&tokens, salt);
        let known = |n: usize| self.published.contains(&(salt, tokens[..n * PAGE].to_vec()));
        for n in 1..=pages.pages.len() {
            assert!(known(n), "a prefix that was never published");
        }
        assert!(pages.n_cached < tokens.len() && pages.n_cached == pages.pages.len() * PAGE);
        let cached = pages.n_cached;
        let room = self.arena.available_pages();
        match self.arena.extend(&mut pages, tokens.len()) {
            Ok(()) => {
                self.live.push(Live { pages, tokens, salt });
                self.write(self.live.len() - 1, cached);
            }
            Err(RequestError::NoCapacity { needed, free, .. }) => {
                assert!(needed > free && free == room);
                self.arena.release(pages);
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn grow(&mut self, i: usize, tokens: &[u32]) {
        let live = &mut self.live[i];
        let from = live.tokens.len();
        if self.arena.extend(&mut live.pages, from + tokens.len()).is_ok() {
            live.tokens.extend(tokens);
            self.write(i, from);
        }
    }

    fn publish(&mut self, i: usize) {
        let live = &self.live[i];
        self.arena.publish(&live.pages, &live.tokens, live.salt);
        for n in 1..=live.tokens.len() / PAGE {
            self.published.insert((live.salt, live.tokens[..n * PAGE].to_vec()));
        }
    }

    fn check(&self) {
        let a = &self.arena;
        let mut refs = vec![0; a.pages.len()];
        for live in &self.live {
            assert_eq!(live.pages.pages.len(), live.tokens.len().div_ceil(PAGE));
            for (p, page) in live.pages.pages.iter().enumerate() {
                refs[*page as usize] += 1;
                // contents are those of this sequence
                let filled = live.tokens.len().min((p + 1) * PAGE);
                if filled % PAGE == 0 {
                    let want = stamp(&live.tokens, live.salt, filled).to_le_bytes();
                    assert_eq!(a.memory.page(*page)[..8], want, "contents of page {p}");
                }
            }
        }
        let free: BTreeSet<u32> = a.free.iter().copied().chain(a.n_committed as u32..a.pages.len() as u32).collect();
        assert_eq!(free.len(), a.n_free());
        let mut children: BTreeMap<u32, u32> = BTreeMap::new();
        let mut evictable = BTreeSet::new();
        let mut busy = vec![false; a.pages.len()];
        for (i, page) in a.pages.iter().enumerate() {
            assert_eq!(page.refs, refs[i]);
            assert_eq!(free.contains(&(i as u32)), page.refs == 0 && page.node.is_none(), "a leak at {i}");
            if let Some(parent) = page.node.as_ref().and_then(|n| n.parent) {
                *children.entry(parent).or_default() += 1;
            }
            let mut at = (page.refs > 0).then_some(i as u32);
            while let Some(p) = at {
                busy[p as usize] = true;
                at = a.pages[p as usize].node.as_ref().and_then(|n| n.parent);
            }
        }
        for (i, page) in a.pages.iter().enumerate() {
            let Some(node) = &page.node else { continue };
            assert_eq!(a.tree.get(&node.key), Some(&(i as u32)));
            assert_eq!(node.children, children.get(&(i as u32)).copied().unwrap_or(0));
            if page.refs == 0 && node.children == 0 {
                evictable.insert((node.last_used, i as u32));
            }
        }
        let idle = a.pages.iter().zip(&busy).filter(|(p, busy)| p.node.is_some() && !**busy).count();
        assert_eq!((a.n_idle, &a.evictable), (idle, &evictable));
        let stats = a.stats();
        assert_eq!(stats.in_use_bytes + stats.cached_bytes + stats.free_bytes, stats.reserved_bytes);
        let unused: usize = self.live.iter().map(|l| l.pages.pages.len() * PAGE - l.tokens.len()).sum();
        assert_eq!(stats.fragmented_bytes, unused * (stats.page_bytes / PAGE));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// For any sequence of operations: no shared page is written, no page leaks, and at the end all pages can be
    /// allocated.
    #[test]
    fn a_naive_account_agrees(
        n_pages in 1u32..24,
        operations in prop::collection::vec((0u8..7, any::<u16>(), 1usize..70, 0u64..2), 1..80),
    ) {
        let mut m = Account { arena: arena(n_pages), live: Vec::new(), published: BTreeSet::new() };
        for (kind, a, n, salt) in operations {
            let i = a as usize % m.live.len().max(1);
            // only two token values, so that prefixes are often shared
            let tokens: Vec<u32> = (0..n).map(|t| if t % 13 == 0 { u32::from(a >> (t / 13)) & 1 } else { 7 }).collect();
            match kind {
                0 | 1 => m.start(tokens, salt),
                2 if i < m.live.len() => m.grow(i, &tokens),
                3 if i < m.live.len() => m.publish(i),
                4 if i < m.live.len() => {
                    let live = m.live.swap_remove(i);
                    m.arena.release(live.pages);
                }
                5 if i < m.live.len() => {
                    let live = &mut m.live[i];
                    let keep = n.min(live.tokens.len());
                    m.arena.truncate(&mut live.pages, keep);
                    live.tokens.truncate(keep);
                }
                6 => {
                    let room = m.arena.n_free();
                    prop_assert_eq!(m.arena.evict_prefix(&tokens, salt), m.arena.n_free() - room);
                }
                _ => {}
            }
            m.check();
        }
        for live in core::mem::take(&mut m.live) {
            m.arena.release(live.pages);
        }
        prop_assert_eq!(m.arena.available_pages(), n_pages as usize);
        let mut all = m.arena.acquire(&[], 0);
        prop_assert!(m.arena.extend(&mut all, n_pages as usize * PAGE).is_ok());
        prop_assert_eq!(m.arena.tree.len(), 0);
        let distinct: BTreeSet<u32> = all.pages.iter().copied().collect();
        prop_assert_eq!(distinct.len(), n_pages as usize);
        m.arena.release(all);
        prop_assert_eq!(m.arena.n_free(), n_pages as usize);
    }

    /// A page with any bit flipped is refused.
    #[test]
    fn damage_is_noticed(at in any::<prop::sample::Index>(), bit in 0u8..8, cut in any::<prop::sample::Index>()) {
        let (mut a, page) = with_pages(2);
        let exported = a.export_page(page[0]).expect("a page");
        let mut damaged = exported.clone();
        damaged[at.index(exported.len())] ^= 1 << bit;
        prop_assert!(a.import_page(&damaged).is_err());
        prop_assert!(a.import_page(&exported[..cut.index(exported.len())]).is_err());
        prop_assert_eq!(a.import_page(&exported), Ok(page[0]));
    }
}

const TOKENS: [u32; 40] = [5; 40];
const NONE: [u32; 0] = [];

/// An arena with the pages of one released sequence.
fn with_pages(n: usize) -> (KvArena, Vec<u32>) {
    let mut a = arena(4);
    let mut seq = a.acquire(&TOKENS, 0);
    a.extend(&mut seq, n * PAGE).expect("room");
    for page in &seq.pages {
        a.memory.page_mut(*page).iter_mut().zip((0..59).cycle()).for_each(|(b, f)| *b = f + *page as u8);
    }
    a.publish(&seq, &TOKENS[..n * PAGE], 0);
    let pages = seq.pages.clone();
    a.release(seq);
    (a, pages)
}

#[test]
fn only_the_same_tokens_salt_and_model_match() {
    let (mut a, pages) = with_pages(2);
    let hit = |a: &mut KvArena, tokens: &[u32], salt: u64| {
        let seq = a.acquire(tokens, salt);
        let found = seq.pages.clone();
        a.record_lookup(tokens, seq.n_cached);
        a.release(seq);
        found
    };
    assert_eq!(hit(&mut a, &TOKENS, 0), pages);
    // never all of the tokens
    assert_eq!(hit(&mut a, &TOKENS[..33], 0), pages);
    assert_eq!(hit(&mut a, &TOKENS[..32], 0), pages[..1]);
    assert_eq!(hit(&mut a, &TOKENS[..16], 0), NONE);
    assert_eq!(hit(&mut a, &[], 0), NONE);
    assert_eq!(hit(&mut a, &TOKENS, 1), NONE);
    let mut other = TOKENS;
    other[20] = 6;
    assert_eq!(hit(&mut a, &other, 0), pages[..1]);
    other[0] = 6;
    assert_eq!(hit(&mut a, &other, 0), NONE);
    assert_eq!((a.stats().hits, a.stats().misses), (6, 5));
}

#[test]
fn pages_move_between_arenas_of_the_same_model_only() {
    let (a, pages) = with_pages(2);
    let [first, second] = [0, 1].map(|i| a.export_page(pages[i]).expect("in the tree"));
    assert_eq!(first.len(), a.exported_bytes());
    let mut b = arena(2);
    assert!(matches!(b.import_page(&second), Err(PageError::Parent(_))));
    let got = [b.import_page(&first), b.import_page(&second)].map(|p| p.expect("a page"));
    assert_eq!(got.map(|p| b.export_page(p)), [Some(first.clone()), Some(second.clone())]);
    assert_eq!(b.import_page(&first), Ok(got[0]));
    assert_eq!(b.export_prefix(&TOKENS, 0), [first.clone(), second.clone()].concat());
    assert_eq!(b.export_prefix(&TOKENS[..31], 0), first);
    assert!(b.export_prefix(&TOKENS, 1).is_empty());
    let seq = b.acquire(&TOKENS, 0);
    assert_eq!((seq.pages.as_slice(), seq.n_cached), (got.as_slice(), 32));
    b.release(seq);

    let mut other_model = KvArena::new(layout(KvType::F16), 2, [2; 32]).expect("memory");
    assert_eq!(other_model.import_page(&first), Err(PageError::Fingerprint));
    let shape = KvLayout::new(KvType::F16, [KvHeads::separate(2, 8, 8)]);
    let mut other_shape = KvArena::new(shape, 2, [1; 32]).expect("memory");
    assert_eq!(other_shape.import_page(&first), Err(PageError::Layout));
    assert!(other_shape.memory_mut(&layout(KvType::F16)).is_err());
    // no capacity: the only page left is the parent of the new one
    let mut small = arena(1);
    let parent = small.import_page(&first).expect("room");
    assert_eq!(small.import_page(&second), Err(PageError::NoCapacity));
    assert!(small.export_page(parent).is_some());
    assert_eq!(small.export_page(9), None);
}

#[test]
fn a_forgotten_prefix_goes_from_its_end_as_far_as_nobody_needs_it() {
    let (mut a, pages) = with_pages(2);
    let held = a.acquire(&TOKENS[..20], 0);
    assert_eq!(held.pages, pages[..1]);
    assert_eq!(a.evict_prefix(&TOKENS, 1), 0);
    assert_eq!(a.evict_prefix(&TOKENS, 0), 1);
    assert_eq!(a.evict_prefix(&TOKENS, 0), 0);
    a.release(held);
    assert_eq!((a.evict_prefix(&TOKENS, 0), a.n_free(), a.stats().evictions), (1, 4, 0));
}

#[test]
fn the_least_recently_used_leaf_is_evicted_first() {
    let mut a = arena(3);
    let prompts = [[1; 17], [2; 17], [3; 17]];
    let mut pages = Vec::new();
    for prompt in &prompts {
        let mut seq = a.acquire(prompt, 0);
        a.extend(&mut seq, PAGE).expect("room");
        a.publish(&seq, &prompt[..PAGE], 0);
        pages.push(seq.pages[0]);
        a.release(seq);
    }
    let touch = a.acquire(&prompts[0], 0);
    a.release(touch);
    let held = a.acquire(&prompts[1], 0);
    let mut new = a.acquire(&[4; 20], 0);
    a.extend(&mut new, PAGE).expect("room");
    assert_eq!(new.pages, [pages[2]]);
    let free = a.available_pages();
    assert_eq!(a.extend(&mut new, 3 * PAGE), Err(RequestError::NoCapacity { what: "KV pages", needed: 2, free }));
    a.extend(&mut new, 2 * PAGE).expect("room");
    assert_eq!((new.pages.as_slice(), a.stats().evictions), ([pages[2], pages[0]].as_slice(), 2));
    a.release(held);
    a.release(new);
}

#[test]
fn a_cached_prefix_gives_the_same_logits() {
    let file = include_bytes!("../../../fixtures/reference/llama-gqa-untied-f16.gguf");
    let model = Model::load(file, &Inline).expect("a model");
    let tokens: Vec<u32> = (0..60).map(|i| i * 37 % model.config.n_vocab as u32).collect();
    for kv_type in KvType::ALL {
        let kv = model.kv_layout(kv_type);
        let mut a = KvArena::new(kv.clone(), 16, [0; 32]).expect("memory");
        let size = ScratchSize { rows: 64, logits: 1, seqs: 1, n_ctx: 64 };
        let mut scratch = model.scratch(&Inline, kv_type, size).expect("memory");
        let mut run = |a: &mut KvArena| {
            let mut seq = a.acquire(&tokens, 0);
            a.extend(&mut seq, tokens.len()).expect("room");
            let run =
                Run { tokens: &tokens[seq.n_cached..], pos: seq.n_cached, pages: &seq.pages, state: 0, n_logits: 1 };
            let memory = a.memory_mut(&kv).expect("its layout");
            let exec = Exec { cpu: Cpu::detect(), pool: &Inline };
            let out = model.forward(exec, &[run], KvRef { layout: &kv, memory }, &mut scratch, None);
            let logits: Vec<u32> = out.logits(0).iter().map(|x| x.to_bits()).collect();
            a.publish(&seq, &tokens, 0);
            let cached = seq.n_cached;
            (logits, cached, seq)
        };
        let (want, none, first) = run(&mut a);
        let (got, cached, second) = run(&mut a);
        assert_eq!((none, cached), (0, 48));
        assert_eq!(got, want);
        // and exported and imported into another arena
        let mut b = KvArena::new(kv.clone(), 16, [0; 32]).expect("memory");
        for page in &second.pages[..3] {
            b.import_page(&a.export_page(*page).expect("published")).expect("a page");
        }
        let (moved, cached, third) = run(&mut b);
        assert_eq!((moved, cached), (want, 48));
        a.release(first);
        a.release(second);
        b.release(third);
    }
}
