//! A vocabulary of bytes and control tokens, and the bundled model.

use std::sync::LazyLock;

use starling::gguf::{Gguf, GgufWriter, Value};
use starling::model::Model;
use starling::pool::Inline;
use starling::tokenizer::Tokenizer;

/// Id of the token of byte 0.
const FIRST_BYTE: u32 = 3;
/// Id of BOS.
pub(crate) const BOS: u32 = 1;
/// Id of the first control token of a test.
pub(crate) const FIRST_CONTROL: u32 = FIRST_BYTE + 256 + 1;

/// A SentencePiece vocabulary of `<unk> <s> </s>`, all bytes, the space, and `controls`.
pub(crate) fn tokenizer(controls: &[&str]) -> Tokenizer {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
    tokens.push("▁".into());
    tokens.extend(controls.iter().map(|text| text.to_string()));
    let mut types: Vec<i32> = [2, 3, 3].into_iter().chain([6; 256]).chain([1]).collect();
    types.resize(tokens.len(), 3);
    let scores = vec![0.0; tokens.len()];
    let mut file = GgufWriter::new();
    let written = [
        file.str("general.architecture", "llama"),
        file.str("tokenizer.ggml.model", "llama"),
        file.str_array("tokenizer.ggml.tokens", &tokens),
        file.i32_array("tokenizer.ggml.token_type", &types),
        file.f32_array("tokenizer.ggml.scores", &scores),
        file.metadata("tokenizer.ggml.add_space_prefix", &Value::Bool(false)),
    ];
    assert!(written.iter().all(Result::is_ok), "{written:?}");
    let header = file.header();
    Tokenizer::from_gguf(&Gguf::parse(&header).expect("a file")).expect("a vocabulary")
}

/// The tokens of a text, of which each byte is a token; spaces have one of their own.
pub(crate) fn bytes(text: &str) -> Vec<u32> {
    let token = |byte: u8| if byte == b' ' { FIRST_CONTROL - 1 } else { FIRST_BYTE + u32::from(byte) };
    text.bytes().map(token).collect()
}

/// starling-tiny.
pub(crate) static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let file = include_bytes!("../../../../fixtures/starling-tiny/starling-tiny-q8_0.gguf");
    Model::load(file, &Inline).expect("a model")
});
