//! Dots for who has a clock: WebAssembly does not tell what its engine makes of an instruction.

use core::hint::black_box;

use super::Cpu;
use super::cpu::Op;
use super::simd::{Simd, each};

/// Dots of a width side by side: none waits for the one before it.
const ABREAST: usize = 4;

/// Computes `16 * rounds` dots of 4-bit and as many of 8-bit weights, of four elements for each lane: how long that takes
/// says which of two instruction sets is faster.
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
        let (mut dots4, mut dots8): ([S::Acc; ABREAST], [S::Acc; ABREAST]) =
            ([s.acc::<4>(0); ABREAST], [s.acc::<8>(0); ABREAST]);
        for _ in 0..self.0 {
            // other numbers each time, for all that the compiler knows
            black_box((&mut quants, &mut groups));
            for group in 0..4 {
                // SAFETY: a register is at most 64 bytes, a group's activations at most two words.
                unsafe {
                    let group = groups.as_ptr().add(2 * group);
                    let (a4, a8) = (s.act::<4>(group), s.act::<8>(group));
                    for i in 0..ABREAST {
                        let b = s.load_b(quants.as_ptr().add(i * 64));
                        dots4[i] = s.dot::<4>(dots4[i], s.weights::<4>(b), a4);
                        dots8[i] = s.dot::<8>(dots8[i], s.weights::<8>(b), a8);
                    }
                }
            }
        }
        let sums: [i32; ABREAST] =
            each!(ABREAST, |i| s.sum_lanes(s.add_i(s.total::<4>(dots4[i], 0), s.total::<8>(dots8[i], 0))));
        black_box(sums);
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
