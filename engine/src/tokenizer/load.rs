//! Builds a tokenizer from the metadata of a file.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use sha2::{Digest, Sha256};

use super::bpe::{Bpe, MergeTable};
use super::charsmap::CharsMap;
use super::control::TokenNames;
use super::greedy::Greedy;
use super::pretokenizers::{self, Pretokenizer};
use super::special::Specials;
use super::spm::{MergeOrder, Spm, SpmOptions};
use super::table::{Seed, TextTable};
use super::unigram::{Normaliser, Unigram};
use super::vocab::{Kind, Spelling, Vocab};
use super::wordpiece::WordPiece;
use super::{Algorithm, Tokenizer};
use crate::error::LoadError;
use crate::gguf::{Gguf, Value, ValueType};

/// Maximal size of a vocabulary: ids and their successors fit 32 bits, with spare bits for tags.
const MAX_TOKENS: usize = 1 << 24;

pub(super) fn load(gguf: &Gguf<'_>) -> Result<Tokenizer, LoadError> {
    let key = "tokenizer.ggml.model";
    let model = gguf.str(key)?.ok_or_else(|| missing(key, "the name of a tokenizer"))?;
    let row = MODELS.iter().find(|row| row.name == model).ok_or_else(|| {
        let known = MODELS.iter().map(|row| row.name).collect();
        LoadError::Unsupported { what: "tokenizer", found: model.to_owned(), known }
    })?;
    let tokens = gguf.str_array("tokenizer.ggml.tokens")?.ok_or_else(|| missing("tokenizer.ggml.tokens", "tokens"))?;
    let n_tokens = tokens.len();
    if !(1..=MAX_TOKENS).contains(&n_tokens) {
        return Err(wrong("tokenizer.ggml.tokens", n_tokens, format!("1 to {MAX_TOKENS} tokens")));
    }
    let key = "tokenizer.ggml.token_type";
    elements(gguf, key, &[ValueType::I32, ValueType::U32])?;
    let kinds = match per_token(gguf.i32_array(key)?, key, n_tokens)? {
        Some(kinds) => kinds.into_iter().map(Kind::from_id).collect(),
        None => vec![Kind::Normal; n_tokens],
    };
    let pretokenizer = row.pretokenizer.of(gguf)?;
    let n_bytes = tokens.clone().map(<[u8]>::len).sum::<usize>();
    let n_bytes = u32::try_from(n_bytes)
        .map_err(|_| wrong("tokenizer.ggml.tokens", format!("{n_bytes} bytes"), "less than 4 GiB of token texts"))?;
    let mut vocab = Vocab::new(tokens, n_bytes, kinds, pretokenizer.spelling);
    let seed = seed(gguf, &vocab)?;
    let text = |id| vocab.text(id).unwrap_or_default();
    let texts = TextTable::new(seed, n_tokens, |id| !text(id).is_empty(), text);
    let names = TokenNames { vocab: &vocab, texts: &texts };
    for id in names.controls() {
        vocab.kinds[id as usize] = Kind::Control;
    }
    let ids = NamedIds::read(gguf, &vocab, &texts, row)?;
    let inputs = BuildInputs { gguf, vocab: &vocab, texts: &texts, seed, pretokenizer };
    let algorithm = (row.algorithm)(inputs, ids.unknown)?;
    let names = TokenNames { vocab: &vocab, texts: &texts };
    let absorbing = names.absorbing(|key| gguf.str(key).ok().flatten().unwrap_or_default());
    let adds_bos = row.adds_bos || pretokenizer.add_bos;
    let pair_sep = row.pair_sep || pretokenizer.pair_sep;
    // by default there is one token between two texts: SEP if the format has it, else EOS
    let pair_eos = row.adds_eos && !row.pair_sep;
    let ends = names.ends([ids.eos, ids.eot, ids.eom].into_iter().flatten());
    Ok(Tokenizer {
        specials: Specials::new(&vocab, absorbing)?,
        algorithm,
        begin: added(gguf, "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id", adds_bos, ids.bos)?,
        end: added(gguf, "tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id", row.adds_eos, ids.eos)?,
        between: [
            added(gguf, "tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id", pair_eos, ids.eos)?,
            added(gguf, "tokenizer.ggml.add_sep_token", "tokenizer.ggml.seperator_token_id", pair_sep, ids.sep)?,
        ],
        bos: ids.bos,
        eos: ids.eos,
        eot: ids.eot,
        ends,
        vocab,
        texts,
    })
}

type Loaded = Result<Algorithm, LoadError>;

/// A tokenizer kind, by its name in `tokenizer.ggml.model`, with defaults for missing metadata.
struct TokenizerModel {
    name: &'static str,
    pretokenizer: PretokenizerName,
    algorithm: fn(BuildInputs<'_, '_>, Option<u32>) -> Loaded,
    bos: Option<u32>,
    eos: Option<u32>,
    sep: Option<u32>,
    unknown: Option<u32>,
    adds_bos: bool,
    adds_eos: bool,
    /// Whether SEP separates two texts.
    pair_sep: bool,
}

/// Which pre-tokenizer applies.
enum PretokenizerName {
    /// No pre-tokenizer.
    None,
    /// No pre-tokenizer, and tokens with escapes.
    Escaped,
    /// The one named in `tokenizer.ggml.pre`.
    FromFile,
    /// Always this one.
    Fixed(&'static str),
}

const DEFAULTS: TokenizerModel = TokenizerModel {
    name: "",
    pretokenizer: PretokenizerName::None,
    algorithm: by_merges,
    bos: None,
    eos: None,
    sep: None,
    unknown: None,
    adds_bos: false,
    adds_eos: false,
    pair_sep: false,
};

#[rustfmt::skip]
static MODELS: &[TokenizerModel] = &[
    TokenizerModel { name: "gpt2", pretokenizer: PretokenizerName::FromFile, ..DEFAULTS },
    TokenizerModel { name: "gemma4", pretokenizer: PretokenizerName::Fixed("gemma4"), ..DEFAULTS },
    TokenizerModel { name: "whitespace", pretokenizer: PretokenizerName::Fixed("whitespace"), ..DEFAULTS },
    TokenizerModel {
        name: "llama", algorithm: sentence_piece, bos: Some(1), eos: Some(2), unknown: Some(0), adds_bos: true, ..DEFAULTS
    },
    TokenizerModel {
        name: "bert", algorithm: wordpiece, bos: Some(101), eos: Some(102), sep: Some(102), unknown: Some(100),
        adds_bos: true, adds_eos: true, pair_sep: true, ..DEFAULTS
    },
    TokenizerModel { name: "t5", algorithm: unigram, eos: Some(1), unknown: Some(2), adds_eos: true, ..DEFAULTS },
    TokenizerModel { name: "rwkv", pretokenizer: PretokenizerName::Escaped, algorithm: greedy, ..DEFAULTS },
];

impl PretokenizerName {
    fn of(&self, gguf: &Gguf<'_>) -> Result<&'static Pretokenizer, LoadError> {
        let name = match self {
            PretokenizerName::None => return Ok(&pretokenizers::WHOLE),
            PretokenizerName::Escaped => return Ok(&pretokenizers::ESCAPED),
            PretokenizerName::FromFile => gguf.str("tokenizer.ggml.pre")?.unwrap_or("default"),
            PretokenizerName::Fixed(name) => name,
        };
        pretokenizers::find(name).ok_or_else(|| LoadError::Unsupported {
            what: "pre-tokenizer",
            found: name.to_owned(),
            known: pretokenizers::names().collect(),
        })
    }
}

/// Inputs of the constructors of algorithms.
struct BuildInputs<'s, 'f> {
    gguf: &'s Gguf<'f>,
    vocab: &'s Vocab,
    texts: &'s TextTable,
    seed: Seed,
    pretokenizer: &'static Pretokenizer,
}

/// BPE on bytes or on characters, depending on the spelling of the vocabulary.
fn by_merges(inputs: BuildInputs<'_, '_>, unknown: Option<u32>) -> Loaded {
    let BuildInputs { gguf, vocab, texts, seed, pretokenizer } = inputs;
    let key = "tokenizer.ggml.merges";
    let merges = gguf.str_array(key)?.ok_or_else(|| missing(key, "merges"))?;
    let merges = MergeTable::new(vocab, texts, merges, seed);
    Ok(match pretokenizer.spelling {
        Spelling::Bytes => Algorithm::ByteLevel(Bpe::new(vocab, texts, merges, pretokenizer, unknown, seed)),
        Spelling::Meta | Spelling::Plain | Spelling::Escaped => {
            let order = MergeOrder::Merges(merges);
            let options = SpmOptions { order, unknown, add_space_prefix: false };
            Algorithm::SentencePiece(Spm::new(vocab, texts, pretokenizer, options, seed))
        }
    })
}

fn sentence_piece(inputs: BuildInputs<'_, '_>, unknown: Option<u32>) -> Loaded {
    let BuildInputs { gguf, vocab, texts, seed, pretokenizer } = inputs;
    let order = MergeOrder::scores(&scores(gguf, vocab, "a number", |score| !score.is_nan())?);
    let add_space_prefix = gguf.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let options = SpmOptions { order, unknown, add_space_prefix };
    Ok(Algorithm::SentencePiece(Spm::new(vocab, texts, pretokenizer, options, seed)))
}

fn greedy(inputs: BuildInputs<'_, '_>, unknown: Option<u32>) -> Loaded {
    Ok(Algorithm::Greedy(Greedy::new(inputs.vocab, unknown)))
}

fn wordpiece(inputs: BuildInputs<'_, '_>, unknown: Option<u32>) -> Loaded {
    let lowercase = inputs.gguf.bool("tokenizer.ggml.normalizer.lowercase")?.unwrap_or(true);
    let strip_accents = inputs.gguf.bool("tokenizer.ggml.normalizer.strip_accents")?.unwrap_or(lowercase);
    let pieces = WordPiece::pieces(inputs.vocab);
    Ok(Algorithm::WordPiece(WordPiece { pieces, unknown, lowercase, strip_accents }))
}

fn unigram(inputs: BuildInputs<'_, '_>, unknown: Option<u32>) -> Loaded {
    let BuildInputs { gguf, vocab, .. } = inputs;
    let key = "tokenizer.ggml.precompiled_charsmap";
    let normaliser = Normaliser {
        charsmap: CharsMap::new(key, gguf.byte_array(key)?.unwrap_or_default())?,
        add_space_prefix: gguf.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true),
        remove_extra_spaces: gguf.bool("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false),
    };
    let scores = scores(gguf, vocab, "a finite number", f32::is_finite)?;
    Ok(Algorithm::Unigram(Unigram::new(vocab, scores, unknown, normaliser)))
}

/// The scores of all tokens, each checked by `accept`; `expected` describes an accepted score.
fn scores(gguf: &Gguf<'_>, vocab: &Vocab, expected: &str, accept: fn(f32) -> bool) -> Result<Vec<f32>, LoadError> {
    let key = "tokenizer.ggml.scores";
    elements(gguf, key, &[ValueType::F32])?;
    let scores = per_token(gguf.f32_array(key)?, key, vocab.len())?.ok_or_else(|| missing(key, "scores"))?;
    match scores.iter().enumerate().find(|(_, score)| !accept(**score)) {
        Some((id, score)) => Err(wrong(key, format!("{score} for token {id}"), expected)),
        None => Ok(scores),
    }
}

/// Tokens that metadata keys refer to. Ids outside the vocabulary count as missing, since such files exist.
struct NamedIds {
    bos: Option<u32>,
    eos: Option<u32>,
    sep: Option<u32>,
    eot: Option<u32>,
    eom: Option<u32>,
    unknown: Option<u32>,
}

impl NamedIds {
    fn read(gguf: &Gguf<'_>, vocab: &Vocab, texts: &TextTable, row: &TokenizerModel) -> Result<NamedIds, LoadError> {
        let read = |keys: &[&str], default: Option<u32>| -> Result<Option<u32>, LoadError> {
            for key in keys {
                if let Some(id) = gguf.u32(key)? {
                    return Ok(Some(id).filter(|&id| (id as usize) < vocab.len()));
                }
            }
            Ok(default.filter(|&id| (id as usize) < vocab.len()))
        };
        let by_name = TokenNames { vocab, texts };
        Ok(NamedIds {
            // BERT calls BOS and EOS CLS and SEP; the misspelt key is the format's
            bos: read(&["tokenizer.ggml.bos_token_id", "tokenizer.ggml.cls_token_id"], row.bos)?,
            eos: read(&["tokenizer.ggml.eos_token_id", "tokenizer.ggml.seperator_token_id"], row.eos)?,
            sep: read(&["tokenizer.ggml.seperator_token_id"], row.sep)?,
            eot: read(&["tokenizer.ggml.eot_token_id"], None)?.or_else(|| by_name.end_of_turn()),
            eom: read(&["tokenizer.ggml.eom_token_id"], None)?,
            unknown: read(&["tokenizer.ggml.unknown_token_id"], row.unknown)?,
        })
    }
}

/// The token `id` if it is to be added: key `whether` decides, else `default`. Key `which` names the id, for errors.
fn added(
    gguf: &Gguf<'_>,
    whether: &str,
    which: &str,
    default: bool,
    id: Option<u32>,
) -> Result<Option<u32>, LoadError> {
    match (gguf.bool(whether)?, id) {
        (Some(true), None) => Err(match gguf.u32(which)? {
            Some(id) => wrong(which, id, "the id of a token of the vocabulary"),
            None => wrong(whether, "true", "false, because the vocabulary has no such token"),
        }),
        (Some(false), _) => Ok(None),
        (None, _) if !default => Ok(None),
        (_, id) => Ok(id),
    }
}

/// A digest of all token texts and merges.
fn seed(gguf: &Gguf<'_>, vocab: &Vocab) -> Result<Seed, LoadError> {
    let mut digest = Sha256::new();
    for id in vocab.ids() {
        digest.update(vocab.text(id).unwrap_or_default());
        digest.update([0xff]);
    }
    for merge in gguf.str_array("tokenizer.ggml.merges")?.into_iter().flatten() {
        digest.update(merge);
        digest.update([0xff]);
    }
    Ok(Seed::new(digest.finalize().into()))
}

/// Refuses an array whose element type is not one that converters write.
fn elements(gguf: &Gguf<'_>, key: &str, types: &[ValueType]) -> Result<(), LoadError> {
    match gguf.get(key).and_then(Value::as_array) {
        Some(array) if !types.contains(&array.element_type()) => {
            Err(wrong(key, format!("elements of type {:?}", array.element_type()), format!("{:?}", types[0])))
        }
        _ => Ok(()),
    }
}

/// The array, if it has an element per token.
fn per_token<T>(array: Option<Vec<T>>, key: &str, n_tokens: usize) -> Result<Option<Vec<T>>, LoadError> {
    match array {
        Some(mut array) if array.len() >= n_tokens => {
            array.truncate(n_tokens);
            Ok(Some(array))
        }
        Some(array) => {
            let found = format!("{} elements", array.len());
            Err(wrong(key, found, format!("{n_tokens} elements, one per token")))
        }
        None => Ok(None),
    }
}

fn missing(key: &str, expected: &str) -> LoadError {
    wrong(key, "nothing", expected)
}

fn wrong(key: &str, found: impl alloc::string::ToString, expected: impl Into<alloc::string::String>) -> LoadError {
    LoadError::Metadata { key: key.to_owned(), found: found.to_string(), expected: expected.into() }
}
