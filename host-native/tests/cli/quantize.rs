//! `starling quantize`: the bytes of the files it writes.

use std::fs;
use std::path::Path;

use starling::gguf::{Gguf, GgufWriter, Value as Meta};
use starling::quant::Dtype;
use starling_tests::reference::{split, split_at};

use super::starling::{IO, MODEL_ERROR, PROMPT, SMALL, USAGE, fails, fixture, ok, temp, written};

/// Checks that two model files have the same tensors, byte for byte.
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
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    written(name, &writer.file(tensors.iter().map(|(_, values)| bytes(values))))
}

#[test]
fn quantize_with_an_importance_matrix() {
    let source = fixture("reference/llama-k256-bf16.gguf");
    let out = temp("guided.gguf");
    // left by an earlier run
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
        ok(&["run", "-m", &out, PROMPT, "--raw", "--temp", "0", "-n", "4", "-q"]);
        let json = ok(&["inspect", "-m", &out, "--json"]).json();
        assert_eq!(json["metadata"]["quantize.imatrix.file"], "imatrix.gguf");
        assert_eq!(json["metadata"]["quantize.imatrix.chunks_count"], 7);
    }
    // the importance weights change the result
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
    let parts = split(&fs::read(&source).expect("a file"), 2);
    let name = |i: usize| format!("split-0000{}-of-00002.gguf", i + 1);
    let paths: Vec<_> = parts.iter().enumerate().map(|(i, part)| written(&name(i), part)).collect();
    let (whole, joined) = (temp("whole.gguf"), temp("joined.gguf"));
    let said = ok(&["quantize", &source, &whole, "Q4_K_M"]).err;
    assert!(said.contains("quantizing: 100 % of "), "{said}");
    ok(&["quantize", &paths[0], &joined, "Q4_K_M"]);
    assert!(fs::read(&whole).expect("a file") == fs::read(&joined).expect("a file"));
    fails(&["quantize", &paths[0], &paths[1], "Q4_K_M"], USAGE, &["same file"]);
    // the error names the invalid part
    let second = fs::read(&paths[1]).expect("the file");
    fs::write(&paths[1], &second[..second.len() - 1]).expect("a place");
    fails(&["inspect", "-m", &paths[0]], MODEL_ERROR, &["split-00002-of-00002.gguf"]);
    fails(&["run", "x", "-m", &paths[0]], MODEL_ERROR, &["split-00002-of-00002.gguf"]);
    fs::write(&paths[1], &parts[0]).expect("a place");
    fails(&["run", "x", "-m", &paths[0]], MODEL_ERROR, &["split-00002-of-00002.gguf", "split.no", "found 0"]);
    fs::remove_file(&paths[1]).expect("the file");
    fails(&["quantize", &paths[0], &joined, "Q4_K_M"], IO, &["split-00002-of-00002.gguf"]);
}

/// As llama.cpp makes them with `--no-tensor-first-split`.
#[test]
fn the_first_of_several_files_may_have_no_tensors() {
    let source = fixture(SMALL);
    let bytes = fs::read(&source).expect("a file");
    let n = Gguf::parse(&bytes).expect("a model").tensors().len();
    let name = |i: usize| format!("headless-0000{}-of-00003.gguf", i + 1);
    let parts = split_at(&bytes, &[0, 0, n / 2, n]);
    let paths: Vec<_> = parts.iter().enumerate().map(|(i, part)| written(&name(i), part)).collect();
    let logits = |path: &str| ok(&["logits", "-m", path, "--ids", "1,2,3"]).json();
    assert_eq!(logits(&paths[0]), logits(&source));
}

#[test]
fn quantize_makes_files_that_run() {
    let source = fixture("starling-tiny/starling-tiny-f16.gguf");
    for kind in ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_M", "Q5_K_S", "Q6_K"] {
        let path = temp(&format!("quantized-{kind}.gguf"));
        ok(&["quantize", &source, &path, kind]);
        let ran = ok(&["run", "-m", &path, PROMPT, "--raw", "--temp", "0", "-n", "4", "-q"]);
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
        ok(&["run", "-m", &path, PROMPT, "--raw", "--temp", "0", "-n", "4", "-q"]);
        if let Some(theirs) = theirs {
            same_tensors(&path, &fixture(&format!("reference/llama-k256-{theirs}.gguf")));
        }
        fs::remove_file(&path).expect("the file");
    }
    fails(&["quantize", &source, &temp("never.gguf"), "Q9"], USAGE, &["`Q9`", "known: ", "Q8_0"]);
    fails(&["quantize", &source, &source, "Q8_0"], USAGE, &["same file"]);
    fails(&["quantize", &source, &temp("no/such/dir.gguf"), "Q8_0"], IO, &["dir.gguf"]);

    // a directory as output is refused; a symbolic link is followed, not replaced
    let folder = temp("folder");
    fs::create_dir_all(&folder).expect("a place");
    fails(&["quantize", &source, &folder, "Q8_0"], USAGE, &["is not a file"]);
    assert!(
        !fs::read_dir(temp(""))
            .expect("a folder")
            .any(|file| { file.expect("a file").file_name().to_string_lossy().starts_with("folder.") })
    );
    #[cfg(unix)]
    {
        let (link, target) = (temp("link.gguf"), written("target.gguf", b"old"));
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(&target, &link).expect("a link");
        ok(&["quantize", &fixture("starling-tiny/starling-tiny-f16.gguf"), &link, "Q8_0"]);
        assert!(fs::symlink_metadata(&link).expect("the link").is_symlink());
        same_tensors(&target, &fixture("starling-tiny/starling-tiny-q8_0.gguf"));
    }
}
