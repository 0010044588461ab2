//! Circuit breaker of a model: after repeated faults requests are refused at once for a while, rather than each after its
//! time limit. Then single requests try whether the model answers again.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// When a breaker opens.
#[derive(Debug, Clone, Copy)]
pub struct BreakerLimits {
    /// Faults within `window`; 0: never.
    pub faults: usize,
    pub window: Duration,
    /// Time until the first trial.
    pub open: Duration,
}

#[derive(Debug)]
pub struct Breaker {
    limits: BreakerLimits,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// Requests pass; the times of recent faults.
    Closed(VecDeque<Instant>),
    /// Requests are refused until then.
    Open(Instant),
    /// One request was let through at this time.
    HalfOpen(Instant),
}

impl Breaker {
    pub fn new(limits: BreakerLimits) -> Breaker {
        Breaker { limits, state: Mutex::new(State::Closed(VecDeque::new())) }
    }

    /// Whether a request may pass.
    ///
    /// # Errors
    /// The time after which to try again.
    pub fn admit(&self, now: Instant) -> Result<(), Duration> {
        let mut state = self.lock();
        match *state {
            State::Closed(_) => Ok(()),
            State::Open(until) if now < until => Err(until - now),
            // a trial that never ended is followed by another
            State::HalfOpen(since) if now < since + self.limits.open => Err(since + self.limits.open - now),
            State::Open(_) | State::HalfOpen(_) => {
                *state = State::HalfOpen(now);
                Ok(())
            }
        }
    }

    /// Notes a fault: a lost worker, or a request that missed its deadline.
    pub fn fault(&self, now: Instant) {
        let mut state = self.lock();
        match &mut *state {
            State::Closed(faults) => {
                faults.push_back(now);
                faults.retain(|at| now.saturating_duration_since(*at) <= self.limits.window);
                if self.limits.faults > 0 && faults.len() >= self.limits.faults {
                    *state = State::Open(now + self.limits.open);
                }
            }
            State::HalfOpen(_) => *state = State::Open(now + self.limits.open),
            State::Open(_) => {}
        }
    }

    /// Notes a complete answer.
    pub fn success(&self) {
        let mut state = self.lock();
        if let State::HalfOpen(_) = *state {
            *state = State::Closed(VecDeque::new());
        }
    }

    /// `closed`, `open` or `half-open`.
    pub fn name(&self) -> &'static str {
        match *self.lock() {
            State::Closed(_) => "closed",
            State::Open(_) => "open",
            State::HalfOpen(_) => "half-open",
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
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

    proptest! {
        /// The breaker against its definition, with all faults in a list.
        #[test]
        fn breaker_opens_on_repeated_faults_and_closes_after_a_trial(events in events(), limit in 1usize..5) {
            let (window, open) = (Duration::from_secs(10), Duration::from_secs(5));
            let breaker = Breaker::new(BreakerLimits { faults: limit, window, open });
            let mut now = Instant::now();
            let (mut faults, mut refuses_until, mut trial): (Vec<Instant>, _, bool) = (Vec::new(), None, false);
            for event in events {
                match event {
                    Event::Wait(ms) => now += Duration::from_millis(ms),
                    Event::Fault => {
                        breaker.fault(now);
                        if trial {
                            (trial, refuses_until) = (false, Some(now + open));
                        } else if refuses_until.is_none() {
                            faults.push(now);
                            if faults.iter().filter(|at| now - **at <= window).count() >= limit {
                                refuses_until = Some(now + open);
                            }
                        }
                    }
                    Event::Success => {
                        breaker.success();
                        if trial {
                            (trial, refuses_until) = (false, None);
                            faults.clear();
                        }
                    }
                    Event::Request => {
                        let passes = refuses_until.is_none_or(|until| now >= until);
                        prop_assert_eq!(breaker.admit(now).is_ok(), passes);
                        if passes && refuses_until.is_some() {
                            // one trial at a time
                            (trial, refuses_until) = (true, Some(now + open));
                        }
                    }
                }
                let expected = if trial { "half-open" } else if refuses_until.is_some() { "open" } else { "closed" };
                prop_assert_eq!(breaker.name(), expected);
            }
        }
    }

    #[test]
    fn a_breaker_without_a_limit_never_opens() {
        let limits = BreakerLimits { faults: 0, window: Duration::MAX / 4, open: Duration::from_secs(1) };
        let breaker = Breaker::new(limits);
        (0..1000).for_each(|_| breaker.fault(Instant::now()));
        assert_eq!(breaker.admit(Instant::now()), Ok(()));
    }
}
