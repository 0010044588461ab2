//! The pinned results on every instruction set of this machine, with 1, 2 and 3 threads, whole and in pieces, alone and
//! among others.

use std::sync::Arc;

use starling::kernels::Cpu;
use starling::model::Model;
use starling::pool::Inline;
use starling_tests::golden::{self, Case};
use starling_tests::pool::Threads;

fn each(check: impl Fn(&Case, &Arc<Model>)) {
    let cases = golden::cases();
    assert!(cases.len() > 20, "cases are missing");
    for case in cases {
        let model = Arc::new(Model::load(&case.model_bytes(), &Inline).expect("a model"));
        check(&case, &model);
    }
}

#[test]
fn on_every_instruction_set() {
    let cpus = Cpu::available();
    println!("instruction sets: {:?}", cpus.iter().map(|c| c.isa().name()).collect::<Vec<_>>());
    each(|case, model| {
        for &cpu in &cpus {
            assert_eq!(case.compute(model, cpu, &Inline, 512, 0), case.pinned(), "{} on {}", case.name, cpu.isa());
        }
    });
}

#[test]
fn with_any_threads_batches_and_neighbours() {
    each(|case, model| {
        for (threads, batch, neighbours) in [(2, 512, 0), (3, 7, 2), (1, 1, 0), (1, 64, 3)] {
            let got = case.compute(model, Cpu::detect(), &Threads::new(threads), batch, neighbours);
            assert_eq!(got, case.pinned(), "{}: {threads} threads, batches of {batch}, {neighbours} others", case.name);
        }
    });
}
