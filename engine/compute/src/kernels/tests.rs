//! Every instruction set of this machine gives the bits of the scalar definition.

use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::Cpu;
use super::act::{ActLayout, Floats, pack};
use super::attention::{
    AttendScratch, Attention, AttentionWindow, DistanceBias, KvHeads, KvLayout, KvMemory, KvRows, KvType, MAX_HEAD_DIM,
    PAGE, Slot, Span, write_kv,
};
use super::elementwise::{
    Activation, Xielu, activate, add_scaled, clamp, clamped_swiglu, gated, limited_swiglu, multiply, scale,
    silu_clamped, soft_cap, xielu,
};
use super::matmul::{Columns, MatmulJob, products};
use super::norm::{NormKind, NormWeights, mean_square, norm, norm_in_place, normalise, sparsify};
use super::panel::{Matrix, PANEL};
use super::rope::{RopeStyle, Rotation, rope};
use crate::pool::{Inline, Pool};
use crate::quant::{Dtype, validate};

pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn normal(&mut self) -> f32 {
        let z = self.next();
        let s = (z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48);
        (s as f32 - 131070.0) / 37837.0
    }

    /// Ordinary numbers; if `extreme`, also runs of zeros, subnormal, huge and extreme values.
    fn floats(&mut self, n: usize, extreme: bool) -> Vec<f32> {
        let mut x: Vec<f32> = (0..n).map(|_| self.normal()).collect();
        if extreme {
            for run in x.chunks_mut(32) {
                let scale = [0.0, 1e-38, 1e-43, 1e15, 1e-29, 1e10, 1.0, 1.0][self.next() as usize % 8];
                // of one sign or alternating, for the largest possible sums and for none
                let flat = [[3.0, 3.0], [-3.0, -3.0], [3.0, -3.0]].get(self.next() as usize % 8);
                for (i, v) in run.iter_mut().enumerate() {
                    *v = scale * flat.map_or(*v, |flat| flat[i % 2]);
                }
            }
        }
        x
    }

    /// Finite f16 bits: ordinary, or zero, subnormal, largest.
    fn f16(&mut self, extreme: bool) -> [u8; 2] {
        let z = self.next();
        let ordinary = z as u16 & 0x83ff | 0x2000;
        let h = match (extreme, z >> 32 & 7) {
            (true, 0) => 0,
            (true, 1) => z as u16 & 0x83ff,
            (true, 2) => 0x7bff,
            (true, 3) => 0xfbff,
            _ => ordinary,
        };
        h.to_le_bytes()
    }

    /// GGUF rows of random quants with finite scales.
    pub(super) fn rows(&mut self, dtype: Dtype, rows: usize, k: usize, extreme: bool) -> Vec<u8> {
        let block = dtype.block_bytes() as usize;
        let mut v: Vec<u8> = (0..rows * k / dtype.block_len() as usize * block).map(|_| self.next() as u8).collect();
        for b in v.chunks_exact_mut(block) {
            if extreme && block > 4 {
                match self.next() % 8 {
                    0 => b.fill(0x80),
                    1 => b.fill(0xff),
                    2 => b.fill(0),
                    3 => b.fill(0x7f),
                    _ => {}
                }
            }
            for &at in dtype.f16_scales() {
                b[at..at + 2].copy_from_slice(&self.f16(extreme));
            }
            match dtype {
                Dtype::F32 => b.copy_from_slice(&self.normal().to_le_bytes()),
                Dtype::BF16 => b.copy_from_slice(&self.normal().to_le_bytes()[2..]),
                // products of larger scales with the largest activations are not finite
                Dtype::MXFP4 => {
                    b[0] = [118 + b[0] % 16, b[0] % 3, 190][if extreme { usize::from(b[1] % 3) } else { 0 }]
                }
                Dtype::IQ1_M => {
                    let d = u16::from_le_bytes(self.f16(extreme));
                    (0..4).for_each(|i| b[49 + 2 * i] = b[49 + 2 * i] & 15 | ((d >> (4 * i) & 15) as u8) << 4);
                }
                _ => {}
            }
            assert_eq!(validate(dtype, b), Ok(()));
        }
        v
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// Checks that `f` gives the scalar bits on every instruction set.
fn same(f: impl Fn(Cpu) -> Vec<f32>) -> Result<(), TestCaseError> {
    let want = bits(&f(Cpu::SCALAR));
    for cpu in Cpu::all_variants() {
        let got = bits(&f(cpu));
        if let Some(i) = (0..want.len()).find(|&i| got[i] != want[i]) {
            let (g, w) = (f32::from_bits(got[i]), f32::from_bits(want[i]));
            return Err(TestCaseError::fail(alloc::format!("{}: element {i}: {g:e}, scalar {w:e}", cpu.isa())));
        }
    }
    Ok(())
}

fn product(cpu: Cpu, pool: &dyn Pool, w: &Matrix, x: &[f32], n: usize) -> Vec<f32> {
    let k = w.k();
    // NaN between the columns: must not be read
    let x: Vec<f32> = x.chunks_exact(k).flat_map(|row| row.iter().copied().chain([f32::NAN; 3])).collect();
    let (mut words, x) = (Vec::new(), Floats { x: &x, stride: k + 3 });
    let x = match ActLayout::of(cpu, w.dtype()) {
        None => Columns::Plain(x),
        Some(layout) => {
            words.resize(layout.len_words(n, k), 0);
            Columns::Packed(pack(cpu, pool, layout, x, k, &mut words))
        }
    };
    let stride = w.panels() * PANEL + 5;
    let mut out = vec![0.0; n * stride];
    products(cpu, pool, &[MatmulJob { w, x, out_column: 0, out_row: 5 }], &mut out, stride);
    out
}

/// A pool that starts threads for each operation; without thread support it calls one after the other.
pub(super) struct Scoped(pub(super) usize);

impl Pool for Scoped {
    fn threads(&self) -> usize {
        self.0
    }
    fn broadcast(&self, work: &(dyn Fn() + Sync)) {
        if cfg!(target_family = "wasm") {
            return (0..self.0).for_each(|_| work());
        }
        std::thread::scope(|s| (0..self.0).for_each(|_| drop(s.spawn(work))));
    }
}

/// The full range of cases is native; emulated targets are a hundred times slower and test their instructions only.
const CASES: u32 = match (cfg!(debug_assertions), cfg!(target_arch = "x86_64")) {
    (false, _) => 1000,
    (true, true) => 240,
    (true, false) => 32,
};

/// Test runners name the path that they mean to test.
#[test]
fn the_named_path_is_the_fastest() {
    if let Ok(name) = std::env::var("STARLING_TEST_ISA") {
        assert_eq!(Cpu::detect().isa().name(), name);
    }
}

/// More rows and columns than kernels buffer at a time, and not multiples of that.
#[test]
fn many_columns_of_long_rows() {
    for (dtype, k, n) in [
        (Dtype::Q4_1, 1056, 534),
        (Dtype::Q8_0, 1056, 534),
        (Dtype::Q4_K, 1280, 534),
        (Dtype::Q6_K, 1280, 534),
        // longer than what other instruction sets unpack at once
        (Dtype::Q5_0, 4128, 9),
        (Dtype::NVFP4, 4160, 9),
        (Dtype::Q5_K, 4352, 9),
        (Dtype::Q2_K, 4352, 9),
    ] {
        let (rows, mut rng) = (70, Rng(5));
        let w = Matrix::from_rows(dtype, rows, k, &rng.rows(dtype, rows, k, false)).unwrap();
        let x = rng.floats(n * k, false);
        let some = [0, 17, 511, 512, 527, 528, 533].map(|c| c % n);
        let alone = some.map(|c| bits(&product(Cpu::SCALAR, &Inline, &w, &x[c * k..(c + 1) * k], 1)));
        for cpu in Cpu::available().into_iter().filter(|cpu| *cpu != Cpu::SCALAR) {
            let all = product(cpu, &Inline, &w, &x, n);
            for (c, want) in some.iter().zip(&alone) {
                assert_eq!(&bits(&all[c * want.len()..][..want.len()]), want, "{}, {dtype:?}, column {c}", cpu.isa());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn matrix_products(f in 0usize..Dtype::SUPPORTED.len(), rows in 1usize..400, blocks in 1usize..5, n in 1usize..60, threads in 1usize..4, extreme: bool, seed: u64) {
        let dtype = Dtype::SUPPORTED[f];
        let k = blocks * dtype.block_len() as usize * if dtype.block_len() == 1 { 7 } else { 1 };
        let mut rng = Rng(seed);
        let w = Matrix::from_rows(dtype, rows, k, &rng.rows(dtype, rows, k, extreme)).unwrap();
        let x = rng.floats(n * k, extreme);
        let pool = Scoped(threads);
        same(|cpu| product(cpu, if cpu == Cpu::SCALAR { &Inline } else { &pool }, &w, &x, n))?;
    }

    #[test]
    fn a_column_does_not_depend_on_its_batch(f in 0usize..Dtype::SUPPORTED.len(), rows in 1usize..60, n in 2usize..12, seed: u64) {
        let dtype = Dtype::SUPPORTED[f];
        let k = 256;
        let mut rng = Rng(seed);
        let w = Matrix::from_rows(dtype, rows, k, &rng.rows(dtype, rows, k, false)).unwrap();
        let x = rng.floats(n * k, false);
        for cpu in Cpu::all_variants() {
            let all = product(cpu, &Inline, &w, &x, n);
            for (c, want) in all.chunks_exact(w.panels() * PANEL + 5).enumerate() {
                prop_assert_eq!(bits(&product(cpu, &Inline, &w, &x[c * k..(c + 1) * k], 1)), bits(want));
            }
        }
    }

    /// Several matrices, each for some of the columns, as with experts.
    #[test]
    fn columns_in_groups(f in 0usize..Dtype::SUPPORTED.len(), rows in 1usize..50, groups in prop::collection::vec(1usize..15, 1..5), threads in 1usize..4, seed: u64) {
        let (dtype, k, mut rng) = (Dtype::SUPPORTED[f], 256, Rng(seed));
        let matrices: Vec<Matrix> = groups
            .iter()
            .flat_map(|_| [rows, 20])
            .map(|rows| Matrix::from_rows(dtype, rows, k, &rng.rows(dtype, rows, k, false)).unwrap())
            .collect();
        let x = rng.floats(groups.iter().sum::<usize>() * k, false);
        let (at, stride) = (matrices[0].panels() * PANEL, (matrices[0].panels() + 2) * PANEL);
        for cpu in Cpu::all_variants() {
            let layout = ActLayout::of(cpu, dtype);
            let mut words: Vec<Vec<u32>> = groups.iter().map(|n| vec![0; layout.map_or(0, |a| a.len_words(*n, k))]).collect();
            let (mut jobs, mut column, mut want) = (Vec::new(), 0, Vec::new());
            for ((n, words), w) in groups.iter().zip(&mut words).zip(matrices.chunks_exact(2)) {
                let x = &x[column * k..(column + n) * k];
                let alone = [0, 1].map(|i| product(cpu, &Inline, &w[i], x, *n));
                for c in 0..*n {
                    for (w, alone) in w.iter().zip(&alone) {
                        let width = w.panels() * PANEL;
                        want.extend(&alone[c * (width + 5) + 5..][..width]);
                    }
                }
                let x = Floats { x, stride: k };
                let x = match layout {
                    None => Columns::Plain(x),
                    Some(layout) => Columns::Packed(pack(cpu, &Inline, layout, x, k, words)),
                };
                jobs.extend([(0, 0), (1, at)].map(|(i, at)| MatmulJob { w: &w[i], x, out_column: column, out_row: at }));
                column += n;
            }
            let mut out = vec![0.0; column * stride];
            products(cpu, &Scoped(threads), &jobs, &mut out, stride);
            prop_assert_eq!(bits(&out), bits(&want));
        }
    }

    #[test]
    fn norms_and_elementwise(n in 1usize..300, extreme: bool, seed: u64) {
        let mut rng = Rng(seed);
        let (x, y, z) = (rng.floats(n, extreme), rng.floats(n, false), rng.floats(n, false));
        same(|cpu| {
            let mut all = Vec::new();
            for (kind, b) in [(NormKind::Rms, None), (NormKind::Layer, None), (NormKind::Layer, Some(&z[..]))] {
                let weights = NormWeights { kind, eps: 1e-5, w: &y, b };
                let (mut out, mut in_place) = (vec![0.0; n], x.clone());
                norm(cpu, &weights, &x, &mut out);
                norm_in_place(cpu, &weights, &mut in_place);
                assert_eq!(bits(&out), bits(&in_place));
                all.extend(out);
            }
            let mut unit = x.clone();
            normalise(cpu, &mut unit);
            all.extend(unit);
            all.push(mean_square(cpu, &x));
            let mut sparse = x.clone();
            sparsify(cpu, &mut sparse, 0.5);
            all.extend(sparse);
            let mut step = |f: &dyn Fn(&mut [f32])| {
                let mut x = x.clone();
                f(&mut x);
                all.extend(x);
            };
            use Activation::{GeluErf, GeluTanh, Relu, ReluSquared, Sigmoid, Silu};
            for act in [Silu, GeluTanh, GeluErf, Relu, ReluSquared, Sigmoid] {
                step(&|x| gated(cpu, act, x, &y));
                step(&|x| activate(cpu, act, x));
            }
            step(&|x| add_scaled(cpu, x, &y, 0.3));
            step(&|x| scale(cpu, x, 0.7));
            step(&|x| soft_cap(cpu, x, 2.5));
            step(&|x| clamp(cpu, x, 0.6));
            step(&|x| limited_swiglu(cpu, x, &y, 0.7));
            step(&|x| xielu(cpu, x, Xielu { negative: 0.9, positive: 1.1, beta: 0.5, eps: -1e-6 }));
            step(&|x| multiply(cpu, x, &y));
            step(&|x| clamped_swiglu(cpu, x, &y, 0.7));
            step(&|x| silu_clamped(cpu, x, &y, 0.7));
            all
        })?;
    }

    #[test]
    fn rotations(heads in 1usize..5, half in 1usize..40, rest in 0usize..9, seed: u64) {
        let mut rng = Rng(seed);
        let d = 2 * half + rest;
        let (x, cos, sin) = (rng.floats(heads * d, false), rng.floats(half, false), rng.floats(half, false));
        for style in [RopeStyle::Interleaved, RopeStyle::NeoX] {
            same(|cpu| {
                let mut x = x.clone();
                rope(cpu, Rotation { style, cos: &cos, sin: &sin, scale: 0.37 }, &mut x, d);
                x
            })?;
        }
    }

    /// Values that are parts of the keys are weighted as if they were stored beside them. Keys may be longer than separate
    /// ones.
    #[test]
    fn latent_values(
        t in 0..KvType::ALL.len(), group in prop_oneof![4 => 1usize..5, 1 => Just(40)],
        (k2, v16) in prop_oneof![4 => (0usize..32, 1usize..6), 1 => Just((64, 32))], tokens in 1usize..3,
        past in prop_oneof![0usize..40, 250usize..260], extreme: bool, seed: u64,
    ) {
        let (dk, dv, all, mut rng) = (v16 * 16 + k2 * 2, v16 * 16, past + tokens, Rng(seed));
        let (k, q) = (rng.floats(all * dk, extreme), rng.floats(tokens * group * dk, false));
        let pages: Vec<u32> = (0..all.div_ceil(PAGE) as u32).collect();
        let slots: Vec<Slot> = (0..all).map(|t| Slot { page: pages[t / PAGE], token: (t % PAGE) as u32 }).collect();
        let run = |cpu, heads| {
            let layout = KvLayout::new(KvType::ALL[t], [heads]);
            let kv = layout.layers()[0];
            let mut memory = KvMemory::zeroed(&layout, pages.len()).expect("memory");
            let rows = KvRows { x: &k, stride: dk, k_at: 0, v_at: 0, slots: &slots };
            write_kv(cpu, &Inline, &kv, rows, &mut memory);
            let mut parts = vec![0.0; Attention::parts_len(&kv, group, tokens, all)];
            let mut out = vec![0.0; tokens * group * dv];
            let window = AttentionWindow::CAUSAL;
            let spans = [Span { row: 0, n: tokens, pos: past, pages: &pages }];
            let (q, q_stride) = (&q[..], group * dk);
            Attention { kv, memory: &memory, n_head: group, window, soft_cap: None, alibi: None, bias: None, sinks: None, selected: None, q, q_stride, spans: &spans }
                .run(cpu, &Inline, &mut out, &mut [AttendScratch::new(layout.layers())], &mut parts);
            out
        };
        let latent = run(Cpu::detect(), KvHeads::latent(dk, dv));
        match KvType::ALL[t] {
            // values are rounded to 8 bits
            KvType::K8 | KvType::Q8 => prop_assert_eq!(bits(&latent), bits(&run(Cpu::SCALAR, KvHeads::latent(dk, dv)))),
            _ if dk > MAX_HEAD_DIM => prop_assert_eq!(bits(&latent), bits(&run(Cpu::SCALAR, KvHeads::latent(dk, dv)))),
            _ => prop_assert_eq!(bits(&latent), bits(&run(Cpu::detect(), KvHeads::separate(1, dk, dv)))),
        }
    }

    #[test]
    fn attention(
        t in 0..KvType::ALL.len(), heads in 1usize..3, group in prop_oneof![20 => 1usize..5, 1 => 33usize..40],
        (k8, v8) in (1usize..10, 1usize..10), latent: bool, tokens in 1usize..12,
        past in prop_oneof![0usize..40, 200usize..300, 500usize..540],
        before in prop_oneof![Just(usize::MAX), 0usize..300], after in prop_oneof![2 => Just(0), 1 => Just(usize::MAX), 1 => 0usize..12],
        soft_cap in prop_oneof![Just(None), Just(Some(3.0))], extra in 0usize..4, extreme: bool, seed: u64,
    ) {
        let kv_heads = match latent {
            true => KvHeads::latent(v8 * 16 + k8 * 2, v8 * 16),
            false => KvHeads::separate(heads, k8 * 8, v8 * 8),
        };
        let KvHeads { n: heads, key_dim: dk, value_dim: dv, .. } = kv_heads;
        let layout = KvLayout::new(KvType::ALL[t], [KvHeads::separate(2, 24, 8), kv_heads]);
        let kv = layout.layers()[1];
        let (n_head, all, mut rng) = (heads * group, past + tokens, Rng(seed));
        let n_pages = all.div_ceil(PAGE);
        // pages in scrambled order, and arbitrary contents in unused slots
        let pages: Vec<u32> = (0..n_pages as u32).rev().collect();
        let (k, v) = (rng.floats(all * heads * dk, extreme), rng.floats(all * heads * dv, extreme));
        let q = rng.floats(tokens * n_head * dk, false);
        let per_head = rng.floats(n_head, false);
        let (alibi, sinks) = ((extra == 1).then_some(&per_head[..]), (extra == 2).then_some(&per_head[..]));
        let table = rng.floats(n_head * 21, false);
        let bias = (extra == 3).then_some(DistanceBias { table: &table, max: 10 });
        let [k_width, v_width] = [dk, dv].map(|d| heads * d);
        let slots: Vec<Slot> =
            (0..all).map(|t| Slot { page: pages[t / PAGE], token: (t % PAGE) as u32 }).collect();
        let kv_rows: Vec<f32> = k.chunks(k_width).zip(v.chunks(v_width)).flat_map(|(k, v)| [k, v].concat()).collect();
        let seen = |pos: usize| pos.saturating_sub(before)..pos.saturating_add(after).min(all - 1) + 1;
        let run = |cpu: Cpu, pool: &dyn Pool, whole: bool| {
            let mut memory = KvMemory::with_segments(&layout, n_pages, (seed % 4) as u32).expect("memory");
            pages.iter().for_each(|p| memory.commit(*p).expect("memory"));
            let rows = KvRows { x: &kv_rows, stride: k_width + v_width, k_at: 0, v_at: k_width, slots: &slots };
            write_kv(cpu, pool, &kv, rows, &mut memory);
            let mut scratch: Vec<_> = (0..pool.threads()).map(|_| AttendScratch::new(layout.layers())).collect();
            let mut parts = vec![0.0; Attention::parts_len(&kv, n_head, tokens, all)];
            let mut run = |window, q: &[f32], span: Span<'_>| {
                let mut out = vec![0.0; q.len() / dk * dv];
                Attention { kv, memory: &memory, n_head, window, soft_cap, alibi, bias, sinks, selected: None, q, q_stride: n_head * dk, spans: &[span] }
                    .run(cpu, pool, &mut out, &mut scratch, &mut parts);
                out
            };
            if whole {
                return run(AttentionWindow { left: before, right: after, chunk: usize::MAX }, &q, Span { row: 0, n: tokens, pos: past, pages: &pages });
            }
            // queries are not rotated here, so the query may be placed at the last token that it attends to
            let one = |(t, q)| {
                let seen = seen(past + t);
                run(AttentionWindow { left: seen.len() - 1, right: 0, chunk: usize::MAX }, q, Span { row: 0, n: 1, pos: seen.end - 1, pages: &pages })
            };
            q.chunks(n_head * dk).enumerate().flat_map(one).collect()
        };
        let scores = |cpu: Cpu| {
            let mut memory = KvMemory::with_segments(&layout, n_pages, (seed % 4) as u32).expect("memory");
            pages.iter().for_each(|p| memory.commit(*p).expect("memory"));
            let rows = KvRows { x: &kv_rows, stride: k_width + v_width, k_at: 0, v_at: k_width, slots: &slots };
            write_kv(cpu, &Inline, &kv, rows, &mut memory);
            let spans = [Span { row: 0, n: tokens, pos: past, pages: &pages }];
            let window = AttentionWindow { left: before, right: after, chunk: usize::MAX };
            Attention { kv, memory: &memory, n_head, window, soft_cap, alibi, bias, sinks, selected: None, q: &q, q_stride: n_head * dk, spans: &spans }
                .scores(cpu)
        };
        let lens: Vec<usize> = scores(Cpu::detect()).iter().map(Vec::len).collect();
        prop_assert_eq!(lens, (past..all).flat_map(|pos| vec![seen(pos).len(); n_head]).collect::<Vec<_>>());
        same(|cpu| scores(cpu).concat())?;
        same(|cpu| run(cpu, if cpu == Cpu::SCALAR { &Inline } else { &Scoped(2) }, true))?;
        // distances to the query differ there
        prop_assume!(alibi.is_none() && bias.is_none());
        prop_assert_eq!(bits(&run(Cpu::detect(), &Inline, false)), bits(&run(Cpu::SCALAR, &Inline, true)), "one by one");
    }
}
