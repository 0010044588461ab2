//! KV pages that leave an engine and enter another: the same bits as computed ones, and nothing else is accepted.

use std::sync::Arc;

use proptest::prelude::*;
use starling::engine::{Engine, EngineOptions, Event, Request, RequestId};
use starling::kernels::Cpu;
use starling::kernels::attention::{KvType, PAGE};
use starling::kv::{PageError, PageKey};
use starling::model::Model;
use starling::pool::Inline;
use starling::receipt::Receipt;
use starling_tests::sequences;

const N_PROMPT: usize = 100;

fn engine(model: &Arc<Model>, kv_type: KvType, pages: usize) -> Engine {
    let options = EngineOptions {
        kv_type,
        n_ctx: 256,
        max_seqs: 3,
        batch_tokens: 24,
        prefill_chunk: 16,
        draft_rows: 0,
        kv_bytes: EngineOptions::kv_bytes_of(model, kv_type, pages * PAGE),
        snapshots: Default::default(),
        model_sha256: Some([7; 32]),
    };
    let mut engine = Engine::new(Arc::clone(model), &Inline, options).expect("memory");
    engine.track_new_pages(true);
    engine
}

fn request(first: u32, n_prompt: usize, max_tokens: usize) -> Request {
    let tokens = (0..n_prompt as u32).map(|i| first + i * 37 % 200).collect();
    Request { max_tokens: Some(max_tokens), ignore_eos: true, receipt: true, ..Request::new(tokens) }
}

/// Runs a step. Adds receipts, which hash the hidden state of each answer token, and the number of cached tokens.
fn step(engine: &mut Engine, seen: &mut Vec<(RequestId, usize, Option<Receipt>)>) {
    engine.step(Cpu::detect(), &Inline, &mut |event| match event {
        Event::Prefilled { id, n_cached, .. } => seen.push((id, n_cached, None)),
        Event::Done { id, receipt, .. } => {
            let entry = seen.iter_mut().find(|(other, ..)| *other == id).expect("prefilled");
            entry.2 = receipt.map(|receipt| *receipt);
        }
        _ => {}
    });
}

/// The receipt of a request, and the number of its cached tokens.
fn run(engine: &mut Engine, request: Request) -> (Receipt, usize) {
    let (id, mut seen) = (engine.submit(request).expect("room"), Vec::new());
    while !engine.is_idle() {
        step(engine, &mut seen);
    }
    let (_, n_cached, receipt) = seen.into_iter().find(|(other, ..)| *other == id).expect("an answer");
    (receipt.expect("a receipt"), n_cached)
}

/// The new pages of an engine: key, length of the prefix, bytes.
fn new_pages(engine: &mut Engine) -> Vec<(PageKey, usize, Vec<u8>)> {
    let new = std::iter::from_fn(|| engine.take_new_page()).collect::<Vec<_>>();
    new.iter().map(|page| (page.key, page.n_tokens, engine.export_page(&page.key).expect("cached"))).collect()
}

#[test]
fn imported_pages_give_the_same_bits_as_computed_ones() {
    let model = sequences::model();
    for kv_type in KvType::ALL {
        let mut a = engine(&model, kv_type, 48);
        let (expected, none) = run(&mut a, request(3, N_PROMPT, 30));
        assert_eq!(none, 0);
        let pages = new_pages(&mut a);
        // the last token of the answer was never input
        assert_eq!(pages.len(), (N_PROMPT + 29) / PAGE, "{kv_type:?}");
        let whole = request(3, N_PROMPT, 1).tokens;
        let keys = a.page_keys(&whole, 0);
        assert_eq!(keys, pages[..N_PROMPT / PAGE].iter().map(|(key, ..)| *key).collect::<Vec<_>>());
        assert!(pages.iter().enumerate().all(|(i, (_, n_tokens, _))| *n_tokens == (i + 1) * PAGE));
        assert_eq!(a.take_new_page(), None);
        assert_ne!(a.page_keys(&whole, 1), keys);

        // while another request runs, one page between two steps
        let mut b = engine(&model, kv_type, 48);
        let (alone, _) = run(&mut engine(&model, kv_type, 48), request(5, 40, 60));
        let other = b.submit(request(5, 40, 60)).expect("room");
        let mut seen = Vec::new();
        for (i, (_, _, bytes)) in pages.iter().enumerate() {
            step(&mut b, &mut seen);
            b.import_page(bytes).expect("a page");
            assert_eq!(b.n_cached_pages(&keys), (i + 1).min(keys.len()));
        }
        let id = b.submit(request(3, N_PROMPT, 30)).expect("room");
        while !b.is_idle() {
            step(&mut b, &mut seen);
        }
        let of = |id| seen.iter().find(|(other, ..)| *other == id).expect("an answer");
        assert_eq!(of(id), &(id, N_PROMPT / PAGE * PAGE, Some(expected.clone())), "{kv_type:?}");
        assert_eq!(of(other), &(other, 0, Some(alone)));
        // imported pages are not new
        assert_eq!(new_pages(&mut b).len(), (40 + 59) / PAGE);
        // each page as it came
        assert!(pages.iter().all(|(key, _, bytes)| b.export_page(key).as_ref() == Some(bytes)));

        // the namespace tells layouts apart
        for other in KvType::ALL.into_iter().filter(|other| *other != kv_type) {
            let mut c = engine(&model, other, 4);
            assert_ne!(c.page_namespace(), b.page_namespace());
            assert!(c.import_page(&pages[0].2).is_err());
        }
    }
}

#[test]
fn running_requests_publish_their_pages() {
    let model = sequences::model();
    let (expected, _) = run(&mut engine(&model, KvType::F16, 48), request(3, N_PROMPT, 40));
    let mut a = engine(&model, KvType::F16, 48);
    let (id, mut seen, mut n) = (a.submit(request(3, N_PROMPT, 40)).expect("room"), Vec::new(), 0);
    for i in 0.. {
        step(&mut a, &mut seen);
        if a.is_idle() {
            break;
        }
        a.publish_running();
        let n_tokens = if i < 4 { (i + 1) * 24 } else { N_PROMPT + i - 4 };
        n += new_pages(&mut a).len();
        assert_eq!(n, n_tokens / PAGE, "step {i}");
    }
    assert_eq!(seen, [(id, 0, Some(expected))]);
}

#[test]
fn a_page_needs_its_parent_and_takes_no_page_in_use() {
    let model = sequences::model();
    let mut a = engine(&model, KvType::F16, 48);
    let (expected, _) = run(&mut a, request(3, N_PROMPT, 2));
    let pages = new_pages(&mut a);
    let mut b = engine(&model, KvType::F16, 8);
    assert!(matches!(b.import_page(&pages[1].2), Err(PageError::Parent(_))));
    let before = b.kv_stats();
    // the running request has all pages
    let id = b.submit(request(3, N_PROMPT, 28)).expect("room");
    let mut seen = Vec::new();
    step(&mut b, &mut seen);
    let other = run(&mut engine(&model, KvType::F16, 48), request(9, 60, 2));
    assert_eq!(b.kv_stats().free_bytes, before.page_bytes);
    let mut c = engine(&model, KvType::F16, 48);
    run(&mut c, request(9, 60, 2));
    let foreign = new_pages(&mut c);
    assert_eq!(b.import_page(&foreign[0].2), Ok(()));
    assert_eq!(b.import_page(&foreign[1].2), Err(PageError::NoCapacity));
    while !b.is_idle() {
        step(&mut b, &mut seen);
    }
    assert_eq!(seen[0].0, id);
    let receipt = seen[0].2.clone().expect("a receipt");
    assert_eq!(receipt.output[..2], expected.output[..2]);
    // idle pages make room
    assert_eq!(run(&mut b, request(9, 60, 2)).0, other.0);
    pages.iter().for_each(|(_, _, bytes)| b.import_page(bytes).expect("room"));
    assert_eq!(run(&mut b, request(3, N_PROMPT, 2)), (expected, N_PROMPT / PAGE * PAGE));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Bytes cut, extended or changed anywhere are refused, and the engine computes as if nothing had been.
    #[test]
    fn damaged_bytes_are_refused(
        kv_type in 0..KvType::ALL.len(),
        cut in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(),
        bit in 0u8..8,
        more in prop::collection::vec(any::<u8>(), 1..40),
    ) {
        let model = sequences::model();
        let mut a = engine(&model, KvType::ALL[kv_type], 8);
        let (expected, _) = run(&mut a, request(3, 33, 2));
        let page = new_pages(&mut a).swap_remove(0).2;
        let mut b = engine(&model, KvType::ALL[kv_type], 8);
        let mut flipped = page.clone();
        flipped[at.index(page.len())] ^= 1 << bit;
        prop_assert!(b.import_page(&flipped).is_err());
        let (short, expected_len) = (&page[..cut.index(page.len())], b.exported_page_bytes());
        prop_assert_eq!(b.import_page(short), Err(PageError::Length { found: short.len(), expected: expected_len }));
        prop_assert!(b.import_page(&[&page[..], &more].concat()).is_err());
        prop_assert!(b.import_page(&more).is_err());
        prop_assert_eq!(b.kv_stats().cached_bytes, 0);
        let (receipt, n_cached) = run(&mut b, request(3, 33, 2));
        prop_assert_eq!((&receipt, n_cached), (&expected, 0));
        prop_assert_eq!(b.import_page(&page), Ok(()));
    }
}
