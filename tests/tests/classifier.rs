//! Scores of classification heads: the head as llama.cpp and transformers define it, in f64, on the hidden states that
//! llama.cpp computes; equal bits alone and in any batch; errors.

use std::sync::Arc;

use starling::embed::{Pooling, Text};
use starling::error::{LoadError, RequestError};
use starling::kernels::Cpu;
use starling::model::Model;
use starling::pool::Inline;
use starling::quant::Dtype;
use starling_tests::architecture::{Recipe, TensorRecipe, recipe};
use starling_tests::embedding::{embed, embedder, states};
use starling_tests::pool::Threads;

const D: usize = 256;

/// What a recipe differs in.
type Change<'a> = &'a dyn Fn(&mut Recipe);

/// A head on a model of `fixtures/architectures`.
struct Case {
    recipe: &'static str,
    /// Rows of the layers, 0 for none.
    hidden: u64,
    classes: u64,
    has_norm: bool,
    /// Pooling type of the head.
    pooling: Option<u32>,
    act: fn(f64) -> f64,
    has_softmax: bool,
}

const BERT: Case = Case {
    recipe: "bert",
    hidden: D as u64,
    classes: 1,
    has_norm: false,
    pooling: None,
    act: f64::tanh,
    has_softmax: false,
};

const CASES: [Case; 6] = [
    BERT,
    Case { hidden: 0, classes: 3, ..BERT },
    // one layer, as in jina-reranker-v1
    Case { recipe: "jina-bert-v2", hidden: 1, classes: 0, ..BERT },
    Case { recipe: "modern-bert", has_norm: true, act: gelu, ..BERT },
    Case { recipe: "modern-bert", has_norm: true, act: gelu, pooling: Some(1), ..BERT },
    // yes and no of Qwen3-Reranker
    Case { recipe: "qwen3", hidden: 0, classes: 2, has_softmax: true, ..BERT },
];

/// `x * P(normal < x)`, by Simpson's rule.
fn gelu(x: f64) -> f64 {
    let (n, density) = (2000, |t: f64| (-0.5 * t * t).exp() / (2.0 * std::f64::consts::PI).sqrt());
    let h = x / f64::from(n);
    let weight = |i: i32| if i == 0 || i == n { 1.0 } else { f64::from(2 + 2 * (i % 2)) };
    let sum: f64 = (0..=n).map(|i| weight(i) * density(h * f64::from(i))).sum();
    x * (0.5 + sum * h / 3.0)
}

fn tensor(name: &str, shape: &[u64], rule: &str) -> TensorRecipe {
    let (name, shape, rule) = (name.into(), shape.into(), rule.into());
    TensorRecipe { name, shape, rule, gain: 1.0, lo: 0.0, hi: 0.0, w: false }
}

impl Case {
    fn recipe(&self) -> Recipe {
        let mut recipe = recipe(self.recipe);
        let d = D as u64;
        let arch = recipe.arch.clone();
        recipe.metadata.retain(|(key, ..)| !key.ends_with(".pooling_type"));
        recipe.metadata.push((format!("{arch}.pooling_type"), "UINT32".into(), 4.into()));
        if let Some(pooling) = self.pooling {
            recipe.metadata.push((format!("{arch}.classifier.pooling_type"), "UINT32".into(), pooling.into()));
        }
        let mut width = d;
        if self.hidden > 0 {
            recipe.tensors.push(tensor("cls.weight", &[width, self.hidden], "matrix"));
            recipe.tensors.push(tensor("cls.bias", &[self.hidden], "bias"));
            width = self.hidden;
        }
        if self.has_norm {
            recipe.tensors.push(tensor("cls.norm.weight", &[width], "norm"));
        }
        if self.classes > 0 {
            recipe.tensors.push(tensor("cls.output.weight", &[width, self.classes], "matrix"));
            recipe.tensors.push(tensor("cls.output.bias", &[self.classes], "bias"));
        }
        recipe
    }

    /// The scores of a text with these states (n_tokens, D), by the definition.
    fn scores(&self, recipe: &Recipe, model: &Model, states: &[f32]) -> Vec<f64> {
        let row = |i: usize| states[i * D..(i + 1) * D].iter().map(|x| f64::from(*x));
        let n = states.len() / D;
        let mut x: Vec<f64> = match self.pooling {
            Some(1) => (0..D).map(|j| (0..n).map(|i| f64::from(states[i * D + j])).sum::<f64>() / n as f64).collect(),
            _ if model.config.causal => row(n - 1).collect(),
            _ => row(0).collect(),
        };
        let values = |name: &str| {
            let tensor = recipe.tensors.iter().find(|t| t.name == name)?;
            Some(tensor.values(recipe.seed).into_iter().map(f64::from).collect::<Vec<_>>())
        };
        let layer = |x: &[f64], name: &str| -> Option<Vec<f64>> {
            let (w, b) = (values(&format!("{name}.weight"))?, values(&format!("{name}.bias"))?);
            Some(w.chunks(x.len()).zip(b).map(|(w, b)| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>() + b).collect())
        };
        if let Some(hidden) = layer(&x, "cls") {
            x = hidden.into_iter().map(self.act).collect();
        }
        if let Some(norm) = values("cls.norm.weight") {
            let n = x.len() as f64;
            let mean = x.iter().sum::<f64>() / n;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
            let root = (variance + f64::from(model.config.norm.eps)).sqrt();
            x.iter_mut().zip(norm).for_each(|(x, w)| *x = (*x - mean) / root * w);
        }
        x = layer(&x, "cls.output").unwrap_or(x);
        if self.has_softmax {
            let sum: f64 = x.iter().map(|x| x.exp()).sum();
            x.iter_mut().for_each(|x| *x = x.exp() / sum);
        }
        x
    }
}

fn load(recipe: &Recipe) -> Arc<Model> {
    Arc::new(Model::load(&recipe.file(Dtype::F32), &Inline).unwrap_or_else(|e| panic!("{}: {e}", recipe.name)))
}

fn rank(tokens: &[u32]) -> Text<'_> {
    Text { tokens, pooling: Pooling::Rank, dimensions: None, normalise: true }
}

fn difference(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max)
}

#[test]
fn scores_are_those_of_the_definition() {
    for case in &CASES {
        let recipe = case.recipe();
        let model = load(&recipe);
        assert_eq!(Pooling::of(&model.config), Ok(Pooling::Rank), "{}", case.recipe);
        assert_eq!(model.n_classes() as u64, if case.classes > 0 { case.classes } else { case.hidden });
        let mut e = embedder(&model, &Inline, 4, 512);
        for prompt in &recipe.prompts {
            let got = &embed(&mut e, Cpu::detect(), &Inline, &[rank(prompt)])[0];
            let want = case.scores(&recipe, &model, &states(&model, Cpu::detect(), prompt));
            let error = difference(got, &want);
            assert!(error < 1e-5, "{}: {got:?}, expected {want:?}", case.recipe);
        }
        if recipe.kind == "embedding" {
            // as many tokens as the fixture has states
            let expected = self::recipe(case.recipe).expected();
            let got = &embed(&mut e, Cpu::detect(), &Inline, &[rank(&recipe.prompts[0])])[0];
            let want = case.scores(&recipe, &model, &expected[0].rows);
            let error = difference(got, &want);
            println!("{:14} {got:?} {error:.1e} from llama.cpp's states", case.recipe);
            assert!(error < 5e-3, "{}: {got:?}, expected {want:?}", case.recipe);
        }
    }
}

#[test]
fn a_text_has_the_same_scores_alone_and_in_any_batch() {
    for case in &CASES {
        let recipe = case.recipe();
        let model = load(&recipe);
        let texts: Vec<Vec<u32>> = (1..9).map(|n| (0..n * 3).map(|i| (i * 7 + n) % 128).collect()).collect();
        let forms: Vec<Text<'_>> = texts
            .iter()
            .enumerate()
            .map(|(i, tokens)| Text { pooling: Pooling::ALL[if i % 3 == 0 { 1 + i % 2 } else { 4 }], ..rank(tokens) })
            .collect();
        let (pool, bits) = (Threads::new(3), |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
        let together = embed(&mut embedder(&model, &pool, 8, 512), Cpu::detect(), &pool, &forms);
        let mut alone = embedder(&model, &Inline, 1, 64);
        for (text, got) in forms.iter().zip(&together) {
            assert_eq!(bits(got), bits(&embed(&mut alone, Cpu::SCALAR, &Inline, &[*text])[0]), "{}", case.recipe);
            assert_eq!(got.len(), text.pooling.width(&model));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let refused = |case: &Case, change: Change<'_>| {
        let mut recipe = case.recipe();
        change(&mut recipe);
        Model::load(&recipe.file(Dtype::F32), &Inline).err().expect("an error")
    };
    let shape = |name: &'static str, shape: &'static [u64]| {
        move |recipe: &mut Recipe| {
            recipe.tensors.iter_mut().find(|t| t.name == name).expect("a tensor").shape = shape.into();
        }
    };
    let changes: [(&Case, &str, Change<'_>); 4] = [
        (&CASES[0], "cls.weight", &shape("cls.weight", &[128, 256])),
        (&CASES[0], "cls.output.weight", &shape("cls.output.weight", &[128, 1])),
        (&CASES[0], "cls.output.bias", &shape("cls.output.bias", &[2])),
        (&CASES[3], "cls.norm.weight", &shape("cls.norm.weight", &[128])),
    ];
    for (case, name, change) in changes {
        let error = refused(case, change);
        assert!(matches!(&error, LoadError::Tensor { name: found, .. } if found == name), "{name}: {error}");
    }
    // a norm or bias without its layer
    let error = refused(&CASES[3], &|recipe| recipe.tensors.retain(|t| t.name != "cls.weight"));
    assert!(error.to_string().contains("cls."), "{error}");
    let model = load(&recipe("bert"));
    assert_eq!(model.n_classes(), 0);
    let error = embedder(&model, &Inline, 1, 64).check(&rank(&[1, 2])).expect_err("no head");
    assert!(matches!(&error, RequestError::Option { name: "pooling", found, .. } if found.contains("rank")), "{error}");
}
