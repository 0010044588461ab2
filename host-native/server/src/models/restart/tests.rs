//! Faults of requests: each ends its own request, and no other.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use proptest::prelude::{ProptestConfig, any, prop, prop_assert_eq, proptest};
use proptest::strategy::Strategy;
use starling::engine::Request;
use starling::sampler::{Constraint, ConstraintError, SamplingOptions};
use starling_host::load::ModelOptions;
use tokio::runtime::{Builder, Runtime};

use super::*;
use crate::config::value::Bytes;
use crate::config::{ModelEntry, Settings};
use crate::models::budget::MemoryBudget;
use crate::models::entry::Entry;
use crate::models::instance::ModelInstance;
use crate::models::loading::{self, Resources};
use crate::observe::metrics::Metrics;
use crate::observe::trace::{Stages, Trace};
use crate::schedule::queue::{Deadlines, EngineUpdates, Progress, SequenceGroup, updates};
use crate::schedule::scheduler::{Flow, Priority};

/// Allows every token, and panics where it is asked for the tokens after the first `left`.
#[derive(Debug, Clone)]
struct Poison {
    left: usize,
    /// Whether the message is another one each time.
    varies: bool,
}

impl Constraint for Poison {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }

    fn allow(&mut self, mask: &mut [u32]) -> Result<bool, ConstraintError> {
        if self.left == 0 {
            let n = if self.varies { starling_host::clock::random() } else { 0 };
            std::panic::resume_unwind(Box::new(format!("poison {n}")));
        }
        mask.fill(u32::MAX);
        Ok(true)
    }

    fn accept(&mut self, _: u32) -> Result<bool, ConstraintError> {
        self.left -= 1;
        Ok(false)
    }
}

/// A request, and after how many tokens it is a fault, if it is one.
#[derive(Debug, Clone)]
struct Case {
    tokens: Vec<u32>,
    max_tokens: usize,
    seed: u64,
    poison: Option<(usize, bool)>,
}

impl Case {
    fn is_poison(&self) -> bool {
        self.poison.is_some_and(|(after, _)| after < self.max_tokens)
    }

    fn job(&self) -> (Job, EngineUpdates) {
        let left = self.poison.map_or(usize::MAX, |(after, _)| after);
        let constraint = Poison { left, varies: self.poison.is_some_and(|(_, varies)| varies) };
        let request = Request {
            sampling: SamplingOptions { temperature: 1.0, seed: self.seed, ..SamplingOptions::default() },
            max_tokens: Some(self.max_tokens),
            ignore_eos: true,
            constraint: Some(Arc::new(constraint)),
            ..Request::new(self.tokens.clone())
        };
        let (to, updates) = updates(1, self.max_tokens, Arc::default());
        let time = Duration::from_secs(120);
        let times = Deadlines { arrival: Instant::now(), queue: time, total: time, partial: false, is_own: false };
        let job = Job {
            group: Arc::new(SequenceGroup::new(request)),
            sequence: 0,
            refused: None,
            is_looked_up: true,
            progress: Progress::default(),
            request_id: "test".into(),
            index: 0,
            to,
            times,
            trace: Trace::default(),
            stages: Stages::new(),
        };
        (job, updates)
    }
}

fn cases(n: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Case>> {
    let poison = prop::option::weighted(0.2, (0usize..10, any::<bool>()));
    let case = (prop::collection::vec(10u32..200, 1..40), 1usize..10, any::<u64>(), poison);
    let case = case.prop_map(|(tokens, max_tokens, seed, poison)| Case { tokens, max_tokens, seed, poison });
    prop::collection::vec(case, n)
}

fn instance(n_workers: usize) -> Arc<ModelInstance> {
    let settings = Settings {
        workers: n_workers,
        max_seqs: 16,
        kv_memory: Some(Bytes(16 << 20)),
        draft_max: 0,
        ..Settings::default()
    };
    let args = ModelOptions { threads: Some(1), ..ModelOptions::default() };
    let model = ModelEntry { name: Some("m".into()), args, settings };
    let metrics = Arc::new(Metrics::new(model.settings.metrics_compat));
    let budget = Arc::new(MemoryBudget::new(1 << 30));
    let resources = Resources::new(budget, metrics, Arc::default(), (None, None), Some(1));
    let lease = resources.budget.lease(1 << 28).expect("memory");
    let entry = Entry::new(model.clone(), &resources);
    loading::load(&model, (&model.args, None), entry.identity(), &resources, lease).expect("the bundled model")
}

/// Sends all requests at once. The tokens of each, or why it failed.
async fn ask(instance: &ModelInstance, cases: &[Case]) -> Vec<Result<(Vec<u32>, String), Failed>> {
    let flow = Flow { tenant: "t".into(), share: 1, session: None, priority: Priority::Normal, rank: Priority::Normal };
    let send = |case: &Case| {
        let (job, mut updates) = case.job();
        let deadline = job.times.deadline();
        updates.hold(instance.queue.generate(&flow, 50, deadline, vec![job]).expect("room in the queue"));
        updates
    };
    let all: Vec<EngineUpdates> = cases.iter().map(send).collect();
    let mut results = Vec::new();
    for mut updates in all {
        let (mut tokens, mut answer) = (Vec::new(), String::new());
        results.push(loop {
            match updates.recv().await.expect("an end").1 {
                Update::Token { token, text, .. } => {
                    tokens.push(token);
                    answer += &text;
                }
                Update::Done { text, .. } => break Ok((tokens, answer + &text)),
                Update::Failed(failed) => break Err(failed),
                _ => {}
            }
        });
    }
    results
}

/// Models with one and two workers, for all cases.
static MODELS: LazyLock<(Runtime, BTreeMap<usize, Arc<ModelInstance>>)> = LazyLock::new(|| {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    (runtime, [1, 2].map(|n| (n, instance(n))).into())
});

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 20, ..ProptestConfig::default() })]

    #[test]
    fn a_fault_ends_the_request_that_causes_it_and_no_other(cases in cases(2..17), n_workers in 1usize..3) {
        let (runtime, models) = &*MODELS;
        let healthy: Vec<Case> = cases.iter().map(|case| Case { poison: None, ..case.clone() }).collect();
        let alone = |case: &Case| runtime.block_on(ask(&models[&1], std::slice::from_ref(case))).remove(0);
        let expected = cases.iter().zip(&healthy).map(|(case, healthy)| {
            if case.is_poison() { Err(Failed::Worker) } else { alone(healthy) }
        });
        let expected: Vec<_> = expected.collect();
        let found = runtime.block_on(ask(&models[&n_workers], &cases));
        prop_assert_eq!(found, expected);
    }
}
