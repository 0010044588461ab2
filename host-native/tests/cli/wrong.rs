//! Errors of invalid model files and arguments.

use std::fs;
use std::process::Stdio;

use starling::gguf::{Gguf, GgufWriter, Value as Meta};
use starling::kernels::Cpu;
use starling::quant::Dtype;

use super::starling::{
    IO, MEMORY, MODEL_ERROR, RECEIPT, SMALL, USAGE, command, fails, fixture, ok, said, starling, temp, with_input,
    written,
};

#[test]
fn files_that_are_no_models() {
    fails(&["run", "-m", &temp("missing.gguf"), "x"], IO, &["missing.gguf"]);
    fails(&["inspect", "-m", env!("CARGO_MANIFEST_DIR")], IO, &["found no GGUF model file"]);
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
#[cfg(target_os = "linux")]
fn output_that_nobody_can_take() {
    let to = |args: &[&str], device: &str| {
        let device = fs::OpenOptions::new().write(true).open(device).expect("a device");
        let status =
            command(args).stdin(Stdio::null()).stdout(device).stderr(Stdio::null()).status().expect("the command");
        status.code().expect("no signal")
    };
    for args in
        [&["--help"][..], &["--version"], &["help", "run"], &["completions", "bash"], &["tokenize", "x"], &["inspect"]]
    {
        assert_eq!(to(args, "/dev/full"), IO, "{args:?}");
        assert_eq!(to(args, "/dev/null"), 0, "{args:?}");
    }
    assert_eq!(to(&["run", "--no-such-option"], "/dev/full"), USAGE);
}

/// A standard error that cannot be written changes neither the output nor the exit code.
#[test]
#[cfg(target_os = "linux")]
fn remarks_that_nobody_can_take() {
    let run = |args: &[&str]| {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("a device");
        let done = command(args).stdin(Stdio::null()).stderr(full).output().expect("the command");
        (done.status.code().expect("no signal"), done.stdout)
    };
    let path = temp("unheard.json");
    let (code, text) = run(&["run", "x", "-n", "4", "--seed", "0", "--receipt", &path]);
    assert!(code == 0 && text == ok(&["run", "x", "-n", "4", "--seed", "0"]).out);
    assert_eq!(run(&["verify", &path]).0, 0);
    let receipt = fs::read_to_string(&path).expect("the receipt");
    assert!(receipt.contains("\"seed\":0"), "{receipt}");
    let forged = written("forged.json", receipt.replace("\"seed\":0", "\"seed\":1").as_bytes());
    assert_eq!(run(&["verify", &forged]).0, RECEIPT);
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

#[test]
fn models_that_want_more_working_memory_than_they_may_have() {
    for command in [&["run", "x"][..], &["bench"], &["logits", "--ids", "1,2"], &["serve", "--port", "0"]] {
        fails(&[command, &["--working-memory", "20KiB"]].concat(), MEMORY, &["20480", "tokens", "--working-memory"]);
    }
    ok(&["run", "x", "-n", "1", "--working-memory", "64MiB"]);
    fails(&["run", "x", "--working-memory", "much"], USAGE, &["much", "--working-memory"]);
}

/// Changes dimensions or data of a tensor, by its name; returns whether to keep it.
type Change = dyn Fn(&str, &mut Vec<u64>, &mut Vec<u8>) -> bool;

/// The model with another architecture's name, or other tensors.
fn changed(name: &str, source: &str, arch: Option<&str>, tensor: &Change) -> String {
    changed_with(name, source, arch, tensor, &[])
}

/// [`changed`], with additional tensors of zeros.
fn changed_with(name: &str, source: &str, arch: Option<&str>, tensor: &Change, also: &[(&str, &[u64])]) -> String {
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
    for (name, dims) in also {
        writer.tensor(name, Dtype::F32, dims).expect("a tensor");
        contents.push(vec![0; dims.iter().product::<u64>() as usize * 4]);
    }
    written(name, &writer.file(contents))
}

#[test]
fn models_that_are_wrong_say_where() {
    let same = |_: &str, _: &mut Vec<u64>, _: &mut Vec<u8>| true;
    let path = changed("unknown-arch.gguf", SMALL, Some("mamba9"), &same);
    fails(&["run", "x", "-m", &path], MODEL_ERROR, &["`mamba9`", "known: ", "llama"]);
    let path = changed("missing-tensor.gguf", SMALL, None, &|name, _, _| name != "blk.0.ffn_up.weight");
    fails(&["run", "x", "-m", &path], MODEL_ERROR, &["`blk.0.ffn_up.weight`", "is missing"]);
    let path = changed("wrong-shape.gguf", SMALL, None, &|name, dims, _| {
        if name == "blk.0.attn_q.weight" {
            *dims = vec![dims[0] * 2, dims[1] / 2];
        }
        true
    });
    let message =
        fails(&["run", "x", "-m", &path], MODEL_ERROR, &["`blk.0.attn_q.weight`", "found shape [", "expected"]);
    assert_eq!(message.matches("shape [").count(), 2, "{message}");
    // beside a fused matrix the separate ones would be ignored
    let mut shapes = Vec::new();
    let bytes = fs::read(fixture(SMALL)).expect("a model");
    for part in ["attn_q", "attn_k", "attn_v"] {
        let gguf = Gguf::parse(&bytes).expect("a model");
        let of = |t: &&starling::gguf::TensorInfo<'_>| t.name == format!("blk.0.{part}.weight");
        shapes.push(gguf.tensors().iter().find(of).expect("a matrix").dims);
    }
    let fused = [shapes[0][0], shapes.iter().map(|dims| dims[1]).sum()];
    let all = |_: &str, _: &mut Vec<u64>, _: &mut Vec<u8>| true;
    let name = |layer: usize| format!("blk.{layer}.attn_qkv.weight");
    let path = changed_with(
        "superfluous.gguf",
        SMALL,
        None,
        &all,
        &[0, 1].map(name).each_ref().map(|name| (&name[..], &fused[..])),
    );
    fails(&["run", "x", "-m", &path], MODEL_ERROR, &["`blk.0.attn_k.", "either the fused or the separate tensors"]);
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
fn answers_that_cannot_go_on_say_why() {
    let path = changed("not-finite.gguf", "reference/llama-tied-llama3rope-f32.gguf", None, &|name, _, data| {
        if name == "output_norm.weight" {
            data.chunks_exact_mut(4).for_each(|w| w.copy_from_slice(&f32::MAX.to_le_bytes()));
        }
        true
    });
    fails(&["run", "x", "-m", &path], MODEL_ERROR, &["not finite"]);
    said(with_input(&["chat", "-m", &path], b"Hello.\n"), MODEL_ERROR, &["not finite"]);
}

#[test]
fn empty_variables_of_the_environment_are_not_set() {
    let with = |value: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_starling"));
        for name in ["MODEL", "THREADS", "ISA", "KV_TYPE", "WORKING_MEMORY"] {
            command.env(format!("STARLING_{name}"), value);
        }
        command.args(["run", "x", "-n", "1", "-q"]).output().expect("the command").status.code()
    };
    assert_eq!((with(""), with("none")), (Some(0), Some(USAGE)));
}

#[test]
fn requests_that_cannot_be_taken() {
    let long = "word ".repeat(100);
    let message = fails(&["run", &long, "-c", "32"], USAGE, &["prompt tokens", "context of 32 tokens"]);
    let n: usize = message.split_whitespace().find_map(|w| w.parse().ok()).expect("a count");
    assert!(n > 100, "{message}");
    // at most: what fits
    let cut = ok(&["run", "x", "-n", "500", "-c", "32", "--ignore-eos", "--json"]).json();
    assert_eq!(cut["finish_reason"], "length");
    let [n_prompt, n] = [&cut["timings"]["prompt_tokens"], &cut["ids"]]
        .map(|v| v.as_array().map_or_else(|| v.as_u64().expect("a number"), |ids| ids.len() as u64));
    assert_eq!(n_prompt + n, 33);
    fails(&["run", "x", "-n", "0"], USAGE, &["max_tokens"]);
    fails(&["run", "x", "--temp", "-1"], USAGE, &["temperature is -1"]);
    fails(&["run", "x", "--repeat-last-n=-2"], USAGE, &["-2 is not in -1.."]);
    ok(&["run", "x", "-n", "1", "-q", "--presence-penalty", "-.5", "--frequency-penalty", "-1e-3"]);
    fails(&["bench", "-p", "0", "-n", "0"], USAGE, &["nothing to measure"]);
    let encoder = fixture("reference/bert-mean-f32.gguf");
    fails(&["bench", "-p", "4", "-n", "4", "-m", &encoder], USAGE, &["nothing to measure", "-e 8x128"]);
    fails(&["run", "x", "--top-p", "2"], USAGE, &["top_p is 2"]);
    let isas: Vec<&str> = Cpu::available().iter().map(|c| c.isa().name()).collect();
    fails(&["run", "x", "--isa", "z80"], USAGE, &["`z80`", &isas.join(", ")]);
    for args in [["run", "-f"], ["tokenize", "-f"], ["logits", "-"], ["perplexity", "-f"]] {
        let path = written(&format!("latin1-{}.txt", args[0]), b"caf\xe9 au lait");
        let ran =
            if args[1] == "-" { with_input(&args, b"caf\xe9") } else { starling(&[&args[..], &[&path]].concat()) };
        said(ran, USAGE, &["invalid UTF-8 at byte 3"]);
    }
    let template = written("latin1.jinja", b"a\n{# caf\xe9 #}");
    fails(&["run", "x", "--chat", "--chat-template", &template], USAGE, &["latin1.jinja: invalid UTF-8 at byte 8"]);
    let grammar = written("latin1.lark", b"start: \"\xe9\"");
    fails(&["run", "x", "--grammar", &grammar], USAGE, &["latin1.lark: invalid UTF-8 at byte 8"]);
    let schema = written("latin1.json", b"{\"const\": \"\xe9\"}");
    fails(&["run", "x", "--json-schema", &schema], USAGE, &["latin1.json: invalid UTF-8 at byte 11"]);
    fails(&["run", "x", "--stop", &"s".repeat(2000)], USAGE, &["a string of 2000 bytes", "at most 1024 bytes"]);
    fails(&["run", "x", "--chat", "--special"], USAGE, &["--special", "--chat"]);
    fails(&["quantize", "-m", &fixture(SMALL), &fixture(SMALL), "out.gguf", "Q4_0"], USAGE, &["not by --model"]);
    fails(&["bench", "-p", "99999999999"], USAGE, &["99999999999", "from 0 to 268435456"]);
    fails(&["bench", "-p", "268435456", "-n", "0"], MEMORY, &["a context of 268435456 tokens", "are free"]);
    fails(&["logits", "--ids", "1, x"], USAGE, &["` x` is not a token id"]);
    assert_eq!(ok(&["logits", "--ids", "1, 2 ,3"]).out, ok(&["logits", "--ids", "1,2,3"]).out);
    assert_eq!(ok(&["detokenize", "1697, 1079"]).out, ok(&["detokenize", "1697", "1079"]).out);
    said(starling(&["frobnicate"]), USAGE, &["frobnicate"]);
    said(starling(&[]), USAGE, &["Usage"]);
    assert!(ok(&["--help"]).text().contains("5 the receipt does not verify"));
}
