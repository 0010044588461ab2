//! Measures which instruction set is faster on this CPU.

use starling::kernels::Cpu;
use starling::kernels::isa_benchmark::run;

use crate::runtime::now_ms;

const REPEATS: usize = 8;
/// 1 to 2 ms: the clocks of browsers have a resolution of 0.1 ms.
const ROUNDS: u32 = 100;

/// The instruction sets of modules for relaxed SIMD: with its dot product, and with products of 16 bits.
const ISAS: [&str; 2] = ["relaxed-simd", "relaxed-i16"];

/// Computes with an instruction set; its milliseconds, or `None` if this module does not have it.
fn time(isa: &str) -> Option<f64> {
    let cpu = Cpu::named(isa).ok().filter(|_| cfg!(target_feature = "relaxed-simd"))?;
    let begin = now_ms();
    run(cpu, ROUNDS);
    Some(now_ms() - begin)
}

/// Warms up the JIT for [`faster`]; returns whether the module has both instruction sets.
pub(crate) fn warm_up() -> bool {
    (0..2).all(|_| ISAS.iter().all(|isa| time(isa).is_some()))
}

/// The faster instruction set of a module for relaxed SIMD. On a CPU without an instruction for the relaxed dot product, which
/// cannot be detected, products of 16 bits are faster, most so with 4-bit weights.
pub(crate) fn faster() -> &'static str {
    // the minimum: fully compiled, and not preempted
    let mut best = [f64::INFINITY; 2];
    for _ in 0..REPEATS {
        for (isa, best) in ISAS.iter().zip(&mut best) {
            *best = best.min(time(isa).unwrap_or(f64::INFINITY));
        }
    }
    ISAS[usize::from(best[1] < best[0])]
}
