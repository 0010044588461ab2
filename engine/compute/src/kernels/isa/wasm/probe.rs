//! Probe of the relaxed-simd instructions: `Cpu` offers the relaxed paths only if the engine computes what `lanes.rs`
//! needs.
#![allow(unsafe_code)]

use alloc::vec;
use alloc::vec::Vec;
#[cfg(target_arch = "wasm32")]
use core::arch::wasm32::*;
#[cfg(target_arch = "wasm64")]
use core::arch::wasm64::*;
use core::sync::atomic::{AtomicU8, Ordering};

use crate::kernels::Cpu;
use crate::kernels::act::{self, ActLayout};
use crate::kernels::matmul::{Columns, MatmulJob, products};
use crate::kernels::panel::Matrix;
use crate::pool::Inline;
use crate::quant::Dtype;

/// Whether the relaxed dot product is exact wherever the second operand is in 0..=127, and the relaxed multiply-add
/// wherever the product is exact.
///
/// The baseline compiler of V8 11.3 compiles the dot product wrongly, its optimising compiler rightly. The first call
/// here runs in the baseline compiler, as the first calls of the kernels do; its verdict is kept for the life of the
/// module.
pub(in crate::kernels) fn relaxed_is_exact(relaxed: [Cpu; 2]) -> bool {
    const UNKNOWN: u8 = 0;
    const EXACT: u8 = 1;
    const WRONG: u8 = 2;
    static VERDICT: AtomicU8 = AtomicU8::new(UNKNOWN);
    if VERDICT.load(Ordering::Relaxed) == UNKNOWN {
        let exact = probe_relaxed_dots() && probe_relaxed_madd() && relaxed.into_iter().all(probe_products);
        let verdict = if exact { EXACT } else { WRONG };
        // if two threads probe at once and disagree, both must get the same verdict: the worse one
        VERDICT.fetch_max(verdict, Ordering::Relaxed);
    }
    VERDICT.load(Ordering::Relaxed) == EXACT
}

fn probe_relaxed_dots() -> bool {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 56) as u8
    };
    (0..PROBES).all(|i| {
        let (mut a, mut w, mut start) = ([0u8; 16], [0u8; 16], [0i32; 4]);
        for lane in 0..16 {
            // every fourth probe has extreme values only: -128, -1, 127 and 0 against 127 and 0
            let (x, y) = (next(), next());
            (a[lane], w[lane]) = match i % 4 {
                0 => ([0x80, 0xff, 0x7f, 0][usize::from(x >> 6)], [127, 127, 127, 0][usize::from(y >> 6)]),
                _ => (x, y & 127),
            };
        }
        start.iter_mut().for_each(|s| *s = i32::from_le_bytes([next(), next(), next(), next()]) >> 4);
        let pairs: [i32; 8] = core::array::from_fn(|pair| {
            [2 * pair, 2 * pair + 1].map(|i| i32::from(a[i] as i8) * i32::from(w[i])).iter().sum()
        });
        let want: [i32; 4] = core::array::from_fn(|lane| start[lane] + pairs[2 * lane] + pairs[2 * lane + 1]);
        // through memory, or the compiler would fold the dot product
        let (a, w, start) = core::hint::black_box((a, w, start));
        let (mut got, mut got_pairs) = ([0i32; 4], [0i16; 8]);
        // SAFETY: all five arrays are 16 bytes.
        unsafe {
            let (a, w) = (v128_load(a.as_ptr().cast()), v128_load(w.as_ptr().cast()));
            let dot = i32x4_relaxed_dot_i8x16_i7x16_add(a, w, v128_load(start.as_ptr().cast()));
            v128_store(got.as_mut_ptr().cast(), dot);
            v128_store(got_pairs.as_mut_ptr().cast(), i16x8_relaxed_dot_i8x16_i7x16(a, w));
        }
        got == want && got_pairs.map(i32::from) == pairs
    })
}

fn probe_relaxed_madd() -> bool {
    (1..PROBES).all(|i| {
        // factors of 11 and 13 bits, and a sum that must be rounded
        let w = [2047.0 - i as f32, i as f32 / -1024.0, i as f32 * 0.125, 1.0 / 16_777_216.0];
        let x = [8191.0 - i as f32, 4097.0, -3.0 * i as f32, 7.0];
        let sums = [0.3, -1e7, 1.0 / i as f32, 3e-9 * i as f32];
        let want: [f32; 4] = core::array::from_fn(|lane| sums[lane] + w[lane] * x[lane]);
        let (w, x, sums) = core::hint::black_box((w, x, sums));
        let mut got = [0f32; 4];
        // SAFETY: all four arrays are 16 bytes.
        unsafe {
            let (w, x) = (v128_load(w.as_ptr().cast()), v128_load(x.as_ptr().cast()));
            v128_store(got.as_mut_ptr().cast(), f32x4_relaxed_madd(w, x, v128_load(sums.as_ptr().cast())));
        }
        got == want
    })
}

/// Compares small matrix products of each activation encoding with the simd128 path: whether the compiled code is wrong
/// can depend on the registers that the baseline compiler has free.
fn probe_products(relaxed: Cpu) -> bool {
    const ROWS: usize = 16;
    const K: usize = 256;
    const N: usize = 5;
    // bytes that are finite f16 scales at any offset: exponent bytes of at most 0x55
    let byte = |i: usize| [0x0f, 0x3a, 0x35, 0x00, 0x2c, 0x51, 0x16][i * i % 31 % 7];
    let x: Vec<f32> = (0..N * K).map(|i| (i * i % 255) as f32 - 127.0).collect();
    [Dtype::Q4_0, Dtype::Q8_0, Dtype::Q4_K, Dtype::Q6_K, Dtype::IQ4_NL, Dtype::Q2_K].into_iter().all(|dtype| {
        let blocks = ROWS * K / dtype.block_len() as usize;
        let src: Vec<u8> = (0..blocks * dtype.block_bytes() as usize).map(byte).collect();
        let Ok(w) = Matrix::from_rows(dtype, ROWS, K, &src) else { return false };
        [1, N].into_iter().all(|n| {
            let product = |cpu| {
                let mut out = vec![0.0f32; n * ROWS];
                if let Some(layout) = ActLayout::of(cpu, dtype) {
                    let mut words = vec![0; layout.len_words(n, K)];
                    let x = act::Floats { x: &x[..n * K], stride: K };
                    let x = Columns::Packed(act::pack(cpu, &Inline, layout, x, K, &mut words));
                    products(cpu, &Inline, &[MatmulJob { w: &w, x, out_column: 0, out_row: 0 }], &mut out, ROWS);
                }
                out
            };
            product(relaxed) == product(Cpu::SIMD128)
        })
    })
}

/// Number of vectors that the instruction probes try.
const PROBES: usize = 512;
