//! The request queue under concurrent handlers, which enqueue and cancel, and the engine thread.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use shuttle::thread;

use crate::schedule::handoff::{Queue, Shutdown, Waiting};
use crate::schedule::scheduler::{Flow, Limits, Priority};
use crate::sync::{Arc, Mutex};

const LIMITS: Limits = Limits { high: 3, low: 1, tenant_requests: 0, tenant_tokens: 0 };

/// Each accepted request is taken or cancelled exactly once, and the engine thread misses no wake-up.
pub(crate) fn a_request_is_taken_or_cancelled_once_and_the_worker_wakes() {
    crate::check(|| {
        let queue: Arc<Queue<u32, u32>> = Arc::new(Queue::new(LIMITS, 1));
        let (accepted, taken, kept) =
            (Arc::new(Mutex::new(BTreeSet::new())), Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
        let handlers = (0..3u32).map(|i| {
            let (queue, accepted, kept) = (Arc::clone(&queue), Arc::clone(&accepted), Arc::clone(&kept));
            thread::spawn(move || {
                let session = (i > 0).then(|| "s".into());
                let flow =
                    Flow { tenant: "t".into(), share: 1, session, priority: Priority::Normal, rank: Priority::Normal };
                let deadline = Instant::now() + Duration::from_secs(3600);
                let Ok(ticket) = queue.generate(&flow, 1, deadline, vec![2 * i, 2 * i + 1]) else { return };
                accepted.lock().expect("no panic").extend([2 * i, 2 * i + 1]);
                if i == 1 {
                    drop(ticket);
                } else {
                    kept.lock().expect("no panic").push(ticket);
                }
            })
        });
        let handlers: Vec<_> = handlers.collect();
        let worker = {
            let (queue, taken) = (Arc::clone(&queue), Arc::clone(&taken));
            thread::spawn(move || {
                loop {
                    let mut waiting = queue.lock();
                    let version = waiting.version;
                    let Waiting { prompts, cancelled_prompts, shutdown, .. } = &mut *waiting;
                    let removed: Vec<u32> = std::mem::take(cancelled_prompts)
                        .into_iter()
                        .flatten()
                        .filter_map(|id| prompts.remove(id))
                        .collect();
                    assert!(removed.iter().all(|job| job / 2 == 1), "{removed:?}");
                    taken.lock().expect("no panic").extend(removed);
                    if let Some(next) = prompts.take(|_| true) {
                        prompts.release(&next.tenant);
                        taken.lock().expect("no panic").push(next.job);
                        continue;
                    }
                    if *shutdown != Shutdown::None {
                        return;
                    }
                    drop(waiting);
                    // shuttle ignores timeouts: a lost wake-up is a deadlock
                    queue.wait(version, Duration::from_secs(1));
                }
            })
        };
        handlers.into_iter().for_each(|handler| handler.join().expect("no panic"));
        queue.shut_down(Shutdown::Draining);
        worker.join().expect("no panic");
        let mut taken = taken.lock().expect("no panic").clone();
        taken.sort_unstable();
        assert_eq!(taken, accepted.lock().expect("no panic").iter().copied().collect::<Vec<_>>());
    });
}
