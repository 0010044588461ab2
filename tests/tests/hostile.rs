//! Fuzzed model files: each is refused or runs; none panics or allocates much memory.

use std::sync::Arc;

use proptest::prelude::*;
use starling::engine::{Engine, EngineOptions, Request};
use starling::error::MemoryError;
use starling::gguf::{Gguf, Value};
use starling::kernels::Cpu;
use starling::kernels::attention::KvType;
use starling::model::{Model, ScratchSize};
use starling::pool::Inline;
use starling_tests::reference::{read, whole, written};

const FILES: [&str; 10] = [
    "gemma2-swa16-f16",
    "gpt2-4h-f16",
    "granite-scales-f16",
    "llama-yarn-f16",
    "mixtral-quant-q4_0",
    "nomic-bert-mean-f16",
    "phi3-longrope-short-f16",
    "qwen3-embedding-last-f16",
    "smollm3-nope-f16",
    "starcoder2-gqa-f16",
];

fn file(i: usize) -> Vec<u8> {
    read(&format!("{}.gguf", FILES[i]))
}

/// Loads the model and, if it loads, generates from a prompt.
fn run(file: &[u8]) {
    let Ok(model) = Model::load(file, &Inline) else { return };
    let model = Arc::new(model);
    let kv_bytes = EngineOptions::kv_bytes_of(&model, KvType::F16, 32);
    let options = EngineOptions {
        kv_type: KvType::F16,
        n_ctx: 32,
        max_seqs: 1,
        batch_tokens: 8,
        prefill_chunk: 8,
        draft_rows: 0,
        kv_bytes,
        snapshots: Default::default(),
        model_sha256: None,
    };
    let Ok(mut engine) = Engine::new(Arc::clone(&model), &Inline, options) else { return };
    let n_vocab = model.config.n_vocab as u32;
    let tokens = (0..12).map(|i| i % n_vocab).collect();
    let request = Request { max_tokens: Some(4), ..Request::new(tokens) };
    if engine.submit(request).is_ok() {
        for _ in 0..16 {
            engine.step(Cpu::detect(), &Inline, &mut |_| {});
        }
    }
}

/// A number that replaces the value of a key.
fn changed<'a>(value: &Value<'a>, to: i64) -> Option<Value<'a>> {
    Some(match value {
        Value::U8(_) => Value::U8(to as u8),
        Value::I8(_) => Value::I8(to as i8),
        Value::U16(_) => Value::U16(to as u16),
        Value::I16(_) => Value::I16(to as i16),
        Value::U32(_) => Value::U32(to as u32),
        Value::I32(_) => Value::I32(to as i32),
        Value::U64(_) => Value::U64(to as u64),
        Value::I64(_) => Value::I64(to),
        Value::F32(_) => Value::F32(f32::from_bits(to as u32)),
        Value::F64(_) => Value::F64(f64::from_bits(to as u64)),
        Value::Bool(_) => Value::Bool(to & 1 == 1),
        _ => return None,
    })
}

/// The file with changed or missing metadata.
fn with_numbers(bytes: &[u8], changes: &[(prop::sample::Index, Option<i64>)]) -> Vec<u8> {
    let gguf = Gguf::parse(bytes).expect("a model");
    let n = gguf.metadata().len();
    let metadata: Vec<_> = gguf
        .metadata()
        .iter()
        .enumerate()
        .filter_map(|(i, &(key, value))| match changes.iter().find(|(at, _)| at.index(n) == i) {
            Some((_, None)) => None,
            Some((_, Some(to))) => Some((key, changed(&value, *to).unwrap_or(value))),
            None => Some((key, value)),
        })
        .collect();
    written(&gguf, &metadata, &whole)
}

/// The limit is exact, and the error reports the bytes needed without allocating them.
#[test]
fn working_memory_has_a_limit() {
    for (i, name) in FILES.iter().enumerate() {
        let mut model = Model::load(&file(i), &Inline).expect("a model");
        let mut limited = |limit, rows| {
            model.max_scratch_bytes = limit;
            model.scratch(&Inline, KvType::F16, ScratchSize { rows, logits: 1, seqs: 1, n_ctx: 32 }).map(drop)
        };
        let needs = |scratch| match scratch {
            Err(MemoryError::Limit { needed, .. }) => needed,
            other => panic!("{name}: {other:?}"),
        };
        let needed = needs(limited(0, 8));
        assert_eq!(limited(needed, 8), Ok(()));
        assert_eq!(needs(limited(needed - 1, 8)), needed);
        assert!(needs(limited(needed, 9)) > needed);
        assert_eq!(needs(limited(needed, usize::MAX)), usize::MAX);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn bytes_that_changed(i in 0..FILES.len(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20), in_front in any::<bool>()) {
        let mut bytes = file(i);
        let n = if in_front { 20_000 } else { bytes.len() };
        for (at, to) in &changes {
            bytes[at.index(n)] = *to;
        }
        run(&bytes);
    }

    #[test]
    fn numbers_that_changed(i in 0..FILES.len(), changes in prop::collection::vec((any::<prop::sample::Index>(), prop::option::of(prop_oneof![
        0i64..40, (0u32..63).prop_map(|shift| 1 << shift), (0u32..63).prop_map(|shift| (1 << shift) - 1), any::<i64>(),
    ])), 1..4)) {
        run(&with_numbers(&file(i), &changes));
    }
}
