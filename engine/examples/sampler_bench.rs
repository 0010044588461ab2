//! Time of a pick: `sampler_bench [ISA]`. Prints the best of many runs in microseconds, for several sets of options.
#![expect(clippy::std_instead_of_core, reason = "a program, not the engine")]

use std::error::Error;
use std::time::Instant;

use starling::kernels::Cpu;
use starling::sampler::{ALL_TOKENS, Dry, LogprobKind, Sampler, SamplingOptions};

/// Different rows of logits, so that no pick finds the last one's in cache or in the branch predictor.
const ROWS: usize = 16;
const ROUNDS: usize = 40;
const HISTORY: u32 = 2048;

fn main() -> Result<(), Box<dyn Error>> {
    let cpu = std::env::args().nth(1).map_or_else(|| Ok(Cpu::detect()), |name| Cpu::named(&name))?;
    let dry = Dry { multiplier: 0.8, base: 1.75, allowed_length: 2, last_n: ALL_TOKENS, breakers: vec![vec![13]] };
    let raw = SamplingOptions { logprobs: LogprobKind::Raw, top_logprobs: 5, ..Default::default() };
    let cases = [
        ("greedy", SamplingOptions::greedy()),
        ("default", SamplingOptions::default()),
        ("default, raw logprobs", raw),
        ("default, repeat penalty, DRY", {
            SamplingOptions { repeat_penalty: 1.1, dry: Some(dry), ..Default::default() }
        }),
        ("temperature alone", SamplingOptions::neutral()),
        ("top-p alone", SamplingOptions { top_p: 0.95, ..SamplingOptions::neutral() }),
        ("min-p alone", SamplingOptions { min_p: 0.05, ..SamplingOptions::neutral() }),
        ("typical alone", SamplingOptions { typical_p: 0.95, ..SamplingOptions::neutral() }),
    ];
    println!("{}, microseconds per pick (best, mean)", cpu.isa());
    for n_vocab in [49152, 128_256] {
        let rows: Vec<Vec<f32>> = (0..ROWS as u64).map(|seed| logits(seed, n_vocab)).collect();
        for (name, options) in &cases {
            let mut sampler = Sampler::new(options.clone(), n_vocab)?;
            (0..HISTORY).for_each(|i| sampler.accept(i * i % 977));
            let (mut best, mut sum) = (f64::MAX, 0.0);
            for round in 0..ROUNDS {
                for (i, row) in rows.iter().enumerate() {
                    let started = Instant::now();
                    std::hint::black_box(sampler.pick(cpu, row, 0, (round * ROWS + i) as u64, None));
                    let time = started.elapsed().as_secs_f64() * 1e6;
                    (best, sum) = (best.min(time), sum + time);
                }
            }
            println!("{n_vocab:7} {name:30} {best:8.1} {:8.1}", sum / (ROWS * ROUNDS) as f64);
        }
    }
    Ok(())
}

/// Logits with a bell-shaped bulk and a few that stand out, as a model's do.
fn logits(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let mut x: Vec<f32> = (0..n).map(|_| 4.0 * (next() + next() + next() + next() - 2.0)).collect();
    (0..30).for_each(|i| x[(next() * n as f32) as usize] += 16.0 - 0.4 * i as f32);
    x
}
