//! What the workers of a model share, and the engine and embedder of each.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use starling::embed::{Embedder, EmbedderOptions, Pooling};
use starling::engine::{Engine, EngineOptions, Request};
use starling::error::{DraftModelError, MemoryError};
use starling::kernels::Cpu;
use starling::model::Model;

use super::cores::Threads;
use super::disk_tier::DiskTier;
use super::dispatch::Dispatcher;
use crate::config::Settings;
use crate::observe::failures::SharedFailures;
use crate::observe::model_metrics::InstanceMetrics;
use crate::schedule::breaker::Breaker;
use crate::schedule::queue::Queue;

/// What workers of a model share.
#[derive(Clone)]
pub struct Shared {
    pub name: Arc<str>,
    pub model: Arc<Model>,
    /// Drafts for the model.
    pub draft: Option<Arc<Model>>,
    /// `None` for encoders, which only embed.
    pub engine: Option<EngineOptions>,
    pub embedder: EmbedderOptions,
    pub pooling: Pooling,
    pub cpu: Cpu,
    pub queue: Arc<Queue>,
    pub metrics: Arc<InstanceMetrics>,
    pub dispatcher: Arc<Dispatcher>,
    pub failures: SharedFailures,
    pub batch: Arc<BatchLimits>,
    pub breaker: Arc<Breaker>,
    pub stall_timeout: Duration,
    /// KV pages on disk.
    pub disk: Option<Arc<DiskTier>>,
}

impl Shared {
    /// Sequences that run at once; none of a model that only embeds.
    pub fn max_seqs(&self) -> usize {
        self.engine.map_or(0, |options| options.max_seqs.min(self.batch.max_seqs()))
    }

    /// An engine with its draft model.
    pub fn new_engine(&self, threads: &Threads, options: EngineOptions) -> Result<Engine, MemoryError> {
        let mut engine = Engine::new(Arc::clone(&self.model), threads, options)?;
        if let Some(draft) = &self.draft {
            match engine.set_draft_model(Arc::clone(draft), threads) {
                Ok(()) => {}
                Err(DraftModelError::Memory(e)) => return Err(e),
                // checked when the draft model was loaded
                Err(e) => tracing::error!(model = &*self.name, "no drafts: {e}"),
            }
        }
        Ok(engine)
    }
}

/// Maximum sequences and tokens of a batch, and tokens of one with decode rows; they change while workers run.
#[derive(Debug)]
pub struct BatchLimits {
    max_seqs: AtomicUsize,
    batch_tokens: AtomicUsize,
    prefill_chunk: AtomicUsize,
    /// Divisor of the tokens under memory pressure.
    divisor: AtomicUsize,
}

impl BatchLimits {
    pub fn new(settings: &Settings) -> BatchLimits {
        let [max_seqs, batch_tokens, prefill_chunk, divisor] = [0, 0, 0, 1].map(AtomicUsize::new);
        let limits = BatchLimits { max_seqs, batch_tokens, prefill_chunk, divisor };
        limits.set(settings);
        limits
    }

    pub fn set(&self, settings: &Settings) {
        let (batch_tokens, prefill_chunk) = (settings.batch_tokens.max(settings.max_seqs), settings.prefill_chunk);
        self.max_seqs.store(settings.max_seqs, Ordering::Relaxed);
        self.batch_tokens.store(batch_tokens, Ordering::Relaxed);
        self.prefill_chunk.store(prefill_chunk, Ordering::Relaxed);
    }

    pub fn max_seqs(&self) -> usize {
        self.max_seqs.load(Ordering::Relaxed)
    }

    /// Divides the tokens under memory pressure.
    pub fn set_divisor(&self, divisor: usize) {
        self.divisor.store(divisor.max(1), Ordering::Relaxed);
    }

    pub fn apply(&self, engine: &mut Engine) {
        let [batch_tokens, prefill_chunk] = self.current();
        engine.set_batch_limits(batch_tokens, prefill_chunk);
    }

    /// Maximum tokens of a batch, and of one with decode rows.
    pub fn current(&self) -> [usize; 2] {
        let divisor = self.divisor.load(Ordering::Relaxed);
        [&self.batch_tokens, &self.prefill_chunk].map(|limit| (limit.load(Ordering::Relaxed) / divisor).max(1))
    }
}

/// An engine, and the embedder beside it.
pub struct Engines {
    /// `None` for encoders.
    pub engine: Option<Engine>,
    pub embedder: Embedder,
}

impl Engines {
    pub fn new(shared: &Shared, threads: &Threads) -> Result<Engines, MemoryError> {
        let engine = shared.engine.map(|options| shared.new_engine(threads, options)).transpose()?;
        let embedder = Embedder::new(Arc::clone(&shared.model), threads, shared.embedder)?;
        Ok(Engines { engine, embedder })
    }

    pub fn active(&self) -> usize {
        self.engine.as_ref().map_or(0, Engine::active)
    }

    /// Generates a token, to see whether the engine works.
    pub fn probe(&mut self, cpu: Cpu, threads: &Threads) {
        let Some(engine) = &mut self.engine else { return };
        let request = Request { max_tokens: Some(1), ignore_eos: true, ..Request::new(vec![0]) };
        if engine.submit(request).is_ok() {
            while !engine.is_idle() {
                threads.run(|pool| engine.step(cpu, pool, &mut |_| {}));
            }
        }
    }
}
