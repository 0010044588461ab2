//! The instructions of the shipped module: its kernels are there, and none that an engine may carry out as it likes.

use std::collections::BTreeMap;

use wasmparser::{Operator, Parser, Payload};

/// How often each vector product and each relaxed instruction stands in the module.
fn count(module: &[u8]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for payload in Parser::new(0).parse_all(module) {
        let Payload::CodeSectionEntry(body) = payload.expect("a module") else { continue };
        for operator in body.get_operators_reader().expect("a function") {
            let name = match operator.expect("an instruction") {
                Operator::I32x4DotI16x8S => "dot".to_string(),
                other => format!("{other:?}"),
            };
            let name = name.split([' ', '{']).next().unwrap_or_default();
            if name == "dot" || name.contains("Relaxed") {
                *counts.entry(name.to_string()).or_default() += 1;
            }
        }
    }
    counts
}

#[test]
fn the_kernels_are_there_and_nothing_is_left_to_the_engine() {
    let path = std::env::var("STARLING_MODULE").expect("STARLING_MODULE: a file");
    let isa = std::env::var("STARLING_TEST_ISA").expect("STARLING_TEST_ISA: an instruction set");
    let counts = count(&std::fs::read(path).expect("the module"));
    println!("{counts:?}");
    let of = |name: &str| counts.get(name).copied().unwrap_or(0);
    // the relaxed dots are exact where their second operand has 7 bits, the multiply-add where products are exact
    let known = ["dot", "I32x4RelaxedDotI8x16I7x16AddS", "I16x8RelaxedDotI8x16I7x16S", "F32x4RelaxedMadd"];
    for name in counts.keys() {
        assert!(known.contains(&name.as_str()), "{name}: its result is not the same everywhere");
    }
    let wanted = match isa.as_str() {
        "scalar" => [0..1, 0..1, 0..1, 0..1],
        "simd128" => [100..usize::MAX, 0..1, 0..1, 0..1],
        _ => [0..usize::MAX, 100..usize::MAX, 20..usize::MAX, 50..usize::MAX],
    };
    for (name, wanted) in known.into_iter().zip(wanted) {
        assert!(wanted.contains(&of(name)), "{name}: {} times in the build for {isa}", of(name));
    }
}
