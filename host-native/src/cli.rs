//! The command line: its help is the manual.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use starling::embed::Pooling;
use starling::kernels::attention::KvType;

use crate::pool::MAX_THREADS;
use crate::sampling::SamplingArgs;
use crate::serve::config::ServeArgs;
use crate::serve::value::{Bytes, Value};
use crate::tokens::token_id;

/// Run language models (GGUF files) on this machine's CPU. The same model, prompt and seed give the same bytes on every
/// instruction set, with any number of threads.
#[derive(Debug, Parser)]
#[command(name = "starling", version, propagate_version = true)]
#[command(after_help = "Exit codes: 0 done, 1 the model file is wrong, 2 the command line or the request is, \
                        3 input or output failed, 4 not enough memory or capacity, 5 the receipt does not verify.")]
pub struct Cli {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(subcommand)]
    pub command: Command,
}

/// Which model, and how it runs.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// Model file (GGUF; of a split model any part); the bundled model if none is given
    #[arg(short, long, value_name = "FILE", global = true, env = "STARLING_MODEL")]
    pub model: Option<PathBuf>,
    /// Threads, at most 512; by default the physical cores that this process may use
    #[arg(short, long, value_name = "N", global = true, env = "STARLING_THREADS", value_parser = clap::value_parser!(u16).range(1..=MAX_THREADS as i64))]
    pub threads: Option<u16>,
    /// Instruction set; by default the fastest this machine has
    #[arg(long, value_name = "NAME", global = true, env = "STARLING_ISA")]
    pub isa: Option<String>,
    /// How keys and values are kept [default: f16]
    #[arg(long, value_name = "TYPE", global = true, env = "STARLING_KV_TYPE", value_enum)]
    pub kv_type: Option<KvChoice>,
    /// Working memory of batches, at most, as 512MiB or 4GiB; a model that needs more is refused [default: 2GiB, or what the weights take]
    #[arg(long, value_name = "BYTES", global = true, env = "STARLING_WORKING_MEMORY", value_parser = Bytes::read)]
    pub working_memory: Option<Bytes>,
}

impl ModelArgs {
    /// How keys and values are kept.
    pub fn kv_type(&self) -> KvType {
        self.kv_type.unwrap_or(KvChoice::F16).into()
    }
}

/// [`KvType`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvChoice {
    /// f32: most exact, twice the memory
    F32,
    /// f16
    F16,
    /// int8 keys and f16 values: least memory
    K8,
}

impl From<KvChoice> for KvType {
    fn from(c: KvChoice) -> KvType {
        match c {
            KvChoice::F32 => KvType::F32,
            KvChoice::F16 => KvType::F16,
            KvChoice::K8 => KvType::K8,
        }
    }
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Continue a prompt, or answer it with --chat
    Run(Box<RunArgs>),
    /// Check that a model gave an answer, by its receipt (of `run --receipt`)
    Verify(VerifyArgs),
    /// Serve the model over HTTP, in OpenAI's wire format
    Serve(Box<ServeArgs>),
    /// Talk with the model in the terminal
    Chat(Box<ChatArgs>),
    /// Turn texts into vectors
    Embed(Box<EmbedArgs>),
    /// Measure prefill and decode speed
    Bench(Box<BenchArgs>),
    /// Show metadata and tensors of a model file
    Inspect(InspectArgs),
    /// Turn text into token ids
    Tokenize(TokenizeArgs),
    /// Turn token ids into text
    Detokenize(DetokenizeArgs),
    /// Print the logits of a prompt, with their SHA-256
    Logits(LogitsArgs),
    /// Measure how well the model predicts a text
    Perplexity(PerplexityArgs),
    /// Write a model file in another type
    Quantize(QuantizeArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// Options of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The prompt; `-` or nothing reads standard input
    pub prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    pub file: Option<PathBuf>,
    /// Answer the prompt as a chat message, by the model's chat template
    #[arg(long)]
    pub chat: bool,
    /// System message of the chat
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Chat template: a built-in one by name, or a file [default: the model's, or chatml]
    #[arg(long, value_name = "NAME|FILE", requires = "chat")]
    pub chat_template: Option<String>,
    /// Take special tokens in the prompt for what they say
    #[arg(long, conflicts_with = "chat")]
    pub special: bool,
    /// Tokens to generate, at most [default: until the model ends or the context is full]
    #[arg(short = 'n', long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Tokens of the context [default: what the model was made for, at most 8192]
    #[arg(short, long, value_name = "N")]
    pub ctx_size: Option<usize>,
    /// Text that ends the answer; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Go on when the model ends its answer
    #[arg(long)]
    pub ignore_eos: bool,
    /// Answer with JSON by a schema: a file, or the schema itself
    #[arg(long, value_name = "FILE|JSON", conflicts_with_all = ["grammar", "regex"])]
    pub json_schema: Option<String>,
    /// Answer by a grammar in Lark's syntax, as llguidance has it
    #[arg(long, value_name = "FILE", conflicts_with = "regex")]
    pub grammar: Option<PathBuf>,
    /// Answer with a text that a regular expression matches as a whole
    #[arg(long, value_name = "TEXT")]
    pub regex: Option<String>,
    /// Print one JSON object instead of streaming text
    #[arg(long)]
    pub json: bool,
    /// Write a receipt of the answer, which `verify` checks
    #[arg(long, value_name = "FILE")]
    pub receipt: Option<PathBuf>,
    /// No timings
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Options of `verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The receipt; `-` reads standard input
    pub receipt: PathBuf,
    /// No timings
    #[arg(short, long)]
    pub quiet: bool,
}

/// Options of `chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Chat template: a built-in one by name, or a file [default: the model's, or chatml]
    #[arg(long, value_name = "NAME|FILE")]
    pub chat_template: Option<String>,
    /// Tokens of an answer, at most [default: until the model ends or the context is full]
    #[arg(short = 'n', long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Tokens of the context [default: what the model was made for, at most 8192]
    #[arg(short, long, value_name = "N")]
    pub ctx_size: Option<usize>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Options of `embed`.
#[derive(Debug, Args)]
pub struct EmbedArgs {
    /// The texts; without any, the lines of standard input
    pub texts: Vec<String>,
    /// Read the texts from a file, one a line; `-` reads standard input
    #[arg(short, long, value_name = "FILE", conflicts_with = "texts")]
    pub file: Option<PathBuf>,
    /// The lines are JSON: texts, or objects with a `text` or `input`
    #[arg(long, conflicts_with = "texts")]
    pub jsonl: bool,
    /// Token ids of one text instead; may be given several times
    #[arg(long, value_name = "IDS", conflicts_with_all = ["texts", "file", "jsonl"])]
    pub ids: Vec<String>,
    /// Which states make a text's vector [default: what the model's file says]
    #[arg(long, value_enum)]
    pub pooling: Option<PoolingChoice>,
    /// Leave vectors as long as they are, instead of length 1
    #[arg(long)]
    pub no_normalize: bool,
    /// The first numbers of each vector only, for models that were trained for it
    #[arg(long, value_name = "N")]
    pub dimensions: Option<usize>,
    /// Cut texts that are too long, instead of refusing them
    #[arg(long)]
    pub truncate: bool,
    /// Take special tokens in the texts for what they say
    #[arg(long)]
    pub special: bool,
    /// Tokens of a text, at most [default: what the model was made for, at most 8192]
    #[arg(short, long, value_name = "N")]
    pub ctx_size: Option<usize>,
    /// Tokens of a batch, at most [default: 2048, or a whole text]
    #[arg(long, value_name = "N")]
    pub batch_tokens: Option<usize>,
    /// Texts of a batch
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub batch_texts: usize,
    /// Output: `json`, `base64` (little-endian f32 in JSON), or `npy`
    #[arg(short, long, value_enum, default_value_t = EmbedOutput::Json)]
    pub output: EmbedOutput,
    /// Write to a file instead of standard output
    #[arg(long, value_name = "FILE")]
    pub to: Option<PathBuf>,
}

/// [`Pooling`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PoolingChoice {
    /// A vector for each token
    None,
    /// The mean of all tokens
    Mean,
    /// The first token
    Cls,
    /// The last token
    Last,
}

impl From<PoolingChoice> for Pooling {
    fn from(c: PoolingChoice) -> Pooling {
        match c {
            PoolingChoice::None => Pooling::None,
            PoolingChoice::Mean => Pooling::Mean,
            PoolingChoice::Cls => Pooling::Cls,
            PoolingChoice::Last => Pooling::Last,
        }
    }
}

/// Formats of `embed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EmbedOutput {
    /// Numbers
    Json,
    /// Little-endian f32 in base64
    Base64,
    /// A NumPy array of f32, a row for each vector
    Npy,
}

/// Options of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// With --json: whole arrays
    #[arg(long, requires = "json")]
    pub full: bool,
}

/// Options of `tokenize`.
#[derive(Debug, Args)]
pub struct TokenizeArgs {
    /// The text; `-` or nothing reads standard input
    pub text: Option<String>,
    /// Read the text from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "text")]
    pub file: Option<PathBuf>,
    /// Leave out the tokens that the model wants before and after a text
    #[arg(long)]
    pub no_bos: bool,
    /// Take special tokens in the text for what they say
    #[arg(long)]
    pub special: bool,
    /// Print {"ids", "pieces", "offsets"}
    #[arg(long, conflicts_with = "batch")]
    pub json: bool,
    /// The input is a JSON array of texts; print a JSON array of id arrays
    #[arg(long)]
    pub batch: bool,
}

/// Options of `detokenize`.
#[derive(Debug, Args)]
pub struct DetokenizeArgs {
    /// Token ids; without any, they are read from standard input
    #[arg(value_delimiter = ',', value_parser = token_id)]
    pub ids: Vec<u32>,
    /// Read the ids from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "ids")]
    pub file: Option<PathBuf>,
    /// Leave special tokens out of the text
    #[arg(long)]
    pub skip_special: bool,
}

/// Options of `logits`.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    /// The prompt; `-` or nothing reads standard input
    pub text: Option<String>,
    /// Token ids instead of a text
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = token_id, conflicts_with = "text")]
    pub ids: Option<Vec<u32>>,
    /// Logits after every token, not only the last
    #[arg(long)]
    pub all: bool,
    /// Print a SHA-256 of the numbers after each stage of each layer instead
    #[arg(long)]
    pub trace: bool,
}

/// Options of `perplexity`.
#[derive(Debug, Args)]
pub struct PerplexityArgs {
    /// The text
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Tokens of a window, of which the second half is scored
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = window)]
    pub ctx_size: usize,
    /// Windows, at most
    #[arg(long, value_name = "N")]
    pub chunks: Option<NonZeroUsize>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn window(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n >= 4 => Ok(n),
        _ => Err("expected a number of at least 4".into()),
    }
}

/// Options of `quantize`.
#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// Model file to read; of a split model any of its files
    pub input: PathBuf,
    /// Model file to write
    pub output: PathBuf,
    /// Type or mixture, as llama.cpp names them: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q2_K_S, Q3_K_S, Q3_K_M, Q3_K_L, Q4_K_S, Q4_K_M, Q5_K_S, Q5_K_M, Q6_K, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ2_M, IQ3_XXS, IQ3_XS, IQ3_S, IQ3_M, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4_MOE, Q1_0, Q2_0
    #[arg(value_name = "TYPE")]
    pub kind: String,
    /// Importance matrix of the model, a GGUF file as llama.cpp's imatrix writes; the smallest types need one
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,
}

/// Options of `bench`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub what: Option<BenchWhat>,
    /// Prompt tokens of the prefill test, several with commas; 0 for none
    #[arg(short = 'p', long, value_name = "N", value_delimiter = ',', default_value = "512", value_parser = tokens)]
    pub prompt: Vec<usize>,
    /// Tokens of the decode test, several with commas; 0 for none
    #[arg(short = 'n', long, value_name = "N", value_delimiter = ',', default_value = "64", value_parser = tokens)]
    pub generate: Vec<usize>,
    /// Tokens in the context before decode and batch tests start, several with commas
    #[arg(short = 'd', long, value_name = "N", value_delimiter = ',', default_value = "0", value_parser = tokens)]
    pub depth: Vec<usize>,
    /// Batch tests, ANSWERSxTOKENS, several with commas: so many answers at once of so many tokens, picks included
    #[arg(short = 'a', long, value_name = "NxN", value_delimiter = ',', value_parser = n_by_n)]
    pub answers: Vec<(usize, usize)>,
    /// Embedding tests, TEXTSxTOKENS, several with commas: so many texts of so many tokens
    #[arg(short = 'e', long, value_name = "NxN", value_delimiter = ',', value_parser = n_by_n)]
    pub embed: Vec<(usize, usize)>,
    /// Threads, at most 512, several with commas; by default the physical cores that this process may use
    // in place of the one for all commands, which takes one number
    #[arg(short, long, value_name = "N", value_delimiter = ',', env = "STARLING_THREADS", value_parser = clap::value_parser!(u16).range(1..=MAX_THREADS as i64))]
    pub threads: Vec<u16>,
    /// Measure how fast memory reads, and say what share of it decode tests reach
    #[arg(long)]
    pub bandwidth: bool,
    /// Say on standard error how much memory weights, keys and values have, and the most that the process had, with its
    /// program and libraries and without
    #[arg(long)]
    pub memory: bool,
    /// Repetitions
    #[arg(short = 'r', long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repetitions: u32,
    /// Output format
    #[arg(short = 'o', long, value_enum, default_value_t = BenchOutput::Md)]
    pub output: BenchOutput,
}

/// What else `bench` measures.
#[derive(Debug, Subcommand)]
pub enum BenchWhat {
    /// Put load on a server (any that speaks OpenAI's language) and measure how it bears it
    Serve(BenchServeArgs),
}

/// Options of `bench serve`.
#[derive(Debug, Args)]
pub struct BenchServeArgs {
    /// The server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// The model's name there [default: the first it names]
    #[arg(long, value_name = "NAME")]
    pub server_model: Option<String>,
    /// Its key, if it wants one
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Requests in all
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub requests: usize,
    /// Requests at a time
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub concurrency: usize,
    /// Requests a second instead, at random times
    #[arg(long, value_name = "R", conflicts_with = "concurrency", value_parser = positive)]
    pub rate: Option<f64>,
    /// Tokens of a prompt
    #[arg(short = 'p', long, value_name = "N", default_value_t = 128)]
    pub prompt: usize,
    /// Tokens of an answer
    #[arg(short = 'n', long, value_name = "N", default_value_t = 64)]
    pub generate: usize,
    /// Temperature
    #[arg(long = "temp", value_name = "T", default_value_t = 0.0)]
    pub temperature: f64,
    /// Prompts are drawn from this many token ids
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub ids: u64,
    /// The first of those
    #[arg(long, value_name = "ID", default_value_t = 300)]
    pub first_id: u64,
    /// Seed of prompts and times
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// A request is in time if its first token comes within so many milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2000.0)]
    pub slo_ttft: f64,
    /// ... and its tokens follow each other in so many, on average
    #[arg(long, value_name = "MS", default_value_t = 200.0)]
    pub slo_tpot: f64,
    /// Output format
    #[arg(short = 'o', long, value_enum, default_value_t = BenchOutput::Md)]
    pub output: BenchOutput,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| (1..=1 << 16).contains(n)).ok_or_else(|| "expected a number from 1 to 65536".into())
}

/// Most tokens of a test: no model has more positions.
const MAX_TOKENS: usize = 1 << 28;

fn tokens(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n <= MAX_TOKENS).ok_or_else(|| format!("expected a number from 0 to {MAX_TOKENS}"))
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| *x > 0.0 && *x <= 1e6).ok_or_else(|| "expected a number above 0".into())
}

fn n_by_n(text: &str) -> Result<(usize, usize), String> {
    let positive = |n: &str| n.parse().ok().filter(|n| (1..=1 << 20).contains(n));
    let sizes = text.split_once('x').and_then(|(n, tokens)| Some((positive(n)?, positive(tokens)?)));
    sizes.ok_or_else(|| "expected how many of how many tokens, such as 32x256".into())
}

/// Formats of `bench`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchOutput {
    /// A Markdown table
    Md,
    /// JSON
    Json,
}
