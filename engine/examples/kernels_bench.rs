//! Speed of the matrix products: `kernels_bench [ISA] [TYPE] [ROWS K [N]]`.
//!
//! Prints, per instruction set of this machine (or the one named) and weight type, billions of operations a second
//! (2 * rows * k * n) of a product on one thread, 2048 x 2048 if no size is given, packed columns, n = 1 (and its GB/s)
//! and N, usually 128. The last column is a hash of the results: the same everywhere.
#![expect(clippy::std_instead_of_core, reason = "a program, not the engine")]

use std::error::Error;
use std::time::{Duration, Instant};

use starling::kernels::Cpu;
use starling::kernels::act::{ActLayout, Floats, pack};
use starling::kernels::matmul::{Columns, MatmulJob, products};
use starling::kernels::panel::Matrix;
use starling::pool::Inline;
use starling::quant::Dtype;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let cpus = match args.first().map(String::as_str) {
        None | Some("all") => Cpu::available(),
        Some(name) => vec![Cpu::named(name)?],
    };
    let types = Dtype::SUPPORTED.into_iter().filter(|f| args.get(1).is_none_or(|name| f.name() == name));
    let size = |i: usize, usual| args.get(i).map_or(Ok(usual), |v| v.parse::<usize>());
    let (rows, k, n) = (size(2, 2048)?, size(3, 2048)?, size(4, 128)?);
    println!("{:14}{:8}{:>10}{:>10}{:>12}   results", "isa", "type", "n=1", "GB/s", format!("n={n}"));
    for dtype in types {
        let w = weights(dtype, rows, k)?;
        for &cpu in &cpus {
            let (one, hash1) = speed(cpu, &w, 1);
            let (many, hash_many) = speed(cpu, &w, n);
            let gb_per_s = one * w.len_bytes() as f64 / (2 * rows * k) as f64;
            println!(
                "{:14}{:8}{one:10.1}{gb_per_s:10.1}{many:12.1}   {:016x}",
                cpu.isa().name(),
                dtype.name(),
                hash1 ^ hash_many
            );
        }
    }
    Ok(())
}

/// Billions of operations a second for `n` columns, the best of some runs, and a hash of the result.
fn speed(cpu: Cpu, w: &Matrix, n: usize) -> (f64, u64) {
    let mut random = Random(7);
    let x: Vec<f32> = (0..n * w.k()).map(|_| random.next() as i32 as f32 / (1u32 << 31) as f32).collect();
    let (mut words, x) = (Vec::new(), Floats { x: &x, stride: w.k() });
    let columns = match ActLayout::of(cpu, w.dtype()) {
        None => Columns::Plain(x),
        Some(layout) => {
            words.resize(layout.len_words(n, w.k()), 0);
            Columns::Packed(pack(cpu, &Inline, layout, x, w.k(), &mut words))
        }
    };
    let stride = w.panels() * 16;
    let mut out = vec![0.0; n * stride];
    let started = Instant::now();
    let mut best = Duration::MAX;
    let mut runs = 0;
    while runs < 3 || (started.elapsed() < Duration::from_millis(400) && runs < 1000) {
        let run = Instant::now();
        products(cpu, &Inline, &[MatmulJob { w, x: columns, out_column: 0, out_row: 0 }], &mut out, stride);
        best = best.min(run.elapsed());
        runs += 1;
    }
    let hash = out
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |h, v| (h ^ u64::from(v.to_bits())).wrapping_mul(0x0000_0100_0000_01b3));
    (2e-9 * (w.rows() * w.k()) as f64 * n as f64 / best.as_secs_f64(), hash)
}

/// Random quants with ordinary scales.
fn weights(dtype: Dtype, rows: usize, k: usize) -> Result<Matrix, Box<dyn Error>> {
    let mut random = Random(1);
    let mut src: Vec<u8> = (0..rows * dtype.row_bytes(k as u64).ok_or("K is not whole blocks")? as usize)
        .map(|_| random.next() as u8)
        .collect();
    for block in src.chunks_exact_mut(dtype.block_bytes() as usize) {
        let scale = (random.next() as u16 & 0x83ff | 0x2000).to_le_bytes();
        match dtype {
            Dtype::F32 => block.copy_from_slice(&(random.next() as i32 as f32 / (1u32 << 31) as f32).to_le_bytes()),
            Dtype::BF16 => block[1] = block[1] & 0x80 | 0x3f,
            Dtype::MXFP4 => block[0] = 120 + block[0] % 8,
            Dtype::IQ1_M => (0..4).for_each(|i| block[49 + 2 * i] = block[49 + 2 * i] & 15 | [0, 0, 0, 0x20][i]),
            _ => dtype.f16_scales().iter().for_each(|&at| block[at..at + 2].copy_from_slice(&scale)),
        }
    }
    Ok(Matrix::from_rows(dtype, rows, k, &src)?)
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
