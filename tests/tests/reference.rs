//! Logits and greedy tokens against HF transformers, within the tolerances of `fixtures/reference/README.md`.

use starling::kernels::Cpu;
use starling_tests::reference::{self, Case, Prompt};

/// Causal cases of `fixtures/reference`.
const N_CASES: usize = 65;

/// Tolerance of logits.
#[derive(Debug)]
enum Tolerance {
    MaxAbs(f32),
    Quantised { nmse: f64, kl: f64 },
}

fn tolerance(dtype: &str, layers: usize) -> Tolerance {
    match dtype {
        "F32" | "F16" | "BF16" => Tolerance::MaxAbs(1e-3),
        "Q8_0" | "Q4_0" | "Q4_1" | "Q5_0" | "Q5_1" | "IQ4_NL" => Tolerance::Quantised { nmse: 1e-3, kl: 5e-3 },
        _ => Tolerance::Quantised { nmse: if layers > 1 { 4e-3 } else { 2e-3 }, kl: 1.5e-2 },
    }
}

fn softmax(x: &[f32]) -> Vec<f64> {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f64> = x.iter().map(|v| f64::from(v - max).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|v| v / sum).collect()
}

#[derive(Default)]
struct Distance {
    max_abs: f32,
    square: f64,
    reference: f64,
    kl: f64,
    rows: usize,
    numbers: usize,
}

impl Distance {
    fn add(&mut self, got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert!(g.is_finite());
            self.max_abs = self.max_abs.max((g - w).abs());
            self.square += f64::from(g - w).powi(2);
            self.reference += f64::from(*w).powi(2);
        }
        self.kl += softmax(want).iter().zip(softmax(got)).map(|(w, g)| w * (w / g).ln()).sum::<f64>();
        self.rows += 1;
        self.numbers += got.len();
    }
}

fn wanted(prompt: &Prompt) -> (Vec<f32>, usize) {
    match (&prompt.logits_all, &prompt.logits_last) {
        (Some(all), _) => (all.values(), prompt.ids.len()),
        (None, Some(last)) => (last.clone(), 1),
        _ => panic!("a causal prompt has logits"),
    }
}

fn check(case: &Case) {
    for file in &case.files {
        let model = reference::load(&file.file);
        let vocab = model.config.n_vocab;
        let tolerance = tolerance(&file.dtype, model.config.n_layer());
        let close = if let Tolerance::MaxAbs(_) = tolerance { 0.0 } else { 0.1 };
        let mut distance = Distance::default();
        let mut greedy = (0, 0);
        for prompt in &case.prompts {
            let got = reference::logits(&model, Cpu::detect(), &prompt.ids);
            let (want, rows) = wanted(prompt);
            let first = prompt.ids.len() - rows;
            for (i, (got, want)) in got[first * vocab..].chunks(vocab).zip(want.chunks(vocab)).enumerate() {
                // router scores so close that rounding may choose the other expert
                let margin = prompt.router_margins.as_ref().map_or(f32::INFINITY, |m| m[first + i]);
                if margin >= close {
                    distance.add(got, want);
                }
            }
        }
        let (nmse, kl) = (distance.square / distance.reference, distance.kl / distance.rows as f64);
        let rms = (distance.square / distance.numbers as f64).sqrt();
        for prompt in &case.prompts {
            let Some(reference) = &prompt.greedy else { continue };
            let allowed = match tolerance {
                Tolerance::MaxAbs(v) => v,
                Tolerance::Quantised { .. } => distance.max_abs,
            };
            let mut ids = prompt.ids.clone();
            for (want, margin) in reference.ids.iter().zip(&reference.margins) {
                let logits = reference::logits(&model, Cpu::detect(), &ids);
                let last = &logits[logits.len() - vocab..];
                let best = (0..vocab).rev().max_by(|&a, &b| last[a].total_cmp(&last[b])).expect("a token") as u32;
                greedy.1 += 1;
                if best != *want {
                    assert!(*margin <= 2.0 * allowed, "{}: token {} at margin {margin}", file.file, ids.len());
                    break;
                }
                greedy.0 += 1;
                ids.push(best);
            }
        }
        println!(
            "{:36} max_abs {:.2e} rms {rms:.2e} nmse {nmse:.2e} kl {kl:.2e} greedy {}/{}",
            file.file, distance.max_abs, greedy.0, greedy.1
        );
        match tolerance {
            Tolerance::MaxAbs(limit) => assert!(distance.max_abs <= limit, "{}: {}", file.file, distance.max_abs),
            Tolerance::Quantised { nmse: n, kl: k } => assert!(nmse <= n && kl <= k, "{}: {nmse} {kl}", file.file),
        }
        if let Some(llama_cpp) = case.llama_cpp_vs_reference.get(&file.dtype).filter(|_| rms > 1e-3) {
            let theirs = llama_cpp["rms"].as_f64().expect("a number");
            assert!(rms <= 1.5 * theirs, "{}: rms {rms}, llama.cpp {theirs}", file.file);
        }
    }
}

#[test]
fn logits_and_greedy_tokens_agree_with_transformers() {
    let cases = reference::cases("causal");
    assert_eq!(cases.len(), N_CASES, "reference cases are missing");
    cases.iter().for_each(check);
}
