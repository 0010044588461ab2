//! `starling chat`: messages and commands, one per line.

use std::fs;

use super::starling::{USAGE, fails, ok, said, temp, with_input};

#[test]
fn chat_takes_lines_and_commands() {
    let script =
        b"/help\n/seed x\n/nope\n\nHello\n/again\n/system Be kind.\nHello\n/clear\n/seed 3\nHello\n/exit\nnever\n";
    let chat = || with_input(&["chat", "-n", "8", "--seed", "0"], script);
    let ran = chat();
    assert_eq!(ran.code, 0, "{ran:?}");
    let text = ran.text();
    for part in ["delete the conversation", "/seed takes a number", "unknown command /nope"] {
        assert!(text.contains(part), "no {part:?} in {text:?}");
    }
    assert_eq!(chat().out, ran.out);
    said(with_input(&["chat", "-n", "2"], b"Hi\na\xff\n"), USAGE, &["line 2: invalid UTF-8 at byte 1"]);
}

#[test]
fn a_draft_model_changes_no_byte_of_a_chat() {
    let draft = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/starling-tiny/starling-tiny-q4_0.gguf");
    let chat = |more: &[&str]| {
        let arguments = [&["chat", "-n", "40", "--seed", "3"], more].concat();
        let ran = with_input(&arguments, b"Hello\nTell me a story.\n/again\n");
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.out
    };
    assert_eq!(chat(&["--draft-model", draft]), chat(&["--draft-max", "0"]));
}

#[test]
fn chat_goes_on_when_the_context_is_full() {
    let ran = with_input(&["chat", "--temp", "0", "-n", "400"], "Tell me a story.\n".repeat(8).as_bytes());
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.err.contains("dropped the oldest question and answer"), "{ran:?}");
    assert!(ran.text().lines().filter(|line| line.len() > 40).count() >= 8, "{ran:?}");
}

#[test]
fn chat_refuses_what_no_message_can_change() {
    for (arguments, part) in [
        (&["--temp=-1"][..], "temperature"),
        (&["--top-p", "2"], "top_p"),
        (&["--logit-bias", "999999=1"], "999999"),
        (&["-n", "0"], "max_tokens"),
        (&["-m", concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/reference/bert-mean-f32.gguf")], "embed"),
    ] {
        said(with_input(&[&["chat"], arguments].concat(), b"Hi\n"), USAGE, &[part]);
    }
    let long = "word ".repeat(100);
    said(with_input(&["chat", "-c", "32"], long.as_bytes()), USAGE, &["context of 32 tokens"]);
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
    // a cleared conversation leaves nothing behind
    assert_eq!(chat("Hello\n/clear\nHello\n"), first.repeat(2));
    assert_eq!(chat("/system Be kind.\n/system\nHello\n"), first);
    // the same question again, greedily: the same answer
    assert_eq!(chat("Hello\n/again\n"), first.repeat(2));
    // a seed that no answer has used yet applies to the next answer
    let warm = |script: &str| {
        let ran =
            with_input(&["chat", "-n", "6", "--temp", "2", "--seed", "0", "--chat-template", &file], script.as_bytes());
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.text()
    };
    assert_eq!(warm("Hello\n/seed 7\n/again\n"), warm("Hello\n") + &warm("/seed 7\nHello\n"));
    assert_eq!(warm("/seed 7\nHello\n/again\n"), warm("/seed 7\nHello\n") + &warm("/seed 8\nHello\n"));
    // there is no message to answer again
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
    fails(&broken.each_ref().map(|arg| arg.as_str()), USAGE, &["broken.jinja", "line 2"]);
}
