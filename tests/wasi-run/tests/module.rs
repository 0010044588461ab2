//! The shipped module against the pinned results. `STARLING_MODULE` is its file, `STARLING_TEST_ISA` the instruction
//! set it must choose, or is told to use where it would choose another (`relaxed-i16`).

use std::sync::LazyLock;

use serde_json::{Value, json};
use starling_tests::golden::{self, Case, Pinned};
use starling_tests::{embedding, reference};
use wasi_run::{Starling, engine, stopping_engine};
use wasmtime::{Engine, Module};

static MODULE: LazyLock<(Engine, Module)> = LazyLock::new(|| {
    let path = std::env::var("STARLING_MODULE").expect("STARLING_MODULE: a file");
    let engine = engine().expect("an engine");
    let module = Module::from_file(&engine, path).expect("a module");
    (engine, module)
});

fn starling() -> Starling {
    let (engine, module) = &*MODULE;
    Starling::new(engine, module).expect("an instance")
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("token ids")
}

/// Computes the case as a caller of the module would.
fn compute(m: &mut Starling, case: &Case, piece: usize, batch: usize) -> Pinned {
    let want = case.pinned();
    let n_ctx = want.prompt_ids.len() + case.max_tokens;
    let isa = std::env::var("STARLING_TEST_ISA").ok();
    let told = isa.as_deref().filter(|&isa| isa == "relaxed-i16");
    let options = json!({ "kv_type": case.kv_type, "n_ctx": n_ctx, "batch_tokens": batch, "isa": told });
    let session = m.open(&case.model_bytes(), piece, &options.to_string()).expect("a session");

    let info = m.call("starling_info", session).expect("info");
    if let Some(isa) = isa {
        assert_eq!(info["isa"], json!(isa));
    }
    let tokens = m.call_with("starling_tokenize", session, case.prompt.as_bytes()).expect("tokens");
    let prompt_ids = ids(&tokens["ids"]);
    let prompt_json = json!(prompt_ids).to_string();
    let logits = m.call_with("starling_logits", session, prompt_json.as_bytes()).expect("logits");

    let sampling = json!(case.options());
    let request = json!({
        "prompt": case.prompt, "max_tokens": case.max_tokens, "sampling": sampling, "dry_breakers": [],
    })
    .to_string();
    let id = m.call_with("starling_submit", session, request.as_bytes()).expect("an id");
    let (mut ids, mut text, mut done) = (Vec::new(), String::new(), false);
    while !done {
        let step = m.call("starling_step", session).expect("a step");
        for event in step["events"].as_array().expect("events") {
            assert_eq!(event["id"], id);
            text.push_str(event["text"].as_str().unwrap_or(""));
            match event["type"].as_str() {
                Some("token") => ids.push(event["token"].as_u64().expect("a token") as u32),
                Some("done") => done = true,
                _ => {}
            }
        }
    }
    m.raw::<_, ()>("starling_close", session);
    Pinned { prompt_ids, logits_sha256: logits.as_str().expect("a digest").to_owned(), ids, text }
}

#[test]
fn goldens() {
    // one instance for all: a session leaves nothing behind that another would notice
    let mut m = starling();
    let cases = golden::cases();
    assert!(cases.len() > 20, "cases are missing");
    for (i, case) in cases.iter().enumerate() {
        let piece = [65_536, 100_003, 1_000_000][i % 3];
        let batch = [512, 64, 7][i % 3];
        assert_eq!(compute(&mut m, case, piece, batch), case.pinned(), "{}", case.name);
    }
}

#[test]
fn embeddings_agree_with_the_reference_and_the_pinned_bits() {
    let mut m = starling();
    for case in embedding::cases() {
        let session = m.open(&case.model_bytes(), 100_003, "{\"n_ctx\": 512}").expect("a session");
        let mut embed = |ids: &[u32]| -> Vec<f32> {
            let reply = m.call_with("starling_embed", session, json!(ids).to_string().as_bytes()).expect("a vector");
            serde_json::from_value(reply).expect("numbers")
        };
        let vectors: Vec<_> = case.texts.iter().map(|text| embed(text)).collect();
        assert_eq!(embedding::sha256(&vectors), case.pinned().vectors_sha256, "{}", case.name);
        let references = reference::cases("embedding");
        let file = |c: &&reference::Case| case.model.ends_with(&c.files[0].file);
        for prompt in &references.iter().find(file).expect("a reference").prompts {
            let want = prompt.embedding.as_ref().expect("a vector");
            for (got, want) in embed(&prompt.ids).iter().zip(want) {
                assert!((got - want).abs() <= 5e-4, "{}: {got} {want}", case.name);
            }
        }
        fails(m.call_with("starling_embed", session, b"[]"), "request", "no tokens");
        fails(m.call_with("starling_embed", session, json!(vec![1; 513]).to_string().as_bytes()), "request", "513");
        fails(m.call_with("starling_embed", session, b"[99999]"), "request", "99999");
        m.raw::<_, ()>("starling_close", session);
    }
}

#[test]
fn small_pieces() {
    let case = golden::cases().into_iter().find(|c| c.model.contains("yarn")).expect("a small model");
    for piece in [1, 13, 4096] {
        assert_eq!(compute(&mut starling(), &case, piece, 64), case.pinned(), "pieces of {piece} bytes");
    }
}

#[test]
fn a_split_model_is_the_same_model() {
    let (mut m, case) = (starling(), small());
    let whole = case.model_bytes();
    let parts = reference::split(&whole, 2);
    let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
    let session = m.open(&whole, 65_536, "{\"n_ctx\": 16}").expect("a session");
    let expected = m.call_with("starling_logits", session, b"[1, 2, 3]").expect("a digest");
    for piece in [77, 10_000, 1 << 20] {
        let session = m.open_split(&parts, piece, "{\"n_ctx\": 16}").expect("a session");
        assert_eq!(m.call_with("starling_logits", session, b"[1, 2, 3]").expect("a digest"), expected);
    }
    fails(m.open_split(&[parts[1], parts[0]], 10_000, "").map(|_| json!(0)), "model", "split.no");
    fails(m.open_split(&parts[..1], 10_000, "").map(|_| json!(0)), "model", "split.count");
    fails(m.open_split(&[], 10_000, "").map(|_| json!(0)), "model", "no weights");
}

fn small() -> Case {
    golden::cases().into_iter().filter(|c| c.quantise.is_none()).min_by_key(|c| c.model_bytes().len()).expect("a case")
}

/// Expects an error of that kind with that in its message.
fn fails(reply: wasi_run::Reply, kind: &str, part: &str) {
    let (found, message) = reply.expect_err(part);
    assert_eq!(found, kind, "{message}");
    assert!(message.contains(part), "{message}");
}

#[test]
fn wrong_calls_are_errors_and_harm_nothing() {
    let (mut m, case) = (starling(), small());
    let model = case.model_bytes();

    fails(m.call("starling_info", 77u32), "request", "77 is not an open session");
    fails(m.call("starling_step", 77u32), "request", "77 is not an open session");
    for name in ["starling_submit", "starling_tokenize", "starling_detokenize", "starling_logits", "starling_embed"] {
        fails(m.call_with(name, 77, b"[1]"), "request", "77 is not an open session");
        fails(m.call(name, (77u32, 12u32)), "request", "12 is not a buffer");
        fails(m.call_with(name, 77, b"\xff\xfe"), "request", "UTF-8");
    }
    fails(m.call_with("starling_feed", 77, b"GGUF"), "request", "77 is not an open loader");
    fails(m.call_with("starling_open", 77, b""), "request", "77 is not an open loader");
    m.raw::<_, ()>("starling_close", 77u32);
    let given_up: u32 = m.raw("starling_loader", (model.len() as u64, 0u32));
    m.raw::<_, ()>("starling_close", given_up);
    fails(m.call_with("starling_feed", given_up, b"GGUF"), "request", "is not an open loader");
    m.raw::<_, ()>("starling_free", 12u32);
    assert_eq!(m.raw::<_, u32>("starling_cancel", (77u32, 1u64)), 0);
    assert_eq!(m.raw::<_, u32>("starling_alloc", u32::MAX), 0);

    for options in ["{", "7", "{\"nctx\": 1}", "{\"n_ctx\": -1}", "{\"kv_type\": \"f8\"}", "{\"isa\": \"avx2\"}"] {
        assert_eq!(m.open(&model, 65_536, options).expect_err(options).0, "request", "{options}");
    }
    let session = m.open(&model, 65_536, "{\"n_ctx\": 32}").expect("a session");
    for request in ["", "{", "{}", "{\"prompt\": 1}", "{\"prompt\": \"a\", \"ids\": [1]}", "{\"ids\": []}"] {
        fails(m.call_with("starling_submit", session, request.as_bytes()), "request", "");
    }
    for request in ["{\"ids\": [4294967295]}", "{\"ids\": [-1]}", "{\"ids\": [1], \"sampling\": {\"top_p\": 7}}"] {
        fails(m.call_with("starling_submit", session, request.as_bytes()), "request", "");
    }
    let long = json!({ "ids": vec![1; 33] }).to_string();
    fails(m.call_with("starling_submit", session, long.as_bytes()), "request", "");
    for list in ["", "{}", "[-1]", "[4294967295]"] {
        fails(m.call_with("starling_logits", session, list.as_bytes()), "request", "");
        fails(m.call_with("starling_detokenize", session, list.as_bytes()), "request", "");
    }
    fails(m.call_with("starling_logits", session, b"[]"), "request", "");
    fails(m.call_with("starling_logits", session, json!(vec![1; 33]).to_string().as_bytes()), "request", "");
    assert_eq!(m.raw::<_, u32>("starling_cancel", (session, 99u64)), 0);
    assert_eq!(m.call("starling_step", session).expect("an empty step")["tokens"], json!(0));

    assert_eq!(compute(&mut m, &case, 65_536, 64), case.pinned());
}

#[test]
fn wrong_files_are_errors_and_harm_nothing() {
    let (mut m, case) = (starling(), small());
    let model = case.model_bytes();
    let n = model.len();

    // cut anywhere, with the length of the whole file or of the piece announced
    for at in [0, 1, 4, 23, 24, 100, 1000, n / 10, n / 3, n / 2, n - 33, n - 1] {
        let loader: u32 = m.raw("starling_loader", (n as u64, 0u32));
        if at > 0 {
            m.call_with("starling_feed", loader, &model[..at]).expect("a beginning is no error");
        }
        let error = m.call_with("starling_open", loader, b"").expect_err("a file that ends early");
        assert_eq!(error.0, "model", "{}", error.1);
        let error = m.open(&model[..at], 1000, "").expect_err("a file cut short");
        assert_eq!(error.0, "model", "{}", error.1);
    }
    // more than announced
    let loader: u32 = m.raw("starling_loader", (100u64, 0u32));
    let fed = m.call_with("starling_feed", loader, &model[..101]);
    assert!(fed.is_err() || m.call_with("starling_open", loader, b"").is_err());

    // no model at all, and a model with rubbish in its header; callers may go on after an error
    let mut state = 1u32;
    let mut noise = |n: usize| -> Vec<u8> {
        let next = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..n).map(next).collect()
    };
    for i in 0..300 {
        let mut file = model.clone();
        let at = if i == 0 { 0 } else { (i * 37) % 8000 };
        let bytes = noise(1 + i % 16);
        file[at..at + bytes.len()].copy_from_slice(&bytes);
        if i % 10 == 0 {
            file = noise(2000);
        }
        let loader: u32 = m.raw("starling_loader", (file.len() as u64, 0u32));
        for bytes in file.chunks(40_000) {
            let _ = m.call_with("starling_feed", loader, bytes);
        }
        if let Ok(session) = m.call_with("starling_open", loader, b"{\"n_ctx\": 16}") {
            let session = session.as_u64().expect("an id") as u32;
            let _ = m.call_with("starling_logits", session, b"[1, 2, 3]");
            m.raw::<_, ()>("starling_close", session);
        }
    }
    assert_eq!(compute(&mut m, &case, 65_536, 64), case.pinned());
}

#[test]
fn sessions_give_their_memory_back() {
    let (mut m, case) = (starling(), small());
    let mut run = || {
        for _ in 0..10 {
            assert_eq!(compute(&mut m, &case, 65_536, 64), case.pinned());
        }
        m.memory_bytes()
    };
    assert_eq!(run(), run());
}

/// Prompts of many tokens without a common beginning.
fn prompts(n: u32) -> Vec<Vec<u32>> {
    (0..n).map(|i| (0..200).map(|at| 300 + (i * 37 + at * at) % 1000).collect()).collect()
}

/// Answers to requests, as many at once as there is room for; the ids of each.
fn answers(m: &mut Starling, session: u32, prompts: &[Vec<u32>]) -> Vec<Vec<u64>> {
    let mut all = vec![Vec::new(); prompts.len()];
    let (mut next, mut running) = (0, std::collections::HashMap::new());
    while next < prompts.len() || !running.is_empty() {
        while let Some(prompt) = prompts.get(next) {
            let request = json!({ "ids": prompt, "max_tokens": 24, "ignore_eos": true }).to_string();
            match m.call_with("starling_submit", session, request.as_bytes()) {
                Ok(id) => running.insert(id.as_u64().expect("an id"), next),
                Err((kind, message)) => {
                    assert!(kind == "capacity" && !running.is_empty(), "{kind}: {message}");
                    break;
                }
            };
            next += 1;
        }
        for event in m.call("starling_step", session).expect("a step")["events"].as_array().expect("events") {
            let id = event["id"].as_u64().expect("an id");
            match event["type"].as_str() {
                Some("token") => all[running[&id]].push(event["token"].as_u64().expect("a token")),
                Some("done") => {
                    assert_eq!(event["reason"], "length");
                    running.remove(&id);
                }
                _ => {}
            }
        }
    }
    all
}

/// A model's caches may be larger than the memory that the module gets: they stay as large as that is.
#[test]
fn memory_that_runs_short_costs_time_alone() {
    // the same for all kernels, of which these would take a minute
    if std::env::var("STARLING_TEST_ISA").is_ok_and(|isa| isa == "scalar") {
        return;
    }
    let bundled = std::fs::read(reference::fixtures().join("starling-tiny/starling-tiny-q8_0.gguf")).expect("a model");
    let (prompts, options) = (prompts(10), "{\"n_ctx\": 512, \"max_seqs\": 64}");
    let mut m = starling();
    let session = m.open(&bundled, 1 << 20, options).expect("a session");
    let before = m.memory_bytes();
    let expected = answers(&mut m, session, &prompts);
    assert!(m.memory_bytes() > before + (6 << 20), "all answers have little to keep");

    let mut m = starling();
    let session = m.open(&bundled, 1 << 20, options).expect("a session");
    m.limit_memory(m.memory_bytes() + (5 << 20));
    // at once, and one after the other
    assert!(answers(&mut m, session, &prompts) == expected);
    for (prompt, expected) in prompts.iter().zip(&expected) {
        assert!(answers(&mut m, session, core::slice::from_ref(prompt))[0] == *expected);
    }

    // not enough for a single one
    let mut m = starling();
    let session = m.open(&bundled, 1 << 20, options).expect("a session");
    m.limit_memory(m.memory_bytes() + (1 << 20));
    let request = json!({ "ids": prompts[0], "max_tokens": 80 }).to_string();
    fails(m.call_with("starling_submit", session, request.as_bytes()), "capacity", "memory for KV pages");
}

/// A host that does not trust a model bounds its time from outside.
#[test]
fn a_call_can_be_stopped() {
    let (engine, case) = (stopping_engine().expect("an engine"), small());
    let path = std::env::var("STARLING_MODULE").expect("STARLING_MODULE: a file");
    let module = Module::from_file(&engine, path).expect("a module");
    let mut m = Starling::new(&engine, &module).expect("an instance");
    let session = m.open(&case.model_bytes(), 65_536, "{\"n_ctx\": 64}").expect("a session");
    m.set_deadline(1);
    engine.increment_epoch();
    let trap = m.try_raw::<_, u64>("starling_step", session).expect_err("its time is over");
    assert!(matches!(trap.downcast_ref(), Some(wasmtime::Trap::Interrupt)), "{trap:?}");
}
