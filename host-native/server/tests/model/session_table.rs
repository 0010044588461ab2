//! The session table under concurrent turns, close and expiry.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use shuttle::thread;

use crate::state::sessions::{Conversation, History, SessionError, SessionLimits, Sessions};
use crate::sync::{Arc, Mutex};

const LIMITS: SessionLimits =
    SessionLimits { ttl: Duration::from_secs(10), count: 2, bytes: 1 << 20, total_bytes: 1 << 20 };

/// Each turn appends its own token. A turn that begins after a close must not see a token from before it.
pub(crate) fn a_turn_sees_the_turns_since_the_last_close_and_no_others() {
    let case = || {
        let sessions = Arc::new(Sessions::new(LIMITS, None));
        let name: std::sync::Arc<str> = "x".into();
        // tokens of closed sessions
        let closed = Arc::new(Mutex::new(BTreeSet::new()));
        let turns = (1..=3).map(|token| {
            let (sessions, name, closed) = (Arc::clone(&sessions), name.clone(), Arc::clone(&closed));
            thread::spawn(move || {
                let closed_before = closed.lock().expect("no panic").clone();
                let now = Instant::now();
                let turn = match sessions.begin(&name, &name, 0, now) {
                    Ok((turn, _)) => turn,
                    Err(e) => return assert_eq!(e, SessionError::Busy),
                };
                let mut tokens = turn.conversation.tokens.to_vec();
                assert!(tokens.iter().all(|token| !closed_before.contains(token)), "{tokens:?} {closed_before:?}");
                // exclusive: another turn gets `Busy`
                tokens.push(token);
                thread::yield_now();
                let conversation = Conversation { tokens: Arc::new(tokens), history: History::Text };
                for evicted in turn.end(conversation) {
                    closed.lock().expect("no panic").extend(evicted.tokens);
                }
            })
        });
        let turns: Vec<_> = turns.collect();
        let closer = {
            let (sessions, name, closed) = (Arc::clone(&sessions), name.clone(), Arc::clone(&closed));
            thread::spawn(move || {
                if let Some(Some(evicted)) = sessions.close(&name, &name) {
                    closed.lock().expect("no panic").extend(evicted.tokens);
                }
                sessions.expire(Instant::now());
            })
        };
        turns.into_iter().for_each(|turn| turn.join().expect("no panic"));
        closer.join().expect("no panic");
        // the session is idle, and none of its tokens was closed
        if let Ok((turn, _)) = sessions.begin(&name, &name, 0, Instant::now()) {
            let closed = closed.lock().expect("no panic");
            assert!(turn.conversation.tokens.iter().all(|token| !closed.contains(token)));
        } else {
            panic!("a session is busy with no turn in progress");
        }
    };
    crate::check(case);
}
