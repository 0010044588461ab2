//! Any bytes as a page of keys and values: refused or taken, and then the arena can do all it could before.
//!
//! The first byte says what to do with the rest: take it as it is, or as an exported page with some bytes changed.
//!
//! From `tests/`: `cargo +nightly fuzz run kv_page -- -max_len=4096`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling::kernels::attention::KvType;
use starling::kv::{KvArena, KvHeads, KvLayout, PAGE};

const TOKENS: [u32; 40] = [5; 40];
const N_PAGES: u32 = 3;

fuzz_target!(|bytes: &[u8]| {
    let Some((how, bytes)) = bytes.split_first() else { return };
    let kv_type = KvType::ALL[*how as usize % KvType::ALL.len()];
    let layout = KvLayout::new(kv_type, [KvHeads::separate(1, 4, 4)]);
    let Ok(mut arena) = KvArena::new(layout, N_PAGES, [1; 32]) else { return };
    let mut seq = arena.acquire(&TOKENS, 0);
    assert!(arena.extend(&mut seq, 2 * PAGE).is_ok());
    arena.publish(&seq, &TOKENS[..2 * PAGE], 0);
    let mut exported = arena.export_page(seq.pages[1]).expect("it was published");
    arena.release(seq);

    let taken = arena.import_page(bytes);
    // pairs of place and value
    for change in bytes.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % exported.len();
        exported[at] ^= change[2];
    }
    let changed = arena.import_page(&exported);
    for page in [taken, changed].into_iter().flatten() {
        let again = arena.export_page(page).expect("it is in the tree");
        assert_eq!(arena.import_page(&again), Ok(page));
    }
    assert_eq!(arena.available_pages(), N_PAGES as usize);
    let mut all = arena.acquire(&[], 0);
    assert!(arena.extend(&mut all, N_PAGES as usize * PAGE).is_ok());
    arena.release(all);
});
