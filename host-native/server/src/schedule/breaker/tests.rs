use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone, Copy)]
enum Event {
    Wait(u64),
    Fault,
    Success,
    Request,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        (1u64..4000).prop_map(Event::Wait),
        Just(Event::Fault),
        Just(Event::Success),
        Just(Event::Request),
    ];
    prop::collection::vec(event, 0..80)
}

fn tenant(name: &str) -> Arc<str> {
    name.into()
}

fn breaker(faults: usize) -> Arc<Breaker> {
    let (window, open) = (Duration::from_secs(10), Duration::from_secs(5));
    Arc::new(Breaker::new(BreakerLimits { faults, window, open }))
}

proptest! {
    /// The breaker of one tenant against its definition, with all faults in a list.
    #[test]
    fn breaker_opens_on_repeated_faults_and_closes_after_a_trial(
        events in events(), limit in 1usize..5, is_worker in any::<bool>(),
    ) {
        let (window, open) = (Duration::from_secs(10), Duration::from_secs(5));
        let (breaker, a) = (breaker(limit), tenant("a"));
        let mut now = Instant::now();
        let (mut faults, mut refuses_until, mut trial): (Vec<Instant>, _, bool) = (Vec::new(), None, false);
        let mut trials = Vec::new();
        for event in events {
            match event {
                Event::Wait(ms) => now += Duration::from_millis(ms),
                Event::Fault => {
                    if is_worker { breaker.model_fault(vec![a.clone()], now) } else { breaker.deadline_missed(&a, now) }
                    faults.push(now);
                    let is_over = refuses_until.is_some_and(|until| now >= until);
                    let n = faults.iter().filter(|at| now - **at <= window).count();
                    if trial || is_over || refuses_until.is_none() && n >= limit {
                        (trial, refuses_until) = (false, Some(now + open));
                    }
                }
                Event::Success => {
                    breaker.success(&a);
                    if trial {
                        (trial, refuses_until) = (false, None);
                        faults.clear();
                    }
                }
                Event::Request => {
                    let passes = refuses_until.is_none_or(|until| now >= until);
                    let admitted = breaker.admit(&a, now);
                    prop_assert_eq!(admitted.is_ok(), passes);
                    if passes && refuses_until.is_some() {
                        // one trial at a time
                        (trial, refuses_until) = (true, Some(now + open));
                        trials.push(admitted);
                    }
                }
            }
            let expected = if trial { "half-open" } else if refuses_until.is_some() { "open" } else { "closed" };
            prop_assert_eq!(breaker.name(), expected);
        }
    }

    /// Whatever one tenant does, and whoever else has requests at the time, others are let through.
    #[test]
    fn the_faults_of_one_tenant_leave_others_alone(
        faults in prop::collection::vec((any::<bool>(), prop::option::of(0usize..8)), 1..60),
    ) {
        let (breaker, a) = (breaker(3), tenant("a"));
        let (now, mut n_with_other) = (Instant::now(), [0; 8]);
        for (is_worker, other) in &faults {
            let neighbour = other.map(|i| tenant(&format!("b{i}")));
            match (is_worker, other) {
                (false, _) => breaker.deadline_missed(&a, now),
                (true, Some(i)) => {
                    n_with_other[*i] += 1;
                    breaker.model_fault([a.clone()].into_iter().chain(neighbour).collect(), now);
                }
                (true, None) => breaker.model_fault(vec![a.clone()], now),
            }
        }
        prop_assert!(breaker.admit(&tenant("c"), now).is_ok());
        prop_assert!(breaker.check(now).is_ok());
        let n_worker = faults.iter().filter(|(is_worker, _)| *is_worker).count();
        // a neighbour of some of the faults, but not of all
        for (i, n) in n_with_other.iter().enumerate().filter(|(_, n)| **n < n_worker) {
            if faults.iter().position(|(worker, _)| *worker).is_some_and(|first| faults[first].1 != Some(i)) {
                prop_assert!(breaker.admit(&tenant(&format!("b{i}")), now).is_ok(), "b{i} with {n} of {n_worker}");
            }
        }
        prop_assert_eq!(breaker.admit(&a, now).is_err(), faults.len() >= 3);
    }
}

#[test]
fn faults_without_a_common_tenant_are_the_models() {
    let (breaker, now) = (breaker(2), Instant::now());
    for name in ["a", "b", "a", "b"] {
        assert!(breaker.check(now).is_ok());
        breaker.model_fault(vec![tenant(name)], now);
    }
    assert!(breaker.admit(&tenant("c"), now).is_err() && breaker.check(now).is_err());
    // missed deadlines of many tenants are not
    let breaker = super::tests::breaker(2);
    for i in 0..100 {
        breaker.deadline_missed(&tenant(&i.to_string()), now);
    }
    assert!(breaker.admit(&tenant("c"), now).is_ok());
    // a load that fails is of no tenant
    breaker.model_fault(Vec::new(), now);
    breaker.model_fault(Vec::new(), now);
    assert!(breaker.check(now).is_err());
}

#[test]
fn a_trial_that_ends_without_an_answer_is_given_back() {
    let (breaker, a) = (breaker(1), tenant("a"));
    let start = Instant::now();
    let later = start.checked_sub(Duration::from_secs(60)).unwrap_or(start);
    breaker.deadline_missed(&a, later);
    for _ in 0..100 {
        let trial = breaker.admit(&a, Instant::now()).expect("the circuit may be tried");
        assert!(trial.is_some() && breaker.admit(&a, Instant::now()).is_err());
        drop(trial);
    }
    let trial = breaker.admit(&a, Instant::now()).expect("the circuit may be tried");
    breaker.success(&a);
    drop(trial);
    assert!(matches!(breaker.admit(&a, Instant::now()), Ok(None)));
    assert_eq!(breaker.name(), "closed");
}

#[test]
fn the_memory_of_a_breaker_is_bounded() {
    let (breaker, now) = (breaker(1), Instant::now());
    for i in 0..2 * MAX_KEPT {
        breaker.deadline_missed(&tenant(&i.to_string()), now);
    }
    let state = breaker.lock();
    assert_eq!((state.faults.len(), state.circuits.len()), (MAX_KEPT, MAX_KEPT));
}

#[test]
fn a_breaker_without_a_limit_never_opens() {
    let limits = BreakerLimits { faults: 0, window: Duration::MAX / 4, open: Duration::from_secs(1) };
    let breaker = Arc::new(Breaker::new(limits));
    (0..1000).for_each(|_| breaker.model_fault(vec![tenant("a")], Instant::now()));
    assert!(matches!(breaker.admit(&tenant("a"), Instant::now()), Ok(None)));
}
