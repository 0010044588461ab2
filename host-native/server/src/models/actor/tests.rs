//! Any interleaving of commands ends in a state that some serial order of them gives.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use proptest::prelude::{any, prop, prop_assert, prop_oneof, proptest};
use proptest::strategy::{Just, Strategy};
use starling_host::load::ModelOptions;

use super::*;

/// What outlives instances: the gauge of the loaded model, and the model of the sessions.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Gauges {
    loaded: Option<PathBuf>,
    sessions: Option<PathBuf>,
}

type SharedGauges = Arc<Mutex<Gauges>>;

struct Stub {
    source: Option<PathBuf>,
    /// A setting that takes effect at a load.
    n_ctx: Option<usize>,
    /// The settings that take effect at once.
    settings: Mutex<Settings>,
    gauges: SharedGauges,
}

impl Instance for Stub {
    fn set_settings(&self, settings: Settings) {
        *self.settings.lock().unwrap() = settings;
    }

    fn publish(&self) {
        self.gauges.lock().unwrap().loaded.clone_from(&self.source);
    }

    fn withdraw(&self, _: Option<&'static str>) {
        self.gauges.lock().unwrap().loaded = None;
    }

    fn is_busy(&self) -> bool {
        false
    }
}

/// How loads, a test and a drain of one command go.
#[derive(Debug, Clone)]
struct Plan {
    /// Turns that each of them takes.
    turns: usize,
    first_load: bool,
    test: bool,
    /// Loads after the first: of the old model, when a new one failed.
    other_loads: bool,
}

struct StubLoader {
    plan: Plan,
    n_loads: AtomicUsize,
    gauges: SharedGauges,
}

/// Lets other commands have their turns.
async fn turns(n: usize) {
    for _ in 0..n {
        let mut has_waited = false;
        poll_fn(|_| if std::mem::replace(&mut has_waited, true) { Poll::Ready(()) } else { Poll::Pending }).await;
    }
}

impl Loader<Stub, &'static str> for StubLoader {
    async fn load(&self, model: ModelEntry) -> Result<Arc<Stub>, &'static str> {
        turns(self.plan.turns).await;
        let is_first = self.n_loads.fetch_add(1, Ordering::Relaxed) == 0;
        if !(if is_first { self.plan.first_load } else { self.plan.other_loads }) {
            return Err("load");
        }
        Ok(Arc::new(Stub {
            source: model.args.model,
            n_ctx: model.settings.ctx_size,
            settings: Mutex::new(model.settings),
            gauges: Arc::clone(&self.gauges),
        }))
    }

    async fn test(&self, _: &Arc<Stub>) -> Result<(), &'static str> {
        turns(self.plan.turns).await;
        if self.plan.test { Ok(()) } else { Err("test") }
    }

    fn replace(&self, _: Option<Arc<Stub>>, _: &Arc<Stub>) {}

    async fn adopt(&self, new: &Arc<Stub>) {
        turns(self.plan.turns).await;
        self.gauges.lock().unwrap().sessions.clone_from(&new.source);
    }

    async fn drain(&self, old: Arc<Stub>) {
        drop(old);
        turns(self.plan.turns).await;
    }
}

#[derive(Debug, Clone)]
enum Command {
    Load(Plan),
    Swap {
        source: Option<u8>,
        drain: bool,
        plan: Plan,
    },
    Unload,
    UnloadIdle,
    Remove,
    /// A setting that takes effect at once.
    SetQueue(usize),
    /// One that takes effect at the next load.
    SetContext(usize),
    /// Loads the model unless it is loaded, and holds the instance for some turns.
    Request(Plan, usize),
}

struct Model {
    actor: ModelActor<Stub, &'static str>,
    gauges: SharedGauges,
}

/// What a client can see at the end.
#[derive(Debug, Clone, PartialEq)]
struct End {
    state: &'static str,
    /// Source, context and queue limit of the instance.
    instance: Option<(Option<PathBuf>, Option<usize>, usize)>,
    source: Option<PathBuf>,
    n_ctx: Option<usize>,
    queue: usize,
    gauges: Gauges,
}

impl Model {
    fn new() -> Model {
        let args = ModelOptions { model: Some("0".into()), ..ModelOptions::default() };
        let entry = ModelEntry { name: None, args, settings: Settings::default() };
        Model { actor: ModelActor::new(entry), gauges: Arc::default() }
    }

    fn loader(&self, plan: &Plan) -> StubLoader {
        StubLoader { plan: plan.clone(), n_loads: AtomicUsize::new(0), gauges: Arc::clone(&self.gauges) }
    }

    fn set(&self, change: impl FnOnce(&mut Settings)) {
        let mut settings = self.actor.entry().settings.clone();
        change(&mut settings);
        self.actor.set_settings(settings);
    }

    /// Returns whether the command took effect, if it may do nothing.
    async fn run(&self, command: &Command) -> bool {
        match command {
            Command::Load(plan) => drop(self.actor.change(Change::Load, &self.loader(plan)).await),
            Command::Swap { source, drain, plan } => {
                let source = source.map(|n| n.to_string().into());
                let change = Change::Swap { source, drain: *drain };
                drop(self.actor.change(change, &self.loader(plan)).await);
            }
            Command::Unload => drop(self.actor.unload("request").await),
            Command::UnloadIdle => return self.actor.unload_idle("idle"),
            Command::Remove => drop(self.actor.remove("request").await),
            Command::SetQueue(n) => self.set(|settings| settings.queue_high = *n),
            Command::SetContext(n) => self.set(|settings| settings.ctx_size = Some(*n)),
            Command::Request(plan, held) => {
                let instance = match self.actor.instance() {
                    Some(instance) => Some(instance),
                    None => self.actor.change(Change::Load, &self.loader(plan)).await.ok(),
                };
                turns(*held).await;
                drop(instance);
            }
        }
        true
    }

    fn end(&self) -> End {
        let entry = self.actor.entry();
        let instance = self
            .actor
            .instance()
            .map(|instance| (instance.source.clone(), instance.n_ctx, instance.settings.lock().unwrap().queue_high));
        End {
            state: self.actor.state().name(),
            instance,
            source: entry.args.model.clone(),
            n_ctx: entry.settings.ctx_size,
            queue: entry.settings.queue_high,
            gauges: self.gauges.lock().unwrap().clone(),
        }
    }
}

/// Runs all futures to their end; `order` says whose turn is next.
fn interleave(mut futures: Vec<Pin<Box<dyn Future<Output = bool> + '_>>>, order: &[u16]) -> Vec<bool> {
    let mut context = Context::from_waker(Waker::noop());
    let mut results = vec![None; futures.len()];
    let mut order = order.iter().cycle();
    while results.iter().any(Option::is_none) {
        let left: Vec<usize> = (0..futures.len()).filter(|i| results[*i].is_none()).collect();
        let i = left[usize::from(*order.next().unwrap()) % left.len()];
        if let Poll::Ready(result) = futures[i].as_mut().poll(&mut context) {
            results[i] = Some(result);
        }
    }
    results.into_iter().flatten().collect()
}

fn one_by_one(commands: &[&Command]) -> End {
    let model = Model::new();
    for command in commands {
        interleave(vec![Box::pin(model.run(command))], &[0]);
    }
    model.end()
}

/// All orders of the commands.
fn orders<'a>(commands: &[&'a Command]) -> Vec<Vec<&'a Command>> {
    if commands.is_empty() {
        return vec![Vec::new()];
    }
    let first = |i: usize| {
        let mut rest = commands.to_vec();
        let command = rest.remove(i);
        orders(&rest).into_iter().map(move |order| [vec![command], order].concat())
    };
    (0..commands.len()).flat_map(first).collect()
}

fn plans() -> impl Strategy<Value = Plan> {
    let mostly = || prop::bool::weighted(0.7);
    (0usize..4, mostly(), mostly(), mostly()).prop_map(|(turns, first_load, test, other_loads)| Plan {
        turns,
        first_load,
        test,
        other_loads,
    })
}

fn commands() -> impl Strategy<Value = Command> {
    let swap = (prop::option::of(1u8..4), any::<bool>(), plans());
    prop_oneof![
        2 => plans().prop_map(Command::Load),
        4 => swap.prop_map(|(source, drain, plan)| Command::Swap { source, drain, plan }),
        1 => Just(Command::Unload),
        1 => Just(Command::UnloadIdle),
        1 => Just(Command::Remove),
        2 => (1000usize..2000).prop_map(Command::SetQueue),
        2 => (1usize..1000).prop_map(Command::SetContext),
        2 => (plans(), 0usize..4).prop_map(|(plan, held)| Command::Request(plan, held)),
    ]
}

proptest! {
    #[test]
    fn the_end_is_that_of_some_serial_order(
        commands in prop::collection::vec(commands(), 1..6),
        order in prop::collection::vec(any::<u16>(), 60),
    ) {
        let model = Model::new();
        let run = |command| Box::pin(model.run(command)) as Pin<Box<dyn Future<Output = bool>>>;
        let results = interleave(commands.iter().map(run).collect(), &order);
        let end = model.end();
        // an idle model may be in use at the time: then nothing happens
        let done: Vec<&Command> = commands.iter().zip(&results).filter(|(_, done)| **done).map(|(c, _)| c).collect();
        let serial: Vec<End> = orders(&done).iter().map(|order| one_by_one(order)).collect();
        prop_assert!(serial.contains(&end), "{end:?} is none of {serial:?}");
    }
}

#[test]
fn settings_that_change_during_a_swap_are_those_of_the_new_instance() {
    let plan = Plan { turns: 2, first_load: true, test: true, other_loads: true };
    let (model, swap) = (Model::new(), Command::Swap { source: Some(1), drain: false, plan });
    let mut swapping = Box::pin(model.run(&swap));
    let mut context = Context::from_waker(Waker::noop());
    assert!(swapping.as_mut().poll(&mut context).is_pending());
    model.set(|settings| settings.queue_high = 7);
    while swapping.as_mut().poll(&mut context).is_pending() {}
    drop(swapping);
    let end = model.end();
    assert_eq!((end.instance, end.queue), (Some((Some("1".into()), None, 7)), 7));
}

#[test]
fn a_change_that_is_dropped_leaves_the_model_unloaded() {
    let plan = Plan { turns: 2, first_load: true, test: true, other_loads: true };
    let (model, load) = (Model::new(), Command::Load(plan));
    let mut loading = Box::pin(model.run(&load));
    assert!(loading.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(model.end().state, "loading");
    drop(loading);
    assert_eq!(model.end().state, "unloaded");
    assert_eq!(one_by_one(&[&load]).state, "loaded");
}
