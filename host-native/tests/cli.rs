//! The command as its users see it: output, messages and exit codes.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use starling::gguf::{Gguf, GgufWriter, Value as Meta};
use starling::kernels::Cpu;
use starling::quant::Dtype;

/// No command here may take longer.
const LIMIT: Duration = Duration::from_secs(120);
const MODEL_ERROR: i32 = 1;
const USAGE: i32 = 2;
const IO: i32 = 3;
const RECEIPT: i32 = 5;

#[derive(Debug)]
struct Ran {
    code: i32,
    out: Vec<u8>,
    err: String,
}

impl Ran {
    fn text(&self) -> String {
        String::from_utf8(self.out.clone()).expect("UTF-8")
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_starling"));
    command.args(args).env_remove("STARLING_MODEL").env_remove("STARLING_ISA").env_remove("STARLING_THREADS");
    command
}

/// Runs the command with `input` on its standard input.
fn with_input(args: &[&str], input: &[u8]) -> Ran {
    let mut command = command(args);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command");
    let (mut stdin, input) = (child.stdin.take().expect("a pipe"), input.to_vec());
    // it may end without reading all
    let writer = thread::spawn(move || drop(stdin.write_all(&input)));
    let read = |mut from: Box<dyn Read + Send>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            from.read_to_end(&mut bytes).map(|_| bytes).expect("output")
        })
    };
    let out = read(Box::new(child.stdout.take().expect("a pipe")));
    let err = read(Box::new(child.stderr.take().expect("a pipe")));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a status") {
            break status;
        }
        if start.elapsed() > LIMIT {
            let _ = child.kill();
            panic!("{args:?} takes more than {LIMIT:?}");
        }
        thread::sleep(Duration::from_millis(2));
    };
    writer.join().expect("input");
    let err = String::from_utf8_lossy(&err.join().expect("errors")).into_owned();
    Ran { code: status.code().expect("no signal"), out: out.join().expect("output"), err }
}

fn starling(args: &[&str]) -> Ran {
    with_input(args, b"")
}

fn ok(args: &[&str]) -> Ran {
    let ran = starling(args);
    assert_eq!(ran.code, 0, "{args:?}: {ran:?}");
    ran
}

/// Fails with that code, and a message that says all of `parts` in one line.
#[track_caller]
fn fails(args: &[&str], code: i32, parts: &[&str]) -> String {
    said(starling(args), code, parts)
}

#[track_caller]
fn said(ran: Ran, code: i32, parts: &[&str]) -> String {
    assert_eq!(ran.code, code, "{ran:?}");
    assert!(!ran.err.contains("panicked"), "{ran:?}");
    for part in parts {
        assert!(ran.err.contains(part), "no {part:?} in {ran:?}");
    }
    ran.err
}

fn fixture(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name);
    path.to_str().expect("a path").into()
}

/// A path of a test's own.
fn temp(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    path.to_str().expect("a path").into()
}

fn written(name: &str, bytes: &[u8]) -> String {
    let path = temp(name);
    fs::write(&path, bytes).expect("a file");
    path
}

fn pinned() -> Value {
    serde_json::from_slice(&fs::read(fixture("goldens/pinned/tiny-q8_0-greedy.json")).expect("a golden")).expect("JSON")
}

const PROMPT: &str = "Once upon a time";
const SMALL: &str = "reference/qwen2-untied-f16.gguf";

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

#[test]
fn the_same_seed_gives_the_same_text() {
    let run = |seed: &str, t: &str| ok(&["run", PROMPT, "-n", "24", "--seed", seed, "--temp", "1", "-t", t, "-q"]).out;
    assert_eq!(run("7", "1"), run("7", "3"));
    assert_ne!(run("7", "1"), run("8", "1"));
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
    for stage in ["embedding", "q", "k", "v", "rope", "scores", "attn_out", "ffn_out", "final_norm", "logits"] {
        assert!(scalar.lines().any(|l| l.split_whitespace().nth(1) == Some(stage)), "no {stage} in {scalar}");
    }
    Cpu::available().iter().for_each(|cpu| assert_eq!(trace(cpu.isa().name()), scalar, "{}", cpu.isa()));
    fails(&["logits", "--ids", "1,99999"], USAGE, &["99999", "position 1"]);
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

/// Two model files have the same tensors, to the byte.
fn same_tensors(ours: &str, theirs: &str) {
    let (ours, theirs) = (fs::read(ours).expect("a file"), fs::read(theirs).expect("a file"));
    let (ours, theirs) = (Gguf::parse(&ours).expect("a model"), Gguf::parse(&theirs).expect("a model"));
    assert_eq!(ours.tensors().len(), theirs.tensors().len());
    for t in theirs.tensors() {
        let our = ours.tensor(t.name).expect("the same names");
        assert_eq!((our.dtype, our.dims), (t.dtype, t.dims), "{}", t.name);
        assert!(ours.data(our) == theirs.data(t), "tensor {} differs", t.name);
    }
}

/// An importance matrix.
fn imatrix_file(name: &str, tensors: &[(String, Vec<f32>)]) -> String {
    let mut writer = GgufWriter::new();
    writer.str_array("imatrix.datasets", &[b"a text"]).expect("a key");
    writer.metadata("imatrix.chunk_count", &Meta::U32(7)).expect("a key");
    writer.metadata("imatrix.chunk_size", &Meta::U32(512)).expect("a key");
    for (name, values) in tensors {
        writer.tensor(name, Dtype::F32, &[values.len() as u64]).expect("a tensor");
    }
    let mut file = writer.header();
    for (_, values) in tensors {
        values.iter().for_each(|v| file.extend_from_slice(&v.to_le_bytes()));
        file.resize(file.len() + writer.padding(4 * values.len() as u64), 0);
    }
    written(name, &file)
}

#[test]
fn quantize_with_an_importance_matrix() {
    let source = fixture("reference/llama-k256-bf16.gguf");
    let out = temp("guided.gguf");
    // of a run before
    let _ = fs::remove_file(&out);
    let message = fails(&["quantize", &source, &out, "IQ2_XS"], USAGE, &["IQ2_XS", "--imatrix"]);
    assert!(message.contains("blk.0."), "{message}");
    assert!(!Path::new(&out).exists());

    let bytes = fs::read(&source).expect("a file");
    let gguf = Gguf::parse(&bytes).expect("a model");
    let mut tensors = Vec::new();
    for t in gguf.tensors().iter().filter(|t| t.n_dims == 2) {
        let sums = (0..t.dims[0]).map(|i| (1 + i % 7) as f32).collect();
        tensors.push((format!("{}.in_sum2", t.name), sums));
        tensors.push((format!("{}.counts", t.name), vec![4.0]));
    }
    let imatrix = imatrix_file("imatrix.gguf", &tensors);
    for kind in ["IQ2_XS", "Q4_K_M"] {
        ok(&["quantize", &source, &out, kind, "--imatrix", &imatrix]);
        ok(&["run", "-m", &out, PROMPT, "--temp", "0", "-n", "4", "-q"]);
        let json = ok(&["inspect", "-m", &out, "--json"]).json();
        assert_eq!(json["metadata"]["quantize.imatrix.file"], "imatrix.gguf");
        assert_eq!(json["metadata"]["quantize.imatrix.chunks_count"], 7);
    }
    // weights matter
    ok(&["quantize", &source, &temp("plain.gguf"), "Q4_K_M"]);
    assert!(fs::read(&out).expect("a file") != fs::read(temp("plain.gguf")).expect("a file"));

    fails(&["quantize", &source, &out, "Q4_K_M", "--imatrix", &source], MODEL_ERROR, &["`imatrix.datasets`"]);
    let alone = imatrix_file("alone.gguf", &tensors[..1]);
    fails(&["quantize", &source, &out, "Q4_K_M", "--imatrix", &alone], MODEL_ERROR, &[".in_sum2`", "no counts"]);
    tensors[2].1.pop();
    let short = imatrix_file("short.gguf", &tensors);
    fails(
        &["quantize", &source, &out, "Q4_K_M", "--imatrix", &short],
        USAGE,
        &["importance matrix has", "expected 1 x"],
    );
    tensors[2].1[3] = -1.0;
    let negative = imatrix_file("negative.gguf", &tensors);
    fails(&["quantize", &source, &out, "Q4_K_M", "--imatrix", &negative], MODEL_ERROR, &["negative"]);
}

#[test]
fn quantize_joins_a_split_model() {
    let source = fixture("reference/llama-k256-bf16.gguf");
    let bytes = fs::read(&source).expect("a file");
    let gguf = Gguf::parse(&bytes).expect("a model");
    let n_tensors = gguf.tensors().len();
    let mut paths = Vec::new();
    for (i, tensors) in gguf.tensors().chunks(n_tensors.div_ceil(2)).enumerate() {
        let mut writer = GgufWriter::new();
        if i == 0 {
            gguf.metadata().iter().for_each(|(key, value)| writer.metadata(key, value).expect("a key"));
        }
        for (key, value) in [("split.no", i), ("split.count", 2), ("split.tensors.count", n_tensors)] {
            writer.metadata(key, &Meta::U32(value as u32)).expect("a key");
        }
        for t in tensors {
            writer.tensor(t.name, t.dtype, &t.dims[..t.n_dims as usize]).expect("a tensor");
        }
        let mut file = writer.header();
        for t in tensors {
            file.extend_from_slice(gguf.data(t).expect("data"));
            file.resize(file.len() + writer.padding(t.len_bytes), 0);
        }
        paths.push(written(&format!("split-0000{}-of-00002.gguf", i + 1), &file));
    }
    let (whole, joined) = (temp("whole.gguf"), temp("joined.gguf"));
    ok(&["quantize", &source, &whole, "Q4_K_M"]);
    ok(&["quantize", &paths[0], &joined, "Q4_K_M"]);
    assert!(fs::read(&whole).expect("a file") == fs::read(&joined).expect("a file"));
    fails(&["quantize", &paths[0], &paths[1], "Q4_K_M"], USAGE, &["same file"]);
    fs::remove_file(&paths[1]).expect("the file");
    fails(&["quantize", &paths[0], &joined, "Q4_K_M"], IO, &["split-00002-of-00002.gguf"]);
}

#[test]
fn quantize_makes_files_that_run() {
    let source = fixture("starling-tiny/starling-tiny-f16.gguf");
    for kind in ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_M", "Q5_K_S", "Q6_K"] {
        let path = temp(&format!("quantized-{kind}.gguf"));
        ok(&["quantize", &source, &path, kind]);
        let ran = ok(&["run", "-m", &path, PROMPT, "--temp", "0", "-n", "4", "-q"]);
        assert!(ran.text().len() > 2, "{kind}: {ran:?}");
        if let "Q8_0" | "Q4_0" = kind {
            let shipped = fixture(&format!("starling-tiny/starling-tiny-{}.gguf", kind.to_lowercase()));
            same_tensors(&path, &shipped);
        }
        fs::remove_file(&path).expect("the file");
    }
    let source = fixture("reference/llama-k256-bf16.gguf");
    for (kind, theirs) in [("Q3_K", Some("q3_k_m")), ("IQ4_XS", Some("iq4_xs")), ("IQ3_S", None), ("TQ2_0", None)] {
        let path = temp(&format!("quantized-{kind}.gguf"));
        ok(&["quantize", &source, &path, kind]);
        ok(&["run", "-m", &path, PROMPT, "--temp", "0", "-n", "4", "-q"]);
        if let Some(theirs) = theirs {
            same_tensors(&path, &fixture(&format!("reference/llama-k256-{theirs}.gguf")));
        }
        fs::remove_file(&path).expect("the file");
    }
    fails(&["quantize", &source, &temp("never.gguf"), "Q9"], USAGE, &["`Q9`", "known: ", "Q8_0"]);
    fails(&["quantize", &source, &source, "Q8_0"], USAGE, &["same file"]);
    fails(&["quantize", &source, &temp("no/such/dir.gguf"), "Q8_0"], IO, &["dir.gguf"]);
}

#[test]
fn perplexity_completions_and_bench() {
    let file = written("story.txt", pinned()["text"].as_str().expect("a text").repeat(4).as_bytes());
    let json = ok(&["perplexity", "-f", &file, "-c", "32", "--json"]).json();
    let perplexity = json["perplexity"].as_f64().expect("a number");
    assert!((1.0..500.0).contains(&perplexity), "{json}");
    assert_eq!(ok(&["perplexity", "-f", &file, "-c", "32", "--json", "-t", "1", "--isa", "scalar"]).json(), json);
    fails(&["perplexity", "-f", &file, "-c", "4096"], USAGE, &["4096"]);
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        assert!(ok(&["completions", shell]).text().contains("perplexity"));
    }
    let rows = ok(&["bench", "-p", "16", "-n", "4", "-r", "1", "-o", "json"]).json();
    let tests: Vec<&str> = rows.as_array().expect("rows").iter().filter_map(|r| r["test"].as_str()).collect();
    assert_eq!(tests, ["pp16", "tg4"]);
    assert!(rows[1]["tokens_per_second"].as_f64() > Some(0.0));
}

#[test]
fn chat_takes_lines_and_commands() {
    let script =
        b"/help\n/seed x\n/nope\n\nHello\n/again\n/system Be kind.\nHello\n/clear\n/seed 3\nHello\n/exit\nnever\n";
    let chat = || with_input(&["chat", "-n", "8"], script);
    let ran = chat();
    assert_eq!(ran.code, 0, "{ran:?}");
    let text = ran.text();
    for part in ["forget the conversation", "/seed takes a number", "no command /nope"] {
        assert!(text.contains(part), "no {part:?} in {text:?}");
    }
    assert_eq!(chat().out, ran.out);
    said(with_input(&["chat"], b"a\xff\n"), IO, &["UTF-8"]);
}

#[test]
fn chat_commands_change_the_conversation() {
    let file = temp("shout.jinja");
    fs::write(&file, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}").expect("a template");
    let chat = |script: &str| {
        let ran = with_input(&["chat", "-n", "6", "--temp", "0", "--chat-template", &file], script.as_bytes());
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.text()
    };
    let first = chat("Hello\n");
    assert!(!first.is_empty());
    // a conversation that is forgotten leaves nothing behind
    assert_eq!(chat("Hello\n/clear\nHello\n"), first.repeat(2));
    assert_eq!(chat("/system Be kind.\n/system\nHello\n"), first);
    // the same question again, greedily: the same answer
    assert_eq!(chat("Hello\n/again\n"), first.repeat(2));
    // nothing to answer again
    assert_eq!(chat("/again\n/clear\n/again\n"), "");
}

#[test]
fn chat_templates_by_name_and_file() {
    let run = |template: &str| {
        ["run", "--chat", "--chat-template", template, "-n", "4", "-q", "--temp", "0", "Hello"].map(String::from)
    };
    for name in ["chatml", "llama3", "gemma", "vicuna"] {
        ok(&run(name).each_ref().map(|arg| arg.as_str()));
    }
    let unknown = run("no-such-template");
    fails(&unknown.each_ref().map(|arg| arg.as_str()), USAGE, &["no-such-template", "chatml", "llama3"]);
    let file = temp("broken.jinja");
    fs::write(&file, "a\n{% if %}").expect("a template");
    let broken = run(&file);
    fails(&broken.each_ref().map(|arg| arg.as_str()), MODEL_ERROR, &["line 2"]);
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
    changed(&|r| r["model"] = zeros(64), &["model 0000"]);
    changed(&|r| r["numerics"] = 0.into(), &["numerics version 0"]);
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
fn files_that_are_no_models() {
    fails(&["run", "-m", &temp("missing.gguf"), "x"], IO, &["missing.gguf"]);
    fails(&["inspect", "-m", env!("CARGO_TARGET_TMPDIR")], IO, &["is a directory"]);
    fails(&["inspect", "-m", &written("empty.gguf", b"")], MODEL_ERROR, &["empty.gguf"]);
    fails(&["run", "x", "-m", &written("text.gguf", b"This is a text, no model.")], MODEL_ERROR, &["GGUF", "magic"]);
    if cfg!(unix) {
        for device in ["/dev/zero", "/dev/null"] {
            fails(&["run", "x", "-m", device], IO, &["not a regular file"]);
        }
    }
    let (mut state, mut rubbish) = (1u64, vec![0; 100_000]);
    for with_magic in [false, true] {
        rubbish.iter_mut().for_each(|b| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *b = (state >> 56) as u8;
        });
        if with_magic {
            rubbish[..8].copy_from_slice(b"GGUF\x03\0\0\0");
        }
        fails(&["run", "x", "-m", &written("rubbish.gguf", &rubbish)], MODEL_ERROR, &["rubbish.gguf", "GGUF"]);
    }
}

#[test]
fn models_cut_short_at_any_length() {
    let bytes = fs::read(fixture(SMALL)).expect("a model");
    let lens = (0..64).chain((64..bytes.len()).step_by(bytes.len() / 40)).chain([bytes.len() - 1]);
    for len in lens {
        let path = written("short.gguf", &bytes[..len]);
        fails(&["run", "x", "-n", "1", "-m", &path], MODEL_ERROR, &["short.gguf"]);
    }
}

/// Changes dimensions or data of the tensor of that name; says whether to keep it.
type Change = dyn Fn(&str, &mut Vec<u64>, &mut Vec<u8>) -> bool;

/// The model with another architecture's name, or other tensors.
fn changed(name: &str, source: &str, arch: Option<&str>, tensor: &Change) -> String {
    let bytes = fs::read(fixture(source)).expect("a model");
    let gguf = Gguf::parse(&bytes).expect("a model");
    let mut writer = GgufWriter::new();
    for (key, value) in gguf.metadata() {
        match (*key, arch) {
            ("general.alignment", _) => {}
            ("general.architecture", Some(arch)) => writer.metadata(key, &Meta::Str(arch.as_bytes())).expect("a value"),
            _ => writer.metadata(key, value).expect("a value"),
        }
    }
    let mut contents = Vec::new();
    for t in gguf.tensors() {
        let (mut dims, mut data) = (t.dims[..t.n_dims as usize].to_vec(), gguf.data(t).expect("data").to_vec());
        if tensor(t.name, &mut dims, &mut data) {
            writer.tensor(t.name, t.dtype, &dims).expect("a tensor");
            contents.push(data);
        }
    }
    let mut file = writer.header();
    for data in contents {
        file.extend_from_slice(&data);
        file.resize(file.len() + writer.padding(data.len() as u64), 0);
    }
    written(name, &file)
}

#[test]
fn models_that_are_wrong_say_where() {
    let same = |_: &str, _: &mut Vec<u64>, _: &mut Vec<u8>| true;
    let path = changed("unknown-arch.gguf", SMALL, Some("mamba9"), &same);
    fails(&["run", "x", "-m", &path], MODEL_ERROR, &["`mamba9`", "known: ", "llama"]);
    let path = changed("missing-tensor.gguf", SMALL, None, &|name, _, _| name != "blk.0.ffn_up.weight");
    fails(&["run", "x", "-m", &path], MODEL_ERROR, &["`blk.0.ffn_up.weight`", "found nothing"]);
    let path = changed("wrong-shape.gguf", SMALL, None, &|name, dims, _| {
        if name == "blk.0.attn_q.weight" {
            *dims = vec![dims[0] * 2, dims[1] / 2];
        }
        true
    });
    let message =
        fails(&["run", "x", "-m", &path], MODEL_ERROR, &["`blk.0.attn_q.weight`", "found shape [", "expected"]);
    assert_eq!(message.matches("shape [").count(), 2, "{message}");
    let path = changed("nan-scale.gguf", "reference/llama-k256-q8_0.gguf", None, &|name, _, data| {
        if name == "blk.0.ffn_down.weight" {
            let at = Dtype::Q8_0.block_bytes() as usize * 40;
            data[at..at + 2].copy_from_slice(&[0, 0x7e]);
        }
        true
    });
    fails(&["run", "x", "-m", &path], MODEL_ERROR, &["`blk.0.ffn_down.weight`", "NaN in block 40"]);
}

#[test]
fn requests_that_cannot_be_taken() {
    let long = "word ".repeat(100);
    let message = fails(&["run", &long, "-c", "32"], USAGE, &["prompt tokens", "context of 32 tokens"]);
    let n: usize = message.split_whitespace().find_map(|w| w.parse().ok()).expect("a count");
    assert!(n > 100, "{message}");
    fails(&["run", "x", "-n", "500", "-c", "32"], USAGE, &["500 to generate", "context of 32 tokens"]);
    fails(&["run", "x", "-n", "0"], USAGE, &["max_tokens"]);
    fails(&["run", "x", "--temp", "-1"], USAGE, &[]);
    fails(&["run", "x", "--top-p", "2"], USAGE, &["top_p is 2"]);
    let isas: Vec<&str> = Cpu::available().iter().map(|c| c.isa().name()).collect();
    fails(&["run", "x", "--isa", "z80"], USAGE, &["`z80`", &isas.join(", ")]);
    for args in [["run", "-f"], ["tokenize", "-f"], ["logits", "-"], ["perplexity", "-f"]] {
        let path = written(&format!("latin1-{}.txt", args[0]), b"caf\xe9 au lait");
        let ran =
            if args[1] == "-" { with_input(&args, b"caf\xe9") } else { starling(&[&args[..], &[&path]].concat()) };
        said(ran, USAGE, &["invalid UTF-8 at byte 3"]);
    }
    said(starling(&["frobnicate"]), USAGE, &["frobnicate"]);
    said(starling(&[]), USAGE, &["Usage"]);
    assert!(ok(&["--help"]).text().contains("5 the receipt does not verify"));
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

/// A reference model that embeds.
fn embedding_model() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/reference/qwen3-embedding-last-f16.gguf");
    path.display().to_string()
}

fn vector(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).expect("numbers")
}

#[test]
fn embeddings_are_those_of_the_reference_however_texts_come() {
    let model = embedding_model();
    let reference: Value =
        serde_json::from_slice(&fs::read(model.replace("-f16.gguf", ".json")).expect("a reference")).expect("JSON");
    let prompts = reference["prompts"].as_array().expect("prompts");
    let texts: Vec<&str> = prompts.iter().map(|p| p["text"].as_str().expect("a text")).collect();
    let args = |more: &[&str]| -> Vec<String> {
        ["embed", "-m", &model].iter().chain(more).map(|s| (*s).to_owned()).collect()
    };
    let run = |more: &[&str], input: &str| {
        let args = args(more);
        let ran = with_input(&args.iter().map(String::as_str).collect::<Vec<_>>(), input.as_bytes());
        assert_eq!(ran.code, 0, "{}", ran.err);
        ran
    };
    let all = run(&texts, "").json();
    for (i, (got, prompt)) in all.as_array().expect("an array").iter().zip(prompts).enumerate() {
        assert_eq!(got["index"], i);
        assert_eq!(got["n_tokens"], prompt["n_tokens"]);
        let (got, want) = (vector(&got["embedding"]), vector(&prompt["embedding"]));
        assert!(got.len() == want.len() && got.iter().zip(&want).all(|(g, w)| (g - w).abs() <= 5e-4));
    }
    let lines = texts.join("\n");
    assert_eq!(run(&[], &lines).json(), all);
    assert_eq!(run(&["--file", "-", "--batch-texts", "1"], &lines).json(), all);
    let objects: Vec<String> = texts.iter().map(|t| serde_json::json!({ "input": t }).to_string()).collect();
    assert_eq!(run(&["--jsonl"], &objects.join("\n")).json(), all);
    let ids: Vec<u32> = serde_json::from_value(prompts[0]["ids"].clone()).expect("ids");
    let ids = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    assert_eq!(run(&["--ids", &ids], "").json()[0], all[0]);

    let first = vector(&all[0]["embedding"]);
    let cut = vector(&run(&["--dimensions", "8", "--no-normalize", "--ids", &ids], "").json()[0]["embedding"]);
    assert_eq!(cut.len(), 8);
    assert!(cut.iter().zip(&first).all(|(c, f)| (c / f - cut[0] / first[0]).abs() < 1e-3));
    let states = run(&["--pooling", "none", "--ids", &ids], "").json();
    assert_eq!(vector(&states[0]["embedding"][9]), first);
    let npy = run(&["-o", "npy", "--ids", &ids, "--ids", &ids], "").out;
    assert!(npy.starts_with(b"\x93NUMPY\x01\x00") && npy.len() == 128 + 2 * 48 * 4);
    let bytes: Vec<u8> = first.iter().flat_map(|v| v.to_le_bytes()).collect();
    assert!(String::from_utf8_lossy(&npy[..128]).contains("'<f4', 'fortran_order': False, 'shape': (2, 48)"));
    assert!(npy[128..].chunks(bytes.len()).all(|row| row == bytes));
    let base64 = run(&["-o", "base64", "--ids", &ids], "").json();
    assert_eq!(base64[0]["embedding"].as_str().expect("a text").len(), (48usize * 4).div_ceil(3) * 4);
}

#[test]
fn embedding_what_is_wrong_says_so() {
    let model = embedding_model();
    let fails = |args: &[&str], input: &[u8], code: i32, words: &[&str]| {
        let ran = with_input(args, input);
        assert_eq!(ran.code, code, "{args:?}: {}", ran.err);
        assert!(words.iter().all(|w| ran.err.contains(w)), "{args:?}: {}", ran.err);
    };
    fails(&["embed", "a"], b"", USAGE, &["no model", "-m"]);
    let embed = |more: &[&'static str]| [&["embed", "-m", &model], more].concat();
    fails(&embed(&[]), b"", USAGE, &["no texts"]);
    fails(&embed(&["--ids", "1,x"]), b"", USAGE, &["`x`"]);
    fails(&embed(&["--ids", "1,368"]), b"", USAGE, &["368"]);
    fails(&embed(&["--dimensions", "49", "a"]), b"", USAGE, &["dimensions", "49 of 48"]);
    fails(&embed(&["--jsonl"]), b"\"a\"\n{\"txt\": 1}\n", USAGE, &["line 2", "input"]);
    fails(&embed(&["--pooling", "max", "a"]), b"", USAGE, &["max", "mean"]);
    fails(&embed(&["-c", "4"]), b"a\nThe birds moved slowly\n", USAGE, &["text 1", "context 4"]);
    let ran = with_input(&embed(&["-c", "4", "--truncate"]), b"The birds moved slowly\n");
    assert_eq!((ran.code, ran.json()[0]["n_tokens"].as_u64()), (0, Some(4)), "{}", ran.err);
}
