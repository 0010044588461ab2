//! The component against the pinned results, through the types of its WIT. `STARLING_MODULE` is its file,
//! `STARLING_TEST_ISA` the instruction set it must choose.

use starling_tests::golden::{self, Case, Pinned};
use wasi_run::engine;
use wasmtime::component::{Component, Linker, ResourceAny};
use wasmtime::{Engine, Store};

wasmtime::component::bindgen!({ path: "../../host-wasm/wit", world: "starling" });

use exports::starling::engine::models::{
    Dry, Error, ErrorKind, Event, Guest, KvType, LogprobKind, Options, Prompt, Reason, Request, Sampling,
};

struct Host {
    store: Store<()>,
    world: Starling,
}

impl Host {
    /// An instance that is given nothing.
    fn new() -> Host {
        let path = std::env::var("STARLING_MODULE").expect("STARLING_MODULE: a file");
        let engine: Engine = engine().expect("an engine");
        let component = Component::from_file(&engine, path).expect("a component");
        assert_eq!(component.component_type().imports(&engine).count(), 0, "it imports something");
        let mut store = Store::new(&engine, ());
        let world = Starling::instantiate(&mut store, &component, &Linker::new(&engine)).expect("an instance");
        Host { store, world }
    }

    fn parts(&mut self) -> (&mut Store<()>, &Guest) {
        (&mut self.store, self.world.starling_engine_models())
    }

    fn open(&mut self, model: &[u8], piece: usize, options: &Options) -> Result<ResourceAny, Error> {
        let (store, models) = self.parts();
        let loader = models.loader().call_constructor(&mut *store, &[model.len() as u64], false).expect("a loader");
        for bytes in model.chunks(piece) {
            if let Err(e) = models.loader().call_feed(&mut *store, loader, 0, bytes).expect("no trap") {
                loader.resource_drop(store).expect("a loader");
                return Err(e);
            }
        }
        models.loader().call_open(store, loader, options).expect("no trap")
    }

    /// Computes the case as a host would.
    fn compute(&mut self, case: &Case) -> Pinned {
        let want = case.pinned();
        let options = Options {
            n_ctx: Some((want.prompt_ids.len() + case.max_tokens) as u32),
            max_seqs: None,
            batch_tokens: Some(7),
            working_memory: None,
            kv_type: Some(match case.kv_type.as_str() {
                "f32" => KvType::F32,
                "f16" => KvType::F16,
                "k8" => KvType::K8,
                "q8" => KvType::Q8,
                other => panic!("KV type {other}"),
            }),
            isa: None,
        };
        let model = self.open(&case.model_bytes(), 100_003, &options).expect("a model");
        let (store, models) = self.parts();
        let info = models.model().call_info(&mut *store, model).expect("info");
        assert_eq!(info.isa, std::env::var("STARLING_TEST_ISA").expect("STARLING_TEST_ISA: an instruction set"));
        let pieces = models.model().call_tokenize(&mut *store, model, &case.prompt, true, false).expect("tokens");
        assert_eq!(pieces.last().expect("a token").end as usize, case.prompt.len());
        let prompt_ids: Vec<u32> = pieces.iter().map(|piece| piece.id).collect();
        let logits = models.model().call_logits_sha256(&mut *store, model, &prompt_ids).expect("no trap");
        let request = request(case);
        let id = models.model().call_submit(&mut *store, model, &request).expect("no trap").expect("a request");
        let (mut ids, mut text, mut done) = (Vec::new(), String::new(), None);
        while done.is_none() {
            assert!(models.model().call_step(&mut *store, model).expect("a step") > 0);
            while let Some(event) = models.model().call_next_event(&mut *store, model).expect("an event") {
                match event {
                    Event::Prefilled(e) => assert_eq!((e.request, e.tokens as usize), (id, prompt_ids.len())),
                    Event::Token(e) => {
                        assert_eq!(e.request, id);
                        ids.push(e.picked.id);
                        text += &e.text;
                    }
                    Event::Done(e) => {
                        text += &e.text;
                        done = Some(e);
                    }
                }
            }
        }
        let done = done.expect("an end");
        assert!(matches!(done.reason, Reason::Stop | Reason::Length) && done.tokens as usize >= ids.len());
        model.resource_drop(store).expect("a model");
        Pinned { prompt_ids, logits_sha256: logits.expect("a digest"), ids, text }
    }
}

fn request(case: &Case) -> Request {
    let o = case.options();
    Request {
        prompt: Prompt::Text(case.prompt.clone()),
        parse_special: false,
        add_special: true,
        max_tokens: Some(case.max_tokens as u32),
        stop: Vec::new(),
        stop_tokens: Vec::new(),
        ignore_eos: false,
        sequence: 0,
        receipt: false,
        sampling: Sampling {
            temperature: Some(o.temperature),
            seed: Some(o.seed),
            top_k: Some(o.top_k),
            top_p: Some(o.top_p),
            min_p: Some(o.min_p),
            typical_p: Some(o.typical_p),
            repeat_penalty: Some(o.repeat_penalty),
            repeat_last_n: Some(o.repeat_last_n),
            frequency_penalty: Some(o.frequency_penalty),
            presence_penalty: Some(o.presence_penalty),
            dry: o.dry.map(|d| Dry {
                multiplier: d.multiplier,
                base: d.base,
                allowed_length: d.allowed_length,
                last_n: d.last_n,
                breakers: d.breakers,
                breaker_texts: Some(Vec::new()),
            }),
            logit_bias: o.logit_bias,
            logprobs: LogprobKind::None,
            top_logprobs: 0,
        },
    }
}

fn bundled() -> Vec<Case> {
    golden::cases().into_iter().filter(|c| c.model.contains("starling-tiny")).collect()
}

#[test]
fn goldens_of_the_bundled_model() {
    let mut host = Host::new();
    let cases = bundled();
    assert!(cases.len() > 5, "cases are missing");
    for case in &cases {
        assert_eq!(host.compute(case), case.pinned(), "{}", case.name);
    }
}

#[test]
fn wrong_calls_are_errors_and_harm_nothing() {
    let mut host = Host::new();
    let case = &bundled()[0];
    let bytes = case.model_bytes();
    let options = |isa: Option<&str>| Options {
        n_ctx: Some(128),
        max_seqs: None,
        batch_tokens: None,
        working_memory: None,
        kv_type: None,
        isa: isa.map(Into::into),
    };
    let fails = |result: Result<ResourceAny, Error>, kind: ErrorKind, part: &str| {
        let e = result.expect_err(part);
        assert_eq!(e.kind, kind, "{}", e.message);
        assert!(e.message.contains(part), "{}", e.message);
    };
    fails(host.open(b"no model", 8, &options(None)), ErrorKind::Model, "GGUF");
    fails(host.open(&bytes[..1000], 100, &options(None)), ErrorKind::Model, "");
    fails(host.open(&bytes, 1 << 20, &options(Some("avx2"))), ErrorKind::Request, "avx2");

    let model = host.open(&bytes, 1 << 20, &options(None)).expect("a model");
    let (store, models) = host.parts();
    let memory = models.model().call_memory(&mut *store, model).expect("no trap");
    assert!(memory.weights > 1 << 20 && memory.kv_reserved > 0 && memory.kv_in_use == 0, "{memory:?}");
    for prompt in
        [Prompt::Ids(vec![]), Prompt::Ids(vec![u32::MAX]), Prompt::Ids(vec![1; 129]), Prompt::Chat("{".into())]
    {
        let request = Request { prompt, ..request(case) };
        let e = models.model().call_submit(&mut *store, model, &request).expect("no trap").expect_err("a wrong prompt");
        assert_eq!(e.kind, ErrorKind::Request, "{}", e.message);
    }
    let e = models.model().call_detokenize(&mut *store, model, &[u32::MAX]).expect("no trap").expect_err("no token");
    assert_eq!(e.kind, ErrorKind::Request);
    assert!(models.model().call_embed(&mut *store, model, &[]).expect("no trap").is_err());
    assert!(models.model().call_verify(&mut *store, model, "{}").expect("no trap").is_err());
    assert!(models.model().call_restore(&mut *store, model, b"pages").expect("no trap").is_err());
    assert!(!models.model().call_cancel(&mut *store, model, 99).expect("no trap"));
    assert_eq!(models.model().call_step(&mut *store, model).expect("no trap"), 0);
    assert!(models.model().call_next_event(&mut *store, model).expect("no trap").is_none());
    let id = models.model().call_submit(&mut *store, model, &request(case)).expect("no trap");
    assert!(models.model().call_cancel(&mut *store, model, id.expect("a request")).expect("no trap"));

    let conversation = r#"{"messages": [{"role": "user", "content": "Who are you?"}]}"#;
    let rendered = models.model().call_render(&mut *store, model, conversation).expect("no trap").expect("a text");
    assert!(rendered.text.contains("Who are you?") && !rendered.ids.is_empty());
    model.resource_drop(store).expect("a model");
    assert_eq!(host.compute(case), case.pinned());
}
