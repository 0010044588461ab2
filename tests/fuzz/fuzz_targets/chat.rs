//! A template and the texts of a conversation of arbitrary bytes: rendering ends in a text or an error, within its limits,
//! and no text of the conversation becomes a control token.
//!
//! From `tests/`: `cargo +nightly fuzz run chat fuzz/corpus/chat ../fixtures/chat ../engine/src/chat/templates --
//! -max_len=4096`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling::chat::{ChatLimits, ChatRequest, ChatTemplate, Json};
use starling::gguf::{Gguf, GgufWriter};
use starling::tokenizer::Tokenizer;

/// Little, so that a run takes no longer than reading its input.
const LIMITS: ChatLimits = ChatLimits { fuel: 20_000, recursion: 32, output_bytes: 1 << 16, work_bytes: 1 << 18 };

fn tokenizer() -> Tokenizer {
    let mut tokens: Vec<String> = (0..=255u8).map(|byte| format!("<0x{byte:02X}>")).collect();
    tokens.extend(["<s>", "</s>", "<|im_start|>", "<|im_end|>"].map(String::from));
    let types: Vec<i32> = (0..tokens.len()).map(|id| if id < 256 { 6 } else { 3 }).collect();
    let mut w = GgufWriter::new();
    w.str("tokenizer.ggml.model", "llama").expect("valid");
    w.str_array("tokenizer.ggml.tokens", &tokens).expect("valid");
    w.i32_array("tokenizer.ggml.token_type", &types).expect("valid");
    w.f32_array("tokenizer.ggml.scores", &vec![0.0; tokens.len()]).expect("valid");
    Tokenizer::from_gguf(&Gguf::parse(&w.header()).expect("valid")).expect("valid")
}

fuzz_target!(|input: (&str, &str, bool)| {
    let (source, content, add_generation_prompt) = input;
    let Ok(template) = ChatTemplate::with_limits(source, LIMITS) else { return };
    let tokenizer = tokenizer();
    let count = |content: &str| {
        let messages = ["system", "user", "assistant", "user"].map(|role| Json::message(role, content)).into();
        let request = ChatRequest { messages, add_generation_prompt, ..ChatRequest::default() };
        let rendered = template.render(&request, &tokenizer).ok()?;
        assert!(rendered.text.len() <= LIMITS.output_bytes + content.len() * 4);
        Some(rendered.encode(&tokenizer).iter().filter(|&&id| tokenizer.is_control(id)).count())
    };
    count(content);
    // a template without expressions has the control tokens that it spells, whatever is said
    if !source.contains('{') {
        assert_eq!(count(content), count("x"));
    }
});
