//! A tiny model that answers given texts, control tokens included, whatever the prompt says.
//!
//! Its layer computes nothing and its tokens are all alike: only the embedding of a position counts, which is the code of the
//! token that the position predicts. So the length of the prompt in tokens selects the answer. With [`TEMPLATE`] that is the
//! length of the user's text.

use starling::gguf::{GgufWriter, Value};
use starling::quant::Dtype;

use crate::admin_client::Directory;

/// Renders the users' texts alone, and the marker of reasoning with the variable `think`.
pub(crate) const TEMPLATE: &str = "{%- for message in messages if message.role == 'user' -%}{{ message.content }}{%- endfor -%}\
    {%- if think -%}<think>{%- endif -%}{#- tools -#}";

const WIDTH: usize = 64;
/// The token that ends an answer, after those of the 256 bytes.
const END: &str = "<|scripted_end|>";

/// Answers, and the model that gives them.
pub(crate) struct Script {
    controls: Vec<String>,
    /// For each position the token that it predicts.
    predicted: Vec<usize>,
}

impl Script {
    /// A script whose vocabulary has these control tokens beside bytes.
    pub(crate) fn new(controls: &[&str]) -> Script {
        let controls = [END].iter().chain(controls).map(|text| (*text).to_string()).collect();
        Script { controls, predicted: Vec::new() }
    }

    /// Adds an answer. Returns the number of prompt tokens that select it.
    pub(crate) fn answer(&mut self, text: &str) -> usize {
        let n_prompt = self.predicted.len() + 1;
        let tokens = self.tokens(text);
        self.predicted.extend(tokens.into_iter().chain([256]));
        n_prompt
    }

    /// The tokens of a text: of the control tokens the longest, else bytes.
    pub(crate) fn tokens(&self, text: &str) -> Vec<usize> {
        let (mut tokens, mut at) = (Vec::new(), 0);
        while at < text.len() {
            let starts = |name: &&(usize, &String)| text.as_bytes()[at..].starts_with(name.1.as_bytes());
            let controls: Vec<(usize, &String)> = self.controls.iter().enumerate().collect();
            match controls.iter().filter(starts).max_by_key(|(_, name)| name.len()) {
                Some((i, name)) => {
                    tokens.push(256 + i);
                    at += name.len();
                }
                None => {
                    tokens.push(text.as_bytes()[at].into());
                    at += 1;
                }
            }
        }
        tokens
    }

    /// A text without control tokens.
    pub(crate) fn plain(&self, text: &str) -> String {
        self.controls.iter().fold(text.to_string(), |text, control| text.replace(control, ""))
    }

    /// Writes the model. Returns the path of the file.
    pub(crate) fn write(&self, directory: &Directory) -> String {
        let n_vocab = 256 + self.controls.len();
        let n_ctx = self.predicted.len() + 8;
        let codes = codes(n_vocab);
        let mut writer = GgufWriter::new();
        self.write_metadata(&mut writer, n_ctx).expect("metadata");
        let positions = (0..n_ctx).flat_map(|i| codes[self.predicted.get(i).copied().unwrap_or(256)].clone());
        let (one, zero) = (|n: usize| vec![1.0; n], |n: usize| vec![0.0; n]);
        let w = WIDTH;
        let tensors: Vec<(&str, Vec<usize>, Vec<f32>)> = vec![
            ("token_embd.weight", vec![w, n_vocab], zero(w * n_vocab)),
            ("position_embd.weight", vec![w, n_ctx], positions.collect()),
            ("output_norm.weight", vec![w], one(w)),
            ("output_norm.bias", vec![w], zero(w)),
            ("output.weight", vec![w, n_vocab], codes.concat()),
            ("blk.0.attn_norm.weight", vec![w], one(w)),
            ("blk.0.attn_norm.bias", vec![w], zero(w)),
            ("blk.0.attn_qkv.weight", vec![w, 3 * w], zero(3 * w * w)),
            ("blk.0.attn_qkv.bias", vec![3 * w], zero(3 * w)),
            ("blk.0.attn_output.weight", vec![w, w], zero(w * w)),
            ("blk.0.attn_output.bias", vec![w], zero(w)),
            ("blk.0.ffn_norm.weight", vec![w], one(w)),
            ("blk.0.ffn_norm.bias", vec![w], zero(w)),
            ("blk.0.ffn_up.weight", vec![w, w], zero(w * w)),
            ("blk.0.ffn_up.bias", vec![w], zero(w)),
            ("blk.0.ffn_down.weight", vec![w, w], zero(w * w)),
            ("blk.0.ffn_down.bias", vec![w], zero(w)),
        ];
        for (name, dims, _) in &tensors {
            let dims: Vec<u64> = dims.iter().map(|n| *n as u64).collect();
            writer.tensor(name, Dtype::F32, &dims).expect("a tensor");
        }
        let bytes = |values: &Vec<f32>| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let file = writer.file(tensors.iter().map(|(_, _, values)| bytes(values)));
        directory.write("scripted.gguf", file)
    }

    fn write_metadata(&self, writer: &mut GgufWriter, n_ctx: usize) -> Result<(), starling::gguf::WriteError> {
        writer.str("general.architecture", "gpt2")?;
        for (key, value) in [
            ("context_length", n_ctx),
            ("embedding_length", WIDTH),
            ("feed_forward_length", WIDTH),
            ("block_count", 1),
            ("attention.head_count", 2),
        ] {
            writer.metadata(&format!("gpt2.{key}"), &Value::U32(value as u32))?;
        }
        writer.metadata("gpt2.attention.layer_norm_epsilon", &Value::F32(1e-5))?;
        writer.str("tokenizer.ggml.model", "gpt2")?;
        writer.str("tokenizer.ggml.pre", "gpt-2")?;
        let tokens: Vec<String> = byte_names().into_iter().chain(self.controls.iter().cloned()).collect();
        writer.str_array("tokenizer.ggml.tokens", &tokens)?;
        let kinds: Vec<i32> = (0..tokens.len()).map(|i| if i < 256 { 1 } else { 3 }).collect();
        writer.i32_array("tokenizer.ggml.token_type", &kinds)?;
        writer.str_array::<String>("tokenizer.ggml.merges", &[])?;
        writer.metadata("tokenizer.ggml.eos_token_id", &Value::U32(256))?;
        writer.metadata("tokenizer.ggml.add_bos_token", &Value::Bool(false))
    }
}

/// For each token a vector of 1 and -1 of sum 0, far from those of all others.
fn codes(n: usize) -> Vec<Vec<f32>> {
    let mut codes: Vec<Vec<f32>> = Vec::new();
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    while codes.len() < n {
        let mut code: Vec<f32> = (0..WIDTH).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
        for i in (1..WIDTH).rev() {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            code.swap(i, random as usize % (i + 1));
        }
        let product = |other: &Vec<f32>| code.iter().zip(other).map(|(a, b)| a * b).sum::<f32>();
        if codes.iter().all(|other| product(other) < WIDTH as f32 * 0.6) {
            codes.push(code);
        }
    }
    codes
}

/// GPT-2's names of the 256 bytes.
fn byte_names() -> Vec<String> {
    let is_shown = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut hidden = (0x100..).filter_map(char::from_u32);
    let name = |byte: u8| if is_shown(&byte) { Some(char::from(byte)) } else { hidden.next() };
    (0..=255).filter_map(name).map(String::from).collect()
}
