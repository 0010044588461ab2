//! Command-line arguments. The doc comments are the text of `--help`.

use std::io::{IsTerminal, stdin, stdout};
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use starling::draft::Speculation;
use starling::embed::Pooling;
use starling::kernels::attention::KvType;
use starling_host::bytes::Bytes;
use starling_host::error::Failure;
use starling_host::load::{self, ModelOptions};
use starling_host::pool::MAX_THREADS;
use starling_server::config::{DRAFT_MAX, DRAFT_MIN_ACCEPTANCE};

use crate::diffusion::DiffusionArgs;
use crate::sampling::SamplingArgs;
use crate::serve::ServeArgs;
use crate::tokens::token_id;

/// Run language models (GGUF files) on the CPU. The same model, prompt and seed give the same bytes on every instruction
/// set and with any number of threads.
#[derive(Debug, Parser)]
#[command(name = "starling", version, propagate_version = true)]
#[command(after_help = "Exit codes: 0 success, 1 invalid model file, 2 invalid arguments or request, 3 I/O error, \
                        4 not enough memory or capacity, 5 the receipt does not verify.")]
pub struct Cli {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Clone, Default, Args)]
pub struct ModelArgs {
    // not a doc comment, in which brackets would be links
    #[arg(
        id = "model",
        short,
        long,
        value_name = "MODEL",
        global = true,
        help_heading = "Model",
        env = "STARLING_MODEL",
        help = "Model: a GGUF file (any file of a split model), a directory with one model, or \
                hf:OWNER/REPO[:QUANT | /FILE.gguf][@REVISION], an https URL, or a name in the store; a model \
                that is not on this machine is downloaded into the store [default: the bundled model]"
    )]
    pub sources: Vec<PathBuf>,
    /// Number of threads, at most 512 [default: physical cores available to this process]
    #[arg(help_heading = "Performance", short, long, value_name = "N", global = true, env = "STARLING_THREADS", value_parser = clap::value_parser!(u16).range(1..=MAX_THREADS as i64))]
    pub threads: Option<u16>,
    /// Instruction set of the kernels [default: the fastest this CPU supports]
    #[arg(help_heading = "Performance", long, value_name = "NAME", global = true, env = "STARLING_ISA")]
    pub isa: Option<String>,
    /// Type of the KV cache [default: f16]
    #[arg(
        help_heading = "Performance",
        long,
        value_name = "TYPE",
        global = true,
        env = "STARLING_KV_TYPE",
        value_enum
    )]
    pub kv_type: Option<KvChoice>,
    /// Maximum memory for intermediate results of a batch, such as 512MiB; a model that needs more is refused [default: 2GiB, or the size of the weights if larger]
    #[arg(help_heading = "Performance", long, value_name = "BYTES", global = true, env = "STARLING_WORKING_MEMORY", value_parser = Bytes::parse)]
    pub working_memory: Option<Bytes>,
}

impl ModelArgs {
    /// The options of all models, without a source.
    pub fn options(&self) -> ModelOptions {
        ModelOptions {
            model: None,
            lock: None,
            threads: self.threads,
            isa: self.isa.clone(),
            kv_type: self.kv_type.map(Into::into),
            working_memory: self.working_memory,
        }
    }

    /// The one model of a command, with the path of its file in place of its source.
    ///
    /// # Errors
    /// If there are several sources, or the source leads to no file.
    pub fn resolve(&self) -> Result<ModelOptions, Failure> {
        match &self.sources[..] {
            [] => Ok(self.options()),
            [source] => load::resolve_source(&self.options(), source),
            all => {
                let message =
                    format!("found --model {} times, expected once; only serve takes several models", all.len());
                Err(Failure::Usage(message))
            }
        }
    }
}

/// [`KvType`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvChoice {
    /// f32: exact, twice the memory of f16
    F32,
    /// f16
    F16,
    /// int8 keys and f16 values: about three quarters of the memory of f16
    K8,
    /// int8 keys and values: about half of the memory of f16
    Q8,
}

impl From<KvChoice> for KvType {
    fn from(c: KvChoice) -> KvType {
        match c {
            KvChoice::F32 => KvType::F32,
            KvChoice::F16 => KvType::F16,
            KvChoice::K8 => KvType::K8,
            KvChoice::Q8 => KvType::Q8,
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer or continue a prompt
    Run(Box<RunArgs>),
    /// Verify a receipt: replay it and check that the model gave this answer
    Verify(VerifyArgs),
    /// Serve the model over HTTP (OpenAI-compatible API)
    Serve(Box<ServeArgs>),
    /// Chat with the model in the terminal
    Chat(Box<ChatArgs>),
    /// Embed texts as vectors
    Embed(Box<EmbedArgs>),
    /// Measure prefill and decode speed
    Bench(Box<BenchArgs>),
    /// Show metadata and tensors of a model file
    Inspect(InspectArgs),
    /// Convert text to token ids
    Tokenize(TokenizeArgs),
    /// Convert token ids to text
    Detokenize(DetokenizeArgs),
    /// Print the logits of a prompt, with their SHA-256
    Logits(LogitsArgs),
    /// Measure the perplexity of a text
    Perplexity(PerplexityArgs),
    /// Convert the weights of a model file to another type
    Quantize(QuantizeArgs),
    /// Download a model into the store
    Pull(PullArgs),
    /// List the models of the store
    List(ListArgs),
    /// Show a model of the store
    Show(ShowArgs),
    /// Remove models from the store
    Rm(RmArgs),
    /// Check that a server is alive: exit code 0 if it is
    Health(HealthArgs),
    /// Administer a running server
    Admin(AdminArgs),
    /// Print a shell completion script
    Completions {
        /// Shell
        shell: clap_complete::Shell,
    },
    /// Write a man page for each command
    Man {
        /// Directory of the pages, such as /usr/local/share/man/man1
        directory: PathBuf,
    },
}

#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub text: ModelAndText,
    /// Prompt, for those who prefer an option
    #[arg(help_heading = "Prompt", short, long = "prompt", value_name = "TEXT", conflicts_with = "file")]
    pub prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(help_heading = "Prompt", short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Send the prompt as a user message in the chat template [default: if the model file has a chat template]
    #[arg(help_heading = "Prompt", long)]
    pub chat: bool,
    /// Continue the prompt as plain text, without a chat template [default: if the model file has none]
    #[arg(help_heading = "Prompt", long, conflicts_with_all = ["chat", "system", "chat_template"])]
    pub raw: bool,
    /// System message of the chat
    #[arg(help_heading = "Prompt", long, alias = "system-prompt", value_name = "TEXT")]
    pub system: Option<String>,
    /// Chat template: a built-in one by name, or a file [default: the model's, or chatml]
    #[arg(help_heading = "Prompt", long, value_name = "NAME|FILE")]
    pub chat_template: Option<String>,
    /// Turn the text of special tokens in the prompt into these tokens, such as <|im_start|>; implies --raw
    #[arg(help_heading = "Prompt", long, conflicts_with_all = ["chat", "system", "chat_template"])]
    pub special: bool,
    /// Maximum number of tokens to generate [default: until the model stops or the context is full]
    #[arg(help_heading = "Output", short = 'n', long, aliases = ["n-predict", "predict", "num-predict"], value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Context size in tokens [default: the model's, at most 8192]
    #[arg(help_heading = "Performance", short, long, value_name = "N")]
    pub ctx_size: Option<usize>,
    /// Stop string; repeatable
    #[arg(help_heading = "Output", long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Ignore end-of-generation tokens
    #[arg(help_heading = "Output", long)]
    pub ignore_eos: bool,
    /// Constrain the output to a JSON schema: a file, or the schema itself
    #[arg(help_heading = "Output", long, value_name = "FILE|JSON", conflicts_with_all = ["grammar", "regex"])]
    pub json_schema: Option<String>,
    /// Constrain the output to a grammar (llguidance's Lark syntax)
    #[arg(help_heading = "Output", long, value_name = "FILE", conflicts_with = "regex")]
    pub grammar: Option<PathBuf>,
    /// Constrain the output to a regular expression, which must match all of it
    #[arg(help_heading = "Output", long, value_name = "TEXT")]
    pub regex: Option<String>,
    /// Print the result as one JSON object instead of streaming text
    #[arg(help_heading = "Output", long)]
    pub json: bool,
    /// Write a receipt of the answer, for `verify`
    #[arg(help_heading = "Output", long, value_name = "FILE")]
    pub receipt: Option<PathBuf>,
    /// Continue the conversation of a file and save it there, with its KV cache; a missing file starts a new one
    #[arg(help_heading = "Prompt", long, value_name = "FILE")]
    pub session: Option<PathBuf>,
    /// Do not print timings
    #[arg(help_heading = "Output", short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub draft: DraftArgs,
    /// File with a text that the output probably resembles; it is used as a draft
    #[arg(help_heading = "Speculative decoding", long, value_name = "FILE")]
    pub prediction: Option<PathBuf>,
    #[command(flatten)]
    pub diffusion: DiffusionArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

impl RunArgs {
    /// Whether there is no prompt, and a terminal to ask for messages.
    pub fn is_interactive(&self) -> bool {
        let has_prompt = self.text.text.is_some() || self.file.is_some();
        let has_form = self.json_schema.is_some() || self.grammar.is_some() || self.regex.is_some();
        let has_file = self.session.is_some() || self.receipt.is_some() || self.prediction.is_some();
        let is_text = self.json || self.raw || self.special || self.ignore_eos || !self.stop.is_empty();
        !(has_prompt || has_form || has_file || is_text) && stdin().is_terminal() && stdout().is_terminal()
    }

    /// The options that `chat` has too.
    pub fn as_chat(&self) -> ChatArgs {
        ChatArgs {
            model: PositionalModel::default(),
            system: self.system.clone(),
            chat_template: self.chat_template.clone(),
            max_tokens: self.max_tokens,
            ctx_size: self.ctx_size,
            stats: false,
            no_history: false,
            draft: self.draft.clone(),
            sampling: self.sampling.clone(),
        }
    }
}

/// A model as the argument of a command, beside `--model`.
#[derive(Debug, Clone, Default, Args)]
pub struct PositionalModel {
    /// Model, as --model takes it
    #[arg(id = "positional_model", value_name = "MODEL")]
    pub source: Option<PathBuf>,
}

/// A model and a text as arguments of a command; [`crate::positional`] tells them apart.
#[derive(Debug, Clone, Default, Args)]
pub struct ModelAndText {
    /// Model, as --model takes it; without one, this is the text
    #[arg(id = "positional_model", value_name = "MODEL")]
    pub first: Option<String>,
    /// Text; `-` or none reads standard input
    #[arg(id = "positional_text", value_name = "TEXT")]
    pub text: Option<String>,
}

/// Speculative decoding.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Speculative decoding")]
pub struct DraftArgs {
    /// Maximum draft tokens per step, taken from prompt and answer or from a draft model; changes the speed, not the text; 0: off
    #[arg(long, value_name = "N", env = "STARLING_DRAFT_MAX", default_value_t = DRAFT_MAX, value_parser = clap::value_parser!(u16).range(0..=MAX_DRAFT))]
    pub draft_max: u16,
    /// Smaller model with the same vocabulary, as --model takes it, which drafts tokens that prompt and answer do not predict
    #[arg(long, value_name = "MODEL", env = "STARLING_DRAFT_MODEL")]
    pub draft_model: Option<PathBuf>,
    /// Draft with the layer of the model file for multi-token prediction (MTP, NextN), where it has one
    #[arg(long, env = "STARLING_DRAFT_MTP", conflicts_with = "draft_model")]
    pub draft_mtp: bool,
    /// Minimum share of draft tokens expected to be accepted, 0 to 1; fewer are drafted if it would be lower
    #[arg(long, value_name = "X", env = "STARLING_DRAFT_MIN_ACCEPTANCE", default_value_t = DRAFT_MIN_ACCEPTANCE, value_parser = unit_interval)]
    pub draft_min_acceptance: f32,
}

/// Maximum of `--draft-max`.
pub const MAX_DRAFT: i64 = 64;

/// A number from 0 to 1.
fn unit_interval(text: &str) -> Result<f32, String> {
    let value = text.parse().ok().filter(|value| (0.0..=1.0).contains(value));
    value.ok_or_else(|| format!("found {text:?}, expected a number from 0 to 1"))
}

impl DraftArgs {
    /// Whether the model is loaded with its MTP head.
    pub fn loads_mtp(&self) -> bool {
        self.draft_mtp && self.draft_max > 0
    }

    /// The speculation of a request with a prediction, which may be empty.
    pub fn speculation(&self, prediction: Vec<u32>) -> Speculation {
        let (max, min_acceptance) = (self.draft_max.into(), self.draft_min_acceptance);
        Speculation { max, min_acceptance, prediction, drafter: None }
    }
}

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Receipt file, `-` for standard input, or the name of a model in the store, whose files are compared with their digests
    #[arg(required_unless_present = "models")]
    pub receipt: Option<PathBuf>,
    /// Compare all models of the store with their digests
    #[arg(long, conflicts_with = "receipt")]
    pub models: bool,
    /// Do not print timings
    #[arg(short, long)]
    pub quiet: bool,
}

#[derive(Debug, Clone, Args)]
pub struct ChatArgs {
    #[command(flatten)]
    pub model: PositionalModel,
    /// System message
    #[arg(help_heading = "Chat", long, alias = "system-prompt", value_name = "TEXT")]
    pub system: Option<String>,
    /// Chat template: a built-in one by name, or a file [default: the model's, or chatml]
    #[arg(help_heading = "Chat", long, value_name = "NAME|FILE")]
    pub chat_template: Option<String>,
    /// Maximum number of tokens of an answer [default: until the model stops or the context is full]
    #[arg(help_heading = "Output", short = 'n', long, aliases = ["n-predict", "predict", "num-predict"], value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Context size in tokens [default: the model's, at most 8192]
    #[arg(help_heading = "Performance", short, long, value_name = "N")]
    pub ctx_size: Option<usize>,
    /// Print tokens per second and the seed after each answer
    #[arg(help_heading = "Output", long)]
    pub stats: bool,
    /// Neither read nor write the file of messages typed in earlier chats
    #[arg(help_heading = "Chat", long)]
    pub no_history: bool,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(Debug, Args)]
pub struct EmbedArgs {
    /// Texts [default: the lines of standard input]
    pub texts: Vec<String>,
    /// Read texts from a file, one per line; `-` reads standard input
    #[arg(short, long, value_name = "FILE", conflicts_with = "texts")]
    pub file: Option<PathBuf>,
    /// Lines are JSON: strings, or objects with `text` or `input`
    #[arg(long, conflicts_with = "texts")]
    pub jsonl: bool,
    /// Token ids of a text instead of a text; repeatable
    #[arg(long, value_name = "IDS", conflicts_with_all = ["texts", "file", "jsonl"])]
    pub ids: Vec<String>,
    /// Pooling of token states [default: from the model file]
    #[arg(long, value_enum)]
    pub pooling: Option<PoolingChoice>,
    /// Do not scale vectors to length 1
    #[arg(long)]
    pub no_normalize: bool,
    /// Keep the first N dimensions (Matryoshka embeddings)
    #[arg(long, value_name = "N")]
    pub dimensions: Option<usize>,
    /// Truncate texts that are too long instead of refusing them
    #[arg(long)]
    pub truncate: bool,
    /// Parse special tokens in the texts
    #[arg(long)]
    pub special: bool,
    /// Maximum number of tokens of a text [default: the model's context, at most 8192]
    #[arg(short, long, value_name = "N")]
    pub ctx_size: Option<usize>,
    /// Maximum number of tokens of a batch [default: 2048, or the longest text]
    #[arg(long, value_name = "N")]
    pub batch_tokens: Option<usize>,
    /// Maximum number of texts of a batch
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub batch_texts: usize,
    /// Output: `json`, `base64` (little-endian f32 in JSON), or `npy`
    #[arg(short, long, value_enum, default_value_t = EmbedOutput::Json)]
    pub output: EmbedOutput,
    /// Output file [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub to: Option<PathBuf>,
}

/// [`Pooling`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PoolingChoice {
    /// One vector per token
    None,
    /// Mean of all tokens
    Mean,
    /// First token
    Cls,
    /// Last token
    Last,
    /// Scores of the classification head
    Rank,
}

impl From<PoolingChoice> for Pooling {
    fn from(c: PoolingChoice) -> Pooling {
        match c {
            PoolingChoice::None => Pooling::None,
            PoolingChoice::Mean => Pooling::Mean,
            PoolingChoice::Cls => Pooling::Cls,
            PoolingChoice::Last => Pooling::Last,
            PoolingChoice::Rank => Pooling::Rank,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EmbedOutput {
    /// JSON numbers
    Json,
    /// Little-endian f32, base64-encoded
    Base64,
    /// NumPy array of f32, one row per vector
    Npy,
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    #[command(flatten)]
    pub model: PositionalModel,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// With --json: print arrays in full
    #[arg(long, requires = "json")]
    pub full: bool,
}

#[derive(Debug, Args)]
pub struct TokenizeArgs {
    #[command(flatten)]
    pub text: ModelAndText,
    /// Read the text from a file
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Do not add BOS and EOS tokens
    #[arg(long)]
    pub no_bos: bool,
    /// Parse special tokens in the text
    #[arg(long)]
    pub special: bool,
    /// Print a JSON object with `ids`, `pieces` and byte `offsets`
    #[arg(long, conflicts_with = "batch")]
    pub json: bool,
    /// Read a JSON array of texts, print a JSON array of id arrays
    #[arg(long)]
    pub batch: bool,
}

#[derive(Debug, Args)]
pub struct DetokenizeArgs {
    /// Token ids [default: read from standard input]
    #[arg(value_delimiter = ',', value_parser = token_id)]
    pub ids: Vec<u32>,
    /// Read ids from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "ids")]
    pub file: Option<PathBuf>,
    /// Omit special tokens
    #[arg(long)]
    pub skip_special: bool,
}

#[derive(Debug, Args)]
pub struct LogitsArgs {
    #[command(flatten)]
    pub text: ModelAndText,
    /// Token ids instead of text
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = token_id)]
    pub ids: Option<Vec<u32>>,
    /// Print the logits after every token, not only the last
    #[arg(long)]
    pub all: bool,
    /// Print the logits as JSON on a terminal too, where the default is the most probable tokens
    #[arg(long)]
    pub json: bool,
    /// Print a SHA-256 of each stage of each layer instead
    #[arg(long)]
    pub trace: bool,
}

#[derive(Debug, Args)]
pub struct PerplexityArgs {
    /// Text file
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Window size in tokens; the second half of each window is scored
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = window)]
    pub ctx_size: usize,
    /// Maximum number of windows
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

#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// Input model file; any file of a split model
    pub input: PathBuf,
    /// Output model file
    pub output: PathBuf,
    /// Type or mixture, by llama.cpp's names: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q2_K_S, Q3_K_S, Q3_K_M, Q3_K_L, Q4_K_S, Q4_K_M, Q5_K_S, Q5_K_M, Q6_K, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ2_M, IQ3_XXS, IQ3_XS, IQ3_S, IQ3_M, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4_MOE, Q1_0, Q2_0
    #[arg(value_name = "TYPE")]
    pub kind: String,
    /// Importance matrix (GGUF file written by llama.cpp's imatrix); required by the smallest types
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub what: Option<BenchWhat>,
    #[command(flatten)]
    pub model: PositionalModel,
    /// Prompt tokens of the prefill test, comma-separated; 0 for none
    #[arg(short = 'p', long, value_name = "N", value_delimiter = ',', default_value = "512", value_parser = tokens)]
    pub prompt: Vec<usize>,
    /// Tokens of the decode test, comma-separated; 0 for none
    #[arg(short = 'n', long, value_name = "N", value_delimiter = ',', default_value = "64", value_parser = tokens)]
    pub generate: Vec<usize>,
    /// Tokens in the context before a test starts, comma-separated
    #[arg(short = 'd', long, value_name = "N", value_delimiter = ',', default_value = "0", value_parser = tokens)]
    pub depth: Vec<usize>,
    /// Batch decode tests, comma-separated: number of answers at once x tokens of each, with sampling
    #[arg(short = 'a', long, value_name = "NxN", value_delimiter = ',', value_parser = n_by_n)]
    pub answers: Vec<(usize, usize)>,
    /// Embedding tests, comma-separated: number of texts x tokens of each
    #[arg(short = 'e', long, value_name = "NxN", value_delimiter = ',', value_parser = n_by_n)]
    pub embed: Vec<(usize, usize)>,
    /// Numbers of threads, at most 512, comma-separated [default: physical cores available to this process]
    // replaces the global option, which takes one number
    #[arg(short, long, value_name = "N", value_delimiter = ',', env = "STARLING_THREADS", value_parser = clap::value_parser!(u16).range(1..=MAX_THREADS as i64))]
    pub threads: Vec<u16>,
    /// Measure the memory read bandwidth, and print the share of it that decode reaches
    #[arg(long)]
    pub bandwidth: bool,
    /// Print the memory of weights and KV cache and the peak of the process to standard error
    #[arg(long)]
    pub memory: bool,
    /// Repetitions
    #[arg(short = 'r', long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repetitions: u32,
    /// Output format
    #[arg(short = 'o', long, value_enum, default_value_t = BenchOutput::Md)]
    pub output: BenchOutput,
}

#[derive(Debug, Subcommand)]
pub enum BenchWhat {
    /// Load-test an OpenAI-compatible server
    Serve(BenchServeArgs),
}

#[derive(Debug, Clone, Args)]
pub struct BenchServeArgs {
    /// Compare servers of the model with 1, 2, ... workers, up to one worker per thread
    #[arg(long, conflicts_with_all = ["url", "server_model", "api_key"])]
    pub find_workers: bool,
    /// Base URL of the server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// Model name [default: the first in /v1/models]
    #[arg(long, value_name = "NAME")]
    pub server_model: Option<String>,
    /// API key
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Number of requests
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub requests: usize,
    /// Number of concurrent requests
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub concurrency: usize,
    /// Requests per second, at Poisson-distributed times, instead of a fixed concurrency
    #[arg(long, value_name = "R", conflicts_with = "concurrency", value_parser = positive)]
    pub rate: Option<f64>,
    /// Prompt tokens
    #[arg(short = 'p', long, value_name = "N", default_value_t = 128)]
    pub prompt: usize,
    /// Tokens to generate
    #[arg(short = 'n', long, value_name = "N", default_value_t = 64)]
    pub generate: usize,
    /// Temperature
    #[arg(long = "temp", value_name = "T", default_value_t = 0.0)]
    pub temperature: f64,
    /// Number of token ids that prompts are drawn from
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub ids: u64,
    /// First of those token ids
    #[arg(long, value_name = "ID", default_value_t = 300)]
    pub first_id: u64,
    /// Seed of prompts and arrival times
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// SLO: maximum time to first token, in ms
    #[arg(long, value_name = "MS", default_value_t = 2000.0)]
    pub slo_ttft: f64,
    /// SLO: maximum mean time per output token, in ms
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
    sizes.ok_or_else(|| "expected COUNTxTOKENS, such as 32x256".into())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchOutput {
    /// Markdown table
    Md,
    /// JSON
    Json,
}

#[derive(Debug, Args)]
pub struct AdminArgs {
    /// Address of the server
    #[arg(
        long,
        value_name = "URL",
        default_value = "http://127.0.0.1:8080",
        env = "STARLING_ADMIN_URL",
        global = true
    )]
    pub url: String,
    /// File whose first key is sent; STARLING_ADMIN_KEY has the key itself
    #[arg(long, value_name = "FILE", global = true)]
    pub key_file: Option<PathBuf>,
    /// Print the response as JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub action: AdminAction,
}

#[derive(Debug, Args)]
pub struct HealthArgs {
    /// Address of the server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// Check that it accepts requests (/readyz), not only that it is alive (/livez)
    #[arg(long)]
    pub ready: bool,
}

#[derive(Debug, Subcommand)]
pub enum AuditAction {
    /// Print the last line's number and hash of the server's audit log, to keep elsewhere
    Head,
    /// Check the hash chain of an audit log with all its rotated files; needs no server
    Verify {
        /// The log (--audit-log)
        file: PathBuf,
        /// Key of its hashes (--audit-key-file)
        #[arg(long, value_name = "FILE")]
        audit_key_file: Option<PathBuf>,
        /// Hash from `audit head` that the log must contain: detects a log whose end was cut off
        #[arg(long, value_name = "HASH")]
        expect: Option<String>,
    },
}

#[derive(Debug, Subcommand)]
pub enum AdminAction {
    /// Audit log
    Audit {
        #[command(subcommand)]
        what: AuditAction,
    },
    /// List models
    Models,
    /// Add a model under a new name
    Add {
        /// Model name
        name: String,
        /// Path, name, URL or hf:OWNER/REPO
        source: String,
        /// Settings of the model, such as ctx-size=4096
        #[arg(value_name = "KEY=VALUE")]
        settings: Vec<String>,
    },
    /// Remove a model and its name; its requests finish
    Remove {
        /// Model name
        name: String,
    },
    /// Load a model
    Load {
        /// Model name
        name: String,
    },
    /// Unload a model; its name stays
    Unload {
        /// Model name
        name: String,
        /// End running requests
        #[arg(long)]
        now: bool,
    },
    /// Replace a model without a gap
    Swap {
        /// Model name
        name: String,
        /// New source [default: load the old source again]
        source: Option<String>,
        /// Free the old model first: for models that do not fit into memory together
        #[arg(long)]
        drain: bool,
        /// Prompt of a test that the new model has to pass
        #[arg(long, value_name = "PROMPT", requires = "expect")]
        test_prompt: Option<String>,
        /// Beginning of the expected greedy answer to the prompt
        #[arg(long, value_name = "TEXT", requires = "test_prompt")]
        expect: Option<String>,
        /// Do not wait for the end
        #[arg(long)]
        no_wait: bool,
    },
    /// List the workers of a model
    Workers {
        /// Model name
        name: String,
    },
    /// Add a worker to a model
    AddWorker {
        /// Model name
        name: String,
    },
    /// Remove a worker once its requests have finished
    DrainWorker {
        /// Model name
        name: String,
        /// Worker
        id: u32,
    },
    /// Refuse new requests; running ones finish
    Drain,
    /// Accept requests again
    Undrain,
    /// Read settings file and keys again
    Reload,
    /// Show the settings in effect, and where each comes from
    Config,
    /// Change settings while the server runs
    Set {
        /// Change one model only
        #[arg(long, value_name = "NAME")]
        of: Option<String>,
        /// Settings, such as queue-high=300
        #[arg(value_name = "KEY=VALUE", required = true)]
        settings: Vec<String>,
    },
    /// Show the caches of all models
    Caches,
    /// Evict prefix caches
    Invalidate {
        /// Model name [default: all models]
        name: Option<String>,
    },
    /// List requests that were given up because two workers failed on them
    Failures,
}

#[derive(Debug, Args)]
pub struct PullArgs {
    // not a doc comment, in which brackets would be links
    #[arg(help = "hf:OWNER/REPO[:QUANT | /FILE.gguf][@REVISION], or an https URL")]
    pub source: String,
    /// Name in the store [default: the file name without .gguf]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Expected SHA-256 of the file, in hexadecimal [default: the hub's]
    #[arg(long, value_name = "HEX")]
    pub sha256: Option<String>,
    /// Connections for one file [default: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub connections: Option<u8>,
    /// Download nothing: fail if the store does not have the model
    #[arg(long)]
    pub offline: bool,
    /// Download the model again even if the store has it
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Name or source of the model
    pub name: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct RmArgs {
    /// Names or sources of the models
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Remove a model even if a process uses it; the process keeps the open file
    #[arg(long)]
    pub force: bool,
}
