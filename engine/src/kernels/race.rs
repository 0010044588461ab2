//! Dots for who has a clock: WebAssembly does not tell what its engine makes of an instruction.

use core::hint::black_box;

use super::Cpu;
use super::cpu::Op;
use super::simd::{Simd, each};

/// Dots side by side: none waits for the one before it.
const ABREAST: usize = 8;

/// Computes `32 * rounds` dots of 4-bit weights, of four elements for each lane: how long that takes says which of two
/// instruction sets is faster.
pub fn race(cpu: Cpu, rounds: u32) {
    cpu.run(Race(rounds));
}

struct Race(u32);

impl Op for Race {
    type Out = ();
    const DOTS: bool = true;

    fn scalar(self) {
        for round in 0..self.0 {
            black_box(round);
        }
    }

    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        let (mut quants, mut groups) = ([0x31u8; ABREAST * 64], [0x0102_0304u32; 8]);
        let mut dots: [S::Acc; ABREAST] = each!(ABREAST, |_i| s.acc::<4>(0));
        for _ in 0..self.0 {
            // other numbers each time, for all that the compiler knows
            black_box((&mut quants, &mut groups));
            for group in 0..4 {
                // SAFETY: a register is at most 64 bytes, a group's activations at most two words.
                unsafe {
                    let a = s.act::<4>(groups.as_ptr().add(2 * group));
                    for (i, dot) in dots.iter_mut().enumerate() {
                        *dot = s.dot::<4>(*dot, s.weights::<4>(s.load_b(quants.as_ptr().add(i * 64))), a);
                    }
                }
            }
        }
        black_box(dots.map(
            #[inline(always)]
            |dot| s.sum_lanes(s.total::<4>(dot, 0)),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_runs_on_every_path() {
        Cpu::all_ways().into_iter().for_each(|cpu| race(cpu, 3));
    }
}
