//! Drafts change nothing of structured output: schemas, grammars, expressions and tool calls, with lookup and a draft model.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use std::fs;

use proptest::prelude::*;
use serde_json::json;

use super::{Calls, GrammarSource, Limits, Structures};
use crate::draft::Speculation;
use crate::engine::{Engine, EngineOptions, Event, Request};
use crate::kernels::Cpu;
use crate::kernels::attention::KvType;
use crate::model::Model;
use crate::pool::Inline;
use crate::sampler::{Constraint, SamplingOptions};
use crate::tokenizer::EncodeOptions;

fn model(dtype: &str) -> Arc<Model> {
    let path = alloc::format!("{}/../fixtures/starling-tiny/starling-tiny-{dtype}.gguf", env!("CARGO_MANIFEST_DIR"));
    Arc::new(Model::load(&fs::read(path).expect("a file"), &Inline).expect("a model"))
}

/// The constraints, in order of [`N_FORMS`].
fn constraints(model: &Model) -> Vec<Arc<dyn Constraint>> {
    let structures = Structures::new(Limits::DEFAULT);
    let words = || model.tokenizer.grammar_vocabulary(model.config.n_vocab);
    let person = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 12 },
            "age": { "type": "integer", "minimum": 0, "maximum": 150 },
            "pets": { "type": "array", "items": { "enum": ["dog", "cat", "bird"] }, "minItems": 1, "maxItems": 4 },
        },
        "required": ["name", "age", "pets"],
        "additionalProperties": false,
    });
    let list = json!({ "type": "array", "items": { "type": "boolean" }, "minItems": 3, "maxItems": 30 });
    let lark = "start: line+\nline: NAME \" = \" NUMBER \";\\n\"\nNAME: /[a-z]{1,6}/\nNUMBER: /[0-9]{1,3}/\n";
    let forms = [
        GrammarSource::Schema(person),
        GrammarSource::Schema(list),
        GrammarSource::Lark(lark.into(), Vec::new()),
        GrammarSource::Regex("(Once upon a time, (Tom|Lily|Ben)[a-z ]{1,20}\\. ){1,3}".into()),
    ];
    let mut all: Vec<_> = forms.iter().map(|source| structures.constraint(&words, source).expect("a form")).collect();
    let parameters = json!({ "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] });
    let tools = ["weather", "map"]
        .map(|name| json!({ "type": "function", "function": { "name": name, "parameters": parameters } }));
    for is_forced in [true, false] {
        let calls = Calls::new(&tools, 0..2, is_forced, true);
        all.push(structures.calls(&words, &calls, None).map_err(|e| e.1).expect("calls"));
    }
    all
}

const N_FORMS: usize = 6;

fn engine(model: &Arc<Model>, max_seqs: usize, draft: Option<&Arc<Model>>) -> Engine {
    let options = EngineOptions {
        kv_type: KvType::F16,
        n_ctx: 256,
        max_seqs,
        batch_tokens: 48,
        prefill_chunk: 16,
        draft_rows: 24,
        kv_bytes: EngineOptions::kv_bytes_of(model, KvType::F16, 256 * max_seqs),
        snapshots: Default::default(),
        model_sha256: None,
    };
    let mut engine = Engine::new(Arc::clone(model), &Inline, options).expect("memory");
    if let Some(draft) = draft {
        engine.set_draft_model(Arc::clone(draft), &Inline).expect("the same vocabulary");
    }
    engine.set_step_costs(&[1.0]);
    engine.set_draft_cost(0.0);
    engine
}

/// The events of each request but those of drafts and batches, and the number of accepted draft tokens.
fn run(mut engine: Engine, requests: Vec<Request>) -> (Vec<Vec<Event>>, usize) {
    let (mut events, mut n_accepted) = (vec![Vec::new(); requests.len()], 0);
    let ids: Vec<_> = requests.into_iter().map(|request| engine.submit(request).expect("room")).collect();
    while !engine.is_idle() {
        engine.step(Cpu::detect(), &Inline, &mut |event| match &event {
            Event::Token { id, .. } | Event::Done { id, .. } => {
                let at = ids.iter().position(|i| i == id).expect("a request");
                events[at].push(event);
            }
            Event::Drafted { n_accepted: n, .. } => n_accepted += n,
            _ => {}
        });
    }
    (events, n_accepted)
}

#[test]
fn drafts_change_nothing_of_structured_output() {
    let (target, draft) = (model("q8_0"), model("q4_0"));
    let constraints = constraints(&target);
    assert_eq!(constraints.len(), N_FORMS);
    let cases =
        prop::collection::vec((0..N_FORMS, any::<u64>(), prop_oneof![Just(0f32), 0.3f32..1.2], 1usize..90), 1..4);
    let mut n_accepted = [0; 2];
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(24));
    let accepted = core::cell::RefCell::new(&mut n_accepted);
    let checked = runner.run(&(cases, 1usize..12), |(cases, max)| {
        let request = |(source, seed, temperature, max_tokens): &(usize, u64, f32, usize), max| {
            let options = EncodeOptions { add_special: true, parse_special: false };
            let tokens = target.tokenizer.encode("Tell me about Tom and his dog as JSON: {\"name\": \"", options);
            let sampling = SamplingOptions { seed: *seed, temperature: *temperature, ..SamplingOptions::default() };
            let constraint = Some(Arc::clone(&constraints[*source]));
            let speculation = Speculation { max, ..Speculation::default() };
            Request { sampling, constraint, speculation, max_tokens: Some(*max_tokens), ..Request::new(tokens) }
        };
        let requests = |max| cases.iter().map(|case| request(case, max)).collect::<Vec<_>>();
        let (want, _) = run(engine(&target, cases.len(), None), requests(0));
        for (i, draft) in [None, Some(&draft)].into_iter().enumerate() {
            let (found, n) = run(engine(&target, cases.len(), draft), requests(max));
            prop_assert_eq!(&found, &want);
            accepted.borrow_mut()[i] += n;
        }
        Ok(())
    });
    checked.expect("the same events");
    assert!(n_accepted[0] > 0 && n_accepted[1] > n_accepted[0], "{n_accepted:?}");
}
