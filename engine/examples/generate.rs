//! Generates text and prints it as it is sampled: `generate [MODEL.gguf] [PROMPT]`.
#![expect(clippy::std_instead_of_core, reason = "a program, not the engine")]

use std::error::Error;
use std::io::{self, Write};
use std::num::NonZero;
use std::sync::Arc;
use std::{env, fs, thread};

use starling::engine::{Engine, EngineOptions, Event, Request};
use starling::kernels::Cpu;
use starling::kernels::attention::KvType;
use starling::model::Model;
use starling::pool::Pool;
use starling::tokenizer::EncodeOptions;

const BUNDLED_MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/starling-tiny/starling-tiny-q8_0.gguf");
const MAX_CONTEXT: usize = 4096;
const MAX_TOKENS: usize = 200;

/// A pool that spawns its threads for each operation. A server would keep them, as `starling::kernels::standby` does.
struct ScopedThreads(usize);

impl Pool for ScopedThreads {
    fn threads(&self) -> usize {
        self.0
    }

    fn broadcast(&self, work: &(dyn Fn() + Sync)) {
        thread::scope(|scope| {
            for _ in 1..self.0 {
                scope.spawn(work);
            }
            work();
        });
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let path = args.next().unwrap_or_else(|| BUNDLED_MODEL.into());
    let prompt = args.next().unwrap_or_else(|| "Once upon a time".into());

    let pool = ScopedThreads(thread::available_parallelism().map_or(1, NonZero::get));
    let model = Arc::new(Model::load(&fs::read(path)?, &pool)?);
    let (kv_type, n_ctx) = (KvType::F16, model.config.n_ctx_train.min(MAX_CONTEXT));
    let options = EngineOptions {
        kv_type,
        n_ctx,
        max_seqs: 1,
        batch_tokens: 256,
        prefill_chunk: 256,
        draft_rows: 0,
        kv_bytes: EngineOptions::kv_bytes_of(&model, kv_type, n_ctx),
        snapshots: Default::default(),
        model_sha256: None,
    };
    let mut engine = Engine::new(Arc::clone(&model), &pool, options)?;

    let tokens = model.tokenizer.encode(&prompt, EncodeOptions { add_special: true, parse_special: false });
    let max_tokens = MAX_TOKENS.min((n_ctx + 1).saturating_sub(tokens.len()));
    engine.submit(Request { max_tokens: Some(max_tokens), ..Request::new(tokens) })?;

    let mut out = io::stdout();
    write!(out, "{prompt}")?;
    let cpu = Cpu::detect();
    while !engine.is_idle() {
        let mut written = Ok(());
        engine.step(cpu, &pool, &mut |event| match event {
            Event::Token { text, .. } if written.is_ok() => {
                written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
            }
            Event::Done { text, reason, n_tokens, .. } if written.is_ok() => {
                written = writeln!(out, "{text}\n[{n_tokens} tokens, finish reason: {}]", reason.name());
            }
            _ => {}
        });
        written?;
    }
    Ok(())
}
