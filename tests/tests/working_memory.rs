//! Working memory has the size that mechanisms declare: a batch of the largest size uses all of it, and none more.

use std::sync::Arc;

use starling::kernels::Cpu;
use starling::kernels::attention::{KvMemory, KvType, PAGE};
use starling::kernels::recurrent::StateMemory;
use starling::model::{Exec, KvRef, Model, Run, ScratchSize};
use starling::pool::Inline;
use starling::quant::Dtype;
use starling_tests::architecture::recipes;
use starling_tests::sequences::prompt;

/// Tokens of the largest batch.
const ROWS: usize = 21;

/// Bytes of temporaries, and those that a batch of `n` tokens uses, all with logits.
fn temporaries(model: &Model, n: usize) -> [usize; 2] {
    let ids: Vec<u32> = prompt(n, 3).iter().map(|id| id % model.config.n_vocab as u32).collect();
    let layout = model.kv_layout(KvType::F32);
    let pages: Vec<u32> = (0..ROWS.div_ceil(PAGE) as u32).collect();
    let mut memory = KvMemory::zeroed(&layout, pages.len()).expect("memory");
    memory.states = StateMemory::zeroed(model.config.state_len(), 1).expect("memory");
    let size = ScratchSize { rows: ROWS, logits: ROWS, seqs: 1, n_ctx: ROWS };
    let mut scratch = model.scratch(&Inline, KvType::F32, size).expect("memory");
    assert_eq!(scratch.temporary_bytes()[1], 0);
    let run = Run { tokens: &ids, pos: 0, pages: &pages, state: 0, n_logits: n };
    let kv = KvRef { layout: &layout, memory: &mut memory };
    model.forward(Exec { cpu: Cpu::detect(), pool: &Inline }, &[run], kv, &mut scratch, None);
    scratch.temporary_bytes()
}

#[test]
fn the_largest_batch_uses_what_is_declared() {
    for recipe in recipes() {
        for dtype in [Dtype::F32, Dtype::Q8_0] {
            let model = Arc::new(Model::load(&recipe.file(dtype), &Inline).expect("a model"));
            let [declared, used] = temporaries(&model, ROWS);
            assert_eq!(used, declared, "{} of {}", recipe.arch, dtype.name());
            let [declared, used] = temporaries(&model, ROWS - 1);
            assert!(used < declared, "{} of {}", recipe.arch, dtype.name());
        }
    }
}
