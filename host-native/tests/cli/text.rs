//! `run`, `tokenize`, `logits`, `inspect`, `perplexity`, `bench` and receipts.

use std::fs;
use std::io::Read;
use std::process::Stdio;

use serde_json::Value;
use starling::gguf::Gguf;
use starling::kernels::Cpu;

use super::starling::{
    IO, MODEL_ERROR, PROMPT, RECEIPT, SMALL, USAGE, command, fails, fixture, ok, pinned, said, starling, temp,
    with_input, written,
};

#[test]
fn run_gives_the_pinned_text() {
    let pinned = pinned();
    let text = pinned["text"].as_str().expect("a text");
    let ran = ok(&["run", PROMPT, "--temp", "0", "-n", "64"]);
    assert_eq!(ran.text(), format!("{text}\n"));
    assert!(ran.err.contains("prompt 5 tokens") && ran.err.contains("answer 64 tokens"), "{}", ran.err);
    let json = ok(&["run", PROMPT, "--temp", "0", "-n", "64", "--json"]).json();
    assert_eq!((&json["text"], &json["ids"]), (&pinned["text"], &pinned["ids"]));
    assert_eq!(json["finish_reason"], "length");
    assert_eq!(json["timings"]["prompt_tokens"], 5);
    let piped = with_input(&["run", "--temp", "0", "-n", "8", "-q"], PROMPT.as_bytes());
    assert!(piped.err.is_empty() && text.starts_with(piped.text().trim_end()), "{piped:?}");
    let file = written("prompt.txt", PROMPT.as_bytes());
    assert_eq!(ok(&["run", "-f", &file, "--temp", "0", "-n", "8", "-q"]).out, piped.out);
    let stopped = ok(&["run", PROMPT, "--temp", "0", "-n", "64", "--stop", "Lena", "--json"]).json();
    assert_eq!(stopped["finish_reason"], "stop");
    assert_eq!(stopped["text"], text[..text.find("Lena").expect("Lena")]);
}

/// The first process of a container ends by a handler only, and its parent sees the code that shells have.
#[test]
fn an_interrupt_ends_a_command_with_130() {
    let args = ["run", PROMPT, "-n", "100000", "-c", "100000", "--ignore-eos", "--temp", "0"];
    let mut child =
        command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null()).spawn().expect("the command");
    let mut out = child.stdout.take().expect("a pipe");
    let mut text = vec![0; 20];
    out.read_exact(&mut text).expect("a beginning");
    let killed = std::process::Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status();
    assert!(killed.expect("kill").success());
    out.read_to_end(&mut text).expect("the rest");
    let ended = child.wait_with_output().expect("an end");
    let err = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(130), "{err}");
    assert!(text.ends_with(b"\n") && err.contains("tok/s") && !err.contains("error"), "{err}");
}

#[test]
fn the_time_of_a_prompt_is_that_of_all_its_batches() {
    let prompt = written("long.txt", "word ".repeat(1500).as_bytes());
    let model = fixture(SMALL);
    let ran = ok(&["run", "-m", &model, "-f", &prompt, "-c", "16384", "-n", "1", "--json"]).json();
    let [prefill, decode] = ["prefill_seconds", "decode_seconds"].map(|key| ran["timings"][key].as_f64().expect(key));
    assert!(ran["timings"]["prompt_tokens"].as_u64() > Some(1100), "three batches: {ran}");
    assert!(decode < prefill, "nothing is decoded after the first token: {ran}");
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let run = |seed: &str, t: &str| ok(&["run", PROMPT, "-n", "24", "--seed", seed, "--temp", "1", "-t", t, "-q"]).out;
    assert_eq!(run("7", "1"), run("7", "3"));
    assert_ne!(run("7", "1"), run("8", "1"));
}

#[test]
fn a_draft_model_changes_no_byte() {
    let draft = fixture("starling-tiny/starling-tiny-q4_0.gguf");
    let schema =
        r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}"#;
    let run = |more: &[&str]| {
        let ran = ok(&[&["run", PROMPT, "-n", "80", "--seed", "5", "--json"], more].concat()).json();
        (ran["ids"].clone(), ran["text"].clone(), ran["finish_reason"].clone())
    };
    for options in [&["--temp", "0"][..], &["--temp", "0.8"], &["--temp", "0.5", "--json-schema", schema]] {
        let plain = run(&[options, &["--draft-max", "0"]].concat());
        for n in ["0", "1", "8"] {
            assert_eq!(run(&[options, &["--draft-model", &draft, "--draft-max", n]].concat()), plain, "{options:?}");
        }
    }
    let receipts = [&[][..], &["--draft-model", &draft]].map(|more| {
        let file = temp("drafted-receipt.json");
        ok(&[&["run", PROMPT, "-n", "40", "--seed", "5", "--receipt", &file], more].concat());
        fs::read(file).expect("a receipt")
    });
    assert_eq!(receipts[0], receipts[1]);
}

#[test]
fn draft_models_that_cannot_draft() {
    let draft = |name: &str| fixture(&format!("reference/{name}.gguf"));
    let run = |draft: &str, code, parts: &[&str]| fails(&["run", "x", "--draft-model", draft], code, parts);
    run(&draft("llama-gqa-untied-f16"), USAGE, &["llama-gqa-untied-f16.gguf", "vocabulary of", "expected"]);
    run(&draft("bert-cls-f16"), USAGE, &["bert-cls-f16.gguf", "encoder"]);
    run(&temp("no-draft.gguf"), IO, &["no-draft.gguf"]);
    fails(&["serve", "--port", "0", "--draft-model", &draft("bert-cls-f16")], USAGE, &["bert-cls-f16.gguf", "encoder"]);
    fails(&["serve", "--port", "0", "--draft-model", &temp("no-draft.gguf")], IO, &["no-draft.gguf"]);
    fails(&["run", "x", "--draft-mtp"], MODEL_ERROR, &["nextn_predict_layers", "no layer for multi-token prediction"]);
    let both = ["--draft-mtp", "--draft-model", "x.gguf"];
    fails(&[&["run", "x"], &both[..]].concat(), USAGE, &["--draft-mtp", "cannot be used with", "--draft-model"]);
    let both = ["--draft-mtp", "true", "--draft-model", "x.gguf"];
    fails(&[&["serve", "--port", "0"], &both[..]].concat(), USAGE, &["draft-mtp and draft-model", "one of them"]);
    let mut other = fs::read(fixture("starling-tiny/starling-tiny-q4_0.gguf")).expect("a model");
    let at = other.windows(7).position(|bytes| bytes == b"<|pad|>").expect("a token");
    other[at + 4] = b'X';
    run(&written("other-tokens.gguf", &other), USAGE, &["token 3 of the draft model is \"<|paX|>\"", "\"<|pad|>\""]);
}

#[test]
fn run_follows_a_form() {
    let schema = r#"{"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 20}},
        "required": ["age"], "additionalProperties": false}"#;
    let file = written("schema.json", schema.as_bytes());
    for given in [schema, &file] {
        let ran = ok(&["run", PROMPT, "--json-schema", given, "--seed", "3", "--temp", "1", "--json"]).json();
        let answer: Value = serde_json::from_str(ran["text"].as_str().expect("a text")).expect("JSON");
        assert!(answer["age"].as_u64() <= Some(20) && answer["age"].is_u64(), "{ran}");
        assert_eq!(ran["finish_reason"], "stop");
    }
    let grammar = written("grammar.lark", b"start: \"a\" | \"b\" start");
    let text = ok(&["run", PROMPT, "--grammar", &grammar, "-q", "-n", "40"]).text();
    assert!(text.trim_end().bytes().all(|b| b == b'a' || b == b'b') && !text.trim_end().is_empty(), "{text}");
    let text = ok(&["run", PROMPT, "--regex", "x{3}|yy", "-q"]).text();
    assert!(["xxx\n", "yy\n"].contains(&text.as_str()), "{text}");
    said(starling(&["run", PROMPT, "--regex", "("]), USAGE, &["--regex"]);
    said(starling(&["run", PROMPT, "--json-schema", "{\"not\": {}}"]), USAGE, &["--json-schema", "not"]);
    said(starling(&["run", PROMPT, "--grammar", "absent.lark"]), IO, &["absent.lark"]);
}

#[test]
fn tokens_there_and_back() {
    for text in [PROMPT, "", "a\n\n b\tc", "naïve – 北京 🙂", "<|im_end|> 123"] {
        let ids = with_input(&["tokenize", "--no-bos"], text.as_bytes());
        assert_eq!(with_input(&["detokenize"], &ids.out).text(), text);
        let json = with_input(&["tokenize", "--no-bos", "--json"], text.as_bytes()).json();
        let listed: Vec<String> = json["ids"].as_array().expect("ids").iter().map(Value::to_string).collect();
        assert_eq!(listed.join(" "), ids.text().trim_end());
        let mut end = 0;
        for range in json["offsets"].as_array().expect("offsets") {
            assert!(range[0].as_u64() <= Some(end), "no gaps: {json}");
            end = range[1].as_u64().expect("a number");
        }
        assert_eq!(end as usize, text.len());
    }
    let batch = with_input(&["tokenize", "--batch"], br#"["Once upon a time", ""]"#).json();
    assert_eq!(batch[0], pinned()["prompt_ids"]);
    assert_eq!(ok(&["tokenize", PROMPT]).text(), "0 1697 1079 262 544\n");
    assert_eq!(ok(&["detokenize", "1697,1079,262,544"]).text(), PROMPT);
    said(with_input(&["tokenize", "--batch"], b"{}"), USAGE, &["JSON array of strings"]);
    fails(&["detokenize", "99999"], USAGE, &["99999"]);
    said(with_input(&["detokenize"], b"1 x"), USAGE, &["`x` is not a token id"]);
}

#[test]
fn logits_are_the_same_on_every_instruction_set_and_any_threads() {
    let args = |isa: &'static str, t: &'static str| ["logits", PROMPT, "--all", "--isa", isa, "-t", t];
    for cpu in Cpu::available() {
        for t in ["1", "2", "3"] {
            let json = ok(&args(cpu.isa().name(), t)).json();
            assert_eq!(json["sha256"], pinned()["logits_sha256"], "{} with {t} threads", cpu.isa());
            assert_eq!(json["logits"]["shape"][0], 5);
        }
    }
    let trace = |isa| ok(&["logits", PROMPT, "--trace", "--isa", isa]).text();
    let scalar = trace("scalar");
    assert_eq!(scalar, std::fs::read_to_string(fixture("goldens/pinned/trace.txt")).expect("a trace"));
    for stage in ["embedding", "q", "k", "v", "rope", "scores", "attn_out", "ffn_out", "final_norm", "logits"] {
        assert!(scalar.lines().any(|l| l.split_whitespace().nth(1) == Some(stage)), "no {stage} in {scalar}");
    }
    Cpu::available().iter().for_each(|cpu| assert_eq!(trace(cpu.isa().name()), scalar, "{}", cpu.isa()));
    fails(&["logits", "--ids", "1,99999"], USAGE, &["99999", "index 1"]);
}

/// Nested metadata arrays, as gguf-py writes them.
#[test]
fn inspect_shows_arrays_in_arrays() {
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    for number in [0u64, 1, 1] {
        file.extend(number.to_le_bytes());
    }
    file.push(b'k');
    let array = |kind: u32, len: u64| [&kind.to_le_bytes()[..], &len.to_le_bytes()].concat();
    file.extend(9u32.to_le_bytes());
    file.extend([array(9, 3), array(4, 2)].concat());
    file.extend([7u32.to_le_bytes(), 8u32.to_le_bytes()].concat());
    file.extend([array(8, 1), 2u64.to_le_bytes().to_vec(), b"ab".to_vec(), array(5, 0)].concat());
    let path = written("nested.gguf", &file);
    let inner = serde_json::json!([[7, 8], ["ab"], []]);
    assert_eq!(ok(&["inspect", "--json", "--full", "-m", &path]).json()["metadata"]["k"], inner);
    assert_eq!(ok(&["inspect", "--json", "-m", &path]).json()["metadata"]["k"]["first"], inner);
    assert!(ok(&["inspect", "-m", &path]).text().contains("k = 3 x Array [[7,8], [\"ab\"], []]"));
}

#[test]
fn inspect_lists_the_file() {
    let json = ok(&["inspect", "--json"]).json();
    assert_eq!(json["metadata"]["general.architecture"], "llama");
    let bytes = fs::read(fixture("starling-tiny/starling-tiny-q8_0.gguf")).expect("the model");
    let gguf = Gguf::parse(&bytes).expect("a model");
    assert_eq!(json["tensors"].as_array().map(Vec::len), Some(gguf.tensors().len()));
    let text = ok(&["inspect"]).text();
    assert!(text.starts_with("GGUF v3, 1 file(s)") && text.contains("token_embd.weight"), "{text}");
}

#[test]
fn perplexity_and_completions() {
    let file = written("story.txt", pinned()["text"].as_str().expect("a text").repeat(4).as_bytes());
    let json = ok(&["perplexity", "-f", &file, "-c", "32", "--json"]).json();
    let perplexity = json["perplexity"].as_f64().expect("a number");
    assert!((1.0..500.0).contains(&perplexity), "{json}");
    assert_eq!(ok(&["perplexity", "-f", &file, "-c", "32", "--json", "-t", "1", "--isa", "scalar"]).json(), json);
    fails(&["perplexity", "-f", &file, "-c", "4096"], USAGE, &["4096"]);
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        assert!(ok(&["completions", shell]).text().contains("perplexity"));
    }
}

#[test]
fn bench_runs_its_tests_with_each_number_of_threads() {
    let rows = ok(&["bench", "-p", "16", "-n", "4", "-a", "3x4", "-t", "1,2", "-r", "1", "-o", "json"]).json();
    let rows = rows.as_array().expect("rows");
    let tests = rows.iter().map(|r| (r["threads"].as_u64().expect("a number"), r["test"].as_str().expect("a name")));
    let names = ["pp16", "tg4", "tg3x4"];
    assert!(tests.eq([1, 2].into_iter().flat_map(|threads| names.map(|name| (threads, name)))), "{rows:?}");
    assert!(rows.iter().all(|r| r["tokens_per_second"].as_f64() > Some(0.0)));
    let threads = |args: &[&str]| {
        ok(&[args, &["-p", "4", "-n", "0", "-r", "1", "-o", "json"]].concat()).json()[0]["threads"].clone()
    };
    assert_eq!(threads(&["-t", "2", "bench"]), 2);
    assert_eq!(threads(&["bench", "--threads", "1"]), 1);
    let said = ok(&["bench", "-p", "4", "-n", "4", "-r", "1", "--memory"]).err;
    assert!(
        said.contains(" of weights, ") && said.contains("peak of the process: ") == cfg!(target_os = "linux"),
        "{said}"
    );
    fails(&["bench", "-t", "0"], USAGE, &["--threads", "0"]);
}

#[test]
fn receipts_verify_and_changes_do_not() {
    let path = temp("receipt.json");
    let with = |model: &[&str], options: &[&str]| {
        ok(&[&["run", PROMPT, "-n", "40", "-q", "--seed", "5", "--receipt", &path], model, options].concat())
    };
    let verify = |model: &[&str], path: &str| starling(&[&["verify", path], model].concat());
    let small = fixture(SMALL);
    for model in [&[][..], &["-m", &small]] {
        for options in [&["--ignore-eos"][..], &["--temp", "0", "--kv-type", "k8"], &["--stop", "the", "--top-k", "0"]]
        {
            with(model, options);
            for cpu in Cpu::available() {
                let ran = verify(&[model, &["--isa", cpu.isa().name()]].concat(), &path);
                assert!(ran.code == 0 && ran.text().starts_with("verified: "), "{model:?} {options:?} {ran:?}");
                assert_eq!(ran.text().lines().count(), 1);
            }
        }
    }
    with(&[], &["--ignore-eos"]);
    let json: Value = serde_json::from_slice(&fs::read(&path).expect("a receipt")).expect("JSON");
    assert_eq!(with_input(&["verify", "-", "-q"], json.to_string().as_bytes()).code, 0);
    let changed = |change: &dyn Fn(&mut Value), parts: &[&str]| {
        let mut json = json.clone();
        change(&mut json);
        let path = written("receipt-changed.json", json.to_string().as_bytes());
        said(verify(&[], &path), RECEIPT, &[&["the receipt does not verify"], parts].concat());
    };
    let zeros = |n: usize| Value::from("0".repeat(n));
    changed(&|r| r["output"][7] = 1.into(), &["step 7", "token 1"]);
    changed(&|r| r["steps"][8] = zeros(16), &["step 7"]);
    changed(&|r| r["digest"] = zeros(64), &["step 39"]);
    changed(&|r| r["digest"] = zeros(63), &["not a receipt"]);
    changed(&|r| r["model"] = zeros(64), &["SHA-256 0000"]);
    changed(&|r| r["numerics"] = 0.into(), &["numerics version: found 0"]);
    changed(&|r| r["request"]["sampling"]["seed"] = 6.into(), &["step 0"]);
    changed(&|r| r["request"]["sampling"]["temperature"] = 0.5.into(), &["step 0"]);
    changed(&|r| r["request"]["prompt"][0] = 9.into(), &["step 0"]);
    changed(&|r| r["request"]["prompt"][0] = 999_999.into(), &["999999"]);
    said(verify(&["-m", &small], &path), RECEIPT, &["not of this one"]);
    said(verify(&[], &written("receipt-text.json", b"hello")), RECEIPT, &["not a receipt"]);
    said(verify(&[], &temp("no-receipt.json")), IO, &["no-receipt.json"]);
    fails(&["run", PROMPT, "-n", "1", "--receipt", &temp("no/such/receipt.json")], IO, &["receipt.json"]);
}

#[test]
fn a_closed_pipe_is_no_error() {
    let story = written("closed-pipe.txt", PROMPT.repeat(40).as_bytes());
    let lists: [&[&str]; 9] = [
        &["inspect"],
        &["inspect", "--json", "--full"],
        &["run", PROMPT, "-n", "8", "-q"],
        &["run", PROMPT, "-n", "8", "--json"],
        &["tokenize", PROMPT],
        &["logits", PROMPT],
        &["completions", "bash"],
        &["bench", "-p", "4", "-n", "0", "-r", "1"],
        &["perplexity", "-f", &story, "-c", "16"],
    ];
    for args in lists {
        let mut child =
            command(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a child");
        drop(child.stdout.take());
        let ran = child.wait_with_output().expect("an end");
        let err = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success() && !err.contains("error") && !err.contains("panicked"), "{args:?}: {err}");
    }
}

#[test]
fn a_session_continues_with_the_bytes_of_one_text() {
    let path = temp("session");
    let _ = fs::remove_file(&path);
    let turn = |path: &str, prompt: &str| {
        ok(&["run", prompt, "--session", path, "--temp", "0", "-n", "40", "--ignore-eos", "--json"])
    };
    let first = turn(&path, &"Once upon a time ".repeat(8)).json();
    let saved = fs::read(&path).expect("a session");
    let second = turn(&path, " and the dog").json();
    let cached = second["timings"]["cached_tokens"].as_u64().expect("a number");
    let known = first["timings"]["prompt_tokens"].as_u64().expect("a number") + 39;
    assert_eq!(cached, known / 16 * 16, "{second}");
    let third = turn(&path, ".").json();
    assert!(third["timings"]["cached_tokens"].as_u64() > Some(cached), "{third}");
    // damaged or missing pages, and another KV type: computed again
    for (name, bytes) in [("damaged", [&saved[..saved.len() - 90], &[7; 90]].concat()), ("short", saved[..9000].into())]
    {
        let copy = written(&format!("session-{name}"), &bytes);
        let ran = turn(&copy, " and the dog");
        assert!(ran.err.contains("computed again"), "{name}: {}", ran.err);
        assert!(ran.json()["timings"]["cached_tokens"].as_u64() < Some(cached), "{name}");
        assert_eq!(ran.json()["ids"], second["ids"], "{name}");
    }
    // a damaged conversation, another model, another kind of prompt
    let mut bytes = saved.clone();
    bytes[100] ^= 1;
    let damaged = written("session-wrong", &bytes);
    let wrong = starling(&["run", "x", "--session", &damaged]);
    assert!(wrong.code == IO && wrong.err.contains("the session file is damaged"), "{wrong:?}");
    let other = written("session-other", &saved);
    let wrong = starling(&["run", "x", "--session", &other, "-m", &fixture(SMALL)]);
    assert!(wrong.code == IO && wrong.err.contains("of another model"), "{wrong:?}");
    let wrong = starling(&["run", "x", "--session", &other, "--chat"]);
    assert!(wrong.code == USAGE && wrong.err.contains("expected a session that began with --chat"), "{wrong:?}");
    assert_eq!(fs::read(&other).expect("a session"), saved);
}

/// The state of recurrent layers is in the file.
#[test]
fn a_session_of_a_model_with_recurrent_layers_continues() {
    let (path, model) = (temp("session-recurrent"), fixture("reference/qwen35-f32.gguf"));
    let _ = fs::remove_file(&path);
    let turn = |prompt: &str| {
        let run = ["run", prompt, "-m", &model, "--session", &path, "--draft-max", "0"];
        ok(&[&run[..], &["--temp", "0", "-n", "40", "--ignore-eos", "--json"]].concat()).json()
    };
    let first = turn(&"Once upon a time ".repeat(8));
    let saved = fs::read(&path).expect("a session");
    let second = turn(" and the dog");
    let known = first["timings"]["prompt_tokens"].as_u64().expect("a number") + 39;
    assert_eq!(second["timings"]["cached_tokens"], known / 16 * 16, "{second}");
    // damaged: computed again
    fs::write(&path, [&saved[..saved.len() - 90], &[7; 90]].concat()).expect("a file");
    let again = turn(" and the dog");
    assert_eq!((&again["ids"], &again["timings"]["cached_tokens"]), (&second["ids"], &0.into()));
}

#[test]
fn a_session_keeps_a_chat() {
    let path = temp("session-chat");
    let _ = fs::remove_file(&path);
    let turn = |prompt: &str| ok(&["run", "--chat", prompt, "--session", &path, "--temp", "0", "-n", "24", "--json"]);
    turn("Tell me about a little dog and a tree, please.");
    let second = turn("And then?").json();
    assert!(second["timings"]["cached_tokens"].as_u64() >= Some(16), "{second}");
}
