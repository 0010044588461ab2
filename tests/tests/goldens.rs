//! Pinned goldens on every instruction set of this machine, with 1, 2 and 3 threads, any prefill chunk, alone and in a batch.

use std::sync::Arc;

use starling::kernels::Cpu;
use starling::model::Model;
use starling::pool::Inline;
use starling::quant::Dtype;
use starling_tests::architecture::recipes;
use starling_tests::embedding;
use starling_tests::golden;
use starling_tests::pool::Threads;

/// The instruction set under test, or all. Emulators are slow and test one; the scalar code has run natively.
fn only() -> Option<Cpu> {
    std::env::var("STARLING_TEST_ISA").ok().map(|name| Cpu::named(&name).expect("STARLING_TEST_ISA"))
}

#[test]
fn on_every_instruction_set_with_any_threads_batches_and_neighbours() {
    let cpus = only().map_or_else(Cpu::available, |cpu| vec![cpu]);
    println!("instruction sets: {:?}", cpus.iter().map(|c| c.isa().name()).collect::<Vec<_>>());
    let shapes = &[(3, 7, 2), (2, 512, 0), (1, 1, 0), (1, 64, 3)][..];
    let cases = golden::cases();
    assert!(cases.len() > 50, "cases are missing");
    for (i, case) in cases.into_iter().enumerate() {
        // on emulators each case runs with one setting: alone in one batch, or chunked in a batch with others
        let (alone, shapes) = match only() {
            None => (true, shapes),
            Some(_) => (i % 2 == 0, &shapes[..i % 2]),
        };
        let model = Arc::new(Model::load(&case.model_bytes(), &Inline).expect("a model"));
        for &cpu in cpus.iter().filter(|_| alone) {
            assert_eq!(case.compute(&model, cpu, &Inline, 512, 0), case.pinned(), "{} on {}", case.name, cpu.isa());
        }
        for &(threads, batch, neighbours) in shapes {
            let got = case.compute(&model, Cpu::detect(), &Threads::new(threads), batch, neighbours);
            assert_eq!(got, case.pinned(), "{}: {threads} threads, batches of {batch}, {neighbours} others", case.name);
        }
    }
}

#[test]
fn all_architectures_on_every_instruction_set() {
    let pinned = std::fs::read(golden::architectures_path()).expect("pinned results; run `bless`");
    let pinned: golden::Architectures = serde_json::from_slice(&pinned).expect("digests");
    for (i, recipe) in recipes().iter().enumerate() {
        // the two instruction sets of aarch64 differ in products of integers only, and share the cases in the emulator
        let other = if cfg!(target_arch = "aarch64") { only().map(|cpu| cpu.isa().name() == "neon") } else { None };
        let Some(want) = pinned.get(&recipe.name).filter(|_| other != Some(i % 2 == 0)) else { continue };
        let model = Arc::new(Model::load(&recipe.file(Dtype::Q8_0), &Inline).expect("a model"));
        for cpu in only().map_or_else(Cpu::available, |cpu| vec![cpu]) {
            let got = golden::architecture_digest(recipe, &model, cpu, if i % 2 == 0 { 3 } else { 8 });
            assert_eq!(&got, want, "{} on {}", recipe.name, cpu.isa());
        }
    }
}

#[test]
fn every_stage_of_a_pass_on_every_instruction_set() {
    let pinned = std::fs::read_to_string(golden::trace_path()).expect("a trace; run `bless`");
    for cpu in only().map_or_else(Cpu::available, |cpu| vec![cpu]) {
        let trace = golden::trace(cpu, &Threads::new(2));
        // report the first stage that differs; later ones follow from it
        let differs = trace.lines().zip(pinned.lines()).find(|(found, pinned)| found != pinned);
        assert_eq!(differs, None, "found and pinned, on {}", cpu.isa());
        assert_eq!(trace.lines().count(), pinned.lines().count());
    }
}

#[test]
fn embeddings_on_every_instruction_set_with_any_threads_and_batches() {
    let cases = embedding::cases();
    assert!(cases.len() >= 5, "cases are missing");
    for case in cases {
        let model = Arc::new(Model::load(&case.model_bytes(), &Inline).expect("a model"));
        for cpu in only().map_or_else(Cpu::available, |cpu| vec![cpu]) {
            assert_eq!(case.compute(&model, cpu, &Inline, 5), case.pinned(), "{} on {}", case.name, cpu.isa());
        }
        let all = [(3, 5), (2, 2), (1, 1)];
        for &(threads, max_texts) in if only().is_some() { &all[..1] } else { &all[..] } {
            let got = case.compute(&model, Cpu::detect(), &Threads::new(threads), max_texts);
            assert_eq!(got, case.pinned(), "{}: {threads} threads, batches of {max_texts}", case.name);
        }
    }
}
