//! Prompts for fill-in-the-middle models.

use starling::tokenizer::{EncodeOptions, Tokenizer};

use crate::error::ApiError;

/// Control tokens of a family: before the prefix, before the suffix, before the answer; of a repository and a file.
struct InfillTokens {
    prefix: &'static str,
    suffix: &'static str,
    middle: &'static str,
    repository: &'static str,
    file: &'static str,
}

const fn tokens(prefix: &'static str, suffix: &'static str, middle: &'static str) -> InfillTokens {
    InfillTokens { prefix, suffix, middle, repository: "", file: "" }
}

/// The families, by the texts of their tokens.
const FAMILIES: [InfillTokens; 5] = [
    // Qwen2.5-Coder and later
    InfillTokens {
        repository: "<|repo_name|>",
        file: "<|file_sep|>",
        ..tokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    },
    // StarCoder 2, Granite
    InfillTokens {
        repository: "<repo_name>",
        file: "<file_sep>",
        ..tokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    },
    tokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    // DeepSeek Coder
    tokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    // CodeLlama
    tokens("▁<PRE>", "▁<SUF>", "▁<MID>"),
];

/// What begins the text of a file where the model has no token for it, as in llama-server.
const SNIPPET: &str = "\n\n--- snippet ---\n\n";

/// Text before and after the answer, and other files.
#[derive(Debug, Clone, Default)]
pub struct Infill {
    /// Text before the answer.
    pub prefix: String,
    /// Text after the answer.
    pub suffix: String,
    /// Names and texts of other files.
    pub files: Vec<(String, String)>,
}

impl Infill {
    /// Bytes of all texts.
    pub fn bytes(&self) -> usize {
        let files: usize = self.files.iter().map(|(name, text)| name.len() + text.len()).sum();
        self.prefix.len() + self.suffix.len() + files
    }

    /// The prompt, in the order of llama-server: other files, prefix, suffix. Control tokens in the texts are plain text.
    ///
    /// # Errors
    /// A model without the tokens.
    pub fn encode(&self, tokenizer: &Tokenizer, param: &str) -> Result<Vec<u32>, ApiError> {
        let id = |text: &str| tokenizer.token_id(text.as_bytes()).filter(|_| !text.is_empty());
        let ids = FAMILIES.iter().find_map(|f| Some((f, id(f.prefix)?, id(f.suffix)?, id(f.middle)?)));
        let Some((family, prefix, suffix, middle)) = ids else {
            let message = format!("{param}: the model has no fill-in-the-middle tokens");
            return Err(ApiError::unsupported(param, message));
        };
        let options = EncodeOptions { add_special: false, parse_special: false };
        let encode = |text: &str| tokenizer.encode(text, options);
        let mut all: Vec<u32> = tokenizer.bos().filter(|_| tokenizer.adds_bos()).into_iter().collect();
        if !self.files.is_empty() {
            match id(family.repository).zip(id(family.file)) {
                Some((repository, file)) => {
                    all.push(repository);
                    all.extend(encode("myproject\n"));
                    for (name, text) in &self.files {
                        all.push(file);
                        all.extend(encode(&format!("{name}\n{text}")));
                    }
                    all.push(file);
                    all.extend(encode("filename\n"));
                }
                None => self.files.iter().for_each(|(_, text)| all.extend(encode(&format!("{SNIPPET}{text}")))),
            }
        }
        all.push(prefix);
        all.extend(encode(&self.prefix));
        all.push(suffix);
        all.extend(encode(&self.suffix));
        all.push(middle);
        Ok(all)
    }

    /// Whether the model has tokens for infill.
    pub fn is_supported(tokenizer: &Tokenizer) -> bool {
        Infill::has_tokens(|text| tokenizer.token_id(text.as_bytes()).is_some())
    }

    /// Whether a vocabulary has tokens for infill; `has` tells whether a text is a token.
    pub fn has_tokens(has: impl Fn(&str) -> bool) -> bool {
        FAMILIES.iter().any(|family| has(family.prefix) && has(family.suffix) && has(family.middle))
    }
}
