//! Work for a benchmark of instruction sets, for hosts with a clock: a WebAssembly module cannot detect which
//! instructions its engine compiles well.

use alloc::vec;
use core::hint::black_box;

use super::Cpu;
use super::act::{ActLayout, Floats, pack};
use super::matmul::{Columns, MatmulJob, products};
use super::panel::Matrix;
use crate::pool::Inline;
use crate::quant::Dtype;

/// Rows and columns of the product: full tiles of the WebAssembly instruction sets.
const ROWS: usize = 64;
const COLUMNS: usize = 16;
const K: usize = 512;

/// Multiplies a matrix of 4-bit and one of 8-bit weights `rounds` times, half a million multiply-adds each. The caller
/// measures the time to compare two instruction sets.
pub fn run(cpu: Cpu, rounds: u32) {
    for dtype in [Dtype::Q4_0, Dtype::Q8_0] {
        let blocks = ROWS * K / dtype.block_len() as usize;
        let weights = vec![0x11; blocks * dtype.block_bytes() as usize];
        let matrix = Matrix::from_rows(dtype, ROWS, K, &weights);
        let (Ok(w), Some(layout)) = (matrix, ActLayout::of(cpu, dtype)) else { continue };
        let mut words = vec![0; layout.len_words(COLUMNS, K)];
        let x = Floats { x: &[1.0; COLUMNS * K], stride: K };
        let packed = pack(cpu, &Inline, layout, x, K, &mut words);
        let mut out = [0.0; COLUMNS * ROWS];
        for _ in 0..rounds {
            let job = MatmulJob { w: &w, x: Columns::Packed(packed), out_column: 0, out_row: 0 };
            products(cpu, &Inline, &[job], &mut out, ROWS);
            black_box(&mut out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_on_every_instruction_set() {
        Cpu::all_variants().into_iter().for_each(|cpu| run(cpu, 3));
    }
}
