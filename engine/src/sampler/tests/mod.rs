mod naive;

use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;

/// Logits on a coarse grid, so that there are many ties, and with gaps too wide for rounding to matter.
fn logits(n: usize) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec((-40i32..40).prop_map(|i| i as f32 * 0.37), n..=n)
}

/// Logits of all sizes.
fn smooth(seed: u32, n: usize) -> Vec<f32> {
    let mut s = seed | 1;
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 17;
        s ^= s << 5;
        (s >> 8) as f32 / (1 << 24) as f32
    };
    (0..n).map(|_| 6.0 * (next() + next() + next() - 1.5) + if next() < 0.01 { 6.0 * next() } else { 0.0 }).collect()
}

fn sampler(o: &SamplingOptions, n: usize, history: &[u32]) -> Sampler {
    let mut s = Sampler::new(o.clone(), n).expect("options");
    history.iter().for_each(|t| s.accept(*t));
    s
}

#[test]
fn a_scope_of_the_answer_leaves_the_prompt_out() {
    let x = [4.0, 3.0, 2.0, 1.0];
    let pick = |scope: PenaltyScope, repeat_penalty: f32, last_n: u32| {
        let o = SamplingOptions {
            repeat_penalty,
            repeat_last_n: last_n,
            frequency_penalty: 0.75,
            presence_penalty: 0.75,
            penalty_scope: scope,
            ..SamplingOptions::greedy()
        };
        let mut s = Sampler::new(o, 4).expect("options");
        [0, 0, 1].into_iter().for_each(|token| s.accept_prompt(token));
        let mut answer = Vec::new();
        for at in 0..5 {
            answer.push(s.pick(Cpu::detect(), &x, 1, at, None).token);
            s.accept(answer[at as usize]);
        }
        answer
    };
    // 0 costs 2.25 in the prompt, 1 1.5
    assert_eq!(pick(PenaltyScope::All, 1.0, ALL_TOKENS), [2, 0, 1, 0, 3]);
    assert_eq!(pick(PenaltyScope::Answer, 1.0, ALL_TOKENS), [0, 1, 0, 2, 0]);
    // the repeat penalty counts both
    assert_eq!(pick(PenaltyScope::Answer, 4.0, ALL_TOKENS)[0], 2);
    // what leaves the window is counted no more, wherever it was
    assert_eq!(pick(PenaltyScope::Answer, 1.0, 1), [0, 1, 0, 1, 0]);
}

/// Whether `logprob` is the logarithm of `p`, within 1e-5 and the precision of an f32 of that size.
fn is_log(logprob: f32, p: f64) -> bool {
    (f64::from(logprob) - p.ln()).abs() < 1e-5 * p.ln().abs().max(1.0)
}

/// The sampler agrees with the naive definitions.
fn check(o: &SamplingOptions, history: &[u32], x: &[f32], allowed: Option<&[u32]>) {
    let n = x.len();
    let o = SamplingOptions { logprobs: LogprobKind::Final, top_logprobs: 200, ..o.clone() };
    let is_allowed = |t: usize| allowed.is_none_or(|m| m.get(t / 32).is_some_and(|w| w >> (t % 32) & 1 == 1));
    let any = (0..n).any(is_allowed);
    let adjusted = naive::adjusted(&o, history, x, |t| !any || is_allowed(t));
    let want = naive::distribution(&o, &adjusted);
    let picks: Vec<Pick> = (0..20).map(|at| sampler(&o, n, history).pick(Cpu::detect(), x, 1, at, allowed)).collect();
    let mut by_p = want.clone();
    by_p.sort_by(|a, b| adjusted[b.0 as usize].total_cmp(&adjusted[a.0 as usize]).then(a.0.cmp(&b.0)));
    for pick in &picks {
        let (_, p) = want.iter().find(|w| w.0 == pick.token).expect("a token that was filtered out");
        assert!(is_log(pick.logprob, *p), "{} {}", pick.logprob, p.ln());
        if o.temperature == 0.0 {
            assert_eq!((pick.token, pick.logprob), (want[0].0, 0.0));
            continue;
        }
        assert_eq!(pick.top.len(), by_p.len().min(200));
        for ((token, logprob), want) in pick.top.iter().zip(&by_p) {
            assert_eq!(*token, want.0);
            assert!(is_log(*logprob, want.1), "{logprob} {}", want.1.ln());
        }
    }
    for cpu in Cpu::available() {
        let again = (0..20).map(|at| sampler(&o, n, history).pick(cpu, x, 1, at, allowed));
        assert!(again.eq(picks.iter().cloned()), "{} differs", cpu.isa());
    }
    // the draw is the inverse of the distribution function
    let mut one = sampler(&o, n, history);
    for at in 0..20 {
        let u = draw::uniform(o.seed, 7, at);
        let token = one.pick(Cpu::detect(), x, 7, at, allowed).token;
        let below: f64 = want.iter().filter(|w| w.0 < token).map(|w| w.1).sum();
        let upto: f64 = want.iter().filter(|w| w.0 <= token).map(|w| w.1).sum();
        assert!(below - 1e-5 <= u && u <= upto + 1e-5, "{below} {u} {upto}");
    }
}

fn options() -> impl Strategy<Value = SamplingOptions> {
    let filters = (
        prop_oneof![Just(0u32), 1u32..60, Just(5000)],
        prop_oneof![Just(1.0f32), 0.05f32..1.0],
        prop_oneof![Just(1.0f32), 0.05f32..1.0],
        prop_oneof![Just(0.0f32), 0.001f32..1.0],
        prop_oneof![Just(0.0f32), Just(1.0), 0.1f32..3.0],
    );
    let penalties = (
        prop_oneof![Just(1.0f32), 0.5f32..2.0],
        prop_oneof![Just(0u32), 1u32..40, Just(ALL_TOKENS)],
        prop_oneof![Just(0.0f32), -1.0f32..2.0],
        prop_oneof![Just(0.0f32), -1.0f32..2.0],
        prop::option::of(dry()),
    );
    let bias = prop::collection::btree_map(0u32..20, -5.0f32..5.0, 0..3);
    (filters, penalties, bias, any::<u64>()).prop_map(|(f, p, bias, seed)| SamplingOptions {
        logit_bias: bias.into_iter().collect(),
        repeat_penalty: p.0,
        repeat_last_n: p.1,
        frequency_penalty: p.2,
        presence_penalty: p.3,
        dry: p.4,
        top_k: f.0,
        typical_p: f.1,
        top_p: f.2,
        min_p: f.3,
        temperature: f.4,
        seed,
        ..SamplingOptions::neutral()
    })
}

fn dry() -> impl Strategy<Value = Dry> {
    let breakers = prop::collection::vec(prop::collection::vec(0u32..6, 1..4), 0..3);
    (0.1f32..2.0, 1.0f32..2.0, 1u32..4, prop_oneof![Just(0u32), 1u32..40, Just(ALL_TOKENS)], breakers).prop_map(
        |(multiplier, base, allowed_length, last_n, breakers)| Dry {
            multiplier,
            base,
            allowed_length,
            last_n,
            breakers,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn all_stages_together_are_as_defined(
        o in options(),
        x in (20usize..1500).prop_flat_map(logits),
        history in prop::collection::vec(0u32..8, 0..60),
    ) {
        check(&o, &history, &x, None);
    }

    #[test]
    fn filters_alone_are_as_defined(o in options(), seed in any::<u32>(), n in 1usize..4000) {
        let alone = SamplingOptions { temperature: o.temperature, ..SamplingOptions::neutral() };
        let x = smooth(seed, n);
        check(&SamplingOptions { top_k: o.top_k, ..alone.clone() }, &[], &x, None);
        check(&SamplingOptions { typical_p: o.typical_p, ..alone.clone() }, &[], &x, None);
        check(&SamplingOptions { top_p: o.top_p, ..alone.clone() }, &[], &x, None);
        check(&SamplingOptions { min_p: o.min_p, ..alone.clone() }, &[], &x, None);
    }

    #[test]
    fn a_mask_is_kept_whatever_the_options(
        o in options(),
        x in (20usize..200).prop_flat_map(logits),
        history in prop::collection::vec(0u32..8, 0..30),
        mask in prop::collection::vec(prop_oneof![Just(0u32), Just(u32::MAX), any::<u32>()], 0..8),
    ) {
        check(&o, &history, &x, Some(&mask));
    }

    #[test]
    fn dry_is_as_defined(dry in dry(), history in prop::collection::vec(0u32..6, 0..80)) {
        let o = SamplingOptions { dry: Some(dry), ..SamplingOptions::neutral() };
        check(&o, &history, &[0.0; 20], None);
    }

    #[test]
    fn raw_logprobs_are_of_the_model(o in options(), seed in any::<u32>(), history in prop::collection::vec(0u32..8, 0..9)) {
        let x = smooth(seed, 3000);
        let o = SamplingOptions { logprobs: LogprobKind::Raw, top_logprobs: 20, ..o };
        let all: Vec<(u32, f32)> = x.iter().enumerate().map(|(t, x)| (t as u32, *x)).collect();
        let p = naive::softmax(&all, 1.0);
        let pick = sampler(&o, x.len(), &history).pick(Cpu::detect(), &x, 0, 0, None);
        prop_assert!((f64::from(pick.logprob) - p[pick.token as usize].ln()).abs() < 1e-5);
        let mut order: Vec<u32> = (0..x.len() as u32).collect();
        order.sort_by(|a, b| x[*b as usize].total_cmp(&x[*a as usize]).then(a.cmp(b)));
        prop_assert_eq!(pick.top.len(), 20);
        for ((token, logprob), want) in pick.top.iter().zip(&order) {
            prop_assert_eq!(token, want);
            prop_assert!((f64::from(*logprob) - p[*want as usize].ln()).abs() < 1e-5);
        }
    }
}

#[test]
fn ties_go_to_the_lower_id() {
    let n = 2000;
    let mut x = vec![0.0; n];
    for (a, b) in [(1999, 3), (17, 1), (600, 599)] {
        x.fill(-0.0);
        (x[a], x[b]) = (2.0, 2.0);
        for cpu in Cpu::available() {
            let pick = sampler(&SamplingOptions::greedy(), n, &[]).pick(cpu, &x, 0, 0, None);
            assert_eq!(pick.token, a.min(b) as u32);
        }
    }
    // one of the two zeros is not larger than the other
    x.fill(-0.0);
    x[700] = 0.0;
    assert_eq!(sampler(&SamplingOptions::greedy(), n, &[]).pick(Cpu::detect(), &x, 0, 0, None).token, 0);
    let o = SamplingOptions { top_k: 3, ..SamplingOptions::neutral() };
    assert!((0..200).all(|at| sampler(&o, n, &[]).pick(Cpu::detect(), &x, 0, at, None).token < 3));
}

#[test]
fn draws_follow_the_distribution() {
    let x = smooth(9, 1200);
    for o in [SamplingOptions::default(), SamplingOptions::neutral()] {
        let want = naive::distribution(&o, &x);
        let (mut s, n) = (sampler(&o, x.len(), &[]), 60_000);
        let mut counts = vec![0u32; x.len()];
        (0..n).for_each(|at| counts[s.pick(Cpu::detect(), &x, at % 3, at, None).token as usize] += 1);
        // classes of at least 20 expected draws; the rest is one class
        let (mut chi, mut classes, mut rest) = (0.0f64, 0.0f64, (0.0, 0.0));
        let mut class = |got: f64, expected: f64| {
            chi += (got - expected).powi(2) / expected;
            classes += 1.0;
        };
        for (token, p) in &want {
            let (got, expected) = (f64::from(counts[*token as usize]), p * n as f64);
            if expected >= 20.0 { class(got, expected) } else { rest = (rest.0 + got, rest.1 + expected) }
        }
        if rest.1 > 0.0 {
            class(rest.0, rest.1);
        }
        // mean `classes - 1`, variance twice that: five deviations
        let freedom = classes - 1.0;
        assert!(chi < freedom + 5.0 * (2.0 * freedom).sqrt(), "chi-square {chi}, {freedom} degrees of freedom");
    }
}

#[test]
fn a_draw_depends_on_seed_sequence_and_position_alone() {
    let x = smooth(5, 500);
    let o = SamplingOptions { seed: 1, ..SamplingOptions::neutral() };
    let draw =
        |o: &SamplingOptions, sequence, at| sampler(o, 500, &[]).pick(Cpu::detect(), &x, sequence, at, None).token;
    let want: Vec<u32> = (0..50).map(|at| draw(&o, 2, at)).collect();
    let mut one = sampler(&o, 500, &[]);
    let backwards: Vec<u32> = (0..50).rev().map(|at| one.pick(Cpu::detect(), &x, 2, at, None).token).collect();
    assert!(backwards.iter().rev().eq(&want));
    assert!((0..50).any(|at| draw(&o, 3, at) != want[at as usize]));
    let other = SamplingOptions { seed: 2, ..o };
    assert!((0..50).any(|at| draw(&other, 2, at) != want[at as usize]));
    // pinned: the generator is part of the contract
    let pinned =
        [(0, 0, 0), (1, 2, 3), (u64::MAX, u64::MAX, 1 << 40)].map(|(a, b, c)| draw::uniform(a, b, c).to_bits());
    assert_eq!(pinned, [0x3fd4_fe55_41da_a6bc, 0x3fef_ce3f_4e17_6fdc, 0x3fea_e21b_64fa_7cef]);
}

#[test]
fn extreme_logits_and_options_give_a_token() {
    let extremes = [f32::MAX, f32::MIN, 0.0, 1e30, -1e30, f32::MIN_POSITIVE];
    for t in [0.0, f32::MIN_POSITIVE, 1e-6, 1.0, 1e30] {
        let o = SamplingOptions {
            temperature: t,
            repeat_penalty: 1e30,
            repeat_last_n: ALL_TOKENS,
            frequency_penalty: f32::MAX,
            presence_penalty: -f32::MAX,
            logit_bias: vec![(0, f32::MAX), (1, f32::MIN)],
            logprobs: LogprobKind::Final,
            top_logprobs: 3,
            dry: Some(Dry { multiplier: f32::MAX, base: f32::MAX, allowed_length: 1, last_n: 99, breakers: vec![] }),
            ..SamplingOptions::default()
        };
        let mut s = sampler(&o, 6, &[1, 2, 1, 2, 1, 2, 3]);
        for at in 0..50 {
            let pick = s.pick(Cpu::detect(), &extremes, 0, at, None);
            assert!(pick.token < 6 && pick.logprob <= 1e-6, "{pick:?}");
        }
    }
    // an empty mask violates the contract, but a token is still sampled
    let nan = [f32::NAN; 40];
    for o in [SamplingOptions::default(), SamplingOptions::greedy(), SamplingOptions::neutral()] {
        assert!(sampler(&o, 40, &[]).pick(Cpu::detect(), &nan, 0, 0, None).token < 40);
    }
}

#[test]
fn options_are_checked() {
    let ok = SamplingOptions::default;
    let dry = || Dry { multiplier: 1.0, base: 1.5, allowed_length: 2, last_n: 9, breakers: vec![] };
    let wrong = [
        ("temperature", SamplingOptions { temperature: -1.0, ..ok() }),
        ("temperature", SamplingOptions { temperature: f32::NAN, ..ok() }),
        ("temperature", SamplingOptions { temperature: f32::INFINITY, ..ok() }),
        ("top_p", SamplingOptions { top_p: 0.0, ..ok() }),
        ("top_p", SamplingOptions { top_p: 1.1, ..ok() }),
        ("typical_p", SamplingOptions { typical_p: -0.1, ..ok() }),
        ("min_p", SamplingOptions { min_p: 1.5, ..ok() }),
        ("repeat_penalty", SamplingOptions { repeat_penalty: 0.0, ..ok() }),
        ("frequency_penalty", SamplingOptions { frequency_penalty: f32::NAN, ..ok() }),
        ("presence_penalty", SamplingOptions { presence_penalty: f32::INFINITY, ..ok() }),
        ("top_logprobs", SamplingOptions { top_logprobs: 201, ..ok() }),
        ("logit_bias", SamplingOptions { logit_bias: vec![(10, 0.0)], ..ok() }),
        ("logit_bias", SamplingOptions { logit_bias: vec![(1, f32::NEG_INFINITY)], ..ok() }),
        ("logit_bias", SamplingOptions { logit_bias: vec![(1, 0.0), (1, 1.0)], ..ok() }),
        ("dry.base", SamplingOptions { dry: Some(Dry { base: 0.5, ..dry() }), ..ok() }),
        ("dry.multiplier", SamplingOptions { dry: Some(Dry { multiplier: -1.0, ..dry() }), ..ok() }),
        ("dry.allowed_length", SamplingOptions { dry: Some(Dry { allowed_length: 0, ..dry() }), ..ok() }),
        ("dry.breakers", SamplingOptions { dry: Some(Dry { breakers: vec![vec![]], ..dry() }), ..ok() }),
        ("dry.breakers", SamplingOptions { dry: Some(Dry { breakers: vec![vec![1, 10]], ..dry() }), ..ok() }),
    ];
    for (want, o) in wrong {
        match Sampler::new(o, 10) {
            Err(RequestError::Option { name, .. }) => assert_eq!(name, want),
            Err(other) => panic!("{want}: {other}"),
            Ok(_) => panic!("{want} was taken"),
        }
    }
    assert!(Sampler::new(SamplingOptions { dry: Some(dry()), ..ok() }, 10).is_ok());
}
