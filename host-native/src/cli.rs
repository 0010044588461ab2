//! The command line: its help is the manual.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use starling::kernels::attention::KvType;

use crate::sampling::SamplingArgs;

/// Run language models (GGUF files) on this machine's CPU. The same model, prompt and seed give the same bytes on every
/// instruction set, with any number of threads.
#[derive(Debug, Parser)]
#[command(name = "starling", version, propagate_version = true)]
#[command(after_help = "Exit codes: 0 done, 1 the model file is wrong, 2 the command line or the request is, \
                        3 input or output failed, 4 not enough memory or capacity.")]
pub struct Cli {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(subcommand)]
    pub command: Command,
}

/// Which model, and how it runs.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Model file (GGUF; of a split model any part); the bundled model if none is given
    #[arg(short, long, value_name = "FILE", global = true, env = "STARLING_MODEL")]
    pub model: Option<PathBuf>,
    /// Threads; by default the physical cores that this process may use
    #[arg(short, long, value_name = "N", global = true, env = "STARLING_THREADS", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub threads: Option<u16>,
    /// Instruction set; by default the fastest this machine has
    #[arg(long, value_name = "NAME", global = true, env = "STARLING_ISA")]
    pub isa: Option<String>,
    /// How keys and values are kept
    #[arg(long, value_name = "TYPE", global = true, env = "STARLING_KV_TYPE", value_enum, default_value_t = KvChoice::F16)]
    pub kv_type: KvChoice,
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
    /// Measure prefill and decode speed
    Bench(BenchArgs),
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
    /// Take special tokens in the prompt for what they say
    #[arg(long)]
    pub special: bool,
    /// Tokens to generate, at most [default: until the model ends or the context is full]
    #[arg(short = 'n', long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Tokens of the context [default: what the model was made for]
    #[arg(short, long, value_name = "N")]
    pub ctx_size: Option<usize>,
    /// Text that ends the answer; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Go on when the model ends its answer
    #[arg(long)]
    pub ignore_eos: bool,
    /// Print one JSON object instead of streaming text
    #[arg(long)]
    pub json: bool,
    /// No timings
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Options of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Prompt tokens of the prefill test, several with commas; 0 for none
    #[arg(short = 'p', long, value_name = "N", value_delimiter = ',', default_value = "512")]
    pub prompt: Vec<usize>,
    /// Tokens of the decode test, several with commas; 0 for none
    #[arg(short = 'n', long, value_name = "N", value_delimiter = ',', default_value = "64")]
    pub generate: Vec<usize>,
    /// Tokens in the context before the decode test starts, several with commas
    #[arg(short = 'd', long, value_name = "N", value_delimiter = ',', default_value = "0")]
    pub depth: Vec<usize>,
    /// Threads, several with commas [default: --threads]
    #[arg(long = "bench-threads", value_name = "N", value_delimiter = ',')]
    pub bench_threads: Vec<u16>,
    /// Repetitions
    #[arg(short = 'r', long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repetitions: u32,
    /// Output format
    #[arg(short = 'o', long, value_enum, default_value_t = BenchOutput::Md)]
    pub output: BenchOutput,
}

/// Formats of `bench`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchOutput {
    /// A Markdown table
    Md,
    /// JSON
    Json,
}
