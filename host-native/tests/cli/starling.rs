//! Helpers that run the `starling` command.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Time limit of each command.
pub(super) const LIMIT: Duration = Duration::from_secs(120);
pub(super) const MODEL_ERROR: i32 = 1;
pub(super) const USAGE: i32 = 2;
pub(super) const IO: i32 = 3;
pub(super) const MEMORY: i32 = 4;
pub(super) const RECEIPT: i32 = 5;

#[derive(Debug)]
pub(super) struct Ran {
    pub(super) code: i32,
    pub(super) out: Vec<u8>,
    pub(super) err: String,
}

impl Ran {
    pub(super) fn text(&self) -> String {
        String::from_utf8(self.out.clone()).expect("UTF-8")
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

pub(super) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_starling"));
    command.args(args).env_remove("STARLING_MODEL").env_remove("STARLING_ISA").env_remove("STARLING_THREADS");
    command.env_remove("STARLING_WORKING_MEMORY");
    command
}

/// Runs the command with `input` on its standard input.
pub(super) fn with_input(args: &[&str], input: &[u8]) -> Ran {
    let mut command = command(args);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command");
    let (mut stdin, input) = (child.stdin.take().expect("a pipe"), input.to_vec());
    // the command may exit without reading all of its input
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

pub(super) fn starling(args: &[&str]) -> Ran {
    with_input(args, b"")
}

pub(super) fn ok(args: &[&str]) -> Ran {
    let ran = starling(args);
    assert_eq!(ran.code, 0, "{args:?}: {ran:?}");
    ran
}

/// Checks the exit code, and that the message is one line with all of `parts`.
#[track_caller]
pub(super) fn fails(args: &[&str], code: i32, parts: &[&str]) -> String {
    said(starling(args), code, parts)
}

#[track_caller]
pub(super) fn said(ran: Ran, code: i32, parts: &[&str]) -> String {
    assert_eq!(ran.code, code, "{ran:?}");
    assert!(!ran.err.contains("panicked"), "{ran:?}");
    for part in parts {
        assert!(ran.err.contains(part), "no {part:?} in {ran:?}");
    }
    ran.err
}

pub(super) fn fixture(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name);
    path.to_str().expect("a path").into()
}

/// A temporary path for one test.
pub(super) fn temp(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    path.to_str().expect("a path").into()
}

pub(super) fn written(name: &str, bytes: &[u8]) -> String {
    let path = temp(name);
    fs::write(&path, bytes).expect("a file");
    path
}

pub(super) fn pinned() -> Value {
    serde_json::from_slice(&fs::read(fixture("goldens/pinned/tiny-q8_0-greedy.json")).expect("a golden")).expect("JSON")
}

pub(super) const PROMPT: &str = "Once upon a time";
pub(super) const SMALL: &str = "reference/qwen2-untied-f16.gguf";
